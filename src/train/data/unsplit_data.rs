//! Reads digits, images, sparse rows, arrays and random data. The samples are not divided into a training set and
//! a test set yet.

use std::mem::discriminant;

use super::synthetic::SyntheticTarget;
use super::{
    DataError, DataSource, Features, ImageShape, Task, UninterpretedSamples, digits, image_folder, libsvm,
    npy, synthetic,
};

/// All samples of a source, before they are divided into a training set and a test set.
pub(crate) struct UnsplitData {
    pub(crate) samples: UninterpretedSamples,
    /// The shape of the images. `None` if the samples are not images.
    pub(crate) image: Option<ImageShape>,
    /// Messages for the user.
    pub(crate) notes: Vec<String>,
}

impl DataSource {
    /// Returns an error if `test` cannot be the test set of a model that is trained on `self`.
    pub(crate) fn check_test_source(&self, test: &Self) -> Result<(), String> {
        let is_text_table =
            |source: &Self| matches!(source, Self::Csv(_) | Self::CsvFiles(_) | Self::StandardInput);
        let is_arrays = |source: &Self| matches!(source, Self::Npy(..) | Self::Npz(_));
        if let Some(name) = self.name_of_own_test_set() {
            return Err(format!("--test-data does not apply: {name}"));
        }
        match self {
            Self::StandardInput if matches!(test, Self::StandardInput) => Err(
                "--data - and --test-data - both name standard input, which can be read only once; pass the name of a file \
                 to one of them"
                    .into(),
            ),
            Self::Digits | Self::Synthetic { .. } => {
                Err(format!("--test-data does not apply to --data {self}, which is built in"))
            }
            _ if is_text_table(self) && is_text_table(test) => Ok(()),
            _ if is_arrays(self) && is_arrays(test) => Ok(()),
            _ if discriminant(self) == discriminant(test) => Ok(()),
            _ => Err(format!(
                "--test-data {test} has another format than --data {self}; both must have the same format"
            )),
        }
    }

    /// Reads all rows of the digits, of images, of sparse rows, of arrays or of random data, except for the test set of a
    /// `.npz` file. `task` chooses the targets of random data. If `wanted_shape` is given, all images in files must have
    /// this shape.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is malformed.
    ///
    /// # Panics
    ///
    /// If the source is a table, IDX data or a text.
    pub(crate) fn load_unsplit_data(
        &self,
        task: Option<Task>,
        wanted_shape: Option<ImageShape>,
    ) -> Result<UnsplitData, DataError> {
        let plain = |samples| UnsplitData { samples, image: None, notes: Vec::new() };
        Ok(match self {
            Self::Digits => UnsplitData { image: Some(digits::IMAGE_SHAPE), ..plain(digits::load_digits()) },
            Self::Images(directory) => {
                let (samples, shape, notes) = image_folder::load_image_folder(directory, wanted_shape)?;
                UnsplitData { samples, image: Some(shape), notes }
            }
            Self::Libsvm(path) => plain(libsvm::load_libsvm_file(path)?),
            Self::Npy(features, targets) => {
                let npy::NpyDataset { samples, image, notes } = npy::load_array_pair(features, targets)?;
                UnsplitData { samples, image, notes }
            }
            Self::Npz(path) => {
                let file = npy::NpzFile::open(path)?;
                let (features, targets) = file.training_arrays()?;
                let npy::NpyDataset { samples, image, mut notes } =
                    npy::load_array_pair(&features, &targets)?;
                notes.extend(file.describe_ignored_arrays());
                UnsplitData { samples, image, notes }
            }
            &Self::Synthetic { rows, columns } => {
                plain(synthetic::generate_samples(rows, columns, SyntheticTarget::of_task(task)))
            }
            Self::Csv(_)
            | Self::CsvFiles(_)
            | Self::StandardInput
            | Self::Parquet(_)
            | Self::Idx(_)
            | Self::Text(_) => {
                unreachable!("the caller loads tables, IDX data and texts")
            }
        })
    }

    /// Reads all samples of `test_source`, or its test set if it is a `.npz` file with a test set. `train` holds the
    /// training set, and `self` is the source of the training set. If the sets have different numbers of sparse
    /// features, adds features with the value 0 to the set with fewer features.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is malformed, or if the two sets have different features.
    pub(crate) fn load_test_set(
        &self,
        train: &mut UnsplitData,
        test_source: &Self,
    ) -> Result<UnsplitData, DataError> {
        let arrays = test_source.own_test_arrays()?;
        let test_source = arrays.as_ref().unwrap_or(test_source);
        let mut data = test_source.load_unsplit_data(None, train.image)?;
        if let (Features::Sparse(trained), Features::Sparse(tested)) =
            (&mut train.samples.features, &mut data.samples.features)
        {
            let columns = trained.columns().max(tested.columns());
            trained.widen(columns);
            tested.widen(columns);
        }
        let differs = |what: &str, here: String, there: String| {
            Err(DataError::Unsuitable(format!(
                "the test set {test_source} has {here}, but --data {self} has {there}{what}"
            )))
        };
        let (trained, tested) = (&train.samples.features, &data.samples.features);
        if train.image != data.image {
            let describe = |image: Option<ImageShape>| match image {
                Some(shape) => format!("images of the shape {shape} (channels x height x width)"),
                None => "no images".to_owned(),
            };
            return differs("", describe(data.image), describe(train.image));
        }
        if tested.columns() != trained.columns() {
            return differs(
                " features",
                format!("{} features", tested.columns()),
                trained.columns().to_string(),
            );
        }
        let is_bytes = |features: &Features| matches!(features, Features::Pixels { .. });
        if is_bytes(trained) != is_bytes(tested) {
            let kind = |features| if is_bytes(features) { "pixels of u8" } else { "other numbers" };
            return differs(" as features", kind(tested).into(), kind(trained).into());
        }
        Ok(data)
    }
}
