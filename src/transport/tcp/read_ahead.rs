//! What a link has sent beyond what was asked for: with a short header the short payload behind it comes along, in one system
//! call instead of two.

use std::io::{self, IoSliceMut, Read as _};

use mio::net::TcpStream;

/// The most bytes that are read ahead; they are copied once more.
const AHEAD: usize = 4 << 10;

/// Bytes that have been read ahead.
#[derive(Default)]
pub(super) struct ReadAhead {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// The socket has been found empty once, so that whatever comes afterwards is told of by an event.
    is_told: bool,
}

/// What a read has come to.
pub(super) struct Read {
    /// Bytes of what was asked for; none if there will never be any.
    pub(super) wanted: usize,
    /// The socket had less than it was asked for, and there is an event when it has more.
    pub(super) was_emptied: bool,
}

impl ReadAhead {
    /// Moves what was read ahead into the parts, one after another.
    pub(super) fn take(&mut self, parts: &mut [IoSliceMut<'_>]) -> usize {
        let before = self.start;
        for part in parts {
            let count = part.len().min(self.end - self.start);
            part[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
            self.start += count;
        }
        self.start - before
    }

    /// Reads into the parts, and ahead if they are short. All that was read ahead before has been taken.
    pub(super) fn read(&mut self, stream: &mut TcpStream, parts: &mut [IoSliceMut<'_>]) -> io::Result<Read> {
        let read = self.try_read(stream, parts);
        self.is_told |= read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        read
    }

    fn try_read(&mut self, stream: &mut TcpStream, parts: &mut [IoSliceMut<'_>]) -> io::Result<Read> {
        let asked: usize = parts.iter().map(|part| part.len()).sum();
        let ([first], true) = (&mut *parts, asked < AHEAD) else {
            // More may have come meanwhile, so it is worth while to ask again.
            return Ok(Read { wanted: stream.read_vectored(parts)?, was_emptied: false });
        };
        self.bytes.resize(AHEAD, 0);
        let count = stream.read_vectored(&mut [IoSliceMut::new(first), IoSliceMut::new(&mut self.bytes)])?;
        (self.start, self.end) = (0, count.saturating_sub(asked));
        Ok(Read { wanted: count.min(asked), was_emptied: self.is_told && count < asked + AHEAD })
    }
}
