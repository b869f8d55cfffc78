//! Groups of ranks on several hosts, some of which share one: what they do by hosts ([`HostLayout`]), and the memory for it.

use std::sync::{Arc, Mutex, PoisonError};

use super::call::Call;
use super::driver::{Block, HierarchicalOperation};
use super::memory::Memory;
use super::shm_executor::{ShmExecutor, ShmRequest};
use super::{Error, Group};
use crate::reduce::Kernels;
use crate::schedule::hierarchy::{HierarchicalPhases, HostLayout};
use crate::schedule::rounds::RoundPlan;
use crate::schedule::{CollectiveSpec, cost, double_tree};
use crate::types::{Algorithm, Element, LOCAL_GROUP_BIT, Rank, ReduceOp, Site};

/// Bytes that a host sends another one in a step of the ring, of each slice, where the buffer is long enough: while they are
/// on their way, ranks of a host meet for the next block.
const CHUNK_BYTES: usize = 512 << 10;
/// The most blocks that an operation is cut into.
const BLOCKS_MAX: usize = 64;

/// A board and the ranks of the job that have it.
pub(super) type HostExecutor = (Arc<Mutex<ShmExecutor>>, Arc<[Rank]>);

/// What a group of several hosts has.
pub(super) struct Hosts {
    pub(super) layout: HostLayout,
    /// Where the ranks of this host meet before the wire and after it: two places, for an operation that waits for the wire
    /// must not keep the next one from it. A rank that is alone on its host has none.
    pub(super) host_executors: Option<[HostExecutor; 2]>,
}

impl Group {
    /// Makes the memory for the ranks of each host, if all hosts can; what is in the way, if anything. All ranks of the group
    /// have to call this.
    pub(super) fn share_memory_by_hosts(&mut self) -> Result<Result<(), String>, Error> {
        let machine = |rank: &Rank| self.machines.get(rank.index()).copied().unwrap_or_default();
        let machines: Vec<u32> = self.members.iter().map(machine).collect();
        let Some(layout) = HostLayout::new(&machines, self.rank) else { return Ok(Ok(())) };
        let member = |rank: &Rank| self.members[rank.index()];
        let members: Arc<[Rank]> = layout.local_ranks().iter().map(member).collect();
        let host_executors = self.new_host_executors(members)?;
        // Everybody has it or nobody uses it.
        let mut has_it = [u8::from(host_executors.is_ok())];
        self.all_reduce_elements(&mut has_it, ReduceOp::Min, Site::here())?;
        match host_executors {
            Ok(host_executors) if has_it == [1] => {
                self.hosts = Some(Hosts { layout, host_executors });
                Ok(Ok(()))
            }
            Ok(_) => Ok(Err("another host's ranks could not".into())),
            Err(why) => Ok(Err(why)),
        }
    }

    /// The places of this host's ranks, or what is in the way; none for one that is alone there.
    fn new_host_executors(
        &self,
        members: Arc<[Rank]>,
    ) -> Result<Result<Option<[HostExecutor; 2]>, String>, Error> {
        if members.len() == 1 {
            return Ok(Ok(None));
        }
        let local = self.with_members((self.id % LOCAL_GROUP_BIT) | LOCAL_GROUP_BIT, Arc::clone(&members));
        let before = match local.new_shm_executor()? {
            Ok(before) => (before, Arc::clone(&members)),
            Err(why) => return Ok(Err(why)),
        };
        Ok(local.new_shm_executor()?.map(|after| Some([before, (after, members)])))
    }

    /// What is to be done by hosts, block by block.
    pub(super) fn hierarchical<T: Element>(
        &self,
        hosts: &Hosts,
        call: Call,
        memory: Memory,
    ) -> HierarchicalOperation {
        let (work, kernels) = call.into_spec_and_kernels();
        let (count, layout) = (work.count(), &hosts.layout);
        let chunk = CHUNK_BYTES / size_of::<T>();
        let block = layout.host_count().as_usize() * layout.slice_count().as_usize() * chunk;
        let block = block.max(count.div_ceil(BLOCKS_MAX));
        let blocks = (0..count.max(1)).step_by(block).map(|start| {
            let range = start..count.min(start + block);
            let phases = self.phases::<T>(layout, &work.with_count(range.len()));
            let slot = hosts
                .host_executors
                .as_ref()
                .map(|[(shm_executor, _), _]| slot_bytes(shm_executor) / size_of::<T>());
            // For an average, the reduction between the hosts divides the sums, not the reduction on each host.
            let partial = kernels.as_ref().map(Kernels::without_division);
            let (world, rank) = layout.local_world_and_rank();
            let shm_request = |work, kernels| {
                let plan = RoundPlan::new(world, rank, slot?, 0, work);
                Some(ShmRequest { plan, kernels, divisor: 1 })
            };
            Block {
                bytes: range.start * size_of::<T>()..range.end * size_of::<T>(),
                before: shm_request(phases.before, partial),
                across: phases.across,
                after: shm_request(phases.after, None),
            }
        });
        let blocks = blocks.collect();
        HierarchicalOperation {
            host_executors: hosts.host_executors.clone(),
            blocks,
            memory,
            kernels,
            divisor: self.world.get(),
        }
    }

    /// What this rank does for a block, with ranks of the job.
    fn phases<T: Element>(&self, layout: &HostLayout, work: &CollectiveSpec) -> HierarchicalPhases {
        let slice = work.count().div_ceil(layout.slice_count().as_usize());
        let bytes = slice.saturating_mul(size_of::<T>()) as u64;
        let algorithm = cost::cheapest_between_hosts(work.operation(), layout.host_count(), bytes);
        let elements = match algorithm {
            Algorithm::DoubleTree => double_tree::block_bytes(bytes) as usize / size_of::<T>(),
            _ => slice,
        };
        let mut phases = layout.phases(work, algorithm, elements.max(1));
        self.to_world_ranks(&mut phases.across);
        phases
    }
}

fn slot_bytes(shm_executor: &Mutex<ShmExecutor>) -> usize {
    shm_executor.lock().unwrap_or_else(PoisonError::into_inner).slot_bytes()
}
