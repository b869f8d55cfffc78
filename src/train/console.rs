//! Shows the progress of a run on a terminal or in a log.

mod relayed_terminal;

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write};
use std::num::NonZeroU64;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use self::relayed_terminal::RelayedTerminal;
use super::progress::{CompletedStep, Observer};
use super::report::EpochRecord;

/// The maximum number of times per second that a progress bar is drawn.
const DRAWINGS_PER_SECOND_MAX: u8 = 5;

/// What a [`Console`] shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConsoleOptions {
    /// How to show progress within an epoch.
    pub display: ProgressDisplay,
    /// Which lines to write.
    pub lines: ConsoleLines,
    /// Write a line after each interval of this number of steps. If `None`, write lines only at the end of each
    /// epoch.
    pub log_interval: Option<NonZeroU64>,
}

/// How to show progress within an epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ProgressDisplay {
    /// A progress bar on standard error. Shows nothing if standard error is not a terminal.
    Bar,
    /// A progress bar that is sent through a pipe on standard error. The program that reads the pipe, for
    /// example `ringrun`, shows the bar on its own terminal.
    RelayedBar {
        /// The width of the bar in characters.
        columns: u16,
    },
    /// No progress within an epoch.
    #[default]
    None,
}

/// Which lines a [`Console`] writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ConsoleLines {
    /// All lines.
    #[default]
    All,
    /// Only warnings.
    Warnings,
}

/// Writes lines to a writer, and a progress bar to a terminal.
pub struct Console<W> {
    options: ConsoleOptions,
    /// `None` after a write failed. Training then continues without output.
    out: Option<W>,
    /// See [`failure`](Self::failure).
    failure: Option<io::Error>,
    epoch: EpochProgress,
    /// The progress bar of the current epoch.
    bar: Option<ProgressBar>,
}

/// The progress of the current epoch.
struct EpochProgress {
    /// The number of the epoch, counted from 1.
    epoch: u64,
    /// The number of epochs of the run.
    epochs: u64,
    /// The number of steps that are complete.
    steps_done: u64,
    /// The number of steps of the epoch.
    steps: u64,
    /// The steps since the epoch began.
    since_epoch_start: StepSums,
    /// The steps since the last line of `--log-interval`.
    since_last_line: StepSums,
}

/// Sums over consecutive steps.
struct StepSums {
    started: Instant,
    steps: u64,
    samples: u64,
    /// The sum of the losses of all samples.
    loss_sum: f64,
}

impl StepSums {
    fn start(now: Instant) -> Self {
        Self { started: now, steps: 0, samples: 0, loss_sum: 0.0 }
    }

    fn add(&mut self, step: &CompletedStep) {
        self.steps += 1;
        self.samples += step.samples;
        self.loss_sum += step.loss * step.samples as f64;
    }

    fn mean_loss(&self) -> f64 {
        self.loss_sum / self.samples.max(1) as f64
    }

    fn samples_per_second(&self, now: Instant) -> f64 {
        self.samples as f64 / now.saturating_duration_since(self.started).as_secs_f64().max(1e-9)
    }
}

impl<W: Write> Console<W> {
    /// Creates a console that writes lines to `out`.
    pub fn new(options: ConsoleOptions, out: W) -> Self {
        let [since_epoch_start, since_last_line] = [Instant::now(); 2].map(StepSums::start);
        let epoch = EpochProgress {
            epoch: 0,
            epochs: 0,
            steps_done: 0,
            steps: 0,
            since_epoch_start,
            since_last_line,
        };
        Self { options, out: Some(out), failure: None, epoch, bar: None }
    }

    /// Returns the error of the first failed write. A closed pipe does not count as an error.
    pub fn failure(&self) -> Option<&io::Error> {
        self.failure.as_ref()
    }

    /// Writes a line. The progress bar disappears while the line is written.
    fn write_line(&mut self, line: &str) {
        let Some(out) = &mut self.out else { return };
        let mut write = || writeln!(out, "{line}").and_then(|()| out.flush());
        let written = match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        };
        if let Err(error) = written {
            self.out = None;
            self.failure = Some(error).filter(|error| error.kind() != ErrorKind::BrokenPipe);
        }
    }
}

impl<W: Write> Observer for Console<W> {
    fn notice(&mut self, line: &str) {
        if self.options.lines == ConsoleLines::All {
            self.write_line(line);
        }
    }

    fn warning(&mut self, text: &str) {
        self.write_line(&format!("warning: {text}"));
    }

    fn epoch_started(&mut self, epoch: u64, epochs: u64, steps_done: u64, steps: u64) {
        let [since_epoch_start, since_last_line] = [Instant::now(); 2].map(StepSums::start);
        self.epoch = EpochProgress { epoch, epochs, steps_done, steps, since_epoch_start, since_last_line };
        let target = match self.options.display {
            ProgressDisplay::None => return,
            ProgressDisplay::Bar => ProgressDrawTarget::stderr_with_hz(DRAWINGS_PER_SECOND_MAX),
            ProgressDisplay::RelayedBar { columns } => {
                let terminal = RelayedTerminal::new(columns, io::stderr());
                ProgressDrawTarget::term_like_with_hz(Box::new(terminal), DRAWINGS_PER_SECOND_MAX)
            }
        };
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg}");
        let bar = ProgressBar::with_draw_target(Some(steps), target);
        let bar = bar.with_position(steps_done).with_prefix(format!("epoch {epoch}/{epochs}"));
        self.bar = Some(bar.with_style(style.expect("the template is valid")));
    }

    fn step_taken(&mut self, step: &CompletedStep) {
        let progress = &mut self.epoch;
        progress.steps_done += 1;
        progress.since_epoch_start.add(step);
        progress.since_last_line.add(step);
        if let Some(bar) = &self.bar {
            bar.inc(1);
            let sums = &progress.since_epoch_start;
            let (loss, speed) = (sums.mean_loss(), sums.samples_per_second(step.completed_at));
            bar.set_message(format!("loss {loss:.4}  {speed:.0} samples/s"));
        }
        if self.options.log_interval.is_some_and(|interval| progress.since_last_line.steps >= interval.get())
        {
            let EpochProgress { epoch, epochs, steps_done, steps, since_last_line: sums, .. } = progress;
            let speed = sums.samples_per_second(step.completed_at);
            let (loss, rate) = (sums.mean_loss(), step.learning_rate);
            let line = format!(
                "epoch {epoch}/{epochs}, step {steps_done}/{steps}: loss {loss:.4}, lr {rate}, {speed:.0} samples/s"
            );
            progress.since_last_line = StepSums::start(step.completed_at);
            self.notice(&line);
        }
    }

    fn epoch_ended(&mut self, epochs: u64, record: Option<&EpochRecord>) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        let Some(record) = record else { return };
        let mut line = format!("epoch {}/{epochs}: train loss {:.4}", record.epoch, record.train_loss);
        for (name, value) in [
            ("test loss", record.test_loss),
            ("test accuracy", record.test_accuracy),
            ("test R²", record.test_r2),
            ("test RMSE", record.test_rmse),
            ("test perplexity", record.test_perplexity),
            ("validation loss", record.validation_loss),
        ] {
            if let Some(value) = value {
                let _ = write!(line, ", {name} {value:.4}");
            }
        }
        let _ = write!(line, ", {:.0} samples/s", record.samples_per_second);
        if let Some(times) = &record.step_times {
            let _ = write!(line, ", {times}");
        }
        self.notice(&line);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::train::StepTimes;

    struct FailingWriter {
        writes: usize,
        error: ErrorKind,
    }

    impl Write for FailingWriter {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            self.writes += 1;
            Err(self.error.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_is_not_an_error() {
        let mut pipe = FailingWriter { writes: 0, error: ErrorKind::BrokenPipe };
        let mut console = Console::new(ConsoleOptions::default(), &mut pipe);
        console.notice("one");
        console.notice("two");
        assert!(console.failure().is_none());
        assert_eq!(pipe.writes, 1);
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let mut disk = FailingWriter { writes: 0, error: ErrorKind::StorageFull };
        let mut console = Console::new(ConsoleOptions::default(), &mut disk);
        console.notice("one");
        console.notice("two");
        assert_eq!(console.failure().map(io::Error::kind), Some(ErrorKind::StorageFull));
    }

    fn make_record(step_times: Option<StepTimes>) -> EpochRecord {
        EpochRecord {
            epoch: 2,
            train_loss: 0.25,
            test_loss: Some(0.5),
            test_accuracy: Some(0.875),
            samples_per_second: 1234.4,
            step_times,
            ..EpochRecord::default()
        }
    }

    #[test]
    fn an_epoch_is_printed_as_a_line_with_the_applicable_metrics() {
        let times = StepTimes {
            steps: 2,
            compute_seconds: 0.5,
            exposed_communication_seconds: 0.3,
            data_seconds: 0.2,
        };
        for (step_times, expected) in [
            (None, ""),
            (Some(times), ", step 500.00 ms (compute 250.00, communication 150.00, data 100.00)"),
        ] {
            let mut text = Vec::new();
            Console::new(ConsoleOptions::default(), &mut text).epoch_ended(3, Some(&make_record(step_times)));
            let line = "epoch 2/3: train loss 0.2500, test loss 0.5000, test accuracy 0.8750, 1234 samples/s";
            assert_eq!(String::from_utf8(text).unwrap(), format!("{line}{expected}\n"));
        }
    }

    #[test]
    fn a_line_is_printed_after_each_interval_of_steps() {
        let (mut text, start) = (Vec::new(), Instant::now());
        let options = ConsoleOptions { log_interval: NonZeroU64::new(2), ..ConsoleOptions::default() };
        let mut console = Console::new(options, &mut text);
        for epoch in [1, 2] {
            console.epoch_started(epoch, 2, 10, 15);
            for (step, samples) in [(1, 30), (2, 10), (3, 30), (4, 30), (5, 30)] {
                let loss = f64::from(step);
                let steps_total = u64::from(step as u32);
                let (learning_rate, completed_at) = (0.01, start + Duration::from_secs(steps_total));
                console.step_taken(&CompletedStep {
                    steps_total,
                    loss,
                    learning_rate,
                    samples,
                    completed_at,
                });
            }
            console.epoch_ended(2, None);
        }
        let text = String::from_utf8(text).unwrap();
        let speeds: Vec<&str> = text.lines().map(|line| line.rsplit_once(", ").unwrap().1).collect();
        // The second interval of each epoch has 60 samples in 2 seconds.
        assert_eq!([speeds[1], speeds[3]], ["30 samples/s"; 2]);
        let lines: Vec<&str> = text.lines().map(|line| line.rsplit_once(", ").unwrap().0).collect();
        // The loss is the mean over all samples of the interval: (30 * 1 + 10 * 2) / 40.
        assert_eq!(
            lines,
            [
                "epoch 1/2, step 12/15: loss 1.2500, lr 0.01",
                "epoch 1/2, step 14/15: loss 3.5000, lr 0.01",
                "epoch 2/2, step 12/15: loss 1.2500, lr 0.01",
                "epoch 2/2, step 14/15: loss 3.5000, lr 0.01",
            ]
        );
    }

    #[test]
    fn a_quiet_console_prints_only_warnings() {
        let mut text = Vec::new();
        let options = ConsoleOptions { lines: ConsoleLines::Warnings, ..ConsoleOptions::default() };
        let mut console = Console::new(options, &mut text);
        console.notice("a notice");
        console.warning("the loss is large");
        console.epoch_ended(3, Some(&make_record(None)));
        assert_eq!(String::from_utf8(text).unwrap(), "warning: the loss is large\n");
    }
}
