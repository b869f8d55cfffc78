//! A link with several connections, for networks in which one connection does not fill the line, and for hosts on which one core
//! cannot serve a connection fast enough.
//!
//! For its user it is one ordered stream of bytes, like any link. The stream is cut into numbered
//! [records](crate::wire::record). The sender writes each record on the connection with the most free buffer space, and skips
//! full ones. The receiver reads the record with the next number directly into its destination. Later records stay in the
//! kernel's receive buffers, so nothing is stored here, and a slow reader slows its peer down as it does on one connection.
//!
//! The further connections may be added later or never: a link works with the connections that it has.

mod receiving;
mod sending;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::Shutdown;

use mio::Token;
use mio::net::TcpStream;

use self::receiving::{Receiving, RecordBuffer};
use self::sending::Sending;
use super::kernel::{self, SendSpace};
use crate::transport::listener::Event;

/// The operations that a bundle needs of a connection.
pub(super) trait Connection {
    /// Reads into the parts, one after another.
    fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Writes the parts, one after another.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// The state of the send buffer.
    fn room(&self) -> io::Result<SendSpace>;

    /// Whether it can take bytes now. If not, an event will report when it can.
    fn is_writable(&self) -> io::Result<bool>;

    /// Says that nothing more will be written.
    fn finish(&self) -> io::Result<()>;
}

impl Connection for TcpStream {
    fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.read_vectored(parts)
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_vectored(parts)
    }

    fn room(&self) -> io::Result<SendSpace> {
        kernel::room(self)
    }

    fn is_writable(&self) -> io::Result<bool> {
        kernel::is_writable(self)
    }

    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

/// A link's connections.
pub(super) struct Bundle<P> {
    /// The connections by number; `None` if one is not open.
    streams: Vec<Option<Stream<P>>>,
    /// The number of connections that are used for sending.
    used: usize,
    /// The number of connections that this rank is opening.
    awaited: usize,
    is_finished: bool,
    sending: Sending,
    receiving: Receiving,
}

struct Stream<P> {
    connection: P,
    token: Token,
    is_readable: bool,
    is_writable: bool,
    /// An event has reported that the peer ended its side.
    is_ended: bool,
    /// It cannot be read any more.
    over: Option<ConnectionEnd>,
    /// Its free buffer space at the last check.
    room: SendSpace,
    buffer: RecordBuffer,
    /// The rest of its current record.
    head: Option<PendingRecord>,
}

/// Why a connection cannot be read any more.
enum ConnectionEnd {
    /// It has been read to its end.
    Ended,
    /// It is broken, for this reason.
    Broken(String),
}

/// A record that is being read or will be read next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PendingRecord {
    number: u64,
    /// Bytes that have not been read; `None` if they go on to the end of the connection.
    left: Option<usize>,
}

impl<P: Connection> Bundle<P> {
    /// A link of so many connections, of which there is the first.
    pub(super) fn new(first: P, token: Token, of: u8) -> Self {
        let mut streams: Vec<_> = std::iter::repeat_with(|| None).take(of.into()).collect();
        if let Some(place) = streams.first_mut() {
            *place = Some(Stream::new(first, token));
        }
        Self {
            streams,
            used: of.into(),
            awaited: 0,
            is_finished: false,
            sending: Sending::default(),
            receiving: Receiving::default(),
        }
    }

    /// The number of connections that it should have.
    pub(super) fn of(&self) -> u8 {
        self.streams.len() as u8
    }

    /// Whether the connection with that number may still be added.
    pub(super) fn is_missing(&self, index: u8) -> bool {
        !self.is_single() && matches!(self.streams.get(usize::from(index)), Some(None))
    }

    /// Sets the number of connections that are being opened. Until they are, the end of the others is not the end of the link.
    pub(super) fn expect_connections(&mut self, count: usize) {
        self.awaited = count;
    }

    /// An expected connection could not be opened.
    pub(super) fn expect_one_less(&mut self) {
        self.awaited = self.awaited.saturating_sub(1);
    }

    /// Adds a further connection, or closes it if the link does not need it.
    pub(super) fn add(&mut self, index: u8, connection: P, token: Token) {
        if !self.is_missing(index) {
            return;
        }
        if self.is_finished {
            finish(&connection);
        }
        if let Some(place) = self.streams.get_mut(usize::from(index)) {
            *place = Some(Stream::new(connection, token));
        }
    }

    /// Sends only on the first `used` connections.
    pub(super) fn use_streams(&mut self, used: usize) {
        self.used = used.clamp(1, self.streams.len().max(1));
    }

    /// Sends all further bytes on the first connection without records. This cannot be undone.
    pub(super) fn use_single_connection(&mut self) {
        self.sending.is_last = true;
    }

    /// The open connections.
    pub(super) fn connections(&self) -> impl Iterator<Item = &P> {
        self.streams.iter().flatten().map(|stream| &stream.connection)
    }

    /// Handles an event of a connection.
    pub(super) fn note(&mut self, event: Event) {
        let mut streams = self.streams.iter_mut().flatten();
        if let Some(stream) = streams.find(|stream| stream.token == event.token) {
            stream.is_readable |= event.is_readable;
            stream.is_writable |= event.is_writable;
            stream.is_ended |= event.is_ended;
        }
    }

    /// Says on all connections that nothing more will be sent.
    pub(super) fn finish(&mut self) {
        self.is_finished = true;
        self.connections().for_each(finish);
    }

    /// Whether both directions use only the rest of the first connection.
    fn is_single(&self) -> bool {
        self.sending.has_no_end() && self.receiving.has_no_end
    }

    /// Closes the connections that neither side uses any more: all records on them have been read here, and the peer knows
    /// that none follows.
    fn close_unused(&mut self) {
        if self.is_single() {
            self.streams.iter_mut().skip(1).for_each(|place| *place = None);
        }
    }
}

impl<P> Stream<P> {
    fn new(connection: P, token: Token) -> Self {
        Self {
            connection,
            token,
            is_readable: true,
            is_writable: true,
            is_ended: false,
            over: None,
            room: SendSpace::default(),
            buffer: RecordBuffer::default(),
            head: None,
        }
    }
}

fn finish<P: Connection>(connection: &P) {
    if let Err(error) = connection.finish() {
        log::debug!("a connection was gone when it was to be closed: {error}");
    }
}
