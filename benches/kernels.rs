//! Reduction kernels and half-precision codecs: bytes of the accumulator by second.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use ringtrain::codec::Narrow;
use ringtrain::reduce::{Kernels, kernels};
use ringtrain::{DType, ReduceOp};

/// A segment: both slices stay in the L2 cache, as they do between socket and sum.
const SEGMENT_BYTES: usize = 128 << 10;

fn reduce(c: &mut Criterion) {
    let mut group = c.benchmark_group("reduce");
    group.throughput(Throughput::Bytes(SEGMENT_BYTES as u64));
    // Words, so that they are aligned for every element type.
    let mut accumulator = vec![0u64; SEGMENT_BYTES / 8];
    let input = vec![0u64; SEGMENT_BYTES / 8];
    let mut measure = |name: &str, dtype: DType, kernels: &Kernels| {
        group.bench_function(BenchmarkId::new(name, dtype), |b| {
            b.iter(|| {
                let accumulator = bytemuck::cast_slice_mut(&mut accumulator);
                let kernel = &kernels.reduce_last;
                kernel.apply(black_box(accumulator), bytemuck::cast_slice(&input), 4);
            });
        });
    };
    let of_numbers = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max];
    let numbers = DType::NUMBERS.iter().flat_map(|&dtype| of_numbers.map(|op| (dtype, op)));
    // One of each further kind: bits, truth values, values with their location.
    let others = [
        (DType::U64, ReduceOp::BitXor),
        (DType::F32, ReduceOp::LogicalAnd),
        (DType::F32Loc, ReduceOp::MinLoc),
        (DType::I64Loc, ReduceOp::MaxLoc),
    ];
    for (dtype, op) in numbers.chain(others) {
        measure(op.name(), dtype, &kernels(dtype, op).expect("defined on it"));
    }
    measure("custom", DType::F32, &Kernels::custom(|a: &f32, b: &f32| a + b));
    group.finish();
}

fn codec<H: Narrow>(c: &mut Criterion, name: &str) {
    let mut group = c.benchmark_group("codec");
    let mut wide = vec![1.5f32; SEGMENT_BYTES / 4];
    let mut narrow = vec![H::ZERO; wide.len()];
    group.throughput(Throughput::Bytes(SEGMENT_BYTES as u64));
    group.bench_function(BenchmarkId::new("encode", name), |b| {
        b.iter(|| H::encode(black_box(&wide), &mut narrow));
    });
    group.bench_function(BenchmarkId::new("decode", name), |b| {
        b.iter(|| H::decode(black_box(&narrow), &mut wide));
    });
    group.finish();
}

fn codecs(c: &mut Criterion) {
    codec::<f16>(c, "fp16");
    codec::<bf16>(c, "bf16");
}

criterion_group!(benches, reduce, codecs);
criterion_main!(benches);
