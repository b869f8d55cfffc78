//! Benchmarks of reduction kernels and half-precision codecs, in bytes of the accumulator per second.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use ringtrain::codec::CompressedElement;
use ringtrain::reduce::{Kernels, kernels};
use ringtrain::{DType, ReduceOp};

/// The size of the accumulator and the size of the input in bytes. The accumulator and the input fit in the L2 cache,
/// like a segment that a rank receives and then reduces.
const SEGMENT_BYTES: usize = 128 << 10;

fn bench_reductions(c: &mut Criterion) {
    let mut group = c.benchmark_group("reduce");
    group.throughput(Throughput::Bytes(SEGMENT_BYTES as u64));
    // A vector of `u64` is aligned for every element type.
    let mut accumulator = vec![0u64; SEGMENT_BYTES / 8];
    let input = vec![0u64; SEGMENT_BYTES / 8];
    let mut measure = |name: &str, dtype: DType, kernels: &Kernels| {
        group.bench_function(BenchmarkId::new(name, dtype), |b| {
            b.iter(|| {
                let accumulator = bytemuck::cast_slice_mut(&mut accumulator);
                let kernel = &kernels.reduce_last;
                kernel.apply(black_box(accumulator), bytemuck::cast_slice(&input));
            });
        });
    };
    let number_ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max];
    let on_numbers = DType::NUMBER_TYPES.iter().flat_map(|&dtype| number_ops.map(|op| (dtype, op)));
    // Examples of all kinds of reductions that are not arithmetic: bitwise, logical, and for values with a location.
    let other_kinds = [
        (DType::U64, ReduceOp::BitXor),
        (DType::F32, ReduceOp::LogicalAnd),
        (DType::F32Loc, ReduceOp::MinLoc),
        (DType::I64Loc, ReduceOp::MaxLoc),
    ];
    for (dtype, op) in on_numbers.chain(other_kinds) {
        let kernels = kernels(dtype, op).expect("the operation is defined for this type");
        measure(op.name(), dtype, &kernels.of_contributions(4));
    }
    measure("custom", DType::F32, &Kernels::custom(|a: &f32, b: &f32| a + b));
    group.finish();
}

fn bench_codec<H: CompressedElement>(c: &mut Criterion, name: &str) {
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

fn bench_codecs(c: &mut Criterion) {
    bench_codec::<f16>(c, "fp16");
    bench_codec::<bf16>(c, "bf16");
}

criterion_group!(benches, bench_reductions, bench_codecs);
criterion_main!(benches);
