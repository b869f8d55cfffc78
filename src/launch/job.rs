//! The one loop of ringrun: joins the ranks' processes, their output, the signals and the clock to the supervisor.
//!
//! It waits in a poll that knows of everything that can happen, at most until the supervisor's next deadline.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZero;
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
use super::blame::trace;
use super::claims::ClaimRegistry;
use super::command::Program;
use super::environment::{JobVariables, environment};
use super::mpi4py::{self, Surroundings};
use super::outcome::{EPIPE, JobOutcome, RankStatus, exit_code, report, seconds};
use super::output::{Output, OutputEvent, OutputFiles, OutputSummary, stdout_is_incomplete};
use super::rank_processes::RankProcesses;
use super::signals::Signals;
use super::supervisor::{Supervisor, SupervisorAction};
use super::topology::{self, Processor};
use super::watchdog::Watchdog;
use super::{LaunchError, LaunchPlan, Verbosity, shim};
use crate::exit::Exit;
use crate::rendezvous::Server;
use crate::wire::Secret;

const WAKE: Token = Token(0);
const SIGNALS: usize = 1;

/// How long leftovers of the ranks are hunted after the ranks have ended.
const SWEEP_TIME: Duration = Duration::from_secs(2);

/// Open files per rank: its two pipes, the socket to its shim and its two files of `--output-dir`.
const FILES_PER_RANK: u64 = 5;

/// Open files besides: the programs', and what a start needs for a moment. The job's claims on processors come on top.
const FILES_BESIDES: u64 = 64;

/// Runs the job and returns what ringrun exits with.
pub(super) fn run(plan: &LaunchPlan) -> Result<u8, LaunchError> {
    let directory = working_directory(plan)?;
    let mut extra = extra_variables(plan)?;
    let path = extra.get(&OsString::from("PATH")).cloned().or_else(|| env::var_os("PATH"));
    let program = Program::find(&plan.program, path.as_deref(), &directory)?;
    let python_path = env::var_os("PYTHONPATH");
    let around =
        Surroundings { directory: &directory, path: path.as_deref(), python_path: python_path.as_deref() };
    let _guard = mpi4py::put_first(plan, around, &mut extra)?;
    allow_files(plan)?;
    let files = match &plan.output_dir {
        Some(place) => OutputFiles::create(place, plan.world)
            .map_err(|(path, source)| LaunchError::OutputDir { path, source })?,
        None => OutputFiles::default(),
    };
    let mut job = RunningJob::open(plan, files)?;
    let (bindings, _claims) = bind(plan);
    let secret = format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
    let server = serve_rendezvous(plan, &secret, &job.id)?;
    let master_port =
        ReservedPort::new().map_err(|source| LaunchError::System { what: "a free port", source })?;
    let common = JobVariables {
        world: plan.world,
        rendezvous: server.address(),
        master_port: master_port.number,
        secret,
        job_id: job.id.clone(),
        start_timeout: plan.limits.start_timeout,
        processors: bindings.exclusive_processors,
        threads: (plan.world.get() > 1 && env::var_os("OMP_NUM_THREADS").is_none())
            .then_some(bindings.threads),
    };
    job.say_limits(&server.address());
    for rank in plan.world.ranks() {
        let processors = bindings.processors.get(rank.index()).map_or(&[][..], Vec::as_slice);
        if plan.report_bindings {
            let place = if processors.is_empty() { "is not bound".to_owned() } else { bound_to(processors) };
            job.output.note(&format!("rank {rank} {place}"));
        }
        let mut command = shim::command(&program, &plan.arguments, processors);
        command.current_dir(&directory).envs(environment(rank, &common)).envs(&extra);
        let started = job.ranks.start(command);
        let streams = started.map_err(|source| LaunchError::Spawn { rank, world: plan.world, source })?;
        job.output.read(rank, streams);
    }
    let (outcome, members) = job.watch(Supervisor::new(plan.limits, &job.ranks.pids()), &server)?;
    job.sweep()?;
    let Some(OutputSummary { tails, incomplete }) = job.drain()? else {
        return Ok(exit_code(outcome, &members));
    };
    let outcome = trace(outcome, &members, &tails);
    let mut text = report(outcome, &members, &tails);
    // Told when it happened, but that may be pages ago.
    text.extend(incomplete.iter().map(|sentence| format!("ringrun: {sentence}\n")));
    // A closed standard error is no failure.
    let _ = io::stderr().write_all(text.as_bytes());
    let code = exit_code(outcome, &members);
    Ok(if code == 0 && !incomplete.is_empty() { Exit::Failure as u8 } else { code })
}

/// The processors of each rank, and the job's claims on them.
fn bind(plan: &LaunchPlan) -> (BindingPlan, Vec<UnixDatagram>) {
    let cores = topology::cores();
    let registry = ClaimRegistry::open();
    let bindings =
        BindingPlan::new(plan.binding, plan.world, &cores, &registry.jobs(&cores), usable_processors());
    let claims = bindings.claimed.iter().filter_map(|&core| registry.claim(&cores[core])).collect();
    (bindings, claims)
}

/// How many processors this process may keep busy: a container may limit it below the number of its processors.
fn usable_processors() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

fn bound_to(processors: &[Processor]) -> String {
    let plural = if processors.len() > 1 { "s" } else { "" };
    format!("is bound to processor{plural} {}", topology::list(processors))
}

/// Serves the rendezvous of the job to which this secret and this id, in hexadecimal, belong.
fn serve_rendezvous(plan: &LaunchPlan, secret: &str, id: &str) -> Result<Server, LaunchError> {
    let secret = Secret::new(secret.as_bytes()).map_err(|error| LaunchError::Rendezvous(error.into()))?;
    let id = u128::from_str_radix(id, 16).expect("an id that this program has just made").to_be_bytes();
    Server::start(Ipv4Addr::LOCALHOST.into(), plan.world, secret, id, plan.limits.start_timeout)
        .map_err(LaunchError::Rendezvous)
}

/// What a running job consists of.
struct RunningJob<'a> {
    plan: &'a LaunchPlan,
    id: String,
    begin: Instant,
    poll: Poll,
    signals: Signals,
    /// Held although the output wakes us by it: with its last owner it would leave the poll, and a wake-up that was not
    /// yet seen would be lost.
    _waker: Arc<Waker>,
    output: Output,
    ranks: RankProcesses,
    warned: bool,
}

impl<'a> RunningJob<'a> {
    /// Everything but the ranks. Signals come first: from here on none kills us unawares.
    fn open(plan: &'a LaunchPlan, files: OutputFiles) -> Result<Self, LaunchError> {
        let system = |what| move |source| LaunchError::System { what, source };
        let poll = Poll::new().map_err(system("a poll"))?;
        let signals = Signals::register(poll.registry(), SIGNALS).map_err(system("the signal handlers"))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE).map_err(system("a waker"))?);
        let id = hex(&rand::random::<[u8; 16]>());
        let ranks = RankProcesses::new(Watchdog::start(&id).map_err(system("the watchdog process"))?);
        let output = Output::start(plan.world, plan.output_format, files, Arc::clone(&waker))
            .map_err(system("the output thread"))?;
        Ok(Self {
            plan,
            id,
            begin: Instant::now(),
            poll,
            signals,
            _waker: waker,
            output,
            ranks,
            warned: false,
        })
    }

    /// Until every rank has ended, or cannot be made to.
    fn watch(
        &mut self,
        mut supervisor: Supervisor,
        server: &Server,
    ) -> Result<(JobOutcome, Vec<RankStatus>), LaunchError> {
        while !supervisor.is_over() {
            let timeout = supervisor.deadline().map(|until| until.saturating_sub(self.begin.elapsed()));
            for signal in self.wait(timeout)? {
                match signal {
                    SIGCHLD => {}
                    // Ctrl-Z: the ranks first, then we; SIGCONT wakes us, and we them.
                    SIGTSTP => {
                        self.ranks.signal(SIGTSTP);
                        let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
                    }
                    other => supervisor.signalled(other, self.begin.elapsed()),
                }
            }
            let batch = self.ranks.reap();
            let now = self.begin.elapsed();
            supervisor.ended(&batch, now);
            for (rank, ended) in batch.iter().filter(|(_, ended)| !ended.is_success()) {
                server.rank_ended(*rank, format!("it {ended}"));
            }
            if self.plan.verbosity == Verbosity::Verbose {
                for (rank, ended) in batch {
                    self.output.note(&format!("rank {rank} {ended} after {}", seconds(now)));
                }
            }
            if let Ok(OutputEvent::Closed(errno)) = self.output.event() {
                supervisor.output_closed(errno, now);
            }
            supervisor.tick(now);
            self.act(&mut supervisor);
            self.warn_of_lost_watchdog();
        }
        Ok(supervisor.into_result())
    }

    fn act(&self, supervisor: &mut Supervisor) {
        while let Some(action) = supervisor.poll_action() {
            match action {
                SupervisorAction::Signal(signal) => self.ranks.signal(signal),
                SupervisorAction::Note(text) => self.output.note(&text),
            }
        }
    }

    /// Kills what the ranks have left behind, until there is nothing or the time is over.
    fn sweep(&mut self) -> Result<(), LaunchError> {
        let until = Instant::now() + SWEEP_TIME;
        loop {
            // What ends after this has its SIGCHLD still to come.
            self.ranks.reap();
            if self.ranks.kill_leftovers() == 0 {
                break;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.output.note("some processes that the ranks left behind cannot be killed");
                break;
            }
            self.wait(Some(left))?;
        }
        Ok(())
    }

    /// What remains once everything is written; `None` if a signal said not to wait for that. A pager may read
    /// as slowly as its user likes, so this is the one wait without a deadline.
    fn drain(&mut self) -> Result<Option<OutputSummary>, LaunchError> {
        self.output.finish();
        let mut lost = None;
        loop {
            match self.output.event() {
                Ok(OutputEvent::Drained(mut remains)) => {
                    remains.incomplete.extend(lost.map(stdout_is_incomplete));
                    return Ok(Some(remains));
                }
                // A reader that leaves once the ranks have ended has seen what it wanted.
                Ok(OutputEvent::Closed(EPIPE)) => continue,
                Ok(OutputEvent::Closed(errno)) => {
                    lost = Some(errno);
                    continue;
                }
                Err(TryRecvError::Disconnected) => return Ok(Some(OutputSummary::default())),
                Err(TryRecvError::Empty) => {}
            }
            let signals = self.wait(None)?;
            if signals.iter().any(|signal| [SIGINT, SIGTERM, SIGHUP, SIGQUIT].contains(signal)) {
                return Ok(None);
            }
        }
    }

    /// Waits until something happens, and returns the signals that came.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<Vec<i32>, LaunchError> {
        let mut events = Events::with_capacity(64);
        match self.poll.poll(&mut events, timeout) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(LaunchError::System { what: "a poll", source: error })
            }
            _ => Ok(events.iter().filter_map(|event| self.signals.take(event.token())).collect()),
        }
    }

    fn warn_of_lost_watchdog(&mut self) {
        if self.ranks.watchdog_ended() && !self.warned {
            self.warned = true;
            self.output.note("the watchdog process was killed; if ringrun is now killed too, what its ranks started may survive");
        }
    }

    fn say_limits(&self, rendezvous: &SocketAddr) {
        if self.plan.verbosity == Verbosity::Verbose {
            let limits = &self.plan.limits;
            let job = limits.job_timeout.map_or_else(|| "none".to_owned(), seconds);
            self.output
                .note(&format!("job {} of {} ranks, rendezvous at {rendezvous}", self.id, self.plan.world));
            self.output.note(&format!(
                "deadlines: start {}, job {job}; after a failure {}, then SIGTERM, then {}; after SIGTERM to ringrun {}",
                seconds(limits.start_timeout),
                seconds(limits.grace),
                seconds(limits.kill_after),
                seconds(limits.term_timeout)
            ));
        }
    }
}

/// A port that nothing listens on, for a program that wants to listen on `MASTER_PORT` itself.
///
/// It is held by a socket that is bound but does not listen: the kernel then gives it to no program that asks for any free port,
/// yet a listener that sets `SO_REUSEADDR`, as all do that we know of, can have it.
struct ReservedPort {
    number: u16,
    _socket: Socket,
}

impl ReservedPort {
    fn new() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())?;
        let number = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
        Ok(Self { number, _socket: socket })
    }
}

fn working_directory(plan: &LaunchPlan) -> Result<PathBuf, LaunchError> {
    let chosen = plan.directory.as_deref().unwrap_or(Path::new("."));
    let wrong = |source| LaunchError::Directory { path: chosen.to_owned(), source };
    let absolute = chosen.canonicalize().map_err(wrong)?;
    if !absolute.is_dir() {
        return Err(wrong(io::ErrorKind::NotADirectory.into()));
    }
    Ok(absolute)
}

/// The variables of `-x`, those without a value taken from our own environment.
fn extra_variables(plan: &LaunchPlan) -> Result<BTreeMap<OsString, OsString>, LaunchError> {
    let mut found = BTreeMap::new();
    for (name, value) in &plan.variables {
        let value = value.clone().or_else(|| env::var_os(name));
        let value = value.ok_or_else(|| LaunchError::VariableUnset { name: name.clone() })?;
        found.insert(name.clone(), value);
    }
    Ok(found)
}

/// Raises the soft limit of open files where the job needs it. The ranks inherit it.
fn allow_files(plan: &LaunchPlan) -> Result<(), LaunchError> {
    let needed = u64::from(plan.world.get()) * FILES_PER_RANK + FILES_BESIDES + usable_processors() as u64;
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

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
