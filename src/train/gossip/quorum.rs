//! The rule that prevents two groups of ranks from completing the same run with two models.
//!
//! If connections fail, the ranks of a job may fall apart into groups that cannot reach each other. Each group has its own
//! coordinator. Only the coordinator of a group with a quorum may complete the run.

use super::error::GossipError;
use crate::types::Rank;

/// Returns whether a group of ranks may complete the run: more than half of the ranks of the job are members, or
/// exactly half of the ranks, with rank 0 among them. Two groups without a common member never both have a quorum.
/// `members[i]` says whether rank i is a member.
fn has_quorum(members: &[bool]) -> bool {
    let count = members.iter().filter(|&&is_member| is_member).count();
    let missing = members.len() - count;
    count > missing || (count == missing && members.first() == Some(&true))
}

/// Checks that a group of ranks may complete the run. `own` is this rank. `describe_missing` returns why this rank cannot
/// reach the other ranks.
pub(super) fn check_quorum(
    own: Rank,
    members: &[bool],
    describe_missing: impl FnOnce() -> String,
) -> Result<(), GossipError> {
    if has_quorum(members) {
        return Ok(());
    }
    let reached = members.iter().filter(|&&is_member| is_member).count();
    Err(GossipError::TooFewRanks { own, reached, ranks: members.len(), missing: describe_missing() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without this rule, two halves of a job would complete the run with different parameters, and without an error.
    #[test]
    fn two_groups_without_a_common_rank_never_both_have_a_quorum() {
        let members =
            |set: u32, ranks: u32| -> Vec<bool> { (0..ranks).map(|rank| set >> rank & 1 == 1).collect() };
        for ranks in 1..=6 {
            for first in 0..1 << ranks {
                for second in (0..1 << ranks).filter(|second| first & second == 0) {
                    let both = [first, second].map(|set| has_quorum(&members(set, ranks)));
                    assert_ne!(both, [true, true], "{ranks} ranks, groups {first:b} and {second:b}");
                }
            }
        }
    }

    #[test]
    fn a_quorum_is_more_than_half_of_the_ranks_or_exactly_half_with_rank_0() {
        for (members, expected) in [
            (&[true][..], true),
            (&[true, false], true),
            (&[false, true], false),
            (&[true, false, false], false),
            (&[false, true, true], true),
            (&[true, false, false, true], true),
            (&[false, true, true, false], false),
            (&[false, true, true, true], true),
        ] {
            assert_eq!(check_quorum(Rank::ZERO, members, String::new).is_ok(), expected, "{members:?}");
        }
    }
}
