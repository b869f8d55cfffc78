//! Ranks join a job while many idle connections of other programs, called strangers, are open to their ports.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::util::ranks::{peers_file, peers_file_options, server_options};
use crate::util::{if_long_tests_else, wait_until};
use ringtrain::rendezvous::{LaunchedRank, Server};
use ringtrain::wire::Secret;
use ringtrain::{Group, JoinMethod, JoinOptions, Rank, ReduceOp, WorldSize};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Protocol, Socket, Type};

/// The number of ranks of each job.
const RANKS: u32 = 4;
/// The time within which all ranks must join while strangers are idle.
const JOIN_TIME_MAX: Duration = Duration::from_secs(5);
/// The time within which all ranks must join while strangers connect again and again, which keeps the processors of
/// this machine busy.
const BUSY_JOIN_TIME_MAX: Duration = Duration::from_secs(15);

/// The addresses from which strangers connect. The ranks connect from 127.0.0.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StrangerAddresses {
    /// All strangers have the address of the ranks.
    Same,
    /// Each stranger has its own address.
    Different,
}

/// What a stranger does when its connection is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StrangerOnClose {
    Stay,
    ConnectAgain,
}

/// Idle connections to ranks. The connections stay open until this value is dropped.
struct Strangers {
    is_over: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Strangers {
    /// Opens `count` connections to each of the targets. A target may begin to listen later.
    fn start(
        targets: Vec<SocketAddr>,
        count: usize,
        sources: StrangerAddresses,
        on_close: StrangerOnClose,
    ) -> Self {
        let (is_over, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (over, counter) = (Arc::clone(&is_over), Arc::clone(&opened));
        let hold = move || {
            let source = |number| match sources {
                StrangerAddresses::Same => Ipv4Addr::LOCALHOST.into(),
                StrangerAddresses::Different => Ipv4Addr::from(0x7f01_0001 + number).into(),
            };
            let mut open: Vec<Vec<Socket>> = targets.iter().map(|_| Vec::new()).collect();
            while !over.load(Ordering::SeqCst) {
                for (target, open) in targets.iter().zip(&mut open) {
                    if on_close == StrangerOnClose::ConnectAgain {
                        open.retain(|socket| !is_closed(socket));
                    }
                    while open.len() < count
                        && let Some(socket) = connect(*target, source(open.len() as u32))
                    {
                        open.push(socket);
                        counter.fetch_add(1, Ordering::SeqCst);
                    }
                }
                thread::yield_now();
            }
        };
        Self { is_over, opened, thread: Some(thread::spawn(hold)) }
    }

    fn wait_until_open(&self, count: usize) {
        wait_until("the strangers are connected", || self.opened.load(Ordering::SeqCst) >= count);
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the strangers do not panic");
        }
    }
}

/// Connects without waiting for the answer of the target. Returns `None` if the target does not listen.
fn connect(target: SocketAddr, source: IpAddr) -> Option<Socket> {
    let socket =
        Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).expect("a file descriptor is free");
    // Do not bind to the address of the ranks, because `bind` might take a port on which a rank is about to listen.
    if source != target.ip() {
        socket.bind(&SocketAddr::new(source, 0).into()).expect("a port is free");
    }
    socket.set_nonblocking(true).expect("the socket is open");
    let in_progress = rustix::io::Errno::INPROGRESS.raw_os_error();
    match socket.connect(&target.into()) {
        Err(error) if error.raw_os_error() != Some(in_progress) => None,
        _ => Some(socket),
    }
}

fn is_closed(socket: &Socket) -> bool {
    use std::io::ErrorKind::{NotConnected, WouldBlock};
    match socket.peek(&mut [std::mem::MaybeUninit::uninit()]) {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), NotConnected | WouldBlock),
    }
}

/// Allows this process as many open files as the operating system permits.
fn raise_open_files_limit(needed: usize) {
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.unwrap_or(u64::MAX);
    assert!(maximum >= needed as u64, "this test needs {needed} open files (ulimit -Hn)");
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
        .expect("below the maximum");
}

/// Starts a thread for each rank. The thread joins the job with the options of its rank, and checks the sum of an
/// all-reduce.
fn join_all(options: Vec<JoinOptions>) -> Vec<JoinHandle<()>> {
    let join = |options: JoinOptions| {
        thread::spawn(move || {
            let mut group = Group::join(&options).expect("the rank joins");
            let mut sum = [1u32; 1000];
            group.all_reduce(&mut sum, ReduceOp::Sum).expect("the links work");
            assert_eq!(sum, [RANKS; 1000]);
        })
    };
    options.into_iter().map(join).collect()
}

/// The number of strangers for each port, the addresses of the strangers, and what a stranger does when its
/// connection is closed.
type StrangersCase = (usize, StrangerAddresses, StrangerOnClose);
/// The case of a usual test run.
const SHORT_RUN: [StrangersCase; 1] = [(600, StrangerAddresses::Same, StrangerOnClose::Stay)];
/// The cases of a long test run. Strangers that connect again load the machine much more than idle strangers, so
/// cases with [`StrangerOnClose::ConnectAgain`] have fewer strangers.
const LONG_RUN: [StrangersCase; 4] = [
    (6000, StrangerAddresses::Same, StrangerOnClose::Stay),
    (6000, StrangerAddresses::Different, StrangerOnClose::Stay),
    (1000, StrangerAddresses::Same, StrangerOnClose::ConnectAgain),
    (1000, StrangerAddresses::Different, StrangerOnClose::ConnectAgain),
];

/// Regression test: before the fix, more than 512 idle connections to a rank's port kept a job from starting.
#[test]
fn ranks_join_by_a_peers_file_in_spite_of_idle_strangers() {
    for &(count, sources, on_close) in if_long_tests_else::<[StrangersCase]>(&LONG_RUN, &SHORT_RUN) {
        let targets = 2;
        raise_open_files_limit(targets * count + 3000);
        let secret = Secret::new(b"a secret for this test").unwrap();
        let file = peers_file(RANKS as usize);
        let addresses = file.resolve_all().unwrap();
        let mut options: Vec<_> = (0..RANKS).map(|rank| peers_file_options(&file, rank, &secret)).collect();
        for options in &mut options {
            options.transport = ringtrain::group::LocalTransport::Tcp;
        }
        // Strangers connect to rank 0 while rank 0 waits for the other ranks, and to rank 1 as soon as rank 1
        // listens.
        let later = options.split_off(1);
        let mut joining = join_all(options);
        let first = Strangers::start(vec![addresses[0]], count, sources, on_close);
        first.wait_until_open(count);
        let _others = Strangers::start(addresses[1..targets].to_vec(), count, sources, on_close);
        let started = Instant::now();
        joining.extend(join_all(later));
        for rank in joining {
            rank.join().unwrap();
        }
        let took = started.elapsed();
        println!(
            "peers file, {count} strangers for each port, {sources:?}, {on_close:?}: joined after {took:?}"
        );
        assert!(took < join_time_max(on_close), "{took:?}");
    }
}

/// Regression test: before the fix, more than 512 idle connections to the launcher's rendezvous kept a job from
/// starting.
#[test]
fn ranks_join_under_a_launcher_in_spite_of_idle_strangers() {
    for &(count, sources, on_close) in if_long_tests_else::<[StrangersCase]>(&LONG_RUN, &SHORT_RUN) {
        raise_open_files_limit(count + 3000);
        let (world, job_id) = (WorldSize::new(RANKS).unwrap(), [7; 16]);
        let secret = Secret::new(b"a secret for this test").unwrap();
        let start_timeout = Duration::from_secs(20);
        let server = Server::start(server_options(world, secret.clone(), job_id, start_timeout)).unwrap();
        let strangers = Strangers::start(vec![server.address()], count, sources, on_close);
        strangers.wait_until_open(count);
        let started = Instant::now();
        let options = world.ranks().map(|rank| JoinOptions {
            method: JoinMethod::Launched(LaunchedRank {
                listen: None,
                rank: Rank::new(rank.get()),
                world,
                rendezvous: server.address(),
                job_id,
                start_timeout: None,
                local_processors: None,
            }),
            secret: secret.clone(),
            start_timeout,
            ..JoinOptions::default()
        });
        for rank in join_all(options.collect()) {
            rank.join().unwrap();
        }
        let took = started.elapsed();
        println!("launcher, {count} strangers, {sources:?}, {on_close:?}: joined after {took:?}");
        assert!(took < join_time_max(on_close), "{took:?}");
    }
}

fn join_time_max(on_close: StrangerOnClose) -> Duration {
    match on_close {
        StrangerOnClose::Stay => JOIN_TIME_MAX,
        StrangerOnClose::ConnectAgain => BUSY_JOIN_TIME_MAX,
    }
}
