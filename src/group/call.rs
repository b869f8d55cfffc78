//! How the call of a collective becomes an operation.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::driver::{Driver, OperationOutput, Submission};
use super::handle::Handle;
use super::memory::{BufferAccess, Memory};
use super::shm_executor::ShmRequest;
use super::{Error, Group, OwnedBuffer, link_driver};
use crate::engine::{OperationRequest, SendMode};
use crate::reduce::{self, Kernels};
use crate::schedule::rounds::RoundPlan;
use crate::schedule::{CollectiveSpec, Schedule, double_tree};
use crate::types::{
    Algorithm, Contract, DType, Element, HOSTS_GROUP_BIT, Operation, Rank, ReduceOp, Site, WorldSize,
};

/// The most blocks of an all-reduce on the ring. The limit keeps the schedule of a long buffer small.
const BLOCKS_MAX: usize = 512;

/// A collective that a caller requests, and the algorithm that was chosen for it.
pub(super) struct Call {
    spec: CollectiveSpec,
    reduction: Option<Reduction>,
    algorithm: Algorithm,
    /// Whether the whole collective runs in shared memory.
    uses_shared_memory: bool,
    /// Whether the reduction must be applied in rank order, because it may not commute.
    in_rank_order: bool,
    /// A digest of the lengths of uneven parts; 0 for even parts.
    layout: u32,
    site: Site,
}

/// The reduction of the elements at the same index of all ranks' buffers.
pub(super) struct Reduction {
    pub(super) op: ReduceOp,
    pub(super) kernels: Kernels,
}

/// A collective with the elements on which it works, and the function that converts them to the result.
pub(super) struct Prepared<'a, T: Clone, R> {
    call: Call,
    elements: Elements<'a, T>,
    finish: Finish<'a, T, R>,
}

/// The elements on which a collective works.
pub(super) enum Elements<'a, T: Clone> {
    /// Elements that the collective writes. The result is made from them.
    Written(Vec<T>),
    /// Elements that the collective only sends. A blocking call borrows them from its caller.
    Sent(Cow<'a, [T]>),
}

/// Converts the written elements to the result. Gets an empty vector if elements were only sent.
type Finish<'a, T, R> = Box<dyn FnOnce(Vec<T>) -> R + Send + 'a>;

impl<'a, T: Element, R> Prepared<'a, T, R> {
    pub(super) fn new(call: Call, elements: Vec<T>, finish: impl FnOnce(Vec<T>) -> R + Send + 'a) -> Self {
        Self { call, elements: Elements::Written(elements), finish: Box::new(finish) }
    }

    /// A collective in which this rank only sends.
    pub(super) fn sending(call: Call, elements: Cow<'a, [T]>, result: R) -> Self
    where
        R: Send + 'a,
    {
        Self { call, elements: Elements::Sent(elements), finish: Box::new(|_| result) }
    }
}

impl Reduction {
    /// Returns a built-in reduction.
    pub(super) fn known<T: Element>(op: ReduceOp) -> Result<Self, Error> {
        let kernels = reduce::kernels(T::DTYPE, op).ok_or(Error::Unsupported { op, dtype: T::DTYPE })?;
        Ok(Self { op, kernels })
    }

    /// Returns a built-in reduction for a scan. An average is not defined for a scan.
    pub(super) fn for_scan<T: Element>(op: ReduceOp) -> Result<Self, Error> {
        if op == ReduceOp::Average {
            return Err(Error::Unsupported { op, dtype: T::DTYPE });
        }
        Self::known::<T>(op)
    }

    /// Returns a reduction by a function of the user.
    pub(super) fn custom<T: Element>(function: impl Fn(&T, &T) -> T + Send + Sync + 'static) -> Self {
        Self { op: ReduceOp::Custom, kernels: Kernels::custom(function) }
    }
}

impl Call {
    /// Sets the reduction.
    pub(super) fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = Some(reduction);
        self
    }

    /// Makes the reduction run in rank order.
    pub(super) fn in_rank_order(mut self) -> Self {
        self.in_rank_order = true;
        if !self.uses_shared_memory {
            self.algorithm = Algorithm::Chain;
        }
        self
    }

    /// Sets the direct algorithm: every rank sends to every other rank.
    pub(super) fn with_direct_algorithm(mut self) -> Self {
        self.algorithm = Algorithm::Direct;
        self
    }

    /// Returns the collective and its reduction functions.
    pub(super) fn into_spec_and_kernels(self) -> (CollectiveSpec, Option<Kernels>) {
        (self.spec, self.reduction.map(|reduction| reduction.kernels))
    }

    /// Sets the digest of the lengths of uneven parts.
    pub(super) fn with_layout(mut self, layout: u32) -> Self {
        self.layout = layout;
        self
    }
}

impl Group {
    /// Returns a call without a reduction and with even parts, on elements of type `T`.
    pub(super) fn call<T: Element>(&self, spec: CollectiveSpec, site: Site) -> Call {
        let uses_shared_memory = self.shm_executor.is_some() && spec.has_known_part_lengths();
        let algorithm = self.algorithm_of::<T>(spec.operation(), spec.count());
        Call { spec, reduction: None, algorithm, uses_shared_memory, in_rank_order: false, layout: 0, site }
    }

    /// Runs a collective on a buffer, and waits until it is complete.
    pub(super) fn run<T: Element>(&self, call: Call, elements: &mut [T]) -> Result<(), Error> {
        let driver = self.driver()?;
        self.reduce_single(&call, elements);
        let Some(driver) = driver else { return Ok(()) };
        self.run_on::<T>(driver, call, bytemuck::cast_slice_mut::<T, u8>(elements).into())
    }

    /// Runs a collective in which this rank only sends, and waits until it is complete.
    pub(super) fn run_sending<T: Element>(&self, call: Call, elements: &[T]) -> Result<(), Error> {
        let Some(driver) = self.driver()? else { return Ok(()) };
        self.run_on::<T>(driver, call, bytemuck::cast_slice::<T, u8>(elements).into())
    }

    /// Runs a collective that reads `input` and writes `output`, and waits until it is complete. The collective sees one buffer:
    /// the input followed by the output.
    pub(super) fn run_with_output<T: Element>(
        &self,
        call: Call,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), Error> {
        let Some(driver) = self.driver()? else { return Ok(()) };
        let (input, output) = (bytemuck::cast_slice::<T, u8>(input), bytemuck::cast_slice_mut(output));
        self.run_on::<T>(driver, call, (input, output).into())
    }

    fn run_on<T: Element>(&self, driver: &Driver, call: Call, bytes: BufferAccess<'_>) -> Result<(), Error> {
        let request = self.begin_of::<T>(&call);
        if let Some(shm_executor) = self.shm_executor.as_ref().filter(|_| call.uses_shared_memory) {
            let mut shm_executor = shm_executor.lock().unwrap_or_else(PoisonError::into_inner);
            // If asynchronous operations are active in the shared memory, this operation has to queue behind them.
            if !shm_executor.is_busy() {
                let shm_request = self.shm_request::<T>(call, shm_executor.slot_bytes());
                return driver.run_in_shared_memory(
                    &mut shm_executor,
                    &self.members,
                    request,
                    shm_request,
                    bytes,
                );
            }
        }
        driver.run(request, bytes, |memory| self.submission::<T>(call, memory)).map(|_| ())
    }

    /// Runs a prepared collective, and waits until it is complete.
    pub(super) fn run_prepared<T: Element, R>(&self, prepared: Prepared<'_, T, R>) -> Result<R, Error> {
        let Prepared { call, elements, finish } = prepared;
        match elements {
            Elements::Written(mut elements) => {
                self.run(call, &mut elements)?;
                Ok(finish(elements))
            }
            Elements::Sent(elements) => {
                self.run_sending(call, &elements)?;
                Ok(finish(Vec::new()))
            }
        }
    }

    /// Begins an asynchronous collective.
    pub(super) fn start<T: Element, R: Send + 'static>(
        &self,
        prepared: Prepared<'static, T, R>,
    ) -> Result<Handle<R>, Error> {
        let Prepared { call, elements, finish } = prepared;
        let (mut elements, is_result) = match elements {
            Elements::Written(elements) => (elements, true),
            Elements::Sent(elements) => (elements.into_owned(), false),
        };
        let finish = move |elements| finish(if is_result { elements } else { Vec::new() });
        self.driver()?;
        self.reduce_single(&call, &mut elements);
        let Some(job) = &self.job else { return Ok(Handle::ready(Ok(finish(elements)))) };
        let request = self.begin_of::<T>(&call);
        let id = job.driver.submit(request, self.submission::<T>(call, Memory::owned(elements)))?;
        let finish = move |outcome: OperationOutput| Ok(finish(outcome.memory.into_elements()));
        Ok(Handle::pending(Arc::clone(job), id, finish))
    }

    /// Begins an asynchronous collective on a buffer. The handle returns the buffer.
    pub(super) fn start_on<B: OwnedBuffer>(&self, call: Call, mut buffer: B) -> Result<Handle<B>, Error> {
        self.driver()?;
        self.reduce_single(&call, buffer.as_mut());
        let Some(job) = &self.job else { return Ok(Handle::ready(Ok(buffer))) };
        let request = self.begin_of::<B::Element>(&call);
        let id = job.driver.submit(request, self.submission::<B::Element>(call, Memory::owned(buffer)))?;
        let finish = |outcome: OperationOutput| outcome.memory.into_owned().ok_or(Error::Taken);
        Ok(Handle::pending(Arc::clone(job), id, finish))
    }

    /// Reduces a contribution that is already the result: in a world of one rank, and on rank 0 of a scan. For example, a
    /// logical reduction converts the elements to 0 and 1.
    fn reduce_single<T: Element>(&self, call: &Call, elements: &mut [T]) {
        let has_prefixes = matches!(call.spec, CollectiveSpec::Scan { .. } | CollectiveSpec::Exscan { .. });
        let is_result = self.world == WorldSize::ONE || (has_prefixes && self.rank == Rank::ZERO);
        if let Some(reduction) = call.reduction.as_ref().filter(|_| is_result) {
            reduce::reduce_single_contribution(T::DTYPE, reduction.op, bytemuck::cast_slice_mut(elements));
        }
    }

    /// Returns the driver; `None` in a world of one rank. In a world of one rank, returns the error after an abort.
    pub(super) fn driver(&self) -> Result<Option<&Driver>, Error> {
        match (&self.job, self.aborted.get()) {
            (Some(job), _) => Ok(Some(&job.driver)),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Ok(None),
        }
    }

    /// Returns the engine's description of a call.
    pub(super) fn begin_of<T: Element>(&self, call: &Call) -> OperationRequest {
        let operation = call.spec.operation();
        let contract = Contract {
            operation,
            dtype: if operation == Operation::Barrier { DType::U8 } else { T::DTYPE },
            reduction: call.reduction.as_ref().map(|reduction| reduction.op),
            algorithm: call.algorithm,
            root: call.spec.root(),
            count: call.spec.count() as u64,
            layout: call.layout,
        };
        let flag = if call.algorithm == Algorithm::Hierarchy { HOSTS_GROUP_BIT } else { 0 };
        OperationRequest {
            group: self.id | flag,
            contract,
            timeout: self.timeout,
            spent: Duration::ZERO,
            site: call.site,
            mode: SendMode::Standard,
        }
    }

    /// Returns the operation to begin, by the transport that the call uses.
    fn submission<T: Element>(&self, call: Call, memory: Memory) -> Submission {
        if let Some(shm_executor) = self.shm_executor.as_ref().filter(|_| call.uses_shared_memory) {
            let slot_bytes = shm_executor.lock().unwrap_or_else(PoisonError::into_inner).slot_bytes();
            let executor = (Arc::clone(shm_executor), Arc::clone(&self.members));
            return Submission::SharedMemory(executor, self.shm_request::<T>(call, slot_bytes), memory);
        }
        if let Some(hosts) = self.hosts.as_ref().filter(|_| call.algorithm == Algorithm::Hierarchy) {
            return Submission::Hierarchical(self.hierarchical_operation::<T>(hosts, call, memory));
        }
        let block = self.block_elements::<T>(&call);
        let world_and_rank = (self.world, self.rank);
        let mut schedule = call.spec.schedule(call.algorithm, world_and_rank, block, call.in_rank_order);
        self.to_world_ranks(&mut schedule);
        let kernels = call.reduction.map(|reduction| reduction.kernels);
        Submission::Collective(
            schedule,
            link_driver::OperationBuffers { memory, kernels, divisor: self.world.get() },
        )
    }

    /// Replaces the group ranks in a schedule by world ranks.
    pub(super) fn to_world_ranks(&self, schedule: &mut Schedule) {
        for step in &mut schedule.steps {
            if let Some(send) = &mut step.send {
                send.peer = self.members[send.peer.index()];
            }
            if let Some(receive) = &mut step.receive {
                receive.peer = self.members[receive.peer.index()];
            }
        }
    }

    /// Returns the number of elements of a block, for an algorithm that divides the buffer into blocks.
    fn block_elements<T: Element>(&self, call: &Call) -> usize {
        let count = call.spec.count();
        if call.algorithm == Algorithm::DoubleTree {
            let bytes = double_tree::block_bytes(count.saturating_mul(size_of::<T>()) as u64);
            return (bytes as usize / size_of::<T>()).max(1);
        }
        let chunk_bytes = self.job.as_ref().map_or(1 << 20, |job| job.chunk_bytes);
        let block = self.world.as_usize() * (chunk_bytes / size_of::<T>());
        block.max(count.div_ceil(BLOCKS_MAX))
    }

    /// Returns the request for the executor of the shared memory.
    fn shm_request<T: Element>(&self, call: Call, slot_bytes: usize) -> ShmRequest {
        let slot = slot_bytes / size_of::<T>();
        let one_shot = if call.algorithm == Algorithm::OneShot { slot } else { 0 };
        let kernels = call.reduction.map(|reduction| reduction.kernels);
        let plan = RoundPlan::new(self.world, self.rank, slot, one_shot, call.spec);
        ShmRequest { plan, kernels, divisor: self.world.get() }
    }
}
