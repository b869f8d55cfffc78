//! Benchmarks of the fixed costs of an operation: creating a schedule (for links) or a program (for shared memory),
//! encoding and decoding frame headers, and passing frames through the engine and through a queue in shared memory.

use std::hint::black_box;
use std::io::{IoSlice, IoSliceMut};
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringtrain::engine::{Engine, FrameVerdict, OpId, OperationRequest, SendMode, Settings, Transmit};
use ringtrain::schedule::partition::Partition;
use ringtrain::schedule::plan::{SharedSlots, plan};
use ringtrain::schedule::{CollectiveSpec, Schedule};
use ringtrain::shm::{HostMemoryLayout, QueueReceiver, QueueSender, Segment, TOKEN_BYTES};
use ringtrain::types::{Algorithm, Contract, Operation};
use ringtrain::wire::{FrameHeader, FrameKind};
use ringtrain::{DType, Rank, ReduceOp, WorldSize};

/// The number of elements in the buffer of a collective.
const COUNT: usize = 16 << 20;
/// The number of elements in a block of a schedule.
const BLOCK: usize = 2 << 20;
/// The number of elements in a slot in shared memory.
const SLOT: usize = 64 << 10;
const SEGMENT_BYTES: usize = 256 << 10;
/// The number of frames that each of the two ranks sends in [`bench_frames`].
const FRAMES: usize = 64;

fn world_size(ranks: u32) -> WorldSize {
    WorldSize::new(ranks).expect("the number of ranks is at least 1")
}

/// Returns the measured collectives, each with its algorithm.
fn collectives(world: WorldSize) -> Vec<(CollectiveSpec, Algorithm)> {
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

fn bench_schedules(c: &mut Criterion) {
    let mut group = c.benchmark_group("schedule");
    for ranks in [2, 8, 64] {
        let world = world_size(ranks);
        for (collective, algorithm) in collectives(world) {
            let name = format!("{}, {}", collective.operation().name(), algorithm.name());
            group.bench_function(BenchmarkId::new(name, ranks), |b| {
                b.iter(|| black_box(&collective).schedule(algorithm, (world, Rank::ZERO), BLOCK, false));
            });
        }
    }
    group.finish();
}

/// Measures how long one rank takes to create the program of a collective in shared memory.
fn bench_programs(c: &mut Criterion) {
    let mut group = c.benchmark_group("program");
    for ranks in [2, 8, 64] {
        for (count, name) in [(16, "all_reduce of 16"), (COUNT, "all_reduce of 16 Mi")] {
            group.bench_function(BenchmarkId::new(name, ranks), |b| {
                let slots = SharedSlots { world: world_size(ranks), rank: Rank::ZERO, slot_len: SLOT };
                let collective = CollectiveSpec::AllReduce { count };
                b.iter(|| plan(black_box(&collective), slots, count <= SLOT / 8));
            });
        }
    }
    group.finish();
}

fn bench_headers(c: &mut Criterion) {
    let header = FrameHeader {
        kind: FrameKind::Data,
        group: 0,
        sequence: 7,
        contract: contract(Operation::AllReduce, Some(ReduceOp::Sum)),
        offset: 1 << 20,
        step: 0,
        eager: false,
        payload_bytes: 128 << 10,
        payload_crc: None,
    };
    let bytes = header.encode();
    let mut group = c.benchmark_group("header");
    group.bench_function("encode", |b| b.iter(|| black_box(&header).encode()));
    group.bench_function("decode", |b| b.iter(|| FrameHeader::decode(black_box(&bytes))));
    group.finish();
    let segment = vec![1u8; SEGMENT_BYTES];
    let mut group = c.benchmark_group("payload");
    group.throughput(Throughput::Bytes(SEGMENT_BYTES as u64));
    group.bench_function("checksum", |b| b.iter(|| crc32c::crc32c(black_box(&segment))));
    group.finish();
}

/// Returns the arguments of a collective that must be the same on all ranks.
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

/// The engines of two ranks, which exchange frames without a transport.
struct EnginePair([Engine; 2]);

impl EnginePair {
    fn new() -> Self {
        let engine = |rank| {
            let host_names = vec!["one".into(), "two".into()];
            let world = world_size(2);
            Engine::new(Settings {
                rank,
                world,
                segment_bytes: SEGMENT_BYTES,
                checked_links: Vec::new(),
                host_names,
            })
        };
        Self([engine(Rank::ZERO), engine(Rank::new(1))])
    }

    /// Runs an operation on the two ranks until no frames are left to send. Returns the number of ranks on which the
    /// operation has ended.
    fn run(&mut self, request: OperationRequest, schedules: &[Schedule; 2]) -> usize {
        let begun: Vec<OpId> = (self.0.iter_mut().zip(schedules))
            .filter_map(|(engine, schedule)| engine.begin(Duration::ZERO, request, schedule.clone()).ok())
            .collect();
        while self.pass_frame(0) | self.pass_frame(1) {}
        begun.len().min(self.0.iter_mut().filter_map(Engine::take_completed).count())
    }

    /// Passes one frame of rank `from` to the other rank, and encodes and decodes the header of the frame. Returns
    /// false if rank `from` has no frame to send.
    fn pass_frame(&mut self, from: usize) -> bool {
        let [sender, receiver] = [from, 1 - from].map(|rank| Rank::new(rank as u32));
        let header = match self.0[from].poll_transmit(receiver) {
            None => return false,
            Some(Transmit::Control { header, .. }) => header,
            Some(Transmit::Segment { header, .. }) => {
                self.0[from].handle_sent_segment(receiver);
                header
            }
        };
        let header = FrameHeader::decode(black_box(&header.encode())).expect("the header was just encoded");
        let engine = &mut self.0[1 - from];
        if let FrameVerdict::Apply { operation, .. } = engine.handle_header(sender, &header) {
            engine.handle_applied_segment(operation, sender, &header, false);
        }
        true
    }
}

fn bench_frames(c: &mut Criterion) {
    let count = 2 * FRAMES * SEGMENT_BYTES / 4;
    let world = world_size(2);
    let gather = CollectiveSpec::AllGather(Partition::even(count, world));
    let schedules =
        [0, 1].map(|rank| gather.schedule(Algorithm::Ring, (world, Rank::new(rank)), BLOCK, false));
    let contract = Contract { count: count as u64, ..contract(Operation::AllGather, None) };
    let request = OperationRequest {
        group: 0,
        contract,
        timeout: Duration::from_mins(1),
        spent: Duration::ZERO,
        site: Location::caller().into(),
        mode: SendMode::Standard,
    };
    let mut pair = EnginePair::new();
    let mut group = c.benchmark_group("engine");
    group.throughput(Throughput::Elements(2 * FRAMES as u64));
    group.bench_function("frames of an all_gather, 2 ranks", |b| {
        b.iter(|| assert_eq!(pair.run(request, &schedules), 2, "the operation has ended on both ranks"));
    });
    group.finish();
}

/// Measures how long one thread takes to write a frame to a queue in shared memory and to read it.
fn bench_queues(c: &mut Criterion) {
    let layout = HostMemoryLayout::new(2);
    let segment = Segment::create(layout.bytes(), &[0; TOKEN_BYTES]).expect("the system has memory");
    let segment = Arc::new(segment);
    let mut sender = QueueSender::new(Arc::clone(&segment), layout, 0, 1);
    let mut receiver = QueueReceiver::new(segment, layout, 0, 1);
    let mut group = c.benchmark_group("queue");
    for bytes in [72, 4 << 10, 32 << 10] {
        let (sent, mut received) = (vec![1u8; bytes], vec![0u8; bytes]);
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new("write and read", bytes), |b| {
            b.iter(|| {
                let written = sender.write(&[IoSlice::new(&sent)], 0).expect("the receiver is correct");
                let read =
                    receiver.read(&mut [IoSliceMut::new(&mut received)], 0).expect("the sender is correct");
                assert_eq!((written, read.bytes), (bytes, bytes), "the whole frame was moved");
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench_schedules, bench_programs, bench_headers, bench_frames, bench_queues);
criterion_main!(benches);
