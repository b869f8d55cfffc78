//! Progress of a run, for the user.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write};

use indicatif::{ProgressBar, ProgressStyle};

use super::report::EpochRecord;

/// Receives the events of a run on this rank.
pub trait Observer {
    /// A line for the user.
    fn notice(&mut self, line: &str);
    /// Training towards the end of `epoch` (counted from 1) begins at `step` of `steps`. If an epoch is one step, several
    /// epochs are reported as one.
    fn epoch_started(&mut self, epoch: u64, epochs: u64, step: u64, steps: u64);
    /// A step was taken: its mean loss, and samples per second since `epoch_started`.
    fn step_taken(&mut self, loss: f64, samples_per_second: f64);
    /// An epoch ended; without a record if a signal stopped it.
    fn epoch_ended(&mut self, epochs: u64, record: Option<&EpochRecord>);
    /// Called with the parameters at the end of each epoch, before they are tested and saved. A program can change them here,
    /// for example to clip them. It must change them in the same way on all ranks: the run compares them next.
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
    /// As a bar on standard error, if that is a terminal.
    Bar,
    /// Not at all; there is a line at the end of each epoch.
    Lines,
}

/// Writes lines to a writer, and a progress bar to a terminal.
pub struct Console<W> {
    display: ProgressDisplay,
    /// `None` after a write failed, which does not stop training.
    out: Option<W>,
    failure: Option<io::Error>,
    bar: Option<ProgressBar>,
}

impl<W: Write> Console<W> {
    /// An observer that writes lines to `out`.
    pub fn new(display: ProgressDisplay, out: W) -> Self {
        Self { display, out: Some(out), failure: None, bar: None }
    }

    /// The error of the write that failed, except that of a closed pipe.
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

    struct Gone(usize, ErrorKind);

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            self.0 += 1;
            Err(self.1.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_goes_away_is_no_error() {
        let mut gone = Gone(0, ErrorKind::BrokenPipe);
        let mut console = Console::new(ProgressDisplay::Lines, &mut gone);
        console.notice("one");
        console.notice("two");
        assert!(console.failure().is_none());
        assert_eq!(gone.0, 1);
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let mut full = Gone(0, ErrorKind::StorageFull);
        let mut console = Console::new(ProgressDisplay::Lines, &mut full);
        console.notice("one");
        console.notice("two");
        assert_eq!(console.failure().map(io::Error::kind), Some(ErrorKind::StorageFull));
    }

    #[test]
    fn an_epoch_is_a_line_with_the_metrics_that_apply() {
        let mut text = Vec::new();
        let record = EpochRecord {
            epoch: 2,
            train_loss: 0.25,
            test_loss: Some(0.5),
            test_accuracy: Some(0.875),
            test_r2: None,
            test_rmse: None,
            samples_per_second: 1234.4,
            seconds: 1.0,
        };
        Console::new(ProgressDisplay::Lines, &mut text).epoch_ended(3, Some(&record));
        let expected =
            "epoch 2/3: train loss 0.2500, test loss 0.5000, test accuracy 0.8750, 1234 samples/s\n";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }
}
