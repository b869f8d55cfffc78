//! Encodes and decodes the bytes that ranks send each other: the handshake, frames, records and root causes; and the exit
//! record, which a rank sends to `ringrun`. This module does no IO.
//!
//! All integers are little-endian. `docs/wire-format.md` describes every layout. Every length that a peer can send
//! has a limit here, and no input from the network causes a panic.

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

pub mod cause;
mod checksum;
mod contract;
mod exit_record;
pub mod frame;
pub mod handshake;
#[cfg(test)]
mod handshake_tests;
mod introduction;
mod missed_deadline;
mod reader;
pub mod record;
mod secret;

pub use cause::Cause;
pub use checksum::crc32c;
pub use contract::{CONTRACT_WORDS, contract_from_words, contract_to_words};
pub use exit_record::{CauseKind, EXIT_RECORD_BYTES_MAX, ExitRecord};
pub use frame::{FrameHeader, FrameKind, HeaderError};
pub use reader::printable;
pub use secret::{SECRET_BYTES_MAX, SECRET_BYTES_MIN, Secret, SecretError};

/// The version of the wire format. Ranks with different versions refuse each other in the handshake.
pub const VERSION: u16 = 12;
