//! Distributed training over TCP and shared memory: a launcher, a trainer, a benchmark, and the library that they
//! use.
//!
//! The ranks of a job are processes that run the same program. A [`Group`] is a set of ranks. A group has methods for
//! collectives, which all its ranks call together, and for messages between two ranks.
//!
//! ```
//! use ringtrain::{Group, ReduceOp};
//!
//! // Under `ringrun -n 4`, this process is one of four ranks. Without a launcher, this process is the only rank.
//! let mut group = Group::from_environment()?;
//! let mut gradients = vec![1.0f32, 2.0, 3.0];
//! group.all_reduce(&mut gradients, ReduceOp::Average)?;
//! println!("rank {} of {}: {gradients:?}", group.rank(), group.size());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```sh
//! cargo build --release
//! ringrun -n 4 target/release/my_program
//! ```
//!
//! | to do this | see |
//! |---|---|
//! | run a collective with uneven parts, a function, compression or separate buffers | [`Group::call`], [`verbs`] |
//! | join a job in another way, or set time-outs and algorithms | [`Group::join`], [`JoinOptions`] |
//! | overlap communication with computation | [`Handle`], [`wait_all`] |
//! | send messages from several threads | [`Messenger`] |
//! | reduce in place in shared memory | [`Group::alloc`], [`SharedBuffer`] |
//! | reduce tensors by name, in any order | [`NamedTensors`] |
//! | find out why a call failed | [`Error`], [`wire::Cause`] |
//! | find the cost of each collective | `docs/algorithms.md` |
//!
//! If a rank fails, then the calls of all other ranks return an error with the same cause. The cause names the rank
//! that failed and its host. A failed group cannot be used again.
//!
//! The programs `ringrun`, `ringtrain` and `ringbench` call [`cli`]. `docs/ARCHITECTURE.md` describes the modules.
//!
//! Without the default feature `cli`, the package contains neither these programs nor the modules [`cli`] and
//! [`launch`]. The feature `train` adds the module [`train`]; `cli` includes it. A program that only needs [`Group`] and
//! [`NamedTensors`] uses `default-features = false`.

// Only the programs use some functions of the other modules.
#![cfg_attr(not(feature = "cli"), allow(dead_code, unused_imports))]

#[cfg(not(target_os = "linux"))]
compile_error!("ringtrain runs on Linux only: it uses epoll, /proc and socket options of Linux");
#[cfg(target_endian = "big")]
compile_error!(
    "ringtrain runs on little-endian processors only: it sends elements in the byte order of memory"
);

#[cfg(feature = "cli")]
pub mod cli;
pub mod codec;
mod engine;
pub mod exit;
pub mod group;
#[cfg(feature = "cli")]
pub mod launch;
#[cfg(feature = "cli")]
mod monitor;
pub mod named;
pub mod observe;
pub mod reduce;
pub mod rendezvous;
mod runtime;
mod schedule;
mod shm;
mod simd;
#[cfg(test)]
mod simulation;
#[cfg(feature = "train")]
pub mod train;
mod transport;
pub mod types;
pub mod wire;

/// The crates of candle, in the versions that [`CandleModule`](train::model::CandleModule) uses.
#[cfg(feature = "candle")]
pub use {candle_core, candle_nn};

pub use codec::Compression;
pub use group::objects::OBJECT_BYTES_MAX;
pub use group::{
    AutoReport, Buffer, Compressor, CompressorState, Error, ForeignBuffer, Group, Handle, Input, JoinMethod,
    JoinOptions, LinkBytes, Messenger, OwnedBuffer, Profile, Received, SendMode, SendOptions, SharedBuffer,
    Source, Spent, Statistics, Status, verbs, wait_all, wait_any,
};
pub use named::{NamedError, NamedHandle, NamedOptions, NamedStatistics, NamedTensors, Stall};
pub use rendezvous::StartError;
pub use types::{DType, Element, F32Loc, F64Loc, I32Loc, I64Loc, Rank, ReduceOp, Site, WorldSize};
