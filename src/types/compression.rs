//! The names of gradient compressions. `src/codec/` implements them.

use std::fmt;
use std::str::FromStr;

/// How ranks encode `f32` elements that they send to other hosts. The ranks of one host exchange exact values in shared memory.
///
/// A name is followed by its parameter, if it has one: `int8`, `topk:0.01`, `powersgd:4`. `docs/compression.md` compares the
/// accuracy, the bytes and the time of all codecs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Compression {
    /// No compression: 4 bytes per element.
    #[default]
    None,
    /// IEEE binary16: 2 bytes per element, 11 bits of precision. Values beyond 65,504 overflow to infinity.
    Fp16,
    /// bfloat16: 2 bytes per element, 8 bits of precision, and the same range as `f32`.
    Bf16,
    /// 8-bit floats with one scale for each block of elements.
    Fp8(Fp8Format),
    /// 8-bit integers with one scale for each block of elements.
    Int8(Rounding),
    /// 4-bit integers with one scale for each block of elements.
    Int4(Rounding),
    /// QSGD: integers of 2 to 8 bits, rounded stochastically, scaled by the Euclidean norm of each block.
    Qsgd(u8),
    /// The sign of each element, and the mean absolute value of each block.
    OneBit,
    /// signSGD with majority vote: the result of each element is 1 or -1, the sign that most ranks have. Zeros and ties give 1 or
    /// -1 at random.
    SignSgd,
    /// The elements with the largest absolute values: this fraction of all elements.
    TopK(Fraction),
    /// Randomly chosen elements, the same on all ranks: this fraction of all elements.
    RandomK(Fraction),
    /// `PowerSGD`: the matrices of the gradient are approximated by matrices of this rank.
    PowerSgd(u8),
    /// Chooses the fastest of none, bf16, int8, int4 and onebit for each buffer, by measurement. Uses no codec whose relative
    /// error is larger than this fraction, and no codec that is slower than none.
    Auto(Fraction),
    /// EF21: the codec encodes the difference between each element and what this rank has sent of it so far. So the results
    /// converge to the exact sums if the elements converge.
    ///
    /// Source: Richtárik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster error
    /// feedback", `NeurIPS` 2021.
    Ef21(BiasedCodec),
}

/// A codec for [`Compression::Ef21`]: it rounds elements to the nearest value that it can send, or leaves elements out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum BiasedCodec {
    /// As [`Compression::Fp8`].
    Fp8(Fp8Format),
    /// As [`Compression::Int8`] with [`Rounding::Nearest`].
    Int8,
    /// As [`Compression::Int4`] with [`Rounding::Nearest`].
    Int4,
    /// As [`Compression::OneBit`].
    OneBit,
    /// As [`Compression::TopK`].
    TopK(Fraction),
    /// As [`Compression::RandomK`].
    RandomK(Fraction),
}

impl BiasedCodec {
    /// Returns the codec of `compression`; `None` if EF21 does not apply to it.
    pub fn new(compression: Compression) -> Option<Self> {
        Some(match compression {
            Compression::Fp8(format) => Self::Fp8(format),
            Compression::Int8(Rounding::Nearest) => Self::Int8,
            Compression::Int4(Rounding::Nearest) => Self::Int4,
            Compression::OneBit => Self::OneBit,
            Compression::TopK(fraction) => Self::TopK(fraction),
            Compression::RandomK(fraction) => Self::RandomK(fraction),
            _ => return None,
        })
    }

    /// Returns the compression with this codec and without EF21.
    pub fn compression(self) -> Compression {
        match self {
            Self::Fp8(format) => Compression::Fp8(format),
            Self::Int8 => Compression::Int8(Rounding::Nearest),
            Self::Int4 => Compression::Int4(Rounding::Nearest),
            Self::OneBit => Compression::OneBit,
            Self::TopK(fraction) => Compression::TopK(fraction),
            Self::RandomK(fraction) => Compression::RandomK(fraction),
        }
    }
}

/// A format of 8-bit floats.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fp8Format {
    /// 4 bits of exponent and 3 bits of mantissa; the largest value is 448.
    E4M3,
    /// 5 bits of exponent and 2 bits of mantissa; the largest finite value is 57,344.
    E5M2,
}

/// How a value between two integers is rounded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rounding {
    /// To the nearest integer.
    Nearest,
    /// Up or down at random, so that the expected result is the value.
    Stochastic,
}

/// A fraction of the elements of a buffer, greater than 0 and at most 1, in parts per million.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Fraction(u32);

impl Fraction {
    /// The number of parts of the whole.
    const WHOLE: u32 = 1_000_000;

    /// Returns the fraction that is nearest to `value`. Returns `None` if `value` is not between 0.000001 and 1.
    pub fn new(value: f64) -> Option<Self> {
        let parts = (value * f64::from(Self::WHOLE)).round();
        (parts >= 1.0 && parts <= f64::from(Self::WHOLE)).then_some(Self(parts as u32))
    }

    /// Returns the fraction as a number.
    pub fn value(self) -> f64 {
        f64::from(self.0) / f64::from(Self::WHOLE)
    }

    /// Returns this fraction of `count` elements, rounded up. At least 1, unless `count` is 0.
    pub fn of(self, count: usize) -> usize {
        ((count as u128 * u128::from(self.0)).div_ceil(u128::from(Self::WHOLE))) as usize
    }
}

/// The names that [`Compression::from_str`] accepts, for error messages.
pub const COMPRESSION_NAMES: &str = "none, fp16, bf16, fp8-e4m3, fp8-e5m2, int8, int8-stochastic, int4, int4-stochastic, \
     qsgd:BITS, onebit, signsgd, topk:FRACTION, randomk:FRACTION, powersgd:RANK, auto:ERROR, ef21:CODEC";

/// The codecs to which EF21 applies, for error messages.
const EF21_CODECS: &str = "fp8-e4m3, fp8-e5m2, int8, int4, onebit, topk:FRACTION and randomk:FRACTION";
/// The bits of QSGD without a parameter.
const QSGD_BITS: u8 = 4;
/// The fraction of top-k and random-k without a parameter.
const DEFAULT_FRACTION: Fraction = Fraction(10_000);
/// The largest relative error of `auto` without a parameter.
const AUTO_ERROR: Fraction = Fraction(50_000);
/// The rank of `PowerSGD` without a parameter.
const POWER_SGD_RANK: u8 = 4;
/// The codec of EF21 without a parameter.
const EF21_CODEC: BiasedCodec = BiasedCodec::Int4;
/// The bit of a [`Compression::to_code`] that stands for EF21.
const EF21_BIT: u32 = 1 << 30;
/// The largest rank of `PowerSGD`.
pub const POWER_SGD_RANK_MAX: u8 = 64;

impl Compression {
    /// Returns the number that stands for this compression in a [`Contract`](super::Contract). 0 stands for no compression.
    pub(crate) fn to_code(self) -> u32 {
        let (kind, parameter) = match self {
            Self::None => (0, 0),
            Self::Fp16 => (1, 0),
            Self::Bf16 => (2, 0),
            Self::Fp8(format) => (3, u32::from(format == Fp8Format::E5M2)),
            Self::Int8(rounding) => (4, u32::from(rounding == Rounding::Stochastic)),
            Self::Int4(rounding) => (5, u32::from(rounding == Rounding::Stochastic)),
            Self::Qsgd(bits) => (6, u32::from(bits)),
            Self::OneBit => (7, 0),
            Self::SignSgd => (8, 0),
            Self::TopK(fraction) => (9, fraction.0),
            Self::RandomK(fraction) => (10, fraction.0),
            Self::PowerSgd(rank) => (11, u32::from(rank)),
            Self::Auto(error_max) => (12, error_max.0),
            Self::Ef21(codec) => return EF21_BIT | codec.compression().to_code(),
        };
        kind << 24 | parameter
    }

    /// Returns the compression with this code; `None` if there is none.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        if code & EF21_BIT != 0 {
            return Self::from_code(code & !EF21_BIT).and_then(BiasedCodec::new).map(Self::Ef21);
        }
        let parameter = code & 0x00ff_ffff;
        let rounding = || [Rounding::Nearest, Rounding::Stochastic].get(parameter as usize).copied();
        let fraction = || (1..=Fraction::WHOLE).contains(&parameter).then_some(Fraction(parameter));
        let compression = match code >> 24 {
            0 => Self::None,
            1 => Self::Fp16,
            2 => Self::Bf16,
            3 => Self::Fp8(*[Fp8Format::E4M3, Fp8Format::E5M2].get(parameter as usize)?),
            4 => Self::Int8(rounding()?),
            5 => Self::Int4(rounding()?),
            6 => Self::Qsgd(u8::try_from(parameter).ok().filter(|bits| (2..=8).contains(bits))?),
            7 => Self::OneBit,
            8 => Self::SignSgd,
            9 => Self::TopK(fraction()?),
            10 => Self::RandomK(fraction()?),
            11 => Self::PowerSgd(u8::try_from(parameter).ok().filter(|&rank| is_power_sgd_rank(rank))?),
            12 => Self::Auto(fraction()?),
            _ => return None,
        };
        (compression.to_code() == code).then_some(compression)
    }

    /// Returns whether the error of each call is worth keeping and adding to the input of the next call: whether the codec is
    /// biased, and coarser than 16-bit floats.
    pub fn needs_error_feedback(self) -> bool {
        match self {
            Self::None | Self::Fp16 | Self::Bf16 | Self::SignSgd | Self::Qsgd(_) => false,
            Self::Int8(rounding) | Self::Int4(rounding) => rounding == Rounding::Nearest,
            Self::Fp8(_)
            | Self::OneBit
            | Self::TopK(_)
            | Self::RandomK(_)
            | Self::PowerSgd(_)
            | Self::Auto(_)
            | Self::Ef21(_) => true,
        }
    }

    /// Returns whether each result contains the result of the last call.
    pub fn adds_last_result(self) -> bool {
        matches!(self, Self::Ef21(_))
    }

    /// Returns whether the results depend on random numbers.
    pub fn is_random(self) -> bool {
        match self {
            Self::Int8(rounding) | Self::Int4(rounding) => rounding == Rounding::Stochastic,
            Self::Qsgd(_) | Self::SignSgd | Self::RandomK(_) => true,
            Self::Ef21(codec) => codec.compression().is_random(),
            _ => false,
        }
    }
}

fn is_power_sgd_rank(rank: u8) -> bool {
    (1..=POWER_SGD_RANK_MAX).contains(&rank)
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.value())
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = |rounding| if rounding == Rounding::Stochastic { "-stochastic" } else { "" };
        let name = match *self {
            Self::None => "none".into(),
            Self::Fp16 => "fp16".into(),
            Self::Bf16 => "bf16".into(),
            Self::Fp8(Fp8Format::E4M3) => "fp8-e4m3".into(),
            Self::Fp8(Fp8Format::E5M2) => "fp8-e5m2".into(),
            Self::Int8(rounding) => format!("int8{}", suffix(rounding)),
            Self::Int4(rounding) => format!("int4{}", suffix(rounding)),
            Self::Qsgd(bits) => format!("qsgd:{bits}"),
            Self::OneBit => "onebit".into(),
            Self::SignSgd => "signsgd".into(),
            Self::TopK(fraction) => format!("topk:{fraction}"),
            Self::RandomK(fraction) => format!("randomk:{fraction}"),
            Self::PowerSgd(rank) => format!("powersgd:{rank}"),
            Self::Auto(AUTO_ERROR) => "auto".into(),
            Self::Auto(error_max) => format!("auto:{error_max}"),
            Self::Ef21(codec) => format!("ef21:{}", codec.compression()),
        };
        f.pad(&name)
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, parameter) = match text.split_once(':') {
            Some((name, parameter)) => (name, Some(parameter)),
            None => (text, None),
        };
        let fraction = |default| match parameter {
            None => Ok(default),
            Some(parameter) => parameter.parse().ok().and_then(Fraction::new).ok_or_else(|| {
                format!("`{text}`: `{parameter}` is not a fraction from 0.000001 to 1, such as 0.01")
            }),
        };
        let number = |default: u8, range: std::ops::RangeInclusive<u8>, what: &str| match parameter {
            None => Ok(default),
            Some(parameter) => {
                parameter.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
                    format!("`{text}`: `{parameter}` is not {what} from {} to {}", range.start(), range.end())
                })
            }
        };
        let compression = match name {
            "qsgd" => return Ok(Self::Qsgd(number(QSGD_BITS, 2..=8, "a number of bits")?)),
            "topk" => return Ok(Self::TopK(fraction(DEFAULT_FRACTION)?)),
            "randomk" => return Ok(Self::RandomK(fraction(DEFAULT_FRACTION)?)),
            "auto" => return Ok(Self::Auto(fraction(AUTO_ERROR)?)),
            "ef21" => {
                let Some(parameter) = parameter else { return Ok(Self::Ef21(EF21_CODEC)) };
                let codec: Self = parameter.parse().map_err(|error| format!("`{text}`: {error}"))?;
                return BiasedCodec::new(codec)
                    .map(Self::Ef21)
                    .ok_or_else(|| format!("`{text}`: ef21 applies to {EF21_CODECS}, not to {codec}"));
            }
            "powersgd" => {
                return Ok(Self::PowerSgd(number(POWER_SGD_RANK, 1..=POWER_SGD_RANK_MAX, "a rank")?));
            }
            "none" => Self::None,
            "fp16" => Self::Fp16,
            "bf16" => Self::Bf16,
            "fp8" | "fp8-e4m3" => Self::Fp8(Fp8Format::E4M3),
            "fp8-e5m2" => Self::Fp8(Fp8Format::E5M2),
            "int8" => Self::Int8(Rounding::Nearest),
            "int8-stochastic" => Self::Int8(Rounding::Stochastic),
            "int4" => Self::Int4(Rounding::Nearest),
            "int4-stochastic" => Self::Int4(Rounding::Stochastic),
            "onebit" => Self::OneBit,
            "signsgd" => Self::SignSgd,
            _ => return Err(format!("`{text}` is not one of {COMPRESSION_NAMES}")),
        };
        match parameter {
            Some(parameter) => Err(format!("`{text}`: {name} has no parameter; leave out `:{parameter}`")),
            None => Ok(compression),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One compression of each kind, with each of its variants.
    fn all() -> Vec<Compression> {
        let names = "none fp16 bf16 fp8-e4m3 fp8-e5m2 int8 int8-stochastic int4 int4-stochastic qsgd:2 qsgd:8 onebit signsgd \
                     topk:0.000001 topk:1 randomk:0.25 powersgd:1 powersgd:64 auto \
                     auto:0.3 ef21:fp8-e4m3 ef21:fp8-e5m2 ef21:int8 ef21:int4 ef21:onebit ef21:topk:0.5 ef21:randomk:0.25";
        names.split_whitespace().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn names_and_codes_are_read_back() {
        for compression in all() {
            assert_eq!(compression.to_string().parse(), Ok(compression));
            assert_eq!(Compression::from_code(compression.to_code()), Some(compression));
        }
        assert_eq!("topk".parse(), Ok(Compression::TopK(Fraction::new(0.01).unwrap())));
        assert_eq!("powersgd".parse::<Compression>().unwrap().to_string(), "powersgd:4");
        assert_eq!("ef21".parse::<Compression>().unwrap().to_string(), "ef21:int4");
        for code in [
            13 << 24,
            (1 << 24) + 1,
            (3 << 24) + 2,
            (6 << 24) + 9,
            9 << 24,
            (11 << 24) + 65,
            12 << 24,
            u32::MAX,
            EF21_BIT,
            EF21_BIT + (2 << 24),
            EF21_BIT + (4 << 24) + 1,
        ] {
            assert_eq!(Compression::from_code(code), None, "{code:x}");
        }
    }

    #[test]
    fn invalid_names_and_parameters_are_refused() {
        for (text, expected) in [
            ("", "is not one of none, fp16"),
            ("int9", "is not one of"),
            ("INT8", "is not one of"),
            ("int8:4", "int8 has no parameter; leave out `:4`"),
            ("topk:0", "`0` is not a fraction"),
            ("topk:1.5", "`1.5` is not a fraction"),
            ("topk:nan", "`nan` is not a fraction"),
            ("randomk:", "`` is not a fraction"),
            ("qsgd:1", "`1` is not a number of bits from 2 to 8"),
            ("auto:0", "`0` is not a fraction"),
            ("powersgd:0", "`0` is not a rank from 1 to 64"),
            ("powersgd:-1", "`-1` is not a rank"),
            ("ef21:bf16", "ef21 applies to fp8-e4m3, fp8-e5m2, int8, int4, onebit, topk"),
            ("ef21:int8-stochastic", "not to int8-stochastic"),
            ("ef21:ef21:topk", "not to ef21:topk:0.01"),
            ("ef21:topk:2", "`2` is not a fraction"),
            ("ef21:", "`` is not one of none"),
        ] {
            let error = text.parse::<Compression>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_fraction_of_a_count_is_rounded_up() {
        let fraction = Fraction::new(0.01).unwrap();
        for (count, expected) in [(0, 0), (1, 1), (100, 1), (101, 2), (10_000, 100)] {
            assert_eq!(fraction.of(count), expected);
        }
        assert_eq!(Fraction::new(1.0).unwrap().of(usize::MAX), usize::MAX);
    }
}
