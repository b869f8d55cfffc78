//! The listening socket and the connections that have not proved themselves yet.
//!
//! Whoever connects gets a bounded time and a bounded place to complete the [handshake](crate::wire::handshake); what
//! fails is logged and closed, and the job goes on. Admitted connections wait here until their owner fetches them.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};

pub use super::poller::Event;
use super::poller::{FIRST_TOKEN, Poller};
use crate::types::Rank;
use crate::wire::Secret;
use crate::wire::handshake::{Acceptor, Dialer, HandshakeError, Introduction, Job, NONCE_BYTES, Purpose};

/// How long a connection may take to prove itself.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How many connections may be proving themselves at once; further ones are closed at once.
pub const PENDING_MAX: usize = 256;
const LISTENER: Token = Token(0);

/// A connection whose other end has proved that it belongs to the job.
pub struct Admitted {
    /// The connection, registered under `token`.
    pub stream: TcpStream,
    /// Its token.
    pub token: Token,
    /// Who is there and what for.
    pub introduction: Introduction,
}

/// What an outgoing handshake has come to.
pub enum Dialled {
    /// It goes on.
    Pending,
    /// The link may be used.
    Ready,
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

struct Pending {
    stream: TcpStream,
    address: SocketAddr,
    handshake: Acceptor,
    deadline: Duration,
}

/// The listening socket, its handshakes under way, and the event queue that it shares with its owner's sockets.
pub struct Lobby {
    /// Until its owner takes it.
    poller: Option<Poller>,
    registry: Registry,
    listener: TcpListener,
    identity: Identity,
    pending: BTreeMap<Token, Pending>,
    admitted: VecDeque<Admitted>,
    next_token: usize,
}

impl Lobby {
    /// A lobby on a listening socket.
    ///
    /// # Errors
    ///
    /// When the operating system has no event queue or socket left.
    pub fn new(listener: StdListener, identity: Identity) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let mut listener = TcpListener::from_std(listener);
        let poller = Poller::new()?;
        let registry = poller.registry()?;
        registry.register(&mut listener, LISTENER, Interest::READABLE)?;
        Ok(Self {
            poller: Some(poller),
            registry,
            listener,
            identity,
            pending: BTreeMap::new(),
            admitted: VecDeque::new(),
            next_token: FIRST_TOKEN,
        })
    }

    /// The address that the socket listens on.
    ///
    /// # Errors
    ///
    /// When the operating system does not tell.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Who we are.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Where the owner registers its own sockets, with tokens from [`Lobby::token`].
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// A token that nobody has.
    pub fn token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    /// A connection that has been admitted for `purpose` since the last call.
    pub fn take_admitted(&mut self, purpose: Purpose) -> Option<Admitted> {
        let index = self.admitted.iter().position(|admitted| admitted.introduction.purpose == purpose)?;
        self.admitted.remove(index)
    }

    /// The event queue, for an owner that waits by itself; [`Lobby::wait`] is then over.
    pub fn take_poller(&mut self) -> Option<Poller> {
        self.poller.take()
    }

    /// Waits for events until `until`, serves the lobby's own, and appends the others to `others`.
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

    /// When the next handshake's time is up.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.pending.values().map(|pending| pending.deadline).min()
    }

    /// Serves the lobby's own events and appends the others to `others`.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>, others: &mut Vec<Event>) {
        for event in events {
            if event.token == LISTENER {
                self.accept(now);
            } else if self.pending.contains_key(&event.token) {
                self.pursue(event.token);
            } else {
                others.push(event);
            }
        }
        self.expire(now);
    }

    fn accept(&mut self, now: Duration) {
        loop {
            match self.listener.accept() {
                Ok((stream, address)) => self.greet(now, stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Out of file descriptors, say: those who wait in the backlog are served at the next event.
                    log::warn!("a connection could not be accepted: {error}");
                    return;
                }
            }
        }
    }

    fn greet(&mut self, now: Duration, mut stream: TcpStream, address: SocketAddr) {
        if self.pending.len() >= PENDING_MAX {
            log::warn!("{address} turned away: {PENDING_MAX} connections are proving themselves already");
            return;
        }
        let token = self.token();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.registry.register(&mut stream, token, interest) {
            log::warn!("{address} turned away: {error}");
            return;
        }
        let Identity { secret, job, rank } = self.identity.clone();
        let handshake = Acceptor::new(secret, job, rank, nonce());
        let deadline = now + HANDSHAKE_TIMEOUT;
        self.pending.insert(token, Pending { stream, address, handshake, deadline });
        self.pursue(token);
    }

    /// Lets a handshake go as far as it can.
    fn pursue(&mut self, token: Token) {
        let Some(mut pending) = self.pending.remove(&token) else { return };
        match advance(&mut pending.stream, &mut pending.handshake) {
            Ok(true) => {
                if let Some(introduction) = pending.handshake.introduction() {
                    self.admitted.push_back(Admitted { stream: pending.stream, token, introduction });
                }
            }
            Ok(false) => {
                self.pending.insert(token, pending);
            }
            Err(error) => log::warn!("{} turned away: {error}", pending.address),
        }
    }

    fn expire(&mut self, now: Duration) {
        self.pending.retain(|_, pending| {
            let keep = now < pending.deadline;
            if !keep {
                let seconds = HANDSHAKE_TIMEOUT.as_secs();
                log::warn!("{} turned away: it did not introduce itself within {seconds} s", pending.address);
            }
            keep
        });
    }
}

/// An outgoing connection's handshake.
pub struct Dialling {
    handshake: Dialer,
}

impl Dialling {
    /// Introduces us as `from` to `to`.
    pub fn new(identity: &Identity, introduction: Introduction) -> Self {
        Self { handshake: Dialer::new(identity.secret.clone(), &identity.job, introduction, nonce()) }
    }

    /// Goes as far as the connection allows.
    pub fn pursue(&mut self, stream: &mut TcpStream) -> Dialled {
        if let Ok(Some(error)) = stream.take_error() {
            return Dialled::Failed(error.into());
        }
        match stream.peer_addr() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return Dialled::Pending,
            Err(error) => return Dialled::Failed(error.into()),
        }
        match advance(stream, &mut self.handshake) {
            Ok(true) => Dialled::Ready,
            Ok(false) => Dialled::Pending,
            Err(error) => Dialled::Failed(error),
        }
    }
}

/// Moves a handshake's bytes until it is over (true) or would have to wait (false). Its messages are smaller than any
/// socket's buffer and follow each other strictly, so a write that would block is a failure, not something to wait for.
pub(crate) fn advance<S: io::Read + io::Write>(
    stream: &mut S,
    handshake: &mut dyn crate::wire::handshake::Handshake,
) -> Result<bool, DialError> {
    loop {
        let output = handshake.take_output();
        if !output.is_empty() {
            stream.write_all(&output)?;
        }
        let wanted = handshake.wanted();
        if wanted == 0 {
            return Ok(true);
        }
        let mut bytes = [0; 256];
        let wanted = wanted.min(bytes.len());
        match stream.read(&mut bytes[..wanted]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => {
                let result = handshake.feed(&bytes[..count]);
                let last_words = handshake.take_output();
                if !last_words.is_empty() {
                    let sent = stream.write_all(&last_words);
                    if result.is_ok() {
                        sent?;
                    }
                }
                result?;
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
