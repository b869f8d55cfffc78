//! Measures one row of the table. A measurement consists of warm-up iterations, timed iterations and checked iterations.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::compression::{self, CompressionResult};
use super::operation::BenchOperation;
use super::pattern::TestPattern;
use super::plan::{BenchCase, IterationCount};
use super::statistics::{median, percentile};
use super::test_values::BenchElement;
use super::time_breakdown::RankProfile;
use crate::codec::Compression;
use crate::group::verbs::{AllGather, AllToAll, Exscan, Gather, Scatter};
use crate::group::{Compressor, Error, Group, SharedBuffer, Spent};
use crate::types::{Algorithm, Rank, ReduceOp, WorldSize};

/// The least number of timed iterations without `-n`.
const ITERATIONS_MIN: u32 = 5;
/// The greatest number of timed iterations without `-n`.
const ITERATIONS_MAX: u32 = 1000;
/// In each checked barrier, one rank sleeps for this time before it enters the barrier, so that all other ranks already
/// wait in the barrier.
const BARRIER_CHECK_DELAY: Duration = Duration::from_millis(2);
/// The timeout of a rank that only waits until the other ranks have finished the measured operations.
const IDLE_RANK_TIMEOUT: Duration = Duration::from_hours(24);
/// The length of a cache line of most processors.
const LINE_BYTES: usize = 64;
/// The tag of all messages of the benchmark.
const MESSAGE_TAG: u32 = 0;

/// The options that apply to every row.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasureOptions {
    /// The number of timed iterations.
    pub(super) iterations: IterationCount,
    /// The number of untimed iterations before the timed iterations.
    pub(super) warm_up: u32,
    /// The number of checked iterations.
    pub(super) checks: u32,
    /// Whether to record the time breakdown of each rank (`--profile`).
    pub(super) profiles: bool,
    /// Whether to allocate the buffers of an all-reduce with [`Group::alloc`] (`--alloc`).
    pub(super) allocates: bool,
    /// Whether to write to the input before each iteration (`--rewrite-input`).
    pub(super) rewrites_input: bool,
    /// How the ranks encode elements (`--compression`).
    pub(super) compression: Compression,
    /// Without `-n`, the number of iterations is chosen such that a row takes about this time, in microseconds.
    pub(super) budget_us: f64,
}

/// A measured row. `bytes` and `count` describe the whole buffer, even if the operation moves only a part of the buffer.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchRow {
    /// The measured operation.
    pub operation: &'static str,
    /// The element type.
    pub dtype: &'static str,
    /// The reduction; `None` if the operation does not reduce.
    pub reduction: Option<&'static str>,
    /// The algorithm; `none` if the job has only one rank.
    pub algorithm: &'static str,
    /// The transport; `none` if the job has only one rank.
    pub transport: &'static str,
    /// The number of ranks.
    pub world_size: u32,
    /// The root; `None` if the operation has no root.
    pub root: Option<u32>,
    /// The size of the whole buffer in bytes.
    pub bytes: u64,
    /// The number of elements in the whole buffer.
    pub count: u64,
    /// The number of timed iterations.
    pub iterations: u32,
    /// The median time of the timed iterations, in microseconds. The time of an iteration is that of its slowest rank.
    pub time_us: f64,
    /// The mean time of the timed iterations of the slowest rank, in microseconds.
    pub time_us_mean: f64,
    /// The shortest time of the timed iterations, in microseconds, measured as for `time_us`.
    pub time_us_min: f64,
    /// The 99th percentile (nearest-rank method) of the times of the timed iterations, in microseconds, measured as
    /// for `time_us`.
    pub time_us_p99: f64,
    /// The algorithm bandwidth: `bytes` divided by `time_us`, in 10^9 bytes per second.
    pub algbw_gb_per_s: f64,
    /// The bus bandwidth: the algorithm bandwidth times [`BenchOperation::bus_factor`].
    pub busbw_gb_per_s: f64,
    /// The number of wrong elements on all ranks, or for a barrier the number of times that a rank left too early;
    /// `None` if nothing was checked.
    pub wrong: Option<u64>,
    /// The time breakdown of each rank that takes part in the operation; `None` without `--profile`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Vec<RankProfile>>,
    /// What compression changes; `None` without `--compression`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<CompressionResult>,
}

/// The timed iterations of one rank.
struct TimedIterations {
    /// The time of each iteration, in microseconds.
    times_us: Vec<f64>,
    /// The time of all iterations together.
    total_time: Duration,
    /// How much of `total_time` the group spent on sending, receiving, reducing and waiting.
    spent: Spent,
}

/// The buffers of one rank for one case.
struct BenchBuffers<T: BenchElement> {
    /// The contribution of this rank. If the operation works in place, this buffer also receives the result.
    input: Vec<T>,
    /// The result of an operation that does not work in place.
    output: Vec<T>,
    /// The buffer that replaces `input` if `--alloc` was given.
    shared: Option<SharedBuffer<T>>,
    /// The compressor and the contribution of each call; `None` without `--compression`.
    compressor: Option<(Compressor, Vec<f32>)>,
    /// Whether [`BenchBuffers::refill`] writes to the input.
    rewrites_input: bool,
}

impl<T: BenchElement> BenchBuffers<T> {
    /// Allocates buffers of zeros. With other contents, repeated operations could produce subnormal numbers, which are slow.
    /// The kernel maps a page of memory at the first write to it. `resize` writes the zeros, unlike `vec![0; n]`, so all
    /// pages are mapped before the measurement. Compressed operations get new random values for each call.
    fn new(group: &mut Group, case: BenchCase, options: MeasureOptions) -> Result<Self, Error> {
        let MeasureOptions { allocates, rewrites_input, compression, .. } = options;
        let zeros = |count| {
            let mut zeros = Vec::new();
            zeros.resize(count, T::zeroed());
            zeros
        };
        let (input, output) =
            (case.input_count(group.size(), group.rank()), case.output_count(group.size(), group.rank()));
        let compressor = (compression != Compression::None).then(|| {
            let values = compression::random_values(input, u64::from(group.rank().get()));
            (Compressor::new(compression), values)
        });
        if allocates && case.operation == BenchOperation::AllReduce {
            let mut shared = group.alloc(input)?;
            shared.fill(T::zeroed());
            let (input, output) = (Vec::new(), zeros(output));
            return Ok(Self { input, output, shared: Some(shared), compressor, rewrites_input });
        }
        Ok(Self { input: zeros(input), output: zeros(output), shared: None, compressor, rewrites_input })
    }

    /// Writes the contribution to a compressed call, or to every cache line of the input with `--rewrite-input`: then no
    /// other processor has the line in its cache. Returns whether it has written anything.
    fn refill(&mut self) -> bool {
        let Self { input, shared, compressor, .. } = self;
        let buffer = shared.as_deref_mut().unwrap_or(input);
        if let Some((_, values)) = compressor {
            bytemuck::cast_slice_mut(buffer).copy_from_slice(values);
        } else if self.rewrites_input {
            for line in buffer.chunks_mut(LINE_BYTES / size_of::<T>()) {
                *black_box(&mut line[0]) = T::zeroed();
            }
        }
        compressor.is_some() || self.rewrites_input
    }

    /// Returns the buffer that holds the contribution of this rank.
    fn contribution(&mut self) -> &mut [T] {
        self.shared.as_deref_mut().unwrap_or(&mut self.input)
    }

    /// Returns the buffer that holds the result of the operation.
    fn result(&self, case: BenchCase) -> &[T] {
        let in_place = self.shared.as_deref().unwrap_or(&self.input);
        if case.operation.is_in_place() { in_place } else { &self.output }
    }
}

/// Measures one case. All ranks must call this function together.
pub(super) fn measure<T: BenchElement>(
    group: &mut Group,
    case: BenchCase,
    options: MeasureOptions,
) -> Result<BenchRow, Error> {
    let timeout = group.timeout();
    if !case.operation.involves(group.rank()) {
        // This rank waits in one operation while the other ranks perform many operations, so this rank needs a longer timeout.
        group.set_timeout(IDLE_RANK_TIMEOUT);
    }
    let row = measure_row::<T>(group, case, options);
    group.set_timeout(timeout);
    row
}

/// Does the same as [`measure()`], but does not change the timeout of the group.
fn measure_row<T: BenchElement>(
    group: &mut Group,
    case: BenchCase,
    options: MeasureOptions,
) -> Result<BenchRow, Error> {
    let mut buffers = BenchBuffers::<T>::new(group, case, options)?;
    let mut warm_up_times_us = Vec::new();
    while buffers
        .compressor
        .as_ref()
        .and_then(|(compressor, _)| compressor.report())
        .is_some_and(|it| it.is_trial)
    {
        buffers.refill();
        run_operation_once(group, case, &mut buffers)?;
    }
    for _ in 0..options.warm_up {
        buffers.refill();
        let start = Instant::now();
        run_operation_once(group, case, &mut buffers)?;
        warm_up_times_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let iterations = match options.iterations {
        IterationCount::Fixed(count) => count,
        IterationCount::Adaptive => {
            choose_iterations(group, case, options.budget_us, &warm_up_times_us, &mut buffers)?
        }
    };
    let encoded_before = compression::encoded(group);
    let TimedIterations { mut times_us, total_time, spent } =
        time_iterations(group, case, iterations, &mut buffers)?;
    if case.operation == BenchOperation::PingPong {
        // Only rank 0 reports a time: half of the round trip, by the clock of rank 0. The other ranks report 0.
        let factor = if group.rank() == Rank::ZERO { 0.5 } else { 0.0 };
        for time_us in &mut times_us {
            *time_us *= factor;
        }
    }
    let mut mean_us = [times_us.iter().sum::<f64>() / times_us.len() as f64];
    group.all_reduce(&mut mean_us, ReduceOp::Max)?;
    group.all_reduce(&mut times_us, ReduceOp::Max)?;
    let profile = if options.profiles {
        let ranks = RankProfile::gather_from_ranks(group, (total_time, spent), iterations)?;
        let is_involved = |profile: &RankProfile| case.operation.involves(Rank::new(profile.rank));
        Some(ranks.into_iter().filter(is_involved).collect())
    } else {
        None
    };
    let mut compressed = buffers.compressor.as_ref().map(|(compressor, _)| CompressionResult {
        codec: compression::codec_name(compressor),
        fraction_of_bytes: compression::fraction_of_bytes(group, encoded_before),
        relative_error: None,
    });
    let compressor = buffers.compressor.as_ref().map(|(compressor, _)| compressor);
    let used_codec = compressor.map_or(Compression::None, compression::used_codec);
    let wrong = match (options.checks, case.operation) {
        (0, _) => None,
        (checks, _) if let Some(result) = &mut compressed => {
            let mut wrong = 0;
            for seed in 0..checks {
                let (differing, error) = compression::check(group, case, used_codec, seed.into())?;
                wrong += differing;
                result.relative_error = Some(result.relative_error.unwrap_or_default().max(error));
            }
            Some(wrong)
        }
        (checks, BenchOperation::Barrier) => count_early_barrier_exits(group, checks)?,
        (checks, _) => Some(count_wrong_elements(group, case, checks, &mut buffers)?),
    };
    let row =
        BenchRow { profile, compression: compressed, ..make_row(group, case, times_us, mean_us[0], wrong) };
    // Unless the ranks share memory on each host, they send encoded elements directly to the owners of chunks.
    let is_direct = row.compression.is_some() && group.transport() == "tcp";
    Ok(if is_direct { BenchRow { algorithm: Algorithm::Direct.name(), ..row } } else { row })
}

/// Returns how many iterations the slowest rank can do in `budget_us` microseconds. All ranks return the same number.
fn choose_iterations<T: BenchElement>(
    group: &mut Group,
    case: BenchCase,
    budget_us: f64,
    warm_up_times_us: &[f64],
    buffers: &mut BenchBuffers<T>,
) -> Result<u32, Error> {
    // Use the times of the second half of the warm-up iterations. Without a warm-up, time one iteration.
    let mut used_times_us = warm_up_times_us[warm_up_times_us.len() / 2..].to_vec();
    if used_times_us.is_empty() {
        used_times_us = time_iterations(group, case, 1, buffers)?.times_us;
    }
    let mut mean_us = [used_times_us.iter().sum::<f64>() / used_times_us.len() as f64];
    group.all_reduce(&mut mean_us, ReduceOp::Max)?;
    let iterations = budget_us / mean_us[0].max(f64::MIN_POSITIVE);
    Ok((iterations as u32).clamp(ITERATIONS_MIN, ITERATIONS_MAX))
}

/// Times each iteration on this rank. As in nccl-tests, there is no barrier between iterations of operations without compression.
/// Ranks leave a barrier at slightly different times, and these differences would distort the times of short operations.
fn time_iterations<T: BenchElement>(
    group: &mut Group,
    case: BenchCase,
    iterations: u32,
    buffers: &mut BenchBuffers<T>,
) -> Result<TimedIterations, Error> {
    let mut times_us = Vec::with_capacity(iterations as usize);
    group.barrier()?;
    let spent_before = group.profile().calls;
    let start = Instant::now();
    let mut previous_end = start;
    for _ in 0..iterations {
        if buffers.refill() {
            if buffers.compressor.is_some() {
                // Wait for the ranks that still write, so that the time of the call does not contain this wait.
                group.barrier()?;
            }
            previous_end = Instant::now();
        }
        run_operation_once(group, case, buffers)?;
        let now = Instant::now();
        times_us.push((now - previous_end).as_secs_f64() * 1e6);
        previous_end = now;
    }
    Ok(TimedIterations {
        times_us,
        total_time: previous_end - start,
        spent: group.profile().calls.since(spent_before),
    })
}

/// Runs `checks` iterations, each with different input data. Returns the total number of wrong elements on all ranks.
fn count_wrong_elements<T: BenchElement>(
    group: &mut Group,
    case: BenchCase,
    checks: u32,
    buffers: &mut BenchBuffers<T>,
) -> Result<u64, Error> {
    let mut wrong = [0u64];
    for seed in 0..checks {
        let pattern = TestPattern::<T>::new(case, group.size(), group.rank(), seed.into());
        buffers.output.fill(T::zeroed());
        pattern.fill(buffers.contribution());
        run_operation_once(group, case, buffers)?;
        wrong[0] += pattern.count_wrong(buffers.result(case));
    }
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok(wrong[0])
}

/// Runs `checks` barriers. Counts the ranks that left a barrier before the last rank entered this barrier. In each barrier, a
/// different rank enters last. Returns `None` if the ranks are on several hosts, because these hosts have no common clock.
fn count_early_barrier_exits(group: &mut Group, checks: u32) -> Result<Option<u64>, Error> {
    if group.local_size() != group.size() {
        return Ok(None);
    }
    let mut early = 0;
    for round in 0..checks {
        if group.rank().get() == round % group.size().get() {
            thread::sleep(BARRIER_CHECK_DELAY);
        }
        let entered = monotonic_nanoseconds();
        group.barrier()?;
        let left = monotonic_nanoseconds();
        early += count_ranks_that_left_early(&group.call(AllGather::new()).run_from(&[entered, left])?);
    }
    Ok(Some(early))
}

/// Returns the number of ranks that left the barrier before the last rank entered the barrier. `times` has two elements
/// for each rank: when the rank entered the barrier, and when the rank left the barrier.
fn count_ranks_that_left_early(times: &[u64]) -> u64 {
    let last_entry = times.iter().step_by(2).max();
    times.iter().skip(1).step_by(2).filter(|&left| Some(left) < last_entry).count() as u64
}

/// Returns the time in nanoseconds, from the clock that all processes of a host share.
fn monotonic_nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Performs the measured operation once.
fn run_operation_once<T: BenchElement>(
    group: &mut Group,
    case: BenchCase,
    buffers: &mut BenchBuffers<T>,
) -> Result<(), Error> {
    let BenchBuffers { input, output, shared, compressor, .. } = buffers;
    if let Some((compressor, _)) = compressor {
        let buffer = shared.as_deref_mut().unwrap_or(input);
        return compression::run_once(group, case, bytemuck::cast_slice_mut(buffer), compressor);
    }
    let op = case.reduction.unwrap_or(ReduceOp::Sum);
    match case.operation {
        BenchOperation::AllReduce => group.all_reduce(shared.as_deref_mut().unwrap_or(input), op)?,
        BenchOperation::Reduce => group.reduce(input, op, case.root)?,
        BenchOperation::ReduceScatter => {
            group.reduce_scatter(input, op)?;
        }
        BenchOperation::AllGather => group.all_gather(input)?,
        BenchOperation::Broadcast => group.broadcast(input, case.root)?,
        BenchOperation::Gather => group.call(Gather::to(case.root)).run_into(input, output)?,
        BenchOperation::Scatter => {
            group.call(Scatter::from(case.root).count(case.count)).run_into(input, output)?;
        }
        BenchOperation::AllToAll => group.call(AllToAll::new()).run_into(input, output)?,
        BenchOperation::Scan => group.scan(input, op)?,
        BenchOperation::Exscan => *output = group.call(Exscan::new(op)).run_from(input)?,
        BenchOperation::Barrier => group.barrier()?,
        BenchOperation::PingPong => ping_pong(group, buffers)?,
        BenchOperation::SendReceive => {
            let (next, previous) =
                (group.size().rank_after(group.rank(), 1), group.size().rank_before(group.rank(), 1));
            group.send_receive((input, next, MESSAGE_TAG), (output, previous.into(), Some(MESSAGE_TAG)))?;
        }
    }
    Ok(())
}

/// Rank 0 sends its input and then receives. Rank 1 receives and then sends its input. Other ranks do nothing.
fn ping_pong<T: BenchElement>(group: &mut Group, buffers: &mut BenchBuffers<T>) -> Result<(), Error> {
    let BenchBuffers { input, output, .. } = buffers;
    let peer = match group.rank().get() {
        0 => Rank::new(1),
        1 => Rank::ZERO,
        _ => return Ok(()),
    };
    if peer == Rank::ZERO {
        group.receive(output, peer, MESSAGE_TAG)?;
    }
    group.send(input, peer, MESSAGE_TAG)?;
    if peer != Rank::ZERO {
        group.receive(output, peer, MESSAGE_TAG)?;
    }
    Ok(())
}

/// Makes the row of a case from the times of its iterations, their mean on the slowest rank and the number of wrong elements.
fn make_row(
    group: &Group,
    case: BenchCase,
    mut times_us: Vec<f64>,
    mean_us: f64,
    wrong: Option<u64>,
) -> BenchRow {
    times_us.sort_by(f64::total_cmp);
    let median_us = median(&times_us);
    // One byte per microsecond is 10^6 bytes per second, which is 10^-3 GB/s.
    let algbw = if median_us > 0.0 { case.bytes() as f64 / median_us / 1e3 } else { 0.0 };
    BenchRow {
        operation: case.operation.name(),
        dtype: if case.operation == BenchOperation::Barrier { "none" } else { case.dtype.name() },
        reduction: case.reduction.map(ReduceOp::name),
        algorithm: algorithm_name(group, case),
        transport: group.transport(),
        world_size: group.size().get(),
        root: case.operation.group_operation().has_root().then_some(case.root.get()),
        bytes: case.bytes() as u64,
        count: case.count as u64,
        iterations: times_us.len() as u32,
        time_us: median_us,
        time_us_mean: mean_us,
        time_us_min: times_us.first().copied().unwrap_or_default(),
        time_us_p99: percentile(&times_us, 0.99),
        algbw_gb_per_s: algbw,
        busbw_gb_per_s: algbw * case.operation.bus_factor(group.size()),
        wrong,
        profile: None,
        compression: None,
    }
}

/// Returns the name of the algorithm that the group uses for this case.
fn algorithm_name(group: &Group, case: BenchCase) -> &'static str {
    let is_alone = group.size() == WorldSize::ONE;
    if is_alone { "none" } else { group.algorithm(case.operation.group_operation(), case.bytes()).name() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rewritten_input_is_written_in_each_cache_line() {
        for (rewrites_input, expected) in [(true, [0.0, 1.0, 0.0]), (false, [1.0; 3])] {
            let input = vec![1f32; 40];
            let mut buffers =
                BenchBuffers { input, output: Vec::new(), shared: None, compressor: None, rewrites_input };
            assert_eq!(buffers.refill(), rewrites_input);
            assert_eq!([0, 1, 32].map(|index| buffers.input[index]), expected);
        }
    }

    #[test]
    fn ranks_that_left_a_barrier_too_early_are_counted() {
        assert_eq!(count_ranks_that_left_early(&[10, 30, 20, 31, 29, 29]), 0);
        assert_eq!(count_ranks_that_left_early(&[10, 30, 20, 28, 29, 31, 1, 2]), 2);
        assert_eq!(count_ranks_that_left_early(&[5, 5]), 0);
    }
}
