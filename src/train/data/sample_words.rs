//! Converts samples to 32-bit words, which ranks exchange and which temporary files hold.
//!
//! The words of a sample are its features and then its target. A number or a cell is one word, four pixels are one
//! word, and a stored value of a sparse row is two words: its column and its value. A target is one word (a class) or
//! two words (a number). Two tokens are one word. The tokens of a window of a text are followed by the next token, so the
//! window needs no words for its target.

use ndarray::Array2;

use super::sparse::SparseRowsBuilder;
use super::{DataError, Features, HeldSamples, Samples, Targets, TokenWindows};

impl Features {
    /// Returns the number of words of the features of a sample. `value_count` is the number of stored values if the sample
    /// is a sparse row, and otherwise has no effect.
    pub(super) fn word_count(&self, value_count: usize) -> usize {
        match self {
            Self::Numbers(cells) | Self::Encoded { cells, .. } => cells.ncols(),
            Self::Pixels { values, .. } => values.ncols().div_ceil(size_of::<u32>()),
            Self::Sparse(_) => 2 * value_count,
            Self::Tokens(windows) => (windows.context() + 1).div_ceil(2),
        }
    }

    /// Appends the words of the features of a sample to `words`.
    pub(super) fn append_words(&self, index: usize, words: &mut Vec<u32>) {
        match self {
            Self::Numbers(cells) | Self::Encoded { cells, .. } => {
                words.extend(cells.row(index).iter().map(|cell| cell.to_bits()));
            }
            Self::Pixels { values, .. } => {
                let start = words.len();
                words.resize(start + values.ncols().div_ceil(size_of::<u32>()), 0);
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words[start..]);
                bytes.iter_mut().zip(values.row(index)).for_each(|(to, &from)| *to = from);
            }
            Self::Sparse(rows) => {
                words.extend(rows.row(index).flat_map(|(column, value)| [column as u32, value.to_bits()]));
            }
            Self::Tokens(windows) => {
                let pairs = windows.tokens_and_next(index).chunks(2);
                let high = |pair: &[u16]| pair.get(1).map_or(0, |&token| u32::from(token) << 16);
                words.extend(pairs.map(|pair| u32::from(pair[0]) | high(pair)));
            }
        }
    }
}

impl HeldSamples {
    /// Returns the number of words of a sample. `value_count` is that of [`Features::word_count`].
    pub(crate) fn words_per_sample(&self, value_count: usize) -> usize {
        self.feature_format().word_count(value_count) + self.target_words()
    }

    fn target_words(&self) -> usize {
        match self.targets() {
            Targets::Numbers(_) => 2,
            Targets::Classes(_) => 1,
            Targets::NextTokens(_) => 0,
        }
    }

    /// Returns the words of the samples with these indices.
    ///
    /// # Errors
    ///
    /// If the samples cannot be read from their file.
    pub(crate) fn words_of(&self, indices: &[usize]) -> Result<Vec<u32>, DataError> {
        let mut words = Vec::with_capacity(indices.len() * self.words_per_sample(0));
        match self {
            Self::InMemory(samples) => {
                for &index in indices {
                    samples.features.append_words(index, &mut words);
                    append_target(&samples.targets, index, &mut words);
                }
            }
            Self::OnDisk(features, targets) => {
                let (stored, lengths) = features.read_words(indices.iter().copied())?;
                let mut rest = stored.as_slice();
                for (&index, length) in indices.iter().zip(lengths) {
                    let (row, later) = rest.split_at(length);
                    words.extend_from_slice(row);
                    append_target(targets, index, &mut words);
                    rest = later;
                }
            }
        }
        Ok(words)
    }

    /// Returns samples in the same format as these samples, from the words of [`words_of`](Self::words_of).
    /// `value_counts` has an entry for each sample; see [`words_per_sample`](Self::words_per_sample).
    ///
    /// # Panics
    ///
    /// If there are fewer words than the samples have. The caller received as many words as it computed from
    /// `value_counts`.
    pub(crate) fn samples_from_words(
        &self,
        words: &[u32],
        value_counts: impl Iterator<Item = usize>,
    ) -> Samples {
        let target_words = self.target_words();
        let mut rest = words;
        let samples: Vec<(&[u32], &[u32])> = value_counts
            .map(|count| {
                let (sample, later) = rest.split_at(self.words_per_sample(count));
                rest = later;
                sample.split_at(sample.len() - target_words)
            })
            .collect();
        let rows = samples.iter().map(|(features, _)| *features);
        let features = features_from_words(self.feature_format(), rows);
        let targets = samples.iter().map(|(_, target)| *target);
        let targets = match (self.targets(), &features) {
            (_, Features::Tokens(windows)) => Targets::NextTokens(windows.clone()),
            (Targets::Numbers(_), _) => {
                let number =
                    |halves: &[u32]| f64::from_bits(u64::from(halves[1]) << 32 | u64::from(halves[0]));
                Targets::Numbers(targets.map(number).collect())
            }
            (Targets::Classes(_), _) => Targets::Classes(targets.map(|class| class[0]).collect()),
            (Targets::NextTokens(_), _) => unreachable!("only samples of a text have next tokens"),
        };
        Samples { features, targets }
    }
}

/// Appends the words of a target to `words`.
fn append_target(targets: &Targets, index: usize, words: &mut Vec<u32>) {
    match targets {
        Targets::Numbers(values) => {
            let bits = values[index].to_bits();
            words.extend([bits as u32, (bits >> 32) as u32]);
        }
        Targets::Classes(classes) => words.push(classes[index]),
        Targets::NextTokens(_) => {}
    }
}

/// Returns features in the format `format`. Each entry of `rows` holds the words of the features of a sample.
pub(super) fn features_from_words<'a>(
    format: &Features,
    rows: impl ExactSizeIterator<Item = &'a [u32]>,
) -> Features {
    let count = rows.len();
    match format {
        Features::Numbers(cells) | Features::Encoded { cells, .. } => {
            let values = rows.flatten().map(|&bits| f32::from_bits(bits)).collect();
            let cells = Array2::from_shape_vec((count, cells.ncols()), values);
            let cells = cells.expect("each sample has a word for each cell");
            format.with_cells(cells).expect("the format has cells")
        }
        Features::Pixels { values, divisor } => {
            let columns = values.ncols();
            let mut bytes = Vec::with_capacity(count * columns);
            rows.for_each(|row| bytes.extend_from_slice(&bytemuck::cast_slice::<u32, u8>(row)[..columns]));
            let values = Array2::from_shape_vec((count, columns), bytes);
            Features::Pixels { values: values.expect("each sample has its pixels"), divisor: *divisor }
        }
        Features::Sparse(format) => {
            let mut builder = SparseRowsBuilder::default();
            for row in rows {
                for &[column, bits] in row.as_chunks().0 {
                    builder.push(column, f32::from_bits(bits));
                }
                builder.end_row();
            }
            Features::Sparse(builder.build(format.columns()))
        }
        Features::Tokens(windows) => {
            let context = windows.context();
            let mut tokens = Vec::with_capacity(count * (context + 1));
            for row in rows {
                let halves = row.iter().flat_map(|&word| [word as u16, (word >> 16) as u16]);
                tokens.extend(halves.take(context + 1));
            }
            Features::Tokens(TokenWindows::from_separate_windows(tokens, context))
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;

    #[test]
    fn the_words_of_samples_give_the_same_samples() {
        let mut sparse = SparseRowsBuilder::default();
        for row in [&[(0, 1.5), (6, -2.0)][..], &[], &[(3, 4.0)]] {
            for &(column, value) in row {
                sparse.push(column, value);
            }
            sparse.end_row();
        }
        let numbers = Targets::Numbers(vec![0.1, -1e300, 7.0]);
        let classes = Targets::Classes(vec![2, 0, 1]);
        let windows = TokenWindows::new(vec![7, u16::MAX, 0, 1, 2, 3, 4], 2);
        let tokens = Features::Tokens(windows.clone());
        let pixels = array![[1, 2, 3, 4, 5], [255, 0, 254, 0, 253], [9, 8, 7, 6, 5]];
        for (features, targets, value_counts, word_count) in [
            (Features::Numbers(array![[0.5, -0.0], [1e-40, 2.0], [3.0, 4.0]]), numbers.clone(), [0; 3], 12),
            (Features::Pixels { values: pixels, divisor: 255.0 }, classes, [0; 3], 9),
            (Features::Sparse(sparse.build(7)), numbers, [2, 0, 1], 12),
            (tokens, Targets::NextTokens(windows), [0; 3], 6),
        ] {
            let samples = Samples { features, targets };
            let held = HeldSamples::InMemory(samples.clone());
            let words = held.words_of(&[0, 1, 2]).unwrap();
            assert_eq!(words.len(), word_count);
            assert_eq!(held.samples_from_words(&words, value_counts.into_iter()), samples);
            // A rank without samples has the format of the samples too.
            let empty = held.select(&[]);
            assert_eq!(empty.samples_from_words(&words, value_counts.into_iter()), samples);
            let swapped = held.words_of(&[2, 0]).unwrap();
            let counts = [value_counts[2], value_counts[0]];
            assert_eq!(
                HeldSamples::InMemory(held.samples_from_words(&swapped, counts.into_iter())).in_memory(),
                held.select(&[2, 0]).in_memory()
            );
        }
    }
}
