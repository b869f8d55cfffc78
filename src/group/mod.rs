//! The public API: a [`Group`] of ranks and the collectives they call together.

mod buffer;
mod error;

use std::ops::Range;
use std::time::Duration;

pub use buffer::Buffer;
pub use error::Error;

use crate::codec::Compression;
use crate::types::{Rank, ReduceOp, WorldSize};
use crate::wire::Cause;

/// What a group has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Operations completed.
    pub operations: u64,
    /// Bytes this rank sent, headers included.
    pub bytes_sent: u64,
    /// Bytes this rank received, headers included.
    pub bytes_received: u64,
    /// Time this rank spent inside collectives, waiting for slower ranks included.
    pub communication: Duration,
}

/// The ranks of a job, seen from one of them.
pub struct Group {
    failure: Option<Error>,
}

impl Group {
    /// A group of this process alone: every collective returns at once.
    pub fn solo() -> Self {
        Self { failure: None }
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        Rank::ZERO
    }

    /// How many ranks there are.
    pub fn size(&self) -> WorldSize {
        WorldSize::ONE
    }

    /// This process's number among the ranks of its host.
    pub fn local_rank(&self) -> Rank {
        Rank::ZERO
    }

    /// How many ranks this host has.
    pub fn local_size(&self) -> WorldSize {
        WorldSize::ONE
    }

    /// What has been done so far.
    pub fn statistics(&self) -> Statistics {
        Statistics::default()
    }

    /// Leaves in every rank's buffer the reduction of all ranks' buffers, bit for bit the same everywhere.
    pub fn all_reduce<B: Buffer + ?Sized>(&mut self, buffer: &mut B, _op: ReduceOp) -> Result<(), Error> {
        buffer.elements_mut()?;
        Ok(())
    }

    /// All-reduce of `f32` that travels compressed.
    pub fn all_reduce_compressed<B: Buffer<Element = f32> + ?Sized>(
        &mut self,
        buffer: &mut B,
        _op: ReduceOp,
        _compression: Compression,
    ) -> Result<(), Error> {
        buffer.elements_mut()?;
        Ok(())
    }

    /// Leaves this rank's chunk of the reduction in its place; returns where that is.
    pub fn reduce_scatter<B: Buffer + ?Sized>(&mut self, buffer: &mut B, _op: ReduceOp) -> Result<Range<usize>, Error> {
        Ok(0..buffer.elements_mut()?.len())
    }

    /// Each rank's chunk ([`Group::chunk`]) becomes everybody's.
    pub fn all_gather<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        buffer.elements_mut()?;
        Ok(())
    }

    /// The root's buffer becomes everybody's.
    pub fn broadcast<B: Buffer + ?Sized>(&mut self, buffer: &mut B, _root: Rank) -> Result<(), Error> {
        buffer.elements_mut()?;
        Ok(())
    }

    /// Returns when every rank has entered.
    pub fn barrier(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Ends the job on every rank: this one's reason becomes everybody's error. Returns that error.
    pub fn abort(&mut self, message: &str) -> Error {
        let cause = Cause::Aborted { rank: self.rank(), host: "localhost".into(), message: message.into() };
        self.failure.insert(Error::Failed { cause, reported_by: None }).clone()
    }

    /// Says goodbye to all peers and closes every connection in order. Dropping the group does the same.
    pub fn close(self) {}
}
