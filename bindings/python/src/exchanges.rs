//! Collectives that send elements without reducing them.

use pyo3::prelude::*;
use ringtrain::verbs::{AllGather, AllToAll, Broadcast, Gather, Scatter};

use crate::arguments::{BufferArg, check_same_kind, scale_counts};
use crate::collectives::{Ended, Ending, discard_result};
use crate::elements::{Region, with_type};
use crate::errors;
use crate::group::PyGroup;
use crate::handle::PyHandle;

#[pymethods]
impl PyGroup {
    #[pyo3(signature = (output, input, counts = None, *, async_op = false))]
    fn all_gather(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: Option<BufferArg<'_, '_>>,
        counts: Option<Vec<i64>>,
        async_op: bool,
    ) -> Ended {
        let (output, input) = (Region::writable(output)?, input.map(Region::readable).transpose()?);
        let scale = output.kind.wire_type().1;
        let counts = scale_counts(py, counts, scale)?;
        if let Some(input) = &input {
            check_same_kind(py, &output, input)?;
        }
        self.all_gather_regions(py, output, input, counts, async_op.into())
    }

    #[pyo3(signature = (output, input, root, counts = None, *, async_op = false))]
    fn gather(
        &self,
        py: Python<'_>,
        output: Option<BufferArg<'_, '_>>,
        input: BufferArg<'_, '_>,
        root: i64,
        counts: Option<Vec<i64>>,
        async_op: bool,
    ) -> Ended {
        let (root, input) = (Self::parse_rank(py, root)?, Region::readable(input)?);
        let output = self.root_buffer(output, root)?.map(Region::writable).transpose()?;
        if let Some(output) = &output {
            check_same_kind(py, output, &input)?;
        }
        let (dtype, scale) = input.kind.wire_type();
        let counts = scale_counts(py, counts, scale)?;
        let verb = Gather::to(root);
        let verb = if let Some(counts) = counts { verb.counts(&counts) } else { verb };
        with_type!(dtype, T => self.out_of_place::<T, _>(py, verb, (output, Some(input)), async_op.into()))
    }

    #[pyo3(signature = (output, input, root, counts = None, *, async_op = false))]
    fn scatter(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: Option<BufferArg<'_, '_>>,
        root: i64,
        counts: Option<Vec<i64>>,
        async_op: bool,
    ) -> Ended {
        let (root, output) = (Self::parse_rank(py, root)?, Region::writable(output)?);
        let input = self.root_buffer(input, root)?.map(Region::readable).transpose()?;
        if let Some(input) = &input {
            check_same_kind(py, &output, input)?;
        }
        let (dtype, scale) = output.kind.wire_type();
        let (counts, total) = (scale_counts(py, counts, scale)?, output.wire_count() * self.size as usize);
        let (verb, regions, ending) = (Scatter::from(root), (Some(output), input), async_op.into());
        with_type!(dtype, T => match counts {
            Some(counts) => self.out_of_place::<T, _>(py, verb.counts(&counts), regions, ending),
            None => self.out_of_place::<T, _>(py, verb.count(total), regions, ending),
        })
    }

    #[pyo3(signature = (output, root, *, async_op = false))]
    fn broadcast(&self, py: Python<'_>, output: BufferArg<'_, '_>, root: i64, async_op: bool) -> Ended {
        let root = Self::parse_rank(py, root)?;
        let output = Region::to_broadcast(output, self.rank == root)?;
        with_type!(output.kind.wire_type().0, T => {
            self.in_place::<T, _>(py, Broadcast::from(root), (output, None), async_op.into())
        })
    }

    #[pyo3(signature = (output, input, send_counts = None, receive_counts = None, *, async_op = false))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: BufferArg<'_, '_>,
        send_counts: Option<Vec<i64>>,
        receive_counts: Option<Vec<i64>>,
        async_op: bool,
    ) -> Ended {
        let (output, input) = (Region::writable(output)?, Region::readable(input)?);
        check_same_kind(py, &output, &input)?;
        let (dtype, scale) = output.kind.wire_type();
        let counts = exchange_counts(py, send_counts, receive_counts, scale)?;
        let (verb, regions, ending) = (AllToAll::new(), (Some(output), Some(input)), async_op.into());
        with_type!(dtype, T => match counts {
            Some((sent, received)) => {
                self.out_of_place::<T, _>(py, verb.counts(&sent, &received), regions, ending)
            }
            None => self.out_of_place::<T, _>(py, verb, regions, ending),
        })
    }

    #[pyo3(signature = (*, async_op = false))]
    fn barrier(&self, py: Python<'_>, async_op: bool) -> Ended {
        if !async_op {
            return self.lock.with_group(py, ringtrain::Group::barrier).map(|()| None);
        }
        let handle = self.lock.with_group(py, |group| Ok(group.barrier_async()?.and_then(discard_result)))?;
        Ok(Some(PyHandle::new(handle)))
    }
}

impl PyGroup {
    /// Gathers parts of one type. `counts` has the number of values of each rank, as the library sends them.
    pub(crate) fn all_gather_regions(
        &self,
        py: Python<'_>,
        mut output: Region,
        input: Option<Region>,
        counts: Option<Vec<usize>>,
        ending: Ending,
    ) -> Ended {
        let dtype = output.kind.wire_type().0;
        let verb = AllGather::new();
        let Some(counts) = counts else {
            if let Some(own_part) = input {
                let offset_bytes = self.own_offset(py, &output, &own_part)?;
                // The library copies a long part past the caches.
                if ending == Ending::Wait && !own_part.overlaps(&output) {
                    let regions = (Some(output), Some(own_part));
                    return with_type!(dtype, T => self.out_of_place::<T, _>(py, verb, regions, ending));
                }
                output.copy_part(offset_bytes, &own_part);
            }
            return with_type!(dtype, T => self.in_place::<T, _>(py, verb, (output, None), ending));
        };
        let verb = verb.counts(&counts);
        with_type!(dtype, T => match input {
            Some(input) => self.out_of_place::<T, _>(py, verb, (Some(output), Some(input)), ending),
            None => self.in_place::<T, _>(py, verb, (output, None), ending),
        })
    }

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

    /// Returns the offset in bytes within `output` to which `input` must be copied before an all-gather of equal parts.
    fn own_offset(&self, py: Python<'_>, output: &Region, input: &Region) -> PyResult<usize> {
        let n = self.size as usize;
        if output.count != n * input.count {
            let (output, input) = (output.count, input.count);
            let what = format!(
                "the output has {output} elements, but the {n} ranks' inputs have {input} elements each"
            );
            return Err(errors::invalid(py, what));
        }
        Ok(self.rank.index() * input.bytes())
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
