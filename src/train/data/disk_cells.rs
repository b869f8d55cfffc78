//! Encoded rows of a table, in memory or in a temporary file.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ndarray::Array2;

use super::stream_file::StreamFile;
use super::{DataError, Features, HeldFeatures};

/// The cells of samples in a temporary file. Each row of the file holds the cells of a sample.
#[derive(Clone, Debug)]
pub(crate) struct DiskCells {
    file: Arc<StreamFile>,
    /// The number of the row of each sample in the file, in ascending order. Shared, because a clone is a view of the
    /// same samples.
    rows: Arc<[u32]>,
    /// Features with the same columns and without samples.
    format: Features,
}

impl DiskCells {
    /// Returns the number of samples.
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns features with the same columns and without samples.
    pub(crate) fn format(&self) -> &Features {
        &self.format
    }

    /// Returns the number of cells of a sample.
    fn columns(&self) -> usize {
        self.format.cells().map_or(0, Array2::ncols)
    }

    /// Returns the samples whose indices are in `chosen`, as a view of the same file. `chosen` must be sorted.
    #[must_use]
    pub(crate) fn select(&self, chosen: &[usize]) -> Self {
        let rows = chosen.iter().map(|&index| self.rows[index]).collect();
        Self { file: Arc::clone(&self.file), rows, format: self.format.clone() }
    }

    /// Reads samples into memory, in the order of `indices`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub(crate) fn load(&self, indices: impl Iterator<Item = usize>) -> Result<Features, DataError> {
        let columns = self.columns();
        let rows: Vec<u32> = indices.map(|index| self.rows[index]).collect();
        let mut cells = Array2::<f32>::zeros((rows.len(), columns));
        let mut rest = cells.as_slice_mut().expect("a new array is contiguous");
        // Adjacent rows are read at once.
        for run in rows.chunk_by(|row, next| row + 1 == *next) {
            let (values, later_values) = rest.split_at_mut(run.len() * columns);
            self.file.read_at(bytemuck::cast_slice_mut(values), self.position(run[0]))?;
            rest = later_values;
        }
        Ok(self.format.with_cells(cells).expect("the format has cells"))
    }

    /// Tells the operating system that the samples `range` will soon be read.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        let rows = &self.rows[range];
        if let (Some(&first), Some(&last)) = (rows.first(), rows.last()) {
            let start = self.position(first);
            self.file.prefetch(start, self.position(last + 1) - start);
        }
    }

    /// Returns the position of a row in the file.
    fn position(&self, row: u32) -> u64 {
        u64::from(row) * (self.columns() * size_of::<f32>()) as u64
    }
}

/// Collects the encoded rows of a table.
pub(crate) struct CellWriter {
    columns: usize,
    /// The number of rows.
    rows: u32,
    /// The cells, if there is no file.
    values: Vec<f32>,
    file: Option<StreamFile>,
}

impl CellWriter {
    /// Starts a table with `columns` columns and at most `capacity` rows. The rows are stored in memory, or in a file in
    /// `stream_directory` if there is one.
    pub(crate) fn new(
        columns: usize,
        capacity: usize,
        stream_directory: Option<&Path>,
    ) -> Result<Self, DataError> {
        let file = stream_directory.map(StreamFile::create).transpose()?;
        let values = Vec::with_capacity(if file.is_some() { 0 } else { capacity * columns });
        Ok(Self { columns, rows: 0, values, file })
    }

    /// Adds rows.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub(crate) fn append(&mut self, cells: &Array2<f32>) -> Result<(), DataError> {
        let cells = cells.as_slice().expect("the caller passes a new array, which is contiguous");
        self.rows += (cells.len() / self.columns.max(1)) as u32;
        if let Some(file) = &self.file {
            file.append(bytemuck::cast_slice(cells))?;
        } else {
            self.values.extend_from_slice(cells);
        }
        Ok(())
    }

    /// Returns the rows as features. `make_features` interprets the cells.
    pub(crate) fn finish(self, make_features: impl FnOnce(Array2<f32>) -> Features) -> HeldFeatures {
        let Self { columns, rows, values, file } = self;
        if let Some(file) = file {
            let format = make_features(Array2::zeros((0, columns)));
            let (file, rows) = (Arc::new(file), (0..rows).collect());
            return HeldFeatures::OnDisk(DiskCells { file, rows, format });
        }
        let cells = Array2::from_shape_vec((rows as usize, columns), values);
        HeldFeatures::InMemory(make_features(cells.expect("`rows` counts the rows of `values`")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_from_a_file_equal_rows_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let write = |stream_directory: Option<&Path>| {
            let mut writer = CellWriter::new(3, 10, stream_directory).unwrap();
            for first in [0, 4] {
                let count = if first == 0 { 4 } else { 6 };
                let value = |(row, column)| (10 * (first + row) + column) as f32;
                writer.append(&Array2::from_shape_fn((count, 3), value)).unwrap();
            }
            writer.finish(Features::Numbers)
        };
        let HeldFeatures::InMemory(memory) = write(None) else { panic!("there is no directory") };
        let HeldFeatures::OnDisk(disk) = write(Some(directory.path())) else {
            panic!("there is a directory")
        };
        assert_eq!((memory.rows(), disk.rows()), (10, 10));
        for indices in [&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9][..], &[3, 4, 9, 0, 1], &[7, 7, 8], &[]] {
            assert_eq!(disk.load(indices.iter().copied()).unwrap(), memory.select(indices));
        }
        let (chosen, indices) = (&[1, 2, 5, 9][..], &[3, 0, 1][..]);
        let part = disk.select(chosen);
        part.prefetch(1..4);
        part.prefetch(4..4);
        assert_eq!(part.load(indices.iter().copied()).unwrap(), memory.select(chosen).select(indices));
    }
}
