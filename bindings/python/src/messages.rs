//! Messages of elements from one rank to another.

use pyo3::prelude::*;
use ringtrain::{Element, Rank, SendMode, SendOptions, Source, Status};

use crate::collectives::{Ended, Ending, discard_result};
use crate::elements::{Region, with_type};
use crate::errors;
use crate::group::PyGroup;
use crate::handle::{OperationResult, PyHandle, duration_from_seconds};
use crate::signals::wait_in_intervals;

/// Converts the source and the tag of a receive from Python integers to the types of the library. A source of `None`
/// matches any rank, and a tag of `None` matches any tag.
pub(crate) fn source_and_tag(
    py: Python<'_>,
    source: Option<i64>,
    tag: Option<i64>,
) -> PyResult<(Source, Option<u32>)> {
    let source = source.map_or(Ok(Source::Any), |rank| PyGroup::parse_rank(py, rank).map(Source::Rank))?;
    Ok((source, tag.map(|tag| PyGroup::parse_tag(py, tag)).transpose()?))
}

/// Returns the options of a send. A synchronous send completes only when a receive has matched the message.
pub(crate) fn send_options(py: Python<'_>, tag: i64, synchronous: bool) -> PyResult<SendOptions> {
    let mode = if synchronous { SendMode::Synchronous } else { SendMode::Standard };
    Ok(SendOptions { tag: PyGroup::parse_tag(py, tag)?, mode })
}

#[pymethods]
impl PyGroup {
    #[pyo3(signature = (buffer, to, tag = 0, synchronous = false, *, async_op = false))]
    fn send(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        to: i64,
        tag: i64,
        synchronous: bool,
        async_op: bool,
    ) -> Ended {
        let (region, to) = (Region::readable(buffer)?, Self::parse_rank(py, to)?);
        let options = send_options(py, tag, synchronous)?;
        with_type!(region.kind.wire_type().0, T => self.send_region::<T>(py, region, to, options, async_op.into()))
    }

    #[pyo3(signature = (buffer, source = None, tag = None, *, async_op = false))]
    fn receive(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<i64>,
        tag: Option<i64>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        let (mut region, (source, tag)) = (Region::writable(buffer)?, source_and_tag(py, source, tag)?);
        let (dtype, scale) = region.kind.wire_type();
        if !async_op {
            let status = self.receive_region(py, &mut region, source, tag)?;
            return OperationResult::Message(status).into_python(py);
        }
        let received = with_type!(dtype, T => {
            let elements = region.into_foreign::<T>();
            self.lock.with_messenger(py, |messenger| {
                let received = messenger.receive_into_async(elements, source, tag)?;
                Ok(received.and_then(move |(_, status)| Ok(OperationResult::message(status, scale))))
            })
        })?;
        PyHandle::new(received).into_python(py)
    }

    #[pyo3(signature = (buffer, to, send_tag, output, source, receive_tag))]
    #[expect(clippy::too_many_arguments, reason = "they describe two messages")]
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
        let (input, mut output) = (Region::readable(buffer)?, Region::writable(output)?);
        let (to, send_tag) = (Self::parse_rank(py, to)?, Self::parse_tag(py, send_tag)?);
        let (source, receive_tag) = source_and_tag(py, source, receive_tag)?;
        if input.kind.wire_type().0 != output.kind.wire_type().0 {
            return Err(errors::invalid(
                py,
                "the elements to send and the elements to receive are of different types",
            ));
        }
        let scale = output.kind.wire_type().1;
        let status = with_type!(input.kind.wire_type().0, T => {
            let sent = input.elements_without_overlap::<T>(&output);
            let received = output.elements_mut::<T>();
            self.lock.with_messenger(py, |messenger| {
                messenger.send_receive((&*sent, to, send_tag), (received, source, receive_tag))
            })?
        });
        OperationResult::message(status, scale).into_python(py)
    }

    #[pyo3(signature = (source = None, tag = None, timeout = 0.0))]
    fn probe(
        &self,
        py: Python<'_>,
        source: Option<i64>,
        tag: Option<i64>,
        timeout: f64,
    ) -> PyResult<Option<(u32, u32, usize, String)>> {
        let (source, tag) = source_and_tag(py, source, tag)?;
        let limit = duration_from_seconds(py, timeout)?;
        let found = wait_in_intervals(py, Some(limit), |patience| {
            self.lock.with_messenger(py, |messenger| messenger.probe(source, tag, patience))
        })?;
        Ok(found.map(|status| (status.source.get(), status.tag, status.count, status.dtype.to_string())))
    }
}

impl PyGroup {
    /// Sends the elements of a region. `T` is their type, or `u8`.
    pub(crate) fn send_region<T: Element>(
        &self,
        py: Python<'_>,
        region: Region,
        to: Rank,
        options: SendOptions,
        ending: Ending,
    ) -> Ended {
        if ending == Ending::Wait {
            let elements = region.elements::<T>();
            return self
                .lock
                .with_messenger(py, |messenger| messenger.send(elements, to, options))
                .map(|()| None);
        }
        let elements = region.into_foreign::<T>();
        let sent = self.lock.with_messenger(py, |messenger| {
            messenger.send_async(elements, to, options).map(|sent| sent.and_then(discard_result))
        })?;
        Ok(Some(PyHandle::new(sent)))
    }

    /// Receives a message into the beginning of a region, and waits for it.
    pub(crate) fn receive_region(
        &self,
        py: Python<'_>,
        region: &mut Region,
        source: Source,
        tag: Option<u32>,
    ) -> PyResult<Status> {
        let (dtype, scale) = region.kind.wire_type();
        let status = with_type!(dtype, T => {
            let elements = region.elements_mut::<T>();
            self.lock.with_messenger(py, |messenger| messenger.receive(elements, source, tag))?
        });
        Ok(Status { count: status.count / scale.max(1), ..status })
    }
}
