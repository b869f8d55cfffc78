//! How a collective uses memory on one rank, and how it runs in place, into a new vector or into an output.

use std::ops::Range;

use super::call::Call;
use super::parts::{output_elements, zeroed};
use super::{Buffer, Error, Group, Handle, OwnedBuffer};
use crate::shm::copy_to_buffer;
use crate::types::{Element, Site};

/// A call, and the places of the rank's input and result in the memory on which the call works.
pub struct Plan {
    pub(super) call: Call,
    pub(super) access: MemoryAccess,
    /// The number of elements of the memory.
    pub(super) count: usize,
    pub(super) input: Range<usize>,
    /// The place of this rank's result. It is empty on a rank that gets no result.
    pub(super) result: Range<usize>,
    /// The required length of this rank's output; `None` if the rank's output is ignored.
    pub(super) output_count: Option<usize>,
}

/// How a call uses its memory.
pub(super) enum MemoryAccess {
    /// The call writes to the memory.
    Written,
    /// This rank only sends the memory.
    Sent,
    /// The call reads the input, which is followed by the output. The rank's own part goes from the first range, in the input,
    /// to the second range, in the output.
    InputThenOutput(Range<usize>, Range<usize>),
}

/// A plan for a buffer that holds the input at first and the result at the end.
pub struct InPlacePlan {
    pub(super) plan: Plan,
    /// The index in the buffer at which the memory of the call begins. `None` if the call needs separate memory. Then the whole
    /// buffer is the input, and the result goes to the beginning of the buffer.
    pub(super) start: Option<usize>,
}

/// A verb that works in place on a buffer of elements of type `T`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not work in place on elements of type `{T}`",
    note = "give the input and the output separately (`run_from`, `run_into`, `start_from`), or check the element type"
)]
pub trait InPlace<T: Element>: PlansInPlace<T> {}

/// A verb that works on a separate input of elements of type `T`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not work on a separate input of elements of type `{T}`",
    note = "a broadcast or scatter needs `count` or `counts`, because only the root has an input"
)]
pub trait OutOfPlace<T: Element>: Plans<T> {}

/// A verb that can plan a collective on a separate input. This trait is private, so that only this crate can add verbs.
pub trait Plans<T: Element> {
    /// Returns the plan for an input of `count` elements.
    fn plan(&self, group: &Group, count: usize, site: Site) -> Result<Plan, Error>;

    /// Returns whether this rank's input is used.
    fn uses_input(&self, _group: &Group) -> bool {
        true
    }

    /// Changes the input in the memory of the call before the call begins.
    fn prepare(&self, _input: &mut [T]) {}
}

/// A verb that can plan a collective in place.
pub trait PlansInPlace<T: Element> {
    /// Returns the plan for a buffer of `count` elements.
    fn plan_in_place(&self, group: &Group, count: usize, site: Site) -> Result<InPlacePlan, Error>;

    /// Changes the input in the memory of the call before the call begins.
    fn prepare_in_place(&self, _input: &mut [T]) {}
}

impl Plan {
    /// Returns the plan of a call that replaces `count` elements of input by the result.
    pub(super) fn replacing(call: Call, count: usize) -> Self {
        let access = MemoryAccess::Written;
        Self { call, access, count, input: 0..count, result: 0..count, output_count: Some(count) }
    }

    /// Returns the plan of a call that only sends `count` elements. Of these elements, `result` is this rank's result.
    pub(super) fn sending(call: Call, count: usize, result: Range<usize>) -> Self {
        let output_count = Some(result.len());
        Self { call, access: MemoryAccess::Sent, count, input: 0..count, result, output_count }
    }

    /// Sets the places of the input and the result.
    pub(super) fn with_places(self, input: Range<usize>, result: Range<usize>) -> Self {
        let output_count = Some(result.len());
        Self { input, result, output_count, ..self }
    }

    /// Makes the call ignore this rank's output. The rank has no result.
    pub(super) fn without_result(self) -> Self {
        Self { result: 0..0, output_count: None, ..self }
    }

    /// Makes this a plan in place, in which the memory of the call begins at `start` in the buffer.
    pub(super) fn at(self, start: usize) -> InPlacePlan {
        InPlacePlan { plan: self, start: Some(start) }
    }

    /// Returns memory for the call that holds a copy of the input.
    fn fill<T: Element>(&self, input: &[T], prepare: impl FnOnce(&mut [T])) -> Result<Vec<T>, Error> {
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

/// Keeps only this range of the elements. This function moves the elements within the vector, because new memory would cost a
/// page fault for every 4 KiB.
fn keep_range<T>(mut elements: Vec<T>, range: Range<usize>) -> Vec<T> {
    elements.truncate(range.end);
    elements.drain(..range.start);
    elements
}

impl Group {
    /// Copies a part of the input to its place in the output.
    fn copy_part<T: Element>(&self, output: &mut [T], place: &Range<usize>, part: &[T]) {
        let ranks = if self.host_rounds.is_some() { self.world.as_usize() } else { 1 };
        let bytes_of_all_ranks = size_of_val(output) * ranks;
        let target = bytemuck::cast_slice_mut(&mut output[place.clone()]);
        copy_to_buffer(target, bytemuck::cast_slice(part), bytes_of_all_ranks);
    }

    /// Runs a verb on a buffer in place. Returns the range of the buffer that holds this rank's result.
    pub(super) fn run_verb_in_place<T: Element>(
        &mut self,
        verb: &impl PlansInPlace<T>,
        buffer: &mut [T],
        site: Site,
    ) -> Result<Range<usize>, Error> {
        let InPlacePlan { plan, start } = verb.plan_in_place(self, buffer.len(), site)?;
        let Some(start) = start else {
            let mut memory = plan.fill(buffer, |input| verb.prepare_in_place(input))?;
            self.run(plan.call, &mut memory)?;
            let result = &memory[plan.result];
            buffer[..result.len()].copy_from_slice(result);
            return Ok(0..result.len());
        };
        let memory = &mut buffer[start..start + plan.count];
        verb.prepare_in_place(&mut memory[plan.input]);
        match plan.access {
            MemoryAccess::Sent => self.run_sending(plan.call, memory)?,
            _ => self.run(plan.call, memory)?,
        }
        Ok(start + plan.result.start..start + plan.result.end)
    }

    /// Runs a verb on `input`, and returns this rank's result.
    pub(super) fn run_verb_from<T: Element>(
        &mut self,
        verb: &impl Plans<T>,
        input: &[T],
        site: Site,
    ) -> Result<Vec<T>, Error> {
        let plan = verb.plan(self, input.len(), site)?;
        match &plan.access {
            MemoryAccess::Written => {
                let mut memory = plan.fill(input, |input| verb.prepare(input))?;
                self.run(plan.call, &mut memory)?;
                Ok(keep_range(memory, plan.result))
            }
            MemoryAccess::Sent => {
                self.run_sending(plan.call, input)?;
                Ok(input[plan.result].to_vec())
            }
            MemoryAccess::InputThenOutput(own_input, own_output) => {
                let mut output = zeroed(plan.result.len())?;
                self.copy_part(&mut output, own_output, &input[own_input.clone()]);
                self.run_with_output(plan.call, input, &mut output)?;
                Ok(output)
            }
        }
    }

    /// Runs a verb on `input`, and writes this rank's result to `output`.
    pub(super) fn run_verb_into<T: Element, B: Buffer<Element = T> + ?Sized>(
        &mut self,
        verb: &impl Plans<T>,
        input: &[T],
        output: &mut B,
        site: Site,
    ) -> Result<(), Error> {
        let plan = verb.plan(self, input.len(), site)?;
        let output: &mut [T] = match plan.output_count {
            Some(count) => output_elements(output, count)?,
            None => &mut [],
        };
        match &plan.access {
            MemoryAccess::Sent => {
                self.run_sending(plan.call, input)?;
                self.copy_part(output, &(0..output.len()), &input[plan.result]);
            }
            MemoryAccess::InputThenOutput(own_input, own_output) => {
                self.copy_part(output, own_output, &input[own_input.clone()]);
                self.run_with_output(plan.call, input, output)?;
            }
            MemoryAccess::Written if output.len() == plan.count && plan.result == (0..plan.count) => {
                self.copy_part(output, &plan.input, input);
                verb.prepare(&mut output[plan.input]);
                self.run(plan.call, output)?;
            }
            MemoryAccess::Written => {
                let mut memory = plan.fill(input, |input| verb.prepare(input))?;
                self.run(plan.call, &mut memory)?;
                let result = &memory[plan.result];
                output[..result.len()].copy_from_slice(result);
            }
        }
        Ok(())
    }

    /// Begins a verb on an owned buffer in place. The handle returns the buffer.
    pub(super) fn start_verb_in_place<B: OwnedBuffer>(
        &mut self,
        verb: &impl PlansInPlace<B::Element>,
        mut buffer: B,
        site: Site,
    ) -> Result<Handle<B>, Error> {
        let count = buffer.as_ref().len();
        let InPlacePlan { plan, start } = verb.plan_in_place(self, count, site)?;
        if start == Some(0) && plan.count == count {
            verb.prepare_in_place(&mut buffer.as_mut()[plan.input]);
            return self.start_in_place(plan.call, buffer);
        }
        let (memory, target) = match start {
            Some(start) => {
                let mut memory = buffer.as_ref()[start..start + plan.count].to_vec();
                verb.prepare_in_place(&mut memory[plan.input]);
                (memory, start + plan.result.start)
            }
            None => (plan.fill(buffer.as_ref(), |input| verb.prepare_in_place(input))?, 0),
        };
        let result = plan.result;
        let ended = self.start_in_place(plan.call, memory)?;
        Ok(ended.and_then(move |memory| {
            buffer.as_mut()[target..target + result.len()].copy_from_slice(&memory[result]);
            Ok(buffer)
        }))
    }

    /// Begins a verb on a copy of `input`. The handle returns this rank's result.
    pub(super) fn start_verb_from<T: Element>(
        &mut self,
        verb: &impl Plans<T>,
        input: &[T],
        site: Site,
    ) -> Result<Handle<Vec<T>>, Error> {
        let plan = verb.plan(self, input.len(), site)?;
        let memory = plan.fill(input, |input| verb.prepare(input))?;
        let (result, ended) = (plan.result, self.start_in_place(plan.call, memory)?);
        Ok(ended.and_then(move |memory| Ok(keep_range(memory, result))))
    }
}
