//! How a collective uses memory on one rank, and the plans that a group keeps: in shared memory, a short collective takes less time
//! than it takes to plan, and a program repeats most of its collectives.

use std::ops::Range;

use super::call::Call;
use super::parts::zeroed;
use super::{Error, Group};
use crate::runtime::buffer::BufferAccess;
use crate::runtime::host_rounds::ShortCall;
use crate::types::{DType, Element, Operation, Rank, ReduceOp, Site};

/// The most plans that a group keeps.
const KEPT_MAX: usize = 32;

/// A call, and how it uses its memory.
pub struct Plan {
    pub(super) call: Call,
    pub(super) places: Places,
}

/// The places of the rank's input and result in the memory on which a call works.
#[derive(Clone)]
pub(super) struct Places {
    pub(super) access: MemoryAccess,
    /// The number of elements of the memory.
    pub(super) count: usize,
    pub(super) input: Range<usize>,
    /// The place of this rank's result. It is empty on a rank that gets no result.
    pub(super) result: Range<usize>,
    /// The required length of this rank's output; `None` if the rank's output is ignored.
    pub(super) output_count: Option<usize>,
    /// If the call works in place: the index in the buffer at which the memory of the call begins. `None` if the call needs
    /// separate memory. Then the whole buffer is the input, and the result goes to the beginning of the buffer.
    pub(super) start: Option<usize>,
}

/// Which parts of its memory a call writes.
#[derive(Clone)]
pub(super) enum MemoryAccess {
    /// The call writes to the memory.
    Written,
    /// This rank only sends the memory.
    Sent,
    /// The call reads the input, which is followed by the output. The rank's own part goes from the first range, in the input,
    /// to the second range, in the output.
    InputThenOutput(Range<usize>, Range<usize>),
}

/// A verb that works in place on a buffer of elements of type `T`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not work in place on elements of type `{T}`",
    note = "give the input and the output separately (`run_from`, `run_into`, `start_from`), or check the element type"
)]
pub trait InPlace<T: Element> {
    /// Returns the plan for a buffer of `count` elements.
    #[doc(hidden)]
    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error>;

    /// Returns what determines the plan, or `None` if there is more than a key contains.
    #[doc(hidden)]
    fn key_in_place(&self) -> Option<VerbKey>;

    /// Changes the input in the memory of the call before the call begins.
    #[doc(hidden)]
    fn prepare_in_place(&self, _input: &mut [T]) {}
}

/// A verb that works on a separate input of elements of type `T`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not work on a separate input of elements of type `{T}`",
    note = "a broadcast or scatter needs `count` or `counts`, because only the root has an input"
)]
pub trait OutOfPlace<T: Element> {
    /// Returns the plan for an input of `count` elements.
    #[doc(hidden)]
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error>;

    /// Returns what determines the plan, or `None` if there is more than a key contains.
    #[doc(hidden)]
    fn key(&self) -> Option<VerbKey>;

    /// Returns whether this rank's input is used.
    #[doc(hidden)]
    fn uses_input(&self, _group: &Group) -> bool {
        true
    }

    /// Changes the input in the memory of the call before the call begins.
    #[doc(hidden)]
    fn prepare(&self, _input: &mut [T]) {}
}

impl Plan {
    /// Returns the plan of a call that replaces `count` elements of input by the result.
    pub(super) fn replacing(call: Call, count: usize) -> Self {
        let (whole, output_count, access) = (0..count, Some(count), MemoryAccess::Written);
        let places =
            Places { access, count, input: whole.clone(), result: whole, output_count, start: Some(0) };
        Self { call, places }
    }

    /// Returns the plan of a call that only sends `count` elements. Of these elements, `result` is this rank's result.
    pub(super) fn sending(call: Call, count: usize, result: Range<usize>) -> Self {
        let mut plan = Self::replacing(call, count).with_places(0..count, result);
        plan.places.access = MemoryAccess::Sent;
        plan
    }

    /// Sets the places of the input and the result.
    pub(super) fn with_places(mut self, input: Range<usize>, result: Range<usize>) -> Self {
        self.places.output_count = Some(result.len());
        (self.places.input, self.places.result) = (input, result);
        self
    }

    /// Sets the place of the result. The length of the output stays.
    pub(super) fn with_result(mut self, result: Range<usize>) -> Self {
        self.places.result = result;
        self
    }

    /// Sets the index in the buffer at which the memory of the call begins if it works in place.
    pub(super) fn with_start(mut self, start: Option<usize>) -> Self {
        self.places.start = start;
        self
    }

    /// Makes the call ignore this rank's output. The rank has no result.
    pub(super) fn without_result(mut self) -> Self {
        (self.places.result, self.places.output_count) = (0..0, None);
        self
    }
}

impl Places {
    /// Returns memory for the call that holds a copy of the input.
    pub(super) fn fill<T: Element>(
        &self,
        input: &[T],
        prepare: impl FnOnce(&mut [T]),
    ) -> Result<Vec<T>, Error> {
        let mut memory = if self.input == (0..self.count) {
            input.to_vec()
        } else {
            let mut memory = zeroed(self.count)?;
            memory[self.input.clone()].copy_from_slice(input);
            memory
        };
        prepare(&mut memory[self.input.clone()]);
        if let MemoryAccess::InputThenOutput(own_input, own_output) = &self.access {
            memory.copy_within(own_input.clone(), self.result.start + own_output.start);
        }
        Ok(memory)
    }
}

/// What determines the plan of a verb with even parts and a built-in reduction, besides the group and the elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VerbKey {
    operation: Operation,
    reduction: Option<ReduceOp>,
    root: Rank,
    /// The number of elements, if the verb gives it.
    count: usize,
}

/// What determines a plan, besides the group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PlanKey {
    verb: VerbKey,
    dtype: DType,
    /// The number of elements of the input.
    count: usize,
    is_in_place: bool,
}

/// A planned call of a collective.
pub(super) struct PlannedCall {
    /// `None` if the group does not keep the plan.
    key: Option<PlanKey>,
    call: Call,
    pub(super) places: Places,
    /// The same call, if it is so short that it is not an operation.
    short: Option<ShortCall>,
}

impl VerbKey {
    /// Returns the key of a verb without a reduction, a root and a count.
    #[inline]
    pub(super) fn new(operation: Operation) -> Self {
        Self { operation, reduction: None, root: Rank::ZERO, count: 0 }
    }

    /// Sets the reduction.
    #[inline]
    pub(super) fn reducing(self, op: ReduceOp) -> Self {
        Self { reduction: Some(op), ..self }
    }

    /// Sets the root.
    #[inline]
    pub(super) fn with_root(self, root: Rank) -> Self {
        Self { root, ..self }
    }

    /// Sets the number of elements.
    #[inline]
    pub(super) fn with_count(self, count: usize) -> Self {
        Self { count, ..self }
    }
}

impl Group {
    /// Returns a planned call for elements of type `T`: one that the group has kept, or one with the plan that `make_plan` returns.
    /// `verb` is `None` if the plan depends on more than its key. After the call, pass it to [`Group::keep_plan`].
    #[inline]
    pub(super) fn plan_call<T: Element>(
        &mut self,
        (verb, is_in_place): (Option<VerbKey>, bool),
        count: usize,
        make_plan: impl FnOnce(&Self) -> Result<Plan, Error>,
    ) -> Result<Box<PlannedCall>, Error> {
        let key = verb.map(|verb| PlanKey { verb, dtype: T::DTYPE, count, is_in_place });
        if let Some(planned) = key.and_then(|key| self.take_kept(key)) {
            return Ok(planned);
        }
        let plan = make_plan(self)?;
        Ok(self.prepare(key, plan))
    }

    /// Takes the kept plan with a key. After the call, pass it to [`Group::keep_plan`].
    #[inline]
    fn take_kept(&mut self, key: PlanKey) -> Option<Box<PlannedCall>> {
        let index = self.kept_plans.iter().rposition(|planned| planned.key == Some(key))?;
        Some(self.kept_plans.swap_remove(index))
    }

    /// Runs a collective that works on all `elements` in place. Returns `None` if the group has not kept its plan.
    #[inline]
    pub(super) fn run_kept<T: Element>(
        &mut self,
        verb: VerbKey,
        elements: &mut [T],
        site: Site,
    ) -> Option<Result<(), Error>> {
        let key = PlanKey { verb, dtype: T::DTYPE, count: elements.len(), is_in_place: true };
        let mut planned = self.take_kept(key)?;
        let result = self.run_planned((&mut planned, site), elements);
        self.keep_plan(planned);
        Some(result)
    }

    /// Prepares a call to be kept if it is for shared memory.
    fn prepare(&mut self, key: Option<PlanKey>, Plan { call, places }: Plan) -> Box<PlannedCall> {
        let key = key.filter(|_| call.uses_shared_memory() && self.take_back_rounds());
        let host_rounds = self.host_rounds.as_mut().filter(|_| key.is_some());
        let short = host_rounds.and_then(|host_rounds| call.short_call(host_rounds));
        Box::new(PlannedCall { key, call, places, short })
    }

    /// Keeps the plan of a call.
    #[inline]
    pub(super) fn keep_plan(&mut self, planned: Box<PlannedCall>) {
        if planned.key.is_some() {
            if self.kept_plans.len() == KEPT_MAX {
                self.kept_plans.remove(0);
            }
            self.kept_plans.push(planned);
        }
    }

    /// Runs a planned call that works on `elements` in place, and waits until it is complete.
    #[inline]
    pub(super) fn run_planned<T: Element>(
        &mut self,
        (planned, site): (&mut PlannedCall, Site),
        elements: &mut [T],
    ) -> Result<(), Error> {
        if planned.key.is_none() {
            return self.run(&mut planned.call, elements);
        }
        self.run_planned_on_bytes((planned, site), bytemuck::cast_slice_mut::<T, u8>(elements).into())
    }

    /// Runs a planned call on the bytes of its buffer, and waits until it is complete.
    pub(super) fn run_planned_on_bytes(
        &mut self,
        (planned, site): (&mut PlannedCall, Site),
        bytes: BufferAccess<'_>,
    ) -> Result<(), Error> {
        let PlannedCall { key, call, short, .. } = planned;
        if let (Some(short), Some(job), Some(host_rounds)) = (short, &self.job, &mut self.host_rounds) {
            let as_operation = || call.as_operation(site, self.timeout);
            return job.driver.run_short(host_rounds, (short, site), as_operation, bytes);
        }
        if key.is_none() {
            return self.run_on_bytes(call, bytes);
        }
        let mut call = call.again(site, self.timeout);
        self.run_on_bytes(&mut call, bytes)
    }
}
