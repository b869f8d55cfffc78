//! Benchmarks of collectives between two ranks in one process, over TCP on the loopback interface and in shared memory. To
//! measure ranks in separate processes, which is how users run them, use `ringbench`.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringtrain::group::LocalTransport;
use ringtrain::rendezvous::{LaunchedRank, NoticeReceiver, Server, ServerOptions};
use ringtrain::verbs::AllToAll;
use ringtrain::wire::Secret;
use ringtrain::{Error, Group, JoinMethod, JoinOptions, Rank, ReduceOp, WorldSize};

/// A collective on a buffer of `f32`.
type Collective = fn(&mut Group, &mut [f32]) -> Result<(), Error>;

/// The measured collectives: name, function, and sizes of the buffer in bytes.
const COLLECTIVES: [(&str, Collective, &[usize]); 6] = [
    ("all_reduce", |group, buffer| group.all_reduce(buffer, ReduceOp::Sum), &[64, 64 << 10, 4 << 20]),
    ("reduce_scatter", |group, buffer| group.reduce_scatter(buffer, ReduceOp::Sum).map(|_| ()), &[64 << 10]),
    ("all_gather", |group, buffer| group.all_gather(buffer), &[64 << 10]),
    // Rank 0 measures the time. Rank 1 is the root, so the broadcast ends on rank 0 when rank 0 has received the data.
    ("broadcast", |group, buffer| group.broadcast(buffer, Rank::new(1)), &[64 << 10]),
    ("all_to_all", |group, buffer| group.call(AllToAll::new()).run_from(&*buffer).map(drop), &[64 << 10]),
    ("barrier", |group, _| group.barrier(), &[0]),
];

/// A command from rank 0 to rank 1: the index of the collective, the number of elements, and the number of iterations.
type Command = [u64; 3];

/// The command that ends rank 1.
const END: Command = [u64::MAX, 0, 0];

/// Runs the commands that rank 0 broadcasts. Rank 1 calls this function.
fn run_commands(mut group: Group) {
    let mut command: Command = END;
    let mut buffer = Vec::new();
    loop {
        group.broadcast(&mut command, Rank::ZERO).expect("rank 0 does not fail");
        if command == END {
            return;
        }
        let [index, length, iterations] = command;
        let (_, collective, _) = COLLECTIVES[index as usize];
        buffer.resize(length as usize, 0f32);
        for _ in 0..iterations {
            collective(&mut group, &mut buffer).expect("rank 0 does not fail");
        }
    }
}

/// Runs a collective on both ranks and returns the duration of all iterations. Rank 0 calls this function.
fn measure(group: &mut Group, index: usize, buffer: &mut [f32], iterations: u64) -> Duration {
    let mut command: Command = [index as u64, buffer.len() as u64, iterations];
    group.broadcast(&mut command, Rank::ZERO).expect("rank 1 does not fail");
    let started = Instant::now();
    for _ in 0..iterations {
        COLLECTIVES[index].1(group, buffer).expect("rank 1 does not fail");
    }
    started.elapsed()
}

/// Starts a job of two ranks. Returns the group of rank 0 and the thread of rank 1.
fn start_two_ranks(transport: LocalTransport) -> (Group, JoinHandle<()>) {
    let world = WorldSize::new(2).expect("2 is a valid size");
    let secret = Secret::new(b"a secret for benchmarks").expect("the secret is long enough");
    let options = JoinOptions { secret: secret.clone(), transport, ..JoinOptions::default() };
    let (job_id, start_timeout) = ([0; 16], options.start_timeout);
    let server_options = ServerOptions {
        host: std::net::Ipv4Addr::LOCALHOST.into(),
        ports: None,
        world,
        secret,
        job_id,
        start_timeout,
        notices: NoticeReceiver::LowestRank,
    };
    let server = Server::start(server_options).expect("the rendezvous starts");
    let rendezvous = server.address();
    let method = |rank| {
        JoinMethod::Launched(LaunchedRank {
            listen: None,
            rank: Rank::new(rank),
            world,
            rendezvous,
            job_id,
            start_timeout: None,
            local_processors: None,
        })
    };
    let other = JoinOptions { method: method(1), ..options.clone() };
    let thread = thread::spawn(move || run_commands(Group::join(&other).expect("rank 1 joins")));
    let group = Group::join(&JoinOptions { method: method(0), ..options }).expect("rank 0 joins");
    (group, thread)
}

fn bench_collectives(c: &mut Criterion) {
    for transport in [LocalTransport::Tcp, LocalTransport::Shm] {
        let (mut rank_0, thread) = start_two_ranks(transport);
        let mut group = c.benchmark_group(format!("2 ranks, {}", rank_0.transport()));
        for (index, (name, _, sizes)) in COLLECTIVES.into_iter().enumerate() {
            for &bytes in sizes {
                let mut buffer = vec![0f32; bytes / 4];
                group.throughput(Throughput::Bytes(bytes as u64));
                group.bench_function(BenchmarkId::new(name, bytes), |b| {
                    b.iter_custom(|iterations| measure(&mut rank_0, index, &mut buffer, iterations));
                });
            }
        }
        group.finish();
        rank_0.broadcast(&mut END.clone(), Rank::ZERO).expect("rank 1 does not fail");
        thread.join().expect("rank 1 does not panic");
    }
}

criterion_group!(benches, bench_collectives);
criterion_main!(benches);
