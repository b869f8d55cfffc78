//! Records the curves of a run for `TensorBoard` while the run is in progress.

mod event_file;

use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use self::event_file::EventFile;
use super::atomic_file;
use super::checkpoint::ExistingCheckpoint;
use super::config::Config;
use super::measurements::RankMeasurements;
use super::progress::{CompletedStep, Observer};
use super::report::EpochRecord;

/// The default of [`TensorBoard::step_interval`].
pub const STEP_INTERVAL_DEFAULT: NonZeroU64 = NonZeroU64::new(50).unwrap();

/// Before the run, rank 0 checks that the disk has this number of bytes for the curves. Long runs write more.
const EVENT_FILE_BYTES_ASSUMED: u64 = 1 << 20;

/// Where and how often to record curves for `TensorBoard`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorBoard {
    /// The directory, which is created if it does not exist. Each run writes a new file.
    pub directory: PathBuf,
    /// Every `step_interval` steps, the run records the mean loss of these steps and the learning rate.
    pub step_interval: NonZeroU64,
}

/// Creates `directory` if it does not exist, and checks that events can be written to it.
pub(super) fn check_event_directory(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    atomic_file::check_disk_space(&directory.join("events"), EVENT_FILE_BYTES_ASSUMED)
}

/// Records the events of a run, and forwards all events to another observer.
pub(super) struct EventRecorder<'a> {
    /// The observer to which all events are forwarded.
    observer: &'a mut dyn Observer,
    options: &'a TensorBoard,
    file: EventSink,
    /// If the run resumes: the first step of this process. An earlier process that was killed may have recorded
    /// this step and later steps.
    first_repeated_step: Option<u64>,
    /// The number of steps since the run began.
    steps_total: u64,
    /// Totals since the last recorded step: the number of steps, the sum of the losses, and the number of samples.
    interval_totals: (u64, f64, u64),
}

/// The state of a recorder's file.
enum EventSink {
    /// The first event will create the file.
    NotCreated,
    Open(EventFile),
    /// A write failed, and the recorder warned the user.
    Failed,
}

impl<'a> EventRecorder<'a> {
    /// Creates a recorder. `steps_total` is the number of steps that the run took before this process started.
    pub(super) fn new(
        observer: &'a mut dyn Observer,
        (config, options): (&Config, &'a TensorBoard),
        steps_total: u64,
    ) -> Self {
        let checkpoint = config.checkpoint.as_ref();
        let resumes = checkpoint.is_some_and(|target| target.existing == ExistingCheckpoint::Resume);
        Self::with_first_repeated_step(observer, options, resumes.then_some(steps_total + 1))
    }

    fn with_first_repeated_step(
        observer: &'a mut dyn Observer,
        options: &'a TensorBoard,
        first_repeated_step: Option<u64>,
    ) -> Self {
        Self {
            observer,
            options,
            file: EventSink::NotCreated,
            first_repeated_step,
            steps_total: 0,
            interval_totals: (0, 0.0, 0),
        }
    }

    /// Writes values of the current step. If the write fails, warns the user, and training continues without the
    /// file.
    fn record_scalars(&mut self, scalars: &[(&str, f64)]) {
        if let Err(error) = self.try_record_scalars(scalars) {
            self.file = EventSink::Failed;
            let directory = self.options.directory.display();
            self.observer.warning(&format!(
                "cannot write to the directory of --tensorboard, {directory}: {error}; training continues, but TensorBoard \
                 shows no further values of this run"
            ));
        }
    }

    fn try_record_scalars(&mut self, scalars: &[(&str, f64)]) -> io::Result<()> {
        if matches!(self.file, EventSink::NotCreated) {
            let mut file = EventFile::create(&self.options.directory)?;
            if let Some(step) = self.first_repeated_step {
                file.discard_from_step(step)?;
            }
            self.file = EventSink::Open(file);
        }
        match &mut self.file {
            EventSink::Open(file) => file.add_scalars(self.steps_total, scalars),
            EventSink::NotCreated | EventSink::Failed => Ok(()),
        }
    }
}

impl Observer for EventRecorder<'_> {
    fn notice(&mut self, line: &str) {
        self.observer.notice(line);
    }

    fn warning(&mut self, text: &str) {
        self.observer.warning(text);
    }

    fn epoch_started(&mut self, epoch: u64, epochs: u64, steps_done: u64, steps: u64) {
        self.observer.epoch_started(epoch, epochs, steps_done, steps);
    }

    fn batch_started(&mut self, epoch: u64, batch: u64, samples: &[u32]) {
        self.observer.batch_started(epoch, batch, samples);
    }

    fn step_taken(&mut self, step: &CompletedStep) {
        self.observer.step_taken(step);
        self.steps_total = step.steps_total;
        let (steps, loss, samples) = &mut self.interval_totals;
        *steps += 1;
        *loss += step.loss * step.samples as f64;
        *samples += step.samples;
        if *steps >= self.options.step_interval.get() {
            let mean = *loss / (*samples).max(1) as f64;
            self.interval_totals = (0, 0.0, 0);
            self.record_scalars(&[("loss/steps", mean), ("learning_rate", f64::from(step.learning_rate))]);
        }
    }

    fn measured(&mut self, measurements: &RankMeasurements<'_>) {
        self.observer.measured(measurements);
    }

    fn epoch_ended(&mut self, epochs: u64, record: Option<&EpochRecord>) {
        self.observer.epoch_ended(epochs, record);
        let Some(record) = record else { return };
        let times = record.step_times.filter(|times| times.steps > 0);
        let per_step = |seconds: f64| times.map(|times| seconds / times.steps as f64);
        let scalars: Vec<(&str, f64)> = [
            ("loss/train", Some(record.train_loss)),
            ("loss/test", record.test_loss),
            ("loss/validation", record.validation_loss),
            ("test/accuracy", record.test_accuracy),
            ("test/r2", record.test_r2),
            ("test/rmse", record.test_rmse),
            ("test/perplexity", record.test_perplexity),
            ("epoch", Some(record.epoch as f64)),
            ("samples_per_second", Some(record.samples_per_second)),
            ("step_seconds/compute", times.and_then(|times| per_step(times.compute_seconds))),
            (
                "step_seconds/exposed_communication",
                times.and_then(|times| per_step(times.exposed_communication_seconds)),
            ),
            ("step_seconds/data", times.and_then(|times| per_step(times.data_seconds))),
        ]
        .into_iter()
        .filter_map(|(tag, value)| value.map(|value| (tag, value)))
        .collect();
        self.record_scalars(&scalars);
    }

    fn adjust_parameters(&mut self, parameters: &mut [f32]) {
        self.observer.adjust_parameters(parameters);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[derive(Default)]
    struct LineCollector(Vec<String>);

    impl Observer for LineCollector {
        fn notice(&mut self, line: &str) {
            self.0.push(line.into());
        }
        fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
        fn step_taken(&mut self, _: &CompletedStep) {}
        fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
    }

    /// A killed run may have recorded steps after its last checkpoint. The resumed run repeats these steps.
    #[test]
    fn a_resumed_run_begins_its_file_with_the_first_step_that_it_repeats() {
        for (first_repeated_step, expected) in [(None, false), (Some(300), true)] {
            let directory = tempfile::tempdir().unwrap();
            let options =
                TensorBoard { directory: directory.path().to_owned(), step_interval: NonZeroU64::MIN };
            let mut lines = LineCollector::default();
            let mut recorder =
                EventRecorder::with_first_repeated_step(&mut lines, &options, first_repeated_step);
            for steps_total in [300, 301] {
                recorder.step_taken(&CompletedStep {
                    steps_total,
                    loss: 1.0,
                    learning_rate: 0.1,
                    samples: 5,
                    completed_at: Instant::now(),
                });
            }
            let file = fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
            let bytes = fs::read(file).unwrap();
            // The step 300 and the status START, after the time of the event.
            let start = bytes.windows(7).position(|window| window == b"\x10\xac\x02\x3a\x02\x08\x01");
            let value = bytes.windows(10).position(|window| window == b"loss/steps");
            assert_eq!(start.is_some(), expected);
            assert!(start < value, "{start:?} {value:?}");
            assert_eq!(
                bytes.windows(4).filter(|window| *window == b"\x3a\x02\x08\x01").count(),
                usize::from(expected)
            );
        }
    }

    #[test]
    fn training_continues_if_the_event_directory_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(check_event_directory(&file).is_err());
        assert!(check_event_directory(&directory.path().join("a/b")).is_ok());
        let options = TensorBoard { directory: file, step_interval: NonZeroU64::MIN };
        let mut lines = LineCollector::default();
        let mut recorder = EventRecorder::with_first_repeated_step(&mut lines, &options, None);
        for steps_total in 1..4 {
            let (loss, learning_rate, samples, completed_at) = (1.0, 0.1, 5, Instant::now());
            recorder.step_taken(&CompletedStep { steps_total, loss, learning_rate, samples, completed_at });
        }
        assert_eq!(lines.0.len(), 1, "{:?}", lines.0);
        assert!(
            lines.0[0].starts_with("warning: cannot write to the directory of --tensorboard"),
            "{:?}",
            lines.0
        );
    }
}
