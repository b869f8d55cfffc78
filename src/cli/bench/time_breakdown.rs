//! `--profile`: the time that each rank spent in sending, receiving, reducing and waiting during the timed iterations
//! of a row.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use crate::group::verbs::AllGather;
use crate::group::{Error, Group, Spent};
use crate::types::Rank;

/// The number of durations that each rank sends to the other ranks.
const DURATION_COUNT: usize = 5;
/// Jobs of at most this many ranks get a line for each rank. Larger jobs get three lines: the mean of all ranks, and
/// two selected ranks.
const LISTED_RANKS_MAX: usize = 2;

/// A rank and its time breakdown.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RankProfile {
    /// The rank.
    pub rank: u32,
    /// How the rank spent its time.
    #[serde(flatten)]
    pub breakdown: TimeBreakdown,
}

/// The mean time of a timed iteration, and the parts of this time, in microseconds. The sum of the parts is
/// `wall_us`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct TimeBreakdown {
    /// The mean time of an iteration by this rank's clock. The row's `time_us` is a different time: the median on the
    /// slowest rank.
    pub wall_us: f64,
    /// The mean of [`Spent::send`] per iteration.
    pub send_us: f64,
    /// The mean of [`Spent::receive`] per iteration.
    pub receive_us: f64,
    /// The mean of [`Spent::reduce`] per iteration.
    pub reduce_us: f64,
    /// The mean of [`Spent::wait`] per iteration.
    pub wait_us: f64,
    /// The rest of `wall_us`: planning schedules, matching messages, allocating results, waiting for locks, and the
    /// work of `ringbench` between two calls.
    pub other_us: f64,
}

impl RankProfile {
    /// Gathers the time breakdown of every rank over `iterations` iterations. All ranks must call this function.
    pub(super) fn gather_from_ranks(
        group: &mut Group,
        (total_time, spent): (Duration, Spent),
        iterations: u32,
    ) -> Result<Vec<Self>, Error> {
        let own_durations: [Duration; DURATION_COUNT] =
            [total_time, spent.send, spent.receive, spent.reduce, spent.wait];
        let all_durations =
            group.call(AllGather::new()).run_from(&own_durations.map(|part| part.as_nanos() as u64))?;
        let (all_durations, _) = all_durations.as_chunks::<DURATION_COUNT>();
        let profile = |(rank, rank_durations): (Rank, &[u64; DURATION_COUNT])| Self {
            rank: rank.get(),
            breakdown: TimeBreakdown::new(*rank_durations, iterations),
        };
        Ok(group.size().ranks().zip(all_durations).map(profile).collect())
    }
}

impl TimeBreakdown {
    /// Returns the mean durations of one iteration. The given durations are sums over all iterations, in nanoseconds.
    fn new([wall, parts @ ..]: [u64; DURATION_COUNT], iterations: u32) -> Self {
        let mean_us = |nanoseconds: u64| nanoseconds as f64 / f64::from(iterations.max(1)) / 1e3;
        let other_us = mean_us(wall.saturating_sub(parts.iter().sum()));
        let [send_us, receive_us, reduce_us, wait_us] = parts.map(mean_us);
        Self { wall_us: mean_us(wall), send_us, receive_us, reduce_us, wait_us, other_us }
    }

    /// Returns the mean of each duration over the ranks.
    fn mean(profiles: &[RankProfile]) -> Self {
        let mean_of = |duration: fn(&Self) -> f64| {
            profiles.iter().map(|profile| duration(&profile.breakdown)).sum::<f64>()
                / profiles.len().max(1) as f64
        };
        Self {
            wall_us: mean_of(|parts| parts.wall_us),
            send_us: mean_of(|parts| parts.send_us),
            receive_us: mean_of(|parts| parts.receive_us),
            reduce_us: mean_of(|parts| parts.reduce_us),
            wait_us: mean_of(|parts| parts.wait_us),
            other_us: mean_of(|parts| parts.other_us),
        }
    }

    /// Returns the names of the parts of `wall_us`, and their durations in microseconds.
    fn named_parts(&self) -> [(&'static str, f64); DURATION_COUNT] {
        [
            ("send", self.send_us),
            ("receive", self.receive_us),
            ("reduce", self.reduce_us),
            ("wait", self.wait_us),
            ("other", self.other_us),
        ]
    }

    /// Writes a line that begins with `name` and lists the parts.
    fn write_line(&self, out: &mut dyn Write, name: &str) -> io::Result<()> {
        write!(out, "#  {name:<19}")?;
        for (part, time_us) in self.named_parts() {
            let percent = if self.wall_us > 0.0 { 100.0 * time_us / self.wall_us } else { 0.0 };
            write!(out, " {part} {time_us:>9.2} ({percent:>3.0}%)")?;
        }
        writeln!(out, " of {:.2}", self.wall_us)
    }
}

/// Writes the line above the table that explains the output of [`write_time_breakdown`].
pub(super) fn write_legend(out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "# below each row: the parts of the mean time of a timed iteration, in microseconds")
}

/// Writes a line for each rank if there are at most two ranks. Otherwise writes three lines: the mean of all ranks,
/// the rank that waits least, and the rank that waits most. The rank that waits least probably delays the other
/// ranks.
pub(super) fn write_time_breakdown(out: &mut dyn Write, profiles: &[RankProfile]) -> io::Result<()> {
    if profiles.len() <= LISTED_RANKS_MAX {
        return profiles
            .iter()
            .try_for_each(|profile| profile.breakdown.write_line(out, &format!("rank {}", profile.rank)));
    }
    TimeBreakdown::mean(profiles).write_line(out, &format!("mean of {}", profiles.len()))?;
    let by_wait = |a: &&RankProfile, b: &&RankProfile| a.breakdown.wait_us.total_cmp(&b.breakdown.wait_us);
    let extremes =
        [(profiles.iter().min_by(by_wait), "waits least"), (profiles.iter().max_by(by_wait), "waits most")];
    for (found, waits) in extremes {
        let Some(profile) = found else { continue };
        profile.breakdown.write_line(out, &format!("rank {} {waits}", profile.rank))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up_to_the_wall_time() {
        let parts = TimeBreakdown::new([10_000, 1000, 2000, 3000, 3500], 2);
        let sum: f64 = parts.named_parts().iter().map(|(_, time_us)| time_us).sum();
        assert_eq!((parts.wall_us, parts.send_us, parts.other_us, sum), (5.0, 0.5, 0.25, 5.0));
        assert_eq!(
            TimeBreakdown::new([1, 1, 1, 0, 0], 0).other_us,
            0.0,
            "parts that exceed the wall time by a clock tick must leave 0 for other"
        );
    }

    #[test]
    fn three_ranks_are_shown_as_mean_and_extremes() {
        let rank =
            |rank, wait| RankProfile { rank, breakdown: TimeBreakdown::new([8000, 1000, 0, 0, wait], 1) };
        let lines = |ranks: &[RankProfile]| {
            let mut text = Vec::new();
            write_time_breakdown(&mut text, ranks).unwrap();
            String::from_utf8(text).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let two = lines(&[rank(0, 2000), rank(1, 4000)]);
        assert!(two.len() == 2 && two[0].starts_with("#  rank 0 "), "{two:?}");
        assert!(two[1].ends_with("wait      4.00 ( 50%) other      3.00 ( 38%) of 8.00"), "{two:?}");
        let three = lines(&[rank(0, 2000), rank(1, 7000), rank(2, 0)]);
        let expected = ["mean of 3 ", "rank 2 waits least", "rank 1 waits most"];
        assert!(
            three.len() == 3 && three.iter().zip(expected).all(|(line, expected)| line.contains(expected)),
            "{three:?}"
        );
        assert!(three[0].contains("wait      3.00 ( 38%)"), "{three:?}");
    }
}
