//! Measures the differences between the clocks of the ranks.

use std::time::Duration;

use super::{Error, Group};
use crate::observe::clock_offset::{ClockOffset, PingPong};
use crate::observe::recorder::Recorder;
use crate::types::Rank;

/// The fewest messages that rank 0 exchanges with each rank. The first one opens the link.
const PING_PONGS_MIN: usize = 32;
/// The most messages. On a busy host, most round trips are long, because a rank has to wait for a processor.
const PING_PONGS_MAX: usize = 2000;
/// Rank 0 exchanges more than the fewest messages only while the error is larger than this time, in nanoseconds.
const SMALL_ERROR_NS: i64 = 10_000;
/// Rank 0 exchanges no more messages with a rank after this time.
const EXCHANGE_TIME_MAX: Duration = Duration::from_millis(50);
pub(super) const CLOCK_TAG: u32 = 0;
/// The first number of a message that asks for the time, and of the last message, which has the difference.
const ASK: i64 = 1;
const END: i64 = 0;

impl Group {
    /// Returns the difference between the clocks of this rank and of rank 0. All ranks must call this function, and no other
    /// message of this group may have the tag [`CLOCK_TAG`].
    pub(super) fn measure_clock(&self, recorder: &Recorder) -> Result<ClockOffset, Error> {
        if self.rank == Rank::ZERO {
            for peer in self.world.ranks().skip(1) {
                let offset = self.measure_clock_of(peer, recorder)?;
                self.send(&[END, offset.time_ns, offset.offset_ns, offset.error_ns], peer, CLOCK_TAG)?;
            }
            return Ok(ClockOffset::default());
        }
        loop {
            let mut message = [END; 4];
            self.receive(&mut message, Rank::ZERO, CLOCK_TAG)?;
            let [kind, time_ns, offset_ns, error_ns] = message;
            if kind != ASK {
                return Ok(ClockOffset { time_ns, offset_ns, error_ns });
            }
            self.send(&[recorder.now().as_nanos() as u64], Rank::ZERO, CLOCK_TAG)?;
        }
    }

    fn measure_clock_of(&self, peer: Rank, recorder: &Recorder) -> Result<ClockOffset, Error> {
        let started = recorder.now();
        let mut best = ClockOffset { error_ns: i64::MAX, ..ClockOffset::default() };
        for count in 0..PING_PONGS_MAX {
            let is_long = recorder.now().saturating_sub(started) > EXCHANGE_TIME_MAX;
            if count >= PING_PONGS_MIN && (best.error_ns <= SMALL_ERROR_NS || is_long) {
                break;
            }
            let mut answered = [0u64];
            let sent = recorder.now();
            self.send(&[ASK, 0, 0, 0], peer, CLOCK_TAG)?;
            self.receive(&mut answered, peer, CLOCK_TAG)?;
            let (answered, received) = (Duration::from_nanos(answered[0]), recorder.now());
            let offset = ClockOffset::from_ping_pong(PingPong { sent, answered, received });
            if offset.error_ns < best.error_ns {
                best = offset;
            }
        }
        Ok(best)
    }
}
