//! Hierarchical collectives of groups with several hosts and several ranks on a host ([`HostLayout`]), and their shared memory.

use std::sync::Arc;

use super::call::Call;
use super::driver::{Block, HierarchicalOperation};
use super::host_rounds::ShmRequest;
use super::memory::Memory;
use super::rounds_home::RoundsHome;
use super::{Error, Group};
use crate::reduce::Kernels;
use crate::schedule::hierarchy::{HierarchicalStages, HostLayout};
use crate::schedule::{CollectiveSpec, cost, double_tree};
use crate::types::{Algorithm, Element, LOCAL_GROUP_BIT, Rank, ReduceOp};

/// The bytes of each slice of a block that a host sends to another host in one step of the ring, if the buffer is long enough.
/// Meanwhile, the ranks of the host work on the next block in shared memory.
const CHUNK_BYTES: usize = 512 << 10;
/// The most blocks of a hierarchical operation.
const BLOCKS_MAX: usize = 64;

/// The rounds of the first and of the last stage.
type StageRounds = [RoundsHome; 2];

/// The data for hierarchical collectives of a group.
pub(super) struct HierarchicalData {
    pub(super) layout: HostLayout,
    /// Rounds for the first stage and rounds for the last stage, so that an operation that waits for the network does not
    /// delay the first stage of the following operation. `None` if this rank is alone on its host.
    pub(super) stage_rounds: Option<StageRounds>,
    /// The world ranks of this host's members.
    pub(super) local_members: Arc<[Rank]>,
}

impl Group {
    /// Creates shared memory for the ranks of each host. If any host cannot create the memory, returns the reason, and no host
    /// uses shared memory. All ranks of the group have to call this method.
    pub(super) fn share_memory_on_each_host(&mut self) -> Result<Result<(), String>, Error> {
        let machine = |rank: &Rank| self.machine_numbers.get(rank.index()).copied().unwrap_or_default();
        let machines: Vec<u32> = self.members.iter().map(machine).collect();
        let Some(layout) = HostLayout::new(&machines, self.rank) else { return Ok(Ok(())) };
        let member = |rank: &Rank| self.members[rank.index()];
        let members: Arc<[Rank]> = layout.local_ranks().iter().map(member).collect();
        let stage_rounds = self.new_stage_rounds(&members)?;
        // Shared memory is used only if all ranks have it.
        let mut have_all = [u8::from(stage_rounds.is_ok())];
        self.all_reduce(&mut have_all, ReduceOp::Min)?;
        match stage_rounds {
            Ok(stage_rounds) if have_all == [1] => {
                self.hierarchical_data =
                    Some(HierarchicalData { layout, stage_rounds, local_members: members });
                Ok(Ok(()))
            }
            Ok(_) => Ok(Err("ranks of another host could not share memory".into())),
            Err(why) => Ok(Err(why)),
        }
    }

    /// Creates the rounds of this host's ranks, or returns why that failed. Returns no rounds for a rank that is alone on
    /// its host.
    fn new_stage_rounds(&self, members: &Arc<[Rank]>) -> Result<Result<Option<StageRounds>, String>, Error> {
        if members.len() == 1 {
            return Ok(Ok(None));
        }
        let mut local = self.with_members((self.id % LOCAL_GROUP_BIT) | LOCAL_GROUP_BIT, Arc::clone(members));
        let first_on_host = match local.new_host_rounds()? {
            Ok(first_on_host) => first_on_host,
            Err(why) => return Ok(Err(why)),
        };
        Ok(local
            .new_host_rounds()?
            .map(|last_on_host| Some([first_on_host, last_on_host].map(RoundsHome::Owned))))
    }

    /// Divides a call into blocks, and returns the hierarchical operation.
    pub(super) fn hierarchical_operation<T: Element>(
        &self,
        hierarchical_data: &HierarchicalData,
        call: Call,
        memory: Memory,
    ) -> HierarchicalOperation {
        let (spec, kernels) = call.into_spec_and_kernels();
        let (count, layout) = (spec.count(), &hierarchical_data.layout);
        let chunk_elements = CHUNK_BYTES / size_of::<T>();
        let block_elements =
            layout.host_count().as_usize() * layout.slice_count().as_usize() * chunk_elements;
        let block_elements = block_elements.max(count.div_ceil(BLOCKS_MAX));
        let blocks = (0..count.max(1)).step_by(block_elements).map(|start| {
            let range = start..count.min(start + block_elements);
            let stages = self.stages::<T>(layout, &spec.with_count(range.len()));
            // For an average, the reduction on each host only adds. The reduction between the hosts divides the sums.
            let host_kernels = kernels.as_ref().map(Kernels::without_division);
            let is_alone = hierarchical_data.stage_rounds.is_none();
            let shm_request = |spec, kernels| (!is_alone).then_some(ShmRequest { spec, kernels, divisor: 1 });
            Block {
                bytes: range.start * size_of::<T>()..range.end * size_of::<T>(),
                first_on_host: shm_request(stages.first_on_host, host_kernels),
                between_hosts: stages.between_hosts,
                last_on_host: shm_request(stages.last_on_host, None),
            }
        });
        let blocks = blocks.collect();
        HierarchicalOperation { blocks, memory, kernels, divisor: self.world.get() }
    }

    /// Returns the three stages of a block. The schedule of the second stage names world ranks.
    fn stages<T: Element>(&self, layout: &HostLayout, spec: &CollectiveSpec) -> HierarchicalStages {
        let slice_elements = spec.count().div_ceil(layout.slice_count().as_usize());
        let slice_bytes = slice_elements.saturating_mul(size_of::<T>()) as u64;
        let algorithm = cost::cheapest_between_hosts(spec.operation(), layout.host_count(), slice_bytes);
        let block_elements = match algorithm {
            Algorithm::DoubleTree => double_tree::block_bytes(slice_bytes) as usize / size_of::<T>(),
            _ => slice_elements,
        };
        let mut stages = layout.stages(spec, algorithm, block_elements.max(1));
        self.to_world_ranks(&mut stages.between_hosts);
        stages
    }
}
