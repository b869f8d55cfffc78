//! The Python functions that join a job, and the Python class of a job's rendezvous server.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, Once};
use std::thread;
use std::time::SystemTime;

use humantime::format_rfc3339_seconds;
use pyo3::prelude::*;
use ringtrain::group::{Checksums, LocalTransport};
use ringtrain::observe::log_line::write_log_line;
use ringtrain::rendezvous::{LaunchedRank, NoticeReceiver, PeersFile, Server, ServerOptions};
use ringtrain::types::WorldSize;
use ringtrain::wire::Secret;
use ringtrain::{JoinMethod, JoinOptions, Rank, StartError};

use crate::group::PyGroup;
use crate::handle::duration_from_seconds;
use crate::signals::SIGNAL_CHECK_INTERVAL;
use crate::{calls, errors};

/// The rendezvous server of a job. A separate thread runs the server until all ranks have joined or this object is
/// dropped.
#[pyclass(frozen, module = "ringtrain._core")]
pub(crate) struct Rendezvous {
    server: Mutex<Option<Server>>,
    #[pyo3(get)]
    address: String,
}

#[pymethods]
impl Rendezvous {
    #[new]
    #[pyo3(signature = (size, secret, job_id, host = "127.0.0.1", start_timeout = 30.0))]
    fn new(
        py: Python<'_>,
        size: u32,
        secret: &str,
        job_id: &str,
        host: &str,
        start_timeout: f64,
    ) -> PyResult<Self> {
        let world = parse_world_size(py, size)?;
        let (secret, job_id) = (parse_secret(py, secret)?, parse_job_id(py, job_id)?);
        let host: IpAddr =
            host.parse().map_err(|_| errors::invalid(py, format!("`{host}` is not an IP address")))?;
        let timeout = duration_from_seconds(py, start_timeout)?;
        let notices = NoticeReceiver::LowestRank;
        let options =
            ServerOptions { host, ports: None, world, secret, job_id, start_timeout: timeout, notices };
        let server = py.detach(|| Server::start(options));
        let server = server.map_err(|error| errors::from_start_error(py, &error))?;
        Ok(Self { address: server.address().to_string(), server: Mutex::new(Some(server)) })
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        let server = self.server.get_mut().map_or(None, Option::take);
        if calls::is_forked() {
            std::mem::forget(server);
        } else {
            // `drop` waits for the server's thread. `detach` lets other Python threads run during this wait.
            Python::try_attach(|py| py.detach(move || drop(server)));
        }
    }
}

fn parse_world_size(py: Python<'_>, size: u32) -> PyResult<WorldSize> {
    WorldSize::new(size).ok_or_else(|| errors::invalid(py, format!("a job cannot have {size} ranks")))
}

fn parse_secret(py: Python<'_>, secret: &str) -> PyResult<Secret> {
    Secret::new(secret.as_bytes()).map_err(|error| errors::invalid(py, error.to_string()))
}

fn parse_job_id(py: Python<'_>, id: &str) -> PyResult<[u8; 16]> {
    let number = u128::from_str_radix(id, 16).ok().filter(|_| id.len() == 32);
    let number = number.ok_or_else(|| errors::invalid(py, "a job's id is 32 hexadecimal digits"))?;
    Ok(number.to_be_bytes())
}

/// Returns a group whose only rank is this process.
#[pyfunction]
pub(crate) fn solo(py: Python<'_>) -> PyResult<PyGroup> {
    calls::fail_if_forked(py)?;
    Ok(PyGroup::new(ringtrain::Group::solo()))
}

/// Joins a job. Without arguments, joins the job for which ringrun started this process. If ringrun did not start
/// this process, makes a job of one rank.
#[pyfunction]
#[pyo3(signature = (*, rank = None, size = None, rendezvous = None, job_id = None, secret = None, peers = None,
    start_timeout = None, timeout = None, algorithm = None, transport = None, congestion = None, streams = None,
    host_id = None, check_payloads = None))]
#[expect(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
pub(crate) fn join(
    py: Python<'_>,
    rank: Option<u32>,
    size: Option<u32>,
    rendezvous: Option<&str>,
    job_id: Option<&str>,
    secret: Option<&str>,
    peers: Option<&str>,
    start_timeout: Option<f64>,
    timeout: Option<f64>,
    algorithm: Option<&str>,
    transport: Option<&str>,
    congestion: Option<&str>,
    streams: Option<&str>,
    host_id: Option<String>,
    check_payloads: Option<bool>,
) -> PyResult<PyGroup> {
    calls::fail_if_forked(py)?;
    let mut options = join_options(py, rendezvous, peers, rank, (size, job_id))?;
    if let Some(secret) = secret {
        options.secret = parse_secret(py, secret)?;
    }
    if let Some(seconds) = start_timeout {
        options.start_timeout = duration_from_seconds(py, seconds)?;
    }
    if let Some(seconds) = timeout {
        options.operation_timeout = duration_from_seconds(py, seconds)?;
    }
    if let Some(text) = algorithm {
        options.algorithms = text.parse().map_err(|error: String| errors::invalid(py, error))?;
    }
    if let Some(text) = congestion {
        options.congestion = text.parse().map_err(|error: String| errors::invalid(py, error))?;
    }
    if let Some(text) = streams {
        options.streams = text.parse().map_err(|error: String| errors::invalid(py, error))?;
    }
    options.transport = match transport {
        None | Some("auto") => LocalTransport::Auto,
        Some("tcp") => LocalTransport::Tcp,
        Some("shm") => LocalTransport::Shm,
        Some(other) => return Err(errors::invalid(py, format!("`{other}` is not one of auto, tcp, shm"))),
    };
    options.host_id = host_id;
    options.checksums = match check_payloads {
        None => Checksums::Auto,
        Some(true) => Checksums::On,
        Some(false) => Checksums::Off,
    };
    options.interrupt = Some(calls::is_interrupted);
    log_to_stderr();
    join_in_thread(py, options)
}

/// Writes the library's warnings to standard error, as the program `ringtrain` does. Python's `logging` would cause
/// deadlocks: a thread that logs while it holds a lock L would wait for the interpreter's lock, and the thread that
/// holds the interpreter's lock may wait for L.
fn log_to_stderr() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let environment = env_logger::Env::default().default_filter_or("warn");
        // Another extension module may have set a logger for this process.
        let _ = env_logger::Builder::from_env(environment)
            .format(|out, record| {
                let style = out.default_level_style(record.level());
                write_log_line(out, record, format_rfc3339_seconds(SystemTime::now()), style)
            })
            .try_init();
    });
}

/// Joins the job in a separate thread, so that Python can run signal handlers while this function waits. If a signal
/// handler raises an exception, this function returns the exception at once. The separate thread continues until the
/// start timeout.
fn join_in_thread(py: Python<'_>, options: JoinOptions) -> PyResult<PyGroup> {
    let (sender, receiver) = mpsc::channel();
    let join = move || {
        // Sending fails if the caller was interrupted and has dropped the receiver.
        let _ = sender.send(ringtrain::Group::join(&options));
    };
    let thread = thread::Builder::new().name("join".into()).spawn(join);
    thread.map_err(|error| errors::base_error(py, format!("cannot start a thread: {error}")))?;
    let receiver = Mutex::new(receiver);
    loop {
        let joined = py.detach(|| {
            let receiver = receiver.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            receiver.recv_timeout(SIGNAL_CHECK_INTERVAL)
        });
        match joined {
            Ok(Ok(group)) => return Ok(PyGroup::new(group)),
            Ok(Err(error)) => return Err(errors::from_start_error(py, &error)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(errors::base_error(py, "joining the job panicked, which is a bug"));
            }
        }
    }
}

/// Converts the arguments of `join` to the options that say how this rank finds the other ranks.
fn join_options(
    py: Python<'_>,
    rendezvous: Option<&str>,
    peers: Option<&str>,
    rank: Option<u32>,
    (size, job_id): (Option<u32>, Option<&str>),
) -> PyResult<JoinOptions> {
    let to_exception = |error: StartError| errors::from_start_error(py, &error);
    let recording = JoinOptions::recording_from_environment();
    match (rendezvous, peers) {
        (Some(address), None) => {
            let (Some(rank), Some(size), Some(id)) = (rank, size, job_id) else {
                return Err(errors::invalid(py, "a rendezvous also needs rank, size and job_id"));
            };
            let address: SocketAddr =
                address.parse().map_err(|_| errors::invalid(py, format!("`{address}` is not ip:port")))?;
            let (world, rank) = (parse_world_size(py, size)?, Rank::new(rank));
            if !world.contains(rank) {
                return Err(to_exception(StartError::RankOutOfRange { rank, world }));
            }
            let job_id = parse_job_id(py, id)?;
            let method = JoinMethod::Launched(LaunchedRank {
                listen: None,
                rank,
                world,
                rendezvous: address,
                job_id,
                start_timeout: None,
                local_processors: None,
            });
            Ok(JoinOptions { method, recording, ..JoinOptions::default() })
        }
        (None, Some(path)) => {
            let Some(rank) = rank else {
                return Err(errors::invalid(py, "a file of peers also needs this process's rank"));
            };
            let file = PeersFile::read(Path::new(path)).map_err(|error| to_exception(error.into()))?;
            let method = JoinMethod::Peers { file, rank: Rank::new(rank), bind: None };
            Ok(JoinOptions { method, recording, ..JoinOptions::default() })
        }
        (None, None) if rank.is_none() && size.is_none() && job_id.is_none() => {
            JoinOptions::from_environment().map_err(to_exception)
        }
        (None, None) => {
            Err(errors::invalid(py, "rank, size and job_id need a rendezvous or a file of peers"))
        }
        (Some(_), Some(_)) => {
            Err(errors::invalid(py, "pass either a rendezvous or a file of peers, not both"))
        }
    }
}
