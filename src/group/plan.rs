//! The plan of a collective: how the collective uses memory on one rank. The group keeps and runs plans.

use super::call::Call;
use super::kept_plan::{MemoryAccess, Places, Plan, PlanKey};
use super::parts::zeroed;
use super::reducers::Reducer;
use super::{Error, Group};
use crate::types::{Element, Operation, Rank, ReduceOp, Site};

/// A verb on elements of type `T`: in place if `IN_PLACE` is true, and otherwise on a separate input.
pub trait Verb<T: Element, const IN_PLACE: bool> {
    #[doc(hidden)]
    fn arguments(&self) -> VerbArguments<'_, T>;
}

/// What a verb says about its collective.
#[derive(Clone, Copy)]
pub struct VerbArguments<'a, T> {
    pub(super) operation: Operation,
    pub(super) root: Rank,
    pub(super) is_in_place: bool,
    /// The number of elements that a broadcast or scatter names; otherwise 0.
    pub(super) count: usize,
    pub(super) counts: Option<&'a [usize]>,
    /// The lengths of the parts that this rank sends and receives in an uneven all-to-all.
    pub(super) exchanged_counts: Option<&'a [Vec<usize>; 2]>,
    pub(super) reducer: Option<&'a dyn Reducer<T>>,
    /// The built-in reduction, if the reducer does nothing else.
    pub(super) built_in: Option<ReduceOp>,
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

impl<'a, T: Element> VerbArguments<'a, T> {
    /// Returns the arguments of a verb in place, with even parts, and with rank 0 as its root.
    #[inline]
    pub(super) fn new(operation: Operation) -> Self {
        Self {
            operation,
            root: Rank::ZERO,
            is_in_place: true,
            count: 0,
            counts: None,
            exchanged_counts: None,
            reducer: None,
            built_in: None,
        }
    }

    #[inline]
    pub(super) fn reducing(operation: Operation, reducer: &'a impl Reducer<T>) -> Self {
        Self { reducer: Some(reducer), built_in: reducer.built_in(), ..Self::new(operation) }
    }

    /// Returns what identifies the plan for `count` elements; `None` if the plan depends on something that is not in the key.
    #[inline]
    pub(super) fn key(&self, count: usize) -> Option<PlanKey> {
        // Rank 0 of a scan also applies the reduction to its own elements, which no plan contains.
        let has_key = self.counts.is_none()
            && self.exchanged_counts.is_none()
            && self.reducer.is_some() == self.built_in.is_some()
            && !matches!(self.operation, Operation::Scan | Operation::Exscan);
        has_key.then_some(PlanKey {
            operation: self.operation,
            reduction: self.built_in,
            root: self.root,
            named_count: self.count,
            dtype: T::DTYPE,
            count,
            is_in_place: self.is_in_place,
        })
    }

    /// Changes the input in the memory of the call before the call begins.
    #[inline]
    pub(super) fn prepare(&self, input: &mut [T]) {
        if let (Some(reducer), None) = (self.reducer, self.built_in) {
            reducer.prepare(input);
        }
    }

    /// Returns memory for the call that holds a copy of the input.
    pub(super) fn fill(&self, places: &Places, input: &[T]) -> Result<Vec<T>, Error> {
        let mut memory = if places.input == (0..places.count) {
            input.to_vec()
        } else {
            let mut memory = zeroed(places.count)?;
            memory[places.input.clone()].copy_from_slice(input);
            memory
        };
        self.prepare(&mut memory[places.input.clone()]);
        if let MemoryAccess::InputThenOutput(own_input, own_output) = &places.access {
            memory.copy_within(own_input.clone(), places.result.start + own_output.start);
        }
        Ok(memory)
    }
}

impl Group {
    /// Returns a kept or new plan of a verb on `count` elements. After the call, pass it to [`Group::keep_plan`].
    #[inline]
    pub(super) fn plan_call<T: Element>(
        &mut self,
        verb: &VerbArguments<'_, T>,
        count: usize,
        site: Site,
    ) -> Result<Box<Plan>, Error> {
        let key = verb.key(count);
        if let Some(kept) = key.and_then(|key| self.take_kept(key, site)) {
            return Ok(kept);
        }
        let mut plan = Box::new(verb.plan(self, count, site)?);
        if key.is_some()
            && plan.call.uses_shared_memory
            && self.take_back_rounds()
            && let Some(host_rounds) = &mut self.host_rounds
        {
            let Call { spec, request, kernels, .. } = &plan.call;
            plan.call.short = host_rounds.short_call(spec, request.contract, kernels.clone());
            plan.key = key;
        }
        Ok(plan)
    }

    #[inline]
    pub(super) fn keep_plan(&mut self, plan: Box<Plan>) {
        if plan.key.is_some() {
            self.kept_plans.keep(plan);
        }
    }
}
