//! Of how many connections links consist: what was asked for, or what is measured when the group forms.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use super::share::LocalTransport;
use super::tune::{median, ring};
use super::{Error, Group};
use crate::types::ReduceOp;
use crate::wire::handshake::STREAMS_MAX;

/// How many are tried where that is measured.
const TRIED: u8 = 4;
/// By what part of the time they must be faster.
const GAIN: f64 = 0.1;
/// How often each is timed, after one time that does not count; the median does.
const ROUNDS: usize = 5;
/// How long one of them is to take, in nanoseconds: all of them take some 50 ms. What limits a connection may let the first
/// 100 KB or so pass.
const TRIAL: f64 = 4e6;
/// Bytes that each rank sends around the ring to learn how many that are, how often it does that, the fastest of which counts,
/// and at least and at most how many it may be then.
const FIRST: usize = 64 << 10;
const PROBES: usize = 3;
const LEAST: usize = 64 << 10;
const MOST: usize = 8 << 20;

/// The number of connections of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Streams(StreamChoice);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StreamChoice {
    Measured,
    Fixed(u8),
}

impl Streams {
    /// One, the default.
    pub const ONE: Self = Self(StreamChoice::Fixed(1));
    /// One or four, depending on which is measured to be faster when the group forms.
    pub const AUTO: Self = Self(StreamChoice::Measured);

    /// This number of connections, from 1 to 8.
    pub fn new(count: u8) -> Option<Self> {
        (1..=STREAMS_MAX).contains(&count).then_some(Self(StreamChoice::Fixed(count)))
    }

    /// As the rendezvous says it.
    pub(super) fn to_byte(self) -> u8 {
        match self.0 {
            StreamChoice::Measured => 0,
            StreamChoice::Fixed(count) => count,
        }
    }

    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        if byte == 0 { Some(Self::AUTO) } else { Self::new(byte) }
    }

    /// With how many links begin.
    pub(super) fn at_first(self) -> u8 {
        match self.0 {
            StreamChoice::Measured => TRIED,
            StreamChoice::Fixed(count) => count,
        }
    }

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

/// Takes one connection for each link or those that there are, whichever is faster around the ring. All ranks of the job
/// have to call this, before anybody else uses it, and decide the same.
pub(super) fn choose(group: &mut Group, local: LocalTransport) -> Result<(), Error> {
    // Whoever shares memory sends little over links.
    let has_memory = local != LocalTransport::Tcp && group.local_size() == group.size();
    let count = if has_memory { 1 } else { measure(group)? };
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

fn measure(group: &mut Group) -> Result<u8, Error> {
    // The first time is also the one in which the connections come.
    time(group, TRIED, FIRST)?;
    let mut first = [f64::INFINITY];
    for _ in 0..PROBES {
        first[0] = first[0].min(time(group, 1, FIRST)?);
    }
    group.all_reduce(&mut first, ReduceOp::Max)?;
    let bytes = (FIRST as f64 * TRIAL / first[0]).clamp(LEAST as f64, MOST as f64) as usize;
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        // In turns, so that what disturbs one disturbs the other too.
        for (count, times) in [1, TRIED].into_iter().zip(&mut times) {
            let time = time(group, count, bytes)?;
            if round > 0 {
                times.push(time);
            }
        }
    }
    let [one, several] = times;
    let mut medians = [median(one), median(several)];
    group.all_reduce(&mut medians, ReduceOp::Max)?;
    let [one, several] = medians;
    log::debug!("{bytes} bytes take {one} ns with 1 connection and {several} ns with {TRIED}");
    Ok(if several <= one * (1.0 - GAIN) { TRIED } else { 1 })
}

/// The time, in nanoseconds, in which every rank's bytes go around the ring, each link sending on so many connections.
fn time(group: &mut Group, count: u8, bytes: usize) -> Result<f64, Error> {
    group.with_job(|job| job.driver.use_streams(count));
    ring(group);
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
    fn streams_are_a_number_or_measured() {
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
