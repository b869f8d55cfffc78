//! Loads digits, images, sparse rows, arrays and random data. The samples are not divided into a training set and
//! a test set yet.

use std::mem::discriminant;
use std::path::Path;

use super::part_of_source::{PartOfSource, load_parts};
use super::row_map::RowMap;
use super::synthetic::SyntheticTarget;
use super::{
    BlocksOfRank, DataError, DataSource, Features, HeldFeatures, ImageShape, Task, UninterpretedSamples,
    digits, image_folder, libsvm, npy, synthetic,
};
use crate::group::Group;
use crate::train::rank_checks::check_all_succeeded;
use crate::train::{RunPhase, TrainError};
use crate::types::counted;

/// The samples of a source, before they are divided into a training set and a test set.
#[derive(Debug)]
pub(crate) struct UnsplitData {
    /// The samples that this rank holds.
    pub(crate) samples: UninterpretedSamples<HeldFeatures>,
    /// Which rank holds which samples. `None` if each rank holds all samples.
    pub(crate) row_map: Option<RowMap>,
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

    /// Loads the digits, images, sparse rows, arrays or random data, except for the test set of a `.npz` file. Each rank reads
    /// a part of the samples. The digits and random data are not in files, so each rank holds all samples. `task` chooses the
    /// targets of random data. If `wanted_shape` is given, all images in files must have this shape. If there is a
    /// `stream_directory`, the features of samples from files are in a temporary file in this directory. All ranks must call this
    /// function.
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
        (stream_directory, group): (Option<&Path>, &mut Group),
    ) -> Result<UnsplitData, TrainError> {
        let built_in = |UninterpretedSamples { features, target }, image| {
            let samples = UninterpretedSamples { features: HeldFeatures::InMemory(features), target };
            UnsplitData { samples, row_map: None, image, notes: Vec::new() }
        };
        match self {
            Self::Digits => return Ok(built_in(digits::load_digits(), Some(digits::IMAGE_SHAPE))),
            &Self::Synthetic { rows, columns } => {
                let target = SyntheticTarget::of_task(task);
                return Ok(built_in(synthetic::generate_samples(rows, columns, target), None));
            }
            _ => {}
        }
        let read = |share| self.read_part(wanted_shape, (share, stream_directory));
        let data = load_parts(&self.to_string(), group, read)?;
        if let (Self::Libsvm(path), Some(rows)) = (self, &data.row_map) {
            libsvm::check_rows(path, rows.rows(), data.samples.features.format().columns())?;
        }
        Ok(data)
    }

    /// Reads this rank's part of images, sparse rows or arrays. `place` consists of the part that this rank reads, and the
    /// directory for a temporary file with the features.
    fn read_part(
        &self,
        wanted_shape: Option<ImageShape>,
        place: (BlocksOfRank, Option<&Path>),
    ) -> Result<PartOfSource, DataError> {
        match self {
            Self::Images(directory) => image_folder::read_part_of_folder(directory, wanted_shape, place),
            Self::Libsvm(path) => libsvm::read_part_of_file(path, place),
            Self::Npy(features, targets) => npy::read_part_of_arrays(features, targets, place),
            Self::Npz(path) => {
                let file = npy::NpzFile::open(path)?;
                let (features, targets) = file.training_arrays()?;
                let mut part = npy::read_part_of_arrays(&features, &targets, place)?;
                part.notes.extend(file.describe_ignored_arrays());
                Ok(part)
            }
            Self::Csv(_)
            | Self::CsvFiles(_)
            | Self::StandardInput
            | Self::Parquet(_)
            | Self::Idx(_)
            | Self::Text(_)
            | Self::Digits
            | Self::Synthetic { .. } => {
                unreachable!("the caller loads tables, IDX data, texts and built-in data")
            }
        }
    }

    /// Loads all samples of `test_source`, or its test set if it is a `.npz` file with a test set. `train` holds the
    /// training set, and `self` is the source of the training set. If the sets have different numbers of sparse
    /// features, adds features with the value 0 to the set with fewer features. All ranks must call this function.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is malformed, or if the two sets have different features.
    pub(crate) fn load_test_set(
        &self,
        train: &mut UnsplitData,
        test_source: &Self,
        (stream_directory, group): (Option<&Path>, &mut Group),
    ) -> Result<UnsplitData, TrainError> {
        let arrays = test_source.own_test_arrays().map_err(TrainError::from);
        let arrays = check_all_succeeded(group, RunPhase::Data, arrays)?;
        let test_source = arrays.as_ref().unwrap_or(test_source);
        let mut data = test_source.load_unsplit_data(None, train.image, (stream_directory, group))?;
        let columns = |data: &UnsplitData| data.samples.features.format().columns();
        let columns = columns(train).max(columns(&data));
        train.samples.features.widen(columns);
        data.samples.features.widen(columns);
        let differs = |what: &str, here: String, there: String| {
            Err(DataError::Unsuitable(format!(
                "the test set {test_source} has {here}, but --data {self} has {there}{what}"
            ))
            .into())
        };
        let (trained, tested) = (train.samples.features.format(), data.samples.features.format());
        if train.image != data.image {
            let describe = |image: Option<ImageShape>| match image {
                Some(shape) => format!("images of the shape {shape} (channels x height x width)"),
                None => "no images".to_owned(),
            };
            return differs("", describe(data.image), describe(train.image));
        }
        if tested.columns() != trained.columns() {
            return differs(" features", counted(tested.columns(), "feature"), trained.columns().to_string());
        }
        let is_bytes = |features: &Features| matches!(features, Features::Pixels { .. });
        if is_bytes(trained) != is_bytes(tested) {
            let kind = |features| if is_bytes(features) { "pixels of u8" } else { "other numbers" };
            return differs(" as features", kind(tested).into(), kind(trained).into());
        }
        Ok(data)
    }
}
