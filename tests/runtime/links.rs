//! Tests of opening links over real TCP: from the higher or the lower rank, from both ranks at once, and to a rank
//! that is inside no call of the library.
//!
//! In worlds of at most 16 ranks, joining opens all links to measure them. The worlds of these tests have more than
//! 16 ranks: after joining, each rank has links only to the ranks at a distance of 1, 2, 4, 8 and 16.

use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use crate::util::{ranks, runs_long_tests};
use ringtrain::group::{Source, wait_all};
use ringtrain::{JoinOptions, Rank, ReduceOp};

/// The time after which a rank that opens a connection and gets no answer is lost.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const TAG: u32 = 7;

/// Sets a deadline that is long enough for every test, and short enough to end a hanging test soon.
fn set_short_timeout(options: &mut JoinOptions) {
    options.operation_timeout = Duration::from_secs(15);
}

/// Regression test: before the fix, only the lower of two ranks opened links, so a message to the lower rank waited
/// until the sender's deadline.
#[test]
fn a_message_to_a_lower_rank_is_sent_before_its_receive_is_posted() {
    for n in [17, 18, 20] {
        ranks::run_with(n, set_short_timeout, |mut group| {
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

/// A receive from any source opens no link: every message comes over a link that its sender has opened.
#[test]
fn a_receive_from_any_source_uses_links_that_the_senders_opened() {
    let n = 18;
    ranks::run_with(n, set_short_timeout, move |mut group| {
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

/// All ranks send to all other ranks at the same moment, so that each pair opens its link from both sides.
#[test]
fn all_pairs_may_open_their_links_from_both_sides_at_once() {
    for round in 0..if runs_long_tests() { 16 } else { 6u64 } {
        let n = 17 + (round % 2) as u32;
        let start = Arc::new(Barrier::new(n as usize));
        ranks::run_with(n, set_short_timeout, move |mut group| {
            let own = group.rank();
            start.wait();
            // The order of the peers: descending from the previous rank, ascending from the next rank, or ascending
            // from rank 0.
            let to_rank = |step: u32| match round / 2 % 3 {
                0 => rank_at_distance(own, n - step, n),
                1 => rank_at_distance(own, step, n),
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

fn rank_at_distance(own: Rank, step: u32, n: u32) -> Rank {
    Rank::new((own.get() + step) % n)
}

/// Regression test: before the fix, a rank that computed for longer than the connect timeout was reported as lost by
/// the rank that dialed it.
#[test]
fn a_rank_that_computes_for_longer_than_the_connect_timeout_is_not_lost() {
    let (has_waited, waits) = mpsc::channel();
    let waits = Mutex::new(Some(waits));
    let joined = Barrier::new(18);
    ranks::run(18, move |mut group| {
        let late = Rank::new(3);
        // Wait until all ranks have joined, because a rank that is still joining is inside a call of the library.
        joined.wait();
        match group.rank().get() {
            3 => {
                let waits = waits.lock().unwrap().take().unwrap();
                // Rank 3 makes no call of the library until two ranks have waited for rank 3.
                for _ in 0..2 {
                    waits.recv_timeout(crate::util::TEST_TIMEOUT).unwrap();
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
                    Ok(result) => panic!("the send ended before rank 3 received the message: {result:?}"),
                };
                has_waited.send(()).unwrap();
                sent.wait().unwrap();
            }
            _ => {}
        }
        group.barrier().unwrap();
    });
}
