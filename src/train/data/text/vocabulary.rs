//! The tokens of a text: characters, bytes, or sequences of bytes that byte-pair encoding finds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

#[cfg(feature = "candle")]
use super::byte_pairs::{self, BytePairs};
use super::stored_text::{StoredText, TextBlock, blocks_in_memory};
use crate::train::data::DataError;
#[cfg(not(feature = "candle"))]
use crate::train::model::CANDLE_NEEDED;

/// The maximum number of tokens in a vocabulary. A token is stored as a `u16`.
pub(crate) const VOCABULARY_MAX: usize = 1 << 16;
/// The number of different bytes. Each byte is a token of every byte-pair vocabulary.
const BYTE_COUNT: usize = 256;

/// The kind of the tokens of a text: the value of `--tokens`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TokenKind {
    /// A character. The vocabulary has the characters of the whole text.
    #[default]
    Characters,
    /// A byte of the file.
    Bytes,
    /// A sequence of bytes. Byte-pair encoding finds frequent sequences in the training text.
    BytePairs {
        /// The number of tokens in the vocabulary.
        vocabulary: usize,
    },
}

impl FromStr for TokenKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "characters" => return Ok(Self::Characters),
            "bytes" => return Ok(Self::Bytes),
            _ => {}
        }
        let size = text.strip_prefix("bpe:").ok_or("it is not one of characters, bytes, bpe:SIZE")?;
        let vocabulary: usize = size.parse().map_err(|_| format!("`{size}` is not a number of tokens"))?;
        if !(BYTE_COUNT + 1..=VOCABULARY_MAX).contains(&vocabulary) {
            return Err(format!("the number of tokens must be from {} to {VOCABULARY_MAX}", BYTE_COUNT + 1));
        }
        Ok(Self::BytePairs { vocabulary })
    }
}

impl fmt::Display for TokenKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Characters => f.write_str("characters"),
            Self::Bytes => f.write_str("bytes"),
            Self::BytePairs { vocabulary } => write!(f, "bpe:{vocabulary}"),
        }
    }
}

/// The tokens that a model knows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "tokens", rename_all = "kebab-case")]
pub enum Vocabulary {
    /// Token i is the byte i.
    Bytes,
    /// Token i is the character with the index i, counted from 0.
    Characters {
        /// The characters in increasing order.
        characters: String,
    },
    /// The tokens of a byte-pair encoding.
    BytePairs {
        /// The encoding, in the JSON format of the Python package `tokenizers`.
        tokenizer: String,
    },
}

/// Converts texts to tokens of a vocabulary, and tokens to bytes.
#[derive(Debug)]
pub(crate) enum Tokenizer {
    Bytes,
    Characters {
        /// Token i is the character i.
        characters: Vec<char>,
        /// The token of each character.
        tokens: BTreeMap<char, u16>,
    },
    #[cfg(feature = "candle")]
    BytePairs(BytePairs),
}

impl Vocabulary {
    /// Creates a vocabulary for `text`. The first `training_bytes` bytes are the training text. Fails if the text
    /// does not suit `kind`, for example because it is not UTF-8. The error is a sentence that says what to do.
    pub(super) fn for_text(
        kind: TokenKind,
        text: &StoredText,
        training_bytes: usize,
    ) -> Result<Self, DataError> {
        match kind {
            TokenKind::Bytes => Ok(Self::Bytes),
            TokenKind::Characters => {
                let mut characters = BTreeSet::new();
                for block in text.blocks(0..text.len()) {
                    // `collect` would first store all characters of the block, with 4 bytes each.
                    characters.extend(block?.to_str().map_err(|problem| text.refuse(problem))?.chars());
                }
                if characters.len() > VOCABULARY_MAX {
                    return Err(text.refuse(format!(
                        "the text has {} different characters; the maximum is {VOCABULARY_MAX}; pass --tokens bytes",
                        characters.len()
                    )));
                }
                Ok(Self::Characters { characters: characters.into_iter().collect() })
            }
            TokenKind::BytePairs { vocabulary } => {
                let mut unreadable = None;
                let blocks = text.blocks(0..training_bytes).map_while(|block| {
                    let block = block.and_then(|block| {
                        block.to_str().map(str::to_owned).map_err(|problem| text.refuse(problem))
                    });
                    block.map_err(|error| unreadable = Some(error)).ok()
                });
                let learned = learn_byte_pairs(blocks, vocabulary);
                match unreadable {
                    Some(error) => Err(error),
                    None => Ok(Self::BytePairs { tokenizer: learned.map_err(|why| text.refuse(why))? }),
                }
            }
        }
    }

    /// Creates the tokenizer of the vocabulary. Returns an error if the vocabulary is not valid.
    pub(crate) fn create_tokenizer(&self) -> Result<Tokenizer, String> {
        Ok(match self {
            Self::Bytes => Tokenizer::Bytes,
            Self::Characters { characters } => {
                let characters: Vec<char> = characters.chars().collect();
                if characters.is_empty()
                    || characters.len() > VOCABULARY_MAX
                    || !characters.is_sorted_by(|first, second| first < second)
                {
                    return Err(format!(
                        "its vocabulary must have 1 to {VOCABULARY_MAX} characters in increasing order"
                    ));
                }
                let tokens = characters
                    .iter()
                    .zip(0..=u16::MAX)
                    .map(|(&character, token)| (character, token))
                    .collect();
                Tokenizer::Characters { characters, tokens }
            }
            Self::BytePairs { tokenizer } => read_byte_pairs(tokenizer)?,
        })
    }
}

impl Tokenizer {
    /// Returns the number of tokens in the vocabulary.
    pub(crate) fn token_count(&self) -> usize {
        match self {
            Self::Bytes => BYTE_COUNT,
            Self::Characters { characters, .. } => characters.len(),
            #[cfg(feature = "candle")]
            Self::BytePairs(pairs) => pairs.token_count(),
        }
    }

    /// Returns the tokens of a text; see [`encode_block`](Self::encode_block).
    pub(crate) fn encode(&self, text: &[u8]) -> Result<Vec<u16>, String> {
        let mut tokens = Vec::new();
        for block in blocks_in_memory(text) {
            tokens.append(&mut self.encode_block(&block)?);
        }
        Ok(tokens)
    }

    /// Returns the number of tokens of a block. Returns `None` for byte pairs, whose number is known only after encoding.
    pub(super) fn count_tokens(&self, block: &TextBlock<'_>) -> Result<Option<usize>, String> {
        match self {
            Self::Bytes => Ok(Some(block.bytes.len())),
            Self::Characters { .. } => Ok(Some(block.to_str()?.chars().count())),
            #[cfg(feature = "candle")]
            Self::BytePairs(_) => Ok(None),
        }
    }

    /// Returns the tokens of a block of a text. Any text can be encoded as bytes. With other tokens, a text that is not UTF-8 is
    /// an error. If the tokens are characters, a character that is not in the vocabulary is an error too.
    pub(super) fn encode_block(&self, block: &TextBlock<'_>) -> Result<Vec<u16>, String> {
        match self {
            Self::Bytes => Ok(block.bytes.iter().map(|&byte| byte.into()).collect()),
            Self::Characters { tokens, .. } => {
                let encode = |(index, character): (usize, char)| {
                    tokens.get(&character).copied().ok_or_else(|| {
                        let line = block.line_number(index);
                        format!(
                            "line {line}: the character {character:?} does not occur in the text on which the model was trained; \
                             replace it, or train the model with --tokens bytes"
                        )
                    })
                };
                block.to_str()?.char_indices().map(encode).collect()
            }
            #[cfg(feature = "candle")]
            Self::BytePairs(pairs) => pairs.encode(block.to_str()?),
        }
    }

    /// Returns the bytes of a token. One character may consist of the bytes of several tokens.
    pub(crate) fn decode(&self, token: u16) -> Vec<u8> {
        match self {
            Self::Bytes => vec![token.to_le_bytes()[0]],
            Self::Characters { characters, .. } => characters
                .get(usize::from(token))
                .map_or_else(Vec::new, |character| character.to_string().into_bytes()),
            #[cfg(feature = "candle")]
            Self::BytePairs(pairs) => pairs.decode(token),
        }
    }
}

#[cfg(feature = "candle")]
fn learn_byte_pairs(
    blocks: impl Iterator<Item = String> + Send,
    vocabulary: usize,
) -> Result<String, String> {
    byte_pairs::learn_encoding(blocks, vocabulary)
}

#[cfg(feature = "candle")]
fn read_byte_pairs(json: &str) -> Result<Tokenizer, String> {
    BytePairs::from_json(json).map(Tokenizer::BytePairs)
}

#[cfg(not(feature = "candle"))]
fn learn_byte_pairs(_: impl Iterator<Item = String>, vocabulary: usize) -> Result<String, String> {
    Err(format!("--tokens bpe:{vocabulary} {CANDLE_NEEDED}"))
}

#[cfg(not(feature = "candle"))]
fn read_byte_pairs(_: &str) -> Result<Tokenizer, String> {
    Err(format!("byte-pair encoding {CANDLE_NEEDED}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the tokenizer of the vocabulary of `text`.
    fn create_tokenizer(kind: TokenKind, text: &[u8]) -> Result<Tokenizer, String> {
        let text = StoredText::from_bytes(text);
        let vocabulary = Vocabulary::for_text(kind, &text, text.len()).map_err(|error| error.to_string())?;
        vocabulary.create_tokenizer()
    }

    #[test]
    fn kinds_of_tokens_are_parsed_and_printed_unchanged() {
        for text in ["characters", "bytes", "bpe:257", "bpe:65536"] {
            assert_eq!(text.parse::<TokenKind>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("words", "one of"),
            ("bpe", "one of"),
            ("bpe:x", "`x`"),
            ("bpe:256", "257"),
            ("bpe:65537", "65536"),
        ] {
            let error = text.parse::<TokenKind>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn texts_are_encoded_and_decoded_unchanged() {
        let text = "Ahoy – ahoy!\n\u{1f433}\r\n".as_bytes();
        for (kind, count) in [(TokenKind::Bytes, 256), (TokenKind::Characters, 11)] {
            let tokenizer = create_tokenizer(kind, text).unwrap();
            assert_eq!(tokenizer.token_count(), count, "{kind}");
            let tokens = tokenizer.encode(text).unwrap();
            let decoded: Vec<u8> = tokens.iter().flat_map(|&token| tokenizer.decode(token)).collect();
            assert_eq!(decoded, text, "{kind}");
        }
    }

    #[test]
    fn texts_that_cannot_be_encoded_are_refused_with_their_line() {
        let tokenizer = create_tokenizer(TokenKind::Characters, b"ab\n").unwrap();
        let error = tokenizer.encode(b"ab\naxb").unwrap_err();
        assert!(error.contains("line 2: the character 'x' does not occur"), "{error}");
        let error = create_tokenizer(TokenKind::Characters, b"a\nb\n\xff").unwrap_err();
        assert!(error.contains("line 3: the text is not UTF-8"), "{error}");
        for characters in ["", "ba", "aa"] {
            let characters = characters.to_owned();
            assert!(Vocabulary::Characters { characters }.create_tokenizer().is_err());
        }
    }
}
