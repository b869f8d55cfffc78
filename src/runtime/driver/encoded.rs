//! Begins the stages over links, and does the local work of those that exchange encoded elements.
//!
//! A block is encoded, its contributions travel, it is reduced, its results travel, and it is decoded. [`Core::poll`] does the
//! local work of one block at a time, so the links send and receive between the blocks.

use super::core::Core;
use super::link_stages::{BlockId, ExchangeState, LinkStage};
use crate::engine::{Failure, Timestamp};
use crate::runtime::encoding::InvalidChunk;
use crate::runtime::memory::Memory;
use crate::shm::RoundsMemory;
use crate::transport::SocketTransport;
use crate::types::RESULTS_GROUP_BIT;

const WORD_BYTES: u64 = 4;

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    /// Does the local work of a block, and begins its next operation over links. Returns whether there was work.
    pub(super) fn poll_link_stages(&mut self, now: Timestamp) -> bool {
        let Some((block, stage)) = self.link_stages.take_next() else { return false };
        // After an error, the engine has recorded the failure, and all operations fail.
        let _ = self.continue_link_stage(now, block, stage);
        true
    }

    fn continue_link_stage(
        &mut self,
        now: Timestamp,
        block: BlockId,
        stage: LinkStage,
    ) -> Result<(), Failure> {
        let (mut exchange, state) = match stage {
            LinkStage::Plain(schedule, memory_and_kernels) => {
                return self.begin_links_of_stage(now, (0, block), schedule, memory_and_kernels);
            }
            LinkStage::Exchange(exchange, state) => (exchange, state),
        };
        let (workspace, step) = match state {
            ExchangeState::Ready | ExchangeState::FirstStep | ExchangeState::SecondStep => {
                let (elements, words) = exchange.sent_elements_and_words();
                self.statistics.encoded_elements += elements;
                self.statistics.encoded_bytes += words * WORD_BYTES;
                let workspace = exchange.encode(self.link_stages.free_workspaces.pop().unwrap_or_default());
                (workspace, Some((0, exchange.exchange.first.clone(), ExchangeState::FirstStep)))
            }
            ExchangeState::Contributions(mut workspace) => {
                exchange.reduce(&mut workspace).map_err(|invalid| self.fail_because_of_chunk(invalid))?;
                let second = exchange.exchange.second.clone();
                (workspace, second.map(|schedule| (RESULTS_GROUP_BIT, schedule, ExchangeState::SecondStep)))
            }
            ExchangeState::Results(workspace) => {
                exchange.decode(&workspace).map_err(|invalid| self.fail_because_of_chunk(invalid))?;
                (workspace, None)
            }
        };
        let Some((group_bit, schedule, state)) = step else {
            self.link_stages.recycle_workspace(workspace);
            return self.start_next_stage(now, block, exchange.elements);
        };
        self.link_stages.stages.insert(block, LinkStage::Exchange(exchange, state));
        self.begin_links_of_stage(now, (group_bit, block), schedule, (Memory::owned(workspace), None))
    }

    fn fail_because_of_chunk(&mut self, (sender, error): InvalidChunk) -> Failure {
        let engine = &mut self.link_driver.engine;
        engine.report_misbehavior(sender, format!("it sent compressed elements that do not decode: {error}"));
        engine.failure().cloned().expect("the misbehavior of a peer fails the job")
    }
}
