//! Memory that the ranks of one host share (`docs/shared-memory.md`). In a [`ShmRounds`], each rank posts payloads and reads
//! those of the other ranks. A queue carries the bytes of a link from one rank to another ([`QueueSender`], [`QueueReceiver`]),
//! and [`QueueSignals`] says when a rank must be woken.
//!
//! The memory is an anonymous file, whose size is sealed, so no process can shorten the file and make an access fail.
//!
//! The ranks use a [`HandoverBuffer`] in turns. An [`ExposedBuffer`] is a buffer of this rank in shared memory. The other ranks
//! map it as a [`RemoteBuffer`], and read and write its elements in place.

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

mod buffer;
mod copy;
mod host;
mod memory;
mod queue;
mod rounds;
mod segment;
mod signals;

pub use buffer::{ExposedBuffer, HandoverBuffer, RemoteBuffer};
pub use copy::{copy_to_buffer, exceeds_caches};
pub use host::HostMemoryLayout;
pub use memory::{RoundsMemory, SegmentMemory, pause_between_looks};
pub use queue::{NextEntry, QueueError, QueueMessage, QueueReceiver, QueueSender};
pub use rounds::{
    BUFFERS_MAX, HEADER_WORDS, Header, LEAD_MAX, Payload, PostedRound, Posts, RoundsSize,
    SHORT_PAYLOAD_BYTES_MAX, ShmRounds, ShortPost,
};
pub use segment::{Segment, SegmentLocation, TOKEN_BYTES};
pub use signals::QueueSignals;
#[cfg(test)]
pub use {memory::WORD_BYTES, rounds::BufferRef};
