//! Texts in messages that consist of 32-bit words.

/// Encodes a text as words of 4 bytes each. Cuts the text off after `words_max` words.
pub(crate) fn encode_text(text: &str, words_max: usize) -> Vec<u32> {
    let to_word = |chunk: &[u8]| {
        let mut bytes = [0; 4];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u32::from_ne_bytes(bytes)
    };
    text.as_bytes().chunks(4).take(words_max).map(to_word).collect()
}

/// Decodes the first `byte_count` bytes of the words. If the words have fewer bytes, decodes all bytes. Replaces bytes that
/// are not UTF-8 by U+FFFD.
pub(crate) fn decode_text(words: &[u32], byte_count: u64) -> String {
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let byte_count = usize::try_from(byte_count).unwrap_or(usize::MAX).min(bytes.len());
    String::from_utf8_lossy(&bytes[..byte_count]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decoded_text_equals_the_encoded_text_up_to_the_limit() {
        for (text, words_max, expected) in [
            ("", 2, ""),
            ("abc", 2, "abc"),
            ("abcdefgh", 2, "abcdefgh"),
            ("abcdefghi", 2, "abcdefgh"),
            ("abcé", 1, "abc\u{fffd}"),
        ] {
            let words = encode_text(text, words_max);
            assert!(words.len() <= words_max);
            assert_eq!(decode_text(&words, text.len() as u64), expected, "{text}");
            assert_eq!(decode_text(&words, u64::MAX).trim_end_matches('\0'), expected, "{text}");
        }
    }
}
