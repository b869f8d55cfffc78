//! The part of the runtime that strategies use. Strategies call only this trait, and not [`Group`]. So a change of
//! the API of [`Group`] changes this file, but no strategy.

use super::shard_exchange::{ShardSums, add_over_ranks};
use crate::group::verbs::{AllReduce, ReduceScatter};
use crate::group::{Compressor, Error, Group, Handle, SharedBuffer, Status};
use crate::types::{Rank, ReduceOp, WorldSize};

/// The operations between ranks that strategies use. All ranks must call these functions in the same order.
///
/// This trait has at most six functions, so that it stays easy to see what strategies need.
pub(crate) trait Runtime {
    /// Returns this rank and the number of ranks.
    fn rank_and_size(&self) -> (Rank, WorldSize);

    /// Combines the values of all ranks, as [`Values`] says. The result has the same bits on all ranks.
    fn combine(&mut self, values: Values<'_>) -> Result<(), Error>;

    /// Starts to sum a vector over all ranks, and returns while the sum is still in progress. `values` are the parts of the
    /// vector, one after the other. `compressor` encodes what goes to other hosts. `reuse` may be the buffer of an earlier sum.
    /// If that sum had the same number of values and the same target, its memory is used again.
    fn start_sum(
        &mut self,
        values: &[&[f32]],
        target_and_compressor: (SumTarget, &Compressor),
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
    /// Parameters or gradients. Exact sums over all ranks replace the values.
    Vector(&'a mut [f32]),
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

/// The buffer of a sum.
pub(crate) enum SumBuffer {
    /// The buffer for [`SumTarget::Everything`]. Ranks on the same host reduce this buffer in place.
    Everything(SharedBuffer<f32>),
    /// The buffer for [`SumTarget::OwnChunk`]. After the sum, the vector holds only the rank's chunk, but keeps its
    /// capacity.
    OwnChunk(Vec<f32>),
}

/// A sum of parameters or gradients over all ranks. The sum may still be in progress.
pub(crate) enum PendingSum {
    Everything(Handle<SharedBuffer<f32>>),
    OwnChunk(Handle<Vec<f32>>),
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
            Values::Vector(values) => self.all_reduce(values, ReduceOp::Sum),
            Values::Totals(totals) => self.all_reduce(totals, ReduceOp::Sum),
            Values::ShardSums(sums) => add_over_ranks(self, sums),
            Values::Chunks(parameters) => self.all_gather(parameters),
        }
    }

    fn start_sum(
        &mut self,
        values: &[&[f32]],
        (target, compressor): (SumTarget, &Compressor),
        reuse: Option<SumBuffer>,
    ) -> Result<PendingSum, Error> {
        let count = values.iter().map(|part| part.len()).sum();
        match target {
            SumTarget::Everything => {
                let mut buffer = match reuse {
                    Some(SumBuffer::Everything(buffer)) if buffer.len() == count => buffer,
                    _ => self.alloc(count)?,
                };
                let mut rest = &mut buffer[..];
                for part in values {
                    let (start, end) = rest.split_at_mut(part.len());
                    start.copy_from_slice(part);
                    rest = end;
                }
                let verb = AllReduce::new(ReduceOp::Sum).compressed(compressor);
                self.call(verb).start(buffer).map(PendingSum::Everything)
            }
            SumTarget::OwnChunk => {
                let mut buffer = match reuse {
                    Some(SumBuffer::OwnChunk(buffer)) => buffer,
                    _ => Vec::new(),
                };
                buffer.clear();
                for part in values {
                    buffer.extend_from_slice(part);
                }
                let own = self.chunk(count, self.rank());
                let verb = ReduceScatter::new(ReduceOp::Sum).compressed(compressor);
                let reduced = self.call(verb).start(buffer)?;
                Ok(PendingSum::OwnChunk(reduced.and_then(move |mut buffer| {
                    buffer.truncate(own.end);
                    buffer.drain(..own.start);
                    Ok(buffer)
                })))
            }
        }
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

impl PendingSum {
    /// Waits for the sums and calls `on_summed` with the sums that this rank gets. Returns the buffer, which a later sum may
    /// reuse.
    pub(crate) fn wait(self, on_summed: impl FnOnce(&mut [f32])) -> Result<SumBuffer, Error> {
        Ok(match self {
            Self::Everything(handle) => {
                let mut sums = handle.wait()?;
                on_summed(&mut sums);
                SumBuffer::Everything(sums)
            }
            Self::OwnChunk(handle) => {
                let mut sums = handle.wait()?;
                on_summed(&mut sums);
                SumBuffer::OwnChunk(sums)
            }
        })
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
