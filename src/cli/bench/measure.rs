//! One row: warmed up, timed, checked.

use std::time::Instant;

use serde::Serialize;

use super::pattern::{Pattern, Sample};
use super::plan::{Case, Iterations};
use crate::group::{Error, Group};
use crate::types::{Algorithm, Operation, ReduceOp, WorldSize};

/// The fewest iterations that are timed where their number is not given.
const ITERATIONS_MIN: u32 = 5;
/// The most.
const ITERATIONS_MAX: u32 = 1000;

/// How each row is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Method {
    pub(super) iterations: Iterations,
    pub(super) warm_up: u32,
    pub(super) checks: u32,
    /// The time that an adaptive row aims at, in microseconds.
    pub(super) budget_us: f64,
}

/// A measured row. `size` and `count` are the whole buffer's, whichever part of it the operation moves.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// The collective.
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
    /// The root of a broadcast; `None` where there is none.
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
    /// [`bus_factor`] times that.
    pub busbw_gb_per_s: f64,
    /// Wrong elements on all ranks; `None` if none were looked at.
    pub wrong: Option<u64>,
}

/// What algorithm bandwidth is multiplied by to give bus bandwidth: the bytes that each rank's link has to carry for each
/// byte of the buffer, whatever the algorithm (nccl-tests, `doc/PERFORMANCE.md`). A world of one needs no link.
pub fn bus_factor(operation: Operation, world: WorldSize) -> f64 {
    let n = f64::from(world.get());
    match operation {
        Operation::AllReduce => 2.0 * (n - 1.0) / n,
        Operation::ReduceScatter | Operation::AllGather => (n - 1.0) / n,
        _ => 1.0,
    }
}

/// Measures one case with `buffer`, which is as long as the case says.
pub(super) fn measure<T: Sample>(
    group: &mut Group,
    case: Case,
    method: Method,
    buffer: &mut [T],
) -> Result<Row, Error> {
    // Small contents: whatever is done to them again and again, no denormal slows the sum down.
    buffer.fill(bytemuck::Zeroable::zeroed());
    let mut warm_up_us = Vec::new();
    for _ in 0..method.warm_up {
        let started = Instant::now();
        perform(group, case, buffer)?;
        warm_up_us.push(started.elapsed().as_secs_f64() * 1e6);
    }
    let iterations = match method.iterations {
        Iterations::Fixed(count) => count,
        Iterations::Adaptive => adapt(group, case, method.budget_us, &warm_up_us, buffer)?,
    };
    let mut times_us = time(group, case, iterations, buffer)?;
    group.all_reduce(&mut times_us, ReduceOp::Max)?;
    let wrong = if method.checks == 0 { None } else { Some(check(group, case, method.checks, buffer)?) };
    Ok(row(group, case, times_us, wrong))
}

/// As many iterations as fit the budget; all ranks agree on the slowest's answer.
fn adapt<T: Sample>(
    group: &mut Group,
    case: Case,
    budget_us: f64,
    warm_up_us: &[f64],
    buffer: &mut [T],
) -> Result<u32, Error> {
    // The second half of the warm-up is warm. Without a warm-up one iteration tells.
    let mut warm = warm_up_us[warm_up_us.len() / 2..].to_vec();
    if warm.is_empty() {
        warm = time(group, case, 1, buffer)?;
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
    case: Case,
    iterations: u32,
    buffer: &mut [T],
) -> Result<Vec<f64>, Error> {
    let mut times_us = Vec::with_capacity(iterations as usize);
    group.barrier()?;
    let mut last = Instant::now();
    for _ in 0..iterations {
        perform(group, case, buffer)?;
        let now = Instant::now();
        times_us.push((now - last).as_secs_f64() * 1e6);
        last = now;
    }
    Ok(times_us)
}

/// Wrong elements of all ranks in `checks` iterations, each with contents of its own.
fn check<T: Sample>(group: &mut Group, case: Case, checks: u32, buffer: &mut [T]) -> Result<u64, Error> {
    let mut wrong = [0u64];
    for seed in 0..checks {
        let pattern = Pattern::<T>::new(case, group.size(), group.rank(), seed.into());
        pattern.fill(buffer);
        perform(group, case, buffer)?;
        wrong[0] += pattern.count_wrong(buffer);
    }
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok(wrong[0])
}

fn perform<T: Sample>(group: &mut Group, case: Case, buffer: &mut [T]) -> Result<(), Error> {
    let op = case.reduction.unwrap_or(ReduceOp::Sum);
    match case.operation {
        Operation::AllReduce => group.all_reduce(buffer, op),
        Operation::ReduceScatter => group.reduce_scatter(buffer, op).map(drop),
        Operation::AllGather => group.all_gather(buffer),
        Operation::Broadcast => group.broadcast(buffer, case.root),
        _ => group.barrier(),
    }
}

fn row(group: &Group, case: Case, mut times_us: Vec<f64>, wrong: Option<u64>) -> Row {
    times_us.sort_by(f64::total_cmp);
    let median_us = median(&times_us);
    // Bytes by microsecond are 10^6 bytes a second.
    let algbw = if median_us > 0.0 { case.bytes() as f64 / median_us / 1e3 } else { 0.0 };
    Row {
        operation: case.operation.name(),
        dtype: case.dtype.name(),
        reduction: case.reduction.map(ReduceOp::name),
        algorithm: algorithm(group.size()),
        transport: group.transport(),
        world_size: group.size().get(),
        root: (case.operation == Operation::Broadcast).then_some(case.root.get()),
        bytes: case.bytes() as u64,
        count: case.count as u64,
        iterations: times_us.len() as u32,
        time_us: median_us,
        time_us_min: times_us.first().copied().unwrap_or_default(),
        time_us_p99: percentile(&times_us, 0.99),
        algbw_gb_per_s: algbw,
        busbw_gb_per_s: algbw * bus_factor(case.operation, group.size()),
        wrong,
    }
}

/// How the collectives of this version route their traffic.
pub(super) fn algorithm(world: WorldSize) -> &'static str {
    if world == WorldSize::ONE { "none" } else { Algorithm::Ring.name() }
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
    fn bus_factors_are_those_of_nccl_tests() {
        let of = |operation, n| bus_factor(operation, WorldSize::new(n).unwrap());
        assert_eq!(of(Operation::AllReduce, 4), 1.5);
        assert_eq!(of(Operation::ReduceScatter, 4), 0.75);
        assert_eq!(of(Operation::AllGather, 2), 0.5);
        assert_eq!(of(Operation::Broadcast, 8), 1.0);
        assert_eq!(of(Operation::AllReduce, 1), 0.0);
    }
}
