//! Which rank a failure began with, as far as the ranks themselves say. Pure: it reads what they printed last.
//!
//! How ranks end tells victims from culprits only where their codes do. A rank that panics, or gives up by `Group::abort`, first
//! sees to it that the others hear of it: they may well end before it, and with the same code. But they say whose fault it was,
//! in the words of [`Cause`](crate::wire::Cause), which do not depend on the program.

use super::outcome::{JobOutcome, RankEnd, RankStatus};
use crate::types::Rank;

/// What follows `rank N on HOST` where the words name a culprit.
const FAULTS: [&str; 4] =
    [" was lost: ", " closed its group while ", " stopped the job: ", " broke the protocol: "];

/// The outcome after having heard the ranks: from the rank that is blamed to the one that it names, and from there on, as long
/// as these ended by themselves and badly. `tails` holds the last lines of each rank.
pub(super) fn trace(outcome: JobOutcome, members: &[RankStatus], tails: &[Vec<String>]) -> JobOutcome {
    let JobOutcome::Failed(first) = outcome else { return outcome };
    let gave_up = |rank: Rank| {
        let ended = members.get(rank.index()).and_then(|member| member.ended);
        matches!(ended, Some((RankEnd::Exited(code), _)) if code != 0)
    };
    let mut heard = vec![first];
    let mut rank = first;
    // One that was killed or never ran says nothing of others.
    while gave_up(rank)
        && let Some(named) =
            tails.get(rank.index()).and_then(|lines| lines.iter().rev().find_map(|line| named(line)))
        && named != rank
        && gave_up(named)
    {
        if heard.contains(&named) {
            // They accuse each other: the first by time it is.
            return outcome;
        }
        heard.push(named);
        rank = named;
    }
    JobOutcome::Failed(rank)
}

/// The rank that a line names as the one whose fault it was.
fn named(line: &str) -> Option<Rank> {
    line.match_indices("rank ").find_map(|(at, word)| {
        let rest = &line[at + word.len()..];
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, rest) = rest.split_at(digits);
        let is_fault = rest.starts_with(" failed: ")
            || (rest.starts_with(" on ") && FAULTS.iter().any(|fault| rest.contains(fault)));
        is_fault.then(|| number.parse().ok().map(Rank::new))?
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wire::Cause;

    fn aborted(rank: u32) -> String {
        let (rank, host, message) = (Rank::new(rank), "h (127.0.0.1:1)".into(), "it panicked".into());
        Cause::Aborted { rank, host, message }.to_string()
    }

    fn traced(ends: &[RankEnd], said: &[&str]) -> u32 {
        let members: Vec<RankStatus> = (0..)
            .zip(ends)
            .map(|(rank, &ended)| RankStatus {
                rank: Rank::new(rank),
                pid: 1,
                ended: Some((ended, Duration::ZERO)),
            })
            .collect();
        let tails: Vec<Vec<String>> = said.iter().map(|line| vec![(*line).to_owned()]).collect();
        match trace(JobOutcome::Failed(Rank::new(1)), &members, &tails) {
            JobOutcome::Failed(rank) => rank.get(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_cause_with_a_culprit_names_it() {
        let (rank, host, detail) = (Rank::new(12), || "h (127.0.0.1:1)".to_owned(), || "reset".to_owned());
        for cause in [
            Cause::PeerLost { rank, host: host(), seen_by: Rank::ZERO, detail: detail() },
            Cause::PeerLeft { rank, host: host() },
            Cause::Aborted { rank, host: host(), message: "rank 3 on x".into() },
            Cause::Misbehaved { rank, host: host(), detail: detail() },
        ] {
            assert_eq!(named(&format!("Error: {cause} (reported by rank 4)")), Some(rank), "{cause}");
        }
        assert_eq!(named("ringtrain: error: rank 3 failed: cannot read x"), Some(Rank::new(3)));
        for line in [
            "rank 3 on host waits",
            "rank on h was lost: x",
            "a frank 7 failed",
            "rank 99999999999 failed: x",
        ] {
            assert_eq!(named(line), None, "{line}");
        }
    }

    #[test]
    fn the_rank_that_the_others_name_is_blamed() {
        let (one, other) = (RankEnd::Exited(1), RankEnd::Exited(101));
        let lost = "rank 2's connection to rank 1 on h was lost: reset; see the output of rank 1";
        let cases: [(&[RankEnd], [&str; 3], u32); 8] = [
            (&[one, one, other], [&aborted(2), &aborted(2), "thread panicked"], 2),
            (&[one, one, one], [&aborted(2), &aborted(2), &aborted(2)], 2),
            // Along the chain.
            (&[one, one, one], ["out of memory", &aborted(2), "rank 0 on h was lost: reset"], 0),
            // No rank is named, or the named rank succeeded or was killed.
            (&[one, one, one], ["x", "y", "z"], 1),
            (&[one, one, RankEnd::Exited(0)], ["x", &aborted(2), ""], 1),
            (&[one, one, RankEnd::Killed(15)], ["x", &aborted(2), ""], 1),
            (&[one, RankEnd::Killed(9), one], ["x", &aborted(2), "z"], 1),
            // They accuse each other.
            (&[one, one, one], ["x", &aborted(2), lost], 1),
        ];
        for (ends, said, expected) in cases {
            assert_eq!(traced(ends, &said), expected, "{ends:?} {said:?}");
        }
    }
}
