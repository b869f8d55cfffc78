//! Executes the operations of a rank. [`link_driver`] connects the engine, the transport, the memory of operations and the
//! kernels; [`host_rounds`] runs collectives in shared memory; [`driver`] adds the clock, the lock and the threads.
//!
//! The files of this module import no file that imports them, so each can be read after the files that it imports.

pub(crate) mod buffer;
pub(crate) mod deferred_drop;
pub(crate) mod driver;
pub(crate) mod encoding;
pub(crate) mod error;
pub(crate) mod failure_report;
mod gathering;
pub(crate) mod host_rounds;
pub(crate) mod link_driver;
pub(crate) mod link_io;
pub(crate) mod measurements;
pub(crate) mod memory;
