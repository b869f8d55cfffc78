//! `ringrun doctor`: checks the hosts of a job before the job. It starts one process on each host, in the same way as the
//! ranks of a job, and judges what these processes measure.

mod facts;
mod findings;
mod host_check;
mod link_check;
mod ring_order;
mod tables;

use std::env;
use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::process::{ChildStdout, Command, ExitCode, Stdio};

use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use self::findings::{Finding, HostChecks, Severity};
use self::host_check::{HostReport, check_host};
use self::ring_order::suggest_order;
use super::print_error::{print_error, print_launch_error};
use crate::exit::Exit;
use crate::launch::{self, HOST_CHECK_NAME, HostError, LaunchError, LaunchPlan, OutputFormat, RankShare};
use crate::rendezvous::host_name;
use crate::types::WorldSize;

const HELP: &str = "\
Checks the hosts of a job before the job

Usage: ringrun doctor [--json] [OPTIONS OF ringrun]

Starts one process on each host of --host or --hostfile, in the same way as the ranks of a job. Every two
hosts measure the round-trip time, the rate in both directions and the difference of their clocks, which
takes 3 s for each host. Without --host and --hostfile, checks only this host.

Options:
      --json  Print the measurements and the findings as JSON
  -h, --help  Print help

All other options are those of ringrun, such as --host, --hostfile, --ssh-port and --start-timeout.

Exit codes:
  0   the hosts are fit for a job
  1   the hosts are not fit for a job
  2   an option is unknown or has a wrong value
";

/// The longest line that a host may print.
const REPORT_BYTES_MAX: u64 = 4 << 20;
/// The option of the child process that starts the processes on the hosts.
const REPORTS_OPTION: &str = "--reports";

/// The output of `ringrun doctor --json`.
#[derive(Serialize)]
struct DoctorReport<'a> {
    is_fit: bool,
    hosts: &'a [String],
    /// What each host has measured; `null` for a host that has not reported.
    reports: &'a [Option<HostReport>],
    /// Why the check could not start on a host; `null` for the other hosts.
    failures: &'a [Option<String>],
    findings: &'a [Finding],
    /// The suggested order of the hosts in a ring, as indices of `hosts`.
    ring_order: Vec<usize>,
}

/// A line of the child process that starts the processes on the hosts.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum CheckLine {
    /// The process of a host prints it.
    Report(Box<HostReport>),
    /// Why the check cannot start on a host.
    Failure { host: String, reason: String },
}

/// What the child process has said about each host.
struct CheckLines {
    reports: Vec<Option<HostReport>>,
    failures: Vec<Option<String>>,
}

/// Runs `ringrun doctor` and returns its exit code. `arguments` follow the word `doctor`; `parse` checks the options of ringrun.
pub(super) fn run_doctor(
    arguments: &[OsString],
    parse: impl FnOnce(Vec<OsString>) -> Result<LaunchPlan, clap::Error>,
) -> ExitCode {
    let has = |option: &str| arguments.iter().any(|argument| argument == option);
    if has("--help") || has("-h") {
        let _ = io::stdout().write_all(HELP.as_bytes());
        return Exit::Success.into();
    }
    let own_options = ["--json", REPORTS_OPTION];
    let is_of_ringrun = |argument: &&OsString| own_options.iter().all(|own| *argument != own);
    let mut options: Vec<OsString> = arguments.iter().filter(is_of_ringrun).cloned().collect();
    let names_hosts = ["-n", "-H", "--host", "--hostfile", "-hostfile"].iter().any(|option| {
        options.iter().any(|argument| argument.to_string_lossy().split('=').next() == Some(option))
    });
    if !names_hosts {
        options.splice(0..0, ["-n".into(), "1".into()]);
    }
    options.push(HOST_CHECK_NAME.into());
    let plan = match parse(options) {
        Ok(plan) => plan,
        Err(error) => {
            let _ = error.print();
            return Exit::Usage.into();
        }
    };
    if plan.nodes.is_some() {
        print_error("ringrun doctor", "--nnodes: name the hosts with --host");
        return Exit::Usage.into();
    }
    let (plan, names) = check_plan(plan);
    let result =
        if has(REPORTS_OPTION) { run_check_job(&plan) } else { judge(arguments, &names, has("--json")) };
    result.unwrap_or_else(|error| {
        print_error("ringrun doctor", &error);
        Exit::Failure.into()
    })
}

/// Changes a plan to one process on each host. Also returns the names of the hosts, in the order of the ranks.
fn check_plan(mut plan: LaunchPlan) -> (LaunchPlan, Vec<String>) {
    let one_rank = |share: &mut RankShare| {
        share.ranks.truncate(1);
        share.ranks.fill(share.host);
    };
    let mut hosts: Vec<(u32, String)> = Vec::new();
    if plan.share.count() > 0 {
        hosts.push((plan.share.host, host_name()));
    }
    one_rank(&mut plan.share);
    for host in &mut plan.remote_hosts {
        hosts.push((host.share.host, without_user(&host.name).to_owned()));
        one_rank(&mut host.share);
    }
    hosts.sort();
    let names: Vec<String> = hosts.into_iter().map(|(_, name)| name).collect();
    plan.world = WorldSize::new(names.len() as u32).unwrap_or(WorldSize::ONE);
    plan.output_format = OutputFormat::Raw;
    plan.programs.truncate(1);
    for program in &mut plan.programs {
        program.ranks = plan.world.get();
        program.arguments = names.iter().map(OsString::from).collect();
    }
    (plan, names)
}

/// Returns the host of `USER@HOST`.
fn without_user(name: &str) -> &str {
    name.rsplit('@').next().unwrap_or_default()
}

/// Runs the check on all hosts. Each process prints its report to standard output. If the check cannot start on some hosts,
/// prints why.
fn run_check_job(plan: &LaunchPlan) -> io::Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    Ok(match launch::run_job(plan) {
        Ok(code) => code.into(),
        Err(LaunchError::Hosts(failures)) => {
            for HostError { host, reason, .. } in failures {
                let line = CheckLine::Failure { host: without_user(&host).to_owned(), reason };
                writeln!(io::stdout(), "{}", serde_json::to_string(&line)?)?;
            }
            Exit::Start.into()
        }
        Err(error) => {
            print_launch_error(plan, &error);
            error.exit_code().into()
        }
    })
}

/// Runs the check in a child process, whose standard output this process reads, and prints the result.
fn judge(arguments: &[OsString], names: &[String], as_json: bool) -> io::Result<ExitCode> {
    let mut child = Command::new(env::current_exe()?)
        .arg("doctor")
        .arg(REPORTS_OPTION)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout =
        child.stdout.take().ok_or_else(|| io::Error::other("the child process has no standard output"))?;
    let lines = read_lines(stdout, names);
    child.wait()?;
    let CheckLines { reports, failures } = lines?;
    let reports = HostChecks { names, reports: &reports, failures: &failures };
    let findings = reports.findings();
    let is_fit = findings.iter().all(|finding| finding.severity != Severity::Problem);
    let text = if as_json {
        let ring_order = suggest_order(&reports.rates()).0;
        let HostChecks { names: hosts, reports, failures } = reports;
        let report = DoctorReport { is_fit, hosts, reports, failures, findings: &findings, ring_order };
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        tables::format_report(&reports, &findings)
    };
    // A closed pipe is not an error.
    let _ = io::stdout().write_all(text.as_bytes());
    Ok(if is_fit { Exit::Success.into() } else { Exit::Failure.into() })
}

/// Reads the lines of the child process, which are in any order.
fn read_lines(stdout: ChildStdout, names: &[String]) -> io::Result<CheckLines> {
    let mut found = CheckLines { reports: vec![None; names.len()], failures: vec![None; names.len()] };
    let mut lines = BufReader::new(stdout);
    let mut line = Vec::new();
    while (&mut lines).take(REPORT_BYTES_MAX).read_until(b'\n', &mut line)? > 0 {
        match serde_json::from_slice(&line) {
            Ok(CheckLine::Report(report))
                if report.rank < names.len() && report.links.len() == names.len() =>
            {
                let rank = report.rank;
                found.reports[rank] = Some(*report);
            }
            Ok(CheckLine::Failure { host, reason }) if names.contains(&host) => {
                let failed = names.iter().zip(&mut found.failures).filter(|(name, _)| **name == host);
                failed.for_each(|(_, failure)| *failure = Some(reason.clone()));
            }
            // The line is a message of a host's login shell.
            _ => io::stderr().write_all(&line)?,
        }
        line.clear();
    }
    Ok(found)
}

/// Runs the process of one host and returns its exit code. `arguments` are the names of all hosts.
pub fn run_host_check(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let names: Vec<String> = arguments.map(|name| name.to_string_lossy().into_owned()).collect();
    match check_host(&names) {
        Ok(report) => match serde_json::to_string(&report) {
            Ok(json) if writeln!(io::stdout(), "{json}").is_ok() => Exit::Success.into(),
            _ => Exit::Failure.into(),
        },
        Err(error) => {
            print_error("ringrun doctor", &error);
            Exit::Start.into()
        }
    }
}
