//! All-reduce between two ranks in one process, over real TCP on loopback. For figures between processes, which is what
//! users have, see `ringbench`.

use std::thread::{self, JoinHandle};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringtrain::rendezvous::{Launched, Server};
use ringtrain::wire::Secret;
use ringtrain::{Group, JoinOptions, Meeting, Rank, ReduceOp, WorldSize};

/// What rank 0 tells rank 1 to do next: elements in the upper half, iterations in the lower; 0 ends.
type Order = [u64; 1];

/// Rank 1: all-reduces whatever length rank 0 broadcasts, until that is 0.
fn serve(mut group: Group) {
    let mut order: Order = [0];
    let mut buffer = Vec::new();
    loop {
        group.broadcast(&mut order, Rank::ZERO).expect("rank 0 is there");
        if order == [0] {
            return;
        }
        let [length, iterations] = [order[0] >> 32, order[0] & u64::from(u32::MAX)];
        buffer.resize(length as usize, 0f32);
        for _ in 0..iterations {
            group.all_reduce(&mut buffer, ReduceOp::Sum).expect("rank 0 is there");
        }
    }
}

fn pair() -> (Group, JoinHandle<()>) {
    let world = WorldSize::new(2).expect("a world");
    let secret = Secret::new(b"a secret for benchmarks").expect("long enough");
    let options = JoinOptions { secret: secret.clone(), ..JoinOptions::default() };
    let (job_id, start_timeout) = ([0; 16], options.start_timeout);
    let server = Server::start(world, secret, job_id, start_timeout).expect("a rendezvous");
    let rendezvous = server.address();
    let meeting = |rank| {
        Meeting::Launched(Launched { rank: Rank::new(rank), world, rendezvous, job_id, start_timeout: None })
    };
    let other = JoinOptions { meeting: meeting(1), ..options.clone() };
    let thread = thread::spawn(move || serve(Group::join(&other).expect("rank 1 joins")));
    let group = Group::join(&JoinOptions { meeting: meeting(0), ..options }).expect("rank 0 joins");
    (group, thread)
}

fn all_reduce(c: &mut Criterion) {
    let (mut ranks, thread) = pair();
    let mut group = c.benchmark_group("all_reduce, 2 ranks");
    for bytes in [64usize, 64 << 10, 4 << 20] {
        let mut buffer = vec![0f32; bytes / 4];
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |b| {
            b.iter_custom(|iterations| {
                let mut order: Order = [(buffer.len() as u64) << 32 | iterations.min(u64::from(u32::MAX))];
                ranks.broadcast(&mut order, Rank::ZERO).expect("rank 1 is there");
                let started = std::time::Instant::now();
                for _ in 0..iterations {
                    ranks.all_reduce(&mut buffer, ReduceOp::Sum).expect("rank 1 is there");
                }
                started.elapsed()
            });
        });
    }
    group.finish();
    ranks.broadcast(&mut [0u64], Rank::ZERO).expect("rank 1 is there");
    thread.join().expect("rank 1 ends well");
}

criterion_group!(benches, all_reduce);
criterion_main!(benches);
