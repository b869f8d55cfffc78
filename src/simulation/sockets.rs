//! Simulated connections between processes. Each end reads and writes without blocking, as on a socket, and each change of
//! an end is reported once. The network delivers bytes in pieces of random length, and may cut a connection at any byte.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::rc::Rc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::transport::handshake::DialedStream;

/// The number of an end of a connection.
pub(crate) type EndId = usize;

/// Where and how the network cuts a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Whether the network counts the bytes to the dialer; or else those to the acceptor.
    pub(crate) is_to_dialer: bool,
    /// The number of bytes that arrive before the cut.
    pub(crate) after_bytes: usize,
    /// Whether both ends learn about the cut, as after a reset. Otherwise, further bytes are lost.
    pub(crate) is_reported: bool,
}

/// All simulated connections.
pub(crate) struct SocketNetwork {
    pub(crate) now: Duration,
    pub(crate) random: StdRng,
    latency: Duration,
    piece_bytes_max: usize,
    /// The maximum number of bytes that an end has not read. At this limit, the other end cannot write.
    pub(crate) window_bytes: usize,
    ends: BTreeMap<EndId, SimulatedEnd>,
    next_end: EndId,
    /// The changes of ends that have not been reported.
    changes: BTreeSet<(Duration, EndId)>,
}

/// One end of a connection.
struct SimulatedEnd {
    peer: EndId,
    established_at: Duration,
    /// The pieces that travel to this end, with their times of arrival.
    arriving: VecDeque<(Duration, VecDeque<u8>)>,
    last_arrival: Duration,
    /// The number of bytes that may still be sent to this end, and whether the cut after them is reported.
    cut: Option<(usize, bool)>,
    /// The time at which this end learns that the other end has been closed.
    ends_at: Option<Duration>,
    /// The time at which the connection is reset.
    resets_at: Option<Duration>,
    /// Whether this end could not write because the other end has not read enough.
    is_blocked: bool,
}

/// A shared simulated network.
pub(crate) type SharedSocketNetwork = Rc<RefCell<SocketNetwork>>;

impl SocketNetwork {
    pub(crate) fn new(mut random: StdRng) -> SharedSocketNetwork {
        let latency = Duration::from_micros(random.random_range(1..2000));
        let piece_bytes_max = random.random_range(1..300);
        Rc::new(RefCell::new(Self {
            now: Duration::ZERO,
            random,
            latency,
            piece_bytes_max,
            window_bytes: usize::MAX,
            ends: BTreeMap::new(),
            next_end: 2,
            changes: BTreeSet::new(),
        }))
    }

    /// Returns the time of the next change of an end.
    pub(crate) fn next_event(&self) -> Option<Duration> {
        self.changes.first().map(|change| change.0)
    }

    /// Returns the ends that have changed since the previous call.
    pub(crate) fn take_events(&mut self) -> BTreeSet<EndId> {
        let later = self.changes.split_off(&(self.now + Duration::from_nanos(1), 0));
        std::mem::replace(&mut self.changes, later).into_iter().map(|change| change.1).collect()
    }

    /// Resets the connection of an end at the time `at`.
    fn reset(&mut self, id: EndId, at: Duration) {
        if let Some(end) = self.ends.get_mut(&id) {
            let at = *end.resets_at.get_or_insert(at);
            self.changes.insert((at, id));
        }
    }

    fn random_arrival(&mut self) -> Duration {
        self.now + self.latency + self.latency.mul_f64(self.random.random_range(0.0..1.0))
    }
}

/// One end of a simulated connection, as its process sees it. Dropping the value closes the end.
pub(crate) struct SimulatedSocket {
    network: SharedSocketNetwork,
    pub(crate) id: EndId,
}

/// Opens a connection. Returns the dialer's end and the acceptor's end.
pub(crate) fn open_connection(
    network: &SharedSocketNetwork,
    cut: Option<Cut>,
) -> (SimulatedSocket, SimulatedSocket) {
    let mut state = network.borrow_mut();
    let (dialer, acceptor) = (state.next_end, state.next_end + 1);
    state.next_end += 2;
    for (id, peer) in [(dialer, acceptor), (acceptor, dialer)] {
        let established_at = state.random_arrival();
        let cut = cut.filter(|cut| cut.is_to_dialer == (id == dialer));
        let end = SimulatedEnd {
            peer,
            established_at,
            arriving: VecDeque::new(),
            last_arrival: established_at,
            cut: cut.map(|cut| (cut.after_bytes, cut.is_reported)),
            ends_at: None,
            resets_at: None,
            is_blocked: false,
        };
        state.ends.insert(id, end);
        state.changes.insert((established_at, id));
    }
    let socket = |id| SimulatedSocket { network: Rc::clone(network), id };
    (socket(dialer), socket(acceptor))
}

impl SimulatedSocket {
    /// Returns whether the other end has been closed, or the connection has been reset.
    pub(crate) fn is_closed_by_peer(&self) -> bool {
        let network = self.network.borrow();
        let end = &network.ends[&self.id];
        end.ends_at.into_iter().chain(end.resets_at).any(|at| at <= network.now)
    }
}

impl DialedStream for SimulatedSocket {
    fn is_established(&self) -> io::Result<bool> {
        let network = self.network.borrow();
        Ok(network.ends[&self.id].established_at <= network.now)
    }
}

impl Read for SimulatedSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut network = self.network.borrow_mut();
        let SocketNetwork { now, random, ends, changes, latency, .. } = &mut *network;
        let end = ends.get_mut(&self.id).expect("the end is open");
        // A reset discards the bytes that the process has not read.
        if end.resets_at.is_some_and(|at| at <= *now) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let Some((_, piece)) = end.arriving.front_mut().filter(|piece| piece.0 <= *now) else {
            let has_ended = end.arriving.is_empty() && end.ends_at.is_some_and(|at| at <= *now);
            return if has_ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        };
        let count = random.random_range(1..=piece.len()).min(buffer.len());
        for (slot, byte) in buffer.iter_mut().zip(piece.drain(..count)) {
            *slot = byte;
        }
        if piece.is_empty() {
            end.arriving.pop_front();
        }
        let peer = end.peer;
        if ends.get_mut(&peer).is_some_and(|peer| std::mem::take(&mut peer.is_blocked)) {
            changes.insert((*now + *latency, peer));
        }
        Ok(count)
    }
}

impl Write for SimulatedSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut network = self.network.borrow_mut();
        let (now, latency, arrives) = (network.now, network.latency, network.random_arrival());
        let count = network.piece_bytes_max.min(bytes.len());
        let own = &network.ends[&self.id];
        if own.ends_at.into_iter().chain(own.resets_at).any(|at| at <= now) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let peer = own.peer;
        // If the peer has closed its end, this end learns so later.
        let window_bytes = network.window_bytes;
        let Some(end) = network.ends.get_mut(&peer) else { return Ok(count) };
        let unread: usize = end.arriving.iter().map(|piece| piece.1.len()).sum();
        let count = count.min(window_bytes.saturating_sub(unread));
        if count == 0 {
            network.ends.entry(self.id).and_modify(|own| own.is_blocked = true);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        end.last_arrival = end.last_arrival.max(arrives);
        let arrives = end.last_arrival;
        let kept = end.cut.map_or(count, |(left, _)| left.min(count));
        if kept > 0 {
            end.arriving.push_back((arrives, bytes[..kept].iter().copied().collect()));
        }
        let is_reset = end.cut.is_some_and(|(_, is_reported)| is_reported && kept < count);
        end.cut = end.cut.map(|(left, is_reported)| (left - kept, is_reported));
        if is_reset {
            network.reset(peer, arrives);
            network.reset(self.id, arrives + latency);
        }
        network.changes.insert((arrives, peer));
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for SimulatedSocket {
    fn drop(&mut self) {
        let mut network = self.network.borrow_mut();
        let arrives = network.random_arrival();
        let Some(own) = network.ends.remove(&self.id) else { return };
        // The kernel resets a connection that is closed while it holds bytes that the process has not read.
        if !own.arriving.is_empty() {
            return network.reset(own.peer, arrives);
        }
        let Some(peer) = network.ends.get_mut(&own.peer) else { return };
        let ends_at = arrives.max(peer.last_arrival);
        peer.ends_at = Some(ends_at);
        network.changes.insert((ends_at, own.peer));
    }
}
