//! Tests of compressed all-reduces and reduce-scatters.

use crate::util::ranks::{self, TestTransport};
use ringtrain::verbs::{AllReduce, ReduceScatter};
use ringtrain::{Compression, Compressor, Error, Group, ReduceOp};

/// Each codec, and the bound of the error of an average of values between -1 and 1, without error feedback. Codecs that leave
/// most elements out have no useful bound.
const CODECS: [(&str, f32); 2] = [("fp16", 1e-3), ("bf16", 8e-3)];
const WORLD_SIZES: [u32; 5] = [2, 3, 4, 5, 8];
const NETWORKS: [TestTransport; 2] = [TestTransport::Tcp, TestTransport::Hosts];

fn codecs() -> impl Iterator<Item = (Compression, f32)> {
    CODECS.into_iter().map(|(name, bound)| (name.parse().expect("the codec exists"), bound))
}

/// A value between -1 and 1 that depends on the rank, the step and the index.
fn value(rank: u32, step: u32, index: usize) -> f32 {
    let mixed = (index as u32).wrapping_mul(2_654_435_761) ^ (rank * 977 + step * 131).wrapping_mul(40_503);
    (mixed.wrapping_mul(2_246_822_519) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

fn input(group: &Group, step: u32, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(group.rank().get(), step, index)).collect()
}

/// Returns the exact sum of the inputs.
fn exact_sum(n: u32, step: u32, index: usize) -> f64 {
    (0..n).map(|rank| f64::from(value(rank, step, index))).sum()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn all_ranks_get_the_same_bits_and_the_error_is_bounded() {
    // The last length has two blocks in which the chunks of the ranks have different lengths.
    for (n, count) in WORLD_SIZES.into_iter().zip([1, 1000, 2, 70_003, (1 << 19) + 13]) {
        for network in NETWORKS {
            for (compression, bound) in codecs() {
                let results = network.run(n, move |mut group| {
                    let verb = || AllReduce::new(ReduceOp::Average).compressed(compression);
                    // Both calls are the first call with their compressor, so they draw the same random numbers.
                    let own = input(&group, 0, count);
                    let blocking = group.call(verb()).run_from(&own).unwrap();
                    let asynchronous = group.call(verb()).start(own).unwrap().wait().unwrap();
                    assert_eq!(bits(&blocking), bits(&asynchronous), "{compression}");
                    assert!(group.statistics().encoded_bytes > 0 || count < n as usize, "{compression}");
                    blocking
                });
                let case = format!("{compression}, n={n}, {network:?}, {count} elements");
                assert!(results.iter().all(|result| bits(result) == bits(&results[0])), "{case}");
                for (index, &found) in results[0].iter().enumerate() {
                    let expected = exact_sum(n, 0, index) / f64::from(n);
                    assert!(
                        (f64::from(found) - expected).abs() <= f64::from(bound),
                        "{case}: {index}: {found}"
                    );
                }
            }
        }
    }
}

/// In shared memory, ranks exchange exact values, although each of them names a codec.
#[test]
fn ranks_that_share_memory_encode_nothing() {
    for (compression, _) in codecs() {
        let results = TestTransport::Shm.run(3, move |mut group| {
            let own = input(&group, 0, 1000);
            let compressed =
                group.call(AllReduce::new(ReduceOp::Sum).compressed(compression)).run_from(&own).unwrap();
            let exact = group.call(AllReduce::new(ReduceOp::Sum)).run_from(&own).unwrap();
            assert_eq!(group.statistics().encoded_bytes, 0);
            bits(&compressed) == bits(&exact)
        });
        assert_eq!(results, [true; 3]);
    }
}

#[test]
fn a_compressed_reduce_scatter_gives_each_rank_its_part() {
    for (n, count) in [(2, 1001), (3, 2), (5, 70_003)] {
        for (compression, bound) in codecs() {
            TestTransport::Tcp.run(n, move |mut group| {
                let own = input(&group, 0, count);
                let verb = ReduceScatter::new(ReduceOp::Sum).compressed(compression);
                let part = group.call(verb).run_from(&own).unwrap();
                let chunk = group.chunk(count, group.rank());
                assert_eq!(part.len(), chunk.len());
                for (index, &found) in chunk.zip(&part) {
                    let error = (f64::from(found) - exact_sum(n, 0, index)).abs();
                    assert!(error <= f64::from(bound) * f64::from(n), "{compression}: {index}: {found}");
                }
                let statistics = group.statistics();
                assert!(statistics.encoded_elements == (count - part.len()) as u64, "{statistics:?}");
            });
        }
    }
}

/// Several buffers are reduced at the same time, some of them without compression. The ranks wait in different orders.
#[test]
fn compressed_and_other_collectives_run_at_the_same_time() {
    for network in NETWORKS {
        let results = network.run(4, |mut group| {
            let verb = |index: usize| {
                let (compression, _) = codecs().nth(index % CODECS.len()).unwrap();
                AllReduce::new(ReduceOp::Sum).compressed(compression)
            };
            let mut handles = Vec::new();
            for index in 0..12 {
                let own = input(&group, index as u32, 40_000 * (index % 3 + 1));
                handles.push(group.call(verb(index)).start(own).unwrap());
                let exact = input(&group, index as u32, 100);
                handles.push(group.call(AllReduce::new(ReduceOp::Sum)).start(exact).unwrap());
            }
            if group.rank().get().is_multiple_of(2) {
                handles.reverse();
            }
            let mut results: Vec<Vec<u32>> =
                handles.into_iter().map(|handle| bits(&handle.wait().unwrap())).collect();
            if group.rank().get().is_multiple_of(2) {
                results.reverse();
            }
            results
        });
        assert!(results.iter().all(|result| *result == results[0]), "{network:?}");
        for (index, &found) in results[0][1].iter().enumerate() {
            assert!((f64::from(f32::from_bits(found)) - exact_sum(4, 0, index)).abs() < 1e-5);
        }
    }
}

#[test]
fn invalid_uses_of_compression_are_refused_and_the_group_stays_usable() {
    ranks::run(2, |mut group| {
        let text = |error: Error| match error {
            Error::Compression(text) => text,
            other => panic!("{other}"),
        };
        let mut buffer = [1.0f32; 4];
        let powersgd: Compression = "powersgd:2".parse().unwrap();
        let refused = group.call(AllReduce::new(ReduceOp::Sum).compressed(powersgd)).run(&mut buffer);
        assert!(text(refused.unwrap_err()).contains("powersgd:2 is for the gradients of a model"));
        let verb = ReduceScatter::new(ReduceOp::Sum).compressed(Compression::Bf16).counts(&[1, 3]);
        let refused = group.call(verb).run(&mut buffer);
        assert!(text(refused.unwrap_err()).contains("a compressed reduce_scatter has even parts"));
        let compressor = Compressor::new(Compression::Bf16);
        let verb = || AllReduce::new(ReduceOp::Sum).compressed(&compressor);
        let first = group.call(verb()).start(vec![1.0f32; 8]).unwrap();
        let refused = group.call(verb()).run(&mut buffer);
        assert!(text(refused.unwrap_err()).contains("in use by a call that has not ended"));
        assert_eq!(first.wait().unwrap(), [2.0; 8]);
        group.call(verb()).run(&mut buffer).unwrap();
        assert_eq!(buffer, [2.0; 4]);
        // Min and max are defined for codecs that keep the order of values.
        let mut buffer = [group.rank().get() as f32; 3];
        group.call(AllReduce::new(ReduceOp::Max).compressed(Compression::Fp16)).run(&mut buffer).unwrap();
        assert_eq!(buffer, [1.0; 3]);
    });
}
