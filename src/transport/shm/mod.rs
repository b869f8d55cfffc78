//! Memory that the ranks of one host share: a [`ShmRounds`] on which each rank posts what it has and reads what the others have.
//!
//! The memory is an anonymous file (`memfd_create`), which has no name that could be left behind: the kernel frees it when
//! the last rank that has it mapped is gone, however that rank ended. Its size is sealed, so that no access can fail because
//! another process has cut it off, and it takes memory only as far as it is used.
//!
//! A [`RemoteBuffer`] is a buffer of one rank, made in the same way, that the others reach where it lies.

mod buffer;
mod rounds;
mod segment;

pub use buffer::{ExposedBuffer, RemoteBuffer};
pub use rounds::{BUFFERS_MAX, BufferRef, HEADER_WORDS, Header, PostedRound, RoundsSize, ShmRounds};
pub use segment::{Segment, SegmentLocation, TOKEN_BYTES};
