//! TCP links: one connection for each pair of ranks that talk, opened when first needed.
//!
//! Whoever needs a link dials. If both do, `crossing` says which connection becomes the link.

mod crossing;
mod options;
mod surplus;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Token};

use self::crossing::{Crossing, Next};
pub use self::options::{CongestionControl, SocketOptions, available_congestion_controls};
use self::surplus::{Read, Surplus};
use super::lobby::{Admitted, Dialled, Dialling, Event, HANDSHAKE_TIMEOUT, Lobby};
use super::poller::Poller;
use super::{Moved, Transport};
use crate::types::Rank;
use crate::wire::handshake::{Introduction, Purpose};

/// How long a peer's machine may take to take a connection. The peer itself answers when it is next inside a call, which may
/// be long after: for that the operation that needs the link has its own deadline.
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
    /// The peer has ended its side.
    is_ended: bool,
    surplus: Surplus,
}

enum State {
    /// We dial the peer, and perhaps it dials us.
    Meeting(Box<Crossing<Dial, Admitted>>),
    /// Both ends have proved themselves.
    Open(TcpStream),
    Lost(String),
}

/// A connection that we have opened.
struct Dial {
    stream: TcpStream,
    token: Token,
    handshake: Dialling,
    began: Duration,
    /// Until when the peer's machine must have taken it, if it has not.
    deadline: Option<Duration>,
}

impl Link {
    fn new(state: State, is_ready: bool) -> Self {
        Self {
            state,
            is_readable: is_ready,
            is_writable: is_ready,
            is_ended: false,
            surplus: Surplus::default(),
        }
    }
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
            link.is_ended |= event.is_ended;
            self.pursue(now, peer);
        }
        while let Some(admitted) = self.lobby.take_admitted(Purpose::Link) {
            self.meet(admitted);
        }
        self.expire(now);
    }

    fn dial(&mut self, now: Duration, peer: Rank) -> io::Result<Dial> {
        let address = self.addresses.get(peer.index()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mut stream = self.options.connect(*address)?;
        let token = self.lobby.token();
        self.lobby.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        self.ranks.insert(token, peer);
        let introduction = Introduction { purpose: Purpose::Link, from: self.rank, to: peer };
        let handshake = Dialling::new(self.lobby.identity(), introduction);
        Ok(Dial { stream, token, handshake, began: now, deadline: Some(now + CONNECT_TIMEOUT) })
    }

    /// Lets a dial go as far as it can.
    fn pursue(&mut self, now: Duration, peer: Rank) {
        let Some(Link { state: State::Meeting(crossing), .. }) = self.links.get_mut(&peer) else { return };
        let dial = &mut crossing.ours;
        match dial.handshake.pursue(&mut dial.stream) {
            Dialled::Connecting => {}
            Dialled::Pending => dial.deadline = None,
            Dialled::Ready => self.settle(peer, "", Crossing::answer),
            // We were away in the middle of the handshake, and the peer could not know who kept it waiting.
            Dialled::Closed(_) if now >= dial.began + HANDSHAKE_TIMEOUT && !crossing.has_theirs() => {
                self.dial_again(now, peer);
            }
            Dialled::Closed(error) => self.settle(peer, &format!("no connection: {error}"), Crossing::fail),
            Dialled::Failed(error) => self.settle(peer, &format!("no connection: {error}"), Crossing::fail),
        }
    }

    fn dial_again(&mut self, now: Duration, peer: Rank) {
        let dialled = self.dial(now, peer);
        let Some(Link { state: State::Meeting(crossing), .. }) = self.links.get_mut(&peer) else { return };
        match dialled {
            Ok(dial) => {
                self.ranks.remove(&crossing.ours.token);
                crossing.ours = dial;
            }
            Err(error) => self.settle(peer, &format!("no connection: {error}"), Crossing::fail),
        }
    }

    /// A peer has opened a connection and proved itself.
    fn meet(&mut self, admitted: Admitted) {
        let peer = admitted.introduction.from;
        match self.links.get(&peer).map(|link| &link.state) {
            None => {
                let state = self.welcome(peer, admitted);
                self.links.insert(peer, Link::new(state, true));
                self.newcomers.push_back(peer);
            }
            Some(State::Meeting(_)) => self.settle(peer, "", |crossing| crossing.knock(admitted)),
            // The usual end of a crossing: it had not given its connection up when it made its proof.
            Some(State::Open(_) | State::Lost(_)) => log::debug!("rank {peer} dialled too; closed"),
        }
    }

    fn welcome(&mut self, peer: Rank, admitted: Admitted) -> State {
        self.ranks.insert(admitted.token, peer);
        let set_up = self.options.apply(&admitted.stream).map_err(|error| ("could not be set up", error));
        match set_up.and_then(|()| admitted.welcome().map_err(|error| ("could not be welcomed", error))) {
            Ok(stream) => State::Open(stream),
            Err((what, error)) => State::Lost(format!("its connection {what}: {error}")),
        }
    }

    /// Something has happened to a link that is not settled on; `why` is what is said if it is lost by that.
    fn settle(
        &mut self,
        peer: Rank,
        why: &str,
        event: impl FnOnce(Crossing<Dial, Admitted>) -> Next<Dial, Admitted>,
    ) {
        let Some(Link { state: State::Meeting(crossing), .. }) = self.links.remove(&peer) else { return };
        let own = crossing.ours.token;
        let state = match event(*crossing) {
            Next::Waiting(crossing) => State::Meeting(Box::new(crossing)),
            Next::Ours(dial) => State::Open(dial.stream),
            Next::Theirs(admitted) => {
                self.ranks.remove(&own);
                self.welcome(peer, admitted)
            }
            Next::Lost => State::Lost(why.to_owned()),
        };
        self.links.insert(peer, Link::new(state, true));
    }

    fn expire(&mut self, now: Duration) {
        let is_late = |link: &Link| deadline(link).is_some_and(|deadline| now >= deadline);
        let late: Vec<Rank> =
            self.links.iter().filter(|(_, link)| is_late(link)).map(|(&peer, _)| peer).collect();
        for peer in late {
            // Perhaps it is we who were away, and there is a connection by now.
            self.pursue(now, peer);
            if self.links.get(&peer).is_some_and(is_late) {
                let why = format!("no connection within {} s", CONNECT_TIMEOUT.as_secs());
                self.settle(peer, &why, Crossing::fail);
            }
        }
    }

    /// The moment at which a dial gives up or a handshake wants to be looked after.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.links.values().filter_map(deadline).chain(self.lobby.next_deadline()).min()
    }
}

/// When a dial gives up.
fn deadline(link: &Link) -> Option<Duration> {
    match &link.state {
        State::Meeting(crossing) => crossing.ours.deadline,
        _ => None,
    }
}

impl Transport for TcpTransport {
    fn connect(&mut self, now: Duration, peer: Rank) {
        if self.links.contains_key(&peer) {
            return;
        }
        let state = match self.dial(now, peer) {
            Ok(dial) => State::Meeting(Box::new(Crossing::new(self.rank, peer, dial))),
            Err(error) => State::Lost(format!("no connection: {error}")),
        };
        self.links.insert(peer, Link::new(state, false));
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
        let left_over = link.surplus.take(parts);
        if left_over > 0 {
            return Moved::Bytes(left_over);
        }
        let stream = match &mut link.state {
            State::Open(stream) if link.is_readable => stream,
            State::Lost(why) => return Moved::Lost(why.clone()),
            _ => return Moved::Blocked,
        };
        match link.surplus.read(stream, parts) {
            Ok(Read { wanted: 0, .. }) => Moved::Lost("it closed the connection without a word".into()),
            Ok(Read { wanted, was_emptied }) => {
                link.is_readable = !was_emptied || link.is_ended;
                Moved::Bytes(wanted)
            }
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
