//! A set of samples for all ranks. Either each rank holds all samples, or the samples are divided among the ranks.

use std::ops::Range;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::disk_features::{BLOCK_WORDS, FeatureWriter};
use super::exact_sum::{self, ExactSum};
use super::row_map::RowMap;
use super::{DataError, Features, HeldSamples, Samples, Targets};
use crate::group::verbs::AllGather;
use crate::group::{Error, Group};
use crate::train::batches::range_of_rank;
use crate::train::early_stopping::hold_out_rows;
use crate::train::rank_checks::check_all_succeeded;
use crate::train::{RunPhase, TrainError};
use crate::types::{Rank, ReduceOp, WorldSize};

/// A training set, a validation set or a test set that all ranks use.
#[derive(Clone, Debug)]
pub(crate) struct SharedSamples {
    /// The samples that this rank holds.
    pub(crate) held: HeldSamples,
    /// Which rank holds which samples. `None` if each rank holds all samples.
    row_map: Option<RowMap>,
    /// Statistics of the targets. All fields are 0 or empty until [`measure_targets`](Self::measure_targets) is called.
    pub(crate) statistics: TargetStatistics,
}

/// Statistics of the targets of all samples on all ranks.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct TargetStatistics {
    /// The mean of the targets. 0 if the targets are classes.
    pub(crate) mean: f64,
    /// The sum of the squared differences between the targets and their mean. R² compares the squared errors of a
    /// model with this sum. 0 if the targets are classes.
    pub(crate) sum_of_squares: f64,
    /// The number of samples of each class, or how often each token of a text is a target. Empty for numbers.
    pub(crate) class_counts: Vec<u64>,
}

impl SharedSamples {
    /// Creates a set. `held` are the samples of this rank, and `row_map` says which rank holds which samples. If `row_map`
    /// is `None`, each rank passes all samples.
    pub(crate) fn new(held: HeldSamples, row_map: Option<RowMap>) -> Self {
        let row_map = row_map.filter(RowMap::has_several_ranks);
        Self { held, row_map, statistics: TargetStatistics::default() }
    }

    /// Creates a set whose samples are the same on all ranks, and in memory: each rank passes all samples.
    pub(crate) fn held_by_each_rank(samples: Samples) -> Self {
        Self::new(HeldSamples::InMemory(samples), None)
    }

    /// Returns the number of samples of all ranks together.
    pub(crate) fn len(&self) -> usize {
        self.row_map.as_ref().map_or(self.held.len(), RowMap::rows)
    }

    /// Returns whether the set has no samples.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of features.
    pub(crate) fn columns(&self) -> usize {
        self.held.feature_format().columns()
    }

    /// Returns the number of bytes that the features of all ranks together need in memory.
    pub(crate) fn feature_bytes(&self) -> usize {
        let bytes_of_rows = |bytes_per_row: usize| self.len().saturating_mul(bytes_per_row);
        match self.held.feature_format() {
            Features::Numbers(cells) | Features::Encoded { cells, .. } => {
                bytes_of_rows(cells.ncols() * size_of::<f32>())
            }
            Features::Pixels { values, .. } => bytes_of_rows(values.ncols()),
            Features::Sparse(_) => {
                let held = || self.held.stored_value_count();
                2 * size_of::<f32>() * self.row_map.as_ref().map_or_else(held, RowMap::total_value_count)
            }
            Features::Tokens(windows) => bytes_of_rows(windows.context() * size_of::<u16>()),
        }
    }

    /// Returns the mean number of words in which ranks send a sample, rounded up. Returns 0 if each rank holds all samples
    /// in memory.
    pub(crate) fn mean_words_per_sample(&self) -> usize {
        match &self.row_map {
            Some(rows) => self.held.words_per_sample(rows.total_value_count().div_ceil(rows.rows().max(1))),
            None if self.held.in_memory().is_none() => {
                self.held.words_per_sample(self.held.stored_value_count().div_ceil(self.len().max(1)))
            }
            None => 0,
        }
    }

    /// Returns which rank holds which samples. Returns `None` if each rank holds all samples.
    pub(crate) fn row_map(&self) -> Option<&RowMap> {
        self.row_map.as_ref()
    }

    /// Returns this rank's part of the samples, as indices into [`held`](Self::held). Each sample is in the part of
    /// exactly one rank.
    pub(crate) fn own_part(&self, rank: Rank, size: WorldSize) -> Range<usize> {
        match &self.row_map {
            None => range_of_rank(self.held.len(), rank, size),
            Some(_) => 0..self.held.len(),
        }
    }

    /// Returns the number of samples in the largest [`own_part`](Self::own_part) of any rank.
    pub(crate) fn longest_part(&self, size: WorldSize) -> usize {
        match &self.row_map {
            None => range_of_rank(self.held.len(), Rank::ZERO, size).len(),
            Some(rows) => rows.row_counts_of_ranks().into_iter().max().unwrap_or_default(),
        }
    }

    /// Gathers the samples of all ranks, so that each rank holds all samples: in memory, or in a temporary file in
    /// `stream_directory` if there is one. `class_count` is the number of classes, or the number of tokens in the vocabulary of a
    /// text. All ranks must call this function.
    pub(crate) fn gather_on_all_ranks(
        self,
        class_count: usize,
        (stream_directory, group): (Option<&Path>, &mut Group),
    ) -> Result<Self, TrainError> {
        match (&self.row_map, stream_directory) {
            (None, Some(_)) => Ok(self),
            (None, None) => {
                let loaded = self.held.into_memory().map_err(TrainError::from);
                Ok(Self::held_by_each_rank(check_all_succeeded(group, RunPhase::Data, loaded)?))
            }
            (Some(rows), None) => {
                Ok(Self::held_by_each_rank(self.gather_rows(0..rows.rows(), class_count, group)?))
            }
            (Some(rows), Some(directory)) => {
                let format = self.held.feature_format();
                let writer = FeatureWriter::create(directory, format).map_err(TrainError::from);
                let mut writer = check_all_succeeded(group, RunPhase::Data, writer)?;
                let mut targets = self.held.targets().select(&[], writer.format());
                let block_rows = (BLOCK_WORDS / self.mean_words_per_sample().max(1)).max(1);
                for start in (0..rows.rows()).step_by(block_rows) {
                    let block = start..rows.rows().min(start + block_rows);
                    let samples = self.gather_rows(block, class_count, group)?;
                    let written = writer.append(&samples.features).map_err(TrainError::from);
                    check_all_succeeded(group, RunPhase::Data, written)?;
                    targets.append(samples.targets);
                }
                Ok(Self::new(HeldSamples::OnDisk(writer.finish(), targets), None))
            }
        }
    }

    /// Returns the samples with the numbers in `range`, which are divided among the ranks. All ranks must call this function.
    fn gather_rows(
        &self,
        range: Range<usize>,
        class_count: usize,
        group: &mut Group,
    ) -> Result<Samples, TrainError> {
        let rows = self.row_map.as_ref().expect("the samples are divided among the ranks");
        let held: Vec<usize> = rows.indices_of_held_range(range.clone()).collect();
        let words = self.held.words_of(&held).map_err(TrainError::from);
        let words = check_all_succeeded(group, RunPhase::Data, words)?;
        let mut rows_of_ranks = vec![Vec::new(); group.size().as_usize()];
        range.clone().for_each(|row| rows_of_ranks[rows.holder_and_index(row).0].push(row));
        let words_of_row = |&row: &usize| self.held.words_per_sample(rows.value_count(row));
        let word_counts: Vec<usize> =
            rows_of_ranks.iter().map(|rows| rows.iter().map(words_of_row).sum()).collect();
        let words = group.call(AllGather::new().counts(&word_counts)).run_from(&words)?;
        let order = rows_of_ranks.concat();
        let value_counts = order.iter().map(|&row| rows.value_count(row));
        let mut samples = self.held.samples_from_words(&words, value_counts);
        samples.check_received_samples(class_count, group)?;
        if !order.is_sorted() {
            let mut positions = vec![0; order.len()];
            order.iter().enumerate().for_each(|(position, &row)| positions[row - range.start] = position);
            samples = samples.select(&positions);
        }
        Ok(samples)
    }

    /// Moves a part of the samples out of the set, and returns this part. `fraction` is the size of the part relative
    /// to the set. A shuffle with a fixed seed chooses the samples. Both sets keep the order of the samples.
    ///
    /// # Errors
    ///
    /// If either set would be empty.
    pub(crate) fn hold_out(&mut self, fraction: f64) -> Result<Self, DataError> {
        let (training, validation) = hold_out_rows(self.len(), fraction)?;
        let held_out = self.select(&validation);
        *self = self.select(&training);
        Ok(held_out)
    }

    /// Returns a set with the samples whose numbers are in `chosen`. The samples of all ranks are numbered from 0.
    /// `chosen` must be sorted.
    fn select(&self, chosen: &[usize]) -> Self {
        match &self.row_map {
            None => Self::new(self.held.select(chosen), None),
            Some(rows) => Self::new(
                self.held.select(&rows.indices_of_held_rows(chosen)),
                Some(rows.restrict_to_rows(chosen)),
            ),
        }
    }

    /// Computes the statistics of the targets. `class_count` is the number of classes, or the number of tokens in the
    /// vocabulary of a text. All ranks must call this function.
    pub(crate) fn measure_targets(
        &mut self,
        class_count: usize,
        group: &mut Group,
    ) -> Result<(), TrainError> {
        let part = self.own_part(group.rank(), group.size());
        self.statistics = match self.held.targets() {
            Targets::Numbers(values) => {
                let count = self.len().max(1) as f64;
                let mean = sum_over_ranks(values[part.clone()].iter().copied(), group)? / count;
                let squares = values[part].iter().map(|value| (value - mean).powi(2));
                TargetStatistics {
                    mean,
                    sum_of_squares: sum_over_ranks(squares, group)?,
                    class_counts: Vec::new(),
                }
            }
            Targets::Classes(classes) => {
                let mut class_counts = vec![0; class_count];
                for &class in &classes[part] {
                    class_counts[class as usize] += 1;
                }
                group.all_reduce(&mut class_counts, ReduceOp::Sum)?;
                TargetStatistics { class_counts, ..TargetStatistics::default() }
            }
            Targets::NextTokens(_) => {
                let mut class_counts = vec![0; class_count];
                let counted = self.held.visit_blocks(part, |samples, block| {
                    let Targets::NextTokens(windows) = &samples.targets else { return };
                    for &token in block.flat_map(|window| windows.next_tokens(window)) {
                        class_counts[usize::from(token)] += 1;
                    }
                });
                check_all_succeeded(group, RunPhase::Data, counted.map_err(TrainError::from))?;
                group.all_reduce(&mut class_counts, ReduceOp::Sum)?;
                TargetStatistics { class_counts, ..TargetStatistics::default() }
            }
        };
        Ok(())
    }

    /// Adds the shape and the content of the set to a digest. Each sample is hashed together with its number. The first
    /// two 64-bit words of these hashes are summed modulo 2^64, and the digest contains the two sums. Therefore the
    /// digest does not depend on which rank holds which samples.
    pub(crate) fn digest(&self, hasher: &mut Sha256, group: &mut Group) -> Result<(), TrainError> {
        let mut sums = [0_u64; 2];
        let mut numbers: Box<dyn Iterator<Item = usize>> = match &self.row_map {
            None => Box::new(0..self.held.len()),
            Some(rows) => Box::new(rows.held_rows()),
        };
        let visited = self.held.visit_blocks(0..self.held.len(), |samples, block| {
            for (index, number) in block.zip(&mut numbers) {
                let mut row = Sha256::new();
                row.update((number as u64).to_le_bytes());
                samples.features.digest_row(index, &mut row);
                samples.targets.digest_row(index, &mut row);
                let digest: [u8; 32] = row.finalize().into();
                for (sum, part) in sums.iter_mut().zip(digest.as_chunks().0) {
                    *sum = sum.wrapping_add(u64::from_le_bytes(*part));
                }
            }
        });
        check_all_succeeded(group, RunPhase::Data, visited.map_err(TrainError::from))?;
        if self.row_map.is_some() {
            group.all_reduce(&mut sums, ReduceOp::Sum)?;
        }
        hasher.update((self.len() as u64).to_le_bytes());
        self.held.feature_format().digest_format(hasher);
        hasher.update(sums.map(u64::to_le_bytes).as_flattened());
        Ok(())
    }
}

/// Returns the sum of the values of all ranks. If a value is infinite, the sum is infinite.
fn sum_over_ranks(values: impl Iterator<Item = f64>, group: &mut Group) -> Result<f64, Error> {
    let mut sum = [ExactSum::ZERO];
    for value in values {
        sum[0].add(value);
    }
    exact_sum::add_sums_of_ranks(group, &mut sum)?;
    Ok(sum[0].value())
}

impl Samples {
    /// Checks samples that other ranks have sent: each class and each token must be below `class_count`, and the features
    /// must be valid; see [`Features::are_valid`].
    pub(crate) fn check_received_samples(&self, class_count: usize, group: &Group) -> Result<(), TrainError> {
        let has_valid_classes = match &self.targets {
            Targets::Numbers(_) => true,
            Targets::Classes(classes) => classes.iter().all(|&class| (class as usize) < class_count),
            Targets::NextTokens(windows) => windows.are_in_vocabulary(class_count),
        };
        if has_valid_classes && self.features.are_valid() {
            return Ok(());
        }
        let message = "another rank sent a sample with a class or a feature that does not exist: the memory of a host or \
                       the network corrupted a value; start the job again without --no-checksum";
        // `abort` fails if another rank has already aborted the job. Even then, this rank returns its own message.
        let _ = group.abort(message);
        Err(DataError::Unsuitable(message.into()).into())
    }
}
