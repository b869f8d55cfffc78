//! Memory that the ranks of one host share: a [`Board`] on which each rank posts what it has and reads what the others have.
//!
//! The memory is an anonymous file (`memfd_create`), which has no name that could be left behind: the kernel frees it when
//! the last rank that has it mapped is gone, however that rank ended. Its size is sealed, so that no access can fail because
//! another process has cut it off, and it takes memory only as far as it is used.
//!
//! A [`Window`] is a buffer of one rank, made in the same way, that the others reach where it lies.

mod board;
mod segment;
mod window;

pub use board::{BUFFERS_MAX, Board, BoardSize, HEADER_WORDS, Header, Posted, Spot};
pub use segment::{Place, Segment, TOKEN_BYTES};
pub use window::{OwnWindow, Window};
