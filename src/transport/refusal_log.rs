//! Limits how many lines are logged about refused connections: any host that reaches the port could fill the log.

use std::fmt;
use std::time::Duration;

/// After this time the count of lines starts again.
const INTERVAL: Duration = Duration::from_secs(10);
/// How many lines are logged in an interval; further ones are only counted.
const LINES_MAX: u32 = 10;

/// Logs the first lines of each interval, and at its end how many more there were.
#[derive(Default)]
pub(super) struct RefusalLog {
    began: Duration,
    lines: u32,
    hidden: u64,
}

impl RefusalLog {
    /// Logs the line as a warning, or counts it.
    pub(super) fn note(&mut self, now: Duration, line: fmt::Arguments<'_>) {
        self.tick(now);
        if self.is_allowed() {
            log::warn!("{line}");
        }
    }

    /// Logs the count of an interval that is over.
    pub(super) fn tick(&mut self, now: Duration) {
        if now >= self.began + INTERVAL {
            self.report();
            *self = Self { began: now, ..Self::default() };
        }
    }

    /// When the count has to be logged.
    pub(super) fn deadline(&self) -> Option<Duration> {
        (self.hidden > 0).then_some(self.began + INTERVAL)
    }

    fn is_allowed(&mut self) -> bool {
        let is_allowed = self.lines < LINES_MAX;
        if is_allowed {
            self.lines += 1;
        } else {
            self.hidden += 1;
        }
        is_allowed
    }

    fn report(&self) {
        if self.hidden > 0 {
            let seconds = INTERVAL.as_secs();
            log::warn!("... and {} more refused connections in the last {seconds} s", self.hidden);
        }
    }
}

impl Drop for RefusalLog {
    fn drop(&mut self) {
        self.report();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 31,000 HTTP requests a second wrote 31,000 lines a second.
    #[test]
    fn a_flood_is_counted_and_not_logged() {
        let mut log = RefusalLog::default();
        for millisecond in 0..30_000 {
            log.note(Duration::from_millis(millisecond) / 3, format_args!("refused"));
        }
        assert_eq!((log.lines, log.hidden, log.deadline()), (LINES_MAX, 29_990, Some(INTERVAL)));
        log.tick(INTERVAL);
        assert_eq!((log.lines, log.hidden, log.deadline()), (0, 0, None));
        log.note(INTERVAL, format_args!("refused"));
        assert_eq!((log.lines, log.hidden), (1, 0));
    }
}
