//! The listening socket and the connections whose handshake is not complete.
//!
//! A connection must complete the [handshake](crate::wire::handshake) within [`HANDSHAKE_TIMEOUT`], and at most
//! [`PENDING_HANDSHAKES_MAX`] handshakes are in progress. If a handshake fails, the listener logs the failure and
//! closes the connection, and the job continues. The owner of the listener takes a connection with
//! [`Listener::take_accepted_connection`]. The owner then accepts the connection with [`AcceptedConnection::confirm`], or
//! closes the connection because it prefers another connection to the same peer.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token, Waker};
use socket2::{Domain, Protocol, Socket, Type};

use super::eviction::EvictionOrder;
use super::handshake::{DialError, Identity, advance_handshake, random_nonce};
pub use super::poller::Event;
use super::poller::{FIRST_TOKEN, Poller};
use super::refusal_log::RefusalLog;
use crate::types::Rank;
use crate::wire::handshake::{Acceptor, ConnectionPurpose, Handshake as _, HandshakeError, Introduction};

/// The time-out of a handshake. If this rank calls [`Listener::serve`] late, at most 1 s of the time since the
/// previous call counts toward the time-out.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of handshakes in progress. If a further connection arrives, the listener closes the connection
/// that is least likely to belong to a rank.
pub const PENDING_HANDSHAKES_MAX: usize = 256;
/// While handshakes are in progress, a rank that is not busy calls [`Listener::serve`] again after at most this time.
/// If the rank calls later, for example after 60 s, only 1 s counts toward the time-out of the handshakes.
const SERVE_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// The maximum number of connections that one call of [`Listener::serve`] accepts. Without this limit, programs that
/// connect again and again could prevent the listener from serving its other connections. The limit is lower than
/// [`PENDING_HANDSHAKES_MAX`], so that a new connection stays open until the listener has read the connection's first
/// message.
const ACCEPTS_PER_SERVE_MAX: usize = 64;
const _: () = assert!(ACCEPTS_PER_SERVE_MAX * 2 <= PENDING_HANDSHAKES_MAX);
/// The pause after a failed attempt to accept a connection, for example because there was no free file descriptor.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// The maximum number of refused processes that the error message about missing ranks lists.
const REFUSED_RANKS_MAX: usize = 8;
/// The maximum number of connections that stay open after the reply to a late rank. The listener does not close these
/// connections at once, because a reset could discard the reply.
const LATE_REPLY_CONNECTIONS_MAX: usize = 64;
/// The number of established connections that the kernel keeps until the process accepts them. The setting
/// `somaxconn` may lower this number. If the queue is full, the kernel does not answer, and the dialer waits and may
/// time out.
const ACCEPT_BACKLOG: i32 = 4096;
/// The token of the listening socket.
const LISTENER: Token = Token(0);

/// Listens on `address`. `set_options` sets the options of the socket.
///
/// # Errors
///
/// If the operating system refuses the address or an option.
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

/// A connection whose other end has proved that it belongs to the job.
pub struct AcceptedConnection {
    /// The connection, which is registered under `token`.
    pub stream: TcpStream,
    /// The token of the connection.
    pub token: Token,
    /// Which rank dialed, and for which purpose.
    pub introduction: Introduction,
    /// The last message of the handshake, for which the dialer waits.
    verdict: Vec<u8>,
}

impl AcceptedConnection {
    /// Sends the verdict, which accepts the connection. After that, both ends use the connection for the link.
    ///
    /// # Errors
    ///
    /// If the connection is lost.
    pub fn confirm(mut self) -> io::Result<TcpStream> {
        // The verdict fits into the send buffer, because the connection has carried only the handshake.
        self.stream.write_all(&self.verdict)?;
        Ok(self.stream)
    }
}

/// A process that the listener refused, because the process belongs to another job or has different options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RefusedRank {
    /// The rank that the process claims to be, or `None` if the process has not sent a rank.
    claimed: Option<Rank>,
    host: IpAddr,
    reason: String,
}

impl fmt::Display for RefusedRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claimed, host, reason } = self;
        match claimed {
            Some(rank) => write!(f, "a process at {host} that says it is rank {rank} was refused: {reason}"),
            None => write!(f, "a process at {host} was refused: {reason}"),
        }
    }
}

/// A connection that another process has opened, and whose handshake is in progress.
struct IncomingHandshake {
    stream: TcpStream,
    address: SocketAddr,
    handshake: Acceptor,
    /// The time that counts toward the time-out: at most [`SERVE_INTERVAL_MAX`] for each interval between two calls
    /// of [`Listener::serve`].
    elapsed: Duration,
}

/// Creates the reply to a rank that connects after the job has started, or after the start of the job has failed.
type LateReplyFunction = Box<dyn Fn(Rank) -> Vec<u8> + Send>;

/// The listening socket, the incoming handshakes, and an event queue. The owner of the listener also registers its
/// own sockets with this queue.
pub struct Listener {
    /// The event queue; `None` after the owner has taken it.
    poller: Option<Poller>,
    registry: Registry,
    socket: TcpListener,
    identity: Identity,
    /// The connections whose handshake is in progress.
    pending: BTreeMap<Token, IncomingHandshake>,
    /// The order in which pending connections are closed if there are too many.
    eviction: EvictionOrder,
    /// The connections whose handshake is complete, and which the owner has not taken yet.
    accepted: VecDeque<AcceptedConnection>,
    /// Whether there may be connections in the kernel that this listener has not accepted. The kernel reports each
    /// such connection only once.
    may_have_waiting: bool,
    /// The earliest time of the next attempt to accept a connection. A failed attempt sets this time to
    /// [`ACCEPT_RETRY_DELAY`] after the attempt.
    accept_at: Duration,
    /// The time of the last call of [`Listener::serve`].
    served_at: Duration,
    next_token: usize,
    log: RefusalLog,
    /// The first refused processes, at most [`REFUSED_RANKS_MAX`].
    refused: VecDeque<RefusedRank>,
    late_reply: Option<LateReplyFunction>,
    /// The connections on which the reply to a late rank has been sent.
    replied: VecDeque<TcpStream>,
}

impl Listener {
    /// Returns the file descriptors of the listening socket, of all connections whose handshake is in progress, of the
    /// accepted connections that wait for the owner, and of the connections on which the reply to a late rank has been
    /// sent.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let pending = self.pending.values().map(|pending| pending.stream.as_raw_fd());
        let accepted = self.accepted.iter().map(|accepted| accepted.stream.as_raw_fd());
        let replied = self.replied.iter().map(AsRawFd::as_raw_fd);
        std::iter::once(self.socket.as_raw_fd()).chain(pending).chain(accepted).chain(replied).collect()
    }

    /// Creates a listener from a listening socket.
    ///
    /// # Errors
    ///
    /// If the operating system refuses an event queue or a socket option.
    pub fn new(listener: StdListener, identity: Identity) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let mut socket = TcpListener::from_std(listener);
        let poller = Poller::new()?;
        let registry = poller.registry()?;
        registry.register(&mut socket, LISTENER, Interest::READABLE)?;
        Ok(Self {
            poller: Some(poller),
            registry,
            socket,
            identity,
            pending: BTreeMap::new(),
            eviction: EvictionOrder::default(),
            accepted: VecDeque::new(),
            may_have_waiting: false,
            accept_at: Duration::ZERO,
            served_at: Duration::ZERO,
            next_token: FIRST_TOKEN,
            log: RefusalLog::default(),
            refused: VecDeque::new(),
            late_reply: None,
            replied: VecDeque::new(),
        })
    }

    /// Returns the address of the listening socket.
    ///
    /// # Errors
    ///
    /// If the operating system does not return the address.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the secret, the job and the rank of this process.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the registry in which the owner registers its sockets, with tokens from [`Listener::new_token`].
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Returns a token that is not in use.
    pub fn new_token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    /// Removes and returns a connection for `purpose` whose dialer has proved that it belongs to the job.
    pub fn take_accepted_connection(&mut self, purpose: ConnectionPurpose) -> Option<AcceptedConnection> {
        let index = self.accepted.iter().position(|accepted| accepted.introduction.purpose == purpose)?;
        self.accepted.remove(index)
    }

    /// Returns the first refused processes, each process once, at most `REFUSED_RANKS_MAX` processes.
    pub fn refused_ranks(&self) -> impl Iterator<Item = &RefusedRank> {
        self.refused.iter()
    }

    /// From now on, sends the bytes that `reply(rank)` returns to each rank that connects to the rendezvous. Call this
    /// method when the job has started, or when its start has failed.
    pub fn reply_to_late_ranks(&mut self, reply: impl Fn(Rank) -> Vec<u8> + Send + 'static) {
        self.late_reply = Some(Box::new(reply));
    }

    /// Removes and returns the event queue, for an owner that waits on the queue itself instead of calling [`Listener::wait`].
    pub fn take_poller(&mut self) -> Option<Poller> {
        self.poller.take()
    }

    /// Returns the waker with which another thread ends [`Listener::wait`]. Returns `None` after a call of
    /// [`Listener::take_poller`].
    pub fn waker(&self) -> Option<Arc<Waker>> {
        self.poller.as_ref().map(Poller::waker)
    }

    /// Waits for events, at most until the time `until`. Handles the events of the listener's sockets, and appends
    /// all other events to `other_events`.
    ///
    /// # Errors
    ///
    /// If the system call fails, or the event queue has been taken.
    pub fn wait(
        &mut self,
        now: Duration,
        until: Option<Duration>,
        other_events: &mut Vec<Event>,
    ) -> io::Result<()> {
        let until = until.into_iter().chain(self.next_deadline()).min();
        let poller = self.poller.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let first_new = other_events.len();
        poller.wait(until.map(|until| until.saturating_sub(now)), other_events)?;
        let events = other_events.split_off(first_new);
        self.serve(now, events, other_events);
        Ok(())
    }

    /// Returns the time at which [`Listener::serve`] must be called again, even if there is no event.
    pub fn next_deadline(&self) -> Option<Duration> {
        let longest = self.pending.values().map(|pending| pending.elapsed).max();
        let handshakes = longest.map(|longest| {
            self.served_at + HANDSHAKE_TIMEOUT.saturating_sub(longest).min(SERVE_INTERVAL_MAX)
        });
        let accept = self.may_have_waiting.then_some(self.accept_at);
        handshakes.into_iter().chain(accept).chain(self.log.deadline()).min()
    }

    /// Handles the events of the listener's sockets, and appends all other events to `other_events`.
    pub fn serve(
        &mut self,
        now: Duration,
        events: impl IntoIterator<Item = Event>,
        other_events: &mut Vec<Event>,
    ) {
        self.log.end_interval_if_over(now);
        for event in events {
            if event.token == LISTENER {
                self.may_have_waiting = true;
            } else if self.pending.contains_key(&event.token) {
                self.continue_handshake(now, event.token);
            } else {
                other_events.push(event);
            }
        }
        self.expire_handshakes(now);
        self.accept(now);
    }

    fn accept(&mut self, now: Duration) {
        for _ in 0..ACCEPTS_PER_SERVE_MAX {
            if !self.may_have_waiting || now < self.accept_at {
                return;
            }
            match self.socket.accept() {
                Ok((stream, address)) => self.begin_handshake(now, stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.may_have_waiting = false,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    // An attempt to accept fails, for example, if there is no free file descriptor. The kernel
                    // reports waiting connections only once, so try again later.
                    self.accept_at = now + ACCEPT_RETRY_DELAY;
                    self.log.log_or_count(
                        now,
                        format_args!("a connection could not be accepted, trying again: {error}"),
                    );
                }
            }
        }
    }

    fn begin_handshake(&mut self, now: Duration, mut stream: TcpStream, address: SocketAddr) {
        if self.pending.len() >= PENDING_HANDSHAKES_MAX {
            self.evict_connection(now);
        }
        let token = self.new_token();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.registry.register(&mut stream, token, interest) {
            self.log.log_or_count(now, format_args!("refused the connection from {address}: {error}"));
            return;
        }
        let Identity { secret, job, rank } = self.identity.clone();
        let handshake = Acceptor::new(secret, job, rank, random_nonce());
        self.pending.insert(token, IncomingHandshake { stream, address, handshake, elapsed: Duration::ZERO });
        self.eviction.add(token, address.ip());
        self.continue_handshake(now, token);
    }

    /// Closes the pending connection that is least likely to belong to a rank.
    fn evict_connection(&mut self, now: Duration) {
        let Some(token) = self.eviction.first() else { return };
        let Some(IncomingHandshake { address, .. }) = self.remove_pending(token) else { return };
        self.log.log_or_count(
            now,
            format_args!("closed the connection from {address}: too many connections are in their handshake"),
        );
    }

    fn remove_pending(&mut self, token: Token) -> Option<IncomingHandshake> {
        let pending = self.pending.remove(&token)?;
        self.eviction.remove(token, pending.address.ip());
        Some(pending)
    }

    /// Advances a handshake as far as possible without blocking.
    fn continue_handshake(&mut self, now: Duration, token: Token) {
        let Some(pending) = self.pending.get_mut(&token) else { return };
        let address = pending.address;
        let progress = advance_handshake(&mut pending.stream, &mut pending.handshake);
        if let Ok(false) = progress {
            if !pending.handshake.has_received_nothing() {
                self.eviction.mark_as_active(token, address.ip());
            }
            return;
        }
        let Some(pending) = self.remove_pending(token) else { return };
        match progress {
            Ok(_) => self.finish_handshake(now, pending, token),
            // This is usually no error: the dialer has chosen another connection to this rank.
            Err(DialError::Io(error)) if pending.handshake.requests_link() => {
                log::debug!("{address} closed its connection: {error}");
            }
            Err(DialError::Io(error)) => {
                self.log.log_or_count(now, format_args!("refused the connection from {address}: {error}"));
            }
            Err(DialError::Handshake(error)) => {
                self.log.log_or_count(now, format_args!("refused the connection from {address}: {error}"));
                self.remember_refused(pending.handshake.claimed_rank(), address.ip(), &error);
            }
        }
    }

    fn remember_refused(&mut self, claimed: Option<Rank>, host: IpAddr, error: &HandshakeError) {
        let reason = match error {
            HandshakeError::Secret => "its secret differs".to_owned(),
            HandshakeError::RefusedPeer(refusal) => refusal.to_string(),
            HandshakeError::Version { theirs } => format!("it speaks protocol version {theirs}"),
            // The process is another program, for example a port scanner.
            _ => return,
        };
        let refused = RefusedRank { claimed, host, reason };
        if !self.refused.contains(&refused) {
            self.refused.push_back(refused);
            self.refused.truncate(REFUSED_RANKS_MAX);
        }
    }

    fn finish_handshake(&mut self, now: Duration, pending: IncomingHandshake, token: Token) {
        let IncomingHandshake { mut stream, address, mut handshake, .. } = pending;
        let Some(introduction) = handshake.introduction() else { return };
        let mut verdict = handshake.take_output();
        if introduction.purpose == ConnectionPurpose::Rendezvous {
            let late = self.late_reply.as_ref().map(|reply| reply(introduction.from));
            verdict.extend_from_slice(late.as_deref().unwrap_or_default());
            if let Err(error) = stream.write_all(&std::mem::take(&mut verdict)) {
                self.log.log_or_count(now, format_args!("refused the connection from {address}: {error}"));
                return;
            }
            if late.is_some() {
                let rank = introduction.from;
                self.log.log_or_count(
                    now,
                    format_args!(
                        "refused rank {rank} at {address}: the job already runs, or its start has failed"
                    ),
                );
                self.replied.truncate(LATE_REPLY_CONNECTIONS_MAX - 1);
                self.replied.push_front(stream);
                return;
            }
        }
        self.accepted.push_back(AcceptedConnection { stream, token, introduction, verdict });
    }

    /// Updates the elapsed time of all handshakes, and closes the connections that exceed [`HANDSHAKE_TIMEOUT`].
    fn expire_handshakes(&mut self, now: Duration) {
        let elapsed = now.saturating_sub(self.served_at).min(SERVE_INTERVAL_MAX);
        self.served_at = now;
        let Self { pending, eviction, log, .. } = self;
        pending.retain(|&token, pending| {
            pending.elapsed += elapsed;
            let is_in_time = pending.elapsed < HANDSHAKE_TIMEOUT;
            if !is_in_time {
                eviction.remove(token, pending.address.ip());
                let (address, seconds) = (pending.address, HANDSHAKE_TIMEOUT.as_secs());
                log.log_or_count(
                    now,
                    format_args!("closed the connection from {address}: no handshake within {seconds} s"),
                );
            }
            is_in_time
        });
    }
}
