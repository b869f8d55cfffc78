//! Isolated groups: separate jobs of the same ranks.

use crate::util::ranks::TestTransport;
use ringtrain::wire::Cause;
use ringtrain::{Rank, ReduceOp};

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

on_every_transport! {
    a_failure_stays_in_its_isolated_group,
    an_aborted_job_does_not_affect_an_isolated_group_of_its_ranks,
}
