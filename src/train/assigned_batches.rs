//! The batches of a rank that gets the numbers of its batches from another rank.

use super::batches::Batches;
use super::setup::Setup;
use super::window_prefetch::WindowPrefetch;

/// The batches of one epoch at a time, for a rank that gets the numbers of its batches from another rank.
pub(crate) struct AssignedBatches<'a> {
    setup: &'a Setup,
    seed: u64,
    /// The epoch of the last batch, and the batches of this epoch.
    drawn: Option<(u64, Batches, WindowPrefetch)>,
}

impl<'a> AssignedBatches<'a> {
    /// Creates the batches of the training set: see [`Batches::new`].
    pub(crate) fn new(seed: u64, setup: &'a Setup) -> Self {
        Self { setup, seed, drawn: None }
    }

    /// Returns the samples of batch `index` of `epoch`. If the last batch is from another epoch, first draws the batches of
    /// `epoch`.
    pub(crate) fn batch(&mut self, epoch: u64, index: u64) -> &[u32] {
        let Setup { dataset, settings, shuffle_blocks, .. } = self.setup;
        if self.drawn.as_ref().is_none_or(|(drawn, ..)| *drawn != epoch) {
            let order = (settings.batch_size, *shuffle_blocks);
            let batches = Batches::new(self.seed, epoch, dataset.train.len(), order);
            self.drawn = Some((epoch, batches, WindowPrefetch::default()));
        }
        let Some((_, batches, prefetch)) = &mut self.drawn else { return &[] };
        prefetch.prefetch(&dataset.train, batches, index as usize);
        batches.batch(index as usize)
    }
}
