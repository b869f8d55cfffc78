//! Where the time of a row's timed iterations went, on each rank.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use crate::group::{Error, Group, Spent};
use crate::types::Rank;

/// Figures that a rank tells the others.
const FIGURES: usize = 5;
/// The most ranks of which each gets a line.
const LISTED_RANKS_MAX: usize = 2;

/// Where the time of a timed iteration went on one rank.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RankProfile {
    /// Which rank.
    pub rank: u32,
    /// Where its time went.
    #[serde(flatten)]
    pub parts: TimeBreakdown,
}

/// Where the time of a timed iteration went: the mean of all of them, in microseconds. The parts come to the whole.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct TimeBreakdown {
    /// All of it, by this rank's clock. The row's `time_us` is another figure: the median of the slowest ranks.
    pub wall_us: f64,
    /// [`Spent::send`].
    pub send_us: f64,
    /// [`Spent::receive`].
    pub receive_us: f64,
    /// [`Spent::reduce`].
    pub reduce_us: f64,
    /// [`Spent::wait`].
    pub wait_us: f64,
    /// The rest: schedules, matching, memory for results, locks, and what `ringbench` does between two calls.
    pub other_us: f64,
}

impl RankProfile {
    /// Gathers what every rank spent in so many iterations; all of them have to call this.
    pub(super) fn gather(
        group: &mut Group,
        (wall, spent): (Duration, Spent),
        iterations: u32,
    ) -> Result<Vec<Self>, Error> {
        let figures: [Duration; FIGURES] = [wall, spent.send, spent.receive, spent.reduce, spent.wait];
        let all = group.all_gather_from(&figures.map(|part| part.as_nanos() as u64))?;
        let (all, _) = all.as_chunks::<FIGURES>();
        let of = |(rank, own): (Rank, &[u64; FIGURES])| Self {
            rank: rank.get(),
            parts: TimeBreakdown::new(*own, iterations),
        };
        Ok(group.size().ranks().zip(all).map(of).collect())
    }
}

impl TimeBreakdown {
    /// The mean of nanoseconds in all iterations.
    fn new([wall, parts @ ..]: [u64; FIGURES], iterations: u32) -> Self {
        let mean_us = |nanoseconds: u64| nanoseconds as f64 / f64::from(iterations.max(1)) / 1e3;
        let other_us = mean_us(wall.saturating_sub(parts.iter().sum()));
        let [send_us, receive_us, reduce_us, wait_us] = parts.map(mean_us);
        Self { wall_us: mean_us(wall), send_us, receive_us, reduce_us, wait_us, other_us }
    }

    fn mean(ranks: &[RankProfile]) -> Self {
        let of = |figure: fn(&Self) -> f64| {
            ranks.iter().map(|rank| figure(&rank.parts)).sum::<f64>() / ranks.len().max(1) as f64
        };
        Self {
            wall_us: of(|parts| parts.wall_us),
            send_us: of(|parts| parts.send_us),
            receive_us: of(|parts| parts.receive_us),
            reduce_us: of(|parts| parts.reduce_us),
            wait_us: of(|parts| parts.wait_us),
            other_us: of(|parts| parts.other_us),
        }
    }

    fn named(&self) -> [(&'static str, f64); FIGURES] {
        [
            ("send", self.send_us),
            ("receive", self.receive_us),
            ("reduce", self.reduce_us),
            ("wait", self.wait_us),
            ("other", self.other_us),
        ]
    }

    fn write(&self, out: &mut dyn Write, name: &str) -> io::Result<()> {
        write!(out, "#  {name:<19}")?;
        for (part, time_us) in self.named() {
            let percent = if self.wall_us > 0.0 { 100.0 * time_us / self.wall_us } else { 0.0 };
            write!(out, " {part} {time_us:>9.2} ({percent:>3.0}%)")?;
        }
        writeln!(out, " of {:.2}", self.wall_us)
    }
}

/// What the lines of [`write`] say, above the table.
pub(super) fn write_legend(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "# below each row: microseconds of a timed iteration, the mean of all of them, by what they went into"
    )
}

/// Two ranks as they are. Of more their mean, the one that waits least, for which the others wait very likely, and the one
/// that waits most.
pub(super) fn write(out: &mut dyn Write, ranks: &[RankProfile]) -> io::Result<()> {
    if ranks.len() <= LISTED_RANKS_MAX {
        return ranks.iter().try_for_each(|of| of.parts.write(out, &format!("rank {}", of.rank)));
    }
    TimeBreakdown::mean(ranks).write(out, &format!("mean of {}", ranks.len()))?;
    let by_wait = |a: &&RankProfile, b: &&RankProfile| a.parts.wait_us.total_cmp(&b.parts.wait_us);
    let extremes =
        [(ranks.iter().min_by(by_wait), "waits least"), (ranks.iter().max_by(by_wait), "waits most")];
    for (found, waits) in extremes {
        let Some(of) = found else { continue };
        of.parts.write(out, &format!("rank {} {waits}", of.rank))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_to_the_whole() {
        let parts = TimeBreakdown::new([10_000, 1000, 2000, 3000, 3500], 2);
        let sum: f64 = parts.named().iter().map(|(_, time_us)| time_us).sum();
        assert_eq!((parts.wall_us, parts.send_us, parts.other_us, sum), (5.0, 0.5, 0.25, 5.0));
        assert_eq!(
            TimeBreakdown::new([1, 1, 1, 0, 0], 0).other_us,
            0.0,
            "clocks of threads may differ by a tick"
        );
    }

    #[test]
    fn of_many_ranks_the_extremes_are_shown() {
        let of = |rank, wait| RankProfile { rank, parts: TimeBreakdown::new([8000, 1000, 0, 0, wait], 1) };
        let lines = |ranks: &[RankProfile]| {
            let mut text = Vec::new();
            write(&mut text, ranks).unwrap();
            String::from_utf8(text).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let two = lines(&[of(0, 2000), of(1, 4000)]);
        assert!(two.len() == 2 && two[0].starts_with("#  rank 0 "), "{two:?}");
        assert!(two[1].ends_with("wait      4.00 ( 50%) other      3.00 ( 38%) of 8.00"), "{two:?}");
        let three = lines(&[of(0, 2000), of(1, 7000), of(2, 0)]);
        let expected = ["mean of 3 ", "rank 2 waits least", "rank 1 waits most"];
        assert!(
            three.len() == 3 && three.iter().zip(expected).all(|(line, expected)| line.contains(expected)),
            "{three:?}"
        );
        assert!(three[0].contains("wait      3.00 ( 38%)"), "{three:?}");
    }
}
