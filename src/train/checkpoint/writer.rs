//! Writes checkpoints in a separate thread while training continues.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::files::CheckpointFiles;
use super::schedule::SaveSchedule;
use super::{CheckpointError, CheckpointSettings, RunIdentity, TrainingState, serialize_checkpoint};
use crate::train::model::Network;

/// A run that ends with an error waits at most this long for the checkpoint that is being written.
const DROP_WAIT_MAX: Duration = Duration::from_secs(10);
/// The minimum time between two messages about failed saves.
const FAILURE_NOTICE_INTERVAL: Duration = Duration::from_mins(1);

/// Writes the checkpoints of a run. Only one write is in progress at a time.
#[derive(Debug)]
pub(crate) struct CheckpointWriter {
    context: Arc<WriteContext>,
    schedule: SaveSchedule,
    /// The write that is in progress.
    current_write: Option<WriteInProgress>,
    /// The last copy of the state. The next copy reuses its memory.
    spare_copy: TrainingState,
    /// The number of steps of the latest checkpoint in the directory.
    latest_steps: Option<u64>,
    /// The last save, if it failed.
    failed_save: Option<FailedSave>,
    notices: FailureNotices,
}

/// The values that all writes of a run use.
#[derive(Debug)]
struct WriteContext {
    network: Network,
    identity: RunIdentity,
    files: CheckpointFiles,
}

/// A write that is in progress.
#[derive(Debug)]
struct WriteInProgress {
    /// The number of steps that the run had taken when the save began.
    steps: u64,
    /// Whether the checkpoint is also the best checkpoint.
    is_best: bool,
    result: Receiver<WriteResult>,
}

/// The message that the writing thread sends after a write.
#[derive(Debug)]
struct WriteResult {
    /// The copy of the state that was written.
    copy: TrainingState,
    /// The number of steps of the latest checkpoint after the write.
    latest_steps: Option<u64>,
    result: Result<(), CheckpointError>,
}

/// A save that failed.
#[derive(Debug)]
struct FailedSave {
    /// The number of steps that the run had taken when the save was due.
    steps: u64,
    /// Whether the checkpoint would also have been the best checkpoint.
    is_best: bool,
    error: CheckpointError,
}

impl WriteContext {
    /// Writes the checkpoint of `state`. `latest_steps` and `is_best` are the arguments of
    /// [`CheckpointFiles::replace_latest`].
    fn write(
        &self,
        state: &TrainingState,
        latest_steps: &mut Option<u64>,
        is_best: bool,
    ) -> Result<(), CheckpointError> {
        let path = self.files.latest_path();
        let fail = |error| CheckpointError::io("write", &path, error);
        let bytes = serialize_checkpoint(&self.network, &self.identity, state).map_err(fail)?;
        self.files.replace_latest(&bytes, state.position.steps_total, latest_steps, is_best).map_err(fail)
    }
}

impl CheckpointWriter {
    /// Creates the writer of a run that starts after `steps_total` steps. If `steps_total` is not 0, the run has
    /// resumed from a checkpoint in the directory.
    pub(crate) fn new(
        settings: &CheckpointSettings,
        (network, identity): (Network, RunIdentity),
        steps_total: u64,
        now: Instant,
    ) -> Self {
        let files = CheckpointFiles::new(settings);
        Self {
            context: Arc::new(WriteContext { network, identity, files }),
            schedule: SaveSchedule::new(settings, steps_total, now),
            current_write: None,
            spare_copy: TrainingState::default(),
            latest_steps: (steps_total > 0).then_some(steps_total),
            failed_save: None,
            notices: FailureNotices::default(),
        }
    }

    /// Returns whether a write is in progress.
    pub(crate) fn is_writing(&self) -> bool {
        self.current_write.is_some()
    }

    /// Returns whether a save within an epoch is due.
    pub(crate) fn is_due(&self, steps_total: u64, now: Instant) -> bool {
        self.schedule.is_due(steps_total, now)
    }

    /// Returns whether a save within an epoch is due because of the time since the last save.
    pub(crate) fn is_interval_over(&self, now: Instant) -> bool {
        self.schedule.is_interval_over(now)
    }

    /// Returns whether the last save failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed_save.is_some()
    }

    /// Copies `state`, and starts a thread that writes the copy. No other write may be in progress. Returns a line
    /// for the user if the thread cannot start.
    pub(crate) fn begin_save(
        &mut self,
        state: &TrainingState,
        is_best: bool,
        now: Instant,
    ) -> Option<String> {
        debug_assert!(self.current_write.is_none(), "only one write is in progress at a time");
        let steps = state.position.steps_total;
        // If a save of the best checkpoint failed, another save at the same step must save the best checkpoint again.
        let is_best =
            is_best || self.failed_save.as_ref().is_some_and(|last| last.is_best && last.steps == steps);
        self.schedule.record_save_start(steps, now);
        let mut copy = std::mem::take(&mut self.spare_copy);
        copy.copy_from(state);
        let (sender, result) = mpsc::channel();
        let (context, mut latest_steps) = (Arc::clone(&self.context), self.latest_steps);
        let started = thread::Builder::new().name("checkpoint".into()).spawn(move || {
            let result = context.write(&copy, &mut latest_steps, is_best);
            // Sending fails if the run has ended without waiting for this checkpoint.
            let _ = sender.send(WriteResult { copy, latest_steps, result });
        });
        match started {
            Ok(_) => {
                self.current_write = Some(WriteInProgress { steps, is_best, result });
                None
            }
            Err(error) => {
                let error =
                    CheckpointError::io("start a thread to write", &self.context.files.latest_path(), error);
                self.record_save_result((steps, is_best), Err(error), now)
            }
        }
    }

    /// Waits at most for `timeout` until the write that is in progress ends. Returns a line for the user if the
    /// write failed, or if it succeeded after failed writes.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Option<String> {
        let WriteInProgress { steps, is_best, result } = self.current_write.as_ref()?;
        let save = (*steps, *is_best);
        let result = match result.recv_timeout(timeout) {
            Ok(WriteResult { copy, latest_steps, result }) => {
                self.spare_copy = copy;
                self.latest_steps = latest_steps;
                result
            }
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => {
                let error = io::Error::other("the thread that writes checkpoints has panicked");
                Err(CheckpointError::io("write", &self.context.files.latest_path(), error))
            }
        };
        self.current_write = None;
        self.record_save_result(save, result, Instant::now())
    }

    /// Records that the save after `steps` steps could not begin, because the previous write is still in progress.
    /// May return a line for the user.
    pub(crate) fn record_skipped_save(&mut self, steps: u64, is_best: bool, now: Instant) -> Option<String> {
        self.record_save_result((steps, is_best), Err(self.still_writing_error()), now)
    }

    /// Returns an error if the last save failed or is still in progress.
    pub(crate) fn take_error(&mut self) -> Result<(), CheckpointError> {
        let (steps, source) = match (self.failed_save.take(), &self.current_write) {
            (Some(failed), None) => (failed.steps, failed.error),
            (_, Some(write)) => (write.steps, self.still_writing_error()),
            (None, None) => return Ok(()),
        };
        let latest = describe_latest_checkpoint(self.latest_steps);
        Err(CheckpointError::LastNotSaved { steps, latest, source: Box::new(source) })
    }

    /// Returns the error of a save that cannot begin, because the previous write has not ended.
    fn still_writing_error(&self) -> CheckpointError {
        let problem = "the disk has not completed the previous write in time";
        let error = io::Error::new(io::ErrorKind::TimedOut, problem);
        CheckpointError::io("write", &self.context.files.latest_path(), error)
    }

    /// Records the result of the save after `steps` steps. May return a line for the user.
    fn record_save_result(
        &mut self,
        (steps, is_best): (u64, bool),
        result: Result<(), CheckpointError>,
        now: Instant,
    ) -> Option<String> {
        // If a later save was skipped during this write, that save still counts as failed, and the run must repeat it.
        let is_superseded = self.failed_save.as_ref().is_some_and(|last| last.steps > steps);
        match result {
            Ok(()) if is_superseded => None,
            Ok(()) => {
                self.failed_save = None;
                self.notices.record_success(steps)
            }
            Err(error) => {
                let latest = describe_latest_checkpoint(self.latest_steps);
                let line = format!(
                    "warning: the checkpoint of step {steps} was not saved: {error}; {latest}; training continues"
                );
                if !is_superseded {
                    self.failed_save = Some(FailedSave { steps, is_best, error });
                }
                self.notices.record_failure(line, now)
            }
        }
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        self.wait(DROP_WAIT_MAX);
    }
}

/// Returns a sentence that says which checkpoint is the latest.
fn describe_latest_checkpoint(latest_steps: Option<u64>) -> String {
    match latest_steps {
        Some(steps) => format!("the latest checkpoint is from step {steps}"),
        None => "there is no checkpoint yet".into(),
    }
}

/// Limits the number of messages about failed saves.
#[derive(Clone, Copy, Debug, Default)]
struct FailureNotices {
    /// The number of saves that have failed since the last success.
    count: u64,
    /// The time of the last message.
    last: Option<Instant>,
    /// Whether a message about a failure was printed since the last success.
    is_announced: bool,
}

impl FailureNotices {
    /// Records a failure. Returns `line` if no message was printed in the last [`FAILURE_NOTICE_INTERVAL`].
    fn record_failure(&mut self, mut line: String, now: Instant) -> Option<String> {
        self.count += 1;
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < FAILURE_NOTICE_INTERVAL) {
            return None;
        }
        self.last = Some(now);
        self.is_announced = true;
        if self.count > 1 {
            let _ = write!(line, " ({} saves in a row have failed)", self.count);
        }
        Some(line)
    }

    /// Records a success. Returns a line if a message about an earlier failure was printed.
    fn record_success(&mut self, steps: u64) -> Option<String> {
        let count = std::mem::take(&mut self.count);
        std::mem::take(&mut self.is_announced).then(|| {
            let saves = if count == 1 { "save" } else { "saves" };
            format!("the checkpoint of step {steps} was saved, after {count} failed {saves}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExistingCheckpoint;
    use super::super::tests::example_run;
    use super::*;

    /// A slow disk may complete a write only after the next save was skipped.
    #[test]
    fn a_skipped_save_still_counts_as_failed_when_the_previous_write_succeeds() {
        let settings = CheckpointSettings::new("absent", ExistingCheckpoint::Refuse);
        let (network, identity, state) = example_run();
        let now = Instant::now();
        let mut writer = CheckpointWriter::new(&settings, (network, identity), 0, now);
        let (sender, result) = mpsc::channel();
        writer.current_write = Some(WriteInProgress { steps: 10, is_best: false, result });
        let line = writer.record_skipped_save(20, true, now).unwrap();
        assert!(line.contains("step 20 was not saved") && line.contains("there is no checkpoint"), "{line}");
        sender.send(WriteResult { copy: state, latest_steps: Some(10), result: Ok(()) }).unwrap();
        assert_eq!((writer.wait(DROP_WAIT_MAX), writer.has_failed()), (None, true));
        let error = writer.take_error().unwrap_err().to_string();
        assert!(error.contains("step 20") && error.contains("latest checkpoint is from step 10"), "{error}");
    }

    /// A run may try to save in every step. On a full disk, a message for each failed save would fill the log.
    #[test]
    fn failures_are_announced_once_a_minute() {
        let start = Instant::now();
        let mut notices = FailureNotices::default();
        for (seconds, expected) in [
            (Some(0), Some("no")),
            (Some(59), None),
            (Some(61), Some("no (3 saves in a row have failed)")),
            (None, Some("the checkpoint of step 9 was saved, after 3 failed saves")),
            (None, None),
            (Some(62), None),
            (None, None),
            (Some(121), Some("no")),
            (None, Some("the checkpoint of step 9 was saved, after 1 failed save")),
        ] {
            let found = match seconds {
                Some(seconds) => notices.record_failure("no".into(), start + Duration::from_secs(seconds)),
                None => notices.record_success(9),
            };
            assert_eq!(found.as_deref(), expected, "{seconds:?}");
        }
    }
}
