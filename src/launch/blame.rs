//! Finds the rank that failed first, by the last lines that each rank printed. This module performs no IO.
//!
//! Exit codes and times do not always show which rank failed first. A rank that panics or calls `Group::abort`
//! notifies the other ranks. The other ranks may then end before this rank, with the same exit code. But the error
//! messages of the other ranks name the rank at fault: these messages contain the `Display` text of
//! [`Cause`](crate::wire::Cause).

use super::outcome::{JobOutcome, RankEnd, RankStatus};
use crate::types::Rank;

/// The texts after `rank N on HOST` that say that rank N is at fault.
const FAULT_PHRASES: [&str; 4] =
    [" was lost: ", " closed its group while ", " stopped the job: ", " broke the protocol: "];

/// Follows the error messages from rank to rank: if the last lines of the blamed rank say that another rank is at
/// fault, blames the other rank instead. Blames only ranks that exited with a code other than 0. `last_lines` holds the
/// last lines of each rank.
pub(super) fn blame_named_rank(
    outcome: JobOutcome,
    rank_statuses: &[RankStatus],
    last_lines: &[Vec<String>],
) -> JobOutcome {
    let (JobOutcome::Failed(first) | JobOutcome::Tolerated(first)) = outcome else { return outcome };
    let exited_with_error = |rank: Rank| {
        let ended = rank_statuses.get(rank.index()).and_then(|status| status.ended);
        matches!(ended, Some((RankEnd::Exited(code), _)) if code != 0)
    };
    let mut visited = vec![first];
    let mut rank = first;
    // A rank that was killed or could not run names no other rank.
    while exited_with_error(rank)
        && let Some(named) = last_lines
            .get(rank.index())
            .and_then(|lines| lines.iter().rev().find_map(|line| rank_at_fault(line)))
        && named != rank
        && exited_with_error(named)
    {
        if visited.contains(&named) {
            // The ranks name each other, so their messages do not show which rank failed first.
            return outcome;
        }
        visited.push(named);
        rank = named;
    }
    match outcome {
        JobOutcome::Tolerated(_) => JobOutcome::Tolerated(rank),
        _ => JobOutcome::Failed(rank),
    }
}

/// Returns the rank that `line` blames, or `None` if the line blames no rank.
fn rank_at_fault(line: &str) -> Option<Rank> {
    line.match_indices("rank ").find_map(|(at, word)| {
        let rest = &line[at + word.len()..];
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, rest) = rest.split_at(digits);
        let is_fault = rest.starts_with(" failed: ")
            || (rest.starts_with(" on ") && FAULT_PHRASES.iter().any(|fault| rest.contains(fault)));
        is_fault.then(|| number.parse().ok().map(Rank::new))?
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wire::Cause;

    fn abort_message(rank: u32) -> String {
        let (rank, host, message) = (Rank::new(rank), "h (127.0.0.1:1)".into(), "it panicked".into());
        Cause::Aborted { rank, host, message }.to_string()
    }

    fn blamed_rank(ends: &[RankEnd], printed_lines: &[&str]) -> u32 {
        let rank_statuses: Vec<RankStatus> = (0..)
            .zip(ends)
            .map(|(rank, &ended)| RankStatus {
                rank: Rank::new(rank),
                pid: 1,
                ended: Some((ended, Duration::ZERO)),
            })
            .collect();
        let last_lines: Vec<Vec<String>> =
            printed_lines.iter().map(|line| vec![(*line).to_owned()]).collect();
        match blame_named_rank(JobOutcome::Failed(Rank::new(1)), &rank_statuses, &last_lines) {
            JobOutcome::Failed(rank) => rank.get(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_rank_at_fault_is_found_in_the_message_of_every_cause() {
        let (rank, host, detail) = (Rank::new(12), || "h (127.0.0.1:1)".to_owned(), || "reset".to_owned());
        for cause in [
            Cause::PeerLost { rank, host: host(), seen_by: Rank::ZERO, detail: detail() },
            Cause::PeerLeft { rank, host: host() },
            Cause::Aborted { rank, host: host(), message: "rank 3 on x".into() },
            Cause::Misbehaved { rank, host: host(), detail: detail() },
        ] {
            assert_eq!(rank_at_fault(&format!("Error: {cause} (reported by rank 4)")), Some(rank), "{cause}");
        }
        assert_eq!(rank_at_fault("ringtrain: error: rank 3 failed: cannot read x"), Some(Rank::new(3)));
        for line in [
            "rank 3 on host waits",
            "rank on h was lost: x",
            "a frank 7 failed",
            "rank 99999999999 failed: x",
        ] {
            assert_eq!(rank_at_fault(line), None, "{line}");
        }
    }

    #[test]
    fn the_rank_that_other_ranks_name_is_blamed() {
        let (one, other) = (RankEnd::Exited(1), RankEnd::Exited(101));
        let lost = "rank 2's connection to rank 1 on h was lost: reset; see the output of rank 1";
        let cases: [(&[RankEnd], [&str; 3], u32); 8] = [
            (&[one, one, other], [&abort_message(2), &abort_message(2), "thread panicked"], 2),
            (&[one, one, one], [&abort_message(2), &abort_message(2), &abort_message(2)], 2),
            // Rank 1 is blamed first and names rank 2, and rank 2 names rank 0.
            (&[one, one, one], ["out of memory", &abort_message(2), "rank 0 on h was lost: reset"], 0),
            // Rank 1 stays blamed: rank 1 names no rank, the rank that it names succeeded or was killed, or rank 1
            // was killed itself.
            (&[one, one, one], ["x", "y", "z"], 1),
            (&[one, one, RankEnd::Exited(0)], ["x", &abort_message(2), ""], 1),
            (&[one, one, RankEnd::Killed(15)], ["x", &abort_message(2), ""], 1),
            (&[one, RankEnd::Killed(9), one], ["x", &abort_message(2), "z"], 1),
            // Two ranks name each other.
            (&[one, one, one], ["x", &abort_message(2), lost], 1),
        ];
        for (ends, printed_lines, expected) in cases {
            assert_eq!(blamed_rank(ends, &printed_lines), expected, "{ends:?} {printed_lines:?}");
        }
    }
}
