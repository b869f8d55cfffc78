//! Values with their locations, for minima and maxima with location.

use bytemuck::{Pod, Zeroable};

/// Defines a value with an index. It has no padding, so its wire format is its memory layout.
macro_rules! located {
    ($( $(#[$meta:meta])* $name:ident { $value:ty, $index:ty } )+) => { $(
        $(#[$meta])*
        ///
        /// [`MinLoc`](super::ReduceOp::MinLoc) and [`MaxLoc`](super::ReduceOp::MaxLoc) reduce it. The program chooses
        /// the meaning of the index: a rank, or an index into a larger array. Of equal values the one with the lowest
        /// index wins.
        #[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            /// The value that is compared.
            pub value: $value,
            /// Its location.
            pub index: $index,
        }

        impl $name {
            /// The value with the location `index`.
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
