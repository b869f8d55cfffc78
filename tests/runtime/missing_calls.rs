//! Tests of ranks that wait for a call that another rank never makes. At the deadline, every rank that waits reports the
//! same cause.

use std::sync::{Arc, Barrier};

use super::mismatches::{
    WORLD_SIZES, common_report, retry_with_longer_deadlines, set_options_for, wait_for_cause, world_sizes,
};
use crate::util::if_long_tests_else;
use crate::util::ranks;
use ringtrain::group::at;
use ringtrain::verbs::AllToAll;
use ringtrain::wire::Cause;
use ringtrain::{Error, Group, Rank, ReduceOp, Site};

type GroupCall = fn(&mut Group) -> Result<(), Error>;

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

fn all_reduce_sum(group: &mut Group, count: usize) -> Result<(), Error> {
    group.all_reduce(&mut vec![1f32; count], ReduceOp::Sum)
}

/// One rank calls an operation on a duplicate of the group, the other ranks on the group itself.
#[test]
fn calls_of_different_groups_are_reported() {
    for &n in world_sizes() {
        for differing_rank in [0, n - 1] {
            retry_with_longer_deadlines(|deadline| {
                let causes = ranks::run_with(n, set_options_for(n), move |mut group| {
                    let mut twin = group.duplicate().expect("all ranks agree so far");
                    group.set_timeout(deadline);
                    twin.set_timeout(deadline);
                    let called_group =
                        if group.rank().get() == differing_rank { &mut twin } else { &mut group };
                    let called = all_reduce_sum(called_group, 7);
                    wait_for_cause(&mut group, called)
                });
                let report = common_report(&format!("rank {differing_rank} of {n}"), &causes);
                let Cause::Timeout { waiting, .. } = &causes[0] else { panic!("{report}") };
                assert_eq!(waiting.len(), n as usize, "{report}");
                for waiting in waiting {
                    assert_eq!(waiting.group != 0, waiting.rank.get() == differing_rank, "{report}");
                    assert!(waiting.site.contains(concat!(file!(), ":")), "{report}");
                }
            });
        }
    }
}

/// The error names the rank that never calls the operation, and the lines in which the other ranks wait.
#[test]
fn a_rank_that_never_calls_is_reported() {
    let calls: [(&str, GroupCall); 4] = [
        ("all_reduce(sum, 10 x f32, ", |group| all_reduce_sum(group, 10)),
        ("all_reduce(sum, 1000000 x f32, ", |group| all_reduce_sum(group, 1_000_000)),
        ("barrier(", |group| group.barrier()),
        ("all_to_all(", |group| {
            let input = vec![0u8; group.size().as_usize()];
            group.call(AllToAll::new()).run_from(&input).map(|_| ())
        }),
    ];
    for (expected, call) in calls {
        for &n in if_long_tests_else(&WORLD_SIZES[..], &[3]) {
            let missing = n / 2;
            retry_with_longer_deadlines(|deadline| {
                let failed = Arc::new(Barrier::new(n as usize));
                let causes = ranks::run_with(n, set_options_for(n), move |mut group| {
                    if group.rank().get() == missing {
                        failed.wait();
                        return None;
                    }
                    group.set_timeout(deadline);
                    let called = call(&mut group);
                    let cause = wait_for_cause(&mut group, called);
                    failed.wait();
                    Some(cause)
                });
                let causes: Vec<Cause> = causes.into_iter().flatten().collect();
                let report = common_report(&format!("{expected}, rank {missing} of {n}"), &causes);
                assert!(matches!(causes[0], Cause::Timeout { .. }), "{report}");
                assert!(
                    report.contains(&format!("all other ranks wait for rank {missing} on ")),
                    "{n} ranks: {report}"
                );
                assert!(report.contains(expected), "{n} ranks: {report}");
                assert!(report.contains(concat!(file!(), ":")), "{n} ranks: {report}");
            });
        }
    }
}

/// Two ranks wait for messages from each other. At the deadline the error reports both receives.
#[test]
fn two_receives_without_a_send_are_reported() {
    retry_with_longer_deadlines(|deadline| {
        let causes = ranks::run_with(2, set_options_for(2), move |mut group| {
            group.set_timeout(deadline);
            let called = if group.rank() == R0 {
                at(Site::new("wait.py", 4), || group.receive(&mut [0u8; 4], R1, 6)).map(|_| ())
            } else {
                group.receive(&mut [0u8; 4], R0, 6).map(|_| ())
            };
            wait_for_cause(&mut group, called)
        });
        let report = common_report("two receives", &causes);
        assert!(report.contains("the ranks wait for each other"), "{report}");
        assert_eq!(report.matches("waits in message(tag 6, 4 x u8)").count(), 2, "{report}");
        assert!(report.contains("wait.py:4"), "{report}");
    });
}
