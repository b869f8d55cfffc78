//! `_core.Gossip`, which works on vectors of f32. `ringtrain/gossip.py` converts arrays and tensors to vectors.

use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use ringtrain::Rank;
use ringtrain::train::{AverageCounts, Gossip, GossipOptions};

use crate::arguments::writable_f32;
use crate::closable::Closable;
use crate::errors;
use crate::group::PyGroup;
use crate::handle::duration_from_seconds;

/// The counts of averages, and the lost ranks with the reasons.
type GossipSnapshot = (AverageCounts, Vec<(Rank, String)>);

/// This rank's part of the gossip averaging of a group.
#[pyclass(name = "Gossip", frozen, module = "ringtrain._core")]
pub(crate) struct PyGossip {
    /// Other threads may only refer to a `Gossip` through a mutex, because `Gossip` is not `Sync`.
    gossip: Closable<Mutex<Gossip>>,
    /// The counts and the lost ranks at the end of the gossip. `None` before the end.
    last_snapshot: Mutex<Option<GossipSnapshot>>,
    /// The number of parameters.
    count: usize,
    /// The maximum time of one operation of the group.
    timeout: Duration,
    /// The ranks of the group's members in the job.
    members: Vec<u32>,
}

impl PyGossip {
    fn last_snapshot(&self) -> MutexGuard<'_, Option<GossipSnapshot>> {
        self.last_snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counts and the lost ranks at this time, or at the end of the gossip if the gossip has ended.
    fn snapshot(&self, py: Python<'_>) -> PyResult<GossipSnapshot> {
        let last = self.last_snapshot().clone();
        last.map_or_else(|| self.gossip.run_shared(py, take_snapshot), Ok)
    }
}

fn take_snapshot(gossip: &Mutex<Gossip>) -> GossipSnapshot {
    let gossip = lock(gossip);
    (gossip.averages(), gossip.lost_ranks())
}

fn lock(gossip: &Mutex<Gossip>) -> MutexGuard<'_, Gossip> {
    gossip.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl PyGossip {
    /// Writes rank 0's parameters to `parameters`.
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 converts the Python object into it")]
    fn new(
        py: Python<'_>,
        group: PyRef<'_, PyGroup>,
        parameters: &Bound<'_, PyAny>,
        count: usize,
        every: u32,
    ) -> PyResult<Self> {
        let every = NonZeroU32::new(every).ok_or_else(|| errors::invalid(py, "every is 0"))?;
        let mut parameters = writable_f32(parameters, count)?;
        let options = GossipOptions { steps_between_averages: every, ..GossipOptions::default() };
        let members: Vec<u32> = (0..group.size).map(|rank| group.rank_in_job(Rank::new(rank))).collect();
        let (started, timeout) = group.lock.with_group(py, |group: &mut ringtrain::Group| {
            Ok((Gossip::start(group, parameters.elements_mut(), &options), group.timeout()))
        })?;
        let gossip = started.map_err(|error| errors::from_gossip(py, &error, &members))?;
        let messengers = gossip.messengers();
        Ok(Self {
            gossip: Closable::new("gossip", Mutex::new(gossip), messengers),
            last_snapshot: Mutex::new(None),
            count,
            timeout,
            members,
        })
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.gossip.is_closed()
    }

    fn step(&self, py: Python<'_>, parameters: &Bound<'_, PyAny>) -> PyResult<bool> {
        let mut parameters = writable_f32(parameters, self.count)?;
        self.gossip.run_alone(py, |gossip| lock(gossip).step(parameters.elements_mut()))
    }

    /// Closes the gossip, also after an error.
    fn finish(&self, py: Python<'_>, parameters: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<()> {
        let mut parameters = writable_f32(parameters, self.count)?;
        let timeout = timeout.map_or(Ok(self.timeout), |seconds| duration_from_seconds(py, seconds))?;
        let result = self.gossip.run_alone(py, |gossip| {
            let mut gossip = lock(gossip);
            let result = gossip.finish(parameters.elements_mut(), timeout);
            *self.last_snapshot() = Some((gossip.averages(), gossip.lost_ranks()));
            result
        });
        if self.last_snapshot().is_some() {
            self.gossip.close(py)?;
        }
        result?.map_err(|error| errors::from_gossip(py, &error, &self.members))
    }

    /// How many averages this rank has done and skipped.
    #[getter]
    fn averages(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let AverageCounts { done, skipped } = self.snapshot(py)?.0;
        Ok((done, skipped))
    }

    #[getter]
    fn lost_ranks(&self, py: Python<'_>) -> PyResult<Vec<(u32, String)>> {
        let in_job = |rank: Rank| self.members.get(rank.index()).copied().unwrap_or(rank.get());
        Ok(self.snapshot(py)?.1.into_iter().map(|(rank, problem)| (in_job(rank), problem)).collect())
    }

    fn abort(&self, py: Python<'_>, message: &str) -> PyResult<()> {
        self.gossip.abort(py, message)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.gossip.is_closed()
            && let Ok(snapshot) = self.gossip.run_shared(py, take_snapshot)
        {
            self.last_snapshot().get_or_insert(snapshot);
        }
        self.gossip.close(py)
    }
}
