//! TCP links: one link for each pair of ranks that communicate, opened when it is first needed.
//!
//! A rank that needs a link dials. If both ranks dial, `simultaneous_open` decides which connection becomes the link. A link may
//! consist of several connections (`bundle`); the rank that dialed the first one also opens the others (`extra`).

mod bundle;
mod descriptors;
mod extra;
mod kernel;
mod options;
mod pacing;
mod read_ahead;
mod simultaneous_open;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Token};

use self::bundle::Bundle;
use self::extra::Extra;
pub use self::options::{CongestionControl, SocketOptions, available_congestion_controls};
pub use self::pacing::PacingRate;
use self::read_ahead::{Read, ReadAhead};
use self::simultaneous_open::{Resolution, SimultaneousOpen};
use super::handshake::{DialProgress, OutgoingHandshake};
use super::listener::{Accepted, Event, HANDSHAKE_TIMEOUT, Listener};
use super::poller::Poller;
use super::{Moved, Transport};
use crate::types::Rank;
use crate::wire::handshake::{Introduction, Purpose, Stream};

/// How long a peer's machine may take to take a connection. The peer itself answers when it is next inside a call, which may
/// be long after: for that the operation that needs the link has its own deadline.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Links over TCP.
pub struct TcpTransport {
    listener: Listener,
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
    /// Peers whose links this rank has not asked for.
    incoming: VecDeque<Rank>,
}

struct Link {
    state: LinkState,
    is_readable: bool,
    is_writable: bool,
    /// The peer has ended its side.
    is_ended: bool,
    read_ahead: ReadAhead,
}

enum LinkState {
    /// We dial the peer, and perhaps it dials us.
    Opening(Box<SimultaneousOpen<Dial, Accepted>>),
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
    handshake: OutgoingHandshake,
    began: Duration,
    /// Of how many connections the link is to consist.
    of: u8,
    /// Until when the peer's machine must have taken it, if it has not.
    deadline: Option<Duration>,
}

impl Link {
    fn new(state: LinkState, is_ready: bool) -> Self {
        Self {
            state,
            is_readable: is_ready,
            is_writable: is_ready,
            is_ended: false,
            read_ahead: ReadAhead::default(),
        }
    }
}

impl TcpTransport {
    /// A transport for `rank` whose peers listen at `addresses`, in rank order, and which accepts through `listener`. The links
    /// that it opens consist of so many connections.
    pub fn new(
        listener: Listener,
        rank: Rank,
        addresses: Vec<SocketAddr>,
        options: SocketOptions,
        streams: u8,
    ) -> Self {
        let (links, ranks, incoming) = (BTreeMap::new(), HashMap::new(), VecDeque::new());
        let (extras, used) = (BTreeMap::new(), streams);
        Self { listener, rank, addresses, options, streams, used, links, ranks, extras, incoming }
    }

    /// The event queue, whose events [`TcpTransport::serve`] wants to know.
    pub fn take_poller(&mut self) -> Option<Poller> {
        self.listener.take_poller()
    }

    /// Takes note of what has happened to the sockets.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>) {
        let mut others = Vec::new();
        self.listener.serve(now, events, &mut others);
        for event in others {
            if self.extras.contains_key(&event.token) {
                self.advance_extra(now, event.token);
                continue;
            }
            let Some(&peer) = self.ranks.get(&event.token) else { continue };
            let Some(link) = self.links.get_mut(&peer) else { continue };
            if let LinkState::Bundled(bundle) = &mut link.state {
                bundle.note(event);
                continue;
            }
            link.is_readable |= event.is_readable;
            link.is_writable |= event.is_writable;
            link.is_ended |= event.is_ended;
            self.advance_dial(now, peer);
        }
        while let Some(accepted) = self.listener.take_accepted(Purpose::Link) {
            match accepted.introduction.stream.index {
                0 => self.handle_accepted(now, accepted),
                _ => self.accept_extra(accepted),
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
        let token = self.listener.token();
        self.listener.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let (from, to, stream_of_link) = (self.rank, peer, which);
        let introduction = Introduction { purpose: Purpose::Link, from, to, stream: stream_of_link };
        let handshake = OutgoingHandshake::new(self.listener.identity(), introduction);
        let deadline = Some(now + CONNECT_TIMEOUT);
        Ok(Dial { stream, token, handshake, began: now, deadline, of: which.of })
    }

    /// Among how many connections a link's rate is divided.
    fn sharers(&self, of: u8) -> u8 {
        of.min(self.used)
    }

    /// Lets a dial go as far as it can.
    fn advance_dial(&mut self, now: Duration, peer: Rank) {
        let Some(Link { state: LinkState::Opening(opening), .. }) = self.links.get_mut(&peer) else { return };
        let dial = &mut opening.ours;
        match dial.handshake.advance(&mut dial.stream) {
            DialProgress::Connecting => {}
            DialProgress::Pending => dial.deadline = None,
            DialProgress::Ready => self.resolve(now, peer, "", SimultaneousOpen::handle_accepted),
            // We were away in the middle of the handshake, and the peer could not know who kept it waiting.
            DialProgress::Closed(_) if now >= dial.began + HANDSHAKE_TIMEOUT && !opening.has_theirs() => {
                self.dial_again(now, peer);
            }
            DialProgress::Closed(error) => {
                self.resolve(now, peer, &format!("no connection: {error}"), SimultaneousOpen::handle_failed);
            }
            DialProgress::Failed(error) => {
                self.resolve(now, peer, &format!("no connection: {error}"), SimultaneousOpen::handle_failed);
            }
        }
    }

    fn dial_again(&mut self, now: Duration, peer: Rank) {
        let dialed = self.dial(now, peer);
        let Some(Link { state: LinkState::Opening(opening), .. }) = self.links.get_mut(&peer) else { return };
        match dialed {
            Ok(dial) => {
                self.ranks.remove(&opening.ours.token);
                opening.ours = dial;
            }
            Err(error) => {
                self.resolve(now, peer, &format!("no connection: {error}"), SimultaneousOpen::handle_failed);
            }
        }
    }

    /// A peer has opened a connection and proved itself.
    fn handle_accepted(&mut self, now: Duration, accepted: Accepted) {
        let peer = accepted.introduction.from;
        match self.links.get(&peer).map(|link| &link.state) {
            None => {
                let state = self.accept_link(peer, accepted);
                self.links.insert(peer, Link::new(state, true));
                self.incoming.push_back(peer);
            }
            Some(LinkState::Opening(_)) => {
                self.resolve(now, peer, "", |opening| opening.handle_peer_dial(accepted));
            }
            // The usual end of a simultaneous open: it had not given its connection up when it made its proof.
            Some(LinkState::Open(_) | LinkState::Bundled(_) | LinkState::Lost(_)) => {
                log::debug!("rank {peer} dialed too; closed");
            }
        }
    }

    fn accept_link(&mut self, peer: Rank, accepted: Accepted) -> LinkState {
        let (token, of) = (accepted.token, accepted.introduction.stream.of);
        self.ranks.insert(token, peer);
        match self.confirm(accepted) {
            Ok(stream) => self.opened(stream, token, of),
            Err((what, error)) => LinkState::Lost(format!("its connection {what}: {error}")),
        }
    }

    /// Sets a connection up that a peer has opened, and tells the peer that it is welcome.
    fn confirm(&self, accepted: Accepted) -> Result<TcpStream, (&'static str, io::Error)> {
        let sharers = self.sharers(accepted.introduction.stream.of);
        let set_up = self.options.apply(&accepted.stream, sharers);
        set_up.map_err(|error| ("could not be set up", error))?;
        accepted.confirm().map_err(|error| ("could not be welcomed", error))
    }

    /// A link whose first connection this is.
    fn opened(&self, stream: TcpStream, token: Token, of: u8) -> LinkState {
        if of == 1 {
            return LinkState::Open(stream);
        }
        let mut bundle = Bundle::new(stream, token, of);
        bundle.use_streams(self.used.into());
        if self.streams == 1 {
            bundle.use_single_connection();
        }
        LinkState::Bundled(Box::new(bundle))
    }

    /// Something has happened to a link that is not settled on; `why` is what is said if it is lost by that.
    fn resolve(
        &mut self,
        now: Duration,
        peer: Rank,
        why: &str,
        event: impl FnOnce(SimultaneousOpen<Dial, Accepted>) -> Resolution<Dial, Accepted>,
    ) {
        let Some(Link { state: LinkState::Opening(opening), .. }) = self.links.remove(&peer) else { return };
        let (own, mut is_ours) = (opening.ours.token, false);
        let state = match event(*opening) {
            Resolution::Waiting(opening) => LinkState::Opening(Box::new(opening)),
            Resolution::Ours(dial) => {
                is_ours = true;
                self.opened(dial.stream, dial.token, dial.of)
            }
            Resolution::Theirs(accepted) => {
                self.ranks.remove(&own);
                self.accept_link(peer, accepted)
            }
            Resolution::Lost => LinkState::Lost(why.to_owned()),
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
            self.advance_dial(now, peer);
            if self.links.get(&peer).is_some_and(is_late) {
                let why = format!("no connection within {} s", CONNECT_TIMEOUT.as_secs());
                self.resolve(now, peer, &why, SimultaneousOpen::handle_failed);
            }
        }
        self.expire_extras(now);
    }

    /// The moment at which a dial gives up or a handshake wants to be looked after.
    pub fn next_deadline(&self) -> Option<Duration> {
        let extras = self.extras.values().filter_map(Extra::deadline);
        self.links.values().filter_map(deadline).chain(extras).chain(self.listener.next_deadline()).min()
    }
}

/// When a dial gives up.
fn deadline(link: &Link) -> Option<Duration> {
    match &link.state {
        LinkState::Opening(opening) => opening.ours.deadline,
        _ => None,
    }
}

impl Transport for TcpTransport {
    fn connect(&mut self, now: Duration, peer: Rank) {
        if self.links.contains_key(&peer) {
            return;
        }
        let state = match self.dial(now, peer) {
            Ok(dial) => LinkState::Opening(Box::new(SimultaneousOpen::new(self.rank, peer, dial))),
            Err(error) => LinkState::Lost(format!("no connection: {error}")),
        };
        self.links.insert(peer, Link::new(state, false));
    }

    fn is_open(&self, peer: Rank) -> bool {
        self.links
            .get(&peer)
            .is_some_and(|link| matches!(link.state, LinkState::Open(_) | LinkState::Bundled(_)))
    }

    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> Moved {
        let Some(link) = self.links.get_mut(&peer) else { return Moved::Blocked };
        let stream = match &mut link.state {
            LinkState::Open(stream) if link.is_writable => stream,
            LinkState::Bundled(bundle) => return bundle.send(parts),
            LinkState::Lost(why) => return Moved::Lost(why.clone()),
            _ => return Moved::Blocked,
        };
        match stream.write_vectored(parts) {
            Ok(count) => Moved::Bytes(count),
            Err(error) => blocked_or_lost(&error, &mut link.is_writable),
        }
    }

    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> Moved {
        let Some(link) = self.links.get_mut(&peer) else { return Moved::Blocked };
        if let LinkState::Bundled(bundle) = &mut link.state {
            return bundle.receive(parts);
        }
        let left_over = link.read_ahead.take(parts);
        if left_over > 0 {
            return Moved::Bytes(left_over);
        }
        let stream = match &mut link.state {
            LinkState::Open(stream) if link.is_readable => stream,
            LinkState::Lost(why) => return Moved::Lost(why.clone()),
            _ => return Moved::Blocked,
        };
        match link.read_ahead.read(stream, parts) {
            Ok(Read { wanted: 0, .. }) => Moved::Lost("it closed the connection without saying why".into()),
            Ok(Read { wanted, was_emptied }) => {
                link.is_readable = !was_emptied || link.is_ended;
                Moved::Bytes(wanted)
            }
            Err(error) => blocked_or_lost(&error, &mut link.is_readable),
        }
    }

    fn finish(&mut self, peer: Rank) {
        match self.links.get_mut(&peer).map(|link| &mut link.state) {
            Some(LinkState::Open(stream)) => {
                if let Err(error) = stream.shutdown(Shutdown::Write) {
                    log::debug!("rank {peer} was gone when its link was to be closed: {error}");
                }
            }
            Some(LinkState::Bundled(bundle)) => bundle.finish(),
            _ => {}
        }
    }

    fn take_incoming(&mut self) -> Option<Rank> {
        self.incoming.pop_front()
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
