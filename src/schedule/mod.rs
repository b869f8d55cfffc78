//! Collective algorithms as data: who sends which elements to whom, and what is done on arrival.
//!
//! A [`Schedule`] is what one rank does in one operation. It knows no bytes, no clock and no socket, so that one executor
//! (the [engine](crate::engine)) serves every algorithm, and a symbolic executor can prove each of them for every world
//! size (see this module's tests).
//!
//! The cost of each schedule, in steps and bytes, is in `docs/algorithms.md`. Signs: n ranks, S bytes in the whole
//! buffer, B the bandwidth of a link, s the bytes of a segment.
//!
//! Schedules for long messages apply whatever arrives at once: no receive of theirs depends on another one. Those that
//! let a receive wait for another (a tree that reduces, the barrier, direct reduction, doubling, butterflies) are for
//! messages short enough to be stored meanwhile. Between them stands the double tree, in which a receive may wait for one
//! that waits for none, block by block.

pub mod butterfly;
mod chain;
pub mod cost;
pub mod direct;
mod dissemination;
pub mod double_tree;
pub mod doubling;
mod exchange;
pub mod hierarchy;
pub mod partition;
mod ring;
pub mod rounds;
mod spec;
mod star;
#[cfg(test)]
mod symbolic;
mod tree;

use std::ops::Range;

pub use chain::{all_ordered_reduce, exscan, ordered_reduce, reduce, scan};
pub use dissemination::barrier;
pub use exchange::all_to_all;
pub use ring::{all_gather, all_reduce, broadcast, reduce_scatter};
pub use spec::CollectiveSpec;
pub use star::{gather, scatter};
pub use tree::{broadcast_tree, reduce_tree};

use crate::types::Rank;

/// What one rank does in one operation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// The steps, in the order in which the messages to one peer, and those from one peer, follow each other.
    pub steps: Vec<Step>,
}

/// One step: something sent, something received, or both at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// What leaves.
    pub send: Option<Outbound>,
    /// What arrives.
    pub receive: Option<Inbound>,
}

/// Elements that leave for a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outbound {
    /// The receiver.
    pub peer: Rank,
    /// The elements; an empty range still sends a message, so that every step checks the peers' agreement.
    pub range: Range<usize>,
    /// The step whose receive has to be applied first.
    pub after: Option<After>,
}

/// Elements that arrive from a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inbound {
    /// The sender.
    pub peer: Rank,
    /// The elements: as many as the sender's range has. They may lie elsewhere in its buffer, so what a message says
    /// about its place counts from the start of the range.
    pub range: Range<usize>,
    /// What is done with them.
    pub action: Action,
    /// The step whose receive has to be applied first.
    pub after: Option<After>,
}

/// A dependency on the receive of an earlier step.
///
/// Where both ranges are the same it holds segment by segment (cut-through: a segment is forwarded while the rest of its
/// chunk still arrives); otherwise the whole receive has to be applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct After(pub usize);

/// What is done with elements that arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// They replace what is there.
    Copy,
    /// They are reduced into what is there. What arrived is the left operand, what is there the right one; it makes a
    /// difference for a function that does not commute.
    Reduce,
    /// The same with the last contribution, and the result is finished (an average divided).
    ReduceLast,
}

impl Step {
    /// Whether what arrives, in this step of that number, goes where what leaves still lies: it must not be applied before
    /// that has left. It does not where what leaves is what has arrived.
    pub fn leaves_first(&self, number: usize) -> bool {
        let (Some(send), Some(receive)) = (&self.send, &self.receive) else { return false };
        let overlaps = send.range.start.max(receive.range.start) < send.range.end.min(receive.range.end);
        overlaps && send.after.is_none_or(|After(step)| step < number)
    }
}

impl Schedule {
    /// Every rank that this one exchanges messages with, each once.
    pub fn peers(&self) -> Vec<Rank> {
        let mut peers: Vec<Rank> = self
            .steps
            .iter()
            .flat_map(|step| {
                let to = step.send.as_ref().map(|send| send.peer);
                let from = step.receive.as_ref().map(|receive| receive.peer);
                to.into_iter().chain(from)
            })
            .collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// How many elements are sent to `peer`, in all steps together.
    pub fn sent_elements(&self, peer: Rank) -> usize {
        let sends = self.steps.iter().filter_map(|step| step.send.as_ref());
        sends.filter(|send| send.peer == peer).map(|send| send.range.len()).sum()
    }

    /// How many elements are received from `peer`, in all steps together: as many as it sends to this rank.
    pub fn received_elements(&self, peer: Rank) -> usize {
        let receives = self.steps.iter().filter_map(|step| step.receive.as_ref());
        receives.filter(|receive| receive.peer == peer).map(|receive| receive.range.len()).sum()
    }

    /// One rank's place in a chain: the range arrives from `previous` and goes on to `next`, segment by segment, either
    /// of which the chain's ends lack. What is sent without being received here is the outcome of the last receive.
    fn push_link(&mut self, previous: Option<Rank>, next: Option<Rank>, range: Range<usize>, action: Action) {
        if previous.is_none() && next.is_none() {
            return;
        }
        let receive = previous.map(|peer| Inbound { peer, range: range.clone(), action, after: None });
        let after = match receive {
            Some(_) => Some(self.steps.len()),
            None => self.steps.iter().rposition(|step| step.receive.is_some()),
        };
        let send = next.map(|peer| Outbound { peer, range, after: after.map(After) });
        self.steps.push(Step { send, receive });
    }
}
