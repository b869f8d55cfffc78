//! Collective algorithms as data: which rank sends which elements to which other rank, and how arriving elements are
//! used.
//!
//! A [`Schedule`] lists what one rank does in one operation. It contains no bytes, clocks or sockets, so that one
//! executor (the [engine](crate::engine)) runs every algorithm, and a symbolic executor can prove each of them for
//! every world size (see this module's tests).
//!
//! The cost of each schedule, in steps and bytes, is in `docs/algorithms.md`. Symbols: n ranks, S bytes in the whole
//! buffer, B the bandwidth of a link, s the bytes of a segment.
//!
//! Schedules for long messages apply arriving data at once: none of their receives depends on another one. Schedules
//! in which a receive waits for another one (a tree that reduces, the barrier, direct reduction, doubling,
//! butterflies) are for messages short enough to be stored meanwhile. The double tree is between the two: a receive
//! may wait for one that waits for none, block by block.

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

/// The part of one rank in one operation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// The steps, in the order of the messages to each peer and from each peer.
    pub steps: Vec<Step>,
}

/// One step: a send, a receive, or both at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// The send.
    pub send: Option<Outbound>,
    /// The receive.
    pub receive: Option<Inbound>,
}

/// Elements to send to a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outbound {
    /// The receiver.
    pub peer: Rank,
    /// The elements; an empty range still sends a message, so that every step checks the peers' agreement.
    pub range: Range<usize>,
    /// The step whose receive has to be applied first.
    pub after: Option<After>,
}

/// Elements to receive from a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inbound {
    /// The sender.
    pub peer: Rank,
    /// The elements: as many as the sender's range has. The two ranges may differ, so positions in a message count
    /// from the start of the range.
    pub range: Range<usize>,
    /// How they are used.
    pub action: Action,
    /// The step whose receive has to be applied first.
    pub after: Option<After>,
}

/// A dependency on the receive of an earlier step.
///
/// If both ranges are the same it applies to each segment (cut-through: a segment is forwarded while the rest of its
/// chunk still arrives); otherwise the whole receive has to be applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct After(pub usize);

/// How arriving elements are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// They replace the rank's elements.
    Copy,
    /// They are reduced into the rank's elements. The arriving element is the left operand, the rank's the right one;
    /// this makes a difference for a function that does not commute.
    Reduce,
    /// The same with the last contribution, and the result is finished (an average divided).
    ReduceLast,
}

impl Step {
    /// Whether this step, with the number `number`, receives into elements that it sends: the receive must not be
    /// applied before they have been sent. It is false if the step sends the elements that it has received.
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

    /// The number of elements sent to `peer`, in all steps together.
    pub fn sent_elements(&self, peer: Rank) -> usize {
        let sends = self.steps.iter().filter_map(|step| step.send.as_ref());
        sends.filter(|send| send.peer == peer).map(|send| send.range.len()).sum()
    }

    /// The number of elements received from `peer`, in all steps together: as many as it sends to this rank.
    pub fn received_elements(&self, peer: Rank) -> usize {
        let receives = self.steps.iter().filter_map(|step| step.receive.as_ref());
        receives.filter(|receive| receive.peer == peer).map(|receive| receive.range.len()).sum()
    }

    /// The step of one rank in a chain: the range arrives from `previous` and goes on to `next`, segment by segment.
    /// The ends of the chain lack one of them. A step that only sends, sends the result of the last receive.
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
