//! Links between transports in one thread, over real sockets and in virtual time: late ranks, simultaneous dials, and
//! connections of other programs.

use std::net::TcpStream as StdStream;
use std::os::fd::AsRawFd as _;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::transport::handshake::Identity;
use crate::transport::listener::PENDING_MAX;
use crate::wire::Secret;
use crate::wire::handshake::Job;

/// How long the kernel may take to deliver data over loopback. The tests wait for events, they do not sleep.
const PATIENCE: Duration = Duration::from_secs(10);
const SECOND: Duration = Duration::from_secs(1);

/// One rank's transport and event queue.
struct End {
    transport: TcpTransport,
    poller: Poller,
}

impl End {
    /// Handles events, as a rank inside a call does.
    fn look(&mut self, now: Duration) {
        self.look_for(now, Duration::ZERO);
    }

    fn look_for(&mut self, now: Duration, timeout: Duration) {
        let mut events = Vec::new();
        self.poller.wait(Some(timeout), &mut events).unwrap();
        self.transport.serve(now, events);
    }

    fn why_lost(&self, peer: u32) -> Option<&str> {
        match &self.transport.links.get(&Rank::new(peer))?.state {
            LinkState::Lost(why) => Some(why),
            _ => None,
        }
    }

    fn is_open(&self, peer: u32) -> bool {
        assert_eq!(self.why_lost(peer), None);
        self.transport.is_open(Rank::new(peer))
    }

    fn connect(&mut self, now: Duration, peer: u32) {
        self.transport.connect(now, Rank::new(peer));
    }

    /// The connection's two ends, the lower port first.
    fn connection(&self, peer: u32) -> [SocketAddr; 2] {
        let state = &self.transport.links[&Rank::new(peer)].state;
        let stream = match state {
            LinkState::Open(stream) => Some(stream),
            LinkState::Bundled(bundle) => bundle.connections().next(),
            _ => None,
        };
        let stream = stream.expect("it is open");
        let mut ends = [stream.local_addr().unwrap(), stream.peer_addr().unwrap()];
        ends.sort();
        ends
    }
}

fn options() -> SocketOptions {
    SocketOptions::new(&CongestionControl::Host, Duration::from_mins(1)).unwrap()
}

fn ends(n: u32) -> Vec<End> {
    ends_of(n, 1)
}

fn ends_of(n: u32, streams: u8) -> Vec<End> {
    let listeners: Vec<_> =
        (0..n).map(|_| options().listen("127.0.0.1:0".parse().unwrap()).unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    let secret = Secret::new(b"a secret for these tests").unwrap();
    let with_rank = listeners.into_iter().zip((0..n).map(Rank::new));
    with_rank
        .map(|(listener, rank)| {
            let job = Job { id: [1; 16], world: n, peers_digest: [0; 32] };
            let identity = Identity { secret: secret.clone(), job, rank: Some(rank) };
            let listener = Listener::new(listener, identity).unwrap();
            let mut transport = TcpTransport::new(listener, rank, addresses.clone(), options(), streams);
            let poller = transport.take_poller().unwrap();
            End { transport, poller }
        })
        .collect()
}

/// Handles the events of the ends that `who` names, at the time `now`, until `is_done`. Waits for the kernel in between.
fn look_until(ends: &mut [End], who: &[usize], now: Duration, is_done: impl Fn(&[End]) -> bool) {
    let started = std::time::Instant::now();
    while !is_done(ends) {
        assert!(started.elapsed() < PATIENCE, "waited in vain");
        for &index in who {
            ends[index].look_for(now, Duration::from_millis(1));
        }
    }
}

/// Sends a byte in each direction over the connection that both ends hold.
fn assert_linked(ends: &mut [End], now: Duration) {
    assert_eq!(ends[0].connection(1), ends[1].connection(0));
    for (from, to) in [(0, 1), (1, 0)] {
        let to_rank = Rank::new(to as u32);
        let sent = ends[from].transport.send(to_rank, &[IoSlice::new(&[42])]);
        assert_eq!(sent, Moved::Bytes(1));
        let (mut byte, started) = ([0], std::time::Instant::now());
        loop {
            match ends[to].transport.receive(Rank::new(from as u32), &mut [IoSliceMut::new(&mut byte)]) {
                Moved::Bytes(1) => break,
                Moved::Blocked => ends[to].look_for(now, Duration::from_millis(1)),
                other => panic!("{other:?}"),
            }
            assert!(started.elapsed() < PATIENCE, "waited in vain");
        }
        assert_eq!(byte, [42]);
    }
}

/// A rank that computed for longer than a connection may take was reported as lost, and the job was over.
#[test]
fn a_rank_that_is_away_when_it_is_dialled_is_not_lost() {
    for (dialer, acceptor) in [(0, 1), (1, 0)] {
        let mut ends = ends(2);
        ends[dialer].connect(Duration::ZERO, acceptor as u32);
        let is_connected = |ends: &[End]| ends[dialer].transport.next_deadline().is_none();
        look_until(&mut ends, &[dialer], SECOND, is_connected);
        let late = 1000 * SECOND;
        ends[dialer].look(late);
        assert!(!ends[dialer].is_open(acceptor as u32));
        look_until(&mut ends, &[0, 1], late, |ends| ends[0].is_open(1) && ends[1].is_open(0));
        assert_linked(&mut ends, late);
        assert_eq!(ends[acceptor].transport.take_incoming(), Some(Rank::new(dialer as u32)));
        assert_eq!(ends[dialer].transport.take_incoming(), None);
    }
}

/// A rank that began to dial and then computed for a long time finds its connection made, and must not report it as too slow.
#[test]
fn a_rank_that_dials_and_goes_away_is_not_lost_to_itself() {
    let mut ends = ends(2);
    ends[0].connect(Duration::ZERO, 1);
    let late = 1000 * SECOND;
    look_until(&mut ends, &[0, 1], late, |ends| ends[0].is_open(1) && ends[1].is_open(0));
    assert_linked(&mut ends, late);
}

/// The accepting rank counted the time in which it computed against the connection.
#[test]
fn a_rank_that_accepts_and_goes_away_does_not_close_the_connection_when_it_is_back() {
    let mut ends = ends(2);
    ends[0].connect(Duration::ZERO, 1);
    // The connection is accepted before the dialer has sent anything.
    look_until(&mut ends, &[1], Duration::ZERO, |ends| ends[1].transport.next_deadline().is_some());
    look_until(&mut ends, &[0], Duration::ZERO, |ends| ends[0].transport.next_deadline().is_none());
    let late = 1000 * SECOND;
    look_until(&mut ends, &[1, 0], late, |ends| ends[0].is_open(1) && ends[1].is_open(0));
    assert_linked(&mut ends, late);
}

/// A dialer that computes in the middle of the handshake is disconnected like any other client, and dials again afterwards.
#[test]
fn a_dialler_that_kept_the_acceptor_waiting_dials_again() {
    let mut ends = ends(2);
    ends[0].connect(Duration::ZERO, 1);
    look_until(&mut ends, &[1], Duration::ZERO, |ends| ends[1].transport.next_deadline().is_some());
    for second in 1..=5 {
        ends[1].look(second * SECOND);
    }
    assert_eq!(ends[1].transport.next_deadline(), None, "the connection has been closed");
    let late = 20 * SECOND;
    look_until(&mut ends, &[0, 1], late, |ends| ends[0].is_open(1) && ends[1].is_open(0));
    assert_linked(&mut ends, late);
}

/// A process that closes the connection at once is not a rank of this job, so it is not dialed again.
#[test]
fn a_connection_that_is_closed_at_once_is_lost() {
    let mut ends = ends(2);
    let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    ends[0].transport.addresses[1] = stranger.local_addr().unwrap();
    ends[0].connect(Duration::ZERO, 1);
    drop(stranger.accept().unwrap());
    look_until(&mut ends, &[0], SECOND, |ends| ends[0].why_lost(1).is_some());
    assert!(ends[0].why_lost(1).unwrap().starts_with("no connection: "), "{:?}", ends[0].why_lost(1));
}

/// A machine that does not accept the connection is lost at the connect deadline, and not earlier.
#[test]
fn a_machine_that_does_not_answer_is_lost() {
    let mut ends = ends(2);
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    // The kernel does not answer once its backlog is full.
    let full = Duration::from_millis(100);
    let taken: Vec<_> = std::iter::from_fn(|| StdStream::connect_timeout(&address, full).ok()).collect();
    assert!(taken.len() < 100);
    ends[0].transport.addresses[1] = address;
    ends[0].connect(SECOND, 1);
    assert_eq!(ends[0].transport.next_deadline(), Some(SECOND + CONNECT_TIMEOUT));
    ends[0].look(CONNECT_TIMEOUT);
    assert_eq!(ends[0].why_lost(1), None);
    ends[0].look(SECOND + CONNECT_TIMEOUT);
    assert_eq!(ends[0].why_lost(1), Some("no connection within 5 s"));
}

/// Both ranks dial at the same time, many times, and handle events in any order: they choose the same connection.
#[test]
fn both_dial_and_one_connection_comes_of_it() {
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut ends = ends(2);
        let mut to_dial = vec![0, 1];
        let started = std::time::Instant::now();
        while !to_dial.is_empty() || !ends[0].is_open(1) || !ends[1].is_open(0) {
            assert!(started.elapsed() < PATIENCE, "seed {seed}: waited in vain");
            let which = random.random_range(0..2);
            if random.random_bool(0.3) {
                if let Some(at) = to_dial.iter().position(|&dialer| dialer == which) {
                    to_dial.remove(at);
                    ends[which].connect(Duration::ZERO, 1 - which as u32);
                }
            } else {
                ends[which].look(Duration::ZERO);
            }
        }
        assert_linked(&mut ends, Duration::ZERO);
        // The other connection is closed, and neither rank reports its peer as lost.
        look_until(&mut ends, &[0, 1], Duration::ZERO, |ends| {
            ends.iter().all(|end| end.transport.ranks.len() == 1 && end.transport.next_deadline().is_none())
        });
        assert_linked(&mut ends, Duration::ZERO);
    }
}

/// The lower rank's dial fails while the higher rank's connection waits for it: that connection becomes the link.
#[test]
fn a_dial_that_fails_leaves_the_other_ones_connection() {
    let mut ends = ends(2);
    let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    ends[0].transport.addresses[1] = elsewhere.local_addr().unwrap();
    ends[0].connect(Duration::ZERO, 1);
    ends[1].connect(Duration::ZERO, 0);
    let waits = |ends: &[End]| {
        let LinkState::Opening(opening) = &ends[0].transport.links[&Rank::new(1)].state else { return false };
        opening.has_theirs()
    };
    look_until(&mut ends, &[0, 1], Duration::ZERO, waits);
    drop(elsewhere.accept().unwrap());
    look_until(&mut ends, &[0, 1], Duration::ZERO, |ends| ends[0].is_open(1) && ends[1].is_open(0));
    assert_linked(&mut ends, Duration::ZERO);
}

/// 256 silent connections took all places for 5 s, and a rank that came after them could not connect.
#[test]
fn silent_strangers_do_not_keep_a_rank_out() {
    let mut ends = ends(2);
    let address = ends[1].transport.addresses[1];
    let before: Vec<_> = (0..3 * PENDING_MAX).map(|_| StdStream::connect(address).unwrap()).collect();
    ends[0].connect(Duration::ZERO, 1);
    let is_connected = |ends: &[End]| ends[0].transport.next_deadline().is_none();
    look_until(&mut ends, &[0], Duration::ZERO, is_connected);
    let behind: Vec<_> = (0..PENDING_MAX).map(|_| StdStream::connect(address).unwrap()).collect();
    look_until(&mut ends, &[1, 0], Duration::ZERO, |ends| ends[0].is_open(1) && ends[1].is_open(0));
    assert_linked(&mut ends, Duration::ZERO);
    // The silent connections that remain have 5 s.
    assert!(ends[1].transport.next_deadline().is_some());
    for second in 1..=5 {
        ends[1].look(second * SECOND);
    }
    assert_eq!(ends[1].transport.next_deadline().filter(|&at| at < 10 * SECOND), None);
    drop((before, behind));
}

/// A process that was started with the rank of its peer got a link.
#[test]
fn a_dialer_that_claims_the_acceptors_rank_is_refused() {
    let mut ends = ends(2);
    ends[0].transport.rank = Rank::new(1);
    ends[0].connect(Duration::ZERO, 1);
    look_until(&mut ends, &[0, 1], Duration::ZERO, |ends| ends[0].why_lost(1).is_some());
    let why = ends[0].why_lost(1).unwrap();
    assert!(why.contains("both processes were started as the same rank"), "{why}");
    assert!(!ends[1].transport.is_open(Rank::new(1)));
}

/// Receives into parts of these lengths until the link has given so many bytes or is lost; what it gave, and why it was lost.
fn receive_all(ends: &mut [End], lengths: &[usize], count: usize) -> (Vec<u8>, Option<String>) {
    let (mut got, started) = (Vec::new(), std::time::Instant::now());
    while got.len() < count {
        assert!(started.elapsed() < PATIENCE, "waited in vain after {} bytes", got.len());
        let mut buffers: Vec<Vec<u8>> = lengths.iter().map(|&length| vec![0; length]).collect();
        let mut parts: Vec<IoSliceMut<'_>> =
            buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
        match ends[1].transport.receive(Rank::ZERO, &mut parts) {
            Moved::Bytes(moved) => got.extend(buffers.concat().into_iter().take(moved)),
            Moved::Blocked => ends[1].look_for(SECOND, Duration::from_millis(1)),
            Moved::Lost(why) | Moved::Corrupt(why) => return (got, Some(why)),
        }
    }
    (got, None)
}

/// For all requested lengths, bytes that were read ahead come first and in order, and the end comes after the last byte.
#[test]
fn what_is_read_ahead_is_neither_lost_nor_late() {
    let mut stream = StdRng::seed_from_u64(7);
    for round in 0..60 {
        let mut ends = ends(2);
        ends[0].connect(Duration::ZERO, 1);
        look_until(&mut ends, &[0, 1], Duration::ZERO, |ends| ends[0].is_open(1) && ends[1].is_open(0));
        let mut sent = Vec::new();
        for _ in 0..stream.random_range(1..6) {
            let length = stream.random_range(1..9000);
            let bytes: Vec<u8> = (0..length).map(|_| stream.random()).collect();
            let moved = ends[0].transport.send(Rank::new(1), &[IoSlice::new(&bytes)]);
            assert_eq!(moved, Moved::Bytes(length));
            sent.extend(bytes);
            if stream.random_bool(0.5) {
                let lengths: Vec<usize> = (0..stream.random_range(1..3))
                    .map(|_| stream.random_range(1..if round % 2 == 0 { 100 } else { 6000 }))
                    .collect();
                let (got, lost) = receive_all(&mut ends, &lengths, stream.random_range(1..=sent.len()));
                assert_eq!((&got[..], lost), (&sent[..got.len()], None));
                sent.drain(..got.len());
            }
        }
        ends[0].transport.finish(Rank::new(1));
        let (got, lost) = receive_all(&mut ends, &[64], usize::MAX);
        assert!(
            got == sent && lost.is_some_and(|why| why.contains("closed the connection")),
            "round {round}"
        );
    }
}

fn has_all(ends: &[End], which: usize, count: usize) -> bool {
    match &ends[which].transport.links[&Rank::new(1 - which as u32)].state {
        LinkState::Bundled(bundle) => bundle.connections().count() == count,
        _ => false,
    }
}

/// Two ends of a link with all its connections.
fn bundled(of: u8) -> Vec<End> {
    let mut ends = ends_of(2, of);
    ends[0].connect(Duration::ZERO, 1);
    let are_there = |ends: &[End]| {
        ends[0].is_open(1) && ends[1].is_open(0) && (0..2).all(|end| has_all(ends, end, of.into()))
    };
    look_until(&mut ends, &[0, 1], Duration::ZERO, are_there);
    ends
}

#[test]
fn the_dialer_opens_all_connections_of_a_link() {
    for of in [2, 4, 8] {
        let mut ends = bundled(of);
        assert!(ends.iter().all(|end| end.transport.extras.is_empty()));
        assert_linked(&mut ends, SECOND);
    }
}

/// Both ranks dial at the same time: all connections belong to one link.
#[test]
fn a_simultaneous_open_leaves_one_link_with_all_its_connections() {
    for seed in 0..40 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut ends = ends_of(2, 3);
        ends[0].connect(Duration::ZERO, 1);
        ends[1].connect(Duration::ZERO, 0);
        for _ in 0..random.random_range(0..20) {
            ends[random.random_range(0..2)].look(Duration::ZERO);
        }
        look_until(&mut ends, &[0, 1], Duration::ZERO, |ends| {
            ends[0].is_open(1) && ends[1].is_open(0) && has_all(ends, 0, 3) && has_all(ends, 1, 3)
        });
        assert_linked(&mut ends, Duration::ZERO);
        assert!(ends.iter().all(|end| end.transport.ranks.len() == 3), "seed {seed}");
    }
}

/// A connection that a link does not need is closed, and the link goes on.
#[test]
fn a_connection_that_a_link_does_not_lack_is_closed() {
    let mut ends = bundled(3);
    let wrong = [(1, 3), (2, 3), (1, 2), (3, 4), (0, 3), (0, 1)];
    for (index, of) in wrong {
        let dial = ends[0].transport.open(SECOND, Rank::new(1), Stream { index, of }).unwrap();
        let mut dial = dial;
        let started = std::time::Instant::now();
        loop {
            assert!(started.elapsed() < PATIENCE, "{index} of {of} was not closed");
            ends[1].look_for(SECOND, Duration::from_millis(1));
            match dial.handshake.advance(&mut dial.stream) {
                DialProgress::Ready => panic!("{index} of {of} was taken"),
                DialProgress::Closed(_) | DialProgress::Failed(_) => break,
                DialProgress::Connecting | DialProgress::Pending => {}
            }
        }
        assert!(has_all(&ends, 1, 3) && has_all(&ends, 0, 3));
    }
    // The rank that was dialed opens no connections.
    let dial = ends[1].transport.open(SECOND, Rank::ZERO, Stream { index: 7, of: 8 }).unwrap();
    look_until(&mut ends, &[0, 1], SECOND, |ends| ends[0].transport.next_deadline().is_none());
    drop(dial);
    assert_linked(&mut ends, SECOND);
}

/// The others close once both ends have decided, in either order, and no data are lost.
#[test]
fn a_link_may_be_left_with_one_connection() {
    let mut ends = bundled(4);
    ends[0].transport.use_single_connection();
    assert_linked(&mut ends, SECOND);
    assert!(has_all(&ends, 0, 4) && has_all(&ends, 1, 4));
    ends[1].transport.use_single_connection();
    assert_linked(&mut ends, SECOND);
    assert_linked(&mut ends, SECOND);
    assert!(has_all(&ends, 0, 1) && has_all(&ends, 1, 1));
    assert_linked(&mut ends, SECOND);
}

/// The connections in the backlog are reported once. After an error they waited until another one came.
#[test]
fn waiting_connections_are_accepted_when_descriptors_are_free_again() {
    // The limit applies to the whole process, so a separate process runs this part.
    const CHILD: &str = "RING_TEST_NO_DESCRIPTORS";
    if std::env::var_os(CHILD).is_none() {
        let name = "transport::tcp::tests::waiting_connections_are_accepted_when_descriptors_are_free_again";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", name, "--test-threads", "1"]).env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let mut ends = ends(2);
    ends[0].connect(Duration::ZERO, 1);
    let is_connected = |ends: &[End]| ends[0].transport.next_deadline().is_none();
    look_until(&mut ends, &[0], Duration::ZERO, is_connected);
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let next = std::fs::File::open("/dev/null").unwrap();
    let current = Some(next.as_raw_fd() as u64);
    drop(next);
    let none = rustix::process::Rlimit { current, ..limits };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
    ends[1].look(Duration::ZERO);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limits).unwrap();
    // There is no further event, so a timer is necessary.
    let again = ends[1].transport.next_deadline().expect("another attempt");
    assert!(again > Duration::ZERO && again < SECOND, "{again:?}");
    look_until(&mut ends, &[0, 1], again, |ends| ends[0].is_open(1) && ends[1].is_open(0));
}
