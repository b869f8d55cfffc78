//! Prefetches the samples that a rank will soon read from its temporary file.

use super::batches::Batches;
use super::data::SharedSamples;

/// The windows of the shuffle in blocks that a rank has prefetched in an epoch.
#[derive(Default)]
pub(crate) struct WindowPrefetch {
    /// The number of windows that were prefetched or skipped.
    windows: usize,
}

impl WindowPrefetch {
    /// Tells the operating system which samples this rank will read from its file in the window of batch `index` and in the next
    /// window. Does nothing if the samples are in memory.
    pub(crate) fn prefetch(&mut self, train: &SharedSamples, batches: &Batches, index: usize) {
        if train.held.in_memory().is_some() {
            return;
        }
        let window = batches.window_of_batch(index);
        for number in self.windows.max(window)..window + 2 {
            for block in batches.blocks_of_window(number) {
                let rows = block.start as usize..block.end as usize;
                let indices = train.row_map().map(|map| map.indices_of_held_range(rows.clone()));
                train.held.prefetch(indices.unwrap_or(rows));
            }
            self.windows = number + 1;
        }
    }
}
