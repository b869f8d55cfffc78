//! Benchmarks of reduction kernels, in bytes of the accumulator per second.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
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

criterion_group!(benches, bench_reductions);
criterion_main!(benches);
