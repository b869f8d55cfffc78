//! `_core.ParameterServer`, which works on vectors of f32. `ringtrain/parameter_server.py` converts arrays and
//! tensors to vectors.

use std::num::NonZeroU32;
use std::ops::Range;

use pyo3::prelude::*;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{ParameterServer, ParameterServerError, ParameterServerOptions, PushOutcome};
use ringtrain::{DType, Rank};

use crate::arguments::{readable_f32, writable_f32};
use crate::closable::Closable;
use crate::elements::{ElementKind, Region};
use crate::errors;
use crate::group::PyGroup;
use crate::handle::duration_from_seconds;
use crate::signals::wait_in_intervals;

/// The result of a push: whether all servers applied their parts of the gradient, and the largest staleness of a part.
type PushResult = (bool, u64);

/// This rank's part of a parameter server: the rank is a worker or a server.
#[pyclass(name = "ParameterServer", frozen, module = "ringtrain._core")]
pub(crate) struct PyParameterServer {
    server: Closable<ParameterServer>,
    #[pyo3(get)]
    is_server: bool,
    /// The workers' ranks in the job.
    #[pyo3(get)]
    workers: Vec<u32>,
    /// The range of parameters that this server holds. Empty on a worker.
    range: Range<usize>,
    /// The names of the optimizer's state vectors.
    #[pyo3(get)]
    state_names: Vec<&'static str>,
    /// The number of parameters on all servers together.
    len: usize,
    is_synchronous: bool,
    /// The ranks of the group's members in the job.
    members: Vec<u32>,
}

/// Converts the name and the constants of an optimizer to its rule.
fn optimizer_rule(
    py: Python<'_>,
    name: &str,
    momentum: f32,
    (beta_1, beta_2, epsilon): (f64, f64, f64),
) -> PyResult<Rule> {
    let options = AdamOptions { beta_1, beta_2, epsilon };
    Ok(match name {
        "sgd" => Rule::Sgd,
        "momentum" => Rule::Momentum { momentum },
        "nesterov" => Rule::Nesterov { momentum },
        "adam" => Rule::Adam(options),
        "adamw" => Rule::AdamW(options),
        "lamb" => Rule::Lamb(options),
        "lars" => Rule::Lars { momentum },
        _ => {
            let names = "sgd, momentum, nesterov, adam, adamw, lamb, lars";
            return Err(errors::invalid(py, format!("`{name}` is not an optimizer; use one of {names}")));
        }
    })
}

/// Converts pairs (first element, length) to ranges. The ranges must be ascending, must not overlap and must not exceed
/// `len` elements.
fn ranges_from_pairs(py: Python<'_>, pairs: &Bound<'_, PyAny>, len: usize) -> PyResult<Vec<Range<usize>>> {
    let region = Region::readable(pairs)?;
    if region.kind != ElementKind::Number(DType::I64) {
        return Err(errors::invalid(py, format!("ranges are i64, not {}", region.kind.name())));
    }
    let mut end = 0_usize;
    let ranges = region.elements::<i64>().chunks_exact(2).map(|pair| {
        let (start, count) = (usize::try_from(pair[0]).ok()?, usize::try_from(pair[1]).ok()?);
        let next = start.checked_add(count).filter(|&next| end <= start && next <= len)?;
        end = next;
        Some(start..next)
    });
    let ranges: Option<Vec<_>> = ranges.collect();
    ranges.ok_or_else(|| {
        errors::invalid(py, format!("the ranges are not ascending, overlap or exceed the {len} elements"))
    })
}

/// Combines what the servers did with their parts of a gradient.
fn combine_outcomes(outcomes: &[PushOutcome]) -> PushResult {
    let convert = |outcome: &PushOutcome| match *outcome {
        PushOutcome::Applied { staleness } => (true, staleness),
        PushOutcome::Stale { staleness } => (false, staleness),
        PushOutcome::Unwanted => (false, 0),
    };
    let combine = |(all_applied, largest): PushResult, (applied, staleness): PushResult| {
        (all_applied && applied, largest.max(staleness))
    };
    outcomes.iter().map(convert).fold((true, 0), combine)
}

impl PyParameterServer {
    /// Calls `work` on a worker. Other Python threads can run during `work`.
    fn run_on_worker<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut ParameterServer) -> Result<R, ParameterServerError> + Send,
    ) -> PyResult<R> {
        if self.is_server {
            return Err(errors::base_error(py, "this rank is a server; only workers push and pull"));
        }
        let result = self.server.run_alone(py, work)?;
        result.map_err(|error| errors::from_parameter_server(py, &error, &self.members))
    }

    /// Calls `work` on a server. Other Python threads can run during `work`.
    fn run_on_server<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&ParameterServer) -> R + Send,
    ) -> PyResult<R> {
        if !self.is_server {
            return Err(errors::base_error(py, "this rank is a worker; only servers can call this function"));
        }
        self.server.run_shared(py, work)
    }
}

#[pymethods]
impl PyParameterServer {
    #[new]
    #[pyo3(signature = (group, parameters, tensors, servers, optimizer, learning_rate, momentum, adam, weight_decay, synchronous,
        staleness, staleness_aware))]
    #[expect(clippy::too_many_arguments, reason = "the Python class has an argument for each setting")]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 converts the Python sequence into it")]
    fn new(
        py: Python<'_>,
        group: PyRef<'_, PyGroup>,
        parameters: &Bound<'_, PyAny>,
        tensors: Vec<usize>,
        servers: u32,
        optimizer: &str,
        learning_rate: f32,
        momentum: f32,
        adam: (f64, f64, f64),
        weight_decay: Option<f32>,
        synchronous: bool,
        staleness: Option<u64>,
        staleness_aware: bool,
    ) -> PyResult<Self> {
        let rule = optimizer_rule(py, optimizer, momentum, adam)?;
        let servers = NonZeroU32::new(servers).ok_or_else(|| errors::invalid(py, "0 servers are too few"))?;
        let len = tensors.iter().sum();
        let parameters = readable_f32(parameters, len)?;
        let weight_decay = weight_decay.unwrap_or_else(|| rule.default_weight_decay());
        let options = ParameterServerOptions {
            servers,
            rule,
            tensors: tensor_ranges(&tensors),
            learning_rate,
            weight_decay,
            synchronous,
            staleness,
            staleness_aware,
        };
        let members: Vec<u32> = (0..group.size).map(|rank| group.rank_in_job(Rank::new(rank))).collect();
        let start = |group: &mut ringtrain::Group| {
            let values = parameters.elements::<f32>();
            let server = match ParameterServer::start(group, values, &options) {
                Ok(server) => server,
                Err(error) => return Ok(Err(error)),
            };
            let range = server.with_shard(|range, _, _| range);
            Ok(Ok((server, range.unwrap_or_default())))
        };
        let started = group.lock.with_group(py, start)?;
        let (server, range) = started.map_err(|error| errors::from_parameter_server(py, &error, &members))?;
        let messengers = server.messengers();
        let is_server = server.is_server();
        let in_job = |rank: &Rank| members.get(rank.index()).copied().unwrap_or(rank.get());
        Ok(Self {
            is_server,
            workers: server.workers().iter().map(in_job).collect(),
            state_names: rule.state_names().to_vec(),
            server: Closable::new("parameter server", server, messengers),
            range,
            len,
            is_synchronous: synchronous,
            members,
        })
    }

    /// The index of this server's first parameter, and the number of parameters on this server.
    #[getter]
    fn part(&self) -> (usize, usize) {
        (self.range.start, self.range.len())
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.server.is_closed()
    }

    fn pull(&self, py: Python<'_>, parameters: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut parameters = writable_f32(parameters, self.len)?;
        self.run_on_worker(py, |server| server.pull(parameters.elements_mut()))
    }

    fn push(&self, py: Python<'_>, gradient: &Bound<'_, PyAny>) -> PyResult<PushResult> {
        let gradient = readable_f32(gradient, self.len)?;
        let outcomes = self.run_on_worker(py, |server| server.push(gradient.elements()))?;
        Ok(combine_outcomes(&outcomes))
    }

    fn push_pull(
        &self,
        py: Python<'_>,
        gradient: &Bound<'_, PyAny>,
        parameters: &Bound<'_, PyAny>,
    ) -> PyResult<PushResult> {
        let (gradient, mut parameters) =
            (readable_f32(gradient, self.len)?, writable_f32(parameters, self.len)?);
        let outcomes = self.run_on_worker(py, |server| {
            let gradient = gradient.elements_without_overlap::<f32>(&parameters);
            server.push_pull(&gradient, parameters.elements_mut())
        })?;
        Ok(combine_outcomes(&outcomes))
    }

    fn set_learning_rate(&self, py: Python<'_>, rate: f32) -> PyResult<()> {
        self.run_on_worker(py, move |server| server.set_learning_rate(rate))
    }

    fn push_ranges(
        &self,
        py: Python<'_>,
        ranges: &Bound<'_, PyAny>,
        gradients: &Bound<'_, PyAny>,
    ) -> PyResult<PushResult> {
        let ranges = ranges_from_pairs(py, ranges, self.len)?;
        let gradients = readable_f32(gradients, ranges.iter().map(Range::len).sum())?;
        if self.is_synchronous {
            return Err(errors::unsupported(
                py,
                "a synchronous server needs the gradients of all parameters",
            ));
        }
        let outcomes = self.run_on_worker(py, |server| server.push_ranges(&ranges, gradients.elements()))?;
        Ok(combine_outcomes(&outcomes))
    }

    fn pull_ranges(
        &self,
        py: Python<'_>,
        ranges: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ranges = ranges_from_pairs(py, ranges, self.len)?;
        let mut values = writable_f32(values, ranges.iter().map(Range::len).sum())?;
        self.run_on_worker(py, |server| server.pull_ranges(&ranges, values.elements_mut()))
    }

    #[pyo3(signature = (timeout = None))]
    fn wait_for_workers(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = timeout.map(|seconds| duration_from_seconds(py, seconds)).transpose()?;
        let ended = wait_in_intervals(py, limit, |patience| {
            let have_ended = self.run_on_server(py, |server| server.wait_for_workers(Some(patience)))?;
            Ok(have_ended.then_some(()))
        })?;
        Ok(ended.is_some())
    }

    #[getter]
    fn lost_workers(&self, py: Python<'_>) -> PyResult<Vec<(u32, String)>> {
        let lost = self.run_on_server(py, ParameterServer::lost_workers)?;
        let in_job = |rank: Rank| self.members.get(rank.index()).copied().unwrap_or(rank.get());
        Ok(lost.into_iter().map(|(rank, problem)| (in_job(rank), problem)).collect())
    }

    #[getter]
    fn staleness(&self, py: Python<'_>) -> PyResult<(Vec<u64>, u64)> {
        self.run_on_server(py, ParameterServer::staleness_counts)
    }

    /// Copies this server's parameters and its optimizer's state vectors to the buffers. Returns the number of
    /// optimizer steps.
    fn read_state(
        &self,
        py: Python<'_>,
        parameters: &Bound<'_, PyAny>,
        state: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let mut parameters = writable_f32(parameters, self.range.len())?;
        let mut state = self.state_regions(py, state)?;
        let steps = self.run_on_server(py, |server| {
            server.with_shard(|_, values, optimizer| {
                parameters.elements_mut::<f32>().copy_from_slice(values);
                for (region, vector) in state.iter_mut().zip(&optimizer.state) {
                    region.elements_mut::<f32>().copy_from_slice(vector);
                }
                optimizer.steps
            })
        })?;
        Ok(steps.unwrap_or_default())
    }

    /// Copies the buffers to this server's parameters and to its optimizer's state vectors.
    fn write_state(
        &self,
        py: Python<'_>,
        parameters: &Bound<'_, PyAny>,
        state: Vec<Bound<'_, PyAny>>,
        steps: u64,
    ) -> PyResult<()> {
        let parameters = readable_f32(parameters, self.range.len())?;
        let state = self.state_regions(py, state)?;
        self.run_on_server(py, |server| {
            server.with_shard(|_, values, optimizer| {
                values.copy_from_slice(parameters.elements());
                for (region, vector) in state.iter().zip(&mut optimizer.state) {
                    vector.copy_from_slice(region.elements());
                }
                optimizer.steps = steps;
            })
        })?;
        Ok(())
    }

    fn abort(&self, py: Python<'_>, message: &str) -> PyResult<()> {
        self.server.abort(py, message)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.server.close(py)
    }
}

impl PyParameterServer {
    /// Returns the memory of the buffers for the optimizer's state vectors.
    fn state_regions(&self, py: Python<'_>, state: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Region>> {
        if state.len() != self.state_names.len() {
            let expected = self.state_names.len();
            return Err(errors::invalid(
                py,
                format!("there are {} vectors instead of {expected}", state.len()),
            ));
        }
        state.into_iter().map(|vector| writable_f32(&vector, self.range.len())).collect()
    }
}

/// Returns the range of each tensor in the vector of all parameters.
fn tensor_ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |&len: &usize| {
        end += len;
        end - len..end
    };
    lengths.iter().map(range).collect()
}
