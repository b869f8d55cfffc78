//! What buffers hold before a checked iteration, and what they have to hold after it, element by element.
//!
//! Contents are drawn from a seed, the rank and the index, and are such that the exact result is known whatever the order
//! of the reduction: sums of floats are small enough whole numbers, their products powers of two with a sign, integers
//! anything at all, because they wrap around. An average is the exact sum divided once, as
//! [`ReduceOp::Average`] promises: integers truncate towards zero, half types divide in `f32` and round once. What only few
//! ranks decide, such as a bit that all must have set, is drawn so that both outcomes are usual in a world of any size.
//! So a result is either right in every bit or wrong.

use half::{bf16, f16};

use super::plan::Case;
use crate::schedule::partition::chunk;
use crate::types::{Element, F32Loc, F64Loc, I32Loc, I64Loc, Operation, Rank, ReduceOp, WorldSize};

/// Elements after which contents repeat. A prime: no power of two, hence no slip by a segment or a chunk, maps contents
/// onto themselves.
const PERIOD: usize = 8191;

/// What one rank's checked iteration starts from and has to end with.
pub struct Pattern<T> {
    case: Case,
    world: WorldSize,
    rank: Rank,
    seed: u64,
    /// One period of the reduction of all ranks, where there is one.
    reduced: Vec<T>,
}

impl<T: Sample> Pattern<T> {
    /// The pattern that `seed` gives for `case`; the same on all ranks but for what is `rank`'s own.
    pub fn new(case: Case, world: WorldSize, rank: Rank, seed: u64) -> Self {
        let mut pattern = Self { case, world, rank, seed, reduced: Vec::new() };
        if let Some(op) = case.reduction {
            pattern.reduced = (0..case.count.min(PERIOD)).map(|index| pattern.reduce(op, index)).collect();
        }
        pattern
    }

    /// Fills this rank's buffer with what it contributes, and zeros, which no result holds, where it contributes nothing.
    pub fn fill(&self, buffer: &mut [T]) {
        let own = match self.case.operation {
            Operation::AllGather => chunk(buffer.len(), self.world, self.rank),
            Operation::Broadcast if self.rank != self.case.root => 0..0,
            _ => 0..buffer.len(),
        };
        buffer.fill(T::zeroed());
        let tile = self.contribution(self.rank);
        let mut index = own.start;
        while index < own.end {
            let offset = index % PERIOD;
            let length = (own.end - index).min(tile.len() - offset);
            buffer[index..index + length].copy_from_slice(&tile[offset..offset + length]);
            index += length;
        }
    }

    /// How many elements of the result are not what they have to be. What the operation leaves unspecified is not looked
    /// at.
    pub fn count_wrong(&self, buffer: &[T]) -> u64 {
        let chunk_of = |rank| chunk(buffer.len(), self.world, rank);
        match self.case.operation {
            Operation::ReduceScatter => {
                let own = chunk_of(self.rank);
                differences(&buffer[own.clone()], &self.reduced, own.start)
            }
            Operation::AllGather => self
                .world
                .ranks()
                .map(|rank| {
                    differences(&buffer[chunk_of(rank)], &self.contribution(rank), chunk_of(rank).start)
                })
                .sum(),
            Operation::Broadcast => differences(buffer, &self.contribution(self.case.root), 0),
            _ => differences(buffer, &self.reduced, 0),
        }
    }

    /// One period of what `rank` contributes.
    fn contribution(&self, rank: Rank) -> Vec<T> {
        (0..self.case.count.min(PERIOD)).map(|index| self.draw(rank, index)).collect()
    }

    fn draw(&self, rank: Rank, index: usize) -> T {
        let bits = mix(mix(self.seed ^ u64::from(rank.get()) << 32) ^ index as u64);
        T::draw(self.case.reduction, Place { bits, at: rank.index() + index, world: self.world.as_usize() })
    }

    fn reduce(&self, op: ReduceOp, index: usize) -> T {
        T::reduce(op, self.world.ranks().map(|rank| self.draw(rank, index)), self.world)
    }
}

/// How many elements differ from the periodic contents that `tile` holds one period of, the first element being number
/// `start`.
fn differences<T: PartialEq>(elements: &[T], tile: &[T], start: usize) -> u64 {
    let mut wrong = 0;
    let mut done = 0;
    while done < elements.len() {
        let offset = (start + done) % PERIOD;
        let length = (elements.len() - done).min(tile.len() - offset);
        let (found, expected) = (&elements[done..done + length], &tile[offset..offset + length]);
        wrong += found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
        done += length;
    }
    wrong as u64
}

/// The finaliser of `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014): every bit of the input reaches every bit of the output.
fn mix(input: u64) -> u64 {
    let mut z = input.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Where a sample is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Random bits of its own.
    bits: u64,
    /// Rank plus index: where not all ranks can contribute, they take turns along the index.
    at: usize,
    /// Ranks.
    world: usize,
}

impl Place {
    /// How many ranks may contribute here, and whether this one does, if at most `limit` may.
    fn turn(self, limit: usize) -> (usize, bool) {
        let stride = self.world.div_ceil(limit);
        (self.world.div_ceil(stride), self.at.is_multiple_of(stride))
    }

    /// One of so many bits where it is this rank's turn, at random, and none elsewhere: all ranks together set about half
    /// of them.
    fn sparse_bit(self, width: u32) -> u64 {
        let stride = self.world.div_ceil(width as usize / 2) as u64;
        let is_one = (self.bits >> 8).is_multiple_of(stride);
        if is_one { 1 << (self.bits % u64::from(width)) } else { 0 }
    }

    /// What a rank contributes to a logical reduction: 0 for false, 1 to 127 for true.
    fn truth(self, op: ReduceOp) -> u8 {
        // Of all ranks together one or none, usually, is the exception.
        let is_rare = (self.bits >> 8).is_multiple_of(2 * self.world as u64);
        let is_true = match op {
            ReduceOp::LogicalAnd => !is_rare,
            ReduceOp::LogicalOr => is_rare,
            _ => self.bits >> 63 == 0,
        };
        if is_true { 1 + (self.bits % 127) as u8 } else { 0 }
    }

    /// A float's contribution, as a number that every float type holds exactly, if whole numbers are exact up to
    /// `exact_max` and powers of two up to `exponent_max`.
    fn float(self, op: Option<ReduceOp>, exact_max: usize, exponent_max: usize) -> f64 {
        let Self { bits, .. } = self;
        match op {
            None => (1 + bits % 127) as f64,
            Some(ReduceOp::Min | ReduceOp::Max) => (bits % 255) as f64 - 127.0,
            Some(ReduceOp::Sum | ReduceOp::PreMulSum | ReduceOp::Average) => {
                let (contributors, is_one) = self.turn(exact_max);
                let value = 1 + bits % (exact_max / contributors).min(128) as u64;
                if is_one { value as f64 } else { 0.0 }
            }
            Some(ReduceOp::Product) => {
                let (_, is_one) = self.turn(exponent_max);
                let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
                let magnitude = if bits & 2 == 0 { 2.0 } else { 0.5 };
                if is_one { sign * magnitude } else { sign }
            }
            Some(op) => f64::from(self.truth(op)),
        }
    }
}

/// An element type whose results can be foretold.
pub trait Sample: Element {
    /// What one rank contributes at one place; not zero where nothing is reduced.
    fn draw(op: Option<ReduceOp>, place: Place) -> Self;
    /// The reduction of all contributions.
    fn reduce(op: ReduceOp, contributions: impl Iterator<Item = Self>, world: WorldSize) -> Self;
}

/// The result of a logical reduction.
fn truth(op: ReduceOp, mut values: impl Iterator<Item = bool>) -> bool {
    match op {
        ReduceOp::LogicalAnd => values.all(|value| value),
        ReduceOp::LogicalOr => values.any(|value| value),
        _ => values.filter(|&value| value).count() % 2 == 1,
    }
}

/// The exact reduction of floats, an average not divided yet.
fn fold(op: ReduceOp, values: impl Iterator<Item = f64>) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::PreMulSum | ReduceOp::Average => values.sum(),
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Product => values.product(),
        op => f64::from(u8::from(truth(op, values.map(|value| value != 0.0)))),
    }
}

macro_rules! floats {
    ($($ty:ty as $computed:ty: $exact_max:literal, $exponent_max:literal, $to:expr, $from:expr;)+) => { $(
        impl Sample for $ty {
            fn draw(op: Option<ReduceOp>, place: Place) -> Self {
                let round: fn($computed) -> $ty = $from;
                round(place.float(op, $exact_max, $exponent_max) as $computed)
            }

            fn reduce(op: ReduceOp, contributions: impl Iterator<Item = Self>, world: WorldSize) -> Self {
                let widen: fn($ty) -> $computed = $to;
                let round: fn($computed) -> $ty = $from;
                let exact = fold(op, contributions.map(|value| f64::from(widen(value)))) as $computed;
                round(if op == ReduceOp::Average { exact / world.get() as $computed } else { exact })
            }
        }
    )+ };
}

floats! {
    f16 as f32: 2048, 14, f16::to_f32, f16::from_f32;
    bf16 as f32: 256, 126, bf16::to_f32, bf16::from_f32;
    f32 as f32: 16_777_216, 126, |value| value, |value| value;
    f64 as f64: 16_777_216, 126, |value| value, |value| value;
}

macro_rules! integers {
    ($($ty:ty => $wider:ty),+ $(,)?) => { $(
        impl Sample for $ty {
            fn draw(op: Option<ReduceOp>, place: Place) -> Self {
                let value = place.bits as $ty;
                match op {
                    // Odd: not zero, and no product of such is.
                    None | Some(ReduceOp::Product) => value | 1,
                    Some(ReduceOp::BitAnd) => !(place.sparse_bit(<$ty>::BITS) as $ty),
                    Some(ReduceOp::BitOr) => place.sparse_bit(<$ty>::BITS) as $ty,
                    Some(op) if op.is_logical() => place.truth(op) as $ty,
                    Some(_) => value,
                }
            }

            fn reduce(op: ReduceOp, contributions: impl Iterator<Item = Self>, world: WorldSize) -> Self {
                let sum = |a: $ty, b: $ty| a.wrapping_add(b);
                match op {
                    ReduceOp::BitAnd => contributions.fold(!0, |a, b| a & b),
                    ReduceOp::BitOr => contributions.fold(0, |a, b| a | b),
                    ReduceOp::BitXor => contributions.fold(0, |a, b| a ^ b),
                    ReduceOp::Average => {
                        (<$wider>::from(contributions.fold(0, sum)) / <$wider>::from(world.get())) as $ty
                    }
                    ReduceOp::Min => contributions.fold(<$ty>::MAX, <$ty>::min),
                    ReduceOp::Max => contributions.fold(<$ty>::MIN, <$ty>::max),
                    ReduceOp::Product => contributions.fold(1, |a, b| a.wrapping_mul(b)),
                    op if op.is_logical() => truth(op, contributions.map(|value| value != 0)).into(),
                    // Sums, those of contributions multiplied beforehand too.
                    _ => contributions.fold(0, sum),
                }
            }
        }
    )+ };
}

integers!(i8 => i64, u8 => u64, i32 => i64, u32 => u64, i64 => i64, u64 => u64);

macro_rules! located {
    ($($located:ty { $value:ty, $index:ty }),+ $(,)?) => { $(
        impl Sample for $located {
            fn draw(op: Option<ReduceOp>, place: Place) -> Self {
                let index = (place.bits >> 16) as $index;
                match op {
                    None => Self::new((1 + place.bits % 127) as $value, index),
                    // Few values, so that indices often decide.
                    Some(_) => Self::new((place.bits % 5) as $value - 2 as $value, index),
                }
            }

            fn reduce(op: ReduceOp, contributions: impl Iterator<Item = Self>, _: WorldSize) -> Self {
                let is_better = |a: Self, b: Self| {
                    if op == ReduceOp::MinLoc { a.value < b.value } else { a.value > b.value }
                };
                let winner = |best: Self, next: Self| {
                    let is_tied = next.value == best.value;
                    if is_better(next, best) || (is_tied && next.index < best.index) { next } else { best }
                };
                contributions.reduce(winner).unwrap_or_default()
            }
        }
    )+ };
}

located!(F32Loc { f32, u32 }, F64Loc { f64, u64 }, I32Loc { i32, u32 }, I64Loc { i64, u64 });

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    fn case(operation: Operation, dtype: DType, reduction: Option<ReduceOp>, count: usize) -> Case {
        Case { operation, dtype, reduction, root: Rank::ZERO, count }
    }

    /// Reduces in rank order with rounding after each step, as a ring would.
    fn in_steps<T: Sample>(op: ReduceOp, contributions: &[Vec<T>]) -> Vec<T> {
        let kernels = crate::reduce::kernels(T::DTYPE, op).expect("a defined reduction");
        let world = contributions.len();
        let mut result = contributions[0].clone();
        for (rank, contribution) in contributions.iter().enumerate().skip(1) {
            let kernel = if rank + 1 == world { &kernels.reduce_last } else { &kernels.reduce };
            let result = bytemuck::cast_slice_mut(&mut result);
            kernel.apply(result, bytemuck::cast_slice(contribution), world as u32);
        }
        result
    }

    fn holds_for<T: Sample>(ranks: u32) {
        let world = WorldSize::new(ranks).unwrap();
        let is_measured = |op: &&ReduceOp| op.applies_to(T::DTYPE) && **op != ReduceOp::Custom;
        for &op in ReduceOp::ALL.iter().filter(is_measured) {
            let case = case(Operation::AllReduce, T::DTYPE, Some(op), 60);
            let pattern = Pattern::<T>::new(case, world, Rank::ZERO, 7);
            let contributions: Vec<Vec<T>> = world.ranks().map(|rank| pattern.contribution(rank)).collect();
            let mut result = in_steps(op, &contributions);
            assert_eq!(pattern.count_wrong(&result), 0, "{} {op} of {ranks}", T::DTYPE);
            // One flipped bit in one element, wherever it stands.
            for index in [0, 29, 59] {
                let byte = index * size_of::<T>();
                bytemuck::cast_slice_mut::<T, u8>(&mut result)[byte] ^= 1;
            }
            assert_eq!(pattern.count_wrong(&result), 3, "{} {op} of {ranks}", T::DTYPE);
        }
    }

    #[test]
    fn every_reduction_of_every_type_is_exact_in_small_and_large_worlds() {
        for ranks in [2, 3, 8, 127, 300, 2100] {
            holds_for::<f16>(ranks);
            holds_for::<bf16>(ranks);
            holds_for::<f32>(ranks);
            holds_for::<f64>(ranks);
            holds_for::<i8>(ranks);
            holds_for::<u8>(ranks);
            holds_for::<i32>(ranks);
            holds_for::<u32>(ranks);
            holds_for::<i64>(ranks);
            holds_for::<u64>(ranks);
            holds_for::<F32Loc>(ranks);
            holds_for::<F64Loc>(ranks);
            holds_for::<I32Loc>(ranks);
            holds_for::<I64Loc>(ranks);
        }
    }

    #[test]
    fn both_outcomes_are_usual_in_small_and_large_worlds() {
        for ranks in [2, 3, 8, 127, 2100] {
            let world = WorldSize::new(ranks).unwrap();
            for op in [ReduceOp::LogicalAnd, ReduceOp::LogicalOr, ReduceOp::LogicalXor] {
                let case = case(Operation::AllReduce, DType::I32, Some(op), 500);
                let reduced = Pattern::<i32>::new(case, world, Rank::ZERO, 7).reduced;
                let ones = reduced.iter().filter(|&&value| value == 1).count();
                assert!((100..=400).contains(&ones), "{op} of {ranks}: {ones} of 500");
            }
            for op in [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor] {
                let case = case(Operation::AllReduce, DType::U32, Some(op), 500);
                let reduced = Pattern::<u32>::new(case, world, Rank::ZERO, 7).reduced;
                let ones: u32 = reduced.iter().map(|value| value.count_ones()).sum();
                assert!((500..=15_500).contains(&ones), "{op} of {ranks}: {ones} of 16000");
            }
        }
    }

    #[test]
    fn a_missing_contribution_and_a_slip_are_seen() {
        let world = WorldSize::new(4).unwrap();
        let count = 40_000;
        let case = case(Operation::AllReduce, DType::F32, Some(ReduceOp::Sum), count);
        let pattern = Pattern::<f32>::new(case, world, Rank::ZERO, 1);
        let mut own = vec![0.0; count];
        pattern.fill(&mut own);
        let right: Vec<f32> = (0..count).map(|index| pattern.reduced[index % PERIOD]).collect();
        assert_eq!(pattern.count_wrong(&right), 0);
        let missing: Vec<f32> = right.iter().zip(&own).map(|(sum, own)| sum - own).collect();
        assert_eq!(pattern.count_wrong(&missing), count as u64);
        let mut slipped = right.clone();
        slipped[8192..16_384].copy_from_slice(&right[..8192]);
        assert!(pattern.count_wrong(&slipped) > 8000);
        assert_eq!(pattern.count_wrong(&vec![f32::NAN; count]), count as u64);
    }

    #[test]
    fn what_was_never_received_is_seen() {
        let world = WorldSize::new(3).unwrap();
        let count = 20_000;
        for (operation, missing) in [(Operation::AllGather, 13_333), (Operation::Broadcast, 20_000)] {
            let case = case(operation, DType::Bf16, None, count);
            let pattern = Pattern::<bf16>::new(case, world, Rank::new(1), 3);
            let mut buffer = vec![bf16::ONE; count];
            pattern.fill(&mut buffer);
            assert_eq!(pattern.count_wrong(&buffer), missing, "{operation}");
        }
        // Outside its own chunk reduce-scatter promises nothing.
        let case = case(Operation::ReduceScatter, DType::I8, Some(ReduceOp::Max), count);
        let pattern = Pattern::<i8>::new(case, world, Rank::new(1), 3);
        let own = chunk(count, world, Rank::new(1));
        let mut buffer = vec![0i8; count];
        for index in own {
            buffer[index] = pattern.reduced[index % PERIOD];
        }
        assert_eq!(pattern.count_wrong(&buffer), 0);
    }
}
