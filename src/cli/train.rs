//! The program `ringtrain`: arguments -> checked configuration -> run -> exit code.

mod args;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Parser;
use signal_hook::consts::{SIGINT, SIGTERM};

use self::args::LowArgs;
use super::group_args;
use super::print_error::print_error;
use crate::exit::Exit;
use crate::group::Algorithms;
use crate::train::{self, Console, Observer, Phase, ProgressDisplay, Silent, TrainError};
use crate::types::{Rank, WorldSize};

/// A failure, with the exit code and the message of the program.
struct Failure {
    exit: Exit,
    message: String,
}

/// Runs `ringtrain` with these arguments, the program's name first.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    // A test may call this twice; the second initialisation fails, which does no harm.
    let _ = env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).try_init();
    let low = match parse(args) {
        Ok(low) => low,
        Err(code) => return code,
    };
    match train(low) {
        Ok(()) => Exit::Success.into(),
        Err(failure) => failure.print(),
    }
}

impl Failure {
    fn print(self) -> ExitCode {
        print_error("ringtrain", format_args!("error: {}", self.message));
        self.exit.into()
    }
}

/// The options; help, a version or an error is printed, and the exit code returned.
fn parse(args: impl Iterator<Item = OsString>) -> Result<LowArgs, ExitCode> {
    LowArgs::try_parse_from(args).map_err(|error| {
        // clap's own exit code: 0 for --help and --version, 2 otherwise. A closed pipe is no error.
        let _ = error.print();
        ExitCode::from(error.exit_code() as u8)
    })
}

fn config(low: LowArgs) -> Result<train::Config, Failure> {
    low.lift().map_err(|message| Failure { exit: Exit::Usage, message: message + " (see --help)" })
}

/// Checks arguments, the program's name first, without joining a job: ringrun prints an error once and not from every rank.
pub(super) fn check_arguments(args: impl Iterator<Item = OsString>) -> Result<(), ExitCode> {
    config(parse(args)?).map(drop).map_err(Failure::print)
}

fn train(low: LowArgs) -> Result<(), Failure> {
    let mut joining = low.group.clone();
    if joining.algorithm.is_automatic() {
        // Two runs with the same options give the same parameters, to the last bit.
        joining.algorithm = Algorithms::reproducible();
    }
    let config = config(low)?;
    let mut group =
        joining.join().map_err(|error| Failure { exit: error.exit(), message: error.to_string() })?;
    let stop = stop_on_signals().map_err(|error| Failure {
        exit: Exit::Failure,
        message: format!("cannot listen for signals: {error}"),
    })?;
    let rank = group.rank();
    let display = if io::stderr().is_terminal() { ProgressDisplay::Bar } else { ProgressDisplay::Lines };
    let mut console = Console::new(display, io::stdout());
    if rank == Rank::ZERO && group.size() > WorldSize::ONE {
        console.notice(&joining.describe(&group));
    }
    let observer: &mut dyn Observer = if rank == Rank::ZERO { &mut console } else { &mut Silent };
    let summary = train::run(&mut group, &config, &stop, observer)
        .map_err(|error| Failure { exit: exit_of(&error), message: error.to_string() })?;
    group.close();
    if rank == Rank::ZERO {
        console.notice(&conclusion(&summary.report));
    }
    // Every rank prints its hash, so that the user sees that they are equal.
    console.notice(&format!("rank {rank}: parameters_hash {}", summary.report.parameters_hash));
    match console.failure() {
        None => Ok(()),
        Some(error) => Err(Failure {
            exit: Exit::Failure,
            message: format!("training is complete, but standard output could not be written: {error}"),
        }),
    }
}

/// A flag that SIGTERM and SIGINT set. A second signal ends the process at once.
fn stop_on_signals() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal must find the flag unset.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

fn conclusion(report: &train::Report) -> String {
    let mut line = format!("final: train loss {:.6}", report.train_loss);
    if report.stopped {
        line += " in the current epoch so far, not evaluated after the signal";
    }
    for (name, value) in [
        ("test loss", report.test_loss),
        ("test accuracy", report.test_accuracy),
        ("train R²", report.train_r2),
        ("test R²", report.test_r2),
    ] {
        if let Some(value) = value {
            let _ = write!(line, ", {name} {value:.4}");
        }
    }
    let (seconds, communication) = (report.seconds, report.communication_seconds);
    let _ = write!(
        line,
        "; {:.0} samples/s, {seconds:.2} s of which {communication:.2} s communication",
        report.samples_per_second
    );
    if report.bucket_bytes.is_some() {
        let _ = write!(line, " ({:.2} s of it not overlapped)", report.exposed_communication_seconds);
    }
    line
}

fn exit_of(error: &TrainError) -> Exit {
    match error {
        TrainError::Data(_)
        | TrainError::DataDiffer { .. }
        | TrainError::Elsewhere { phase: Phase::Data, .. } => Exit::Data,
        TrainError::Checkpoint(_) | TrainError::Elsewhere { phase: Phase::Storage, .. } => Exit::Checkpoint,
        TrainError::ArgumentsDiffer { .. } => Exit::Configuration,
        TrainError::Diverged(_) => Exit::Diverged,
        TrainError::ParametersDiffer { .. } => Exit::ParametersDiffer,
        TrainError::Group(error) => group_args::exit_of(error),
    }
}
