//! Reads more from a link than was asked for, so that a short header and the short payload after it take one system call
//! instead of two.

use std::io::{self, IoSliceMut, Read as _};

use mio::net::TcpStream;

/// The most bytes that are read ahead. They are copied once more.
const AHEAD: usize = 4 << 10;

/// Bytes that have been read ahead.
#[derive(Default)]
pub(super) struct ReadAhead {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// A read has found the socket empty, so an event will report further data.
    is_told: bool,
}

/// The result of a read.
pub(super) struct Read {
    /// Bytes that were asked for and read; 0 at the end of the stream.
    pub(super) wanted: usize,
    /// The socket had less than was asked for, and an event will report more.
    pub(super) was_emptied: bool,
}

impl ReadAhead {
    /// Moves the bytes that were read ahead into the parts, one after another.
    pub(super) fn take(&mut self, parts: &mut [IoSliceMut<'_>]) -> usize {
        let before = self.start;
        for part in parts {
            let count = part.len().min(self.end - self.start);
            part[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
            self.start += count;
        }
        self.start - before
    }

    /// Reads into the parts, and ahead if they are short. Everything that was read ahead before must have been taken.
    pub(super) fn read(&mut self, stream: &mut TcpStream, parts: &mut [IoSliceMut<'_>]) -> io::Result<Read> {
        let read = self.try_read(stream, parts);
        self.is_told |= read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        read
    }

    fn try_read(&mut self, stream: &mut TcpStream, parts: &mut [IoSliceMut<'_>]) -> io::Result<Read> {
        let asked: usize = parts.iter().map(|part| part.len()).sum();
        let ([first], true) = (&mut *parts, asked < AHEAD) else {
            // More data may have arrived in the meantime, so the next read may succeed.
            return Ok(Read { wanted: stream.read_vectored(parts)?, was_emptied: false });
        };
        self.bytes.resize(AHEAD, 0);
        let count = stream.read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(&mut self.bytes)])?;
        (self.start, self.end) = (0, count.saturating_sub(asked));
        Ok(Read { wanted: count.min(asked), was_emptied: self.is_told && count < asked + AHEAD })
    }
}
