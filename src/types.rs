//! The words of the domain: ranks, element types, reductions, and what a rank asks of a collective.

mod located;
mod site;

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

pub use self::located::{F32Loc, F64Loc, I32Loc, I64Loc};
pub use self::site::Site;

/// The most ranks one job may have. A roster, a rank or a world size beyond it is refused before anything is allocated.
pub const WORLD_SIZE_MAX: u32 = 65_536;

/// A process of the job, numbered from 0 to the world size less one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(u32);

impl Rank {
    /// Rank 0, the one that reports and from which parameters are broadcast.
    pub const ZERO: Self = Self(0);

    /// The rank with this number. Whether it is below the world size is checked where the two meet.
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

/// How many ranks the job has: at least 1, at most [`WORLD_SIZE_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorldSize(u32);

impl WorldSize {
    /// A world of one rank, which has nobody to talk to.
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

    /// Whether `rank` is one of this world's.
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

/// Defines a fieldless enum that travels as one byte and is written in lower case.
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

            /// The byte that stands for it on the wire.
            pub const fn to_byte(self) -> u8 { self as u8 }

            /// What the byte stands for; `None` for a byte that no variant has.
            pub const fn from_byte(byte: u8) -> Option<Self> {
                match byte { $( $byte => Some(Self::$variant), )+ _ => None }
            }

            /// The name that people type and read.
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
        /// [`F32Loc`]: an f32 and a u32 that says where it stands.
        F32Loc = 11 => "f32_loc",
        /// [`F64Loc`]: an f64 and a u64 that says where it stands.
        F64Loc = 12 => "f64_loc",
        /// [`I32Loc`]: an i32 and a u32 that says where it stands.
        I32Loc = 13 => "i32_loc",
        /// [`I64Loc`]: an i64 and a u64 that says where it stands.
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

    /// Whether it is a plain number, and not a number with its location.
    pub const fn is_number(self) -> bool {
        !matches!(self, Self::F32Loc | Self::F64Loc | Self::I32Loc | Self::I64Loc)
    }

    /// Whether it is a plain whole number.
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
    /// What is done to the elements that stand at the same place on different ranks.
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
        /// 1 where no rank has zero, 0 elsewhere. For the logical reductions everything but zero is true: a NaN is, and
        /// -0.0 is not. Truth values travel in any type of number, usually as `u8`.
        LogicalAnd = 9 => "land",
        /// 1 where any rank has something else than zero, 0 elsewhere.
        LogicalOr = 10 => "lor",
        /// 1 where an odd number of ranks has something else than zero, 0 elsewhere.
        LogicalXor = 11 => "lxor",
        /// The smallest with its location; of equal ones that with the lowest index. A NaN on any rank wins, and of
        /// several that with the lowest index. Located types only, as the next one.
        MinLoc = 12 => "minloc",
        /// The largest with its location; of equal ones that with the lowest index, and a NaN as for the smallest.
        MaxLoc = 13 => "maxloc",
        /// The sum of what the ranks have multiplied beforehand, each its own contribution by a factor of its own. What
        /// travels and is added is a [`ReduceOp::Sum`]'s; the name keeps ranks apart that did not multiply.
        PreMulSum = 14 => "premulsum",
        /// A function of the program's own, the same on every rank.
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

    /// Whether the result is a truth value, 1 or 0, whatever the contributions are.
    pub const fn is_logical(self) -> bool {
        matches!(self, Self::LogicalAnd | Self::LogicalOr | Self::LogicalXor)
    }
}

wire_enum! {
    /// A collective operation.
    pub enum Operation {
        /// Every rank ends with the reduction of all buffers.
        AllReduce = 1 => "all_reduce",
        /// Each rank ends with the reduction of its own chunk of all buffers.
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
        /// Each rank ends with the part that every rank has for it.
        AllToAll = 9 => "all_to_all",
        /// Each rank ends with the reduction of the buffers of all ranks up to itself.
        Scan = 10 => "scan",
        /// Each rank but the first ends with the reduction of the buffers of all ranks before it.
        Exscan = 11 => "exscan",
        /// A message from one rank to another.
        Message = 12 => "message",
    }
}

impl Operation {
    /// Whether one rank has a part of its own in it.
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }
}

wire_enum! {
    /// How an operation's traffic is routed: which schedule the ranks walk.
    pub enum Algorithm {
        /// Neighbours on a ring, a chunk per rank, segments within a chunk.
        Ring = 1 => "ring",
        /// Rounds at distances 1, 2, 4, ...: Hensgen, Finkel and Manber's dissemination barrier.
        Dissemination = 2 => "dissemination",
        /// A binomial tree.
        Tree = 3 => "tree",
        /// From rank to rank in order, pipelined.
        Chain = 4 => "chain",
        /// Between the two ranks concerned: whoever has something sends it straight to whoever is to have it.
        Direct = 5 => "direct",
        /// Everybody's whole buffer straight to everybody, who each reduce them alone.
        OneShot = 6 => "one-shot",
        /// The same in rounds at distances 1, 2, 4, ..., in each of which twice as much is known.
        Doubling = 7 => "doubling",
        /// Whole buffers with a partner at distances 1, 2, 4, ..., reduced each time.
        Butterfly = 8 => "butterfly",
        /// Two binary trees, each for half of the buffer, pipelined; the inner ranks of one are leaves of the other.
        DoubleTree = 9 => "double-tree",
        /// In shared memory within hosts, over links between them, where every rank carries a slice.
        Hierarchy = 10 => "hierarchy",
    }
}

/// The bits of a group's number that say in whose name something is done; the group's own number has none of them.
pub const GROUP_FLAGS: u32 = OBJECTS_GROUP | HOSTS_GROUP | LOCAL_GROUP;
/// Messages of objects that go on by themselves.
pub const OBJECTS_GROUP: u32 = 1 << 31;
/// What a group does by hosts.
pub const HOSTS_GROUP: u32 = 1 << 30;
/// The group's ranks on one host, before they share memory.
pub const LOCAL_GROUP: u32 = 1 << 29;

/// What stands for a tag where a receive takes any; no message has it.
pub const ANY_TAG: u32 = u32::MAX;

/// What one rank asks for when it calls a collective. Every message carries it, and all ranks must ask for the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Contract {
    /// The collective.
    pub operation: Operation,
    /// The element type.
    pub dtype: DType,
    /// The reduction; `None` where nothing is reduced.
    pub reduction: Option<ReduceOp>,
    /// The route.
    pub algorithm: Algorithm,
    /// The root; rank 0 where the operation has none.
    pub root: Rank,
    /// Elements in the whole buffer.
    pub count: u64,
    /// Where the ranks' parts differ in length: a digest of the lengths; 0 for even parts. For a message: its tag.
    pub layout: u32,
}

impl Contract {
    /// What control frames carry in its place; no operation asks for it.
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

/// What collectives carry: a number (`f16`, `bf16`, `f32`, `f64`, `i8`, `u8`, `i16`, `u16`, `i32`, `u32`, `i64` or `u64`), or
/// one with its location ([`F32Loc`], [`F64Loc`], [`I32Loc`] or [`I64Loc`]).
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
