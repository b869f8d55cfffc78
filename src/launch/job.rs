//! The event loop of ringrun. The loop tells the [supervisor](super::supervisor) when a rank ends, when the output is
//! closed, when a signal arrives and when time passes. The supervisor decides which signals to send to the ranks, and
//! the loop sends these signals.
//!
//! The loop waits for all events in a single poll, at most until the supervisor's next deadline.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token, Waker};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use socket2::{Domain, Socket, Type};

use super::binding::BindingPlan;
use super::claims::ClaimRegistry;
use super::command::LaunchedProgram;
use super::environment::{JobVariables, rank_environment};
use super::mpi4py::{self, SearchPaths};
use super::outcome::{EPIPE, JobOutcome, RankStatus, exit_code, failure_report, format_seconds};
use super::output::{Output, OutputEvent, OutputSummary, stdout_incomplete_message};
use super::output_files::OutputFiles;
use super::rank_processes::RankProcesses;
use super::root_cause::{blame_reported_rank, find_report};
use super::signals::Signals;
use super::status_line::{self, STATUS_COLUMNS_VARIABLE};
use super::supervisor::{Supervisor, SupervisorAction};
use super::terminal_writer::progress_bar_columns;
use super::topology::{self, Processor};
use super::watchdog::Watchdog;
use super::{Binding, LaunchError, LaunchPlan, StdinReader, Verbosity, shim};
use crate::exit::Exit;
use crate::rendezvous::{NoticeReceiver, Server, ServerOptions};
use crate::types::Rank;
use crate::wire::Secret;

const WAKE_TOKEN: Token = Token(0);
const FIRST_SIGNAL_TOKEN: usize = 1;

/// How long ringrun tries to kill processes that the ranks have left behind.
const LEFTOVER_PROCESSES_TIMEOUT: Duration = Duration::from_secs(2);

/// The number of open files that each rank needs: two pipes for its output and one for its exit record, a socket to its
/// [`shim`], and two files of `--output-dir`.
const OPEN_FILES_PER_RANK: u64 = 6;

/// The number of open files that ringrun needs for itself: in addition to [`OPEN_FILES_PER_RANK`] files for each rank,
/// and one file for each claimed processor.
const RINGRUN_OPEN_FILES: u64 = 64;

/// Runs the job and returns the exit code of ringrun.
pub(super) fn run_job(plan: &LaunchPlan) -> Result<u8, LaunchError> {
    let directory = working_directory(plan)?;
    let mut variables = user_variables(plan)?;
    let path = variables.get(&OsString::from("PATH")).cloned().or_else(|| env::var_os("PATH"));
    let program = LaunchedProgram::find(&plan.program, path.as_deref(), &directory)?;
    let python_path = env::var_os("PYTHONPATH");
    let search_paths =
        SearchPaths { directory: &directory, path: path.as_deref(), python_path: python_path.as_deref() };
    let _mpi4py_guard = mpi4py::extend_python_path(plan, search_paths, &mut variables)?;
    raise_file_limit(plan)?;
    let files = match &plan.output_dir {
        Some(output_dir) => OutputFiles::create(output_dir, plan.world)
            .map_err(|(path, source)| LaunchError::OutputDir { path, source })?,
        None => OutputFiles::default(),
    };
    let mut job = RunningJob::prepare(plan, files)?;
    let (bindings, _claims) = assign_processors(plan, &job.output);
    let secret = format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
    let server = start_rendezvous_server(plan, &secret, &job)?;
    let master_port =
        ReservedPort::new().map_err(|source| LaunchError::System { resource: "a free port", source })?;
    let job_variables = JobVariables {
        world: plan.world,
        rendezvous: server.address(),
        master_port: master_port.port,
        secret,
        job_id: job.job_id.clone(),
        start_timeout: plan.limits.start_timeout,
        exclusive_processors: bindings.exclusive_processors,
        omp_threads: (plan.world.get() > 1 && env::var_os("OMP_NUM_THREADS").is_none())
            .then_some(bindings.omp_threads),
        // With --output-dir, rank 0 shows no progress bar, because the bar would fill its output file.
        status_columns: status_line::terminal_columns()
            .filter(|_| plan.output_dir.is_none())
            .map(|columns| progress_bar_columns(columns, plan.output_format)),
    };
    job.print_job_and_time_limits(&server.address());
    let stdin = io::stdin();
    for rank in plan.world.ranks() {
        let processors = bindings.processors.get(rank.index()).map_or(&[][..], Vec::as_slice);
        if plan.report_bindings {
            job.output.print_message(&format!("rank {rank} {}", describe_binding(processors)));
        }
        let mut command = shim::shim_command(&program, &plan.arguments, processors);
        // If ringrun itself runs as rank 0 of another ringrun job, it has inherited this variable.
        command.env_remove(STATUS_COLUMNS_VARIABLE);
        command.current_dir(&directory).envs(rank_environment(rank, &job_variables)).envs(&variables);
        let stdin = Some(stdin.as_fd()).filter(|stdin| reads_stdin(rank, plan.stdin_reader, stdin));
        let started = job.rank_processes.start_rank(command, stdin);
        let streams = started.map_err(|source| LaunchError::Spawn { rank, world: plan.world, source })?;
        job.output.add_streams(rank, streams);
    }
    let supervisor = Supervisor::new(plan.limits, plan.failure_policy, &job.rank_processes.pids());
    let (outcome, rank_statuses) = job.run_event_loop(supervisor, &server)?;
    job.kill_leftover_processes()?;
    let Some(OutputSummary { last_lines, write_failures }) = job.wait_for_output()? else {
        return Ok(exit_code(outcome, &rank_statuses));
    };
    let exit_records = job.rank_processes.read_exit_records();
    let outcome = blame_reported_rank(outcome, &rank_statuses, &exit_records);
    let report = find_report(outcome, &exit_records);
    let mut text = failure_report(outcome, &rank_statuses, (&last_lines, report));
    // Repeat the sentences about failed writes at the end, because the first copies may have scrolled away.
    text.extend(write_failures.iter().map(|sentence| format!("ringrun: {sentence}\n")));
    // Ignore the failure of this write: standard error may be closed.
    let _ = io::stderr().write_all(text.as_bytes());
    let code = exit_code(outcome, &rank_statuses);
    Ok(if code == 0 && !write_failures.is_empty() { Exit::Failure as u8 } else { code })
}

/// Returns whether `rank` reads the standard input of ringrun. If a rank read a terminal, the kernel would stop the rank
/// with SIGTTIN, because the process group of the rank is not the foreground process group of the terminal.
fn reads_stdin(rank: Rank, reader: StdinReader, stdin: &impl IsTerminal) -> bool {
    rank == Rank::ZERO && reader == StdinReader::RankZero && !stdin.is_terminal()
}

/// Assigns processors to the ranks, and claims these processors until the returned sockets are dropped. If the system
/// does not let ringrun bind ranks, prints a warning and leaves the ranks unbound.
fn assign_processors(plan: &LaunchPlan, output: &Output) -> (BindingPlan, Vec<UnixDatagram>) {
    let mut binding = plan.binding;
    if binding != Binding::None
        && let Err(error) = topology::check_binding_is_allowed()
    {
        output.print_message(&format!(
            "this system does not let ringrun bind ranks to processors; ringrun continues as with --bind-to none: {error}"
        ));
        binding = Binding::None;
    }
    let cores = topology::usable_cores();
    let registry = ClaimRegistry::lock_for_machine();
    let bindings =
        BindingPlan::new(binding, plan.world, &cores, &registry.count_jobs(&cores), usable_processors());
    let claims =
        bindings.claimed_cores.iter().filter_map(|&core| registry.claim_core(&cores[core])).collect();
    (bindings, claims)
}

/// Returns how many processors this process may keep busy. A container may have a CPU limit that is lower than the
/// number of its processors.
fn usable_processors() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

/// Describes the processors of a rank, for example `is bound to processors 0-3`.
fn describe_binding(processors: &[Processor]) -> String {
    if processors.is_empty() {
        return "is not bound".to_owned();
    }
    let plural = if processors.len() > 1 { "s" } else { "" };
    format!("is bound to processor{plural} {}", topology::format_processor_list(processors))
}

/// Starts the rendezvous server of the job. While ranks are missing, the server prints their numbers.
fn start_rendezvous_server(
    plan: &LaunchPlan,
    secret: &str,
    job: &RunningJob<'_>,
) -> Result<Server, LaunchError> {
    let secret = Secret::new(secret.as_bytes()).map_err(|error| LaunchError::Rendezvous(error.into()))?;
    let job_id =
        u128::from_str_radix(&job.job_id, 16).expect("an id that this program has just made").to_be_bytes();
    let output = job.output.command_sender();
    Server::start(ServerOptions {
        host: Ipv4Addr::LOCALHOST.into(),
        world: plan.world,
        secret,
        job_id,
        start_timeout: plan.limits.start_timeout,
        notices: NoticeReceiver::Report(Box::new(move |notice| output.print_message(notice))),
    })
    .map_err(LaunchError::Rendezvous)
}

/// A running job.
struct RunningJob<'a> {
    plan: &'a LaunchPlan,
    job_id: String,
    start_time: Instant,
    poll: Poll,
    signals: Signals,
    /// The waker with which the output thread wakes the poll. The job also owns the waker: a wake-up would be lost if
    /// the output thread were the only owner, and dropped the waker before the poll returns.
    _waker: Arc<Waker>,
    output: Output,
    rank_processes: RankProcesses,
    has_warned_of_lost_watchdog: bool,
}

impl<'a> RunningJob<'a> {
    /// Prepares the job without starting ranks. Installs the signal handlers first, so that no signal ends ringrun
    /// without stopping the job.
    fn prepare(plan: &'a LaunchPlan, files: OutputFiles) -> Result<Self, LaunchError> {
        let system_error = |resource| move |source| LaunchError::System { resource, source };
        let poll = Poll::new().map_err(system_error("an event queue"))?;
        let signals = Signals::register(poll.registry(), FIRST_SIGNAL_TOKEN)
            .map_err(system_error("the signal handlers"))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE_TOKEN).map_err(system_error("an eventfd"))?);
        let job_id = to_hex(&rand::random::<[u8; 16]>());
        let rank_processes =
            RankProcesses::new(Watchdog::start(&job_id).map_err(system_error("the watchdog process"))?);
        let output = Output::start(plan.world, plan.output_format, files, Arc::clone(&waker))
            .map_err(system_error("the output thread"))?;
        Ok(Self {
            plan,
            job_id,
            start_time: Instant::now(),
            poll,
            signals,
            _waker: waker,
            output,
            rank_processes,
            has_warned_of_lost_watchdog: false,
        })
    }

    /// Runs the event loop until every rank has ended, or some ranks did not end after SIGKILL.
    fn run_event_loop(
        &mut self,
        mut supervisor: Supervisor,
        server: &Server,
    ) -> Result<(JobOutcome, Vec<RankStatus>), LaunchError> {
        while !supervisor.is_over() {
            let timeout = supervisor.deadline().map(|until| until.saturating_sub(self.start_time.elapsed()));
            for signal in self.wait_for_events(timeout)? {
                match signal {
                    SIGCHLD => {}
                    // Ctrl-Z stops the ranks and then ringrun. After SIGCONT, ringrun continues the ranks.
                    SIGTSTP => {
                        self.rank_processes.send_signal(SIGTSTP);
                        let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
                    }
                    other => supervisor.handle_signal(other, self.start_time.elapsed()),
                }
            }
            let ended_ranks = self.rank_processes.reap_ended_ranks();
            // Call `has_job_started` after `reap_ended_ranks`: if a rank in `ended_ranks` ended after the start of the
            // job, the supervisor must first record the start.
            if server.has_job_started() {
                supervisor.handle_job_start();
            }
            let now = self.start_time.elapsed();
            supervisor.handle_rank_ends(&ended_ranks, now);
            // Tell the server that these ranks can no longer join the job, even if they ended without an error.
            for (rank, ended) in &ended_ranks {
                server.rank_ended(*rank, format!("it {ended}"));
            }
            if self.plan.verbosity == Verbosity::Verbose {
                for (rank, ended) in ended_ranks {
                    self.output.print_message(&format!("rank {rank} {ended} after {}", format_seconds(now)));
                }
            }
            if let Ok(OutputEvent::StdoutFailed(errno)) = self.output.next_event() {
                supervisor.handle_stdout_failure(errno, now);
            }
            supervisor.tick(now);
            self.perform_actions(&mut supervisor);
            self.warn_of_lost_watchdog();
        }
        Ok(supervisor.into_result())
    }

    fn perform_actions(&self, supervisor: &mut Supervisor) {
        while let Some(action) = supervisor.poll_action() {
            match action {
                SupervisorAction::Signal(signal) => self.rank_processes.send_signal(signal),
                SupervisorAction::PrintMessage(text) => self.output.print_message(&text),
            }
        }
    }

    /// Kills processes that the ranks have left behind, until none is left or [`LEFTOVER_PROCESSES_TIMEOUT`] is over.
    fn kill_leftover_processes(&mut self) -> Result<(), LaunchError> {
        let deadline = Instant::now() + LEFTOVER_PROCESSES_TIMEOUT;
        loop {
            // A process that ends after this call of `reap_ended_ranks` causes another SIGCHLD, which ends the wait
            // below.
            self.rank_processes.reap_ended_ranks();
            if self.rank_processes.kill_leftover_processes() == 0 {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.output.print_message("some processes that the ranks left behind cannot be killed");
                break;
            }
            self.wait_for_events(Some(left))?;
        }
        Ok(())
    }

    /// Waits until all output is written. Returns `None` if a signal ends the wait. This wait has no deadline,
    /// because a pager may read slowly.
    fn wait_for_output(&mut self) -> Result<Option<OutputSummary>, LaunchError> {
        self.output.drain_pipes();
        let mut stdout_errno = None;
        loop {
            match self.output.next_event() {
                Ok(OutputEvent::Drained(mut summary)) => {
                    summary.write_failures.extend(stdout_errno.map(stdout_incomplete_message));
                    return Ok(Some(summary));
                }
                // After all ranks have ended, it is no error if the program that reads ringrun's output closes the
                // pipe.
                Ok(OutputEvent::StdoutFailed(EPIPE)) => continue,
                Ok(OutputEvent::StdoutFailed(errno)) => {
                    stdout_errno = Some(errno);
                    continue;
                }
                Err(TryRecvError::Disconnected) => return Ok(Some(OutputSummary::default())),
                Err(TryRecvError::Empty) => {}
            }
            let signals = self.wait_for_events(None)?;
            if signals.iter().any(|signal| [SIGINT, SIGTERM, SIGHUP, SIGQUIT].contains(signal)) {
                return Ok(None);
            }
        }
    }

    /// Waits for events and returns the signals among them.
    fn wait_for_events(&mut self, timeout: Option<Duration>) -> Result<Vec<i32>, LaunchError> {
        let mut events = Events::with_capacity(64);
        match self.poll.poll(&mut events, timeout) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(LaunchError::System { resource: "a wait for events", source: error })
            }
            _ => Ok(events.iter().filter_map(|event| self.signals.take_signal(event.token())).collect()),
        }
    }

    /// After the watchdog was killed, prints a warning once.
    fn warn_of_lost_watchdog(&mut self) {
        if self.rank_processes.watchdog_ended() && !self.has_warned_of_lost_watchdog {
            self.has_warned_of_lost_watchdog = true;
            self.output
                .print_message("the watchdog process was killed; if ringrun is killed too, processes of its ranks may survive");
        }
    }

    /// With `--verbose`, prints the job's id, its number of ranks and its time limits.
    fn print_job_and_time_limits(&self, rendezvous: &SocketAddr) {
        if self.plan.verbosity == Verbosity::Verbose {
            let limits = &self.plan.limits;
            let job = limits.job_timeout.map_or_else(|| "none".to_owned(), format_seconds);
            self.output.print_message(&format!(
                "job {} of {} ranks, rendezvous at {rendezvous}",
                self.job_id, self.plan.world
            ));
            self.output.print_message(&format!(
                "time limits: start {}; whole job {job}; from a failure to SIGTERM {}; from SIGTERM to SIGKILL {}, or {} if \
                 ringrun itself got SIGTERM",
                format_seconds(limits.start_timeout),
                format_seconds(limits.grace),
                format_seconds(limits.kill_after),
                format_seconds(limits.term_timeout)
            ));
        }
    }
}

/// A free port for `MASTER_PORT`, on which a rank can listen.
///
/// A socket that is bound to the port but does not listen reserves the port: the kernel does not give this port to
/// programs that ask for any free port. A rank can still bind its listener to the port, if the listener sets
/// `SO_REUSEADDR`, as the listener of `PyTorch` does.
struct ReservedPort {
    port: u16,
    _socket: Socket,
}

impl ReservedPort {
    fn new() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())?;
        let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
        Ok(Self { port, _socket: socket })
    }
}

/// Returns the absolute path of the working directory of the ranks.
fn working_directory(plan: &LaunchPlan) -> Result<PathBuf, LaunchError> {
    let chosen = plan.directory.as_deref().unwrap_or(Path::new("."));
    let directory_error = |source| LaunchError::Directory { path: chosen.to_owned(), source };
    let absolute = chosen.canonicalize().map_err(directory_error)?;
    if !absolute.is_dir() {
        return Err(directory_error(io::ErrorKind::NotADirectory.into()));
    }
    Ok(absolute)
}

/// Returns the variables of `-x`. A variable without a value gets its value from ringrun's own environment.
fn user_variables(plan: &LaunchPlan) -> Result<BTreeMap<OsString, OsString>, LaunchError> {
    let mut found = BTreeMap::new();
    for (name, value) in &plan.variables {
        let value = value.clone().or_else(|| env::var_os(name));
        let value = value.ok_or_else(|| LaunchError::VariableUnset { name: name.clone() })?;
        found.insert(name.clone(), value);
    }
    Ok(found)
}

/// Raises the soft limit on open files if the limit is lower than the number of files that the job needs. The ranks
/// inherit the new limit.
fn raise_file_limit(plan: &LaunchPlan) -> Result<(), LaunchError> {
    let needed =
        u64::from(plan.world.get()) * OPEN_FILES_PER_RANK + RINGRUN_OPEN_FILES + usable_processors() as u64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if maximum.is_some_and(|maximum| maximum < needed)
        || setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum }).is_err()
    {
        return Err(LaunchError::TooManyFiles {
            world: plan.world,
            needed,
            allowed: maximum.unwrap_or(u64::MAX),
        });
    }
    Ok(())
}

fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
