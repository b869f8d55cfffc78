//! What travels between ranks, byte by byte: frames, the handshake, root causes. Pure functions on bytes.

pub mod cause;

pub use cause::Cause;
