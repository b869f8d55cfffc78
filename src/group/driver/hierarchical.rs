//! Hierarchical operations. Each block of the buffer passes three stages: shared memory of the host, links between hosts, and
//! again shared memory of the host. Several blocks are in different stages at the same time. All ranks begin the stages of the
//! blocks in the same order.

use std::ops::Range;

use super::OperationOutput;
use super::core::Core;
use super::shm::{NO_ROUNDS, ShmTask};
use crate::engine::{Failure, OpId, OperationRequest, Timestamp};
use crate::group::host_rounds::{ShmOperation, ShmRequest};
use crate::group::link_driver::BufferAndReduction;
use crate::group::memory::{Memory, SplitBuffer};
use crate::reduce::Kernels;
use crate::schedule::Schedule;
use crate::types::INTERNAL_GROUP_BITS;

/// A hierarchical operation to begin.
pub(in crate::group) struct HierarchicalOperation {
    pub(in crate::group) blocks: Vec<Block>,
    /// The whole buffer.
    pub(in crate::group) memory: Memory,
    /// The reduction functions between hosts; `None` for an operation without a reduction.
    pub(in crate::group) kernels: Option<Kernels>,
    /// The number by which an average divides the sum: the number of ranks of the group.
    pub(in crate::group) divisor: u32,
}

/// A block of a hierarchical operation. The schedule names ranks of the world.
pub(in crate::group) struct Block {
    /// The range of bytes in the buffer.
    pub(in crate::group) bytes: Range<usize>,
    /// The first stage, in shared memory.
    pub(in crate::group) first_on_host: Option<ShmRequest>,
    /// The second stage, over links between hosts.
    pub(in crate::group) between_hosts: Schedule,
    /// The third stage, in shared memory.
    pub(in crate::group) last_on_host: Option<ShmRequest>,
}

/// An active hierarchical operation.
pub(super) struct ActiveHierarchical {
    whole: SplitBuffer,
    request: OperationRequest,
    /// The time at which the operation began.
    began: Timestamp,
    kernels: Option<Kernels>,
    divisor: u32,
    /// The stages that each block has not begun.
    remaining: Vec<RemainingStages>,
    /// The number of blocks that are not complete.
    unfinished_blocks: usize,
}

/// The stages that a block has not begun.
#[derive(Default)]
struct RemainingStages {
    between_hosts: Option<Schedule>,
    last_on_host: Option<ShmOperation>,
}

impl Core {
    /// Begins a hierarchical operation.
    pub(super) fn begin_hierarchical(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        hierarchical: HierarchicalOperation,
    ) -> Result<OpId, Failure> {
        let HierarchicalOperation { blocks, memory, kernels, divisor } = hierarchical;
        let contract_and_site = (request.contract, request.site);
        let id = self.link_driver.assign_number(request.group & !INTERNAL_GROUP_BITS, contract_and_site)?;
        let has_rounds = self.rounds.contains_key(&(request.group, 0));
        if blocks.iter().any(|block| block.first_on_host.is_some() != has_rounds) {
            return Err(self.link_driver.abort(NO_ROUNDS));
        }
        let ranges: Vec<Range<usize>> = blocks.iter().map(|block| block.bytes.clone()).collect();
        let (whole, parts) = memory.into_parts(&ranges);
        let engine = self.link_driver.engine_mut();
        let mut add_shm_stage = |stage_index: usize, shm_request: Option<ShmRequest>| {
            let host_rounds = &mut self.rounds.get_mut(&(request.group, stage_index))?.host_rounds;
            let shm_operation = host_rounds.add_operation(contract_and_site, shm_request?);
            // With the record, the engine detects a rank of this host that later calls a different operation.
            engine.record_external(request.group, shm_operation.sequence(), contract_and_site);
            Some(shm_operation)
        };
        let mut remaining = Vec::with_capacity(blocks.len());
        let mut first_stages = Vec::with_capacity(blocks.len());
        for Block { first_on_host, between_hosts, last_on_host, .. } in blocks {
            first_stages.push(add_shm_stage(0, first_on_host));
            remaining.push(RemainingStages {
                between_hosts: Some(between_hosts),
                last_on_host: add_shm_stage(1, last_on_host),
            });
        }
        let unfinished_blocks = remaining.len();
        let active =
            ActiveHierarchical { whole, request, began: now, kernels, divisor, remaining, unfinished_blocks };
        // Insert the operation before the stages begin: the operation owns the whole buffer, which must outlive the parts.
        self.hierarchical_operations.insert(id, active);
        for (block, (shm_operation, memory)) in first_stages.into_iter().zip(parts).enumerate() {
            match shm_operation {
                Some(shm_operation) => self.start_shm_stage(now, (id, block), 0, shm_operation, memory)?,
                None => self.start_next_stage(now, (id, block), memory)?,
            }
        }
        Ok(id)
    }

    /// Handles the success of a stage of a block. Returns the memory as an error if `stage` is not a stage of a hierarchical
    /// operation.
    pub(super) fn handle_stage_success(
        &mut self,
        now: Timestamp,
        stage: OpId,
        memory: Memory,
    ) -> Result<(), Memory> {
        let Some(block) = self.stage_of.remove(&stage) else { return Err(memory) };
        // If this call fails, the engine has recorded the failure, and all operations fail.
        let _ = self.start_next_stage(now, block, memory);
        Ok(())
    }

    /// Begins the next stage of a block. `block` is the operation and the index of the block. After the last stage, counts the
    /// block as complete.
    fn start_next_stage(
        &mut self,
        now: Timestamp,
        block: (OpId, usize),
        memory: Memory,
    ) -> Result<(), Failure> {
        let Some(hierarchical) = self.hierarchical_operations.get_mut(&block.0) else { return Ok(()) };
        let remaining = &mut hierarchical.remaining[block.1];
        if let Some(schedule) = remaining.between_hosts.take() {
            let request = hierarchical.stage_request(now);
            let buffer_and_reduction = BufferAndReduction {
                memory,
                kernels: hierarchical.kernels.clone(),
                divisor: hierarchical.divisor,
            };
            let stage = self.link_driver.begin(now, request, schedule, buffer_and_reduction)?;
            self.stage_of.insert(stage, block);
        } else if let Some(shm_operation) = remaining.last_on_host.take() {
            self.start_shm_stage(now, block, 1, shm_operation, memory)?;
        } else {
            drop(memory);
            self.count_complete_block(now, block.0);
        }
        Ok(())
    }

    /// Begins a stage of a block in shared memory. `stage_index` is 0 for the first stage, and 1 for the last stage.
    fn start_shm_stage(
        &mut self,
        now: Timestamp,
        block: (OpId, usize),
        stage_index: usize,
        shm_operation: ShmOperation,
        memory: Memory,
    ) -> Result<(), Failure> {
        let Some(hierarchical) = self.hierarchical_operations.get(&block.0) else { return Ok(()) };
        let request = hierarchical.stage_request(now);
        let stage = self.link_driver.engine_mut().begin_external(now, request, shm_operation.sequence())?;
        let key = (request.group, stage_index);
        self.shm_tasks.insert(stage, ShmTask { key, shm_operation, memory });
        self.stage_of.insert(stage, block);
        Ok(())
    }

    /// Counts a complete block of operation `id`. After the last block, stores the result of the operation.
    fn count_complete_block(&mut self, now: Timestamp, id: OpId) {
        let Some(hierarchical) = self.hierarchical_operations.get_mut(&id) else { return };
        hierarchical.unfinished_blocks -= 1;
        if hierarchical.unfinished_blocks == 0
            && let Some(hierarchical) = self.hierarchical_operations.remove(&id)
        {
            self.statistics.operations += 1;
            self.deferred_kernels.extend(hierarchical.kernels);
            let output = OperationOutput { memory: hierarchical.whole.into_whole(), envelope: None };
            self.record_result(id, now, Ok(output));
        }
    }

    /// Ends all hierarchical operations after a failure. The parts of their buffers must have been dropped before.
    pub(super) fn abandon_hierarchical(&mut self) {
        self.stage_of.clear();
        let hierarchical_operations = std::mem::take(&mut self.hierarchical_operations);
        self.deferred_kernels
            .extend(hierarchical_operations.into_values().filter_map(|hierarchical| hierarchical.kernels));
    }
}

impl ActiveHierarchical {
    /// Returns the arguments with which the engine begins a stage. All stages share the timeout of the whole operation.
    fn stage_request(&self, now: Timestamp) -> OperationRequest {
        OperationRequest { spent: now.saturating_sub(self.began), ..self.request }
    }
}
