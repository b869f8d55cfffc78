//! The element types of buffers. [`ElementKind`] finds an element type by its name, or by its format in Python's
//! buffer protocol. `with_type` calls generic code with an element type that is known only at run time.

use std::ffi::CStr;

use ringtrain::{DType, ReduceOp};

/// The type of a buffer's elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ElementKind {
    /// Numbers that can be reduced.
    Number(DType),
    /// Booleans: each element is a byte with the value 0 or 1.
    Bool,
    /// Items of this many bytes, which can be sent but not reduced.
    Opaque(usize),
}

impl ElementKind {
    /// Returns the kind of elements with this name, such as `f32` or `bool`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "bool" => Some(Self::Bool),
            _ => name.parse().ok().filter(|&dtype| is_number(dtype)).map(Self::Number),
        }
    }

    /// Returns the kind of elements that have this format of the buffer protocol and this size in bytes.
    pub(crate) fn from_format(format: &CStr, item_bytes: usize) -> Self {
        let code = match format.to_bytes() {
            [code] | [b'@' | b'=' | b'<' | b'|', code] => *code,
            _ => return Self::Opaque(item_bytes),
        };
        let number = match (code, item_bytes) {
            (b'?', 1) => return Self::Bool,
            (b'e', 2) => DType::F16,
            (b'f', 4) => DType::F32,
            (b'd', 8) => DType::F64,
            (b'b', 1) => DType::I8,
            (b'B', 1) => DType::U8,
            (b'h', 2) => DType::I16,
            (b'H', 2) => DType::U16,
            (b'i' | b'l', 4) => DType::I32,
            (b'I' | b'L', 4) => DType::U32,
            (b'l' | b'q' | b'n', 8) => DType::I64,
            (b'L' | b'Q' | b'N', 8) => DType::U64,
            _ => return Self::Opaque(item_bytes),
        };
        Self::Number(number)
    }

    /// The size of an element in bytes.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Number(dtype) => dtype.size_bytes(),
            Self::Bool => 1,
            Self::Opaque(bytes) => bytes,
        }
    }

    /// The alignment of an element in bytes.
    pub(crate) fn alignment(self) -> usize {
        match self {
            Self::Number(dtype) => dtype.size_bytes(),
            Self::Bool | Self::Opaque(_) => 1,
        }
    }

    /// Returns the type with which the library sends the elements, and how many values of that type represent one
    /// element.
    pub(crate) fn wire_type(self) -> (DType, usize) {
        match self {
            Self::Number(dtype) => (dtype, 1),
            Self::Bool => (DType::U8, 1),
            Self::Opaque(bytes) => (DType::U8, bytes),
        }
    }

    /// Returns the type with which the library reduces the elements, and the reduction on that type. Returns `None`
    /// if `op` is not defined on the elements.
    pub(crate) fn reduction(self, op: ReduceOp) -> Option<(DType, ReduceOp)> {
        match self {
            Self::Number(dtype) => Some((dtype, op)),
            // Sums and products of booleans are "any" and "all", as in numpy and NCCL.
            Self::Bool => match op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::LogicalOr | ReduceOp::BitOr => {
                    Some((DType::U8, ReduceOp::Max))
                }
                ReduceOp::Product | ReduceOp::Min | ReduceOp::LogicalAnd | ReduceOp::BitAnd => {
                    Some((DType::U8, ReduceOp::Min))
                }
                ReduceOp::LogicalXor | ReduceOp::BitXor => Some((DType::U8, ReduceOp::BitXor)),
                _ => None,
            },
            Self::Opaque(_) => None,
        }
    }

    /// Returns the name of the element type, as error messages show it.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Number(dtype) => dtype.to_string(),
            Self::Bool => "bool".into(),
            Self::Opaque(bytes) => format!("opaque items of {bytes} bytes"),
        }
    }

    /// Returns the format that the buffer protocol has for elements of this kind. The protocol has no format for
    /// bf16, so bf16 has the format of u16.
    pub(crate) fn format(self) -> &'static CStr {
        match self {
            Self::Bool => c"?",
            Self::Opaque(_) => c"B",
            Self::Number(dtype) => match dtype {
                DType::F16 => c"e",
                DType::I16 => c"h",
                DType::Bf16 | DType::U16 => c"H",
                DType::F32 => c"f",
                DType::F64 => c"d",
                DType::I8 => c"b",
                DType::I32 => c"i",
                DType::U32 => c"I",
                DType::I64 => c"q",
                DType::U64 => c"Q",
                _ => c"B",
            },
        }
    }
}

fn is_number(dtype: DType) -> bool {
    !matches!(dtype, DType::F32Loc | DType::F64Loc | DType::I32Loc | DType::I64Loc)
}

/// Runs `$body` with `$T` as the Rust type of the [`DType`] `$dtype`. The macro has no case for values with an index,
/// for example `F32Loc`, because an [`ElementKind`] never has such a type.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ringtrain::DType::F16 => {
                type $T = half::f16;
                $body
            }
            ringtrain::DType::Bf16 => {
                type $T = half::bf16;
                $body
            }
            ringtrain::DType::F32 => {
                type $T = f32;
                $body
            }
            ringtrain::DType::F64 => {
                type $T = f64;
                $body
            }
            ringtrain::DType::I8 => {
                type $T = i8;
                $body
            }
            ringtrain::DType::I16 => {
                type $T = i16;
                $body
            }
            ringtrain::DType::U16 => {
                type $T = u16;
                $body
            }
            ringtrain::DType::I32 => {
                type $T = i32;
                $body
            }
            ringtrain::DType::U32 => {
                type $T = u32;
                $body
            }
            ringtrain::DType::I64 => {
                type $T = i64;
                $body
            }
            ringtrain::DType::U64 => {
                type $T = u64;
                $body
            }
            _ => {
                type $T = u8;
                $body
            }
        }
    };
}
pub(crate) use with_type;
