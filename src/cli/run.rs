//! Parses the arguments of ringrun. The module `other_launchers` first translates the options of other launchers.
//! clap then checks each option, and this module checks that the options fit together and makes a [`LaunchPlan`].

mod help;
mod host_list;
mod hosts;
mod other_launchers;
mod rank_count;
mod top;
mod values;

use std::ffi::{OsStr, OsString};
use std::iter;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory as _, FromArgMatches as _, Parser, ValueHint};

use self::hosts::{HostOptions, JobHosts, place_ranks};
use self::rank_count::RankCount;
use self::values::{
    parse_binding, parse_environment_variable, parse_mpi4py, parse_positive_seconds, parse_seconds,
    parse_stdin_reader,
};
use super::print_error::print_error;
use super::version::LONG_VERSION;
use crate::exit::Exit;
use crate::launch::{
    self, AGENT_OPTION, FailurePolicy, InterfaceFilter, LaunchLimits, LaunchPlan, Mpi4py, OutputFormat,
    RankShare, SshOptions, StdinReader, Verbosity,
};
use crate::types::{Rank, WorldSize};

/// Runs COMMAND as N ranks of one job, on this machine or on several hosts.
#[derive(Parser, Debug)]
#[command(name = "ringrun", version, long_version = LONG_VERSION, after_help = help::AFTER_OPTIONS)]
#[command(max_term_width = 130)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate flag; `LaunchPlan` has enums")]
struct RunArgs {
    /// The number of ranks to start. auto starts one rank for each processor that ringrun may use. -np N means the
    /// same as -n N.
    #[arg(
        short = 'n',
        long = "np",
        visible_alias = "num-proc",
        value_name = "N",
        allow_negative_numbers = true
    )]
    #[arg(required_unless_present_any = ["ranks_per_host", "hosts", "hostfile"])]
    ranks: Option<RankCount>,

    /// The number of ranks to start, from an option of another launcher such as `--nproc-per-node`.
    #[arg(long, value_name = "N", hide = true, allow_negative_numbers = true)]
    ranks_per_host: Option<RankCount>,

    /// The hosts of the ranks, and the number of ranks on each host: HOST[:N],... ringrun starts the ranks of other hosts through
    /// ssh. HOST alone means HOST:1, and n[1-3,7] means n1,n2,n3,n7. Without -n, the number of ranks is the sum of all N. With
    /// -n, ringrun fills the hosts in this order.
    #[arg(short = 'H', long = "host", value_name = "HOSTS")]
    hosts: Vec<String>,

    /// Read the list of hosts from FILE instead of from --host. Each line is HOST, HOST:N or HOST slots=N. A # begins a comment.
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    hostfile: Option<PathBuf>,

    /// The port of sshd on the other hosts.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    ssh_port: Option<u16>,

    /// The file with the private key for ssh.
    #[arg(long, visible_alias = "ssh-identity-file", value_name = "FILE")]
    ssh_identity: Option<PathBuf>,

    /// Further arguments of ssh, separated by spaces, for example --ssh-options='-o StrictHostKeyChecking=accept-new'.
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true)]
    ssh_options: Vec<String>,

    /// On the other hosts, use DIR/bin/ringrun. Without this option, ringrun uses the file with the same path as its own
    /// executable or, if there is no such file, the ringrun in PATH.
    #[arg(long, value_name = "DIR")]
    remote_prefix: Option<PathBuf>,

    /// The network interfaces that the ranks use for other hosts: names, globs (ib*) and networks (10.0.0.0/8), separated by
    /// commas. ^ excludes an entry: ^docker*. Without this option, the routes between the hosts decide.
    #[arg(long, value_name = "LIST")]
    interface: Option<InterfaceFilter>,

    /// The processors on which each rank may run. core: the rank's share of the processors. numa: all processors of
    /// the NUMA nodes that contain this share. none: all processors.
    #[arg(long, value_name = "PLACE", default_value = "core")]
    bind_to: String,

    /// Print which processors each rank may use.
    #[arg(long)]
    report_bindings: bool,

    /// Begin each line of output with [RANK]<stdout>: or [RANK]<stderr>: (the default).
    #[arg(long, overrides_with = "no_tag_output", action = ArgAction::SetTrue)]
    tag_output: bool,

    /// Print lines unchanged, without a tag.
    #[arg(long, overrides_with = "tag_output", action = ArgAction::SetTrue)]
    no_tag_output: bool,

    /// Also write each rank's output to DIR/rank.N/stdout and DIR/rank.N/stderr.
    #[arg(long, visible_alias = "output-filename", value_name = "DIR")]
    output_dir: Option<PathBuf>,

    /// Set the environment variable NAME to VALUE for every rank. Without =VALUE, the ranks get the value of
    /// NAME in the environment of ringrun. You may repeat this option.
    #[arg(short = 'x', long = "env", value_name = "NAME[=VALUE]", action = ArgAction::Append)]
    variables: Vec<OsString>,

    /// Choose what `from mpi4py import MPI` imports in the ranks: the Python package ringtrain, or the installed
    /// mpi4py. Without a value, --mpi4py means --mpi4py=ringtrain.
    #[arg(
        long,
        value_name = "ringtrain|installed",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "ringtrain",
        value_parser = parse_mpi4py
    )]
    mpi4py: Option<Mpi4py>,

    /// The rank that reads the standard input of ringrun: 0 or none. The standard input of all other ranks is /dev/null.
    /// If the standard input of ringrun is a terminal, 0 means none.
    #[arg(long, value_name = "RANK", default_value = "0", value_parser = parse_stdin_reader)]
    stdin: StdinReader,

    /// Run the ranks in the working directory DIR.
    #[arg(long, visible_alias = "wd", value_name = "DIR")]
    wdir: Option<PathBuf>,

    /// How long the ranks wait for each other when the job starts.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_positive_seconds)]
    start_timeout: Duration,

    /// How long ringrun waits between the failure of a rank and the SIGTERM that ringrun sends to the other ranks.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    grace: Duration,

    /// How long the ranks may take to exit after ringrun stops the job or gets Ctrl-C. After this time, ringrun sends
    /// SIGKILL to the remaining ranks.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    kill_after: Duration,

    /// How long the ranks may take to save and exit after ringrun itself gets SIGTERM. Many schedulers kill a job 30
    /// seconds after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value = "25", value_parser = parse_seconds)]
    term_timeout: Duration,

    /// Stop the job after this time and exit with code 124.
    #[arg(long, value_name = "SECONDS", value_parser = parse_positive_seconds)]
    job_timeout: Option<Duration>,

    /// Let the other ranks continue when a rank fails. Use this option for programs that can continue without the
    /// failed rank.
    #[arg(long)]
    tolerate_failures: bool,

    /// Also print the time limits of the job, and how and when each rank ended.
    #[arg(short, long)]
    verbose: bool,

    /// Print only errors (the default).
    #[arg(short, long, overrides_with = "verbose")]
    quiet: bool,

    /// The program and its arguments.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    command: Vec<OsString>,
}

/// Returns the definition of the options.
pub(super) fn command() -> clap::Command {
    RunArgs::command()
}

/// Runs `ringrun` and returns the exit code. `arguments` does not contain the program's name.
pub fn run_ringrun(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut arguments: Vec<OsString> = arguments.collect();
    if arguments == [AGENT_OPTION] {
        super::log_format::start_text_log("error", "ringrun");
        return launch::run_agent();
    }
    if arguments.first().is_some_and(|first| first == "top") {
        return top::run_top(arguments.drain(1..));
    }
    if arguments.first().is_some_and(|first| first == "doctor") {
        return super::doctor::run_doctor(&arguments[1..], parse_launch_plan);
    }
    let plan = match parse_launch_plan(arguments) {
        Ok(plan) => plan,
        Err(error) => {
            // A closed pipe, as in `ringrun --help | head`, is not an error.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Success.into() };
        }
    };
    if let Err(code) = check_builtin_arguments(&plan) {
        return code;
    }
    // The warnings of the library are for the ranks. ringrun prints its own warnings as messages.
    super::log_format::start_text_log("error", "ringrun");
    match launch::run_job(&plan) {
        Ok(code) => code.into(),
        Err(error) => {
            print_error("ringrun", &error);
            error.exit_code().into()
        }
    }
}

/// Checks the arguments of a built-in program before any rank starts, so that ringrun prints an error or the `--help`
/// text only once.
fn check_builtin_arguments(plan: &LaunchPlan) -> Result<(), ExitCode> {
    let arguments = iter::once(&plan.program).chain(&plan.arguments).cloned();
    match plan.program.to_str() {
        Some("ringtrain") => super::train::check_arguments(arguments),
        Some("ringbench") => super::bench::check_arguments(arguments, plan.world),
        _ => Ok(()),
    }
}

fn parse_launch_plan(arguments: Vec<OsString>) -> Result<LaunchPlan, clap::Error> {
    let mut command = RunArgs::command();
    let mut arguments = other_launchers::translate_options_of_other_launchers(&command, arguments)
        .map_err(error_without_usage)?;
    arguments.insert(0, "ringrun".into());
    let matches = command.try_get_matches_from_mut(arguments)?;
    let is_given = |option| matches.value_source(option) == Some(clap::parser::ValueSource::CommandLine);
    let given = GivenOptions { start_timeout: is_given("start_timeout"), stdin: is_given("stdin") };
    let args = RunArgs::from_arg_matches(&matches)?;
    into_plan(args, given).map_err(error_without_usage)
}

/// Returns an error that prints only `text`, without the usage lines that clap adds.
fn error_without_usage(text: String) -> clap::Error {
    clap::Error::raw(ErrorKind::ValueValidation, text + "\n")
}

/// Whether the user has given some options that have default values.
#[derive(Clone, Copy)]
struct GivenOptions {
    start_timeout: bool,
    stdin: bool,
}

/// Checks that the options can be used together, and converts them to a plan.
fn into_plan(args: RunArgs, given: GivenOptions) -> Result<LaunchPlan, String> {
    let JobHosts { world, share, remote_hosts } = place_ranks(&HostOptions {
        ranks: args.ranks,
        ranks_per_host: args.ranks_per_host,
        hosts: &args.hosts,
        hostfile: args.hostfile.as_deref(),
    })?;
    let mut start_timeout = args.start_timeout;
    if let Some(job_timeout) = args.job_timeout
        && job_timeout < start_timeout
    {
        if given.start_timeout {
            return Err(
                "--job-timeout is shorter than --start-timeout: the start could never time out".to_owned()
            );
        }
        start_timeout = job_timeout;
    }
    let variables = args.variables.into_iter().map(parse_environment_variable).collect::<Result<_, _>>()?;
    let mut command = args.command.into_iter();
    let program = command.next().ok_or("there is no COMMAND to run")?;
    let failure_policy = if args.tolerate_failures { FailurePolicy::Tolerate } else { FailurePolicy::EndJob };
    if failure_policy == FailurePolicy::Tolerate {
        check_tolerate_failures(world, &program)?;
    }
    if args.interface.is_some() && remote_hosts.is_empty() {
        return Err("--interface: all ranks run on this host, so they use no network; leave the option out"
            .to_owned());
    }
    Ok(LaunchPlan {
        interfaces: args.interface,
        world,
        share,
        remote_hosts,
        ssh: SshOptions {
            port: args.ssh_port,
            identity: args.ssh_identity,
            arguments: args
                .ssh_options
                .iter()
                .flat_map(|options| options.split_whitespace())
                .map(str::to_owned)
                .collect(),
            remote_prefix: args.remote_prefix,
        },
        program,
        arguments: command.collect(),
        variables,
        mpi4py: args.mpi4py.unwrap_or(Mpi4py::Refused),
        stdin_reader: choose_stdin_reader(args.stdin, given.stdin, share)?,
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
        failure_policy,
        binding: parse_binding(&args.bind_to)?,
        report_bindings: args.report_bindings,
        verbosity: if args.verbose { Verbosity::Verbose } else { Verbosity::Quiet },
    })
}

/// Returns which rank reads the standard input of ringrun. Only a rank on this host can read it.
fn choose_stdin_reader(reader: StdinReader, is_given: bool, share: RankShare) -> Result<StdinReader, String> {
    if reader == StdinReader::NoRank || share.contains(Rank::ZERO) {
        return Ok(reader);
    }
    if is_given {
        return Err(
            "--stdin 0: rank 0 runs on another host, so it cannot read it; name this host first in --host"
                .to_owned(),
        );
    }
    Ok(StdinReader::NoRank)
}

/// Refuses `--tolerate-failures` for jobs that cannot continue after a rank has failed.
fn check_tolerate_failures(world: WorldSize, program: &OsStr) -> Result<(), String> {
    if world == WorldSize::ONE {
        return Err(
            "--tolerate-failures needs at least 2 ranks: no rank could continue after a failure".to_owned()
        );
    }
    if program == "ringbench" {
        return Err(
            "--tolerate-failures: ringbench cannot continue after a rank is lost; leave this option out"
                .to_owned(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<LaunchPlan, String> {
        parse_launch_plan(line.split_whitespace().map(OsString::from).collect())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn options_of_ringrun_end_where_the_command_begins() {
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
            ("-H localhost:3 prog", 3, "prog"),
            ("-H a:2,n[1-2] --ssh-options -v -ssh-port 22 prog", 4, "prog"),
            ("-n 2 -- prog : -n 1 b", 2, "prog : -n 1 b"),
            ("-q -n 2 --bind-to core:overload-allowed prog", 2, "prog"),
        ] {
            let plan = parse_line(line).unwrap_or_else(|error| panic!("{line}: {error}"));
            let words: Vec<_> = [&plan.program]
                .into_iter()
                .chain(&plan.arguments)
                .map(|word| word.to_str().unwrap())
                .collect();
            assert_eq!((plan.world.get(), words.join(" ").as_str()), (ranks, command), "{line}");
        }
    }

    #[test]
    fn invalid_arguments_are_rejected() {
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
            ("-n 1 --tolerate-failures prog", "at least 2 ranks"),
            ("-n 2 --tolerate-failures ringbench", "ringbench cannot continue"),
            ("-n 2 -x =1 prog", "needs a name"),
            ("-n 4 -ppn 2 prog", "several hosts"),
            ("-n 2 -H node7 prog", "more than the 1 slot(s) of node7"),
            ("-H node7 --stdin 0 prog", "rank 0 runs on another host"),
            ("-n 2 --interface eth0 prog", "they use no network"),
            ("-H node7 --interface 10.0.0.0/99 prog", "0 to 32 bits"),
            ("-H node7 --ssh-port 0 prog", "0 is not in 1..=65535"),
            ("-hostfile /no/such -n 2 prog", "/no/such: it cannot be read"),
            ("-n gpu prog", "does not count GPUs"),
            ("-n 2 --bind-to hwthread prog", "--bind-to hwthread: use --bind-to core, which"),
            ("-n 2 --bind-to board prog", "--bind-to board: use --bind-to none, because"),
            ("-n 2 --bind-to user:0,1 prog", "--bind-to user:0,1: start ringrun under `taskset -c LIST`"),
            ("-n 2 --bind-to roof prog", "--bind-to roof: ringrun binds ranks to core, numa or none"),
            ("-n 1 a : -n 1 b", "one command for all ranks"),
            ("-n 2 -x RING_TIMELINE=t -x RING_SECRET=hush prog", "-x RING_SECRET: only ringrun sets"),
            ("-n 2 --stdin all prog", "only rank 0 can read it"),
            ("-n 2 -stdin 1 prog", "only rank 0 can read it"),
        ] {
            let error = parse_line(line).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn auto_is_one_rank_for_each_processor() {
        let processors = std::thread::available_parallelism().unwrap().get();
        for line in ["-n auto prog", "--nproc_per_node=cpu prog"] {
            assert_eq!(parse_line(line).unwrap().world.as_usize(), processors, "{line}");
        }
    }

    #[test]
    fn the_value_of_the_option_mpi4py_is_optional() {
        for (line, expected) in [
            ("-n 2 prog", Mpi4py::Refused),
            ("-n 2 prog --mpi4py", Mpi4py::Refused),
            ("--mpi4py -np 2 prog", Mpi4py::Ringtrain),
            ("--mpi4py=ringtrain -n 2 prog", Mpi4py::Ringtrain),
            ("--mpi4py=installed -n 2 prog", Mpi4py::Installed),
        ] {
            assert_eq!(parse_line(line).unwrap().mpi4py, expected, "{line}");
        }
        let error = parse_line("--mpi4py=mine -n 2 prog").expect_err("the value was accepted");
        assert!(error.contains("neither ringtrain nor installed"), "{error}");
    }

    #[test]
    fn rank_0_reads_standard_input_by_default() {
        for (line, expected) in [
            ("-n 2 prog", StdinReader::RankZero),
            ("-n 2 --stdin 0 prog", StdinReader::RankZero),
            ("-n 2 -stdin=none prog", StdinReader::NoRank),
            ("-n 2 --input none prog", StdinReader::NoRank),
        ] {
            assert_eq!(parse_line(line).unwrap().stdin_reader, expected, "{line}");
        }
    }

    #[test]
    fn a_job_timeout_limits_the_start_timeout() {
        let limits = parse_line("-n 2 --job-timeout 5 prog").unwrap().limits;
        assert_eq!(limits.start_timeout, Duration::from_secs(5));
    }

    #[test]
    fn failures_are_tolerated_only_on_request() {
        for (line, expected) in
            [("-n 2 prog", FailurePolicy::EndJob), ("-n 2 --tolerate_failures prog", FailurePolicy::Tolerate)]
        {
            assert_eq!(parse_line(line).unwrap().failure_policy, expected, "{line}");
        }
    }

    #[test]
    fn the_last_of_several_tag_options_applies() {
        assert_eq!(parse_line("-n 2 --no-tag-output prog").unwrap().output_format, OutputFormat::Raw);
        assert_eq!(
            parse_line("-n 2 --no-tag-output --tag-output prog").unwrap().output_format,
            OutputFormat::Tagged
        );
        assert_eq!(parse_line("-n 2 prog").unwrap().output_format, OutputFormat::Tagged);
    }
}
