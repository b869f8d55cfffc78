//! The listening socket, which accepts the connections of other processes, and the event queue of a process's sockets.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};
use socket2::{Domain, Protocol, Socket, Type};

use super::handshake::Identity;
use super::incoming::{IncomingConnections, PENDING_HANDSHAKES_MAX};
use super::poller::{Event, FIRST_TOKEN, Poller};

/// The maximum number of connections that one call of [`Listener::serve`] accepts, so that it also serves the others. It is below
/// [`PENDING_HANDSHAKES_MAX`], so that a new connection stays open until its first message has been read.
const ACCEPTS_PER_SERVE_MAX: usize = 64;
const _: () = assert!(ACCEPTS_PER_SERVE_MAX * 2 <= PENDING_HANDSHAKES_MAX);
/// The pause after a failed attempt to accept a connection, for example because there was no free file descriptor.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// The number of established connections that the kernel keeps until the process accepts them, unless `somaxconn` is lower. If
/// the queue is full, the kernel does not answer, and the dialer may time out.
const ACCEPT_BACKLOG: i32 = 4096;
const LISTENER: Token = Token(0);

/// Listens on `address`, with the options that `set_options` sets. Returns an error if the system refuses one of them.
pub fn listen(
    address: SocketAddr,
    set_options: impl FnOnce(&Socket) -> io::Result<()>,
) -> io::Result<StdListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Without this option, closed connections of an earlier job block the port.
    socket.set_reuse_address(true)?;
    set_options(&socket)?;
    socket.bind(&address.into())?;
    socket.listen(ACCEPT_BACKLOG)?;
    Ok(socket.into())
}

/// The listening socket, the incoming handshakes, and an event queue, also for the sockets of the owner.
pub struct Listener {
    /// The event queue; `None` if the owner has taken it, to wait on it instead of calling [`Listener::wait`].
    pub poller: Option<Poller>,
    /// The registry in which the owner registers its sockets, with tokens from [`Listener::new_token`].
    pub registry: Registry,
    /// `None` if no process can connect.
    socket: Option<TcpListener>,
    /// Whether there may be connections in the kernel, which reports each of them only once.
    may_have_waiting: bool,
    accept_at: Duration,
    next_token: usize,
    /// The accepted connections. The owner of the listener takes them from here.
    pub incoming: IncomingConnections<TcpStream>,
}

impl Listener {
    /// Returns the file descriptors of the listening socket and of the connections in [`Listener::incoming`].
    pub fn descriptors(&self) -> Vec<RawFd> {
        let incoming = self.incoming.streams().map(AsRawFd::as_raw_fd);
        self.socket.iter().map(AsRawFd::as_raw_fd).chain(incoming).collect()
    }

    /// Creates a listener. Returns an error if the operating system refuses an event queue or a socket option.
    pub fn new(listener: StdListener, identity: Identity) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let mut socket = TcpListener::from_std(listener);
        let without_port = Self::without_port(identity)?;
        without_port.registry.register(&mut socket, LISTENER, Interest::READABLE)?;
        Ok(Self { socket: Some(socket), ..without_port })
    }

    /// Creates a listener to which no process connects. Returns an error if the operating system refuses an event queue.
    pub fn without_port(identity: Identity) -> io::Result<Self> {
        let poller = Poller::new()?;
        let registry = poller.registry()?;
        Ok(Self {
            poller: Some(poller),
            registry,
            socket: None,
            may_have_waiting: false,
            accept_at: Duration::ZERO,
            next_token: FIRST_TOKEN,
            incoming: IncomingConnections::new(identity),
        })
    }

    pub fn has_port(&self) -> bool {
        self.socket.is_some()
    }

    /// Returns the address of the listening socket, or an error if there is none.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?.local_addr()
    }

    pub fn new_token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    /// Waits for events, at most until the time `until`. Handles the events of the listener's sockets, and returns all other
    /// events. Returns an error if the system call fails, or the event queue has been taken.
    pub fn wait(&mut self, now: Duration, until: Option<Duration>) -> io::Result<Vec<Event>> {
        let until = until.into_iter().chain(self.next_deadline()).min();
        let poller = self.poller.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let mut events = Vec::new();
        poller.wait(until.map(|until| until.saturating_sub(now)), &mut events)?;
        Ok(self.serve(now, events))
    }

    /// Returns the time at which [`Listener::serve`] must be called again, even if there is no event.
    pub fn next_deadline(&self) -> Option<Duration> {
        let accept = self.may_have_waiting.then_some(self.accept_at);
        self.incoming.next_deadline().into_iter().chain(accept).min()
    }

    /// Handles the events of the listener's sockets, and returns all other events.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>) -> Vec<Event> {
        let mut other_events = Vec::new();
        for event in events {
            if event.token == LISTENER {
                self.may_have_waiting = true;
            } else if self.incoming.is_pending(event.token) {
                self.incoming.continue_handshake(now, event.token);
            } else {
                other_events.push(event);
            }
        }
        self.incoming.expire(now);
        self.accept(now);
        other_events
    }

    fn accept(&mut self, now: Duration) {
        use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        for _ in 0..ACCEPTS_PER_SERVE_MAX {
            let Some(socket) = &self.socket else { return };
            if !self.may_have_waiting || now < self.accept_at {
                return;
            }
            match socket.accept() {
                Ok((stream, address)) => self.begin_handshake(now, stream, address),
                Err(error) if error.kind() == WouldBlock => self.may_have_waiting = false,
                Err(error) if matches!(error.kind(), Interrupted | ConnectionAborted) => {}
                Err(error) => {
                    // For example, no file descriptor is free. The kernel reports waiting connections only once, so try again.
                    self.accept_at = now + ACCEPT_RETRY_DELAY;
                    let line = format_args!("a connection could not be accepted, trying again: {error}");
                    self.incoming.log.log_or_count(now, line);
                }
            }
        }
    }

    fn begin_handshake(&mut self, now: Duration, mut stream: TcpStream, address: SocketAddr) {
        let token = self.new_token();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.registry.register(&mut stream, token, interest) {
            let line = format_args!("refused the connection from {address}: {error}");
            return self.incoming.log.log_or_count(now, line);
        }
        self.incoming.add(now, token, stream, address, rand::random());
    }
}
