//! What a link that consists of several connections is cut into: records, each with its number in the link's order, each whole
//! on one connection.

use std::array::from_fn;

/// Bytes of a record's header.
pub const RECORD_HEADER_BYTES: usize = 16;
/// The most bytes of a record.
pub const RECORD_BYTES_MAX: u32 = 1 << 20;
/// Bytes of the header that its checksum covers.
const CHECKED: usize = RECORD_HEADER_BYTES - 4;

/// The header of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Its place in the order of the link's records, from 0.
    pub number: u64,
    /// Bytes behind the header; `None` for the last record of all, which is the rest of its connection.
    pub length: Option<u32>,
}

/// Why bytes are no record's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Its checksum is wrong.
    #[error("a record's header is corrupt (checksum {found:08x}, should be {expected:08x})")]
    Checksum {
        /// What the header's bytes come to.
        expected: u32,
        /// What stands in it.
        found: u32,
    },
    /// It is longer than any may be.
    #[error("a record of {0} bytes is beyond the limit of {RECORD_BYTES_MAX}")]
    Length(u32),
}

impl Record {
    /// The header's bytes.
    pub fn encode(self) -> [u8; RECORD_HEADER_BYTES] {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..CHECKED].copy_from_slice(&self.length.unwrap_or(0).to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The header that these bytes are.
    ///
    /// # Errors
    ///
    /// [`RecordError`].
    pub fn decode(bytes: &[u8; RECORD_HEADER_BYTES]) -> Result<Self, RecordError> {
        let number = u64::from_le_bytes(from_fn(|index| bytes[index]));
        let length = u32::from_le_bytes(from_fn(|index| bytes[8 + index]));
        let found = u32::from_le_bytes(from_fn(|index| bytes[CHECKED + index]));
        let expected = crc32c::crc32c(&bytes[..CHECKED]);
        if found != expected {
            return Err(RecordError::Checksum { expected, found });
        }
        if length > RECORD_BYTES_MAX {
            return Err(RecordError::Length(length));
        }
        Ok(Self { number, length: (length > 0).then_some(length) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_is_read_as_it_was_written(number: u64, length in proptest::option::of(1..=RECORD_BYTES_MAX)) {
            let record = Record { number, length };
            prop_assert_eq!(Record::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn a_bit_that_is_wrong_is_seen(number: u64, length in 1..=RECORD_BYTES_MAX, bit in 0..8 * RECORD_HEADER_BYTES) {
            let mut bytes = Record { number, length: Some(length) }.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let is_seen = matches!(Record::decode(&bytes), Err(RecordError::Checksum { .. }));
            prop_assert!(is_seen);
        }
    }

    #[test]
    fn a_record_beyond_the_limit_is_none() {
        let length = RECORD_BYTES_MAX + 1;
        let bytes = Record { number: 3, length: Some(length) }.encode();
        assert_eq!(Record::decode(&bytes), Err(RecordError::Length(length)));
    }
}
