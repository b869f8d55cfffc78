//! Tests of custom reduction functions, scaled sums and compressed sums.

use ringtrain::verbs::{AllReduce, Exscan, Reduce, ReduceScatter, Scan, function, scaled_sum};
use ringtrain::{Compression, Rank, ReduceOp};

use super::{WORLD_SIZES, assert_elements, contributed_value, long_count, tested_lengths};
use crate::util::{if_long_tests_else, ranks, runs_long_tests};

/// Returns an element that represents the function x -> a x + b modulo 2^32: the element holds the numbers a and b.
/// The test reduces elements by composing their functions, which is associative but not commutative.
fn affine_function(rank: u32, index: usize) -> u64 {
    let mixed = (index as u64 + 1) * 0x9e37_79b9 + u64::from(rank) * 0x85eb_ca6b;
    (mixed | 1) << 32 | (mixed >> 7 & 0xffff_ffff)
}

fn compose_affine(first: u64, second: u64) -> u64 {
    let split = |one: u64| ((one >> 32) as u32, one as u32);
    let ((a, b), (c, d)) = (split(first), split(second));
    u64::from(a.wrapping_mul(c)) << 32 | u64::from(b.wrapping_mul(c).wrapping_add(d))
}

#[test]
fn functions_that_do_not_commute_are_applied_in_rank_order() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[4]) {
        super::run_on_every_transport(n, |mut group| {
            let (n, rank) = (group.size().get(), group.rank());
            for count in tested_lengths(n).into_iter().chain([long_count()]) {
                let own: Vec<u64> = (0..count).map(|index| affine_function(rank.get(), index)).collect();
                let whole = |index| {
                    (0..n).map(|rank| affine_function(rank, index)).reduce(compose_affine).expect("a rank")
                };
                let expected: Vec<u64> = (0..count).map(whole).collect();
                let mut buffer = own.clone();
                group
                    .call(AllReduce::new(function(|&first, &second| compose_affine(first, second))))
                    .run(&mut buffer)
                    .unwrap();
                assert_elements(&buffer, expected.iter().copied(), "all_reduce_with", &group);
                let handle = group
                    .call(AllReduce::new(function(|&first, &second| compose_affine(first, second))))
                    .start(own.clone());
                assert_elements(&handle.unwrap().wait().unwrap(), expected.into_iter(), "async", &group);
                let expected: Vec<u64> = (0..count).map(whole).collect();
                let roots = if count == long_count() { 1..2.min(n) } else { 0..n };
                for root in roots.map(Rank::new) {
                    buffer.clone_from(&own);
                    group
                        .call(Reduce::to(root, function(|&first, &second| compose_affine(first, second))))
                        .run(&mut buffer)
                        .unwrap();
                    if rank == root {
                        assert_elements(&buffer, expected.iter().copied(), "reduce_with", &group);
                    }
                }
            }
        });
    }
}

#[test]
fn scaled_sums_multiply_each_contribution_before_the_sum() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[4]) {
        super::run_on_every_transport(n, |mut group| {
            let (n, rank) = (group.size().get(), group.rank().get());
            for count in tested_lengths(n) {
                let scaled = |rank: u32, index| {
                    contributed_value::<f64>(ReduceOp::Sum, rank, index) * f64::from(rank + 1)
                };
                let expected = |index| (0..n).map(|rank| scaled(rank, index)).sum();
                let mut floats: Vec<f64> =
                    (0..count).map(|index| contributed_value(ReduceOp::Sum, rank, index)).collect();
                group.call(AllReduce::new(scaled_sum(f64::from(rank + 1)))).run(&mut floats).unwrap();
                assert_elements(&floats, (0..count).map(expected), "all_reduce_scaled", &group);
                let mut integers: Vec<i32> =
                    (0..count).map(|index| contributed_value(ReduceOp::Sum, rank, index)).collect();
                group.call(AllReduce::new(scaled_sum(rank as i32 + 1))).run(&mut integers).unwrap();
                let expected = (0..count).map(|index| expected(index) as i32);
                assert_elements(&integers, expected, "all_reduce_scaled", &group);
            }
        });
    }
}

#[test]
fn scans_apply_functions_that_do_not_commute_in_rank_order() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[4]) {
        super::run_on_every_transport(n, |mut group| {
            let (n, rank) = (group.size().get(), group.rank().get());
            for count in tested_lengths(n).into_iter().chain([long_count()]) {
                let own: Vec<u64> = (0..count).map(|index| affine_function(rank, index)).collect();
                let upto = |end: u32| {
                    move |index| {
                        (0..end)
                            .map(|rank| affine_function(rank, index))
                            .reduce(compose_affine)
                            .expect("a rank")
                    }
                };
                let scanned = group
                    .call(Scan::new(function(|&a, &b| compose_affine(a, b))))
                    .start(own.clone())
                    .unwrap();
                let exscanned = group
                    .call(Exscan::new(function(|&a, &b| compose_affine(a, b))))
                    .start_from(&own)
                    .unwrap();
                let mut buffer = own.clone();
                group.call(Scan::new(function(|&a, &b| compose_affine(a, b)))).run(&mut buffer).unwrap();
                assert_elements(&buffer, (0..count).map(upto(rank + 1)), "scan_with", &group);
                for found in [
                    group.call(Exscan::new(function(|&a, &b| compose_affine(a, b)))).run_from(&own).unwrap(),
                    exscanned.wait().unwrap(),
                ] {
                    let expected: Vec<u64> =
                        if rank == 0 { Vec::new() } else { (0..count).map(upto(rank)).collect() };
                    assert_elements(&found, expected.into_iter(), "exscan with a function", &group);
                }
                let found = scanned.wait().unwrap();
                assert_elements(&found, (0..count).map(upto(rank + 1)), "scan_with_async", &group);
            }
        });
    }
}

#[test]
fn reduce_scatter_accepts_custom_functions() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[4]) {
        super::run_on_every_transport(n, |mut group| {
            let (n, rank) = (group.size().get(), group.rank());
            for count in tested_lengths(n).into_iter().chain([long_count()]) {
                // The contribution of a rank to an element. The reduction function is `gcd`.
                let number = |rank: u32, index: usize| (index as u64 % 60 + 1) * u64::from(rank % 3 + 1);
                let gcd = |mut a: u64, mut b: u64| {
                    while b > 0 {
                        (a, b) = (b, a % b);
                    }
                    a
                };
                let own: Vec<u64> = (0..count).map(|index| number(rank.get(), index)).collect();
                let expected = |index| (0..n).map(|rank| number(rank, index)).reduce(gcd).expect("a rank");
                let chunk = group.chunk(count, rank);
                let handle = group
                    .call(ReduceScatter::new(function(move |&a, &b| gcd(a, b))))
                    .start(own.clone())
                    .unwrap();
                let mut buffer = own;
                assert_eq!(
                    group.call(ReduceScatter::new(function(move |&a, &b| gcd(a, b)))).run(&mut buffer),
                    Ok(chunk.clone())
                );
                let what = "reduce_scatter_with";
                assert_elements(&buffer[chunk.clone()], chunk.clone().map(expected), what, &group);
                assert_elements(&handle.wait().unwrap()[chunk.clone()], chunk.map(expected), what, &group);
            }
        });
    }
}

/// In each operation, some ranks make the blocking call and the other ranks make the asynchronous call. All ranks
/// must get the same bits.
#[test]
fn blocking_and_asynchronous_calls_of_compressed_sums_give_the_same_bits() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[4]) {
        for compression in [Compression::None, Compression::Fp16, Compression::Bf16] {
            let results = ranks::run(n, move |mut group| {
                let rank = group.rank().get();
                let mut bits = Vec::new();
                for count in [0, 1, 70_000, if runs_long_tests() { 2_500_000 } else { 300_000 }] {
                    let mut own: Vec<f32> =
                        (0..count).map(|index| ((index + rank as usize) % 1000) as f32 * 0.1).collect();
                    if rank.is_multiple_of(2) {
                        let handle =
                            group.call(AllReduce::new(ReduceOp::Sum).compressed(compression)).start(own);
                        own = handle.unwrap().wait().unwrap();
                    } else {
                        group
                            .call(AllReduce::new(ReduceOp::Sum).compressed(compression))
                            .run(&mut own)
                            .unwrap();
                    }
                    bits.extend(own.into_iter().map(f32::to_bits));
                }
                let scaled = group
                    .call(AllReduce::new(scaled_sum(i64::from(rank) + 1)))
                    .start(vec![1i64, 10])
                    .unwrap();
                let sum: i64 = (1..=i64::from(group.size().get())).sum();
                assert_eq!(scaled.wait().unwrap(), [sum, 10 * sum]);
                bits
            });
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "n={n}, {compression}");
        }
    }
}
