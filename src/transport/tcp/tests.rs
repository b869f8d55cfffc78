//! Tests of links in one thread, over real sockets and in virtual time: late ranks, simultaneous dials, several connections.

use std::net::TcpStream as StdStream;
use std::os::fd::AsRawFd as _;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::transport::handshake::{DialProgress, Identity};
use crate::transport::poller::Poller;
use crate::wire::Secret;
use crate::wire::handshake::Job;

/// The time within which the kernel must deliver data over loopback. The tests wait for events and do not sleep.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(10);
pub(super) const SECOND: Duration = Duration::from_secs(1);

/// One rank's transport and event queue.
pub(super) struct TestRank {
    pub(super) transport: TcpTransport,
    pub(super) poller: Poller,
}

impl TestRank {
    /// Handles the events that have occurred, as a rank does when its program calls the library.
    fn handle_events(&mut self, now: Duration) {
        self.wait_and_handle_events(now, Duration::ZERO);
    }

    /// Waits for events, but not longer than `timeout`, and handles the events.
    pub(super) fn wait_and_handle_events(&mut self, now: Duration, timeout: Duration) {
        let mut events = Vec::new();
        self.poller.wait(Some(timeout), &mut events).unwrap();
        self.transport.serve(now, events);
    }

    fn loss_reason(&self, peer: u32) -> Option<&str> {
        match self.transport.links.get(&Rank::new(peer))? {
            TcpLink::Lost(why) => Some(why),
            _ => None,
        }
    }

    fn is_open(&self, peer: u32) -> bool {
        assert_eq!(self.loss_reason(peer), None);
        self.transport.is_open(Rank::new(peer))
    }

    fn connect(&mut self, now: Duration, peer: u32) {
        self.transport.connect(now, Rank::new(peer));
    }

    /// Returns the addresses of the first connection's two ends, in sorted order.
    fn connection_addresses(&self, peer: u32) -> [SocketAddr; 2] {
        let bundle = self.transport.bundle(Rank::new(peer)).expect("the link should be open");
        let stream = bundle.connections().next().expect("the first connection is open");
        let mut ends = [stream.local_addr().unwrap(), stream.peer_addr().unwrap()];
        ends.sort();
        ends
    }
}

pub(super) fn options() -> SocketOptions {
    SocketOptions::new(&CongestionControl::Host, Duration::from_mins(1), None).unwrap()
}

pub(super) fn make_test_ranks(n: u32, streams: u8) -> Vec<TestRank> {
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
            let poller = transport.listener.poller.take().unwrap();
            TestRank { transport, poller }
        })
        .collect()
}

/// Handles the events of `ranks[i]` for each i in `indices`, at the virtual time `now`, until `is_done` returns true.
pub(super) fn handle_events_until(
    ranks: &mut [TestRank],
    indices: &[usize],
    now: Duration,
    mut is_done: impl FnMut(&mut [TestRank]) -> bool,
) {
    let started = std::time::Instant::now();
    while !is_done(ranks) {
        assert!(started.elapsed() < DELIVERY_TIMEOUT, "timed out");
        for &index in indices {
            ranks[index].wait_and_handle_events(now, Duration::from_millis(1));
        }
    }
}

fn is_link_open(ranks: &[TestRank]) -> bool {
    ranks[0].is_open(1) && ranks[1].is_open(0)
}

/// Checks that both ranks use the same connection, and sends one byte in each direction.
pub(super) fn assert_linked(ranks: &mut [TestRank], now: Duration) {
    assert_eq!(ranks[0].connection_addresses(1), ranks[1].connection_addresses(0));
    for (from, to) in [(0, 1), (1, 0)] {
        let [from_rank, to_rank] = [from, to].map(|rank| Rank::new(rank as u32));
        assert_eq!(ranks[from].transport.send(to_rank, &[IoSlice::new(&[42])]), Ok(1));
        let mut byte = [0];
        handle_events_until(ranks, &[to], now, |ranks| {
            match ranks[to].transport.receive(from_rank, &mut [IoSliceMut::new(&mut byte)]) {
                Ok(0) => false,
                received => received == Ok(1) || panic!("{received:?}"),
            }
        });
        assert_eq!(byte, [42]);
    }
}

/// A rank that begins to dial and then computes for a long time must not report that its peer was too slow.
#[test]
fn a_dialing_rank_may_compute_for_a_long_time() {
    let mut ranks = make_test_ranks(2, 1);
    ranks[0].connect(Duration::ZERO, 1);
    let late = 1000 * SECOND;
    handle_events_until(&mut ranks, &[0, 1], late, |ranks| is_link_open(ranks));
    assert_linked(&mut ranks, late);
}

/// If a dialer computes during the handshake, the acceptor closes the connection at the time-out, and the dialer dials again.
#[test]
fn a_dialer_that_was_too_slow_dials_again() {
    let mut ranks = make_test_ranks(2, 1);
    ranks[0].connect(Duration::ZERO, 1);
    handle_events_until(&mut ranks, &[1], Duration::ZERO, |ranks| {
        ranks[1].transport.next_deadline().is_some()
    });
    for second in 1..=5 {
        ranks[1].handle_events(second * SECOND);
    }
    assert_eq!(ranks[1].transport.next_deadline(), None, "the connection has been closed");
    let late = 20 * SECOND;
    handle_events_until(&mut ranks, &[0, 1], late, |ranks| is_link_open(ranks));
    assert_linked(&mut ranks, late);
}

/// The link to a machine that does not accept the connection is lost at the connect deadline, and not earlier.
#[test]
fn a_link_to_a_machine_that_does_not_answer_is_lost() {
    let mut ranks = make_test_ranks(2, 1);
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    // When the backlog of the listening socket is full, the kernel does not answer further connections.
    let full = Duration::from_millis(100);
    let connected: Vec<_> = std::iter::from_fn(|| StdStream::connect_timeout(&address, full).ok()).collect();
    assert!(connected.len() < 100);
    ranks[0].transport.addresses[1] = address;
    ranks[0].connect(SECOND, 1);
    assert_eq!(ranks[0].transport.next_deadline(), Some(SECOND + CONNECT_TIMEOUT));
    ranks[0].handle_events(CONNECT_TIMEOUT);
    assert_eq!(ranks[0].loss_reason(1), None);
    ranks[0].handle_events(SECOND + CONNECT_TIMEOUT);
    assert_eq!(ranks[0].loss_reason(1), Some("no connection within 5 s"));
}

/// The higher rank's connection waits for the lower rank's verdict. When that rank's own dial fails, it becomes the link.
#[test]
fn the_connection_of_the_higher_rank_is_used_if_the_lower_rank_fails() {
    let mut ranks = make_test_ranks(2, 1);
    let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    ranks[0].transport.addresses[1] = elsewhere.local_addr().unwrap();
    ranks[0].connect(Duration::ZERO, 1);
    ranks[1].connect(Duration::ZERO, 0);
    let peers_connection_waits = |ranks: &mut [TestRank]| {
        let TcpLink::Opening(opening) = &ranks[0].transport.links[&Rank::new(1)] else { return false };
        opening.theirs.is_some()
    };
    handle_events_until(&mut ranks, &[0, 1], Duration::ZERO, peers_connection_waits);
    // Regression test: a forked child kept the connections of a link that was being opened, because they were not listed.
    assert_eq!(ranks[0].transport.descriptors().len(), 3, "the listener and both connections");
    drop(elsewhere.accept().unwrap());
    handle_events_until(&mut ranks, &[0, 1], Duration::ZERO, |ranks| is_link_open(ranks));
    assert_linked(&mut ranks, Duration::ZERO);
}

/// Returns whether `ranks[index]` has `count` open connections.
fn has_connections(ranks: &[TestRank], index: usize, count: usize) -> bool {
    let bundle = ranks[index].transport.bundle(Rank::new(1 - index as u32));
    bundle.is_some_and(|bundle| bundle.connections().count() == count)
}

/// Two ranks dial each other at the same time, and handle their events in a random order. They get one link, all of whose
/// connections are open, and close the connection that they did not choose.
#[test]
fn ranks_that_dial_each_other_open_all_connections_of_one_link() {
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let streams = [1, 3][random.random_range(0..2)];
        let mut ranks = make_test_ranks(2, streams);
        let mut to_dial = vec![0, 1];
        let started = std::time::Instant::now();
        while !to_dial.is_empty() || !is_link_open(&ranks) {
            assert!(started.elapsed() < DELIVERY_TIMEOUT, "seed {seed}: timed out");
            let rank = random.random_range(0..2);
            if random.random_bool(0.3) {
                if let Some(index) = to_dial.iter().position(|&dialer| dialer == rank) {
                    to_dial.remove(index);
                    ranks[rank].connect(Duration::ZERO, 1 - rank as u32);
                }
            } else {
                ranks[rank].handle_events(Duration::ZERO);
            }
        }
        assert_linked(&mut ranks, Duration::ZERO);
        let count = usize::from(streams);
        handle_events_until(&mut ranks, &[0, 1], Duration::ZERO, |ranks| {
            ranks.iter().enumerate().all(|(index, TestRank { transport, .. })| {
                has_connections(ranks, index, count)
                    && transport.peers_by_token.len() == count
                    && transport.next_deadline().is_none()
            })
        });
        assert_linked(&mut ranks, Duration::ZERO);
    }
}

/// After a rank has closed an extra connection that the link does not need, the link still works.
#[test]
fn a_connection_that_a_link_does_not_need_is_closed() {
    let mut ranks = make_test_ranks(2, 3);
    ranks[0].connect(Duration::ZERO, 1);
    let are_open =
        |ranks: &mut [TestRank]| is_link_open(ranks) && (0..2).all(|rank| has_connections(ranks, rank, 3));
    handle_events_until(&mut ranks, &[0, 1], Duration::ZERO, are_open);
    let wrong = [(1, 3), (2, 3), (1, 2), (3, 4), (0, 3), (0, 1)];
    for (index, total) in wrong {
        let dial = ranks[0].transport.open_connection(SECOND, Rank::new(1), StreamId { index, total });
        let mut dial = dial.unwrap();
        handle_events_until(&mut ranks, &[1], SECOND, |_| match dial.handshake.advance(&mut dial.stream) {
            Ok(DialProgress::Ready) => panic!("connection {index} of {total} was accepted"),
            progress => progress.is_err(),
        });
        assert!(has_connections(&ranks, 1, 3) && has_connections(&ranks, 0, 3));
    }
    // Only rank 0, which opened the link, may open further connections. So it refuses the connection that rank 1 opens.
    let dial =
        ranks[1].transport.open_connection(SECOND, Rank::ZERO, StreamId { index: 7, total: 8 }).unwrap();
    handle_events_until(&mut ranks, &[0, 1], SECOND, |ranks| ranks[0].transport.next_deadline().is_none());
    drop(dial);
    assert_linked(&mut ranks, SECOND);
}

/// Regression test: the kernel reports waiting connections only once. Before the fix, connections that arrived while
/// no file descriptor was free waited until a further connection arrived.
#[test]
fn waiting_connections_are_accepted_when_descriptors_are_free_again() {
    // The limit on open files applies to a process, so the test runs in a child process, marked by `CHILD_VARIABLE`.
    const CHILD_VARIABLE: &str = "RING_TEST_NO_DESCRIPTORS";
    if std::env::var_os(CHILD_VARIABLE).is_none() {
        let name = "transport::tcp::tests::waiting_connections_are_accepted_when_descriptors_are_free_again";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output =
            child.args(["--exact", name, "--test-threads", "1"]).env(CHILD_VARIABLE, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let mut ranks = make_test_ranks(2, 1);
    ranks[0].connect(Duration::ZERO, 1);
    let is_connected = |ranks: &mut [TestRank]| ranks[0].transport.next_deadline().is_none();
    handle_events_until(&mut ranks, &[0], Duration::ZERO, is_connected);
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let next_file = std::fs::File::open("/dev/null").unwrap();
    let current = Some(next_file.as_raw_fd() as u64);
    drop(next_file);
    let none_free = rustix::process::Rlimit { current, ..limits };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, none_free).unwrap();
    ranks[1].handle_events(Duration::ZERO);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limits).unwrap();
    // No event reports that descriptors are free again, so the listener needs a timer.
    let next_attempt = ranks[1].transport.next_deadline().expect("there is another attempt");
    assert!(next_attempt > Duration::ZERO && next_attempt < SECOND, "{next_attempt:?}");
    handle_events_until(&mut ranks, &[0, 1], next_attempt, |ranks| is_link_open(ranks));
}
