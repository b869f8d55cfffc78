//! Reads plain text, and divides it into the windows on which a model learns to predict the next token.

#[cfg(feature = "candle")]
mod byte_pairs;
mod vocabulary;
mod windows;

use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::file::{open_data_file, stream_error};
use super::{BlocksOfRank, DataError, ELEMENTS_MAX};
use crate::train::rank_checks::short_digest;
pub(crate) use vocabulary::Tokenizer;
pub use vocabulary::{TokenKind, Vocabulary};
pub use windows::TokenWindows;
pub(crate) use windows::{WindowsOfRank, digest_tokens};

/// The maximum number of tokens in a window.
pub(crate) const CONTEXT_MAX: usize = 1 << 14;
/// The default number of tokens in a window.
pub const CONTEXT_DEFAULT: usize = 128;
/// The byte-order mark, with which some UTF-8 files begin.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// How to read a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextOptions {
    /// The kind of the tokens.
    pub tokens: TokenKind,
    /// The number of tokens in a window. The model predicts each token from at most this many tokens before it.
    pub context: usize,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { tokens: TokenKind::default(), context: CONTEXT_DEFAULT }
    }
}

impl TextOptions {
    /// Returns the names and values of the options that must be the same on all ranks.
    pub(crate) fn options_equal_on_all_ranks(self) -> [(&'static str, String); 2] {
        [("--tokens", self.tokens.to_string()), ("--context", self.context.to_string())]
    }
}

/// How a text becomes the inputs of a model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TextEncoding {
    /// The number of tokens in a window.
    pub context: usize,
    /// The tokens that the model knows.
    #[serde(flatten)]
    pub vocabulary: Vocabulary,
}

impl TextEncoding {
    /// Creates the tokenizer of the vocabulary. Returns an error if a field is not valid.
    pub(crate) fn create_tokenizer(&self) -> Result<Tokenizer, String> {
        if !(1..=CONTEXT_MAX).contains(&self.context) {
            return Err(format!(
                "its windows have {} tokens, but must have 1 to {CONTEXT_MAX}",
                self.context
            ));
        }
        self.vocabulary.create_tokenizer()
    }
}

/// A text that was read and divided into windows of tokens: the training set and the test set.
pub(crate) struct LoadedText {
    pub(crate) train: WindowsOfRank,
    pub(crate) test: WindowsOfRank,
    pub(crate) encoding: TextEncoding,
    /// The number of tokens in the vocabulary.
    pub(crate) token_count: usize,
    /// A hash of the whole text, and the number of bytes of the training text.
    pub(crate) fingerprint: [u64; 2],
    /// A message for the user.
    pub(crate) note: String,
}

/// The part of a text that is the test set.
pub(crate) enum TestPart<'a> {
    /// The end of the text. The number is the fraction of the text's bytes that belong to the test set.
    Fraction(f64),
    /// The text in these files.
    Files(Vec<&'a Path>),
}

/// Reads a text from one or more files, in the order of `files`. Divides the text into a training set and a test set. The
/// vocabulary depends on the whole text, so each rank reads the whole text, and then keeps the tokens of its windows.
pub(crate) fn load_text(
    files: &[PathBuf],
    test: TestPart<'_>,
    TextOptions { tokens: kind, context }: TextOptions,
    share: BlocksOfRank,
) -> Result<LoadedText, DataError> {
    let mut text = read_text_files(files)?;
    let name = name_of_files(files);
    let refuse = |problem: String| DataError::Unsuitable(format!("{name}: {problem}"));
    let (training_bytes, has_test, advice) = match test {
        TestPart::Fraction(fraction) => {
            let test_bytes = (text.len() as f64 * fraction).round() as usize;
            let training_bytes = start_of_character(&text, text.len() - test_bytes.min(text.len()));
            (training_bytes, test_bytes > 0, ", or --test-fraction 0 for no test")
        }
        TestPart::Files(files) => {
            let files: Vec<PathBuf> = files.into_iter().map(Path::to_owned).collect();
            let training_bytes = text.len();
            text.append(&mut read_text_files(&files)?);
            (training_bytes, true, "")
        }
    };
    if text.is_empty() {
        return Err(refuse("the text is empty".into()));
    }
    let vocabulary = Vocabulary::for_text(kind, &text, training_bytes).map_err(refuse)?;
    let tokenizer = vocabulary.create_tokenizer().map_err(refuse)?;
    let encode = |part: &[u8]| WindowsOfRank::new((&tokenizer, part), context, share).map_err(refuse);
    let (train, test) = (encode(&text[..training_bytes])?, encode(&text[training_bytes..])?);
    let counts = (train.token_count, test.token_count);
    if counts.0 <= context || (has_test && counts.1 <= context) {
        return Err(refuse(format!(
            "the text has {} tokens for training and {} for testing, but with --context {context}, each of the two sets needs at \
             least {}; pass more text or a smaller --context{}",
            counts.0,
            counts.1,
            context + 1,
            if has_test { advice } else { "" },
        )));
    }
    let token_count = tokenizer.token_count();
    let what = match kind {
        TokenKind::Characters => "characters",
        TokenKind::Bytes => "bytes",
        TokenKind::BytePairs { .. } => "byte pairs",
    };
    let note = format!(
        "the text has {} {what} for training, and then {} for testing; {token_count} tokens in the vocabulary; windows of \
         {context} tokens",
        counts.0, counts.1
    );
    let encoding = TextEncoding { context, vocabulary };
    let fingerprint = [short_digest(&text), training_bytes as u64];
    Ok(LoadedText { train, test, encoding, token_count, fingerprint, note })
}

/// Returns the first position at or after `position` where a UTF-8 character starts. Returns the length of `text` if there
/// is no such position.
fn start_of_character(text: &[u8], position: usize) -> usize {
    let is_start = |byte: u8| byte & 0b1100_0000 != 0b1000_0000;
    (position..text.len()).find(|&index| is_start(text[index])).unwrap_or(text.len())
}

/// Reads one or more text files, and removes their byte-order marks.
pub(crate) fn read_text_files(files: &[PathBuf]) -> Result<Vec<u8>, DataError> {
    let mut text = Vec::new();
    for path in files {
        let start = text.len();
        let rest = ELEMENTS_MAX.saturating_sub(start as u64);
        let read = open_data_file(path)?.take(rest + 1).read_to_end(&mut text);
        read.map_err(|error| stream_error(path, error))?;
        if text.len() as u64 > ELEMENTS_MAX {
            let problem = format!("the text has more than {ELEMENTS_MAX} bytes; pass a shorter text");
            return Err(DataError::malformed(path, problem));
        }
        if text[start..].starts_with(BYTE_ORDER_MARK) {
            text.drain(start..start + BYTE_ORDER_MARK.len());
        }
    }
    Ok(text)
}

/// Returns a name for the text in these files, for messages.
pub(crate) fn name_of_files(files: &[PathBuf]) -> String {
    match files {
        [] => "no files".into(),
        [path] => path.display().to_string(),
        [path, more @ ..] => format!("{} and {} more files", path.display(), more.len()),
    }
}

/// Reads text files as windows for a trained model.
pub(crate) fn load_windows(files: &[PathBuf], encoding: &TextEncoding) -> Result<TokenWindows, DataError> {
    let refuse = |problem: String| DataError::Unsuitable(format!("{}: {problem}", name_of_files(files)));
    let text = read_text_files(files)?;
    let tokens = encoding.create_tokenizer().and_then(|tokenizer| tokenizer.encode(&text)).map_err(refuse)?;
    let (count, context) = (tokens.len(), encoding.context);
    if count <= context {
        return Err(refuse(format!(
            "the text has {count} tokens, but the model needs at least {}",
            context + 1
        )));
    }
    Ok(TokenWindows::new(tokens, context))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes texts to files, and reads them with windows of two characters.
    fn load_texts(texts: &[&[u8]], kind: TokenKind, test_fraction: f64) -> Result<LoadedText, DataError> {
        let directory = tempfile::tempdir().unwrap();
        let write = |(index, text): (usize, &&[u8])| {
            let path = directory.path().join(format!("{index}.txt"));
            std::fs::write(&path, text).unwrap();
            path
        };
        let files: Vec<PathBuf> = texts.iter().enumerate().map(write).collect();
        let options = TextOptions { tokens: kind, context: 2 };
        load_text(&files, TestPart::Fraction(test_fraction), options, BlocksOfRank::ALL)
    }

    #[test]
    fn the_last_part_of_the_text_is_the_test_set() {
        let loaded =
            load_texts(&[b"\xef\xbb\xbfabcabc", b"\xef\xbb\xbfabcd"], TokenKind::Characters, 0.4).unwrap();
        let (train, test) = (loaded.train.windows, loaded.test.windows);
        assert_eq!((train.len(), test.len(), loaded.token_count), (2, 1, 4));
        assert_eq!((train.tokens(0), train.next_tokens(0)), (&[0, 1][..], &[1, 2][..]));
        assert_eq!((test.tokens(0), test.next_tokens(0)), (&[0, 1][..], &[1, 2][..]));
        let expected = "6 characters for training, and then 4 for testing; 4 tokens in the vocabulary";
        assert!(loaded.note.contains(expected), "{}", loaded.note);
        // A character is never divided: the training set ends after a whole character.
        let loaded = load_texts(&["aaaé€bcd".as_bytes()], TokenKind::Characters, 0.4).unwrap();
        assert!(loaded.note.contains("5 characters for training, and then 3"), "{}", loaded.note);
        let loaded = load_texts(&["aaaé€bcd".as_bytes()], TokenKind::Bytes, 0.0).unwrap();
        assert!(loaded.note.contains("11 bytes for training, and then 0"), "{}", loaded.note);
    }

    #[test]
    fn texts_that_are_too_short_are_refused() {
        for (text, fraction, expected) in [
            ("", 0.2, "the text is empty"),
            ("ab", 0.0, "2 tokens for training"),
            (
                "abcdef",
                0.2,
                "5 tokens for training and 1 for testing, but with --context 2, each of the two sets needs at least 3",
            ),
        ] {
            let error =
                load_texts(&[text.as_bytes()], TokenKind::Characters, fraction).err().unwrap().to_string();
            assert!(error.contains(expected), "{text}: {error}");
            assert_eq!(error.contains("--test-fraction 0"), fraction > 0.0 && !text.is_empty(), "{error}");
        }
    }
}
