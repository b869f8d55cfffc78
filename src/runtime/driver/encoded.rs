//! Exchanges of encoded elements: stages of collectives that consist of local work and two operations over links.
//!
//! A block is encoded, its contributions travel, it is reduced, its results travel, and it is decoded. [`Core::poll`] does the local
//! work of one block at a time, so the links send and receive between the blocks. All ranks must begin the operations of a group in
//! the same order, but may finish local work in any order. So the operations of each step have a group number of their own, and
//! begin in the order of the collectives and their blocks.

use std::collections::{BTreeMap, VecDeque};

use super::core::Core;
use crate::engine::{Failure, OpId, Timestamp};
use crate::runtime::encoding::{EncodedBlock, InvalidChunk};
use crate::runtime::memory::Memory;
use crate::shm::RoundsMemory;
use crate::transport::local_links::SocketTransport;
use crate::types::{ENCODED_GROUP_BIT, HOSTS_GROUP_BIT, INTERNAL_GROUP_BITS};

/// The bytes of a word of encoded elements.
const WORD_BYTES: u64 = 4;

/// A collective and the index of one of its blocks.
pub(super) type BlockId = (OpId, usize);

/// The active exchanges of encoded blocks.
#[derive(Default)]
pub(super) struct EncodedExchanges {
    blocks: BTreeMap<BlockId, (EncodedBlock, ExchangeState)>,
    /// The blocks whose operation of a step has not begun, by the group number of the operations.
    queues: BTreeMap<u32, VecDeque<BlockId>>,
}

/// How far the exchange of a block has come.
enum ExchangeState {
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

/// Returns the group numbers of the operations of the first and of the second step.
fn groups_of_steps(group: u32) -> (u32, u32) {
    let first = (group & !INTERNAL_GROUP_BITS) | ENCODED_GROUP_BIT;
    (first, first | HOSTS_GROUP_BIT)
}

impl EncodedExchanges {
    /// Adds a block whose exchange will begin later. The blocks of all collectives of a group must be added in the same order on
    /// all ranks.
    pub(super) fn enqueue(&mut self, group: u32, block: BlockId, has_second_step: bool) {
        let (first, second) = groups_of_steps(group);
        self.queues.entry(first).or_default().push_back(block);
        if has_second_step {
            self.queues.entry(second).or_default().push_back(block);
        }
    }

    /// Begins the exchange of a block.
    pub(super) fn begin(&mut self, block: BlockId, exchange: EncodedBlock) {
        self.blocks.insert(block, (exchange, ExchangeState::Ready));
    }

    /// Takes the memory of a completed operation if it belongs to the exchange of `block`. Otherwise returns the memory.
    pub(super) fn handle_arrival(&mut self, block: BlockId, memory: Memory) -> Result<(), Memory> {
        let Some((_, state)) = self.blocks.get_mut(&block) else { return Err(memory) };
        let workspace = memory.into_owned().unwrap_or_default();
        *state = match state {
            ExchangeState::SecondStep => ExchangeState::Results(workspace),
            _ => ExchangeState::Contributions(workspace),
        };
        Ok(())
    }

    /// Takes the block that is the next one to begin the operations of a step, if it is ready for them: the block whose
    /// contributions have arrived, or which has to be encoded. Returns the number of the group of these operations.
    fn take_next_in_queue(&mut self) -> Option<(u32, BlockId)> {
        let blocks = &self.blocks;
        let is_ready = |group: u32, block: &BlockId| match blocks.get(block) {
            Some((_, ExchangeState::Ready)) => group & HOSTS_GROUP_BIT == 0,
            Some((_, ExchangeState::Contributions(_))) => group & HOSTS_GROUP_BIT != 0,
            _ => false,
        };
        // Blocks are reduced before further blocks are encoded.
        let mut queues = self.queues.iter_mut().rev();
        let (&group, queue) =
            queues.find(|(group, queue)| queue.front().is_some_and(|block| is_ready(**group, block)))?;
        let block = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&group);
        }
        Some((group, block))
    }

    /// Takes an exchange whose local work is its last work: to reduce the contributions if there is no second step, or to decode
    /// the results.
    fn take_last_work(&mut self) -> Option<(BlockId, EncodedBlock, ExchangeState)> {
        let is_last = |exchange: &EncodedBlock, state: &ExchangeState| match state {
            ExchangeState::Contributions(_) => exchange.exchange().second.is_none(),
            ExchangeState::Results(_) => true,
            _ => false,
        };
        let block = *self.blocks.iter().find(|(_, (exchange, state))| is_last(exchange, state))?.0;
        self.blocks.remove(&block).map(|(exchange, state)| (block, exchange, state))
    }

    /// Drops all exchanges after a failure.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.queues.clear();
    }
}

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    /// Does the local work of one block, if any block has local work. Returns whether there was work.
    pub(super) fn poll_encoded(&mut self, now: Timestamp) -> bool {
        let result = if let Some((group, block)) = self.encoded.take_next_in_queue() {
            self.begin_step(now, group, block)
        } else if let Some((block, mut exchange, state)) = self.encoded.take_last_work() {
            let done = match state {
                ExchangeState::Contributions(mut workspace) => exchange.reduce(&mut workspace),
                ExchangeState::Results(workspace) => exchange.decode(&workspace),
                _ => Ok(()),
            };
            match done {
                Ok(()) => self.start_next_stage(now, block, exchange.into_elements()),
                Err(invalid) => Err(self.fail_because_of_chunk(&invalid)),
            }
        } else {
            return false;
        };
        // After an error, the engine has recorded the failure, and all operations fail.
        drop(result);
        true
    }

    /// Encodes or reduces a block, and begins the operation that sends the encoded chunks.
    fn begin_step(&mut self, now: Timestamp, group: u32, block: BlockId) -> Result<(), Failure> {
        let Some((exchange, state)) = self.encoded.blocks.get_mut(&block) else { return Ok(()) };
        let (workspace, schedule, next) = match std::mem::replace(state, ExchangeState::Ready) {
            ExchangeState::Contributions(mut workspace) => {
                let reduced = exchange.reduce(&mut workspace);
                if let Err(invalid) = reduced {
                    return Err(self.fail_because_of_chunk(&invalid));
                }
                let schedule = exchange.exchange().second.clone().unwrap_or_default();
                (workspace, schedule, ExchangeState::SecondStep)
            }
            _ => {
                let (elements, words) = exchange.sent_elements_and_words();
                self.statistics.encoded_elements += elements;
                self.statistics.encoded_bytes += words * WORD_BYTES;
                (exchange.encode(), exchange.exchange().first.clone(), ExchangeState::FirstStep)
            }
        };
        *state = next;
        self.begin_links_of_stage(now, (group, block), schedule, Memory::owned(workspace))
    }

    /// Fails the job because a chunk of a peer does not decode.
    fn fail_because_of_chunk(&mut self, InvalidChunk { sender, error }: &InvalidChunk) -> Failure {
        let engine = self.link_driver.engine_mut();
        engine
            .report_misbehavior(*sender, format!("it sent compressed elements that do not decode: {error}"));
        engine.failure().cloned().expect("the misbehavior of a peer fails the job")
    }
}
