//! Named tensors: collectives in any order.
//!
//! A group's collectives have to be called in the same order on all ranks, from one place. A framework that computes
//! gradients in parallel has no such order: each rank's threads come to their tensors when they do. [`NamedTensors`] takes
//! them by name, finds out which are ready on all ranks, and runs those, in an order that rank 0 of the group decides; small
//! ones are fused into one operation. This is Horovod's model (Sergeev and Del Balso, "Horovod: fast and easy distributed
//! deep learning in TensorFlow", arXiv:1802.05799), without its fixed cycle: what is ready runs at once, and what becomes
//! ready meanwhile is fused.
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

/// The most operations under way at a time: one that moves bytes, and one whose tensors are being copied together.
const OUTSTANDING_MAX: usize = 2;

/// How named tensors are negotiated. What rank 0 of the group says counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NamedOptions {
    /// The most bytes that are fused into one operation; 0 fuses nothing. A longer tensor goes alone.
    ///
    /// 16 MiB by default. Horovod's is 64 MiB (now 128), for networks and GPUs on which an operation costs more to begin.
    /// Fusing costs two copies, and an operation of this length takes milliseconds, against which its 2(n-1) messages
    /// weigh little; a longer one would only make the first results later.
    pub fusion_bytes: usize,
    /// How many tensors are remembered, so that a step that submits them again need not spell them out; at most 16 384.
    pub cache_capacity: usize,
    /// How long a tensor may wait for some of the ranks before rank 0 logs a warning.
    pub stall_warning: Duration,
    /// How long until that ends the job; `None` for never, as in Horovod, where a rank may take its time to compile, or to
    /// save a checkpoint. Other ranks' deaths end it in any case.
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

/// What the named tensors of a rank have done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NamedStatistics {
    /// Tensors submitted.
    pub tensors: u64,
    /// Those of them that the response cache knew, so that a bit was enough to report them.
    pub cached: u64,
    /// Operations run; fewer than tensors where they were fused.
    pub operations: u64,
    /// Messages to the coordinator.
    pub reports: u64,
}

/// Collectives of a group on tensors that have names, submitted in any order from any thread.
///
/// A name is free again when its result can be had. All ranks that submit a name have to mean the same operation, element
/// type and count, or each of them gets an error for that tensor, and the others go on. What is not submitted by some rank
/// for [`NamedOptions::stall_abort`], if there is such a limit, ends the job with an error that names tensor and rank.
pub struct NamedTensors {
    shared: Arc<NamedShared>,
    threads: Vec<JoinHandle<()>>,
}

impl NamedTensors {
    /// Named tensors for all ranks of the group, all of which have to call this. The group itself is free for other use.
    ///
    /// # Errors
    ///
    /// As [`Group::duplicate`], of which it makes two; [`Error::System`] if there can be no threads.
    pub fn new(group: &mut Group, options: NamedOptions) -> Result<Self, Error> {
        let mut control = group.duplicate()?;
        let data = group.duplicate()?;
        // It is idle while there is nothing to agree on. What is waited for in vain is found by the coordinator.
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
    /// [`Error::Unsupported`], or the job's failure; what the other ranks have to do with is the handle's.
    pub fn all_reduce<T: Element>(
        &self,
        name: &str,
        elements: Vec<T>,
        op: ReduceOp,
    ) -> Result<NamedHandle<Vec<T>>, NamedError> {
        check_op::<T>(op)?;
        self.submit(name, elements, TensorOp::AllReduce(op), None)
    }

    /// [`NamedTensors::all_reduce`] of what is multiplied by `before`, whose result is multiplied by `after` (Horovod's
    /// `prescale_factor` and `postscale_factor`). Each rank has factors of its own.
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

    /// The root's tensor of this name, as [`Group::broadcast`]; all ranks submit one of the same length.
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

    /// All ranks' tensors of this name, one after another; each rank's may have a length of its own. It is not fused.
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

    /// This rank has no more data. Until all ranks say so it takes part in their sums and averages with zeros; averages
    /// are divided by the number of all ranks all the same. Other operations that a joined rank has not submitted are an
    /// error on all ranks. Returns the last rank to join; then everything goes on as at the beginning.
    ///
    /// # Errors
    ///
    /// [`NamedError::HasJoined`] if another thread of this rank has, [`NamedError::Closed`], or the job's failure.
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

    /// What has waited for longer than [`NamedOptions::stall_warning`] and still does. Only rank 0 knows.
    pub fn stalled(&self) -> Vec<Stall> {
        self.shared.leader.as_ref().map(|leader| lock(&leader.coordinator).stalled()).unwrap_or_default()
    }

    /// What has been done so far.
    pub fn statistics(&self) -> NamedStatistics {
        lock(&self.shared.local).client.statistics()
    }

    /// Waits until all ranks have closed. What this rank has submitted still runs where the other ranks submit it too;
    /// what it has not submitted is an error on the others. Dropping does the same.
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
            // They do not panic; if one did, there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl Drop for NamedTensors {
    fn drop(&mut self) {
        self.shut();
    }
}

/// A named tensor under way. Dropping the handle lets it go on and forgets its result.
#[must_use = "a tensor's result is had by waiting for it"]
pub struct NamedHandle<R>(ResultReceiver<R>);

impl<R> NamedHandle<R> {
    /// Whether it has ended, well or not; [`NamedHandle::wait`] then returns at once.
    pub fn test(&self) -> bool {
        self.0.is_there()
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// [`NamedError`]: the ranks do not agree about this tensor, some have joined or closed, or the job has failed.
    pub fn wait(self) -> Result<R, NamedError> {
        self.0.wait()
    }

    /// Waits for its end for as long as `timeout`; gives the handle back if that was too short.
    ///
    /// # Errors
    ///
    /// The handle; the tensor goes on.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<R, NamedError>, Self> {
        self.0.wait_timeout(timeout).map_err(Self)
    }
}

/// Waits for all of them; the results come in the same order.
///
/// # Errors
///
/// The first failure, in their order; the others are waited for all the same.
pub fn wait_all<R>(handles: impl IntoIterator<Item = NamedHandle<R>>) -> Result<Vec<R>, NamedError> {
    let results: Vec<Result<R, NamedError>> = handles.into_iter().map(NamedHandle::wait).collect();
    results.into_iter().collect()
}

/// Waits until one of them has ended, takes it from the list, and gives where it stood and its result; `None` if the list is
/// empty. Those behind it move up by one place.
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
