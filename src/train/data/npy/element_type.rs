//! The types of the elements in numpy's arrays.

use half::f16;

/// Converts the bytes of elements to f64.
type Decoder = fn(&[u8], ByteOrder) -> Vec<f64>;

/// All types: the name in the header of a file without the byte order, the size of an element in bytes, and the function
/// that converts elements. A boolean becomes 0 or 1. 64-bit integers are rounded to the nearest f64.
const TYPES: [(&str, u64, Decoder); 12] = [
    ("b1", 1, |bytes, order| decode_elements(bytes, order, |[byte]: [u8; 1]| f64::from(u8::from(byte != 0)))),
    ("i1", 1, |bytes, order| decode_elements(bytes, order, |element| i8::from_le_bytes(element).into())),
    ("u1", 1, |bytes, order| decode_elements(bytes, order, |element| u8::from_le_bytes(element).into())),
    ("i2", 2, |bytes, order| decode_elements(bytes, order, |element| i16::from_le_bytes(element).into())),
    ("u2", 2, |bytes, order| decode_elements(bytes, order, |element| u16::from_le_bytes(element).into())),
    ("f2", 2, |bytes, order| decode_elements(bytes, order, |element| f16::from_le_bytes(element).into())),
    ("i4", 4, |bytes, order| decode_elements(bytes, order, |element| i32::from_le_bytes(element).into())),
    ("u4", 4, |bytes, order| decode_elements(bytes, order, |element| u32::from_le_bytes(element).into())),
    ("f4", 4, |bytes, order| decode_elements(bytes, order, |element| f32::from_le_bytes(element).into())),
    ("i8", 8, |bytes, order| decode_elements(bytes, order, |element| i64::from_le_bytes(element) as f64)),
    ("u8", 8, |bytes, order| decode_elements(bytes, order, |element| u64::from_le_bytes(element) as f64)),
    ("f8", 8, |bytes, order| decode_elements(bytes, order, f64::from_le_bytes)),
];

/// The order of the bytes of an element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ByteOrder {
    Little,
    Big,
}

/// The type of the elements of an array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElementType {
    name: &'static str,
    /// The size of an element in bytes.
    pub(super) size: u64,
    decoder: Decoder,
    order: ByteOrder,
}

impl ElementType {
    /// Parses the type in the header of a file, such as `<f4`. Returns `None` for types that are not in [`TYPES`].
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (order, name) = text.split_at_checked(1)?;
        let &(name, size, decoder) = TYPES.iter().find(|(known, ..)| *known == name)?;
        let order = match order {
            "<" => ByteOrder::Little,
            ">" => ByteOrder::Big,
            // numpy writes this character for types that have no byte order.
            "|" if size == 1 => ByteOrder::Little,
            _ => return None,
        };
        Some(Self { name, size, decoder, order })
    }

    /// Returns the name of the type without the byte order.
    pub(super) fn name(self) -> &'static str {
        self.name
    }

    /// Converts the bytes of elements.
    pub(super) fn decode(self, bytes: &[u8]) -> Vec<f64> {
        (self.decoder)(bytes, self.order)
    }

    /// Returns whether the elements are bytes, which are pixels if the array holds images.
    pub(super) fn is_byte(self) -> bool {
        self.name == "u1"
    }

    /// Returns whether the elements are integers that f64 may not represent exactly.
    pub(super) fn is_wide_integer(self) -> bool {
        ["i8", "u8"].contains(&self.name)
    }
}

/// Converts the bytes of elements to f64. `decode` converts the bytes of one element, with the lowest byte first.
fn decode_elements<const N: usize>(
    bytes: &[u8],
    order: ByteOrder,
    decode: impl Fn([u8; N]) -> f64,
) -> Vec<f64> {
    let elements = bytes.as_chunks().0.iter();
    match order {
        ByteOrder::Little => elements.map(|&element| decode(element)).collect(),
        ByteOrder::Big => elements
            .map(|&(mut element)| {
                element.reverse();
                decode(element)
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_decoded_in_both_byte_orders() {
        let cases: [(&str, Vec<u8>, [f64; 2]); 12] = [
            ("b1", vec![0, 2], [0.0, 1.0]),
            ("i1", vec![0x80, 5], [-128.0, 5.0]),
            ("u1", vec![0x80, 5], [128.0, 5.0]),
            ("i2", [i16::MIN, 258].map(i16::to_le_bytes).concat(), [-32768.0, 258.0]),
            ("u2", [u16::MAX, 258].map(u16::to_le_bytes).concat(), [65535.0, 258.0]),
            // The largest finite number and the smallest number above 0.
            ("f2", vec![0xff, 0x7b, 1, 0], [65504.0, 2.0_f64.powi(-24)]),
            ("i4", [i32::MIN, 70_000].map(i32::to_le_bytes).concat(), [-2_147_483_648.0, 70_000.0]),
            ("u4", [u32::MAX, 70_000].map(u32::to_le_bytes).concat(), [4_294_967_295.0, 70_000.0]),
            ("f4", [-0.5, f32::MAX].map(f32::to_le_bytes).concat(), [-0.5, f32::MAX.into()]),
            // The magnitude 2^53 + 1 is rounded to 2^53.
            ("i8", [-(1_i64 << 53) - 1, 7].map(i64::to_le_bytes).concat(), [-(2.0_f64.powi(53)), 7.0]),
            ("u8", [u64::MAX, 7].map(u64::to_le_bytes).concat(), [2.0_f64.powi(64), 7.0]),
            ("f8", [-0.1_f64, 1e300].map(f64::to_le_bytes).concat(), [-0.1, 1e300]),
        ];
        assert!(cases.iter().map(|case| case.0).eq(TYPES.iter().map(|known| known.0)));
        for (name, bytes, expected) in cases {
            let parse = |order: &str| ElementType::parse(&format!("{order}{name}"));
            let little = parse("<").unwrap();
            assert_eq!(little.decode(&bytes), expected, "{name}");
            let swapped: Vec<u8> = bytes
                .chunks(little.size as usize)
                .flat_map(|element| element.iter().rev().copied())
                .collect();
            assert_eq!(parse(">").unwrap().decode(&swapped), expected, "{name}");
            assert_eq!(parse("|").is_some(), little.size == 1, "{name}");
        }
        for text in ["", "f4", "<c8", "<f16", "|O", "<U4", "é8", "<f44", "=f4"] {
            assert!(ElementType::parse(text).is_none(), "{text}");
        }
    }
}
