//! Cuts the sent stream into records, and writes each on the connection with the most free buffer space.

use std::io::{self, IoSlice};

use super::{Bundle, Connection, Stream};
use crate::transport::Moved;
use crate::transport::tcp::kernel::SendSpace;
use crate::wire::record::{RECORD_BYTES_MAX, RECORD_HEADER_BYTES, Record};

/// Up to this length, a record is not divided and goes on the first connection that takes it, without a check of the free space.
const SHORT: usize = 16 << 10;
/// Bytes of the records of longer data: a segment is divided over the connections. Records shorter than the first limit would
/// cost too many system calls; none is longer than the second. A segment of 256 KiB and its header are four records of the
/// first length.
const PIECE_MIN: usize = (64 << 10) + 64;
const PIECE_MAX: usize = (256 << 10) + 64;

const _: () = assert!(PIECE_MAX <= RECORD_BYTES_MAX as usize);

/// The state of sending.
#[derive(Default)]
pub(super) struct Sending {
    next: u64,
    /// The record that is not fully written. It stays on its connection, and all other data wait, because the caller's next bytes
    /// belong to it. This is rare, because the kernel's free space is checked first.
    partial: Option<PartialRecord>,
    /// The next record is the last one.
    pub(super) is_last: bool,
}

/// A record that is not fully written.
struct PartialRecord {
    stream: usize,
    header: [u8; RECORD_HEADER_BYTES],
    /// Bytes of the header that are written.
    written: usize,
    /// Bytes after it that are not written; `None` if they go on to the end of the connection.
    left: Option<usize>,
}

impl Sending {
    /// Whether all further bytes go on the first connection, without records.
    pub(super) fn has_no_end(&self) -> bool {
        self.partial
            .as_ref()
            .is_some_and(|partial| partial.left.is_none() && partial.written == RECORD_HEADER_BYTES)
    }
}

impl PartialRecord {
    fn is_whole(&self) -> bool {
        self.written == RECORD_HEADER_BYTES && self.left == Some(0)
    }

    /// Writes what it can, of the parts from `skip` on; how many bytes of them.
    fn write<P: Connection>(
        &mut self,
        connection: &mut P,
        parts: &[IoSlice<'_>],
        mut skip: usize,
    ) -> io::Result<usize> {
        let header = self.header;
        let mut slices = Vec::with_capacity(parts.len() + 1);
        slices.push(IoSlice::new(&header[self.written..]));
        let mut left = self.left.unwrap_or(usize::MAX);
        for part in parts {
            let skipped = skip.min(part.len());
            let taken = left.min(part.len() - skipped);
            slices.push(IoSlice::new(&part[skipped..skipped + taken]));
            (skip, left) = (skip - skipped, left - taken);
        }
        let count = connection.write(&slices)?;
        let of_header = count.min(RECORD_HEADER_BYTES - self.written);
        self.written += of_header;
        self.left = self.left.map(|left| left.saturating_sub(count - of_header));
        Ok(count - of_header)
    }
}

impl<P: Connection> Bundle<P> {
    /// Sends as much of the parts, one after another, as the connections take at once.
    pub(in super::super) fn send(&mut self, parts: &[IoSlice<'_>]) -> Moved {
        let total = parts.iter().map(|part| part.len()).sum();
        if total > SHORT && !self.sending.has_no_end() {
            self.streams.iter_mut().take(self.used).flatten().for_each(Stream::look_at_room);
        }
        let mut moved = 0;
        while moved < total {
            match self.send_some(parts, moved, total) {
                Ok(Some(count)) => moved += count,
                Ok(None) => break,
                // The next attempt returns it again.
                Err(_) if moved > 0 => break,
                Err(error) => return Moved::Lost(error.to_string()),
            }
        }
        if moved == 0 { Moved::Blocked } else { Moved::Bytes(moved) }
    }

    /// Writes once; how many bytes of the parts, or `None` if no connection takes any.
    fn send_some(&mut self, parts: &[IoSlice<'_>], skip: usize, total: usize) -> io::Result<Option<usize>> {
        let begun = self.sending.partial.take();
        let is_new = begun.is_none();
        let partial = match begun {
            Some(partial) => Some(partial),
            None => self.choose(total - skip, total)?,
        };
        let Some(mut partial) = partial else { return Ok(None) };
        let written = self.write(&mut partial, parts, skip);
        // A record of which nothing could be written may go elsewhere.
        let has_begun = !is_new || partial.written > 0;
        if is_new && has_begun {
            self.sending.next += 1;
        }
        if has_begun && !partial.is_whole() {
            self.sending.partial = Some(partial);
            self.close_unused();
        }
        written
    }

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
                let SendSpace { queued, free } = stream.room;
                stream.room = SendSpace { queued: queued + count, free: free.saturating_sub(count) };
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

    /// The next record, of `rest` bytes at most that are left of `total`; `None` if no connection has room.
    fn choose(&mut self, rest: usize, total: usize) -> io::Result<Option<PartialRecord>> {
        let is_last = self.sending.is_last;
        let used = if is_last { 1 } else { self.used };
        let streams = self.streams.iter_mut().enumerate().take(used);
        let streams = streams.filter_map(|(index, stream)| Some((index, stream.as_mut()?)));
        let mut writable = streams.filter(|(_, stream)| stream.is_writable);
        let (stream, left) = if is_last || rest <= SHORT {
            let Some((index, _)) = writable.next() else { return Ok(None) };
            (index, (!is_last).then_some(rest))
        } else {
            let mut best: Option<(usize, SendSpace)> = None;
            for (index, stream) in writable {
                if stream.has_room()? && best.is_none_or(|(_, room)| stream.room.queued < room.queued) {
                    best = Some((index, stream.room));
                }
            }
            let Some((index, room)) = best else { return Ok(None) };
            let piece = (total / used).clamp(PIECE_MIN, PIECE_MAX);
            // The kernel's count includes its overhead.
            let fits = (room.free - room.free / 8).max(SHORT);
            (index, Some(rest.div_ceil(rest.div_ceil(piece)).min(fits)))
        };
        let record = Record { number: self.sending.next, length: left.map(|bytes| bytes as u32) };
        Ok(Some(PartialRecord { stream, header: record.encode(), written: 0, left }))
    }
}

impl<P: Connection> Stream<P> {
    /// Asks the kernel for the free buffer space. If the kernel does not tell it, the write is tried.
    fn look_at_room(&mut self) {
        self.room = self.connection.room().unwrap_or(SendSpace { queued: 0, free: PIECE_MAX });
    }

    /// Whether a record is likely to be taken whole: by the kernel's own rule, which says the same of a writable socket. If
    /// not, there will be an event.
    fn has_room(&mut self) -> io::Result<bool> {
        let is_roomy = |room: SendSpace| room.free >= room.queued / 2;
        if is_roomy(self.room) {
            return Ok(true);
        }
        self.is_writable = self.connection.is_writable()?;
        self.look_at_room();
        Ok(self.is_writable)
    }
}
