//! Collective algorithms as data: who sends which elements to whom, and what is done on arrival.
//!
//! A [`Schedule`] is what one rank does in one operation. It knows no bytes, no clock and no socket, so that one executor
//! (the [engine](crate::engine)) serves every algorithm, and a symbolic executor can prove each of them for every world
//! size (see this module's tests).
//!
//! The cost of each schedule, in steps and bytes, is in `docs/algorithms.md`.

mod dissemination;
pub mod partition;
mod ring;
#[cfg(test)]
mod symbolic;

use std::ops::Range;

pub use dissemination::barrier;
pub use ring::{all_gather, all_reduce, broadcast, reduce_scatter};

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
    /// The elements; the sender's range is the same.
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
    /// They are reduced into what is there.
    Reduce,
    /// They are reduced into what is there as its last contribution, and the result is finished (an average divided).
    ReduceLast,
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
}
