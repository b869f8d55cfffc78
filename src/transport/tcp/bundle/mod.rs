//! A link with several connections. Several connections are faster than one in two cases: one connection cannot use
//! the whole bandwidth of the network, or one processor core cannot process the data of one connection fast enough.
//!
//! The caller sees one ordered stream of bytes, as on any link. The sender divides the stream into numbered
//! [records](crate::wire::record), and writes each record on a connection that has free buffer space. The
//! receiver reads the record with the next number directly into its destination. Later records stay in the kernel's
//! receive buffers, except for at most 4 KiB that the receiver reads ahead on each connection. So a slow receiver makes the
//! sender wait, as on a link with one connection.
//!
//! The link can be used as soon as one connection is open. The other connections are added later.

mod receiving;
mod sending;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::Shutdown;

use mio::Token;
use mio::net::TcpStream;

use self::receiving::{ReceiveState, RecordBuffer};
use self::sending::SendState;
use super::kernel::{self, SendSpace};
use crate::transport::poller::Event;

/// The operations of a connection that a bundle needs. Tests implement this trait without sockets.
pub(super) trait Connection {
    /// Reads into the parts, one after another. Returns the number of bytes that were read.
    fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Writes the parts, one after another. Returns the number of bytes that were written.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Returns the state of the send buffer.
    fn send_space(&self) -> io::Result<SendSpace>;

    /// Returns whether the connection accepts bytes now. After a result of false, an event reports when the connection
    /// accepts bytes again.
    fn is_writable(&self) -> io::Result<bool>;

    /// Closes the sending direction.
    fn close_sending(&self) -> io::Result<()>;
}

impl Connection for TcpStream {
    fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.read_vectored(parts)
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_vectored(parts)
    }

    fn send_space(&self) -> io::Result<SendSpace> {
        kernel::send_space(self)
    }

    fn is_writable(&self) -> io::Result<bool> {
        kernel::is_writable(self)
    }

    fn close_sending(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

/// A link with several connections.
pub(super) struct Bundle<P> {
    /// The connections by their number; `None` for a connection that is not open.
    streams: Vec<Option<Stream<P>>>,
    /// The number of connections that are used for sending.
    used: usize,
    /// The number of connections that this rank is opening.
    expected_connections: usize,
    /// Whether the sending direction has been closed.
    is_sending_closed: bool,
    sending: SendState,
    receiving: ReceiveState,
}

/// An open connection of a bundle.
struct Stream<P> {
    connection: P,
    token: Token,
    is_readable: bool,
    is_writable: bool,
    /// Whether an event has reported that the peer closed its sending direction.
    is_ended: bool,
    /// Why no more data can be read from the connection; `None` while data can be read.
    end: Option<ConnectionEnd>,
    /// The state of the send buffer at the last check.
    send_space: SendSpace,
    buffer: RecordBuffer,
    /// The record that is being read, or the next record to read. `None` until the header of this record has been
    /// read.
    head: Option<PendingRecord>,
}

/// Why a connection cannot be read any more.
enum ConnectionEnd {
    /// The peer closed the connection, and all data have been read.
    Ended,
    /// The connection failed, for this reason.
    Broken(String),
}

/// A record that is being read or will be read next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PendingRecord {
    number: u64,
    /// The number of bytes of the record that have not been read. `None` for the last record, which has no fixed
    /// length.
    left: Option<usize>,
}

impl<P: Connection> Bundle<P> {
    /// Creates a link with `stream_count` connections, of which only the first one is open.
    pub(super) fn new(first: P, token: Token, stream_count: u8) -> Self {
        let mut streams: Vec<_> = std::iter::repeat_with(|| None).take(stream_count.into()).collect();
        if let Some(entry) = streams.first_mut() {
            *entry = Some(Stream::new(first, token));
        }
        Self {
            streams,
            used: stream_count.into(),
            expected_connections: 0,
            is_sending_closed: false,
            sending: SendState::default(),
            receiving: ReceiveState::default(),
        }
    }

    /// Returns the number of connections of the link, including connections that are not open.
    pub(super) fn stream_count(&self) -> u8 {
        self.streams.len() as u8
    }

    /// Returns whether the link still needs a connection with the number `index`.
    pub(super) fn is_connection_missing(&self, index: u8) -> bool {
        !self.is_single_connection() && matches!(self.streams.get(usize::from(index)), Some(None))
    }

    /// Sets the number of connections that this rank is opening. While this rank is opening a connection, the link
    /// does not end, even if all open connections have ended.
    pub(super) fn expect_connections(&mut self, count: usize) {
        self.expected_connections = count;
    }

    /// Subtracts one from the number of connections that this rank is opening.
    pub(super) fn decrement_expected_connections(&mut self) {
        self.expected_connections = self.expected_connections.saturating_sub(1);
    }

    /// Adds `connection` as the extra connection with the number `index`. Closes `connection` if the link does not need it.
    pub(super) fn add_connection(&mut self, index: u8, connection: P, token: Token) {
        if !self.is_connection_missing(index) {
            return;
        }
        if self.is_sending_closed {
            close_sending_on(&connection);
        }
        if let Some(entry) = self.streams.get_mut(usize::from(index)) {
            *entry = Some(Stream::new(connection, token));
        }
    }

    /// Sends only on the first `used` connections.
    pub(super) fn use_streams(&mut self, used: usize) {
        self.used = used.clamp(1, self.streams.len().max(1));
    }

    /// Sends all further bytes on the first connection, as one last record. A link cannot change back to several
    /// connections.
    pub(super) fn use_single_connection(&mut self) {
        self.sending.is_last = true;
    }

    /// Returns the open connections.
    pub(super) fn connections(&self) -> impl Iterator<Item = &P> {
        self.streams.iter().flatten().map(|stream| &stream.connection)
    }

    /// Handles an event of a connection.
    pub(super) fn handle_event(&mut self, event: Event) {
        let mut streams = self.streams.iter_mut().flatten();
        if let Some(stream) = streams.find(|stream| stream.token == event.token) {
            stream.is_readable |= event.is_readable;
            stream.is_writable |= event.is_writable;
            stream.is_ended |= event.is_ended;
        }
    }

    /// Closes the sending direction of all connections.
    pub(super) fn close_sending(&mut self) {
        self.is_sending_closed = true;
        self.connections().for_each(close_sending_on);
    }

    /// Returns whether the sending and the receiving direction both use only the first connection from now on.
    fn is_single_connection(&self) -> bool {
        self.sending.is_in_last_record() && self.receiving.is_in_last_record
    }

    /// Closes the extra connections (all connections except the first) if neither direction uses them any more.
    fn close_unused_connections(&mut self) {
        if self.is_single_connection() {
            self.streams.iter_mut().skip(1).for_each(|entry| *entry = None);
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
            end: None,
            send_space: SendSpace::default(),
            buffer: RecordBuffer::default(),
            head: None,
        }
    }
}

fn close_sending_on<P: Connection>(connection: &P) {
    if let Err(error) = connection.close_sending() {
        log::debug!("the sending direction of a connection could not be closed: {error}");
    }
}
