//! Loads data: reads the rows, splits off a test set, and interprets the target.

use std::path::PathBuf;
use std::sync::Arc;

use super::raw_table::{EncodedTable, RowSets};
use super::row_map::RowMap;
use super::{
    BlocksOfRank, Column, DataError, DataSource, Dataset, Features, HeldFeatures, HeldSamples, ImageShape,
    SharedSamples, TableEncoding, TableLayout, TableOptions, Targets, Task, TextOptions,
    UninterpretedSamples, idx, split, table_load, target, text,
};
use crate::group::Group;
use crate::train::early_stopping::hold_out_rows;
use crate::train::rank_checks::{check_all_succeeded, check_same_data};
use crate::train::{RunPhase, TrainError};

/// The options for reading a source.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LoadOptions {
    /// For a table: the name of the column that holds the target, or its number counted from 0.
    pub target: Option<String>,
    /// How to read a table.
    pub table: TableOptions,
    /// How to read a text.
    pub text: TextOptions,
    /// The fraction of the rows to use for testing. This field has no effect if there is a `test_source`, or if the
    /// source has a test set of its own.
    pub test_fraction: f64,
    /// The source of the test set. It has the same format and the same features as the training data. If `None`, a
    /// part of the training data becomes the test set.
    pub test_source: Option<DataSource>,
    /// Whether to predict classes or numbers. If `None`, the values of the target decide; see
    /// [`Targets`](super::Targets).
    pub task: Option<Task>,
    /// The fraction of the training rows that the run will hold out for validation. [`DataSource::load`] returns these
    /// rows in the training set, but does not fit the encoding of a table on them.
    pub validation_fraction: Option<f64>,
    /// The directory for temporary files that hold the samples, so that memory holds only a few samples at a time. `None` holds
    /// all samples in memory. [`DataSource::load`] ignores this field.
    pub stream_directory: Option<PathBuf>,
}

impl LoadOptions {
    /// Divides the row numbers `0..row_count` into training rows and test rows, and chooses the training rows on which the
    /// encoding of the table is fitted. If there is a test source, its rows begin at `first_test_row`.
    pub(crate) fn choose_row_sets(
        &self,
        row_count: usize,
        first_test_row: Option<usize>,
    ) -> Result<RowSets, DataError> {
        let (train, test) = match (&self.test_source, first_test_row) {
            (Some(_), Some(0)) => {
                return Err(DataError::Unsuitable("--data holds no row with a target".into()));
            }
            (Some(source), Some(first)) if first == row_count => {
                return Err(DataError::Unsuitable(format!(
                    "--test-data {source} holds no row with a target"
                )));
            }
            (Some(_), Some(first)) => ((0..first).collect(), (first..row_count).collect()),
            _ => split::split_rows(row_count, self.test_fraction)?,
        };
        let fitted = match self.validation_fraction {
            Some(fraction) => {
                let (remaining, _) = hold_out_rows(train.len(), fraction)?;
                remaining.into_iter().map(|index| train[index]).collect()
            }
            None => train.clone(),
        };
        Ok(RowSets { fitted, train, test })
    }
}

impl DataSource {
    /// Reads the data, splits off a test set if the source has none, and interprets the target.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is malformed, or if the target does not fit the task. An error about a file names the
    /// file and, where possible, the line.
    pub fn load(&self, options: &LoadOptions) -> Result<Dataset, DataError> {
        let options = LoadOptions { stream_directory: None, ..options.clone() };
        let loaded = self.load_on_ranks(&options, &mut Group::solo()).map_err(|error| match error {
            TrainError::Data(error) => error,
            // The collectives of a group of one rank do not fail.
            other => DataError::Unsuitable(other.to_string()),
        });
        loaded?.try_map_sets(|samples| samples.held.into_memory())
    }

    /// Loads the data as [`load`](Self::load) does, but for all ranks of `group`. All ranks must call this function.
    /// Each rank holds a part of the samples. Of the digits and of random data, each rank holds all samples.
    pub(crate) fn load_on_ranks(
        &self,
        options: &LoadOptions,
        group: &mut Group,
    ) -> Result<Dataset<SharedSamples>, TrainError> {
        if let Self::Text(files) = self {
            return self.load_text_on_ranks(files, options, group);
        }
        let UninterpretedData { train, test, row_maps, encoding, layout, image, mut notes } =
            self.read_sets(options, group)?;
        let rows = row_maps.as_ref().map_or(train.features.rows(), |[train, _]| train.rows());
        if rows == 0 || train.features.format().columns() == 0 {
            return Err(DataError::Unsuitable(format!("{self} holds no samples")).into());
        }
        // If each rank holds all rows, a rank needs no other rank to interpret the target.
        let mut solo = Group::solo();
        let holders = if row_maps.is_some() { group } else { &mut solo };
        let ([train_targets, test_targets], classes) = self.choose_task_and_interpret_targets(
            [train.target, test.target],
            options.task,
            holders,
            &mut notes,
        )?;
        let tabular = !matches!(train.features.format(), Features::Pixels { .. });
        let train = HeldSamples::new(train.features, train_targets);
        let test = HeldSamples::new(test.features, test_targets);
        let (train, test) = match row_maps {
            Some([train_map, test_map]) => {
                (SharedSamples::new(train, Some(train_map)), SharedSamples::new(test, Some(test_map)))
            }
            None => (SharedSamples::new(train, None), SharedSamples::new(test, None)),
        };
        let (name, text, token_count) = (self.to_string(), None, 0);
        Ok(Dataset { name, train, test, classes, tabular, image, encoding, layout, text, token_count, notes })
    }

    /// Loads a text for all ranks of `group`. Each rank holds a part of the windows.
    fn load_text_on_ranks(
        &self,
        files: &[PathBuf],
        options: &LoadOptions,
        group: &mut Group,
    ) -> Result<Dataset<SharedSamples>, TrainError> {
        let test = match &options.test_source {
            Some(source) => {
                let checked = self.check_test_source(source).map_err(DataError::Unsuitable);
                checked.map(|()| text::TestPart::Files(source.files()))
            }
            None => Ok(text::TestPart::Fraction(options.test_fraction)),
        };
        let place = (BlocksOfRank::of_rank(group), options.stream_directory.as_deref());
        let loaded = test.and_then(|test| text::load_text(files, test, options.text, place));
        let loaded = check_all_succeeded(group, RunPhase::Data, loaded.map_err(TrainError::from))?;
        let text::LoadedText { train, test, encoding, token_count, fingerprint, note } = loaded;
        check_same_data(group, &fingerprint, |_| self.to_string())?;
        let [train, test] = [train, test]
            .map(|text::WindowsOfRank { samples, row_map, .. }| SharedSamples::new(samples, Some(row_map)));
        Ok(Dataset {
            name: self.to_string(),
            train,
            test,
            classes: Vec::new(),
            tabular: false,
            image: None,
            encoding: None,
            layout: None,
            text: Some(Arc::new(encoding)),
            token_count,
            notes: vec![note],
        })
    }

    /// Reads the rows of the training set and of the test set. If neither the options nor the source has a test set,
    /// splits off a test set.
    fn read_sets(&self, options: &LoadOptions, group: &mut Group) -> Result<UninterpretedData, TrainError> {
        let stream_directory = options.stream_directory.as_deref();
        let own_test_set = self.check_options(options).map_err(TrainError::from);
        let own_test_set = check_all_succeeded(group, RunPhase::Data, own_test_set)?;
        match self {
            Self::Csv(_) | Self::CsvFiles(_) | Self::StandardInput | Self::Parquet(_) => {
                return Ok(table_load::load_table(self, options, group)?.into());
            }
            Self::Idx(directory) => {
                let (train, test) = idx::load_idx_directory(directory, stream_directory, group)?;
                let sets = [(train.samples, train.row_map), (test.samples, test.row_map)];
                return Ok(UninterpretedData::from_sets(sets, train.image, Vec::new()));
            }
            _ => {}
        }
        let mut data = self.load_unsplit_data(options.task, None, (stream_directory, group))?;
        let sets = match options.test_source.as_ref().or(own_test_set.as_ref()) {
            Some(source) => {
                let test = self.load_test_set(&mut data, source, (stream_directory, group))?;
                data.notes.extend(test.notes);
                [(data.samples, data.row_map), (test.samples, test.row_map)]
            }
            None => split::split_samples(&data.samples, data.row_map.as_ref(), options.test_fraction)?,
        };
        Ok(UninterpretedData::from_sets(sets, data.image, data.notes))
    }

    /// Checks that the source fits the options. Returns the test set of a `.npz` file that has one.
    fn check_options(&self, options: &LoadOptions) -> Result<Option<Self>, DataError> {
        if let Some(test) = &options.test_source {
            self.check_test_source(test).map_err(DataError::Unsuitable)?;
        }
        self.own_test_arrays()
    }

    /// Chooses the task, if `task` is `None`. Interprets the targets of the training set and of the test set. Returns
    /// the targets of both sets and the names of the classes.
    fn choose_task_and_interpret_targets(
        &self,
        [train, test]: [Column; 2],
        task: Option<Task>,
        group: &mut Group,
        notes: &mut Vec<String>,
    ) -> Result<([Targets; 2], Vec<String>), TrainError> {
        let task = match (self, task) {
            (_, Some(task)) => task,
            // Digits, IDX files, images and synthetic data have classes as targets.
            (Self::Digits | Self::Idx(_) | Self::Images(_) | Self::Synthetic { .. }, None) => {
                Task::Classification
            }
            (_, None) => {
                let (task, note) = target::guess_task(&train, &test, group)?;
                notes.push(note);
                task
            }
        };
        target::interpret_targets(train, test, task, group)
    }
}

/// The rows that this rank has read, divided into a training set and a test set, before the targets are interpreted.
struct UninterpretedData {
    train: UninterpretedSamples<HeldFeatures>,
    test: UninterpretedSamples<HeldFeatures>,
    /// Which rank holds which rows of the training set and of the test set. `None` if each rank holds all rows.
    row_maps: Option<[RowMap; 2]>,
    encoding: Option<Arc<TableEncoding>>,
    layout: Option<TableLayout>,
    image: Option<ImageShape>,
    /// Messages for the user.
    notes: Vec<String>,
}

impl UninterpretedData {
    /// Creates a training set and a test set from the samples of this rank. The maps say which rank holds which samples; they are
    /// `None` if each rank holds all samples.
    fn from_sets(
        [(train, train_rows), (test, test_rows)]: [split::HeldSet; 2],
        image: Option<ImageShape>,
        notes: Vec<String>,
    ) -> Self {
        let row_maps = train_rows.zip(test_rows).map(|(train, test)| [train, test]);
        Self { train, test, row_maps, encoding: None, layout: None, image, notes }
    }
}

impl From<EncodedTable> for UninterpretedData {
    fn from(table: EncodedTable) -> Self {
        Self {
            train: table.train,
            test: table.test,
            row_maps: Some([table.train_row_map, table.test_row_map]),
            encoding: Some(table.encoding),
            layout: Some(table.layout),
            image: None,
            notes: table.notes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_data_has_classes_or_numbers_as_the_task_requires() {
        let source = DataSource::Synthetic { rows: 100, columns: 4 };
        let load = |task, test_fraction| {
            source.load(&LoadOptions { test_fraction, task, ..LoadOptions::default() }).unwrap()
        };
        assert_eq!(load(None, 0.2).task(), Task::Classification);
        let dataset = load(Some(Task::Regression), 0.2);
        assert_eq!((dataset.task(), dataset.train.len(), dataset.test.len()), (Task::Regression, 80, 20));
        let digest = |test_fraction| {
            let options =
                LoadOptions { test_fraction, task: Some(Task::Regression), ..LoadOptions::default() };
            let mut group = Group::solo();
            source.load_on_ranks(&options, &mut group).unwrap().digest(&mut group).unwrap()
        };
        assert_ne!(digest(0.2), digest(0.3));
    }
}
