//! A self-contained runtime for data-parallel training over plain TCP.
//!
//! [`Group`] is where to begin: the ranks of a job and the collectives that they call together. The programs `ringrun`,
//! `ringtrain` and `ringbench` are thin shells around [`cli`]. `docs/ARCHITECTURE.md` is the map of the house.

#[cfg(not(target_os = "linux"))]
compile_error!("ringtrain is built on epoll, /proc and Linux's socket options");
#[cfg(target_endian = "big")]
compile_error!("payloads travel as they lie in memory, and all ranks have to be little-endian");

pub mod cli;
pub mod codec;
pub mod engine;
pub mod exit;
pub mod group;
pub mod launch;
pub mod named;
pub mod reduce;
pub mod rendezvous;
pub mod schedule;
pub mod train;
pub mod transport;
pub mod types;
pub mod wire;

pub use codec::Compression;
pub use group::{
    Buffer, Error, ForeignBuffer, Group, Handle, Input, JoinMethod, JoinOptions, Messenger, OwnedBuffer,
    Profile, Received, SharedBuffer, Source, Spent, Statistics, Status, test_all, test_any, wait_all,
    wait_all_timeout, wait_any, wait_any_timeout,
};
pub use named::{NamedError, NamedHandle, NamedOptions, NamedStatistics, NamedTensors, Stall};
pub use rendezvous::StartError;
pub use types::{DType, Element, F32Loc, F64Loc, I32Loc, I64Loc, Rank, ReduceOp, Site, WorldSize};
