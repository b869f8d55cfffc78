//! Tests of links that consist of several connections, over real sockets. A link of several connections must give the
//! same results and errors as a link of one connection.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::util::{finish, if_long_tests_else, ranks, runs_long_tests, send_signal, wait_until};
use ringtrain::exit::Exit;
use ringtrain::group::{Source, Streams, wait_all};
use ringtrain::{Group, JoinOptions, Rank, ReduceOp};

const TAG: u32 = 7;
/// Returns the numbers of connections per link that the tests use.
fn stream_counts() -> &'static [u8] {
    if_long_tests_else(&[1, 2, 4, 8], &[2, 8])
}

/// Sets the number of connections of each link.
fn with_streams(count: u8) -> impl Fn(&mut JoinOptions) {
    move |options| {
        options.streams = Streams::new(count).expect("a valid number of connections");
        options.operation_timeout = Duration::from_secs(30);
    }
}

/// Returns `length` elements for `rank`. The elements of different ranks differ.
fn elements_of_rank(rank: Rank, length: usize) -> Vec<u32> {
    (0..length as u32).map(|index| index.wrapping_mul(2_654_435_761) ^ rank.get()).collect()
}

/// Checks all-reduces and messages. Some lengths are so short that a link sends the data on one connection. Longer
/// data are divided over several connections.
fn check_all_lengths(group: &mut Group) {
    let n = group.size().get();
    let lengths: [usize; 9] = [0, 1, 60, 1000, 4096, 16_400, 65_553, 300_001, 2_000_003];
    for &length in if runs_long_tests() { &lengths[..] } else { &lengths[..8] } {
        let mut sum: Vec<u32> = elements_of_rank(group.rank(), length);
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        let all: Vec<Vec<u32>> = ranks::ranks(n).map(|rank| elements_of_rank(rank, length)).collect();
        let is_right =
            |index: usize| sum[index] == all.iter().map(|of_rank| of_rank[index]).fold(0, u32::wrapping_add);
        assert!((0..length).all(is_right), "the sum of {length} with {n} ranks");

        let next = Rank::new((group.rank().get() + 1) % n);
        let before = Rank::new((group.rank().get() + n - 1) % n);
        let sent = group.send_async(elements_of_rank(group.rank(), length), next, TAG).unwrap();
        let mut received = vec![0u32; length];
        group.receive(&mut received, before, TAG).unwrap();
        sent.wait().unwrap();
        assert!(received == elements_of_rank(before, length), "a message of {length} with {n} ranks");
    }
}

#[test]
fn results_are_right_with_any_number_of_connections() {
    for &count in stream_counts() {
        for &n in if_long_tests_else(&[2, 3, 5][..], &[3]) {
            let streams = ranks::run_with(n, with_streams(count), |mut group| {
                check_all_lengths(&mut group);
                group.streams()
            });
            assert_eq!(streams, vec![count; n as usize]);
        }
    }
}

/// Many operations and messages run in both directions while further connections are still opened.
#[test]
#[ignore = "runs with tools/test --full"]
fn many_operations_and_messages_at_once_give_right_results() {
    for &count in stream_counts() {
        let around_the_ring = |options: &mut JoinOptions| {
            with_streams(count)(options);
            options.algorithms = "ring".parse().expect("the algorithm exists");
        };
        ranks::run_with(4, around_the_ring, |mut group| {
            let own = group.rank();
            let mut sums = Vec::new();
            let mut messages = Vec::new();
            for round in 0..30usize {
                sums.push(
                    group.all_reduce_async(vec![round as u64; 1 << (round % 17)], ReduceOp::Sum).unwrap(),
                );
                for peer in ranks::ranks(4).filter(|&peer| peer != own) {
                    messages.push(group.send_async(elements_of_rank(own, round * 3000), peer, TAG).unwrap());
                }
            }
            for round in 0..30usize {
                for peer in ranks::ranks(4).filter(|&peer| peer != own) {
                    let mut received = vec![0u32; round * 3000];
                    group.receive(&mut received, peer, TAG).unwrap();
                    assert!(received == elements_of_rank(peer, round * 3000));
                }
            }
            wait_all(messages).unwrap();
            for (round, sum) in wait_all(sums).unwrap().into_iter().enumerate() {
                assert!(sum.iter().all(|&value| value == 4 * round as u64));
            }
        });
    }
}

/// Both ranks of a pair open their link at the same moment. The job has more than 16 ranks, so joining does not open
/// all links.
#[test]
#[ignore = "runs with tools/test --full"]
fn both_ranks_of_a_link_may_dial_at_once() {
    for round in 0..if runs_long_tests() { 4u64 } else { 2 } {
        let n = 18;
        let start = Arc::new(Barrier::new(n as usize));
        ranks::run_with(n, with_streams(4), move |mut group| {
            let own = group.rank();
            start.wait();
            for step in 1..n {
                group.send(&[round, own.get().into()], Rank::new((own.get() + step) % n), TAG).unwrap();
            }
            for _ in 1..n {
                let mut buffer = [0; 2];
                let status = group.receive(&mut buffer, Source::Any, TAG).unwrap();
                assert_eq!(buffer, [round, status.source.get().into()]);
            }
            let mut large = vec![1u64; 100_000];
            group.all_reduce(&mut large, ReduceOp::Sum).unwrap();
            assert!(large.iter().all(|&sum| sum == u64::from(n)));
        });
    }
}

/// With `Streams::AUTO`, the ranks measure their links and agree on 1 or 4 connections per link.
#[test]
fn all_ranks_use_the_same_measured_number_of_connections() {
    for &n in if_long_tests_else(&[2, 4][..], &[4]) {
        let chosen = ranks::run_with(
            n,
            |options| options.streams = Streams::AUTO,
            |mut group| {
                check_all_lengths(&mut group);
                let mut duplicate = group.duplicate().unwrap();
                check_all_lengths(&mut duplicate);
                group.streams()
            },
        );
        assert!([1, 4].contains(&chosen[0]) && chosen.iter().all(|count| *count == chosen[0]), "{chosen:?}");
    }
}

/// Each rank passes a different number of connections in its options.
#[test]
fn all_ranks_use_the_number_of_connections_of_rank_0() {
    let next_count = std::sync::atomic::AtomicU8::new(3);
    let adjust = |options: &mut JoinOptions| {
        let count = next_count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        options.streams = Streams::new(count).expect("a valid number of connections");
    };
    let streams = ranks::run_with(3, adjust, |mut group| {
        check_all_lengths(&mut group);
        group.streams()
    });
    assert_eq!(streams, [3, 3, 3]);
}

/// The last frame of a rank is an abort if the job has failed, and a goodbye if the rank has closed its group. The
/// last frame must arrive before the rank's connections close. It may be on any connection of the link.
#[test]
fn abort_and_goodbye_frames_arrive_on_links_of_several_connections() {
    for &count in stream_counts() {
        for round in 0..if runs_long_tests() { 5 } else { 2 } {
            let errors = ranks::run_with(3, with_streams(count), move |mut group| {
                let mut buffer = vec![1u32; 500_000];
                let first = group.all_reduce(&mut buffer, ReduceOp::Sum);
                if group.rank() == Rank::new(1) {
                    return group.abort(&format!("reason {round}")).to_string();
                }
                // The other ranks may get the error while they are still in the first all-reduce.
                let second = first.and_then(|()| group.all_reduce(&mut buffer, ReduceOp::Sum));
                second.unwrap_err().to_string()
            });
            assert!(errors.iter().all(|error| error.contains(&format!("reason {round}"))), "{errors:?}");
        }
        let errors = ranks::run_with(2, with_streams(count), |mut group| {
            let mut buffer = vec![1u32; 500_000];
            group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            if group.rank() == Rank::ZERO { None } else { Some(group.barrier().unwrap_err().to_string()) }
        });
        assert!(errors[1].as_ref().is_some_and(|error| error.contains("closed its group")), "{errors:?}");
    }
}

#[test]
fn a_rank_that_is_killed_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hosts.txt"), ranks::peers_text(3)).unwrap();
    let mut started: BTreeMap<usize, _> = (0..3)
        .map(|rank| {
            let child = Command::new(env!("CARGO_BIN_EXE_ringtrain"))
                .args(["--peers", "hosts.txt", "--rank", &rank.to_string(), "--transport", "tcp"])
                .args(["--streams", "4", "--epochs", "1000000", "--report", "report.json"])
                .current_dir(folder.path())
                .stdin(Stdio::null())
                .stdout(fs::File::create(folder.path().join(format!("{rank}.out"))).unwrap())
                .stderr(Stdio::piped())
                .spawn();
            (rank, child.unwrap())
        })
        .collect();
    wait_until("training has begun", || {
        fs::read_to_string(folder.path().join("0.out")).unwrap().contains("epoch 2/")
    });
    let mut victim = started.remove(&1).unwrap();
    send_signal("KILL", victim.id());
    victim.wait().unwrap();
    for survivor in started.into_values() {
        let done = finish(survivor);
        assert_eq!(done.code(), Some(Exit::PeerLost as i32), "{}", done.stderr());
        assert!(done.stderr().contains("rank 1"), "{}", done.stderr());
    }
}
