//! Collective algorithms as data. A [`Schedule`] lists the steps of one rank in one operation: the elements that the
//! rank sends to other ranks, and the elements that it receives and copies or reduces.
//!
//! A schedule contains no elements, clocks or sockets. Therefore one executor, the [engine](crate::engine), runs every
//! algorithm. A second executor, in the tests of this module, proves each algorithm for many world sizes.
//!
//! `docs/algorithms.md` lists the cost of each schedule in steps and bytes. In the comments of this module, n is the
//! number of ranks, S the size of the whole buffer in bytes, B the bandwidth of a link in bytes per second, and s the
//! size of a segment in bytes. A message is sent in segments. A rank *applies* a segment when it copies or reduces the
//! arriving elements into its buffer.
//!
//! In schedules for long messages, no receive waits for another receive, so a rank applies arriving data at once. In
//! the schedules of the reduction tree, the barrier, direct reduction, doubling and the butterfly, some receives wait
//! for earlier receives. These schedules are for short messages, because a rank must store data that arrives early.
//! The double tree is also for long messages: the receive of a block from the second child waits only for the receive
//! of the same block from the first child.

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
