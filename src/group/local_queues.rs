//! Queues in shared memory for the links between ranks of one host. The ranks set them up when the job starts.

use std::sync::Arc;

use super::{Error, Group};
use crate::engine::{CREDIT_BYTES, CREDIT_FRAMES_MAX};
use crate::shm::HostMemoryLayout;

// Early data must fit into a queue while the receiver computes: a send of early data completes at once, and a rank that
// leaves does not wait until they are read. A frame needs less space than credit, which counts 128 bytes for its header.
const _: () = assert!(HostMemoryLayout::has_space_for(CREDIT_FRAMES_MAX, CREDIT_BYTES as usize));

impl Group {
    /// Makes the links between ranks of this host go through queues in shared memory, if all these ranks can map the memory.
    /// All ranks of the job have to call this method.
    pub(super) fn open_local_queues(&self) -> Result<(), Error> {
        let ranks = self.local_size().as_usize();
        if ranks == 1 {
            return Ok(());
        }
        if ranks > HostMemoryLayout::RANKS_MAX {
            let most = HostMemoryLayout::RANKS_MAX;
            log::info!(
                "the {ranks} ranks of this host exchange messages over TCP: there are more than {most}"
            );
            return Ok(());
        }
        let mut local = self.local_group();
        let (members, own) = (Arc::clone(&local.members), local.rank.index());
        let Some(job) = &self.job else { return Ok(()) };
        let layout = HostMemoryLayout::new(ranks);
        // Each pair of ranks may have an isolated group, which has no port. With long arenas, the queues of all these groups
        // would take too much memory.
        let is_isolated = !job.driver.core().link_driver.transport.sockets.has_port();
        let layout = if is_isolated { layout } else { layout.with_long_arenas() };
        // A rank that has its queues may get the first entry of a peer before it knows itself that all ranks have theirs. So each
        // rank adds its queues before it reports that it has the memory.
        let added = local.share_segment(layout.bytes(), |memory| {
            job.driver.core().link_driver.transport.add_queues(&Arc::new(memory), layout, &members, own);
        });
        if let Err(error) = added {
            let why = error.reason()?;
            job.driver.core().link_driver.transport.remove_queues();
            log::info!("the ranks of this host exchange messages over TCP: {why}");
            return Ok(());
        }
        job.driver.change_over_to_queues();
        Ok(())
    }
}
