//! Byte-pair encoding with the crate `tokenizers`, on which `candle-core` depends too.
//!
//! Source: Sennrich et al., "Neural machine translation of rare words with subword units", ACL 2016. The text is divided
//! into words, and characters are divided into bytes, as in GPT-2.

use std::collections::BTreeMap;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::vocabulary::VOCABULARY_MAX;

/// A byte-pair encoding that is ready for use.
#[derive(Debug)]
pub(crate) struct BytePairs {
    tokenizer: Box<tokenizers::Tokenizer>,
    /// The bytes of each token.
    token_bytes: Vec<Vec<u8>>,
}

/// Finds up to `vocabulary` tokens in the blocks of a text. Returns the byte-pair encoding with these tokens as JSON.
pub(super) fn learn_encoding(
    blocks: impl Iterator<Item = String> + Send,
    vocabulary: usize,
) -> Result<String, String> {
    let explain = |error: tokenizers::Error| format!("--tokens bpe:{vocabulary}: {error}");
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(vocabulary)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    tokenizer.train(&mut TrainerWrapper::from(trainer), blocks).map_err(explain)?;
    tokenizer.to_string(false).map_err(explain)
}

impl BytePairs {
    /// Reads an encoding that [`learn_encoding`] returned.
    pub(crate) fn from_json(json: &str) -> Result<Self, String> {
        let tokenizer: tokenizers::Tokenizer =
            json.parse().map_err(|error| format!("its byte-pair encoding is not valid: {error}"))?;
        let count = tokenizer.get_vocab_size(false);
        if !(1..=VOCABULARY_MAX).contains(&count) {
            return Err(format!(
                "its byte-pair encoding has {count} tokens, but must have 1 to {VOCABULARY_MAX}"
            ));
        }
        let bytes = bytes_of_characters();
        let bytes_of = |token: u32| {
            let text = tokenizer.id_to_token(token)?;
            text.chars().map(|character| bytes.get(&character).copied()).collect::<Option<Vec<u8>>>()
        };
        let token_bytes: Option<_> = (0..count as u32).map(bytes_of).collect();
        let token_bytes =
            token_bytes.ok_or("its byte-pair encoding has a token that is not a sequence of bytes")?;
        Ok(Self { tokenizer: Box::new(tokenizer), token_bytes })
    }

    /// Returns the number of tokens.
    pub(crate) fn token_count(&self) -> usize {
        self.token_bytes.len()
    }

    /// Returns the tokens of a block of a text.
    pub(crate) fn encode(&self, block: &str) -> Result<Vec<u16>, String> {
        let encoded = self.tokenizer.encode_fast(block, false).map_err(|error| error.to_string())?;
        let known = |&token: &u32| {
            let known =
                u16::try_from(token).ok().filter(|&token| usize::from(token) < self.token_bytes.len());
            known.ok_or_else(|| "the byte-pair encoding returned an unknown token".to_owned())
        };
        encoded.get_ids().iter().map(known).collect()
    }

    /// Returns the bytes of a token, or no bytes for an unknown token.
    pub(crate) fn decode(&self, token: u16) -> Vec<u8> {
        self.token_bytes.get(usize::from(token)).cloned().unwrap_or_default()
    }
}

/// Returns a map from each character of a token to the byte that the character stands for. GPT-2 uses the same map:
/// a printable character stands for its own byte, and the characters from U+0100 on stand for the other bytes.
fn bytes_of_characters() -> BTreeMap<char, u8> {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let (printable, others): (Vec<u8>, Vec<u8>) = (0..=u8::MAX).partition(is_printable);
    let printable = printable.into_iter().map(|byte| (char::from(byte), byte));
    let others = ('\u{100}'..).zip(others);
    printable.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also tests that learning does not depend on the random order of hash maps.
    #[test]
    fn every_text_is_encoded_and_decoded_unchanged() {
        let text = "call me ishmael, call me – 🐳\n".repeat(2500);
        let learn = || learn_encoding([text.clone(), text.clone()].into_iter(), 300).unwrap();
        let json = learn();
        assert_eq!(learn(), json);
        let pairs = BytePairs::from_json(&json).unwrap();
        assert!((257..=300).contains(&pairs.token_count()), "{}", pairs.token_count());
        for text in [text.as_str(), "", "\0\r\n\u{feff} ünknown\tcharacters"] {
            let tokens = pairs.encode(text).unwrap();
            let decoded: Vec<u8> = tokens.iter().flat_map(|&token| pairs.decode(token)).collect();
            assert_eq!(String::from_utf8(decoded).unwrap(), text);
        }
        assert!(pairs.encode(&text).unwrap().len() < text.len() / 3);
        for json in ["", "{}", "[]"] {
            assert!(BytePairs::from_json(json).is_err(), "{json}");
        }
    }
}
