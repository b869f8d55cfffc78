//! Collective algorithms as data. A [`Schedule`] lists the steps of one rank in one operation: the elements that it sends to
//! other ranks, and the elements that it receives and copies or reduces. So one executor, the [engine](crate::engine), runs every
//! algorithm. A second one (`simulation/symbolic.rs`) proves each algorithm for many world sizes.
//!
//! `docs/schedules.md`, `docs/short-messages.md` and `docs/double-tree.md` describe the steps and name the sources.
//! `docs/algorithms.md` lists the cost. In the comments of this module, n is the number of ranks, and S the size of the whole
//! buffer in bytes. A message is sent in segments. A rank *applies* a segment when it copies or reduces it into its buffer.
//!
//! If a receive waits for another receive, a rank must store data that arrive early. So only schedules for short messages have
//! such receives, and the double tree, in which the wait is short.

pub mod chain;
mod collective_spec;
pub mod cost;
pub mod direct_exchange;
pub mod double_tree;
pub mod doubling;
pub mod hierarchy;
pub mod partition;
pub mod plan;
pub mod program;
pub mod ring;
mod steps;
pub mod topology;
pub mod tree;
pub mod two_step;

pub use collective_spec::CollectiveSpec;
pub use steps::{Action, GatherWorkspace, Schedule, Step, StepDependency, StepTransfer};
