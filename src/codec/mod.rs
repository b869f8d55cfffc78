//! Gradient compression: the wire formats of `f32` gradients.

mod half_floats;

use std::fmt;
use std::str::FromStr;

pub use half_floats::CompressedElement;

/// The wire format of an `f32` gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Compression {
    /// No compression: 4 bytes per element.
    #[default]
    None,
    /// IEEE binary16: 2 bytes per element, 11 bits of precision. Values beyond 65,504 overflow to infinity.
    Fp16,
    /// bfloat16: 2 bytes per element, 8 bits of precision, and the same range as `f32`.
    Bf16,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "fp16" => Ok(Self::Fp16),
            "bf16" => Ok(Self::Bf16),
            other => Err(format!("`{other}` is not one of none, fp16, bf16")),
        }
    }
}
