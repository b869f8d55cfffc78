//! Reads records in the order of their numbers.

use std::io::{self, IoSliceMut};

use super::{Bundle, Connection, ConnectionEnd, PendingRecord, Stream};
use crate::transport::Moved;
use crate::wire::record::{RECORD_HEADER_BYTES, Record};

/// The most bytes of a connection that are read ahead. They are copied once more.
const AHEAD: usize = 4 << 10;
const ENDED: &str = "it closed the connection without saying why";

/// The state of receiving.
#[derive(Default)]
pub(super) struct Receiving {
    /// The number that is due.
    next: u64,
    /// The connection that has it.
    current: Option<usize>,
    /// All further bytes come on the first connection, without records.
    pub(super) has_no_end: bool,
    /// An error in the received data that has not been reported yet.
    fault: Option<String>,
    /// The error has been reported; everything received afterwards is ignored.
    is_corrupt: bool,
}

/// Bytes of a connection that have been read ahead: a header and the bytes after it.
#[derive(Default)]
pub(super) struct RecordBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// A read has found the connection empty, so an event will report further data.
    is_told: bool,
}

/// Why no bytes can be received.
enum ReceiveStop {
    /// No data have arrived.
    Empty,
    /// The link has ended.
    Lost(String),
    /// The received data are wrong.
    Corrupt(String),
}

impl<P: Connection> Bundle<P> {
    /// Receives as much as has arrived, into the parts one after another.
    pub(in super::super) fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> Moved {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut moved = 0;
        while moved < total && self.receiving.fault.is_none() {
            match self.receive_some(parts, moved, total - moved) {
                Ok(count) => moved += count,
                Err(ReceiveStop::Corrupt(why)) => self.receiving.fault = Some(why),
                // The next call returns it again.
                Err(_) if moved > 0 => break,
                Err(ReceiveStop::Empty) => return Moved::Blocked,
                Err(ReceiveStop::Lost(why)) => return Moved::Lost(why),
            }
        }
        if moved == 0
            && let Some(why) = self.receiving.fault.take()
        {
            self.receiving.is_corrupt = true;
            return Moved::Corrupt(why);
        }
        if moved == 0 { Moved::Blocked } else { Moved::Bytes(moved) }
    }

    fn receive_some(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        skip: usize,
        wanted: usize,
    ) -> Result<usize, ReceiveStop> {
        if self.receiving.is_corrupt {
            return self.read_anything(parts, skip, wanted);
        }
        let index = match self.receiving.current {
            Some(index) => index,
            None => self.find_next()?,
        };
        let Some(Some(stream)) = self.streams.get_mut(index) else { return Err(ReceiveStop::Empty) };
        let left = stream.head.and_then(|head| head.left);
        let count = stream.read(parts, skip, wanted.min(left.unwrap_or(usize::MAX)), left)?;
        if let Some(left) = left {
            stream.head = stream.head.map(|head| PendingRecord { left: Some(left - count), ..head });
            if left == count {
                stream.head = None;
                self.receiving.current = None;
                self.receiving.next += 1;
            }
        }
        Ok(count)
    }

    /// The connection whose next record is due.
    fn find_next(&mut self) -> Result<usize, ReceiveStop> {
        let next = self.receiving.next;
        let is_due = |head: PendingRecord| head.number == next;
        let known = |stream: &Option<Stream<P>>| stream.as_ref()?.head.map(is_due);
        let mut found = self.streams.iter().position(|stream| known(stream) == Some(true));
        for index in 0..self.streams.len() {
            if found.is_some() {
                break;
            }
            let Some(Some(stream)) = self.streams.get_mut(index) else { continue };
            if stream.head.is_none()
                && let Some(record) = stream.read_head()?
            {
                self.accept(index, record)?;
                found = (record.number == next).then_some(index);
            }
        }
        let Some(index) = found else { return Err(self.why_none()) };
        self.receiving.current = Some(index);
        if self.streams[index]
            .as_ref()
            .is_some_and(|stream| stream.head.is_some_and(|head| head.left.is_none()))
        {
            self.receiving.has_no_end = true;
            self.close_unused();
        }
        Ok(index)
    }

    /// Stores the header of a connection's next record if it is valid.
    fn accept(&mut self, index: usize, record: Record) -> Result<(), ReceiveStop> {
        let Record { number, length } = record;
        let heads = self.streams.iter().flatten().filter_map(|stream| stream.head);
        if number < self.receiving.next || heads.into_iter().any(|head| head.number == number) {
            return Err(ReceiveStop::Corrupt(format!("it sent a record of number {number} twice")));
        }
        if length.is_none() && index > 0 {
            return Err(ReceiveStop::Corrupt("its last record is not on its first connection".into()));
        }
        if let Some(Some(stream)) = self.streams.get_mut(index) {
            stream.head = Some(PendingRecord { number, left: length.map(|length| length as usize) });
        }
        Ok(())
    }

    /// Why no connection has the record that is due.
    fn why_none(&self) -> ReceiveStop {
        let broken = |stream: &Stream<P>| match &stream.over {
            Some(ConnectionEnd::Broken(why)) => Some(why.clone()),
            _ => None,
        };
        if let Some(why) = self.streams.iter().flatten().find_map(broken) {
            return ReceiveStop::Lost(why);
        }
        if self.are_over() {
            return ReceiveStop::Lost(ENDED.into());
        }
        // The record may be on a connection that is still being opened.
        let all =
            |has: fn(&Stream<P>) -> bool| self.streams.iter().all(|stream| stream.as_ref().is_some_and(has));
        if all(|stream| stream.head.is_some()) {
            return ReceiveStop::Corrupt(format!("it left out the record of number {}", self.receiving.next));
        }
        if all(|stream| stream.head.is_some() || stream.over.is_some()) {
            return ReceiveStop::Lost(ENDED.into());
        }
        ReceiveStop::Empty
    }

    /// Whether all connections have ended and none is being opened.
    fn are_over(&self) -> bool {
        self.awaited == 0 && self.streams.iter().flatten().all(|stream| stream.over.is_some())
    }

    /// Reads and drops all received data: the kernel resets a connection that has unread data, and this rank's last frame would
    /// be lost.
    fn read_anything(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        skip: usize,
        wanted: usize,
    ) -> Result<usize, ReceiveStop> {
        for stream in self.streams.iter_mut().flatten() {
            if let Ok(count) = stream.read(parts, skip, wanted, None) {
                return Ok(count);
            }
        }
        Err(if self.are_over() { ReceiveStop::Lost(ENDED.into()) } else { ReceiveStop::Empty })
    }
}

impl<P: Connection> Stream<P> {
    /// The next header of the connection, once it is complete.
    fn read_head(&mut self) -> Result<Option<Record>, ReceiveStop> {
        loop {
            if let Some(bytes) = self.buffer.take_header() {
                return Record::decode(&bytes)
                    .map(Some)
                    .map_err(|error| ReceiveStop::Corrupt(error.to_string()));
            }
            if !self.is_readable || self.over.is_some() {
                return Ok(None);
            }
            let space = self.buffer.make_space();
            let asked = space.len();
            let read = self.connection.read(&mut [IoSliceMut::new(space)]);
            match self.note_read(read, asked) {
                Some(count) => self.buffer.end += count,
                None => return Ok(None),
            }
        }
    }

    /// Reads up to `wanted` bytes to the parts from `skip` on, and ahead what comes along. So many are `left` of the record.
    fn read(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        skip: usize,
        wanted: usize,
        left: Option<usize>,
    ) -> Result<usize, ReceiveStop> {
        let mut slices = cut(parts, skip, wanted);
        let from_ahead = self.buffer.take(&mut slices);
        if from_ahead > 0 {
            return Ok(from_ahead);
        }
        if let Some(over) = &self.over {
            return Err(over.stop());
        }
        if !self.is_readable {
            return Err(ReceiveStop::Empty);
        }
        // Something short, and what is behind it, in one system call; behind a record the next one's header.
        let beyond = match left {
            _ if wanted < AHEAD => AHEAD,
            Some(left) if left == wanted => RECORD_HEADER_BYTES,
            _ => 0,
        };
        slices.push(IoSliceMut::new(&mut self.buffer.make_space()[..beyond]));
        let read = self.connection.read(&mut slices);
        // More data may have arrived during a long read, so the next read may succeed.
        let asked = if wanted < AHEAD { wanted + beyond } else { 0 };
        match self.note_read(read, asked) {
            Some(count) => {
                self.buffer.end = count.saturating_sub(wanted);
                Ok(count.min(wanted))
            }
            None => Err(self.over.as_ref().map_or(ReceiveStop::Empty, ConnectionEnd::stop)),
        }
    }

    /// Handles the result of a read of `asked` bytes. Returns the number of bytes.
    fn note_read(&mut self, read: io::Result<usize>, asked: usize) -> Option<usize> {
        match read {
            Ok(0) => {
                self.over = Some(ConnectionEnd::Ended);
                None
            }
            Ok(count) => {
                let was_emptied = self.buffer.is_told && count < asked;
                self.is_readable = !was_emptied || self.is_ended;
                Some(count)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.buffer.is_told = true;
                self.is_readable = false;
                None
            }
            // The connection stays ready, and the next call tries again.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
            Err(error) => {
                self.over = Some(ConnectionEnd::Broken(error.to_string()));
                None
            }
        }
    }
}

impl ConnectionEnd {
    fn stop(&self) -> ReceiveStop {
        match self {
            Self::Ended => ReceiveStop::Lost(ENDED.into()),
            Self::Broken(why) => ReceiveStop::Lost(why.clone()),
        }
    }
}

impl RecordBuffer {
    /// The header, if it is complete.
    fn take_header(&mut self) -> Option<[u8; RECORD_HEADER_BYTES]> {
        let header = self.bytes[self.start..self.end].first_chunk().copied()?;
        self.start += RECORD_HEADER_BYTES;
        Some(header)
    }

    /// The free space after the bytes read so far.
    fn make_space(&mut self) -> &mut [u8] {
        self.bytes.resize(AHEAD, 0);
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.bytes[self.end..]
    }

    /// Moves the bytes into the slices, one after another.
    fn take(&mut self, slices: &mut [IoSliceMut<'_>]) -> usize {
        let before = self.start;
        for slice in slices {
            let count = slice.len().min(self.end - self.start);
            slice[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
            self.start += count;
        }
        self.start - before
    }
}

/// So many bytes of the parts, from `skip` on.
fn cut<'a>(parts: &'a mut [IoSliceMut<'_>], mut skip: usize, mut length: usize) -> Vec<IoSliceMut<'a>> {
    let mut slices = Vec::with_capacity(parts.len() + 1);
    for part in parts {
        let skipped = skip.min(part.len());
        let taken = length.min(part.len() - skipped);
        slices.push(IoSliceMut::new(&mut part[skipped..skipped + taken]));
        (skip, length) = (skip - skipped, length - taken);
    }
    slices
}
