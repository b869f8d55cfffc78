//! How links come to be, over real TCP: who opens them, what happens when both do, and ranks that are late.
//!
//! Ranks that join measure their links, and in worlds of at most 16 ranks they open all of them for that, each from both ends.
//! So these worlds are larger. What they have opened are links to ranks 1, 2, 4, 8 and 16 away.

use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use crate::util::ranks;
use ringtrain::group::{Source, wait_all};
use ringtrain::transport::tcp::CONNECT_TIMEOUT;
use ringtrain::{JoinOptions, Rank, ReduceOp};

const TAG: u32 = 7;

/// A deadline that is long for what the tests do and short for who runs them.
fn hurry(options: &mut JoinOptions) {
    options.operation_timeout = Duration::from_secs(15);
}

/// Only the lower of two ranks could open a link, and nothing told it to: the sender waited for its deadline.
#[test]
fn a_message_to_a_lower_rank_leaves_before_anybody_asks_for_it() {
    for n in [17, 18, 20] {
        ranks::run_with(n, hurry, |mut group| {
            let rank = group.rank().get();
            if rank == 3 {
                group.send(&[41u64, 42], Rank::ZERO, TAG).unwrap();
            }
            group.barrier().unwrap();
            if rank == 0 {
                let mut buffer = [0u64; 2];
                group.receive(&mut buffer, Rank::new(3), TAG).unwrap();
                assert_eq!(buffer, [41, 42]);
            }
            group.barrier().unwrap();
        });
    }
}

/// The receiver names no source, so it opens no link: every message comes over one that its sender has opened.
#[test]
fn messages_from_anybody_need_no_link_of_the_receivers_making() {
    let n = 18;
    ranks::run_with(n, hurry, move |mut group| {
        let root = Rank::new(4);
        if group.rank() == root {
            let mut seen: Vec<u64> = (1..n)
                .map(|_| {
                    let mut number = [0];
                    group.receive(&mut number, Source::Any, TAG).unwrap();
                    number[0]
                })
                .collect();
            seen.sort_unstable();
            let others: Vec<u64> = (0..n.into()).filter(|&rank| rank != 4).collect();
            assert_eq!(seen, others);
        } else {
            group.send(&[u64::from(group.rank().get())], root, TAG).unwrap();
        }
        group.barrier().unwrap();
    });
}

/// All ranks send to all others at one moment, so that each pair opens its link from both sides.
#[test]
fn all_pairs_send_first_at_the_same_moment() {
    for round in 0..16u64 {
        let n = 17 + (round % 2) as u32;
        let start = Arc::new(Barrier::new(n as usize));
        ranks::run_with(n, hurry, move |mut group| {
            let own = group.rank();
            start.wait();
            // From the farthest, the nearest, or oneself on: the pairs meet in different orders.
            let to_rank = |step: u32| match round / 2 % 3 {
                0 => after(own, n - step, n),
                1 => after(own, step, n),
                _ => Rank::new(if step <= own.get() { step - 1 } else { step }),
            };
            if round % 4 < 2 {
                let sent: Vec<_> = (1..n)
                    .map(|step| group.send_async(vec![round, own.get().into()], to_rank(step), TAG).unwrap())
                    .collect();
                wait_all(sent).unwrap();
            } else {
                for step in 1..n {
                    group.send(&[round, own.get().into()], to_rank(step), TAG).unwrap();
                }
            }
            for peer in ranks::ranks(n).filter(|&peer| peer != own) {
                let mut buffer = [0; 2];
                group.receive(&mut buffer, peer, TAG).unwrap();
                assert_eq!(buffer, [round, peer.get().into()], "round {round}");
            }
            let mut sum = [1u64];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [u64::from(n)]);
        });
    }
}

fn after(own: Rank, step: u32, n: u32) -> Rank {
    Rank::new((own.get() + step) % n)
}

/// A rank that computed for longer than a connection may take was reported as lost by the rank that dialed it, lower or higher.
#[test]
fn a_rank_that_is_away_for_longer_than_a_connection_may_take_is_not_lost() {
    let (back, away) = mpsc::channel();
    let away = Mutex::new(Some(away));
    let joined = Barrier::new(18);
    ranks::run(18, move |mut group| {
        let late = Rank::new(3);
        // A rank that still joins is inside a call.
        joined.wait();
        match group.rank().get() {
            3 => {
                let away = away.lock().unwrap().take().unwrap();
                // Rank 3 is inside no call until two ranks have waited for it.
                for _ in 0..2 {
                    away.recv_timeout(crate::util::PATIENCE).unwrap();
                }
                for peer in [0, 9] {
                    let mut buffer = [0u32];
                    group.receive(&mut buffer, Rank::new(peer), TAG).unwrap();
                    assert_eq!(buffer, [peer]);
                }
            }
            own @ (0 | 9) => {
                let sent = group.send_async(vec![own], late, TAG).unwrap();
                let waited = sent.wait_timeout(CONNECT_TIMEOUT + Duration::from_millis(500));
                let sent = match waited {
                    Err(sent) => sent,
                    Ok(result) => panic!("no rank can have received it: {result:?}"),
                };
                back.send(()).unwrap();
                sent.wait().unwrap();
            }
            _ => {}
        }
        group.barrier().unwrap();
    });
}
