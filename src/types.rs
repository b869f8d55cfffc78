//! The basic types: ranks, element types, reductions, operations, algorithms, and [`Contract`], which holds the
//! arguments of a call that must be the same on all ranks.

mod compression;
mod debug_as_display;
mod located;
mod plural;
mod rank;
mod rank_map;
mod rank_set;
mod site;
mod sorted_map;
mod wire_enum;

use std::fmt;

use half::{bf16, f16};

pub use self::compression::{
    COMPRESSION_NAMES, Compression, Fp8Format, Fraction, POWER_SGD_RANK_MAX, Rounding,
};
pub(crate) use self::debug_as_display::debug_as_display;
pub use self::located::{F32Loc, F64Loc, I32Loc, I64Loc};
pub use self::plural::{counted, plural};
pub use self::rank::{Rank, WORLD_SIZE_MAX, WorldSize, part_index};
pub(crate) use self::rank_map::RankMap;
pub use self::rank_set::RankSet;
pub use self::site::Site;
pub(crate) use self::sorted_map::{SortedMap, SortedSet};
use self::wire_enum::wire_enum;

wire_enum! {
    /// The type of one element of a buffer.
    pub enum DType {
        /// IEEE 754 binary16.
        F16 = 1 => "f16",
        /// bfloat16: the upper half of an f32.
        Bf16 = 2 => "bf16",
        /// IEEE 754 binary32.
        F32 = 3 => "f32",
        /// IEEE 754 binary64.
        F64 = 4 => "f64",
        /// A signed integer with 8 bits.
        I8 = 5 => "i8",
        /// An unsigned integer with 8 bits.
        U8 = 6 => "u8",
        /// A signed integer with 32 bits.
        I32 = 7 => "i32",
        /// An unsigned integer with 32 bits.
        U32 = 8 => "u32",
        /// A signed integer with 64 bits.
        I64 = 9 => "i64",
        /// An unsigned integer with 64 bits.
        U64 = 10 => "u64",
        /// [`F32Loc`]: an f32 with its location, which is a u32 index.
        F32Loc = 11 => "f32_loc",
        /// [`F64Loc`]: an f64 with its location, which is a u64 index.
        F64Loc = 12 => "f64_loc",
        /// [`I32Loc`]: an i32 with its location, which is a u32 index.
        I32Loc = 13 => "i32_loc",
        /// [`I64Loc`]: an i64 with its location, which is a u64 index.
        I64Loc = 14 => "i64_loc",
        /// A signed integer with 16 bits.
        I16 = 15 => "i16",
        /// An unsigned integer with 16 bits.
        U16 = 16 => "u16",
    }
}

impl DType {
    /// The twelve types that are plain numbers, in the order of their bytes on the wire.
    pub const NUMBER_TYPES: &'static [Self] = &[
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::I16,
        Self::U16,
    ];

    /// Returns whether the type is a plain number, without a location.
    pub const fn is_number(self) -> bool {
        !matches!(self, Self::F32Loc | Self::F64Loc | Self::I32Loc | Self::I64Loc)
    }

    /// Returns whether the type is an integer, without a location.
    pub const fn is_integer(self) -> bool {
        matches!(
            self,
            Self::I8 | Self::U8 | Self::I16 | Self::U16 | Self::I32 | Self::U32 | Self::I64 | Self::U64
        )
    }

    /// Returns the size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 | Self::F32Loc | Self::I32Loc => 8,
            Self::F64Loc | Self::I64Loc => 16,
        }
    }
}

wire_enum! {
    /// The function that reduces the elements that the ranks have at the same index.
    pub enum ReduceOp {
        /// The sum. Integers wrap around.
        Sum = 1 => "sum",
        /// The sum divided by the world size. Integers wrap around in the sum; the division truncates towards zero.
        Average = 2 => "avg",
        /// The smallest element. If any rank has a NaN, the result is a NaN.
        Min = 3 => "min",
        /// The largest element. If any rank has a NaN, the result is a NaN.
        Max = 4 => "max",
        /// The product. Integers wrap around.
        Product = 5 => "prod",
        /// The bits that are set in the elements of all ranks. Only for integers.
        BitAnd = 6 => "band",
        /// The bits that are set in the element of at least one rank. Only for integers.
        BitOr = 7 => "bor",
        /// The bits that are set in the elements of an odd number of ranks. Only for integers.
        BitXor = 8 => "bxor",
        /// 1 if the elements of all ranks are true, else 0. In logical reductions zero is false (also -0.0) and every
        /// other value is true (also NaN). Logical reductions are defined for all types of numbers.
        LogicalAnd = 9 => "land",
        /// 1 if the element of at least one rank is true, else 0.
        LogicalOr = 10 => "lor",
        /// 1 if the elements of an odd number of ranks are true, else 0.
        LogicalXor = 11 => "lxor",
        /// The smallest value with its location, which is an index. Of equal values, the value with the lowest index
        /// wins. A NaN wins over all numbers. Of several NaNs, the NaN with the lowest index wins. Only for types with
        /// a location.
        MinLoc = 12 => "minloc",
        /// The largest value with its location. The rules for equal values and NaNs are those of
        /// [`ReduceOp::MinLoc`]. Only for types with a location.
        MaxLoc = 13 => "maxloc",
        /// The sum of contributions that each rank has already multiplied by a factor. The result is computed as for
        /// [`ReduceOp::Sum`]. If another rank passes [`ReduceOp::Sum`] instead, the library reports a mismatch.
        PreMulSum = 14 => "premulsum",
        /// A function that the caller passes. All ranks must pass the same function.
        Custom = 15 => "custom",
    }
}

impl ReduceOp {
    /// Returns whether the reduction is defined for elements of `dtype`.
    pub const fn applies_to(self, dtype: DType) -> bool {
        match self {
            Self::Sum
            | Self::Average
            | Self::Min
            | Self::Max
            | Self::Product
            | Self::LogicalAnd
            | Self::LogicalOr
            | Self::LogicalXor
            | Self::PreMulSum => dtype.is_number(),
            Self::BitAnd | Self::BitOr | Self::BitXor => dtype.is_integer(),
            Self::MinLoc | Self::MaxLoc => !dtype.is_number(),
            Self::Custom => true,
        }
    }

    /// Returns whether the reduction is a logical one, whose result is always 1 or 0.
    pub const fn is_logical(self) -> bool {
        matches!(self, Self::LogicalAnd | Self::LogicalOr | Self::LogicalXor)
    }
}

wire_enum! {
    /// A collective operation, or a message between two ranks.
    pub enum Operation {
        /// Every rank gets the reduction of all buffers.
        AllReduce = 1 => "all_reduce",
        /// Every rank gets its own part of the reduction of all buffers.
        ReduceScatter = 2 => "reduce_scatter",
        /// Every rank gets the parts of all ranks.
        AllGather = 3 => "all_gather",
        /// Every rank gets the contents of the root's buffer.
        Broadcast = 4 => "broadcast",
        /// No rank leaves the operation before all ranks have entered it.
        Barrier = 5 => "barrier",
        /// The root gets the reduction of all buffers.
        Reduce = 6 => "reduce",
        /// The root gets the parts of all ranks.
        Gather = 7 => "gather",
        /// Every rank gets its own part of the root's buffer.
        Scatter = 8 => "scatter",
        /// Every rank sends a part of its buffer to each rank, and gets one part from each rank.
        AllToAll = 9 => "all_to_all",
        /// Rank r gets the reduction of the buffers of ranks 0 to r.
        Scan = 10 => "scan",
        /// Rank r gets the reduction of the buffers of ranks 0 to r-1. Rank 0 gets no result.
        Exscan = 11 => "exscan",
        /// A message from one rank to another.
        Message = 12 => "message",
    }
}

impl Operation {
    /// Returns whether the operation has a root.
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }
}

wire_enum! {
    /// The algorithm of an operation: which rank sends which data to which other rank.
    pub enum Algorithm {
        /// Each rank sends to its successor on a ring, one chunk in each step.
        Ring = 1 => "ring",
        /// In round k, each rank signals the rank at distance 2^k: the dissemination barrier of Hensgen, Finkel and
        /// Manber.
        Dissemination = 2 => "dissemination",
        /// Data moves along the edges of a binomial tree.
        Tree = 3 => "tree",
        /// The buffer passes along a chain of ranks, which forward the buffer segment by segment.
        Chain = 4 => "chain",
        /// Each rank sends data directly to the rank that needs the data.
        Direct = 5 => "direct",
        /// Each rank sends its whole buffer directly to every other rank, and reduces all buffers itself.
        OneShot = 6 => "one-shot",
        /// Each rank collects the buffers of all ranks, in rounds at distances 1, 2, 4, .... Each round doubles the
        /// number of buffers that a rank has. In the end, each rank reduces all buffers itself.
        Doubling = 7 => "doubling",
        /// Each rank exchanges its whole buffer with partners at distances 1, 2, 4, ..., and reduces after each
        /// exchange.
        Butterfly = 8 => "butterfly",
        /// Each of two binary trees transfers one half of the buffer, block by block. The inner ranks of one tree are
        /// leaves of the other tree.
        DoubleTree = 9 => "double-tree",
        /// The ranks of a host share memory, and hosts exchange data over links. Each rank transfers a part of the
        /// buffer between hosts.
        Hierarchy = 10 => "hierarchy",
    }
}

/// The bits that mark internal operations in a group's number on the wire. A group's own number has none of these
/// bits: it is at most [`SETUP_GROUP`].
pub const INTERNAL_GROUP_BITS: u32 = HOSTS_GROUP_BIT | LOCAL_GROUP_BIT | RESULTS_GROUP_BIT;
/// The number of the group of all ranks in the operations with which the ranks agree on settings and collect a timeline. With a
/// separate number, the first operation of the program is operation 0 of group 0. The numbers of all other groups are lower.
pub const SETUP_GROUP: u32 = RESULTS_GROUP_BIT - 1;
/// The bit that marks operations over links of the blocks of a collective: between hosts, and exchanges of encoded elements.
pub const HOSTS_GROUP_BIT: u32 = 1 << 30;
/// The bit that marks the operations with which the ranks of a group on one host set up their shared memory.
pub const LOCAL_GROUP_BIT: u32 = 1 << 29;
/// The bit that, with [`HOSTS_GROUP_BIT`], marks the second steps of exchanges of encoded elements.
pub const RESULTS_GROUP_BIT: u32 = 1 << 28;

const _: () = assert!(SETUP_GROUP & INTERNAL_GROUP_BITS == 0);

/// The bit of [`Contract::layout`] that marks compressed collectives. Digests of lengths do not have it.
pub const COMPRESSED_LAYOUT: u32 = 1 << 31;

/// The bit of [`Contract::layout`] that marks compressed collectives whose ranks add the result of an earlier collective.
pub const LAST_RESULT_LAYOUT: u32 = 1 << 29;

/// The tag of a receive that accepts messages with any tag. No message is sent with this tag.
pub const ANY_TAG: u32 = u32::MAX;

/// The arguments of a collective call that must be the same on all ranks. Every message contains the contract of the
/// sender. The receiver compares this contract with its own contract, and so detects different calls.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Contract {
    /// The collective, or [`Operation::Message`] for a message.
    pub operation: Operation,
    /// The element type.
    pub dtype: DType,
    /// The reduction, or `None` for an operation without one.
    pub reduction: Option<ReduceOp>,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The root, or rank 0 if the operation has no root.
    pub root: Rank,
    /// The number of elements in the whole buffer.
    pub count: u64,
    /// For a message, its tag. For a collective whose parts have different lengths, a digest of the lengths. For a compressed
    /// collective, [`COMPRESSED_LAYOUT`], [`LAST_RESULT_LAYOUT`] if it applies, and the code of the compression. 0 for all other
    /// operations.
    pub layout: u32,
}

impl Contract {
    /// The contract in frames that belong to no operation.
    pub const NONE: Self = Self {
        operation: Operation::Barrier,
        dtype: DType::U8,
        reduction: None,
        algorithm: Algorithm::Dissemination,
        root: Rank::ZERO,
        count: 0,
        layout: 0,
    };

    /// Returns the contract of a message of `count` elements.
    pub fn message(dtype: DType, count: u64, tag: u32) -> Self {
        let (operation, algorithm) = (Operation::Message, Algorithm::Direct);
        Self { operation, dtype, algorithm, count, layout: tag, ..Self::NONE }
    }

    /// Returns whether the ranks number the blocks of the collective instead of the collective itself: whether it has several
    /// stages.
    pub fn has_blocks(&self) -> bool {
        self.algorithm == Algorithm::Hierarchy || self.compression().is_some()
    }

    /// Returns the compression of a compressed collective.
    pub fn compression(&self) -> Option<Compression> {
        let code = self.layout.checked_sub(COMPRESSED_LAYOUT)?;
        if self.operation == Operation::Message {
            return None;
        }
        Compression::from_code(code & !LAST_RESULT_LAYOUT)
    }
}

impl fmt::Display for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.operation)?;
        if let Some(reduction) = self.reduction {
            write!(f, "{reduction}, ")?;
        }
        if self.operation.has_root() {
            write!(f, "root {}, ", self.root)?;
        }
        if self.operation == Operation::Message {
            let Self { layout: tag, count, dtype, .. } = self;
            return match *tag {
                ANY_TAG => write!(f, "any tag, {count} x {dtype})"),
                tag => write!(f, "tag {tag}, {count} x {dtype})"),
            };
        }
        if self.operation != Operation::Barrier {
            write!(f, "{} x {}, ", self.count, self.dtype)?;
        }
        match self.compression() {
            Some(compression) if self.layout & LAST_RESULT_LAYOUT != 0 => {
                write!(f, "compressed as {compression} with the result of an earlier call, ")?;
            }
            Some(compression) => write!(f, "compressed as {compression}, ")?,
            None if self.layout != 0 => write!(f, "uneven parts {:08x}, ", self.layout)?,
            None => {}
        }
        write!(f, "{})", self.algorithm)
    }
}

mod sealed {
    pub trait SealedElement {}
}

/// The element types of collectives: numbers (`f16`, `bf16`, `f32`, `f64`, `i8`, `u8`, `i16`, `u16`, `i32`, `u32`,
/// `i64` or `u64`) and numbers with a location ([`F32Loc`], [`F64Loc`], [`I32Loc`] or [`I64Loc`]).
///
/// The trait is sealed, because the wire format has codes only for these sixteen types.
pub trait Element: bytemuck::Pod + PartialEq + fmt::Debug + Send + Sync + sealed::SealedElement {
    /// The code of the type on the wire.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($ty:ty => $dtype:ident),+ $(,)?) => {
        $( impl sealed::SealedElement for $ty {}
           impl Element for $ty { const DTYPE: DType = DType::$dtype; }
           const _: () = assert!(size_of::<$ty>() == DType::$dtype.size_bytes()); )+
    };
}

elements! {
    f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64, i8 => I8,
    u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
    F32Loc => F32Loc, F64Loc => F64Loc, I32Loc => I32Loc, I64Loc => I64Loc,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_types_and_reductions_are_decoded_from_their_bytes_and_names() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_byte(dtype.to_byte()), Some(dtype));
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        for &op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_byte(op.to_byte()), Some(op));
            assert_eq!(op.name().parse(), Ok(op));
        }
        assert_eq!(DType::from_byte(0), None);
        assert_eq!(Operation::from_byte(200), None);
    }

    #[test]
    fn reductions_apply_to_the_types_for_which_they_are_defined() {
        let numbers: Vec<DType> = DType::ALL.iter().copied().filter(|dtype| dtype.is_number()).collect();
        assert_eq!(numbers, DType::NUMBER_TYPES);
        let count_types = |op: ReduceOp| DType::ALL.iter().filter(|&&dtype| op.applies_to(dtype)).count();
        let counts: Vec<usize> = ReduceOp::ALL.iter().map(|&op| count_types(op)).collect();
        assert_eq!(counts, [12, 12, 12, 12, 12, 8, 8, 8, 12, 12, 12, 4, 4, 12, 16]);
        assert!(ReduceOp::BitAnd.applies_to(DType::U16) && !ReduceOp::BitAnd.applies_to(DType::F32));
        assert!(ReduceOp::MinLoc.applies_to(DType::F64Loc) && !ReduceOp::Min.applies_to(DType::F64Loc));
    }

    #[test]
    fn ranks_after_the_last_and_before_the_first_wrap_around() {
        let world = WorldSize::new(5).unwrap();
        assert_eq!(world.rank_after(Rank::new(4), 1), Rank::ZERO);
        assert_eq!(world.rank_before(Rank::ZERO, 1), Rank::new(4));
        assert_eq!(world.rank_before(Rank::new(2), 7), Rank::ZERO);
        assert_eq!(WorldSize::new(0), None);
        assert_eq!(WorldSize::new(WORLD_SIZE_MAX + 1), None);
    }
}
