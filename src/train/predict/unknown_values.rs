//! Counts the rows of new data with texts that no training row has.

use std::path::Path;

use crate::train::data::RowPlace;
use crate::types::plural;

/// The maximum number of characters of a text in a message.
const CHARACTERS_SHOWN_MAX: usize = 40;

/// The rows in which a column has a text that no training row has.
#[derive(Clone, Debug, Default)]
pub(super) struct UnknownValues {
    rows: u64,
    /// The text of the first of these rows, and where this row is.
    first: String,
}

impl UnknownValues {
    /// Counts a row at `place` in `file`. `text` is empty if the value is missing.
    pub(super) fn add(&mut self, text: &str, (file, place): (&Path, RowPlace)) {
        self.rows += 1;
        if self.rows > 1 {
            return;
        }
        let shown: String = text.chars().take(CHARACTERS_SHOWN_MAX).collect();
        let more = if shown.len() < text.len() { "..." } else { "" };
        let value = if text.is_empty() { "a missing value".into() } else { format!("`{shown}{more}`") };
        self.first = format!("{value} in {}, {place}", file.display());
    }

    /// Returns a warning for the user if there are such rows. `column` is the name of the column.
    pub(super) fn describe(&self, column: &str) -> Option<String> {
        let Self { rows, first } = self;
        (*rows > 0).then(|| {
            let have = plural(*rows, "row has", "rows have");
            format!(
                "{rows} {have} a value of `{column}` that no training row has (the first is {first}); all inputs of this column are 0 \
                 there"
            )
        })
    }
}
