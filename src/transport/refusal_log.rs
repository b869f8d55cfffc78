//! Limits the number of log lines about refused connections, because any host that reaches the port may connect.

use std::fmt;
use std::time::Duration;

use crate::types::counted;

/// The time after which the count of lines starts again at zero.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum number of lines logged in an interval. The log counts further lines, but does not print them.
const LINES_PER_INTERVAL_MAX: u32 = 10;

/// Logs the first lines of each interval. At the end of the interval, logs how many lines were not logged.
#[derive(Default)]
pub(super) struct RefusalLog {
    interval_start: Duration,
    lines: u32,
    suppressed: u64,
}

impl RefusalLog {
    /// Logs the line as a warning, or only counts it if the limit is reached.
    pub(super) fn log_or_count(&mut self, now: Duration, line: fmt::Arguments<'_>) {
        self.end_interval_if_over(now);
        if self.lines < LINES_PER_INTERVAL_MAX {
            self.lines += 1;
            log::warn!("{line}");
        } else {
            self.suppressed += 1;
        }
    }

    /// If the interval is over, logs how many lines were not logged, and begins the next interval.
    pub(super) fn end_interval_if_over(&mut self, now: Duration) {
        if now >= self.interval_start + COUNT_INTERVAL {
            self.log_suppressed_count();
            *self = Self { interval_start: now, ..Self::default() };
        }
    }

    /// Returns the time at which the number of suppressed lines is logged. `None` if no lines were suppressed.
    pub(super) fn deadline(&self) -> Option<Duration> {
        (self.suppressed > 0).then_some(self.interval_start + COUNT_INTERVAL)
    }

    fn log_suppressed_count(&self) {
        if self.suppressed > 0 {
            let seconds = COUNT_INTERVAL.as_secs();
            log::warn!(
                "... and {} about refused connections in the last {seconds} s",
                counted(self.suppressed, "more message")
            );
        }
    }
}

impl Drop for RefusalLog {
    fn drop(&mut self) {
        self.log_suppressed_count();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression test: before the fix, 31,000 HTTP requests a second caused 31,000 log lines a second.
    #[test]
    fn lines_above_the_limit_are_counted_and_not_logged() {
        let mut log = RefusalLog::default();
        for millisecond in 0..30_000 {
            log.log_or_count(Duration::from_millis(millisecond) / 3, format_args!("refused"));
        }
        assert_eq!(
            (log.lines, log.suppressed, log.deadline()),
            (LINES_PER_INTERVAL_MAX, 29_990, Some(COUNT_INTERVAL))
        );
        log.end_interval_if_over(COUNT_INTERVAL);
        assert_eq!((log.lines, log.suppressed, log.deadline()), (0, 0, None));
        log.log_or_count(COUNT_INTERVAL, format_args!("refused"));
        assert_eq!((log.lines, log.suppressed), (1, 0));
    }
}
