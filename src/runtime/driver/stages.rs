//! Collectives of several stages. Each block of the buffer passes its stages one after another: shared memory of the host, and
//! links. Several blocks are in different stages at a time. Each stage of each block is an operation.

use std::collections::VecDeque;
use std::ops::Range;

use super::core::Core;
use super::link_stages::{BlockId, ExchangeState, LinkStages};
use super::tasks::{OperationOutput, PendingStage, ShmTask, StagedCollective};
use crate::engine::{Failure, OpId, OperationKey, OperationRequest, Timestamp};
use crate::reduce::Kernels;
use crate::runtime::encoding::{EncodedBlock, Encoding};
use crate::runtime::memory::Memory;
use crate::schedule::Schedule;
use crate::schedule::hierarchy::{Block, CollectiveStage};
use crate::shm::RoundsMemory;
use crate::transport::SocketTransport;
use crate::types::{INTERNAL_GROUP_BITS, RESULTS_GROUP_BIT};

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    pub(super) fn begin_staged(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        (blocks, encoding): (Vec<Block>, Option<Encoding>),
        (memory, kernels): (Memory, Option<Kernels>),
    ) -> Result<OpId, Failure> {
        let contract_and_site = (request.contract, request.site);
        let number =
            self.link_driver.assign_number(request.group & !INTERNAL_GROUP_BITS, contract_and_site)?;
        let id = self.link_driver.engine.new_id();
        let element_bytes = request.contract.dtype.size_bytes();
        let bytes = |elements: &Range<usize>| elements.start * element_bytes..elements.end * element_bytes;
        let starts = blocks.iter().map(|block| block.elements.start).collect();
        let ranges: Vec<Range<usize>> = blocks.iter().map(|block| bytes(&block.elements)).collect();
        let mut remaining = Vec::with_capacity(blocks.len());
        for (index, block) in blocks.into_iter().enumerate() {
            let block_number = OperationKey::block_number(number, index);
            let stages = block.stages.into_iter().map(|stage| match stage {
                CollectiveStage::OverLinks(schedule) => {
                    self.link_stages.enqueue(request.group, (id, index));
                    Ok(PendingStage::OverLinks(schedule))
                }
                CollectiveStage::OnHost(memory_number, spec) => {
                    // On each host the ranks only add. The reduction between the hosts divides the sums.
                    let kernels = kernels.as_ref().map(Kernels::without_division);
                    let numbered = (request, Some(block_number));
                    let task =
                        self.new_shm_task(numbered, memory_number, (&spec, kernels), Memory::none())?;
                    Ok(PendingStage::OnHost(Box::new(task)))
                }
                CollectiveStage::Encoded(exchange) => {
                    self.link_stages.enqueue(request.group, (id, index));
                    if exchange.second.is_some() {
                        self.link_stages.enqueue(request.group | RESULTS_GROUP_BIT, (id, index));
                    }
                    Ok(PendingStage::Encoded(exchange))
                }
            });
            remaining.push(stages.collect::<Result<VecDeque<_>, Failure>>()?);
        }
        let unfinished_blocks = remaining.len();
        let (whole, parts) = memory.into_parts(&ranges);
        let staged = StagedCollective {
            whole,
            request: request.begun(now),
            number,
            kernels,
            encoding,
            starts,
            remaining,
            unfinished_blocks,
        };
        // Insert the collective before its stages begin: it owns the whole buffer, which must outlive the parts.
        self.staged_collectives.insert(id, staged);
        for (block, memory) in parts.into_iter().enumerate() {
            self.start_next_stage(now, (id, block), memory)?;
        }
        Ok(id)
    }

    /// Handles the success of a stage of a block. Returns the memory as an error if `stage` is no such stage.
    pub(super) fn handle_stage_success(
        &mut self,
        now: Timestamp,
        stage: OpId,
        memory: Memory,
    ) -> Result<(), Memory> {
        let Some(block) = self.stage_of.remove(&stage) else { return Err(memory) };
        let Err(memory) = self.link_stages.handle_arrival(block, memory) else { return Ok(()) };
        // If this call fails, the engine has recorded the failure, and all operations fail.
        let _ = self.start_next_stage(now, block, memory);
        Ok(())
    }

    pub(super) fn start_next_stage(
        &mut self,
        now: Timestamp,
        block: BlockId,
        memory: Memory,
    ) -> Result<(), Failure> {
        let Some(staged) = self.staged_collectives.get_mut(&block.0) else { return Ok(()) };
        let Some(stage) = staged.remaining[block.1].pop_front() else {
            drop(memory);
            self.count_complete_block(now, block.0);
            return Ok(());
        };
        // All stages share the timeout of the whole collective.
        let request = staged.request;
        let id = match stage {
            PendingStage::OnHost(task) => self.begin_shm_task(now, request, ShmTask { memory, ..*task })?,
            PendingStage::OverLinks(schedule) => {
                self.link_stages.ready.insert(block, (schedule, memory));
                return self.begin_ready_stages(now, request.group);
            }
            PendingStage::Encoded(exchange) => {
                if let Some(encoding) = staged.encoding.clone() {
                    let (exchange, elements, start) = (*exchange, memory, staged.starts[block.1]);
                    let encoded = EncodedBlock { encoding, exchange, elements, start, scratch: Vec::new() };
                    self.link_stages.exchanges.insert(block, (encoded, ExchangeState::Ready));
                }
                return Ok(());
            }
        };
        self.stage_of.insert(id, block);
        Ok(())
    }

    /// Begins the stages over links that are ready, in the order of their queue. `group` is the group number of their operations.
    pub(super) fn begin_ready_stages(&mut self, now: Timestamp, group: u32) -> Result<(), Failure> {
        while let Some((block, schedule, memory)) = self.link_stages.take_ready(group) {
            let kernels = self.staged_collectives.get(&block.0).and_then(|staged| staged.kernels.clone());
            self.begin_links_of_stage(now, (group, block), schedule, memory, kernels)?;
        }
        Ok(())
    }

    /// Begins the operation over links of a stage, or of a step of an exchange, in the group number `group`.
    pub(super) fn begin_links_of_stage(
        &mut self,
        now: Timestamp,
        (group, block): (u32, BlockId),
        schedule: Schedule,
        memory: Memory,
        kernels: Option<Kernels>,
    ) -> Result<(), Failure> {
        let Some(staged) = self.staged_collectives.get(&block.0) else { return Ok(()) };
        let request = OperationRequest { group, ..staged.request };
        let number = OperationKey::block_number(staged.number, block.1);
        let id = self.link_driver.begin(now, request, number, schedule, (memory, kernels))?;
        self.stage_of.insert(id, block);
        Ok(())
    }

    fn count_complete_block(&mut self, now: Timestamp, id: OpId) {
        let Some(staged) = self.staged_collectives.get_mut(&id) else { return };
        staged.unfinished_blocks -= 1;
        if staged.unfinished_blocks == 0
            && let Some(staged) = self.staged_collectives.remove(&id)
        {
            self.statistics.operations += 1;
            let output = OperationOutput { memory: staged.whole.into_whole(), envelope: None, ended: now };
            self.record_result(id, now, Ok(output));
        }
    }

    /// Ends all collectives of several stages after a failure. The parts of their buffers must have been dropped before.
    pub(super) fn abandon_staged(&mut self) {
        self.stage_of.clear();
        self.link_stages = LinkStages::default();
        self.staged_collectives.clear();
    }
}
