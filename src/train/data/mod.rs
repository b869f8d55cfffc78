//! Data: reading it, splitting it into a training and a test set, and interpreting its target.

mod csv;
mod digits;
mod error;
mod features;
mod file;
mod idx;
mod npy;
mod source;
mod split;
mod synthetic;
mod target;

use sha2::{Digest, Sha256};

pub use csv::Header;
pub use error::DataError;
pub use features::{Features, Standardizer};
pub use source::{DataSource, LoadOptions};
pub use target::{Targets, Task};

/// The most values (rows times columns) that a data set may hold.
pub const ELEMENTS_MAX: u64 = 1 << 31;

/// The content of a column of a table.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Column {
    /// Finite numbers.
    Numbers(Vec<f64>),
    /// Names of classes.
    Text(Vec<String>),
}

/// Samples as they were read.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Table {
    features: Features,
    target: Column,
}

/// Samples to train on or to test with.
#[derive(Clone, PartialEq, Debug)]
pub struct Samples {
    /// The inputs of the model.
    pub features: Features,
    /// The values to predict.
    pub targets: Targets,
}

impl Samples {
    /// The number of samples.
    pub fn len(&self) -> usize {
        self.features.rows()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A training set and a test set.
#[derive(Clone, PartialEq, Debug)]
pub struct Dataset {
    /// Its name in reports.
    pub name: String,
    /// The training set; at least one sample.
    pub train: Samples,
    /// The test set; may be empty.
    pub test: Samples,
    /// The classes' names in order; empty for regression.
    pub classes: Vec<String>,
    /// Whether the features are columns of a table, of any scale, and not pixels from 0 to 1.
    pub tabular: bool,
    /// Sentences for the user about what was guessed, with the options that say otherwise.
    pub notes: Vec<String>,
}

impl Dataset {
    /// Whether the target holds classes or numbers.
    pub fn task(&self) -> Task {
        if self.classes.is_empty() { Task::Regression } else { Task::Classification }
    }

    /// SHA-256 of shapes and content: two ranks with the same digest train on the same data.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = Sha256::new();
        for samples in [&self.train, &self.test] {
            samples.features.digest(&mut hasher);
            samples.targets.digest(&mut hasher);
        }
        self.classes.iter().for_each(|name| hasher.update([name.as_bytes(), &[0]].concat()));
        hasher.finalize().into()
    }
}
