//! What is under way at the same time does not get in each other's way: long and short operations, very many messages, receives
//! that are cancelled, and functions that own groups.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::util::ranks::TestTransport;
use crate::util::{PATIENCE, is_full};
use ringtrain::group::{Received, Source, wait_all};
use ringtrain::{Group, JoinOptions, Rank, ReduceOp};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

fn receive(group: &mut Group, count: usize, source: Rank, tag: u32) -> Vec<u64> {
    let Received { elements, .. } = group.receive_async(count, source, tag).unwrap().wait().unwrap();
    elements
}

/// A sender that does not wait for its messages breaks no rule, up to the million that may be announced and what fits the
/// credit.
#[test]
fn a_receiver_gets_many_unexpected_messages() {
    TestTransport::Tcp.run(2, |mut group| {
        let many = if is_full() { 200_000 } else { 30_000 };
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

/// It took the next message that fitted, its deadline ended the job, and the last group waited for it.
fn a_receive_whose_handle_was_dropped_is_withdrawn(transport: TestTransport) {
    transport.run_with(
        2,
        |options: &mut JoinOptions| options.operation_timeout = Duration::from_secs(2),
        |mut group| {
            if group.rank() == R0 {
                group.barrier().unwrap();
                group.send(&[7u64], R1, 1).unwrap();
                // Longer than the deadline of the one that was dropped.
                group.set_timeout(PATIENCE);
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
            let mut taken = group.receive_async::<u64>(1, R0, 1).unwrap();
            crate::util::wait_until("the message comes", || taken.test());
            assert!(!taken.cancel(), "it has its message");
            assert_eq!(taken.wait().unwrap().elements, [7]);
            let started = Instant::now();
            let late = group.probe_for(R0, 9, Duration::from_secs(3));
            assert!(late == Ok(None) && started.elapsed() >= Duration::from_secs(3), "{late:?}");
            group.set_timeout(PATIENCE);
            group.send(&[0u8], R0, 2).unwrap();
            group.barrier().unwrap();
            drop(group.receive_async::<u64>(1, R0, 1).unwrap());
            let started = Instant::now();
            group.close();
            assert!(started.elapsed() < Duration::from_secs(4), "it took {:?}", started.elapsed());
        },
    );
}

/// The message was begun first and had the link until its end.
fn a_barrier_does_not_wait_for_a_long_message(transport: TestTransport) {
    transport.run(2, |mut group| {
        const LONG: usize = 32 << 20;
        let other = Rank::new(1 - group.rank().get());
        let received = group.receive_async::<u64>(LONG, other, 1).unwrap();
        group.barrier().unwrap();
        let before = group.statistics().bytes_received;
        let sent = group.send_async(vec![1u64; LONG], other, 1).unwrap();
        group.barrier().unwrap();
        let came = group.statistics().bytes_received - before;
        assert!(came < 4 * LONG as u64, "{came} bytes of the message came before the barrier's end");
        assert_eq!(received.wait().unwrap().elements.len(), LONG);
        sent.wait().unwrap();
    });
}

/// Each wakes the other's thread when its operation has ended; none waits until the other's has.
fn short_operations_of_other_threads_complete_during_a_long_one(transport: TestTransport) {
    transport.run(2, |mut group| {
        const LONG: usize = 32 << 20;
        let mut twin = group.duplicate().unwrap();
        let mut element = vec![1f32; LONG];
        group.barrier().unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_over);
        let short = thread::spawn(move || {
            let mut rounds = 0;
            loop {
                // All ranks stop after the same round.
                let mut done = [u8::from(told.load(Ordering::SeqCst))];
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
        // A rank that waited for the long one to end would complete none or one.
        assert!(rounds >= 3, "{rounds} short operations passed meanwhile");
    });
}

/// It would have waited for ever for the lock under which it runs.
fn a_reduction_function_must_not_use_its_group_but_may_own_others(transport: TestTransport) {
    transport.run(2, |mut group| {
        // Captures are dropped with the operation, wherever that is.
        let other = Rank::new(1 - group.rank().get());
        for round in 0..20 {
            let twin = Mutex::new(group.duplicate().unwrap());
            let handle = Mutex::new(group.receive_async::<u8>(1, other, 99).unwrap());
            let function = move |a: &u64, b: &u64| {
                let _captured = (&twin, &handle);
                a + b
            };
            if round % 2 == 0 {
                group.all_reduce_with(&mut [1u64; 10], function).unwrap();
            } else {
                drop(group.all_reduce_with_async(vec![1u64; 10], function).unwrap());
                group.barrier().unwrap();
            }
        }
        let twin = Mutex::new(group.duplicate().unwrap());
        let result = group.all_reduce_with(&mut [1u64; 10], move |a, b| {
            twin.lock().unwrap().statistics();
            a + b
        });
        let error = result.and_then(|()| group.barrier()).expect_err("the job ends");
        assert!(error.to_string().contains("the program's own reduction panicked"), "{error}");
    });
}

/// More than a link's credit: each rank is ready for its partner before what it has for it has left.
fn exchanges_beyond_the_credit(transport: TestTransport) {
    let adjust = |options: &mut JoinOptions| options.algorithms = "butterfly".parse().unwrap();
    for n in [2, 4, 8] {
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

/// A thread that sleeps in shared memory also waits for the sockets, and hands that over when it wakes up.
#[test]
fn background_operations_continue_after_a_wait_in_shared_memory() {
    let (told, heard) = mpsc::channel();
    let heard = Mutex::new(heard);
    TestTransport::Shm.run(2, move |mut group| {
        for round in 0..20u64 {
            if group.rank() == R0 {
                // More than may leave before it is asked for.
                let handle = group.send_async(vec![round; 400_000], R1, 0).unwrap();
                let short = group.receive_async::<u64>(1, R1, 1).unwrap();
                group.barrier().unwrap();
                // From here on this rank computes, and calls nothing.
                let heard = heard.lock().unwrap().recv_timeout(PATIENCE);
                assert_eq!(heard, Ok(round), "the message went on");
                handle.wait().unwrap();
                short.wait().unwrap();
            } else {
                // Long enough for the other one to fall asleep, and to sleep again when one of its operations has ended: then
                // it waits for the sockets, and the thread that did so before waits for it.
                let long_enough = || {
                    let started = Instant::now();
                    while started.elapsed() < Duration::from_millis(2) {
                        thread::yield_now();
                    }
                };
                long_enough();
                group.send(&[round], R0, 1).unwrap();
                long_enough();
                group.barrier().unwrap();
                told.send(receive(&mut group, 400_000, R0, 0)[0]).unwrap();
            }
        }
    });
}

on_every_transport! {
    a_receive_whose_handle_was_dropped_is_withdrawn,
    a_barrier_does_not_wait_for_a_long_message,
    short_operations_of_other_threads_complete_during_a_long_one,
    a_reduction_function_must_not_use_its_group_but_may_own_others,
    exchanges_beyond_the_credit,
}
