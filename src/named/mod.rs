//! Named tensors: collectives that the ranks may start in different orders.
//!
//! The ranks of a group must call its collectives in the same order. A framework that computes gradients in parallel
//! has no common order: the threads of each rank finish gradients at different times. [`NamedTensors`] accepts
//! tensors by name, in any order. When all ranks have submitted a tensor, the tensor is ready. The ranks run ready
//! tensors in an order that rank 0 of the group chooses, and fuse small tensors into one operation.
//!
//! This is Horovod's model (Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
//! arXiv:1802.05799), but without a fixed cycle time. At most two operations run at once. Tensors that become ready while
//! two operations run are fused into the next operation.
//!
//! ```
//! use ringtrain::{Group, NamedOptions, NamedTensors, ReduceOp};
//!
//! let mut group = Group::solo();
//! let tensors = NamedTensors::new(&mut group, NamedOptions::default())?;
//! let bias = tensors.all_reduce("bias", vec![1.0f32], ReduceOp::Average)?;
//! let weights = tensors.all_reduce("weights", vec![2.0f32, 3.0], ReduceOp::Average)?;
//! assert_eq!(weights.wait()?, [2.0, 3.0]);
//! assert_eq!(bias.wait()?, [1.0]);
//! tensors.close()?;
//! # Ok::<(), ringtrain::NamedError>(())
//! ```

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

mod cache;
mod client;
mod coordinator;
#[cfg(test)]
mod coordinator_tests;
mod error;
mod execute;
mod message;
#[cfg(test)]
mod negotiation_tests;
mod runtime;
mod stalls;

use std::ops::Mul;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use client::UNFINISHED_TENSORS_MAX;
pub use error::NamedError;
pub use message::{NAME_BYTES_MAX, TENSOR_BYTES_MAX};
pub use stalls::Stall;

use self::coordinator::{Coordinator, CoordinatorLimits};
use self::execute::{
    PostProcess, Promise, ReadySignal, ResultReceiver, TensorInPlace, TensorPayload, TensorWithNewResult,
    lock, new_promise,
};
use self::message::{SLOTS_MAX, Signature, TensorOp};
use self::runtime::NamedTensorsState;
use self::stalls::StallWatch;
use crate::group::{Error, Group, OwnedBuffer};
use crate::types::{Element, Rank, ReduceOp};

/// The largest number of operations that run at the same time. While one operation sends and receives, the next
/// operation can copy its tensors into a buffer.
const RUNNING_OPERATIONS_MAX: usize = 2;

/// The options of named tensors. All ranks use the options that rank 0 of the group passes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NamedOptions {
    /// The largest total size in bytes of the tensors that are fused into one operation. A larger tensor is never
    /// fused. With 0, no tensors are fused.
    ///
    /// The default is 16 MiB. Horovod's default is 128 MiB, for networks and GPUs on which an operation has a higher
    /// fixed cost. Fusing copies each tensor twice. An operation of 16 MiB takes milliseconds, so the fixed cost of
    /// its 2(n-1) messages is small. A longer operation would only delay the first results.
    pub fusion_bytes: usize,
    /// The number of tensors for which the response cache has space; the largest value is 16 384. For a tensor in the
    /// cache, a rank reports only one bit instead of the name, the operation, the element type and the count.
    pub cache_capacity: usize,
    /// If a rank has submitted a tensor, and another rank does not submit it within this time, rank 0 logs a warning.
    pub stall_warning: Duration,
    /// If a rank has submitted a tensor, and another rank does not submit it within this time, the job ends. `None`
    /// means no limit. The default is `None`, as in Horovod, because a rank may compile or save a checkpoint for a
    /// long time. If a rank dies, the job ends in any case.
    pub stall_abort: Option<Duration>,
}

impl Default for NamedOptions {
    fn default() -> Self {
        Self {
            fusion_bytes: 16 << 20,
            cache_capacity: 1024,
            stall_warning: Duration::from_mins(1),
            stall_abort: None,
        }
    }
}

/// Statistics of a rank's named tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NamedStatistics {
    /// The number of tensors that this rank has submitted.
    pub tensors: u64,
    /// The number of submitted tensors that were in the response cache when this rank submitted them.
    pub cached: u64,
    /// The number of operations that have begun. Each fused operation counts once, so this number can be smaller than
    /// the number of tensors.
    pub operations: u64,
    /// The number of reports that this rank has sent to the coordinator on rank 0. A report lists submitted tensors.
    pub reports: u64,
}

/// Collectives of a group on tensors with names. Each rank can submit the tensors in any order and from any thread.
///
/// You can use a name again when the result of the tensor is available. Tensors with the same name must have the same
/// operation, element type and count on all ranks, except that the counts of an all-gather may differ. If one of these
/// properties differs between ranks, every rank gets an error for the tensor, and all other tensors continue. If
/// [`NamedOptions::stall_abort`] is set and a rank does not submit a tensor within this time, the job ends with an
/// error that names the tensor and the rank.
pub struct NamedTensors {
    shared: Arc<NamedTensorsState>,
    threads: Vec<JoinHandle<()>>,
}

impl NamedTensors {
    /// Creates named tensors for a group. All ranks of the group must call this function. You can still use the group
    /// for other calls.
    ///
    /// # Errors
    ///
    /// The errors of [`Group::duplicate`]; [`Error::System`] if a thread cannot be started.
    pub fn new(group: &mut Group, options: NamedOptions) -> Result<Self, Error> {
        let mut control = group.duplicate()?;
        let data = group.duplicate()?;
        // The control group has no timeout, because it is idle while no rank submits a tensor. The coordinator
        // detects stalls.
        control.set_timeout(Duration::MAX);
        let coordinator = (control.rank() == Rank::ZERO).then(|| {
            let limits = CoordinatorLimits {
                fusion_bytes: options.fusion_bytes as u64,
                cache_capacity: options.cache_capacity.min(usize::from(SLOTS_MAX)) as u16,
                running_operations_max: RUNNING_OPERATIONS_MAX,
            };
            let watch = StallWatch::new(options.stall_warning, options.stall_abort);
            Coordinator::new(limits, Arc::from(control.members()), watch)
        });
        let (shared, threads) = runtime::start_threads(control, data, coordinator)?;
        Ok(Self { shared, threads })
    }

    /// Submits a tensor for an all-reduce: the result is the reduction of the tensors with this name on all ranks, as
    /// in [`Group::all_reduce`]. A rank that has joined ([`NamedTensors::join`]) contributes zeros.
    ///
    /// The handle returns the buffer. A tensor that is not fused with other tensors is reduced in the buffer, without a
    /// copy.
    ///
    /// # Errors
    ///
    /// [`NamedError::InFlight`], [`NamedError::Limit`], [`NamedError::HasJoined`], [`NamedError::Closed`],
    /// [`Error::Unsupported`], or the failure of the job. If the tensor does not fit the tensors of other ranks, the
    /// handle returns the error.
    pub fn all_reduce<B: OwnedBuffer>(
        &self,
        name: &str,
        buffer: B,
        op: ReduceOp,
    ) -> Result<NamedHandle<B>, NamedError> {
        check_op_applies_to::<B::Element>(op)?;
        self.submit_in_place(name, TensorOp::AllReduce(op), buffer, None)
    }

    /// Submits a tensor as [`NamedTensors::all_reduce`] does, but first multiplies its elements by `prescale`, and later
    /// multiplies the result by `postscale` (Horovod's `prescale_factor` and `postscale_factor`). The factors may
    /// differ between ranks.
    ///
    /// # Errors
    ///
    /// The errors of [`NamedTensors::all_reduce`].
    pub fn all_reduce_scaled<B>(
        &self,
        name: &str,
        mut buffer: B,
        op: ReduceOp,
        (prescale, postscale): (B::Element, B::Element),
    ) -> Result<NamedHandle<B>, NamedError>
    where
        B: OwnedBuffer,
        B::Element: Mul<Output = B::Element>,
    {
        check_op_applies_to::<B::Element>(op)?;
        let multiply = |elements: &mut [B::Element], factor: B::Element| {
            for element in elements {
                *element = *element * factor;
            }
        };
        multiply(buffer.as_mut(), prescale);
        let post_process: PostProcess<B::Element> = Some(Box::new(move |result| multiply(result, postscale)));
        self.submit_in_place(name, TensorOp::AllReduce(op), buffer, post_process)
    }

    /// Submits a tensor for a reduce-scatter: the result is this rank's chunk ([`Group::chunk`]) of the reduction of
    /// the tensors with this name on all ranks. A rank that has joined contributes zeros. The tensor is not fused.
    ///
    /// # Errors
    ///
    /// The errors of [`NamedTensors::all_reduce`].
    pub fn reduce_scatter<B: OwnedBuffer>(
        &self,
        name: &str,
        buffer: B,
        op: ReduceOp,
    ) -> Result<NamedHandle<Vec<B::Element>>, NamedError> {
        check_op_applies_to::<B::Element>(op)?;
        let count = buffer.as_ref().len() as u64;
        let signature = Signature { kind: TensorOp::ReduceScatter(op), dtype: B::Element::DTYPE, count };
        self.submit(name, signature, |promise| TensorWithNewResult { buffer, promise })
    }

    /// Submits a tensor for a broadcast: the result is the tensor with this name on the root, as in
    /// [`Group::broadcast`]. All ranks must submit a tensor of the same length. The handle returns the buffer.
    ///
    /// # Errors
    ///
    /// The errors of [`NamedTensors::all_reduce`], and [`Error::InvalidRoot`].
    pub fn broadcast<B: OwnedBuffer>(
        &self,
        name: &str,
        buffer: B,
        root: Rank,
    ) -> Result<NamedHandle<B>, NamedError> {
        let world = lock(&self.shared.local).client.world();
        if !world.contains(root) {
            return Err(Error::InvalidRoot { root, world }.into());
        }
        self.submit_in_place(name, TensorOp::Broadcast(root), buffer, None)
    }

    /// Submits a tensor for an all-gather: the result is the concatenation of the tensors with this name on all
    /// ranks. Each rank's tensor may have a different length. The tensor is not fused.
    ///
    /// # Errors
    ///
    /// The errors of [`NamedTensors::all_reduce`]. If the result has more than [`TENSOR_BYTES_MAX`] bytes, the handle
    /// returns [`Error::InvalidCounts`] on every rank.
    pub fn all_gather<B: OwnedBuffer>(
        &self,
        name: &str,
        buffer: B,
    ) -> Result<NamedHandle<Vec<B::Element>>, NamedError> {
        let signature = Signature { kind: TensorOp::AllGather, dtype: B::Element::DTYPE, count: 0 };
        self.submit(name, signature, |promise| TensorWithNewResult { buffer, promise })
    }

    /// Submits a tensor whose result has the same length.
    fn submit_in_place<B: OwnedBuffer>(
        &self,
        name: &str,
        kind: TensorOp,
        buffer: B,
        post_process: PostProcess<B::Element>,
    ) -> Result<NamedHandle<B>, NamedError> {
        let signature = Signature { kind, dtype: B::Element::DTYPE, count: buffer.as_ref().len() as u64 };
        self.submit(name, signature, |promise| TensorInPlace { buffer, post_process, promise })
    }

    /// Submits a tensor, and wakes the reporter, which reports the tensor to the coordinator.
    fn submit<R, P: TensorPayload + 'static>(
        &self,
        name: &str,
        signature: Signature,
        payload: impl FnOnce(Promise<R>) -> P,
    ) -> Result<NamedHandle<R>, NamedError> {
        let (promise, receiver) = new_promise();
        let mut local = lock(&self.shared.local);
        if let Some(error) = &local.end_reason {
            return Err(error.clone());
        }
        local.client.submit(name, signature, || Box::new(payload(promise)))?;
        drop(local);
        self.shared.changed.notify_all();
        Ok(NamedHandle(receiver))
    }

    /// Declares that this rank has no more data, and waits until all ranks have joined. Returns the rank that joined
    /// last. After all ranks have joined, all ranks can submit tensors again.
    ///
    /// Until all ranks have joined, this rank contributes zeros to sums and averages that other ranks submit. The
    /// divisor of an average remains the number of all ranks. If other ranks submit a tensor for another operation,
    /// and this rank has not submitted the tensor before it joined, the other ranks get an error.
    ///
    /// # Errors
    ///
    /// [`NamedError::HasJoined`] if another thread of this rank has joined, [`NamedError::Closed`], or the failure of
    /// the job.
    pub fn join(&self) -> Result<Rank, NamedError> {
        self.join_async()?.wait()
    }

    /// Declares that this rank has no more data, as [`NamedTensors::join`] does, but does not wait.
    ///
    /// # Errors
    ///
    /// The errors of [`NamedTensors::join`].
    pub fn join_async(&self) -> Result<NamedHandle<Rank>, NamedError> {
        let (promise, receiver) = new_promise();
        let mut local = lock(&self.shared.local);
        if let Some(error) = &local.end_reason {
            return Err(error.clone());
        }
        local.client.join()?;
        local.join_promise = Some(promise);
        drop(local);
        self.shared.changed.notify_all();
        Ok(NamedHandle(receiver))
    }

    /// Returns the tensors, joins and closes that have waited for other ranks longer than
    /// [`NamedOptions::stall_warning`], and still wait. On ranks other than rank 0 the list is empty.
    pub fn stalled(&self) -> Vec<Stall> {
        self.shared
            .rank_0
            .as_ref()
            .map(|rank_0| lock(&rank_0.coordinator).reported_stalls())
            .unwrap_or_default()
    }

    /// Returns this rank's statistics since the named tensors were created.
    pub fn statistics(&self) -> NamedStatistics {
        lock(&self.shared.local).client.statistics()
    }

    /// Declares that this rank will submit no more tensors, and waits until all ranks have closed. Tensors that this
    /// rank has submitted still run if the other ranks submit them too. If other ranks submit a tensor that this rank
    /// has not submitted, those ranks get an error. Dropping the [`NamedTensors`] has the same effect.
    ///
    /// # Errors
    ///
    /// The failure of the job.
    pub fn close(mut self) -> Result<(), NamedError> {
        self.close_and_wait();
        match &lock(&self.shared.local).end_reason {
            None | Some(NamedError::Closed) => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Declares that this rank will submit no more tensors, as [`NamedTensors::close`] does, but does not wait.
    pub fn begin_close(&self) {
        lock(&self.shared.local).client.close();
        self.shared.changed.notify_all();
    }

    /// Waits at most `timeout` until all ranks have closed or the job has failed. Returns whether this has happened.
    pub fn wait_until_closed(&self, timeout: Duration) -> bool {
        let local = lock(&self.shared.local);
        let waited =
            self.shared.changed.wait_timeout_while(local, timeout, |local| local.end_reason.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.end_reason.is_some()
    }

    /// Closes this rank, and waits until all ranks have closed or the job has failed.
    fn close_and_wait(&mut self) {
        self.begin_close();
        for thread in self.threads.drain(..) {
            // `join` returns an error only if the thread has panicked, and these threads do not panic.
            let _ = thread.join();
        }
    }
}

impl Drop for NamedTensors {
    fn drop(&mut self) {
        self.close_and_wait();
    }
}

/// A submitted tensor. Dropping the handle does not stop the operation, but discards the result.
#[must_use = "call `wait` to get the tensor's result"]
pub struct NamedHandle<R>(ResultReceiver<R>);

impl<R> NamedHandle<R> {
    /// Returns whether the operation has ended, with success or failure. After the operation has ended,
    /// [`NamedHandle::wait`] returns at once.
    pub fn test(&self) -> bool {
        self.0.has_result()
    }

    /// Waits until the operation has ended, and returns its result.
    ///
    /// # Errors
    ///
    /// [`NamedError::Disagreement`] if the ranks submitted different requests for this tensor. Another [`NamedError`]
    /// if the operation needs data from a rank that has joined or closed, or if the job has failed.
    pub fn wait(self) -> Result<R, NamedError> {
        self.0.wait()
    }

    /// Waits at most `timeout` until the operation has ended, and returns its result.
    ///
    /// # Errors
    ///
    /// Returns the handle if the operation has not ended within `timeout`. The operation continues.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<R, NamedError>, Self> {
        self.0.wait_timeout(timeout).map_err(Self)
    }
}

/// Waits for all tensors, and returns the results in the order of the handles.
///
/// # Errors
///
/// The error of the first handle that failed. The function waits for all handles, even if one of them fails.
pub fn wait_all<R>(handles: impl IntoIterator<Item = NamedHandle<R>>) -> Result<Vec<R>, NamedError> {
    let results: Vec<Result<R, NamedError>> = handles.into_iter().map(NamedHandle::wait).collect();
    results.into_iter().collect()
}

/// Waits until the operation of one handle has ended, and removes this handle from the list. Returns the index of the
/// handle and the result of the operation, or `None` if the list is empty.
pub fn wait_any<R>(handles: &mut Vec<NamedHandle<R>>) -> Option<(usize, Result<R, NamedError>)> {
    let signal = Arc::new(ReadySignal::default());
    for handle in handles.iter() {
        handle.0.attach_signal(&signal);
    }
    while !handles.is_empty() {
        if let Some(index) = handles.iter().position(NamedHandle::test) {
            return Some((index, handles.remove(index).wait()));
        }
        signal.wait();
    }
    None
}

fn check_op_applies_to<T: Element>(op: ReduceOp) -> Result<(), Error> {
    if op == ReduceOp::Custom || !op.applies_to(T::DTYPE) {
        return Err(Error::Unsupported { op, dtype: T::DTYPE });
    }
    Ok(())
}
