//! The listening socket and the connections that have not proved themselves yet.
//!
//! Each connection gets a limited time to complete the [handshake](crate::wire::handshake), and the number of such connections
//! is limited. When one fails, it is logged and closed, and the job continues. The owner fetches accepted connections; it also
//! sends a link's verdict, because it may know of a better connection to the same peer.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token, Waker};

use super::handshake::{DialError, Identity, advance, nonce};
pub use super::poller::Event;
use super::poller::{FIRST_TOKEN, Poller};
use super::refusal_log::RefusalLog;
use crate::types::Rank;
use crate::wire::handshake::{Acceptor, Handshake as _, HandshakeError, Introduction, Purpose};

/// How long a connection may take to prove itself. Only time in which the listener is served counts.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How many connections may be in their handshake at a time. A further one takes the place of one that has sent nothing.
pub const PENDING_MAX: usize = 256;
/// While handshakes are in progress the listener is served at least this often. If it is served later, this rank was busy
/// with its own work, and no more than this counts against the connections.
const SERVED_MAX: Duration = Duration::from_secs(1);
/// How long to wait before accepting again when the operating system had no file descriptor left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How many refused ranks are remembered.
const REFUSED_MAX: usize = 8;
/// How many refused registrations stay open, so that the reply is not lost in a reset.
const REPLIED_MAX: usize = 64;
const LISTENER: Token = Token(0);

/// A connection whose other end has proved that it belongs to the job.
pub struct Accepted {
    /// The connection, registered under `token`.
    pub stream: TcpStream,
    /// Its token.
    pub token: Token,
    /// Which rank dialed, and for what.
    pub introduction: Introduction,
    /// What the other end still waits for.
    verdict: Vec<u8>,
}

impl Accepted {
    /// Sends the verdict. From then on the connection is the link for both ends.
    ///
    /// # Errors
    ///
    /// When the connection is gone.
    pub fn confirm(mut self) -> io::Result<TcpStream> {
        // A few bytes on a connection that has carried hardly any: they always fit its buffer.
        self.stream.write_all(&self.verdict)?;
        Ok(self.stream)
    }
}

/// A process of another job, or one that was started differently, which was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RefusedRank {
    /// The rank that it claims to be, if it could say so.
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

struct IncomingHandshake {
    stream: TcpStream,
    address: SocketAddr,
    handshake: Acceptor,
    /// How long it has taken, without the time in which the listener was not served.
    elapsed: Duration,
}

/// The reply to a rank that registers when the job already runs.
type LateReply = Box<dyn Fn(Rank) -> Vec<u8> + Send>;

/// The listening socket, its incoming handshakes, and the event queue that it shares with its owner's sockets.
pub struct Listener {
    /// Until its owner takes it.
    poller: Option<Poller>,
    registry: Registry,
    socket: TcpListener,
    identity: Identity,
    pending: BTreeMap<Token, IncomingHandshake>,
    accepted: VecDeque<Accepted>,
    /// There may be connections to accept. The kernel reports each of them only once.
    may_have_waiting: bool,
    /// Not before this moment, because the last attempt failed.
    accept_at: Duration,
    served_at: Duration,
    next_token: usize,
    log: RefusalLog,
    refused: VecDeque<RefusedRank>,
    late_reply: Option<LateReply>,
    /// Connections that have been sent the late reply.
    replied: VecDeque<TcpStream>,
}

impl Listener {
    /// The file descriptors of its sockets.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let pending = self.pending.values().map(|pending| pending.stream.as_raw_fd());
        let replied = self.replied.iter().map(AsRawFd::as_raw_fd);
        std::iter::once(self.socket.as_raw_fd()).chain(pending).chain(replied).collect()
    }

    /// A listener on a listening socket.
    ///
    /// # Errors
    ///
    /// When the operating system has no event queue or socket left.
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

    /// The address that the socket listens on.
    ///
    /// # Errors
    ///
    /// When the operating system does not tell.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Who this process is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Where the owner registers its own sockets, with tokens from [`Listener::token`].
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A token that is not in use.
    pub fn token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    /// A connection for `purpose` that has been accepted since the last call.
    pub fn take_accepted(&mut self, purpose: Purpose) -> Option<Accepted> {
        let index = self.accepted.iter().position(|accepted| accepted.introduction.purpose == purpose)?;
        self.accepted.remove(index)
    }

    /// The last ranks that were refused, each once.
    pub fn refused(&self) -> impl Iterator<Item = &RefusedRank> {
        self.refused.iter()
    }

    /// From now on each rank that wants to register gets this reply, and nothing else: the job runs, or cannot start.
    pub fn reply_to_late_ranks(&mut self, reply: impl Fn(Rank) -> Vec<u8> + Send + 'static) {
        self.late_reply = Some(Box::new(reply));
    }

    /// The event queue, for an owner that waits on it directly instead of calling [`Listener::wait`].
    pub fn take_poller(&mut self) -> Option<Poller> {
        self.poller.take()
    }

    /// Ends a [`Listener::wait`] from another thread; `None` when the event queue has been taken.
    pub fn waker(&self) -> Option<Arc<Waker>> {
        self.poller.as_ref().map(Poller::waker)
    }

    /// Waits for events until `until`, handles the listener's own, and appends the others to `others`.
    ///
    /// # Errors
    ///
    /// When the operating system refuses to wait, or the event queue has been taken.
    pub fn wait(
        &mut self,
        now: Duration,
        until: Option<Duration>,
        others: &mut Vec<Event>,
    ) -> io::Result<()> {
        let until = until.into_iter().chain(self.next_deadline()).min();
        let poller = self.poller.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let from = others.len();
        poller.wait(until.map(|until| until.saturating_sub(now)), others)?;
        let events = others.split_off(from);
        self.serve(now, events, others);
        Ok(())
    }

    /// When it has to be served again, even if no event comes.
    pub fn next_deadline(&self) -> Option<Duration> {
        let longest = self.pending.values().map(|pending| pending.elapsed).max();
        let handshakes =
            longest.map(|longest| self.served_at + HANDSHAKE_TIMEOUT.saturating_sub(longest).min(SERVED_MAX));
        let accept = self.may_have_waiting.then_some(self.accept_at);
        handshakes.into_iter().chain(accept).chain(self.log.deadline()).min()
    }

    /// Handles the listener's own events and appends the others to `others`.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>, others: &mut Vec<Event>) {
        self.log.tick(now);
        for event in events {
            if event.token == LISTENER {
                self.may_have_waiting = true;
            } else if self.pending.contains_key(&event.token) {
                self.continue_handshake(now, event.token);
            } else {
                others.push(event);
            }
        }
        self.expire(now);
        self.accept(now);
    }

    fn accept(&mut self, now: Duration) {
        while self.may_have_waiting && now >= self.accept_at {
            match self.socket.accept() {
                Ok((stream, address)) => self.begin_handshake(now, stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.may_have_waiting = false,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    // Such as no free file descriptor. The kernel reports waiting connections only once, so try again later.
                    self.accept_at = now + ACCEPT_RETRY;
                    self.log
                        .note(now, format_args!("a connection could not be accepted, trying again: {error}"));
                }
            }
        }
    }

    fn begin_handshake(&mut self, now: Duration, mut stream: TcpStream, address: SocketAddr) {
        if self.pending.len() >= PENDING_MAX {
            self.evict(now);
        }
        let token = self.token();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.registry.register(&mut stream, token, interest) {
            self.log.note(now, format_args!("refused the connection from {address}: {error}"));
            return;
        }
        let Identity { secret, job, rank } = self.identity.clone();
        let handshake = Acceptor::new(secret, job, rank, nonce());
        self.pending.insert(token, IncomingHandshake { stream, address, handshake, elapsed: Duration::ZERO });
        self.continue_handshake(now, token);
    }

    /// Closes the handshake that is least likely to be a rank's: one that has sent nothing, from the address with the most
    /// handshakes, and of these the oldest. A rank sends its hello as soon as it is connected.
    fn evict(&mut self, now: Duration) {
        let mut by_address: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for pending in self.pending.values() {
            *by_address.entry(pending.address.ip()).or_default() += 1;
        }
        let count = |pending: &IncomingHandshake| by_address.get(&pending.address.ip()).copied();
        let key = |token: Token, pending: &IncomingHandshake| {
            (!pending.handshake.is_silent(), Reverse(count(pending)), token)
        };
        let victim = self.pending.iter().map(|(&token, pending)| key(token, pending)).min();
        if let Some((_, _, token)) = victim
            && let Some(pending) = self.pending.remove(&token)
        {
            let address = pending.address;
            self.log.note(
                now,
                format_args!("closed the connection from {address}: too many wait for their handshake"),
            );
        }
    }

    /// Moves a handshake as far as it can go now.
    fn continue_handshake(&mut self, now: Duration, token: Token) {
        let Some(mut pending) = self.pending.remove(&token) else { return };
        let address = pending.address;
        match advance(&mut pending.stream, &mut pending.handshake) {
            Ok(true) => self.finish_handshake(now, pending, token),
            Ok(false) => {
                self.pending.insert(token, pending);
            }
            // The dialer has settled on another connection to this rank.
            Err(DialError::Io(error)) if pending.handshake.is_link() => {
                log::debug!("{address} closed its connection: {error}");
            }
            Err(DialError::Io(error)) => {
                self.log.note(now, format_args!("refused the connection from {address}: {error}"));
            }
            Err(DialError::Handshake(error)) => {
                self.log.note(now, format_args!("refused the connection from {address}: {error}"));
                self.remember_refused(pending.handshake.claimed_rank(), address.ip(), &error);
            }
        }
    }

    fn remember_refused(&mut self, claimed: Option<Rank>, host: IpAddr, error: &HandshakeError) {
        let reason = match error {
            HandshakeError::Secret => "its secret is another one".to_owned(),
            HandshakeError::Unwelcome(refusal) => refusal.to_string(),
            HandshakeError::Version { theirs } => format!("it speaks protocol version {theirs}"),
            // Strangers, which are no ranks.
            _ => return,
        };
        let refused = RefusedRank { claimed, host, reason };
        if !self.refused.contains(&refused) {
            self.refused.push_back(refused);
            self.refused.truncate(REFUSED_MAX);
        }
    }

    fn finish_handshake(&mut self, now: Duration, pending: IncomingHandshake, token: Token) {
        let IncomingHandshake { mut stream, address, mut handshake, .. } = pending;
        let Some(introduction) = handshake.introduction() else { return };
        let mut verdict = handshake.take_output();
        if introduction.purpose == Purpose::Rendezvous {
            let late = self.late_reply.as_ref().map(|reply| reply(introduction.from));
            verdict.extend_from_slice(late.as_deref().unwrap_or_default());
            if let Err(error) = stream.write_all(&std::mem::take(&mut verdict)) {
                self.log.note(now, format_args!("refused the connection from {address}: {error}"));
                return;
            }
            if late.is_some() {
                let rank = introduction.from;
                self.log.note(now, format_args!("refused rank {rank} at {address}: the job already runs"));
                self.replied.truncate(REPLIED_MAX - 1);
                self.replied.push_front(stream);
                return;
            }
        }
        self.accepted.push_back(Accepted { stream, token, introduction, verdict });
    }

    /// Adds up the time that handshakes have taken, and closes those that take too long.
    fn expire(&mut self, now: Duration) {
        let elapsed = now.saturating_sub(self.served_at).min(SERVED_MAX);
        self.served_at = now;
        let Self { pending, log, .. } = self;
        pending.retain(|_, pending| {
            pending.elapsed += elapsed;
            let keep = pending.elapsed < HANDSHAKE_TIMEOUT;
            if !keep {
                let (address, seconds) = (pending.address, HANDSHAKE_TIMEOUT.as_secs());
                log.note(
                    now,
                    format_args!("closed the connection from {address}: no handshake within {seconds} s"),
                );
            }
            keep
        });
    }
}
