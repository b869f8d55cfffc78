//! The program `ringtrain`: parses and checks its arguments, trains, and returns an exit code.

mod args;
mod checkpoint_args;
mod commands;
mod compression_args;
mod config_file;
mod data_args;
mod flight;
mod generate;
mod help;
mod invocation;
mod monitoring;
mod optimizer_args;
mod option_set;
mod output_args;
mod pid_file;
mod pipeline_args;
mod recipe_args;
mod server_args;
mod service;
mod service_manager;
mod table_args;
mod text_args;

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::CommandFactory as _;
use rustix::fs::{FileType, fstat};
use signal_hook::consts::{SIGINT, SIGTERM};

use self::args::TrainArgs;
use self::invocation::{ArgumentError, Invocation};
use self::monitoring::MetricsServer;
use self::output_args::OutputArgs;
use self::service::{ServiceObserver, ServiceState};
use super::group_args;
use super::log_format::start_text_log;
use super::observe_args::{AfterSignal, write_record_on_signals};
use super::print_error::print_error;
use crate::exit::Exit;
use crate::group::{Algorithms, Group};
use crate::launch::STATUS_COLUMNS_VARIABLE;
use crate::train::data::check_standard_input_is_no_terminal;
use crate::train::predict::Evaluation;
use crate::train::{
    self, CompressionReport, Console, GossipError, Observer, ParameterServerError, ProgressDisplay,
    RefusalReason, RunPhase, SilentObserver, TrainError,
};
use crate::types::{Rank, WorldSize};

/// A failure of the program: its exit code and its message.
struct ProgramFailure {
    exit: Exit,
    message: String,
}

/// Returns the definition of the options and of the commands.
pub(super) fn command() -> clap::Command {
    TrainArgs::command().subcommands(commands::definitions())
}

/// Runs `ringtrain` and returns its exit code. The first of `args` is the name of the program.
pub fn run_ringtrain(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.collect();
    if commands::is_command(&args) {
        start_text_log("warn", "ringtrain");
        return match commands::run_command(&args) {
            Ok(Ok(())) => Exit::Success.into(),
            Ok(Err(failure)) => failure.print_and_return_exit_code(),
            Err(error) => print_clap_error(&error),
        };
    }
    let invocation = match parse_invocation(args) {
        Ok(invocation) => invocation,
        Err(code) => return code,
    };
    let level = invocation.service_args().log_level();
    let log = level.and_then(|level| invocation.group_args().start_log("ringtrain", level));
    match log.map_err(usage_error).and_then(|()| train_as_service(&invocation)) {
        Ok(()) => Exit::Success.into(),
        Err(failure) => failure.print_and_return_exit_code(),
    }
}

impl ProgramFailure {
    /// Prints the message, and returns the exit code.
    fn print_and_return_exit_code(self) -> ExitCode {
        print_error("ringtrain", format_args!("error: {}", self.message));
        self.exit.into()
    }
}

/// Parses the options. On `--help`, `--version` or an error, prints the text and returns the exit code as `Err`.
fn parse_invocation(args: Vec<OsString>) -> Result<Invocation, ExitCode> {
    Invocation::parse(args).map_err(|error| match error {
        ArgumentError::Clap(error) => print_clap_error(&error),
        ArgumentError::Wrong(message) => usage_error(message).print_and_return_exit_code(),
    })
}

/// Returns the failure for wrong arguments.
fn usage_error(message: String) -> ProgramFailure {
    ProgramFailure { exit: Exit::Usage, message: message + " (see --help)" }
}

/// Prints the text of `--help` or `--version`, or an error in the arguments. Returns the exit code.
fn print_clap_error(error: &clap::Error) -> ExitCode {
    // clap's exit code is 0 for --help and --version, otherwise 2. A closed pipe is not an error.
    let _ = error.print();
    ExitCode::from(error.exit_code() as u8)
}

/// Checks the arguments without joining a job, so that ringrun prints an error once and not on every rank. The first
/// argument is the program's name.
pub(super) fn check_arguments(args: impl Iterator<Item = OsString>) -> Result<(), ExitCode> {
    let args: Vec<OsString> = args.collect();
    if commands::is_command(&args) {
        return Err(match commands::error_for_several_ranks(&args) {
            Ok(failure) => failure.print_and_return_exit_code(),
            Err(error) => print_clap_error(&error),
        });
    }
    let invocation = parse_invocation(args)?;
    let stored = match invocation.resume_source() {
        None => None,
        // A missing checkpoint is no error here, because the checkpoint may be on the host of rank 0. Each
        // rank checks the arguments again when the rank starts.
        Some(source) if !source.has_checkpoint() => return Ok(()),
        Some(source) => match source.read_stored_options() {
            Ok(stored) => stored,
            Err(_) => return Ok(()),
        },
    };
    let prepared = invocation.to_config_and_output(stored.as_deref()).map_err(usage_error);
    prepared
        .and_then(|(config, _)| check_standard_input(&config))
        .map_err(ProgramFailure::print_and_return_exit_code)
}

/// Checks that the standard input of ringrun is not a terminal if rank 0 reads it. Rank 0 cannot check this, because
/// ringrun gives it `/dev/null` instead of a terminal.
fn check_standard_input(config: &train::Config) -> Result<(), ProgramFailure> {
    if config.reads_standard_input() {
        check_standard_input_is_no_terminal()
            .map_err(|error| ProgramFailure { exit: Exit::Data, message: error.to_string() })?;
    }
    Ok(())
}

/// Returns the configuration and the output options of a run that resumes. Only rank 0 reads the options in the
/// checkpoint, because the hosts of the other ranks may not have the checkpoint.
fn configure_resumed_run(
    invocation: &Invocation,
    group: &mut Group,
) -> Result<(train::Config, OutputArgs), ProgramFailure> {
    let is_reader = group.rank() == Rank::ZERO;
    let source = invocation.resume_source().filter(|_| is_reader);
    let stored = source.map_or(Ok(None), |source| source.read_stored_options());
    let stored: Result<Option<String>, String> =
        group.broadcast_object(&stored, Rank::ZERO).map_err(|error| ProgramFailure {
            exit: group_args::exit_code_of_group_error(&error),
            message: error.to_string(),
        })?;
    let stored = stored.map_err(|message| {
        group.report_failed_rank(Rank::ZERO);
        let message = if is_reader { message } else { format!("rank 0 failed: {message}") };
        ProgramFailure { exit: Exit::Checkpoint, message }
    })?;
    invocation.to_config_and_output(stored.as_deref()).map_err(usage_error)
}

/// Trains, and tells the service manager about the state of this process.
fn train_as_service(invocation: &Invocation) -> Result<(), ProgramFailure> {
    let mut service = ServiceState::start(invocation.service_args())
        .map_err(|message| ProgramFailure { exit: Exit::Configuration, message })?;
    let result = train(invocation, &mut service);
    match &result {
        Ok(()) => service.set_stopping("the run has ended"),
        Err(failure) => service.set_stopping(&format!("failed: {}", failure.message)),
    }
    result
}

/// Joins the job, trains, and prints the result.
fn train(invocation: &Invocation, service: &mut ServiceState) -> Result<(), ProgramFailure> {
    let mut join_args = invocation.group_args().clone();
    if join_args.algorithm.is_automatic() {
        // With these algorithms, two runs with the same options produce bitwise equal parameters.
        join_args.algorithm = Algorithms::reproducible();
    }
    let resumes = invocation.resume_source().is_some();
    // The options of a run that resumes are known only after rank 0 has read the checkpoint.
    let prepared =
        if resumes { None } else { Some(invocation.to_config_and_output(None).map_err(usage_error)?) };
    let mut group = join_args
        .join()
        .map_err(|error| ProgramFailure { exit: error.exit_code(), message: error.to_string() })?;
    let (config, output) = match prepared {
        Some(prepared) => prepared,
        None => configure_resumed_run(invocation, &mut group)?,
    };
    let console_options = output.console_options(progress_display());
    let no_signals = |error: io::Error| ProgramFailure {
        exit: Exit::Failure,
        message: format!("cannot listen for signals: {error}"),
    };
    let stop_flag = register_stop_flag().map_err(no_signals)?;
    write_record_on_signals(&group, AfterSignal::Continue).map_err(no_signals)?;
    service.set_ready();
    let rank = group.rank();
    let mut console = Console::new(console_options, io::stdout());
    if rank == Rank::ZERO && group.size() > WorldSize::ONE {
        console.notice(&join_args.describe_job(&group));
    }
    let metrics = start_metrics_server((&config, &output), &group, &mut console)?;
    let observer: &mut dyn Observer = if rank == Rank::ZERO { &mut console } else { &mut SilentObserver };
    let mut status_observer;
    let observer: &mut dyn Observer = match &metrics {
        Some(server) => {
            status_observer = server.observe(observer);
            &mut status_observer
        }
        None => observer,
    };
    let mut observer = ServiceObserver::new(observer, service, &stop_flag);
    let summary = train::run(&mut group, &config, &stop_flag, &mut observer).map_err(|error| {
        group.write_flight_record(&error.to_string());
        ProgramFailure { exit: exit_code_of_train_error(&error), message: error.to_string() }
    })?;
    let timeline = group.write_timeline().map_err(|error| ProgramFailure {
        exit: group_args::exit_code_of_group_error(&error),
        message: format!("training is complete, but the ranks could not gather the timeline: {error}"),
    })?;
    drop(metrics);
    group.close();
    let reporter = summary.report.gossip.as_ref().map_or(Rank::ZERO, |gossip| Rank::new(gossip.coordinator));
    if rank == reporter {
        console.notice(&describe_result(&summary.report));
    }
    if let Some(timeline) = timeline {
        console.notice(&timeline.to_string());
    }
    // Every rank prints the hash of its parameters, so that the user can compare the hashes.
    console.notice(&format!("rank {rank}: parameters_hash {}", summary.report.parameters_hash));
    match console.failure() {
        None => Ok(()),
        Some(error) => Err(ProgramFailure {
            exit: Exit::Failure,
            message: format!("training is complete, but standard output could not be written: {error}"),
        }),
    }
}

/// Starts the server of `--metrics`, and prints its address: on every rank if each rank has an unknown port, otherwise only on
/// rank 0.
fn start_metrics_server(
    (config, output): (&train::Config, &OutputArgs),
    group: &Group,
    console: &mut Console<io::Stdout>,
) -> Result<Option<MetricsServer>, ProgramFailure> {
    let Some(address) = output.metrics else { return Ok(None) };
    let (server, warning) = MetricsServer::start(address, group, config.strategy.to_string())
        .map_err(|(exit, message)| ProgramFailure { exit, message })?;
    if address.has_any_port() || group.rank() == Rank::ZERO {
        console.notice(&format!("rank {}: {}", group.rank(), server.describe()));
    }
    if let Some(warning) = warning {
        console.warning(&warning);
    }
    Ok(Some(server))
}

/// Returns where the progress bar appears: on the terminal of this process, on the terminal of ringrun, or nowhere.
fn progress_display() -> ProgressDisplay {
    let stderr = io::stderr();
    if stderr.is_terminal() {
        return ProgressDisplay::Bar;
    }
    let columns = env::var(STATUS_COLUMNS_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .filter(|&columns| columns > 0);
    // If a wrapper script redirects standard error to a file, ringrun cannot read the bar.
    let is_pipe = fstat(&stderr).is_ok_and(|status| FileType::from_raw_mode(status.st_mode).is_fifo());
    columns
        .filter(|_| is_pipe)
        .map_or(ProgressDisplay::None, |columns| ProgressDisplay::RelayedBar { columns })
}

/// Makes SIGTERM and SIGINT set a flag, and returns this flag. A second signal ends the process at once.
fn register_stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop_flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // Handlers run in the order of these lines. The first handler ends the process if the flag is already set, so
        // the first handler must run before the second handler, which sets the flag.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop_flag))?;
        signal_hook::flag::register(signal, Arc::clone(&stop_flag))?;
    }
    Ok(stop_flag)
}

/// Returns the line that shows the final losses and metrics.
fn describe_result(report: &train::Report) -> String {
    let mut line = format!("final: train loss {:.6}", report.train_loss);
    if report.stopped {
        line += " (in the current epoch so far; no evaluation after the signal)";
    }
    let (mae, macro_f1, auc) = match &report.test_metrics {
        Some(Evaluation::Regression { mae, .. }) => (Some(*mae), None, None),
        Some(Evaluation::Classification { macro_f1, auc, .. }) => (None, Some(*macro_f1), *auc),
        _ => (None, None, None),
    };
    for (name, value) in [
        ("test loss", report.test_loss),
        ("test accuracy", report.test_accuracy),
        ("train R²", report.train_r2),
        ("test R²", report.test_r2),
        ("test MAE", mae),
        ("test macro F1", macro_f1),
        ("test AUC", auc),
        ("train perplexity", report.train_perplexity),
        ("test perplexity", report.test_perplexity),
    ] {
        if let Some(value) = value {
            let _ = write!(line, ", {name} {value:.4}");
        }
    }
    let (seconds, communication) = (report.seconds, report.communication_seconds);
    let _ = write!(line, "; {:.0} samples/s, {seconds:.2} s", report.samples_per_second);
    if report.parameter_server.is_none() && report.gossip.is_none() {
        let _ = write!(line, " with {communication:.2} s of communication");
    }
    if report.bucket_bytes.is_some() {
        let _ = write!(line, " ({:.2} s not overlapped)", report.exposed_communication_seconds);
    }
    if let Some(text) = report.compressed.as_ref().and_then(CompressionReport::describe) {
        let _ = write!(line, "; {text}");
    }
    line
}

fn exit_code_of_train_error(error: &TrainError) -> Exit {
    match error {
        TrainError::Data(_)
        | TrainError::DataDiffer { .. }
        | TrainError::OtherRankFailed { phase: RunPhase::Data, .. } => Exit::Data,
        TrainError::Checkpoint(_)
        | TrainError::ModelFile(_)
        | TrainError::OtherRankFailed { phase: RunPhase::Storage, .. } => Exit::Checkpoint,
        TrainError::ArgumentsDiffer { .. } => Exit::Configuration,
        TrainError::Options(_) => Exit::Usage,
        TrainError::Diverged(_)
        | TrainError::Layer(_)
        | TrainError::OtherRankFailed { phase: RunPhase::Training, .. } => Exit::Diverged,
        TrainError::ParametersDiffer { .. } => Exit::ParametersDiffer,
        TrainError::ParameterServer(error) => match error {
            ParameterServerError::TooFewRanks { .. } | ParameterServerError::Unsupported(_) => {
                Exit::Configuration
            }
            ParameterServerError::Refused { reason, .. } => match reason {
                RefusalReason::Diverged => Exit::Diverged,
                RefusalReason::RankLost => Exit::PeerLost,
                RefusalReason::Storage => Exit::Checkpoint,
                _ => Exit::Failure,
            },
            _ => Exit::PeerLost,
        },
        TrainError::Gossip(GossipError::CoordinatorFailed { .. }) => Exit::Failure,
        TrainError::Gossip(_) => Exit::PeerLost,
        TrainError::Group(error) => group_args::exit_code_of_group_error(error),
    }
}
