//! Reads more bytes from a link than the caller requests, so that a short header and its short payload need one
//! system call instead of two.

use std::io::{self, IoSliceMut, Read as _};

use mio::net::TcpStream;

/// The maximum number of bytes that are read ahead. Bytes that are read ahead are copied once more than other bytes.
const READ_AHEAD_BYTES: usize = 4 << 10;

/// The bytes that have been read ahead, but that the caller has not taken yet.
#[derive(Default)]
pub(super) struct ReadAhead {
    /// The memory of the buffer. The bytes from `start` to `end` have not been taken yet.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// Whether a read has found the socket empty, so that an event will report further data.
    has_blocked: bool,
}

/// The result of a read.
pub(super) struct ReadOutcome {
    /// The number of requested bytes that were read; 0 at the end of the stream.
    pub(super) count: usize,
    /// Whether the read has emptied the socket, so that an event will report further data.
    pub(super) was_emptied: bool,
}

impl ReadAhead {
    /// Moves bytes that were read ahead into the parts, one after another. Returns the number of moved bytes.
    pub(super) fn take_into(&mut self, parts: &mut [IoSliceMut<'_>]) -> usize {
        let before = self.start;
        for part in parts {
            let count = part.len().min(self.end - self.start);
            part[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
            self.start += count;
        }
        self.start - before
    }

    /// Reads into the parts, and also reads ahead if the parts are short. Before this call, the caller must have received
    /// all bytes that were read ahead, with [`take_into`](Self::take_into).
    pub(super) fn read(
        &mut self,
        stream: &mut TcpStream,
        parts: &mut [IoSliceMut<'_>],
    ) -> io::Result<ReadOutcome> {
        let read = self.try_read(stream, parts);
        self.has_blocked |= read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        read
    }

    fn try_read(&mut self, stream: &mut TcpStream, parts: &mut [IoSliceMut<'_>]) -> io::Result<ReadOutcome> {
        let requested: usize = parts.iter().map(|part| part.len()).sum();
        let ([first], true) = (&mut *parts, requested < READ_AHEAD_BYTES) else {
            // More data may arrive during a long read, so the socket does not count as emptied.
            return Ok(ReadOutcome { count: stream.read_vectored(parts)?, was_emptied: false });
        };
        self.bytes.resize(READ_AHEAD_BYTES, 0);
        let count = stream.read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(&mut self.bytes)])?;
        (self.start, self.end) = (0, count.saturating_sub(requested));
        let was_emptied = self.has_blocked && count < requested + READ_AHEAD_BYTES;
        Ok(ReadOutcome { count: count.min(requested), was_emptied })
    }
}
