//! All-reduces with each algorithm, at every length.

use ringtrain::{JoinOptions, ReduceOp};

use super::{
    LONG_COUNT, ReductionCase, check_reduction, check_reductions, contributed_value, expected_reduction,
};
use crate::util::ranks::{self, TestTransport};
use crate::util::{if_long_tests_else, runs_long_tests};

/// Each algorithm must work at every length, even if the library never chooses the algorithm for this length.
#[test]
fn every_algorithm_gives_right_results_at_every_length() {
    // Without `--full`, one size that is a power of two, and one that is not.
    for &n in if_long_tests_else(&[2, 3, 4, 5, 8][..], &[4, 5]) {
        // Without `--full`, use 5 ranks for the tests with sockets, and 4 ranks for the tests with shared memory and
        // with several hosts.
        let is_chosen =
            |transport: &TestTransport| runs_long_tests() || (*transport == TestTransport::Tcp) == (n == 5);
        for transport in TestTransport::ALL.into_iter().filter(is_chosen) {
            let algorithms = [
                "one-shot",
                "doubling",
                "butterfly",
                "direct",
                "double-tree",
                "hierarchy",
                "ring",
                "tree",
                "direct:0-64;ring:65-max",
            ];
            for algorithm in algorithms {
                // Shared memory has only two algorithms. Several hosts use the others as sockets alone do.
                let of_transport = match transport {
                    TestTransport::Shm => &["one-shot", "direct"][..],
                    TestTransport::Hosts => &["hierarchy", "ring", "double-tree"],
                    _ => &algorithms,
                };
                if !runs_long_tests() && !of_transport.contains(&algorithm) {
                    continue;
                }
                let adjust = |options: &mut JoinOptions| {
                    transport.apply(options);
                    options.algorithms = algorithm.parse().unwrap();
                };
                ranks::run_with(n, adjust, |mut group| {
                    let all = [ReduceOp::Sum, ReduceOp::Average];
                    check_reductions::<f32>(&mut group, if runs_long_tests() { &all } else { &all[1..] });
                });
            }
        }
    }
}

/// The buffer is so long that a parent cannot store all data of its second child. The second child sends a part, and
/// must then wait for a frame which says that the parent is ready.
#[test]
fn a_double_tree_reduces_long_buffers() {
    for &n in if_long_tests_else(&[2, 3, 4, 8][..], &[5]) {
        let adjust = |options: &mut JoinOptions| {
            TestTransport::Tcp.apply(options);
            options.algorithms = "double-tree".parse().unwrap();
        };
        ranks::run_with(n, adjust, |mut group| {
            let value = |rank, index| contributed_value::<f32>(ReduceOp::Average, rank, index);
            let expected = |ranks, index| expected_reduction::<f32>(ReduceOp::Average, ranks, index);
            check_reduction(
                &mut group,
                LONG_COUNT,
                &ReductionCase { op: ReduceOp::Average, value: &value, expected: &expected },
            );
        });
    }
}
