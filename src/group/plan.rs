//! How a collective uses memory on one rank.

use std::ops::Range;

use super::call::Call;
use super::parts::zeroed;
use super::prepared::VerbKey;
use super::{Error, Group};
use crate::types::{Element, Site};

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
