//! Memory that the ranks of one host share. In a [`ShmRounds`], each rank posts payloads and reads the payloads of the
//! other ranks.
//!
//! The memory is an anonymous file (`memfd_create`), which has no name. The kernel frees the memory when no process maps
//! it any more, even if the processes were killed. The size of the file is sealed, so no process can shorten the file and
//! make an access fail. The kernel allocates only the pages that have been written.
//!
//! An [`ExposedBuffer`] is a buffer of this rank in shared memory. The other ranks map it as a [`RemoteBuffer`], and
//! read and write its elements in place.

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

mod buffer;
mod rounds;
mod segment;

pub use buffer::{ExposedBuffer, RemoteBuffer};
pub use rounds::{BUFFERS_MAX, BufferRef, HEADER_WORDS, Header, PostedRound, RoundsSize, ShmRounds};
pub use segment::{Segment, SegmentLocation, TOKEN_BYTES};
