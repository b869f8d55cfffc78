//! The class `ringtrain.Compressor`, and the argument `compression` of an all-reduce.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};
use ringtrain::{Compression, Compressor, CompressorState, DType};

use crate::arguments::readable_f32;
use crate::elements::{ElementKind, Region};
use crate::errors;

/// A compression, and what a rank could not send in earlier calls. `compression` is a name such as "int8" or "topk:0.01".
/// `seed` is the seed of the random numbers, the same on all ranks.
///
/// Pass a compressor to `Group.all_reduce` for an array that is reduced again and again. Codecs that round a lot keep their
/// errors in the compressor, and add them to the input of the next call (error feedback). The errors need the memory of one
/// float32 for each element. Use a compressor for one array only, and in one call at a time.
///
/// Raises `InvalidArgument` if there is no compression of this name.
#[pyclass(name = "Compressor", frozen, module = "ringtrain._core")]
pub(crate) struct PyCompressor(Compressor);

#[pymethods]
impl PyCompressor {
    #[new]
    #[pyo3(signature = (compression, seed = 0))]
    fn new(py: Python<'_>, compression: &str, seed: u64) -> PyResult<Self> {
        Ok(Self(Compressor::new(parse(py, compression)?).with_seed(seed)))
    }

    #[getter]
    fn compression(&self) -> String {
        self.0.compression().to_string()
    }

    #[getter]
    fn has_memory(&self) -> bool {
        let compression = self.0.compression();
        compression.needs_error_feedback() || compression.is_random()
    }

    /// Returns what a compressor with the compression "auto" has measured and chosen: the name of the codec, whether it is still
    /// trying codecs, the relative error of a result with this codec, and the time in seconds of a call on the slowest rank. The
    /// last two are `None` if they were not measured. Returns `None` for other compressions.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(report) = self.0.report() else { return Ok(None) };
        let dict = PyDict::new(py);
        dict.set_item(intern!(py, "compression"), report.compression.to_string())?;
        dict.set_item(intern!(py, "is_trial"), report.is_trial)?;
        dict.set_item(intern!(py, "relative_error"), report.relative_error)?;
        dict.set_item(intern!(py, "seconds"), report.seconds)?;
        Ok(Some(dict))
    }

    /// Returns a copy of the memory, for a checkpoint: "residual" is an array with what the next call adds to each element, which
    /// is empty before the first call, "result" is the last result of EF21, which is empty without EF21, and "calls" is the number
    /// of calls. Every rank has its own errors, so every rank saves them.
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = self.0.state();
        let array = |elements: &[f32]| {
            let bytes = PyByteArray::new(py, bytemuck::cast_slice(elements));
            py.import("numpy")?.call_method1(intern!(py, "frombuffer"), (bytes, "float32"))
        };
        let dict = PyDict::new(py);
        dict.set_item(intern!(py, "residual"), array(&state.residual)?)?;
        dict.set_item(intern!(py, "result"), array(&state.result)?)?;
        dict.set_item(intern!(py, "calls"), state.calls)?;
        Ok(dict)
    }

    /// Replaces the memory by a result of `state_dict`, which may lack "result". The next array must have as many elements as the
    /// arrays, unless they are empty.
    fn load_state_dict(&self, state: &Bound<'_, PyDict>) -> PyResult<()> {
        let py = state.py();
        let item = |name: &str| {
            state.get_item(name)?.ok_or_else(|| {
                errors::invalid(py, format!("the state of a compressor needs the key \"{name}\""))
            })
        };
        let elements = |array: &Bound<'_, PyAny>| -> PyResult<Vec<f32>> {
            Ok(readable_f32(array, Region::readable(array)?.count)?.elements::<f32>().to_vec())
        };
        let (residual, calls) = (elements(&item("residual")?)?, item("calls")?.extract()?);
        let result = state.get_item("result")?.map_or_else(|| Ok(Vec::new()), |array| elements(&array))?;
        self.0.set_state(CompressorState { residual, result, calls });
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("Compressor(\"{}\")", self.0.compression())
    }
}

fn parse(py: Python<'_>, name: &str) -> PyResult<Compression> {
    name.parse().map_err(|error: String| errors::invalid(py, error))
}

/// Returns the compressor that the argument `compression` stands for: the name of a compression, or a [`PyCompressor`]. Returns
/// `None` if the ranks send unchanged elements. Fails if the compression does not support elements of `kind`.
pub(crate) fn compressor_for(
    argument: Option<&Bound<'_, PyAny>>,
    kind: ElementKind,
) -> PyResult<Option<Compressor>> {
    let Some(argument) = argument else { return Ok(None) };
    let py = argument.py();
    let compressor = if let Ok(compressor) = argument.cast::<PyCompressor>() {
        compressor.get().0.clone()
    } else if let Ok(name) = argument.extract::<&str>() {
        parse(py, name)?.into()
    } else {
        let found = argument.get_type();
        return Err(errors::invalid(
            py,
            format!("compression is the name of a compression or a ringtrain.Compressor, not {found}"),
        ));
    };
    let compression = compressor.compression();
    if compression == Compression::None {
        return Ok(None);
    }
    if kind != ElementKind::Number(DType::F32) {
        return Err(errors::unsupported(py, format!("{compression} compresses f32, not {}", kind.name())));
    }
    Ok(Some(compressor))
}
