//! The ranks of this host: what they need, and their start. ringrun and its agents on other hosts start ranks in the same way.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

use super::binding::BindingPlan;
use super::claims::ClaimRegistry;
use super::command::LaunchedProgram;
use super::environment::{JobVariables, rank_environment};
use super::error::LaunchError;
use super::host_job::HostJob;
use super::message::LaunchMessage;
use super::mpi4py::{self, SearchPaths};
use super::mpi4py_guard::Mpi4pyGuard;
use super::output::Output;
use super::plan::{Binding, LaunchPlan, RankProgram, StdinReader};
use super::shim;
use super::status_line::STATUS_COLUMNS_VARIABLE;
use super::topology::{self, Processor};
use crate::rendezvous::LISTEN_PORTS_VARIABLE;
use crate::types::{Rank, WorldSize, plural};

/// The number of open files that each rank needs: two pipes for its output and one for its exit record, a socket to its
/// [`shim`], and two files of `--output-dir`.
const OPEN_FILES_PER_RANK: u64 = 6;

/// The number of open files that each remote host needs: the three pipes of its ssh.
const OPEN_FILES_PER_HOST: u64 = 3;

/// The number of open files that ringrun needs for itself: in addition to the files of ranks and hosts, and one file for
/// each claimed processor.
const RINGRUN_OPEN_FILES: u64 = 64;

/// What the ranks of this host need. It has been found before any rank starts.
#[derive(Debug)]
pub(super) struct LocalRanks {
    /// The programs of the ranks of this host.
    programs: Vec<LocalProgram>,
}

/// What the ranks of one program need.
#[derive(Debug)]
struct LocalProgram {
    /// The ranks that run the program, also on other hosts.
    ranks: Range<u32>,
    directory: PathBuf,
    program: LaunchedProgram,
    arguments: Vec<OsString>,
    /// The variables of `-x`, and those of mpi4py.
    variables: BTreeMap<OsString, OsString>,
    _mpi4py_guard: Option<Mpi4pyGuard>,
}

/// The processors of the ranks of this host. Dropping this value ends the claims.
#[derive(Debug)]
pub(super) struct LocalProcessors {
    bindings: BindingPlan,
    _claims: Vec<UnixDatagram>,
}

impl LocalRanks {
    /// Looks for the working directories, the programs and the Python packages of the ranks.
    pub(super) fn find(plan: &LaunchPlan) -> Result<Self, LaunchError> {
        raise_file_limit(plan)?;
        let mut first = 0;
        let mut programs = Vec::new();
        for program in &plan.programs {
            let ranks = first..first + program.ranks;
            first = ranks.end;
            if plan.share.ranks().any(|rank| ranks.contains(&rank.get())) {
                programs.push(LocalProgram::find(plan, program, ranks)?);
            }
        }
        Ok(Self { programs })
    }

    /// Starts the ranks of this host. `inherited` are variables of the ringrun that has started this agent.
    pub(super) fn start(
        &self,
        plan: &LaunchPlan,
        processors: &LocalProcessors,
        job: &JobVariables,
        inherited: &[(OsString, OsString)],
        host: &mut HostJob,
    ) -> Result<(), LaunchError> {
        let stdin = io::stdin();
        for rank in plan.share.ranks() {
            let program = self.programs.iter().find(|program| program.ranks.contains(&rank.get()));
            let program = program.expect("each rank of this host has a program");
            let processors = processors.of_rank(plan.share.local_rank(rank) as usize);
            if plan.report_bindings {
                let text = format!("rank {rank} {}", describe_binding(processors));
                host.output.print_message(LaunchMessage::info(text).about(rank));
            }
            let mut command = shim::shim_command(&program.program, &program.arguments, processors);
            command.envs(inherited.iter().map(|(name, value)| (name, value)));
            // If ringrun itself runs as a rank of another ringrun job, it has inherited these variables.
            for inherited in [LISTEN_PORTS_VARIABLE, STATUS_COLUMNS_VARIABLE] {
                command.env_remove(inherited);
            }
            command
                .current_dir(&program.directory)
                .envs(rank_environment(rank, job))
                .envs(&program.variables);
            let spawn_error = |source| LaunchError::Spawn { rank, world: plan.world, source };
            let pipe = match &mut host.input_feed {
                Some(feed) if reads_stdin(rank, plan.stdin_reader, &stdin) => {
                    Some(feed.add_rank(host.poll.registry()).map_err(spawn_error)?)
                }
                _ => None,
            };
            let inherited_stdin = (host.input_feed.is_none() && reads_stdin(rank, plan.stdin_reader, &stdin))
                .then_some(stdin.as_fd());
            let input = pipe.as_ref().map(OwnedFd::as_fd).or(inherited_stdin);
            let streams = host.rank_processes.start_rank(command, input).map_err(spawn_error)?;
            host.output.add_streams(rank, streams);
        }
        Ok(())
    }
}

impl LocalProgram {
    fn find(plan: &LaunchPlan, wanted: &RankProgram, ranks: Range<u32>) -> Result<Self, LaunchError> {
        let directory = working_directory(wanted)?;
        let mut variables = user_variables(wanted)?;
        let path = variables.get(OsStr::new("PATH")).cloned().or_else(|| env::var_os("PATH"));
        let program = LaunchedProgram::find(&wanted.program, path.as_deref(), &directory)?;
        let python_path = env::var_os("PYTHONPATH");
        let search_paths =
            SearchPaths { directory: &directory, path: path.as_deref(), python_path: python_path.as_deref() };
        let mpi4py_guard = mpi4py::extend_python_path((plan, &wanted.program), search_paths, &mut variables)?;
        let arguments = wanted.arguments.clone();
        Ok(Self { ranks, directory, program, arguments, variables, _mpi4py_guard: mpi4py_guard })
    }
}

impl LocalProcessors {
    /// Assigns processors to the ranks of this host, and claims these processors.
    pub(super) fn assign(plan: &LaunchPlan, output: &Output) -> Option<Self> {
        let (bindings, claims) = assign_processors(plan, WorldSize::new(plan.share.count())?, output);
        Some(Self { bindings, _claims: claims })
    }

    fn of_rank(&self, local_rank: usize) -> &[Processor] {
        self.bindings.processors.get(local_rank).map_or(&[], Vec::as_slice)
    }

    pub(super) fn exclusive_count(&self) -> usize {
        self.bindings.exclusive_processors
    }

    /// Returns the value of `OMP_NUM_THREADS` for the ranks, or `None` if the user has set it, or there is only one rank.
    pub(super) fn omp_threads(&self, world: WorldSize) -> Option<usize> {
        (world.get() > 1 && env::var_os("OMP_NUM_THREADS").is_none()).then_some(self.bindings.omp_threads)
    }
}

/// Returns whether `rank` reads the standard input of ringrun. If a rank read a terminal, the kernel would stop the rank
/// with SIGTTIN, because the process group of the rank is not the foreground process group of the terminal.
fn reads_stdin(rank: Rank, reader: StdinReader, stdin: &impl IsTerminal) -> bool {
    let is_reader = match reader {
        StdinReader::NoRank => false,
        StdinReader::RankZero => rank == Rank::ZERO,
        StdinReader::AllRanks => true,
    };
    is_reader && !stdin.is_terminal()
}

/// Assigns processors to the ranks, and claims these processors until the returned sockets are dropped. If the system
/// does not let ringrun bind ranks, prints a warning and leaves the ranks unbound.
fn assign_processors(
    plan: &LaunchPlan,
    world: WorldSize,
    output: &Output,
) -> (BindingPlan, Vec<UnixDatagram>) {
    let mut binding = plan.binding;
    if binding != Binding::None
        && let Err(error) = topology::check_binding_is_allowed()
    {
        output.print_message(LaunchMessage::warning(format!(
            "this system does not let ringrun bind ranks to processors; ringrun continues as with --bind-to none: {error}"
        )));
        binding = Binding::None;
    }
    let cores = topology::usable_cores();
    let registry = ClaimRegistry::lock_for_machine();
    let bindings =
        BindingPlan::new(binding, world, &cores, &registry.count_jobs(&cores), usable_processors());
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
    let noun = plural(processors.len(), "processor", "processors");
    format!("is bound to {noun} {}", topology::format_processor_list(processors))
}

/// A free port for `MASTER_PORT`, on which a rank can listen.
///
/// A socket that is bound to the port but does not listen reserves the port: the kernel does not give this port to
/// programs that ask for any free port. A rank can still bind its listener to the port, if the listener sets
/// `SO_REUSEADDR`, as the listener of `PyTorch` does.
#[derive(Debug)]
pub(super) struct ReservedPort {
    pub(super) port: u16,
    _socket: Socket,
}

impl ReservedPort {
    /// Reserves a free port.
    pub(super) fn new() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())?;
        let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
        Ok(Self { port, _socket: socket })
    }
}

/// Returns the absolute path of the working directory of the ranks.
fn working_directory(program: &RankProgram) -> Result<PathBuf, LaunchError> {
    let chosen = Path::new(program.directory.as_deref().unwrap_or(OsStr::new(".")));
    let directory_error = |source| LaunchError::Directory { path: chosen.to_owned(), source };
    let absolute = chosen.canonicalize().map_err(directory_error)?;
    if !absolute.is_dir() {
        return Err(directory_error(io::ErrorKind::NotADirectory.into()));
    }
    Ok(absolute)
}

/// Returns the variables of `-x`. A variable without a value gets its value from ringrun's own environment.
pub(super) fn user_variables(program: &RankProgram) -> Result<BTreeMap<OsString, OsString>, LaunchError> {
    let mut found = BTreeMap::new();
    for (name, value) in &program.variables {
        let value = value.clone().or_else(|| env::var_os(name));
        let value = value.ok_or_else(|| LaunchError::VariableUnset { name: name.clone() })?;
        found.insert(name.clone(), value);
    }
    Ok(found)
}

/// Raises the soft limit on open files if the limit is lower than the number of files that the job needs. The ranks
/// inherit the new limit.
fn raise_file_limit(plan: &LaunchPlan) -> Result<(), LaunchError> {
    let needed = u64::from(plan.share.count()) * OPEN_FILES_PER_RANK
        + plan.remote_hosts.len() as u64 * OPEN_FILES_PER_HOST
        + RINGRUN_OPEN_FILES
        + usable_processors() as u64;
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
