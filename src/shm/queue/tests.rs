//! Tests of queues that are full, and of peers that write wrong words. The simulation of queues runs them in several threads.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::entry::*;
use super::{QueueReceiver, QueueSender};
use crate::shm::{HostMemoryLayout, Segment, SegmentMemory as _, WORD_BYTES};

/// A layout whose queues fill up after 8 entries or 512 bytes.
const SHORT: HostMemoryLayout = HostMemoryLayout::with_short_queues(2, 8, 512);

fn new_memory() -> Arc<Segment> {
    Arc::new(Segment::for_tests(SHORT.bytes(), 1).remove(0))
}

fn ends(memory: &Arc<Segment>) -> (QueueSender<Segment>, QueueReceiver<Segment>) {
    let sender = QueueSender::new(Arc::clone(memory), SHORT, 0, 1);
    (sender, QueueReceiver::new(Arc::clone(memory), SHORT, 0, 1))
}

fn write_all(sender: &mut QueueSender<Segment>, bytes: &[u8]) -> usize {
    sender.write(&[IoSlice::new(bytes)], 0).unwrap()
}

fn read_up_to(receiver: &mut QueueReceiver<Segment>, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let read = receiver.read(&mut [IoSliceMut::new(&mut bytes)], 0).unwrap();
    bytes.truncate(read);
    bytes
}

#[test]
fn a_full_queue_takes_no_entry_until_the_receiver_has_read_one() {
    for (bytes, fitting) in [(1, 8), (64, 8), (65, 4), (128, 4)] {
        let (mut sender, mut receiver) = ends(&new_memory());
        for lap in 0..20 {
            let mut written = 0;
            while write_all(&mut sender, &vec![lap; bytes]) > 0 {
                written += 1;
            }
            assert_eq!(written, if lap == 0 { fitting } else { 1 }, "{bytes} bytes");
            assert_eq!(read_up_to(&mut receiver, 1).len(), 1, "only a part of the entry is read");
            if bytes > 1 {
                assert_eq!(write_all(&mut sender, &[0]), 0, "the rest of the entry has not been read");
                read_up_to(&mut receiver, bytes);
            }
        }
    }
}

#[test]
fn an_entry_is_at_most_a_quarter_of_the_arena_and_ends_at_its_end() {
    let (mut sender, mut receiver) = ends(&new_memory());
    assert_eq!(write_all(&mut sender, &[1; 1000]), 128);
    assert_eq!(write_all(&mut sender, &[2; 320]), 128);
    assert_eq!(write_all(&mut sender, &[3; 64]), 64);
    assert_eq!(write_all(&mut sender, &[4; 128]), 128);
    assert_eq!(write_all(&mut sender, &[5; 128]), 64, "64 bytes are left before the end");
    assert_eq!(write_all(&mut sender, &[6; 128]), 0);
    assert_eq!(read_up_to(&mut receiver, 1000), [1; 128]);
    assert_eq!(write_all(&mut sender, &[6; 128]), 128, "the arena begins again");
    for (value, count) in [(2, 128), (3, 64), (4, 128), (5, 64), (6, 128)] {
        assert_eq!(read_up_to(&mut receiver, 1000), vec![value; count]);
    }
}

#[test]
fn the_first_entry_says_how_much_was_sent_over_the_socket() {
    let (mut sender, mut receiver) = ends(&new_memory());
    assert_eq!(receiver.read_begin(), Ok(None));
    sender.begin(1 << 40);
    assert_eq!(write_all(&mut sender, b"abc"), 3);
    assert_eq!(receiver.read(&mut [IoSliceMut::new(&mut [0])], 0), Err(QueueError::Kind(KIND_BEGIN)));
    assert_eq!(receiver.read_begin(), Ok(Some(1 << 40)));
    assert_eq!(receiver.read_begin(), Err(QueueError::Kind(KIND_BYTES)));
    assert_eq!(read_up_to(&mut receiver, 9), b"abc");
}

#[test]
fn wrong_words_of_a_peer_are_errors() {
    let (arena, passed) = (SHORT.arena_bytes as u64, SHORT.passed_bytes as u64);
    let bytes = |kind: u64, bytes: u64| kind | bytes << 32;
    for (stamp, kind_and_bytes, start, expected) in [
        (2, bytes(KIND_BYTES, 1), 0, QueueError::Stamp(2)),
        (u64::MAX, bytes(KIND_BYTES, 1), 0, QueueError::Stamp(u64::MAX)),
        (1, bytes(0, 1), 0, QueueError::Kind(0)),
        (1, bytes(u64::from(u32::MAX), 1), 0, QueueError::Kind(u64::from(u32::MAX))),
        (1, bytes(KIND_BYTES, 0), 0, QueueError::Bytes { start: 0, bytes: 0 }),
        (1, bytes(KIND_BYTES, arena + 1), 0, QueueError::Bytes { start: 0, bytes: arena + 1 }),
        (1, bytes(KIND_BYTES, 2), arena - 1, QueueError::Bytes { start: arena - 1, bytes: 2 }),
        // The first passed buffer belongs to the sender, and the second one to the receiver.
        (1, bytes(KIND_BYTES, passed + 1), arena, QueueError::Bytes { start: arena, bytes: passed + 1 }),
        (1, bytes(KIND_BYTES, 0), arena, QueueError::Bytes { start: arena, bytes: 0 }),
        (1, bytes(KIND_BYTES, 1), arena + passed, QueueError::Bytes { start: arena + passed, bytes: 1 }),
        (1, bytes(KIND_BYTES, 1), PASSES_BUFFER, QueueError::Bytes { start: 0, bytes: 1 }),
        (1, bytes(KIND_BYTES, 1), u64::MAX, QueueError::Bytes { start: u64::MAX >> 1, bytes: 1 }),
    ] {
        let memory = new_memory();
        let (_, mut receiver) = ends(&memory);
        for (index, word) in [stamp, kind_and_bytes, start].into_iter().enumerate() {
            memory.store(SHORT.queue(0, 1).cell(0) + index * WORD_BYTES, word, Ordering::Relaxed);
        }
        let error = receiver.read(&mut [IoSliceMut::new(&mut [0; 9])], 0).unwrap_err();
        assert_eq!(error, expected);
        assert!(error.to_string().starts_with("it wrote "));
    }
    for wrong_count in [9, u64::MAX] {
        let memory = new_memory();
        let (mut sender, _) = ends(&memory);
        memory.store(SHORT.queue(0, 1).read_count, wrong_count, Ordering::Relaxed);
        let mut results = (0..9).map(|_| sender.write(&[IoSlice::new(&[1; 64])], 0));
        assert_eq!(results.find_map(Result::err), Some(QueueError::ReadCount(wrong_count)));
    }
}

#[test]
fn the_rest_of_a_message_may_be_late_but_no_other_message_may_come_before_it() {
    let memory = new_memory();
    let (mut sender, mut receiver) = ends(&memory);
    assert_eq!(write_all(&mut sender, &[1; 100]), 100);
    let mut rest = [0; 200];
    assert_eq!(receiver.read_rest(&mut rest, 1), Ok(100), "the other bytes are late");
    assert_eq!(receiver.read_rest(&mut rest[100..], 1), Ok(0));
    assert!(sender.write_message([0; 2], &[2; 30], &mut Vec::new()).unwrap());
    assert_eq!(receiver.read_rest(&mut rest[100..], 1), Err(QueueError::Kind(KIND_MESSAGE)));
    assert_eq!((&rest[..100], &rest[100..]), (&[1; 100][..], &[0; 100][..]));
}

/// A peer that overwrites random words at random times must not make this rank panic or copy bytes from outside the queue.
#[test]
fn random_words_of_a_peer_do_no_harm() {
    let mut random = StdRng::seed_from_u64(5);
    let queue = SHORT.queue(0, 1);
    for _ in 0..2_000 {
        let memory = new_memory();
        let (mut sender, mut receiver) = ends(&memory);
        for _ in 0..40 {
            let index = random.random_range(0..(queue.arena - queue.read_count) / WORD_BYTES);
            let value = match random.random_range(0..4) {
                0 => random.random::<u64>(),
                1 => random.random_range(0..40),
                2 => PASSES_BUFFER | random.random_range(500..1100),
                _ => random.random_range(0..1000) << 32 | 1,
            };
            memory.store(queue.read_count + index * WORD_BYTES, value, Ordering::Relaxed);
            let _ = sender.write(&[IoSlice::new(&[1; 200])], random.random_range(0..200));
            let mut bytes = [0; 300];
            let _ = receiver.read(&mut [IoSliceMut::new(&mut bytes)], random.random_range(0..300));
            let _ = receiver.read_begin();
            let _ = sender.write_message([value, value], &vec![2; random.random_range(0..200)], &mut vec![0]);
            if let Ok(NextEntry::Message(message)) = receiver.peek() {
                if random.random() {
                    receiver.begin_message(&message);
                } else {
                    receiver.read_message(&message, &mut vec![0; message.bytes.min(SHORT.bytes())]);
                    let _ = receiver.read_rest(&mut bytes, 1);
                }
            }
            assert!(receiver.owned.len() < 3);
        }
    }
}

/// Two ranks send each other messages. A message is in the passed buffer in which the last one came, if it is short enough.
#[test]
fn an_answer_is_in_the_buffer_of_the_message() {
    let memory = new_memory();
    let mut ends = [(0, 1), (1, 0)].map(|(own, peer)| {
        let sender = QueueSender::new(Arc::clone(&memory), SHORT, own, peer);
        (sender, QueueReceiver::new(Arc::clone(&memory), SHORT, peer, own))
    });
    let [first, second] = SHORT.queue(0, 1).passed;
    let arena = SHORT.queue(1, 0).arena;
    let longest = SHORT.passed_bytes;
    // The sender, the length of its message, and where the bytes of the message begin.
    let messages = [
        (0, 100, first),
        (1, longest, first),
        (0, longest, first),
        (1, 30, first),
        (1, 200, second),
        (1, 50, arena),
        (0, 60, second),
        (1, 70, second),
    ];
    for (round, (from, bytes, place)) in messages.into_iter().enumerate() {
        let payload: Vec<u8> = (0..bytes).map(|index| (index + round) as u8).collect();
        let (sender, receiver) = &mut ends[from];
        assert!(sender.write_message([0; 2], &payload, &mut receiver.owned).unwrap());
        let (_, receiver) = &mut ends[1 - from];
        let Ok(NextEntry::Message(message)) = receiver.peek() else { panic!("message {round}") };
        assert_eq!(message.first.start, place, "message {round}");
        let mut copy = vec![0; bytes];
        let count = receiver.read_message(&message, &mut copy);
        assert_eq!(receiver.read_rest(&mut copy[count..], 1), Ok(bytes - count));
        assert_eq!(copy, payload, "message {round}");
    }
    assert_eq!(ends.map(|(_, receiver)| receiver.owned), [vec![0, 1], vec![]]);
}
