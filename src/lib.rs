//! A self-contained runtime for data-parallel training over plain TCP.

pub mod cli;
pub mod codec;
pub mod engine;
pub mod exit;
pub mod group;
pub mod launch;
pub mod reduce;
pub mod rendezvous;
pub mod schedule;
pub mod train;
pub mod transport;
pub mod types;
pub mod wire;

pub use codec::Compression;
pub use group::{Buffer, Error, Group, JoinOptions, Meeting, Statistics};
pub use rendezvous::StartError;
pub use types::{DType, Element, Rank, ReduceOp, WorldSize};
