//! How long a thread that waits for the sockets polls them before it sleeps.

use std::time::Duration;

/// A short message within a host takes less time than this, and so does waking up. In measurements of collectives, a ten times
/// longer time was not faster, and used three times as much processor time on a network of 1 Gbit/s.
const POLL_TIME: Duration = Duration::from_micros(20);
/// The polling time of a job of requests and replies while its waits are short.
const POLL_TIME_MAX: Duration = Duration::from_micros(200);
/// If more time passes between two polls, another thread computes on this processor. To poll or answer takes less time.
const POLL_GAP_MAX: Duration = Duration::from_micros(50);

#[derive(Default)]
pub(super) struct PollTime {
    /// Whether a thread polls longer if it has waited only a short time for the last message. Then threads that exchange short
    /// messages all the time do not sleep, and a thread that seldom gets a message does not use more processor time.
    pub(super) is_adaptive: bool,
    /// Whether the waits before the last message were together at most [`POLL_TIME_MAX`] long.
    was_last_wait_short: bool,
    /// How long threads have waited since the last message.
    waited: Duration,
}

impl PollTime {
    pub(super) fn max(&self) -> Duration {
        if self.is_adaptive && self.was_last_wait_short && self.waited < POLL_TIME_MAX {
            POLL_TIME_MAX
        } else {
            POLL_TIME
        }
    }

    /// Records how long a thread has waited for an event. To send and to receive a long message needs several waits.
    pub(super) fn record_wait(&mut self, waited: Duration) {
        self.waited += waited;
    }

    pub(super) fn record_received_message(&mut self) {
        let waited = std::mem::take(&mut self.waited);
        if !waited.is_zero() {
            self.was_last_wait_short = waited <= POLL_TIME_MAX;
        }
    }
}

/// Returns whether a thread must sleep that may poll for `max` and has polled for `polled`; at its previous poll, for
/// `polled_before`. It polls for longer than [`POLL_TIME`] only while no other thread computes on its processor.
pub(super) fn must_sleep(max: Duration, polled_before: Duration, polled: Duration) -> bool {
    polled >= max || (polled >= POLL_TIME && polled.saturating_sub(polled_before) > POLL_GAP_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn only_a_job_that_adapts_polls_longer_after_short_waits() {
        let mut fixed = PollTime::default();
        let mut adaptive = PollTime { is_adaptive: true, ..PollTime::default() };
        assert_eq!(adaptive.max(), POLL_TIME);
        // The waits before each message. A message without waits changes nothing.
        for (waits_us, expected) in [
            (&[][..], POLL_TIME),
            (&[200], POLL_TIME_MAX),
            (&[], POLL_TIME_MAX),
            (&[100, 101], POLL_TIME),
            (&[150, 50], POLL_TIME_MAX),
            (&[50_000, 50_000, 10], POLL_TIME),
        ] {
            for poll_time in [&mut fixed, &mut adaptive] {
                for &waited_us in waits_us {
                    poll_time.record_wait(us(waited_us));
                }
                let has_waited_long = poll_time.waited >= POLL_TIME_MAX;
                assert!(!has_waited_long || poll_time.max() == POLL_TIME, "after {waits_us:?} us");
                poll_time.record_received_message();
            }
            assert_eq!((fixed.max(), adaptive.max()), (POLL_TIME, expected), "after {waits_us:?} us");
        }
    }

    #[test]
    fn a_thread_that_polls_longer_sleeps_when_another_thread_computes() {
        for (polled_before_us, polled_us, expected) in [
            (0, 10, false),
            (0, 50, false),
            (0, 51, true),
            (100, 150, false),
            (100, 151, true),
            (199, 200, true),
        ] {
            let sleeps = must_sleep(POLL_TIME_MAX, us(polled_before_us), us(polled_us));
            assert_eq!(sleeps, expected, "between {polled_before_us} and {polled_us} us");
        }
        assert!(must_sleep(POLL_TIME, us(19), us(20)));
    }
}
