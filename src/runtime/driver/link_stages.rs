//! The stages over links of collectives of several stages, in the order in which they begin.
//!
//! All ranks must begin the operations of a group in the same order, but may get ready for them in any order. So the stages wait
//! in queues. The second steps of exchanges of encoded elements have a group number of their own.

use std::collections::{BTreeMap, VecDeque};

use crate::engine::OpId;
use crate::reduce::Kernels;
use crate::runtime::encoding::EncodedBlock;
use crate::runtime::memory::Memory;
use crate::schedule::Schedule;
use crate::types::RESULTS_GROUP_BIT;

const FREE_WORKSPACE_BYTES_MAX: usize = 32 << 20;

pub(super) type BlockId = (OpId, usize);

#[derive(Default)]
pub(super) struct LinkStages {
    /// The stages that are ready to begin, and the exchanges in progress.
    pub(super) stages: BTreeMap<BlockId, LinkStage>,
    /// The blocks whose operation over links has not begun, by the group number of the operations.
    queues: BTreeMap<u32, VecDeque<BlockId>>,
    /// Workspaces with any contents, for later exchanges: new memory would have to be mapped and cleared.
    pub(super) free_workspaces: Vec<Vec<u32>>,
}

pub(super) enum LinkStage {
    /// A stage without encoding, which is ready to begin.
    Plain(Schedule, (Memory, Option<Kernels>)),
    Exchange(Box<EncodedBlock>, ExchangeState),
}

pub(super) enum ExchangeState {
    /// The contributions of this rank have to be encoded.
    Ready,
    /// The contributions travel; an operation of the link driver has the workspace.
    FirstStep,
    /// The contributions of the other ranks have arrived.
    Contributions(Vec<u32>),
    /// The results travel; an operation of the link driver has the workspace.
    SecondStep,
    /// The results of the other ranks have arrived.
    Results(Vec<u32>),
}

impl LinkStages {
    /// Adds a block with a stage over links, or with a step of an exchange, that will begin later. The blocks of all collectives
    /// of a group must be added in the same order on all ranks.
    pub(super) fn enqueue(&mut self, group: u32, block: BlockId) {
        self.queues.entry(group).or_default().push_back(block);
    }

    /// Takes the memory of a completed operation if it belongs to the exchange of `block`. Otherwise returns the memory.
    pub(super) fn handle_arrival(&mut self, block: BlockId, memory: Memory) -> Result<(), Memory> {
        let Some(LinkStage::Exchange(_, state)) = self.stages.get_mut(&block) else { return Err(memory) };
        let workspace = memory.into_owned().unwrap_or_default();
        *state = match state {
            ExchangeState::SecondStep => ExchangeState::Results(workspace),
            _ => ExchangeState::Contributions(workspace),
        };
        Ok(())
    }

    /// Takes a stage with work: the first one of a queue, if its operation can begin, or an exchange that begins none.
    pub(super) fn take_next(&mut self) -> Option<(BlockId, LinkStage)> {
        let stages = &self.stages;
        let is_ready = |group: u32, block: &BlockId| {
            let is_second_step = group & RESULTS_GROUP_BIT != 0;
            match stages.get(block) {
                Some(LinkStage::Plain(..) | LinkStage::Exchange(_, ExchangeState::Ready)) => !is_second_step,
                Some(LinkStage::Exchange(_, ExchangeState::Contributions(_))) => is_second_step,
                _ => false,
            }
        };
        let is_last_work = |stage: &LinkStage| match stage {
            LinkStage::Exchange(exchange, ExchangeState::Contributions(_)) => {
                exchange.exchange.second.is_none()
            }
            LinkStage::Exchange(_, ExchangeState::Results(_)) => true,
            _ => false,
        };
        // Blocks are reduced before further blocks are encoded.
        let mut queues = self.queues.iter_mut().rev();
        let queue = queues.find(|(group, queue)| queue.front().is_some_and(|block| is_ready(**group, block)));
        let block = match queue {
            Some((_, queue)) => queue.pop_front()?,
            None => *stages.iter().find(|(_, stage)| is_last_work(stage))?.0,
        };
        self.stages.remove(&block).map(|stage| (block, stage))
    }

    /// Stores a workspace for later exchanges, unless too many are free.
    pub(super) fn recycle_workspace(&mut self, workspace: Vec<u32>) {
        let bytes = |workspace: &Vec<u32>| size_of::<u32>() * workspace.capacity();
        let free_bytes: usize = self.free_workspaces.iter().map(bytes).sum();
        if free_bytes + bytes(&workspace) <= FREE_WORKSPACE_BYTES_MAX {
            self.free_workspaces.push(workspace);
        }
    }

    /// Forgets a group that was dropped. Its operations have ended.
    pub(super) fn retire_group(&mut self, group: u32) {
        self.queues.retain(|&number, queue| number != group || !queue.is_empty());
    }
}
