//! A self-contained runtime for data-parallel training over plain TCP.

pub mod cli;
pub mod codec;
pub mod group;
pub mod train;
pub mod types;
pub mod wire;

pub use codec::Compression;
pub use group::{Buffer, Error, Group, Statistics};
pub use types::{DType, Element, Rank, ReduceOp, WorldSize};
