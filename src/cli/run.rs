//! Parses the arguments of ringrun. The module `other_launchers` first translates the options of other launchers.
//! clap then checks each option, and this module checks that the options fit together and makes a [`LaunchPlan`].

mod firewall;
mod help;
mod host_list;
mod hosts;
mod nodes;
mod other_launchers;
mod ports;
mod programs;
mod rank_count;
#[cfg(test)]
mod tests;
mod top;
mod values;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::iter;
use std::mem;
use std::path::{self, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgAction, CommandFactory as _, FromArgMatches as _, Parser, ValueHint};

use self::firewall::firewall_rules;
use self::hosts::{HostOptions, JobHosts, RankOrder, place_ranks};
use self::nodes::{NodeArgs, place_on_nodes};
use self::ports::check_port_count;
use self::programs::{ProgramArgs, into_rank_programs, refuse_job_options, total_ranks};
use self::rank_count::RankCount;
use self::values::{
    parse_binding, parse_mpi4py, parse_positive_seconds, parse_rank_order, parse_seconds, parse_stdin_reader,
};
use super::log_format::{LogFormat, LogLevel, start_log, start_text_log};
use super::print_error::{message_format, print_launch_error};
use super::version::LONG_VERSION;
use crate::exit::Exit;
use crate::launch::{
    self, AGENT_OPTION, FailurePolicy, InterfaceFilter, LaunchLimits, LaunchPlan, Mpi4py, OutputFormat,
    RELAY_OPTION, RankProgram, SshOptions, StdinReader, Verbosity,
};
use crate::rendezvous::{NodeOptions, PortRange};
use crate::types::WorldSize;

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

    #[command(flatten)]
    nodes: NodeArgs,

    /// The order in which the ranks are placed on the hosts. slot: fill the first host, then the next. node: one rank on each
    /// host in turn.
    #[arg(long, value_name = "ORDER", default_value = "slot", value_parser = parse_rank_order)]
    map_by: RankOrder,

    /// The port of sshd on the other hosts.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    ssh_port: Option<u16>,

    /// The file with the private key for ssh.
    #[arg(long, visible_alias = "ssh-identity-file", value_name = "FILE")]
    ssh_identity: Option<PathBuf>,

    /// Further arguments of ssh, separated by spaces, for example --ssh-options='-o StrictHostKeyChecking=accept-new'.
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true)]
    ssh_options: Vec<String>,

    /// The most hosts that ringrun, and each other host, reaches through ssh itself. If there are more hosts, the first hosts run
    /// ssh to further hosts. 0: ringrun runs ssh to all hosts.
    #[arg(long, value_name = "N", default_value_t = 64)]
    ssh_fanout: u16,

    /// On the other hosts, use DIR/bin/ringrun. Without this option, ringrun uses the file with the same path as its own
    /// executable or, if there is no such file, the ringrun in PATH.
    #[arg(long, value_name = "DIR")]
    remote_prefix: Option<PathBuf>,

    /// The network interfaces that the ranks use for other hosts: names, globs (ib*) and networks (10.0.0.0/8), separated by
    /// commas. ^ excludes an entry: ^docker*. Without this option, the routes between the hosts decide.
    #[arg(long, value_name = "LIST")]
    interface: Option<InterfaceFilter>,

    /// The ports on which the ranks and ringrun listen: one port, or a range such as 7000-7010, which applies to each host. Each
    /// rank needs one port, and ringrun needs one port of its host. Without this option, the operating system chooses the ports.
    #[arg(long, value_name = "PORT[-PORT]")]
    port: Option<PortRange>,

    /// Print the rules that the firewalls of the hosts need for the job, as commands of nft and ufw, and exit.
    #[arg(long)]
    print_firewall: bool,

    /// The processors on which each rank may run. core: the rank's share of the processors. numa: all processors of
    /// the NUMA nodes that contain this share. none: all processors.
    #[arg(long, value_name = "PLACE", default_value = "core")]
    bind_to: String,

    /// Print which processors each rank may use.
    #[arg(long)]
    report_bindings: bool,

    /// The format of the messages of ringrun itself on standard error. json: one JSON object for each message, with the same
    /// fields as in the log of ringtrain. The lines of the ranks do not change; see their own --log-format [default: the value of
    /// the environment variable RING_LOG_FORMAT, which the ranks use too, or text]
    #[allow(clippy::doc_markdown, reason = "a help text")]
    #[arg(long, value_name = "FORMAT", value_enum)]
    log_format: Option<LogFormat>,

    /// Begin each line of output with [RANK]<stdout>: or [RANK]<stderr>: (the default).
    #[arg(long, overrides_with = "no_tag_output", action = ArgAction::SetTrue)]
    tag_output: bool,

    /// Print lines unchanged, without a tag.
    #[arg(long, overrides_with = "tag_output", action = ArgAction::SetTrue)]
    no_tag_output: bool,

    /// Begin each line of output with the date and the time (UTC) at which ringrun has received it, before the tag.
    #[arg(long)]
    timestamp_output: bool,

    /// Also write each rank's output to DIR/rank.N/stdout and DIR/rank.N/stderr.
    #[arg(long, visible_alias = "output-filename", value_name = "DIR")]
    output_dir: Option<PathBuf>,

    /// Set the environment variable NAME to VALUE for every rank of the program. Without =VALUE, the ranks get the value of
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

    /// The ranks that read the standard input of ringrun: 0, all or none. With all, each rank gets a copy. The standard input of
    /// the other ranks is /dev/null. If the standard input of ringrun is a terminal, no rank reads it.
    #[arg(long, value_name = "RANKS", default_value = "0", value_parser = parse_stdin_reader)]
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

    /// The program and its arguments. A : separates several programs, each with its own -n, -x and --wdir.
    #[arg(value_name = "COMMAND", required_unless_present = "print_firewall", trailing_var_arg = true)]
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
        start_text_log("error", "ringrun");
        return launch::run_agent();
    }
    if arguments == [RELAY_OPTION] {
        return launch::run_relay();
    }
    if arguments.first().is_some_and(|first| first == "top") {
        return top::run_top(arguments.drain(1..));
    }
    if arguments.first().is_some_and(|first| first == "doctor") {
        return super::doctor::run_doctor(&arguments[1..], parse_launch_plan);
    }
    let planned = parse_arguments(arguments).and_then(|parsed| {
        let planned = if parsed.job.print_firewall {
            print_firewall(&parsed.job).map(|()| None)
        } else {
            let format = parsed.job.log_format();
            format.and_then(|format| Ok(Some((into_plan(parsed)?, format))))
        };
        planned.map_err(error_without_usage)
    });
    let (plan, format) = match planned {
        Ok(Some(planned)) => planned,
        Ok(None) => return Exit::Success.into(),
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
    start_log(LogLevel::FromEnvironment("error"), format, ("ringrun", None));
    match launch::run_job(&plan) {
        Ok(code) => code.into(),
        Err(error) => {
            print_launch_error(&plan, &error);
            error.exit_code().into()
        }
    }
}

/// Checks the arguments of built-in programs before any rank starts, so that ringrun prints an error or the `--help`
/// text only once.
fn check_builtin_arguments(plan: &LaunchPlan) -> Result<(), ExitCode> {
    plan.programs.iter().try_for_each(|RankProgram { program, arguments, .. }| {
        let arguments = iter::once(program).chain(arguments).cloned();
        match program.to_str() {
            Some("ringtrain") => super::train::check_arguments(arguments),
            Some("ringbench") => super::bench::check_arguments(arguments, plan.world),
            _ => Ok(()),
        }
    })
}

fn parse_launch_plan(arguments: Vec<OsString>) -> Result<LaunchPlan, clap::Error> {
    into_plan(parse_arguments(arguments)?).map_err(error_without_usage)
}

/// The checked options of a command line.
struct ParsedArguments {
    job: RunArgs,
    /// Whether the user has given `--start-timeout`.
    has_start_timeout: bool,
    /// The options of each program, also of the first.
    programs: Vec<ProgramArgs>,
}

/// Checks each option. The options of the job stand before the first program.
fn parse_arguments(arguments: Vec<OsString>) -> Result<ParsedArguments, clap::Error> {
    let mut command = RunArgs::command();
    let parse_part = |command: &mut clap::Command, part| {
        let (mut translated, next) = other_launchers::translate_options_of_other_launchers(command, part)
            .map_err(error_without_usage)?;
        translated.insert(0, "ringrun".into());
        Ok::<_, clap::Error>((command.try_get_matches_from_mut(translated)?, next))
    };
    let (matches, mut next) = parse_part(&mut command, arguments)?;
    let has_start_timeout = matches.value_source("start_timeout") == Some(ValueSource::CommandLine);
    let mut job = RunArgs::from_arg_matches(&matches)?;
    let mut programs = vec![job.take_program()];
    while let Some(part) = next {
        let (matches, after) = parse_part(&mut command, part)?;
        refuse_job_options(&command, &matches).map_err(error_without_usage)?;
        programs.push(RunArgs::from_arg_matches(&matches)?.take_program());
        next = after;
    }
    job.ranks = total_ranks(&programs).map_err(error_without_usage)?;
    Ok(ParsedArguments { job, has_start_timeout, programs })
}

/// Prints the rules that the firewalls need.
fn print_firewall(args: &RunArgs) -> Result<(), String> {
    let hosts = args.place_ranks(args.nodes.check()?.as_ref())?;
    let rules = firewall_rules(&hosts, args.port, args.ssh_port, args.ssh_fanout);
    // A closed pipe is not an error.
    let _ = io::stdout().write_all(rules.as_bytes());
    Ok(())
}

impl RunArgs {
    /// Removes and returns what belongs to the program.
    fn take_program(&mut self) -> ProgramArgs {
        ProgramArgs {
            ranks: self.ranks.take(),
            variables: mem::take(&mut self.variables),
            directory: self.wdir.take(),
            command: mem::take(&mut self.command),
        }
    }

    /// Returns the format of the messages.
    fn log_format(&self) -> Result<LogFormat, String> {
        self.log_format.map_or_else(LogFormat::from_environment, Ok)
    }

    /// Returns what is wrong if an option does not work with `--nnodes`.
    fn find_node_conflict(&self) -> Option<&'static str> {
        let conflicts = [
            (self.ranks.is_some(), "-n: give the number of ranks on each node, --nproc-per-node M"),
            (
                !self.hosts.is_empty() || self.hostfile.is_some(),
                "--host: each node of --nnodes runs this command itself; leave out --host or --nnodes",
            ),
            (
                self.tolerate_failures,
                "--tolerate-failures: leave it out, because each node sees only its own ranks",
            ),
            (self.print_firewall, "--print-firewall: name the hosts of the job with --host"),
        ];
        conflicts.into_iter().find(|&(is_given, _)| is_given).map(|(_, sentence)| sentence)
    }

    /// Places the ranks on the hosts, and checks that each host has enough ports.
    fn place_ranks(&self, nodes: Option<&NodeOptions>) -> Result<JobHosts, String> {
        let options = HostOptions {
            ranks: self.ranks,
            ranks_per_host: self.ranks_per_host,
            hosts: &self.hosts,
            hostfile: self.hostfile.as_deref(),
            order: self.map_by,
        };
        let hosts = match nodes {
            Some(nodes) => match self.find_node_conflict() {
                Some(sentence) => return Err(format!("--nnodes {}: {sentence}", nodes.nodes)),
                None => place_on_nodes(nodes, self.ranks_per_host)?,
            },
            None => place_ranks(&options)?,
        };
        if let Some(ports) = self.port {
            check_port_count(ports, &hosts)?;
        }
        Ok(hosts)
    }
}

/// Returns an error that prints only `text`, without the usage lines that clap adds.
fn error_without_usage(text: String) -> clap::Error {
    clap::Error::raw(ErrorKind::ValueValidation, text + "\n")
}

/// Checks that the options can be used together, and converts them to a plan.
fn into_plan(parsed: ParsedArguments) -> Result<LaunchPlan, String> {
    let ParsedArguments { job: args, has_start_timeout, programs } = parsed;
    let log_format = args.log_format()?;
    let nodes = args.nodes.check()?;
    let JobHosts { world, share, remote_hosts } = args.place_ranks(nodes.as_ref())?;
    let mut start_timeout = args.start_timeout;
    if let Some(job_timeout) = args.job_timeout
        && job_timeout < start_timeout
    {
        if has_start_timeout {
            return Err(
                "--job-timeout is shorter than --start-timeout: the start could never time out".to_owned()
            );
        }
        start_timeout = job_timeout;
    }
    let programs = into_rank_programs(programs, world)?;
    let failure_policy = if args.tolerate_failures { FailurePolicy::Tolerate } else { FailurePolicy::EndJob };
    if failure_policy == FailurePolicy::Tolerate {
        check_tolerate_failures(world, &programs)?;
    }
    if args.interface.is_some() && remote_hosts.is_empty() && nodes.is_none() {
        return Err("--interface: all ranks run on this host, so they use no network; leave the option out"
            .to_owned());
    }
    Ok(LaunchPlan {
        interfaces: args.interface,
        ports: args.port,
        world,
        nodes,
        remote_hosts,
        ssh: SshOptions {
            port: args.ssh_port,
            identity: args.ssh_identity.map(absolute_if_it_exists),
            arguments: args
                .ssh_options
                .iter()
                .flat_map(|options| options.split_whitespace())
                .map(str::to_owned)
                .collect(),
            remote_prefix: args.remote_prefix,
            fanout: args.ssh_fanout,
        },
        programs,
        mpi4py: args.mpi4py.unwrap_or(Mpi4py::Refused),
        stdin_reader: args.stdin,
        share,
        message_format: message_format(log_format),
        output_format: choose_output_format(args.no_tag_output, args.timestamp_output)?,
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

/// Returns the absolute path of a file of this host, because other hosts run ssh in another directory. ssh itself replaces `~`.
fn absolute_if_it_exists(path: PathBuf) -> PathBuf {
    if path.exists() { path::absolute(&path).unwrap_or(path) } else { path }
}

/// Returns the format in which ringrun prints lines.
fn choose_output_format(no_tag_output: bool, timestamp_output: bool) -> Result<OutputFormat, String> {
    match (no_tag_output, timestamp_output) {
        (false, false) => Ok(OutputFormat::Tagged),
        (false, true) => Ok(OutputFormat::Timestamped),
        (true, false) => Ok(OutputFormat::Raw),
        (true, true) => {
            Err("--timestamp-output: the time is part of the tag; leave --no-tag-output out".to_owned())
        }
    }
}

/// Refuses `--tolerate-failures` for jobs that cannot continue after a rank has failed.
fn check_tolerate_failures(world: WorldSize, programs: &[RankProgram]) -> Result<(), String> {
    if world == WorldSize::ONE {
        return Err(
            "--tolerate-failures needs at least 2 ranks: no rank could continue after a failure".to_owned()
        );
    }
    if programs.iter().any(|program| program.program == "ringbench") {
        return Err(
            "--tolerate-failures: ringbench cannot continue after a rank is lost; leave this option out"
                .to_owned(),
        );
    }
    Ok(())
}
