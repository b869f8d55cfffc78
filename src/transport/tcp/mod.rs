//! TCP links. Two ranks that communicate have one link, which is opened when it is first needed.
//!
//! The rank that needs a link dials the other rank. If both ranks dial, `simultaneous_open` decides which connection
//! becomes the link. A link is a bundle of one or several connections (`bundle`). The rank that dialed the first
//! connection also opens the extra connections (`extra`).

mod bundle;
mod dial;
mod extra;
mod isolated;
#[cfg(test)]
mod isolated_tests;
mod kernel;
mod options;
mod simultaneous_open;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Token};

pub(crate) use self::bundle::Bundle;
#[cfg(test)]
pub(crate) use self::bundle::Connection;
pub use self::dial::CONNECT_TIMEOUT;
use self::dial::{Dial, DialOutcome};
#[cfg(test)]
pub(crate) use self::kernel::SendSpace;
pub use self::options::{CongestionControl, PacingRate, SocketOptions};
pub(crate) use self::simultaneous_open::{LinkChoice, SimultaneousOpen};
use super::incoming::AcceptedConnection;
use super::listener::Listener;
use super::poller::{Event, Poller};
use super::{SocketTransport, TransferResult};
use crate::types::Rank;
use crate::wire::handshake::{ConnectionPurpose, Introduction, StreamId};

/// Ranks of a job that have connections of their own.
#[derive(Clone, Debug)]
pub struct IsolatedGroup {
    /// The number of the group, which no other isolated group of the job has.
    pub id: u64,
    /// The ranks in the job, in the order of their ranks in the group.
    pub members: Arc<[Rank]>,
}

pub struct TcpTransport {
    listener: Listener,
    rank: Rank,
    /// The address on which each rank listens, in rank order.
    addresses: Vec<SocketAddr>,
    options: SocketOptions,
    /// The number of connections with which this rank opens a link.
    streams: u8,
    /// The number of connections of a link on which this rank sends.
    used_streams: u8,
    links: BTreeMap<Rank, TcpLink>,
    /// The peer of each connection of a link, by the token of the connection.
    peers_by_token: HashMap<Token, Rank>,
    extras: BTreeMap<Token, Dial>,
    /// The peers that have opened a link to this rank without a request of this rank.
    incoming_links: VecDeque<Rank>,
    /// The isolated group of which this is the transport; `None` for the transport of a job.
    isolated: Option<IsolatedGroup>,
}

enum TcpLink {
    /// This rank dials the peer, and the peer may dial this rank at the same time.
    Opening(Box<SimultaneousOpen<Dial, AcceptedConnection>>),
    Open(Box<Bundle<TcpStream>>),
    /// The link is lost, for this reason.
    Lost(String),
}

impl TcpTransport {
    /// Creates the transport of `rank`, whose peers listen at `addresses`, in rank order. The transport accepts
    /// connections through `listener`, and opens links with `streams` connections each.
    pub fn new(
        listener: Listener,
        rank: Rank,
        addresses: Vec<SocketAddr>,
        options: SocketOptions,
        streams: u8,
    ) -> Self {
        Self {
            listener,
            rank,
            addresses,
            options,
            streams,
            used_streams: streams,
            links: BTreeMap::new(),
            peers_by_token: HashMap::new(),
            extras: BTreeMap::new(),
            incoming_links: VecDeque::new(),
            isolated: None,
        }
    }

    pub fn congestion(&self) -> Option<&str> {
        self.options.congestion()
    }

    /// Removes and returns the event queue, whose events the caller passes to [`TcpTransport::serve`].
    pub fn take_poller(&mut self) -> Option<Poller> {
        self.listener.take_poller()
    }

    /// Handles the events of the sockets, and the deadlines that have passed.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>) {
        let mut other_events = Vec::new();
        self.listener.serve(now, events, &mut other_events);
        for event in other_events {
            let peer = self.peers_by_token.get(&event.token);
            match peer.and_then(|peer| self.links.get_mut(peer)) {
                Some(TcpLink::Open(bundle)) => bundle.handle_event(event),
                _ => self.advance_dial(now, event.token),
            }
        }
        while let Some(accepted) = self.listener.incoming.take(ConnectionPurpose::Link) {
            self.add_peer_connection(now, accepted);
        }
        let late: Vec<Token> = self.dials().filter(|dial| dial.is_late(now)).map(|dial| dial.token).collect();
        for token in late {
            self.advance_dial(now, token);
        }
    }

    fn dials(&self) -> impl Iterator<Item = &Dial> {
        let of_links = self.links.values().filter_map(|link| match link {
            TcpLink::Opening(opening) => Some(&opening.ours),
            TcpLink::Open(_) | TcpLink::Lost(_) => None,
        });
        of_links.chain(self.extras.values())
    }

    /// Returns the file descriptors of the listener, of all links and of all connections that are being opened. If a forked
    /// child keeps copies of these file descriptors open, peers do not notice the end of this process.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.listener.descriptors();
        all.extend(self.dials().map(|dial| dial.stream.as_raw_fd()));
        for link in self.links.values() {
            match link {
                TcpLink::Open(bundle) => all.extend(bundle.connections().map(AsRawFd::as_raw_fd)),
                TcpLink::Opening(opening) => {
                    all.extend(opening.peer_connection().map(|accepted| accepted.stream.as_raw_fd()));
                }
                // The connections of a lost link are closed.
                TcpLink::Lost(_) => {}
            }
        }
        all
    }

    /// Begins to open the first connection of a link.
    fn dial(&mut self, now: Duration, peer: Rank) -> io::Result<Dial> {
        let dial = self.open_connection(now, peer, StreamId { index: 0, total: self.streams })?;
        self.peers_by_token.insert(dial.token, peer);
        Ok(dial)
    }

    fn open_connection(&mut self, now: Duration, peer: Rank, stream_id: StreamId) -> io::Result<Dial> {
        let address = self.addresses.get(peer.index()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mut stream = self.options.connect(*address, self.rate_divisor(stream_id.total))?;
        let token = self.listener.new_token();
        self.listener.registry().register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let introduction = self.introduce(peer, stream_id);
        let identity = self.listener.incoming.identity();
        let handshake = identity.dialer(introduction, rand::random());
        let deadline = Some(now + CONNECT_TIMEOUT);
        Ok(Dial { peer, stream_id, stream, token, handshake, began: now, deadline })
    }

    /// Returns the number of connections among which the pacing rate of a link is divided.
    fn rate_divisor(&self, stream_count: u8) -> u8 {
        stream_count.min(self.used_streams)
    }

    /// Advances the opening of a connection as far as possible without blocking.
    fn advance_dial(&mut self, now: Duration, token: Token) {
        if self.extras.contains_key(&token) {
            return self.advance_extra_connection(now, token);
        }
        let Some(&peer) = self.peers_by_token.get(&token) else { return };
        let Some(TcpLink::Opening(opening)) = self.links.get_mut(&peer) else { return };
        match opening.ours.advance(now) {
            DialOutcome::InProgress => {}
            DialOutcome::Ready => {
                self.update_opening_link(now, peer, "", SimultaneousOpen::handle_accepted_dial);
            }
            DialOutcome::Failed { was_too_slow: true, .. } if opening.peer_connection().is_none() => {
                self.dial_again(now, peer);
            }
            DialOutcome::Failed { why, .. } => {
                self.update_opening_link(now, peer, &why, SimultaneousOpen::handle_failed_dial);
            }
        }
    }

    fn dial_again(&mut self, now: Duration, peer: Rank) {
        let dialed = self.dial(now, peer);
        let Some(TcpLink::Opening(opening)) = self.links.get_mut(&peer) else { return };
        match dialed {
            Ok(dial) => {
                self.peers_by_token.remove(&opening.ours.token);
                opening.ours = dial;
            }
            Err(error) => {
                let why = format!("no connection: {error}");
                self.update_opening_link(now, peer, &why, SimultaneousOpen::handle_failed_dial);
            }
        }
    }

    /// Returns what this rank says about itself when it dials `peer`.
    fn introduce(&self, peer: Rank, stream: StreamId) -> Introduction {
        let (purpose, from, to) = match &self.isolated {
            None => (ConnectionPurpose::Link, self.rank, peer),
            Some(IsolatedGroup { id, members }) => {
                (ConnectionPurpose::IsolatedLink(*id), members[self.rank.index()], members[peer.index()])
            }
        };
        Introduction { purpose, from, to, stream }
    }

    fn add_peer_connection(&mut self, now: Duration, accepted: AcceptedConnection) {
        match accepted.introduction.stream.index {
            0 => self.handle_peer_connection(now, accepted),
            _ => self.accept_extra_connection(accepted),
        }
    }

    /// Handles the first connection of a link that a peer has opened.
    fn handle_peer_connection(&mut self, now: Duration, accepted: AcceptedConnection) {
        let peer = accepted.introduction.from;
        match self.links.get(&peer) {
            None => {
                let link = self.accept_link(peer, accepted);
                self.links.insert(peer, link);
                self.incoming_links.push_back(peer);
            }
            Some(TcpLink::Opening(_)) => {
                self.update_opening_link(now, peer, "", |opening| opening.handle_peer_dial(accepted));
            }
            // After a simultaneous open, a second connection is normal: the peer sent its proof on this connection
            // before the other connection was chosen.
            Some(TcpLink::Open(_) | TcpLink::Lost(_)) => {
                log::debug!("closed a second connection of rank {peer}");
            }
        }
    }

    fn accept_link(&mut self, peer: Rank, accepted: AcceptedConnection) -> TcpLink {
        let (token, stream_count) = (accepted.token, accepted.introduction.stream.total);
        self.peers_by_token.insert(token, peer);
        match self.apply_options_and_confirm(accepted) {
            Ok(stream) => self.new_open_link(stream, token, stream_count),
            Err((problem, error)) => TcpLink::Lost(format!("its connection {problem}: {error}")),
        }
    }

    /// Sets the options of a connection that a peer has opened, and sends the peer the verdict that accepts the
    /// connection.
    fn apply_options_and_confirm(
        &self,
        accepted: AcceptedConnection,
    ) -> Result<TcpStream, (&'static str, io::Error)> {
        let rate_divisor = self.rate_divisor(accepted.introduction.stream.total);
        let set_up = self.options.apply(&accepted.stream, rate_divisor);
        set_up.map_err(|error| ("could not be set up", error))?;
        accepted.confirm().map_err(|error| ("could not be confirmed", error))
    }

    fn new_open_link(&self, stream: TcpStream, token: Token, stream_count: u8) -> TcpLink {
        let mut bundle = Bundle::new(stream, token, stream_count);
        bundle.use_streams(self.used_streams.into());
        if self.streams == 1 {
            bundle.use_single_connection();
        }
        TcpLink::Open(Box::new(bundle))
    }

    /// Applies an event to a link that is being opened. If the link is then lost, `why` is the reason.
    fn update_opening_link(
        &mut self,
        now: Duration,
        peer: Rank,
        why: &str,
        event: impl FnOnce(SimultaneousOpen<Dial, AcceptedConnection>) -> LinkChoice<Dial, AcceptedConnection>,
    ) {
        let Some(TcpLink::Opening(opening)) = self.links.remove(&peer) else { return };
        let (own_token, mut is_ours) = (opening.ours.token, false);
        let link = match event(*opening) {
            LinkChoice::Waiting(opening) => TcpLink::Opening(Box::new(opening)),
            LinkChoice::Ours(dial) => {
                is_ours = true;
                self.new_open_link(dial.stream, dial.token, dial.stream_id.total)
            }
            LinkChoice::Theirs(accepted) => {
                self.peers_by_token.remove(&own_token);
                self.accept_link(peer, accepted)
            }
            LinkChoice::Lost => TcpLink::Lost(why.to_owned()),
        };
        self.links.insert(peer, link);
        if is_ours {
            self.open_extra_connections(now, peer);
        }
    }

    /// Returns the connections of the link to `peer`, if the link is open.
    fn bundle(&self, peer: Rank) -> Option<&Bundle<TcpStream>> {
        match self.links.get(&peer) {
            Some(TcpLink::Open(bundle)) => Some(bundle),
            _ => None,
        }
    }

    fn bundle_mut(&mut self, peer: Rank) -> Option<&mut Bundle<TcpStream>> {
        self.open_link(peer).ok()
    }

    /// Returns the connections of the link to `peer`, or why they cannot send and receive.
    fn open_link(&mut self, peer: Rank) -> Result<&mut Bundle<TcpStream>, TransferResult> {
        match self.links.get_mut(&peer) {
            Some(TcpLink::Open(bundle)) => Ok(bundle),
            Some(TcpLink::Lost(why)) => Err(TransferResult::Lost(why.clone())),
            Some(TcpLink::Opening(_)) | None => Err(TransferResult::Blocked),
        }
    }
}

impl SocketTransport for TcpTransport {
    fn connect(&mut self, now: Duration, peer: Rank) {
        if self.links.contains_key(&peer) {
            return;
        }
        let link = match self.dial(now, peer) {
            Ok(dial) => TcpLink::Opening(Box::new(SimultaneousOpen::new(self.rank, peer, dial))),
            Err(error) => TcpLink::Lost(format!("no connection: {error}")),
        };
        self.links.insert(peer, link);
    }

    fn is_open(&self, peer: Rank) -> bool {
        self.bundle(peer).is_some()
    }

    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> TransferResult {
        self.open_link(peer).map_or_else(|result| result, |bundle| bundle.send(parts))
    }

    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        self.open_link(peer).map_or_else(|result| result, |bundle| bundle.receive(parts))
    }

    fn close_sending(&mut self, peer: Rank) {
        if let Some(bundle) = self.bundle_mut(peer) {
            bundle.close_sending();
        }
    }

    fn has_unacknowledged_bytes(&self, peer: Rank) -> bool {
        self.bundle(peer).is_some_and(|bundle| bundle.connections().any(kernel::has_unacknowledged_bytes))
    }

    fn take_incoming_link(&mut self) -> Option<Rank> {
        self.incoming_links.pop_front()
    }

    fn wake(&mut self, peer: Rank) {
        // If the link is lost, an event has told the peer.
        if let Some(bundle) = self.bundle_mut(peer) {
            bundle.send_wake_byte();
        }
    }

    fn next_deadline(&self) -> Option<Duration> {
        self.dials().filter_map(|dial| dial.deadline).chain(self.listener.next_deadline()).min()
    }

    fn is_retransmission_unanswered(&self, peer: Rank) -> bool {
        self.bundle(peer).is_some_and(|bundle| bundle.connections().any(kernel::is_retransmission_unanswered))
    }
}
