//! Tests of ranks that leave while other ranks still work.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use crate::util::ranks::TestTransport;
use crate::util::{TEST_TIMEOUT, runs_long_tests};
use ringtrain::verbs::AllGather;
use ringtrain::{Group, Rank, ReduceOp};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);

/// Returns the elements of the message with this number. No two messages have an element in common.
fn message_elements(number: u64, count: usize) -> Vec<u64> {
    (0..count as u64).map(|index| number << 32 | index).collect()
}

fn receive(group: &mut Group, count: usize, source: Rank, tag: u32) -> Vec<u64> {
    group.receive_async(count, source, tag).unwrap().wait().unwrap().elements
}

/// The sender drops the handles of its sends and then its group.
fn a_message_whose_handle_was_dropped_still_arrives(transport: TestTransport) {
    transport.run(2, |mut group| {
        if group.rank() == R0 {
            for number in 0..3 {
                drop(group.send_async(message_elements(number, 300_000), R1, 1).unwrap());
            }
            return;
        }
        for number in 0..3 {
            assert!(receive(&mut group, 300_000, R0, 1) == message_elements(number, 300_000));
        }
    });
}

/// Rank 0 reads nothing until the senders have left. Over TCP, the senders cannot leave before rank 0 reads, so rank 0 reads
/// nothing for two seconds after they began to leave. Then it gets all messages, and the job goes on without the senders.
fn messages_to_a_rank_that_computes_arrive_after_their_senders_have_left(transport: TestTransport) {
    const SHORT_MESSAGES: u64 = 6_000;
    let (left, has_left) = mpsc::channel();
    let has_left = Mutex::new(has_left);
    let time_to_leave =
        if transport == TestTransport::Shm { TEST_TIMEOUT } else { Duration::from_millis(700) };
    transport.run(5, move |mut group| {
        let (rank, last) = (group.rank(), Rank::new(4));
        if rank == R0 {
            for _ in 0..3 {
                let left = has_left.lock().unwrap().recv_timeout(time_to_leave);
                assert!(transport != TestTransport::Shm || left.is_ok(), "a sender has not left");
            }
            for number in 0..SHORT_MESSAGES {
                assert_eq!(receive(&mut group, 1, R1, 0), [number]);
            }
            for sender in [2, 3].map(Rank::new) {
                for number in 0..4 {
                    assert!(receive(&mut group, 25_000, sender, 1) == message_elements(number, 25_000));
                }
            }
            group.send(&[7u64], last, 2).unwrap();
        } else if rank == last {
            assert_eq!(receive(&mut group, 1, R0, 2), [7]);
        } else {
            if rank == R1 {
                for number in 0..SHORT_MESSAGES {
                    group.send(&[number], R0, 0).unwrap();
                }
            } else {
                for number in 0..4 {
                    drop(group.send_async(message_elements(number, 25_000), R0, 1).unwrap());
                }
            }
            drop(group);
            left.send(()).unwrap();
        }
    });
}

/// The job runs one operation. A rank may complete the operation and close its group, while another rank still waits
/// for data of a third rank.
fn ranks_may_leave_when_their_own_operations_are_complete(transport: TestTransport) {
    for round in 0..if runs_long_tests() { 20 } else { 9 } {
        transport.run(4, move |mut group| {
            let mut element = [group.rank().get()];
            match round % 3 {
                0 => group.barrier().unwrap(),
                1 => group.reduce(&mut element, ReduceOp::Sum, R0).unwrap(),
                _ => assert_eq!(group.call(AllGather::new()).run_from(&element).unwrap(), [0, 1, 2, 3]),
            }
        });
    }
}

on_every_transport! {
    a_message_whose_handle_was_dropped_still_arrives,
    messages_to_a_rank_that_computes_arrive_after_their_senders_have_left,
    ranks_may_leave_when_their_own_operations_are_complete,
}
