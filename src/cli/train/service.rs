//! `ringtrain` as a service: the process id file, the messages to the service manager, and the log level that a signal
//! reads again.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use log::LevelFilter;
use signal_hook::consts::SIGHUP;

use super::pid_file::PidFile;
use super::service_manager::ServiceManager;
use crate::cli::log_format::LogLevel;
use crate::train::{CompletedStep, EpochRecord, Observer, RankMeasurements};

/// More bytes than the longest level and white space.
const LEVEL_FILE_BYTES_MAX: u64 = 64;
/// The level if the file of the level does not exist, and without `--log-level-file`.
const DEFAULT_LEVEL: LevelFilter = LevelFilter::Warn;
/// The status changes at most this often.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// A sign of life is sent when this part of the watchdog's time has passed.
const WATCHDOG_FRACTION: u32 = 4;

// These comments are also the text of --help, so they have no backticks.
#[allow(clippy::doc_markdown, reason = "help texts")]
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Running as a service")]
pub(super) struct ServiceArgs {
    /// Write the id of this process to FILE, and remove FILE at the end. If FILE belongs to a process that still runs,
    /// ringtrain ends with an error
    #[arg(long, value_name = "FILE")]
    pub(super) pid_file: Option<PathBuf>,

    /// Read the log level from FILE, at the start and after each SIGHUP: off, error, warn, info, debug or trace. If FILE
    /// does not exist, the level is warn. The variable RUST_LOG is ignored
    #[arg(long, value_name = "FILE")]
    pub(super) log_level_file: Option<PathBuf>,
}

impl ServiceArgs {
    /// Returns the messages that the log has.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says why the file of the level cannot be used.
    pub(super) fn log_level(&self) -> Result<LogLevel, String> {
        match &self.log_level_file {
            None => Ok(LogLevel::FromEnvironment("warn")),
            Some(path) => read_level(path).map(LogLevel::Changeable),
        }
    }
}

/// The state of this process as a service. Its messages go to the service manager if there is one.
#[derive(Debug)]
pub(super) struct ServiceState {
    manager: Option<ServiceManager>,
    /// The file of the log level, and the flag that SIGHUP sets.
    level: Option<(PathBuf, Arc<AtomicBool>)>,
    is_stopping: bool,
    /// Removes the file when the service ends.
    _pid_file: Option<PidFile>,
}

impl ServiceState {
    /// Creates the process id file, connects to the service manager, and listens for SIGHUP if there is a file of the log
    /// level.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option or variable cannot be used.
    pub(super) fn start(args: &ServiceArgs) -> Result<Self, String> {
        let level = match &args.log_level_file {
            None => None,
            Some(path) => {
                let flag = Arc::new(AtomicBool::new(false));
                signal_hook::flag::register(SIGHUP, Arc::clone(&flag))
                    .map_err(|error| format!("cannot listen for SIGHUP: {error}"))?;
                Some((path.clone(), flag))
            }
        };
        let pid_file = args.pid_file.as_deref().map(PidFile::create).transpose()?;
        let service = Self {
            manager: ServiceManager::from_environment()?,
            level,
            is_stopping: false,
            _pid_file: pid_file,
        };
        service.set_status("waiting until all ranks have joined");
        Ok(service)
    }

    /// Says that the rank has joined its job.
    pub(super) fn set_ready(&self) {
        self.notify("READY=1\nSTATUS=all ranks have joined");
    }

    /// Says that the process ends, unless it has said so before. `status` says why.
    pub(super) fn set_stopping(&mut self, status: &str) {
        if !self.is_stopping {
            self.is_stopping = true;
            self.notify("STOPPING=1");
        }
        self.set_status(status);
    }

    fn notify(&self, message: &str) {
        if let Some(manager) = &self.manager {
            manager.notify(message);
        }
    }

    fn set_status(&self, status: &str) {
        if let Some(manager) = &self.manager {
            manager.set_status(status);
        }
    }

    /// After a SIGHUP, reads the log level again. If the file is wrong, keeps the level.
    fn reload_if_asked(&self) {
        let Some((path, flag)) = &self.level else { return };
        if !flag.swap(false, Ordering::Relaxed) {
            return;
        }
        if let Some(manager) = &self.manager {
            manager.begin_reload();
        }
        match read_level(path) {
            Ok(level) => log::set_max_level(level),
            Err(problem) => log::warn!("{problem}; the level remains {}", log::max_level()),
        }
        log::info!("the log level is {}", log::max_level());
        self.notify("READY=1");
    }
}

/// Reads a log level from a file.
fn read_level(path: &Path) -> Result<LevelFilter, String> {
    let problem = |text: &str| format!("--log-level-file {}: {text}", path.display());
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(DEFAULT_LEVEL),
        opened => opened.map_err(|error| problem(&error.to_string()))?,
    };
    let mut bytes = Vec::new();
    file.take(LEVEL_FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(|error| problem(&error.to_string()))?;
    let level = str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok());
    level.ok_or_else(|| problem("the file must hold one word: off, error, warn, info, debug or trace"))
}

/// Passes the events of a run on to another observer, and gives the service manager a sign of life for each event. So the
/// signs of life end if the training loop hangs.
pub(super) struct ServiceObserver<'a> {
    inner: &'a mut dyn Observer,
    service: &'a mut ServiceState,
    stop_flag: &'a AtomicBool,
    /// The current epoch and the number of epochs.
    epoch: (u64, u64),
    alive_at: Option<Instant>,
    status_at: Option<Instant>,
}

impl<'a> ServiceObserver<'a> {
    pub(super) fn new(
        inner: &'a mut dyn Observer,
        service: &'a mut ServiceState,
        stop_flag: &'a AtomicBool,
    ) -> Self {
        Self { inner, service, stop_flag, epoch: (0, 0), alive_at: None, status_at: None }
    }

    /// Gives a sign of life, and reacts to signals.
    fn handle_event(&mut self) {
        self.service.reload_if_asked();
        if self.stop_flag.load(Ordering::Relaxed) && !self.service.is_stopping {
            self.service.set_stopping("stopping after a signal");
        }
        let Some(manager) = &self.service.manager else { return };
        let Some(timeout) = manager.watchdog_timeout else { return };
        let now = Instant::now();
        if self.alive_at.is_none_or(|at| now.duration_since(at) >= timeout / WATCHDOG_FRACTION) {
            self.alive_at = Some(now);
            manager.notify("WATCHDOG=1");
        }
    }

    fn show_step(&mut self, step: &CompletedStep) {
        let now = Instant::now();
        if self.service.manager.is_none()
            || self.service.is_stopping
            || self.status_at.is_some_and(|at| now.duration_since(at) < STATUS_INTERVAL)
        {
            return;
        }
        self.status_at = Some(now);
        let position = match self.epoch {
            (0, _) => String::new(),
            (epoch, epochs) => format!("epoch {epoch} of {epochs}, "),
        };
        self.service.set_status(&format!("{position}step {}, loss {:.6}", step.steps_total, step.loss));
    }
}

impl Observer for ServiceObserver<'_> {
    fn notice(&mut self, line: &str) {
        self.handle_event();
        self.inner.notice(line);
    }

    fn warning(&mut self, text: &str) {
        self.handle_event();
        self.inner.warning(text);
    }

    fn epoch_started(&mut self, epoch: u64, epochs: u64, steps_done: u64, steps: u64) {
        self.epoch = (epoch, epochs);
        self.handle_event();
        self.inner.epoch_started(epoch, epochs, steps_done, steps);
    }

    fn batch_started(&mut self, epoch: u64, batch: u64, samples: &[u32]) {
        self.handle_event();
        self.inner.batch_started(epoch, batch, samples);
    }

    fn step_taken(&mut self, step: &CompletedStep) {
        self.handle_event();
        self.show_step(step);
        self.inner.step_taken(step);
    }

    fn measured(&mut self, measurements: &RankMeasurements<'_>) {
        self.inner.measured(measurements);
    }

    fn epoch_ended(&mut self, epochs: u64, record: Option<&EpochRecord>) {
        self.handle_event();
        self.inner.epoch_ended(epochs, record);
    }

    fn adjust_parameters(&mut self, parameters: &mut [f32]) {
        self.inner.adjust_parameters(parameters);
    }
}
