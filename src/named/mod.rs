//! Named tensors: collectives in any order.
//!
//! The ranks of a group have to call its collectives in the same order. A framework that computes gradients in
//! parallel has no such order: each rank's threads finish tensors at different times. [`NamedTensors`] accepts
//! tensors by name, finds out which are ready on all ranks, and runs those, in an order that rank 0 of the group
//! decides; small tensors are fused into one operation. This is Horovod's model (Sergeev and Del Balso, "Horovod:
//! fast and easy distributed deep learning in TensorFlow", arXiv:1802.05799), without its fixed cycle: ready tensors
//! run at once, and tensors that become ready meanwhile are fused.
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
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

pub use client::TENSORS_MAX;
pub use error::NamedError;
pub use message::{NAME_BYTES_MAX, TENSOR_BYTES_MAX};
pub use stalls::Stall;

use self::coordinator::{Coordinator, CoordinatorLimits};
use self::execute::{PostProcess, ReadySignal, ResultReceiver, Submitted, lock, promise};
use self::message::{SLOTS_MAX, Signature, TensorOp};
use self::runtime::NamedShared;
use self::stalls::StallWatch;
use crate::group::{Error, Group};
use crate::types::{Element, Rank, ReduceOp};

/// The largest number of operations under way: one that moves bytes, and one whose tensors are being copied together.
const OUTSTANDING_MAX: usize = 2;

/// The options of named tensors. The options of rank 0 of the group apply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NamedOptions {
    /// The most bytes that are fused into one operation; 0 fuses nothing. A longer tensor is not fused.
    ///
    /// 16 MiB by default. Horovod's is 64 MiB (now 128), for networks and GPUs with a higher fixed cost of an
    /// operation. Fusing costs two copies. An operation of this length takes milliseconds, so the fixed cost of its
    /// 2(n-1) messages is small; a longer operation would only delay the first results.
    pub fusion_bytes: usize,
    /// The number of tensors in the response cache, at most 16 384. A step that submits them again sends one bit for
    /// each.
    pub cache_capacity: usize,
    /// How long a tensor may wait for some of the ranks before rank 0 logs a warning.
    pub stall_warning: Duration,
    /// How long a tensor may wait before the job ends; `None` for no limit, as in Horovod, where a rank may take long
    /// to compile, or to save a checkpoint. The loss of a rank ends the job in any case.
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
    /// The number of tensors submitted.
    pub tensors: u64,
    /// How many of them the response cache knew, so that one bit reported them.
    pub cached: u64,
    /// The number of operations run; fewer than tensors if some were fused.
    pub operations: u64,
    /// The number of messages to the coordinator.
    pub reports: u64,
}

/// Collectives of a group on tensors that have names, submitted in any order from any thread.
///
/// A name can be used again when its result is available. All ranks that submit a name must request the same
/// operation, element type and count. Otherwise each of them gets an error for that tensor, and the other tensors are
/// not affected. If some rank does not submit a tensor within [`NamedOptions::stall_abort`], and there is such a
/// limit, the job ends with an error that names the tensor and the rank.
pub struct NamedTensors {
    shared: Arc<NamedShared>,
    threads: Vec<JoinHandle<()>>,
}

impl NamedTensors {
    /// Makes named tensors for all ranks of the group; all of them have to call this. The group can still be used for
    /// other calls.
    ///
    /// # Errors
    ///
    /// As [`Group::duplicate`], which it calls twice; [`Error::System`] if no threads can be started.
    pub fn new(group: &mut Group, options: NamedOptions) -> Result<Self, Error> {
        let mut control = group.duplicate()?;
        let data = group.duplicate()?;
        // It is idle while no tensors are submitted. The coordinator detects waits without end.
        control.set_timeout(Duration::MAX);
        let coordinator = (control.rank() == Rank::ZERO).then(|| {
            let rules = CoordinatorLimits {
                fusion_bytes: options.fusion_bytes as u64,
                capacity: options.cache_capacity.min(usize::from(SLOTS_MAX)) as u16,
                outstanding_max: OUTSTANDING_MAX,
            };
            let watch = StallWatch::new(options.stall_warning, options.stall_abort);
            Coordinator::new(rules, Arc::from(control.members()), watch)
        });
        let (shared, threads) = runtime::start(control, data, coordinator)?;
        Ok(Self { shared, threads })
    }

    /// The reduction of all ranks' tensors of this name, as [`Group::all_reduce`]. A rank that has joined counts as zeros.
    ///
    /// # Errors
    ///
    /// [`NamedError::InFlight`], [`NamedError::Limit`], [`NamedError::HasJoined`], [`NamedError::Closed`],
    /// [`Error::Unsupported`], or the job's failure. The handle returns errors that involve other ranks.
    pub fn all_reduce<T: Element>(
        &self,
        name: &str,
        elements: Vec<T>,
        op: ReduceOp,
    ) -> Result<NamedHandle<Vec<T>>, NamedError> {
        check_op::<T>(op)?;
        self.submit(name, elements, TensorOp::AllReduce(op), None)
    }

    /// [`NamedTensors::all_reduce`] that multiplies the elements by `before` and the result by `after` (Horovod's
    /// `prescale_factor` and `postscale_factor`). The factors may differ between ranks.
    ///
    /// # Errors
    ///
    /// As [`NamedTensors::all_reduce`].
    pub fn all_reduce_scaled<T: Element + Mul<Output = T>>(
        &self,
        name: &str,
        mut elements: Vec<T>,
        op: ReduceOp,
        (before, after): (T, T),
    ) -> Result<NamedHandle<Vec<T>>, NamedError> {
        check_op::<T>(op)?;
        let multiply = |elements: &mut [T], factor: T| {
            for element in elements {
                *element = *element * factor;
            }
        };
        multiply(&mut elements, before);
        let after: PostProcess<T> = Some(Box::new(move |result| multiply(result, after)));
        self.submit(name, elements, TensorOp::AllReduce(op), after)
    }

    /// This rank's chunk ([`Group::chunk`]) of the reduction of all ranks' tensors of this name. A rank that has joined counts
    /// as zeros. It is not fused.
    ///
    /// # Errors
    ///
    /// As [`NamedTensors::all_reduce`].
    pub fn reduce_scatter<T: Element>(
        &self,
        name: &str,
        elements: Vec<T>,
        op: ReduceOp,
    ) -> Result<NamedHandle<Vec<T>>, NamedError> {
        check_op::<T>(op)?;
        self.submit(name, elements, TensorOp::ReduceScatter(op), None)
    }

    /// The root's tensor of this name, as [`Group::broadcast`]; all ranks submit a tensor of the same length.
    ///
    /// # Errors
    ///
    /// As [`NamedTensors::all_reduce`], and [`Error::InvalidRoot`].
    pub fn broadcast<T: Element>(
        &self,
        name: &str,
        elements: Vec<T>,
        root: Rank,
    ) -> Result<NamedHandle<Vec<T>>, NamedError> {
        let world = lock(&self.shared.local).client.world();
        if !world.contains(root) {
            return Err(Error::InvalidRoot { root, world }.into());
        }
        self.submit(name, elements, TensorOp::Broadcast(root), None)
    }

    /// All ranks' tensors of this name, concatenated; their lengths may differ. It is not fused.
    ///
    /// # Errors
    ///
    /// As [`NamedTensors::all_reduce`]; all handles get [`Error::InvalidCounts`] if the result has more than
    /// [`TENSOR_BYTES_MAX`] bytes.
    pub fn all_gather<T: Element>(
        &self,
        name: &str,
        elements: Vec<T>,
    ) -> Result<NamedHandle<Vec<T>>, NamedError> {
        self.submit(name, elements, TensorOp::AllGather, None)
    }

    fn submit<T: Element>(
        &self,
        name: &str,
        elements: Vec<T>,
        kind: TensorOp,
        after: PostProcess<T>,
    ) -> Result<NamedHandle<Vec<T>>, NamedError> {
        let count = if kind == TensorOp::AllGather { 0 } else { elements.len() as u64 };
        let signature = Signature { kind, dtype: T::DTYPE, count };
        let (promise, wanted) = promise();
        let mut local = lock(&self.shared.local);
        if let Some(error) = &local.ended {
            return Err(error.clone());
        }
        local.client.submit(name, signature, || Box::new(Submitted { elements, after, promise }))?;
        drop(local);
        self.shared.changed.notify_all();
        Ok(NamedHandle(wanted))
    }

    /// Declares that this rank has no more data, and waits until all ranks have joined. Until then this rank
    /// contributes zeros to the others' sums and averages; averages are still divided by the number of all ranks.
    /// Other operations that a joined rank has not submitted are an error on all ranks. Returns the last rank to
    /// join; afterwards all ranks can submit tensors again.
    ///
    /// # Errors
    ///
    /// [`NamedError::HasJoined`] if another thread of this rank has joined, [`NamedError::Closed`], or the job's
    /// failure.
    pub fn join(&self) -> Result<Rank, NamedError> {
        let (promise, wanted) = promise();
        let mut local = lock(&self.shared.local);
        if let Some(error) = &local.ended {
            return Err(error.clone());
        }
        local.client.join()?;
        local.join = Some(promise);
        drop(local);
        self.shared.changed.notify_all();
        wanted.wait()
    }

    /// The tensors that have waited longer than [`NamedOptions::stall_warning`] and still wait. Only rank 0 has this
    /// list.
    pub fn stalled(&self) -> Vec<Stall> {
        self.shared.leader.as_ref().map(|leader| lock(&leader.coordinator).stalled()).unwrap_or_default()
    }

    /// Statistics so far.
    pub fn statistics(&self) -> NamedStatistics {
        lock(&self.shared.local).client.statistics()
    }

    /// Waits until all ranks have closed. Tensors that this rank has submitted still run if the other ranks submit
    /// them too; tensors that it has not submitted are an error on the others. Dropping does the same.
    ///
    /// # Errors
    ///
    /// The job's failure.
    pub fn close(mut self) -> Result<(), NamedError> {
        self.shut();
        match &lock(&self.shared.local).ended {
            None | Some(NamedError::Closed) => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    fn shut(&mut self) {
        lock(&self.shared.local).client.close();
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // These threads do not panic; if one did, there is nothing left to inform.
            let _ = thread.join();
        }
    }
}

impl Drop for NamedTensors {
    fn drop(&mut self) {
        self.shut();
    }
}

/// A submitted tensor. Dropping the handle does not stop the operation; its result is discarded.
#[must_use = "a tensor's result is had by waiting for it"]
pub struct NamedHandle<R>(ResultReceiver<R>);

impl<R> NamedHandle<R> {
    /// Whether it has ended, with success or failure; [`NamedHandle::wait`] then returns at once.
    pub fn test(&self) -> bool {
        self.0.is_there()
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    ///
    /// [`NamedError`]: the ranks do not agree about this tensor, some have joined or closed, or the job has failed.
    pub fn wait(self) -> Result<R, NamedError> {
        self.0.wait()
    }

    /// Waits at most `timeout` for its end.
    ///
    /// # Errors
    ///
    /// Returns the handle if the tensor has no result yet; its operation continues.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<R, NamedError>, Self> {
        self.0.wait_timeout(timeout).map_err(Self)
    }
}

/// Waits for all tensors; the results are in the order of the handles.
///
/// # Errors
///
/// The first failure in that order; the call waits for the others as well.
pub fn wait_all<R>(handles: impl IntoIterator<Item = NamedHandle<R>>) -> Result<Vec<R>, NamedError> {
    let results: Vec<Result<R, NamedError>> = handles.into_iter().map(NamedHandle::wait).collect();
    results.into_iter().collect()
}

/// Waits until one tensor has ended, removes its handle from the list, and returns its index and result; `None` if
/// the list is empty. Handles behind it move up by one.
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

fn check_op<T: Element>(op: ReduceOp) -> Result<(), Error> {
    if op == ReduceOp::Custom || !op.applies_to(T::DTYPE) {
        return Err(Error::Unsupported { op, dtype: T::DTYPE });
    }
    Ok(())
}
