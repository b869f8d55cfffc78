//! Reads plain text, and divides it into the windows on which a model learns to predict the next token.

#[cfg(feature = "candle")]
mod byte_pairs;
mod stored_text;
mod vocabulary;
mod windows;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{BlocksOfRank, DataError, Samples};
use crate::types::counted;
use stored_text::StoredText;
pub(crate) use vocabulary::Tokenizer;
pub use vocabulary::{TokenKind, Vocabulary};
pub use windows::TokenWindows;
pub(crate) use windows::{WindowsOfRank, digest_tokens};

/// The maximum number of tokens in a window.
pub(crate) const CONTEXT_MAX: usize = 1 << 14;
/// The default number of tokens in a window.
pub const CONTEXT_DEFAULT: usize = 128;

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
/// vocabulary depends on the whole text, so each rank reads the whole text, and then keeps the tokens of its windows. `place`
/// consists of the part of this rank, and the directory for temporary files with the text and the tokens.
pub(crate) fn load_text(
    files: &[PathBuf],
    test: TestPart<'_>,
    TextOptions { tokens: kind, context }: TextOptions,
    place: (BlocksOfRank, Option<&Path>),
) -> Result<LoadedText, DataError> {
    let mut text = StoredText::read(files, place.1)?;
    let (training_bytes, has_test, advice) = match test {
        TestPart::Fraction(fraction) => {
            let test_bytes = (text.len() as f64 * fraction).round() as usize;
            let training_bytes = text.start_of_character(text.len() - test_bytes.min(text.len()))?;
            (training_bytes, test_bytes > 0, ", or --test-fraction 0 for no test")
        }
        TestPart::Files(files) => {
            let files: Vec<PathBuf> = files.into_iter().map(Path::to_owned).collect();
            let training_bytes = text.len();
            text.append_files(&files)?;
            (training_bytes, true, "")
        }
    };
    let refuse = |problem: String| text.refuse(problem);
    if text.len() == 0 {
        return Err(refuse("the text is empty".into()));
    }
    let vocabulary = Vocabulary::for_text(kind, &text, training_bytes)?;
    let tokenizer = vocabulary.create_tokenizer().map_err(refuse)?;
    let encode = |range| WindowsOfRank::new((&tokenizer, &text, range), context, place);
    let (train, test) = (encode(0..training_bytes)?, encode(training_bytes..text.len())?);
    let counts = (train.token_count, test.token_count);
    if counts.0 <= context || (has_test && counts.1 <= context) {
        return Err(refuse(format!(
            "the text has {} for training and {} for testing, but with --context {context}, each of the two sets needs at \
             least {}; pass more text or a smaller --context{}",
            counted(counts.0, "token"),
            counts.1,
            context + 1,
            if has_test { advice } else { "" },
        )));
    }
    let token_count = tokenizer.token_count();
    let what = match kind {
        TokenKind::Characters => "character",
        TokenKind::Bytes => "byte",
        TokenKind::BytePairs { .. } => "byte pair",
    };
    let note = format!(
        "the text has {} for training, and then {} for testing; {} in the vocabulary; windows of {}",
        counted(counts.0, what),
        counts.1,
        counted(token_count, "token"),
        counted(context, "token")
    );
    let encoding = TextEncoding { context, vocabulary };
    let fingerprint = [text.digest(), training_bytes as u64];
    Ok(LoadedText { train, test, encoding, token_count, fingerprint, note })
}

/// Returns a name for the text in these files, for messages.
pub(crate) fn name_of_files(files: &[PathBuf]) -> String {
    match files {
        [] => "no files".into(),
        [path] => path.display().to_string(),
        [path, more @ ..] => format!("{} and {}", path.display(), counted(more.len(), "more file")),
    }
}

/// Reads text files as windows for a trained model.
pub(crate) fn load_windows(files: &[PathBuf], encoding: &TextEncoding) -> Result<Samples, DataError> {
    let text = StoredText::read(files, None)?;
    let tokenizer = encoding.create_tokenizer().map_err(|problem| text.refuse(problem))?;
    let (context, place) = (encoding.context, (BlocksOfRank::ALL, None));
    let windows = WindowsOfRank::new((&tokenizer, &text, 0..text.len()), context, place)?;
    if windows.token_count <= context {
        return Err(text.refuse(format!(
            "the text has {}, but the model needs at least {}",
            counted(windows.token_count, "token"),
            context + 1
        )));
    }
    windows.samples.into_memory()
}

/// Reads text files as tokens for a trained model. Returns an error if there are fewer than two tokens.
pub(crate) fn load_tokens(files: &[PathBuf], encoding: &TextEncoding) -> Result<Vec<u16>, DataError> {
    let text = StoredText::read(files, None)?;
    let tokenizer = encoding.create_tokenizer().map_err(|problem| text.refuse(problem))?;
    let mut tokens = Vec::new();
    for block in text.blocks(0..text.len()) {
        tokens.append(&mut tokenizer.encode_block(&block?).map_err(|problem| text.refuse(problem))?);
    }
    match tokens.len() {
        count @ (0 | 1) => {
            Err(text.refuse(format!("the text has {}, but needs at least 2", counted(count, "token"))))
        }
        _ => Ok(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Features;
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
        load_text(&files, TestPart::Fraction(test_fraction), options, (BlocksOfRank::ALL, None))
    }

    fn windows_of(part: WindowsOfRank) -> TokenWindows {
        match part.samples.into_memory().unwrap().features {
            Features::Tokens(windows) => windows,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_last_part_of_the_text_is_the_test_set() {
        let loaded =
            load_texts(&[b"\xef\xbb\xbfabcabc", b"\xef\xbb\xbfabcd"], TokenKind::Characters, 0.4).unwrap();
        let [train, test] = [loaded.train, loaded.test].map(windows_of);
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
