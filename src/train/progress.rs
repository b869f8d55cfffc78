//! Shows the progress of a run to the user.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write};

use indicatif::{ProgressBar, ProgressStyle};

use super::report::EpochRecord;

/// Receives the events of a run on this rank.
pub trait Observer {
    /// Called with a line of text for the user.
    fn notice(&mut self, line: &str);
    /// Called when an epoch begins. `epoch` counts from 1 to `epochs`. Of the epoch's `steps` steps, `step` are already
    /// complete. If an epoch has only one step, or if the ranks average only after several epochs, several epochs are reported
    /// together: `epoch` is the last of these epochs, and `steps` and `step` count the steps of all of them.
    fn epoch_started(&mut self, epoch: u64, epochs: u64, step: u64, steps: u64);
    /// Called before each step with the training samples that this rank processes in this step, as row numbers of the
    /// training set. `epoch` and `batch` count from 0. Not called with a parameter server.
    fn batch_started(&mut self, _epoch: u64, _batch: u64, _samples: &[u32]) {}
    /// Called after each step with the mean loss of the step, and with the samples per second since `epoch_started`.
    fn step_taken(&mut self, loss: f64, samples_per_second: f64);
    /// Called at the end of an epoch. `epochs` is the number of epochs in the run. `record` is `None` if a signal
    /// stopped the epoch.
    fn epoch_ended(&mut self, epochs: u64, record: Option<&EpochRecord>);
    /// Called with the parameters at the end of each epoch, before the run tests and saves the parameters. A program can change
    /// the parameters here, for example to clip them. The program must make the same changes on all ranks, because the run then
    /// checks that all ranks have the same parameters.
    fn adjust_parameters(&mut self, _parameters: &mut [f32]) {}
}

/// An observer that does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: f64, _: f64) {}
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// How to show progress within an epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProgressDisplay {
    /// A progress bar on standard error, if standard error is a terminal.
    Bar,
    /// No progress within an epoch, only a line at the end of each epoch.
    Lines,
}

/// Writes lines to a writer, and a progress bar to a terminal.
pub struct Console<W> {
    display: ProgressDisplay,
    /// `None` after a write failed. Training continues without output.
    out: Option<W>,
    failure: Option<io::Error>,
    bar: Option<ProgressBar>,
}

impl<W: Write> Console<W> {
    /// Creates an observer that writes lines to `out`.
    pub fn new(display: ProgressDisplay, out: W) -> Self {
        Self { display, out: Some(out), failure: None, bar: None }
    }

    /// Returns the error of a failed write. Returns `None` if no write failed, or if the error was a closed pipe.
    pub fn failure(&self) -> Option<&io::Error> {
        self.failure.as_ref()
    }
}

impl<W: Write> Observer for Console<W> {
    fn notice(&mut self, line: &str) {
        let Some(out) = &mut self.out else { return };
        let written = writeln!(out, "{line}").and_then(|()| out.flush());
        if let Err(error) = written {
            self.out = None;
            self.failure = Some(error).filter(|error| error.kind() != ErrorKind::BrokenPipe);
        }
    }

    fn epoch_started(&mut self, epoch: u64, epochs: u64, step: u64, steps: u64) {
        if self.display == ProgressDisplay::Bar {
            let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg}");
            let bar =
                ProgressBar::new(steps).with_position(step).with_prefix(format!("epoch {epoch}/{epochs}"));
            self.bar = Some(bar.with_style(style.expect("the template is valid")));
        }
    }

    fn step_taken(&mut self, loss: f64, samples_per_second: f64) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
            bar.set_message(format!("loss {loss:.4}  {samples_per_second:.0} samples/s"));
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
            ("validation loss", record.validation_loss),
        ] {
            if let Some(value) = value {
                let _ = write!(line, ", {name} {value:.4}");
            }
        }
        let _ = write!(line, ", {:.0} samples/s", record.samples_per_second);
        self.notice(&line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut console = Console::new(ProgressDisplay::Lines, &mut pipe);
        console.notice("one");
        console.notice("two");
        assert!(console.failure().is_none());
        assert_eq!(pipe.writes, 1);
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let mut disk = FailingWriter { writes: 0, error: ErrorKind::StorageFull };
        let mut console = Console::new(ProgressDisplay::Lines, &mut disk);
        console.notice("one");
        console.notice("two");
        assert_eq!(console.failure().map(io::Error::kind), Some(ErrorKind::StorageFull));
    }

    #[test]
    fn an_epoch_is_printed_as_a_line_with_the_applicable_metrics() {
        let mut text = Vec::new();
        let record = EpochRecord {
            epoch: 2,
            train_loss: 0.25,
            test_loss: Some(0.5),
            test_accuracy: Some(0.875),
            test_r2: None,
            test_rmse: None,
            validation_loss: None,
            samples_per_second: 1234.4,
            seconds: 1.0,
        };
        Console::new(ProgressDisplay::Lines, &mut text).epoch_ended(3, Some(&record));
        let expected =
            "epoch 2/3: train loss 0.2500, test loss 0.5000, test accuracy 0.8750, 1234 samples/s\n";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }
}
