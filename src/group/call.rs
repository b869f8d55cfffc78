//! From a call of a collective to an operation under way.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::driver::{Driver, OperationOutput, Submission};
use super::handle::Handle;
use super::memory::{BufferAccess, Memory};
use super::shm_executor::ShmRequest;
use super::{Error, Group, OwnedBuffer, link_driver};
use crate::engine::{Begin, SendMode};
use crate::reduce::{self, Kernels};
use crate::schedule::rounds::RoundPlan;
use crate::schedule::{CollectiveSpec, Schedule, double_tree};
use crate::types::{
    Algorithm, Contract, DType, Element, HOSTS_GROUP_BIT, Operation, Rank, ReduceOp, Site, WorldSize,
};

/// The most blocks that an all-reduce on the ring is cut into, so that its schedule stays small however long the buffer is.
const BLOCKS_MAX: usize = 512;

/// A collective as its caller asks for it, and the way that was chosen for it.
pub(super) struct Call {
    work: CollectiveSpec,
    reduction: Option<Reduction>,
    algorithm: Algorithm,
    /// In shared memory, all of it.
    at_desk: bool,
    /// The reduction does not commute.
    in_rank_order: bool,
    /// A digest of uneven parts; 0 for even ones.
    layout: u32,
    site: Site,
}

/// What is done to elements that stand at the same place.
pub(super) struct Reduction {
    pub(super) op: ReduceOp,
    pub(super) kernels: Kernels,
}

/// A collective on elements of its own, and what makes the result of them.
pub(super) struct Prepared<'a, T: Clone, R> {
    call: Call,
    elements: Elements<'a, T>,
    finish: Finish<'a, T, R>,
}

/// What a collective works on.
pub(super) enum Elements<'a, T: Clone> {
    /// Elements that are written, and of which the result is made.
    Worked(Vec<T>),
    /// Elements that are only sent: whoever waits lends its own.
    Sent(Cow<'a, [T]>),
}

/// Makes the result of what has been worked on; of nothing, where elements were only sent.
type Finish<'a, T, R> = Box<dyn FnOnce(Vec<T>) -> R + Send + 'a>;

impl<'a, T: Element, R> Prepared<'a, T, R> {
    pub(super) fn new(call: Call, elements: Vec<T>, finish: impl FnOnce(Vec<T>) -> R + Send + 'a) -> Self {
        Self { call, elements: Elements::Worked(elements), finish: Box::new(finish) }
    }

    /// A rank's part in which it receives nothing.
    pub(super) fn sending(call: Call, elements: Cow<'a, [T]>, result: R) -> Self
    where
        R: Send + 'a,
    {
        Self { call, elements: Elements::Sent(elements), finish: Box::new(|_| result) }
    }
}

impl Reduction {
    /// One of the known reductions.
    pub(super) fn known<T: Element>(op: ReduceOp) -> Result<Self, Error> {
        let kernels = reduce::kernels(T::DTYPE, op).ok_or(Error::Unsupported { op, dtype: T::DTYPE })?;
        Ok(Self { op, kernels })
    }

    /// One that makes sense of some of the ranks alone, which an average does not.
    pub(super) fn of_prefixes<T: Element>(op: ReduceOp) -> Result<Self, Error> {
        if op == ReduceOp::Average {
            return Err(Error::Unsupported { op, dtype: T::DTYPE });
        }
        Self::known::<T>(op)
    }

    /// The program's own function.
    pub(super) fn custom<T: Element>(function: impl Fn(&T, &T) -> T + Send + Sync + 'static) -> Self {
        Self { op: ReduceOp::Custom, kernels: Kernels::custom(function) }
    }
}

impl Call {
    pub(super) fn reducing(mut self, reduction: Reduction) -> Self {
        self.reduction = Some(reduction);
        self
    }

    pub(super) fn in_rank_order(mut self) -> Self {
        self.in_rank_order = true;
        if !self.at_desk {
            self.algorithm = Algorithm::Chain;
        }
        self
    }

    /// From everybody straight to everybody, whatever another way costs.
    pub(super) fn directly(mut self) -> Self {
        self.algorithm = Algorithm::Direct;
        self
    }

    /// What is done, and how elements are reduced, if they are.
    pub(super) fn into_work(self) -> (CollectiveSpec, Option<Kernels>) {
        (self.work, self.reduction.map(|reduction| reduction.kernels))
    }

    pub(super) fn laid_out(mut self, layout: u32) -> Self {
        self.layout = layout;
        self
    }
}

impl Group {
    /// A call without reduction or uneven parts, on elements of this type.
    pub(super) fn call<T: Element>(&self, work: CollectiveSpec, site: Site) -> Call {
        let at_desk = self.shm_executor.is_some() && work.has_known_part_lengths();
        let algorithm = self.algorithm_of::<T>(work.operation(), work.count());
        Call { work, reduction: None, algorithm, at_desk, in_rank_order: false, layout: 0, site }
    }

    /// Runs a collective on a buffer to its end.
    pub(super) fn run<T: Element>(&self, call: Call, elements: &mut [T]) -> Result<(), Error> {
        let driver = self.driver()?;
        self.prepare(&call, elements);
        let Some(driver) = driver else { return Ok(()) };
        self.run_on::<T>(driver, call, bytemuck::cast_slice_mut::<T, u8>(elements).into())
    }

    /// Runs a collective to its end in which this rank only sends.
    pub(super) fn run_sending<T: Element>(&self, call: Call, elements: &[T]) -> Result<(), Error> {
        let Some(driver) = self.driver()? else { return Ok(()) };
        self.run_on::<T>(driver, call, bytemuck::cast_slice::<T, u8>(elements).into())
    }

    /// Runs a collective to its end that reads one buffer and writes another. To the collective they are one, the input first.
    pub(super) fn run_between<T: Element>(
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
        let begin = self.begin_of::<T>(&call);
        if let Some(shm_executor) = self.shm_executor.as_ref().filter(|_| call.at_desk) {
            let mut shm_executor = shm_executor.lock().unwrap_or_else(PoisonError::into_inner);
            // What goes on by itself comes first, and does so without this thread.
            if !shm_executor.is_busy() {
                let shm_request = self.shm_request::<T>(call, shm_executor.slot_bytes());
                return driver.run_in_shared_memory(
                    &mut shm_executor,
                    &self.members,
                    begin,
                    shm_request,
                    bytes,
                );
            }
        }
        driver.run(begin, bytes, |memory| self.submission::<T>(call, memory)).map(|_| ())
    }

    /// Runs a collective on elements of its own to its end.
    pub(super) fn run_prepared<T: Element, R>(&self, prepared: Prepared<'_, T, R>) -> Result<R, Error> {
        let Prepared { call, elements, finish } = prepared;
        match elements {
            Elements::Worked(mut elements) => {
                self.run(call, &mut elements)?;
                Ok(finish(elements))
            }
            Elements::Sent(elements) => {
                self.run_sending(call, &elements)?;
                Ok(finish(Vec::new()))
            }
        }
    }

    /// Begins a collective that goes on by itself.
    pub(super) fn start<T: Element, R: Send + 'static>(
        &self,
        prepared: Prepared<'static, T, R>,
    ) -> Result<Handle<R>, Error> {
        let Prepared { call, elements, finish } = prepared;
        let (mut elements, is_result) = match elements {
            Elements::Worked(elements) => (elements, true),
            Elements::Sent(elements) => (elements.into_owned(), false),
        };
        let finish = move |elements| finish(if is_result { elements } else { Vec::new() });
        self.driver()?;
        self.prepare(&call, &mut elements);
        let Some(job) = &self.job else { return Ok(Handle::ready(Ok(finish(elements)))) };
        let begin = self.begin_of::<T>(&call);
        let id = job.driver.submit(begin, self.submission::<T>(call, Memory::owned(elements)))?;
        let finish = move |outcome: OperationOutput| Ok(finish(outcome.memory.into_elements()));
        Ok(Handle::pending(Arc::clone(job), id, finish))
    }

    /// Begins a collective that goes on by itself in a buffer, which it gives back.
    pub(super) fn start_on<B: OwnedBuffer>(&self, call: Call, mut buffer: B) -> Result<Handle<B>, Error> {
        self.driver()?;
        self.prepare(&call, buffer.as_mut());
        let Some(job) = &self.job else { return Ok(Handle::ready(Ok(buffer))) };
        let begin = self.begin_of::<B::Element>(&call);
        let id = job.driver.submit(begin, self.submission::<B::Element>(call, Memory::owned(buffer)))?;
        let finish = |outcome: OperationOutput| outcome.memory.into_owned().ok_or(Error::Taken);
        Ok(Handle::pending(Arc::clone(job), id, finish))
    }

    /// Makes truth values of contributions that are results as they are: a lone rank's, and the first of prefixes.
    fn prepare<T: Element>(&self, call: &Call, elements: &mut [T]) {
        let has_prefixes = matches!(call.work, CollectiveSpec::Scan { .. } | CollectiveSpec::Exscan { .. });
        let is_result = self.world == WorldSize::ONE || (has_prefixes && self.rank == Rank::ZERO);
        if let Some(reduction) = call.reduction.as_ref().filter(|_| is_result) {
            reduce::reduce_single_contribution(T::DTYPE, reduction.op, bytemuck::cast_slice_mut(elements));
        }
    }

    /// The driver; none in a world of one, which fails only once it has been given up.
    pub(super) fn driver(&self) -> Result<Option<&Driver>, Error> {
        match (&self.job, self.abandoned.get()) {
            (Some(job), _) => Ok(Some(&job.driver)),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Ok(None),
        }
    }

    pub(super) fn begin_of<T: Element>(&self, call: &Call) -> Begin {
        let operation = call.work.operation();
        let contract = Contract {
            operation,
            dtype: if operation == Operation::Barrier { DType::U8 } else { T::DTYPE },
            reduction: call.reduction.as_ref().map(|reduction| reduction.op),
            algorithm: call.algorithm,
            root: call.work.root(),
            count: call.work.count() as u64,
            layout: call.layout,
        };
        let flag = if call.algorithm == Algorithm::Hierarchy { HOSTS_GROUP_BIT } else { 0 };
        Begin {
            group: self.id | flag,
            contract,
            timeout: self.timeout,
            spent: Duration::ZERO,
            site: call.site,
            mode: SendMode::Standard,
        }
    }

    fn submission<T: Element>(&self, call: Call, memory: Memory) -> Submission {
        if let Some(shm_executor) = self.shm_executor.as_ref().filter(|_| call.at_desk) {
            let slot_bytes = shm_executor.lock().unwrap_or_else(PoisonError::into_inner).slot_bytes();
            let place = (Arc::clone(shm_executor), Arc::clone(&self.members));
            return Submission::SharedMemory(place, self.shm_request::<T>(call, slot_bytes), memory);
        }
        if let Some(hosts) = self.hosts.as_ref().filter(|_| call.algorithm == Algorithm::Hierarchy) {
            return Submission::Hierarchical(self.hierarchical::<T>(hosts, call, memory));
        }
        let block = self.block::<T>(&call);
        let place = (self.world, self.rank);
        let mut schedule = call.work.schedule(call.algorithm, place, block, call.in_rank_order);
        self.name_peers(&mut schedule);
        let kernels = call.reduction.map(|reduction| reduction.kernels);
        Submission::Collective(
            schedule,
            link_driver::OperationBuffers { memory, kernels, divisor: self.world.get() },
        )
    }

    /// Puts ranks of the job into a schedule with ranks of the group.
    pub(super) fn name_peers(&self, schedule: &mut Schedule) {
        for step in &mut schedule.steps {
            if let Some(send) = &mut step.send {
                send.peer = self.members[send.peer.index()];
            }
            if let Some(receive) = &mut step.receive {
                receive.peer = self.members[receive.peer.index()];
            }
        }
    }

    /// How many elements are taken at a time, where the algorithm cuts the buffer.
    fn block<T: Element>(&self, call: &Call) -> usize {
        let count = call.work.count();
        if call.algorithm == Algorithm::DoubleTree {
            let bytes = double_tree::block_bytes(count.saturating_mul(size_of::<T>()) as u64);
            return (bytes as usize / size_of::<T>()).max(1);
        }
        let chunk_bytes = self.job.as_ref().map_or(1 << 20, |job| job.chunk_bytes);
        let block = self.world.as_usize() * (chunk_bytes / size_of::<T>());
        block.max(count.div_ceil(BLOCKS_MAX))
    }

    /// What is done at the desk, on elements of this type.
    fn shm_request<T: Element>(&self, call: Call, slot_bytes: usize) -> ShmRequest {
        let slot = slot_bytes / size_of::<T>();
        let one_shot = if call.algorithm == Algorithm::OneShot { slot } else { 0 };
        let kernels = call.reduction.map(|reduction| reduction.kernels);
        let plan = RoundPlan::new(self.world, self.rank, slot, one_shot, call.work);
        ShmRequest { plan, kernels, divisor: self.world.get() }
    }
}
