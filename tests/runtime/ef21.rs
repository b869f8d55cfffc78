//! Tests of EF21.

use crate::util::if_long_tests_else;
use crate::util::ranks::{self, TestTransport};
use ringtrain::verbs::{AllReduce, ReduceScatter};
use ringtrain::{Compression, Compressor, CompressorState, Group, ReduceOp};

const COUNT: usize = 3003;

/// A value between -1 and 1 that depends on the rank and the index.
fn value(rank: u32, index: usize) -> f32 {
    let mixed = (index as u32).wrapping_mul(2_654_435_761) ^ (rank * 977 + 5).wrapping_mul(40_503);
    (mixed.wrapping_mul(2_246_822_519) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

fn input(group: &Group) -> Vec<f32> {
    (0..COUNT).map(|index| value(group.rank().get(), index)).collect()
}

fn average(n: u32, index: usize) -> f64 {
    (0..n).map(|rank| f64::from(value(rank, index))).sum::<f64>() / f64::from(n)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Averages the same input `steps` times. Returns the last result.
fn repeat(group: &mut Group, compressor: &Compressor, steps: u32) -> Vec<f32> {
    let mut last = Vec::new();
    for _ in 0..steps {
        last = input(group);
        group.call(AllReduce::new(ReduceOp::Average).compressed(compressor)).run(&mut last).unwrap();
    }
    last
}

/// With the same input in each step, EF21 converges to the exact average. Error feedback does not: each of its results has some
/// of the elements, or a large rounding error.
#[test]
fn results_converge_if_the_input_does() {
    let all = &["ef21:topk:0.1", "ef21:int4", "ef21:fp8-e5m2", "ef21:int8", "ef21:randomk:0.2"];
    for name in if_long_tests_else(&all[..], &all[..2]) {
        for network in [TestTransport::Tcp, TestTransport::Hosts] {
            let results = network.run(4, move |mut group| {
                let compressor = Compressor::new(name.parse().unwrap());
                let without_ef21 = Compressor::new(name["ef21:".len()..].parse().unwrap());
                let results = [&compressor, &without_ef21].map(|it| repeat(&mut group, it, 120));
                (results, compressor.state())
            });
            let ([first, without_ef21], _) = &results[0];
            let error_of = |found: &[f32]| {
                let error = |(index, &found): (usize, &f32)| (f64::from(found) - average(4, index)).abs();
                found.iter().enumerate().map(error).fold(0.0, f64::max)
            };
            let (error, other_error) = (error_of(first), error_of(without_ef21));
            assert!(error < 1e-4 && other_error > 1e-3, "{name} {network:?}: {error}, {other_error}");
            for ([result, _], state) in &results {
                assert_eq!(bits(result), bits(first), "{name} {network:?}");
                assert_eq!(bits(&state.result), bits(first), "{name} {network:?}");
                assert_eq!((state.residual.len(), state.calls), (COUNT, 120));
            }
            // What all ranks have sent is the result.
            for (index, result) in first.iter().enumerate() {
                let sent: f64 = results.iter().map(|(_, state)| -f64::from(state.residual[index])).sum();
                assert!((sent / 4.0 - f64::from(*result)).abs() < 1e-5, "{name} {network:?}: {index}");
            }
        }
    }
}

/// The state contains everything. If a codec with EF21 follows one without, or the other way round, or if nothing is encoded any
/// more, what was not sent is added once.
#[test]
fn the_state_is_saved_and_restored() {
    let ef21 = || Compressor::new("ef21:topk:0.1".parse().unwrap());
    let results = ranks::run(3, move |mut group| {
        let whole = repeat(&mut group, &ef21(), 6);
        let first = ef21();
        repeat(&mut group, &first, 3);
        let second = ef21();
        second.set_state(first.state());
        assert_eq!(bits(&repeat(&mut group, &second, 3)), bits(&whole));
        let other = Compressor::new("topk:0.2".parse().unwrap());
        other.set_state(first.state());
        let result = repeat(&mut group, &other, 1);
        assert!(other.state().result.is_empty());
        let with_error = other.state().residual;
        let back = ef21();
        back.set_state(other.state());
        let first_result = repeat(&mut group, &back, 1);
        let sent = back.state().residual;
        let last_result = repeat(&mut group, &back, 150);
        [result, with_error, first_result, sent, last_result]
    });
    for index in 0..COUNT {
        let average_of = |vector: usize| -> f64 {
            results.iter().map(|vectors| f64::from(vectors[vector][index])).sum::<f64>() / 3.0
        };
        let [result, with_error, first_result, sent, last_result] = [0, 1, 2, 3, 4].map(average_of);
        let expected = average(3, index);
        assert!((result + with_error - expected).abs() < 1e-5, "{index}");
        assert!((first_result + sent).abs() < 1e-5, "{index}");
        assert!((last_result - expected).abs() < 1e-4, "{index}: {last_result} and {expected}");
    }
    let mut group = Group::solo();
    let compressor = ef21();
    compressor.set_state(CompressorState { residual: vec![-2.5; 3], result: vec![3.0; 3], calls: 1 });
    let mut buffer = [1.0f32, 2.0, 3.0];
    group.call(AllReduce::new(ReduceOp::Sum).compressed(&compressor)).run(&mut buffer).unwrap();
    assert_eq!(buffer, [1.5, 2.5, 3.5]);
    assert_eq!(compressor.state(), CompressorState { calls: 2, ..CompressorState::default() });
}

/// NaN reaches the result, but only that of its step.
#[test]
fn elements_that_are_not_finite_do_not_stay() {
    let results = ranks::run(3, |mut group| {
        let compressor = Compressor::new("ef21:topk:0.1".parse().unwrap());
        repeat(&mut group, &compressor, 4);
        let mut buffer = input(&group);
        buffer[7] = [1.0, f32::NAN, 1.0][group.rank().index()];
        group.call(AllReduce::new(ReduceOp::Average).compressed(&compressor)).run(&mut buffer).unwrap();
        assert!(buffer[7].is_nan());
        let zeros = vec![0.0; COUNT];
        let expected = CompressorState { residual: zeros.clone(), result: zeros, calls: 5 };
        assert_eq!(compressor.state(), expected);
        repeat(&mut group, &compressor, 100)
    });
    for result in &results {
        assert_eq!(bits(result), bits(&results[0]));
        let is_near = |(index, &found): (usize, &f32)| (f64::from(found) - average(3, index)).abs() < 1e-4;
        assert!(result.iter().enumerate().all(is_near));
    }
}

#[test]
fn invalid_uses_are_refused_and_the_group_stays_usable() {
    ranks::run(2, |mut group| {
        // It sends all elements exactly.
        let compression: Compression = "ef21:topk:1".parse().unwrap();
        let refused =
            group.call(ReduceScatter::new(ReduceOp::Sum).compressed(compression)).run(&mut [1.0; 4]);
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("ef21:topk:1 is for all-reduces") && text.contains("reduce_scatter"), "{text}");
        let abandoned = Compressor::new(compression);
        let verb = || AllReduce::new(ReduceOp::Sum).compressed(&abandoned);
        // Without this result, the next one would be wrong.
        drop(group.call(verb()).start(vec![1.0f32; 8]).unwrap());
        group.barrier().unwrap();
        let text = group.call(verb()).run(&mut [1.0; 8]).unwrap_err().to_string();
        assert!(
            text.contains("the compressor lacks the result of its last call")
                || text.contains("has not ended"),
            "{text}"
        );
        let compressor = Compressor::new(compression);
        let verb = || AllReduce::new(ReduceOp::Sum).compressed(&compressor);
        compressor.set_state(CompressorState { result: vec![1.0; 3], ..CompressorState::default() });
        let text = group.call(verb()).run(&mut [1.0; 8]).unwrap_err().to_string();
        assert!(text.contains("a buffer of 3 elements, but this buffer has 8"), "{text}");
        compressor.set_state(CompressorState::default());
        let mut buffer = [1.0f32; 8];
        group.call(verb()).run(&mut buffer).unwrap();
        assert_eq!(buffer, [2.0; 8]);
    });
}
