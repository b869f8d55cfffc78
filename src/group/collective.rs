//! The collective that a caller has described with a verb, and the methods that run it.

use std::ops::Range;

use super::plan::{InPlace, OutOfPlace};
use super::{Buffer, Error, Group, Handle, Input, OwnedBuffer};
use crate::types::Site;

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
    /// Runs the collective in place. Returns the range of the buffer that holds this rank's result. The range is empty if this
    /// rank gets no result.
    ///
    /// # Errors
    ///
    /// [`Error`] if the array is not contiguous, the reduction is not defined on its elements, the root is not a rank of the
    /// group, the counts do not fit the buffer, the ranks do not agree, a peer is lost or the deadline passes.
    pub fn run<B: Buffer + ?Sized>(self, buffer: &mut B) -> Result<Range<usize>, Error>
    where
        V: InPlace<B::Element>,
    {
        self.group.run_verb_in_place(&self.verb, buffer.elements_mut()?, self.site)
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
        let input = used_input(&self.verb, self.group, input)?;
        self.group.run_verb_from(&self.verb, input, self.site)
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
        let input = used_input(&self.verb, self.group, input)?;
        self.group.run_verb_into(&self.verb, input, output, self.site)
    }

    /// Begins the collective in place. The handle returns the buffer, which is a vector or a buffer of [`Group::alloc`].
    ///
    /// # Errors
    ///
    /// The same errors as [`run`](Self::run). The handle returns later failures.
    pub fn start<B: OwnedBuffer>(self, buffer: B) -> Result<Handle<B>, Error>
    where
        V: InPlace<B::Element>,
    {
        self.group.start_verb_in_place(&self.verb, buffer, self.site)
    }

    /// Begins the collective on a copy of `input`. The handle returns this rank's result. The vector is empty if this rank
    /// gets no result.
    ///
    /// # Errors
    ///
    /// The same errors as [`run`](Self::run). The handle returns later failures.
    pub fn start_from<I: Input + ?Sized>(self, input: &I) -> Result<Handle<Vec<I::Element>>, Error>
    where
        V: OutOfPlace<I::Element>,
    {
        let input = used_input(&self.verb, self.group, input)?;
        self.group.start_verb_from(&self.verb, input, self.site)
    }
}

/// Returns the elements of the input. Returns an empty slice on a rank whose input is ignored.
fn used_input<'a, V, I>(verb: &V, group: &Group, input: &'a I) -> Result<&'a [I::Element], Error>
where
    V: OutOfPlace<I::Element>,
    I: Input + ?Sized,
{
    if verb.uses_input(group) { input.elements() } else { Ok(&[]) }
}
