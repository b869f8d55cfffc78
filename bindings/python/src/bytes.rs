//! Messages of bytes. A receive either allocates memory of the length that the sender chose, or writes the bytes to a
//! buffer of any type.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::collectives::Ended;
use crate::elements::Region;
use crate::errors;
use crate::group::PyGroup;
use crate::handle::{OperationResult, PyHandle};
use crate::messages::{send_options, source_and_tag};

/// The maximum length of received data in bytes. The receiver allocates at most this many bytes for a message, even
/// if the sender announces a greater length.
pub(crate) const RECEIVED_BYTES_MAX: usize = 1 << 34;

#[pymethods]
impl PyGroup {
    #[pyo3(signature = (data, to, tag = 0, synchronous = false, *, async_op = false))]
    fn send_bytes(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        to: i64,
        tag: i64,
        synchronous: bool,
        async_op: bool,
    ) -> Ended {
        let (region, to) = (Region::readable(data)?, Self::parse_rank(py, to)?);
        let options = send_options(py, tag, synchronous)?;
        self.send_region::<u8>(py, region, to, options, async_op.into())
    }

    #[pyo3(signature = (source = None, tag = None, *, async_op = false))]
    fn receive_bytes(
        &self,
        py: Python<'_>,
        source: Option<i64>,
        tag: Option<i64>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        let (source, tag) = source_and_tag(py, source, tag)?;
        let received = self
            .lock
            .with_messenger(py, |messenger| messenger.receive_async::<u8>(RECEIVED_BYTES_MAX, source, tag))?;
        let handle = PyHandle::new(received.and_then(|received: ringtrain::Received<u8>| {
            Ok(OperationResult::Bytes(Arc::new(received.elements), received.status))
        }));
        if async_op {
            return handle.into_python(py);
        }
        let received = handle.wait_for(py, None);
        if received.is_err() {
            // Cancel the failed receive. If this receive matched a message later, the message would be lost.
            handle.cancel(py)?;
        }
        received?.ok_or_else(|| errors::base_error(py, "the message has not arrived"))
    }

    #[pyo3(signature = (buffer, source = None, tag = None, *, async_op = false))]
    fn receive_into_bytes(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<i64>,
        tag: Option<i64>,
        async_op: bool,
    ) -> PyResult<Py<PyAny>> {
        let (mut region, (source, tag)) = (Region::writable(buffer)?, source_and_tag(py, source, tag)?);
        if !async_op {
            let bytes = region.elements_mut::<u8>();
            let status =
                self.lock.with_messenger(py, |messenger| messenger.receive_fitting(bytes, source, tag))?;
            return OperationResult::Message(status).into_python(py);
        }
        let bytes = region.into_foreign::<u8>();
        let received =
            self.lock.with_messenger(py, |messenger| messenger.receive_fitting_async(bytes, source, tag))?;
        PyHandle::new(received.and_then(|(_, status)| Ok(OperationResult::Message(status)))).into_python(py)
    }
}
