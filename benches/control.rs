//! What an operation costs beside its bytes: building its schedule or its plan, writing and reading its frames' headers,
//! and walking through it frame by frame.

use std::hint::black_box;
use std::panic::Location;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringtrain::engine::{Begin, Engine, FrameVerdict, OpId, SendMode, Settings, Transmit};
use ringtrain::schedule::partition::Partition;
use ringtrain::schedule::rounds::{Round, RoundPlan};
use ringtrain::schedule::{CollectiveSpec, Schedule};
use ringtrain::types::{Algorithm, Contract, Operation};
use ringtrain::wire::{Header, Kind};
use ringtrain::{DType, Rank, ReduceOp, WorldSize};

const COUNT: usize = 16 << 20;
const BLOCK: usize = 2 << 20;
/// Elements of a slot in shared memory.
const SLOT: usize = 64 << 10;
const SEGMENT_BYTES: usize = 256 << 10;
/// Frames that each of two ranks sends in [`frames`].
const FRAMES: usize = 64;

fn world(ranks: u32) -> WorldSize {
    WorldSize::new(ranks).expect("a world")
}

/// Collectives of so many ranks and the routes that they may take.
fn works(world: WorldSize) -> Vec<(CollectiveSpec, Algorithm)> {
    let even = || Partition::even(COUNT, world);
    vec![
        (CollectiveSpec::AllReduce { count: COUNT }, Algorithm::Ring),
        (CollectiveSpec::AllReduce { count: COUNT }, Algorithm::Direct),
        (CollectiveSpec::ReduceScatter(even()), Algorithm::Ring),
        (CollectiveSpec::AllGather(even()), Algorithm::Ring),
        (CollectiveSpec::Broadcast { count: COUNT, root: Rank::ZERO }, Algorithm::Tree),
        (CollectiveSpec::AllToAll { send: even(), receive: even(), is_even: true }, Algorithm::Direct),
        (CollectiveSpec::Barrier, Algorithm::Dissemination),
    ]
}

fn schedules(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    for ranks in [2, 8, 64] {
        let place = (world(ranks), Rank::ZERO);
        for (work, algorithm) in works(place.0) {
            let name = format!("{}, {}", work.operation().name(), algorithm.name());
            group.bench_function(BenchmarkId::new(name, ranks), |b| {
                b.iter(|| black_box(&work).schedule(algorithm, place, BLOCK, false));
            });
        }
    }
    group.finish();
}

/// All rounds of a rank in shared memory.
fn plans(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    for ranks in [2, 8, 64] {
        for (count, name) in [(16, "all_reduce of 16"), (COUNT, "all_reduce of 16 Mi")] {
            let mut round = Round::default();
            group.bench_function(BenchmarkId::new(name, ranks), |b| {
                b.iter(|| {
                    let work = CollectiveSpec::AllReduce { count: black_box(count) };
                    let plan = RoundPlan::new(world(ranks), Rank::ZERO, SLOT, SLOT / 8, work);
                    (0..plan.rounds()).for_each(|number| plan.fill(number, &mut round));
                });
            });
        }
    }
    group.finish();
}

fn headers(c: &mut Criterion) {
    let header = Header {
        kind: Kind::Data,
        group: 0,
        sequence: 7,
        contract: contract(Operation::AllReduce, Some(ReduceOp::Sum)),
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
    let segment = vec![1u8; SEGMENT_BYTES];
    let mut group = c.benchmark_group("payload");
    group.throughput(Throughput::Bytes(SEGMENT_BYTES as u64));
    group.bench_function("checksum", |b| b.iter(|| crc32c::crc32c(black_box(&segment))));
    group.finish();
}

fn contract(operation: Operation, reduction: Option<ReduceOp>) -> Contract {
    Contract {
        operation,
        dtype: DType::F32,
        reduction,
        algorithm: Algorithm::Ring,
        root: Rank::ZERO,
        count: COUNT as u64,
        layout: 0,
    }
}

/// Two ranks that have only their engines, and what these say to each other.
struct Pair([Engine; 2]);

impl Pair {
    fn new() -> Self {
        let engine = |rank| {
            let hosts = vec!["one".into(), "two".into()];
            let world = world(2);
            Engine::new(Settings {
                rank,
                world,
                segment_bytes: SEGMENT_BYTES,
                checked_links: Vec::new(),
                hosts,
            })
        };
        Self([engine(Rank::ZERO), engine(Rank::new(1))])
    }

    /// An operation from its beginning to its end on both ranks; how many of them have ended it.
    fn run(&mut self, begin: Begin, schedules: &[Schedule; 2]) -> usize {
        let begun: Vec<OpId> = (self.0.iter_mut().zip(schedules))
            .filter_map(|(engine, schedule)| engine.begin(Duration::ZERO, begin, schedule.clone()).ok())
            .collect();
        while self.pass(0) | self.pass(1) {}
        begun.len().min(self.0.iter_mut().filter_map(Engine::take_completed).count())
    }

    /// One frame from a rank to the other, its header in bytes; whether there was one.
    fn pass(&mut self, from: usize) -> bool {
        let [sender, receiver] = [from, 1 - from].map(|rank| Rank::new(rank as u32));
        let header = match self.0[from].poll_transmit(receiver) {
            None => return false,
            Some(Transmit::Control { header, .. }) => header,
            Some(Transmit::Segment { header, .. }) => {
                self.0[from].transmitted(receiver);
                header
            }
        };
        let header = Header::decode(black_box(&header.encode())).expect("what was just encoded");
        let engine = &mut self.0[1 - from];
        if let FrameVerdict::Apply { operation, .. } = engine.frame(sender, &header) {
            engine.applied(operation, sender, &header, false);
        }
        true
    }
}

fn frames(c: &mut Criterion) {
    let count = 2 * FRAMES * SEGMENT_BYTES / 4;
    let gather = CollectiveSpec::AllGather(Partition::even(count, world(2)));
    let schedules =
        [0, 1].map(|rank| gather.schedule(Algorithm::Ring, (world(2), Rank::new(rank)), BLOCK, false));
    let contract = Contract { count: count as u64, ..contract(Operation::AllGather, None) };
    let begin = Begin {
        group: 0,
        contract,
        timeout: Duration::from_mins(1),
        spent: Duration::ZERO,
        site: Location::caller().into(),
        mode: SendMode::Standard,
    };
    let mut pair = Pair::new();
    let mut group = c.benchmark_group("engine");
    group.throughput(Throughput::Elements(2 * FRAMES as u64));
    group.bench_function("frames of an all_gather, 2 ranks", |b| {
        b.iter(|| assert_eq!(pair.run(begin, &schedules), 2, "it has ended on both ranks"));
    });
    group.finish();
}

criterion_group!(benches, schedules, plans, headers, frames);
criterion_main!(benches);
