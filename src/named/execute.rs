//! Runs several submitted tensors as one operation of the group, and passes each result to the handle of its tensor.
//! The tensors have the same kind of operation and the same element type.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use half::{bf16, f16};

use super::error::NamedError;
use super::message::{Request, TENSOR_BYTES_MAX, TensorOp};
use crate::group::verbs::{AllGather, Broadcast, ReduceScatter};
use crate::group::{Error, Group, Handle};
use crate::types::{DType, Element, F32Loc, F64Loc, I32Loc, I64Loc, ReduceOp};

/// Locks the mutex, even if the mutex is poisoned: in the module `named`, the state behind each mutex is consistent
/// even after a panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The shared state of a promise and its receiver.
struct ResultCell<R> {
    result: Mutex<Option<Result<R, NamedError>>>,
    /// Wakes the receiver when there is a result.
    changed: Condvar,
    /// The signal to set when there is a result. A thread that waits for several results waits for this signal.
    signal: Mutex<Option<Arc<ReadySignal>>>,
}

/// Wakes a thread that waits for the first of several results.
#[derive(Default)]
pub(super) struct ReadySignal {
    is_set: Mutex<bool>,
    /// Wakes the waiting thread when the signal is set.
    changed: Condvar,
}

impl ReadySignal {
    fn set_ready(&self) {
        *lock(&self.is_set) = true;
        self.changed.notify_all();
    }

    /// Waits until the signal is set, and then clears the signal.
    pub(super) fn wait(&self) {
        let waited = self.changed.wait_while(lock(&self.is_set), |is_set| !*is_set);
        *waited.unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// The sender of a result. If a promise is dropped without a result, the receiver gets [`NamedError::Closed`].
pub(super) struct Promise<R>(Arc<ResultCell<R>>);

/// The receiver of a result.
pub(super) struct ResultReceiver<R>(Arc<ResultCell<R>>);

/// Creates a promise and its receiver.
pub(super) fn new_promise<R>() -> (Promise<R>, ResultReceiver<R>) {
    let cell =
        Arc::new(ResultCell { result: Mutex::new(None), changed: Condvar::new(), signal: Mutex::new(None) });
    (Promise(Arc::clone(&cell)), ResultReceiver(cell))
}

impl<R> Promise<R> {
    /// Passes the result to the receiver.
    pub(super) fn fulfil(self, result: Result<R, NamedError>) {
        *lock(&self.0.result) = Some(result);
        // The end of this function drops the promise, which wakes the receiver.
    }
}

impl<R> Drop for Promise<R> {
    fn drop(&mut self) {
        lock(&self.0.result).get_or_insert(Err(NamedError::Closed));
        self.0.changed.notify_all();
        if let Some(signal) = &*lock(&self.0.signal) {
            signal.set_ready();
        }
    }
}

impl<R> ResultReceiver<R> {
    /// Makes the promise of this receiver set `signal` when there is a result.
    pub(super) fn attach_signal(&self, signal: &Arc<ReadySignal>) {
        *lock(&self.0.signal) = Some(Arc::clone(signal));
    }

    pub(super) fn has_result(&self) -> bool {
        lock(&self.0.result).is_some()
    }

    pub(super) fn wait(self) -> Result<R, NamedError> {
        let mut result = lock(&self.0.result);
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            result = self.0.changed.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn wait_timeout(self, timeout: Duration) -> Result<Result<R, NamedError>, Self> {
        let result = lock(&self.0.result);
        let waited = self.0.changed.wait_timeout_while(result, timeout, |result| result.is_none());
        let taken = waited.unwrap_or_else(PoisonError::into_inner).0.take();
        taken.ok_or(self)
    }
}

/// A submitted tensor of any element type.
pub(super) trait TensorPayload: Send {
    /// Makes the handle of this tensor return `error`.
    fn fail(self: Box<Self>, error: NamedError);
    /// Converts the tensor to `Any`, so that it can be downcast to a [`SubmittedTensor`] of its element type.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// A submitted tensor with elements of type `T`.
pub(super) struct SubmittedTensor<T> {
    pub(super) elements: Vec<T>,
    /// The function that this rank applies to its result.
    pub(super) post_process: PostProcess<T>,
    pub(super) promise: Promise<Vec<T>>,
}

/// The function that this rank applies to its result, if there is one.
pub(super) type PostProcess<T> = Option<Box<dyn FnOnce(&mut [T]) + Send>>;

impl<T: Element> TensorPayload for SubmittedTensor<T> {
    fn fail(self: Box<Self>, error: NamedError) {
        self.promise.fulfil(Err(error));
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// The request for a tensor, and the tensor that this rank has submitted. The tensor is `None` if this rank has
/// joined, and contributes zeros.
pub(super) type TensorToRun = (Request, Option<Box<dyn TensorPayload>>);

/// An operation that has begun.
pub(super) trait BegunOperation: Send {
    /// Waits for the end of the operation, calls `on_end` with the names of this rank's tensors, and passes each
    /// result to the handle of its tensor.
    fn wait_and_deliver(self: Box<Self>, on_end: &mut dyn FnMut(&[String])) -> Result<(), Error>;
}

/// The range of a tensor in the operation's buffer, the promise of the tensor's result, and the function to apply to
/// the result. If this rank has joined, and contributes zeros, there is no promise and no function.
type FusedPart<T> = (Range<usize>, Option<(Promise<Vec<T>>, PostProcess<T>)>);

/// An operation on one or more tensors with elements of type `T`.
struct FusedOperation<T> {
    /// The handle of the operation, or the error if the operation could not begin.
    handle: Result<Handle<Vec<T>>, Error>,
    /// The names of the tensors that this rank has submitted.
    names: Vec<String>,
    parts: Vec<FusedPart<T>>,
}

/// Begins one operation on all `items`, which must have the same operation and element type. Returns `None` if
/// `items` is empty.
pub(super) fn begin_operation(group: &mut Group, items: Vec<TensorToRun>) -> Option<Box<dyn BegunOperation>> {
    let dtype = items.first()?.0.signature.dtype;
    Some(match dtype {
        DType::F16 => begin_operation_of_type::<f16>(group, items),
        DType::Bf16 => begin_operation_of_type::<bf16>(group, items),
        DType::F32 => begin_operation_of_type::<f32>(group, items),
        DType::F64 => begin_operation_of_type::<f64>(group, items),
        DType::I8 => begin_operation_of_type::<i8>(group, items),
        DType::U8 => begin_operation_of_type::<u8>(group, items),
        DType::I16 => begin_operation_of_type::<i16>(group, items),
        DType::U16 => begin_operation_of_type::<u16>(group, items),
        DType::I32 => begin_operation_of_type::<i32>(group, items),
        DType::U32 => begin_operation_of_type::<u32>(group, items),
        DType::I64 => begin_operation_of_type::<i64>(group, items),
        DType::U64 => begin_operation_of_type::<u64>(group, items),
        DType::F32Loc => begin_operation_of_type::<F32Loc>(group, items),
        DType::F64Loc => begin_operation_of_type::<F64Loc>(group, items),
        DType::I32Loc => begin_operation_of_type::<I32Loc>(group, items),
        DType::I64Loc => begin_operation_of_type::<I64Loc>(group, items),
    })
}

/// Does the same as [`begin_operation`] for elements of type `T`. `items` is not empty.
fn begin_operation_of_type<T: Element>(
    group: &mut Group,
    items: Vec<TensorToRun>,
) -> Box<dyn BegunOperation> {
    let kind = items[0].0.signature.kind;
    let is_single = items.len() == 1;
    let element_count: usize = items.iter().map(|(request, _)| request.signature.count as usize).sum();
    let mut buffer = Vec::new();
    if !is_single {
        buffer.reserve_exact(element_count);
    }
    let (mut names, mut parts) = (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
    let mut start = 0;
    for (request, payload) in items {
        let count = request.signature.count as usize;
        let submitted = payload.and_then(|payload| payload.into_any().downcast::<SubmittedTensor<T>>().ok());
        let (elements, promise) = match submitted {
            Some(submitted) => {
                names.push(request.name);
                (submitted.elements, Some((submitted.promise, submitted.post_process)))
            }
            None => (vec![T::zeroed(); count], None),
        };
        if is_single {
            buffer = elements;
        } else {
            buffer.extend_from_slice(&elements);
        }
        parts.push((start..start + count, promise));
        start += count;
    }
    let handle = match kind {
        TensorOp::AllReduce(op) => group.all_reduce_async(buffer, op),
        TensorOp::Broadcast(root) => group.call(Broadcast::from(root)).start(buffer),
        TensorOp::AllGather => all_gather_uneven(group, &buffer),
        TensorOp::ReduceScatter(op) => start_reduce_scatter(group, buffer, op),
    };
    Box::new(FusedOperation { handle, names, parts })
}

/// Begins a reduce-scatter. The handle returns this rank's chunk.
fn start_reduce_scatter<T: Element>(
    group: &mut Group,
    buffer: Vec<T>,
    op: ReduceOp,
) -> Result<Handle<Vec<T>>, Error> {
    let own = group.chunk(buffer.len(), group.rank());
    Ok(group.call(ReduceScatter::new(op)).start(buffer)?.and_then(move |mut buffer| {
        buffer.truncate(own.end);
        buffer.drain(..own.start);
        Ok(buffer)
    }))
}

/// Begins an all-gather of tensors whose lengths may differ between ranks. Gathers the lengths of all ranks first. If
/// the sum of the lengths is too large, every rank returns an error.
fn all_gather_uneven<T: Element>(group: &mut Group, elements: &[T]) -> Result<Handle<Vec<T>>, Error> {
    let counts = group.call(AllGather::new()).run_from(&[elements.len() as u64])?;
    let total = counts.iter().fold(0u64, |total, &count| total.saturating_add(count));
    if total.saturating_mul(T::DTYPE.size_bytes() as u64) > TENSOR_BYTES_MAX {
        return Err(Error::InvalidCounts(
            "the result of the all-gather exceeds the largest size of a named tensor",
        ));
    }
    let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
    group.call(AllGather::new().counts(&counts)).start_from(elements)
}

impl<T: Element> BegunOperation for FusedOperation<T> {
    fn wait_and_deliver(self: Box<Self>, on_end: &mut dyn FnMut(&[String])) -> Result<(), Error> {
        let Self { handle, names, parts } = *self;
        let result = handle.and_then(Handle::wait);
        // Release the names before any result is visible, because a thread that gets a result may submit a tensor
        // with the same name at once.
        on_end(&names);
        let mut fused = match result {
            Ok(elements) => elements,
            Err(error) => {
                let promises = parts.into_iter().filter_map(|(_, promise)| promise);
                promises.for_each(|(promise, _)| promise.fulfil(Err(error.clone().into())));
                // If the result of an all-gather is too long, this tensor fails on all ranks, but the job continues
                // with other tensors.
                return if matches!(error, Error::InvalidCounts(_)) { Ok(()) } else { Err(error) };
            }
        };
        let is_single = parts.len() == 1;
        for (range, promise) in parts {
            let Some((promise, post_process)) = promise else { continue };
            let mut elements = if is_single { std::mem::take(&mut fused) } else { fused[range].to_vec() };
            if let Some(post_process) = post_process {
                post_process(&mut elements);
            }
            promise.fulfil(Ok(elements));
        }
        Ok(())
    }
}
