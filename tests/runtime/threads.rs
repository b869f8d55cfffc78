//! Tests of ranks with several threads, of interrupt functions and of reduction functions.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, Mutex, mpsc};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::util::ranks::{self, TestTransport};
use crate::util::{TEST_TIMEOUT, wait_until};
use ringtrain::verbs::{AllReduce, function};
use ringtrain::wire::Cause;
use ringtrain::{Error, Group, JoinOptions, Rank, ReduceOp};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

/// Rank 0 sends a message while its main thread is in the barrier. Rank 1 enters the barrier only after it has
/// received the message.
#[test]
fn a_thread_can_send_while_another_thread_is_in_a_collective() {
    for transport in TestTransport::ALL {
        let adjust = move |options: &mut JoinOptions| transport.apply(options);
        ranks::run_with(2, adjust, |mut group| {
            let messenger = group.messenger();
            if group.rank() == R0 {
                let sender = thread::spawn(move || {
                    // While this thread waits for rank 1, the main thread enters the barrier.
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
fn a_message_that_does_not_fit_fails_only_its_receive() {
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
            // After the errors, the group can still be used. These messages fit into their buffers.
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
fn a_message_of_a_rank_to_itself_that_does_not_fit_fails_its_receive() {
    let group = Group::solo();
    group.send(&[1u8, 2, 3], R0, 0).unwrap();
    let refused = group.receive_fitting(&mut [0u8; 2], R0, 0);
    assert!(matches!(refused, Err(Error::Truncated { room: 2, .. })), "{refused:?}");
    group.send(&[1u8, 2, 3], R0, 0).unwrap();
    let mut buffer = [0u8; 3];
    assert_eq!(group.receive_fitting(&mut buffer, R0, 0).unwrap().count, 3);
    assert_eq!(buffer, [1, 2, 3]);
}

/// The id of the thread that the interrupt function interrupts.
static INTERRUPTED_THREAD: Mutex<Option<ThreadId>> = Mutex::new(None);
/// The number of calls of the interrupt function.
static INTERRUPT_CALLS: AtomicU32 = AtomicU32::new(0);

fn is_interrupted() -> bool {
    INTERRUPT_CALLS.fetch_add(1, Ordering::Relaxed);
    *INTERRUPTED_THREAD.lock().unwrap() == Some(thread::current().id())
}

/// Bindings to other languages use an interrupt function for Ctrl-C: the interrupted rank stops waiting, and the
/// errors of all ranks name this rank.
#[test]
fn an_interrupted_wait_ends_the_job_and_names_the_rank() {
    for transport in TestTransport::ALL {
        for call in ["collective", "receive", "send_receive"] {
            let adjust = move |options: &mut JoinOptions| {
                transport.apply(options);
                options.interrupt = Some(is_interrupted);
            };
            let errors = ranks::run_with(3, adjust, move |mut group| {
                if group.rank() != R1 {
                    // This message is never sent.
                    return group.receive(&mut [0u8], R1, 9).unwrap_err();
                }
                *INTERRUPTED_THREAD.lock().unwrap() = Some(thread::current().id());
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
    assert!(INTERRUPT_CALLS.load(Ordering::Relaxed) > 0);
}

/// The thread whose interrupt function panics.
static THREAD_THAT_PANICS: Mutex<Option<ThreadId>> = Mutex::new(None);

fn panic_in_the_panicking_thread() -> bool {
    let panics = *THREAD_THAT_PANICS.lock().unwrap() == Some(thread::current().id());
    assert!(!panics, "the interrupt function panics");
    false
}

/// Regression test: before the fix, a panic in an interrupt function released the buffer of an operation to which
/// other ranks still wrote.
#[test]
fn an_interrupt_function_that_panics_ends_the_job() {
    for transport in TestTransport::ALL {
        let adjust = move |options: &mut JoinOptions| {
            transport.apply(options);
            options.interrupt = Some(panic_in_the_panicking_thread);
        };
        let errors = ranks::run_with(2, adjust, move |mut group| {
            if group.rank() != R1 {
                drop(group.alloc::<f32>(10_000).unwrap());
                return group.receive(&mut [0u8], R1, 9).unwrap_err();
            }
            let mut buffer = group.alloc::<f32>(10_000).unwrap();
            *THREAD_THAT_PANICS.lock().unwrap() = Some(thread::current().id());
            group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err()
        });
        for error in errors {
            let Some(Cause::Aborted { rank, message, .. }) = error.cause() else { panic!("{error}") };
            assert_eq!((*rank, message.contains("interrupt function panicked")), (R1, true), "{error}");
        }
    }
}

/// Waits until the thread with this name sleeps.
fn wait_for_sleep(name: &str) {
    let sleeps = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.contains(&format!("({name}) S"))
    };
    wait_until("the thread sleeps", || fs::read_dir("/proc/self/task").unwrap().flatten().any(sleeps));
}

/// Regression test: before the fix, a receive that slept in the event queue failed only at its deadline if another
/// thread aborted the job.
#[test]
fn a_sleeping_receive_fails_at_once_when_another_thread_aborts() {
    for transport in TestTransport::ALL {
        let adjust = move |options: &mut JoinOptions| transport.apply(options);
        let is_over = Barrier::new(2);
        ranks::run_with(2, adjust, move |group| {
            if group.rank() == R0 {
                let messenger = group.messenger();
                let receiver = messenger.clone();
                let (done, result) = mpsc::channel();
                let receive = move || done.send(receiver.receive(&mut [0u8], R1, 1).map(|_| ()));
                let thread = thread::Builder::new().name("asleep".into()).spawn(receive).unwrap();
                wait_for_sleep("asleep");
                messenger.abort("it gives up");
                let error = result.recv_timeout(Duration::from_secs(4)).expect("it must end").unwrap_err();
                assert!(error.to_string().contains("it gives up"), "{error}");
                thread.join().unwrap().unwrap();
            }
            // Rank 1 makes no call until rank 0 has its error, as if the process of rank 1 were stopped.
            is_over.wait();
        });
    }
}

/// A value that sends a message on its channel when the value is dropped.
struct DropNotice(mpsc::Sender<()>);

impl Drop for DropNotice {
    fn drop(&mut self) {
        if !thread::panicking() {
            let _ = self.0.send(());
        }
    }
}

/// Regression test: before the fix, the progress thread dropped the reduction function and, with this function, the
/// last handle of the job. The progress thread then waited for its own end.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_reduction_function_may_own_the_last_handle_of_the_job() {
    for transport in TestTransport::ALL {
        let adjust = move |options: &mut JoinOptions| transport.apply(options);
        let has_left = Barrier::new(2);
        let is_over = Barrier::new(2);
        ranks::run_with(2, adjust, move |mut group| {
            if group.rank() == R1 {
                has_left.wait();
                let mut buffer = [5u32];
                group.call(AllReduce::new(function(|a: &u32, b: &u32| a + b))).run(&mut buffer).unwrap();
                assert_eq!(buffer, [7]);
                is_over.wait();
                return;
            }
            let (sender, dropped) = mpsc::channel();
            let owned = (group.messenger(), DropNotice(sender));
            let add = move |a: &u32, b: &u32| {
                let _ = &owned;
                a + b
            };
            drop(group.call(AllReduce::new(function(add))).start(vec![2u32]).unwrap());
            drop(group);
            has_left.wait();
            assert!(dropped.recv_timeout(TEST_TIMEOUT).is_ok(), "the job was not dropped");
            is_over.wait();
        });
    }
}
