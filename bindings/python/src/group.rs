//! A group of ranks: its properties, how to form subgroups, and how to close it.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ringtrain::Rank;
use ringtrain::types::Operation;

use crate::calls::GroupLock;
use crate::fork::register_messenger;
use crate::handle::duration_from_seconds;
use crate::{calls, errors};

/// A group of ranks of a job.
#[pyclass(name = "Group", frozen, module = "ringtrain._core")]
pub(crate) struct PyGroup {
    pub(crate) lock: GroupLock,
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    /// The local rank and the local size.
    local: (u32, u32),
    /// The rank of each member in the job.
    members: Vec<u32>,
    transport: &'static str,
}

impl PyGroup {
    pub(crate) fn new(group: ringtrain::Group) -> Self {
        let messenger = register_messenger(group.messenger());
        Self {
            rank: group.rank(),
            size: group.size().get(),
            local: (group.local_rank().get(), group.local_size().get()),
            members: group.members().iter().map(|rank| rank.get()).collect(),
            transport: group.transport(),
            lock: GroupLock::new(group, messenger),
        }
    }

    /// Converts a rank of this group to the rank of the same process in the job.
    pub(crate) fn rank_in_job(&self, rank: Rank) -> u32 {
        self.members.get(rank.index()).copied().unwrap_or(rank.get())
    }

    /// Converts a number from Python to a count of elements. Fails if the number is negative.
    pub(crate) fn parse_count(py: Python<'_>, number: i64) -> PyResult<usize> {
        usize::try_from(number).map_err(|_| errors::invalid(py, format!("{number} is not a count")))
    }

    /// Converts a number from Python to the tag of a message.
    pub(crate) fn parse_tag(py: Python<'_>, number: i64) -> PyResult<u32> {
        u32::try_from(number)
            .map_err(|_| errors::invalid(py, format!("{number} is not a tag; tags are 0 to 2^32 - 2")))
    }

    /// Converts a number from Python to a rank. The library later checks that the group has this rank.
    pub(crate) fn parse_rank(py: Python<'_>, number: i64) -> PyResult<Rank> {
        u32::try_from(number)
            .map(Rank::new)
            .map_err(|_| errors::invalid(py, format!("{number} is not the number of a rank")))
    }
}

#[pymethods]
impl PyGroup {
    #[getter]
    fn get_rank(&self) -> u32 {
        self.rank.get()
    }

    #[getter]
    fn size(&self) -> u32 {
        self.size
    }

    #[getter]
    fn local_rank(&self) -> u32 {
        self.local.0
    }

    #[getter]
    fn local_size(&self) -> u32 {
        self.local.1
    }

    #[getter]
    fn members(&self) -> Vec<u32> {
        self.members.clone()
    }

    #[getter]
    fn transport(&self) -> &'static str {
        self.transport
    }

    #[getter]
    fn is_closed(&self) -> bool {
        // When this process was forked, another thread may have held the lock, which then stays locked for ever.
        !calls::is_forked() && self.lock.is_closed()
    }

    #[getter]
    fn timeout(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.lock.messenger(py)?.timeout().as_secs_f64())
    }

    #[setter]
    fn set_timeout(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let timeout = duration_from_seconds(py, seconds)?;
        self.lock.with_group(py, |group| {
            group.set_timeout(timeout);
            self.lock.replace_messenger(register_messenger(group.messenger()));
            Ok(())
        })
    }

    fn algorithm(&self, py: Python<'_>, operation: &str, bytes: usize) -> PyResult<String> {
        let operation: Operation = operation.parse().map_err(|error: String| errors::invalid(py, error))?;
        self.lock.with_group(py, |group| Ok(group.algorithm(operation, bytes).to_string()))
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let statistics = self.lock.messenger(py)?.statistics();
        let dict = PyDict::new(py);
        dict.set_item("operations", statistics.operations)?;
        dict.set_item("bytes_sent", statistics.bytes_sent)?;
        dict.set_item("bytes_received", statistics.bytes_received)?;
        dict.set_item("encoded_elements", statistics.encoded_elements)?;
        dict.set_item("encoded_bytes", statistics.encoded_bytes)?;
        dict.set_item("communication", statistics.communication.as_secs_f64())?;
        dict.set_item("exposed", statistics.exposed.as_secs_f64())?;
        Ok(dict)
    }

    #[pyo3(signature = (colour, key = 0))]
    fn split(&self, py: Python<'_>, colour: Option<u32>, key: i64) -> PyResult<Option<Self>> {
        Ok(self.lock.with_group(py, |group| group.split(colour, key))?.map(Self::new))
    }

    fn subgroup(&self, py: Python<'_>, ranks: Vec<i64>) -> PyResult<Option<Self>> {
        let ranks: Vec<Rank> =
            ranks.into_iter().map(|rank| Self::parse_rank(py, rank)).collect::<PyResult<_>>()?;
        Ok(self.lock.with_group(py, |group| group.subgroup(&ranks))?.map(Self::new))
    }

    fn duplicate(&self, py: Python<'_>) -> PyResult<Self> {
        Ok(Self::new(self.lock.with_group(py, ringtrain::Group::duplicate)?))
    }

    fn abort(&self, py: Python<'_>, message: &str) -> PyResult<Py<PyAny>> {
        let messenger = self.lock.messenger(py)?;
        let error = py.detach(|| messenger.abort(message));
        Ok(errors::from_error(py, &error).into_value(py).into_any())
    }

    fn write_timeline(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let report = self.lock.with_group(py, ringtrain::Group::write_timeline)?;
        Ok(report.map(|report| report.to_string()))
    }

    fn write_flight_record(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let messenger = self.lock.messenger(py)?;
        py.detach(|| messenger.write_flight_record(reason));
        Ok(())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        calls::fail_if_forked(py)?;
        py.detach(|| self.lock.close());
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("Group(rank {} of {}, {})", self.rank, self.size, self.transport)
    }
}

impl Drop for PyGroup {
    fn drop(&mut self) {
        if calls::is_forked() {
            self.lock.leak();
        } else {
            // Closing the last group of a job can take time, so detach from the interpreter and let other Python
            // threads run. If the interpreter has ended, there are no other Python threads.
            if Python::try_attach(|py| py.detach(|| self.lock.close())).is_none() {
                self.lock.close();
            }
        }
    }
}
