//! Operations by hosts: each block meets on a board, travels between hosts and meets on another board, while the blocks
//! behind it are where they have come to. All ranks send their blocks on in the same order.

use std::ops::Range;

use super::OperationOutput;
use super::core::Core;
use super::shm::{ShmTask, lock};
use crate::engine::{Begin, Failure, OpId, Timestamp};
use crate::group::hosts::HostExecutor;
use crate::group::link_driver::OperationBuffers;
use crate::group::memory::{Memory, SplitBuffer};
use crate::group::shm_executor::{ShmOperation, ShmRequest};
use crate::reduce::Kernels;
use crate::schedule::Schedule;
use crate::types::INTERNAL_GROUP_BITS;

/// An operation by hosts.
pub(in crate::group) struct HierarchicalOperation {
    /// Where the ranks of this host meet before the wire and after it; nowhere, if this one is alone there.
    pub(in crate::group) host_executors: Option<[HostExecutor; 2]>,
    pub(in crate::group) blocks: Vec<Block>,
    /// The whole buffer.
    pub(in crate::group) memory: Memory,
    /// How elements are reduced between hosts, if they are, and by what an average is divided.
    pub(in crate::group) kernels: Option<Kernels>,
    pub(in crate::group) divisor: u32,
}

/// A block of it, with ranks of the job.
pub(in crate::group) struct Block {
    /// The bytes of the buffer.
    pub(in crate::group) bytes: Range<usize>,
    pub(in crate::group) before: Option<ShmRequest>,
    pub(in crate::group) across: Schedule,
    pub(in crate::group) after: Option<ShmRequest>,
}

/// An operation by hosts that is under way.
pub(super) struct ActiveHierarchical {
    whole: SplitBuffer,
    begin: Begin,
    began: Timestamp,
    host_executors: Option<[HostExecutor; 2]>,
    kernels: Option<Kernels>,
    divisor: u32,
    /// What is left of each block's way.
    remaining: Vec<RemainingStages>,
    /// Blocks that have not arrived.
    left: usize,
}

/// What a block has before it.
#[derive(Default)]
struct RemainingStages {
    across: Option<Schedule>,
    after: Option<ShmOperation>,
}

impl Core {
    /// Takes on an operation by hosts.
    pub(super) fn begin_hierarchical(
        &mut self,
        now: Timestamp,
        begin: Begin,
        hierarchical: HierarchicalOperation,
    ) -> Result<OpId, Failure> {
        let HierarchicalOperation { host_executors, blocks, memory, kernels, divisor } = hierarchical;
        let asked = (begin.contract, begin.site);
        let id = self.link_driver.assign_number(begin.group & !INTERNAL_GROUP_BITS, asked)?;
        let ranges: Vec<Range<usize>> = blocks.iter().map(|block| block.bytes.clone()).collect();
        let (whole, parts) = memory.into_parts(&ranges);
        let engine = self.link_driver.engine_mut();
        let mut take_on = |at: usize, shm_request: Option<ShmRequest>| {
            let (shm_executor, _) = &host_executors.as_ref()?[at];
            let shm_operation = lock(shm_executor).take_on(asked, shm_request?);
            // For a rank of this host that comes to it later and asks for something else.
            engine.record_external(begin.group, shm_operation.sequence(), asked);
            Some(shm_operation)
        };
        let mut remaining = Vec::with_capacity(blocks.len());
        let mut first = Vec::with_capacity(blocks.len());
        for Block { before, across, after, .. } in blocks {
            first.push(take_on(0, before));
            remaining.push(RemainingStages { across: Some(across), after: take_on(1, after) });
        }
        let left = remaining.len();
        let active = ActiveHierarchical {
            whole,
            begin,
            began: now,
            host_executors,
            kernels,
            divisor,
            remaining,
            left,
        };
        // It keeps the whole buffer until nothing is left of its parts, whatever happens from here on.
        self.hierarchical_operations.insert(id, active);
        for (block, (shm_operation, memory)) in first.into_iter().zip(parts).enumerate() {
            match shm_operation {
                Some(shm_operation) => self.start_shm_stage(now, (id, block), 0, shm_operation, memory)?,
                None => self.start_next_stage(now, (id, block), memory)?,
            }
        }
        Ok(id)
    }

    /// A block has come to the end of a part of its way; whether that was one.
    pub(super) fn stage_finished(
        &mut self,
        now: Timestamp,
        part: OpId,
        memory: Memory,
    ) -> Result<(), Memory> {
        let Some(block) = self.stage_of.remove(&part) else { return Err(memory) };
        // The pump knows of a failure, and so will everybody.
        let _ = self.start_next_stage(now, block, memory);
        Ok(())
    }

    /// Sends a block on.
    fn start_next_stage(
        &mut self,
        now: Timestamp,
        block: (OpId, usize),
        memory: Memory,
    ) -> Result<(), Failure> {
        let Some(hierarchical) = self.hierarchical_operations.get_mut(&block.0) else { return Ok(()) };
        let stages_left = &mut hierarchical.remaining[block.1];
        if let Some(schedule) = stages_left.across.take() {
            let begin = hierarchical.begin_at(now);
            let work = OperationBuffers {
                memory,
                kernels: hierarchical.kernels.clone(),
                divisor: hierarchical.divisor,
            };
            let part = self.link_driver.begin(now, begin, schedule, work)?;
            self.stage_of.insert(part, block);
        } else if let Some(shm_operation) = stages_left.after.take() {
            self.start_shm_stage(now, block, 1, shm_operation, memory)?;
        } else {
            drop(memory);
            self.block_finished(now, block.0);
        }
        Ok(())
    }

    /// Has a block meet those of the host's other ranks at one of the places.
    fn start_shm_stage(
        &mut self,
        now: Timestamp,
        block: (OpId, usize),
        at: usize,
        shm_operation: ShmOperation,
        memory: Memory,
    ) -> Result<(), Failure> {
        let Some(hierarchical) = self.hierarchical_operations.get(&block.0) else { return Ok(()) };
        let Some(host_executors) = &hierarchical.host_executors else { return Ok(()) };
        let (begin, place) = (hierarchical.begin_at(now), host_executors[at].clone());
        let part = self.link_driver.begin_external(now, begin, shm_operation.sequence())?;
        self.shm_tasks.insert(part, ShmTask::new(begin.group, place, shm_operation, memory));
        self.stage_of.insert(part, block);
        Ok(())
    }

    /// One of its blocks has arrived.
    fn block_finished(&mut self, now: Timestamp, id: OpId) {
        let Some(hierarchical) = self.hierarchical_operations.get_mut(&id) else { return };
        hierarchical.left -= 1;
        if hierarchical.left == 0
            && let Some(hierarchical) = self.hierarchical_operations.remove(&id)
        {
            self.statistics.operations += 1;
            self.left_over.extend(hierarchical.kernels);
            let outcome = OperationOutput { memory: hierarchical.whole.into_whole(), envelope: None };
            self.settle(id, now, Ok(outcome));
        }
    }

    /// Gives up what is under way, once its parts are gone.
    pub(super) fn abandon_hierarchical(&mut self) {
        self.stage_of.clear();
        let hierarchical_operations = std::mem::take(&mut self.hierarchical_operations);
        self.left_over
            .extend(hierarchical_operations.into_values().filter_map(|hierarchical| hierarchical.kernels));
    }
}

impl ActiveHierarchical {
    /// How a part of it begins: its time is that of the whole.
    fn begin_at(&self, now: Timestamp) -> Begin {
        Begin { spent: now.saturating_sub(self.began), ..self.begin }
    }
}
