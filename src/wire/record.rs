//! Records: the numbered pieces into which a link with several connections divides its stream of bytes. All bytes of
//! a record are sent on one connection.

use std::array::from_fn;

/// The length of a record's header in bytes.
pub const RECORD_HEADER_BYTES: usize = 16;
/// The maximum number of bytes after a record's header.
pub const RECORD_BYTES_MAX: u32 = 1 << 20;
/// The number of bytes that the checksum covers: all bytes of the header before the checksum.
const CHECKSUMMED_BYTES: usize = RECORD_HEADER_BYTES - 4;

/// The header of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordHeader {
    /// The number of the record, counted from 0. Each end of a link numbers the records that it sends in the order of the
    /// stream.
    pub number: u64,
    /// The number of bytes after the header; `None` for the last record, which ends where its connection ends.
    pub length: Option<u32>,
}

/// Why bytes are not a valid header of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The checksum of the header is wrong.
    #[error("a record's header is corrupt (checksum {found:08x}, should be {expected:08x})")]
    Checksum {
        /// The checksum that was computed from the header's other bytes.
        expected: u32,
        /// The checksum that the header contains.
        found: u32,
    },
    /// The record is longer than the limit.
    #[error("a record has {0} bytes, more than the limit of {RECORD_BYTES_MAX}")]
    Length(u32),
}

impl RecordHeader {
    /// Encodes the header.
    pub fn encode(self) -> [u8; RECORD_HEADER_BYTES] {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..CHECKSUMMED_BYTES].copy_from_slice(&self.length.unwrap_or(0).to_le_bytes());
        let crc = crate::wire::crc32c(&bytes[..CHECKSUMMED_BYTES]);
        bytes[CHECKSUMMED_BYTES..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a header.
    ///
    /// # Errors
    ///
    /// [`RecordError`] if the checksum or the length is wrong.
    pub fn decode(bytes: &[u8; RECORD_HEADER_BYTES]) -> Result<Self, RecordError> {
        let number = u64::from_le_bytes(from_fn(|index| bytes[index]));
        let length = u32::from_le_bytes(from_fn(|index| bytes[8 + index]));
        let found = u32::from_le_bytes(from_fn(|index| bytes[CHECKSUMMED_BYTES + index]));
        let expected = crate::wire::crc32c(&bytes[..CHECKSUMMED_BYTES]);
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
        fn a_decoded_header_equals_the_encoded_one(number: u64, length in proptest::option::of(1..=RECORD_BYTES_MAX)) {
            let header = RecordHeader { number, length };
            prop_assert_eq!(RecordHeader::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn a_flipped_bit_is_detected(number: u64, length in 1..=RECORD_BYTES_MAX, bit in 0..8 * RECORD_HEADER_BYTES) {
            let mut bytes = RecordHeader { number, length: Some(length) }.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let is_detected = matches!(RecordHeader::decode(&bytes), Err(RecordError::Checksum { .. }));
            prop_assert!(is_detected);
        }
    }

    #[test]
    fn a_record_longer_than_the_limit_is_an_error() {
        let length = RECORD_BYTES_MAX + 1;
        let bytes = RecordHeader { number: 3, length: Some(length) }.encode();
        assert_eq!(RecordHeader::decode(&bytes), Err(RecordError::Length(length)));
    }
}
