//! The collective that a caller has described with a verb, and the methods that run it.

use std::ops::Range;

use super::kept_plan::{MemoryAccess, Places, Plan};
use super::parts::zeroed;
use super::plan::{InPlace, OutOfPlace, VerbArguments};
use super::{Buffer, Error, Group, Handle, Input, OwnedBuffer};
use crate::shm::copy_to_buffer;
use crate::types::{Element, Site};

/// A collective that is ready to run. All ranks of the group must run the same verb with the same options. The ranks may choose
/// different methods: for example, one rank may wait for the collective and another rank may get a handle.
///
/// | method | input | result |
/// |---|---|---|
/// | [`run`](Self::run) | a borrowed buffer | in the same buffer |
/// | [`run_from`](Self::run_from) | a borrowed input | in a new vector |
/// | [`run_into`](Self::run_into) | a borrowed input | in a borrowed output |
/// | [`start`](Self::start) | an owned buffer | a handle returns the buffer |
/// | [`start_from`](Self::start_from) | a borrowed input, which is copied | a handle returns a new vector |
#[must_use = "call one of its methods to run the collective"]
pub struct Collective<'g, V> {
    group: &'g mut Group,
    verb: V,
    site: Site,
}

impl Group {
    /// Describes a collective with a verb of [`verbs`](super::verbs). The methods of [`Collective`] run it. Errors on all ranks
    /// name the line of this call. The collective borrows the group, so compute its input before the call.
    ///
    /// ```
    /// use ringtrain::verbs::{AllGather, AllReduce};
    /// use ringtrain::{Group, ReduceOp};
    ///
    /// let mut group = Group::from_environment()?;
    /// let loss = group.call(AllReduce::new(ReduceOp::Average)).run_from(&[0.5f32])?;
    /// let counts = group.call(AllGather::new()).run_from(&[20u64])?;
    /// println!("loss {}, samples of each rank {counts:?}", loss[0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn call<V>(&mut self, verb: V) -> Collective<'_, V> {
        Collective { site: Site::here(), group: self, verb }
    }
}

impl<V> Collective<'_, V> {
    /// Runs the collective in place. Returns the range of the buffer that holds this rank's result; it is empty without a result.
    ///
    /// # Errors
    ///
    /// [`Error`] if the array is not contiguous, the reduction is not defined on its elements, the root is not a rank of the
    /// group, the counts do not fit the buffer, the ranks do not agree, a peer is lost or the deadline passes.
    pub fn run<B: Buffer + ?Sized>(self, buffer: &mut B) -> Result<Range<usize>, Error>
    where
        V: InPlace<B::Element>,
    {
        let Self { group, ref verb, site } = self;
        let verb = verb.arguments();
        let elements = buffer.elements_mut()?;
        let mut planned = group.plan_call(&verb, elements.len(), site)?;
        let Places { count, input, result, access, start, .. } = planned.places.clone();
        let Some(start) = start else {
            let mut memory = verb.fill(&planned.places, elements)?;
            group.run(&mut planned.call, &mut memory)?;
            group.keep_plan(planned);
            let result = &memory[result];
            elements[..result.len()].copy_from_slice(result);
            return Ok(0..result.len());
        };
        let memory = &mut elements[start..start + count];
        verb.prepare(&mut memory[input]);
        match access {
            MemoryAccess::Sent => {
                let sent = bytemuck::cast_slice::<B::Element, u8>(memory);
                group.run_on_bytes(&mut planned.call, sent.into())?;
            }
            _ => group.run(&mut planned.call, memory)?,
        }
        group.keep_plan(planned);
        Ok(start + result.start..start + result.end)
    }

    /// Runs the collective on `input`, and returns this rank's result. The vector is empty if this rank gets no result.
    ///
    /// # Errors
    ///
    /// The same errors as [`run`](Self::run).
    pub fn run_from<I: Input + ?Sized>(self, input: &I) -> Result<Vec<I::Element>, Error>
    where
        V: OutOfPlace<I::Element>,
    {
        let Self { group, ref verb, site } = self;
        let verb = verb.arguments();
        let input = used_input(&verb, group, input)?;
        let mut planned = group.plan_call(&verb, input.len(), site)?;
        if let MemoryAccess::Written = planned.places.access {
            let mut memory = verb.fill(&planned.places, input)?;
            group.run(&mut planned.call, &mut memory)?;
            let result = planned.places.result.clone();
            group.keep_plan(planned);
            return Ok(keep_range(memory, result));
        }
        let mut output = zeroed(planned.places.result.len())?;
        run_without_copy(group, &mut planned, input, &mut output)?;
        group.keep_plan(planned);
        Ok(output)
    }

    /// Runs the collective on `input`, and writes this rank's result to `output`, which must have the length of the result. The
    /// output is ignored if this rank gets no result.
    ///
    /// # Errors
    ///
    /// The same errors as [`run`](Self::run), and [`Error::InvalidCounts`] if the output has another length.
    pub fn run_into<I, B>(self, input: &I, output: &mut B) -> Result<(), Error>
    where
        I: Input + ?Sized,
        B: Buffer<Element = I::Element> + ?Sized,
        V: OutOfPlace<I::Element>,
    {
        let Self { group, ref verb, site } = self;
        let verb = verb.arguments();
        let input = used_input(&verb, group, input)?;
        let mut planned = group.plan_call(&verb, input.len(), site)?;
        let places = &planned.places;
        let output: &mut [B::Element] = match places.output_count {
            Some(count) => {
                let elements = output.elements_mut()?;
                if elements.len() != count {
                    return Err(Error::InvalidCounts("the output has another length than the result"));
                }
                elements
            }
            None => &mut [],
        };
        match places.access {
            MemoryAccess::Written if output.len() == places.count && places.result == (0..places.count) => {
                copy_part(group, output, &places.input, input);
                verb.prepare(&mut output[places.input.clone()]);
                group.run(&mut planned.call, output)?;
            }
            MemoryAccess::Written => {
                let mut memory = verb.fill(places, input)?;
                group.run(&mut planned.call, &mut memory)?;
                let result = &memory[planned.places.result.clone()];
                output[..result.len()].copy_from_slice(result);
            }
            _ => run_without_copy(group, &mut planned, input, output)?,
        }
        group.keep_plan(planned);
        Ok(())
    }

    /// Begins the collective in place. The handle returns the buffer, which is a vector or a buffer of [`Group::alloc`].
    ///
    /// # Errors
    ///
    /// The same errors as [`run`](Self::run). The handle returns later failures.
    pub fn start<B: OwnedBuffer>(self, mut buffer: B) -> Result<Handle<B>, Error>
    where
        V: InPlace<B::Element>,
    {
        let Self { group, ref verb, site } = self;
        let verb = verb.arguments();
        let count = buffer.as_ref().len();
        let Plan { call, places, .. } = verb.plan(group, count, site)?;
        if places.start == Some(0) && places.count == count {
            verb.prepare(&mut buffer.as_mut()[places.input]);
            return group.start_in_place(call, buffer);
        }
        let (input, target) = match places.start {
            Some(start) => {
                (start + places.input.start..start + places.input.end, start + places.result.start)
            }
            None => (0..count, 0),
        };
        let memory = verb.fill(&places, &buffer.as_ref()[input])?;
        let (result, ended) = (places.result, group.start_in_place(call, memory)?);
        Ok(ended.and_then(move |memory| {
            buffer.as_mut()[target..target + result.len()].copy_from_slice(&memory[result]);
            Ok(buffer)
        }))
    }

    /// Begins the collective on a copy of `input`. The handle returns this rank's result, which is empty if this rank gets none.
    ///
    /// # Errors
    ///
    /// The same errors as [`run`](Self::run). The handle returns later failures.
    pub fn start_from<I: Input + ?Sized>(self, input: &I) -> Result<Handle<Vec<I::Element>>, Error>
    where
        V: OutOfPlace<I::Element>,
    {
        let Self { group, ref verb, site } = self;
        let verb = verb.arguments();
        let input = used_input(&verb, group, input)?;
        let Plan { call, places, .. } = verb.plan(group, input.len(), site)?;
        let memory = verb.fill(&places, input)?;
        let (result, ended) = (places.result, group.start_in_place(call, memory)?);
        Ok(ended.and_then(move |memory| Ok(keep_range(memory, result))))
    }
}

/// Returns the elements of the input. Returns an empty slice on a rank whose input is ignored.
fn used_input<'a, I: Input + ?Sized>(
    verb: &VerbArguments<'_, I::Element>,
    group: &Group,
    input: &'a I,
) -> Result<&'a [I::Element], Error> {
    if verb.has_input(group) { input.elements() } else { Ok(&[]) }
}

/// Runs a call that does not write to its input.
fn run_without_copy<T: Element>(
    group: &mut Group,
    Plan { call, places, .. }: &mut Plan,
    input: &[T],
    output: &mut [T],
) -> Result<(), Error> {
    let input_bytes = bytemuck::cast_slice::<T, u8>(input);
    if let MemoryAccess::InputThenOutput(own_input, own_output) = &places.access {
        copy_part(group, output, own_output, &input[own_input.clone()]);
        let output_bytes = bytemuck::cast_slice_mut::<T, u8>(output);
        return group.run_on_bytes(call, (input_bytes, output_bytes).into());
    }
    group.run_on_bytes(call, input_bytes.into())?;
    copy_part(group, output, &(0..output.len()), &input[places.result.clone()]);
    Ok(())
}

fn copy_part<T: Element>(group: &Group, output: &mut [T], place: &Range<usize>, part: &[T]) {
    let ranks = if group.host_rounds.is_some() { group.world.as_usize() } else { 1 };
    let bytes_of_all_ranks = size_of_val(output) * ranks;
    let target = bytemuck::cast_slice_mut(&mut output[place.clone()]);
    copy_to_buffer(target, bytemuck::cast_slice(part), bytes_of_all_ranks);
}

/// Keeps only this range of the elements. New memory would cost a page fault for every 4 KiB.
fn keep_range<T>(mut elements: Vec<T>, range: Range<usize>) -> Vec<T> {
    elements.truncate(range.end);
    elements.drain(..range.start);
    elements
}
