//! Divides the sent stream into records, and chooses a connection for each record: for a short record the first connection
//! that is writable, and for a long record the connection with the fewest bytes in its send buffer.

use std::io::{self, IoSlice};

use super::{Bundle, Connection, PartialRecord, SLICES_MAX, SendState, Stream};
use crate::transport::TransferResult;
use crate::transport::tcp::kernel::SendSpace;
use crate::wire::record::{RECORD_BYTES_MAX, RECORD_HEADER_BYTES, RecordHeader};

/// If there are at most this many bytes to send, the first writable connection sends all of them as one record,
/// without a check of the free buffer space.
const SHORT_SEND_BYTES_MAX: usize = 16 << 10;
/// The lowest target length of a record if there are more than [`SHORT_SEND_BYTES_MAX`] bytes to send. A record is shorter
/// if the send buffer has less free space, or if the bytes are divided into records of equal length. With a lower target,
/// there would be too many system calls. A segment of 256 KiB and its header fit into four records of this length.
const LONG_RECORD_BYTES_MIN: usize = (64 << 10) + 64;
/// The maximum length of a record if there are more than [`SHORT_SEND_BYTES_MAX`] bytes to send. With longer records,
/// a segment would not be divided over the connections.
const LONG_RECORD_BYTES_MAX: usize = (256 << 10) + 64;

const _: () = assert!(LONG_RECORD_BYTES_MAX <= RECORD_BYTES_MAX as usize);

impl SendState {
    /// Returns whether the header of the last record is written. All further bytes of the link belong to this last
    /// record, and are sent on the first connection.
    pub(super) fn is_in_last_record(&self) -> bool {
        self.partial
            .as_ref()
            .is_some_and(|partial| partial.left.is_none() && partial.written == RECORD_HEADER_BYTES)
    }
}

impl PartialRecord {
    fn is_complete(&self) -> bool {
        self.written == RECORD_HEADER_BYTES && self.left == Some(0)
    }

    /// Writes as many bytes as the connection accepts: first the rest of the header, then `parts` from position
    /// `skip` on. Returns how many bytes of `parts` were written.
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
        let count = connection.write(&slices)?;
        let header_count = count.min(RECORD_HEADER_BYTES - self.written);
        self.written += header_count;
        self.left = self.left.map(|left| left.saturating_sub(count - header_count));
        Ok(count - header_count)
    }
}

impl<P: Connection> Bundle<P> {
    /// Sends `parts` one after another, until the connections accept no more bytes without blocking.
    pub(in super::super) fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
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
                Err(error) => return TransferResult::Lost(error.to_string()),
            }
        }
        if moved == 0 { TransferResult::Blocked } else { TransferResult::Bytes(moved) }
    }

    /// Makes one write, of `parts` from position `skip` on. Returns how many bytes of the parts were written, or `None` if no
    /// connection accepts any bytes.
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
            // The kernel uses a part of the free bytes for its own data structures, so the record is shorter than the
            // free space.
            let fitting = (space.free - space.free / 8).max(SHORT_SEND_BYTES_MAX);
            (index, Some(rest.div_ceil(rest.div_ceil(target)).min(fitting)))
        };
        let header =
            RecordHeader { number: self.sending.next_record, length: left.map(|bytes| bytes as u32) };
        Ok(Some(PartialRecord { stream, header: header.encode(), written: 0, left }))
    }
}

impl<P: Connection> Stream<P> {
    /// Reads the free buffer space from the kernel. If the kernel returns an error, assumes enough space, so that the
    /// caller tries to write.
    fn update_send_space(&mut self) {
        self.send_space =
            self.connection.send_space().unwrap_or(SendSpace { queued: 0, free: LONG_RECORD_BYTES_MAX });
    }

    /// Returns whether the send buffer probably has space for a record. By the rule of the kernel, a socket is
    /// writable if `free >= queued / 2`. If the socket is not writable, an event will report when it becomes
    /// writable.
    fn has_space(&mut self) -> io::Result<bool> {
        if self.send_space.free >= self.send_space.queued / 2 {
            return Ok(true);
        }
        self.is_writable = self.connection.is_writable()?;
        self.update_send_space();
        Ok(self.is_writable)
    }
}
