//! Collects the values of the columns of a table.

use std::sync::Arc;

use super::numbers::{NumberCollector, NumberRange};
use super::raw_table::{RawColumn, RawTexts, RawValues};
use super::row_cursor::Cell;
use super::stream_file::StreamFile;
use super::texts::{DistinctTexts, TextBytesLeft, Texts};
use super::value_store::ValueStore;
use super::{Column, DataError, MissingPolicy};

/// What a column holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ColumnKind {
    /// Finite numbers.
    Numbers,
    /// Dates, which become numbers.
    Dates,
    /// Text, such as names of categories.
    Text,
}

/// What to do with a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ColumnRole {
    /// The column is a feature.
    Feature(ColumnKind),
    /// The column is the target.
    Target(ColumnKind),
    /// The column is not used.
    Ignored,
}

/// The values of a column from the rows that have been read.
#[derive(Debug)]
pub(crate) struct ColumnValues {
    pub(crate) name: String,
    collector: ColumnCollector,
    /// Whether the column is a feature with dates.
    is_date: bool,
    /// The number of missing values of a feature, including missing values in rows that were left out. 0 for other columns.
    pub(crate) missing_count: usize,
}

/// The values of a column, stored in the form that the role of the column needs.
#[derive(Debug)]
enum ColumnCollector {
    FeatureNumbers(NumberCollector),
    /// The distinct texts, and the index of the text of each row.
    FeatureTexts(DistinctTexts, ValueStore<u32>),
    TargetNumbers(Vec<f64>),
    /// The distinct texts, and the index of the text of each row.
    TargetTexts(DistinctTexts, Vec<u32>),
    Ignored,
}

impl ColumnValues {
    /// Creates a column without values. The values of a feature are stored in memory, or in `file` if there is one. The
    /// values of the target are always in memory.
    pub(crate) fn new(name: String, column_role: ColumnRole, file: Option<Arc<StreamFile>>) -> Self {
        let collector = match column_role {
            ColumnRole::Feature(ColumnKind::Numbers | ColumnKind::Dates) => {
                ColumnCollector::FeatureNumbers(NumberCollector::new(file))
            }
            ColumnRole::Feature(ColumnKind::Text) => {
                ColumnCollector::FeatureTexts(DistinctTexts::default(), ValueStore::new(file))
            }
            ColumnRole::Target(ColumnKind::Numbers | ColumnKind::Dates) => {
                ColumnCollector::TargetNumbers(Vec::new())
            }
            ColumnRole::Target(ColumnKind::Text) => {
                ColumnCollector::TargetTexts(DistinctTexts::default(), Vec::new())
            }
            ColumnRole::Ignored => ColumnCollector::Ignored,
        };
        Self {
            name,
            collector,
            is_date: column_role == ColumnRole::Feature(ColumnKind::Dates),
            missing_count: 0,
        }
    }

    /// Returns whether the column is a feature or the target.
    pub(crate) fn is_used(&self) -> bool {
        !matches!(self.collector, ColumnCollector::Ignored)
    }

    /// Returns whether the column is a feature.
    pub(crate) fn is_feature(&self) -> bool {
        matches!(self.collector, ColumnCollector::FeatureNumbers(_) | ColumnCollector::FeatureTexts(..))
    }

    /// Adds the cell of a row to the column. `policy` says what to do with a missing feature, and `bytes_left` is the memory
    /// that is left for distinct texts.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says what is wrong with the cell and what to do.
    pub(crate) fn push(
        &mut self,
        cell: Cell<'_>,
        policy: MissingPolicy,
        bytes_left: &mut TextBytesLeft,
    ) -> Result<(), String> {
        if cell == Cell::Missing && self.is_feature() {
            return self.push_missing(policy, bytes_left);
        }
        match &mut self.collector {
            ColumnCollector::FeatureNumbers(values) if self.is_date => {
                values.push(cell.date()?).map_err(|error| error.to_string())?;
            }
            ColumnCollector::FeatureNumbers(values) => match cell.number() {
                Ok(value) => values.push(value).map_err(|error| error.to_string())?,
                Err(problem) => return Err(self.describe_bad_number(cell, &problem)),
            },
            ColumnCollector::TargetNumbers(values) => match cell.number() {
                Ok(value) => values.push(value),
                Err(problem) => return Err(self.describe_bad_number(cell, &problem)),
            },
            ColumnCollector::FeatureTexts(distinct, indices) => {
                let name = &self.name;
                let with_advice = |problem| format!("{problem}; pass --drop {name} to leave out the column");
                let index = distinct.index_of(&cell.text()?, bytes_left).map_err(with_advice)?;
                indices.push(index).map_err(|error| error.to_string())?;
            }
            ColumnCollector::TargetTexts(distinct, indices) => {
                indices.push(distinct.index_of(&cell.text()?, bytes_left)?);
            }
            ColumnCollector::Ignored => {}
        }
        Ok(())
    }

    /// Adds a missing value to a feature, or returns an error if `policy` is [`MissingPolicy::Error`].
    fn push_missing(&mut self, policy: MissingPolicy, bytes_left: &mut TextBytesLeft) -> Result<(), String> {
        self.missing_count += 1;
        if policy == MissingPolicy::Error {
            let name = &self.name;
            return Err(format!(
                "the value is missing; pass --missing drop to leave out such rows, --missing mean or --missing indicator to \
                 replace such values, or --drop {name} to leave out the column"
            ));
        }
        match &mut self.collector {
            ColumnCollector::FeatureNumbers(values) => {
                values.push(f64::NAN).map_err(|error| error.to_string())
            }
            ColumnCollector::FeatureTexts(distinct, indices) => {
                indices.push(distinct.index_of("", bytes_left)?).map_err(|error| error.to_string())
            }
            _ => Ok(()),
        }
    }

    /// Returns `problem` with advice for the user. `problem` is the error of [`Cell::number`] for `cell`.
    fn describe_bad_number(&self, cell: Cell<'_>, problem: &str) -> String {
        let name = &self.name;
        let drop_advice = if self.is_feature() {
            format!(", or --drop {name} to leave out the column")
        } else {
            String::new()
        };
        if !matches!(cell, Cell::Text(_)) {
            return format!("{problem}; leave the cell without a value if the value is missing{drop_advice}");
        }
        format!(
            "{problem}, but the first values of this column are numbers; correct the cell, make the cell empty if the value \
             is missing, or pass --categorical {name} if the column holds names{drop_advice}"
        )
    }

    /// Moves the values of the target out of this column. Returns `None` if this column is not the target.
    pub(crate) fn take_target(&mut self) -> Option<Column> {
        match &mut self.collector {
            ColumnCollector::TargetNumbers(values) => Some(Column::Numbers(std::mem::take(values))),
            ColumnCollector::TargetTexts(distinct, indices) => Some(Column::Text(Texts {
                indices: std::mem::take(indices),
                distinct: std::mem::take(distinct).texts,
            })),
            _ => None,
        }
    }

    /// Returns the range of the numbers of a feature, or an empty range for other columns.
    pub(crate) fn range(&self) -> NumberRange {
        if let ColumnCollector::FeatureNumbers(values) = &self.collector {
            values.range()
        } else {
            NumberRange::EMPTY
        }
    }

    /// Returns the values of a feature. Returns `None` if this column is not a feature. `range` is the range of the
    /// numbers that all ranks have read from this column.
    ///
    /// # Errors
    ///
    /// If the file with the values cannot be read or written.
    pub(crate) fn into_feature_column(self, range: NumberRange) -> Result<Option<RawColumn>, DataError> {
        let values = match self.collector {
            ColumnCollector::FeatureNumbers(values) => RawValues::Numbers(values.into_numbers(range)?),
            ColumnCollector::FeatureTexts(distinct, indices) => {
                RawValues::Texts(RawTexts { indices, distinct: distinct.texts })
            }
            _ => return Ok(None),
        };
        Ok(Some(RawColumn { name: self.name, is_date: self.is_date, values }))
    }
}
