//! What an operation costs beside its bytes: building its schedule, writing and reading its frames' headers.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use ringtrain::types::{Algorithm, Contract, Operation};
use ringtrain::wire::{Header, Kind};
use ringtrain::{DType, Rank, ReduceOp, WorldSize, schedule};

const COUNT: usize = 16 << 20;
const BLOCK: usize = 2 << 20;

fn schedules(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    for ranks in [2, 8, 64] {
        let world = WorldSize::new(ranks).expect("a world");
        group.bench_function(BenchmarkId::new("all_reduce", ranks), |b| {
            b.iter(|| schedule::all_reduce(black_box(world), Rank::ZERO, COUNT, BLOCK));
        });
        group.bench_function(BenchmarkId::new("barrier", ranks), |b| {
            b.iter(|| schedule::barrier(black_box(world), Rank::ZERO));
        });
    }
    group.finish();
}

fn headers(c: &mut Criterion) {
    let contract = Contract {
        operation: Operation::AllReduce,
        dtype: DType::F32,
        reduction: Some(ReduceOp::Sum),
        algorithm: Algorithm::Ring,
        root: Rank::ZERO,
        count: COUNT as u64,
        layout: 0,
    };
    let header = Header {
        kind: Kind::Data,
        group: 0,
        sequence: 7,
        contract,
        offset: 1 << 20,
        message: 0,
        eager: false,
        payload_bytes: 128 << 10,
        payload_crc: None,
    };
    let bytes = header.encode();
    let mut group = c.benchmark_group("header");
    group.bench_function("encode", |b| b.iter(|| black_box(&header).encode()));
    group.bench_function("decode", |b| b.iter(|| Header::decode(black_box(&bytes))));
    group.finish();
}

criterion_group!(benches, schedules, headers);
criterion_main!(benches);
