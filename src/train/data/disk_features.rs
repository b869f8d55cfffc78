//! Features of samples in a temporary file.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::sample_words::features_from_words;
use super::stream_file::StreamFile;
use super::{DataError, Features};

/// The number of words that are read from a file or from a source at once, if a row has fewer words.
pub(super) const BLOCK_WORDS: usize = 1 << 18;
/// The maximum number of rows that are read at once.
const BLOCK_ROWS_MAX: usize = 1024;

/// The features of samples in a temporary file. Each row of the file holds the words of a sample: see
/// [`Features::append_words`].
#[derive(Clone, Debug)]
pub(crate) struct DiskFeatures {
    file: Arc<StreamFile>,
    /// The directory of the file.
    directory: PathBuf,
    /// The number of the row of each sample in the file, in ascending order. Shared, because a clone is a view of the
    /// same samples.
    rows: Arc<[u32]>,
    /// For sparse rows, the first word of each row in the file, followed by the number of words. Empty if all rows have the
    /// same number of words.
    starts: Arc<[u64]>,
    /// Features with the same columns and without samples.
    format: Features,
    block_rows: usize,
}

impl DiskFeatures {
    /// Returns the number of samples.
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns features with the same columns and without samples.
    pub(crate) fn format(&self) -> &Features {
        &self.format
    }

    /// Returns the format. The caller may add columns to sparse rows.
    pub(crate) fn format_mut(&mut self) -> &mut Features {
        &mut self.format
    }

    /// Returns how many samples have about 1 MiB.
    pub(crate) fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// Returns the number of stored values of a sparse row.
    pub(crate) fn value_count(&self, index: usize) -> usize {
        let words = self.words_of_row(self.rows[index]);
        (words.end - words.start) as usize / 2
    }

    /// Returns the samples whose indices are in `chosen`, as a view of the same file. `chosen` must be sorted.
    #[must_use]
    pub(crate) fn select(&self, chosen: &[usize]) -> Self {
        Self { rows: chosen.iter().map(|&index| self.rows[index]).collect(), ..self.clone() }
    }

    /// Reads samples into memory, in the order of `indices`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn load(&self, indices: impl Iterator<Item = usize>) -> Result<Features, DataError> {
        let (words, lengths) = self.read_words(indices)?;
        let mut rest = words.as_slice();
        let rows: Vec<&[u32]> = lengths
            .into_iter()
            .map(|length| rest.split_off(..length).expect("`words` has all rows"))
            .collect();
        Ok(features_from_words(&self.format, rows.into_iter()))
    }

    /// Reads the words of samples, in the order of `indices`. Returns the words of all samples, and the number of words of each
    /// sample.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn read_words(
        &self,
        indices: impl Iterator<Item = usize>,
    ) -> Result<(Vec<u32>, Vec<usize>), DataError> {
        let ranges: Vec<Range<u64>> = indices.map(|index| self.words_of_row(self.rows[index])).collect();
        let lengths: Vec<usize> = ranges.iter().map(|range| (range.end - range.start) as usize).collect();
        let mut words = vec![0_u32; lengths.iter().sum()];
        let mut rest = words.as_mut_slice();
        // Adjacent rows are read at once.
        for run in ranges.chunk_by(|range, next| range.end == next.start) {
            let (start, end) = (run[0].start, run[run.len() - 1].end);
            let (run_words, later_words) = rest.split_at_mut((end - start) as usize);
            self.file.read_at(bytemuck::cast_slice_mut(run_words), start * size_of::<u32>() as u64)?;
            rest = later_words;
        }
        Ok((words, lengths))
    }

    /// Tells the operating system that the samples `range` will soon be read.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        let rows = &self.rows[range];
        if let (Some(&first), Some(&last)) = (rows.first(), rows.last()) {
            let [start, end] = [self.words_of_row(first).start, self.words_of_row(last).end]
                .map(|word| word * size_of::<u32>() as u64);
            self.file.prefetch(start, end - start);
        }
    }

    /// Writes the results of `convert` for all samples to another file in the same directory.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or written.
    pub(crate) fn rewrite(&self, convert: impl Fn(Features) -> Features) -> Result<FeatureWriter, DataError> {
        let mut writer = FeatureWriter::create(&self.directory, &convert(self.format.clone()))?;
        for start in (0..self.rows()).step_by(self.block_rows) {
            let block = start..self.rows().min(start + self.block_rows);
            writer.append(&convert(self.load(block)?))?;
        }
        Ok(writer)
    }

    /// Returns where the words of a row are in the file.
    fn words_of_row(&self, row: u32) -> Range<u64> {
        if let Some(&[start, end]) = self.starts.get(row as usize..row as usize + 2) {
            return start..end;
        }
        let (row, words) = (u64::from(row), self.format.word_count(0) as u64);
        row * words..(row + 1) * words
    }
}

/// Writes the features of samples to a temporary file.
pub(crate) struct FeatureWriter {
    file: StreamFile,
    directory: PathBuf,
    rows: u32,
    /// The same as in [`DiskFeatures`].
    starts: Vec<u64>,
    format: Features,
    /// The number of words of the longest row.
    longest_row: usize,
}

impl FeatureWriter {
    /// Creates a file in `directory`. `format` has the columns of the samples.
    pub(crate) fn create(directory: &Path, format: &Features) -> Result<Self, DataError> {
        let format = format.select(&[]);
        let starts = if matches!(format, Features::Sparse(_)) { vec![0] } else { Vec::new() };
        let longest_row = format.word_count(0);
        let (file, directory) = (StreamFile::create(directory)?, directory.to_owned());
        Ok(Self { file, directory, rows: 0, starts, format, longest_row })
    }

    /// Returns features with the same columns as the samples and without samples.
    pub(crate) fn format(&self) -> &Features {
        &self.format
    }

    /// Returns how many samples have about 1 MiB.
    pub(crate) fn block_rows(&self) -> usize {
        (BLOCK_WORDS / self.longest_row.max(1)).clamp(1, BLOCK_ROWS_MAX)
    }

    /// Adds samples. Sparse rows may have more columns than earlier rows.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub(crate) fn append(&mut self, features: &Features) -> Result<(), DataError> {
        let mut words = Vec::new();
        for row in 0..features.rows() {
            let start = words.len();
            features.append_words(row, &mut words);
            let length = words.len() - start;
            self.longest_row = self.longest_row.max(length);
            if let Some(&end) = self.starts.last() {
                self.starts.push(end + length as u64);
            }
        }
        if let (Features::Sparse(format), Features::Sparse(rows)) = (&mut self.format, features) {
            format.widen(rows.columns());
        }
        self.rows += features.rows() as u32;
        self.file.append(bytemuck::cast_slice(&words)).map(|_| ())
    }

    /// Returns the samples.
    pub(crate) fn finish(self) -> DiskFeatures {
        let block_rows = self.block_rows();
        let Self { file, directory, rows, starts, format, .. } = self;
        let (file, rows) = (Arc::new(file), (0..rows).collect());
        DiskFeatures { file, directory, rows, starts: starts.into(), format, block_rows }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::super::sparse::SparseRowsBuilder;
    use super::*;

    #[test]
    fn samples_from_a_file_equal_samples_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let value = |(row, column)| 10 * row + column;
        let mut sparse = SparseRowsBuilder::default();
        for row in 0..10 {
            (0..row * 5 % 4).for_each(|column| sparse.push(2 * column, row as f32));
            sparse.end_row();
        }
        let pixels = Array2::from_shape_fn((10, 5), |place| value(place) as u8);
        for memory in [
            Features::Numbers(Array2::from_shape_fn((10, 3), |place| value(place) as f32)),
            Features::Pixels { values: pixels, divisor: 255.0 },
            Features::Sparse(sparse.build(7)),
        ] {
            let mut writer = FeatureWriter::create(directory.path(), &memory).unwrap();
            for rows in [&[0, 1, 2, 3][..], &[], &[4, 5, 6, 7, 8, 9]] {
                writer.append(&memory.select(rows)).unwrap();
            }
            let disk = writer.finish();
            assert_eq!((disk.rows(), disk.format().rows()), (10, 0));
            for indices in [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9][..], &[3, 4, 9, 0, 1], &[7, 7, 8], &[]] {
                assert_eq!(disk.load(indices.iter().copied()).unwrap(), memory.select(indices));
            }
            let (chosen, indices) = (&[1, 2, 5, 9][..], &[3, 0, 1][..]);
            let part = disk.select(chosen);
            part.prefetch(1..4);
            part.prefetch(4..4);
            assert_eq!(part.load(indices.iter().copied()).unwrap(), memory.select(chosen).select(indices));
            let copy = part.rewrite(|features| features).unwrap().finish();
            assert_eq!(copy.load(0..4).unwrap(), memory.select(chosen));
            if let Features::Sparse(rows) = &memory {
                assert!((0..10).all(|row| disk.value_count(row) == rows.value_count(row)));
            }
        }
    }
}
