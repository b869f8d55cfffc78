//! Links of several connections, over real sockets: the results are those of one, and so are the ends.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::util::{finish, ranks, signal, wait_until};
use ringtrain::exit::Exit;
use ringtrain::group::{Source, Streams, wait_all};
use ringtrain::{Group, JoinOptions, Rank, ReduceOp};

const TAG: u32 = 7;
const COUNTS: [u8; 4] = [1, 2, 4, 8];

fn of(count: u8) -> impl Fn(&mut JoinOptions) {
    move |options| {
        options.streams = Streams::new(count).expect("a link may have so many");
        options.operation_timeout = Duration::from_secs(30);
    }
}

/// Bytes that differ on every rank.
fn pattern(rank: Rank, length: usize) -> Vec<u32> {
    (0..length as u32).map(|index| index.wrapping_mul(2_654_435_761) ^ rank.get()).collect()
}

/// Collectives and messages of lengths around all that something is cut at.
fn work(group: &mut Group) {
    let n = group.size().get();
    for length in [0usize, 1, 60, 1000, 4096, 16_400, 65_553, 300_001, 2_000_003] {
        let mut sum: Vec<u32> = pattern(group.rank(), length);
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        let all: Vec<Vec<u32>> = ranks::ranks(n).map(|rank| pattern(rank, length)).collect();
        let is_right =
            |index: usize| sum[index] == all.iter().map(|of_rank| of_rank[index]).fold(0, u32::wrapping_add);
        assert!((0..length).all(is_right), "the sum of {length} with {n} ranks");

        let next = Rank::new((group.rank().get() + 1) % n);
        let before = Rank::new((group.rank().get() + n - 1) % n);
        let sent = group.send_async(pattern(group.rank(), length), next, TAG).unwrap();
        let mut received = vec![0u32; length];
        group.receive(&mut received, before, TAG).unwrap();
        sent.wait().unwrap();
        assert!(received == pattern(before, length), "a message of {length} with {n} ranks");
    }
}

#[test]
fn results_are_right_with_any_number_of_connections() {
    for count in COUNTS {
        for n in [2, 3, 5] {
            let streams = ranks::run_with(n, of(count), |mut group| {
                work(&mut group);
                group.streams()
            });
            assert_eq!(streams, vec![count; n as usize]);
        }
    }
}

/// Many operations and messages at once, each way, while connections still come.
#[test]
fn what_is_under_way_at_once_does_not_get_mixed_up() {
    for count in COUNTS {
        let around_the_ring = |options: &mut JoinOptions| {
            of(count)(options);
            options.algorithms = "ring".parse().expect("there is a ring");
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
                    messages.push(group.send_async(pattern(own, round * 3000), peer, TAG).unwrap());
                }
            }
            for round in 0..30usize {
                for peer in ranks::ranks(4).filter(|&peer| peer != own) {
                    let mut received = vec![0u32; round * 3000];
                    group.receive(&mut received, peer, TAG).unwrap();
                    assert!(received == pattern(peer, round * 3000));
                }
            }
            wait_all(messages).unwrap();
            for (round, sum) in wait_all(sums).unwrap().into_iter().enumerate() {
                assert!(sum.iter().all(|&value| value == 4 * round as u64));
            }
        });
    }
}

/// Links that two ranks open at one moment, beyond those that joining has opened.
#[test]
fn both_ends_may_dial_at_once() {
    for round in 0..4u64 {
        let n = 18;
        let start = Arc::new(Barrier::new(n as usize));
        ranks::run_with(n, of(4), move |mut group| {
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

/// All ranks take the same decision from the measurement and go on.
#[test]
fn the_number_may_be_measured() {
    for n in [2, 4] {
        let chosen = ranks::run_with(
            n,
            |options| options.streams = Streams::AUTO,
            |mut group| {
                work(&mut group);
                let mut duplicate = group.duplicate().unwrap();
                work(&mut duplicate);
                group.streams()
            },
        );
        assert!([1, 4].contains(&chosen[0]) && chosen.iter().all(|count| *count == chosen[0]), "{chosen:?}");
    }
}

/// Rank 0's word counts.
#[test]
fn ranks_that_were_told_otherwise_do_as_rank_0() {
    let told = std::sync::atomic::AtomicU8::new(3);
    let adjust = |options: &mut JoinOptions| {
        let count = told.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        options.streams = Streams::new(count).expect("a link may have so many");
    };
    let streams = ranks::run_with(3, adjust, |mut group| {
        work(&mut group);
        group.streams()
    });
    assert_eq!(streams, [3, 3, 3]);
}

/// What a rank says last comes before the end, whichever connection it takes.
#[test]
fn last_words_are_heard() {
    for count in COUNTS {
        for round in 0..5 {
            let errors = ranks::run_with(3, of(count), move |mut group| {
                let mut buffer = vec![1u32; 500_000];
                let first = group.all_reduce(&mut buffer, ReduceOp::Sum);
                if group.rank() == Rank::new(1) {
                    return group.abort(&format!("reason {round}")).to_string();
                }
                // The others may hear of it while they are still at the first one.
                let second = first.and_then(|()| group.all_reduce(&mut buffer, ReduceOp::Sum));
                second.unwrap_err().to_string()
            });
            assert!(errors.iter().all(|error| error.contains(&format!("reason {round}"))), "{errors:?}");
        }
        let errors = ranks::run_with(2, of(count), |mut group| {
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
    wait_until("training is under way", || {
        fs::read_to_string(folder.path().join("0.out")).unwrap().contains("epoch 2/")
    });
    let mut victim = started.remove(&1).unwrap();
    signal("KILL", victim.id());
    victim.wait().unwrap();
    for survivor in started.into_values() {
        let done = finish(survivor);
        assert_eq!(done.code(), Some(Exit::PeerLost as i32), "{}", done.stderr());
        assert!(done.stderr().contains("rank 1"), "{}", done.stderr());
    }
}
