//! Reads data, splits the data into a training set and a test set, and converts the target to numbers or classes.

mod archive;
mod blocks_of_rank;
mod column_values;
mod compression;
mod csv;
mod dates;
mod digits;
mod disk_features;
mod encoding;
mod error;
mod exact_sum;
mod features;
mod file;
mod file_digest;
mod format;
mod held_samples;
mod idx;
mod image_file;
mod image_folder;
mod image_shape;
mod layout;
mod libsvm;
mod load;
pub(crate) mod npy;
mod numbers;
#[cfg(feature = "parquet")]
mod parquet;
mod part_of_source;
mod raw_table;
mod row_cursor;
mod row_map;
mod rows_of_rank;
mod sample_blocks;
mod sample_words;
mod shared_samples;
mod skippable_reader;
mod source;
mod sparse;
mod split;
mod standard_input;
mod standardizer;
mod stream_file;
mod synthetic;
mod table_load;
mod target;

pub(crate) mod text;
mod texts;
mod unknown_classes;
mod unsplit_data;
mod value_store;

use std::sync::Arc;

use sha2::{Digest, Sha256};

use blocks_of_rank::BlocksOfRank;
pub use csv::{HeaderRow, Separator, TableOptions};
pub(crate) use csv::{
    Records, check_header, detect_header, find_column, is_column_number, parse_number, read_header,
    spellings_of_missing_values,
};
pub use encoding::{ColumnEncoding, ColumnInputs, MissingPolicy, TableEncoding};
pub use error::DataError;
pub(crate) use exact_sum::{ExactSum, add_sums_of_ranks};
pub use features::Features;
pub use format::DataFormat;
pub(crate) use held_samples::{HeldFeatures, HeldSamples};
pub(crate) use image_folder::WantedImages;
pub use image_shape::ImageShape;
pub use layout::TableLayout;
pub use load::LoadOptions;
pub(crate) use npy::{FeatureShape, NpyStream, NpzFile, file_of_array};
#[cfg(feature = "parquet")]
pub(crate) use parquet::ParquetFile;
pub(crate) use row_cursor::{Cell, RowCursor, RowPlace};
pub(crate) use row_map::RowMap;
pub(crate) use sample_blocks::{BlockReader, RowOrigins, SampleBlock, SampleStream};
pub(crate) use shared_samples::{SharedSamples, TargetStatistics};
pub use source::DataSource;
#[cfg(not(feature = "parquet"))]
pub(crate) use source::NO_PARQUET_MESSAGE;
pub use sparse::SparseRows;
pub(crate) use standard_input::{STANDARD_INPUT_NAME, check_standard_input_is_no_terminal};
pub use standardizer::Standardizer;
pub(crate) use target::{CLASS_NUMBER_LIMIT, CLASSES_MAX};
pub use target::{Targets, Task};
pub use text::{CONTEXT_DEFAULT, TextEncoding, TextOptions, TokenKind, TokenWindows, Vocabulary};
use texts::Texts;
pub(crate) use unknown_classes::{check_test_classes, describe_unknown_class, join_first_classes};

use crate::group::Group;
use crate::train::TrainError;

/// The maximum number of values (rows times columns) in a data set.
pub const ELEMENTS_MAX: u64 = 1 << 31;

/// The content of a column of a table.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Column {
    /// Finite numbers.
    Numbers(Vec<f64>),
    /// Texts, such as names of classes. The text is empty for an image that is not in the folder of a class.
    Text(Texts),
}

/// Samples whose targets are not yet converted to numbers or indices of classes. `F` is the type of the features.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct UninterpretedSamples<F = Features> {
    pub(crate) features: F,
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

/// A training set and a test set. `S` is the type of each set.
#[derive(Clone, PartialEq, Debug)]
pub struct Dataset<S = Samples> {
    /// The name of the data in reports.
    pub name: String,
    /// The training set, which holds at least one sample.
    pub train: S,
    /// The test set, which may be empty.
    pub test: S,
    /// The names of the classes: entry i is the name of the class with the index i. Empty for regression.
    pub classes: Vec<String>,
    /// `true` if the features are columns of a table. `false` if the features are pixels or tokens.
    pub tabular: bool,
    /// The shape of the images. `None` if the samples are not images.
    pub image: Option<ImageShape>,
    /// How the columns of a table become features. `None` if the data is not a table with named columns.
    pub encoding: Option<Arc<TableEncoding>>,
    /// Where the feature columns and the target are in the table. `None` if the data is not a table with named
    /// columns.
    pub layout: Option<TableLayout>,
    /// How a text becomes tokens. `None` if the data is not a text.
    pub text: Option<Arc<TextEncoding>>,
    /// The number of tokens in the vocabulary of a text. 0 if the data is not a text.
    pub token_count: usize,
    /// Messages for the user. Each message states what the library guessed about the data, and names the option that
    /// overrides the guess.
    pub notes: Vec<String>,
}

impl<S> Dataset<S> {
    /// Returns the task that the target requires: to predict classes, numbers, or the next tokens of a text.
    pub fn task(&self) -> Task {
        match &self.text {
            Some(_) => Task::Text,
            None if self.classes.is_empty() => Task::Regression,
            None => Task::Classification,
        }
    }

    /// Returns two texts: what the model predicts, such as `10 classes`, and the name of an input, such as
    /// `feature`.
    pub(crate) fn describe_target_and_inputs(&self) -> (String, &'static str) {
        match self.task() {
            Task::Regression => ("regression".into(), "feature"),
            Task::Classification => (format!("{} classes", self.classes.len()), "feature"),
            Task::Text => ("the next token".into(), "token"),
        }
    }

    /// Returns the number of classes, or the number of tokens in the vocabulary of a text. Returns 0 for regression.
    pub(crate) fn class_count(&self) -> usize {
        self.classes.len() + self.token_count
    }

    /// Replaces the training set and the test set by the results of `convert`.
    fn try_map_sets<T>(
        self,
        mut convert: impl FnMut(S) -> Result<T, DataError>,
    ) -> Result<Dataset<T>, DataError> {
        let Self { name, train, test, classes, tabular, image, encoding, layout, text, token_count, notes } =
            self;
        let (train, test) = (convert(train)?, convert(test)?);
        Ok(Dataset { name, train, test, classes, tabular, image, encoding, layout, text, token_count, notes })
    }
}

impl Dataset<SharedSamples> {
    /// Returns a SHA-256 hash of the training set, the test set, the names of the classes and the encoding of a text.
    /// Two runs with the same hash train on the same data. All ranks must call this function, and get the same hash.
    pub(crate) fn digest(&self, group: &mut Group) -> Result<[u8; 32], TrainError> {
        let mut hasher = Sha256::new();
        self.train.digest(&mut hasher, group)?;
        self.test.digest(&mut hasher, group)?;
        self.classes.iter().for_each(|name| hasher.update([name.as_bytes(), &[0]].concat()));
        if let Some(text) = &self.text {
            hasher.update(serde_json::to_vec(&**text).expect("texts and numbers are valid JSON"));
        }
        Ok(hasher.finalize().into())
    }
}
