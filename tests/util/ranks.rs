//! Runs a job inside the test program. Each rank is a thread. The ranks use real sockets and the rendezvous of the
//! launcher.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use ringtrain::group::{LocalTransport, Streams};
use ringtrain::rendezvous::{LaunchedRank, NoticeReceiver, PeersFile, Server, ServerOptions};
use ringtrain::wire::Secret;
use ringtrain::{Group, JoinMethod, JoinOptions, Rank, WorldSize};

/// How the ranks of a test exchange bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TestTransport {
    /// One TCP connection for each pair of ranks, although all ranks are on this host.
    Tcp,
    /// Three TCP connections for each pair of ranks.
    Streams,
    /// Shared memory.
    Shm,
    /// Simulated hosts of two ranks each; if the number of ranks is odd, the last host has one rank. The ranks use
    /// shared memory within a host and TCP between hosts.
    Hosts,
}

impl TestTransport {
    /// The transports with different algorithms. `Streams` has the algorithms of `Tcp`, so `Streams` is not listed.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Shm, Self::Hosts];

    /// Changes the options of a rank so that the rank uses this transport.
    pub fn apply(self, options: &mut JoinOptions) {
        let three = Streams::new(3).expect("a link has at most 8 connections");
        let uses_sockets = matches!(self, Self::Tcp | Self::Streams);
        options.transport = if uses_sockets { LocalTransport::Tcp } else { LocalTransport::Shm };
        options.streams = if self == Self::Streams { three } else { Streams::ONE };
        options.host_id = match &options.method {
            JoinMethod::Launched(LaunchedRank { rank, .. }) if self == Self::Hosts => {
                Some(format!("host {}", rank.get() / 2))
            }
            _ => None,
        };
    }

    /// Does the same as the function [`run_with`], over this transport. `adjust` is called after the options for the
    /// transport are set.
    pub fn run_with<R: Send + 'static>(
        self,
        n: u32,
        adjust: impl Fn(&mut JoinOptions),
        work: impl Fn(Group) -> R + Send + Sync + 'static,
    ) -> Vec<R> {
        let adjust = |options: &mut JoinOptions| {
            self.apply(options);
            adjust(options);
        };
        run_with(n, adjust, work)
    }

    /// Does the same as the function [`run`], over this transport.
    pub fn run<R: Send + 'static>(self, n: u32, work: impl Fn(Group) -> R + Send + Sync + 'static) -> Vec<R> {
        self.run_with(n, |_| {}, work)
    }
}

/// Returns the options of a launcher's rendezvous on a loopback address.
pub fn server_options(
    world: WorldSize,
    secret: Secret,
    job_id: [u8; 16],
    start_timeout: Duration,
) -> ServerOptions {
    let host = std::net::Ipv4Addr::LOCALHOST.into();
    let notices = NoticeReceiver::LowestRank;
    ServerOptions { host, ports: None, world, secret, job_id, start_timeout, notices }
}

/// Runs `work` on every rank of a job of `n` ranks, and returns the results in rank order. `adjust` can change the
/// options of each rank.
pub fn run_with<R: Send + 'static>(
    n: u32,
    adjust: impl Fn(&mut JoinOptions),
    work: impl Fn(Group) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let world = WorldSize::new(n).expect("a job has at least one rank");
    let secret = Secret::new(b"a secret for the tests alone").expect("the secret is long enough");
    let job_id = rand::random();
    let start_timeout = Duration::from_secs(20);
    let server = Server::start(server_options(world, secret.clone(), job_id, start_timeout))
        .expect("the rendezvous starts");
    let work = Arc::new(work);
    let threads: Vec<_> = world
        .ranks()
        .map(|rank| {
            let mut options = JoinOptions {
                method: JoinMethod::Launched(LaunchedRank {
                    listen: None,
                    rank,
                    world,
                    rendezvous: server.address(),
                    job_id,
                    start_timeout: None,
                    local_processors: None,
                }),
                secret: secret.clone(),
                start_timeout,
                streams: Streams::ONE,
                ..JoinOptions::default()
            };
            TestTransport::Tcp.apply(&mut options);
            adjust(&mut options);
            let work = Arc::clone(&work);
            thread::spawn(move || work(Group::join(&options).expect("the rank joins")))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("the thread of the rank does not panic")).collect()
}

/// Does the same as [`run_with`], with the default options.
pub fn run<R: Send + 'static>(n: u32, work: impl Fn(Group) -> R + Send + Sync + 'static) -> Vec<R> {
    run_with(n, |_| {}, work)
}

/// Returns the ranks of a job of `n` ranks.
pub fn ranks(n: u32) -> impl Iterator<Item = Rank> {
    (0..n).map(Rank::new)
}

/// Returns the options with which `rank` joins the job that `file` describes. All ranks must use the same `secret`.
pub fn peers_file_options(file: &PeersFile, rank: u32, secret: &Secret) -> JoinOptions {
    JoinOptions {
        method: JoinMethod::Peers { file: file.clone(), rank: Rank::new(rank), bind: None },
        secret: secret.clone(),
        start_timeout: Duration::from_secs(20),
        ..JoinOptions::default()
    }
}

/// Returns a peers file of `n` ranks, with ports that [`reserve_ports`] has reserved.
pub fn peers_file(n: usize) -> PeersFile {
    PeersFile::parse(Path::new("hosts.txt"), &peers_text(n)).expect("the peers file is valid")
}

/// Returns the text of a peers file of `n` ranks, with ports that [`reserve_ports`] has reserved.
pub fn peers_text(n: usize) -> String {
    reserve_ports(n).iter().map(SocketAddr::to_string).collect::<Vec<_>>().join("\n")
}

thread_local! {
    static RESERVED_PORTS: RefCell<Vec<Socket>> = const { RefCell::new(Vec::new()) };
}

/// Reserves `n` loopback ports until the thread of the test ends. The kernel gives a reserved port neither to a listener
/// without a fixed port nor to a connection. A rank can still listen on the port, because the rank allows the reuse of
/// addresses, and the socket that reserves the port does not listen.
fn reserve_ports(n: usize) -> Vec<SocketAddr> {
    let reserve = || -> io::Result<(Socket, SocketAddr)> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let address = socket.local_addr()?.as_socket().expect("the address is an IP address");
        Ok((socket, address))
    };
    (0..n)
        .map(|_| {
            let (socket, address) = reserve().expect("a port is free");
            RESERVED_PORTS.with_borrow_mut(|sockets| sockets.push(socket));
            address
        })
        .collect()
}
