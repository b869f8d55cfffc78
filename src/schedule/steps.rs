//! A schedule: the steps of one rank in one operation.

use std::ops::Range;

use super::partition::shifted;
use crate::types::{Rank, WorldSize};

/// The steps of one rank in one operation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// The messages to each peer, and those from each peer, are in the order of the steps.
    pub steps: Vec<Step>,
    /// The memory on which the steps work instead of the rank's buffer; `None` if the steps work on the buffer.
    pub workspace: Option<GatherWorkspace>,
}

/// Memory with a slot for the buffer of each rank. Before the first step, this rank copies its buffer into its own slot. After
/// the last step, it reduces the slots of all ranks in rank order, and the result replaces its buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GatherWorkspace {
    pub world: WorldSize,
    pub rank: Rank,
    /// The rank whose slot is the first. The slots are in rank order, and the slot of rank 0 follows that of the last rank.
    pub first: Rank,
    /// The number of elements of each slot.
    pub count: usize,
}

/// One step: a send, a receive, or both at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    pub send: Option<StepTransfer>,
    pub receive: Option<StepTransfer>,
    pub action: Action,
}

/// Elements to send to a peer, or to receive from a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepTransfer {
    pub peer: Rank,
    /// The elements of this rank's buffer. The peer's range has the same length but may start at another index, so an offset
    /// in a message is relative to the start of the range. An empty range still sends a message, so that the receiver can
    /// detect in every step that the two ranks call different operations.
    pub range: Range<usize>,
    /// The step whose received elements must be applied before the elements of this transfer are sent or applied.
    pub awaited_step: Option<StepDependency>,
}

/// A dependency on the receive of the step with this index. If both steps have the same range, it holds for each segment
/// separately: a rank forwards a segment while later ones still arrive (cut-through). If not, the rank must first apply all
/// elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepDependency(pub usize);

/// What a rank does with arriving elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The arriving elements replace the rank's elements.
    Copy,
    /// The arriving elements are reduced into the rank's elements. For a function that does not commute, the left
    /// operand is the arriving element, and the right operand is the rank's own element.
    Reduce,
    /// The last contribution is reduced as in [`Action::Reduce`]. For an average, the sum is then divided.
    ReduceLast,
}

impl Step {
    pub(crate) fn send(peer: Rank, range: Range<usize>, awaited_step: Option<StepDependency>) -> Self {
        Self { send: Some(StepTransfer { peer, range, awaited_step }), receive: None, action: Action::Copy }
    }

    pub(crate) fn receive(
        peer: Rank,
        range: Range<usize>,
        action: Action,
        awaited_step: Option<StepDependency>,
    ) -> Self {
        Self { send: None, receive: Some(StepTransfer { peer, range, awaited_step }), action }
    }

    /// Returns the step that sends what this step sends, and at once receives what `receiving` receives.
    pub(super) fn and(self, receiving: Self) -> Self {
        Self { send: self.send, ..receiving }
    }

    pub fn transfers_mut(&mut self) -> impl Iterator<Item = &mut StepTransfer> {
        self.send.iter_mut().chain(&mut self.receive)
    }

    /// Returns whether this step must send elements before the receive of the same step overwrites these elements.
    /// `index` is the index of this step. Returns false if the step forwards the elements that it receives.
    pub fn must_send_before_receiving(&self, index: usize) -> bool {
        let (Some(send), Some(receive)) = (&self.send, &self.receive) else { return false };
        let overlaps = send.range.start.max(receive.range.start) < send.range.end.min(receive.range.end);
        overlaps && send.awaited_step.is_none_or(|StepDependency(step)| step < index)
    }
}

impl GatherWorkspace {
    pub fn slot(&self, rank: Rank) -> Range<usize> {
        let n = self.world.as_usize();
        let slot = (rank.index() + n - self.first.index()) % n;
        slot * self.count..(slot + 1) * self.count
    }
}

impl From<Vec<Step>> for Schedule {
    fn from(steps: Vec<Step>) -> Self {
        Self { steps, workspace: None }
    }
}

impl Schedule {
    /// Returns the dependency on the last step, if there is one.
    pub(super) fn last_step(&self) -> Option<StepDependency> {
        self.steps.len().checked_sub(1).map(StepDependency)
    }

    /// Replaces each peer by the rank that `name` returns for it.
    pub fn rename_peers(&mut self, name: impl Fn(Rank) -> Rank) {
        for transfer in self.steps.iter_mut().flat_map(Step::transfers_mut) {
            transfer.peer = name(transfer.peer);
        }
    }

    /// Returns the ranks that this rank exchanges messages with, sorted and without duplicates.
    pub fn peers(&self) -> Vec<Rank> {
        let mut peers = Vec::with_capacity(2 * self.steps.len());
        for Step { send, receive, .. } in &self.steps {
            peers.extend(send.iter().chain(receive).map(|transfer| transfer.peer));
        }
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Adds the steps of `other`, which works on the elements from index `start` on.
    pub(super) fn append(&mut self, other: Self, start: usize) {
        let first_step = self.steps.len();
        self.steps.extend(other.steps.into_iter().map(|mut step| {
            for transfer in step.transfers_mut() {
                transfer.range = shifted(&transfer.range, start);
                if let Some(StepDependency(step)) = &mut transfer.awaited_step {
                    *step += first_step;
                }
            }
            step
        }));
    }

    /// Adds the step of one rank in a chain, which forwards the range from `previous` to `next`, segment by segment. If earlier
    /// steps of the first rank receive data, its send waits for the last of these receives.
    pub(super) fn with_chain_step(
        mut self,
        previous: Option<Rank>,
        next: Option<Rank>,
        range: Range<usize>,
        action: Action,
    ) -> Self {
        if previous.is_none() && next.is_none() {
            return self;
        }
        let receive = previous.map(|peer| StepTransfer { peer, range: range.clone(), awaited_step: None });
        let awaited_step = match receive {
            Some(_) => Some(self.steps.len()),
            None => self.steps.iter().rposition(|step| step.receive.is_some()),
        };
        let awaited_step = awaited_step.map(StepDependency);
        let send = next.map(|peer| StepTransfer { peer, range, awaited_step });
        self.steps.push(Step { send, receive, action });
        self
    }
}
