//! Assigns the batches of a run to workers.
//!
//! Batches are numbered from 0, over all epochs of the run. A worker takes a batch, computes the gradient of the batch,
//! and pushes this gradient. If the worker is lost, or the gradient is too old, another worker gets the batch. The
//! gradient of each batch is applied exactly once.

use std::collections::BTreeSet;

/// What a worker does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Assignment {
    /// The worker computes the gradient of the batch with this number.
    Batch(u64),
    /// The worker asks again later, because all batches that are left are in progress on other workers.
    Wait,
    /// The run has ended.
    Finished,
}

/// The batches of a run, and which of them are done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct BatchQueue {
    /// All batches below this number are done.
    first_not_done: u64,
    /// The batches above `first_not_done` that are done.
    done_ahead: BTreeSet<u64>,
    /// The first batch that no worker has taken yet.
    next: u64,
    /// The number after the last batch of the run.
    end: u64,
    /// Batches that a worker has given back.
    returned: BTreeSet<u64>,
    /// `taken[worker]` is the batch that the worker computes.
    taken: Vec<Option<u64>>,
    has_stopped: bool,
}

impl BatchQueue {
    /// Creates a queue of the batches `start..end` for `workers` workers. The batches in `done_ahead` are already
    /// done.
    pub(crate) fn new(
        start: u64,
        end: u64,
        workers: usize,
        done_ahead: impl IntoIterator<Item = u64>,
    ) -> Self {
        let mut queue = Self {
            first_not_done: start,
            done_ahead: done_ahead.into_iter().filter(|&batch| start <= batch && batch < end).collect(),
            next: start,
            end,
            returned: BTreeSet::new(),
            taken: vec![None; workers],
            has_stopped: false,
        };
        queue.advance_first_not_done();
        queue
    }

    /// Assigns a batch to a worker. If all remaining batches are in progress and `is_idle` is true, the worker repeats
    /// the first of these batches, because the worker that took this batch may be slow. Only the first result of a
    /// batch counts. Dean and Ghemawat, "`MapReduce`", OSDI 2004, call this method backup tasks.
    pub(crate) fn assign_batch(&mut self, worker: usize, is_idle: bool) -> Assignment {
        self.give_back(worker);
        if self.has_stopped || self.first_not_done == self.end {
            return Assignment::Finished;
        }
        let batch = self.returned.pop_first().or_else(|| self.take_next_batch()).or_else(|| {
            let in_progress = self.taken.iter().flatten().copied().filter(|&batch| !self.is_done(batch));
            if is_idle { in_progress.min() } else { None }
        });
        self.taken[worker] = batch;
        batch.map_or(Assignment::Wait, Assignment::Batch)
    }

    /// Takes the first batch that no worker has taken yet and that is not done.
    fn take_next_batch(&mut self) -> Option<u64> {
        while self.next < self.end {
            let batch = self.next;
            self.next += 1;
            if !self.done_ahead.contains(&batch) && batch >= self.first_not_done {
                return Some(batch);
            }
        }
        None
    }

    /// Returns whether `batch` is assigned to the worker, and no worker has completed this batch.
    pub(crate) fn is_assigned_and_not_done(&self, worker: usize, batch: u64) -> bool {
        self.taken[worker] == Some(batch) && !self.is_done(batch)
    }

    /// Marks the batch of a worker as done, and returns the batch. Returns `None` if the worker has no batch, or if another
    /// worker has already completed the batch.
    pub(crate) fn complete(&mut self, worker: usize) -> Option<u64> {
        let batch = self.taken[worker].take()?;
        let is_new = self.first_not_done <= batch && self.done_ahead.insert(batch);
        self.advance_first_not_done();
        is_new.then_some(batch)
    }

    /// Gives the batch of a worker back to the queue, so that another worker can compute this batch.
    pub(crate) fn give_back(&mut self, worker: usize) {
        let Some(batch) = self.taken[worker].take() else { return };
        if !self.is_done(batch) && !self.taken.contains(&Some(batch)) {
            self.returned.insert(batch);
        }
    }

    fn is_done(&self, batch: u64) -> bool {
        batch < self.first_not_done || self.done_ahead.contains(&batch)
    }

    /// Lowers `end` to the number after the last batch that is assigned or done, rounded up to a multiple of `unit`.
    pub(crate) fn shorten_to_multiple_of(&mut self, unit: u64) {
        let done_end = self.done_ahead.last().map_or(self.first_not_done, |last| last + 1);
        self.end = self.end.min(self.next.max(done_end).next_multiple_of(unit));
    }

    /// Ends the run: no worker gets another batch.
    pub(crate) fn stop(&mut self) {
        self.has_stopped = true;
    }

    /// Returns the first batch that is not done: all batches below this number are done.
    pub(crate) fn first_not_done(&self) -> u64 {
        self.first_not_done
    }

    /// Returns the batches above [`first_not_done`](Self::first_not_done) that are done.
    pub(crate) fn done_ahead(&self) -> Vec<u64> {
        self.done_ahead.iter().copied().collect()
    }

    /// Returns whether the run has stopped, or all batches are done.
    pub(crate) fn is_finished(&self) -> bool {
        self.has_stopped || self.first_not_done == self.end
    }

    /// Moves `first_not_done` over the batches in `done_ahead` that follow without a gap.
    fn advance_first_not_done(&mut self) {
        while self.done_ahead.remove(&self.first_not_done) {
            self.first_not_done += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    #[test]
    fn batches_are_assigned_in_order_and_done_once() {
        let mut queue = BatchQueue::new(2, 5, 2, []);
        assert_eq!(queue.assign_batch(0, false), Assignment::Batch(2));
        assert_eq!(queue.assign_batch(1, false), Assignment::Batch(3));
        assert_eq!(queue.complete(1), Some(3));
        assert_eq!((queue.first_not_done(), queue.done_ahead()), (2, vec![3]));
        assert_eq!(queue.assign_batch(1, false), Assignment::Batch(4));
        assert_eq!(queue.complete(0), Some(2));
        assert_eq!((queue.first_not_done(), queue.done_ahead()), (4, vec![]));
        assert_eq!(queue.assign_batch(0, false), Assignment::Wait);
        assert_eq!(queue.complete(1), Some(4));
        assert_eq!(queue.assign_batch(0, false), Assignment::Finished);
    }

    #[test]
    fn an_idle_worker_repeats_the_batch_of_a_slow_worker() {
        let mut queue = BatchQueue::new(0, 1, 2, []);
        assert_eq!(queue.assign_batch(0, false), Assignment::Batch(0));
        assert_eq!(queue.assign_batch(1, false), Assignment::Wait);
        assert_eq!(queue.assign_batch(1, true), Assignment::Batch(0));
        assert!(queue.is_assigned_and_not_done(0, 0) && queue.is_assigned_and_not_done(1, 0));
        assert_eq!(queue.complete(1), Some(0));
        assert!(!queue.is_assigned_and_not_done(0, 0));
        assert_eq!(queue.complete(0), None);
    }

    #[test]
    fn a_resumed_run_skips_the_batches_that_are_done() {
        let mut queue = BatchQueue::new(3, 7, 1, [4, 5]);
        assert_eq!(queue.assign_batch(0, false), Assignment::Batch(3));
        assert_eq!(queue.complete(0), Some(3));
        assert_eq!(queue.first_not_done(), 6);
        assert_eq!(queue.assign_batch(0, false), Assignment::Batch(6));
        queue.stop();
        assert_eq!(queue.assign_batch(0, false), Assignment::Finished);
    }

    #[test]
    fn a_shortened_run_ends_at_a_multiple_of_the_unit() {
        for (taken, done_ahead, expected) in
            [(0, vec![], 0), (1, vec![], 3), (3, vec![], 3), (1, vec![7], 9), (4, vec![], 6)]
        {
            let mut queue = BatchQueue::new(0, 100, 5, done_ahead.clone());
            for worker in 0..taken {
                let _ = queue.assign_batch(worker, false);
            }
            queue.shorten_to_multiple_of(3);
            while let Assignment::Batch(_) = queue.assign_batch(0, true) {
                queue.complete(0);
            }
            let found = (queue.first_not_done(), queue.is_finished());
            assert_eq!(found, (expected, true), "{taken} taken, {done_ahead:?} done");
        }
        let mut queue = BatchQueue::new(0, 2, 1, []);
        queue.shorten_to_multiple_of(3);
        assert_eq!((queue.is_finished(), queue.first_not_done()), (true, 0));
    }

    /// Workers complete batches, give batches back and are lost, at random. Each batch must be done exactly once.
    #[test]
    fn each_batch_is_done_once_in_spite_of_lost_workers() {
        for seed in 0..200 {
            let mut random = StdRng::seed_from_u64(seed);
            let (workers, end) = (random.random_range(1..6), random.random_range(1..40));
            let mut queue = BatchQueue::new(0, end, workers, []);
            let mut done = vec![0; end as usize];
            let mut alive = vec![true; workers];
            let mut events = 0;
            while !queue.is_finished() {
                events += 1;
                assert!(events < 10_000, "seed {seed}: the run does not end");
                let worker = random.random_range(0..workers);
                match random.random_range(0..20) {
                    0 if alive.iter().filter(|&&alive| alive).count() > 1 => {
                        alive[worker] = false;
                        queue.give_back(worker);
                    }
                    1 => queue.give_back(worker),
                    2..11 if alive[worker] => {
                        let is_idle = random.random();
                        let _ = queue.assign_batch(worker, is_idle);
                    }
                    _ => {
                        if let Some(batch) = queue.complete(worker) {
                            done[batch as usize] += 1;
                        }
                    }
                }
            }
            assert!(done.iter().all(|&count| count == 1), "seed {seed}: {done:?}");
        }
    }
}
