//! The rows of a file of a table, in any format.

use std::borrow::Cow;
use std::fmt;

use super::DataError;
use super::csv::{is_missing, parse_number};
use super::dates::parse_date;
#[cfg(feature = "parquet")]
use super::parquet::TypedValue;

/// Reads the rows of a file one after the other. [`advance`](Self::advance) reads the next row, which becomes the
/// current row.
pub(crate) trait RowCursor {
    /// Reads the next row. Returns `false` at the end of the file.
    fn advance(&mut self) -> Result<bool, DataError>;

    /// Returns an error if the current row does not have `wanted` cells. The rows of a Parquet file always have the right
    /// number of cells.
    fn check_cell_count(&self, wanted: usize) -> Result<(), DataError>;

    /// Returns a cell of the current row. `column` is the index of the column in the table.
    fn cell(&self, column: usize) -> Cell<'_>;

    /// Returns where the current row is in the file.
    fn place(&self) -> RowPlace;

    /// Returns an error that names the file and the problem.
    fn error(&self, problem: String) -> DataError;
}

/// Where a row is in its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RowPlace {
    /// The number of the line in which the row begins. Lines are counted from 1.
    Line(u64),
    /// The number of the row. Rows are counted from 1.
    #[cfg(feature = "parquet")]
    Row(u64),
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            #[cfg(feature = "parquet")]
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}

/// A cell of a table.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Cell<'a> {
    /// The value is missing.
    Missing,
    /// A text, which may be a number or a date. The text has no spaces at the beginning or the end, and may not be
    /// UTF-8.
    Text(&'a [u8]),
    /// A number, a truth value or a date in a Parquet file.
    #[cfg(feature = "parquet")]
    Typed(TypedValue),
}

impl<'a> Cell<'a> {
    /// Returns the cell with this text, without the spaces at the beginning and the end.
    pub(crate) fn from_text(text: &'a [u8]) -> Self {
        let text = text.trim_ascii();
        if is_missing(text) { Self::Missing } else { Self::Text(text) }
    }

    /// Returns the number in the cell, which is finite as an f32.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong with the cell. [`date`](Self::date) and [`text`](Self::text) have the same
    /// errors.
    pub(crate) fn number(self) -> Result<f64, String> {
        match self {
            Self::Missing => Err(MISSING_VALUE_PROBLEM.into()),
            Self::Text(text) => parse_number(text),
            #[cfg(feature = "parquet")]
            Self::Typed(value) => value.number(),
        }
    }

    /// Returns the date in the cell, as the number of days since 1970.
    pub(crate) fn date(self) -> Result<f64, String> {
        match self {
            Self::Missing => Err(MISSING_VALUE_PROBLEM.into()),
            Self::Text(text) => parse_date(text),
            #[cfg(feature = "parquet")]
            Self::Typed(value) => value.date(),
        }
    }

    /// Returns the cell as text.
    pub(crate) fn text(self) -> Result<Cow<'a, str>, String> {
        match self {
            Self::Missing => Err(MISSING_VALUE_PROBLEM.into()),
            Self::Text(text) => {
                let text = std::str::from_utf8(text).map(Cow::Borrowed);
                text.map_err(|_| "the text is not UTF-8; save the table as UTF-8".into())
            }
            #[cfg(feature = "parquet")]
            Self::Typed(value) => value.text().map(Cow::Owned),
        }
    }
}

/// The error for a missing value where a value is needed.
const MISSING_VALUE_PROBLEM: &str = "the value is missing";
