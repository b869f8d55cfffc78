//! Bytes whose number only their sender knows, and messages of bytes into buffers of any type.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringtrain::Error;

use crate::errors;
use crate::group::Group;
use crate::handle::{Handle, Outcome};
use crate::messages::{pattern_of, send_options};
use crate::region::Region;

/// The longest that comes from elsewhere: what a rank allocates because another says so.
const BYTES_MAX: usize = 1 << 34;

/// The lengths that ranks told each other.
fn checked(lengths: &[u64]) -> Result<Vec<usize>, Error> {
    let all = lengths.iter().map(|&length| usize::try_from(length).unwrap_or(usize::MAX));
    let lengths: Vec<usize> = all.collect();
    let total = lengths.iter().fold(0, |total: usize, &length| total.saturating_add(length));
    if total > BYTES_MAX {
        return Err(Error::InvalidCounts("the objects are longer together than 16 GiB"));
    }
    Ok(lengths)
}

/// Objects of these bytes, of these lengths.
fn divided<'py>(py: Python<'py>, mut all: &[u8], lengths: &[usize]) -> Vec<Bound<'py, PyBytes>> {
    let mut part = |&length: &usize| {
        let (one, rest) = all.split_at(length);
        all = rest;
        PyBytes::new(py, one)
    };
    lengths.iter().map(&mut part).collect()
}

/// What a sequence of buffers has, one after another, and the lengths.
fn joined(parts: &[Bound<'_, PyAny>]) -> PyResult<(Vec<u8>, Vec<usize>)> {
    let mut all = Vec::new();
    let mut lengths = Vec::with_capacity(parts.len());
    for part in parts {
        let region = Region::of(part)?;
        all.extend_from_slice(region.elements::<u8>());
        lengths.push(region.bytes());
    }
    Ok((all, lengths))
}

#[pymethods]
impl Group {
    #[pyo3(signature = (data, to, tag = 0, synchronous = false))]
    fn send_bytes(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        to: i64,
        tag: i64,
        synchronous: bool,
    ) -> PyResult<()> {
        let (region, to) = (Region::of(data)?, Self::rank(py, to)?);
        let options = send_options(py, tag, synchronous)?;
        let bytes = region.elements::<u8>();
        self.message(py, |messenger| messenger.send(bytes, to, options))
    }

    #[pyo3(signature = (data, to, tag = 0, synchronous = false))]
    fn send_bytes_async(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        to: i64,
        tag: i64,
        synchronous: bool,
    ) -> PyResult<Handle> {
        let (to, options) = (Self::rank(py, to)?, send_options(py, tag, synchronous)?);
        let bytes = Region::of(data)?.into_foreign::<u8>(py)?;
        let sent = self.message(py, |messenger| messenger.send_async(bytes, to, options))?;
        Ok(Handle::new(sent.and_then(|_| Ok(Outcome::Nothing))))
    }

    #[pyo3(signature = (source = None, tag = None))]
    fn receive_bytes(&self, py: Python<'_>, source: Option<i64>, tag: Option<i64>) -> PyResult<Py<PyAny>> {
        let handle = self.receive_bytes_async(py, source, tag)?;
        let received = handle.wait_for(py, None);
        if received.is_err() {
            // Nobody would get the message that it still waits for.
            handle.cancel(py)?;
        }
        received?.ok_or_else(|| errors::plain(py, "the message did not come"))
    }

    #[pyo3(signature = (source = None, tag = None))]
    fn receive_bytes_async(&self, py: Python<'_>, source: Option<i64>, tag: Option<i64>) -> PyResult<Handle> {
        let (source, tag) = pattern_of(py, source, tag)?;
        let received = self.message(py, |messenger| messenger.receive_async::<u8>(BYTES_MAX, source, tag))?;
        let bytes = |received: ringtrain::Received<u8>| {
            Ok(Outcome::Bytes(Arc::new(received.elements), received.status))
        };
        Ok(Handle::new(received.and_then(bytes)))
    }

    #[pyo3(signature = (buffer, source = None, tag = None))]
    fn receive_into_bytes(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<i64>,
        tag: Option<i64>,
    ) -> PyResult<Py<PyAny>> {
        let (mut region, (source, tag)) = (Region::writable(buffer)?, pattern_of(py, source, tag)?);
        let bytes = region.elements_mut::<u8>();
        let status = self.message(py, |messenger| messenger.receive_fitting(bytes, source, tag))?;
        Outcome::Message(status).into_python(py)
    }

    #[pyo3(signature = (buffer, source = None, tag = None))]
    fn receive_into_bytes_async(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        source: Option<i64>,
        tag: Option<i64>,
    ) -> PyResult<Handle> {
        let (source, tag) = pattern_of(py, source, tag)?;
        let bytes = Region::writable(buffer)?.into_foreign::<u8>(py)?;
        let received = self.message(py, |messenger| messenger.receive_fitting_async(bytes, source, tag))?;
        Ok(Handle::new(received.and_then(|(_, status)| Ok(Outcome::Message(status)))))
    }

    fn broadcast_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Option<&Bound<'py, PyAny>>,
        root: i64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let root = Self::rank(py, root)?;
        let is_root = root == self.rank;
        let own = match data {
            Some(data) if is_root => Region::of(data)?.elements::<u8>().to_vec(),
            None if is_root => return Err(errors::invalid(py, "the root has to pass what is broadcast")),
            _ => Vec::new(),
        };
        let bytes = self.turn(py, |group| {
            let mut length = [own.len() as u64];
            group.broadcast(&mut length, root)?;
            let length = checked(&length)?[0];
            let mut bytes = own;
            bytes.resize(length, 0);
            group.broadcast(&mut bytes, root)?;
            Ok(bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn all_gather_bytes<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let region = Region::of(data)?;
        let own = region.elements::<u8>();
        let (all, lengths) = self.turn(py, |group| {
            let lengths = checked(&group.all_gather_from(&[own.len() as u64])?)?;
            Ok((group.all_gather_uneven(own, &lengths)?, lengths))
        })?;
        Ok(divided(py, &all, &lengths))
    }

    fn gather_bytes<'py>(
        &self,
        py: Python<'py>,
        data: &Bound<'py, PyAny>,
        root: i64,
    ) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        let (region, root) = (Region::of(data)?, Self::rank(py, root)?);
        let own = region.elements::<u8>();
        let (all, lengths) = self.turn(py, |group| {
            let lengths = checked(&group.all_gather_from(&[own.len() as u64])?)?;
            Ok((group.gather_uneven(own, &lengths, root)?, lengths))
        })?;
        Ok((self.rank == root).then(|| divided(py, &all, &lengths)))
    }

    fn scatter_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Option<Vec<Bound<'py, PyAny>>>,
        root: i64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let root = Self::rank(py, root)?;
        let is_root = self.rank == root;
        let parts = data.filter(|_| is_root).unwrap_or_default();
        let (all, lengths) = joined(&parts)?;
        let bytes = self.turn(py, |group| {
            let n = group.size().as_usize();
            let mut told = vec![0u64; n];
            if is_root {
                if lengths.len() != n {
                    return Err(Error::InvalidCounts("there is not one object for each rank"));
                }
                told = lengths.iter().map(|&length| length as u64).collect();
            }
            group.broadcast(&mut told, root)?;
            group.scatter_uneven(&all, &checked(&told)?, root)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[expect(clippy::needless_pass_by_value, reason = "what Python's sequence is made into")]
    fn all_to_all_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (all, lengths) = joined(&data)?;
        let (all, lengths) = self.turn(py, |group| {
            if lengths.len() != group.size().as_usize() {
                return Err(Error::InvalidCounts("there is not one object for each rank"));
            }
            let told: Vec<u64> = lengths.iter().map(|&length| length as u64).collect();
            let theirs = checked(&group.all_to_all(&told)?)?;
            Ok((group.all_to_all_uneven(&all, &lengths, &theirs)?, theirs))
        })?;
        Ok(divided(py, &all, &lengths))
    }
}
