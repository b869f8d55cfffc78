//! The part of the runtime that strategies use. Strategies call only this trait, and not [`Group`]. So a change of
//! the API of [`Group`] changes this file, but no strategy.

use half::{bf16, f16};

use super::shard_exchange::{ShardSums, add_over_ranks};
use crate::codec::{CompressedElement, Compression};
use crate::group::{Error, Group, Handle, SharedBuffer, Status};
use crate::types::{Element, Rank, ReduceOp, WorldSize};

/// The operations between ranks that strategies use. All ranks must call these functions in the same order.
///
/// This trait has at most six functions, so that it stays easy to see what strategies need.
pub(crate) trait Runtime {
    /// Returns this rank and the number of ranks.
    fn rank_and_size(&self) -> (Rank, WorldSize);

    /// Replaces each value by the sum of the values of all ranks. The result has the same bits on all ranks.
    fn sum_over_ranks(&mut self, values: Values<'_>) -> Result<(), Error>;

    /// Starts to sum `values` over all ranks, and returns while the sum is still in progress. `reuse` may be the
    /// buffer of an earlier sum that had the same number of values and the same compression.
    fn start_sum(
        &mut self,
        values: &[f32],
        compression: Compression,
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

/// The values of a sum.
pub(crate) enum Values<'a> {
    /// Parameters or gradients, and the format in which ranks send them.
    Vector(&'a mut [f32], Compression),
    /// A few numbers.
    Totals(&'a mut [f64]),
    /// The gradients of logical shards, which are added in the order of a summation tree.
    ShardSums(ShardSums<'a>),
}

/// A buffer for a sum, in the format in which ranks send the values. Ranks on the same host reduce these buffers in
/// place.
pub(crate) enum SumBuffer {
    F32(SharedBuffer<f32>),
    F16(SharedBuffer<f16>),
    Bf16(SharedBuffer<bf16>),
}

/// A sum of parameters or gradients over all ranks. The sum may still be in progress.
pub(crate) enum PendingSum {
    F32(Handle<SharedBuffer<f32>>),
    F16(Handle<SharedBuffer<f16>>),
    Bf16(Handle<SharedBuffer<bf16>>),
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

    fn sum_over_ranks(&mut self, values: Values<'_>) -> Result<(), Error> {
        match values {
            Values::Vector(values, compression) => {
                self.all_reduce_compressed(values, ReduceOp::Sum, compression)
            }
            Values::Totals(totals) => self.all_reduce(totals, ReduceOp::Sum),
            Values::ShardSums(sums) => add_over_ranks(self, sums),
        }
    }

    fn start_sum(
        &mut self,
        values: &[f32],
        compression: Compression,
        reuse: Option<SumBuffer>,
    ) -> Result<PendingSum, Error> {
        let op = ReduceOp::Sum;
        Ok(match (compression, reuse) {
            (Compression::None, reuse) => {
                let reuse = if let Some(SumBuffer::F32(buffer)) = reuse { Some(buffer) } else { None };
                let mut buffer = reuse_or_allocate(self, reuse, values.len())?;
                buffer.copy_from_slice(values);
                PendingSum::F32(self.all_reduce_async(buffer, op)?)
            }
            (Compression::Fp16, reuse) => {
                let reuse = if let Some(SumBuffer::F16(buffer)) = reuse { Some(buffer) } else { None };
                let mut buffer = reuse_or_allocate(self, reuse, values.len())?;
                f16::encode(values, &mut buffer);
                PendingSum::F16(self.all_reduce_async(buffer, op)?)
            }
            (Compression::Bf16, reuse) => {
                let reuse = if let Some(SumBuffer::Bf16(buffer)) = reuse { Some(buffer) } else { None };
                let mut buffer = reuse_or_allocate(self, reuse, values.len())?;
                bf16::encode(values, &mut buffer);
                PendingSum::Bf16(self.all_reduce_async(buffer, op)?)
            }
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

/// Returns a buffer of `count` elements: `reuse` if it has this length, or a new one. `count` must be the same on all
/// ranks.
fn reuse_or_allocate<T: Element>(
    group: &mut Group,
    reuse: Option<SharedBuffer<T>>,
    count: usize,
) -> Result<SharedBuffer<T>, Error> {
    match reuse {
        Some(buffer) if buffer.len() == count => Ok(buffer),
        _ => group.alloc(count),
    }
}

impl PendingSum {
    /// Waits for the sums and calls `on_summed` with the sums. Returns the buffer, which a later sum may reuse. If
    /// the ranks sent compressed values, the sums are first written to `target`. The length of `target` must be the
    /// number of values.
    pub(crate) fn wait(
        self,
        target: &mut [f32],
        on_summed: impl FnOnce(&mut [f32]),
    ) -> Result<SumBuffer, Error> {
        Ok(match self {
            Self::F32(handle) => {
                let mut sums = handle.wait()?;
                on_summed(&mut sums);
                SumBuffer::F32(sums)
            }
            Self::F16(handle) => {
                let sums = handle.wait()?;
                f16::decode(&sums, target);
                on_summed(target);
                SumBuffer::F16(sums)
            }
            Self::Bf16(handle) => {
                let sums = handle.wait()?;
                bf16::decode(&sums, target);
                on_summed(target);
                SumBuffer::Bf16(sums)
            }
        })
    }
}

impl PendingSum {
    /// Waits for the sums and writes them to `target`, which must be as long as the values. Returns the buffer, which
    /// a later sum may reuse.
    pub(crate) fn wait_into(self, target: &mut [f32]) -> Result<SumBuffer, Error> {
        match self {
            Self::F32(handle) => {
                let sums = handle.wait()?;
                target.copy_from_slice(&sums);
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
            Err(Error::InvalidCounts(
                "a message of the training has another length than its receiver expects",
            ))
        }
    }
}
