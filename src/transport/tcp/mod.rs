//! TCP links: one connection for each pair of ranks that talk, opened when first needed.
//!
//! Of two ranks the lower one dials and the higher one accepts, so that both may need the link at once and one
//! connection comes of it.

mod options;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Token};

pub use options::{CongestionControl, SocketOptions, available_congestion_controls};

use super::lobby::{Admitted, Dialled, Dialling, Event, Lobby};
use super::poller::Poller;
use super::{Moved, Transport};
use crate::types::Rank;
use crate::wire::handshake::{Introduction, Purpose};

/// How long a peer may take to accept a connection and its handshake.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Links over TCP.
pub struct TcpTransport {
    lobby: Lobby,
    rank: Rank,
    /// Where each rank listens, in rank order.
    addresses: Vec<SocketAddr>,
    options: SocketOptions,
    links: BTreeMap<Rank, Link>,
    ranks: HashMap<Token, Rank>,
    /// Peers whose links nobody has asked for here.
    newcomers: VecDeque<Rank>,
}

struct Link {
    state: State,
    is_readable: bool,
    is_writable: bool,
}

enum State {
    /// The peer is to dial us.
    Awaited,
    /// We dial the peer.
    Dialling {
        stream: TcpStream,
        handshake: Dialling,
        deadline: Duration,
    },
    /// Both ends have proved themselves.
    Open(TcpStream),
    Lost(String),
}

impl TcpTransport {
    /// A transport for `rank` whose peers listen at `addresses`, in rank order, and which accepts through `lobby`.
    pub fn new(lobby: Lobby, rank: Rank, addresses: Vec<SocketAddr>, options: SocketOptions) -> Self {
        let (links, ranks, newcomers) = (BTreeMap::new(), HashMap::new(), VecDeque::new());
        Self { lobby, rank, addresses, options, links, ranks, newcomers }
    }

    /// The event queue, whose events [`TcpTransport::serve`] wants to know.
    pub fn take_poller(&mut self) -> Option<Poller> {
        self.lobby.take_poller()
    }

    /// Takes note of what has happened to the sockets.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>) {
        let mut others = Vec::new();
        self.lobby.serve(now, events, &mut others);
        for event in others {
            let Some(&peer) = self.ranks.get(&event.token) else { continue };
            let Some(link) = self.links.get_mut(&peer) else { continue };
            link.is_readable |= event.is_readable;
            link.is_writable |= event.is_writable;
            self.pursue(peer);
        }
        while let Some(admitted) = self.lobby.take_admitted(Purpose::Link) {
            self.welcome(admitted);
        }
        self.expire(now);
    }

    fn dial(&mut self, now: Duration, peer: Rank) -> io::Result<State> {
        let address = self.addresses.get(peer.index()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mut stream = self.options.connect(*address)?;
        let token = self.lobby.token();
        self.lobby.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        self.ranks.insert(token, peer);
        let introduction = Introduction { purpose: Purpose::Link, from: self.rank, to: peer };
        let handshake = Dialling::new(self.lobby.identity(), introduction);
        Ok(State::Dialling { stream, handshake, deadline: now + CONNECT_TIMEOUT })
    }

    fn welcome(&mut self, admitted: Admitted) {
        let peer = admitted.introduction.from;
        if peer >= self.rank {
            log::warn!("rank {peer} dialled, though it is the one to be dialled; closed");
            return;
        }
        if let Some(Link { state: State::Open(_) | State::Lost(_), .. }) = self.links.get(&peer) {
            log::warn!("rank {peer} dialled a second time; closed");
            return;
        }
        let state = match self.options.apply(&admitted.stream) {
            Ok(()) => State::Open(admitted.stream),
            Err(error) => State::Lost(format!("its socket could not be set up: {error}")),
        };
        self.ranks.insert(admitted.token, peer);
        let link = Link { state, is_readable: true, is_writable: true };
        if self.links.insert(peer, link).is_none() {
            self.newcomers.push_back(peer);
        }
    }

    fn pursue(&mut self, peer: Rank) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        let State::Dialling { stream, handshake, .. } = &mut link.state else { return };
        let dialled = handshake.pursue(stream);
        let Dialled::Failed(error) = dialled else {
            if matches!(dialled, Dialled::Ready) {
                let state = std::mem::replace(&mut link.state, State::Awaited);
                if let State::Dialling { stream, .. } = state {
                    link.state = State::Open(stream);
                    link.is_readable = true;
                    link.is_writable = true;
                }
            }
            return;
        };
        link.state = State::Lost(format!("no connection: {error}"));
    }

    fn expire(&mut self, now: Duration) {
        for link in self.links.values_mut() {
            if matches!(link.state, State::Dialling { deadline, .. } if now >= deadline) {
                let seconds = CONNECT_TIMEOUT.as_secs();
                link.state = State::Lost(format!("no connection within {seconds} s"));
            }
        }
    }

    /// The moment at which a dial or a handshake gives up.
    pub fn next_deadline(&self) -> Option<Duration> {
        let deadline = |link: &Link| match link.state {
            State::Dialling { deadline, .. } => Some(deadline),
            _ => None,
        };
        self.links.values().filter_map(deadline).chain(self.lobby.next_deadline()).min()
    }
}

impl Transport for TcpTransport {
    fn connect(&mut self, now: Duration, peer: Rank) {
        if self.links.contains_key(&peer) {
            return;
        }
        let state = if self.rank < peer {
            self.dial(now, peer).unwrap_or_else(|error| State::Lost(format!("no connection: {error}")))
        } else {
            State::Awaited
        };
        self.links.insert(peer, Link { state, is_readable: false, is_writable: false });
    }

    fn is_open(&self, peer: Rank) -> bool {
        self.links.get(&peer).is_some_and(|link| matches!(link.state, State::Open(_)))
    }

    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> Moved {
        let Some(link) = self.links.get_mut(&peer) else { return Moved::Blocked };
        let stream = match &mut link.state {
            State::Open(stream) if link.is_writable => stream,
            State::Lost(why) => return Moved::Lost(why.clone()),
            _ => return Moved::Blocked,
        };
        match stream.write_vectored(parts) {
            Ok(count) => Moved::Bytes(count),
            Err(error) => blocked_or_lost(&error, &mut link.is_writable),
        }
    }

    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> Moved {
        let Some(link) = self.links.get_mut(&peer) else { return Moved::Blocked };
        let stream = match &mut link.state {
            State::Open(stream) if link.is_readable => stream,
            State::Lost(why) => return Moved::Lost(why.clone()),
            _ => return Moved::Blocked,
        };
        match stream.read_vectored(parts) {
            Ok(0) => Moved::Lost("it closed the connection without a word".into()),
            Ok(count) => Moved::Bytes(count),
            Err(error) => blocked_or_lost(&error, &mut link.is_readable),
        }
    }

    fn finish(&mut self, peer: Rank) {
        if let Some(Link { state: State::Open(stream), .. }) = self.links.get(&peer)
            && let Err(error) = stream.shutdown(Shutdown::Write)
        {
            log::debug!("rank {peer} was gone when its link was to be closed: {error}");
        }
    }

    fn take_newcomer(&mut self) -> Option<Rank> {
        self.newcomers.pop_front()
    }

    fn name(&self) -> &'static str {
        "tcp"
    }
}

fn blocked_or_lost(error: &io::Error, is_ready: &mut bool) -> Moved {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            *is_ready = false;
            Moved::Blocked
        }
        // Ready still, and tried again at the next turn.
        io::ErrorKind::Interrupted => Moved::Blocked,
        _ => Moved::Lost(error.to_string()),
    }
}
