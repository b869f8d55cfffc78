//! Sends samples to the ranks that process these samples in later steps.
//!
//! Batches are drawn from the whole training set, so a rank holds only some of the samples that it processes. The
//! steps of an epoch are divided into windows. For each window, the ranks exchange the samples of all steps of the
//! window with one all-to-all. While the ranks take the steps of a window, they already exchange the samples of the
//! next window. A rank that holds all samples in a file reads the samples of a window from the file.

use std::ops::{Range, RangeInclusive};

use super::TrainError;
use super::batches::Batches;
use super::data::{RowMap, Samples, SharedSamples};
use super::logical_shards::{LogicalShards, part_of_batch};
use super::partition::PartPlace;
use super::rank_checks::abort_if_failed;
use super::window_prefetch::WindowPrefetch;
use crate::group::verbs::AllToAll;
use crate::group::{Group, Handle};
use crate::types::{Rank, WorldSize};

/// The smallest and the largest size in bytes of the samples that a rank processes in a window, if a step is not larger.
const WINDOW_BYTES: RangeInclusive<usize> = 1 << 16..=1 << 20;
/// The number of windows in an epoch, if it does not lead to smaller or larger windows. The ranks wait for the first window of an
/// epoch without doing other work, so this window is only a small part of the epoch.
const WINDOWS_PER_EPOCH: usize = 8;

/// The samples that this rank processes in a step.
pub(crate) struct LocalBatch<'a> {
    /// The samples of all steps of the current window (see the module), or all samples of this rank if the ranks do not
    /// exchange samples.
    pub(crate) samples: &'a Samples,
    /// The positions in `samples` of the samples of this step.
    pub(crate) indices: &'a [u32],
    /// The row numbers of the same samples in the training set.
    pub(crate) row_numbers: &'a [u32],
    /// The number of samples of all ranks together in this step.
    pub(crate) batch_len: usize,
}

/// The batches of an epoch, and the samples that this rank has received or is receiving.
pub(crate) struct BatchExchange<'a> {
    /// The training set. Each rank may hold only a part of its samples.
    train: &'a SharedSamples,
    pub(crate) batches: Batches,
    /// Says which part of each batch this rank processes.
    place: PartPlace,
    /// The shards of a run with `--reproducible`.
    shards: Option<LogicalShards>,
    /// The indices of the samples that this rank holds, if the epoch is a single batch and `shards` is `None`. In
    /// such an epoch, each rank processes the samples that it holds, and the ranks exchange no samples. In all other
    /// epochs, this vector is empty.
    held_indices: Vec<u32>,
    /// The row numbers of the samples in `held_indices`.
    held_row_numbers: Vec<u32>,
    /// The window of the current step, if the ranks exchange samples.
    window: Option<ReceivedWindow>,
    /// The window after `window`.
    next_window: Option<PendingWindow>,
    prefetch: WindowPrefetch,
    /// The result of [`SharedSamples::mean_words_per_sample`].
    words_per_sample: usize,
}

/// The samples that this rank processes in consecutive steps.
pub(crate) struct ReceivedWindow {
    /// The steps of the epoch that belong to the window.
    steps: Range<usize>,
    samples: Samples,
    /// The positions in `samples` of the samples of all steps.
    indices: Vec<u32>,
    /// For each step, the end of the step's range in `indices`.
    step_ends: Vec<usize>,
}

/// A window whose samples this rank has not received yet.
struct PendingWindow {
    /// The steps of the epoch that belong to the window.
    steps: Range<usize>,
    /// The words of the samples that this rank receives.
    words: Handle<Vec<u32>>,
    /// For each rank, the row numbers of the samples that this rank receives from it.
    rows_from_rank: Vec<Vec<u32>>,
}

impl<'a> BatchExchange<'a> {
    /// All ranks must pass the same batches and shards. `place` says which part of each batch this rank processes.
    /// `whole_batch` is the result of [`into_whole_batch`](Self::into_whole_batch) of the previous epoch.
    pub(crate) fn new(
        train: &'a SharedSamples,
        batches: Batches,
        (place, shards): (PartPlace, Option<LogicalShards>),
        whole_batch: Option<ReceivedWindow>,
    ) -> Self {
        let mut held_row_numbers = Vec::new();
        if let (1, Some(rows), None) = (batches.count(), train.row_map(), shards) {
            held_row_numbers = rows.held_rows().map(|row| row as u32).collect();
        }
        let held_indices = (0..held_row_numbers.len() as u32).collect();
        Self {
            train,
            batches,
            place,
            shards,
            held_indices,
            held_row_numbers,
            window: whole_batch,
            next_window: None,
            prefetch: WindowPrefetch::default(),
            words_per_sample: train.mean_words_per_sample(),
        }
    }

    /// Returns the received samples if each epoch is a single batch. This rank then processes the same samples in
    /// each epoch, so the ranks need not exchange them again.
    pub(crate) fn into_whole_batch(self) -> Option<ReceivedWindow> {
        self.window.filter(|_| self.batches.count() == 1)
    }

    /// Returns which rank holds which samples. Returns `None` if the ranks need not exchange samples.
    fn row_map(&self) -> Option<&'a RowMap> {
        self.train.row_map().filter(|_| self.batches.count() > 1 || self.shards.is_some())
    }

    /// Returns this rank's samples of batch `index`. The first call may pass any index, and each later call must pass
    /// the next index. All ranks must call this function with the same indices.
    pub(crate) fn local_batch(
        &mut self,
        group: &mut Group,
        index: usize,
    ) -> Result<LocalBatch<'_>, TrainError> {
        self.prefetch.prefetch(self.train, &self.batches, index);
        if self.row_map().is_some() {
            self.advance_window(group, index)?;
        } else if self.train.held.in_memory().is_none() {
            self.load_window(group, index)?;
        }
        let train = self.train;
        let held = || train.held.in_memory().expect("samples in a file are loaded into a window");
        let batch = self.batches.batch(index);
        let batch_len = batch.len();
        let part = part_of_batch(batch_len, (self.place.replica, self.place.replicas), self.shards);
        let own_rows = &batch[part];
        Ok(match &self.window {
            Some(ReceivedWindow { steps, samples, indices, step_ends }) => {
                let step = index - steps.start;
                let start = if step == 0 { 0 } else { step_ends[step - 1] };
                LocalBatch {
                    samples,
                    indices: &indices[start..step_ends[step]],
                    row_numbers: own_rows,
                    batch_len,
                }
            }
            None if train.row_map().is_some() => LocalBatch {
                samples: held(),
                indices: &self.held_indices,
                row_numbers: &self.held_row_numbers,
                batch_len,
            },
            None => LocalBatch { samples: held(), indices: own_rows, row_numbers: own_rows, batch_len },
        })
    }

    /// Reads the samples of the window that begins with batch `index` from the file of this rank, which holds all samples.
    /// Does nothing if the current window contains the batch.
    fn load_window(&mut self, group: &Group, index: usize) -> Result<(), TrainError> {
        if self.window.as_ref().is_some_and(|window| window.steps.contains(&index)) {
            return Ok(());
        }
        self.window = None;
        let PartPlace { replica, replicas, .. } = self.place;
        let steps = self.steps_of_window(index, replicas);
        let (mut rows, mut step_ends) = (Vec::new(), Vec::new());
        for step in steps.clone() {
            rows.extend(
                self.row_numbers_of_rank(&(step..step + 1), (replica, replicas)).map(|row| row as usize),
            );
            step_ends.push(rows.len());
        }
        let samples = abort_if_failed(group, self.train.held.load(&rows))?;
        self.window =
            Some(ReceivedWindow { steps, samples, indices: (0..rows.len() as u32).collect(), step_ends });
        Ok(())
    }

    /// Returns the steps of the window that begins with batch `first_batch`. `ranks` is the number of ranks that divide a
    /// batch.
    fn steps_of_window(&self, first_batch: usize, ranks: WorldSize) -> Range<usize> {
        let samples_per_step = self.batches.batch(0).len().div_ceil(ranks.as_usize());
        let bytes_per_step = samples_per_step * self.words_per_sample * size_of::<u32>();
        let batch_count = self.batches.count();
        let window_bytes = (batch_count * bytes_per_step / WINDOWS_PER_EPOCH)
            .clamp(*WINDOW_BYTES.start(), *WINDOW_BYTES.end());
        first_batch..batch_count.min(first_batch + (window_bytes / bytes_per_step).max(1))
    }

    /// Waits for the samples of the window that contains batch `index`, and then starts to exchange the samples of
    /// the next window. Does nothing if this rank has already received the window.
    fn advance_window(&mut self, group: &mut Group, index: usize) -> Result<(), TrainError> {
        if self.window.as_ref().is_some_and(|window| window.steps.contains(&index)) {
            return Ok(());
        }
        // The samples of the old window are freed before the new samples arrive.
        self.window = None;
        let pending = match self.next_window.take() {
            Some(pending) => Some(pending),
            None => self.start_window_exchange(group, index)?,
        };
        if let Some(pending) = pending {
            let end = pending.steps.end;
            self.window = Some(self.receive_window(group, pending)?);
            self.next_window = self.start_window_exchange(group, end)?;
        }
        Ok(())
    }

    /// Starts to exchange the samples of the window that begins with batch `first_batch`. Returns `None` if `first_batch`
    /// is beyond the last batch.
    fn start_window_exchange(
        &self,
        group: &mut Group,
        first_batch: usize,
    ) -> Result<Option<PendingWindow>, TrainError> {
        let count = self.batches.count();
        let Some(rows) = self.row_map().filter(|_| first_batch < count) else { return Ok(None) };
        let size = group.size();
        let steps = self.steps_of_window(first_batch, size);
        let words_of_row = |row: u32| self.train.held.words_per_sample(rows.value_count(row as usize));
        let mut sent_words = Vec::with_capacity(size.as_usize());
        let mut rows_from_rank = vec![Vec::new(); size.as_usize()];
        let mut sent_samples = Vec::new();
        for receiver in size.ranks() {
            let mut words = 0;
            for row in self.row_numbers_of_rank(&steps, (receiver, size)) {
                let (holder, index) = rows.holder_and_index(row as usize);
                if holder == group.rank().index() {
                    sent_samples.push(index);
                    words += words_of_row(row);
                }
                if receiver == group.rank() {
                    rows_from_rank[holder].push(row);
                }
            }
            sent_words.push(words);
        }
        let words = abort_if_failed(group, self.train.held.words_of(&sent_samples))?;
        let received_words: Vec<usize> = rows_from_rank
            .iter()
            .map(|received| received.iter().map(|&row| words_of_row(row)).sum())
            .collect();
        let words = group.call(AllToAll::new().counts(&sent_words, &received_words)).start_from(&words)?;
        Ok(Some(PendingWindow { steps, words, rows_from_rank }))
    }

    /// Waits for the samples of a window.
    fn receive_window(&self, group: &Group, pending: PendingWindow) -> Result<ReceivedWindow, TrainError> {
        let PendingWindow { steps, words, rows_from_rank } = pending;
        let words = words.wait()?;
        let rows = self.row_map().expect("a window was sent, so each rank holds only a part of the samples");
        let value_counts = rows_from_rank.iter().flatten().map(|&row| rows.value_count(row as usize));
        let samples = self.train.held.samples_from_words(&words, value_counts);
        samples.check_received_samples(self.train.statistics.class_counts.len(), group)?;
        // The samples of each rank arrive in the order of the steps.
        let mut next_from_rank: Vec<u32> = rows_from_rank
            .iter()
            .scan(0, |end, received| Some(std::mem::replace(end, *end + received.len() as u32)))
            .collect();
        let (mut indices, mut step_ends) = (Vec::new(), Vec::new());
        for step in steps.clone() {
            for sample in self.row_numbers_of_rank(&(step..step + 1), (group.rank(), group.size())) {
                let (holder, _) = rows.holder_and_index(sample as usize);
                indices.push(next_from_rank[holder]);
                next_from_rank[holder] += 1;
            }
            step_ends.push(indices.len());
        }
        Ok(ReceivedWindow { steps, samples, indices, step_ends })
    }

    /// Returns the row numbers of the samples that a rank processes in `steps`.
    fn row_numbers_of_rank(
        &self,
        steps: &Range<usize>,
        rank_and_size: (Rank, WorldSize),
    ) -> impl Iterator<Item = u32> {
        steps.clone().flat_map(move |step| {
            let batch = self.batches.batch(step);
            batch[part_of_batch(batch.len(), rank_and_size, self.shards)].iter().copied()
        })
    }
}
