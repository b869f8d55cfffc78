//! How a collective uses memory on one rank, and how its plan runs.

use std::ops::Range;

use super::call::Call;
use super::kept_plan::{KeptPlan, MemoryAccess, Places, PlanKey, VerbKey};
use super::parts::zeroed;
use super::{Error, Group};
use crate::runtime::buffer::BufferAccess;
use crate::types::{Element, Site};

/// A call, and how it uses its memory.
pub struct Plan {
    pub(super) call: Call,
    pub(super) places: Places,
}

/// What a verb does with elements of type `T`: in place if `IN_PLACE` is true, and otherwise on a separate input.
pub trait Verb<T: Element, const IN_PLACE: bool> {
    /// Returns the plan for a buffer or an input of `count` elements.
    #[doc(hidden)]
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error>;

    /// Returns what determines the plan; `None` if the plan depends on something that is not in the key.
    #[doc(hidden)]
    #[inline]
    fn key(&self) -> Option<VerbKey> {
        None
    }

    /// Returns whether this rank's input is used.
    #[doc(hidden)]
    fn uses_input(&self, _group: &Group) -> bool {
        true
    }

    /// Changes the input in the memory of the call before the call begins.
    #[doc(hidden)]
    fn prepare(&self, _input: &mut [T]) {}
}

/// A verb that works in place on a buffer of elements of type `T`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not work in place on elements of type `{T}`",
    note = "give the input and the output separately (`run_from`, `run_into`, `start_from`), or check the element type"
)]
pub trait InPlace<T: Element>: Verb<T, true> {}
impl<T: Element, V: Verb<T, true>> InPlace<T> for V {}

/// A verb that works on a separate input of elements of type `T`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not work on a separate input of elements of type `{T}`",
    note = "a broadcast or scatter needs `count` or `counts`, because only the root has an input"
)]
pub trait OutOfPlace<T: Element>: Verb<T, false> {}
impl<T: Element, V: Verb<T, false>> OutOfPlace<T> for V {}

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

/// A planned call of a collective.
pub(super) enum PlannedCall {
    /// A call that the group keeps. After the call, pass it to [`Group::keep_plan`].
    Kept(Box<KeptPlan>),
    New(Box<Plan>),
}

impl PlannedCall {
    #[inline]
    pub(super) fn places(&self) -> &Places {
        match self {
            Self::Kept(kept) => &kept.places,
            Self::New(plan) => &plan.places,
        }
    }
}

impl Group {
    /// Returns a planned call of a verb on `count` elements: one that the group has kept, or a new one.
    #[inline]
    pub(super) fn plan_call<T: Element, const IN_PLACE: bool>(
        &mut self,
        verb: &impl Verb<T, IN_PLACE>,
        count: usize,
        site: Site,
    ) -> Result<PlannedCall, Error> {
        let key = verb.key().map(|verb| PlanKey { verb, dtype: T::DTYPE, count, is_in_place: IN_PLACE });
        if let Some(kept) = key.and_then(|key| self.kept_plans.take(key)) {
            return Ok(PlannedCall::Kept(kept));
        }
        let plan = verb.plan(self, count, site)?;
        let key = key.filter(|_| plan.call.uses_shared_memory() && self.take_back_rounds());
        Ok(match (key, &mut self.host_rounds) {
            (Some(key), Some(host_rounds)) => {
                PlannedCall::Kept(Box::new(plan.call.into_kept(key, plan.places, host_rounds)))
            }
            _ => PlannedCall::New(Box::new(plan)),
        })
    }

    /// Keeps the plan of a call, if it is for shared memory.
    #[inline]
    pub(super) fn keep_plan(&mut self, planned: PlannedCall) {
        if let PlannedCall::Kept(kept) = planned {
            self.kept_plans.keep(kept);
        }
    }

    /// Runs a planned call that works on `elements` in place, and waits until it is complete.
    #[inline]
    pub(super) fn run_planned<T: Element>(
        &mut self,
        (planned, site): (&mut PlannedCall, Site),
        elements: &mut [T],
    ) -> Result<(), Error> {
        match planned {
            PlannedCall::New(plan) => self.run(&mut plan.call, elements),
            PlannedCall::Kept(kept) => {
                let bytes = bytemuck::cast_slice_mut::<T, u8>(elements);
                self.run_kept_on_bytes((kept, site), bytes.into())
            }
        }
    }

    /// Runs a planned call on the bytes of its buffer, and waits until it is complete.
    pub(super) fn run_planned_on_bytes(
        &mut self,
        (planned, site): (&mut PlannedCall, Site),
        bytes: BufferAccess<'_>,
    ) -> Result<(), Error> {
        match planned {
            PlannedCall::New(plan) => self.run_on_bytes(&mut plan.call, bytes),
            PlannedCall::Kept(kept) => self.run_kept_on_bytes((kept, site), bytes),
        }
    }
}
