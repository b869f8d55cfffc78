//! The part of the runtime that strategies use. Strategies call only this trait, and not [`Group`]. So a change of
//! the API of [`Group`] changes this file, but no strategy.

use half::{bf16, f16};

use super::shard_exchange::{ShardSums, add_over_ranks};
use crate::codec::{CompressedElement, Compression};
use crate::group::verbs::{AllReduce, ReduceScatter};
use crate::group::{Error, Group, Handle, SharedBuffer, Status};
use crate::types::{Element, Rank, ReduceOp, WorldSize};

/// The operations between ranks that strategies use. All ranks must call these functions in the same order.
///
/// This trait has at most six functions, so that it stays easy to see what strategies need.
pub(crate) trait Runtime {
    /// Returns this rank and the number of ranks.
    fn rank_and_size(&self) -> (Rank, WorldSize);

    /// Combines the values of all ranks, as [`Values`] says. The result has the same bits on all ranks.
    fn combine(&mut self, values: Values<'_>) -> Result<(), Error>;

    /// Starts to sum `values` over all ranks, and returns while the sum is still in progress. `reuse` may be the
    /// buffer of an earlier sum that had the same number of values, the same target and the same compression.
    fn start_sum(
        &mut self,
        values: &[f32],
        target_and_format: (SumTarget, Compression),
        reuse: Option<SumBuffer>,
    ) -> Result<PendingSum, Error>;

    /// Starts to sum a few numbers over all ranks, and returns while the sum is still in progress.
    fn start_sum_of_totals(&mut self, totals: Vec<f64>) -> Result<PendingTotals, Error>;

    /// Starts to send `values` to the rank `to`, and returns while the message is still being sent. Messages with the
    /// same tag arrive in the order in which they were sent. Only the sender and the receiver call this function and
    /// [`start_receive`](Self::start_receive).
    fn start_send(&mut self, values: Vec<f32>, to: Rank, tag: u32) -> Result<PendingSend, Error>;

    /// Starts to receive a message into `buffer`, which must be as long as the message.
    fn start_receive(&mut self, buffer: Vec<f32>, from: Rank, tag: u32) -> Result<PendingReceive, Error>;
}

/// Returns a runtime for the ranks that pass the same `part`, sorted by rank. All ranks must call this function.
pub(crate) fn split_by_part(group: &mut Group, part: u32) -> Result<Box<dyn Runtime>, Error> {
    let key = i64::from(group.rank().get());
    let own = group.split(Some(part), key)?.expect("a rank that passes a part is a member of a new group");
    Ok(Box::new(own))
}

/// The values that ranks combine. The description of each variant says how the ranks combine its values.
pub(crate) enum Values<'a> {
    /// Parameters or gradients, and the format in which ranks send them. Sums over all ranks replace the values.
    Vector(&'a mut [f32], Compression),
    /// A few numbers. Sums over all ranks replace the numbers.
    Totals(&'a mut [f64]),
    /// The gradients of logical shards, which are added in the order of a summation tree.
    ShardSums(ShardSums<'a>),
    /// Parameters. Each rank's chunk ([`Group::chunk`]) is copied to all ranks.
    Chunks(&'a mut [f32]),
}

/// The sums that a rank gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SumTarget {
    /// All sums.
    Everything,
    /// The sums of the rank's chunk ([`Group::chunk`]).
    OwnChunk,
}

/// A buffer for a sum, in the format in which ranks send the values.
pub(crate) enum SumBuffer {
    F32(ElementBuffer<f32>),
    F16(ElementBuffer<f16>),
    Bf16(ElementBuffer<bf16>),
}

/// A sum of parameters or gradients over all ranks. The sum may still be in progress.
pub(crate) enum PendingSum {
    F32(PendingElements<f32>),
    F16(PendingElements<f16>),
    Bf16(PendingElements<bf16>),
}

/// The elements of a [`SumBuffer`].
pub(crate) enum ElementBuffer<T: Element> {
    /// The buffer for [`SumTarget::Everything`]. Ranks on the same host reduce this buffer in place.
    Everything(SharedBuffer<T>),
    /// The buffer for [`SumTarget::OwnChunk`]. After the sum, the vector holds only the rank's chunk, but keeps its
    /// capacity.
    OwnChunk(Vec<T>),
}

/// The elements of a [`PendingSum`].
pub(crate) enum PendingElements<T: Element> {
    Everything(Handle<SharedBuffer<T>>),
    OwnChunk(Handle<Vec<T>>),
}

/// A sum of a few numbers over all ranks. The sum may still be in progress.
pub(crate) struct PendingTotals(Handle<Vec<f64>>);

/// A message to another rank. The message may still be in progress.
pub(crate) struct PendingSend(Handle<Vec<f32>>);

/// A message from another rank. The message may still be in progress.
pub(crate) struct PendingReceive(Handle<(Vec<f32>, Status)>);

impl Runtime for Group {
    fn rank_and_size(&self) -> (Rank, WorldSize) {
        (self.rank(), self.size())
    }

    fn combine(&mut self, values: Values<'_>) -> Result<(), Error> {
        match values {
            Values::Vector(values, compression) => {
                self.call(AllReduce::new(ReduceOp::Sum).compressed(compression)).run(values).map(drop)
            }
            Values::Totals(totals) => self.all_reduce(totals, ReduceOp::Sum),
            Values::ShardSums(sums) => add_over_ranks(self, sums),
            Values::Chunks(parameters) => self.all_gather(parameters),
        }
    }

    fn start_sum(
        &mut self,
        values: &[f32],
        (target, compression): (SumTarget, Compression),
        reuse: Option<SumBuffer>,
    ) -> Result<PendingSum, Error> {
        let count_and_target = (values.len(), target);
        Ok(match compression {
            Compression::None => {
                let reuse = if let Some(SumBuffer::F32(buffer)) = reuse { Some(buffer) } else { None };
                let fill = |buffer: &mut [f32]| buffer.copy_from_slice(values);
                PendingSum::F32(start_sum_of_elements(self, count_and_target, reuse, fill)?)
            }
            Compression::Fp16 => {
                let reuse = if let Some(SumBuffer::F16(buffer)) = reuse { Some(buffer) } else { None };
                let fill = |buffer: &mut [f16]| f16::encode(values, buffer);
                PendingSum::F16(start_sum_of_elements(self, count_and_target, reuse, fill)?)
            }
            Compression::Bf16 => {
                let reuse = if let Some(SumBuffer::Bf16(buffer)) = reuse { Some(buffer) } else { None };
                let fill = |buffer: &mut [bf16]| bf16::encode(values, buffer);
                PendingSum::Bf16(start_sum_of_elements(self, count_and_target, reuse, fill)?)
            }
            _ => return Err(Error::InvalidCounts("WIP")),
        })
    }

    fn start_sum_of_totals(&mut self, totals: Vec<f64>) -> Result<PendingTotals, Error> {
        self.all_reduce_async(totals, ReduceOp::Sum).map(PendingTotals)
    }

    fn start_send(&mut self, values: Vec<f32>, to: Rank, tag: u32) -> Result<PendingSend, Error> {
        self.send_async(values, to, tag).map(PendingSend)
    }

    fn start_receive(&mut self, buffer: Vec<f32>, from: Rank, tag: u32) -> Result<PendingReceive, Error> {
        self.receive_into_async(buffer, from, tag).map(PendingReceive)
    }
}

/// Starts to sum `count` elements, which `fill` writes to a buffer. `count` must be the same on all ranks.
fn start_sum_of_elements<T: Element>(
    group: &mut Group,
    (count, target): (usize, SumTarget),
    reuse: Option<ElementBuffer<T>>,
    fill: impl FnOnce(&mut [T]),
) -> Result<PendingElements<T>, Error> {
    match (target, reuse) {
        (SumTarget::Everything, reuse) => {
            let mut buffer = match reuse {
                Some(ElementBuffer::Everything(buffer)) if buffer.len() == count => buffer,
                _ => group.alloc(count)?,
            };
            fill(&mut buffer);
            group.all_reduce_async(buffer, ReduceOp::Sum).map(PendingElements::Everything)
        }
        (SumTarget::OwnChunk, reuse) => {
            let mut buffer = match reuse {
                Some(ElementBuffer::OwnChunk(buffer)) => buffer,
                _ => Vec::new(),
            };
            buffer.resize(count, bytemuck::Zeroable::zeroed());
            fill(&mut buffer);
            let own = group.chunk(count, group.rank());
            let reduced = group.call(ReduceScatter::new(ReduceOp::Sum)).start(buffer)?;
            Ok(PendingElements::OwnChunk(reduced.and_then(move |mut buffer| {
                buffer.truncate(own.end);
                buffer.drain(..own.start);
                Ok(buffer)
            })))
        }
    }
}

impl<T: Element> PendingElements<T> {
    fn wait(self) -> Result<ElementBuffer<T>, Error> {
        Ok(match self {
            Self::Everything(handle) => ElementBuffer::Everything(handle.wait()?),
            Self::OwnChunk(handle) => ElementBuffer::OwnChunk(handle.wait()?),
        })
    }
}

impl<T: Element> ElementBuffer<T> {
    fn elements_mut(&mut self) -> &mut [T] {
        match self {
            Self::Everything(buffer) => buffer,
            Self::OwnChunk(buffer) => buffer,
        }
    }
}

impl PendingSum {
    /// Waits for the sums and calls `on_summed` with the sums. Returns the buffer, which a later sum may reuse. If
    /// the ranks sent compressed values, the sums are first written to `memory`. The length of `memory` must be the
    /// number of sums that this rank gets.
    pub(crate) fn wait(
        self,
        memory: &mut [f32],
        on_summed: impl FnOnce(&mut [f32]),
    ) -> Result<SumBuffer, Error> {
        Ok(match self {
            Self::F32(pending) => {
                let mut sums = pending.wait()?;
                on_summed(sums.elements_mut());
                SumBuffer::F32(sums)
            }
            Self::F16(pending) => {
                let mut sums = pending.wait()?;
                f16::decode(sums.elements_mut(), memory);
                on_summed(memory);
                SumBuffer::F16(sums)
            }
            Self::Bf16(pending) => {
                let mut sums = pending.wait()?;
                bf16::decode(sums.elements_mut(), memory);
                on_summed(memory);
                SumBuffer::Bf16(sums)
            }
        })
    }
}

impl PendingSum {
    /// Waits for the sums and writes them to `target`, whose length must be the number of sums that this rank gets.
    /// Returns the buffer, which a later sum may reuse.
    pub(crate) fn wait_into(self, target: &mut [f32]) -> Result<SumBuffer, Error> {
        match self {
            Self::F32(pending) => {
                let mut sums = pending.wait()?;
                target.copy_from_slice(sums.elements_mut());
                Ok(SumBuffer::F32(sums))
            }
            compressed => compressed.wait(target, |_| ()),
        }
    }
}

impl PendingTotals {
    /// Waits for the sums.
    pub(crate) fn wait(self) -> Result<Vec<f64>, Error> {
        self.0.wait()
    }
}

impl PendingSend {
    /// Waits until the message has left this rank. Returns the buffer of the message.
    pub(crate) fn wait(self) -> Result<Vec<f32>, Error> {
        self.0.wait()
    }
}

impl PendingReceive {
    /// Waits for the message.
    pub(crate) fn wait(self) -> Result<Vec<f32>, Error> {
        let (values, status) = self.0.wait()?;
        if status.count == values.len() {
            Ok(values)
        } else {
            Err(Error::InvalidCounts("a rank received a training message of an unexpected length"))
        }
    }
}
