//! All-reduces by gathering: every rank gets the buffers of all other ranks in a [`GatherWorkspace`], and reduces them itself
//! in rank order. These all-reduces need the fewest steps. The result of an element depends only on the ranks' values of this
//! element, and not on its index or on the algorithm that gathered the buffers.

use std::ops::Range;

use super::memory::{Memory, zeroed};
use crate::reduce::Kernels;
use crate::schedule::GatherWorkspace;
use crate::types::Rank;

pub(crate) struct Gathering {
    workspace: GatherWorkspace,
    element_bytes: usize,
    /// The buffer of the operation. The memory on which the schedule works is the workspace.
    buffer: Memory,
}

impl Gathering {
    /// Returns the workspace with a copy of `buffer` in this rank's slot; `None` if there is not enough memory.
    pub(crate) fn begin(
        workspace: GatherWorkspace,
        mut buffer: Memory,
        element_bytes: usize,
    ) -> Option<(Memory, Self)> {
        let bytes = (workspace.world.as_usize() * workspace.count).checked_mul(element_bytes)?;
        let mut memory = Memory::owned(zeroed::<u64>(bytes.div_ceil(size_of::<u64>()))?);
        let own = slot_bytes(&workspace, workspace.rank, element_bytes);
        memory.bytes_mut(own)?.copy_from_slice(buffer.access().all_writable()?);
        Some((memory, Self { workspace, element_bytes, buffer }))
    }

    /// Reduces the gathered buffers in rank order into the buffer of the operation, and returns this buffer.
    pub(crate) fn finish(self, gathered: &Memory, kernels: &Kernels) -> Memory {
        let Self { workspace, element_bytes, mut buffer } = self;
        let slot = |rank| gathered.bytes(slot_bytes(&workspace, rank, element_bytes)).unwrap_or_default();
        let result = buffer.bytes_mut(0..workspace.count * element_bytes).unwrap_or_default();
        result.copy_from_slice(slot(Rank::ZERO));
        let last = workspace.world.rank_before(Rank::ZERO, 1);
        for rank in workspace.world.ranks().skip(1) {
            let kernel = if rank == last { &kernels.reduce_last } else { &kernels.reduce };
            kernel.apply(result, slot(rank));
        }
        buffer
    }
}

fn slot_bytes(workspace: &GatherWorkspace, rank: Rank, element_bytes: usize) -> Range<usize> {
    let slot = workspace.slot(rank);
    slot.start * element_bytes..slot.end * element_bytes
}
