//! The checksum of frame headers, frame payloads and record headers.

/// Returns the CRC-32C (Castagnoli, RFC 3720) of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32C in the catalogue of CRC algorithms.
    #[test]
    fn crc32c_matches_the_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn crc32c_agrees_with_another_implementation_for_all_lengths() {
        let bytes: Vec<u8> = (0..1000usize).map(|index| (index * 7 + index / 251) as u8).collect();
        for end in 0..bytes.len() {
            let start = end / 3;
            assert_eq!(crc32c(&bytes[start..end]), ::crc32c::crc32c(&bytes[start..end]), "{start}..{end}");
        }
    }
}
