//! The public API: a [`Group`] of ranks and the collectives they call together.
//!
//! ```
//! use ringtrain::{Group, ReduceOp};
//!
//! // Under `ringrun -n 4` this would be `Group::join(&JoinOptions::default())`.
//! let mut group = Group::solo();
//! let mut gradients = vec![1.0f32, 2.0, 3.0];
//! group.all_reduce(&mut gradients, ReduceOp::Average)?;
//! assert_eq!(gradients, [1.0, 2.0, 3.0]);
//! # Ok::<(), ringtrain::Error>(())
//! ```

mod buffer;
mod driver;
mod error;
mod join;
pub mod pump;

use std::ops::Range;
use std::time::Duration;

pub use buffer::Buffer;
pub use error::Error;
pub use join::{JoinOptions, Meeting, OPERATION_TIMEOUT, SEGMENT_BYTES, START_TIMEOUT};

use self::driver::Driver;
use crate::codec::{self, Compression};
use crate::reduce;
use crate::rendezvous::StartError;
use crate::schedule::{self, Schedule, partition};
use crate::types::{Algorithm, Contract, DType, Element, Operation, Rank, ReduceOp, WorldSize};
use crate::wire::Cause;

/// Elements that a compressed all-reduce converts at a time: 2 MiB on the wire, and as much extra memory.
const COMPRESSED_BLOCK: usize = 1 << 20;

/// The most blocks that an all-reduce is cut into, so that its schedule stays small however long the buffer is.
const BLOCKS_MAX: usize = 512;

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
///
/// All ranks have to call the same collectives in the same order, with buffers of the same length and element type;
/// whatever does not agree ends the job with an error that says what each rank asked for. A collective works in place,
/// blocks until this rank's part is done, and leaves the same bits on every rank whose result is the same. When a peer
/// dies every rank's current or next call returns an error that names it. After a failed operation the buffer's content
/// is unspecified, and every later call returns the same error.
pub struct Group {
    rank: Rank,
    world: WorldSize,
    local: (Rank, WorldSize),
    /// `None` for a world of one, which has no links.
    driver: Option<Driver>,
    /// Why a world of one has been given up.
    abandoned: Option<Error>,
    operations: u64,
    /// Bytes of a chunk of an all-reduce's block, the same on all ranks.
    chunk_bytes: usize,
}

impl Group {
    /// A group of this process alone: every collective returns at once.
    pub fn solo() -> Self {
        Self {
            rank: Rank::ZERO,
            world: WorldSize::ONE,
            local: (Rank::ZERO, WorldSize::ONE),
            driver: None,
            abandoned: None,
            operations: 0,
            chunk_bytes: join::CHUNK_BYTES,
        }
    }

    /// Joins the job that the options describe: meets the other ranks, opens the ring and returns when it is closed.
    ///
    /// # Errors
    ///
    /// [`StartError`] naming who is missing, or what is wrong and on whose side.
    pub fn join(options: &JoinOptions) -> Result<Self, StartError> {
        join::join(options)
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> WorldSize {
        self.world
    }

    /// This process's number among the ranks of its host.
    pub fn local_rank(&self) -> Rank {
        self.local.0
    }

    /// How many ranks this host has.
    pub fn local_size(&self) -> WorldSize {
        self.local.1
    }

    /// The congestion control that links use; `None` for the host's default or a world of one.
    pub fn congestion_control(&self) -> Option<&str> {
        self.driver.as_ref().and_then(Driver::congestion_control)
    }

    /// How bytes travel: `tcp`, or `none` in a world of one.
    pub fn transport(&self) -> &'static str {
        self.driver.as_ref().map_or("none", Driver::transport)
    }

    /// What has been done so far.
    pub fn statistics(&self) -> Statistics {
        let mut statistics = self.driver.as_ref().map(Driver::statistics).unwrap_or_default();
        statistics.operations = self.operations;
        statistics
    }

    /// The elements of a buffer of `count` that belong to `rank` in [`Group::reduce_scatter`] and [`Group::all_gather`]:
    /// contiguous, in rank order, sizes differing by at most one.
    pub fn chunk(&self, count: usize, rank: Rank) -> Range<usize> {
        partition::chunk(count, self.world, rank)
    }

    /// Leaves in every rank's buffer the reduction of all ranks' buffers, bit for bit the same everywhere.
    ///
    /// Ring reduce-scatter and all-gather: 2(n-1) steps, 2(n-1)/n S bytes sent by each rank. `f16` and `bf16` are added
    /// in `f32` and rounded at each of the n-1 hops.
    ///
    /// # Errors
    ///
    /// [`Error`] if the array is not contiguous, the reduction is not defined on its elements, the ranks do not agree, a
    /// peer is lost or the deadline passes.
    pub fn all_reduce<B: Buffer + ?Sized>(&mut self, buffer: &mut B, op: ReduceOp) -> Result<(), Error> {
        let elements = buffer.elements_mut()?;
        let count = elements.len();
        let block = self.world.as_usize() * (self.chunk_bytes / size_of::<B::Element>());
        let schedule =
            schedule::all_reduce(self.world, self.rank, count, block.max(count.div_ceil(BLOCKS_MAX)));
        self.run(Operation::AllReduce, Some(op), Rank::ZERO, elements, schedule)
    }

    /// All-reduce of `f32` that travels compressed, in blocks of 2^20 elements. All ranks end with the same bits, rounded
    /// to what the compression keeps; each hop rounds as well.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    pub fn all_reduce_compressed<B: Buffer<Element = f32> + ?Sized>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
        compression: Compression,
    ) -> Result<(), Error> {
        match compression {
            Compression::None => self.all_reduce(buffer, op),
            Compression::Fp16 => self.all_reduce_as::<half::f16>(buffer.elements_mut()?, op),
            Compression::Bf16 => self.all_reduce_as::<half::bf16>(buffer.elements_mut()?, op),
        }
    }

    fn all_reduce_as<H: codec::Narrow>(&mut self, elements: &mut [f32], op: ReduceOp) -> Result<(), Error> {
        let mut narrow = vec![H::ZERO; elements.len().min(COMPRESSED_BLOCK)];
        // An empty buffer still takes part: its peers have to learn that it is empty.
        for start in (0..elements.len().max(1)).step_by(COMPRESSED_BLOCK) {
            let end = elements.len().min(start + COMPRESSED_BLOCK);
            let block = &mut elements[start..end];
            let narrow = &mut narrow[..block.len()];
            H::encode(block, narrow);
            self.all_reduce(narrow, op)?;
            H::decode(narrow, block);
        }
        Ok(())
    }

    /// Leaves the reduction of this rank's chunk ([`Group::chunk`]) in its place and returns where that is; the rest of
    /// the buffer holds partial results.
    ///
    /// Ring: n-1 steps, (n-1)/n S bytes.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    pub fn reduce_scatter<B: Buffer + ?Sized>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
    ) -> Result<Range<usize>, Error> {
        let elements = buffer.elements_mut()?;
        let count = elements.len();
        let schedule = schedule::reduce_scatter(self.world, self.rank, count);
        self.run(Operation::ReduceScatter, Some(op), Rank::ZERO, elements, schedule)?;
        Ok(self.chunk(count, self.rank))
    }

    /// Each rank's chunk ([`Group::chunk`]) of its own buffer becomes everybody's.
    ///
    /// Ring: n-1 steps, (n-1)/n S bytes.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    pub fn all_gather<B: Buffer + ?Sized>(&mut self, buffer: &mut B) -> Result<(), Error> {
        let elements = buffer.elements_mut()?;
        let schedule = schedule::all_gather(self.world, self.rank, elements.len());
        self.run(Operation::AllGather, None, Rank::ZERO, elements, schedule)
    }

    /// The root's buffer becomes everybody's.
    ///
    /// Pipelined along the ring: n-1 hops, S bytes sent by each rank but the last, S/B plus n-2 segments of time.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`], and [`Error::InvalidRoot`].
    pub fn broadcast<B: Buffer + ?Sized>(&mut self, buffer: &mut B, root: Rank) -> Result<(), Error> {
        if !self.world.contains(root) {
            return Err(Error::InvalidRoot { root, world: self.world });
        }
        let elements = buffer.elements_mut()?;
        let schedule = schedule::broadcast(self.world, self.rank, root, elements.len());
        self.run(Operation::Broadcast, None, root, elements, schedule)
    }

    /// Returns when every rank has entered: ceil(log2 n) rounds of an empty message.
    ///
    /// # Errors
    ///
    /// As [`Group::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), Error> {
        let schedule = schedule::barrier(self.world, self.rank);
        self.run::<u8>(Operation::Barrier, None, Rank::ZERO, &mut [], schedule)
    }

    /// Ends the job on every rank: this one's reason becomes everybody's error. Returns that error.
    pub fn abort(&mut self, message: &str) -> Error {
        if let Some(driver) = &mut self.driver {
            return driver.abort(message);
        }
        let cause = Cause::Aborted { rank: self.rank, host: "this host".into(), message: message.to_owned() };
        self.abandoned.get_or_insert(Error::Failed { cause, reported_by: None }).clone()
    }

    /// Says goodbye to all peers and closes every connection in order. Dropping the group does the same.
    pub fn close(self) {
        drop(self);
    }

    fn run<T: Element>(
        &mut self,
        operation: Operation,
        reduction: Option<ReduceOp>,
        root: Rank,
        elements: &mut [T],
        schedule: Schedule,
    ) -> Result<(), Error> {
        // Before anything is sent: a slip in the arguments leaves the group as it was.
        if let Some(op) = reduction.filter(|&op| reduce::kernels(T::DTYPE, op).is_none()) {
            return Err(Error::Unsupported { op, dtype: T::DTYPE });
        }
        if let Some(error) = &self.abandoned {
            return Err(error.clone());
        }
        if let Some(driver) = &mut self.driver {
            let contract = Contract {
                operation,
                dtype: if operation == Operation::Barrier { DType::U8 } else { T::DTYPE },
                reduction,
                algorithm: algorithm_of(operation),
                root,
                count: elements.len() as u64,
            };
            driver.run(contract, schedule, bytemuck::cast_slice_mut(elements))?;
        } else if let Some(op) = reduction {
            reduce::alone(T::DTYPE, op, bytemuck::cast_slice_mut(elements));
        }
        self.operations += 1;
        Ok(())
    }
}

fn algorithm_of(operation: Operation) -> Algorithm {
    match operation {
        Operation::Barrier => Algorithm::Dissemination,
        Operation::AllReduce | Operation::ReduceScatter | Operation::AllGather | Operation::Broadcast => {
            Algorithm::Ring
        }
    }
}
