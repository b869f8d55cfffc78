//! The contents of buffers before a checked iteration, and the expected contents of the result.
//!
//! The contents are pseudo-random: they depend on a seed, the rank and the index. [`test_values`](super::test_values) draws
//! values whose reduction is exact in any order, so the check compares every bit of the result.

use std::ops::Range;

use super::operation::BenchOperation;
use super::plan::BenchCase;
use super::test_values::{BenchElement, ElementPosition};
use crate::schedule::partition::chunk;
use crate::types::{Rank, ReduceOp, WorldSize};

/// The number of elements after which the contents repeat. The number is prime, so that data shifted by a segment or
/// a chunk (usually a power of two) differ from the expected data.
const PATTERN_PERIOD_ELEMENTS: usize = 8191;

/// The input and the expected result of one rank in a checked iteration.
pub struct TestPattern<T> {
    case: BenchCase,
    world: WorldSize,
    rank: Rank,
    seed: u64,
    /// One period of the expected reduction, which repeats. Empty if the operation does not reduce.
    expected_reduction: Vec<T>,
}

/// The expected contents of a part of the result. The part is a copy of a range of a *source*: the contribution of
/// one rank, or the reduction of several contributions.
struct ExpectedPart<T> {
    /// The range of this part in the result.
    range: Range<usize>,
    /// The index of the part's first element in the source.
    source_start: usize,
    /// The first [`PATTERN_PERIOD_ELEMENTS`] elements of the source, after which the source repeats.
    period: Vec<T>,
}

impl<T: BenchElement> TestPattern<T> {
    /// Creates the pattern of `rank`. All ranks must use the same `case` and `seed`.
    pub fn new(case: BenchCase, world: WorldSize, rank: Rank, seed: u64) -> Self {
        let mut pattern = Self { case, world, rank, seed, expected_reduction: Vec::new() };
        if let Some(op) = case.reduction {
            pattern.expected_reduction = (0..case.count.min(PATTERN_PERIOD_ELEMENTS))
                .map(|index| pattern.expected_element(op, index))
                .collect();
        }
        pattern
    }

    /// Writes the contribution of this rank to `input`. In an all-gather or a broadcast, fills the rest of `input`
    /// with zeros. A correct result contains no zeros, so the check finds elements that no rank sent.
    pub fn fill(&self, input: &mut [T]) {
        let chunk = chunk(self.case.count, self.world, self.rank);
        let (range, start) = match self.case.operation {
            BenchOperation::AllGather => (chunk.clone(), chunk.start),
            BenchOperation::Gather => (0..input.len(), chunk.start),
            BenchOperation::Broadcast if self.rank != self.case.root => (0..0, 0),
            BenchOperation::AllReduce
            | BenchOperation::Reduce
            | BenchOperation::ReduceScatter
            | BenchOperation::Broadcast
            | BenchOperation::Scatter
            | BenchOperation::AllToAll
            | BenchOperation::Scan
            | BenchOperation::Exscan
            | BenchOperation::Barrier
            | BenchOperation::PingPong
            | BenchOperation::SendReceive => (0..input.len(), 0),
        };
        input.fill(T::zeroed());
        let period = self.contribution(self.rank);
        let part = &mut input[range];
        let mut filled = 0;
        while filled < part.len() {
            let offset = (start + filled) % PATTERN_PERIOD_ELEMENTS;
            let length = (part.len() - filled).min(period.len() - offset);
            part[filled..filled + length].copy_from_slice(&period[offset..offset + length]);
            filled += length;
        }
    }

    /// Returns the number of elements of the result that are missing or wrong. Ignores elements that the operation
    /// leaves unspecified.
    pub fn count_wrong(&self, result: &[T]) -> u64 {
        let mut wrong = 0;
        for ExpectedPart { range, source_start, period } in self.expected_parts() {
            let end = range.end.min(result.len());
            let found = &result[range.start.min(end)..end];
            wrong += (range.len() - found.len()) as u64 + count_differences(found, &period, source_start);
        }
        wrong
    }

    /// Returns the parts of the expected result.
    fn expected_parts(&self) -> Vec<ExpectedPart<T>> {
        let Self { case, world, rank, .. } = *self;
        let own_chunk = chunk(case.count, world, rank);
        let whole_source = |period| vec![ExpectedPart { range: 0..case.count, source_start: 0, period }];
        let whole_contribution = |rank| whole_source(self.contribution(rank));
        match case.operation {
            BenchOperation::AllReduce | BenchOperation::Scan => whole_source(self.expected_reduction.clone()),
            BenchOperation::Reduce if rank == case.root => whole_source(self.expected_reduction.clone()),
            BenchOperation::Exscan if rank != Rank::ZERO => whole_source(self.expected_reduction.clone()),
            BenchOperation::ReduceScatter => {
                vec![ExpectedPart {
                    source_start: own_chunk.start,
                    range: own_chunk,
                    period: self.expected_reduction.clone(),
                }]
            }
            BenchOperation::Gather if rank != case.root => Vec::new(),
            BenchOperation::AllGather | BenchOperation::Gather => self.expected_chunks(|chunk| chunk.start),
            BenchOperation::AllToAll => self.expected_chunks(|_| own_chunk.start),
            BenchOperation::Broadcast => whole_contribution(case.root),
            BenchOperation::Scatter => {
                vec![ExpectedPart {
                    range: 0..own_chunk.len(),
                    source_start: own_chunk.start,
                    period: self.contribution(case.root),
                }]
            }
            BenchOperation::SendReceive => whole_contribution(world.rank_before(rank, 1)),
            BenchOperation::PingPong if case.operation.involves(rank) => {
                whole_contribution(Rank::new(1 - rank.get()))
            }
            BenchOperation::Reduce
            | BenchOperation::Exscan
            | BenchOperation::Barrier
            | BenchOperation::PingPong => Vec::new(),
        }
    }

    /// Returns the parts of a result that consists of one chunk from each rank. If a rank's chunk lies at `range` in
    /// the result, the chunk begins at the index `source_start(range)` of the rank's contribution.
    fn expected_chunks(&self, source_start: impl Fn(&Range<usize>) -> usize) -> Vec<ExpectedPart<T>> {
        let part = |rank| {
            let range = chunk(self.case.count, self.world, rank);
            ExpectedPart { source_start: source_start(&range), range, period: self.contribution(rank) }
        };
        self.world.ranks().map(part).collect()
    }

    /// Returns one period of the contribution of `rank`.
    fn contribution(&self, rank: Rank) -> Vec<T> {
        (0..self.case.count.min(PATTERN_PERIOD_ELEMENTS))
            .map(|index| self.contributed_element(rank, index))
            .collect()
    }

    /// Returns the element at `index` of the contribution of `rank`.
    fn contributed_element(&self, rank: Rank, index: usize) -> T {
        let bits = mix_bits(mix_bits(self.seed ^ u64::from(rank.get()) << 32) ^ index as u64);
        T::contribution_at(
            self.case.reduction,
            ElementPosition { bits, rank_plus_index: rank.index() + index, world: self.world.as_usize() },
        )
    }

    /// Returns the element at `index` of the expected reduction.
    fn expected_element(&self, op: ReduceOp, index: usize) -> T {
        let ranks = match self.case.operation {
            BenchOperation::Scan => 0..self.rank.get() + 1,
            BenchOperation::Exscan => 0..self.rank.get(),
            BenchOperation::AllReduce
            | BenchOperation::Reduce
            | BenchOperation::ReduceScatter
            | BenchOperation::AllGather
            | BenchOperation::Broadcast
            | BenchOperation::Gather
            | BenchOperation::Scatter
            | BenchOperation::AllToAll
            | BenchOperation::Barrier
            | BenchOperation::PingPong
            | BenchOperation::SendReceive => 0..self.world.get(),
        };
        T::reduce_exactly(op, ranks.map(|rank| self.contributed_element(Rank::new(rank), index)), self.world)
    }
}

/// Returns the number of elements that differ from the expected periodic contents. `period` is one period of the
/// expected contents. `start` is the index of `elements[0]` in the expected contents.
fn count_differences<T: PartialEq>(elements: &[T], period: &[T], start: usize) -> u64 {
    let mut wrong = 0;
    let mut compared = 0;
    while compared < elements.len() {
        let offset = (start + compared) % PATTERN_PERIOD_ELEMENTS;
        let length = (elements.len() - compared).min(period.len() - offset);
        let (found, expected) = (&elements[compared..compared + length], &period[offset..offset + length]);
        wrong += found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
        compared += length;
    }
    wrong as u64
}

/// Returns a hash in which every bit of the input affects every bit of the output: the finaliser of `SplitMix64`
/// (Steele, Lea and Flood, OOPSLA 2014).
fn mix_bits(input: u64) -> u64 {
    let mut z = input.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::types::{DType, F32Loc, F64Loc, I32Loc, I64Loc};

    fn make_case(
        operation: BenchOperation,
        dtype: DType,
        reduction: Option<ReduceOp>,
        count: usize,
    ) -> BenchCase {
        BenchCase { operation, dtype, reduction, root: Rank::ZERO, count }
    }

    /// Reduces the contributions in rank order. Like the ring algorithm, rounds after each step.
    fn reduce_in_rank_order<T: BenchElement>(op: ReduceOp, contributions: &[Vec<T>]) -> Vec<T> {
        let world = contributions.len();
        let kernels = crate::reduce::kernels(T::DTYPE, op).expect("a defined reduction");
        let kernels = kernels.of_contributions(world as u32);
        let mut result = contributions[0].clone();
        for (rank, contribution) in contributions.iter().enumerate().skip(1) {
            let kernel = if rank + 1 == world { &kernels.reduce_last } else { &kernels.reduce };
            let result = bytemuck::cast_slice_mut(&mut result);
            kernel.apply(result, bytemuck::cast_slice(contribution));
        }
        result
    }

    fn check_reductions<T: BenchElement>(ranks: u32) {
        let world = WorldSize::new(ranks).unwrap();
        let is_measured = |op: &&ReduceOp| op.applies_to(T::DTYPE) && **op != ReduceOp::Custom;
        for &op in ReduceOp::ALL.iter().filter(is_measured) {
            let case = make_case(BenchOperation::AllReduce, T::DTYPE, Some(op), 60);
            let pattern = TestPattern::<T>::new(case, world, Rank::ZERO, 7);
            let contributions: Vec<Vec<T>> = world.ranks().map(|rank| pattern.contribution(rank)).collect();
            let mut result = reduce_in_rank_order(op, &contributions);
            assert_eq!(pattern.count_wrong(&result), 0, "{} {op} of {ranks}", T::DTYPE);
            // Flip a bit in the first, a middle and the last element. The check must find all three wrong elements.
            for index in [0, 29, 59] {
                let byte = index * size_of::<T>();
                bytemuck::cast_slice_mut::<T, u8>(&mut result)[byte] ^= 1;
            }
            assert_eq!(pattern.count_wrong(&result), 3, "{} {op} of {ranks}", T::DTYPE);
        }
    }

    #[test]
    fn every_reduction_of_every_type_is_exact_in_small_and_large_worlds() {
        // Large worlds take seconds. Without `TEST_FULL`, worlds of more than 127 ranks check only `f16` and `bf16`.
        let is_full = std::env::var_os("TEST_FULL").is_some();
        for ranks in [2, 3, 8, 127, 300, 2100] {
            check_reductions::<f16>(ranks);
            check_reductions::<bf16>(ranks);
            if ranks > 127 && !is_full {
                continue;
            }
            check_reductions::<f32>(ranks);
            check_reductions::<f64>(ranks);
            check_reductions::<i8>(ranks);
            check_reductions::<u8>(ranks);
            check_reductions::<i16>(ranks);
            check_reductions::<u16>(ranks);
            check_reductions::<i32>(ranks);
            check_reductions::<u32>(ranks);
            check_reductions::<i64>(ranks);
            check_reductions::<u64>(ranks);
            check_reductions::<F32Loc>(ranks);
            check_reductions::<F64Loc>(ranks);
            check_reductions::<I32Loc>(ranks);
            check_reductions::<I64Loc>(ranks);
        }
    }

    #[test]
    fn logical_and_bitwise_results_vary_in_small_and_large_worlds() {
        for ranks in [2, 3, 8, 127, 2100] {
            let world = WorldSize::new(ranks).unwrap();
            for op in [ReduceOp::LogicalAnd, ReduceOp::LogicalOr, ReduceOp::LogicalXor] {
                let case = make_case(BenchOperation::AllReduce, DType::I32, Some(op), 500);
                let expected_reduction =
                    TestPattern::<i32>::new(case, world, Rank::ZERO, 7).expected_reduction;
                let ones = expected_reduction.iter().filter(|&&value| value == 1).count();
                assert!((100..=400).contains(&ones), "{op} of {ranks}: {ones} of 500");
            }
            for op in [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor] {
                let case = make_case(BenchOperation::AllReduce, DType::U32, Some(op), 500);
                let expected_reduction =
                    TestPattern::<u32>::new(case, world, Rank::ZERO, 7).expected_reduction;
                let ones: u32 = expected_reduction.iter().map(|value| value.count_ones()).sum();
                assert!((500..=15_500).contains(&ones), "{op} of {ranks}: {ones} of 16000");
            }
        }
    }

    #[test]
    fn missing_contributions_and_shifted_data_are_found() {
        let world = WorldSize::new(4).unwrap();
        let count = 40_000;
        let case = make_case(BenchOperation::AllReduce, DType::F32, Some(ReduceOp::Sum), count);
        let pattern = TestPattern::<f32>::new(case, world, Rank::ZERO, 1);
        let mut own = vec![0.0; count];
        pattern.fill(&mut own);
        let right: Vec<f32> =
            (0..count).map(|index| pattern.expected_reduction[index % PATTERN_PERIOD_ELEMENTS]).collect();
        assert_eq!(pattern.count_wrong(&right), 0);
        let missing: Vec<f32> = right.iter().zip(&own).map(|(sum, own)| sum - own).collect();
        assert_eq!(pattern.count_wrong(&missing), count as u64);
        let mut shifted = right.clone();
        shifted[8192..16_384].copy_from_slice(&right[..8192]);
        assert!(pattern.count_wrong(&shifted) > 8000);
        assert_eq!(pattern.count_wrong(&vec![f32::NAN; count]), count as u64);
    }

    /// Computes the results of all ranks directly from all inputs.
    fn compute_results(case: BenchCase, world: WorldSize, inputs: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let sum = |ranks: Range<usize>| -> Vec<u32> {
            let add = |index: usize| {
                inputs[ranks.clone()].iter().map(|input| input[index]).fold(0, u32::wrapping_add)
            };
            (0..case.count).map(add).collect()
        };
        let part = |rank: usize| chunk(case.count, world, Rank::new(rank as u32));
        let (n, root) = (world.as_usize(), case.root.index());
        let result = |rank: usize| match case.operation {
            BenchOperation::AllReduce | BenchOperation::Reduce | BenchOperation::ReduceScatter => sum(0..n),
            BenchOperation::Scan => sum(0..rank + 1),
            BenchOperation::Exscan => sum(0..rank),
            BenchOperation::AllGather => (0..n).flat_map(|from| inputs[from][part(from)].to_vec()).collect(),
            BenchOperation::Gather if rank == root => inputs.concat(),
            BenchOperation::Broadcast => inputs[root].clone(),
            BenchOperation::Scatter => inputs[root][part(rank)].to_vec(),
            BenchOperation::AllToAll => (0..n).flat_map(|from| inputs[from][part(rank)].to_vec()).collect(),
            BenchOperation::SendReceive => inputs[(rank + n - 1) % n].clone(),
            BenchOperation::PingPong if rank < 2 => inputs[1 - rank].clone(),
            BenchOperation::Gather | BenchOperation::PingPong | BenchOperation::Barrier => Vec::new(),
        };
        (0..n).map(result).collect()
    }

    /// Returns the range of the elements whose values the operation defines.
    fn range_to_check(case: BenchCase, world: WorldSize, rank: Rank, result: &[u32]) -> Range<usize> {
        match case.operation {
            BenchOperation::ReduceScatter => chunk(case.count, world, rank),
            BenchOperation::Reduce if rank != case.root => 0..0,
            BenchOperation::Exscan if rank == Rank::ZERO => 0..0,
            _ => 0..result.len(),
        }
    }

    #[test]
    fn correct_results_pass_and_each_wrong_element_is_found() {
        let world = WorldSize::new(4).unwrap();
        for &operation in BenchOperation::ALL {
            let reduction = operation.reduces().then_some(ReduceOp::Sum);
            let case =
                BenchCase { operation, dtype: DType::U32, reduction, root: Rank::new(2), count: 20_000 };
            let patterns: Vec<TestPattern<u32>> =
                world.ranks().map(|rank| TestPattern::new(case, world, rank, 5)).collect();
            let fill = |pattern: &TestPattern<u32>| {
                let mut input = vec![9; case.input_count(world, pattern.rank)];
                pattern.fill(&mut input);
                input
            };
            let inputs: Vec<Vec<u32>> = patterns.iter().map(fill).collect();
            for (pattern, mut result) in patterns.iter().zip(compute_results(case, world, &inputs)) {
                let rank = pattern.rank;
                assert_eq!(pattern.count_wrong(&result), 0, "{operation} on {rank}");
                let specified = range_to_check(case, world, rank, &result);
                let missing = &result[..specified.end.saturating_sub(1)];
                assert_eq!(
                    pattern.count_wrong(missing),
                    u64::from(!specified.is_empty()),
                    "{operation} on {rank}"
                );
                for index in (0..result.len()).step_by(997) {
                    result[index] ^= 1;
                    let is_wrong = specified.contains(&index);
                    assert_eq!(
                        pattern.count_wrong(&result),
                        u64::from(is_wrong),
                        "{operation} on {rank} at {index}"
                    );
                    result[index] ^= 1;
                }
                // No rank contributes a zero, so in a result of zeros every element is wrong.
                result.fill(0);
                assert_eq!(pattern.count_wrong(&result), specified.len() as u64, "{operation} on {rank}");
            }
        }
    }

    #[test]
    fn elements_that_were_never_received_are_found() {
        let world = WorldSize::new(3).unwrap();
        let count = 20_000;
        for (operation, missing) in [(BenchOperation::AllGather, 13_333), (BenchOperation::Broadcast, 20_000)]
        {
            let case = make_case(operation, DType::Bf16, None, count);
            let pattern = TestPattern::<bf16>::new(case, world, Rank::new(1), 3);
            let mut buffer = vec![bf16::ONE; count];
            pattern.fill(&mut buffer);
            assert_eq!(pattern.count_wrong(&buffer), missing, "{operation}");
        }
        // A reduce-scatter defines only the rank's own chunk, so the check ignores the zeros outside this chunk.
        let case = make_case(BenchOperation::ReduceScatter, DType::I8, Some(ReduceOp::Max), count);
        let pattern = TestPattern::<i8>::new(case, world, Rank::new(1), 3);
        let own = chunk(count, world, Rank::new(1));
        let mut buffer = vec![0i8; count];
        for index in own {
            buffer[index] = pattern.expected_reduction[index % PATTERN_PERIOD_ELEMENTS];
        }
        assert_eq!(pattern.count_wrong(&buffer), 0);
    }
}
