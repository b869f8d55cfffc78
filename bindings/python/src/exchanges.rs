//! Collectives that send elements without reducing them.

use std::borrow::Cow;

use pyo3::prelude::*;
use ringtrain::verbs::{AllGather, AllToAll, Broadcast, Gather, Scatter};

use crate::collectives::{BufferArg, check_same_kind, copy_result_to, discard_result, scale_counts};
use crate::dtype::with_type;
use crate::errors;
use crate::group::PyGroup;
use crate::handle::PyHandle;
use crate::region::Region;

#[pymethods]
impl PyGroup {
    #[pyo3(signature = (output, input, counts = None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: Option<BufferArg<'_, '_>>,
        counts: Option<Vec<i64>>,
    ) -> PyResult<()> {
        let mut output = Region::writable(output)?;
        let (dtype, scale) = output.kind.wire_type();
        let counts = scale_counts(py, counts, scale)?;
        let input = input.map(Region::readable).transpose()?;
        if let Some(input) = &input {
            check_same_kind(py, &output, input)?;
        }
        let own = self.own_part_and_offset(py, &output, input.as_ref(), counts.as_deref())?;
        let (output, input) = (&mut output, input.as_ref());
        with_type!(dtype, T => {
            let Some(counts) = counts else {
                return self.collective(py, move |group| {
                    if let Some((at, input)) = own {
                        output.copy_part(at, input);
                    }
                    group.all_gather(output.elements_mut::<T>())
                });
            };
            let input = input.map(|input| input.elements_without_overlap::<T>(output));
            let output = output.elements_mut::<T>();
            self.collective(py, move |group| {
                let all_gather = group.call(AllGather::new().counts(&counts));
                match input {
                    Some(input) => all_gather.run_into(&*input, output),
                    None => all_gather.run(output).map(drop),
                }
            })
        })
    }

    #[pyo3(signature = (output, input, counts = None))]
    fn all_gather_async(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: Option<BufferArg<'_, '_>>,
        counts: Option<Vec<i64>>,
    ) -> PyResult<PyHandle> {
        let mut output = Region::writable(output)?;
        let (dtype, scale) = output.kind.wire_type();
        let counts = scale_counts(py, counts, scale)?;
        let input = input.map(Region::readable).transpose()?;
        if let Some(input) = &input {
            check_same_kind(py, &output, input)?;
        }
        if let Some((at, input)) = self.own_part_and_offset(py, &output, input.as_ref(), counts.as_deref())? {
            output.copy_part(at, input);
        }
        with_type!(dtype, T => {
            let own = input.as_ref().map(Region::elements::<T>);
            let output = output.into_foreign::<T>(py)?;
            self.begin_collective(py, move |group| match (counts, own) {
                (None, _) => Ok(group.call(AllGather::new()).start(output)?.and_then(discard_result)),
                (Some(counts), None) => {
                    Ok(group.call(AllGather::new().counts(&counts)).start(output)?.and_then(discard_result))
                }
                (Some(counts), Some(own)) => {
                    let begun = group.call(AllGather::new().counts(&counts)).start_from(own)?;
                    Ok(begun.and_then(copy_result_to(output)))
                }
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn gather(
        &self,
        py: Python<'_>,
        output: Option<BufferArg<'_, '_>>,
        input: BufferArg<'_, '_>,
        root: i64,
        counts: Option<Vec<i64>>,
    ) -> PyResult<()> {
        let (root, input) = (Self::parse_rank(py, root)?, Region::readable(input)?);
        let mut output = self.root_buffer(output, root)?.map(Region::writable).transpose()?;
        if let Some(output) = &output {
            check_same_kind(py, output, &input)?;
        }
        let (dtype, scale) = input.kind.wire_type();
        let counts = scale_counts(py, counts, scale)?;
        with_type!(dtype, T => {
            let input = match &output {
                Some(output) => input.elements_without_overlap::<T>(output),
                None => Cow::Borrowed(input.elements::<T>()),
            };
            let output: &mut [T] = match &mut output {
                Some(output) => output.elements_mut::<T>(),
                None => &mut [],
            };
            self.collective(py, move |group| match counts {
                Some(counts) => group.call(Gather::to(root).counts(&counts)).run_into(&*input, output),
                None => group.call(Gather::to(root)).run_into(&*input, output),
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn gather_async(
        &self,
        py: Python<'_>,
        output: Option<BufferArg<'_, '_>>,
        input: BufferArg<'_, '_>,
        root: i64,
        counts: Option<Vec<i64>>,
    ) -> PyResult<PyHandle> {
        let (root, input) = (Self::parse_rank(py, root)?, Region::readable(input)?);
        let output = self.root_buffer(output, root)?.map(Region::writable).transpose()?;
        if let Some(output) = &output {
            check_same_kind(py, output, &input)?;
        }
        let (dtype, scale) = input.kind.wire_type();
        let counts = scale_counts(py, counts, scale)?;
        with_type!(dtype, T => {
            let output = output.map(|output| output.into_foreign::<T>(py)).transpose()?;
            let input = input.elements::<T>();
            self.begin_collective(py, move |group| {
                let begun = match counts {
                    Some(counts) => group.call(Gather::to(root).counts(&counts)).start_from(input)?,
                    None => group.call(Gather::to(root)).start_from(input)?,
                };
                Ok(match output {
                    Some(output) => begun.and_then(copy_result_to(output)),
                    None => begun.and_then(discard_result),
                })
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: Option<BufferArg<'_, '_>>,
        root: i64,
        counts: Option<Vec<i64>>,
    ) -> PyResult<()> {
        let (root, mut output) = (Self::parse_rank(py, root)?, Region::writable(output)?);
        let input = self.root_buffer(input, root)?.map(Region::readable).transpose()?;
        if let Some(input) = &input {
            check_same_kind(py, &output, input)?;
        }
        let (dtype, scale) = output.kind.wire_type();
        let counts = scale_counts(py, counts, scale)?;
        with_type!(dtype, T => {
            let input = input.as_ref().map(|input| input.elements_without_overlap::<T>(&output)).unwrap_or_default();
            let output = output.elements_mut::<T>();
            let count = output.len() * self.size as usize;
            self.collective(py, move |group| match counts {
                Some(counts) => group.call(Scatter::from(root).counts(&counts)).run_into(&*input, output),
                None => group.call(Scatter::from(root).count(count)).run_into(&*input, output),
            })
        })
    }

    #[pyo3(signature = (output, input, root, counts = None))]
    fn scatter_async(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: Option<BufferArg<'_, '_>>,
        root: i64,
        counts: Option<Vec<i64>>,
    ) -> PyResult<PyHandle> {
        let (root, output) = (Self::parse_rank(py, root)?, Region::writable(output)?);
        let input = self.root_buffer(input, root)?.map(Region::readable).transpose()?;
        if let Some(input) = &input {
            check_same_kind(py, &output, input)?;
        }
        let (dtype, scale) = output.kind.wire_type();
        let counts = scale_counts(py, counts, scale)?;
        let count = output.wire_count() * self.size as usize;
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            let input = input.as_ref().map_or(&[][..], Region::elements::<T>);
            self.begin_collective(py, move |group| {
                let begun = match counts {
                    Some(counts) => group.call(Scatter::from(root).counts(&counts)).start_from(input)?,
                    None => group.call(Scatter::from(root).count(count)).start_from(input)?,
                };
                Ok(begun.and_then(copy_result_to(output)))
            })
        })
    }

    fn broadcast(&self, py: Python<'_>, output: BufferArg<'_, '_>, root: i64) -> PyResult<()> {
        let root = Self::parse_rank(py, root)?;
        let mut output = self.broadcast_buffer(output, root)?;
        with_type!(output.kind.wire_type().0, T => {
            let output = output.elements_to_broadcast::<T>();
            self.collective(py, move |group| group.broadcast(output, root))
        })
    }

    fn broadcast_async(&self, py: Python<'_>, output: BufferArg<'_, '_>, root: i64) -> PyResult<PyHandle> {
        let root = Self::parse_rank(py, root)?;
        let output = self.broadcast_buffer(output, root)?;
        with_type!(output.kind.wire_type().0, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begin_collective(py, move |group| {
                Ok(group.call(Broadcast::from(root)).start(output)?.and_then(discard_result))
            })
        })
    }

    #[pyo3(signature = (output, input, send_counts = None, receive_counts = None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: BufferArg<'_, '_>,
        send_counts: Option<Vec<i64>>,
        receive_counts: Option<Vec<i64>>,
    ) -> PyResult<()> {
        let (mut output, input) = (Region::writable(output)?, Region::readable(input)?);
        check_same_kind(py, &output, &input)?;
        let (dtype, scale) = output.kind.wire_type();
        let counts = exchange_counts(py, send_counts, receive_counts, scale)?;
        with_type!(dtype, T => {
            let input = input.elements_without_overlap::<T>(&output);
            let output = output.elements_mut::<T>();
            self.collective(py, move |group| match counts {
                Some((sent, received)) => group.call(AllToAll::new().counts(&sent, &received)).run_into(&*input, output),
                None => group.call(AllToAll::new()).run_into(&*input, output),
            })
        })
    }

    #[pyo3(signature = (output, input, send_counts = None, receive_counts = None))]
    fn all_to_all_async(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: BufferArg<'_, '_>,
        send_counts: Option<Vec<i64>>,
        receive_counts: Option<Vec<i64>>,
    ) -> PyResult<PyHandle> {
        let (output, input) = (Region::writable(output)?, Region::readable(input)?);
        check_same_kind(py, &output, &input)?;
        let (dtype, scale) = output.kind.wire_type();
        let counts = exchange_counts(py, send_counts, receive_counts, scale)?;
        with_type!(dtype, T => {
            let (output, input) = (output.into_foreign::<T>(py)?, input.elements::<T>());
            self.begin_collective(py, move |group| {
                let begun = match counts {
                    Some((sent, received)) => group.call(AllToAll::new().counts(&sent, &received)).start_from(input)?,
                    None => group.call(AllToAll::new()).start_from(input)?,
                };
                Ok(begun.and_then(copy_result_to(output)))
            })
        })
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.collective(py, ringtrain::Group::barrier)
    }

    fn barrier_async(&self, py: Python<'_>) -> PyResult<PyHandle> {
        self.begin_collective(py, |group| Ok(group.barrier_async()?.and_then(discard_result)))
    }
}

impl PyGroup {
    /// On the root, returns `buffer`, or an error if the caller passed no buffer. On the other ranks, returns `None`.
    fn root_buffer<'a, 'py>(
        &self,
        buffer: Option<BufferArg<'a, 'py>>,
        root: ringtrain::Rank,
    ) -> PyResult<Option<BufferArg<'a, 'py>>> {
        match buffer {
            Some(buffer) if self.rank == root => Ok(Some(buffer)),
            None if self.rank == root => {
                Python::attach(|py| Err(errors::invalid(py, "the root must pass both buffers")))
            }
            _ => Ok(None),
        }
    }

    /// Returns `input` and the offset in bytes within `output` to which it must be copied before an all-gather of
    /// equal parts. Returns `None` for unequal parts (`counts`), and if the caller passed no `input`.
    fn own_part_and_offset<'a>(
        &self,
        py: Python<'_>,
        output: &Region,
        input: Option<&'a Region>,
        counts: Option<&[usize]>,
    ) -> PyResult<Option<(usize, &'a Region)>> {
        let (Some(input), None) = (input, counts) else { return Ok(None) };
        let n = self.size as usize;
        if output.count != n * input.count {
            let (output, input) = (output.count, input.count);
            let what = format!(
                "the output has {output} elements, but the {n} ranks' inputs have {input} elements each"
            );
            return Err(errors::invalid(py, what));
        }
        Ok(Some((self.rank.index() * input.bytes(), input)))
    }

    /// Returns the memory of a broadcast's buffer. The root only reads the buffer. The other ranks need a writable
    /// buffer.
    fn broadcast_buffer(&self, output: BufferArg<'_, '_>, root: ringtrain::Rank) -> PyResult<Region> {
        if self.rank == root { Region::readable(output) } else { Region::writable(output) }
    }
}

/// Returns the counts `sent` and `received`, multiplied by `scale`. Returns `None` if both arguments are `None`.
fn exchange_counts(
    py: Python<'_>,
    sent: Option<Vec<i64>>,
    received: Option<Vec<i64>>,
    scale: usize,
) -> PyResult<Option<(Vec<usize>, Vec<usize>)>> {
    match (scale_counts(py, sent, scale)?, scale_counts(py, received, scale)?) {
        (Some(sent), Some(received)) => Ok(Some((sent, received))),
        (None, None) => Ok(None),
        _ => Err(errors::invalid(py, "uneven parts need both send_counts and receive_counts")),
    }
}
