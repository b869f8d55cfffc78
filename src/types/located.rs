//! Values that carry where they stand, for minima and maxima with their location.

use bytemuck::{Pod, Zeroable};

/// Defines a value with an index, laid out without padding so that it travels as it lies in memory.
macro_rules! located {
    ($( $(#[$meta:meta])* $name:ident { $value:ty, $index:ty } )+) => { $(
        $(#[$meta])*
        ///
        /// What [`MinLoc`](super::ReduceOp::MinLoc) and [`MaxLoc`](super::ReduceOp::MaxLoc) reduce. The index is the
        /// program's own: a rank, or a place in a larger array. Of equal values the one with the lowest index wins.
        #[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            /// What is compared.
            pub value: $value,
            /// Where it stands.
            pub index: $index,
        }

        impl $name {
            /// The value that stands at `index`.
            pub const fn new(value: $value, index: $index) -> Self {
                Self { value, index }
            }
        }
    )+ };
}

located! {
    /// An `f32` and its place, 8 bytes. A NaN is less than everything in a minimum and more than everything in a maximum.
    F32Loc { f32, u32 }
    /// An `f64` and its place, 16 bytes. A NaN is less than everything in a minimum and more than everything in a maximum.
    F64Loc { f64, u64 }
    /// An `i32` and its place, 8 bytes.
    I32Loc { i32, u32 }
    /// An `i64` and its place, 16 bytes.
    I64Loc { i64, u64 }
}
