//! A simulated network with virtual time. The simulated network has delays, short reads and writes, broken links and
//! corrupted data.
//!
//! The simulation runs in one thread: the [`SimTransport`]s of all ranks share a [`SimNetwork`], whose clock moves
//! only in [`SimNetwork::advance`]. Links are ordered streams, like TCP connections, but data on different links
//! arrive in any order. One end requests a link. When the request has arrived and the other end has handled the request,
//! the link is open at the other end, and one latency later at the requesting end. Runs with the same seed are identical.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{IoSlice, IoSliceMut};
use std::panic::Location;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::transport::{SocketTransport, TransferError, TransferResult};
use crate::types::Rank;

/// The properties of a simulated network.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The seed of every random choice.
    pub seed: u64,
    /// The minimum time from a send to the arrival of its data.
    pub latency: Duration,
    /// The maximum of the random delay that is added for each send.
    pub jitter: Duration,
    /// The bandwidth of each direction of each link, in bytes per second.
    pub bandwidth: u64,
    /// The maximum number of bytes in flight in one direction of a link. At this limit, a send moves no bytes.
    pub window_bytes: usize,
    /// Each send or receive moves a random number of bytes, from 1 to this maximum.
    pub piece_bytes_max: usize,
    /// The maximum of the random delay that is added for each wake byte.
    pub wake_delay: Duration,
    /// The line of the source whose wake bytes are lost, as if the line were missing.
    pub lost_wakes: Option<WakeSite>,
    /// The faults, with their times.
    pub faults: Vec<Fault>,
}

/// A line of the source that sends wake bytes.
pub type WakeSite = &'static Location<'static>;

/// A fault at a moment of virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A rank's process ends. The rank's links close when all data that the rank had sent have arrived.
    Kill {
        /// The rank whose process ends.
        rank: Rank,
        /// The time of the fault.
        at: Duration,
    },
    /// The link between two ranks breaks. Data in flight are lost.
    Cut {
        /// The rank at one end of the link.
        a: Rank,
        /// The rank at the other end of the link.
        b: Rank,
        /// The time of the fault.
        at: Duration,
    },
    /// The network flips one bit of the next data from `from` to `to`.
    Corrupt {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The time of the fault.
        at: Duration,
    },
    /// A rank's process is stopped: no more data from this rank arrive, and this rank receives no data.
    Stall {
        /// The rank whose process is stopped.
        rank: Rank,
        /// The time of the fault.
        at: Duration,
    },
}

impl Fault {
    fn time(&self) -> Duration {
        match *self {
            Self::Kill { at, .. }
            | Self::Cut { at, .. }
            | Self::Corrupt { at, .. }
            | Self::Stall { at, .. } => at,
        }
    }
}

/// The network between all ranks of a simulated job.
pub struct SimNetwork {
    config: SimConfig,
    now: Duration,
    random: StdRng,
    /// The data in flight. The key (a, b) is for data from rank a to rank b.
    pipes: BTreeMap<(Rank, Rank), SimPipe>,
    /// The requested links. The key holds the lower rank and then the higher rank.
    links: BTreeMap<(Rank, Rank), SimLink>,
    bytes_moved: u64,
    wake_sites: BTreeSet<WakeSite>,
    /// The ranks whose process has ended, each with the time at which the other ranks notice that.
    killed: BTreeMap<Rank, Duration>,
    /// The ranks whose process is stopped. Data from these ranks and data to these ranks do not move.
    stalled: BTreeSet<Rank>,
}

/// A link that a rank has requested.
struct SimLink {
    requested_by: Rank,
    /// The time at which the request arrives at the other rank.
    request_arrives_at: Duration,
    /// Two times: when the requesting rank can use the link, and when the other rank can use the link. `None` if the
    /// other rank has not handled the request yet.
    open_times: Option<(Duration, Duration)>,
}

/// One direction of a link.
#[derive(Default)]
struct SimPipe {
    /// The pieces of data in flight, each with the time at which the whole piece has arrived.
    in_flight: VecDeque<(Duration, VecDeque<u8>)>,
    in_flight_bytes: usize,
    /// The arrival time of the last byte that was sent.
    last_arrival: Duration,
    /// The time at which all sent bytes have left the sender, so that the sender can send again.
    free_at: Duration,
    /// Whether a bit of the next piece is flipped.
    corrupts_next: bool,
    /// When the receiver notices that the sender has closed its direction.
    finished_at: Option<Duration>,
    /// Whether the link is broken.
    is_cut: bool,
}

impl SimPipe {
    /// Returns whether the receiver notices that the sender has closed its direction, or was killed.
    fn has_ended(&self, killed_at: Option<Duration>, now: Duration) -> bool {
        self.in_flight.is_empty() && self.finished_at.into_iter().chain(killed_at).any(|at| at <= now)
    }
}

impl SimNetwork {
    /// Creates a network at time zero.
    pub fn new(mut config: SimConfig) -> Rc<RefCell<Self>> {
        config.faults.sort_by_key(Fault::time);
        Rc::new(RefCell::new(Self {
            now: Duration::ZERO,
            random: StdRng::seed_from_u64(config.seed),
            config,
            pipes: BTreeMap::new(),
            links: BTreeMap::new(),
            bytes_moved: 0,
            wake_sites: BTreeSet::new(),
            killed: BTreeMap::new(),
            stalled: BTreeSet::new(),
        }))
    }

    /// Returns the current virtual time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Returns the number of bytes that all ranks have sent and received since the beginning. Do not advance the clock
    /// while this number changes, because each received byte may allow another rank to send.
    pub fn bytes_moved(&self) -> u64 {
        self.bytes_moved
    }

    /// Returns the lines of the source that have sent wake bytes.
    pub fn wake_sites(&self) -> &BTreeSet<WakeSite> {
        &self.wake_sites
    }

    /// Returns a number that changes when anything changes that wakes a rank that waits for its sockets: data or requests for
    /// links that have arrived, and links that have opened or ended or can send again.
    pub fn events_of(&self, rank: Rank) -> u64 {
        let mut events = 0_u64;
        let mut add = |number: u64| events = (events ^ number).wrapping_mul(0x100_0000_01B3).rotate_left(5);
        for (&(from, to), pipe) in &self.pipes {
            if to == rank {
                let arrived = pipe.in_flight.iter().filter(|piece| piece.0 <= self.now);
                add(arrived.map(|piece| piece.1.len() as u64).sum());
                add(u64::from(pipe.has_ended(self.killed.get(&from).copied(), self.now)));
            } else if from == rank {
                let is_full = pipe.in_flight_bytes >= self.config.window_bytes || pipe.free_at > self.now;
                add(u64::from(is_full) + 2 * u64::from(self.killed.contains_key(&to)));
            }
            add(u64::from(pipe.is_cut));
        }
        for (&(a, b), link) in self.links.iter().filter(|((a, b), _)| *a == rank || *b == rank) {
            add(u64::from(self.is_open(rank, if a == rank { b } else { a })));
            add(u64::from(link.request_arrives_at <= self.now));
        }
        events
    }

    /// Ends a rank's process. The rank's links close when all data that the rank had sent have arrived.
    pub fn kill(&mut self, rank: Rank) {
        self.killed.insert(rank, self.now + self.config.latency);
        self.stalled.remove(&rank);
    }

    /// Stops a rank's process.
    pub fn stall(&mut self, rank: Rank) {
        self.stalled.insert(rank);
    }

    /// Returns whether the rank's process has been killed.
    pub fn is_killed(&self, rank: Rank) -> bool {
        self.killed.contains_key(&rank)
    }

    /// Returns whether the rank's process has been stopped.
    pub fn is_stalled(&self, rank: Rank) -> bool {
        self.stalled.contains(&rank)
    }

    /// Returns the time of the next event: an arrival, the opening of a link, a fault, or the end of a sender's wait.
    /// Returns `None` if no event is due.
    pub fn next_event(&self) -> Option<Duration> {
        let arrivals = self.pipes.iter().filter(|((from, to), _)| {
            !self.stalled.contains(from) && !self.stalled.contains(to) && !self.killed.contains_key(to)
        });
        let arrivals = arrivals.flat_map(|(_, pipe)| pipe.in_flight.iter().map(|piece| piece.0));
        let links = self
            .links
            .values()
            .map(|link| link.open_times.map_or(link.request_arrives_at, |(requester, _)| requester));
        let frees = self.pipes.values().map(|pipe| pipe.free_at);
        let ends =
            self.pipes.values().filter_map(|pipe| pipe.finished_at).chain(self.killed.values().copied());
        let faults = self.config.faults.iter().map(Fault::time);
        arrivals.chain(ends).chain(links).chain(frees).chain(faults).filter(|&at| at > self.now).min()
    }

    /// Opens a link without a delay, before the run begins.
    pub fn open_link(&mut self, a: Rank, b: Rank) {
        let open_times = Some((self.now, self.now));
        self.links.insert(
            (a.min(b), a.max(b)),
            SimLink { requested_by: a, request_arrives_at: self.now, open_times },
        );
    }

    /// Requests a link from `from` to `to`.
    fn connect(&mut self, from: Rank, to: Rank) {
        let ends = (from.min(to), from.max(to));
        if self.links.contains_key(&ends) {
            return;
        }
        // One latency each for: the TCP connection, the dialer's hello, the acceptor's hello, the proof.
        let request_arrives_at = self.now + self.config.latency * 4 + self.jitter();
        self.links.insert(ends, SimLink { requested_by: from, request_arrives_at, open_times: None });
    }

    /// Accepts all requests for links that have arrived at `rank`.
    fn accept_links(&mut self, rank: Rank) {
        let verdict_arrives = self.now + self.config.latency + self.jitter();
        let is_requested = |link: &&mut SimLink| link.requested_by != rank && link.open_times.is_none();
        let own = self.links.iter_mut().filter(|((a, b), _)| *a == rank || *b == rank);
        for link in
            own.map(|(_, link)| link).filter(is_requested).filter(|link| link.request_arrives_at <= self.now)
        {
            link.open_times = Some((verdict_arrives, self.now));
        }
    }

    fn is_open(&self, own: Rank, peer: Rank) -> bool {
        let link = self.links.get(&(own.min(peer), own.max(peer)));
        let opens = link.and_then(|link| {
            link.open_times.map(|(requester, other)| if link.requested_by == own { requester } else { other })
        });
        opens.is_some_and(|at| at <= self.now)
    }

    /// Returns a random delay, at most [`SimConfig::jitter`].
    fn jitter(&mut self) -> Duration {
        self.config.jitter.mul_f64(self.random.random_range(0.0..1.0))
    }

    /// Moves the clock to `now`, and applies the faults up to that time.
    pub fn advance(&mut self, now: Duration) {
        self.now = self.now.max(now);
        while self.config.faults.first().is_some_and(|fault| fault.time() <= self.now) {
            match self.config.faults.remove(0) {
                Fault::Kill { rank, .. } => self.kill(rank),
                Fault::Cut { a, b, .. } => {
                    for link in [(a, b), (b, a)] {
                        let pipe = self.pipes.entry(link).or_default();
                        pipe.is_cut = true;
                        pipe.in_flight.clear();
                    }
                }
                Fault::Corrupt { from, to, .. } => {
                    self.pipes.entry((from, to)).or_default().corrupts_next = true;
                }
                Fault::Stall { rank, .. } => self.stall(rank),
            }
        }
    }

    fn send(&mut self, from: Rank, to: Rank, parts: &[IoSlice<'_>]) -> TransferResult {
        if self.killed.contains_key(&to) || self.killed.contains_key(&from) {
            return Err(TransferError::Lost("the simulated process was killed".into()));
        }
        let is_open = self.is_open(from, to);
        let (now, config, random) = (self.now, &self.config, &mut self.random);
        let pipe = self.pipes.entry((from, to)).or_default();
        if pipe.is_cut {
            return Err(TransferError::Lost("the simulated link was cut".into()));
        }
        if !is_open {
            return Ok(0);
        }
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let room = config.window_bytes.saturating_sub(pipe.in_flight_bytes).min(total);
        if room == 0 || pipe.free_at > now {
            return Ok(0);
        }
        let length = random.random_range(1..=config.piece_bytes_max).min(room);
        let mut piece: VecDeque<u8> =
            parts.iter().flat_map(|part| part.iter().copied()).take(length).collect();
        if std::mem::take(&mut pipe.corrupts_next) {
            piece[random.random_range(0..length)] ^= 1 << random.random_range(0..8);
        }
        let transfer = Duration::from_nanos(length as u64 * 1_000_000_000 / config.bandwidth.max(1));
        let jitter = config.jitter.mul_f64(random.random_range(0.0..1.0));
        pipe.free_at = now + transfer;
        pipe.last_arrival = pipe.last_arrival.max(pipe.free_at + config.latency + jitter);
        pipe.in_flight.push_back((pipe.last_arrival, piece));
        pipe.in_flight_bytes += length;
        self.bytes_moved += length as u64;
        Ok(length)
    }

    /// Sends a wake byte, for which a socket always has space.
    fn wake(&mut self, from: Rank, to: Rank, site: WakeSite) {
        self.wake_sites.insert(site);
        let is_lost =
            self.killed.contains_key(&from) || self.killed.contains_key(&to) || !self.is_open(from, to);
        if is_lost || self.config.lost_wakes == Some(site) {
            return;
        }
        let delay = self.config.wake_delay.mul_f64(self.random.random_range(0.0..1.0)) + self.jitter();
        let pipe = self.pipes.entry((from, to)).or_default();
        if !pipe.is_cut {
            pipe.last_arrival = pipe.last_arrival.max(self.now + self.config.latency + delay);
            pipe.in_flight.push_back((pipe.last_arrival, VecDeque::from([0])));
            pipe.in_flight_bytes += 1;
        }
    }

    fn receive(&mut self, from: Rank, to: Rank, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let (now, config, random) = (self.now, &self.config, &mut self.random);
        let killed_at = self.killed.get(&from).copied();
        let pipe = self.pipes.entry((from, to)).or_default();
        if pipe.is_cut {
            return Err(TransferError::Lost("the simulated link was cut".into()));
        }
        let has_arrived = pipe.in_flight.front().is_some_and(|piece| piece.0 <= now);
        if !has_arrived || self.stalled.contains(&from) {
            let has_ended = pipe.has_ended(killed_at, now);
            return if has_ended {
                Err(TransferError::Lost("the peer closed the connection".into()))
            } else {
                Ok(0)
            };
        }
        // One call may read several pieces, as from a stream.
        let arrived = pipe.in_flight.iter().take_while(|piece| piece.0 <= now).map(|piece| piece.1.len());
        let allowed = random.random_range(1..=config.piece_bytes_max).min(arrived.sum());
        let mut moved = 0;
        for slot in parts.iter_mut().flat_map(|part| part.iter_mut()).take(allowed) {
            let Some((_, piece)) = pipe.in_flight.front_mut() else { break };
            let Some(byte) = piece.pop_front() else { break };
            if piece.is_empty() {
                pipe.in_flight.pop_front();
            }
            *slot = byte;
            moved += 1;
        }
        pipe.in_flight_bytes -= moved;
        self.bytes_moved += moved as u64;
        Ok(moved)
    }
}

/// One rank's end of the simulated network.
pub struct SimTransport {
    network: Rc<RefCell<SimNetwork>>,
    rank: Rank,
    peers: BTreeSet<Rank>,
}

impl SimTransport {
    /// Creates the transport of `rank`.
    pub fn new(network: Rc<RefCell<SimNetwork>>, rank: Rank) -> Self {
        Self { network, rank, peers: BTreeSet::new() }
    }
}

impl SocketTransport for SimTransport {
    fn connect(&mut self, _: Duration, peer: Rank) {
        self.peers.insert(peer);
        self.network.borrow_mut().connect(self.rank, peer);
    }

    fn is_open(&self, peer: Rank) -> bool {
        let network = self.network.borrow();
        let is_cut = network.pipes.get(&(self.rank, peer)).is_some_and(|pipe| pipe.is_cut);
        network.is_open(self.rank, peer) && !is_cut
    }

    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> TransferResult {
        self.network.borrow_mut().send(self.rank, peer, parts)
    }

    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        self.network.borrow_mut().receive(peer, self.rank, parts)
    }

    fn close_sending(&mut self, peer: Rank) {
        let mut network = self.network.borrow_mut();
        if network.is_open(self.rank, peer) {
            let ends_at = network.now + network.config.latency;
            network.pipes.entry((self.rank, peer)).or_default().finished_at.get_or_insert(ends_at);
        }
    }

    fn take_incoming_link(&mut self) -> Option<Rank> {
        let mut network = self.network.borrow_mut();
        network.accept_links(self.rank);
        let ends = network.links.keys().filter_map(|&(a, b)| match self.rank {
            rank if rank == a => Some(b),
            rank if rank == b => Some(a),
            _ => None,
        });
        let mut new_peers =
            ends.filter(|&peer| network.is_open(self.rank, peer) && !self.peers.contains(&peer));
        let new_peer = new_peers.next()?;
        self.peers.insert(new_peer);
        Some(new_peer)
    }

    fn wake(&mut self, peer: Rank) {
        self.network.borrow_mut().wake(self.rank, peer, Location::caller());
    }

    fn next_deadline(&self) -> Option<Duration> {
        None
    }

    fn is_retransmission_unanswered(&self, _peer: Rank) -> bool {
        false
    }
}
