//! A connection through which ringrun and an agent or a relay exchange [frames](super::frames): a pair of pipes, or a channel
//! of a relay. Reads and writes never block.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use mio::{Registry, Token};

use super::frames::{AgentFrame, FrameReader, OUTPUT_BYTES_MAX};
use super::pipe_ends::{ChannelEnds, ReadEnd, WriteEnd};

/// The most bytes that one call of [`FrameLink::receive`] reads, so that one host does not delay the others.
const RECEIVED_BYTES_MAX: usize = 1 << 20;

/// What carries the bytes of a connection.
#[derive(Debug)]
enum Carrier {
    Pipes(ReadEnd, WriteEnd),
    Channel(ChannelEnds),
}

/// One end of the connection.
#[derive(Debug)]
pub(super) struct FrameLink {
    carrier: Carrier,
    frames: FrameReader,
}

impl FrameLink {
    /// Wraps the pipes: the one that this end reads, and the one that this end writes.
    pub(super) fn new((reader, writer): (OwnedFd, OwnedFd), frames: FrameReader) -> io::Result<Self> {
        Ok(Self { carrier: Carrier::Pipes(ReadEnd::new(reader)?, WriteEnd::new(writer)?), frames })
    }

    /// Returns the end of a channel of a relay.
    pub(super) fn of_channel(frames: FrameReader) -> Self {
        Self { carrier: Carrier::Channel(ChannelEnds::default()), frames }
    }

    /// Makes a poll report with these tokens when the pipes are ready.
    pub(super) fn register(&self, registry: &Registry, (read, write): (Token, Token)) -> io::Result<()> {
        let Carrier::Pipes(reader, writer) = &self.carrier else { return Ok(()) };
        reader.register(registry, read)?;
        writer.register(registry, write)
    }

    /// Waits until there are bytes to read, at most for this time. For a link that no poll reports.
    pub(super) fn wait_until_readable(&mut self, timeout: Duration) -> io::Result<()> {
        match &mut self.carrier {
            Carrier::Pipes(reader, _) => reader.wait_until_readable(timeout),
            Carrier::Channel(_) => Ok(()),
        }
    }

    /// Records that the poll has reported the pipe as readable.
    pub(super) fn mark_readable(&mut self) {
        if let Carrier::Pipes(reader, _) = &mut self.carrier {
            reader.mark_readable();
        }
    }

    /// Returns whether the next call of [`Self::receive`] may find bytes.
    pub(super) fn is_readable(&self) -> bool {
        match &self.carrier {
            Carrier::Pipes(reader, _) => reader.is_readable(),
            Carrier::Channel(ends) => ends.is_readable(),
        }
    }

    /// Returns whether the other end has closed its direction, and all bytes have been read.
    pub(super) fn has_ended(&self) -> bool {
        match &self.carrier {
            Carrier::Pipes(reader, _) => reader.has_ended(),
            Carrier::Channel(ends) => ends.has_ended(),
        }
    }

    /// Sends bytes: as many as the pipe accepts now, and the others when the poll reports the pipe as writable.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        match &mut self.carrier {
            Carrier::Pipes(_, writer) => writer.send(bytes),
            Carrier::Channel(ends) => ends.send(bytes),
        }
    }

    /// Returns the number of bytes that have not been sent, and still can be sent.
    pub(super) fn unsent_bytes(&self) -> usize {
        match &self.carrier {
            Carrier::Pipes(_, writer) => writer.unsent_bytes(),
            Carrier::Channel(ends) => ends.unsent_bytes(),
        }
    }

    /// Writes as many bytes as the pipe accepts.
    pub(super) fn flush(&mut self) {
        if let Carrier::Pipes(_, writer) = &mut self.carrier {
            writer.flush();
        }
    }

    /// Closes the direction from this end. The other end then reads the end.
    pub(super) fn close(&mut self) {
        match &mut self.carrier {
            Carrier::Pipes(_, writer) => writer.close(),
            Carrier::Channel(ends) => ends.close(),
        }
    }

    /// For a channel: adds bytes that the relay has passed on. No bytes mean the end.
    pub(super) fn push_received(&mut self, bytes: &[u8]) {
        if let Carrier::Channel(ends) = &mut self.carrier {
            ends.push_received(bytes);
        }
    }

    /// For a channel: returns the bytes that the relay must pass on, as the bodies of frames. An empty one is the end.
    pub(super) fn take_unsent(&mut self) -> Vec<Vec<u8>> {
        match &mut self.carrier {
            Carrier::Pipes(..) => Vec::new(),
            Carrier::Channel(ends) => ends.take_unsent(OUTPUT_BYTES_MAX),
        }
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
            let count = match &mut self.carrier {
                Carrier::Pipes(reader, _) => reader.read(&mut buffer),
                Carrier::Channel(ends) => ends.read(&mut buffer),
            };
            received += count;
            self.frames.push(&buffer[..count]);
            while let Some(frame) = self.frames.next_frame()? {
                found.push(frame);
            }
        }
        Ok(found)
    }

    /// Returns the text that the other host has printed instead of starting an agent, or `None` if there is an agent.
    pub(super) fn text_before_magic(&self) -> Option<&[u8]> {
        self.frames.text_before_magic()
    }
}
