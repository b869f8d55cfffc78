//! Collectives between two ranks in one process, over real TCP on loopback and in shared memory. For figures between
//! processes, which is what users have, see `ringbench`.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringtrain::group::LocalTransport;
use ringtrain::rendezvous::{Launched, Server};
use ringtrain::wire::Secret;
use ringtrain::{Error, Group, JoinMethod, JoinOptions, Rank, ReduceOp, WorldSize};

/// A collective on a buffer of `f32`.
type Collective = fn(&mut Group, &mut [f32]) -> Result<(), Error>;

/// What is measured, and the bytes of its buffers.
const COLLECTIVES: [(&str, Collective, &[usize]); 6] = [
    ("all_reduce", |group, buffer| group.all_reduce(buffer, ReduceOp::Sum), &[64, 64 << 10, 4 << 20]),
    ("reduce_scatter", |group, buffer| group.reduce_scatter(buffer, ReduceOp::Sum).map(|_| ()), &[64 << 10]),
    ("all_gather", |group, buffer| group.all_gather(buffer), &[64 << 10]),
    // Rank 0 has the clock, and knows that a broadcast has ended when it has received.
    ("broadcast", |group, buffer| group.broadcast(buffer, Rank::new(1)), &[64 << 10]),
    ("all_to_all", |group, buffer| group.all_to_all(&*buffer).map(drop), &[64 << 10]),
    ("barrier", |group, _| group.barrier(), &[0]),
];

/// What rank 0 tells rank 1 to do next: which collective, on how many elements, and how often; [`END`] ends.
type Order = [u64; 3];

const END: Order = [u64::MAX, 0, 0];

/// Rank 1: runs the operation that rank 0 broadcasts.
fn serve(mut group: Group) {
    let mut order: Order = END;
    let mut buffer = Vec::new();
    loop {
        group.broadcast(&mut order, Rank::ZERO).expect("rank 0 is there");
        if order == END {
            return;
        }
        let [index, length, iterations] = order;
        let (_, collective, _) = COLLECTIVES[index as usize];
        buffer.resize(length as usize, 0f32);
        for _ in 0..iterations {
            collective(&mut group, &mut buffer).expect("rank 0 is there");
        }
    }
}

/// Rank 0: how long so many iterations take.
fn measure(group: &mut Group, index: usize, buffer: &mut [f32], iterations: u64) -> Duration {
    let mut order: Order = [index as u64, buffer.len() as u64, iterations];
    group.broadcast(&mut order, Rank::ZERO).expect("rank 1 is there");
    let started = Instant::now();
    for _ in 0..iterations {
        COLLECTIVES[index].1(group, buffer).expect("rank 1 is there");
    }
    started.elapsed()
}

fn pair(transport: LocalTransport) -> (Group, JoinHandle<()>) {
    let world = WorldSize::new(2).expect("a world");
    let secret = Secret::new(b"a secret for benchmarks").expect("long enough");
    let options = JoinOptions { secret: secret.clone(), transport, ..JoinOptions::default() };
    let (job_id, start_timeout) = ([0; 16], options.start_timeout);
    let server = Server::start(std::net::Ipv4Addr::LOCALHOST.into(), world, secret, job_id, start_timeout)
        .expect("a rendezvous");
    let rendezvous = server.address();
    let method = |rank| {
        JoinMethod::Launched(Launched {
            rank: Rank::new(rank),
            world,
            rendezvous,
            job_id,
            start_timeout: None,
            local_processors: None,
        })
    };
    let other = JoinOptions { method: method(1), ..options.clone() };
    let thread = thread::spawn(move || serve(Group::join(&other).expect("rank 1 joins")));
    let group = Group::join(&JoinOptions { method: method(0), ..options }).expect("rank 0 joins");
    (group, thread)
}

fn collectives(c: &mut Criterion) {
    for transport in [LocalTransport::Tcp, LocalTransport::Shm] {
        let (mut ranks, thread) = pair(transport);
        let mut group = c.benchmark_group(format!("2 ranks, {}", ranks.transport()));
        for (index, (name, _, sizes)) in COLLECTIVES.into_iter().enumerate() {
            for &bytes in sizes {
                let mut buffer = vec![0f32; bytes / 4];
                group.throughput(Throughput::Bytes(bytes as u64));
                group.bench_function(BenchmarkId::new(name, bytes), |b| {
                    b.iter_custom(|iterations| measure(&mut ranks, index, &mut buffer, iterations));
                });
            }
        }
        group.finish();
        ranks.broadcast(&mut END.clone(), Rank::ZERO).expect("rank 1 is there");
        thread.join().expect("rank 1 ends well");
    }
}

criterion_group!(benches, collectives);
criterion_main!(benches);
