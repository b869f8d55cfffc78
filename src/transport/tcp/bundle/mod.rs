//! The connections of a link: one, or several (`docs/streams.md`). The caller sees one ordered stream of bytes. A single
//! connection carries these bytes as they are. With several connections, the sender divides the stream into numbered
//! [records](crate::wire::record), and the receiver reads the record with the next number directly into its destination. The link
//! can be used as soon as one connection is open. The other connections are added later.

mod receiving;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice, Read, Write};

use mio::Token;

use crate::transport::poller::Event;
use crate::transport::{TransferError, TransferResult};
use crate::wire::record::{RECORD_BYTES_MAX, RECORD_HEADER_BYTES, RecordHeader};

/// The most slices that one system call reads or writes: up to three parts of the caller, and the header of a record or bytes
/// that are read ahead. If the caller has more parts, they are moved by further calls.
const SLICES_MAX: usize = 4;

/// The first writable connection sends at most this many bytes as one record, without a check of the free space.
const SHORT_SEND_BYTES_MAX: usize = 16 << 10;
/// The lowest target length of a record if there are more than [`SHORT_SEND_BYTES_MAX`] bytes to send, to limit the number of
/// system calls. A segment of 256 KiB and its header fit into four records of this length.
const LONG_RECORD_BYTES_MIN: usize = (64 << 10) + 64;
/// The maximum length of such a record. With longer ones, a segment would not be divided over the connections.
const LONG_RECORD_BYTES_MAX: usize = (256 << 10) + 64;

const _: () = assert!(LONG_RECORD_BYTES_MAX <= RECORD_BYTES_MAX as usize);

/// The operations of a connection that a bundle needs. Tests implement this trait without sockets.
pub(crate) trait Connection: Read + Write {
    fn send_space(&self) -> io::Result<SendSpace>;

    /// Returns whether the connection accepts bytes now. After a result of false, an event reports when it does.
    fn is_writable(&self) -> io::Result<bool>;

    fn close_sending(&self) -> io::Result<()>;
}

/// The state of a socket's send buffer. `queued` and `free` include the kernel's overhead for the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SendSpace {
    /// The number of bytes that are not sent or not acknowledged.
    pub(crate) queued: usize,
    /// The number of bytes that still fit into the buffer.
    pub(crate) free: usize,
}

pub(crate) struct Bundle<P> {
    /// The connections by their number; `None` for a connection that is not open.
    streams: Vec<Option<Stream<P>>>,
    used: usize,
    /// The number of connections that this rank is opening. Meanwhile the link does not end.
    pub(crate) expected_connections: usize,
    is_sending_closed: bool,
    sending: SendState,
    receiving: ReceiveState,
}

struct Stream<P> {
    connection: P,
    token: Token,
    is_readable: bool,
    is_writable: bool,
    /// Whether an event has reported that the peer closed its sending direction.
    is_ended: bool,
    /// Why no more data can be read from the connection; `None` while data can be read.
    end: Option<ConnectionEnd>,
    send_space: SendSpace,
    buffer: RecordBuffer,
    /// The record that is being read or will be read next, if its header has been read.
    head: Option<PendingRecord>,
}

enum ConnectionEnd {
    /// The peer closed the connection, and all data have been read.
    Ended,
    Broken(String),
}

/// A record that is being read or will be read next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PendingRecord {
    number: u64,
    /// The number of unread bytes of the record; `None` for the last record, which has no fixed length.
    left: Option<usize>,
}

#[derive(Default)]
struct SendState {
    next_record: u64,
    /// A record of which only a part has been written. No other record can begin before this record is complete.
    /// Partial writes are rare, because the sender checks the free buffer space before a write.
    partial: Option<PartialRecord>,
    is_last: bool,
}

struct PartialRecord {
    stream: usize,
    header: [u8; RECORD_HEADER_BYTES],
    written: usize,
    /// The number of unwritten bytes after the header; `None` for the last record, which has no fixed length.
    left: Option<usize>,
}

#[derive(Default)]
struct ReceiveState {
    next_record: u64,
    /// An error in the received data that has not been reported yet.
    fault: Option<String>,
    /// Whether an error has been reported. Then the link receives data in any order, and the caller ignores them.
    is_corrupt: bool,
}

/// Bytes that were read from a connection before a caller requested them: record headers, and bytes after them.
#[derive(Default)]
struct RecordBuffer {
    /// The bytes from `start` to `end` have not been taken yet.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// Whether a read has found the connection empty, so that an event will report further data.
    has_blocked: bool,
}

impl<P: Connection> Bundle<P> {
    /// Creates a link of `stream_count` connections, of which only the first one is open.
    pub(crate) fn new(first: P, token: Token, stream_count: u8) -> Self {
        let mut first = Stream::new(first, token);
        let mut sending = SendState::default();
        if stream_count == 1 {
            // The single connection has no headers: each direction is in its last record from the start.
            let header = [0; RECORD_HEADER_BYTES];
            sending.partial =
                Some(PartialRecord { stream: 0, header, written: RECORD_HEADER_BYTES, left: None });
            first.head = Some(PendingRecord { number: 0, left: None });
        }
        let mut streams = vec![Some(first)];
        streams.resize_with(stream_count.into(), || None);
        Self {
            streams,
            used: stream_count.into(),
            expected_connections: 0,
            is_sending_closed: false,
            sending,
            receiving: ReceiveState::default(),
        }
    }

    /// Returns the number of connections of the link, including connections that are not open.
    pub(crate) fn stream_count(&self) -> u8 {
        self.streams.len() as u8
    }

    pub(crate) fn is_connection_missing(&self, index: u8) -> bool {
        !self.is_single_connection() && matches!(self.streams.get(usize::from(index)), Some(None))
    }

    pub(crate) fn decrement_expected_connections(&mut self) {
        self.expected_connections = self.expected_connections.saturating_sub(1);
    }

    /// Adds `connection` as the extra connection with the number `index`. Closes `connection` if the link does not need it.
    pub(crate) fn add_connection(&mut self, index: u8, connection: P, token: Token) {
        if !self.is_connection_missing(index) {
            return;
        }
        if self.is_sending_closed {
            close_sending_on(&connection);
        }
        self.streams[usize::from(index)] = Some(Stream::new(connection, token));
    }

    pub(crate) fn use_streams(&mut self, used: usize) {
        self.used = used.clamp(1, self.streams.len().max(1));
    }

    /// Sends all further bytes on the first connection, as one last record.
    pub(crate) fn use_single_connection(&mut self) {
        self.sending.is_last = true;
    }

    /// Sends one byte on the first connection, even if no event has said that it has space.
    pub(crate) fn send_wake_byte(&mut self) {
        if let Some(Some(stream)) = self.streams.first_mut()
            && let Err(error) = stream.connection.write(&[0])
        {
            log::debug!("a peer could not be woken: {error}");
        }
    }

    pub(crate) fn connections(&self) -> impl Iterator<Item = &P> {
        self.streams.iter().flatten().map(|stream| &stream.connection)
    }

    pub(crate) fn handle_event(&mut self, event: Event) {
        let mut streams = self.streams.iter_mut().flatten();
        if let Some(stream) = streams.find(|stream| stream.token == event.token) {
            stream.is_readable |= event.is_readable;
            stream.is_writable |= event.is_writable;
            stream.is_ended |= event.is_ended;
        }
    }

    pub(crate) fn close_sending(&mut self) {
        self.is_sending_closed = true;
        self.connections().for_each(close_sending_on);
    }

    /// Sends `parts` one after another, until the connections accept no more bytes without blocking.
    pub(crate) fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        let total = parts.iter().map(|part| part.len()).sum();
        if total > SHORT_SEND_BYTES_MAX && !self.sending.is_in_last_record() {
            self.streams.iter_mut().take(self.used).flatten().for_each(Stream::update_send_space);
        }
        let mut moved = 0;
        while moved < total {
            match self.send_once(parts, moved, total) {
                Ok(Some(count)) => moved += count,
                Ok(None) => break,
                // Report the sent bytes now. The next call gets the same error again.
                Err(_) if moved > 0 => break,
                Err(error) => return Err(TransferError::Lost(error.to_string())),
            }
        }
        Ok(moved)
    }

    /// Makes one write, of `parts` from position `skip` on. Returns how many of these bytes were written, if any are accepted.
    fn send_once(&mut self, parts: &[IoSlice<'_>], skip: usize, total: usize) -> io::Result<Option<usize>> {
        let begun = self.sending.partial.take();
        let is_new = begun.is_none();
        let partial = match begun {
            Some(partial) => Some(partial),
            None => self.begin_record(total - skip, total)?,
        };
        let Some(mut partial) = partial else { return Ok(None) };
        let written = self.write(&mut partial, parts, skip);
        // A record of which no byte is written can still be sent on another connection.
        let has_begun = !is_new || partial.written > 0;
        if is_new && has_begun {
            self.sending.next_record += 1;
        }
        if has_begun && !partial.is_complete() {
            self.sending.partial = Some(partial);
            self.close_unused_connections();
        }
        written
    }

    /// Writes a part of a record, with `parts` from position `skip` on as its content. Returns the same as `send_once`.
    fn write(
        &mut self,
        partial: &mut PartialRecord,
        parts: &[IoSlice<'_>],
        skip: usize,
    ) -> io::Result<Option<usize>> {
        let stream = self.streams.get_mut(partial.stream).and_then(Option::as_mut);
        let Some(stream) = stream.filter(|stream| stream.is_writable) else { return Ok(None) };
        match partial.write(&mut stream.connection, parts, skip) {
            Ok(count) => {
                let SendSpace { queued, free } = stream.send_space;
                stream.send_space = SendSpace { queued: queued + count, free: free.saturating_sub(count) };
                Ok(Some(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                stream.is_writable = false;
                Ok(Some(0))
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Some(0)),
            Err(error) => Err(error),
        }
    }

    /// Chooses the connection and the length of the next record. `rest` is the number of bytes that are left of the
    /// `total` bytes to send. Returns `None` if no connection has free buffer space.
    fn begin_record(&mut self, rest: usize, total: usize) -> io::Result<Option<PartialRecord>> {
        let is_last = self.sending.is_last;
        let used = if is_last { 1 } else { self.used };
        let streams = self.streams.iter_mut().enumerate().take(used);
        let streams = streams.filter_map(|(index, stream)| Some((index, stream.as_mut()?)));
        let mut writable = streams.filter(|(_, stream)| stream.is_writable);
        let (stream, left) = if is_last || rest <= SHORT_SEND_BYTES_MAX {
            let Some((index, _)) = writable.next() else { return Ok(None) };
            (index, (!is_last).then_some(rest))
        } else {
            let mut best: Option<(usize, SendSpace)> = None;
            for (index, stream) in writable {
                if stream.has_space()?
                    && best.is_none_or(|(_, space)| stream.send_space.queued < space.queued)
                {
                    best = Some((index, stream.send_space));
                }
            }
            let Some((index, space)) = best else { return Ok(None) };
            let target = (total / used).clamp(LONG_RECORD_BYTES_MIN, LONG_RECORD_BYTES_MAX);
            // The kernel uses a part of the free bytes for its own data, so the record is shorter.
            let fitting = (space.free - space.free / 8).max(SHORT_SEND_BYTES_MAX);
            (index, Some(rest.div_ceil(rest.div_ceil(target)).min(fitting)))
        };
        let header =
            RecordHeader { number: self.sending.next_record, length: left.map(|bytes| bytes as u32) };
        Ok(Some(PartialRecord { stream, header: header.encode(), written: 0, left }))
    }

    /// Returns whether the sending and the receiving direction both use only the first connection from now on.
    fn is_single_connection(&self) -> bool {
        let first = self.streams.first().and_then(|stream| stream.as_ref()?.head);
        let is_last_received =
            first.is_some_and(|head| head.left.is_none() && head.number == self.receiving.next_record);
        self.sending.is_in_last_record() && is_last_received
    }

    fn close_unused_connections(&mut self) {
        if self.is_single_connection() {
            self.streams.iter_mut().skip(1).for_each(|entry| *entry = None);
        }
    }
}

impl SendState {
    /// Returns whether the header of the last record is written. All further bytes belong to this record.
    fn is_in_last_record(&self) -> bool {
        let is_last =
            |partial: &PartialRecord| partial.left.is_none() && partial.written == RECORD_HEADER_BYTES;
        self.partial.as_ref().is_some_and(is_last)
    }
}

impl PartialRecord {
    fn is_complete(&self) -> bool {
        self.written == RECORD_HEADER_BYTES && self.left == Some(0)
    }

    /// Writes the rest of the header, and then `parts` from position `skip` on. Returns how many bytes of `parts` were written.
    fn write<P: Connection>(
        &mut self,
        connection: &mut P,
        parts: &[IoSlice<'_>],
        mut skip: usize,
    ) -> io::Result<usize> {
        let header = self.header;
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        slices[0] = IoSlice::new(&header[self.written..]);
        let mut left = self.left.unwrap_or(usize::MAX);
        let mut free_slices = slices[1..].iter_mut();
        for part in parts {
            let skipped = skip.min(part.len());
            skip -= skipped;
            let taken = left.min(part.len() - skipped);
            if taken == 0 {
                continue;
            }
            let Some(slice) = free_slices.next() else { break };
            *slice = IoSlice::new(&part[skipped..skipped + taken]);
            left -= taken;
        }
        let count = connection.write_vectored(&slices)?;
        let header_count = count.min(RECORD_HEADER_BYTES - self.written);
        self.written += header_count;
        self.left = self.left.map(|left| left.saturating_sub(count - header_count));
        Ok(count - header_count)
    }
}

impl<P> Stream<P> {
    fn new(connection: P, token: Token) -> Self {
        Self {
            connection,
            token,
            is_readable: true,
            is_writable: true,
            is_ended: false,
            end: None,
            send_space: SendSpace::default(),
            buffer: RecordBuffer::default(),
            head: None,
        }
    }
}

impl<P: Connection> Stream<P> {
    /// Reads the free buffer space. After an error, assumes enough space, so that the caller tries to write.
    fn update_send_space(&mut self) {
        self.send_space =
            self.connection.send_space().unwrap_or(SendSpace { queued: 0, free: LONG_RECORD_BYTES_MAX });
    }

    /// Returns whether the send buffer probably has space for a record. By the rule of the kernel, a socket is writable if
    /// `free >= queued / 2`. If it is not, an event will report when it becomes writable.
    fn has_space(&mut self) -> io::Result<bool> {
        if self.send_space.free >= self.send_space.queued / 2 {
            return Ok(true);
        }
        self.is_writable = self.connection.is_writable()?;
        self.update_send_space();
        Ok(self.is_writable)
    }
}

fn close_sending_on<P: Connection>(connection: &P) {
    if let Err(error) = connection.close_sending() {
        log::debug!("the sending direction of a connection could not be closed: {error}");
    }
}
