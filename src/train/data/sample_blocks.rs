//! Reads samples block by block, so that memory need not hold all of them.

use std::path::PathBuf;

use super::digits::{self, DigitReader};
use super::idx::{IdxReader, IdxSet};
use super::image_folder::ImageReader;
use super::libsvm::LibsvmReader;
use super::synthetic::{SyntheticReader, SyntheticTarget};
use super::{DataError, DataSource, ImageShape, Task, UninterpretedSamples, WantedImages};

/// Reads the samples of a source block by block.
pub(crate) trait BlockReader {
    /// Reads the next samples, at most `rows_max`. Returns a block without samples at the end.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is malformed.
    fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError>;
}

/// Samples that follow each other in their source, and their origins. A row is a sample.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct SampleBlock {
    pub(crate) samples: UninterpretedSamples,
    pub(crate) origins: RowOrigins,
}

/// Where rows come from.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum RowOrigins {
    /// The rows are lines of one file: the path of the file, and the line number of each row, counted from 1.
    Lines(PathBuf, Vec<u64>),
    /// Each row is a file.
    Files(Vec<PathBuf>),
    /// The rows have only numbers: the name of the data, and the number of the first row, counted from 0.
    Numbers(String, usize),
}

impl RowOrigins {
    /// Returns an error that names the origin of a row: the file and, if the row is a line, the number of the line.
    ///
    /// # Panics
    ///
    /// If `row` is out of range.
    pub(crate) fn error(&self, row: usize, problem: &str) -> DataError {
        match self {
            Self::Lines(path, lines) => DataError::malformed(path, format!("line {}: {problem}", lines[row])),
            Self::Files(paths) => DataError::malformed(&paths[row], problem),
            Self::Numbers(name, first) => {
                DataError::Unsuitable(format!("{name}: row {} (counted from 0): {problem}", first + row))
            }
        }
    }
}

/// Samples that a model reads block by block.
pub(crate) struct SampleStream {
    /// The number of features of a sample. For sparse rows, the number of features of the model.
    pub(crate) columns: usize,
    /// The shape of the images. `None` if the samples are not images, or if `reader` compares each image with the model.
    pub(crate) image: Option<ImageShape>,
    pub(crate) reader: Box<dyn BlockReader>,
}

impl DataSource {
    /// Opens the digits, the test set of IDX files, images, sparse rows or random data. Returns `None` for all other sources.
    /// `task` chooses the targets of random data. `wanted` describes the inputs of the model.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is malformed.
    pub(crate) fn open_samples(
        &self,
        task: Task,
        wanted: WantedImages,
    ) -> Result<Option<SampleStream>, DataError> {
        let (columns, image, reader): (_, _, Box<dyn BlockReader>) = match self {
            Self::Digits => (digits::PIXELS, Some(digits::IMAGE_SHAPE), Box::new(DigitReader::new())),
            Self::Idx(directory) => {
                let reader = IdxReader::open(directory, IdxSet::Test)?;
                let shape = reader.image_shape();
                (shape.value_count(), Some(shape), Box::new(reader))
            }
            Self::Images(directory) => (wanted.inputs, None, Box::new(ImageReader::open(directory, wanted)?)),
            Self::Libsvm(path) => (wanted.inputs, None, Box::new(LibsvmReader::open(path)?)),
            &Self::Synthetic { rows, columns } => {
                let target = SyntheticTarget::of_task(Some(task));
                (columns, None, Box::new(SyntheticReader::new(rows, columns, target)))
            }
            Self::Csv(_)
            | Self::CsvFiles(_)
            | Self::StandardInput
            | Self::Parquet(_)
            | Self::Npy(..)
            | Self::Npz(_)
            | Self::Text(_) => return Ok(None),
        };
        Ok(Some(SampleStream { columns, image, reader }))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use ndarray::Array2;

    use super::*;
    use crate::group::Group;
    use crate::train::data::{Column, Features, LoadOptions, Targets};

    /// Writes an IDX test set of two images with 2 x 2 pixels, without the last `missing` bytes, and a training set.
    fn write_idx_directory(directory: &Path, missing: usize) {
        let images =
            [&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2][..], &[1, 2, 3, 4, 5, 6, 7, 8]].concat();
        fs::create_dir(directory).unwrap();
        for (set, len) in [("train", images.len()), ("t10k", images.len() - missing)] {
            fs::write(directory.join(format!("{set}-images-idx3-ubyte")), &images[..len]).unwrap();
            let labels = [0, 0, 8, 1, 0, 0, 0, 2, 1, 0];
            fs::write(directory.join(format!("{set}-labels-idx1-ubyte")), labels).unwrap();
        }
    }

    fn write_images(directory: &Path, files: &[(&str, &[u8])]) {
        for (name, bytes) in files {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }

    /// Reads all samples in blocks. Returns the inputs, row by row, and the targets as text.
    fn read_in_blocks(
        source: &DataSource,
        task: Task,
        inputs: usize,
        rows_max: usize,
    ) -> (Vec<f32>, Vec<String>) {
        let wanted = WantedImages { inputs, shape: None };
        let SampleStream { columns, mut reader, .. } = source.open_samples(task, wanted).unwrap().unwrap();
        assert_eq!(columns, inputs, "{source}");
        let (mut values, mut targets) = (Vec::new(), Vec::new());
        loop {
            let SampleBlock { mut samples, origins } = reader.read_block(rows_max).unwrap();
            let rows = samples.features.rows();
            assert!(rows <= rows_max, "{source}");
            if rows == 0 {
                return (values, targets);
            }
            if let Features::Sparse(sparse) = &mut samples.features {
                assert!(sparse.widen(inputs));
            }
            let mut block = Array2::zeros((rows, inputs));
            samples.features.write_rows(0..rows, None, block.view_mut());
            values.extend(block);
            targets.extend((0..rows).map(|row| match &samples.target {
                Column::Numbers(numbers) => numbers[row].to_string(),
                Column::Text(texts) => texts.distinct[texts.indices[row] as usize].to_string(),
            }));
            if let RowOrigins::Numbers(_, first) = origins {
                assert_eq!(first + rows, targets.len(), "{source}");
            }
        }
    }

    #[test]
    fn blocks_of_any_size_hold_the_samples_of_the_whole_source() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        write_idx_directory(&path("idx"), 0);
        let grey: &[u8] = include_bytes!("images/grey.jpg");
        let colour: &[u8] = include_bytes!("images/palette.png");
        write_images(&path("images"), &[("a/1.jpg", grey), ("a/2.jpg", grey), ("b/1.png", colour)]);
        fs::write(path("a.libsvm"), "1 1:0.5\n# comment\n2 3:4\n1\n1 2:7\n").unwrap();
        let synthetic = || DataSource::Synthetic { rows: 10, columns: 3 };
        for (source, task, inputs) in [
            (DataSource::Digits, Task::Classification, 64),
            (DataSource::Idx(path("idx")), Task::Classification, 4),
            (DataSource::Images(path("images")), Task::Classification, 18),
            (DataSource::Libsvm(path("a.libsvm")), Task::Regression, 3),
            (synthetic(), Task::Classification, 3),
            (synthetic(), Task::Regression, 3),
        ] {
            let dataset = source.load(&LoadOptions { task: Some(task), ..LoadOptions::default() }).unwrap();
            let samples = if matches!(source, DataSource::Idx(_)) { &dataset.test } else { &dataset.train };
            let mut values = Array2::zeros((samples.len(), inputs));
            samples.features.write_rows(0..samples.len(), None, values.view_mut());
            let targets = match &samples.targets {
                Targets::Numbers(numbers) => numbers.iter().map(f64::to_string).collect(),
                Targets::Classes(classes) => {
                    classes.iter().map(|&class| dataset.classes[class as usize].clone()).collect()
                }
                Targets::NextTokens(_) => panic!("the data is no text"),
            };
            let expected: (Vec<f32>, Vec<String>) = (values.into_iter().collect(), targets);
            for rows_max in [1, 2, 3, 1000, usize::MAX] {
                let found = read_in_blocks(&source, task, inputs, rows_max);
                assert!(found == expected, "{source}, blocks of {rows_max}: {found:?} {expected:?}");
            }
            if matches!(source, DataSource::Digits | DataSource::Synthetic { .. }) {
                continue;
            }
            let stream_directory = Some(directory.path().to_owned());
            let options = LoadOptions { task: Some(task), stream_directory, ..LoadOptions::default() };
            let streamed = source.load_on_ranks(&options, &mut Group::solo()).unwrap();
            for (set, expected) in [(streamed.train, dataset.train), (streamed.test, dataset.test)] {
                assert!(set.held.in_memory().is_none() && set.held.feature_format().rows() == 0, "{source}");
                assert_eq!(set.held.into_memory().unwrap(), expected, "{source}");
            }
        }
    }

    /// Regression test: `ringtrain predict` read the whole input before the first prediction.
    #[test]
    fn a_block_is_complete_before_later_samples_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        write_idx_directory(&path("idx"), 3);
        let grey: &[u8] = include_bytes!("images/grey.jpg");
        write_images(&path("images"), &[("1.jpg", grey), ("2.jpg", b"text")]);
        fs::write(path("a.libsvm"), "1 1:0.5\n1 x\n").unwrap();
        for (source, inputs, expected) in [
            (DataSource::Idx(path("idx")), 4, "truncated: it has fewer than the 8 bytes of data"),
            (DataSource::Images(path("images")), 6, "2.jpg: is not a PNG or JPEG image"),
            (DataSource::Libsvm(path("a.libsvm")), 1, "line 2, character 3: `x` is not a feature"),
        ] {
            let wanted = WantedImages { inputs, shape: None };
            let mut reader = source.open_samples(Task::Classification, wanted).unwrap().unwrap().reader;
            assert_eq!(reader.read_block(1).unwrap().samples.features.rows(), 1, "{source}");
            let error = reader.read_block(1).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
