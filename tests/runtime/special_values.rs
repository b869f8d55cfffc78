//! Signed zeros, NaNs with payloads, infinities and subnormals: every algorithm gives all ranks the same bits.

use std::ops::Range;

use crate::util::ranks::TestTransport;
use crate::util::{if_long_tests_else, runs_long_tests};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::types::{Algorithm, Operation};
use ringtrain::{Element, Group, Rank, ReduceOp};

/// A rank contributes the same 97 elements again and again, so that equal contributions are in different chunks of
/// the buffer.
const CONTRIBUTION_PERIOD: usize = 97;
/// The number of elements in a buffer of f32, and in a buffer of any other type. Neither number can be divided evenly
/// among the ranks or into vector registers.
const ELEMENT_COUNTS: [usize; 2] = [4 * CONTRIBUTION_PERIOD + 3, 2 * CONTRIBUTION_PERIOD + 1];
const REDUCTIONS: [ReduceOp; 5] =
    [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product];

/// The layout of an IEEE 754 number in the low bits of a word.
#[derive(Clone, Copy, PartialEq, Debug)]
struct FloatFormat {
    bits: u32,
    mantissa_bits: u32,
}

impl FloatFormat {
    fn for_element<T: Element>() -> Self {
        let mantissa_bits = match T::DTYPE.name() {
            "f16" => 10,
            "bf16" => 7,
            "f32" => 23,
            "f64" => 52,
            other => unreachable!("{other} is no float"),
        };
        Self { bits: 8 * size_of::<T>() as u32, mantissa_bits }
    }

    fn sign_bit(self) -> u64 {
        1 << (self.bits - 1)
    }

    fn infinity(self) -> u64 {
        self.sign_bit() - (1 << self.mantissa_bits)
    }

    fn quiet_nan(self) -> u64 {
        self.infinity() | 1 << (self.mantissa_bits - 1)
    }

    fn is_nan(self, bits: u64) -> bool {
        bits & !self.sign_bit() > self.infinity()
    }

    /// Returns a sort key: a greater number has a greater key, and +0 has a greater key than -0.
    fn sort_key(self, bits: u64) -> i128 {
        let magnitude = i128::from(bits & !self.sign_bit());
        if bits & self.sign_bit() == 0 { magnitude } else { -1 - magnitude }
    }

    /// Returns the magnitudes of the contributions: zero, six finite numbers (the first is the smallest subnormal
    /// number, and the last is the largest number), infinity, and four NaNs.
    fn contributed_magnitudes(self) -> [u64; 12] {
        let normal = 1 << self.mantissa_bits;
        let (infinity, quiet) = (self.infinity(), self.quiet_nan());
        let one = (infinity / 2) & !(normal - 1);
        let finite = [1, normal - 1, normal, one, one + 1];
        let [a, b, c, d, e] = finite;
        [0, a, b, c, d, e, infinity - 1, infinity, quiet, quiet | 3, infinity + 1, infinity + 2]
    }

    /// Returns the contributions of each rank for one period. Indices 0, 4, 8, ... hold zeros; 1, 5, 9, ... finite
    /// numbers; 2, 6, 10, ... also infinities; and 3, 7, 11, ... also NaNs.
    fn contributions_of_all_ranks(self, n: u32) -> Vec<Vec<u64>> {
        let mut random = StdRng::seed_from_u64(u64::from(n));
        let magnitudes = self.contributed_magnitudes();
        let kinds = [1, 7, 8, magnitudes.len()];
        let mut draw = |index: usize| {
            let magnitude = magnitudes[random.random_range(0..kinds[index % kinds.len()])];
            if random.random_bool(0.5) { magnitude } else { magnitude | self.sign_bit() }
        };
        (0..n).map(|_| (0..CONTRIBUTION_PERIOD).map(&mut draw).collect()).collect()
    }

    /// Returns the result of reducing the contributions `values`, or `None` if the result can depend on the order of
    /// the operands.
    fn expected_reduction(self, op: ReduceOp, values: &[u64]) -> Option<u64> {
        let has = |bits| values.contains(&bits);
        let (infinity, sign) = (self.infinity(), self.sign_bit());
        match op {
            // In a scan, the first rank gets its own contribution as the result.
            _ if values.len() == 1 => Some(values[0]),
            _ if values.iter().any(|&bits| self.is_nan(bits)) => Some(self.quiet_nan()),
            ReduceOp::Min => values.iter().copied().min_by_key(|&bits| self.sort_key(bits)),
            ReduceOp::Max => values.iter().copied().max_by_key(|&bits| self.sort_key(bits)),
            ReduceOp::Product if values.iter().all(|&bits| bits & !sign == 0) => {
                Some(values.iter().fold(0, |product, bits| product ^ bits))
            }
            ReduceOp::Product => None,
            _ if has(infinity) && has(infinity | sign) => Some(self.quiet_nan()),
            _ if values.iter().all(|&bits| bits & !sign == 0) => {
                Some(values.iter().fold(sign, |sum, bits| sum & bits))
            }
            _ => None,
        }
    }
}

/// The result of an operation on one rank: the whole result, or the part that this rank gets.
struct ReductionOutcome {
    operation: Operation,
    is_shared_buffer: bool,
    format: FloatFormat,
    op: ReduceOp,
    /// The ranks whose contributions are reduced to this result.
    ranks: Range<usize>,
    /// The index of the first element in the whole buffer.
    start: usize,
    bits: Vec<u64>,
}

fn elements_from_bits<T: Element>(bits: impl Iterator<Item = u64>) -> Vec<T> {
    bits.map(|bits| bytemuck::pod_read_unaligned(&bits.to_le_bytes()[..size_of::<T>()])).collect()
}

fn bits_of<T: Element>(elements: &[T]) -> Vec<u64> {
    let bits = |element| {
        let mut bytes = [0; 8];
        bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(element));
        u64::from_le_bytes(bytes)
    };
    elements.iter().map(bits).collect()
}

/// Runs every operation that reduces, on `count` elements, and returns the outcomes on this rank.
fn run_reductions<T: Element>(group: &mut Group, count: usize) -> Vec<ReductionOutcome> {
    let format = FloatFormat::for_element::<T>();
    let (n, rank) = (group.size(), group.rank());
    let own = format.contributions_of_all_ranks(n.get()).swap_remove(rank.index());
    let own: Vec<T> = elements_from_bits(own.into_iter().cycle().take(count));
    let mut outcomes = Vec::new();
    for op in REDUCTIONS {
        let mut add = |operation, is_shared_buffer, ranks, start, part: &[T]| {
            let bits = bits_of(part);
            outcomes.push(ReductionOutcome { operation, is_shared_buffer, format, op, ranks, start, bits });
        };
        let all = 0..n.as_usize();
        let mut buffer = own.clone();
        group.all_reduce(&mut buffer, op).unwrap();
        add(Operation::AllReduce, false, all.clone(), 0, &buffer);
        let mut shared = group.alloc::<T>(count).unwrap();
        shared.copy_from_slice(&own);
        group.all_reduce(&mut shared, op).unwrap();
        add(Operation::AllReduce, true, all.clone(), 0, &shared);
        let mut buffer = own.clone();
        let part = group.reduce_scatter(&mut buffer, op).unwrap();
        add(Operation::ReduceScatter, false, all.clone(), part.start, &buffer[part]);
        let root = Rank::new(n.get() - 1);
        let mut buffer = own.clone();
        group.reduce(&mut buffer, op, root).unwrap();
        let result = if rank == root { &buffer[..] } else { &[] };
        add(Operation::Reduce, false, all, 0, result);
        if op != ReduceOp::Average {
            let mut buffer = own.clone();
            group.scan(&mut buffer, op).unwrap();
            add(Operation::Scan, false, 0..rank.index() + 1, 0, &buffer);
        }
    }
    outcomes
}

/// Checks the result of one operation. `of_ranks` has the outcome of each rank.
fn check_outcomes(of_ranks: &[&ReductionOutcome], context: &str) {
    let format = of_ranks[0].format;
    let contributions = format.contributions_of_all_ranks(of_ranks.len() as u32);
    for (rank, outcome) in of_ranks.iter().enumerate() {
        let &&ReductionOutcome { operation, is_shared_buffer, op, start, .. } = outcome;
        let contributions = &contributions[outcome.ranks.clone()];
        let at = |place: usize| contributions.iter().map(|of| of[place]).collect::<Vec<u64>>();
        let expected: Vec<_> =
            (0..CONTRIBUTION_PERIOD).map(|place| format.expected_reduction(op, &at(place))).collect();
        // In a scan, the first rank gets its own contribution, in which NaNs keep their bits.
        let may_have_any_nan = contributions.len() == 1;
        for (index, &found) in outcome.bits.iter().enumerate() {
            let place = (start + index) % CONTRIBUTION_PERIOD;
            let is_expected = expected[place].is_none_or(|expected| found == expected);
            let is_right_nan = may_have_any_nan || !format.is_nan(found) || found == format.quiet_nan();
            let is_same = operation != Operation::AllReduce || found == of_ranks[0].bits[index];
            assert!(
                is_expected && is_right_nan && is_same,
                "{operation} {op} of {:x?}, {format:?}, [{}] on rank {rank}, shared buffer: {is_shared_buffer}, {context}: \
                 {found:x}, not {:x?} or the same on all ranks",
                at(place),
                start + index,
                expected[place]
            );
        }
    }
}

/// Regression test: before the fix, the result of a reduction had different zeros and NaNs on different ranks. Even
/// at different places of one buffer, equal contributions gave different zeros and NaNs.
#[test]
fn every_algorithm_gives_special_values_the_same_bits() {
    use Algorithm::{Butterfly, Direct, DoubleTree, Doubling, Hierarchy, OneShot, Ring};
    let algorithms = [
        (TestTransport::Tcp, &[OneShot, Doubling, Butterfly, Direct, DoubleTree, Ring][..]),
        (TestTransport::Shm, &[OneShot, Direct]),
        (TestTransport::Hosts, &[Hierarchy]),
    ];
    // All algorithms are possible on 4 ranks.
    for &n in if_long_tests_else(&[2u32, 3, 4, 5, 8][..], &[4]) {
        for (transport, algorithm) in algorithms.iter().flat_map(|(t, all)| all.iter().map(|a| (*t, *a))) {
            let is_possible = match algorithm {
                Butterfly => n.is_power_of_two(),
                Hierarchy => n > 2,
                _ => true,
            };
            if !is_possible {
                continue;
            }
            let adjust = |options: &mut ringtrain::JoinOptions| {
                options.algorithms = algorithm.name().parse().expect("an algorithm that can be asked for");
            };
            let results = transport.run_with(n, adjust, move |mut group| {
                assert_eq!(group.algorithm(Operation::AllReduce, 4 * ELEMENT_COUNTS[0]), algorithm);
                let mut outcomes = run_reductions::<f32>(&mut group, ELEMENT_COUNTS[0]);
                // On 8 ranks the test uses only f32, because many ranks on few processors take long. The algorithms
                // are the same for all types.
                if n < 8 {
                    if runs_long_tests() {
                        outcomes.extend(run_reductions::<f64>(&mut group, ELEMENT_COUNTS[1]));
                        outcomes.extend(run_reductions::<f16>(&mut group, ELEMENT_COUNTS[1]));
                    }
                    outcomes.extend(run_reductions::<bf16>(&mut group, ELEMENT_COUNTS[1]));
                }
                outcomes
            });
            let context = format!("{n} ranks by {} over {transport:?}", algorithm.name());
            for index in 0..results[0].len() {
                let of_ranks: Vec<&ReductionOutcome> =
                    results.iter().map(|of_rank| &of_rank[index]).collect();
                check_outcomes(&of_ranks, &context);
            }
        }
    }
}
