//! Describes how the columns of a table become the inputs of a model.
//!
//! An encoding is fitted on the training rows. An encoding contains everything that is needed to convert other rows
//! in the same way.

use std::fmt;
use std::str::FromStr;

use ndarray::{ArrayView1, ArrayViewMut1};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::train::rank_checks::short_digest;

/// What to do with missing values in the features of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissingPolicy {
    /// Return an error.
    #[default]
    Error,
    /// Leave out the row.
    Drop,
    /// Replace a missing number by the mean of the column in the training rows. A missing text is a category of its own.
    Mean,
    /// Do the same as [`Mean`](Self::Mean). In addition, if a number of a column is missing in a training row, give the
    /// column a second input: 1 if the number is missing, otherwise 0.
    Indicator,
}

impl MissingPolicy {
    const NAMES: [(Self, &'static str); 4] =
        [(Self::Error, "error"), (Self::Drop, "drop"), (Self::Mean, "mean"), (Self::Indicator, "indicator")];
}

impl fmt::Display for MissingPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMES.iter().find(|(policy, _)| policy == self);
        f.write_str(named.map_or("", |(_, name)| name))
    }
}

impl FromStr for MissingPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::NAMES.iter().find(|(_, name)| *name == text);
        named.map(|(policy, _)| *policy).ok_or_else(|| "is not one of error, drop, mean, indicator".into())
    }
}

/// How the feature columns of a table become the inputs of a model.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TableEncoding {
    /// The name of the column with the target.
    pub target: String,
    /// What to do with missing values.
    pub missing: MissingPolicy,
    /// The feature columns in the order of their inputs.
    pub columns: Vec<ColumnEncoding>,
}

/// How a column becomes one or more inputs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ColumnEncoding {
    /// The name of the column.
    pub name: String,
    /// Whether the cells are dates. A date is read as the number of days since 1970.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_date: bool,
    /// The inputs of the column.
    pub inputs: ColumnInputs,
}

/// The inputs of a column.
///
/// A *cell* represents a value of the column by a single number. [`TableEncoding::write_inputs`] computes the inputs
/// from the cell. The cell of a number is the number, minus `offset` if there is one. The cell of a text is the index of
/// its category or bucket. NaN is the cell of a missing number, and of a text without a category.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ColumnInputs {
    /// One input: the number.
    Number {
        /// The value that replaces a missing number: the mean of the column in the training rows. If `None`, no number
        /// may be missing.
        fill: Option<f32>,
        /// Whether there is a second input: 1 if the number is missing, otherwise 0.
        indicator: bool,
    },
    /// One input: the number minus `offset`. The subtraction uses f64, so that small differences between large
    /// numbers are kept.
    ShiftedNumber {
        /// The mean of the column in the training rows.
        offset: f64,
        /// The input that replaces a missing number. If `None`, no number may be missing.
        fill: Option<f32>,
        /// Whether there is a second input: 1 if the number is missing, otherwise 0.
        indicator: bool,
    },
    /// One input for each category: 1 for the category of the text, 0 for all others. If the text does not occur in
    /// the training rows, all inputs are 0.
    OneHot {
        /// The distinct texts of the training rows in sorted order. The empty text stands for a missing value.
        categories: Vec<String>,
    },
    /// One input for each bucket: 1 for the bucket of the text, 0 for all others. The bucket is the first 8 bytes of
    /// the SHA-256 of the text, as a little-endian number, modulo the number of buckets.
    Hashed {
        /// The number of buckets.
        buckets: u32,
    },
}

impl ColumnEncoding {
    /// Returns the number of inputs.
    pub fn width(&self) -> usize {
        match &self.inputs {
            ColumnInputs::Number { indicator, .. } | ColumnInputs::ShiftedNumber { indicator, .. } => {
                1 + usize::from(*indicator)
            }
            ColumnInputs::OneHot { categories } => categories.len(),
            ColumnInputs::Hashed { buckets } => *buckets as usize,
        }
    }

    /// Returns the names of the inputs, such as `delay`, `delay missing`, `carrier=UA` and `tail#17`.
    pub fn input_names(&self) -> Vec<String> {
        let name = &self.name;
        match &self.inputs {
            ColumnInputs::Number { indicator, .. } | ColumnInputs::ShiftedNumber { indicator, .. } => {
                let missing = indicator.then(|| format!("{name} missing"));
                std::iter::once(name.clone()).chain(missing).collect()
            }
            ColumnInputs::OneHot { categories } => {
                categories.iter().map(|category| format!("{name}={category}")).collect()
            }
            ColumnInputs::Hashed { buckets } => {
                (0..*buckets).map(|bucket| format!("{name}#{bucket}")).collect()
            }
        }
    }

    /// Returns the cell of a text. The empty text stands for a missing value. Returns NaN if the text has no category,
    /// or if this is a column of numbers.
    pub fn cell_of_text(&self, text: &str) -> f32 {
        match &self.inputs {
            ColumnInputs::Number { .. } | ColumnInputs::ShiftedNumber { .. } => f32::NAN,
            ColumnInputs::OneHot { categories } => {
                let found = categories.binary_search_by(|category| category.as_str().cmp(text));
                found.map_or(f32::NAN, |index| index as f32)
            }
            ColumnInputs::Hashed { buckets } => {
                (short_digest(text.as_bytes()) % u64::from(*buckets).max(1)) as f32
            }
        }
    }
}

impl ColumnEncoding {
    /// Returns the cell of a number. Returns NaN if this is a column of texts.
    pub fn cell_of_number(&self, number: f64) -> f32 {
        match &self.inputs {
            ColumnInputs::Number { .. } => number as f32,
            ColumnInputs::ShiftedNumber { offset, .. } => (number - offset) as f32,
            ColumnInputs::OneHot { .. } | ColumnInputs::Hashed { .. } => f32::NAN,
        }
    }

    /// Returns the input that replaces a missing number. Returns `None` if no number may be missing, or if this is a
    /// column of texts.
    pub(crate) fn fill_value(&self) -> Option<f32> {
        match self.inputs {
            ColumnInputs::Number { fill, .. } | ColumnInputs::ShiftedNumber { fill, .. } => fill,
            ColumnInputs::OneHot { .. } | ColumnInputs::Hashed { .. } => None,
        }
    }

    /// Returns whether the column holds numbers.
    pub(crate) fn is_number(&self) -> bool {
        matches!(self.inputs, ColumnInputs::Number { .. } | ColumnInputs::ShiftedNumber { .. })
    }
}

impl TableEncoding {
    /// Returns the number of inputs of the model.
    pub fn width(&self) -> usize {
        self.columns.iter().map(ColumnEncoding::width).sum()
    }

    /// Returns whether every column holds numbers and has a single input. In this case, each input equals the cell of
    /// its column, except that a fill value replaces a missing number.
    pub fn inputs_equal_cells(&self) -> bool {
        let is_plain = |column: &ColumnEncoding| column.is_number() && column.width() == 1;
        self.columns.iter().all(is_plain)
    }

    /// Adds the encoding to a digest.
    pub(crate) fn digest(&self, hasher: &mut Sha256) {
        hasher.update(self.to_json());
    }

    /// Returns the encoding as JSON.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and finite numbers are valid JSON")
    }

    /// Computes the inputs of a row. `cells` holds one cell for each column.
    ///
    /// # Panics
    ///
    /// If `inputs` is shorter than [`width`](Self::width), or if the index of a category or bucket lies outside
    /// `inputs`.
    pub fn write_inputs(&self, cells: &ArrayView1<'_, f32>, mut inputs: ArrayViewMut1<'_, f32>) {
        inputs.fill(0.0);
        self.visit_inputs(cells, |index, value| inputs[index] = value);
    }

    /// Calls `visit` with the index and the value of each input of a row that may differ from 0. `cells` holds one
    /// cell for each column.
    pub(crate) fn visit_inputs(&self, cells: &ArrayView1<'_, f32>, mut visit: impl FnMut(usize, f32)) {
        let mut at = 0;
        for (column, &cell) in self.columns.iter().zip(cells) {
            match &column.inputs {
                ColumnInputs::Number { fill, indicator }
                | ColumnInputs::ShiftedNumber { fill, indicator, .. } => {
                    let missing = cell.is_nan();
                    visit(at, if missing { fill.unwrap_or_default() } else { cell });
                    if *indicator && missing {
                        visit(at + 1, 1.0);
                    }
                }
                ColumnInputs::OneHot { .. } | ColumnInputs::Hashed { .. } => {
                    if !cell.is_nan() {
                        visit(at + cell as usize, 1.0);
                    }
                }
            }
            at += column.width();
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array1, array};

    use super::*;

    fn encoding() -> TableEncoding {
        let column = |name: &str, inputs| ColumnEncoding { name: name.into(), is_date: false, inputs };
        let categories = ["", "EWR", "JFK"].map(String::from).to_vec();
        TableEncoding {
            target: "y".into(),
            missing: MissingPolicy::Indicator,
            columns: vec![
                column("delay", ColumnInputs::Number { fill: Some(2.5), indicator: true }),
                column("origin", ColumnInputs::OneHot { categories }),
                column("hour", ColumnInputs::Number { fill: None, indicator: false }),
                column("tail", ColumnInputs::Hashed { buckets: 3 }),
            ],
        }
    }

    #[test]
    fn cells_become_one_or_several_inputs() {
        let encoding = encoding();
        assert!(!encoding.inputs_equal_cells());
        let names: Vec<String> = encoding.columns.iter().flat_map(ColumnEncoding::input_names).collect();
        let expected = "delay,delay missing,origin=,origin=EWR,origin=JFK,hour,tail#0,tail#1,tail#2";
        assert_eq!(names.join(","), expected);
        assert_eq!(encoding.width(), names.len());
        let origin = |text| encoding.columns[1].cell_of_text(text);
        for (cells, expected) in [
            (array![7.0, origin("JFK"), 5.0, 1.0], array![7.0, 0.0, 0.0, 0.0, 1.0, 5.0, 0.0, 1.0, 0.0]),
            (array![f32::NAN, origin(""), 0.0, 2.0], array![2.5, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
            (array![1.0, origin("LGA"), 0.0, 0.0], array![1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        ] {
            let mut inputs = Array1::from_elem(encoding.width(), 9.0);
            encoding.write_inputs(&cells.view(), inputs.view_mut());
            assert_eq!(inputs, expected);
        }
    }

    #[test]
    fn a_constant_is_subtracted_before_a_number_is_rounded() {
        let inputs =
            ColumnInputs::ShiftedNumber { offset: 1_700_000_000.25, fill: Some(0.5), indicator: true };
        let column = ColumnEncoding { name: "time".into(), is_date: false, inputs };
        assert_eq!(column.cell_of_number(1_700_000_001.5), 1.25);
        assert_eq!(column.input_names(), ["time", "time missing"]);
        let text = r#"{"shifted-number":{"offset":1700000000.25,"fill":0.5,"indicator":true}}"#;
        assert_eq!(serde_json::to_string(&column.inputs).unwrap(), text);
        let encoding = TableEncoding { columns: vec![column], ..encoding() };
        for (cell, expected) in [(1.25, array![1.25, 0.0]), (f32::NAN, array![0.5, 1.0])] {
            let mut inputs = Array1::zeros(2);
            encoding.write_inputs(&array![cell].view(), inputs.view_mut());
            assert_eq!(inputs, expected);
        }
    }

    #[test]
    fn buckets_follow_the_documented_hash() {
        // This command prints the expected buckets:
        // python3 -c "import hashlib; print([int.from_bytes(hashlib.sha256(t).digest()[:8],'little')%1000 for t in
        // (b'N14228',b'')])"
        let inputs = ColumnInputs::Hashed { buckets: 1000 };
        let column = ColumnEncoding { name: "tail".into(), is_date: false, inputs };
        assert_eq!(["N14228", ""].map(|text| column.cell_of_text(text)), EXPECTED_BUCKETS);
    }

    const EXPECTED_BUCKETS: [f32; 2] = [629.0, 227.0];

    #[test]
    fn an_encoding_is_the_same_after_it_is_written_and_read() {
        let text = serde_json::to_string(&encoding()).unwrap();
        assert_eq!(serde_json::from_str::<TableEncoding>(&text).unwrap(), encoding());
        for policy in ["error", "drop", "mean", "indicator"] {
            assert_eq!(policy.parse::<MissingPolicy>().unwrap().to_string(), policy);
        }
        assert!("median".parse::<MissingPolicy>().is_err());
    }
}
