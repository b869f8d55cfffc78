//! Collectives that reduce elements.

use pyo3::prelude::*;
use ringtrain::verbs::{AllReduce, Exscan, Reduce, ReduceScatter, Scan};
use ringtrain::{Compression, DType};

use crate::collectives::{
    BufferArg, check_same_kind, copy_result_to, discard_result, output_and_input, reduction_for, scale_counts,
};
use crate::dtype::{ElementKind, with_type};
use crate::errors;
use crate::group::PyGroup;
use crate::handle::PyHandle;
use crate::region::Region;

/// Parses the name of a compression. Returns an error if the compression does not support elements of `kind`.
fn parse_compression(py: Python<'_>, name: Option<&str>, kind: ElementKind) -> PyResult<Compression> {
    let Some(name) = name else { return Ok(Compression::None) };
    let compression: Compression = name.parse().map_err(|error: String| errors::invalid(py, error))?;
    if compression != Compression::None && kind != ElementKind::Number(DType::F32) {
        return Err(errors::unsupported(py, format!("{name} compresses f32, not {}", kind.name())));
    }
    Ok(compression)
}

#[pymethods]
impl PyGroup {
    #[pyo3(signature = (output, op = "sum", input = None, compression = None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
        compression: Option<&str>,
    ) -> PyResult<()> {
        let (mut output, input) = output_and_input(output, input)?;
        let compression = parse_compression(py, compression, output.kind)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        if compression != Compression::None {
            let (output, input) = (&mut output, input.as_ref());
            return self.collective(py, move |group| {
                output.copy_from(input);
                let verb = AllReduce::new(op).compressed(compression);
                group.call(verb).run(output.elements_mut::<f32>()).map(drop)
            });
        }
        let (output, input) = (&mut output, input.as_ref());
        with_type!(dtype, T => self.collective(py, move |group| {
            output.copy_from(input);
            group.all_reduce(output.elements_mut::<T>(), op)
        }))
    }

    #[pyo3(signature = (output, op = "sum", input = None, compression = None))]
    fn all_reduce_async(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
        compression: Option<&str>,
    ) -> PyResult<PyHandle> {
        let (mut output, input) = output_and_input(output, input)?;
        let compression = parse_compression(py, compression, output.kind)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        output.copy_from(input.as_ref());
        if compression != Compression::None {
            let output = output.into_foreign::<f32>(py)?;
            return self.begin_collective(py, move |group| {
                let verb = AllReduce::new(op).compressed(compression);
                Ok(group.call(verb).start(output)?.and_then(discard_result))
            });
        }
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begin_collective(py, move |group| Ok(group.all_reduce_async(output, op)?.and_then(discard_result)))
        })
    }

    #[pyo3(signature = (output, op, root, input = None))]
    fn reduce(
        &self,
        py: Python<'_>,
        output: Option<BufferArg<'_, '_>>,
        op: &str,
        root: i64,
        input: Option<BufferArg<'_, '_>>,
    ) -> PyResult<()> {
        let root = Self::parse_rank(py, root)?;
        if let Some(input) = input.filter(|_| self.rank != root) {
            let input = Region::readable(input)?;
            let (dtype, op) = reduction_for(py, input.kind, op)?;
            return with_type!(dtype, T => {
                let elements = input.elements::<T>();
                self.collective(py, move |group| group.call(Reduce::to(root, op)).run_from(elements).map(|_| ()))
            });
        }
        let output = output.ok_or_else(|| errors::invalid(py, "an output for the result is needed"))?;
        let (mut output, input) = output_and_input(output, input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        let (output, input) = (&mut output, input.as_ref());
        with_type!(dtype, T => self.collective(py, move |group| {
            output.copy_from(input);
            group.reduce(output.elements_mut::<T>(), op, root)
        }))
    }

    #[pyo3(signature = (output, op, root, input = None))]
    fn reduce_async(
        &self,
        py: Python<'_>,
        output: Option<BufferArg<'_, '_>>,
        op: &str,
        root: i64,
        input: Option<BufferArg<'_, '_>>,
    ) -> PyResult<PyHandle> {
        let root = Self::parse_rank(py, root)?;
        if let Some(input) = input.filter(|_| self.rank != root) {
            let input = Region::readable(input)?;
            let (dtype, op) = reduction_for(py, input.kind, op)?;
            return with_type!(dtype, T => {
                let elements = input.elements::<T>();
                self.begin_collective(py, move |group| {
                    Ok(group.call(Reduce::to(root, op)).start_from(elements)?.and_then(discard_result))
                })
            });
        }
        let output = output.ok_or_else(|| errors::invalid(py, "an output for the result is needed"))?;
        let (mut output, input) = output_and_input(output, input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        output.copy_from(input.as_ref());
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begin_collective(py, move |group| {
                Ok(group.call(Reduce::to(root, op)).start(output)?.and_then(discard_result))
            })
        })
    }

    #[pyo3(signature = (output, input, op = "sum", counts = None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: BufferArg<'_, '_>,
        op: &str,
        counts: Option<Vec<i64>>,
    ) -> PyResult<()> {
        let (mut output, input) = (Region::writable(output)?, Region::readable(input)?);
        check_same_kind(py, &output, &input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        let counts = scale_counts(py, counts, 1)?;
        with_type!(dtype, T => {
            let input = input.elements_without_overlap::<T>(&output);
            let output = output.elements_mut::<T>();
            self.collective(py, move |group| match counts {
                Some(counts) => group.call(ReduceScatter::new(op).counts(&counts)).run_into(&*input, output),
                None => group.call(ReduceScatter::new(op)).run_into(&*input, output),
            })
        })
    }

    #[pyo3(signature = (output, input, op = "sum", counts = None))]
    fn reduce_scatter_async(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        input: BufferArg<'_, '_>,
        op: &str,
        counts: Option<Vec<i64>>,
    ) -> PyResult<PyHandle> {
        let (output, input) = (Region::writable(output)?, Region::readable(input)?);
        check_same_kind(py, &output, &input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        let counts = scale_counts(py, counts, 1)?;
        with_type!(dtype, T => {
            let (output, input) = (output.into_foreign::<T>(py)?, input.elements::<T>());
            self.begin_collective(py, move |group| {
                let begun = match counts {
                    Some(counts) => group.call(ReduceScatter::new(op).counts(&counts)).start_from(input)?,
                    None => group.call(ReduceScatter::new(op)).start_from(input)?,
                };
                Ok(begun.and_then(copy_result_to(output)))
            })
        })
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn scan(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
    ) -> PyResult<()> {
        let (mut output, input) = output_and_input(output, input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        let (output, input) = (&mut output, input.as_ref());
        with_type!(dtype, T => self.collective(py, move |group| {
            output.copy_from(input);
            group.scan(output.elements_mut::<T>(), op)
        }))
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn scan_async(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
    ) -> PyResult<PyHandle> {
        let (mut output, input) = output_and_input(output, input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        output.copy_from(input.as_ref());
        with_type!(dtype, T => {
            let output = output.into_foreign::<T>(py)?;
            self.begin_collective(py, move |group| Ok(group.call(Scan::new(op)).start(output)?.and_then(discard_result)))
        })
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn exscan(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
    ) -> PyResult<()> {
        let (mut output, input) = output_and_input(output, input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        with_type!(dtype, T => {
            let given = input.as_ref().unwrap_or(&output).elements::<T>().to_vec();
            let output = output.elements_mut::<T>();
            self.collective(py, move |group| {
                group.call(Exscan::new(op)).run_into(&given, output)
            })
        })
    }

    #[pyo3(signature = (output, op = "sum", input = None))]
    fn exscan_async(
        &self,
        py: Python<'_>,
        output: BufferArg<'_, '_>,
        op: &str,
        input: Option<BufferArg<'_, '_>>,
    ) -> PyResult<PyHandle> {
        let (output, input) = output_and_input(output, input)?;
        let (dtype, op) = reduction_for(py, output.kind, op)?;
        with_type!(dtype, T => {
            let given = input.as_ref().unwrap_or(&output).elements::<T>().to_vec();
            let output = output.into_foreign::<T>(py)?;
            self.begin_collective(py, move |group| {
                let copy_result_to = copy_result_to(output);
                // Rank 0 has no result.
                let finish = |result: Vec<T>| if result.is_empty() { discard_result(()) } else { copy_result_to(result) };
                Ok(group.call(Exscan::new(op)).start_from(&given)?.and_then(finish))
            })
        })
    }
}
