//! The bytes that ranks send each other: the handshake, frames, records and root causes. Pure functions on bytes.
//!
//! All integers are little-endian. `docs/wire-format.md` describes every layout. Every size that a peer can claim has a limit
//! here, and no input from the network causes a panic.

pub mod cause;
mod contract;
pub mod frame;
pub mod handshake;
#[cfg(test)]
mod handshake_tests;
mod reader;
pub mod record;
mod secret;

pub use cause::Cause;
pub use contract::{CONTRACT_WORDS, contract_of_words, contract_to_words};
pub use frame::{Header, HeaderError, Kind};
pub use reader::printable;
pub use secret::{SECRET_BYTES_MAX, SECRET_BYTES_MIN, Secret, SecretError};

/// The version of everything on the wire. Ranks of different versions refuse each other in the handshake.
pub const VERSION: u16 = 7;
