//! The number of connections of each link: a requested number, or the number that a measurement at the start of the job finds
//! faster.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use super::share::LocalTransport;
use super::tune::{median, use_ring};
use super::{Error, Group};
use crate::types::ReduceOp;
use crate::wire::handshake::STREAMS_MAX;

/// The measurement compares this number of connections with one connection.
const MEASURED_STREAMS: u8 = 4;
/// Several connections are used only if they reduce the time at least by this fraction.
const MIN_GAIN: f64 = 0.1;
/// The number of times that each number of connections is timed, after one warm-up. The median counts.
const ROUNDS: usize = 5;
/// The intended time of one measurement in nanoseconds. All measurements together take some 50 ms. Networks that limit the rate
/// of a connection often let the first 100 KB pass at full speed, so a measurement must be longer.
const MEASUREMENT_NS: f64 = 4e6;
/// The number of bytes that each rank sends in a probe, from which the length of the measurements is computed.
const PROBE_BYTES: usize = 64 << 10;
/// The number of probes. The fastest one counts.
const PROBES: usize = 3;
/// The least bytes that each rank sends in a measurement.
const MEASUREMENT_BYTES_MIN: usize = 64 << 10;
/// The most bytes that each rank sends in a measurement.
const MEASUREMENT_BYTES_MAX: usize = 8 << 20;

/// The number of connections of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Streams(StreamChoice);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StreamChoice {
    /// A measurement at the start of the job chooses the number.
    Measured,
    Fixed(u8),
}

impl Streams {
    /// One connection, the default.
    pub const ONE: Self = Self(StreamChoice::Fixed(1));
    /// One or four connections. The ranks measure at the start of the job which number is faster.
    pub const AUTO: Self = Self(StreamChoice::Measured);

    /// Returns `count` connections; `None` if `count` is not from 1 to 8.
    pub fn new(count: u8) -> Option<Self> {
        (1..=STREAMS_MAX).contains(&count).then_some(Self(StreamChoice::Fixed(count)))
    }

    /// Encodes the setting for the rendezvous. 0 means [`Streams::AUTO`].
    pub(super) fn to_byte(self) -> u8 {
        match self.0 {
            StreamChoice::Measured => 0,
            StreamChoice::Fixed(count) => count,
        }
    }

    /// Decodes the byte of [`Streams::to_byte`]; `None` if the byte is larger than 8.
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        if byte == 0 { Some(Self::AUTO) } else { Self::new(byte) }
    }

    /// Returns the number of connections that each link opens at the start of the job.
    pub(super) fn initial_count(self) -> u8 {
        match self.0 {
            StreamChoice::Measured => MEASURED_STREAMS,
            StreamChoice::Fixed(count) => count,
        }
    }

    /// Returns whether a measurement chooses the number of connections.
    pub(super) fn is_measured(self) -> bool {
        self.0 == StreamChoice::Measured
    }
}

impl Default for Streams {
    fn default() -> Self {
        Self::ONE
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::AUTO);
        }
        let count = text.parse().ok().and_then(Self::new);
        count.ok_or_else(|| format!("`{text}` is neither auto nor a number from 1 to {STREAMS_MAX}"))
    }
}

impl fmt::Display for Streams {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            StreamChoice::Measured => out.write_str("auto"),
            StreamChoice::Fixed(count) => write!(out, "{count}"),
        }
    }
}

/// Measures whether one connection or several connections are faster on the ring, and uses the faster number for each link. All
/// ranks of the job have to call this function, before the job is used for anything else. All ranks choose the same number.
pub(super) fn choose_by_measurement(group: &mut Group, local_transport: LocalTransport) -> Result<(), Error> {
    // Ranks that share memory send little data over links.
    let shares_memory = local_transport != LocalTransport::Tcp && group.local_size() == group.size();
    let count = if shares_memory { 1 } else { measure_faster_count(group)? };
    group.with_job(|job| {
        if count == 1 {
            job.driver.use_single_connection();
        } else {
            job.driver.use_streams(count);
        }
        job.streams = count;
    });
    Ok(())
}

/// Measures an all-gather with one connection and with several connections, and returns the faster number of connections.
fn measure_faster_count(group: &mut Group) -> Result<u8, Error> {
    // The first call opens the connections, so its time does not count.
    time_all_gather(group, MEASURED_STREAMS, PROBE_BYTES)?;
    let mut probe_ns = [f64::INFINITY];
    for _ in 0..PROBES {
        probe_ns[0] = probe_ns[0].min(time_all_gather(group, 1, PROBE_BYTES)?);
    }
    group.all_reduce(&mut probe_ns, ReduceOp::Max)?;
    let bytes = (PROBE_BYTES as f64 * MEASUREMENT_NS / probe_ns[0])
        .clamp(MEASUREMENT_BYTES_MIN as f64, MEASUREMENT_BYTES_MAX as f64) as usize;
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        // Measure both numbers in turns, so that other load affects both alike.
        for (count, times) in [1, MEASURED_STREAMS].into_iter().zip(&mut times) {
            let time_ns = time_all_gather(group, count, bytes)?;
            if round > 0 {
                times.push(time_ns);
            }
        }
    }
    let mut medians = times.map(median);
    group.all_reduce(&mut medians, ReduceOp::Max)?;
    let [one_ns, several_ns] = medians;
    log::debug!(
        "{bytes} bytes take {one_ns} ns with 1 connection and {several_ns} ns with {MEASURED_STREAMS}"
    );
    Ok(if several_ns <= one_ns * (1.0 - MIN_GAIN) { MEASURED_STREAMS } else { 1 })
}

/// Returns the time in nanoseconds of an all-gather of `bytes` bytes from each rank on the ring, with `count` connections for
/// each link.
fn time_all_gather(group: &mut Group, count: u8, bytes: usize) -> Result<f64, Error> {
    group.with_job(|job| job.driver.use_streams(count));
    use_ring(group);
    let mut buffer = vec![0u8; group.size().as_usize() * bytes];
    group.barrier()?;
    let started = Instant::now();
    group.all_gather(&mut buffer)?;
    Ok(started.elapsed().as_nanos() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_auto_or_a_number_from_1_to_8() {
        assert_eq!("auto".parse(), Ok(Streams::AUTO));
        assert_eq!("1".parse(), Ok(Streams::default()));
        for text in ["0", "9", "-1", "", "four"] {
            assert!(text.parse::<Streams>().unwrap_err().contains("neither auto nor a number"), "{text}");
        }
        for byte in 0..=u8::MAX {
            let streams = Streams::from_byte(byte);
            assert_eq!(streams.is_some(), byte <= STREAMS_MAX);
            assert!(streams.is_none_or(|streams| streams.to_byte() == byte));
        }
    }
}
