//! The options that say what a rank records, and what happens when a signal ends it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};

use super::log_format::{LOG_FORMAT_VARIABLE, LogFormat};
use crate::group::{Group, JoinOptions};
use crate::observe::recording_options::RecordingOptions;
use crate::rendezvous::{FLIGHT_RECORDER_VARIABLE, TIMELINE_VARIABLE};

// These comments are also the text of --help, so they have no backticks.
#[allow(clippy::doc_markdown, reason = "help texts")]
/// The options that say what a rank records.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Recording")]
pub struct ObserveArgs {
    /// When the job fails or a signal ends it, write the last 1,000 operations of each rank to DIR/rank.N.json. The
    /// command ringtrain flight DIR compares the files of all ranks [default: the value of the environment variable
    /// RING_FLIGHT_RECORDER, or record nothing]
    #[arg(long, value_name = "DIR")]
    pub flight_recorder: Option<PathBuf>,

    /// Record a timeline of all ranks on one clock, and write it to FILE at the end. Rank 0 writes FILE, which the web page
    /// ui.perfetto.dev shows. If the job fails, each rank writes its part to FILE.rank.N [default: the value of the
    /// environment variable RING_TIMELINE, or record no timeline]
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,

    /// The format of the log on standard error. json: one JSON object for each line, with the time, level, rank, host and
    /// step. RUST_LOG selects the messages [default: the value of the environment variable RING_LOG_FORMAT, or text]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
}

impl ObserveArgs {
    /// Returns the options of the command line and of the environment.
    pub(super) fn recording_options(&self) -> RecordingOptions {
        let options = RecordingOptions {
            flight_recorder: self.flight_recorder.clone(),
            timeline: self.timeline.clone(),
        };
        options.or(JoinOptions::recording_from_environment())
    }
}

/// The environment variables that ringrun does not set itself although their names begin like those of its own variables.
const VARIABLES_OF_USERS: [&str; 3] = [FLIGHT_RECORDER_VARIABLE, TIMELINE_VARIABLE, LOG_FORMAT_VARIABLE];

/// Returns whether users may set this environment variable.
pub(super) fn is_variable_of_users(name: &[u8]) -> bool {
    VARIABLES_OF_USERS.iter().any(|known| known.as_bytes() == name)
}

/// What a program does after SIGTERM and SIGINT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AfterSignal {
    /// The signal ends the process.
    End,
    /// The program has its own handler.
    Continue,
}

/// If the flight recorder is on, writes a record when this process gets SIGTERM or SIGINT, even while another thread waits for an
/// operation.
pub(super) fn write_record_on_signals(group: &Group, after: AfterSignal) -> io::Result<()> {
    // The thread must not keep the recorder, because the recorder writes its files when the last group is dropped.
    let Some(recorder) = group.recorder().map(Arc::downgrade) else { return Ok(()) };
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let wait_for_signals = move || {
        for signal in signals.forever() {
            let name = signal_name(signal).unwrap_or("a signal");
            if let Some(recorder) = recorder.upgrade() {
                recorder.write_because(&format!("the process got {name}"));
            }
            if after == AfterSignal::End {
                let _ = emulate_default_handler(signal);
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait_for_signals).map(drop)
}
