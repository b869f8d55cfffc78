//! A link that consists of several connections, for networks that give one connection less than a line, and hosts on which one
//! core cannot serve a connection as fast.
//!
//! Above, it is one ordered stream of bytes, as any link. Below, that is cut into [records](crate::wire::record), numbered in
//! its order. The sender writes each on whichever connection has most room; one that is full is passed over. The receiver
//! looks for the number that is due: that record is read straight to its place, and what has come of later ones waits in the
//! kernel's receive buffers, so that nothing is stored here and a slow reader holds its peer back as on one connection.
//!
//! The connections beyond the first come later, or never: a link works with those it has.

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

/// A connection, as far as a bundle of them is concerned.
pub(super) trait Connection {
    /// Reads into the parts, one after another.
    fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Writes the parts, one after another.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// What waits to be sent and what more could.
    fn room(&self) -> io::Result<SendSpace>;

    /// Whether it would take bytes now; if not, there will be an event when it does.
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
    /// By their number; those that have not come are not there.
    streams: Vec<Option<Stream<P>>>,
    /// How many of the first ones are sent on.
    used: usize,
    /// How many this rank is opening.
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
    /// The peer has ended its side, which an event has told.
    is_ended: bool,
    /// It cannot be read any more.
    over: Option<ConnectionEnd>,
    /// What was known of its room when it was looked at last.
    room: SendSpace,
    buffer: RecordBuffer,
    /// What is left of the record that it has come to.
    head: Option<PendingRecord>,
}

/// Why a connection cannot be read any more.
enum ConnectionEnd {
    /// It has been read to its end.
    Ended,
    /// It is broken, and this is how.
    Broken(String),
}

/// A record that is being read, or waits for that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PendingRecord {
    number: u64,
    /// Bytes that have not been read; `None` if there is no end to them.
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

    /// Of how many connections it is to consist.
    pub(super) fn of(&self) -> u8 {
        self.streams.len() as u8
    }

    /// Whether it may still have the connection of that number.
    pub(super) fn is_missing(&self, index: u8) -> bool {
        !self.is_single() && matches!(self.streams.get(usize::from(index)), Some(None))
    }

    /// So many connections are being opened: while that goes on, the end of the others is not the end of the link.
    pub(super) fn expect_connections(&mut self, count: usize) {
        self.awaited = count;
    }

    /// One that was expected will not come.
    pub(super) fn expect_one_less(&mut self) {
        self.awaited = self.awaited.saturating_sub(1);
    }

    /// A further connection. It is closed if there is no place for it.
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

    /// Sends on the first `used` connections alone.
    pub(super) fn use_streams(&mut self, used: usize) {
        self.used = used.clamp(1, self.streams.len().max(1));
    }

    /// Sends all that follows on the first connection as it is, without records. There is no way back.
    pub(super) fn use_single_connection(&mut self) {
        self.sending.is_last = true;
    }

    /// The connections that there are.
    pub(super) fn connections(&self) -> impl Iterator<Item = &P> {
        self.streams.iter().flatten().map(|stream| &stream.connection)
    }

    /// Takes note of what has happened to a connection.
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

    /// Whether the rest of the first connection is all that is left, both ways.
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
