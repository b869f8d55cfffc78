//! Tests of the handshakes of incoming connections, in simulated networks and virtual time.
//!
//! One process accepts connections: ranks of the job, which may be late or slow, ranks that were started with wrong options,
//! and strangers, which send random bytes or nothing. The network may cut connections at any byte. The accepting process may
//! be busy for seconds. Every connection ends: it is accepted, or both ends learn why not.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use mio::Token;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::Rank;
use crate::simulation::sockets::{
    Cut, EndId, SharedSocketNetwork, SimulatedSocket, SocketNetwork, open_connection,
};
use crate::transport::handshake::{DialError, DialProgress, Identity};
use crate::transport::incoming::{HANDSHAKE_TIMEOUT, IncomingConnections, PENDING_HANDSHAKES_MAX};
use crate::wire::handshake::{
    ConnectionPurpose, Dialer, Handshake as _, HandshakeError, Introduction, Job, NONCE_BYTES, Refusal,
    StreamId,
};
use crate::wire::{Secret, VERSION};

/// The number of ranks of the simulated job. The accepting rank is rank 0.
const WORLD: u32 = 5;
/// The number of an isolated group. The accepting process expects one connection of this group from each other rank except the
/// last one.
const GROUP: u64 = 11;
/// The virtual time by which every connection must have ended. Processes are busy for less than 100 s altogether.
const END: Duration = Duration::from_mins(5);

/// The behaviour of a process that connects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DialerKind {
    Member,
    /// A rank that opens a connection of the isolated group.
    IsolatedMember,
    /// A rank that opens a connection of an isolated group that the accepting process does not expect.
    WrongGroup,
    WrongSecret,
    WrongJob,
    WrongWorld,
    WrongPeersFile,
    /// Believes that it has dialed another rank.
    WrongAddress,
    /// Was started with the rank of the accepting process.
    SameRank,
    /// Speaks another version of the protocol.
    WrongVersion,
    /// Sends random bytes, or the first bytes of a hello, or nothing, and reads nothing.
    Stranger,
}

const WRONG_KINDS: [DialerKind; 8] = [
    DialerKind::WrongGroup,
    DialerKind::WrongSecret,
    DialerKind::WrongJob,
    DialerKind::WrongWorld,
    DialerKind::WrongPeersFile,
    DialerKind::WrongAddress,
    DialerKind::SameRank,
    DialerKind::WrongVersion,
];

impl DialerKind {
    /// Returns why the handshake fails at the accepting process, and what the list of refused processes says.
    fn refusal(self) -> Option<(Refusal, String)> {
        let refusal = match self {
            Self::WrongSecret => return Some((Refusal::Secret, "its secret differs".into())),
            Self::WrongVersion => {
                return Some((Refusal::Version, format!("it speaks protocol version {}", VERSION + 1)));
            }
            Self::WrongGroup => Refusal::Group,
            Self::WrongJob => Refusal::Job,
            Self::WrongWorld => Refusal::World,
            Self::WrongPeersFile => Refusal::PeersFile,
            Self::WrongAddress => Refusal::Rank,
            Self::SameRank => Refusal::SameRank,
            Self::Member | Self::IsolatedMember | Self::Stranger => return None,
        };
        Some((refusal, refusal.to_string()))
    }

    fn identity(self) -> Identity {
        let mut identity = identity();
        match self {
            Self::WrongSecret => identity.secret = secret("another secret of this test"),
            Self::WrongJob => identity.job.id = [9; 16],
            Self::WrongWorld => identity.job.world += 1,
            Self::WrongPeersFile => identity.job.peers_digest = [9; 32],
            _ => {}
        }
        identity
    }

    fn introduction(self, rank: Rank) -> Introduction {
        let to = if self == Self::WrongAddress { Rank::new(WORLD - 1) } else { Rank::ZERO };
        let from = if self == Self::SameRank { Rank::ZERO } else { rank };
        let purpose = match self {
            Self::IsolatedMember => ConnectionPurpose::IsolatedLink(GROUP),
            Self::WrongGroup => ConnectionPurpose::IsolatedLink(GROUP + 1),
            _ => ConnectionPurpose::Link,
        };
        Introduction { purpose, from, to, stream: StreamId::ONLY }
    }
}

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes()).expect("the secret is long enough")
}

/// Returns the identity of the accepting process.
fn identity() -> Identity {
    let job = Job { id: [7; 16], world: WORLD, peers_digest: [3; 32] };
    Identity { secret: secret("the secret of this simulated job"), job, rank: Some(Rank::ZERO) }
}

/// A process that connects, and its progress.
struct SimulatedDialer {
    kind: DialerKind,
    rank: Rank,
    address: SocketAddr,
    cut: Option<Cut>,
    /// The time until which the process does not answer.
    busy_until: Duration,
    /// The time at which the process begins to connect.
    began: Duration,
    connection: Option<DialedConnection>,
    /// Whether the accepting process has accepted the connection, or why not.
    outcome: Option<Result<(), DialError>>,
}

enum DialedConnection {
    Rank(SimulatedSocket, Dialer),
    /// The bytes that a program that is not a rank has not sent yet.
    Raw(SimulatedSocket, Vec<u8>),
}

impl SimulatedDialer {
    fn socket(&self) -> Option<&SimulatedSocket> {
        match self.connection.as_ref()? {
            DialedConnection::Rank(socket, _) | DialedConnection::Raw(socket, _) => Some(socket),
        }
    }

    /// Opens a connection, and returns the acceptor's end.
    fn dial(&mut self, network: &SharedSocketNetwork) -> SimulatedSocket {
        let (ours, theirs) = open_connection(network, self.cut);
        let mut state = network.borrow_mut();
        self.began = state.now;
        let nonce = state.random.random();
        let (identity, introduction) = (self.kind.identity(), self.kind.introduction(self.rank));
        let hello = || Dialer::new(identity.secret.clone(), &identity.job, introduction, nonce).take_output();
        let random = &mut state.random;
        self.connection = Some(match self.kind {
            DialerKind::WrongVersion => {
                let mut bytes = hello();
                bytes[8..10].copy_from_slice(&(VERSION + 1).to_le_bytes());
                DialedConnection::Raw(ours, bytes)
            }
            DialerKind::Stranger => {
                let mut bytes = if random.random_bool(0.3) { hello() } else { vec![0; 300] };
                bytes.truncate(random.random_range(0..bytes.len()));
                if random.random_bool(0.5) {
                    random.fill(&mut bytes[..]);
                }
                DialedConnection::Raw(ours, bytes)
            }
            _ => DialedConnection::Rank(ours, identity.dialer(introduction, nonce)),
        });
        theirs
    }

    /// Continues the handshake, if the process is not busy and the handshake has not ended.
    fn step(&mut self, now: Duration) {
        if now < self.busy_until || self.outcome.is_some() {
            return;
        }
        match &mut self.connection {
            Some(DialedConnection::Rank(socket, handshake)) => match handshake.advance(socket) {
                Ok(DialProgress::Connecting | DialProgress::Pending) => {}
                Ok(DialProgress::Ready) => self.outcome = Some(Ok(())),
                // This process was too slow, so the accepting process has closed the connection.
                Err(DialError::Closed(_)) if now >= self.began + HANDSHAKE_TIMEOUT && self.cut.is_none() => {
                    self.connection = None;
                }
                Err(error) => self.outcome = Some(Err(error)),
            },
            Some(DialedConnection::Raw(socket, bytes)) => {
                let mut received = [0; 256];
                while let Ok(1..) = socket.read(&mut received) {}
                // The write fails if the accepting process has closed the connection.
                let _ = socket.write_all(&std::mem::take(bytes));
            }
            None => {}
        }
    }
}

/// The process that accepts connections.
struct SimulatedAcceptor {
    incoming: IncomingConnections<SimulatedSocket>,
    /// The connections that the kernel has accepted.
    backlog: Vec<(SimulatedSocket, SocketAddr)>,
    /// The ends with events that this process has not handled.
    events: BTreeSet<EndId>,
    /// The time during which this process does not handle events.
    busy: Range<Duration>,
    /// The connections that this process has accepted, with the ranks of their dialers.
    links: Vec<(Rank, SimulatedSocket)>,
    /// The ranks whose connections of the isolated group this process has accepted.
    isolated: Vec<Rank>,
}

impl SimulatedAcceptor {
    fn step(&mut self, now: Duration, random: &mut StdRng) {
        if self.busy.contains(&now) {
            return;
        }
        for event in std::mem::take(&mut self.events) {
            self.incoming.continue_handshake(now, Token(event));
        }
        self.incoming.expire(now);
        for (socket, address) in self.backlog.drain(..) {
            self.incoming.add(now, Token(socket.id), socket, address, random.random());
        }
        while let Some(accepted) = self.incoming.take(ConnectionPurpose::Link) {
            let rank = accepted.introduction.from;
            if let Ok(socket) = accepted.confirm() {
                self.links.push((rank, socket));
            }
        }
    }
}

/// Creates the processes that connect.
fn random_dialers(random: &mut StdRng) -> Vec<SimulatedDialer> {
    let mut kinds: Vec<(DialerKind, Rank)> =
        (1..WORLD).map(|rank| (DialerKind::Member, Rank::new(rank))).collect();
    // The same rank may connect twice.
    for _ in 0..random.random_range(0..4) {
        kinds.push((DialerKind::IsolatedMember, Rank::new(random.random_range(1..WORLD))));
    }
    for _ in 0..random.random_range(0..4) {
        let kind = WRONG_KINDS[random.random_range(0..WRONG_KINDS.len())];
        kinds.push((kind, Rank::new(random.random_range(1..WORLD))));
    }
    let strangers = if random.random_bool(0.02) { 700 } else { random.random_range(0..10) };
    kinds.extend((0..strangers).map(|_| (DialerKind::Stranger, Rank::ZERO)));
    let window_ms = [1, 100, 20_000][random.random_range(0..3)];
    let make = |(index, (kind, rank)): (usize, (DialerKind, Rank))| {
        let is_rank = kind != DialerKind::Stranger;
        let cut = (is_rank && random.random_bool(0.1)).then(|| Cut {
            is_to_dialer: random.random_bool(0.5),
            after_bytes: random.random_range(0..150),
            is_reported: random.random_bool(0.7),
        });
        // All strangers connect from two hosts.
        let host = if is_rank { 10 + index as u8 } else { (index % 2) as u8 };
        let is_busy = kind == DialerKind::Member && random.random_bool(0.1);
        SimulatedDialer {
            kind,
            rank,
            address: SocketAddr::from(([10, 0, 0, host], 4000)),
            cut,
            busy_until: Duration::from_millis(if is_busy { random.random_range(1..40_000) } else { 0 }),
            began: Duration::from_millis(random.random_range(0..window_ms)),
            connection: None,
            outcome: None,
        }
    };
    kinds.into_iter().enumerate().map(make).collect()
}

/// Runs all processes until nothing more happens, and checks that every connection has ended.
fn run(seed: u64) -> (Vec<SimulatedDialer>, SimulatedAcceptor) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut dialers = random_dialers(&mut random);
    let is_busy = random.random_bool(0.2);
    let mut acceptor = SimulatedAcceptor {
        incoming: IncomingConnections::new(identity()),
        backlog: Vec::new(),
        events: BTreeSet::new(),
        busy: Duration::from_micros(random.random_range(0..20_000))..Duration::from_millis(if is_busy {
            random.random_range(20..60_000)
        } else {
            0
        }),
        links: Vec::new(),
        isolated: Vec::new(),
    };
    acceptor.incoming.expect_isolated_links(GROUP, (1..WORLD - 1).map(Rank::new), 1);
    let network = SocketNetwork::new(StdRng::seed_from_u64(random.random()));
    let mut dialer_of_end = BTreeMap::new();
    // The times at which a dialer connects, or is no longer busy.
    let mut wakes: BTreeSet<(Duration, usize)> = dialers
        .iter()
        .enumerate()
        .flat_map(|(index, dialer)| [(dialer.began, index), (dialer.busy_until, index)])
        .collect();
    loop {
        let now = network.borrow().now;
        let mut ready: BTreeSet<usize> = BTreeSet::new();
        while wakes.first().is_some_and(|wake| wake.0 <= now) {
            ready.extend(wakes.pop_first().map(|wake| wake.1));
        }
        for event in network.borrow_mut().take_events() {
            match dialer_of_end.get(&event) {
                Some(&index) => ready.insert(index),
                None => acceptor.events.insert(event),
            };
        }
        for index in ready {
            let dialer = &mut dialers[index];
            dialer.step(now);
            if dialer.connection.is_none() && dialer.began <= now {
                acceptor.backlog.push((dialer.dial(&network), dialer.address));
                dialer_of_end.insert(dialer.socket().expect("the process dials").id, index);
            }
        }
        acceptor.step(now, &mut random);
        let deadline = match &acceptor.busy {
            busy if busy.contains(&now) => Some(busy.end),
            _ => acceptor.incoming.next_deadline(),
        };
        let wake = wakes.first().map(|wake| wake.0);
        let Some(next) = wake.into_iter().chain(deadline).chain(network.borrow().next_event()).min() else {
            break;
        };
        assert!(next < END, "seed {seed}: connections are still open after {END:?}");
        network.borrow_mut().now = next.max(now);
    }
    let isolated = acceptor.incoming.take_isolated_links(GROUP);
    acceptor.isolated = isolated.iter().map(|accepted| accepted.introduction.from).collect();
    let open = acceptor.incoming.streams().count();
    assert_eq!(open, 0, "seed {seed}: the accepting process waits for these connections without a deadline");
    (dialers, acceptor)
}

/// Checks that members are accepted, that all other processes are refused for the right reason, and that the accepting
/// process names the processes that were started with wrong options.
pub(crate) fn check_handshakes(seed: u64) {
    let (dialers, acceptor) = run(seed);
    let refused = &acceptor.incoming.refused;
    let links: Vec<Rank> = acceptor.links.iter().map(|link| link.0).collect();
    for SimulatedDialer { kind, rank, cut, outcome, connection, .. } in &dialers {
        let case = format!("seed {seed}: {kind:?} {rank}, {cut:?}: {outcome:?}; {links:?}");
        let is_linked = links.contains(rank);
        match (kind, outcome) {
            (DialerKind::Member, Some(Ok(()))) => assert!(is_linked, "{case}"),
            (DialerKind::IsolatedMember, Some(Ok(()))) => {
                assert!(acceptor.isolated.contains(rank) && rank.get() < WORLD - 1, "{case}");
            }
            // The accepting process accepts one connection of each rank.
            (DialerKind::IsolatedMember, Some(Err(DialError::Handshake(error)))) => {
                assert_eq!(*error, HandshakeError::Refused(Refusal::Group), "{case}");
                assert!(acceptor.isolated.contains(rank) || rank.get() == WORLD - 1, "{case}");
            }
            (DialerKind::Member | DialerKind::IsolatedMember, _) => assert!(cut.is_some(), "{case}"),
            (_, Some(Ok(()))) => panic!("{case}"),
            (DialerKind::Stranger | DialerKind::WrongVersion, _) => {
                let Some(DialedConnection::Raw(socket, _)) = connection else { panic!("{case}") };
                assert!(socket.is_closed_by_peer() || cut.is_some(), "{case}");
            }
            (_, Some(Err(DialError::Handshake(error)))) => {
                let (refusal, _) = kind.refusal().expect("the process has wrong options");
                // A dialer with another secret does not accept the proof of the accepting process.
                let expected = match refusal {
                    Refusal::Secret => HandshakeError::Secret,
                    refusal => HandshakeError::Refused(refusal),
                };
                assert_eq!(*error, expected, "{case}");
            }
            (_, _) => assert!(cut.is_some(), "{case}"),
        }
        if let Some((_, reason)) = kind.refusal()
            && cut.is_none()
        {
            let text = match kind {
                DialerKind::SameRank => format!("rank {} was refused: {reason}", Rank::ZERO),
                DialerKind::WrongVersion => format!("was refused: {reason}"),
                _ => format!("rank {rank} was refused: {reason}"),
            };
            assert!(refused.iter().any(|refused| refused.ends_with(&text)), "{case}: {refused:?}");
        }
    }
    let members: BTreeSet<Rank> = (1..WORLD).map(Rank::new).collect();
    let linked: BTreeSet<Rank> = links.iter().copied().collect();
    assert!(linked.is_subset(&members), "seed {seed}: {links:?}");
    assert_eq!(linked.len(), links.len(), "seed {seed}: a rank has two links: {links:?}");
    let isolated: BTreeSet<Rank> = acceptor.isolated.iter().copied().collect();
    assert_eq!(isolated.len(), acceptor.isolated.len(), "seed {seed}: {:?}", acceptor.isolated);
}

#[test]
fn members_are_accepted_and_all_other_processes_are_refused() {
    crate::simulation::seeds(10_000).for_each(check_handshakes);
}

/// Strangers that send nothing fill the list of connections in their handshake. They replace only each other, and not a rank that
/// has sent its hello before them, nor a rank that connects after them. All connect from one host.
#[test]
fn silent_connections_replace_only_each_other() {
    let network = SocketNetwork::new(StdRng::seed_from_u64(1));
    let mut incoming = IncomingConnections::new(identity());
    let address = SocketAddr::from(([10, 0, 0, 1], 4000));
    let (mut dialing, early) = open_connection(&network, None);
    let mut dialer = identity().dialer(DialerKind::Member.introduction(Rank::new(1)), [1; NONCE_BYTES]);
    let early_token = Token(early.id);
    while network.borrow().next_event().is_some() {
        let next = network.borrow().next_event().expect("the loop has checked it");
        network.borrow_mut().now = next;
        network.borrow_mut().take_events();
        let _ = dialer.advance(&mut dialing);
    }
    let now = network.borrow().now;
    let mut add = |stream: SimulatedSocket| {
        let token = Token(stream.id);
        incoming.add(now, token, stream, address, [2; NONCE_BYTES]);
        [early_token, token].map(|token| incoming.is_pending(token))
    };
    assert_eq!(add(early), [true, true]);
    let strangers: Vec<_> =
        (0..2 * PENDING_HANDSHAKES_MAX).map(|_| open_connection(&network, None)).collect();
    let (dialers, streams): (Vec<_>, Vec<_>) = strangers.into_iter().unzip();
    let tokens: Vec<Token> = streams.iter().map(|stream| Token(stream.id)).collect();
    for stream in streams {
        assert_eq!(add(stream), [true, true]);
    }
    let kept: Vec<Token> = tokens.iter().copied().filter(|&token| incoming.is_pending(token)).collect();
    assert_eq!(kept, tokens[tokens.len() + 1 - PENDING_HANDSHAKES_MAX..], "the oldest ones were replaced");
    drop(dialers);
}
