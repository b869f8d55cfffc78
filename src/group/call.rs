//! From a call of a collective to an operation under way.

use std::borrow::Cow;
use std::panic::Location;
use std::sync::Arc;

use super::driver::{Driver, Outcome, Submission};
use super::handle::Handle;
use super::memory::Memory;
use super::pump::Work;
use super::{Error, Group};
use crate::engine::Begin;
use crate::reduce::{self, Kernels};
use crate::schedule::Schedule;
use crate::types::{Algorithm, Contract, DType, Element, Operation, Rank, ReduceOp, WorldSize};

/// Where in the caller's program.
pub(super) type Site = &'static Location<'static>;

/// A collective as its caller asks for it, and the way that was chosen for it.
pub(super) struct Call {
    pub(super) operation: Operation,
    pub(super) reduction: Option<Reduction>,
    pub(super) algorithm: Algorithm,
    pub(super) root: Rank,
    /// What all ranks have to agree on; a rank's own buffer may be shorter.
    pub(super) count: usize,
    /// A digest of uneven parts; 0 for even ones.
    pub(super) layout: u32,
    /// With ranks of the group.
    pub(super) schedule: Schedule,
    pub(super) site: Site,
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
    /// A call without reduction, root or uneven parts.
    pub(super) fn new(
        operation: Operation,
        algorithm: Algorithm,
        count: usize,
        schedule: Schedule,
        site: Site,
    ) -> Self {
        Self { operation, reduction: None, algorithm, root: Rank::ZERO, count, layout: 0, schedule, site }
    }

    pub(super) fn reducing(mut self, reduction: Reduction) -> Self {
        self.reduction = Some(reduction);
        self
    }

    pub(super) fn rooted(mut self, root: Rank) -> Self {
        self.root = root;
        self
    }

    pub(super) fn laid_out(mut self, layout: u32) -> Self {
        self.layout = layout;
        self
    }
}

impl Group {
    /// Runs a collective on a buffer to its end.
    pub(super) fn run<T: Element>(&self, call: Call, elements: &mut [T]) -> Result<(), Error> {
        let driver = self.driver()?;
        self.prepare(&call, elements);
        let Some(driver) = driver else { return Ok(()) };
        let begin = self.begin_of::<T>(&call);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(elements);
        driver.run(begin, bytes, |memory| self.submission(call, memory)).map(|_| ())
    }

    /// Runs a collective to its end in which this rank only sends.
    pub(super) fn run_sending<T: Element>(&self, call: Call, elements: &[T]) -> Result<(), Error> {
        let Some(driver) = self.driver()? else { return Ok(()) };
        let begin = self.begin_of::<T>(&call);
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        driver.run(begin, bytes, |memory| self.submission(call, memory)).map(|_| ())
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
        let id = job.driver.submit(begin, self.submission(call, Memory::owned(elements)))?;
        let finish = move |outcome: Outcome| Ok(finish(outcome.memory.into_elements()));
        Ok(Handle::pending(Arc::clone(job), id, finish))
    }

    /// Makes truth values of contributions that are results as they are: a lone rank's, and the first of prefixes.
    fn prepare<T: Element>(&self, call: &Call, elements: &mut [T]) {
        let has_prefixes = matches!(call.operation, Operation::Scan | Operation::Exscan);
        let is_result = self.world == WorldSize::ONE || (has_prefixes && self.rank == Rank::ZERO);
        if let Some(reduction) = call.reduction.as_ref().filter(|_| is_result) {
            reduce::alone(T::DTYPE, reduction.op, bytemuck::cast_slice_mut(elements));
        }
    }

    /// The driver; none in a world of one, which fails only once it has been given up.
    pub(super) fn driver(&self) -> Result<Option<&Driver>, Error> {
        match (&self.job, &self.abandoned) {
            (Some(job), _) => Ok(Some(&job.driver)),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Ok(None),
        }
    }

    pub(super) fn begin_of<T: Element>(&self, call: &Call) -> Begin {
        let contract = Contract {
            operation: call.operation,
            dtype: if call.operation == Operation::Barrier { DType::U8 } else { T::DTYPE },
            reduction: call.reduction.as_ref().map(|reduction| reduction.op),
            algorithm: call.algorithm,
            root: call.root,
            count: call.count as u64,
            layout: call.layout,
        };
        Begin { group: self.id, contract, timeout: self.timeout, site: call.site }
    }

    fn submission(&self, call: Call, memory: Memory) -> Submission {
        let mut schedule = call.schedule;
        for step in &mut schedule.steps {
            if let Some(send) = &mut step.send {
                send.peer = self.members[send.peer.index()];
            }
            if let Some(receive) = &mut step.receive {
                receive.peer = self.members[receive.peer.index()];
            }
        }
        let kernels = call.reduction.map(|reduction| reduction.kernels);
        Submission::Collective(schedule, Work { memory, kernels, divisor: self.world.get() })
    }
}
