//! TCP links: one connection for each pair of ranks that talk, opened when first needed.
//!
//! Whoever needs a link dials. If both do, `crossing` says which connection becomes the link. A link may consist of several
//! connections (`bundle`), of which whoever has dialled it opens the others as well (`extra`).

mod bundle;
mod crossing;
mod descriptors;
mod extra;
mod kernel;
mod options;
mod pacing;
mod surplus;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Token};

use self::bundle::Bundle;
use self::crossing::{Crossing, Next};
use self::extra::Extra;
pub use self::options::{CongestionControl, SocketOptions, available_congestion_controls};
pub use self::pacing::PacingRate;
use self::surplus::{Read, Surplus};
use super::lobby::{Admitted, Dialled, Dialling, Event, HANDSHAKE_TIMEOUT, Lobby};
use super::poller::Poller;
use super::{Moved, Transport};
use crate::types::Rank;
use crate::wire::handshake::{Introduction, Purpose, Stream};

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
    /// Of how many connections the links consist that this rank opens, and how many of them are used.
    streams: u8,
    used: u8,
    links: BTreeMap<Rank, Link>,
    ranks: HashMap<Token, Rank>,
    /// Connections of links that have others, while they are opened.
    extras: BTreeMap<Token, Extra>,
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
    /// The same, with several connections.
    Bundled(Box<Bundle<TcpStream>>),
    Lost(String),
}

/// A connection that we have opened.
struct Dial {
    stream: TcpStream,
    token: Token,
    handshake: Dialling,
    began: Duration,
    /// Of how many connections the link is to consist.
    of: u8,
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
    /// A transport for `rank` whose peers listen at `addresses`, in rank order, and which accepts through `lobby`. The links
    /// that it opens consist of so many connections.
    pub fn new(
        lobby: Lobby,
        rank: Rank,
        addresses: Vec<SocketAddr>,
        options: SocketOptions,
        streams: u8,
    ) -> Self {
        let (links, ranks, newcomers) = (BTreeMap::new(), HashMap::new(), VecDeque::new());
        let (extras, used) = (BTreeMap::new(), streams);
        Self { lobby, rank, addresses, options, streams, used, links, ranks, extras, newcomers }
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
            if self.extras.contains_key(&event.token) {
                self.pursue_extra(now, event.token);
                continue;
            }
            let Some(&peer) = self.ranks.get(&event.token) else { continue };
            let Some(link) = self.links.get_mut(&peer) else { continue };
            if let State::Bundled(bundle) = &mut link.state {
                bundle.note(event);
                continue;
            }
            link.is_readable |= event.is_readable;
            link.is_writable |= event.is_writable;
            link.is_ended |= event.is_ended;
            self.pursue(now, peer);
        }
        while let Some(admitted) = self.lobby.take_admitted(Purpose::Link) {
            match admitted.introduction.stream.index {
                0 => self.meet(now, admitted),
                _ => self.meet_extra(admitted),
            }
        }
        self.expire(now);
    }

    fn dial(&mut self, now: Duration, peer: Rank) -> io::Result<Dial> {
        let dial = self.open(now, peer, Stream { index: 0, of: self.streams })?;
        self.ranks.insert(dial.token, peer);
        Ok(dial)
    }

    /// Begins to open one of the connections of a link.
    fn open(&mut self, now: Duration, peer: Rank, which: Stream) -> io::Result<Dial> {
        let address = self.addresses.get(peer.index()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mut stream = self.options.connect(*address, self.sharers(which.of))?;
        let token = self.lobby.token();
        self.lobby.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let (from, to, stream_of_link) = (self.rank, peer, which);
        let introduction = Introduction { purpose: Purpose::Link, from, to, stream: stream_of_link };
        let handshake = Dialling::new(self.lobby.identity(), introduction);
        let deadline = Some(now + CONNECT_TIMEOUT);
        Ok(Dial { stream, token, handshake, began: now, deadline, of: which.of })
    }

    /// Among how many connections a link's rate is divided.
    fn sharers(&self, of: u8) -> u8 {
        of.min(self.used)
    }

    /// Lets a dial go as far as it can.
    fn pursue(&mut self, now: Duration, peer: Rank) {
        let Some(Link { state: State::Meeting(crossing), .. }) = self.links.get_mut(&peer) else { return };
        let dial = &mut crossing.ours;
        match dial.handshake.pursue(&mut dial.stream) {
            Dialled::Connecting => {}
            Dialled::Pending => dial.deadline = None,
            Dialled::Ready => self.settle(now, peer, "", Crossing::answer),
            // We were away in the middle of the handshake, and the peer could not know who kept it waiting.
            Dialled::Closed(_) if now >= dial.began + HANDSHAKE_TIMEOUT && !crossing.has_theirs() => {
                self.dial_again(now, peer);
            }
            Dialled::Closed(error) => {
                self.settle(now, peer, &format!("no connection: {error}"), Crossing::fail);
            }
            Dialled::Failed(error) => {
                self.settle(now, peer, &format!("no connection: {error}"), Crossing::fail);
            }
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
            Err(error) => self.settle(now, peer, &format!("no connection: {error}"), Crossing::fail),
        }
    }

    /// A peer has opened a connection and proved itself.
    fn meet(&mut self, now: Duration, admitted: Admitted) {
        let peer = admitted.introduction.from;
        match self.links.get(&peer).map(|link| &link.state) {
            None => {
                let state = self.welcome(peer, admitted);
                self.links.insert(peer, Link::new(state, true));
                self.newcomers.push_back(peer);
            }
            Some(State::Meeting(_)) => self.settle(now, peer, "", |crossing| crossing.knock(admitted)),
            // The usual end of a crossing: it had not given its connection up when it made its proof.
            Some(State::Open(_) | State::Bundled(_) | State::Lost(_)) => {
                log::debug!("rank {peer} dialled too; closed");
            }
        }
    }

    fn welcome(&mut self, peer: Rank, admitted: Admitted) -> State {
        let (token, of) = (admitted.token, admitted.introduction.stream.of);
        self.ranks.insert(token, peer);
        match self.take_in(admitted) {
            Ok(stream) => self.opened(stream, token, of),
            Err((what, error)) => State::Lost(format!("its connection {what}: {error}")),
        }
    }

    /// Sets a connection up that a peer has opened, and tells the peer that it is welcome.
    fn take_in(&self, admitted: Admitted) -> Result<TcpStream, (&'static str, io::Error)> {
        let sharers = self.sharers(admitted.introduction.stream.of);
        let set_up = self.options.apply(&admitted.stream, sharers);
        set_up.map_err(|error| ("could not be set up", error))?;
        admitted.welcome().map_err(|error| ("could not be welcomed", error))
    }

    /// A link whose first connection this is.
    fn opened(&self, stream: TcpStream, token: Token, of: u8) -> State {
        if of == 1 {
            return State::Open(stream);
        }
        let mut bundle = Bundle::new(stream, token, of);
        bundle.use_streams(self.used.into());
        if self.streams == 1 {
            bundle.become_one();
        }
        State::Bundled(Box::new(bundle))
    }

    /// Something has happened to a link that is not settled on; `why` is what is said if it is lost by that.
    fn settle(
        &mut self,
        now: Duration,
        peer: Rank,
        why: &str,
        event: impl FnOnce(Crossing<Dial, Admitted>) -> Next<Dial, Admitted>,
    ) {
        let Some(Link { state: State::Meeting(crossing), .. }) = self.links.remove(&peer) else { return };
        let (own, mut is_ours) = (crossing.ours.token, false);
        let state = match event(*crossing) {
            Next::Waiting(crossing) => State::Meeting(Box::new(crossing)),
            Next::Ours(dial) => {
                is_ours = true;
                self.opened(dial.stream, dial.token, dial.of)
            }
            Next::Theirs(admitted) => {
                self.ranks.remove(&own);
                self.welcome(peer, admitted)
            }
            Next::Lost => State::Lost(why.to_owned()),
        };
        self.links.insert(peer, Link::new(state, true));
        if is_ours {
            self.open_extras(now, peer);
        }
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
                self.settle(now, peer, &why, Crossing::fail);
            }
        }
        self.expire_extras(now);
    }

    /// The moment at which a dial gives up or a handshake wants to be looked after.
    pub fn next_deadline(&self) -> Option<Duration> {
        let extras = self.extras.values().filter_map(Extra::deadline);
        self.links.values().filter_map(deadline).chain(extras).chain(self.lobby.next_deadline()).min()
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
        self.links.get(&peer).is_some_and(|link| matches!(link.state, State::Open(_) | State::Bundled(_)))
    }

    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> Moved {
        let Some(link) = self.links.get_mut(&peer) else { return Moved::Blocked };
        let stream = match &mut link.state {
            State::Open(stream) if link.is_writable => stream,
            State::Bundled(bundle) => return bundle.send(parts),
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
        if let State::Bundled(bundle) = &mut link.state {
            return bundle.receive(parts);
        }
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
        match self.links.get_mut(&peer).map(|link| &mut link.state) {
            Some(State::Open(stream)) => {
                if let Err(error) = stream.shutdown(Shutdown::Write) {
                    log::debug!("rank {peer} was gone when its link was to be closed: {error}");
                }
            }
            Some(State::Bundled(bundle)) => bundle.finish(),
            _ => {}
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
