//! The public API: a [`Group`] of ranks, and the collectives that the ranks call together.

mod alloc;
mod auto_compression;
mod call;
mod clock;
mod collective;
mod collectives;
mod compressor;
mod foreign;
mod handle;
mod isolated;
mod join;
mod kept_plan;
mod messages;
mod new_groups;
pub(crate) mod objects;
mod options;
mod parts;
mod plan;
mod recording;
mod reducers;
mod run_call;
mod selection;
mod share;
mod site;
mod state;
mod streams;
#[cfg(feature = "train")]
mod timeline;
mod tune;
mod verb_plans;
pub mod verbs;

pub use crate::codec::auto_choice::AutoReport;
pub use crate::codec::error_feedback::CompressorState;
pub use crate::engine::SendMode;
#[cfg(feature = "train")]
pub use crate::observe::timeline_report::TimelineReport;
pub use crate::rendezvous::{Checksums, JoinMethod};
pub use crate::runtime::buffer::{Buffer, Input, OwnedBuffer};
pub use crate::runtime::driver::Interrupt;
pub use crate::runtime::error::{Error, Status};
pub use crate::runtime::measurements::{LinkBytes, Profile, Spent, Statistics};
pub(crate) use crate::shm::HandoverBuffer;
pub use crate::wire::Cause;
pub use alloc::SharedBuffer;
pub use compressor::Compressor;
pub use foreign::ForeignBuffer;
pub use handle::{Handle, wait_all, wait_any};
pub use messages::{Messenger, Received, SendOptions, Source};
pub use options::{JoinOptions, OPERATION_TIMEOUT, SEGMENT_BYTES, START_TIMEOUT};
pub use selection::{Algorithms, LocalTransport};
pub use site::at;
pub use state::Group;
pub use streams::Streams;
