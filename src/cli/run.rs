//! ringrun's arguments: translated from other launchers' options, checked one by one by clap, then together as a [`LaunchPlan`].

mod hosts;
mod other_launchers;

use std::ffi::{OsStr, OsString};
use std::iter;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory as _, FromArgMatches as _, Parser};

use super::print_error::print_error;
use crate::exit::Exit;
use crate::launch::{self, Binding, LaunchLimits, LaunchPlan, Mpi4py, OWN_PREFIX, OutputFormat, Verbosity};

/// The longest time that any option takes: a year.
const SECONDS_MAX: f64 = 365.0 * 24.0 * 3600.0;

const EXAMPLES: &str = "\
Examples:
  ringrun -n 4 ringtrain                    train on 4 ranks on this machine
  ringrun -n 4 ringbench allreduce          measure it
  ringrun -n 2 -- python train.py --lr 0.1  any program
  ringrun -n 4 --output-dir logs ringtrain  a copy in logs/rank.0/stdout, ...
  ringrun -n 2 -x RUST_LOG=debug ringtrain  a variable for every rank
  ringrun --mpi4py -n 2 python script.py    run a script for mpi4py on the Python package ringtrain

`ringtrain` and `ringbench`, without a slash, are always the ones that ringrun itself carries. Each rank finds RING_*, and \
the variables of torchrun, Horovod and Open MPI. Its standard input is /dev/null. OMP_NUM_THREADS is the number of cores in the \
rank's share if there is more than one rank and you have not set it.

Each rank may use an even share of the processors that ringrun may use (taskset, Slurm and containers limit them) and that no \
other job of ringrun on this host has claimed; when all are claimed, jobs share them evenly. ringrun passes on lines of up to \
16 MiB whole, longer ones in pieces.

With --mpi4py, `from mpi4py import MPI` imports the Python package ringtrain. ringrun asks COMMAND's interpreter once for its \
directory (python3 if COMMAND is not called python.. or pypy..) and puts that first in the ranks' PYTHONPATH. Without the option \
an import of mpi4py on 2 or more ranks raises an ImportError, because an installed MPI would see each of them as a world of one; \
a program that can do without mpi4py continues without it. --mpi4py=installed imports the installed package.

When a rank fails, the others have --grace to end; then they get SIGTERM, and after --kill-after SIGKILL, each \
with everything that it has started. ringrun says which rank failed first, how, and what it printed last. A rank that has \
ended takes what is left of its process group with it.

SIGINT (Ctrl-C), SIGHUP and SIGQUIT are passed on and end the job within --kill-after, a second Ctrl-C at once. SIGTERM is \
passed on and leaves --term-timeout to save and exit; if every rank then exits with 0, so does ringrun. SIGUSR1, SIGUSR2, \
SIGCONT, SIGTSTP and SIGWINCH are passed on. If ringrun itself is killed, its ranks die with it. If the reader of its standard \
output goes away, the job is stopped, unless there is --output-dir.

Exit codes:
  0        every rank exited with 0
  1-255    the code of the rank that failed first; 128+N if signal N killed it
  1        also: standard output or a file of --output-dir could not be written
  2        wrong usage: unknown flag, bad value, impossible combination
  3        --wdir or --output-dir cannot be used, or too few open files allowed
  5        the ranks could not be started, or --mpi4py finds no package
  124      --job-timeout passed
  126      COMMAND cannot be executed
  127      COMMAND was not found
  129-143  ended by a signal: 130 Ctrl-C, 141 its reader left, 143 SIGTERM
";

/// Runs COMMAND as N ranks of one job on this machine.
#[derive(Parser, Debug)]
#[command(name = "ringrun", version, after_help = EXAMPLES, max_term_width = 130)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate flag; `LaunchPlan` has enums")]
struct RunArgs {
    /// How many ranks to start (also -np N); auto is one for each processor that ringrun may use.
    #[arg(
        short = 'n',
        long = "np",
        visible_alias = "num-proc",
        value_name = "N",
        allow_negative_numbers = true
    )]
    #[arg(required_unless_present_any = ["ranks_per_host", "hosts", "hostfile"])]
    ranks: Option<RankCount>,

    /// The same, as torchrun (--nproc-per-node) and MPICH (-ppn) say it.
    #[arg(long, value_name = "N", hide = true, allow_negative_numbers = true)]
    ranks_per_host: Option<RankCount>,

    /// This host by name, with the number of ranks that it takes: HOST[:N],... (ringrun starts ranks on this host only).
    #[arg(short = 'H', long = "host", value_name = "HOSTS", value_delimiter = ',')]
    hosts: Vec<String>,

    /// A file with such hosts, one a line: HOST, HOST:N or HOST slots=N.
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    hostfile: Option<PathBuf>,

    /// Run each rank on its own even share of the processors (core), on the NUMA nodes of that share (numa), or anywhere (none).
    #[arg(long, value_name = "PLACE", default_value = "core", value_parser = bind_to)]
    bind_to: Binding,

    /// Print which processors each rank may use.
    #[arg(long)]
    report_bindings: bool,

    /// Begin each line with [RANK]<stdout>: or [RANK]<stderr>: (the default).
    #[arg(long, overrides_with = "no_tag_output", action = ArgAction::SetTrue)]
    tag_output: bool,

    /// Pass lines on as they are.
    #[arg(long, overrides_with = "tag_output", action = ArgAction::SetTrue)]
    no_tag_output: bool,

    /// Also write each rank's output to DIR/rank.N/stdout and DIR/rank.N/stderr.
    #[arg(long, visible_alias = "output-filename", value_name = "DIR")]
    output_dir: Option<PathBuf>,

    /// Set a variable for every rank; without a value, ringrun's own (repeatable).
    #[arg(short = 'x', long = "env", value_name = "NAME[=VALUE]", action = ArgAction::Append)]
    variables: Vec<OsString>,

    /// Import the Python package ringtrain, or the installed mpi4py, for `from mpi4py import MPI`.
    #[arg(
        long,
        value_name = "ringtrain|installed",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "ringtrain",
        value_parser = mpi4py
    )]
    mpi4py: Option<Mpi4py>,

    /// Run the ranks in DIR.
    #[arg(long, visible_alias = "wd", value_name = "DIR")]
    wdir: Option<PathBuf>,

    /// How long the ranks wait for each other at the start.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = positive_seconds)]
    start_timeout: Duration,

    /// After a failure, how long the other ranks have to end.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    grace: Duration,

    /// How long after SIGTERM or Ctrl-C the ranks are killed.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    kill_after: Duration,

    /// How long the ranks have to save and exit when ringrun gets SIGTERM (schedulers kill after 30).
    #[arg(long, value_name = "SECONDS", default_value = "25", value_parser = seconds)]
    term_timeout: Duration,

    /// Stop the job after this time, with exit code 124.
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds)]
    job_timeout: Option<Duration>,

    /// Say what ringrun does.
    #[arg(short, long)]
    verbose: bool,

    /// Say only what goes wrong (the default).
    #[arg(short, long, overrides_with = "verbose")]
    quiet: bool,

    /// The program and its arguments.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// ringrun: arguments (without the program's name) -> plan -> job -> exit code.
pub fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let plan = match parse(arguments.collect()) {
        Ok(plan) => plan,
        Err(error) => {
            // `--help | head` is no failure.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Success.into() };
        }
    };
    if let Err(code) = check_own_program(&plan) {
        return code;
    }
    match launch::run(&plan) {
        Ok(code) => code.into(),
        Err(error) => {
            print_error("ringrun", &error);
            error.exit().into()
        }
    }
}

/// Checks the arguments of a program that ringrun carries before any rank is started. Its `--help`, too, is printed once.
fn check_own_program(plan: &LaunchPlan) -> Result<(), ExitCode> {
    let arguments = iter::once(&plan.program).chain(&plan.arguments).cloned();
    match plan.program.to_str() {
        Some("ringtrain") => super::train::check_arguments(arguments),
        Some("ringbench") => super::bench::check_arguments(arguments, plan.world),
        _ => Ok(()),
    }
}

fn parse(arguments: Vec<OsString>) -> Result<LaunchPlan, clap::Error> {
    let mut command = RunArgs::command();
    let mut arguments = other_launchers::translate(&command, arguments).map_err(one_sentence)?;
    arguments.insert(0, "ringrun".into());
    let matches = command.try_get_matches_from_mut(arguments)?;
    let chose_start = matches.value_source("start_timeout") == Some(clap::parser::ValueSource::CommandLine);
    let args = RunArgs::from_arg_matches(&matches)?;
    into_plan(args, chose_start).map_err(one_sentence)
}

/// An error without the lines about usage that clap adds.
fn one_sentence(text: String) -> clap::Error {
    clap::Error::raw(ErrorKind::ValueValidation, text + "\n")
}

/// The checks that concern more than the form of one value.
fn into_plan(args: RunArgs, chose_start: bool) -> Result<LaunchPlan, String> {
    let world = hosts::world(&args)?;
    let mut start_timeout = args.start_timeout;
    if let Some(job) = args.job_timeout
        && job < start_timeout
    {
        if chose_start {
            return Err(
                "--job-timeout is shorter than --start-timeout, which could then never pass".to_owned()
            );
        }
        start_timeout = job;
    }
    let variables = args.variables.into_iter().map(variable).collect::<Result<_, _>>()?;
    let mut command = args.command.into_iter();
    let program = command.next().ok_or("there is no COMMAND to run")?;
    Ok(LaunchPlan {
        world,
        program,
        arguments: command.collect(),
        variables,
        mpi4py: args.mpi4py.unwrap_or(Mpi4py::Refused),
        directory: args.wdir,
        output_format: if args.no_tag_output { OutputFormat::Raw } else { OutputFormat::Tagged },
        output_dir: args.output_dir,
        limits: LaunchLimits {
            start_timeout,
            grace: args.grace,
            kill_after: args.kill_after,
            term_timeout: args.term_timeout,
            job_timeout: args.job_timeout,
        },
        binding: args.bind_to,
        report_bindings: args.report_bindings,
        verbosity: if args.verbose { Verbosity::Verbose } else { Verbosity::Quiet },
    })
}

/// `NAME` or `NAME=VALUE`; the value need not be text.
fn variable(argument: OsString) -> Result<(OsString, Option<OsString>), String> {
    let shown = argument.to_string_lossy().into_owned();
    let bytes = argument.into_vec();
    let (name, value) = match bytes.iter().position(|&byte| byte == b'=') {
        Some(at) => (&bytes[..at], Some(OsStr::from_bytes(&bytes[at + 1..]).to_owned())),
        None => (&bytes[..], None),
    };
    if name.is_empty() {
        return Err(format!("-x {shown}: a variable needs a name"));
    }
    if name.starts_with(OWN_PREFIX.as_bytes()) {
        // The value is not repeated: it may be a secret.
        let name = String::from_utf8_lossy(name);
        return Err(format!("-x {name}: the names that begin with {OWN_PREFIX} are ringrun's to set"));
    }
    Ok((OsStr::from_bytes(name).to_owned(), value))
}

/// How many ranks to start, as it was typed.
#[derive(Clone, Copy, Debug)]
enum RankCount {
    Auto,
    Number(i64),
}

impl std::str::FromStr for RankCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            // torchrun's `cpu` means the same.
            "auto" | "cpu" => Ok(Self::Auto),
            "gpu" => Err("ringrun does not count GPUs; give the number of ranks".to_owned()),
            _ => text.parse().map(Self::Number).map_err(|_| "neither a number nor auto".to_owned()),
        }
    }
}

/// A value of `--bind-to`; what follows a colon qualifies it for Open MPI and is left out.
fn bind_to(text: &str) -> Result<Binding, String> {
    match text.split_once(':').map_or(text, |(place, _)| place) {
        "none" => Ok(Binding::None),
        "core" => Ok(Binding::Core),
        "numa" => Ok(Binding::Numa),
        _ => Err("ringrun binds ranks to core, numa or none".to_owned()),
    }
}

fn mpi4py(text: &str) -> Result<Mpi4py, String> {
    match text {
        "ringtrain" => Ok(Mpi4py::Ringtrain),
        "installed" => Ok(Mpi4py::Installed),
        _ => Err("not ringtrain or installed".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if !(0.0..=SECONDS_MAX).contains(&seconds) {
        return Err(format!("not between 0 and {SECONDS_MAX} seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn positive_seconds(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        time if time.is_zero() => Err("must be more than 0".to_owned()),
        // What the ranks are told is in milliseconds.
        time if time < Duration::from_millis(1) => Err("must be at least 0.001".to_owned()),
        time => Ok(time),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(line: &str) -> Result<LaunchPlan, String> {
        parse(line.split_whitespace().map(OsString::from).collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_ours_and_what_is_the_commands() {
        for (line, ranks, command) in [
            ("-n 4 prog", 4, "prog"),
            ("-np 4 prog -np 3", 4, "prog -np 3"),
            ("-x A=1 -np 2 prog -n 7 --verbose", 2, "prog -n 7 --verbose"),
            ("--output-dir=-np -np 2 prog -np", 2, "prog -np"),
            ("--np 3 -- prog -- -n", 3, "prog -- -n"),
            ("--num-proc=3 --wdir / -- -np", 3, "-np"),
            ("-n4 -v prog --help", 4, "prog --help"),
            ("-np=2 prog", 2, "prog"),
            ("-np 4 -ppn 4 prog", 4, "prog"),
            ("--nproc-per-node 3 --nnodes 1 prog", 3, "prog"),
            ("-H localhost:2,127.0.0.1 prog", 3, "prog"),
            ("-n 2 -- prog : -n 1 b", 2, "prog : -n 1 b"),
            ("-q -n 2 --bind-to core:overload-allowed prog", 2, "prog"),
        ] {
            let plan = plan(line).unwrap_or_else(|error| panic!("{line}: {error}"));
            let words: Vec<_> = [&plan.program]
                .into_iter()
                .chain(&plan.arguments)
                .map(|word| word.to_str().unwrap())
                .collect();
            assert_eq!((plan.world.get(), words.join(" ").as_str()), (ranks, command), "{line}");
        }
    }

    #[test]
    fn what_cannot_be() {
        for (line, part) in [
            ("", "required"),
            ("-n 2", "COMMAND"),
            ("prog", "--np"),
            ("-n 0 prog", "at least 1"),
            ("-n -1 prog", "at least 1"),
            ("-n 99999999999999999999 prog", "neither a number nor auto"),
            ("-n 5000 prog", "at most 1024"),
            ("-n 2 -n 3 prog", "multiple times"),
            ("-np 2 --grace 1 --grace 2 prog", "multiple times"),
            ("-n x prog", "neither a number nor auto"),
            ("-n 2 --bogus prog", "--bogus"),
            ("-n 2 -np", "value"),
            ("-n 2 --grace -1 prog", "unexpected argument"),
            ("-n 2 --grace=-1 prog", "between"),
            ("-n 2 --grace NaN prog", "between"),
            ("-n 2 --kill-after inf prog", "between"),
            ("-n 2 --job-timeout 0 prog", "more than 0"),
            ("-n 2 --start-timeout 0.0001 prog", "at least 0.001"),
            ("-n 2 --start-timeout 10 --job-timeout 5 prog", "shorter"),
            ("-n 2 -x =1 prog", "needs a name"),
            ("-n 4 -ppn 2 prog", "several hosts"),
            ("-n 2 -H node7 prog", "`node7` is not this host"),
            ("-hostfile /no/such -n 2 prog", "/no/such: it cannot be read"),
            ("-n gpu prog", "does not count GPUs"),
            ("-n 2 --bind-to socket prog", "core, numa or none"),
            ("-n 1 a : -n 1 b", "one command for all ranks"),
            ("-n 2 -x RING_SECRET=hush prog", "ringrun's to set"),
        ] {
            let error = plan(line).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn auto_is_one_rank_for_each_processor() {
        let processors = std::thread::available_parallelism().unwrap().get();
        for line in ["-n auto prog", "--nproc_per_node=cpu prog"] {
            assert_eq!(plan(line).unwrap().world.as_usize(), processors, "{line}");
        }
    }

    #[test]
    fn the_option_mpi4py_has_two_values() {
        for (line, expected) in [
            ("-n 2 prog", Mpi4py::Refused),
            ("-n 2 prog --mpi4py", Mpi4py::Refused),
            ("--mpi4py -np 2 prog", Mpi4py::Ringtrain),
            ("--mpi4py=ringtrain -n 2 prog", Mpi4py::Ringtrain),
            ("--mpi4py=installed -n 2 prog", Mpi4py::Installed),
        ] {
            assert_eq!(plan(line).unwrap().mpi4py, expected, "{line}");
        }
        let error = plan("--mpi4py=mine -n 2 prog").expect_err("there is no such value");
        assert!(error.contains("ringtrain or installed"), "{error}");
    }

    #[test]
    fn a_short_job_shortens_the_start() {
        let limits = plan("-n 2 --job-timeout 5 prog").unwrap().limits;
        assert_eq!(limits.start_timeout, Duration::from_secs(5));
    }

    #[test]
    fn the_last_word_on_tags_holds() {
        assert_eq!(plan("-n 2 --no-tag-output prog").unwrap().output_format, OutputFormat::Raw);
        assert_eq!(
            plan("-n 2 --no-tag-output --tag-output prog").unwrap().output_format,
            OutputFormat::Tagged
        );
        assert_eq!(plan("-n 2 prog").unwrap().output_format, OutputFormat::Tagged);
    }
}
