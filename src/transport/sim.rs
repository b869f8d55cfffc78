//! A simulated network with virtual time: seeded delays, short reads and writes, cuts and corruption.
//!
//! It runs in one thread: all ranks' [`SimTransport`]s share the [`SimNetwork`], whose clock moves only in
//! [`SimNetwork::advance`]. Links are ordered streams, like TCP's, but data on different links arrive in any order. A link is
//! open when one end has asked for it, the delay of the handshake is over, and the other end has handled its events. The same
//! seed repeats a run exactly.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{IoSlice, IoSliceMut};
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::{Moved, Transport};
use crate::types::Rank;

/// How the simulated network behaves.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The seed of every random choice.
    pub seed: u64,
    /// The least time from a send to its arrival.
    pub latency: Duration,
    /// The maximum of a further, random delay of each piece sent.
    pub jitter: Duration,
    /// Bytes per second of each direction of each link.
    pub bandwidth: u64,
    /// Bytes that a link holds before its sender is blocked.
    pub window_bytes: usize,
    /// The most bytes that one send or receive moves; the number is random, from 1 to this.
    pub piece_bytes_max: usize,
    /// The faults and their times.
    pub faults: Vec<Fault>,
}

/// A fault at a moment of virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A rank's process ends: all its links close after the data that it had sent have arrived.
    Kill {
        /// The rank.
        rank: Rank,
        /// When.
        at: Duration,
    },
    /// The link between two ranks breaks; data in flight are lost.
    Cut {
        /// One end.
        a: Rank,
        /// The other end.
        b: Rank,
        /// When.
        at: Duration,
    },
    /// One bit of the next data from one rank to another is flipped.
    Corrupt {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// When.
        at: Duration,
    },
    /// A rank's process is stopped: no more data arrive from it, and it receives none.
    Stall {
        /// The rank.
        rank: Rank,
        /// When.
        at: Duration,
    },
}

impl Fault {
    fn at(&self) -> Duration {
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
    /// The data from the first rank to the second.
    pipes: BTreeMap<(Rank, Rank), Pipe>,
    /// Links that a rank has asked for, by their ends, the lower one first.
    links: BTreeMap<(Rank, Rank), SimLink>,
    bytes_moved: u64,
    killed: BTreeSet<Rank>,
    stalled: BTreeSet<Rank>,
}

struct SimLink {
    asked_by: Rank,
    /// When the other end can see the request.
    arrives: Duration,
    /// From when on the rank that asked and the other rank can use it; `None` until the other rank has seen the request.
    opens: Option<(Duration, Duration)>,
}

#[derive(Default)]
struct Pipe {
    /// Pieces, and when each has fully arrived.
    in_flight: VecDeque<(Duration, VecDeque<u8>)>,
    bytes: usize,
    /// When the last byte sent so far has arrived.
    last_arrival: Duration,
    /// When the sender's bandwidth is free again.
    free_at: Duration,
    corrupts_next: bool,
    /// The sender has closed its direction.
    is_finished: bool,
    /// The link is broken.
    is_cut: bool,
}

impl SimNetwork {
    /// A network at time zero on which nothing has been sent.
    pub fn new(mut config: SimConfig) -> Rc<RefCell<Self>> {
        config.faults.sort_by_key(Fault::at);
        Rc::new(RefCell::new(Self {
            now: Duration::ZERO,
            random: StdRng::seed_from_u64(config.seed),
            config,
            pipes: BTreeMap::new(),
            links: BTreeMap::new(),
            bytes_moved: 0,
            killed: BTreeSet::new(),
            stalled: BTreeSet::new(),
        }))
    }

    /// The current moment of virtual time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Bytes sent and received so far. While this changes, the current moment is not over: when a rank reads, another one can
    /// send.
    pub fn bytes_moved(&self) -> u64 {
        self.bytes_moved
    }

    /// Whether the rank's process has been killed.
    pub fn is_killed(&self, rank: Rank) -> bool {
        self.killed.contains(&rank)
    }

    /// Whether the rank's process has been stopped.
    pub fn is_stalled(&self, rank: Rank) -> bool {
        self.stalled.contains(&rank)
    }

    /// The time of the next arrival or fault; `None` if there is none.
    pub fn next_event(&self) -> Option<Duration> {
        let arrivals = self.pipes.iter().filter(|((from, to), _)| {
            !self.stalled.contains(from) && !self.stalled.contains(to) && !self.killed.contains(to)
        });
        let arrivals = arrivals.flat_map(|(_, pipe)| pipe.in_flight.iter().map(|piece| piece.0));
        let links = self.links.values().map(|link| link.opens.map_or(link.arrives, |opens| opens.0));
        let frees = self.pipes.values().map(|pipe| pipe.free_at);
        let faults = self.config.faults.iter().map(Fault::at);
        arrivals.chain(links).chain(frees).chain(faults).filter(|&at| at > self.now).min()
    }

    /// Opens a link before the run begins.
    pub fn open(&mut self, a: Rank, b: Rank) {
        let opens = Some((self.now, self.now));
        self.links.insert((a.min(b), a.max(b)), SimLink { asked_by: a, arrives: self.now, opens });
    }

    /// `from` asks for a link to `to`.
    fn connect(&mut self, from: Rank, to: Rank) {
        let ends = (from.min(to), from.max(to));
        if self.links.contains_key(&ends) {
            return;
        }
        // One delay to connect, and one each for the hello, its answer and the proof.
        let arrives = self.now + self.config.latency * 4 + self.jitter();
        self.links.insert(ends, SimLink { asked_by: from, arrives, opens: None });
    }

    /// `rank` answers all requests for links.
    fn look(&mut self, rank: Rank) {
        let back = self.now + self.config.latency + self.jitter();
        let asked = |link: &&mut SimLink| link.asked_by != rank && link.opens.is_none();
        let own = self.links.iter_mut().filter(|((a, b), _)| *a == rank || *b == rank);
        for link in own.map(|(_, link)| link).filter(asked).filter(|link| link.arrives <= self.now) {
            link.opens = Some((back, self.now));
        }
    }

    fn is_open(&self, own: Rank, peer: Rank) -> bool {
        let link = self.links.get(&(own.min(peer), own.max(peer)));
        let opens = link.and_then(|link| {
            link.opens.map(|(asking, asked)| if link.asked_by == own { asking } else { asked })
        });
        opens.is_some_and(|at| at <= self.now)
    }

    fn jitter(&mut self) -> Duration {
        self.config.jitter.mul_f64(self.random.random_range(0.0..1.0))
    }

    /// Moves the clock to `now`, with all arrivals and faults up to then.
    pub fn advance(&mut self, now: Duration) {
        self.now = self.now.max(now);
        while self.config.faults.first().is_some_and(|fault| fault.at() <= self.now) {
            match self.config.faults.remove(0) {
                Fault::Kill { rank, .. } => {
                    self.killed.insert(rank);
                    self.stalled.remove(&rank);
                    for ((from, _), pipe) in &mut self.pipes {
                        pipe.is_finished |= *from == rank;
                    }
                }
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
                Fault::Stall { rank, .. } => {
                    self.stalled.insert(rank);
                }
            }
        }
    }

    fn send(&mut self, from: Rank, to: Rank, parts: &[IoSlice<'_>]) -> Moved {
        if self.killed.contains(&to) || self.killed.contains(&from) {
            return Moved::Lost("the simulated process was killed".into());
        }
        let is_open = self.is_open(from, to);
        let (now, config, random) = (self.now, &self.config, &mut self.random);
        let pipe = self.pipes.entry((from, to)).or_default();
        if pipe.is_cut {
            return Moved::Lost("the simulated link was cut".into());
        }
        if !is_open {
            return Moved::Blocked;
        }
        let offered: usize = parts.iter().map(|part| part.len()).sum();
        let room = config.window_bytes.saturating_sub(pipe.bytes).min(offered);
        if room == 0 || pipe.free_at > now {
            return Moved::Blocked;
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
        pipe.bytes += length;
        self.bytes_moved += length as u64;
        Moved::Bytes(length)
    }

    fn receive(&mut self, from: Rank, to: Rank, parts: &mut [IoSliceMut<'_>]) -> Moved {
        let (now, config, random) = (self.now, &self.config, &mut self.random);
        let is_killed = self.killed.contains(&from);
        let pipe = self.pipes.entry((from, to)).or_default();
        if pipe.is_cut {
            return Moved::Lost("the simulated link was cut".into());
        }
        let has_arrived = pipe.in_flight.front().is_some_and(|piece| piece.0 <= now);
        if !has_arrived || self.stalled.contains(&from) {
            let ended = pipe.in_flight.is_empty() && (pipe.is_finished || is_killed);
            return if ended { Moved::Lost("the peer closed the connection".into()) } else { Moved::Blocked };
        }
        let Some((_, piece)) = pipe.in_flight.front_mut() else { return Moved::Blocked };
        let allowed = random.random_range(1..=config.piece_bytes_max).min(piece.len());
        let mut moved = 0;
        for part in parts {
            let length = part.len().min(allowed - moved);
            for (slot, byte) in part.iter_mut().zip(piece.drain(..length)) {
                *slot = byte;
            }
            moved += length;
        }
        pipe.bytes -= moved;
        self.bytes_moved += moved as u64;
        if piece.is_empty() {
            pipe.in_flight.pop_front();
        }
        if moved == 0 { Moved::Blocked } else { Moved::Bytes(moved) }
    }
}

/// One rank's end of the simulated network.
pub struct SimTransport {
    network: Rc<RefCell<SimNetwork>>,
    rank: Rank,
    peers: BTreeSet<Rank>,
}

impl SimTransport {
    /// The end that belongs to `rank`.
    pub fn new(network: Rc<RefCell<SimNetwork>>, rank: Rank) -> Self {
        Self { network, rank, peers: BTreeSet::new() }
    }
}

impl Transport for SimTransport {
    fn connect(&mut self, _: Duration, peer: Rank) {
        self.peers.insert(peer);
        self.network.borrow_mut().connect(self.rank, peer);
    }

    fn is_open(&self, peer: Rank) -> bool {
        let network = self.network.borrow();
        let is_cut = network.pipes.get(&(self.rank, peer)).is_some_and(|pipe| pipe.is_cut);
        network.is_open(self.rank, peer) && !is_cut
    }

    fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> Moved {
        self.network.borrow_mut().send(self.rank, peer, parts)
    }

    fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>]) -> Moved {
        self.network.borrow_mut().receive(peer, self.rank, parts)
    }

    fn finish(&mut self, peer: Rank) {
        let mut network = self.network.borrow_mut();
        if network.is_open(self.rank, peer) {
            network.pipes.entry((self.rank, peer)).or_default().is_finished = true;
        }
    }

    fn take_incoming(&mut self) -> Option<Rank> {
        let mut network = self.network.borrow_mut();
        network.look(self.rank);
        let ends = network.links.keys().filter_map(|&(a, b)| match self.rank {
            rank if rank == a => Some(b),
            rank if rank == b => Some(a),
            _ => None,
        });
        let mut newcomers =
            ends.filter(|&peer| network.is_open(self.rank, peer) && !self.peers.contains(&peer));
        let newcomer = newcomers.next()?;
        self.peers.insert(newcomer);
        Some(newcomer)
    }

    fn name(&self) -> &'static str {
        "simulated"
    }
}
