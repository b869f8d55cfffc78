//! What programs need whose threads do several things at a time, and whose signals are not Rust's: messages beside collectives,
//! receives that fail alone, and waits that are given up.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, ThreadId};

use crate::util::ranks::{self, TestTransport};
use ringtrain::wire::Cause;
use ringtrain::{Error, Group, JoinOptions, Rank};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

/// Rank 1 enters the collective only when a message has come that rank 0 sends while it is in it.
#[test]
fn a_thread_in_a_collective_keeps_no_other_from_sending() {
    for transport in TestTransport::ALL {
        let adjust = move |options: &mut JoinOptions| transport.apply(options);
        ranks::run_with(2, adjust, |mut group| {
            let messenger = group.messenger();
            if group.rank() == R0 {
                let sender = thread::spawn(move || {
                    // The collective has begun when its other rank says so.
                    messenger.receive(&mut [0u8], R1, 1).unwrap();
                    messenger.send(&[7u8], R1, 2).unwrap();
                });
                group.barrier().unwrap();
                sender.join().unwrap();
            } else {
                messenger.clone().send(&[1u8], R0, 1).unwrap();
                messenger.receive(&mut [0u8], R0, 2).unwrap();
                group.barrier().unwrap();
            }
        });
    }
}

#[test]
fn a_message_that_does_not_fit_is_the_receivers_error_alone() {
    for transport in TestTransport::ALL {
        let adjust = move |options: &mut JoinOptions| transport.apply(options);
        ranks::run_with(2, adjust, |mut group| {
            for (tag, length) in [(0, 6usize), (1, 1_000_000)] {
                if group.rank() == R0 {
                    let message = vec![tag + 1; length];
                    for _ in 0..2 {
                        group.send(&message, R1, tag).unwrap();
                    }
                } else {
                    let mut buffer = [9u32; 5];
                    let refused = group.receive_fitting(&mut buffer, R0, tag).unwrap_err();
                    let Error::Truncated { status, room } = &refused else { panic!("{refused}") };
                    assert_eq!((status.source, status.tag, status.count, *room), (R0, tag, length, 5));
                    assert_eq!(buffer, [9; 5]);
                    let refused = group.receive_fitting_async(vec![9u32; 5], R0, tag).unwrap().wait();
                    assert!(matches!(refused, Err(Error::Truncated { .. })));
                }
                group.barrier().unwrap();
            }
            // The group is as it was, and what fits is received.
            if group.rank() == R0 {
                group.send(&[1u32, 2], R1, 3).unwrap();
                group.send(&vec![4u32; 300_000], R1, 3).unwrap();
            } else {
                let mut buffer = [9u32; 5];
                assert_eq!(group.receive_fitting(&mut buffer, R0, 3).unwrap().count, 2);
                assert_eq!(buffer, [1, 2, 9, 9, 9]);
                let received = group.receive_fitting_async(vec![9u32; 300_001], R0, 3).unwrap();
                let (long, status) = received.wait().unwrap();
                assert_eq!((status.count, long[299_999], long[300_000]), (300_000, 4, 9));
            }
        });
    }
}

#[test]
fn a_rank_alone_is_told_of_its_own_message_that_does_not_fit() {
    let group = Group::solo();
    group.send(&[1u8, 2, 3], R0, 0).unwrap();
    let refused = group.receive_fitting(&mut [0u8; 2], R0, 0);
    assert!(matches!(refused, Err(Error::Truncated { room: 2, .. })), "{refused:?}");
    group.send(&[1u8, 2, 3], R0, 0).unwrap();
    let mut buffer = [0u8; 3];
    assert_eq!(group.receive_fitting(&mut buffer, R0, 0).unwrap().count, 3);
    assert_eq!(buffer, [1, 2, 3]);
}

/// The thread that is to give up.
static WEARY: Mutex<Option<ThreadId>> = Mutex::new(None);
/// How often others were asked.
static ASKED: AtomicU32 = AtomicU32::new(0);

fn is_weary() -> bool {
    ASKED.fetch_add(1, Ordering::Relaxed);
    *WEARY.lock().unwrap() == Some(thread::current().id())
}

/// Ctrl-C in a binding: the rank that waits gives up, and all hear which one it was.
#[test]
fn a_thread_that_waits_may_give_up() {
    for transport in TestTransport::ALL {
        for call in ["collective", "receive", "send_receive"] {
            let adjust = move |options: &mut JoinOptions| {
                transport.apply(options);
                options.interrupt = Some(is_weary);
            };
            let errors = ranks::run_with(3, adjust, move |mut group| {
                if group.rank() != R1 {
                    // A message that never comes.
                    return group.receive(&mut [0u8], R1, 9).unwrap_err();
                }
                *WEARY.lock().unwrap() = Some(thread::current().id());
                let result = match call {
                    "collective" => group.barrier(),
                    "receive" => group.receive(&mut [0u8], R0, 5).map(|_| ()),
                    _ => group.send_receive((&[1u8], R0, 1), (&mut [0u8], R0.into(), Some(5))).map(|_| ()),
                };
                result.unwrap_err()
            });
            for error in errors {
                let Some(Cause::Aborted { rank, message, .. }) = error.cause() else { panic!("{error}") };
                assert_eq!(*rank, R1, "{transport:?} {call}");
                assert!(message.contains("interrupted"), "{message}");
            }
        }
    }
    assert!(ASKED.load(Ordering::Relaxed) > 0);
}
