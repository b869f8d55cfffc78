//! A growing sequence of values, in memory or in a temporary file.

use std::sync::Arc;

use bytemuck::Pod;

use super::DataError;
use super::stream_file::StreamFile;

/// The number of values that are written to a file at once.
const CHUNK_VALUES: usize = 4096;

/// A growing sequence of values.
#[derive(Clone, Debug)]
pub(crate) struct ValueStore<T> {
    /// The values that are in memory: the values after the chunks, or all values if there is no file.
    values: Vec<T>,
    chunks: Option<StoredChunks>,
}

/// The values that a file holds. Each chunk has [`CHUNK_VALUES`] values.
#[derive(Clone, Debug)]
struct StoredChunks {
    file: Arc<StreamFile>,
    /// The position of each chunk in the file.
    starts: Vec<u64>,
}

impl<T: Pod> ValueStore<T> {
    /// Creates an empty sequence. If there is a `file`, the sequence keeps at most [`CHUNK_VALUES`] values in memory.
    pub(crate) fn new(file: Option<Arc<StreamFile>>) -> Self {
        Self { values: Vec::new(), chunks: file.map(|file| StoredChunks { file, starts: Vec::new() }) }
    }

    /// Adds a value.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub(crate) fn push(&mut self, value: T) -> Result<(), DataError> {
        self.values.push(value);
        match &mut self.chunks {
            Some(chunks) if self.values.len() == CHUNK_VALUES => {
                chunks.starts.push(chunks.file.append(bytemuck::cast_slice(&self.values))?);
                self.values.clear();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        self.stored_len() + self.values.len()
    }

    /// Returns the number of values that the file holds.
    fn stored_len(&self) -> usize {
        self.chunks.as_ref().map_or(0, |chunks| chunks.starts.len() * CHUNK_VALUES)
    }

    /// Returns a reader of the values. Access is fast if successive indices are close to each other.
    pub(crate) fn reader(&self) -> ValueReader<'_, T> {
        ValueReader { store: self, stored_len: self.stored_len(), chunk: usize::MAX, values: Vec::new() }
    }

    /// Returns a sequence with the results of `convert` for all values, in memory or in the same file as this sequence.
    pub(crate) fn map<U: Pod>(&self, convert: impl Fn(T) -> U) -> Result<ValueStore<U>, DataError> {
        let mut mapped = ValueStore::new(self.chunks.as_ref().map(|chunks| Arc::clone(&chunks.file)));
        let mut reader = self.reader();
        for index in 0..self.len() {
            mapped.push(convert(reader.get(index)?))?;
        }
        Ok(mapped)
    }
}

#[cfg(test)]
impl<T: Pod> From<Vec<T>> for ValueStore<T> {
    fn from(values: Vec<T>) -> Self {
        Self { values, chunks: None }
    }
}

#[cfg(test)]
impl<T: Pod + PartialEq> PartialEq for ValueStore<T> {
    fn eq(&self, other: &Self) -> bool {
        self.to_vec() == other.to_vec()
    }
}

#[cfg(test)]
impl<T: Pod> ValueStore<T> {
    /// Returns all values.
    pub(crate) fn to_vec(&self) -> Vec<T> {
        let mut reader = self.reader();
        (0..self.len()).map(|index| reader.get(index).unwrap()).collect()
    }
}

/// Reads values of a [`ValueStore`], and holds one chunk of the file in memory.
#[derive(Debug)]
pub(crate) struct ValueReader<'a, T> {
    store: &'a ValueStore<T>,
    /// The number of values that the file holds.
    stored_len: usize,
    /// The number of the chunk in `values`. `usize::MAX` if `values` is empty.
    chunk: usize,
    values: Vec<T>,
}

impl<T: Pod> ValueReader<'_, T> {
    /// Returns the value with this index.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    ///
    /// # Panics
    ///
    /// If the index is out of range.
    pub(crate) fn get(&mut self, index: usize) -> Result<T, DataError> {
        if index >= self.stored_len {
            return Ok(self.store.values[index - self.stored_len]);
        }
        let chunk = index / CHUNK_VALUES;
        if chunk != self.chunk {
            self.values.resize(CHUNK_VALUES, T::zeroed());
            if let Some(StoredChunks { file, starts }) = &self.store.chunks {
                file.read_at(bytemuck::cast_slice_mut(&mut self.values), starts[chunk])?;
            }
            self.chunk = chunk;
        }
        Ok(self.values[index % CHUNK_VALUES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_a_file_equal_values_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let file = Arc::new(StreamFile::create(directory.path()).unwrap());
        // The file holds the chunks of two sequences alternately.
        let mut stores = [(); 2].map(|()| ValueStore::<u32>::new(Some(Arc::clone(&file))));
        let count = 3 * CHUNK_VALUES + 5;
        for value in 0..count as u32 {
            stores[0].push(value).unwrap();
            stores[1].push(value ^ 1).unwrap();
        }
        assert!(stores.iter().all(|store| store.values.len() == 5 && store.len() == count));
        assert!(stores[0].to_vec().into_iter().eq(0..count as u32));
        assert_eq!(stores[1], (0..count as u32).map(|value| value ^ 1).collect::<Vec<_>>().into());
        let mut reader = stores[0].reader();
        for index in [count - 1, 0, CHUNK_VALUES, CHUNK_VALUES - 1, 2 * CHUNK_VALUES] {
            assert_eq!(reader.get(index).unwrap(), index as u32);
        }
        let doubled = stores[0].map(|value| f64::from(value) * 2.0).unwrap();
        assert!(doubled.to_vec().into_iter().eq((0..count).map(|value| 2.0 * value as f64)));
    }
}
