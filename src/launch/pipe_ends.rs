//! The ends of pipes through which ringrun, its agents and its relays exchange bytes. Reads and writes never block.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio, read, retry_on_intr, write};

/// The end of a pipe that this process reads.
#[derive(Debug)]
pub(super) struct ReadEnd {
    pipe: OwnedFd,
    /// Whether the pipe may have bytes to read.
    is_readable: bool,
    has_ended: bool,
}

impl ReadEnd {
    pub(super) fn new(pipe: OwnedFd) -> io::Result<Self> {
        ioctl_fionbio(&pipe, true)?;
        Ok(Self { pipe, is_readable: true, has_ended: false })
    }

    /// Makes a poll report with this token when there are bytes to read.
    pub(super) fn register(&self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut SourceFd(&self.pipe.as_raw_fd()), token, Interest::READABLE)
    }

    /// Waits until there are bytes to read, at most for this time. For a pipe that no poll reports.
    pub(super) fn wait_until_readable(&mut self, timeout: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        let mut descriptors = [PollFd::new(&self.pipe, PollFlags::IN)];
        retry_on_intr(|| poll(&mut descriptors, Some(&timeout)))?;
        self.is_readable = true;
        Ok(())
    }

    /// Records that the poll has reported the pipe.
    pub(super) fn mark_readable(&mut self) {
        self.is_readable = true;
    }

    /// Returns whether the next call of [`Self::read`] may find bytes or the end.
    pub(super) fn is_readable(&self) -> bool {
        self.is_readable && !self.has_ended
    }

    /// Returns whether the other end has been closed, and all bytes have been read.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Reads once, and returns the number of bytes: 0 if there are none now.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        if !self.is_readable() {
            return 0;
        }
        match retry_on_intr(|| read(&self.pipe, &mut *buffer)) {
            Err(Errno::AGAIN) => self.is_readable = false,
            Ok(0) | Err(_) => self.has_ended = true,
            Ok(count) => return count,
        }
        0
    }
}

/// The end of a pipe that this process writes.
#[derive(Debug)]
pub(super) struct WriteEnd {
    /// `None` after [`Self::close`], and if the other end has been closed.
    pipe: Option<OwnedFd>,
    /// Bytes that the pipe has not accepted yet.
    unsent: Vec<u8>,
    /// Whether to close the pipe when it has accepted all bytes.
    is_closing: bool,
}

impl WriteEnd {
    pub(super) fn new(pipe: OwnedFd) -> io::Result<Self> {
        ioctl_fionbio(&pipe, true)?;
        Ok(Self { pipe: Some(pipe), unsent: Vec::new(), is_closing: false })
    }

    /// Makes a poll report with this token when the pipe accepts bytes.
    pub(super) fn register(&self, registry: &Registry, token: Token) -> io::Result<()> {
        match &self.pipe {
            Some(pipe) => registry.register(&mut SourceFd(&pipe.as_raw_fd()), token, Interest::WRITABLE),
            None => Ok(()),
        }
    }

    /// Sends bytes: as many as the pipe accepts now, and the others when the poll reports the pipe.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        if self.pipe.is_some() && !self.is_closing {
            self.unsent.extend_from_slice(bytes);
            self.flush();
        }
    }

    /// Returns the number of bytes that the pipe has not accepted.
    pub(super) fn unsent_bytes(&self) -> usize {
        self.unsent.len()
    }

    /// Writes as many bytes as the pipe accepts.
    pub(super) fn flush(&mut self) {
        let mut sent = 0;
        while let Some(pipe) = &self.pipe
            && sent < self.unsent.len()
        {
            match retry_on_intr(|| write(pipe, &self.unsent[sent..])) {
                Ok(count) => sent += count,
                Err(Errno::AGAIN) => break,
                Err(_) => return self.close(),
            }
        }
        self.unsent.drain(..sent);
        if self.is_closing && self.unsent.is_empty() {
            self.close();
        }
    }

    /// Closes the pipe. The other end then reads the end of its pipe.
    pub(super) fn close(&mut self) {
        self.pipe = None;
        self.unsent.clear();
    }

    /// Closes the pipe when it has accepted all bytes.
    pub(super) fn close_after_flush(&mut self) {
        self.is_closing = true;
        self.flush();
    }
}

/// The two ends of a channel of a relay, in memory.
#[derive(Default, Debug)]
pub(super) struct ChannelEnds {
    received: Vec<u8>,
    has_ended: bool,
    unsent: Vec<u8>,
    is_closed: bool,
    has_passed_end: bool,
}

impl ChannelEnds {
    /// Adds bytes that the relay has passed on. No bytes mean the end. After [`Self::close`], drops the bytes.
    pub(super) fn push_received(&mut self, bytes: &[u8]) {
        if !self.is_closed {
            self.received.extend_from_slice(bytes);
        }
        self.has_ended |= bytes.is_empty();
    }

    /// Returns whether the next call of [`Self::read`] finds bytes.
    pub(super) fn is_readable(&self) -> bool {
        !self.received.is_empty()
    }

    /// Returns whether all bytes have been read and there will be no more.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended && self.received.is_empty()
    }

    /// Moves received bytes to `buffer`, and returns their number.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let count = self.received.len().min(buffer.len());
        buffer[..count].copy_from_slice(&self.received[..count]);
        self.received.drain(..count);
        count
    }

    /// Keeps bytes for the relay.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        if !self.is_closed {
            self.unsent.extend_from_slice(bytes);
        }
    }

    /// Ends the bytes for the relay.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        self.unsent.clear();
    }

    /// Returns the number of bytes that the relay has not got.
    pub(super) fn unsent_bytes(&self) -> usize {
        self.unsent.len()
    }

    /// Returns the bytes that the relay must pass on, in pieces of at most `piece_bytes_max` bytes. An empty piece is the end.
    pub(super) fn take_unsent(&mut self, piece_bytes_max: usize) -> Vec<Vec<u8>> {
        let unsent = mem::take(&mut self.unsent);
        let mut pieces: Vec<Vec<u8>> = unsent.chunks(piece_bytes_max).map(<[u8]>::to_vec).collect();
        if self.is_closed && !mem::replace(&mut self.has_passed_end, true) {
            pieces.push(Vec::new());
        }
        pieces
    }
}
