//! The ranks of a host to which this rank has queues in shared memory.

use std::sync::Arc;

use crate::shm::{QueueSignals, Segment};
use crate::types::Rank;

/// What a waiting thread looks at to learn of changes of the queues.
pub(super) type JobSignals = QueueSignals<Segment>;

/// The ranks of this host, and the queues between them.
pub(super) struct LocalPeers {
    pub(super) signals: Arc<JobSignals>,
    /// For each rank of the job: its number in `signals`; `None` if there is no queue between the two ranks.
    numbers: Vec<Option<usize>>,
}

impl LocalPeers {
    /// Creates the peers of rank number `own` of this host. `ranks` are all ranks of the host.
    pub(super) fn new(signals: Arc<JobSignals>, ranks: &[Rank], own: usize) -> Self {
        let mut numbers = vec![None; ranks.iter().map(|rank| rank.index() + 1).max().unwrap_or(0)];
        let peers = ranks.iter().enumerate().filter(|&(number, _)| number != own);
        for (number, (_, rank)) in peers.enumerate() {
            numbers[rank.index()] = Some(number);
        }
        Self { signals, numbers }
    }

    /// Returns the number of `peer` in `signals`, if there is a queue between this rank and the peer.
    pub(super) fn number_of(&self, peer: Rank) -> Option<usize> {
        self.numbers.get(peer.index()).copied().flatten()
    }
}
