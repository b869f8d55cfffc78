//! The plan of a collective on one rank: the blocks of its buffer, and the stages that each block passes. A stage is a
//! collective of the ranks of a host in their shared memory, or a [`Schedule`] of messages over links. A collective in one
//! shared memory, and one over links alone, has one block with one stage. Only a [hierarchical](super::hierarchy) collective
//! has more.

use std::ops::Range;

use super::{CollectiveSpec, Schedule};

/// A range of the elements of a buffer, and the stages that it passes one after another. Blocks may be in different stages at the
/// same time, but all ranks begin the stages of the blocks in the same order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// The elements.
    pub elements: Range<usize>,
    /// The stages.
    pub stages: Vec<CollectiveStage>,
}

/// A part of a collective.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveStage {
    /// A collective of the ranks of this host, in the shared memory with this number. Its ranks are numbered within the host.
    OnHost(usize, CollectiveSpec),
    /// Messages over links. The peers are ranks of the job.
    OverLinks(Schedule),
}
