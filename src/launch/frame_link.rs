//! A pair of pipes through which ringrun and an agent exchange [frames](super::frames). Reads and writes never block.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio, read, retry_on_intr, write};

use super::frames::{AgentFrame, FrameReader};

/// The most bytes that one call of [`FrameLink::receive`] reads, so that one host does not delay the others.
const RECEIVED_BYTES_MAX: usize = 1 << 20;

/// One end of the pair of pipes.
#[derive(Debug)]
pub(super) struct FrameLink {
    reader: OwnedFd,
    /// `None` after [`Self::close`], and if the other end has been closed.
    writer: Option<OwnedFd>,
    /// Bytes that the pipe has not accepted yet.
    outgoing: Vec<u8>,
    frames: FrameReader,
    /// Whether the pipe may have bytes to read.
    is_readable: bool,
    has_ended: bool,
}

impl FrameLink {
    /// Wraps the pipes: the one that this end reads, and the one that this end writes.
    pub(super) fn new((reader, writer): (OwnedFd, OwnedFd), frames: FrameReader) -> io::Result<Self> {
        ioctl_fionbio(&reader, true)?;
        ioctl_fionbio(&writer, true)?;
        let (outgoing, has_ended) = (Vec::new(), false);
        Ok(Self { reader, writer: Some(writer), outgoing, frames, is_readable: true, has_ended })
    }

    /// Makes a poll report with these tokens when the pipes are ready.
    pub(super) fn register(&self, registry: &Registry, (read, write): (Token, Token)) -> io::Result<()> {
        registry.register(&mut SourceFd(&self.reader.as_raw_fd()), read, Interest::READABLE)?;
        match &self.writer {
            Some(writer) => registry.register(&mut SourceFd(&writer.as_raw_fd()), write, Interest::WRITABLE),
            None => Ok(()),
        }
    }

    /// Waits until there are bytes to read, at most for this time. For a link that no poll reports.
    pub(super) fn wait_until_readable(&mut self, timeout: Duration) -> io::Result<()> {
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        let mut descriptors = [PollFd::new(&self.reader, PollFlags::IN)];
        retry_on_intr(|| poll(&mut descriptors, Some(&timeout)))?;
        self.is_readable = true;
        Ok(())
    }

    /// Records that the poll has reported the pipe as readable.
    pub(super) fn mark_readable(&mut self) {
        self.is_readable = true;
    }

    /// Returns whether the next call of [`Self::receive`] may find bytes.
    pub(super) fn is_readable(&self) -> bool {
        self.is_readable && !self.has_ended
    }

    /// Returns whether the other end of the pipe that this end reads has been closed, and all bytes have been read.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Sends bytes: as many as the pipe accepts now, and the others when the poll reports the pipe as writable.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        if self.writer.is_some() {
            self.outgoing.extend_from_slice(bytes);
            self.flush();
        }
    }

    /// Returns whether all bytes have been sent, or can no longer be sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Writes as many bytes as the pipe accepts.
    pub(super) fn flush(&mut self) {
        let mut sent = 0;
        while let Some(writer) = &self.writer
            && sent < self.outgoing.len()
        {
            match retry_on_intr(|| write(writer, &self.outgoing[sent..])) {
                Ok(count) => sent += count,
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    self.close();
                    return;
                }
            }
        }
        self.outgoing.drain(..sent);
    }

    /// Closes the pipe that this end writes. The other end then reads the end of its pipe.
    pub(super) fn close(&mut self) {
        self.writer = None;
        self.outgoing.clear();
    }

    /// Returns the frames that have arrived.
    ///
    /// # Errors
    ///
    /// A sentence that says which rule the sender has broken.
    pub(super) fn receive(&mut self) -> Result<Vec<AgentFrame>, String> {
        let (mut found, mut received) = (Vec::new(), 0);
        let mut buffer = vec![0; 64 << 10];
        while self.is_readable() && received < RECEIVED_BYTES_MAX {
            match retry_on_intr(|| read(&self.reader, &mut buffer[..])) {
                Err(Errno::AGAIN) => self.is_readable = false,
                Ok(0) | Err(_) => self.has_ended = true,
                Ok(count) => {
                    received += count;
                    self.frames.push(&buffer[..count]);
                    while let Some(frame) = self.frames.next_frame()? {
                        found.push(frame);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Returns the text that the other host has printed instead of starting an agent, or `None` if there is an agent.
    pub(super) fn text_before_magic(&self) -> Option<&[u8]> {
        self.frames.text_before_magic()
    }
}
