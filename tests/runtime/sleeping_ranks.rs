//! Messages to ranks that have fallen asleep, and from ranks that sleep because they cannot send more. A lost wake-up would make
//! a rank wait until its deadline.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::util::ranks::TestTransport;
use ringtrain::verbs::Broadcast;
use ringtrain::{Group, Rank};

/// A rank that sleeps for ever fails after this time.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The numbers of elements of the messages: below and above the limits of a cache line, of an entry and of a queue.
const COUNTS: [usize; 5] = [1, 10, 600, 20_000, 300_000];

/// Uses the processor for a random time, in which other ranks may fall asleep.
fn compute(random: &mut StdRng) {
    let until = Instant::now() + Duration::from_micros(random.random_range(0..150));
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

fn message(number: usize) -> Vec<u32> {
    (0..COUNTS[number % COUNTS.len()] as u32).map(|index| index.wrapping_mul(number as u32 + 1)).collect()
}

fn receive_and_check(group: &Group, source: Rank, number: usize) {
    let expected = message(number);
    let mut received = vec![7; expected.len()];
    group.receive(&mut received, source, 0).unwrap();
    assert!(received == expected, "message {number}");
}

/// The ranks of each pair answer each other after random times. The third rank waits in a receive meanwhile.
fn messages_wake_ranks_that_sleep(transport: TestTransport) {
    transport.run(3, |mut group| {
        group.set_timeout(TIMEOUT);
        let mut random = StdRng::seed_from_u64(u64::from(group.rank().get()));
        for number in 0..90 {
            let [from, to] = [number, number + 1 + number / 3 % 2].map(|rank| Rank::new(rank as u32 % 3));
            if group.rank() == from {
                compute(&mut random);
                group.send(&message(number), to, 0).unwrap();
                receive_and_check(&group, to, number + 1);
            } else if group.rank() == to {
                compute(&mut random);
                receive_and_check(&group, from, number);
                compute(&mut random);
                group.send(&message(number + 1), from, 0).unwrap();
            }
        }
    });
}

/// In each rank, one thread sends and one receives. A thread may find a queue full while the other thread of its rank sleeps.
fn threads_of_a_rank_send_and_receive_while_others_sleep(transport: TestTransport) {
    transport.run(2, |mut group| {
        group.set_timeout(TIMEOUT);
        let (messenger, peer) = (group.messenger(), group.size().rank_after(group.rank(), 1));
        let mut random = StdRng::seed_from_u64(u64::from(group.rank().get()) + 10);
        let mut sender_random = StdRng::seed_from_u64(random.random());
        let sender = thread::spawn(move || {
            for number in 0..40 {
                compute(&mut sender_random);
                messenger.send(&message(number), peer, 0).unwrap();
            }
        });
        for number in 0..40 {
            compute(&mut random);
            receive_and_check(&group, peer, number);
        }
        sender.join().unwrap();
    });
}

/// The progress thread of each rank sleeps in a receive that completes last. The other thread of the rank tests its receives
/// before it waits for them, so it may read the byte that was sent to wake the progress thread.
fn a_thread_that_tests_takes_no_wake_up_from_a_thread_that_sleeps(transport: TestTransport) {
    transport.run(2, |mut group| {
        group.set_timeout(TIMEOUT);
        let peer = group.size().rank_after(group.rank(), 1);
        let pending = group.receive_async::<u8>(1, peer, 9).unwrap();
        let mut random = StdRng::seed_from_u64(u64::from(group.rank().get()) + 20);
        for number in 0..300_u32 {
            let handle = group.receive_async::<u32>(1, peer, 1).unwrap();
            compute(&mut random);
            group.send(&[number], peer, 1).unwrap();
            let tests = random.random_range(0..20);
            let is_complete = (0..tests).any(|_| handle.test());
            let received = handle.wait().unwrap();
            assert_eq!(received.elements, [number], "{is_complete}");
        }
        group.send(&[0u8], peer, 9).unwrap();
        pending.wait().unwrap();
    });
}

/// A root that is late does not wait for anything, so it returns at once, and does not poll before the others have their results.
fn a_late_root_wakes_ranks_that_sleep_before_it_returns(transport: TestTransport) {
    let (report, reports) = mpsc::channel();
    let reports = Mutex::new(reports);
    transport.run(3, move |mut group| {
        group.set_timeout(TIMEOUT);
        for number in 0..20_u32 {
            let mut elements = vec![if group.rank() == Rank::ZERO { number } else { 7 }; 2000];
            if group.rank() == Rank::ZERO {
                // Longer than ranks poll before they sleep.
                let until = Instant::now() + Duration::from_millis(2);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
                if number % 2 == 0 {
                    elements =
                        group.call(Broadcast::from(Rank::ZERO)).start(elements).unwrap().wait().unwrap();
                } else {
                    group.broadcast(&mut elements, Rank::ZERO).unwrap();
                }
                for _ in 1..3 {
                    let wakes = reports.lock().unwrap().recv_timeout(TIMEOUT / 2);
                    assert_eq!(wakes, Ok(number), "a rank sleeps although the root has posted");
                }
            } else {
                group.broadcast(&mut elements, Rank::ZERO).unwrap();
                report.send(number).unwrap();
            }
            assert_eq!(elements, [number; 2000]);
        }
    });
}

on_every_transport!(
    messages_wake_ranks_that_sleep,
    threads_of_a_rank_send_and_receive_while_others_sleep,
    a_thread_that_tests_takes_no_wake_up_from_a_thread_that_sleeps,
    a_late_root_wakes_ranks_that_sleep_before_it_returns
);
