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
pub(crate) use self::bundle::{Connection, SendSpace};
pub use self::dial::CONNECT_TIMEOUT;
use self::dial::Dial;
pub use self::options::{CongestionControl, PacingRate, SocketOptions};
pub(crate) use self::simultaneous_open::SimultaneousOpen;
use super::incoming::AcceptedConnection;
use super::listener::Listener;
use super::poller::Event;
use super::{SocketTransport, TransferError, TransferResult};
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
    pub listener: Listener,
    rank: Rank,
    /// The address on which each rank listens, in rank order.
    addresses: Vec<SocketAddr>,
    pub options: SocketOptions,
    /// The number of connections with which this rank opens a link.
    streams: u8,
    /// The number of connections of a link on which this rank sends.
    used_streams: u8,
    links: BTreeMap<Rank, TcpLink>,
    /// The peer of each connection of an open link, by the token of the connection.
    peers_by_token: HashMap<Token, Rank>,
    dials: BTreeMap<Token, Dial>,
    /// The peers that have opened a link to this rank without a request of this rank.
    incoming_links: VecDeque<Rank>,
    /// The isolated group of which this is the transport; `None` for the transport of a job.
    isolated: Option<IsolatedGroup>,
}

enum TcpLink {
    /// This rank dials the peer, and the peer may dial this rank at the same time.
    Opening(SimultaneousOpen<Token, AcceptedConnection>),
    Open(Box<Bundle<TcpStream>>),
    Lost(String),
}

impl TcpTransport {
    /// Creates the transport of `rank`. The peers listen at `addresses`, in rank order.
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
            dials: BTreeMap::new(),
            incoming_links: VecDeque::new(),
            isolated: None,
        }
    }

    /// Handles the events of the sockets, and the deadlines that have passed.
    pub fn serve(&mut self, now: Duration, events: impl IntoIterator<Item = Event>) {
        for event in self.listener.serve(now, events) {
            let peer = self.peers_by_token.get(&event.token).copied();
            match peer.and_then(|peer| self.bundle_mut(peer)) {
                Some(bundle) => bundle.handle_event(event),
                None => self.advance_dial(now, event.token),
            }
        }
        while let Some(accepted) = self.listener.incoming.take(ConnectionPurpose::Link) {
            self.add_peer_connection(accepted);
        }
        let late = self.dials.values().filter(|dial| dial.is_late(now)).map(|dial| dial.token);
        for token in late.collect::<Vec<Token>>() {
            self.advance_dial(now, token);
        }
    }

    /// Returns the file descriptors of all sockets. If a forked child keeps them, peers do not notice the end of this process.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.listener.descriptors();
        all.extend(self.dials.values().map(|dial| dial.stream.as_raw_fd()));
        for link in self.links.values() {
            match link {
                TcpLink::Open(bundle) => all.extend(bundle.connections().map(AsRawFd::as_raw_fd)),
                TcpLink::Opening(opening) => {
                    all.extend(opening.theirs.as_ref().map(|accepted| accepted.stream.as_raw_fd()));
                }
                // The connections of a lost link are closed.
                TcpLink::Lost(_) => {}
            }
        }
        all
    }

    /// Begins to open a connection. Returns its token, or why it cannot be opened.
    fn dial(&mut self, now: Duration, peer: Rank, stream_id: StreamId) -> Result<Token, String> {
        let dialed = self.open_connection(now, peer, stream_id);
        let dial = dialed.map_err(|error| format!("no connection: {error}"))?;
        let token = dial.token;
        self.dials.insert(token, dial);
        Ok(token)
    }

    fn open_connection(&mut self, now: Duration, peer: Rank, stream_id: StreamId) -> io::Result<Dial> {
        let address = self.addresses.get(peer.index()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mut stream = self.options.connect(*address, self.rate_divisor(stream_id.total))?;
        let token = self.listener.new_token();
        self.listener.registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        let introduction = self.introduce(peer, stream_id);
        let handshake = self.listener.incoming.identity.dialer(introduction, rand::random());
        let deadline = Some(now + CONNECT_TIMEOUT);
        Ok(Dial { peer, stream_id, stream, token, handshake, began: now, deadline })
    }

    /// Returns the number of connections among which the pacing rate of a link is divided.
    fn rate_divisor(&self, stream_count: u8) -> u8 {
        stream_count.min(self.used_streams)
    }

    fn advance_dial(&mut self, now: Duration, token: Token) {
        let Some(dial) = self.dials.get_mut(&token) else { return };
        let progress = dial.advance(now);
        if let Ok(false) = progress {
            return;
        }
        let Some(dial) = self.dials.remove(&token) else { return };
        let Dial { peer, stream_id, .. } = dial;
        let is_extra = stream_id.index > 0;
        let failure = match progress {
            Ok(_) if is_extra => return self.add_extra_connection(dial),
            Ok(_) => {
                self.add_open_link(peer, dial.stream, token, stream_id.total);
                return self.open_extra_connections(now, peer);
            }
            Err(failure) => failure,
        };
        let link = self.links.get(&peer);
        let has_peer_dialed = matches!(link, Some(TcpLink::Opening(opening)) if opening.theirs.is_some());
        let may_dial_again = failure.was_too_slow && !has_peer_dialed;
        let again = if may_dial_again { self.dial(now, peer, stream_id) } else { Err(failure.why) };
        match (again, self.links.get_mut(&peer)) {
            (Ok(again), Some(TcpLink::Opening(opening))) => opening.ours = again,
            (Ok(_), _) => {}
            (Err(why), Some(TcpLink::Opening(opening))) => match opening.theirs.take() {
                Some(accepted) => self.accept_link(peer, accepted),
                None => drop(self.links.insert(peer, TcpLink::Lost(why))),
            },
            (Err(why), _) => self.handle_failed_extra_connection(peer, stream_id, &why),
        }
    }

    fn introduce(&self, peer: Rank, stream: StreamId) -> Introduction {
        let (purpose, from, to) = match &self.isolated {
            None => (ConnectionPurpose::Link, self.rank, peer),
            Some(IsolatedGroup { id, members }) => {
                (ConnectionPurpose::IsolatedLink(*id), members[self.rank.index()], members[peer.index()])
            }
        };
        Introduction { purpose, from, to, stream }
    }

    fn add_peer_connection(&mut self, accepted: AcceptedConnection) {
        match accepted.introduction.stream.index {
            0 => self.handle_peer_connection(accepted),
            _ => self.accept_extra_connection(accepted),
        }
    }

    /// Handles the first connection of a link that a peer has opened.
    fn handle_peer_connection(&mut self, accepted: AcceptedConnection) {
        let peer = accepted.introduction.from;
        match self.links.get_mut(&peer) {
            None => {
                self.accept_link(peer, accepted);
                self.incoming_links.push_back(peer);
            }
            Some(TcpLink::Opening(opening)) => {
                let own_token = opening.ours;
                if let Some(accepted) = opening.handle_peer_dial(accepted) {
                    self.dials.remove(&own_token);
                    self.accept_link(peer, accepted);
                }
            }
            // After a simultaneous open, this is normal: the peer sent its proof before the other connection was chosen.
            Some(TcpLink::Open(_) | TcpLink::Lost(_)) => {
                log::debug!("closed a second connection of rank {peer}");
            }
        }
    }

    fn accept_link(&mut self, peer: Rank, accepted: AcceptedConnection) {
        let (token, stream_count) = (accepted.token, accepted.introduction.stream.total);
        match self.apply_options_and_confirm(accepted) {
            Ok(stream) => self.add_open_link(peer, stream, token, stream_count),
            Err((problem, error)) => {
                self.links.insert(peer, TcpLink::Lost(format!("its connection {problem}: {error}")));
            }
        }
    }

    /// Sets the options of a connection that a peer has opened, and sends the peer the verdict that accepts it.
    fn apply_options_and_confirm(
        &self,
        accepted: AcceptedConnection,
    ) -> Result<TcpStream, (&'static str, io::Error)> {
        let rate_divisor = self.rate_divisor(accepted.introduction.stream.total);
        let set_up = self.options.apply(&accepted.stream, rate_divisor);
        set_up.map_err(|error| ("could not be set up", error))?;
        accepted.confirm().map_err(|error| ("could not be confirmed", error))
    }

    fn add_open_link(&mut self, peer: Rank, stream: TcpStream, token: Token, stream_count: u8) {
        self.peers_by_token.insert(token, peer);
        let mut bundle = Bundle::new(stream, token, stream_count);
        bundle.use_streams(self.used_streams.into());
        if self.streams == 1 {
            bundle.use_single_connection();
        }
        self.links.insert(peer, TcpLink::Open(Box::new(bundle)));
    }

    fn bundle(&self, peer: Rank) -> Option<&Bundle<TcpStream>> {
        match self.links.get(&peer) {
            Some(TcpLink::Open(bundle)) => Some(bundle),
            _ => None,
        }
    }

    fn bundle_mut(&mut self, peer: Rank) -> Option<&mut Bundle<TcpStream>> {
        self.open_link(peer).ok().flatten()
    }

    /// Returns the connections of the link to `peer`, if it is open, or why it is lost.
    fn open_link(&mut self, peer: Rank) -> Result<Option<&mut Bundle<TcpStream>>, TransferError> {
        match self.links.get_mut(&peer) {
            Some(TcpLink::Open(bundle)) => Ok(Some(bundle)),
            Some(TcpLink::Lost(why)) => Err(TransferError::Lost(why.clone())),
            Some(TcpLink::Opening(_)) | None => Ok(None),
        }
    }
}

impl SocketTransport for TcpTransport {
    fn connect(&mut self, now: Duration, peer: Rank) {
        if self.links.contains_key(&peer) {
            return;
        }
        let link = match self.dial(now, peer, StreamId { index: 0, total: self.streams }) {
            Ok(token) => TcpLink::Opening(SimultaneousOpen::new(self.rank, peer, token)),
            Err(why) => TcpLink::Lost(why),
        };
        self.links.insert(peer, link);
    }

    fn is_open(&self, peer: Rank) -> bool {
        self.bundle(peer).is_some()
    }

    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> TransferResult {
        self.open_link(peer)?.map_or(Ok(0), |bundle| bundle.send(parts))
    }

    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        self.open_link(peer)?.map_or(Ok(0), |bundle| bundle.receive(parts))
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
        self.dials.values().filter_map(|dial| dial.deadline).chain(self.listener.next_deadline()).min()
    }

    fn is_retransmission_unanswered(&self, peer: Rank) -> bool {
        self.bundle(peer).is_some_and(|bundle| bundle.connections().any(kernel::is_retransmission_unanswered))
    }
}
