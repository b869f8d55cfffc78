//! Finds the rank that failed first, by the exit records of the ranks. This module performs no IO.
//!
//! Exit codes and times do not always show which rank failed first. A rank that panics or calls `Group::abort`
//! notifies the other ranks. The other ranks may then end before this rank, with the same exit code. But the
//! [`ExitRecord`]s of the other ranks name the rank at fault.

use super::outcome::{JobOutcome, RankEnd, RankStatus};
use crate::types::Rank;
use crate::wire::ExitRecord;

/// Follows the exit records from rank to rank: if the record of the blamed rank says that another rank is at fault,
/// blames the other rank instead. Blames only ranks that exited with a code other than 0. A record that names several ranks
/// changes nothing. `exit_records` holds the record of each rank.
pub(super) fn blame_reported_rank(
    outcome: JobOutcome,
    rank_statuses: &[RankStatus],
    exit_records: &[Option<ExitRecord>],
) -> JobOutcome {
    let (JobOutcome::Failed(first) | JobOutcome::Tolerated(first)) = outcome else { return outcome };
    let exited_with_error = |rank: Rank| {
        let ended = rank_statuses.get(rank.index()).and_then(|status| status.ended);
        matches!(ended, Some((RankEnd::Exited(code), _)) if code != 0)
    };
    let mut visited = vec![first];
    let mut rank = first;
    // The record of a rank that was killed is not about its own end.
    while exited_with_error(rank)
        && let Some(reported) = reported_rank(exit_records, rank)
        && reported != rank
        && exited_with_error(reported)
    {
        if visited.contains(&reported) {
            // The ranks name each other, so their records do not show which rank failed first.
            return outcome;
        }
        visited.push(reported);
        rank = reported;
    }
    match outcome {
        JobOutcome::Tolerated(_) => JobOutcome::Tolerated(rank),
        _ => JobOutcome::Failed(rank),
    }
}

/// Returns the record that says most about the end of the blamed rank, and the rank that wrote it: the record of the blamed
/// rank or, if it wrote none, of the lowest rank that says that the blamed rank is at fault.
pub(super) fn find_report(
    outcome: JobOutcome,
    exit_records: &[Option<ExitRecord>],
) -> Option<(Rank, &ExitRecord)> {
    let (JobOutcome::Failed(blamed) | JobOutcome::Tolerated(blamed)) = outcome else { return None };
    let all = (0..).map(Rank::new).zip(exit_records);
    let mut reports = all.filter_map(|(rank, record)| Some((rank, record.as_ref()?)));
    let own = reports.clone().find(|(rank, _)| *rank == blamed);
    own.or_else(|| reports.find(|(_, record)| record.ranks == [blamed]))
}

/// Returns the rank that the record of `rank` names, or `None` if the record does not name exactly one rank.
fn reported_rank(exit_records: &[Option<ExitRecord>], rank: Rank) -> Option<Rank> {
    match exit_records.get(rank.index())?.as_ref()?.ranks[..] {
        [reported] => Some(reported),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::launch::outcome::RankPlace;
    use crate::wire::CauseKind;

    /// Returns the records of ranks that name the ranks in `named`. A rank that names no rank wrote no record.
    fn make_records(named: &[&[u32]]) -> Vec<Option<ExitRecord>> {
        let record = |ranks: &&[u32]| {
            let ranks: Vec<Rank> = ranks.iter().copied().map(Rank::new).collect();
            let (host, operation) = ("h".to_owned(), String::new());
            (!ranks.is_empty()).then_some(ExitRecord { kind: CauseKind::Aborted, ranks, host, operation })
        };
        named.iter().map(record).collect()
    }

    fn blamed_rank(ends: &[RankEnd], named: &[&[u32]]) -> u32 {
        let rank_statuses: Vec<RankStatus> = (0..)
            .zip(ends)
            .map(|(rank, &ended)| RankStatus {
                rank: Rank::new(rank),
                place: RankPlace { pid: 1, host: None },
                ended: Some((ended, Duration::ZERO)),
            })
            .collect();
        let outcome = JobOutcome::Failed(Rank::new(1));
        match blame_reported_rank(outcome, &rank_statuses, &make_records(named)) {
            JobOutcome::Failed(rank) => rank.get(),
            other => panic!("{other:?}"),
        }
    }

    /// How the ranks end, the ranks that their records name, and the rank to blame.
    type BlameCase<'a> = (&'a [RankEnd], [&'a [u32]; 3], u32);

    #[test]
    fn the_rank_that_other_ranks_name_is_blamed() {
        let (one, other) = (RankEnd::Exited(1), RankEnd::Exited(101));
        let cases: [BlameCase<'_>; 10] = [
            (&[one, one, other], [&[2], &[2], &[]], 2),
            (&[one, one, one], [&[2], &[2], &[2]], 2),
            // Rank 1 is blamed first and names rank 2, and rank 2 names rank 0.
            (&[one, one, one], [&[], &[2], &[0]], 0),
            // Rank 1 stays blamed: rank 1 wrote no record, the rank that it names succeeded, was killed or does not
            // exist, or rank 1 was killed itself.
            (&[one, one, one], [&[2], &[], &[]], 1),
            (&[one, one, RankEnd::Exited(0)], [&[], &[2], &[]], 1),
            (&[one, one, RankEnd::Killed(15)], [&[], &[2], &[]], 1),
            (&[one, one, one], [&[], &[3], &[]], 1),
            (&[one, RankEnd::Killed(9), one], [&[], &[2], &[]], 1),
            // Two ranks name each other.
            (&[one, one, one], [&[], &[2], &[1]], 1),
            // The record names two ranks.
            (&[one, one, one], [&[], &[0, 2], &[]], 1),
        ];
        for (ends, named, expected) in cases {
            assert_eq!(blamed_rank(ends, &named), expected, "{ends:?} {named:?}");
        }
    }

    #[test]
    fn the_report_is_that_of_the_blamed_rank_or_of_a_rank_that_names_it() {
        let reporter = |named: &[&[u32]]| {
            let outcome = JobOutcome::Failed(Rank::new(2));
            find_report(outcome, &make_records(named)).map(|(reporter, _)| reporter.get())
        };
        assert_eq!(reporter(&[&[2], &[2], &[2]]), Some(2));
        assert_eq!(reporter(&[&[1], &[2], &[0]]), Some(2));
        assert_eq!(reporter(&[&[1], &[2], &[]]), Some(1));
        assert_eq!(reporter(&[&[1], &[0, 2], &[]]), None);
    }
}
