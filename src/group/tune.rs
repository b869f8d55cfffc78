//! What the ranks agree about before the group is handed out: what rank 0 was asked for, and what links cost.

use std::sync::Arc;
use std::time::Instant;

use super::selection::{AlgorithmRange, AlgorithmSelection, Algorithms, RANGES_MAX};
use super::share::LocalTransport;
use super::streams::{self, Streams};
use super::{Error, Group, SharedJob};
use crate::schedule::cost::LinkCost;
use crate::types::{Algorithm, Rank, ReduceOp};

/// Words of an algorithm's range.
const RANGE_WORDS: usize = 3;
/// Bytes of a part of the shortest buffer that is timed.
const SHORT: usize = 8;
/// What each rank sends of a longer one, and the longest part. It is long against what a line lets pass at once after a pause,
/// beyond its rate, and takes a line of 1 Gbit/s 6 ms.
const LONG_TOTAL: usize = 768 << 10;
const LONG_MAX: usize = 256 << 10;
/// The largest world in which all links are opened to measure what a message to everybody costs.
const CROWD_MAX: usize = 16;
/// Where that is not measured: the part of a latency that each further message costs.
const OVERHEAD: f64 = 0.25;
/// Nanoseconds a byte that no link undercuts; what was measured may be noise.
const BYTE_MIN: f64 = 0.02;
/// How often each is timed, and how often in a larger world; the median counts. Of the longer buffer every third time will do.
const ROUNDS: usize = 15;
const ROUNDS_LARGE: usize = 5;
const LONG_EVERY: usize = 3;

/// Takes rank 0's algorithms and transport, and measures the links.
pub(super) fn agree(
    group: &mut Group,
    algorithms: &Algorithms,
    transport: LocalTransport,
    streams: Streams,
) -> Result<(), Error> {
    let (algorithms, local) = of_rank_0(group, algorithms, transport)?;
    if streams.is_measured() {
        streams::choose(group, local)?;
    }
    let link = measure(group)?;
    set(group, AlgorithmSelection { algorithms, link, local });
    log::debug!("links cost {link:?}");
    Ok(())
}

fn set(group: &mut Group, selection: AlgorithmSelection) {
    group.with_job(|job| job.selection = selection);
}

/// Whatever can goes along the ring.
pub(super) fn ring(group: &mut Group) {
    set(
        group,
        AlgorithmSelection {
            algorithms: "ring".parse().unwrap_or_default(),
            ..AlgorithmSelection::default()
        },
    );
}

impl Group {
    /// Changes the job, which nobody else has yet.
    pub(super) fn with_job(&mut self, change: impl FnOnce(&mut SharedJob)) {
        if let Some(job) = self.job.as_mut().and_then(Arc::get_mut) {
            change(job);
        }
    }
}

/// What rank 0 was asked for.
fn of_rank_0(
    group: &mut Group,
    own: &Algorithms,
    transport: LocalTransport,
) -> Result<(Algorithms, LocalTransport), Error> {
    let mut words = [0u64; 1 + RANGES_MAX * RANGE_WORDS];
    words[0] = transport as u64;
    for (place, range) in words[1..].chunks_exact_mut(RANGE_WORDS).zip(own.ranges()) {
        place.copy_from_slice(&[u64::from(range.algorithm.to_byte()), range.from, range.to]);
    }
    group.broadcast(&mut words, Rank::ZERO)?;
    let range = |words: &[u64]| {
        let algorithm = u8::try_from(words[0]).ok().and_then(Algorithm::from_byte)?;
        Some(AlgorithmRange { algorithm, from: words[1], to: words[2] })
    };
    let algorithms = Algorithms::new(words[1..].chunks_exact(RANGE_WORDS).map_while(range).collect());
    let all = [LocalTransport::Auto, LocalTransport::Tcp, LocalTransport::Shm];
    let transport = all.into_iter().find(|&transport| transport as u64 == words[0]);
    Ok((algorithms, transport.unwrap_or(LocalTransport::Tcp)))
}

/// Times a few messages around the ring and, in a small world, straight to everybody. The slowest rank's figures count.
fn measure(group: &mut Group) -> Result<LinkCost, Error> {
    let n = group.size().as_usize();
    let is_small = n <= CROWD_MAX;
    let long = (LONG_TOTAL / (n - 1)).clamp(2 * SHORT, LONG_MAX);
    let (rounds, every) = if is_small { (ROUNDS, LONG_EVERY) } else { (ROUNDS_LARGE, 1) };
    let kinds = [("ring", SHORT, 1), ("ring", long, every), ("direct", SHORT, 1)];
    let has_crowd = is_small && n > 2;
    let kinds = if has_crowd { &kinds[..] } else { &kinds[..2] };
    let mut times = vec![Vec::new(); kinds.len()];
    // In turns, so that what disturbs one disturbs the others too.
    for round in 0..rounds {
        for (&(algorithm, bytes, every), times) in kinds.iter().zip(&mut times) {
            if round.is_multiple_of(every) {
                times.push(time(group, algorithm, bytes)?);
            }
        }
    }
    let medians: Vec<f64> = times.into_iter().map(median).collect();
    let hops = (n - 1) as f64;
    let short = medians[0] / hops;
    let byte = (medians[1] / hops - short) / (long - SHORT) as f64;
    let overhead = medians.get(2).map_or(short * OVERHEAD, |crowd| (crowd - short) / (n - 2) as f64);
    let mut link = [short, overhead.max(0.0), byte.max(BYTE_MIN)];
    group.all_reduce(&mut link, ReduceOp::Max)?;
    Ok(LinkCost { latency: link[0], overhead: link[1], byte: link[2] })
}

/// The time, in nanoseconds, of an all-gather of so many bytes from each rank.
fn time(group: &mut Group, algorithm: &str, bytes: usize) -> Result<f64, Error> {
    let algorithms = algorithm.parse().unwrap_or_default();
    set(group, AlgorithmSelection { algorithms, ..AlgorithmSelection::default() });
    let mut buffer = vec![0u8; group.size().as_usize() * bytes];
    // What others still have under way of the one before would be in its way.
    group.barrier()?;
    let started = Instant::now();
    group.all_gather(&mut buffer)?;
    Ok(started.elapsed().as_nanos() as f64)
}

pub(super) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
