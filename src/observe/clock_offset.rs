//! The difference between the clocks of two ranks, measured by messages (Cristian, "Probabilistic clock synchronization", 1989).

use std::time::Duration;

/// The times of a message from rank 0 to another rank and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PingPong {
    /// When rank 0 sent the message, on its own clock.
    pub(crate) sent: Duration,
    /// When the other rank answered, on the clock of that rank.
    pub(crate) answered: Duration,
    /// When rank 0 received the answer, on its own clock.
    pub(crate) received: Duration,
}

/// A measured difference between the clock of a rank and the clock of rank 0.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[allow(clippy::struct_field_names, reason = "all fields have the same unit")]
pub(crate) struct ClockOffset {
    /// When the difference was measured, on the clock of the rank, in nanoseconds.
    pub(crate) time_ns: i64,
    /// The time on the rank's clock minus the time on the clock of rank 0, in nanoseconds.
    pub(crate) offset_ns: i64,
    /// The largest possible error of `offset_ns`: half of the shortest round trip, in nanoseconds.
    pub(crate) error_ns: i64,
}

impl ClockOffset {
    /// Computes the difference from one message. The answer was sent between `sent` and `received`. So the error of the middle of
    /// these two times is at most half of the round trip. Of several messages, the one with the smallest error counts.
    pub(crate) fn from_ping_pong(PingPong { sent, answered, received }: PingPong) -> Self {
        let nanoseconds = |time: Duration| time.as_nanos() as i64;
        let (sent, answered, received) = (nanoseconds(sent), nanoseconds(answered), nanoseconds(received));
        let half = (received - sent + 1) / 2;
        Self { time_ns: answered, offset_ns: answered - (sent + half), error_ns: half }
    }
}

/// Converts times on the clock of a rank to times on the clock of rank 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockMap {
    start: ClockOffset,
    end: ClockOffset,
}

impl ClockMap {
    /// Returns a map from one or two measurements. Between the two, the difference of the clocks is interpolated.
    pub(crate) fn new(start: ClockOffset, end: Option<ClockOffset>) -> Self {
        Self { start, end: end.unwrap_or(start) }
    }

    /// Converts a time in nanoseconds. Returns 0 for times before the clock of rank 0 has started.
    pub(crate) fn to_rank_0(self, time_ns: u64) -> u64 {
        let (time, Self { start, end }) = (time_ns as i64, self);
        let passed = (time - start.time_ns) as f64 / (end.time_ns - start.time_ns).max(1) as f64;
        let change = (end.offset_ns - start.offset_ns) as f64 * passed;
        (time - start.offset_ns - change as i64).max(0) as u64
    }

    /// Returns the largest possible error in nanoseconds, if the speed of the clocks does not change.
    pub(crate) fn error_ns(self) -> i64 {
        self.start.error_ns.max(self.end.error_ns)
    }

    /// Returns how much faster the rank's clock is than the clock of rank 0, in parts per million.
    pub(crate) fn drift_ppm(self) -> f64 {
        let passed = (self.end.time_ns - self.start.time_ns).max(1) as f64;
        (self.end.offset_ns - self.start.offset_ns) as f64 / passed * 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ns(time: u64) -> Duration {
        Duration::from_nanos(time)
    }

    /// Two clocks with a known difference and drift, and messages with delays that are not the same in both directions.
    #[test]
    fn the_error_is_at_most_half_of_the_shortest_round_trip() {
        let rank_clock = |time: u64| time + 5_000_000_000 + time / 10_000;
        let measure = |start: u64| {
            let trip = |k: u64, there: u64, back: u64| {
                let sent = start + k * 100_000;
                ClockOffset::from_ping_pong(PingPong {
                    sent: ns(sent),
                    answered: ns(rank_clock(sent + there)),
                    received: ns(sent + there + back),
                })
            };
            let trips = [trip(0, 90_000, 400), trip(1, 9_000, 1_001), trip(2, 20_000, 20_000)];
            trips.into_iter().min_by_key(|offset| offset.error_ns).unwrap()
        };
        let (start, end) = (measure(1_000_000_000), measure(9_000_000_000));
        assert_eq!((start.error_ns, end.error_ns), (5_001, 5_001));
        let map = ClockMap::new(start, Some(end));
        for time in (0..12_000_000_000).step_by(700_000_001) {
            let error = map.to_rank_0(rank_clock(time)).abs_diff(time);
            assert!(error <= map.error_ns() as u64 + 2, "an error of {error} ns at {time}");
        }
        assert!((map.drift_ppm() - 100.0).abs() < 1.0, "{}", map.drift_ppm());
        // Times before the start of rank 0's clock.
        assert_eq!(map.to_rank_0(0), 0);
        assert_eq!(ClockMap::new(ClockOffset::default(), None).to_rank_0(7), 7);
    }
}
