//! Benchmarks of the gradient codecs, in bytes of the `f32` elements per second.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringtrain::codec::{Compression, RandomKeys, codec};

/// The number of elements of a chunk: 256 KiB.
const ELEMENTS: usize = 64 << 10;

const NAMES: [&str; 13] = [
    "fp16",
    "bf16",
    "fp8-e4m3",
    "fp8-e5m2",
    "int8",
    "int8-stochastic",
    "int4",
    "int4-stochastic",
    "qsgd:4",
    "onebit",
    "signsgd",
    "topk:0.01",
    "randomk:0.01",
];

/// Returns elements like those of a gradient: approximately normally distributed, with a standard deviation of 0.01.
fn gradient() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..ELEMENTS).map(|_| ((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * 0.01).collect()
}

fn bench_codecs(c: &mut Criterion) {
    let mut group = c.benchmark_group("codec");
    group.throughput(Throughput::Bytes(ELEMENTS as u64 * 4));
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    let mut values = gradient();
    let keys = RandomKeys { shared: 1, own: 2 };
    for name in NAMES {
        let compression: Compression = name.parse().expect("the name is one of a codec");
        let codec = codec(compression).expect("the compression has a codec");
        let mut words = vec![0; codec.encoded_words(ELEMENTS)];
        group.bench_function(BenchmarkId::new("encode", name), |b| {
            b.iter(|| codec.encode(black_box(&values), keys, &mut words));
        });
        let mut decoded = vec![0.0; ELEMENTS];
        group.bench_function(BenchmarkId::new("decode", name), |b| {
            b.iter(|| codec.decode(black_box(&words), keys, &mut decoded));
        });
        // The benchmark is worthless if the codec is wrong: the decoded elements have, at least, the signs of the elements.
        assert!(values.iter().zip(&decoded).all(|(value, decoded)| value * decoded >= 0.0), "{name}");
        values.rotate_left(1);
    }
    group.finish();
}

criterion_group!(benches, bench_codecs);
criterion_main!(benches);
