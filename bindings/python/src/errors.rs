//! Converts the library's errors to Python exceptions, whose classes `ringtrain/_errors.py` defines.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use ringtrain::train::{GossipError, ParameterServerError};
use ringtrain::wire::Cause;
use ringtrain::{Error, NamedError, Rank, StartError};

const MODULE: &str = "ringtrain._errors";
const CLASS_NAMES: [&str; 14] = [
    "Error",
    "JobFailed",
    "PeerLost",
    "PeerLeft",
    "Mismatch",
    "Timeout",
    "Aborted",
    "Misbehaved",
    "StartError",
    "InvalidArgument",
    "Unsupported",
    "Truncated",
    "Forked",
    "StillRunning",
];

/// The exception classes, in the order of `CLASS_NAMES`. The classes are kept here, because an interpreter that is
/// ending can no longer import `MODULE`.
static CLASSES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

fn classes(py: Python<'_>) -> PyResult<&'static [Py<PyType>]> {
    let find = || {
        let errors = py.import(MODULE)?;
        let class = |name: &&str| Ok(errors.getattr(*name)?.cast_into::<PyType>()?.unbind());
        CLASS_NAMES.iter().map(class).collect::<PyResult<Vec<_>>>()
    };
    CLASSES.get_or_try_init(py, find).map(Vec::as_slice)
}

/// Adds the exception classes to the module.
pub(crate) fn add_classes(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let classes = classes(module.py())?;
    CLASS_NAMES.iter().zip(classes).try_for_each(|(&name, class)| module.add(name, class))
}

/// Advice in the library's messages that names options of `ringtrain`, and the advice that Python's exceptions give instead.
const ADVICE_IN_PYTHON: [(&str, &str); 5] = [
    ("raise --timeout", "raise the argument timeout of ringtrain.init or init_process_group"),
    ("the deadline (--timeout)", "the deadline (the argument timeout of ringtrain.init)"),
    (
        "the same --secret-file (or RING_SECRET)",
        "the same RING_SECRET, or the same argument secret of ringtrain.init",
    ),
    ("the same --secret-file", "the same RING_SECRET, or the same argument secret of ringtrain.init"),
    ("use --peers and --rank", "pass the arguments peers and rank to ringtrain.init"),
];

/// Makes an exception of the class `name`, which is one of `CLASS_NAMES`.
fn new_exception(py: Python<'_>, name: &str, message: String) -> PyErr {
    let replace = |message: String, (option, argument)| message.replace(option, argument);
    let message = ADVICE_IN_PYTHON.into_iter().fold(message, replace);
    let index = CLASS_NAMES.iter().position(|&known| known == name).unwrap_or_default();
    match classes(py) {
        Ok(classes) => PyErr::from_type(classes[index].bind(py).clone(), message),
        Err(error) => error,
    }
}

/// Sets an attribute of the exception and returns the exception.
fn with_attribute(py: Python<'_>, error: PyErr, name: &str, value: impl for<'py> IntoPyObject<'py>) -> PyErr {
    // If the attribute cannot be set, the exception is raised without the attribute.
    let _ = error.value(py).setattr(name, value);
    error
}

/// Makes the exception for a call in a process that was forked from a rank.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    let message = "this process was forked from a rank and is not a rank itself: communicate in the parent, or start processes with spawn";
    new_exception(py, "Forked", message.into())
}

pub(crate) fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    new_exception(py, "InvalidArgument", message.into())
}

pub(crate) fn unsupported(py: Python<'_>, message: impl Into<String>) -> PyErr {
    new_exception(py, "Unsupported", message.into())
}

/// Makes an exception of the base class `Error`.
pub(crate) fn base_error(py: Python<'_>, message: impl Into<String>) -> PyErr {
    new_exception(py, "Error", message.into())
}

/// Makes the exception that says that `rank` did not contribute to a collective of objects, and why.
pub(crate) fn no_contribution(py: Python<'_>, rank: u32, reason: &str) -> PyErr {
    let error = base_error(py, format!("rank {rank} did not contribute to this collective: {reason}"));
    with_attribute(py, error, "rank", rank)
}

pub(crate) fn still_running(py: Python<'_>, seconds: f64) -> PyErr {
    new_exception(py, "StillRunning", format!("the operation has not ended within {seconds} s; it goes on"))
}

/// Makes the exception for an error of the library.
pub(crate) fn from_error(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    let name = match error {
        Error::Failed { cause, reported_by } => {
            let failed = with_culprit(py, new_exception(py, class_name(cause), message), cause);
            return with_attribute(py, failed, "reported_by", reported_by.map(ringtrain::Rank::get));
        }
        Error::Truncated { status, .. } => {
            let raised = new_exception(py, "Truncated", message);
            let raised = with_attribute(
                py,
                with_attribute(py, raised, "source", status.source.get()),
                "tag",
                status.tag,
            );
            return with_attribute(py, raised, "count", status.count);
        }
        Error::Unsupported { .. } => "Unsupported",
        Error::NotContiguous
        | Error::InvalidRoot { .. }
        | Error::InvalidCounts(_)
        | Error::TooManyBuffers(_)
        | Error::InvalidPeer { .. }
        | Error::NothingSent
        | Error::Compression(_)
        | Error::InvalidTag => "InvalidArgument",
        _ => "Error",
    };
    new_exception(py, name, message)
}

fn class_name(cause: &Cause) -> &'static str {
    match cause {
        Cause::PeerLost { .. } => "PeerLost",
        Cause::PeerLeft { .. } => "PeerLeft",
        Cause::Mismatch { .. } => "Mismatch",
        Cause::Timeout { .. } => "Timeout",
        Cause::Aborted { .. } => "Aborted",
        Cause::Misbehaved { .. } => "Misbehaved",
        _ => "JobFailed",
    }
}

fn with_culprit(py: Python<'_>, error: PyErr, cause: &Cause) -> PyErr {
    match cause {
        Cause::PeerLost { rank, host, .. }
        | Cause::PeerLeft { rank, host }
        | Cause::Aborted { rank, host, .. }
        | Cause::Misbehaved { rank, host, .. } => {
            with_attribute(py, with_attribute(py, error, "rank", rank.get()), "host", host.as_str())
        }
        Cause::Mismatch { first, second, .. } => {
            with_attribute(py, error, "ranks", (first.get(), second.get()))
        }
        Cause::Timeout { waiting, .. } => {
            // A late rank does not wait itself, but other ranks wait for it. If there is exactly one late rank, the
            // exception names this rank.
            let awaited = waiting.iter().flat_map(|one| &one.awaited);
            let mut late: Vec<_> =
                awaited.filter(|(rank, _)| waiting.iter().all(|one| one.rank != *rank)).collect();
            late.sort();
            late.dedup();
            match late[..] {
                [(rank, host)] => {
                    with_attribute(py, with_attribute(py, error, "rank", rank.get()), "host", host.as_str())
                }
                _ => error,
            }
        }
        _ => error,
    }
}

/// The error of an operation that has ended.
#[derive(Clone)]
pub(crate) enum OperationError {
    Group(Error),
    /// The error of an operation on a named tensor. The text says which operation on which tensor failed.
    Named(NamedError, String),
}

impl From<Error> for OperationError {
    fn from(error: Error) -> Self {
        Self::Group(error)
    }
}

impl OperationError {
    pub(crate) fn into_python(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Group(error) => from_error(py, &error),
            Self::Named(error, operation) => {
                let raised = from_named(py, &error);
                // The other errors already name the tensor. If the note cannot be added, the exception is raised without it.
                if matches!(error, NamedError::Job(_)) {
                    let _ = raised.value(py).call_method1("add_note", (format!("in {operation}"),));
                }
                raised
            }
        }
    }
}

/// Makes the exception for an error of named tensors.
pub(crate) fn from_named(py: Python<'_>, error: &NamedError) -> PyErr {
    match error {
        NamedError::Job(error) => from_error(py, error),
        NamedError::InFlight(_) | NamedError::Limit { .. } | NamedError::Disagreement { .. } => {
            invalid(py, error.to_string())
        }
        _ => base_error(py, error.to_string()),
    }
}

/// Makes the exception for an error of a parameter server. Rank r of the parameter server's group is rank
/// `members[r]` of the job.
pub(crate) fn from_parameter_server(py: Python<'_>, error: &ParameterServerError, members: &[u32]) -> PyErr {
    let message = error.to_string();
    let lost = |rank: &Rank, message| {
        let in_job = members.get(rank.index()).copied().unwrap_or(rank.get());
        with_attribute(py, new_exception(py, "PeerLost", message), "rank", in_job)
    };
    match error {
        ParameterServerError::Group(error) => from_error(py, error),
        ParameterServerError::TooFewRanks { .. } => new_exception(py, "InvalidArgument", message),
        ParameterServerError::Unsupported(_) => new_exception(py, "Unsupported", message),
        ParameterServerError::Connect { .. } | ParameterServerError::Thread(_) => {
            new_exception(py, "StartError", message)
        }
        ParameterServerError::ServerLost { server: rank, .. }
        | ParameterServerError::WorkerLost { worker: rank, .. }
        | ParameterServerError::AllWorkersLost { worker: rank, .. } => lost(rank, message),
        _ => new_exception(py, "JobFailed", message),
    }
}

/// Makes the exception for an error of gossip averaging. Rank r of the gossip's group is rank `members[r]` of the job.
pub(crate) fn from_gossip(py: Python<'_>, error: &GossipError, members: &[u32]) -> PyErr {
    let message = error.to_string();
    let with_rank = |name, coordinator: &Rank, message| {
        let in_job = members.get(coordinator.index()).copied().unwrap_or(coordinator.get());
        with_attribute(py, new_exception(py, name, message), "rank", in_job)
    };
    match error {
        GossipError::Group(error) => from_error(py, error),
        GossipError::Connect { .. } | GossipError::Thread(_) => new_exception(py, "StartError", message),
        GossipError::CoordinatorLostAtEnd { coordinator, .. } => with_rank("PeerLost", coordinator, message),
        GossipError::CoordinatorFailed { coordinator, .. } => with_rank("JobFailed", coordinator, message),
        GossipError::Interrupted => base_error(py, message),
        _ => new_exception(py, "JobFailed", message),
    }
}

/// Makes the exception for a rank that could not join its job.
pub(crate) fn from_start_error(py: Python<'_>, error: &StartError) -> PyErr {
    let raised = new_exception(py, "StartError", error.to_string());
    match error {
        StartError::PeerLost { rank, host, .. } => {
            with_attribute(py, with_attribute(py, raised, "rank", rank.get()), "host", host.as_str())
        }
        _ => raised,
    }
}
