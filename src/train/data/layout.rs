//! The positions of the columns of a table.

use serde::{Deserialize, Serialize};

/// Where the feature columns and the target are in a table. Columns are numbered from 0.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TableLayout {
    /// The number of columns of the table.
    pub columns: usize,
    /// The number of the column with the target.
    pub target: usize,
    /// The numbers of the feature columns, in increasing order. The model takes the features in this order.
    pub features: Vec<usize>,
    /// Whether the table has the names of its columns. A model file does not store this.
    #[serde(skip)]
    pub has_header: bool,
}

impl TableLayout {
    /// Returns the numbers of the feature columns in a table without the target column.
    pub fn features_without_target(&self) -> Vec<usize> {
        self.features.iter().map(|&column| column - usize::from(column > self.target)).collect()
    }

    /// Checks a layout that was read from a file. `features` is the number of feature columns of the model.
    ///
    /// # Errors
    ///
    /// A text that says what is wrong.
    pub(crate) fn check(&self, features: usize) -> Result<(), String> {
        let Self { columns, target, features: found, .. } = self;
        let are_sorted = found.is_sorted_by(|a, b| a < b);
        let fit = found.len() == features && target < columns && found.iter().all(|column| column < columns);
        if are_sorted && fit && !found.contains(target) {
            return Ok(());
        }
        Err(format!(
            "its layout is not valid: it must have {features} feature columns in increasing order, and a target column that \
             is not a feature, in a table of {columns} columns"
        ))
    }
}
