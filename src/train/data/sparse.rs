//! Sparse features of samples: only values other than 0 are stored.

/// Rows of numbers. Only values other than 0 are stored.
#[derive(Clone, PartialEq, Debug)]
pub struct SparseRows {
    /// The number of columns.
    columns: usize,
    /// The values of row i are `values[starts[i]..starts[i + 1]]`.
    starts: Vec<usize>,
    /// The column of each value.
    indices: Vec<u32>,
    /// The stored values, row by row.
    values: Vec<f32>,
}

impl SparseRows {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the number of stored values.
    pub fn stored_value_count(&self) -> usize {
        self.values.len()
    }

    /// Returns the number of stored values of a row.
    ///
    /// # Panics
    ///
    /// If `row` is out of range.
    pub(crate) fn value_count(&self, row: usize) -> usize {
        self.starts[row + 1] - self.starts[row]
    }

    /// Returns whether each stored value is in one of the columns.
    pub(crate) fn has_valid_columns(&self) -> bool {
        self.indices.iter().all(|&index| (index as usize) < self.columns)
    }

    /// Returns the column and the value of each stored element of a row.
    ///
    /// # Panics
    ///
    /// If `row` is out of range.
    pub fn row(&self, row: usize) -> impl Iterator<Item = (usize, f32)> + '_ {
        let range = self.starts[row]..self.starts[row + 1];
        self.indices[range.clone()]
            .iter()
            .map(|&index| index as usize)
            .zip(self.values[range].iter().copied())
    }

    /// Returns a copy of the rows whose indices are in `rows`.
    ///
    /// # Panics
    ///
    /// If an index in `rows` is out of range.
    #[must_use]
    pub fn select(&self, rows: &[usize]) -> Self {
        let mut selected = SparseRowsBuilder::default();
        for &row in rows {
            self.row(row).for_each(|(column, value)| selected.push(column as u32, value));
            selected.end_row();
        }
        selected.build(self.columns)
    }

    /// Increases the number of columns to `columns`. The values in added columns are 0. If the rows already have more
    /// columns, changes nothing and returns `false`.
    pub(crate) fn widen(&mut self, columns: usize) -> bool {
        let fits = self.columns <= columns;
        if fits {
            self.columns = columns;
        }
        fits
    }
}

/// Collects rows, value by value. The fields have the same meaning as in [`SparseRows`].
#[derive(Debug)]
pub(crate) struct SparseRowsBuilder {
    starts: Vec<usize>,
    indices: Vec<u32>,
    values: Vec<f32>,
}

impl Default for SparseRowsBuilder {
    fn default() -> Self {
        Self { starts: vec![0], indices: Vec::new(), values: Vec::new() }
    }
}

impl SparseRowsBuilder {
    /// Adds a value to the current row. Does not store a value of 0.
    pub(crate) fn push(&mut self, column: u32, value: f32) {
        if value != 0.0 {
            self.indices.push(column);
            self.values.push(value);
        }
    }

    /// Ends the current row.
    pub(crate) fn end_row(&mut self) {
        self.starts.push(self.values.len());
    }

    /// Returns the number of stored values.
    pub(crate) fn stored_value_count(&self) -> usize {
        self.values.len()
    }

    /// Returns the collected rows with `columns` columns. Each index of a column must be below `columns`.
    pub(crate) fn build(self, columns: usize) -> SparseRows {
        let Self { starts, indices, values } = self;
        SparseRows { columns, starts, indices, values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_selected_and_columns_are_added() {
        let mut builder = SparseRowsBuilder::default();
        for row in [&[(0, 1.0), (3, 2.0)][..], &[], &[(1, 0.0), (2, -1.0)]] {
            for &(column, value) in row {
                builder.push(column, value);
            }
            builder.end_row();
        }
        let mut rows = builder.build(4);
        assert_eq!((rows.rows(), rows.columns(), rows.stored_value_count()), (3, 4, 3));
        let selected = rows.select(&[2, 0, 2]);
        let found: Vec<Vec<_>> = (0..3).map(|row| selected.row(row).collect()).collect();
        assert_eq!(found, [vec![(2, -1.0)], vec![(0, 1.0), (3, 2.0)], vec![(2, -1.0)]]);
        assert!(rows.widen(6) && rows.columns() == 6);
        assert!(!rows.widen(5) && rows.columns() == 6);
    }
}
