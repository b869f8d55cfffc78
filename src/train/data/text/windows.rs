//! Windows of a text: the samples of a model that predicts the next token.

use std::sync::Arc;

use sha2::{Digest, Sha256};

/// Windows of a sequence of tokens. All windows have the same length. Copies of a `TokenWindows` share the tokens.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenWindows {
    /// The whole sequence of tokens.
    tokens: Arc<[u16]>,
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
        let count = tokens.len().saturating_sub(1) / context;
        let start = |window| u32::try_from(window * context).expect("a text has less than 2^32 tokens");
        Self { starts: (0..count).map(start).collect(), tokens: tokens.into(), context }
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

    /// Returns the windows with the indices `chosen`.
    pub(crate) fn select(&self, chosen: &[usize]) -> Self {
        let starts = chosen.iter().map(|&window| self.starts[window]).collect();
        Self { tokens: Arc::clone(&self.tokens), starts, context: self.context }
    }
}

/// Adds tokens to a digest.
pub(crate) fn digest_tokens(tokens: &[u16], hasher: &mut Sha256) {
    let bytes: Vec<[u8; 2]> = tokens.iter().map(|token| token.to_le_bytes()).collect();
    hasher.update(bytes.as_flattened());
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
