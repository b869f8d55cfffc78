//! Isolated groups: separate jobs of the same ranks.

use std::time::{Duration, Instant};

use crate::util::ranks::TestTransport;
use ringtrain::wire::Cause;
use ringtrain::{Group, Rank, ReduceOp};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

/// Rank 0 has one isolated group with rank 1 and one with rank 2. A failure of the group with rank 1 does not affect
/// the group with rank 2.
fn a_failure_stays_in_its_isolated_group(transport: TestTransport) {
    transport.run(3, |mut group| {
        let rank = group.rank();
        let mut pair_with = |other: Rank| {
            let pair = group.subgroup(&[R0, other]).unwrap();
            pair.map(|mut pair| pair.isolated().unwrap())
        };
        let (first, second) = (pair_with(R1), pair_with(Rank::new(2)));
        if let Some(mut first) = first {
            let mut sum = [1.0, 2.0];
            first.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [2.0, 4.0]);
            let error = if rank == R1 {
                first.abort("a test")
            } else {
                first.receive(&mut [0u8], R1, 5).unwrap_err()
            };
            assert!(matches!(error.cause(), Some(Cause::Aborted { rank, .. }) if *rank == R1), "{error}");
        }
        if let Some(mut second) = second {
            assert_eq!(second.broadcast_object(&rank.get(), R1).unwrap(), 2);
        }
        // The parent of the groups still works.
        let mut ranks = [rank.get()];
        group.all_reduce(&mut ranks, ReduceOp::Sum).unwrap();
        assert_eq!(ranks, [3]);
    });
}

/// The end of a job does not affect an isolated group of some of its ranks.
fn an_aborted_job_does_not_affect_an_isolated_group_of_its_ranks(transport: TestTransport) {
    transport.run(3, |mut group| {
        let rank = group.rank();
        let others = group.subgroup(&[R0, R1]).unwrap();
        let isolated = others.map(|mut others| others.isolated().unwrap());
        // Ranks 0 and 1 exchange messages of the parent while they connect, so rank 2 waits before it aborts the
        // parent.
        if rank.get() == 2 {
            for source in [R0, R1] {
                group.receive(&mut [0u8], source, 1).unwrap();
            }
            group.abort("rank 2 leaves");
        } else {
            group.send(&[0u8], Rank::new(2), 1).unwrap();
        }
        if let Some(mut isolated) = isolated {
            let error = group.barrier().unwrap_err();
            assert!(matches!(error.cause(), Some(Cause::Aborted { .. })), "{error}");
            for round in 0..3u32 {
                let mut sum = [round];
                isolated.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [2 * round]);
            }
        }
    });
}

/// An isolated group of three ranks, in another order than in the job, works like the job.
fn an_isolated_group_may_have_more_than_two_ranks(transport: TestTransport) {
    transport.run(4, |mut group| {
        let order = [3, 0, 2].map(Rank::new);
        let Some(mut isolated) = group.subgroup(&order).unwrap().map(|mut some| some.isolated().unwrap())
        else {
            return;
        };
        assert_eq!(order[isolated.rank().index()], group.rank());
        let ranks = isolated.all_gather_object(&group.rank().get()).unwrap();
        assert_eq!(ranks, [3, 0, 2]);
        let error = isolated.isolated().err().expect("an isolated group has no ports").to_string();
        assert!(error.contains("no ports"), "{error}");
    });
}

/// The steps in which the ranks of a pair connect, and after which a rank of the test leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LastStep {
    /// The ranks have agreed on the number of the isolated group.
    Number,
    /// All ports accept connections of the group.
    Expectation,
    /// The rank has told the other rank that it cannot take part.
    Refusal,
}

/// Takes part in [`Group::isolated`] as far as the step `last`.
fn connect_partly(group: &mut Group, last: LastStep) {
    group.broadcast_object(&5u64, R0).unwrap();
    let own = match last {
        LastStep::Number => return,
        LastStep::Expectation => Ok(()),
        LastStep::Refusal => Err("no more files".to_owned()),
    };
    group.all_gather_object(&own).unwrap();
}

/// A rank leaves, or cannot take part, while it and another rank connect. The other rank learns this at once, and not at a
/// deadline.
fn a_rank_that_leaves_while_it_connects_is_named(transport: TestTransport) {
    for leaver in [R0, R1] {
        for last in [LastStep::Number, LastStep::Expectation, LastStep::Refusal] {
            transport.run(2, move |mut group| {
                if group.rank() == leaver {
                    connect_partly(&mut group, last);
                    if last == LastStep::Refusal {
                        group.isolated().unwrap();
                    }
                    return;
                }
                let started = Instant::now();
                let error = group.isolated().err().expect("a rank is missing").to_string();
                assert!(started.elapsed() < Duration::from_secs(5), "{last:?} of rank {leaver}: {error}");
                if last == LastStep::Refusal {
                    // The job and a second isolated group still work.
                    assert_eq!(error, "no more files");
                    group.isolated().unwrap();
                } else {
                    assert!(error.contains(&format!("rank {leaver}")), "{last:?}: {error}");
                }
            });
        }
    }
}

on_every_transport! {
    an_isolated_group_may_have_more_than_two_ranks,
    a_rank_that_leaves_while_it_connects_is_named,
    a_failure_stays_in_its_isolated_group,
    an_aborted_job_does_not_affect_an_isolated_group_of_its_ranks,
}
