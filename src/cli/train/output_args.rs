//! The options that say what `ringtrain` prints and which results it writes.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;

use crate::monitor::ListenAddress;
use crate::train::{
    ConsoleLines, ConsoleOptions, CurveFiles, ProgressDisplay, STEP_INTERVAL_DEFAULT, TensorBoard,
};

#[derive(Args, Clone, Debug)]
pub(super) struct OutputArgs {
    /// Write a JSON report of the run to FILE. Rank 0 writes FILE
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) report: Option<PathBuf>,

    /// Write the trained model to FILE in the safetensors format, at the end of the run or after a stop signal. Rank 0
    /// writes FILE, and replaces an existing file. The commands predict, eval, inspect, export and
    /// generate read FILE
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) save_model: Option<PathBuf>,

    /// At the end of the run, plot the losses and the accuracy or R² of all epochs in the SVG format. Rank 0 writes
    /// FILE.svg
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    plot: Option<PathBuf>,

    /// Record the losses, metrics, learning rate and speed for `tensorboard --logdir DIR`. Rank 0 writes a new file
    /// in DIR. ringtrain records the mean loss of every 50 steps, or of every --log-interval steps
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    tensorboard: Option<PathBuf>,

    /// At the end of the run, write a page in HTML with the curves, the times and bytes of each rank, the configuration and
    /// the results. Rank 0 writes FILE
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,

    /// Serve /metrics (for Prometheus), /status (JSON) and /healthz over HTTP on each rank. The port is the number in
    /// ADDRESS plus the number of the rank on its host: with --metrics 9400, the ranks of a host listen at 9400, 9401 and
    /// so on, on the loopback interface. Pass 0.0.0.0:9400 to listen on all interfaces, and 0 to listen at any free port.
    /// Everyone who can connect can read the status. `ringrun top` shows all ranks of this host that have this option
    #[arg(long, value_name = "ADDRESS", help_heading = "Output")]
    pub(super) metrics: Option<ListenAddress>,

    /// Print only warnings and errors, and show no progress bar. For the results, pass --report
    #[arg(long, short, help_heading = "Output")]
    quiet: bool,

    /// Every STEPS steps, print the mean loss and the speed of these steps, and the learning rate
    #[arg(long, value_name = "STEPS", help_heading = "Output")]
    log_interval: Option<NonZeroU64>,
}

impl OutputArgs {
    /// Returns what rank 0 prints. `display` says where a progress bar appears without `--quiet`.
    pub(super) fn console_options(&self, display: ProgressDisplay) -> ConsoleOptions {
        if self.quiet {
            return ConsoleOptions {
                display: ProgressDisplay::None,
                lines: ConsoleLines::Warnings,
                log_interval: None,
            };
        }
        ConsoleOptions { display, lines: ConsoleLines::All, log_interval: self.log_interval }
    }

    /// Checks the options, and returns the files for the curves of the run (`--plot`, `--html` and `--tensorboard`).
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option is wrong and what to do.
    pub(super) fn curve_files(&self) -> Result<CurveFiles, String> {
        if let Some(path) = &self.plot
            && path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("svg"))
        {
            return Err(format!(
                "--plot {}: the picture has the format SVG; pass a name that ends in .svg",
                path.display()
            ));
        }
        if self.quiet && self.log_interval.is_some() && self.tensorboard.is_none() {
            return Err(
                "--log-interval has no effect with --quiet; leave out one of them, or pass --tensorboard DIR"
                    .into(),
            );
        }
        let step_interval = self.log_interval.unwrap_or(STEP_INTERVAL_DEFAULT);
        let tensorboard = self.tensorboard.clone().map(|directory| TensorBoard { directory, step_interval });
        Ok(CurveFiles { plot: self.plot.clone(), html: self.html.clone(), tensorboard })
    }
}
