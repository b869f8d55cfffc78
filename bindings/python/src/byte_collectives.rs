//! Collectives of bytes, such as pickled objects, in which each rank knows only the length of its own bytes.
//!
//! A rank that cannot contribute, for example because it could not pickle an object, *refuses*: it sends a reason
//! instead of its data. If a rank refuses, every rank gets an error that names this rank and its reason. The group
//! can still be used.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringtrain::verbs::{AllGather, AllToAll, Gather, Scatter};
use ringtrain::{Error, Rank};

use crate::bytes::RECEIVED_BYTES_MAX;
use crate::elements::Region;
use crate::errors;
use crate::group::PyGroup;

/// A rank refuses with a header in which this bit is set. In the header of a refusal, the low 63 bits are the length
/// of the reason in bytes.
const REFUSAL_BIT: u64 = 1 << 63;
/// The maximum length of a reason in bytes. Longer reasons are cut.
const REASON_BYTES_MAX: usize = 4096;

const _: () = assert!((RECEIVED_BYTES_MAX as u64) < REFUSAL_BIT);

/// A rank that refused, and its reason.
struct RankRefusal {
    rank: Rank,
    reason: String,
}

/// The result of a collective in which a rank may refuse.
type UnlessRefused<T> = Result<Result<T, RankRefusal>, Error>;

/// The data that this rank contributes, or the reason why this rank refuses. `error` is the Python exception that caused
/// the refusal, if there is one.
struct Contribution<T> {
    data: Result<T, String>,
    error: Option<PyErr>,
}

impl<T: Default> Contribution<T> {
    /// Calls `read` to get the data of this rank. If `read` fails, or if the caller passes a `refusal`, this rank
    /// refuses.
    fn new(py: Python<'_>, refusal: Option<String>, read: impl FnOnce() -> PyResult<T>) -> Self {
        if let Some(reason) = refusal {
            return Self { data: Err(shorten_reason(reason)), error: None };
        }
        match read() {
            Ok(data) => Self { data: Ok(data), error: None },
            Err(error) => Self { data: Err(shorten_reason(error.value(py).to_string())), error: Some(error) },
        }
    }

    /// Returns the contribution of a rank that has nothing to send.
    fn none() -> Self {
        Self { data: Ok(T::default()), error: None }
    }
}

/// Cuts a reason to the maximum length.
fn shorten_reason(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    reason
}

/// Returns the header that a rank sends before its data: the length of the data, or [`REFUSAL_BIT`] and the length of the
/// reason.
fn length_header<T>(data: &Result<T, String>, length: impl FnOnce(&T) -> usize) -> u64 {
    match data {
        Ok(data) => length(data) as u64,
        Err(reason) => REFUSAL_BIT | reason.len() as u64,
    }
}

/// Returns a header for each of `n` ranks. The header is the length of the part for that rank, or zero if this rank
/// has no parts. If this rank refuses, all headers are [`REFUSAL_BIT`] and the length of the reason.
fn part_headers(data: &Result<(Vec<u8>, Vec<usize>), String>, n: usize) -> Vec<u64> {
    match data {
        Ok((_, lengths)) if !lengths.is_empty() => lengths.iter().map(|&length| length as u64).collect(),
        data => vec![length_header(data, |_| 0); n],
    }
}

/// Returns the length of the reason if the rank that sent this header refuses, otherwise `None`.
fn reason_length(header: u64) -> Option<usize> {
    (header & REFUSAL_BIT != 0).then_some(((header & !REFUSAL_BIT) as usize).min(REASON_BYTES_MAX))
}

/// Returns the lengths of all ranks' data. If some ranks refuse, exchanges the reasons and returns the refusal of the
/// lowest rank that refuses.
fn lengths_or_refusal<T>(
    group: &mut ringtrain::Group,
    headers: &[u64],
    own: &Result<T, String>,
) -> UnlessRefused<Vec<usize>> {
    let Some(first) = headers.iter().position(|&header| reason_length(header).is_some()) else {
        return Ok(Ok(check_lengths(headers)?));
    };
    let counts: Vec<usize> =
        headers.iter().map(|&header| reason_length(header).unwrap_or_default()).collect();
    let reason = own.as_ref().err().map_or(&[][..], String::as_bytes);
    let reasons = group.call(AllGather::new().counts(&counts)).run_from(reason)?;
    // `reasons` begins with the reason of rank `first`, because the lower ranks sent no reason.
    let reason = String::from_utf8_lossy(&reasons[..counts[first]]).into_owned();
    Ok(Err(RankRefusal { rank: Rank::new(first as u32), reason }))
}

/// Broadcasts the root's headers. Returns the lengths in these headers, or the root's refusal.
fn broadcast_lengths<T>(
    group: &mut ringtrain::Group,
    headers: &mut [u64],
    own: &Result<T, String>,
    root: Rank,
) -> UnlessRefused<Vec<usize>> {
    group.broadcast(headers, root)?;
    let Some(length) = headers.first().and_then(|&header| reason_length(header)) else {
        return Ok(Ok(check_lengths(headers)?));
    };
    let mut reason = own.as_ref().err().map_or_else(Vec::new, |reason| reason.clone().into_bytes());
    reason.resize(length, 0);
    group.broadcast(&mut reason, root)?;
    Ok(Err(RankRefusal { rank: root, reason: String::from_utf8_lossy(&reason).into_owned() }))
}

/// Returns the lengths, or an error if their sum is more than [`RECEIVED_BYTES_MAX`].
fn check_lengths(lengths: &[u64]) -> Result<Vec<usize>, Error> {
    let all = lengths.iter().map(|&length| usize::try_from(length).unwrap_or(usize::MAX));
    let lengths: Vec<usize> = all.collect();
    let total = lengths.iter().fold(0, |total: usize, &length| total.saturating_add(length));
    if total > RECEIVED_BYTES_MAX {
        return Err(Error::InvalidCounts("the objects have more than 16 GiB in total"));
    }
    Ok(lengths)
}

/// Divides `all` into Python `bytes` objects. `lengths[i]` is the length of object i.
fn divide_into_python_bytes<'py>(
    py: Python<'py>,
    mut all: &[u8],
    lengths: &[usize],
) -> Vec<Bound<'py, PyBytes>> {
    let mut part = |&length: &usize| {
        let (one, rest) = all.split_at(length);
        all = rest;
        PyBytes::new(py, one)
    };
    lengths.iter().map(&mut part).collect()
}

/// Returns a copy of a buffer's bytes.
fn copy_bytes(data: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<Vec<u8>> {
    let data = data.ok_or_else(|| errors::invalid(py, "no data was passed"))?;
    Ok(Region::readable(data)?.elements::<u8>().to_vec())
}

/// Returns the concatenated bytes of one buffer for each of `n` ranks, and the lengths of the buffers.
fn concatenate(
    py: Python<'_>,
    parts: Option<Vec<Bound<'_, PyAny>>>,
    n: usize,
) -> PyResult<(Vec<u8>, Vec<usize>)> {
    let parts = parts.unwrap_or_default();
    if parts.len() != n {
        let given = parts.len();
        return Err(errors::invalid(py, format!("one object for each of {n} ranks is needed, not {given}")));
    }
    let mut all = Vec::new();
    let mut lengths = Vec::with_capacity(n);
    for part in &parts {
        let region = Region::readable(part)?;
        all.extend_from_slice(region.elements::<u8>());
        lengths.push(region.bytes());
    }
    Ok((all, lengths))
}

impl PyGroup {
    /// Runs a collective in which a rank may refuse. A rank that refuses returns its own error. Every other rank
    /// returns an error that names the lowest rank that refuses.
    fn run_unless_refused<R: Send>(
        &self,
        py: Python<'_>,
        own_error: Option<PyErr>,
        work: impl FnOnce(&mut ringtrain::Group) -> UnlessRefused<R> + Send,
    ) -> PyResult<R> {
        match (self.lock.with_group(py, work)?, own_error) {
            (Ok(result), None) => Ok(result),
            (_, Some(error)) => Err(error),
            (Err(RankRefusal { rank, reason }), None) => {
                let rank = self.rank_in_job(rank);
                Err(errors::no_contribution(py, rank, &reason))
            }
        }
    }

    /// Exchanges the lengths of the ranks' bytes, and calls `gather` with this rank's bytes and all lengths. Returns
    /// the gathered bytes and the lengths.
    fn exchange_lengths(
        &self,
        py: Python<'_>,
        own: Contribution<Vec<u8>>,
        gather: impl FnOnce(&mut ringtrain::Group, &[u8], &[usize]) -> Result<Vec<u8>, Error> + Send,
    ) -> PyResult<(Vec<u8>, Vec<usize>)> {
        self.run_unless_refused(py, own.error, move |group| {
            let headers = group.call(AllGather::new()).run_from(&[length_header(&own.data, Vec::len)])?;
            match lengths_or_refusal(group, &headers, &own.data)? {
                Ok(lengths) => {
                    let own = own.data.unwrap_or_default();
                    Ok(Ok((gather(group, &own, &lengths)?, lengths)))
                }
                Err(refusal) => Ok(Err(refusal)),
            }
        })
    }
}

#[pymethods]
impl PyGroup {
    #[pyo3(signature = (data, root, refusal = None))]
    fn broadcast_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Option<&Bound<'py, PyAny>>,
        root: i64,
        refusal: Option<String>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let root = Self::parse_rank(py, root)?;
        let own = if root == self.rank {
            Contribution::new(py, refusal, || copy_bytes(data, py))
        } else {
            Contribution::none()
        };
        let bytes = self.run_unless_refused(py, own.error, move |group| {
            let mut headers = [length_header(&own.data, Vec::len)];
            let length = match broadcast_lengths(group, &mut headers, &own.data, root)? {
                Ok(lengths) => lengths[0],
                Err(refusal) => return Ok(Err(refusal)),
            };
            let mut bytes = own.data.unwrap_or_default();
            bytes.resize(length, 0);
            group.broadcast(&mut bytes, root)?;
            Ok(Ok(bytes))
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (data, refusal = None))]
    fn all_gather_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Option<&Bound<'py, PyAny>>,
        refusal: Option<String>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let own = Contribution::new(py, refusal, || copy_bytes(data, py));
        let gather = |group: &mut ringtrain::Group, own: &[u8], lengths: &[usize]| {
            group.call(AllGather::new().counts(lengths)).run_from(own)
        };
        let (all, lengths) = self.exchange_lengths(py, own, gather)?;
        Ok(divide_into_python_bytes(py, &all, &lengths))
    }

    #[pyo3(signature = (data, root, refusal = None))]
    fn gather_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Option<&Bound<'py, PyAny>>,
        root: i64,
        refusal: Option<String>,
    ) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        let root = Self::parse_rank(py, root)?;
        let own = Contribution::new(py, refusal, || copy_bytes(data, py));
        let gather = |group: &mut ringtrain::Group, own: &[u8], lengths: &[usize]| {
            group.call(Gather::to(root).counts(lengths)).run_from(own)
        };
        let (all, lengths) = self.exchange_lengths(py, own, gather)?;
        Ok((self.rank == root).then(|| divide_into_python_bytes(py, &all, &lengths)))
    }

    #[pyo3(signature = (data, root, refusal = None))]
    fn scatter_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Option<Vec<Bound<'py, PyAny>>>,
        root: i64,
        refusal: Option<String>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (root, n) = (Self::parse_rank(py, root)?, self.size as usize);
        let own = if root == self.rank {
            Contribution::new(py, refusal, || concatenate(py, data, n))
        } else {
            Contribution::none()
        };
        let bytes = self.run_unless_refused(py, own.error, move |group| {
            let mut headers = part_headers(&own.data, n);
            match broadcast_lengths(group, &mut headers, &own.data, root)? {
                Ok(lengths) => {
                    let (all, _) = own.data.unwrap_or_default();
                    Ok(Ok(group.call(Scatter::from(root).counts(&lengths)).run_from(&all)?))
                }
                Err(refusal) => Ok(Err(refusal)),
            }
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (data, refusal = None))]
    fn all_to_all_bytes<'py>(
        &self,
        py: Python<'py>,
        data: Option<Vec<Bound<'py, PyAny>>>,
        refusal: Option<String>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let n = self.size as usize;
        let own = Contribution::new(py, refusal, || concatenate(py, data, n));
        let (all, lengths) = self.run_unless_refused(py, own.error, move |group| {
            let headers = group.call(AllToAll::new()).run_from(&part_headers(&own.data, n))?;
            match lengths_or_refusal(group, &headers, &own.data)? {
                Ok(received_lengths) => {
                    let (all, lengths) = own.data.unwrap_or_default();
                    Ok(Ok((
                        group.call(AllToAll::new().counts(&lengths, &received_lengths)).run_from(&all)?,
                        received_lengths,
                    )))
                }
                Err(refusal) => Ok(Err(refusal)),
            }
        })?;
        Ok(divide_into_python_bytes(py, &all, &lengths))
    }
}
