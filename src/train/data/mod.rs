//! Data: where it comes from, its split into training and test set, and what its target means.

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

pub use error::DataError;
pub use features::{Features, Standardizer};
pub use source::Source;
pub use target::{Targets, Task};

/// The most values (rows times columns) that a data set may hold.
pub const ELEMENTS_MAX: u64 = 1 << 31;

/// What a column of a table holds.
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
    /// What is known of each sample.
    pub features: Features,
    /// What is to be found out.
    pub targets: Targets,
}

impl Samples {
    /// How many samples there are.
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
    /// What it is called in reports.
    pub name: String,
    /// The training set; at least one sample.
    pub train: Samples,
    /// The test set; may be empty.
    pub test: Samples,
    /// The classes' names in order; empty for regression.
    pub classes: Vec<String>,
    /// Whether the features are columns of a table, of any scale, and not pixels from 0 to 1.
    pub tabular: bool,
}

impl Dataset {
    /// Whether the target holds classes or numbers.
    pub fn task(&self) -> Task {
        if self.classes.is_empty() { Task::Regression } else { Task::Classification }
    }

    /// SHA-256 of shapes and content: equal on two ranks exactly where they train on the same data.
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
