//! One row: warmed up, timed, checked.

use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::operation::BenchOperation;
use super::pattern::TestPattern;
use super::plan::{BenchCase, IterationCount};
use super::sample::Sample;
use super::time_breakdown::RankProfile;
use crate::group::{Error, Group, SharedBuffer, Spent};
use crate::types::{Rank, ReduceOp, WorldSize};

/// The fewest iterations that are timed where their number is not given.
const ITERATIONS_MIN: u32 = 5;
/// The most.
const ITERATIONS_MAX: u32 = 1000;
/// How late the last rank enters a barrier that is checked: long after the others wait in it.
const LAST_RANK_DELAY: Duration = Duration::from_millis(2);
/// How long a rank waits that has no part in what is measured.
const IDLE_RANK_TIMEOUT: Duration = Duration::from_hours(24);
/// The tag of all messages.
const TAG: u32 = 0;

/// How each row is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasureOptions {
    pub(super) iterations: IterationCount,
    pub(super) warm_up: u32,
    pub(super) checks: u32,
    /// Whether a row says where its time went.
    pub(super) profiles: bool,
    /// Whether buffers are the group's, where that makes a difference.
    pub(super) allocates: bool,
    /// The time that an adaptive row aims at, in microseconds.
    pub(super) budget_us: f64,
}

/// A measured row. `size` and `count` are the whole buffer's, whichever part of it the operation moves.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchRow {
    /// What was measured.
    pub operation: &'static str,
    /// The element type.
    pub dtype: &'static str,
    /// The reduction; `None` where nothing is reduced.
    pub reduction: Option<&'static str>,
    /// How the traffic was routed; `none` in a world of one.
    pub algorithm: &'static str,
    /// How bytes travelled; `none` in a world of one.
    pub transport: &'static str,
    /// Ranks.
    pub world_size: u32,
    /// The root; `None` where there is none.
    pub root: Option<u32>,
    /// Bytes of the whole buffer.
    pub bytes: u64,
    /// Elements of the whole buffer.
    pub count: u64,
    /// Iterations that were timed.
    pub iterations: u32,
    /// The median time of an operation on its slowest rank, in microseconds.
    pub time_us: f64,
    /// The shortest.
    pub time_us_min: f64,
    /// The 99th percentile, by nearest rank.
    pub time_us_p99: f64,
    /// Bytes by median time, in 10^9 bytes a second.
    pub algbw_gb_per_s: f64,
    /// [`BenchOperation::bus_factor`] times that.
    pub busbw_gb_per_s: f64,
    /// Wrong elements on all ranks; `None` if none were looked at.
    pub wrong: Option<u64>,
    /// Where the time went, on each rank that has a part in it; `None` without `--profile`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Vec<RankProfile>>,
}

/// What one rank has measured.
struct TimedIterations {
    /// Each iteration's time.
    times_us: Vec<f64>,
    /// All of them together, by the same clock.
    wall: Duration,
    /// Where that went.
    spent: Spent,
}

/// One rank's memory for one case.
struct BenchBuffers<T: Sample> {
    /// What this rank contributes, and in place also the result.
    input: Vec<T>,
    /// The result, where it is not in position.
    output: Vec<T>,
    /// What is used instead of `input`, if buffers are to be the group's.
    shared: Option<SharedBuffer<T>>,
}

impl<T: Sample> BenchBuffers<T> {
    /// Small contents: repeated operations on them never reach subnormal numbers, which are slow. They are written, for the
    /// kernel gives memory only to what is.
    fn new(group: &mut Group, case: BenchCase, allocates: bool) -> Result<Self, Error> {
        let zeros = |count| {
            let mut zeros = Vec::new();
            zeros.resize(count, T::zeroed());
            zeros
        };
        let (input, output) = (case.input_count(group.size(), group.rank()), case.output_count(group.rank()));
        if allocates && case.operation == BenchOperation::AllReduce {
            let mut shared = group.alloc(input)?;
            shared.fill(T::zeroed());
            return Ok(Self { input: Vec::new(), output: zeros(output), shared: Some(shared) });
        }
        Ok(Self { input: zeros(input), output: zeros(output), shared: None })
    }

    fn contribution(&mut self) -> &mut [T] {
        self.shared.as_deref_mut().unwrap_or(&mut self.input)
    }

    fn result(&self, case: BenchCase) -> &[T] {
        let in_place = self.shared.as_deref().unwrap_or(&self.input);
        if case.operation.is_in_place() { in_place } else { &self.output }
    }
}

/// Measures one case; all ranks have to do so together.
pub(super) fn measure<T: Sample>(
    group: &mut Group,
    case: BenchCase,
    method: MeasureOptions,
) -> Result<BenchRow, Error> {
    let timeout = group.timeout();
    if !case.operation.involves(group.rank()) {
        // It waits for many operations of others at once. Each of those has its deadline.
        group.set_timeout(IDLE_RANK_TIMEOUT);
    }
    let row = measure_within_timeout::<T>(group, case, method);
    group.set_timeout(timeout);
    row
}

fn measure_within_timeout<T: Sample>(
    group: &mut Group,
    case: BenchCase,
    method: MeasureOptions,
) -> Result<BenchRow, Error> {
    let mut buffers = BenchBuffers::<T>::new(group, case, method.allocates)?;
    let mut warm_up_us = Vec::new();
    for _ in 0..method.warm_up {
        let started = Instant::now();
        perform(group, case, &mut buffers)?;
        warm_up_us.push(started.elapsed().as_secs_f64() * 1e6);
    }
    let iterations = match method.iterations {
        IterationCount::Fixed(count) => count,
        IterationCount::Adaptive => adapt(group, case, method.budget_us, &warm_up_us, &mut buffers)?,
    };
    let TimedIterations { mut times_us, wall, spent } = time(group, case, iterations, &mut buffers)?;
    if case.operation == BenchOperation::PingPong {
        // The rank that begins has both ways on one clock, and half of them is what one takes.
        let part = if group.rank() == Rank::ZERO { 0.5 } else { 0.0 };
        for time_us in &mut times_us {
            *time_us *= part;
        }
    }
    group.all_reduce(&mut times_us, ReduceOp::Max)?;
    let profile = if method.profiles {
        let ranks = RankProfile::gather(group, (wall, spent), iterations)?;
        let is_involved = |of: &RankProfile| case.operation.involves(Rank::new(of.rank));
        Some(ranks.into_iter().filter(is_involved).collect())
    } else {
        None
    };
    let wrong = match (method.checks, case.operation) {
        (0, _) => None,
        (checks, BenchOperation::Barrier) => check_barrier(group, checks)?,
        (checks, _) => Some(check(group, case, checks, &mut buffers)?),
    };
    Ok(BenchRow { profile, ..row(group, case, times_us, wrong) })
}

/// As many iterations as fit the budget; all ranks agree on the slowest's answer.
fn adapt<T: Sample>(
    group: &mut Group,
    case: BenchCase,
    budget_us: f64,
    warm_up_us: &[f64],
    buffers: &mut BenchBuffers<T>,
) -> Result<u32, Error> {
    // The second half of the warm-up is warm. Without a warm-up one iteration tells.
    let mut warm = warm_up_us[warm_up_us.len() / 2..].to_vec();
    if warm.is_empty() {
        warm = time(group, case, 1, buffers)?.times_us;
    }
    let mut mean_us = [warm.iter().sum::<f64>() / warm.len() as f64];
    group.all_reduce(&mut mean_us, ReduceOp::Max)?;
    let fitting = budget_us / mean_us[0].max(f64::MIN_POSITIVE);
    Ok((fitting as u32).clamp(ITERATIONS_MIN, ITERATIONS_MAX))
}

/// Each iteration's time on this rank. They follow each other at once, as in nccl-tests: a barrier between them would
/// add its own skew to every short operation.
fn time<T: Sample>(
    group: &mut Group,
    case: BenchCase,
    iterations: u32,
    buffers: &mut BenchBuffers<T>,
) -> Result<TimedIterations, Error> {
    let mut times_us = Vec::with_capacity(iterations as usize);
    group.barrier()?;
    let before = group.profile().calls;
    let started = Instant::now();
    let mut last = started;
    for _ in 0..iterations {
        perform(group, case, buffers)?;
        let now = Instant::now();
        times_us.push((now - last).as_secs_f64() * 1e6);
        last = now;
    }
    Ok(TimedIterations { times_us, wall: last - started, spent: group.profile().calls.since(before) })
}

/// Wrong elements of all ranks in `checks` iterations, each with different contents.
fn check<T: Sample>(
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
        perform(group, case, buffers)?;
        wrong[0] += pattern.count_wrong(buffers.result(case));
    }
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok(wrong[0])
}

/// How many ranks left a barrier before the last one entered, which comes late, another one each time. `None` for ranks of
/// several hosts, which have no clock in common.
fn check_barrier(group: &mut Group, checks: u32) -> Result<Option<u64>, Error> {
    if group.local_size() != group.size() {
        return Ok(None);
    }
    let mut early = 0;
    for round in 0..checks {
        if group.rank().get() == round % group.size().get() {
            thread::sleep(LAST_RANK_DELAY);
        }
        let entered = nanoseconds();
        group.barrier()?;
        let left = nanoseconds();
        early += left_early(&group.all_gather_from(&[entered, left])?);
    }
    Ok(Some(early))
}

/// How many left before the last one entered; each rank's two times, one after another.
fn left_early(times: &[u64]) -> u64 {
    let last = times.iter().step_by(2).max();
    times.iter().skip(1).step_by(2).filter(|&left| Some(left) < last).count() as u64
}

/// The clock that all processes of a host share.
fn nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn perform<T: Sample>(
    group: &mut Group,
    case: BenchCase,
    buffers: &mut BenchBuffers<T>,
) -> Result<(), Error> {
    let BenchBuffers { input, output, shared } = buffers;
    let op = case.reduction.unwrap_or(ReduceOp::Sum);
    match case.operation {
        BenchOperation::AllReduce => group.all_reduce(shared.as_deref_mut().unwrap_or(input), op)?,
        BenchOperation::Reduce => group.reduce(input, op, case.root)?,
        BenchOperation::ReduceScatter => {
            group.reduce_scatter(input, op)?;
        }
        BenchOperation::AllGather => group.all_gather(input)?,
        BenchOperation::Broadcast => group.broadcast(input, case.root)?,
        BenchOperation::Gather => *output = group.gather(input, case.root)?,
        BenchOperation::Scatter => *output = group.scatter(input, case.count, case.root)?,
        BenchOperation::AllToAll => *output = group.all_to_all(input)?,
        BenchOperation::Scan => group.scan(input, op)?,
        BenchOperation::Exscan => *output = group.exscan(input, op)?.unwrap_or_default(),
        BenchOperation::Barrier => group.barrier()?,
        BenchOperation::PingPong => ping_pong(group, buffers)?,
        BenchOperation::SendReceive => {
            let (next, previous) =
                (group.size().after(group.rank(), 1), group.size().before(group.rank(), 1));
            group.send_receive((input, next, TAG), (output, previous.into(), Some(TAG)))?;
        }
    }
    Ok(())
}

/// Rank 0 sends and receives, rank 1 receives and sends, each what is its own; the others do nothing.
fn ping_pong<T: Sample>(group: &mut Group, buffers: &mut BenchBuffers<T>) -> Result<(), Error> {
    let BenchBuffers { input, output, .. } = buffers;
    let peer = match group.rank().get() {
        0 => Rank::new(1),
        1 => Rank::ZERO,
        _ => return Ok(()),
    };
    if peer == Rank::ZERO {
        group.receive(output, peer, TAG)?;
    }
    // Given away and taken back: no copy of it is measured.
    *input = group.send_async(std::mem::take(input), peer, TAG)?.wait()?;
    if peer != Rank::ZERO {
        group.receive(output, peer, TAG)?;
    }
    Ok(())
}

fn row(group: &Group, case: BenchCase, mut times_us: Vec<f64>, wrong: Option<u64>) -> BenchRow {
    times_us.sort_by(f64::total_cmp);
    let median_us = median(&times_us);
    // Bytes by microsecond are 10^6 bytes a second.
    let algbw = if median_us > 0.0 { case.bytes() as f64 / median_us / 1e3 } else { 0.0 };
    BenchRow {
        operation: case.operation.name(),
        dtype: if case.operation == BenchOperation::Barrier { "none" } else { case.dtype.name() },
        reduction: case.reduction.map(ReduceOp::name),
        algorithm: algorithm(group, case),
        transport: group.transport(),
        world_size: group.size().get(),
        root: case.operation.group_operation().has_root().then_some(case.root.get()),
        bytes: case.bytes() as u64,
        count: case.count as u64,
        iterations: times_us.len() as u32,
        time_us: median_us,
        time_us_min: times_us.first().copied().unwrap_or_default(),
        time_us_p99: percentile(&times_us, 0.99),
        algbw_gb_per_s: algbw,
        busbw_gb_per_s: algbw * case.operation.bus_factor(group.size()),
        wrong,
        profile: None,
    }
}

/// How the case's traffic is routed.
fn algorithm(group: &Group, case: BenchCase) -> &'static str {
    let is_alone = group.size() == WorldSize::ONE;
    if is_alone { "none" } else { group.algorithm(case.operation.group_operation(), case.bytes()).name() }
}

fn median(sorted: &[f64]) -> f64 {
    let (half, length) = (sorted.len() / 2, sorted.len());
    match length {
        0 => 0.0,
        _ if length.is_multiple_of(2) => f64::midpoint(sorted[half - 1], sorted[half]),
        _ => sorted[half],
    }
}

/// The smallest value that at least this part of all values do not exceed.
fn percentile(sorted: &[f64], part: f64) -> f64 {
    let rank = (sorted.len() as f64 * part).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_tail() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 0.99), 99.0);
        assert_eq!(percentile(&[5.0], 0.99), 5.0);
        assert_eq!((median(&[]), percentile(&[], 0.99)), (0.0, 0.0));
    }

    #[test]
    fn who_left_a_barrier_too_early_is_counted() {
        assert_eq!(left_early(&[10, 30, 20, 31, 29, 29]), 0);
        assert_eq!(left_early(&[10, 30, 20, 28, 29, 31, 1, 2]), 2);
        assert_eq!(left_early(&[5, 5]), 0);
    }
}
