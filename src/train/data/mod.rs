//! Reads data, splits the data into a training set and a test set, and interprets the target.

mod compression;
mod csv;
mod digits;
mod encoding;
mod error;
mod features;
mod file;
mod format;
mod idx;
mod image_file;
mod image_folder;
mod image_shape;
mod layout;
mod libsvm;
mod loaded_rows;
pub(crate) mod npy;
mod numbers;
mod raw_table;
mod source;
mod sparse;
mod split;
mod synthetic;
mod target;
mod texts;

use std::sync::Arc;

use sha2::{Digest, Sha256};

pub use csv::{HeaderRow, Separator, TableOptions};
pub(crate) use csv::{
    Records, check_header, find_column, is_missing, missing_spellings, parse_number, read_header,
};
pub use encoding::{ColumnEncoding, ColumnInputs, MissingPolicy, TableEncoding};
pub use error::DataError;
pub use features::{Features, Standardizer};
pub use format::DataFormat;
pub(crate) use image_folder::WantedImages;
pub use image_shape::ImageShape;
pub use layout::TableLayout;
pub(crate) use loaded_rows::LoadedRows;
pub(crate) use npy::{FeatureShape, NpyStream};
pub use source::{DataSource, LoadOptions};
pub use sparse::SparseRows;
pub(crate) use target::{CLASS_END, CLASSES_MAX};
pub use target::{Targets, Task};
use texts::Texts;

/// The maximum number of values (rows times columns) in a data set.
pub const ELEMENTS_MAX: u64 = 1 << 31;

/// The content of a column of a table.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Column {
    /// Finite numbers.
    Numbers(Vec<f64>),
    /// Names of classes. The name is empty for an image that is not in the folder of a class.
    Text(Texts),
}

/// Samples whose targets have not been interpreted yet.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Table {
    pub(crate) features: Features,
    pub(crate) target: Column,
}

/// A set of samples: the training set or the test set.
#[derive(Clone, PartialEq, Debug)]
pub struct Samples {
    /// The inputs of the model.
    pub features: Features,
    /// The values to predict.
    pub targets: Targets,
}

impl Samples {
    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.features.rows()
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A training set and a test set.
#[derive(Clone, PartialEq, Debug)]
pub struct Dataset {
    /// The name of the data in reports.
    pub name: String,
    /// The training set, which holds at least one sample.
    pub train: Samples,
    /// The test set, which may be empty.
    pub test: Samples,
    /// The names of the classes: entry i is the name of the class with the index i. Empty for regression.
    pub classes: Vec<String>,
    /// `true` if the features are columns of a table. `false` if the features are pixels.
    pub tabular: bool,
    /// The shape of the images. `None` if the samples are not images.
    pub image: Option<ImageShape>,
    /// How the columns of a table become features. `None` if the data is not a table with named columns.
    pub encoding: Option<Arc<TableEncoding>>,
    /// Where the feature columns and the target are in the table. `None` if the data is not a table with named
    /// columns.
    pub layout: Option<TableLayout>,
    /// Messages for the user. Each message states what the library guessed about the data, and names the option that
    /// overrides the guess.
    pub notes: Vec<String>,
}

impl Dataset {
    /// Returns the task that the target requires: to predict classes, or to predict numbers.
    pub fn task(&self) -> Task {
        if self.classes.is_empty() { Task::Regression } else { Task::Classification }
    }

    /// Returns a SHA-256 of both sets of samples and the names of the classes. Two ranks with the same digest train
    /// on the same data.
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
