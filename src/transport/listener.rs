//! The listening socket and the connections that have not proved themselves yet.
//!
//! Whoever connects gets a bounded time and a bounded place to complete the [handshake](crate::wire::handshake); what
//! fails is logged and closed, and the job goes on. Accepted connections wait here until their owner fetches them; a link's
//! verdict is left to its owner, who may know of a better connection to the same peer.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};

pub use super::poller::Event;
use super::poller::{FIRST_TOKEN, Poller};
use crate::types::Rank;
use crate::wire::Secret;
use crate::wire::handshake::{
    Acceptor, Dialer, Handshake, HandshakeError, Introduction, Job, NONCE_BYTES, Purpose,
};

/// How long a connection may take to prove itself, counted only while somebody attends to it.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How many connections may be proving themselves at once; further ones wait to be accepted, in the kernel's bounded backlog.
pub const PENDING_MAX: usize = 256;
/// While connections prove themselves the listener is served at least this often. Whoever comes back after a longer time was
/// away, computing perhaps, and the others must not pay for that: no more than this counts.
const ATTENDED_MAX: Duration = Duration::from_secs(1);
const LISTENER: Token = Token(0);

/// A connection whose other end has proved that it belongs to the job.
pub struct Accepted {
    /// The connection, registered under `token`.
    pub stream: TcpStream,
    /// Its token.
    pub token: Token,
    /// Who is there and what for.
    pub introduction: Introduction,
    /// What its other end waits for, unless it has been sent.
    verdict: Vec<u8>,
}

impl Accepted {
    /// Tells the other end that it is welcome: from then on the connection is both ends' link.
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

/// What an outgoing handshake has come to.
pub enum DialProgress {
    /// Nobody has taken the connection yet.
    Connecting,
    /// There is a connection, and its handshake goes on.
    Pending,
    /// The link may be used.
    Ready,
    /// The other end closed the connection before it could know who we are.
    Closed(io::Error),
    /// It failed.
    Failed(DialError),
}

/// Why a connection that we opened did not come to be.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The network or the other end refused.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The other end is not who we look for.
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
}

/// Who we are and what we prove.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The job's secret.
    pub secret: Secret,
    /// The job.
    pub job: Job,
    /// Our rank; `None` for a launcher's rendezvous.
    pub rank: Option<Rank>,
}

struct IncomingHandshake {
    stream: TcpStream,
    address: SocketAddr,
    handshake: Acceptor,
    /// For how long somebody has attended to it.
    attended: Duration,
}

/// The listening socket, its handshakes under way, and the event queue that it shares with its owner's sockets.
pub struct Listener {
    /// Until its owner takes it.
    poller: Option<Poller>,
    registry: Registry,
    socket: TcpListener,
    identity: Identity,
    pending: BTreeMap<Token, IncomingHandshake>,
    accepted: VecDeque<Accepted>,
    /// There may be connections to accept: an event is told only once.
    may_have_waiting: bool,
    served_at: Duration,
    next_token: usize,
}

impl Listener {
    /// The sockets that it has, by their numbers.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let pending = self.pending.values().map(|pending| pending.stream.as_raw_fd());
        std::iter::once(self.socket.as_raw_fd()).chain(pending).collect()
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
            served_at: Duration::ZERO,
            next_token: FIRST_TOKEN,
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

    /// Who we are.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Where the owner registers its own sockets, with tokens from [`Listener::token`].
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A token that nobody has.
    pub fn token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    /// A connection that has been accepted for `purpose` since the last call.
    pub fn take_accepted(&mut self, purpose: Purpose) -> Option<Accepted> {
        let index = self.accepted.iter().position(|accepted| accepted.introduction.purpose == purpose)?;
        self.accepted.remove(index)
    }

    /// The event queue, for an owner that waits by itself; [`Listener::wait`] is then over.
    pub fn take_poller(&mut self) -> Option<Poller> {
        self.poller.take()
    }

    /// Waits for events until `until`, serves the listener's own, and appends the others to `others`.
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

    /// When it wants to be served again, whatever happens.
    pub fn next_deadline(&self) -> Option<Duration> {
        let longest = self.pending.values().map(|pending| pending.attended).max()?;
        Some(self.served_at + HANDSHAKE_TIMEOUT.saturating_sub(longest).min(ATTENDED_MAX))
    }

    /// Serves the listener's own events and appends the others to `others`.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>, others: &mut Vec<Event>) {
        for event in events {
            if event.token == LISTENER {
                self.may_have_waiting = true;
            } else if self.pending.contains_key(&event.token) {
                self.continue_handshake(event.token);
            } else {
                others.push(event);
            }
        }
        self.expire(now);
        self.accept();
    }

    fn accept(&mut self) {
        while self.may_have_waiting && self.pending.len() < PENDING_MAX {
            match self.socket.accept() {
                Ok((stream, address)) => self.begin_handshake(stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.may_have_waiting = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Out of file descriptors, say: those who wait in the backlog are served at the next event.
                    log::warn!("a connection could not be accepted: {error}");
                    self.may_have_waiting = false;
                }
            }
        }
    }

    fn begin_handshake(&mut self, mut stream: TcpStream, address: SocketAddr) {
        let token = self.token();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.registry.register(&mut stream, token, interest) {
            log::warn!("{address} turned away: {error}");
            return;
        }
        let Identity { secret, job, rank } = self.identity.clone();
        let handshake = Acceptor::new(secret, job, rank, nonce());
        self.pending
            .insert(token, IncomingHandshake { stream, address, handshake, attended: Duration::ZERO });
        self.continue_handshake(token);
    }

    /// Lets a handshake go as far as it can.
    fn continue_handshake(&mut self, token: Token) {
        let Some(mut pending) = self.pending.remove(&token) else { return };
        match advance(&mut pending.stream, &mut pending.handshake) {
            Ok(true) => self.finish_handshake(pending, token),
            Ok(false) => {
                self.pending.insert(token, pending);
            }
            // It has found another connection to us meanwhile.
            Err(DialError::Io(error)) if pending.handshake.claims_link() => {
                log::debug!("{} gave its connection up: {error}", pending.address);
            }
            Err(error) => log::warn!("{} turned away: {error}", pending.address),
        }
    }

    fn finish_handshake(&mut self, pending: IncomingHandshake, token: Token) {
        let IncomingHandshake { mut stream, address, mut handshake, .. } = pending;
        let Some(introduction) = handshake.introduction() else { return };
        let mut verdict = handshake.take_output();
        if introduction.purpose == Purpose::Rendezvous
            && let Err(error) = stream.write_all(&std::mem::take(&mut verdict))
        {
            log::warn!("{address} turned away: {error}");
            return;
        }
        self.accepted.push_back(Accepted { stream, token, introduction, verdict });
    }

    /// Counts the time that connections have had somebody to talk to, and closes those that have had enough of it.
    fn expire(&mut self, now: Duration) {
        let attended = now.saturating_sub(self.served_at).min(ATTENDED_MAX);
        self.served_at = now;
        self.pending.retain(|_, pending| {
            pending.attended += attended;
            let keep = pending.attended < HANDSHAKE_TIMEOUT;
            if !keep {
                let seconds = HANDSHAKE_TIMEOUT.as_secs();
                log::warn!("{} turned away: it did not introduce itself within {seconds} s", pending.address);
            }
            keep
        });
    }
}

/// An outgoing connection's handshake.
pub struct OutgoingHandshake {
    handshake: Dialer,
}

impl OutgoingHandshake {
    /// Introduces us as `from` to `to`.
    pub fn new(identity: &Identity, introduction: Introduction) -> Self {
        Self { handshake: Dialer::new(identity.secret.clone(), &identity.job, introduction, nonce()) }
    }

    /// Goes as far as the connection allows.
    pub fn advance(&mut self, stream: &mut TcpStream) -> DialProgress {
        if let Ok(Some(error)) = stream.take_error() {
            return DialProgress::Failed(error.into());
        }
        match stream.peer_addr() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return DialProgress::Connecting,
            Err(error) => return DialProgress::Failed(error.into()),
        }
        match advance(stream, &mut self.handshake) {
            Ok(true) => DialProgress::Ready,
            Ok(false) => DialProgress::Pending,
            Err(DialError::Io(error)) if !self.handshake.has_proved() && is_end(&error) => {
                DialProgress::Closed(error)
            }
            Err(error) => DialProgress::Failed(error),
        }
    }
}

/// Whether the other end has closed the connection.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Moves a handshake's bytes until it is over (true) or would have to wait (false). Its messages are smaller than any
/// socket's buffer and follow each other strictly, so a write that would block is a failure, not something to wait for.
/// Words that end it well, an acceptor's verdict, are left to the caller.
pub(crate) fn advance<S: io::Read + io::Write>(
    stream: &mut S,
    handshake: &mut dyn Handshake,
) -> Result<bool, DialError> {
    loop {
        let wanted = handshake.wanted();
        if wanted == 0 {
            return Ok(true);
        }
        let output = handshake.take_output();
        if !output.is_empty() {
            stream.write_all(&output)?;
        }
        let mut bytes = [0; 256];
        let wanted = wanted.min(bytes.len());
        match stream.read(&mut bytes[..wanted]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => {
                if let Err(error) = handshake.feed(&bytes[..count]) {
                    // Who is refused may be told why; whether that arrives changes nothing.
                    let _ = stream.write_all(&handshake.take_output());
                    return Err(error.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Fresh random bytes for a handshake.
pub(crate) fn nonce() -> [u8; NONCE_BYTES] {
    rand::random()
}
