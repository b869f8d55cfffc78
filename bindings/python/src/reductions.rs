//! Collectives that reduce elements.

use pyo3::prelude::*;
use ringtrain::Rank;
use ringtrain::verbs::{AllReduce, Exscan, Reduce, ReduceScatter, Scan};

use crate::arguments::{BufferArg, check_same_kind, output_and_input, scale_counts};
use crate::collectives::{Ended, Ending};
use crate::compressor::compressor_for;
use crate::elements::{Region, with_type};
use crate::errors;
use crate::group::PyGroup;

#[pymethods]
impl PyGroup {
    #[pyo3(signature = (output, op = "sum", input = None, compression = None, *, async_op = false))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
        compression: Option<BufferArg<'_, '_>>,
        async_op: bool,
    ) -> Ended {
        self.all_reduce_regions(py, output_and_input(output, input)?, op, compression, async_op.into())
    }

    #[pyo3(signature = (output, op, root, input = None, *, async_op = false))]
    fn reduce(
        &self,
        py: Python<'_>,
        output: Option<BufferArg<'_, '_>>,
        op: &str,
        root: i64,
        input: Option<BufferArg<'_, '_>>,
        async_op: bool,
    ) -> Ended {
        let root = Self::parse_rank(py, root)?;
        if let Some(input) = input.filter(|_| self.rank != root) {
            let input = Region::readable(input)?;
            let (dtype, op) = input.kind.reduction(py, op)?;
            let verb = Reduce::to(root, op);
            return with_type!(dtype, T => {
                self.out_of_place::<T, _>(py, verb, (None, Some(input)), async_op.into())
            });
        }
        let output = output.ok_or_else(|| errors::invalid(py, "an output for the result is needed"))?;
        let regions = output_and_input(output, input)?;
        let (dtype, op) = regions.0.kind.reduction(py, op)?;
        with_type!(dtype, T => self.in_place::<T, _>(py, Reduce::to(root, op), regions, async_op.into()))
    }

    #[pyo3(signature = (output, input, op = "sum", counts = None, *, async_op = false))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: BufferArg<'_, '_>,
        op: &str,
        counts: Option<Vec<i64>>,
        async_op: bool,
    ) -> Ended {
        let (output, input) = (Region::writable(output)?, Region::readable(input)?);
        check_same_kind(py, &output, &input)?;
        let (dtype, op) = output.kind.reduction(py, op)?;
        let verb = ReduceScatter::new(op);
        let verb = if let Some(counts) = scale_counts(py, counts, 1)? { verb.counts(&counts) } else { verb };
        let regions = (Some(output), Some(input));
        with_type!(dtype, T => self.out_of_place::<T, _>(py, verb, regions, async_op.into()))
    }

    #[pyo3(signature = (output, op = "sum", input = None, *, async_op = false))]
    fn scan(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
        async_op: bool,
    ) -> Ended {
        let regions = output_and_input(output, input)?;
        let (dtype, op) = regions.0.kind.reduction(py, op)?;
        with_type!(dtype, T => self.in_place::<T, _>(py, Scan::new(op), regions, async_op.into()))
    }

    #[pyo3(signature = (output, op = "sum", input = None, *, async_op = false))]
    fn exscan(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
        async_op: bool,
    ) -> Ended {
        let (output, input) = output_and_input(output, input)?;
        let (dtype, op) = output.kind.reduction(py, op)?;
        let (verb, ending) = (Exscan::new(op), async_op.into());
        if self.rank == Rank::ZERO {
            // Rank 0 has no result, so its output does not change.
            let input = input.unwrap_or(output);
            return with_type!(dtype, T => match ending {
                Ending::Handle => self.out_of_place::<T, _>(py, verb, (None, Some(input)), ending),
                Ending::Wait => {
                    let input = input.elements::<T>();
                    self.lock.with_group(py, |group| group.call(verb).run_from(input).map(|_| None))
                }
            });
        }
        with_type!(dtype, T => self.in_place::<T, _>(py, verb, (output, input), ending))
    }
}

impl PyGroup {
    /// Runs or begins an all-reduce of an output and an input as [`output_and_input`] returns them.
    pub(crate) fn all_reduce_regions(
        &self,
        py: Python<'_>,
        regions: (Region, Option<Region>),
        op: &str,
        compression: Option<BufferArg<'_, '_>>,
        ending: Ending,
    ) -> Ended {
        let compressor = compressor_for(compression, regions.0.kind)?;
        let (dtype, op) = regions.0.kind.reduction(py, op)?;
        let verb = AllReduce::new(op);
        if let Some(compressor) = compressor {
            return self.in_place::<f32, _>(py, verb.compressed(compressor), regions, ending);
        }
        with_type!(dtype, T => self.in_place::<T, _>(py, verb, regions, ending))
    }
}
