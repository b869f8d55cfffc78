//! Runs several submitted tensors as one operation of the group, and passes each result to the handle of its tensor.
//! The tensors have the same kind of operation and the same element type.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use half::{bf16, f16};

use super::error::NamedError;
use super::message::{Request, TENSOR_BYTES_MAX, TensorOp};
use crate::group::verbs::{AllGather, Broadcast, ReduceScatter};
use crate::group::{Error, Group, Handle, OwnedBuffer};
use crate::types::{DType, Element, F32Loc, F64Loc, I32Loc, I64Loc};

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

/// A submitted tensor in memory of any kind, and the promise of its result.
pub(super) trait TensorPayload: Send {
    /// Makes the handle of this tensor return `error`.
    fn fail(self: Box<Self>, error: NamedError);
    /// The bytes of the tensor's elements.
    fn bytes(&self) -> &[u8];
    /// Begins the operation on this tensor alone, which is not fused. An all-reduce and a broadcast use the tensor's own memory.
    fn begin_alone(self: Box<Self>, group: &mut Group, request: Request) -> Box<dyn BegunOperation>;
    /// Copies the result of a fused operation to the tensor, and passes the tensor to its handle.
    fn deliver(self: Box<Self>, result: &[u8]);
}

/// The function that this rank applies to its result, if there is one.
pub(super) type PostProcess<T> = Option<Box<dyn FnOnce(&mut [T]) + Send>>;

/// A tensor whose result has the same length, and therefore replaces the tensor's elements.
pub(super) struct TensorInPlace<B: OwnedBuffer> {
    pub(super) buffer: B,
    pub(super) post_process: PostProcess<B::Element>,
    pub(super) promise: Promise<B>,
}

impl<B: OwnedBuffer> TensorPayload for TensorInPlace<B> {
    fn fail(self: Box<Self>, error: NamedError) {
        self.promise.fulfil(Err(error));
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.buffer.as_ref())
    }

    fn begin_alone(self: Box<Self>, group: &mut Group, request: Request) -> Box<dyn BegunOperation> {
        let Self { buffer, post_process, promise } = *self;
        let handle = match request.signature.kind {
            TensorOp::Broadcast(root) => group.call(Broadcast::from(root)).start(buffer),
            TensorOp::AllReduce(op) => group.all_reduce_async(buffer, op),
            // `NamedTensors` submits tensors for other operations as `TensorWithNewResult`.
            _ => Err(Error::Taken),
        };
        let finish = move |buffer: &mut B| {
            if let Some(post_process) = post_process {
                post_process(buffer.as_mut());
            }
        };
        Box::new(OperationOnOne { handle, name: request.name, promise, finish })
    }

    fn deliver(mut self: Box<Self>, result: &[u8]) {
        bytemuck::cast_slice_mut(self.buffer.as_mut()).copy_from_slice(result);
        if let Some(post_process) = self.post_process {
            post_process(self.buffer.as_mut());
        }
        self.promise.fulfil(Ok(self.buffer));
    }
}

/// A tensor whose result has another length than the tensor: a tensor for an all-gather or a reduce-scatter. The coordinator
/// fuses no such tensors.
pub(super) struct TensorWithNewResult<B: OwnedBuffer> {
    pub(super) buffer: B,
    pub(super) promise: Promise<Vec<B::Element>>,
}

impl<B: OwnedBuffer> TensorPayload for TensorWithNewResult<B> {
    fn fail(self: Box<Self>, error: NamedError) {
        self.promise.fulfil(Err(error));
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.buffer.as_ref())
    }

    fn begin_alone(self: Box<Self>, group: &mut Group, request: Request) -> Box<dyn BegunOperation> {
        let elements = self.buffer.as_ref();
        let handle = match request.signature.kind {
            TensorOp::ReduceScatter(op) => group.call(ReduceScatter::new(op)).start_from(elements),
            _ => all_gather_uneven(group, elements),
        };
        Box::new(OperationOnOne {
            handle,
            name: request.name,
            promise: self.promise,
            finish: |_: &mut Vec<_>| (),
        })
    }

    fn deliver(self: Box<Self>, _: &[u8]) {}
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

/// An operation on one tensor, whose result is of type `R`.
struct OperationOnOne<R, F> {
    /// The handle of the operation, or the error if the operation could not begin.
    handle: Result<Handle<R>, Error>,
    name: String,
    promise: Promise<R>,
    /// The function to apply to the result.
    finish: F,
}

/// The range of a tensor in the operation's buffer in bytes, and the tensor if this rank has submitted it.
type FusedPart = (Range<usize>, Option<Box<dyn TensorPayload>>);

/// An operation on several tensors with elements of type `T`, or on zeros that this rank contributes to other ranks' tensors.
struct FusedOperation<T> {
    /// The handle of the operation, or the error if the operation could not begin.
    handle: Result<Handle<Vec<T>>, Error>,
    /// The names of the tensors that this rank has submitted.
    names: Vec<String>,
    parts: Vec<FusedPart>,
}

/// Begins one operation on all `items`, which must have the same operation and element type. Returns `None` if
/// `items` is empty.
pub(super) fn begin_operation(
    group: &mut Group,
    mut items: Vec<TensorToRun>,
) -> Option<Box<dyn BegunOperation>> {
    let is_single = items.len() == 1;
    let (first, payload) = items.first_mut()?;
    let dtype = first.signature.dtype;
    if let Some(payload) = payload.take_if(|_| is_single) {
        return Some(payload.begin_alone(group, first.clone()));
    }
    Some(match dtype {
        DType::F16 => begin_fused::<f16>(group, items),
        DType::Bf16 => begin_fused::<bf16>(group, items),
        DType::F32 => begin_fused::<f32>(group, items),
        DType::F64 => begin_fused::<f64>(group, items),
        DType::I8 => begin_fused::<i8>(group, items),
        DType::U8 => begin_fused::<u8>(group, items),
        DType::I16 => begin_fused::<i16>(group, items),
        DType::U16 => begin_fused::<u16>(group, items),
        DType::I32 => begin_fused::<i32>(group, items),
        DType::U32 => begin_fused::<u32>(group, items),
        DType::I64 => begin_fused::<i64>(group, items),
        DType::U64 => begin_fused::<u64>(group, items),
        DType::F32Loc => begin_fused::<F32Loc>(group, items),
        DType::F64Loc => begin_fused::<F64Loc>(group, items),
        DType::I32Loc => begin_fused::<I32Loc>(group, items),
        DType::I64Loc => begin_fused::<I64Loc>(group, items),
    })
}

/// Copies the tensors to one buffer, and begins the operation on this buffer. For a tensor that this rank has not submitted, the
/// buffer has zeros. `items` is not empty.
fn begin_fused<T: Element>(group: &mut Group, items: Vec<TensorToRun>) -> Box<dyn BegunOperation> {
    let kind = items[0].0.signature.kind;
    let element_count: usize = items.iter().map(|(request, _)| request.signature.count as usize).sum();
    let mut buffer: Vec<T> = Vec::with_capacity(element_count);
    let (mut names, mut parts) = (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
    for (request, payload) in items {
        let start = size_of_val(&buffer[..]);
        match &payload {
            Some(payload) => {
                names.push(request.name);
                buffer.extend_from_slice(bytemuck::cast_slice(payload.bytes()));
            }
            None => buffer.resize(buffer.len() + request.signature.count as usize, T::zeroed()),
        }
        parts.push((start..size_of_val(&buffer[..]), payload));
    }
    let handle = match kind {
        TensorOp::AllReduce(op) => group.all_reduce_async(buffer, op),
        TensorOp::Broadcast(root) => group.call(Broadcast::from(root)).start(buffer),
        TensorOp::AllGather => all_gather_uneven(group, &buffer),
        TensorOp::ReduceScatter(op) => group.call(ReduceScatter::new(op)).start_from(&buffer[..]),
    };
    Box::new(FusedOperation { handle, names, parts })
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

impl<R: Send, F: FnOnce(&mut R) + Send> BegunOperation for OperationOnOne<R, F> {
    fn wait_and_deliver(self: Box<Self>, on_end: &mut dyn FnMut(&[String])) -> Result<(), Error> {
        let Self { handle, name, promise, finish } = *self;
        let result = handle.and_then(Handle::wait);
        // Release the name before the result is visible, because a thread that gets the result may submit a tensor with the
        // same name at once.
        on_end(&[name]);
        match result {
            Ok(mut result) => {
                finish(&mut result);
                promise.fulfil(Ok(result));
                Ok(())
            }
            Err(error) => {
                promise.fulfil(Err(error.clone().into()));
                // If the result of an all-gather is too long, this tensor fails on all ranks, but the job continues
                // with other tensors.
                if matches!(error, Error::InvalidCounts(_)) { Ok(()) } else { Err(error) }
            }
        }
    }
}

impl<T: Element> BegunOperation for FusedOperation<T> {
    fn wait_and_deliver(self: Box<Self>, on_end: &mut dyn FnMut(&[String])) -> Result<(), Error> {
        let Self { handle, names, parts } = *self;
        let result = handle.and_then(Handle::wait);
        // As in `OperationOnOne`.
        on_end(&names);
        let submitted = parts.into_iter().filter_map(|(range, payload)| Some((range, payload?)));
        match result {
            Ok(elements) => {
                let bytes: &[u8] = bytemuck::cast_slice(&elements);
                submitted.for_each(|(range, payload)| payload.deliver(&bytes[range]));
                Ok(())
            }
            Err(error) => {
                submitted.for_each(|(_, payload)| payload.fail(error.clone().into()));
                Err(error)
            }
        }
    }
}
