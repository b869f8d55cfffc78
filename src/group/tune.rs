//! The agreement of the ranks at the start of a job: all ranks use the options of rank 0 and the same measured cost of links.

use std::sync::Arc;
use std::time::Instant;

use super::selection::{AlgorithmSelection, Algorithms, LocalTransport};
use super::state::{Group, SharedJob};
use super::streams::{MEASURED_STREAMS, Streams};
use crate::runtime::error::Error;
use crate::schedule::cost::LinkCost;
use crate::types::{Rank, ReduceOp};

/// The bytes that each rank contributes to a short all-gather.
const SHORT_BYTES: usize = 8;
/// The bytes that each rank sends in a long all-gather: more than the burst that a network passes above its rate after a pause.
/// To send these bytes takes 6 ms on a network of 1 Gbit/s.
const LONG_TOTAL_BYTES: usize = 768 << 10;
/// The most bytes that each rank contributes to a long all-gather.
const LONG_BYTES_MAX: usize = 256 << 10;
/// The largest world in which all links are opened to measure the cost of sending to all other ranks.
const DIRECT_WORLD_MAX: usize = 16;
/// In a larger world, the assumed cost of each further message of a step, as a fraction of the latency.
const OVERHEAD_FRACTION: f64 = 0.25;
/// The least time per byte in nanoseconds. A smaller measured time is noise.
const BYTE_NS_MIN: f64 = 0.02;
/// The largest number of times that each all-gather is timed. The median counts.
const ROUNDS_MAX: usize = 15;
/// The value of [`ROUNDS_MAX`] in a world of more than [`DIRECT_WORLD_MAX`] ranks.
const ROUNDS_MAX_LARGE: usize = 5;
/// The least number of times that each all-gather is timed, because the first direct all-gather opens connections.
const ROUNDS_MIN: usize = 2;
/// In a small world, the long all-gather is timed only in every third round.
const LONG_INTERVAL: usize = 3;
/// The intended time of all rounds in nanoseconds. Slow links, and ranks that share a processor, have fewer rounds.
const ALL_ROUNDS_NS: f64 = 1e8;

/// Several connections are used only if they reduce the time at least by this fraction.
const MIN_GAIN: f64 = 0.1;
/// The number of times that each number of connections is timed, after one warm-up. The median counts.
const STREAM_ROUNDS: usize = 5;
/// The intended time of one measurement in nanoseconds. All measurements together take some 50 ms. Networks that limit the rate
/// of a connection often let the first 100 KB pass at full speed, so a measurement must be longer.
const MEASUREMENT_NS: f64 = 4e6;
/// The number of bytes that each rank sends in a probe, from which the length of the measurements is computed.
const PROBE_BYTES: usize = 64 << 10;
const PROBES: usize = 3;
const MEASUREMENT_BYTES_MIN: usize = 64 << 10;
const MEASUREMENT_BYTES_MAX: usize = 8 << 20;

/// Makes all ranks use rank 0's algorithms and transport, opens queues between the ranks of each host, and measures the cost of
/// links. The second argument has this rank's transport and the text of its algorithms. All ranks have to call this function.
pub(super) fn agree_on_selection(
    group: &mut Group,
    (own_transport, own_algorithms): (LocalTransport, String),
    streams: Streams,
) -> Result<(), Error> {
    let own_options = (own_transport as u8, own_algorithms);
    let (algorithms, local_transport) = broadcast_options(group, &own_options)?;
    if streams.is_measured() {
        choose_streams_by_measurement(group, local_transport)?;
    }
    // A rank that sleeps is woken over the only connection of a link.
    if local_transport != LocalTransport::Tcp && streams.initial_count() == 1 {
        group.open_local_queues()?;
    }
    let link_cost = measure_link_cost(group)?;
    group.with_job(|job| job.selection = AlgorithmSelection { algorithms, link_cost, local_transport });
    log::debug!("measured cost of links: {link_cost:?}");
    Ok(())
}

impl Group {
    /// Changes the job, of which this group must be the only owner.
    pub(super) fn with_job(&mut self, change: impl FnOnce(&mut SharedJob)) {
        if let Some(job) = self.job.as_mut().and_then(Arc::get_mut) {
            change(job);
        }
    }
}

/// Returns rank 0's algorithms and transport. A rank of another version that does not know them stops the job.
fn broadcast_options(
    group: &mut Group,
    own_options: &(u8, String),
) -> Result<(Algorithms, LocalTransport), Error> {
    let (transport, algorithms) = group.broadcast_object(own_options, Rank::ZERO)?;
    let known_transports = [LocalTransport::Auto, LocalTransport::Tcp, LocalTransport::Shm];
    let known_transport = known_transports.into_iter().find(|&known| known as u8 == transport);
    let unknown = match (algorithms.parse(), known_transport) {
        (Ok(algorithms), Some(transport)) => return Ok((algorithms, transport)),
        (Err(why), _) => format!("--algorithm {algorithms} of rank 0: {why}"),
        (_, None) => format!("the transport {transport} of rank 0"),
    };
    let version = env!("CARGO_PKG_VERSION");
    Err(group.abort(&format!(
        "version {version} of ringtrain on this rank does not know {unknown}; install the same version on every host"
    )))
}

/// Measures the cost of links: the slowest times of short and long all-gathers on the ring and, in a small world, direct ones.
fn measure_link_cost(group: &mut Group) -> Result<LinkCost, Error> {
    let n = group.size().as_usize();
    let is_small = n <= DIRECT_WORLD_MAX;
    let long_bytes = (LONG_TOTAL_BYTES / (n - 1)).clamp(2 * SHORT_BYTES, LONG_BYTES_MAX);
    let (rounds_max, long_interval) =
        if is_small { (ROUNDS_MAX, LONG_INTERVAL) } else { (ROUNDS_MAX_LARGE, 1) };
    let kinds = [("ring", SHORT_BYTES, 1), ("ring", long_bytes, long_interval), ("direct", SHORT_BYTES, 1)];
    let times_direct = is_small && n > 2;
    let kinds = if times_direct { &kinds[..] } else { &kinds[..2] };
    let mut times = vec![Vec::new(); kinds.len()];
    let started = Instant::now();
    let mut rounds = ROUNDS_MIN;
    let mut round = 0;
    // Measure all kinds in turns, so that other load affects all alike.
    while round < rounds {
        for (&(algorithm, bytes, interval), times) in kinds.iter().zip(&mut times) {
            if round.is_multiple_of(interval) {
                times.push(time_all_gather(group, algorithm, bytes)?);
            }
        }
        if round == 0 {
            let mut round_ns = [started.elapsed().as_nanos() as f64];
            group.all_reduce(&mut round_ns, ReduceOp::Max)?;
            rounds = round_count(round_ns[0], rounds_max);
        }
        round += 1;
    }
    let medians: Vec<f64> = times.into_iter().map(median).collect();
    let hops = (n - 1) as f64;
    let latency_ns = medians[0] / hops;
    let ns_per_byte = (medians[1] / hops - latency_ns) / (long_bytes - SHORT_BYTES) as f64;
    let overhead_ns = medians
        .get(2)
        .map_or(latency_ns * OVERHEAD_FRACTION, |direct_ns| (direct_ns - latency_ns) / (n - 2) as f64);
    let mut costs_ns = [latency_ns, overhead_ns.max(0.0), ns_per_byte.max(BYTE_NS_MIN)];
    group.all_reduce(&mut costs_ns, ReduceOp::Max)?;
    Ok(LinkCost { latency_ns: costs_ns[0], overhead_ns: costs_ns[1], ns_per_byte: costs_ns[2] })
}

/// Returns the number of rounds, of which one takes `round_ns`: at most `rounds_max`, and fewer within [`ALL_ROUNDS_NS`].
fn round_count(round_ns: f64, rounds_max: usize) -> usize {
    ((ALL_ROUNDS_NS / round_ns) as usize).clamp(ROUNDS_MIN, rounds_max)
}

fn time_all_gather(group: &mut Group, algorithm: &str, bytes: usize) -> Result<f64, Error> {
    let algorithms = algorithm.parse().unwrap_or_default();
    let selection = AlgorithmSelection { algorithms, ..AlgorithmSelection::default() };
    group.with_job(|job| job.selection = selection);
    let mut buffer = vec![0u8; group.size().as_usize() * bytes];
    // Other ranks may still work on the previous all-gather. The barrier waits for these ranks.
    group.barrier()?;
    let started = Instant::now();
    group.all_gather(&mut buffer)?;
    Ok(started.elapsed().as_nanos() as f64)
}

/// Returns the median of the times, which are at least one; of an even number of times, the lower of the two in the middle.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[(times.len() - 1) / 2]
}

/// Measures whether one connection or several connections are faster on the ring, and uses the faster number for each link. All
/// ranks of the job have to call this function, before the job is used for anything else. All ranks choose the same number.
fn choose_streams_by_measurement(group: &mut Group, local_transport: LocalTransport) -> Result<(), Error> {
    // Ranks that share memory send little data over links.
    let shares_memory = local_transport != LocalTransport::Tcp && group.local_size() == group.size();
    let count = if shares_memory { 1 } else { measure_faster_count(group)? };
    group.with_job(|job| {
        let mut core = job.driver.core();
        let sockets = &mut core.link_driver.transport.sockets;
        if count == 1 {
            sockets.use_single_connection();
        } else {
            sockets.use_streams(count);
        }
        drop(core);
        job.streams = count;
    });
    Ok(())
}

fn measure_faster_count(group: &mut Group) -> Result<u8, Error> {
    // The first call opens the connections, so its time does not count.
    time_with_streams(group, MEASURED_STREAMS, PROBE_BYTES)?;
    let mut probe_ns = [f64::INFINITY];
    for _ in 0..PROBES {
        probe_ns[0] = probe_ns[0].min(time_with_streams(group, 1, PROBE_BYTES)?);
    }
    group.all_reduce(&mut probe_ns, ReduceOp::Max)?;
    let bytes = (PROBE_BYTES as f64 * MEASUREMENT_NS / probe_ns[0])
        .clamp(MEASUREMENT_BYTES_MIN as f64, MEASUREMENT_BYTES_MAX as f64) as usize;
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=STREAM_ROUNDS {
        // Measure both numbers in turns, so that other load affects both alike.
        for (count, times) in [1, MEASURED_STREAMS].into_iter().zip(&mut times) {
            let time_ns = time_with_streams(group, count, bytes)?;
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

fn time_with_streams(group: &mut Group, count: u8, bytes: usize) -> Result<f64, Error> {
    group.with_job(|job| job.driver.core().link_driver.transport.sockets.use_streams(count));
    time_all_gather(group, "ring", bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Cause;

    /// A fast network has all rounds. A network on which a round takes more than a second has the least number.
    #[test]
    fn slow_links_are_timed_less_often() {
        for (round_ns, rounds) in [(0.0, 15), (1e6, 15), (1e7, 10), (4e7, 2), (2e9, 2)] {
            assert_eq!(round_count(round_ns, ROUNDS_MAX), rounds, "{round_ns} ns");
        }
        assert_eq!(round_count(1e6, ROUNDS_MAX_LARGE), 5);
    }

    /// In an earlier version, a rank that did not know rank 0's algorithm waited for messages that no rank sends.
    #[test]
    fn options_of_rank_0_that_this_rank_does_not_know_stop_the_job() {
        let known = broadcast_options(&mut Group::solo(), &(2, "ring:0-max".into())).unwrap();
        assert_eq!((known.0.to_string().as_str(), known.1), ("ring:0-max", LocalTransport::Shm));
        for (transport, algorithms, expected) in [
            (0, "ring:0-8;cube:9-max", "--algorithm ring:0-8;cube:9-max of rank 0: `cube` is not one of "),
            (3, "auto", "does not know the transport 3 of rank 0; install the same version on every host"),
        ] {
            let error = broadcast_options(&mut Group::solo(), &(transport, algorithms.into())).unwrap_err();
            assert!(matches!(error.cause(), Some(Cause::Aborted { rank: Rank::ZERO, .. })), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
