//! Collectives of several stages. Each block of the buffer passes its stages one after another: shared memory of the host, and
//! links. Several blocks are in different stages at a time. Each stage of each block is an operation.

use std::collections::VecDeque;
use std::ops::Range;

use super::core::Core;
use super::link_stages::{BlockId, ExchangeState, LinkStage};
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
        let bytes = |Range { start, end }: &Range<usize>| start * element_bytes..end * element_bytes;
        let ranges: Vec<Range<usize>> = blocks.iter().map(|block| bytes(&block.elements)).collect();
        let mut remaining = Vec::with_capacity(blocks.len());
        for (index, block) in blocks.into_iter().enumerate() {
            let (block_number, start) = (OperationKey::block_number(number, index), block.elements.start);
            let stages = block.stages.into_iter().map(|stage| match stage {
                CollectiveStage::OverLinks(schedule) => {
                    self.link_stages.enqueue(request.group, (id, index));
                    let memory_and_kernels = (Memory::none(), kernels.clone());
                    Ok(PendingStage::OverLinks(LinkStage::Plain(schedule, memory_and_kernels)))
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
                    let encoding = encoding.clone().expect("an exchange of encoded elements has an encoding");
                    let block = Box::new(EncodedBlock::new(encoding, *exchange, start));
                    Ok(PendingStage::OverLinks(LinkStage::Exchange(block, ExchangeState::Ready)))
                }
            });
            remaining.push(stages.collect::<Result<VecDeque<_>, Failure>>()?);
        }
        let unfinished_blocks = remaining.len();
        let (whole, parts) = memory.into_parts(&ranges);
        let request = request.begun(now);
        let staged = StagedCollective { whole, request, number, remaining, unfinished_blocks };
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
            staged.unfinished_blocks -= 1;
            if staged.unfinished_blocks == 0
                && let Some(staged) = self.staged_collectives.remove(&block.0)
            {
                self.statistics.operations += 1;
                let output =
                    OperationOutput { memory: staged.whole.into_whole(), envelope: None, ended: now };
                self.record_result(block.0, now, Ok(output));
            }
            return Ok(());
        };
        match stage {
            PendingStage::OnHost(task) => {
                // All stages share the timeout of the whole collective.
                let request = staged.request;
                let id = self.begin_shm_task(now, request, ShmTask { memory, ..*task })?;
                self.stage_of.insert(id, block);
            }
            PendingStage::OverLinks(mut stage) => {
                match &mut stage {
                    LinkStage::Plain(_, (elements, _)) => *elements = memory,
                    LinkStage::Exchange(exchange, _) => exchange.elements = memory,
                }
                self.link_stages.stages.insert(block, stage);
            }
        }
        Ok(())
    }

    /// Begins the operation over links of a stage, or of a step of an exchange. `group_bit` is added to the number of its group.
    pub(super) fn begin_links_of_stage(
        &mut self,
        now: Timestamp,
        (group_bit, block): (u32, BlockId),
        schedule: Schedule,
        memory_and_kernels: (Memory, Option<Kernels>),
    ) -> Result<(), Failure> {
        let Some(staged) = self.staged_collectives.get(&block.0) else { return Ok(()) };
        let request = OperationRequest { group: staged.request.group | group_bit, ..staged.request };
        let number = OperationKey::block_number(staged.number, block.1);
        let id = self.link_driver.begin(now, request, number, schedule, memory_and_kernels)?;
        self.stage_of.insert(id, block);
        Ok(())
    }
}
