//! Receives records in the order of their numbers.

use std::io::{self, IoSliceMut};

use super::{Bundle, Connection, ConnectionEnd, PendingRecord, RecordBuffer, SLICES_MAX, Stream};
use crate::transport::{TransferError, TransferResult};
use crate::wire::record::{RECORD_HEADER_BYTES, RecordHeader};

/// The maximum number of bytes that are read ahead from a connection. These bytes are copied once more.
const READ_AHEAD_BYTES: usize = 4 << 10;

impl<P: Connection> Bundle<P> {
    pub(crate) fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut moved = 0;
        while moved < total && self.receiving.fault.is_none() {
            match self.receive_once(parts, moved, total - moved) {
                Ok(0) => break,
                Ok(count) => moved += count,
                Err(TransferError::Corrupt(why)) => self.receiving.fault = Some(why),
                // First return the bytes that have been received. The next call then returns this error.
                Err(_) if moved > 0 => break,
                Err(error) => return Err(error),
            }
        }
        if moved == 0
            && let Some(why) = self.receiving.fault.take()
        {
            self.receiving.is_corrupt = true;
            return Err(TransferError::Corrupt(why));
        }
        Ok(moved)
    }

    /// Receives up to `wanted` bytes with at most one read, into the parts from position `skip` on.
    fn receive_once(&mut self, parts: &mut [IoSliceMut<'_>], skip: usize, wanted: usize) -> TransferResult {
        if self.receiving.is_corrupt {
            return self.read_any_connection(parts, skip, wanted);
        }
        let Some(index) = self.find_connection_of_next_record()? else { return self.why_no_record() };
        let Some(Some(stream)) = self.streams.get_mut(index) else { return Ok(0) };
        let left = stream.head.and_then(|head| head.left);
        let count = stream.read(parts, skip, wanted.min(left.unwrap_or(usize::MAX)), left)?;
        if let Some(left) = left {
            stream.head = stream.head.map(|head| PendingRecord { left: Some(left - count), ..head });
            if left == count {
                stream.head = None;
                self.receiving.next_record += 1;
            }
        }
        Ok(count)
    }

    /// Returns the number of the connection whose next record is the link's next record; `None` if there is none.
    fn find_connection_of_next_record(&mut self) -> Result<Option<usize>, TransferError> {
        let next = self.receiving.next_record;
        let number = |stream: &Option<Stream<P>>| Some(stream.as_ref()?.head?.number);
        let mut found = self.streams.iter().position(|stream| number(stream) == Some(next));
        for index in 0..self.streams.len() {
            if found.is_none()
                && let Some(stream) = self.streams[index].as_mut().filter(|stream| stream.head.is_none())
                && let Some(header) = stream.read_record_header()?
            {
                self.store_header(index, header)?;
                found = (header.number == next).then_some(index);
            }
        }
        self.close_unused_connections();
        Ok(found)
    }

    fn store_header(&mut self, index: usize, header: RecordHeader) -> Result<(), TransferError> {
        let RecordHeader { number, length } = header;
        let heads = self.streams.iter().flatten().filter_map(|stream| stream.head);
        if number < self.receiving.next_record || heads.into_iter().any(|head| head.number == number) {
            return Err(TransferError::Corrupt(format!("it sent record {number} twice")));
        }
        if length.is_none() && index > 0 {
            return Err(TransferError::Corrupt("its last record is not on its first connection".into()));
        }
        if let Some(Some(stream)) = self.streams.get_mut(index) {
            stream.head = Some(PendingRecord { number, left: length.map(|length| length as usize) });
        }
        Ok(())
    }

    /// Returns why no connection has the record that is to be received next; 0 if the record may still arrive.
    fn why_no_record(&self) -> TransferResult {
        for stream in self.streams.iter().flatten() {
            if let Some(ConnectionEnd::Broken(why)) = &stream.end {
                return Err(TransferError::Lost(why.clone()));
            }
        }
        if self.have_all_connections_ended() {
            return Err(ConnectionEnd::Ended.to_error());
        }
        // The record may be on a connection that is still being opened.
        let all =
            |has: fn(&Stream<P>) -> bool| self.streams.iter().all(|stream| stream.as_ref().is_some_and(has));
        if all(|stream| stream.head.is_some()) {
            return Err(TransferError::Corrupt(format!("it left out record {}", self.receiving.next_record)));
        }
        if all(|stream| stream.head.is_some() || stream.end.is_some()) {
            return Err(ConnectionEnd::Ended.to_error());
        }
        Ok(0)
    }

    /// Returns whether all open connections have ended and no further connection is being opened.
    fn have_all_connections_ended(&self) -> bool {
        self.expected_connections == 0 && self.streams.iter().flatten().all(|stream| stream.end.is_some())
    }

    /// Reads bytes that the caller ignores, after an error in the received data. If this rank closed a connection with unread
    /// data, the kernel would reset the connection, and the peer would lose this rank's last frame.
    fn read_any_connection(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        skip: usize,
        wanted: usize,
    ) -> TransferResult {
        for stream in self.streams.iter_mut().flatten() {
            if let Ok(count @ 1..) = stream.read(parts, skip, wanted, None) {
                return Ok(count);
            }
        }
        if self.have_all_connections_ended() { Err(ConnectionEnd::Ended.to_error()) } else { Ok(0) }
    }
}

impl<P: Connection> Stream<P> {
    /// Reads the connection's next header. Returns `None` if the header has not arrived completely.
    fn read_record_header(&mut self) -> Result<Option<RecordHeader>, TransferError> {
        loop {
            if let Some(bytes) = self.buffer.take_header() {
                let header = RecordHeader::decode(&bytes).map(Some);
                return header.map_err(|error| TransferError::Corrupt(error.to_string()));
            }
            if !self.is_readable || self.end.is_some() {
                return Ok(None);
            }
            let space = self.buffer.make_space();
            let requested = space.len();
            let read = self.connection.read(space);
            match self.handle_read(read, requested) {
                Some(count) => self.buffer.end += count,
                None => return Ok(None),
            }
        }
    }

    /// Reads up to `wanted` bytes into `parts`, starting at byte `skip` of the parts. May also read further bytes into
    /// `self.buffer`. `left` is [`PendingRecord::left`].
    fn read(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        skip: usize,
        wanted: usize,
        left: Option<usize>,
    ) -> TransferResult {
        let (mut slices, wanted) = subslices(parts, skip, wanted);
        let from_ahead = self.buffer.take_into(&mut slices);
        if from_ahead > 0 {
            return Ok(from_ahead);
        }
        if let Some(end) = &self.end {
            return Err(end.to_error());
        }
        if !self.is_readable {
            return Ok(0);
        }
        // To save system calls, a short read also reads what follows, and a read up to the end of a record the next header.
        let beyond = match left {
            _ if wanted < READ_AHEAD_BYTES => READ_AHEAD_BYTES,
            Some(left) if left == wanted => RECORD_HEADER_BYTES,
            _ => 0,
        };
        slices[SLICES_MAX - 1] = IoSliceMut::new(&mut self.buffer.make_space()[..beyond]);
        let read = self.connection.read_vectored(&mut slices);
        // During a long read, more data may have arrived, so the connection counts as still readable.
        let requested = if wanted < READ_AHEAD_BYTES { wanted + beyond } else { 0 };
        match self.handle_read(read, requested) {
            Some(count) => {
                self.buffer.end = count.saturating_sub(wanted);
                Ok(count.min(wanted))
            }
            None => self.end.as_ref().map_or(Ok(0), |end| Err(end.to_error())),
        }
    }

    /// Handles the result of a read of at most `requested` bytes. Returns the number of bytes, if any were read.
    fn handle_read(&mut self, read: io::Result<usize>, requested: usize) -> Option<usize> {
        match read {
            Ok(0) => {
                self.end = Some(ConnectionEnd::Ended);
                None
            }
            Ok(count) => {
                let was_emptied = self.buffer.has_blocked && count < requested;
                self.is_readable = !was_emptied || self.is_ended;
                Some(count)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.buffer.has_blocked = true;
                self.is_readable = false;
                None
            }
            // The connection stays readable, and the next call tries again.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
            Err(error) => {
                self.end = Some(ConnectionEnd::Broken(error.to_string()));
                None
            }
        }
    }
}

impl ConnectionEnd {
    fn to_error(&self) -> TransferError {
        TransferError::Lost(match self {
            Self::Ended => "it closed the connection without saying why".into(),
            Self::Broken(why) => why.clone(),
        })
    }
}

impl RecordBuffer {
    fn take_header(&mut self) -> Option<[u8; RECORD_HEADER_BYTES]> {
        let header = self.bytes[self.start..self.end].first_chunk().copied()?;
        self.start += RECORD_HEADER_BYTES;
        Some(header)
    }

    /// Moves the stored bytes to the beginning of the buffer, and returns the free space after these bytes.
    fn make_space(&mut self) -> &mut [u8] {
        self.bytes.resize(READ_AHEAD_BYTES, 0);
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.bytes[self.end..]
    }

    fn take_into(&mut self, slices: &mut [IoSliceMut<'_>]) -> usize {
        let before = self.start;
        for slice in slices {
            let count = slice.len().min(self.end - self.start);
            slice[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
            self.start += count;
        }
        self.start - before
    }
}

/// Returns slices of the first `parts` that cover `length` bytes or fewer, beginning at position `skip`, and the number of bytes
/// that they cover. The last slice is empty.
fn subslices<'a>(
    parts: &'a mut [IoSliceMut<'_>],
    mut skip: usize,
    length: usize,
) -> ([IoSliceMut<'a>; SLICES_MAX], usize) {
    let mut slices = std::array::from_fn(|_| IoSliceMut::new(&mut []));
    let mut covered = 0;
    let mut free_slices = slices[..SLICES_MAX - 1].iter_mut();
    for part in parts {
        let skipped = skip.min(part.len());
        skip -= skipped;
        let taken = (length - covered).min(part.len() - skipped);
        if taken == 0 {
            continue;
        }
        let Some(slice) = free_slices.next() else { break };
        *slice = IoSliceMut::new(&mut part[skipped..skipped + taken]);
        covered += taken;
    }
    (slices, covered)
}
