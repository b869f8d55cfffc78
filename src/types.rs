//! The terms of the field: ranks, element types, reductions, and what a rank requests of a collective.

mod located;
mod site;

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

pub use self::located::{F32Loc, F64Loc, I32Loc, I64Loc};
pub use self::site::Site;

/// The largest number of ranks in a job. A larger rank, world size or list of ranks is refused before anything is
/// allocated.
pub const WORLD_SIZE_MAX: u32 = 65_536;

/// A process of the job, numbered from 0 to the world size minus one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(u32);

impl Rank {
    /// Rank 0, which reports results and from which parameters are broadcast.
    pub const ZERO: Self = Self(0);

    /// The rank with this number. It is compared with the world size where both are known.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The rank's number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The rank's number as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// The number of ranks of the job: at least 1, at most [`WORLD_SIZE_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorldSize(u32);

impl WorldSize {
    /// A world of one rank, which has no peers.
    pub const ONE: Self = Self(1);

    /// A world of `ranks` ranks; `None` for 0 and for more than [`WORLD_SIZE_MAX`].
    pub const fn new(ranks: u32) -> Option<Self> {
        if ranks == 0 || ranks > WORLD_SIZE_MAX { None } else { Some(Self(ranks)) }
    }

    /// The number of ranks.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number of ranks as a length.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// Every rank of this world, in order.
    pub fn ranks(self) -> impl Iterator<Item = Rank> + Clone {
        (0..self.0).map(Rank)
    }

    /// Whether `rank` belongs to this world.
    pub const fn contains(self, rank: Rank) -> bool {
        rank.0 < self.0
    }

    /// The rank `steps` places after `rank` around the ring.
    pub const fn after(self, rank: Rank, steps: u32) -> Rank {
        Rank(((rank.0 as u64 + steps as u64) % self.0 as u64) as u32)
    }

    /// The rank `steps` places before `rank` around the ring.
    pub const fn before(self, rank: Rank, steps: u32) -> Rank {
        self.after(rank, self.0 - steps % self.0)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Defines a fieldless enum that is encoded as one byte and printed in lower case.
macro_rules! wire_enum {
    (
        $(#[$meta:meta])*
        pub enum $name:ident { $( $(#[$vmeta:meta])* $variant:ident = $byte:literal => $text:literal ),+ $(,)? }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $name { $( $(#[$vmeta])* $variant = $byte ),+ }

        impl $name {
            /// Every variant, in the order of their wire bytes.
            pub const ALL: &'static [Self] = &[ $( Self::$variant ),+ ];

            /// The byte that encodes it on the wire.
            pub const fn to_byte(self) -> u8 { self as u8 }

            /// The variant that the byte encodes; `None` if no variant has this byte.
            pub const fn from_byte(byte: u8) -> Option<Self> {
                match byte { $( $byte => Some(Self::$variant), )+ _ => None }
            }

            /// The name in options and in output.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $text ),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.pad(self.name()) }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $( $text => Ok(Self::$variant), )+
                    other => Err(format!("`{other}` is not one of {}", [$( $text ),+].join(", "))),
                }
            }
        }
    };
}

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
        /// Signed, 8 bits.
        I8 = 5 => "i8",
        /// Unsigned, 8 bits.
        U8 = 6 => "u8",
        /// Signed, 32 bits.
        I32 = 7 => "i32",
        /// Unsigned, 32 bits.
        U32 = 8 => "u32",
        /// Signed, 64 bits.
        I64 = 9 => "i64",
        /// Unsigned, 64 bits.
        U64 = 10 => "u64",
        /// [`F32Loc`]: an f32 and a u32 index, its location.
        F32Loc = 11 => "f32_loc",
        /// [`F64Loc`]: an f64 and a u64 index, its location.
        F64Loc = 12 => "f64_loc",
        /// [`I32Loc`]: an i32 and a u32 index, its location.
        I32Loc = 13 => "i32_loc",
        /// [`I64Loc`]: an i64 and a u64 index, its location.
        I64Loc = 14 => "i64_loc",
        /// Signed, 16 bits.
        I16 = 15 => "i16",
        /// Unsigned, 16 bits.
        U16 = 16 => "u16",
    }
}

impl DType {
    /// The twelve types that are plain numbers, in the order of their wire bytes.
    pub const NUMBERS: &'static [Self] = &[
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

    /// Whether it is a plain number, without a location.
    pub const fn is_number(self) -> bool {
        !matches!(self, Self::F32Loc | Self::F64Loc | Self::I32Loc | Self::I64Loc)
    }

    /// Whether it is a plain integer.
    pub const fn is_integer(self) -> bool {
        matches!(
            self,
            Self::I8 | Self::U8 | Self::I16 | Self::U16 | Self::I32 | Self::U32 | Self::I64 | Self::U64
        )
    }

    /// Bytes of one element.
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
    /// How elements at the same index on different ranks are combined.
    pub enum ReduceOp {
        /// The sum. Integers wrap around.
        Sum = 1 => "sum",
        /// The sum divided by the world size. Integers wrap around in the sum; the division truncates towards zero.
        Average = 2 => "avg",
        /// The smallest. A NaN on any rank gives NaN.
        Min = 3 => "min",
        /// The largest. A NaN on any rank gives NaN.
        Max = 4 => "max",
        /// The product. Integers wrap around.
        Product = 5 => "prod",
        /// The bits that are set on every rank. Integers only, as the next two.
        BitAnd = 6 => "band",
        /// The bits that are set on any rank.
        BitOr = 7 => "bor",
        /// The bits that are set on an odd number of ranks.
        BitXor = 8 => "bxor",
        /// 1 where no rank has zero, 0 elsewhere. In logical reductions every value but zero is true: NaN is true,
        /// -0.0 is false. Any type of number can hold truth values; `u8` is usual.
        LogicalAnd = 9 => "land",
        /// 1 where any rank has a value other than zero, 0 elsewhere.
        LogicalOr = 10 => "lor",
        /// 1 where an odd number of ranks has a value other than zero, 0 elsewhere.
        LogicalXor = 11 => "lxor",
        /// The smallest value with its location. Of equal values, the one with the lowest index wins. A NaN on any
        /// rank wins; of several NaNs, the one with the lowest index. Located types only, as the next one.
        MinLoc = 12 => "minloc",
        /// The largest value with its location. Equal values and NaNs are treated as for the smallest.
        MaxLoc = 13 => "maxloc",
        /// The sum of contributions that each rank has multiplied by its own factor beforehand. It is computed as
        /// [`ReduceOp::Sum`]; the separate name detects ranks that did not multiply.
        PreMulSum = 14 => "premulsum",
        /// A function of the caller, the same on every rank.
        Custom = 15 => "custom",
    }
}

impl ReduceOp {
    /// Whether the reduction is defined on elements of `dtype`.
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

    /// Whether the result is always a truth value, 1 or 0.
    pub const fn is_logical(self) -> bool {
        matches!(self, Self::LogicalAnd | Self::LogicalOr | Self::LogicalXor)
    }
}

wire_enum! {
    /// A collective operation.
    pub enum Operation {
        /// Every rank ends with the reduction of all buffers.
        AllReduce = 1 => "all_reduce",
        /// Each rank ends with one chunk, its own, of the reduction of all buffers.
        ReduceScatter = 2 => "reduce_scatter",
        /// Every rank ends with every rank's chunk.
        AllGather = 3 => "all_gather",
        /// Every rank ends with the root's buffer.
        Broadcast = 4 => "broadcast",
        /// No rank leaves before every rank has entered.
        Barrier = 5 => "barrier",
        /// The root ends with the reduction of all buffers.
        Reduce = 6 => "reduce",
        /// The root ends with every rank's part.
        Gather = 7 => "gather",
        /// Each rank ends with its part of the root's buffer.
        Scatter = 8 => "scatter",
        /// Each rank ends with the parts that all ranks have for it.
        AllToAll = 9 => "all_to_all",
        /// Each rank ends with the reduction of the buffers of ranks 0 to its own.
        Scan = 10 => "scan",
        /// Each rank but the first ends with the reduction of the buffers of all ranks before it.
        Exscan = 11 => "exscan",
        /// A message from one rank to another.
        Message = 12 => "message",
    }
}

impl Operation {
    /// Whether one rank has a special part in it, as root.
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }
}

wire_enum! {
    /// How an operation is routed: which schedule the ranks follow.
    pub enum Algorithm {
        /// Neighbours on a ring, one chunk for each rank, segments within a chunk.
        Ring = 1 => "ring",
        /// Rounds at distances 1, 2, 4, ...: Hensgen, Finkel and Manber's dissemination barrier.
        Dissemination = 2 => "dissemination",
        /// A binomial tree.
        Tree = 3 => "tree",
        /// From rank to rank in order, pipelined.
        Chain = 4 => "chain",
        /// Straight from the rank that has the data to the rank that needs it.
        Direct = 5 => "direct",
        /// Every rank sends its whole buffer straight to every other rank and reduces all buffers itself.
        OneShot = 6 => "one-shot",
        /// The same in rounds at distances 1, 2, 4, ...; each round doubles the number of contributions that a rank
        /// has.
        Doubling = 7 => "doubling",
        /// Exchanges whole buffers with partners at distances 1, 2, 4, ... and reduces after each exchange.
        Butterfly = 8 => "butterfly",
        /// Two binary trees, each for half of the buffer, pipelined; the inner ranks of one are leaves of the other.
        DoubleTree = 9 => "double-tree",
        /// In shared memory within hosts and over links between them; every rank carries a slice.
        Hierarchy = 10 => "hierarchy",
    }
}

/// The bits of a group's number that mark internal operations; the group's own number has none of them.
pub const GROUP_FLAGS: u32 = OBJECTS_GROUP | HOSTS_GROUP | LOCAL_GROUP;
/// Messages of asynchronous object operations.
pub const OBJECTS_GROUP: u32 = 1 << 31;
/// Operations of a group between hosts.
pub const HOSTS_GROUP: u32 = 1 << 30;
/// Operations of the group's ranks on one host, before they share memory.
pub const LOCAL_GROUP: u32 = 1 << 29;

/// The tag of a receive that accepts any tag; no message has it.
pub const ANY_TAG: u32 = u32::MAX;

/// What one rank requests when it calls a collective. Every message carries it, and all ranks must request the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Contract {
    /// The collective.
    pub operation: Operation,
    /// The element type.
    pub dtype: DType,
    /// The reduction; `None` where nothing is reduced.
    pub reduction: Option<ReduceOp>,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The root; rank 0 if the operation has none.
    pub root: Rank,
    /// The number of elements in the whole buffer.
    pub count: u64,
    /// A digest of the lengths if the ranks' parts differ in length, 0 for even parts. For a message: its tag.
    pub layout: u32,
}

impl Contract {
    /// The value that control frames carry instead; no operation requests it.
    pub const NONE: Self = Self {
        operation: Operation::Barrier,
        dtype: DType::U8,
        reduction: None,
        algorithm: Algorithm::Dissemination,
        root: Rank::ZERO,
        count: 0,
        layout: 0,
    };
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
        if self.layout != 0 {
            write!(f, "uneven parts {:08x}, ", self.layout)?;
        }
        write!(f, "{})", self.algorithm)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// The element types of collectives: numbers (`f16`, `bf16`, `f32`, `f64`, `i8`, `u8`, `i16`, `u16`, `i32`, `u32`,
/// `i64` or `u64`) and numbers with a location ([`F32Loc`], [`F64Loc`], [`I32Loc`] or [`I64Loc`]).
///
/// Sealed: the wire format knows these sixteen and no others.
pub trait Element: bytemuck::Pod + PartialEq + fmt::Debug + Send + Sync + sealed::Sealed {
    /// Its name on the wire.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($ty:ty => $dtype:ident),+ $(,)?) => {
        $( impl sealed::Sealed for $ty {}
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
    fn every_wire_byte_comes_back() {
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
    fn reductions_apply_where_they_are_defined() {
        let numbers: Vec<DType> = DType::ALL.iter().copied().filter(|dtype| dtype.is_number()).collect();
        assert_eq!(numbers, DType::NUMBERS);
        let types = |op: ReduceOp| DType::ALL.iter().filter(|&&dtype| op.applies_to(dtype)).count();
        let counts: Vec<usize> = ReduceOp::ALL.iter().map(|&op| types(op)).collect();
        assert_eq!(counts, [12, 12, 12, 12, 12, 8, 8, 8, 12, 12, 12, 4, 4, 12, 16]);
        assert!(ReduceOp::BitAnd.applies_to(DType::U16) && !ReduceOp::BitAnd.applies_to(DType::F32));
        assert!(ReduceOp::MinLoc.applies_to(DType::F64Loc) && !ReduceOp::Min.applies_to(DType::F64Loc));
    }

    #[test]
    fn the_ring_closes() {
        let world = WorldSize::new(5).unwrap();
        assert_eq!(world.after(Rank::new(4), 1), Rank::ZERO);
        assert_eq!(world.before(Rank::ZERO, 1), Rank::new(4));
        assert_eq!(world.before(Rank::new(2), 7), Rank::ZERO);
        assert_eq!(WorldSize::new(0), None);
        assert_eq!(WorldSize::new(WORLD_SIZE_MAX + 1), None);
    }
}
