//! Plans of collectives. A program repeats most of its collectives. In shared memory, a short collective takes less time than it takes to plan, so a group
//! keeps its last plans.

use super::call::Call;
use super::plan::{Places, Plan};
use super::{Error, Group};
use crate::runtime::host_rounds::ShortCall;
use crate::runtime::memory::BufferAccess;
use crate::types::{DType, Element, Operation, Rank, ReduceOp, Site};

/// The most plans that a group keeps.
const KEPT_MAX: usize = 32;

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
        if key.is_some()
            && let Some(index) = self.kept_plans.iter().rposition(|planned| planned.key == key)
        {
            return Ok(self.kept_plans.swap_remove(index));
        }
        let plan = make_plan(self)?;
        Ok(self.prepare(key, plan))
    }

    /// Prepares a call to be kept if it is for shared memory.
    fn prepare(&mut self, key: Option<PlanKey>, Plan { call, places }: Plan) -> Box<PlannedCall> {
        let key = key.filter(|_| call.uses_shared_memory() && self.take_back_rounds());
        let host_rounds = self.host_rounds.as_mut().filter(|_| key.is_some());
        let short = host_rounds.and_then(|host_rounds| call.short_call(host_rounds));
        Box::new(PlannedCall { key, call, places, short })
    }

    /// Keeps the plan of a call that has succeeded.
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
