//! Tests that operations in progress at the same time do not delay or disturb each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::util::ranks::TestTransport;
use crate::util::{TEST_TIMEOUT, if_long_tests_else, retry_on_busy_machine, runs_long_tests};
use ringtrain::group::{Received, Source, wait_all};
use ringtrain::verbs::{AllReduce, function};
use ringtrain::{Group, JoinOptions, Rank, ReduceOp};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

fn receive(group: &mut Group, count: usize, source: Rank, tag: u32) -> Vec<u64> {
    let Received { elements, .. } = group.receive_async(count, source, tag).unwrap().wait().unwrap();
    elements
}

/// A sender may begin many messages before the receives are posted. Before the receives are posted, the sender
/// transmits only the first 1 MiB of its messages (the credit of the link). The sender announces up to 1,048,576
/// further messages without their data.
#[test]
fn a_receiver_gets_many_unexpected_messages() {
    TestTransport::Tcp.run(2, |mut group| {
        let many = if runs_long_tests() { 200_000 } else { 10_000 };
        if group.rank() == R0 {
            let handles: Vec<_> =
                (0..many).map(|_| group.send_async(Vec::<u64>::new(), R1, 1).unwrap()).collect();
            group.send(&[0u64], R1, 2).unwrap();
            wait_all(handles).unwrap();
        } else {
            receive(&mut group, 1, R0, 2);
            for _ in 0..many {
                receive(&mut group, 0, R0, 1);
            }
        }
    });
}

/// Regression test: before the fix, dropping the handle of a receive did not cancel the receive. A receive without a
/// handle could take the next matching message, end the job at the receive's deadline, and delay the closing of the
/// last group.
fn a_receive_whose_handle_is_dropped_is_cancelled(transport: TestTransport) {
    transport.run_with(
        2,
        |options: &mut JoinOptions| options.operation_timeout = Duration::from_secs(2),
        |mut group| {
            if group.rank() == R0 {
                group.barrier().unwrap();
                group.send(&[7u64], R1, 1).unwrap();
                // The next receive waits until the deadline of the dropped receives has passed, so it needs a longer
                // timeout.
                group.set_timeout(TEST_TIMEOUT);
                group.receive(&mut [0u8], R1, 2).unwrap();
                group.barrier().unwrap();
                return;
            }
            drop(group.receive_async::<u64>(1, R0, 1).unwrap());
            drop(group.receive_async::<u64>(1, Source::Any, None).unwrap());
            let mut cancelled = group.receive_async::<u64>(1, R0, None).unwrap();
            assert!(cancelled.cancel() && !cancelled.cancel());
            assert!(cancelled.wait().is_err());
            group.barrier().unwrap();
            let mut matched = group.receive_async::<u64>(1, R0, 1).unwrap();
            crate::util::wait_until("the message comes", || matched.test());
            assert!(!matched.cancel(), "the receive has matched its message");
            assert_eq!(matched.wait().unwrap().elements, [7]);
            let started = Instant::now();
            let late = group.probe(R0, 9, Duration::from_secs(3));
            assert!(late == Ok(None) && started.elapsed() >= Duration::from_secs(3), "{late:?}");
            group.set_timeout(TEST_TIMEOUT);
            group.send(&[0u8], R0, 2).unwrap();
            group.barrier().unwrap();
            drop(group.receive_async::<u64>(1, R0, 1).unwrap());
            let started = Instant::now();
            group.close();
            assert!(started.elapsed() < Duration::from_secs(4), "closing took {:?}", started.elapsed());
        },
    );
}

/// Regression test: before the fix, if a long message began before the barrier, the barrier could use the link only
/// after the last byte of the message.
fn a_barrier_completes_while_a_long_message_is_sent(transport: TestTransport) {
    const LONG_COUNT: usize = 8 << 20;
    // If the system suspends a thread between `send_async` and `barrier`, the message can arrive before the barrier.
    retry_on_busy_machine(|_| {
        transport.run(2, |mut group| {
            let other = Rank::new(1 - group.rank().get());
            let received = group.receive_async::<u64>(LONG_COUNT, other, 1).unwrap();
            let message = vec![1u64; LONG_COUNT];
            group.barrier().unwrap();
            let before = group.statistics().bytes_received;
            let sent = group.send_async(message, other, 1).unwrap();
            group.barrier().unwrap();
            let bytes_so_far = group.statistics().bytes_received - before;
            assert_eq!(received.wait().unwrap().elements.len(), LONG_COUNT);
            sent.wait().unwrap();
            let what = "bytes of the message came before the barrier's end";
            assert!(bytes_so_far < 4 * LONG_COUNT as u64, "{bytes_so_far} {what}");
        });
    });
}

/// If thread A completes the operation of thread B, then A wakes B at once, although the operation of A has not
/// ended.
fn short_operations_complete_while_another_thread_runs_a_long_one(transport: TestTransport) {
    const LONG_COUNT: usize = 8 << 20;
    // On a busy machine, the short operations may begin only when the long operation is almost complete.
    retry_on_busy_machine(|_| {
        transport.run(2, |mut group| {
            let mut twin = group.duplicate().unwrap();
            let mut element = vec![1f32; LONG_COUNT];
            group.barrier().unwrap();
            let is_over = Arc::new(AtomicBool::new(false));
            let is_long_one_over = Arc::clone(&is_over);
            let short = thread::spawn(move || {
                let mut rounds = 0;
                loop {
                    // All ranks stop after the same round.
                    let mut done = [u8::from(is_long_one_over.load(Ordering::SeqCst))];
                    twin.all_reduce(&mut done, ReduceOp::Min).unwrap();
                    if done == [1] {
                        return rounds;
                    }
                    rounds += 1;
                }
            });
            group.all_reduce(&mut element, ReduceOp::Sum).unwrap();
            is_over.store(true, Ordering::SeqCst);
            let rounds = short.join().unwrap();
            println!("{rounds} short operations");
            // If short operations waited for the long operation, a rank would complete at most one short operation.
            assert!(rounds >= 3, "only {rounds} short operations completed during the long one");
        });
    });
}

/// Regression test: before the fix, a reduction function that used a group waited forever, because the library holds
/// a lock during the function and the group needs this lock.
fn a_reduction_function_may_own_groups_but_using_one_ends_the_job(transport: TestTransport) {
    transport.run(2, |mut group| {
        // When an operation ends, any thread may drop the values that its reduction function has captured.
        let other = Rank::new(1 - group.rank().get());
        for round in 0..20 {
            let twin = Mutex::new(group.duplicate().unwrap());
            let handle = Mutex::new(group.receive_async::<u8>(1, other, 99).unwrap());
            let add = move |a: &u64, b: &u64| {
                let _captured = (&twin, &handle);
                a + b
            };
            if round % 2 == 0 {
                group.call(AllReduce::new(function(add))).run(&mut [1u64; 10]).unwrap();
            } else {
                drop(group.call(AllReduce::new(function(add))).start(vec![1u64; 10]).unwrap());
                group.barrier().unwrap();
            }
        }
        let twin = Mutex::new(group.duplicate().unwrap());
        let add = move |a: &u64, b: &u64| {
            twin.lock().unwrap().statistics();
            a + b
        };
        let result = group.call(AllReduce::new(function(add))).run(&mut [1u64; 10]);
        let error = result.and_then(|_| group.barrier()).expect_err("the job ends");
        assert!(error.to_string().contains("the program's reduction function panicked"), "{error}");
    });
}

/// The credit of a link is the 1 MiB that a peer may send before this rank is ready. In a butterfly, partners are
/// ready for each other from the start. A rank may therefore receive more data than the credit before its own data
/// have left.
fn butterflies_with_more_data_than_the_credit_complete(transport: TestTransport) {
    let adjust = |options: &mut JoinOptions| options.algorithms = "butterfly".parse().unwrap();
    for &n in if_long_tests_else(&[2, 4, 8][..], &[4]) {
        transport.run_with(n, adjust, |mut group| {
            let n = group.size().get();
            let own = vec![group.rank().get() + 1; 50_000];
            for _ in 0..3 {
                let handles: Vec<_> =
                    (0..30).map(|_| group.all_reduce_async(own.clone(), ReduceOp::Sum).unwrap()).collect();
                for sums in wait_all(handles).unwrap() {
                    assert!(sums.iter().all(|&sum| sum == n * (n + 1) / 2));
                }
            }
        });
    }
}

/// A thread that sleeps in a shared-memory collective also waits for the sockets. When the sleeping thread wakes up,
/// the progress thread must wait for the sockets in its place.
#[test]
fn background_operations_continue_after_a_thread_slept_in_shared_memory() {
    let (report, reports) = mpsc::channel();
    let reports = Mutex::new(reports);
    TestTransport::Shm.run(2, move |mut group| {
        for round in 0..20u64 {
            if group.rank() == R0 {
                // Rank 0 cannot send the whole message before a receive on rank 1 matches it.
                let handle = group.send_async(vec![round; 400_000], R1, 0).unwrap();
                let short = group.receive_async::<u64>(1, R1, 1).unwrap();
                group.barrier().unwrap();
                // From here on, this rank makes no call of the library.
                let received_round = reports.lock().unwrap().recv_timeout(TEST_TIMEOUT);
                assert_eq!(received_round, Ok(round), "the message is sent in the background");
                handle.wait().unwrap();
                short.wait().unwrap();
            } else {
                // During the first pause, rank 0 falls asleep in the barrier. During the second pause, rank 0 falls
                // asleep again, after its receive has ended. While rank 0 sleeps, its main thread waits for the
                // sockets.
                let pause = || {
                    let started = Instant::now();
                    while started.elapsed() < Duration::from_millis(2) {
                        thread::yield_now();
                    }
                };
                pause();
                group.send(&[round], R0, 1).unwrap();
                pause();
                group.barrier().unwrap();
                report.send(receive(&mut group, 400_000, R0, 0)[0]).unwrap();
            }
        }
    });
}

on_every_transport! {
    a_receive_whose_handle_is_dropped_is_cancelled,
    a_barrier_completes_while_a_long_message_is_sent,
    short_operations_complete_while_another_thread_runs_a_long_one,
    a_reduction_function_may_own_groups_but_using_one_ends_the_job,
    butterflies_with_more_data_than_the_credit_complete,
}
