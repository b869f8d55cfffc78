//! Exchanges of encoded elements: stages of collectives that consist of local work and two operations over links.
//!
//! A block is encoded, its contributions travel, it is reduced, its results travel, and it is decoded. [`Core::poll`] does the
//! local work of one block at a time, so the links send and receive between the blocks.

use super::core::Core;
use super::link_stages::{BlockId, ExchangeState, LinkStages};
use crate::engine::{Failure, Timestamp};
use crate::runtime::encoding::InvalidChunk;
use crate::runtime::memory::Memory;
use crate::shm::RoundsMemory;
use crate::transport::SocketTransport;

const WORD_BYTES: u64 = 4;

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    /// Does the local work of one block, if any block has local work. Returns whether there was work.
    pub(super) fn poll_encoded(&mut self, now: Timestamp) -> bool {
        let result = if let Some((group, block)) = self.link_stages.take_next_in_queue() {
            self.begin_step(now, group, block)
        } else if let Some((block, mut exchange, state)) = self.link_stages.take_last_work() {
            let (done, workspace) = match state {
                ExchangeState::Contributions(mut workspace) => (exchange.reduce(&mut workspace), workspace),
                ExchangeState::Results(workspace) => (exchange.decode(&workspace), workspace),
                _ => (Ok(()), Vec::new()),
            };
            self.link_stages.recycle_workspace(workspace);
            match done {
                Ok(()) => self.start_next_stage(now, block, exchange.elements),
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
        let LinkStages { exchanges, free_workspaces, .. } = &mut self.link_stages;
        let Some((exchange, state)) = exchanges.get_mut(&block) else { return Ok(()) };
        let before = std::mem::replace(state, ExchangeState::Ready);
        let (workspace, schedule, next) = if let ExchangeState::Contributions(mut workspace) = before {
            let reduced = exchange.reduce(&mut workspace);
            if let Err(invalid) = reduced {
                return Err(self.fail_because_of_chunk(&invalid));
            }
            let schedule = exchange.exchange.second.clone().unwrap_or_default();
            (workspace, schedule, ExchangeState::SecondStep)
        } else {
            let (elements, words) = exchange.sent_elements_and_words();
            self.statistics.encoded_elements += elements;
            self.statistics.encoded_bytes += words * WORD_BYTES;
            let workspace = exchange.encode(free_workspaces.pop().unwrap_or_default());
            (workspace, exchange.exchange.first.clone(), ExchangeState::FirstStep)
        };
        *state = next;
        self.begin_links_of_stage(now, (group, block), schedule, Memory::owned(workspace), None)?;
        self.begin_ready_stages(now, group)
    }

    fn fail_because_of_chunk(&mut self, InvalidChunk { sender, error }: &InvalidChunk) -> Failure {
        let engine = &mut self.link_driver.engine;
        engine
            .report_misbehavior(*sender, format!("it sent compressed elements that do not decode: {error}"));
        engine.failure().cloned().expect("the misbehavior of a peer fails the job")
    }
}
