//! The calls of `ringtrain.Group` for arrays that need no conversion. A call through Python's functions takes longer than a short
//! collective or message.

use std::sync::Mutex;

use pyo3::intern;
use pyo3::prelude::*;
use ringtrain::verbs::{AllToAll, Broadcast, Gather, ReduceScatter, Scatter};

use crate::arguments::BufferArg;
use crate::calls;
use crate::collectives::Ending;
use crate::elements::{PlainArray, Region, with_type};
use crate::group::PyGroup;
use crate::messages::{send_options, source_and_tag};

/// The base class of `ringtrain.Group`. If the arguments are plain numpy arrays and `out` is passed, a method of this class runs
/// the operation itself. Otherwise it calls the method of the subclass that has the same name with an underscore in front, and
/// that accepts all arguments.
#[pyclass(name = "ArrayGroup", subclass, frozen, module = "ringtrain._core")]
pub(crate) struct PyArrayGroup {
    core: Py<PyGroup>,
    /// The status of the last received message, which is often that of the next message too.
    last_status: Mutex<Option<(StatusValues, Py<PyAny>)>>,
}

/// The source, tag and length of a message.
type StatusValues = (u32, u32, usize);

/// The array that a call reads, and the array for its result. Both have elements of the same type.
struct InputAndOutput<'a, 'py> {
    input: PlainArray<'a, 'py>,
    output: PlainArray<'a, 'py>,
}

impl<'a, 'py> InputAndOutput<'a, 'py> {
    /// Returns the arrays. Returns `None` if the arguments need a conversion or have different types.
    fn of(input: BufferArg<'a, 'py>, output: Option<BufferArg<'a, 'py>>) -> Option<Self> {
        let (input, output) = (PlainArray::of(input)?, PlainArray::writable(output?)?);
        (input.kind == output.kind).then_some(Self { input, output })
    }

    fn have_same_shape(&self) -> bool {
        self.input.shape() == self.output.shape()
    }

    /// Returns the output, and the input if it is another array.
    fn output_and_input(&self) -> (Region, Option<Region>) {
        let is_in_place = self.input.object.is(self.output.object);
        (self.output.region(), (!is_in_place).then(|| self.input.region()))
    }

    fn regions(&self) -> (Option<Region>, Option<Region>) {
        (Some(self.output.region()), Some(self.input.region()))
    }

    /// Returns the output as the result of the call.
    fn into_result(self) -> Bound<'py, PyAny> {
        self.output.object.clone()
    }
}

/// Returns whether an array of the shape `whole` has `n` arrays of the shape `part` as its rows.
fn has_parts_as_rows(whole: &[isize], part: &[isize], n: u32) -> bool {
    whole.split_first().is_some_and(|(&rows, row)| rows == n as isize && row == part)
}

/// Returns whether an array of the shape `whole` has the rows of `n` arrays of the shape `part`.
fn has_rows_of_parts(whole: &[isize], part: &[isize], n: u32) -> bool {
    match (whole, part) {
        ([rows, row @ ..], [own, own_row @ ..]) => *rows == own * n as isize && row == own_row,
        _ => false,
    }
}

impl PyArrayGroup {
    /// Returns the group for a call. A forked process gets an error at once: a thread of its parent may have been in the middle
    /// of initializing an interned string, and the forked process would wait for this thread for ever.
    fn for_call<'py, 'a>(slf: &'a Bound<'py, Self>) -> PyResult<(Python<'py>, &'a PyGroup)> {
        calls::fail_if_forked(slf.py())?;
        Ok((slf.py(), slf.get().core.get()))
    }
}

#[pymethods]
impl PyArrayGroup {
    #[new]
    fn new(core: Py<PyGroup>) -> Self {
        Self { core, last_status: Mutex::new(None) }
    }

    /// Reduces the arrays of all ranks and returns the result on every rank. The bits of the result are the same on all ranks.
    ///
    /// With `compression`, float32 elements are compressed between hosts. `compression` is a name, such as "bf16", "int8" or
    /// "topk:0.01", or a `Compressor`.
    #[pyo3(signature = (x, op = "sum", *, out = None, compression = None))]
    fn all_reduce<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        compression: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        if let Some(arrays) = InputAndOutput::of(x, out)
            && arrays.have_same_shape()
        {
            if compression.is_some() {
                group.all_reduce_regions(py, arrays.output_and_input(), op, compression, Ending::Wait)?;
                return Ok(arrays.into_result());
            }
            let (dtype, op) = arrays.input.kind.reduction(py, op)?;
            let (mut output, input) = arrays.output_and_input();
            with_type!(dtype, T => group.lock.with_group(py, |group| {
                output.copy_from(input.as_ref());
                group.all_reduce(output.elements_mut::<T>(), op)
            }))?;
            return Ok(arrays.into_result());
        }
        slf.call_method1(intern!(py, "_all_reduce"), (false, x, op, out, compression))
    }

    /// Reduces the arrays of all ranks and returns this rank's rows of the result. With n ranks, rank r gets the r-th of n
    /// equal parts of the rows. With `counts`, rank r gets `counts[r]` rows.
    #[pyo3(signature = (x, op = "sum", *, out = None, counts = None))]
    fn reduce_scatter<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        op: &str,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        if let (Some(arrays), None) = (InputAndOutput::of(x, out), counts)
            && has_rows_of_parts(arrays.input.shape(), arrays.output.shape(), group.size)
        {
            let (dtype, op) = arrays.input.kind.reduction(py, op)?;
            with_type!(dtype, T => {
                group.out_of_place::<T, _>(py, ReduceScatter::new(op), arrays.regions(), Ending::Wait)
            })?;
            return Ok(arrays.into_result());
        }
        slf.call_method1(intern!(py, "_reduce_scatter"), (false, x, op, out, counts))
    }

    /// Returns the root's array on every rank. The other ranks pass an array of the same shape and type.
    #[pyo3(signature = (x, root = 0, *, out = None))]
    fn broadcast<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        root: i64,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        let rank = PyGroup::parse_rank(py, root)?;
        if let Some(arrays) = InputAndOutput::of(x, out)
            && arrays.have_same_shape()
        {
            let (output, input) = arrays.output_and_input();
            let input = input.filter(|_| group.rank == rank);
            with_type!(output.kind.wire_type().0, T => {
                group.in_place::<T, _>(py, Broadcast::from(rank), (output, input), Ending::Wait)
            })?;
            return Ok(arrays.into_result());
        }
        slf.call_method1(intern!(py, "_broadcast"), (false, x, root, out))
    }

    /// Returns the arrays of all n ranks, stacked in rank order to an array of shape (n, *shape). With `counts`, the array of
    /// rank r has `counts[r]` rows, and the arrays are concatenated along their first dimension.
    #[pyo3(signature = (x, *, out = None, counts = None))]
    fn all_gather<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        if let (Some(arrays), None) = (InputAndOutput::of(x, out), counts)
            && has_parts_as_rows(arrays.output.shape(), arrays.input.shape(), group.size)
        {
            let (output, input) = (arrays.output.region(), arrays.input.region());
            group.all_gather_regions(py, output, Some(input), None, Ending::Wait)?;
            return Ok(arrays.into_result());
        }
        slf.call_method1(intern!(py, "_all_gather"), (false, x, out, counts))
    }

    /// Gathers the arrays of all ranks on the root. The root gets what `all_gather` would return, and the other ranks get `None`.
    #[pyo3(signature = (x, root = 0, *, out = None, counts = None))]
    fn gather<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        root: i64,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        let rank = PyGroup::parse_rank(py, root)?;
        let (arrays, input) = (InputAndOutput::of(x, out), PlainArray::of(x));
        let arrays = arrays
            .filter(|arrays| has_parts_as_rows(arrays.output.shape(), arrays.input.shape(), group.size));
        let is_root = group.rank == rank;
        if let (Some(input), None) = (input, counts)
            && (arrays.is_some() || !is_root)
        {
            let output = arrays.filter(|_| is_root).map(|arrays| arrays.output.region());
            with_type!(input.kind.wire_type().0, T => {
                group.out_of_place::<T, _>(py, Gather::to(rank), (output, Some(input.region())), Ending::Wait)
            })?;
            let result = out.filter(|_| is_root).cloned();
            return Ok(result.unwrap_or_else(|| py.None().into_bound(py)));
        }
        slf.call_method1(intern!(py, "_gather"), (false, x, root, out, counts))
    }

    /// Divides the root's array among the n ranks: rank r gets the r-th of n equal parts of its rows, or `counts[r]` rows. The
    /// other ranks pass `None` for `x`.
    ///
    /// Either all ranks pass `out` or none does. Without `out`, the root first sends the shape and type of its array to the
    /// other ranks. If the root cannot send its array, it sends the reason instead, and the other ranks raise an `Error` with
    /// this reason. With `out`, the other ranks wait until their deadline if the root cannot send its array.
    #[pyo3(signature = (x, root = 0, *, out = None, counts = None))]
    fn scatter<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        root: i64,
        out: Option<&Bound<'py, PyAny>>,
        counts: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        let rank = PyGroup::parse_rank(py, root)?;
        let arrays = InputAndOutput::of(x, out)
            .filter(|arrays| has_rows_of_parts(arrays.input.shape(), arrays.output.shape(), group.size));
        let is_root = group.rank == rank;
        if let (Some(out), None) = (out, counts)
            && let Some(output) = PlainArray::writable(out)
            && (arrays.is_some() || !is_root)
        {
            let output = output.region();
            let verb = Scatter::from(rank).count(output.count * group.size as usize);
            let input = arrays.filter(|_| is_root).map(|arrays| arrays.input.region());
            with_type!(output.kind.wire_type().0, T => {
                group.out_of_place::<T, _>(py, verb, (Some(output), input), Ending::Wait)
            })?;
            return Ok(out.clone());
        }
        slf.call_method1(intern!(py, "_scatter"), (false, x, root, out, counts))
    }

    /// Sends the r-th of n equal parts of the rows of `x` to rank r. Returns the parts that this rank received, concatenated in
    /// rank order. With `send_counts` and `receive_counts`, this rank sends `send_counts[r]` rows to rank r and receives
    /// `receive_counts[r]` rows from rank r.
    #[pyo3(signature = (x, *, out = None, send_counts = None, receive_counts = None))]
    fn all_to_all<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        send_counts: Option<&Bound<'py, PyAny>>,
        receive_counts: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        if let (Some(arrays), None, None) = (InputAndOutput::of(x, out), send_counts, receive_counts)
            && arrays.have_same_shape()
            && arrays.input.shape().first().is_some_and(|rows| rows % group.size as isize == 0)
        {
            with_type!(arrays.input.kind.wire_type().0, T => {
                group.out_of_place::<T, _>(py, AllToAll::new(), arrays.regions(), Ending::Wait)
            })?;
            return Ok(arrays.into_result());
        }
        slf.call_method1(intern!(py, "_all_to_all"), (false, x, out, send_counts, receive_counts))
    }

    /// Waits until every rank has called `barrier`.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.core.get().lock.with_group(py, ringtrain::Group::barrier)
    }

    /// Sends an array to rank `to`. After `send` has returned, you may change the array. With `synchronous`, the call returns
    /// only after a receive has matched the message. The receiver must pass an `out` of the type of `x`, with at least as many
    /// elements as `x`.
    #[pyo3(signature = (x, to, tag = 0, *, synchronous = false))]
    fn send(
        slf: &Bound<'_, Self>,
        x: &Bound<'_, PyAny>,
        to: i64,
        tag: i64,
        synchronous: bool,
    ) -> PyResult<()> {
        let (py, group) = Self::for_call(slf)?;
        let Some(array) = PlainArray::of(x) else {
            return slf.call_method1(intern!(py, "_send"), (false, x, to, tag, synchronous)).map(drop);
        };
        let (rank, options) = (PyGroup::parse_rank(py, to)?, send_options(py, tag, synchronous)?);
        with_type!(array.kind.wire_type().0, T => {
            group.send_region::<T>(py, array.region(), rank, options, Ending::Wait)
        })
        .map(drop)
    }

    /// Receives an array into the beginning of `out`, and returns its `Status`. If `source` is `None`, the message may come from
    /// any rank. If `tag` is `None`, the message may have any tag. The message must have the type of `out` and at most as many
    /// elements as `out`; otherwise the job fails with a `Mismatch`.
    #[pyo3(signature = (out, source = None, tag = None))]
    fn receive<'py>(
        slf: &Bound<'py, Self>,
        out: &Bound<'py, PyAny>,
        source: Option<i64>,
        tag: Option<i64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, group) = Self::for_call(slf)?;
        let Some(array) = PlainArray::writable(out) else {
            return slf.call_method1(intern!(py, "_receive"), (false, out, source, tag));
        };
        let (source, tag) = source_and_tag(py, source, tag)?;
        let status = group.receive_region(py, &mut array.region(), source, tag)?;
        let values = (status.source.get(), status.tag, status.count);
        if let Ok(last) = slf.get().last_status.try_lock()
            && let Some((last_values, last_status)) = &*last
            && *last_values == values
        {
            return Ok(last_status.bind(py).clone());
        }
        let status = slf.getattr(intern!(py, "_Status"))?.call1(values)?;
        if let Ok(mut last) = slf.get().last_status.try_lock() {
            *last = Some((values, status.clone().unbind()));
        }
        Ok(status)
    }
}
