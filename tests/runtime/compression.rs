//! Tests of compressed all-reduces and reduce-scatters.

use std::cell::Cell;

use crate::util::if_long_tests_else;
use crate::util::ranks::{self, TestTransport};
use ringtrain::verbs::{AllReduce, ReduceScatter};
use ringtrain::{Compression, Compressor, CompressorState, Error, Group, JoinOptions, ReduceOp};

/// Each codec, and the bound of the error of an average of values between -1 and 1, without error feedback. Codecs that leave
/// most elements out, or keep only signs, have no useful bound.
const CODECS: [(&str, f32); 13] = [
    ("fp16", 1e-3),
    ("bf16", 8e-3),
    ("fp8-e4m3", 0.13),
    ("fp8-e5m2", 0.26),
    ("int8", 0.01),
    ("int8-stochastic", 0.02),
    ("int4", 0.15),
    ("int4-stochastic", 0.3),
    ("qsgd:8", 1.0),
    ("onebit", f32::INFINITY),
    ("signsgd", f32::INFINITY),
    ("topk:0.1", f32::INFINITY),
    ("randomk:0.1", f32::INFINITY),
];
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
    // The first buffer has two blocks. With five ranks, four chunks are empty.
    let all = &[(2, 140_003), (3, 2), (4, 1000), (5, 1), (8, 2003)];
    for &(n, count) in if_long_tests_else(&all[..], &[(2, 140_003), (3, 2), (5, 1)]) {
        // Two ranks of `Hosts` would share one host, where nothing is encoded.
        for network in NETWORKS.into_iter().take(if n == 2 { 1 } else { 2 }) {
            let results = network.run(n, move |mut group| {
                let own = input(&group, 0, count);
                let mut result_of = |(compression, _)| {
                    // Both calls are the first call with their compressor, so they draw the same random numbers.
                    let verb = || {
                        AllReduce::new(ReduceOp::Average)
                            .compressed(Compressor::new(compression).with_seed(7))
                    };
                    let encoded_before = group.statistics().encoded_bytes;
                    let blocking = group.call(verb()).run_from(&own).unwrap();
                    let asynchronous = group.call(verb()).start(own.clone()).unwrap().wait().unwrap();
                    assert_eq!(bits(&blocking), bits(&asynchronous), "{compression}");
                    let shares_memory = group.transport() == "shm";
                    let encodes = group.statistics().encoded_bytes > encoded_before;
                    assert!(encodes || shares_memory || count < n as usize, "{compression}");
                    blocking
                };
                codecs().map(&mut result_of).collect::<Vec<_>>()
            });
            let averages: Vec<f64> =
                (0..count).map(|element| exact_sum(n, 0, element) / f64::from(n)).collect();
            for (index, (compression, bound)) in codecs().enumerate() {
                let case = format!("{compression}, n={n}, {network:?}, {count} elements");
                let found = &results[0][index];
                assert!(results.iter().all(|result| bits(&result[index]) == bits(found)), "{case}");
                for (element, (&found, average)) in found.iter().zip(&averages).enumerate() {
                    let error = (f64::from(found) - average).abs();
                    assert!(error <= f64::from(bound), "{case}: {element}: {found}");
                }
            }
        }
    }
}

/// What the results lack is in the residuals: in each step, the sum of the results and of all residuals is the sum of the inputs
/// and of the residuals before.
#[test]
fn error_feedback_loses_nothing() {
    const STEPS: u32 = 3;
    for &(n, count) in if_long_tests_else(&[(3, 1000), (4, 1), (5, 20_003)], &[(3, 1000), (4, 1), (5, 3003)])
    {
        let inputs: Vec<f64> =
            (0..count).map(|index| (0..STEPS).map(|step| exact_sum(n, step, index)).sum()).collect();
        for network in NETWORKS {
            let op = if n == 3 { ReduceOp::Sum } else { ReduceOp::Average };
            let with_residuals = || codecs().filter(|(compression, _)| compression.needs_error_feedback());
            let results_of_ranks = network.run(n, move |mut group| {
                let result_of = |(compression, _)| {
                    let compressor = Compressor::new(compression);
                    let results = (0..STEPS).map(|step| {
                        let mut buffer = input(&group, step, count);
                        group.call(AllReduce::new(op).compressed(&compressor)).run(&mut buffer).unwrap();
                        buffer
                    });
                    let results: Vec<Vec<f32>> = results.collect();
                    let state = compressor.state();
                    assert_eq!((state.residual.len(), state.calls), (count, u64::from(STEPS)));
                    (results, state.residual)
                };
                with_residuals().map(result_of).collect::<Vec<_>>()
            });
            for (number, (compression, _)) in with_residuals().enumerate() {
                let all: Vec<&(Vec<Vec<f32>>, Vec<f32>)> =
                    results_of_ranks.iter().map(|results| &results[number]).collect();
                let factor = if op == ReduceOp::Sum { 1.0 } else { f64::from(n) };
                for (index, input) in inputs.iter().enumerate() {
                    let sum = |step: &Vec<f32>| f64::from(step[index]) * factor;
                    let results: f64 = all[0].0.iter().map(sum).sum();
                    let residuals: f64 = all.iter().map(|(_, residual)| f64::from(residual[index])).sum();
                    let error = (results + residuals - input).abs();
                    assert!(error < 1e-4, "{compression}, n={n}, {network:?}: {index}: {error}");
                }
            }
        }
    }
}

/// A run that saves the state of its compressors and continues gives the same bits as a run without interruption. With another
/// number of ranks, and without any encoding, the residuals are added once.
#[test]
fn the_state_of_a_compressor_is_saved_and_restored() {
    for name in ["topk:0.1", "int4", "randomk:0.2", "int8-stochastic"] {
        let compression: Compression = name.parse().unwrap();
        let steps = move |group: &mut Group, compressor: &Compressor, steps: std::ops::Range<u32>| {
            let mut last = Vec::new();
            for step in steps {
                last = input(group, step, 5000);
                group.call(AllReduce::new(ReduceOp::Sum).compressed(compressor)).run(&mut last).unwrap();
            }
            bits(&last)
        };
        let whole = ranks::run(3, move |mut group| {
            steps(&mut group, &Compressor::new(compression).with_seed(3), 0..6)
        });
        let interrupted = ranks::run(3, move |mut group| {
            let first = Compressor::new(compression).with_seed(3);
            steps(&mut group, &first, 0..3);
            let second = Compressor::new(compression).with_seed(3);
            second.set_state(first.state());
            steps(&mut group, &second, 3..6)
        });
        assert_eq!(whole, interrupted, "{name}");
    }
    let mut group = Group::solo();
    let compressor = Compressor::new("topk:0.1".parse().unwrap());
    compressor.set_state(CompressorState { residual: vec![0.5; 3], calls: 1, ..CompressorState::default() });
    let mut buffer = [1.0f32, 2.0, 3.0];
    group.call(AllReduce::new(ReduceOp::Sum).compressed(&compressor)).run(&mut buffer).unwrap();
    assert_eq!((buffer, compressor.state().residual), ([1.5, 2.5, 3.5], vec![0.0; 3]));
    let refused = group.call(AllReduce::new(ReduceOp::Sum).compressed(&compressor)).run(&mut [1.0; 4]);
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("the errors of a buffer of 3 elements, but this buffer has 4")
    );
}

/// In a majority vote, all votes have the same weight, for large and small absolute values.
#[test]
fn sign_sgd_gives_the_sign_of_most_ranks() {
    ranks::run(3, |mut group| {
        let own = [[100.0f32, -1.0, 2.0], [-1.0, -5.0, 0.1], [-2.0, 9.0, 0.1]][group.rank().index()];
        let sum = group.call(AllReduce::new(ReduceOp::Sum).compressed(Compression::SignSgd)).run_from(&own);
        assert_eq!(sum.unwrap(), [-1.0, -1.0, 1.0]);
    });
}

/// All ranks choose the same codec in each call, although they measure different times.
#[test]
fn auto_uses_the_same_codec_on_all_ranks_and_keeps_to_the_largest_error() {
    for network in NETWORKS {
        let work = |mut group: Group| {
            let compressor = Compressor::new("auto:0.05".parse().unwrap());
            let count = 20_000;
            let mut codecs = Vec::new();
            for step in 0..60 {
                let own = input(&group, step, count);
                let verb = AllReduce::new(ReduceOp::Average).compressed(&compressor);
                let found = group.call(verb).start(own).unwrap().wait().unwrap();
                let report = compressor.report().unwrap();
                codecs.push((report, bits(&found)));
            }
            let elements = group.statistics().encoded_elements;
            (codecs, elements)
        };
        let hosts = Cell::new(0);
        let adjust = |options: &mut JoinOptions| {
            if network == TestTransport::Tcp {
                options.host_id = Some(format!("host {}", hosts.replace(hosts.get() + 1)));
            }
        };
        let reports = network.run_with(3, adjust, work);
        let (first, encoded) = &reports[0];
        assert!(reports.iter().all(|(calls, _)| calls == first), "the ranks differ");
        let used =
            |name: &str| first.iter().filter(|(report, _)| report.compression.to_string() == name).count();
        assert!(used("none") > 0 && used("bf16") > 0 && used("int8") > 0 && used("int4") == 1, "{network:?}");
        assert!(*encoded > 0 && used("onebit") == 0, "{network:?}: int4 had too large an error");
        let (last, _) = first[59];
        assert!(
            !last.is_trial && last.relative_error.unwrap() < 0.05 && last.seconds.unwrap() > 0.0,
            "{last:?}"
        );
    }
    // Within a host, `auto` encodes nothing, also over TCP.
    let choices = TestTransport::Tcp.run(2, |mut group| {
        let direct =
            group.call(AllReduce::new(ReduceOp::Sum).compressed("auto".parse::<Compression>().unwrap()));
        let refusal = direct.run(&mut [1.0f32]).unwrap_err().to_string();
        assert!(refusal.contains("pass a Compressor"), "{refusal}");
        let compressor = Compressor::new("auto".parse().unwrap());
        group.call(AllReduce::new(ReduceOp::Sum).compressed(&compressor)).run(&mut [1.0f32; 100]).unwrap();
        (compressor.report().unwrap(), group.statistics().encoded_bytes)
    });
    for (report, encoded_bytes) in choices {
        assert!(!report.is_trial && report.compression == Compression::None, "{report:?}");
        assert_eq!(encoded_bytes, 0);
    }
}

/// In shared memory, ranks exchange exact values, although each of them names a codec.
#[test]
fn ranks_that_share_memory_encode_nothing() {
    TestTransport::Shm.run(3, |mut group| {
        let own = input(&group, 0, 1000);
        let exact = group.call(AllReduce::new(ReduceOp::Sum)).run_from(&own).unwrap();
        for (compression, _) in codecs() {
            let compressed =
                group.call(AllReduce::new(ReduceOp::Sum).compressed(compression)).run_from(&own).unwrap();
            assert_eq!(group.statistics().encoded_bytes, 0, "{compression}");
            assert_eq!(bits(&compressed), bits(&exact), "{compression}");
        }
    });
}

#[test]
fn a_compressed_reduce_scatter_gives_each_rank_its_part() {
    for &(n, count) in if_long_tests_else(&[(2, 1001), (3, 2), (5, 20_003)][..], &[(3, 2), (5, 2003)]) {
        TestTransport::Tcp.run(n, move |mut group| {
            let own = input(&group, 0, count);
            for (compression, bound) in codecs() {
                let encoded_before = group.statistics().encoded_elements;
                let verb = ReduceScatter::new(ReduceOp::Sum).compressed(compression);
                let part = group.call(verb).run_from(&own).unwrap();
                let chunk = group.chunk(count, group.rank());
                assert_eq!(part.len(), chunk.len());
                for (index, &found) in chunk.zip(&part) {
                    let error = (f64::from(found) - exact_sum(n, 0, index)).abs();
                    assert!(error <= f64::from(bound) * f64::from(n), "{compression}: {index}: {found}");
                }
                let encoded = group.statistics().encoded_elements - encoded_before;
                assert_eq!(encoded, (count - part.len()) as u64, "{compression}");
            }
        });
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
