//! Windows of a text: the samples of a model that predicts the next token.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{StoredText, Tokenizer};
use crate::train::data::disk_features::FeatureWriter;
use crate::train::data::stream_file::StreamFile;
use crate::train::data::{BlocksOfRank, DataError, Features, HeldFeatures, HeldSamples, RowMap};

/// Windows of a sequence of tokens. All windows have the same length. Copies of a `TokenWindows` share the tokens.
#[derive(Clone, Debug)]
pub struct TokenWindows {
    /// The tokens of all windows. A window and the next window may share tokens.
    tokens: Arc<Vec<u16>>,
    /// The index of the first token of each window.
    starts: Vec<u32>,
    /// The number of tokens in a window.
    context: usize,
}

impl TokenWindows {
    /// Divides `tokens` into windows of `context` tokens. The windows follow each other. The last token of the last
    /// window has a next token too. Tokens at the end that do not fill a window are left out.
    ///
    /// # Panics
    ///
    /// If `context` is 0, or if there are 2^32 tokens or more.
    pub(crate) fn new(tokens: Vec<u16>, context: usize) -> Self {
        let count = count_windows(tokens.len(), context);
        Self::with_distance(tokens, context, context, count)
    }

    /// Creates windows from `tokens`, which holds the tokens of each window and the token that follows the window:
    /// `context` + 1 tokens for each window.
    ///
    /// # Panics
    ///
    /// If there are 2^32 tokens or more.
    pub(crate) fn from_separate_windows(tokens: Vec<u16>, context: usize) -> Self {
        let count = tokens.len() / (context + 1);
        Self::with_distance(tokens, context, context + 1, count)
    }

    /// Creates `count` windows. `distance` is the number of tokens from the start of a window to the start of the next window.
    fn with_distance(mut tokens: Vec<u16>, context: usize, distance: usize, count: usize) -> Self {
        let start = |window| u32::try_from(window * distance).expect("a text has less than 2^32 tokens");
        tokens.shrink_to_fit();
        Self { starts: (0..count).map(start).collect(), tokens: Arc::new(tokens), context }
    }

    /// Returns the number of windows.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Returns whether there are no windows.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Returns the number of tokens in each window.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the tokens of a window.
    ///
    /// # Panics
    ///
    /// If `window` is out of range.
    pub fn tokens(&self, window: usize) -> &[u16] {
        let start = self.starts[window] as usize;
        &self.tokens[start..start + self.context]
    }

    /// Returns the token that follows each token of a window.
    ///
    /// # Panics
    ///
    /// If `window` is out of range.
    pub fn next_tokens(&self, window: usize) -> &[u16] {
        let start = self.starts[window] as usize + 1;
        &self.tokens[start..start + self.context]
    }

    /// Returns the tokens of a window and the token that follows the window.
    ///
    /// # Panics
    ///
    /// If `window` is out of range.
    pub(crate) fn tokens_and_next(&self, window: usize) -> &[u16] {
        let start = self.starts[window] as usize;
        &self.tokens[start..=start + self.context]
    }

    /// Returns whether all tokens are in a vocabulary of `token_count` tokens.
    pub(crate) fn are_in_vocabulary(&self, token_count: usize) -> bool {
        self.tokens.iter().all(|&token| usize::from(token) < token_count)
    }

    /// Returns the windows with the indices `chosen`.
    pub(crate) fn select(&self, chosen: &[usize]) -> Self {
        let starts = chosen.iter().map(|&window| self.starts[window]).collect();
        Self { tokens: Arc::clone(&self.tokens), starts, context: self.context }
    }
}

/// Compares the tokens of the windows. Equal windows may be stored with and without shared tokens.
impl PartialEq for TokenWindows {
    fn eq(&self, other: &Self) -> bool {
        let windows = |set: &Self| 0..set.len();
        self.context == other.context
            && windows(self)
                .map(|window| self.tokens_and_next(window))
                .eq(windows(other).map(|window| other.tokens_and_next(window)))
    }
}

/// The windows of a text that a rank holds.
pub(crate) struct WindowsOfRank {
    pub(crate) samples: HeldSamples,
    /// Which rank holds which windows.
    pub(crate) row_map: RowMap,
    /// The number of tokens of the whole text.
    pub(crate) token_count: usize,
}

impl WindowsOfRank {
    /// Divides the bytes `range` of a text into windows of `context` tokens. Each rank holds consecutive windows, and the tokens
    /// of these windows, in memory or in a temporary file in `stream_directory`.
    pub(super) fn new(
        (tokenizer, text, range): (&Tokenizer, &StoredText, Range<usize>),
        context: usize,
        (share, stream_directory): (BlocksOfRank, Option<&Path>),
    ) -> Result<Self, DataError> {
        let refuse = |problem: String| text.refuse(problem);
        let mut token_count = 0;
        // Byte pairs are counted by encoding them.
        let mut encoded = StoredTokens::create(stream_directory)?;
        for block in text.blocks(range.clone()) {
            let block = block?;
            token_count += match tokenizer.count_tokens(&block).map_err(refuse)? {
                Some(count) => count,
                None => encoded.append(&tokenizer.encode_block(&block).map_err(refuse)?)?,
            };
        }
        let row_map = RowMap::of_consecutive_rows(share, count_windows(token_count, context));
        let windows = share.range_of(row_map.rows() as u64);
        let [start, end] = [windows.start, windows.end].map(|window| window as usize * context);
        let mut own_tokens = start..(end + 1).min(token_count);
        if encoded.len() < token_count {
            encoded.reserve(own_tokens.len());
            let mut first = 0;
            for block in text.blocks(range) {
                let block = block?;
                let end = first + tokenizer.count_tokens(&block).map_err(refuse)?.unwrap_or_default();
                let own = [own_tokens.start, own_tokens.end].map(|bound| bound.clamp(first, end) - first);
                if own[0] < own[1] {
                    encoded.append(&tokenizer.encode_block(&block).map_err(refuse)?[own[0]..own[1]])?;
                }
                first = end;
            }
            own_tokens = 0..own_tokens.len();
        }
        let samples = HeldSamples::of_windows(encoded.into_windows(own_tokens, context)?);
        Ok(Self { samples, row_map, token_count })
    }
}

/// Tokens of a text, in memory or in a temporary file.
enum StoredTokens<'a> {
    InMemory(Vec<u16>),
    /// The file, and its directory.
    OnDisk(StreamFile, &'a Path),
}

impl<'a> StoredTokens<'a> {
    fn create(stream_directory: Option<&'a Path>) -> Result<Self, DataError> {
        Ok(match stream_directory {
            None => Self::InMemory(Vec::new()),
            Some(directory) => Self::OnDisk(StreamFile::create(directory)?, directory),
        })
    }

    fn len(&self) -> usize {
        match self {
            Self::InMemory(tokens) => tokens.len(),
            Self::OnDisk(file, _) => file.len() as usize / size_of::<u16>(),
        }
    }

    /// Allocates memory for `count` tokens, if they will be in memory.
    fn reserve(&mut self, count: usize) {
        if let Self::InMemory(tokens) = self {
            tokens.reserve_exact(count);
        }
    }

    /// Adds tokens. Returns their number.
    fn append(&mut self, more: &[u16]) -> Result<usize, DataError> {
        match self {
            Self::InMemory(tokens) => tokens.extend_from_slice(more),
            Self::OnDisk(file, _) => {
                file.append(bytemuck::cast_slice(more))?;
            }
        }
        Ok(more.len())
    }

    /// Returns the windows of the tokens in `range`.
    fn into_windows(self, range: Range<usize>, context: usize) -> Result<HeldFeatures, DataError> {
        match self {
            Self::InMemory(mut tokens) => {
                tokens.truncate(range.end);
                tokens.drain(..range.start);
                Ok(HeldFeatures::InMemory(Features::Tokens(TokenWindows::new(tokens, context))))
            }
            Self::OnDisk(file, directory) => {
                let format = Features::Tokens(TokenWindows::new(Vec::new(), context));
                let mut writer = FeatureWriter::create(directory, &format)?;
                let block_tokens = writer.block_rows() * context;
                for start in range.clone().step_by(block_tokens) {
                    // The last window of a block has a next token too.
                    let mut tokens = vec![0; range.end.min(start + block_tokens + 1) - start];
                    file.read_at(bytemuck::cast_slice_mut(&mut tokens), (start * size_of::<u16>()) as u64)?;
                    writer.append(&Features::Tokens(TokenWindows::new(tokens, context)))?;
                }
                Ok(HeldFeatures::OnDisk(writer.finish()))
            }
        }
    }
}

/// Returns the number of windows of a text with `token_count` tokens.
fn count_windows(token_count: usize, context: usize) -> usize {
    token_count.saturating_sub(1) / context
}

/// Adds tokens to a digest.
pub(crate) fn digest_tokens(tokens: &[u16], hasher: &mut Sha256) {
    let bytes: Vec<[u8; 2]> = tokens.iter().map(|token| token.to_le_bytes()).collect();
    hasher.update(bytes.as_flattened());
}

#[cfg(test)]
mod tests {
    use super::super::{TokenKind, Vocabulary};
    use super::*;
    use crate::train::data::{Samples, Targets};

    #[test]
    fn windows_follow_each_other_and_have_a_next_token_for_each_token() {
        for (count, expected) in [(0, 0), (1, 0), (3, 0), (4, 1), (6, 1), (7, 2), (8, 2), (10, 3)] {
            let windows = TokenWindows::new((0..count).collect(), 3);
            assert_eq!(windows.len(), expected, "{count} tokens");
            let seen: Vec<u16> =
                (0..windows.len()).flat_map(|window| windows.tokens(window).to_vec()).collect();
            let next: Vec<u16> =
                (0..windows.len()).flat_map(|window| windows.next_tokens(window).to_vec()).collect();
            assert!(seen.into_iter().eq(0..3 * expected as u16), "{count} tokens");
            assert!(next.into_iter().eq(1..=3 * expected as u16), "{count} tokens");
        }
        let windows = TokenWindows::new((0..10).collect(), 3).select(&[0, 2]);
        assert_eq!(
            (windows.len(), windows.tokens(1), windows.next_tokens(1)),
            (2, &[6, 7, 8][..], &[7, 8, 9][..])
        );
    }

    /// With more ranks than windows, some ranks hold no window. The long text has several blocks, and the windows need several
    /// blocks of a temporary file.
    #[test]
    fn the_ranks_hold_the_windows_of_a_text_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let kinds = [TokenKind::Characters, TokenKind::Bytes];
        #[cfg(feature = "candle")]
        let kinds = [kinds[0], kinds[1], TokenKind::BytePairs { vocabulary: 270 }];
        let long = "the sea – the whale\n".repeat(3500);
        for (kind, text) in
            kinds.into_iter().flat_map(|kind| [(kind, ""), (kind, "é"), (kind, long.as_str())])
        {
            let (long, stored) =
                (StoredText::from_bytes(long.as_bytes()), StoredText::from_bytes(text.as_bytes()));
            let vocabulary = Vocabulary::for_text(kind, &long, long.len()).unwrap();
            let tokenizer = vocabulary.create_tokenizer().unwrap();
            let Ok(tokens) = tokenizer.encode(text.as_bytes()) else { continue };
            let (count, whole) = (tokens.len(), TokenWindows::new(tokens, 7));
            for (ranks, stream_directory) in
                [1_usize, 3, 5000].into_iter().flat_map(|n| [(n, None), (n, Some(directory.path()))])
            {
                for rank in (0..ranks).step_by(ranks.div_ceil(3)) {
                    let place = (BlocksOfRank { rank, ranks }, stream_directory);
                    let part = WindowsOfRank::new((&tokenizer, &stored, 0..text.len()), 7, place).unwrap();
                    assert_eq!((part.token_count, part.row_map.rows()), (count, whole.len()), "{kind}");
                    assert_eq!(part.samples.in_memory().is_none(), stream_directory.is_some(), "{kind}");
                    let rows: Vec<usize> = part.row_map.held_rows().collect();
                    let Samples { features, targets } = part.samples.into_memory().unwrap();
                    let Features::Tokens(windows) = features else { panic!() };
                    assert_eq!(targets, Targets::NextTokens(windows.clone()), "{kind}");
                    assert_eq!(windows, whole.select(&rows), "{kind} on {ranks} ranks");
                    let held = windows.tokens.len();
                    assert!(held <= whole.len().div_ceil(ranks) * 8 + 1, "{kind}: {held} of {count}");
                }
            }
        }
    }
}
