//! Values with a location, for [`MinLoc`](super::ReduceOp::MinLoc) and [`MaxLoc`](super::ReduceOp::MaxLoc).

use bytemuck::{Pod, Zeroable};

/// Defines types that consist of a value and an index. These types have no padding, so their wire format is their
/// memory layout.
macro_rules! located {
    ($( $(#[$meta:meta])* $name:ident { $value:ty, $index:ty } )+) => { $(
        $(#[$meta])*
        ///
        /// Use this type with [`MinLoc`](super::ReduceOp::MinLoc) and [`MaxLoc`](super::ReduceOp::MaxLoc). Of several
        /// equal values, the value with the lowest index wins. You choose the meaning of the index, for instance a
        /// rank or an index into a larger array.
        #[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
        #[repr(C)]
        pub struct $name {
            /// The value that is compared.
            pub value: $value,
            /// The location of the value.
            pub index: $index,
        }

        impl $name {
            /// Returns `value` with the location `index`.
            pub const fn new(value: $value, index: $index) -> Self {
                Self { value, index }
            }
        }
    )+ };
}

located! {
    /// An `f32` and its location, 8 bytes. A NaN wins over all numbers, in a minimum and in a maximum.
    F32Loc { f32, u32 }
    /// An `f64` and its location, 16 bytes. A NaN wins over all numbers, in a minimum and in a maximum.
    F64Loc { f64, u64 }
    /// An `i32` and its location, 8 bytes.
    I32Loc { i32, u32 }
    /// An `i64` and its location, 16 bytes.
    I64Loc { i64, u64 }
}
