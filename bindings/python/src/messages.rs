//! Messages of elements.

use std::time::Duration;

use pyo3::prelude::*;
use ringtrain::{ReduceOp, SendMode, SendOptions, Source};

use crate::dtype::with_type;
use crate::errors;
use crate::fork;
use crate::group::Group;
use crate::handle::{Handle, OperationResult, duration};
use crate::region::Region;

/// How long a probe waits before it asks whether a signal handler has raised.
const SLICE: Duration = Duration::from_millis(50);

/// The source and the tag of a receive; `None` is any.
pub(crate) fn pattern_of(
    py: Python<'_>,
    source: Option<i64>,
    tag: Option<i64>,
) -> PyResult<(Source, Option<u32>)> {
    let source = source.map_or(Ok(Source::Any), |rank| Group::rank(py, rank).map(Source::Rank))?;
    Ok((source, tag.map(|tag| Group::tag(py, tag)).transpose()?))
}

/// The tag of a message, and whether the send is complete only when a receive has matched it.
pub(crate) fn send_options(py: Python<'_>, tag: i64, synchronous: bool) -> PyResult<SendOptions> {
    let mode = if synchronous { SendMode::Synchronous } else { SendMode::Standard };
    Ok(SendOptions { tag: Group::tag(py, tag)?, mode })
}

pub(crate) fn reduction(py: Python<'_>, name: &str) -> PyResult<ReduceOp> {
    name.parse().map_err(|error: String| errors::invalid(py, error))
}

#[pymethods]
impl Group {
    #[pyo3(signature = (buffer, to, tag = 0, synchronous = false))]
    fn send(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        to: i64,
        tag: i64,
        synchronous: bool,
    ) -> PyResult<()> {
        let (region, to) = (Region::of(buffer)?, Self::rank(py, to)?);
        let options = send_options(py, tag, synchronous)?;
        with_type!(region.kind.moved().0, T => {
            let elements = region.elements::<T>();
            self.with_messenger(py, |messenger| messenger.send(elements, to, options))
        })
    }

    #[pyo3(signature = (buffer, source = None, tag = None))]
    fn receive(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<i64>,
        tag: Option<i64>,
    ) -> PyResult<Py<PyAny>> {
        let (mut region, (source, tag)) = (Region::writable(buffer)?, pattern_of(py, source, tag)?);
        let scale = region.kind.moved().1;
        let status = with_type!(region.kind.moved().0, T => {
            let elements = region.elements_mut::<T>();
            self.with_messenger(py, |messenger| messenger.receive(elements, source, tag))?
        });
        OperationResult::message(status, scale).into_python(py)
    }

    #[pyo3(signature = (buffer, to, send_tag, output, source, receive_tag))]
    #[expect(clippy::too_many_arguments, reason = "two messages")]
    fn send_receive(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        to: i64,
        send_tag: i64,
        output: &Bound<'_, PyAny>,
        source: Option<i64>,
        receive_tag: Option<i64>,
    ) -> PyResult<Py<PyAny>> {
        let (input, mut output) = (Region::of(buffer)?, Region::writable(output)?);
        let (to, send_tag) = (Self::rank(py, to)?, Self::tag(py, send_tag)?);
        let (source, receive_tag) = pattern_of(py, source, receive_tag)?;
        if input.kind.moved().0 != output.kind.moved().0 {
            return Err(errors::invalid(
                py,
                "the elements to send and the elements to receive are of different types",
            ));
        }
        let scale = output.kind.moved().1;
        let status = with_type!(input.kind.moved().0, T => {
            let sent = input.elements_beside::<T>(&output);
            let received = output.elements_mut::<T>();
            self.with_messenger(py, |messenger| {
                messenger.send_receive((&*sent, to, send_tag), (received, source, receive_tag))
            })?
        });
        OperationResult::message(status, scale).into_python(py)
    }

    #[pyo3(signature = (buffer, to, tag = 0, synchronous = false))]
    fn send_async(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        to: i64,
        tag: i64,
        synchronous: bool,
    ) -> PyResult<Handle> {
        let (region, to) = (Region::of(buffer)?, Self::rank(py, to)?);
        let options = send_options(py, tag, synchronous)?;
        with_type!(region.kind.moved().0, T => {
            let elements = region.into_foreign::<T>(py)?;
            self.with_messenger(py, |messenger| {
                messenger.send_async(elements, to, options).map(|sent| sent.and_then(|_| Ok(OperationResult::Nothing)))
            })
        })
        .map(Handle::new)
    }

    #[pyo3(signature = (buffer, source = None, tag = None))]
    fn receive_async(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<i64>,
        tag: Option<i64>,
    ) -> PyResult<Handle> {
        let (region, (source, tag)) = (Region::writable(buffer)?, pattern_of(py, source, tag)?);
        let (dtype, scale) = region.kind.moved();
        with_type!(dtype, T => {
            let elements = region.into_foreign::<T>(py)?;
            self.with_messenger(py, |messenger| {
                let received = messenger.receive_into_async(elements, source, tag)?;
                Ok(received.and_then(move |(_, status)| Ok(OperationResult::message(status, scale))))
            })
        })
        .map(Handle::new)
    }

    #[pyo3(signature = (source = None, tag = None, timeout = 0.0))]
    fn probe(
        &self,
        py: Python<'_>,
        source: Option<i64>,
        tag: Option<i64>,
        timeout: f64,
    ) -> PyResult<Option<(u32, u32, usize, String)>> {
        let ((source, tag), mut left) = (pattern_of(py, source, tag)?, duration(py, timeout)?);
        loop {
            let patience = left.min(SLICE);
            let found = self.with_messenger(py, |messenger| messenger.probe_for(source, tag, patience))?;
            left -= patience;
            if found.is_some() || left.is_zero() {
                return Ok(found.map(|status| {
                    (status.source.get(), status.tag, status.count, status.dtype.to_string())
                }));
            }
            fork::check(py)?;
            py.check_signals()?;
        }
    }
}
