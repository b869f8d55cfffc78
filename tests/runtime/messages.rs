//! Tests of messages between two ranks: their order, sources and tags, probes, flow control, and errors.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::util::ranks::TestTransport;
use crate::util::{TEST_TIMEOUT, runs_long_tests};
use ringtrain::group::{Received, Source, Status, wait_all, wait_any};
use ringtrain::wire::Cause;
use ringtrain::{DType, Error, Group, JoinOptions, Rank, ReduceOp};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);
/// The number of elements of a message of 64 KiB.
const SHORT_LENGTH: usize = 8 << 10;
/// The number of bytes of a frame header on the wire.
const HEADER_BYTES: u64 = 64;
/// A rank stores at most this number of bytes of messages from one peer before receives for these messages are
/// posted.
pub(crate) const CREDIT_BYTES: u64 = 1 << 20;

/// Returns the elements of the message with this number. No two messages have an element in common.
fn message_elements(number: u64, count: usize) -> Vec<u64> {
    (0..count as u64).map(|index| number << 32 | index).collect()
}

fn receive(
    group: &mut Group,
    count: usize,
    source: impl Into<Source>,
    tag: impl Into<Option<u32>>,
) -> Vec<u64> {
    let Received { elements, .. } = group.receive_async(count, source, tag).unwrap().wait().unwrap();
    elements
}

fn messages_of_a_tag_keep_their_order_if_other_tags_are_received_first(transport: TestTransport) {
    transport.run(2, |mut group| {
        let length = |number: u64| (number * 37 % 200) as usize;
        if group.rank() == R0 {
            for number in 0..300 {
                group.send(&message_elements(number, length(number)), R1, (number % 3) as u32).unwrap();
            }
            group.barrier().unwrap();
            return;
        }
        // Receives the messages with tag 2 first, and then the other messages in their order, so that most messages
        // are stored for a while.
        for number in (0..300).filter(|number| number % 3 == 2) {
            let mut buffer = [0; 200];
            let status = group.receive(&mut buffer, R0, 2).unwrap();
            assert_eq!(buffer[..status.count], message_elements(number, length(number)));
        }
        for number in (0..300).filter(|number| number % 3 != 2) {
            let Received { elements, status } =
                group.receive_async::<u64>(200, R0, None).unwrap().wait().unwrap();
            assert_eq!(elements, message_elements(number, length(number)));
            assert_eq!((status.source, status.tag), (R0, (number % 3) as u32));
        }
        group.barrier().unwrap();
    });
}

/// The sender first sends a few long or many short messages with another tag. The receiver has not posted receives
/// for these messages.
fn a_message_overtakes_messages_without_a_receive(transport: TestTransport) {
    let empty_messages = if runs_long_tests() { 20_000 } else { 5000 };
    for (messages, count) in [(5, 400_000), (300, SHORT_LENGTH), (3000, 10), (empty_messages, 0)] {
        transport.run(2, move |mut group| {
            if group.rank() == R0 {
                let handles: Vec<_> = (0..messages)
                    .map(|number| group.send_async(message_elements(number, count), R1, 1).unwrap())
                    .collect();
                group.send(&[42u64], R1, 2).unwrap();
                group.send(&message_elements(7, 300_000), R1, 3).unwrap();
                wait_all(handles).unwrap();
            } else {
                assert_eq!(receive(&mut group, 1, R0, 2), [42]);
                assert_eq!(receive(&mut group, 300_000, R0, 3), message_elements(7, 300_000));
                for number in 0..messages {
                    assert_eq!(
                        receive(&mut group, count, R0, 1),
                        message_elements(number, count),
                        "{messages} x {count}"
                    );
                }
            }
            group.barrier().unwrap();
        });
    }
}

/// The sender keeps most of 256 MiB of messages until the receives are posted. The test counts the bytes that the
/// receiver gets. The test cannot measure the memory of one rank, because both ranks share one process.
#[test]
fn a_sender_keeps_messages_beyond_the_credit_until_receives_are_posted() {
    TestTransport::Tcp.run(2, |mut group| {
        const FLOOD_MESSAGES: u64 = 4096;
        group.barrier().unwrap();
        if group.rank() == R0 {
            let handles: Vec<_> = (0..FLOOD_MESSAGES)
                .map(|number| group.send_async(message_elements(number, SHORT_LENGTH), R1, 1).unwrap())
                .collect();
            group.send(&[0u64], R1, 2).unwrap();
            // The receiver sends this message when it has received the message with tag 2, which was sent after the
            // flood. Until the receives of the flood are posted, at most 1 MiB of the flood may leave the sender: its
            // credit.
            assert_eq!(receive(&mut group, 1, R1, 3), [0]);
            let sent = handles.iter().filter(|handle| handle.test()).count();
            assert!(
                (1..=CREDIT_BYTES as usize / (8 * SHORT_LENGTH)).contains(&sent),
                "{sent} messages have left the sender"
            );
            group.send(&[0u64], R1, 4).unwrap();
            wait_all(handles).unwrap();
        } else {
            let before = group.statistics().bytes_received;
            receive(&mut group, 1, R0, 2);
            group.send(&[0u64], R0, 3).unwrap();
            receive(&mut group, 1, R0, 4);
            let stored = group.statistics().bytes_received - before;
            assert!(
                stored <= CREDIT_BYTES + 2 * FLOOD_MESSAGES * HEADER_BYTES,
                "{stored} bytes came before their receives"
            );
            for number in 0..FLOOD_MESSAGES {
                assert_eq!(receive(&mut group, SHORT_LENGTH, R0, 1), message_elements(number, SHORT_LENGTH));
            }
        }
        group.barrier().unwrap();
    });
}

fn receives_with_any_source_and_any_tag_keep_the_order_of_each_sender(transport: TestTransport) {
    transport.run(5, |mut group| {
        const MESSAGES_PER_SENDER: u64 = 40;
        let rank = u64::from(group.rank().get());
        if rank != 0 {
            for number in 0..MESSAGES_PER_SENDER {
                group
                    .send(&message_elements(rank << 8 | number, (number * 50) as usize), R0, number as u32)
                    .unwrap();
            }
            group.barrier().unwrap();
            return;
        }
        let mut next = [0; 5];
        for _ in 0..4 * MESSAGES_PER_SENDER {
            let Received { elements, status } = group
                .receive_async::<u64>(MESSAGES_PER_SENDER as usize * 50, Source::Any, None)
                .unwrap()
                .wait()
                .unwrap();
            let number = next[status.source.index()];
            next[status.source.index()] += 1;
            assert_eq!(u64::from(status.tag), number, "messages of one sender overtook each other");
            assert_eq!(
                elements,
                message_elements(u64::from(status.source.get()) << 8 | number, number as usize * 50)
            );
        }
        assert_eq!(
            next,
            [0, MESSAGES_PER_SENDER, MESSAGES_PER_SENDER, MESSAGES_PER_SENDER, MESSAGES_PER_SENDER]
        );
        group.barrier().unwrap();
    });
}

/// If several receives accept a message, the message matches the receive that was posted first.
fn receives_match_messages_in_the_order_in_which_they_were_posted(transport: TestTransport) {
    transport.run(3, |mut group| {
        if group.rank() == R0 {
            let any = group.receive_async::<u64>(10, Source::Any, 7).unwrap();
            let from_rank_2 = group.receive_async::<u64>(10, Rank::new(2), None).unwrap();
            let first = group.receive_async::<u64>(10, R1, 1).unwrap();
            let second = group.receive_async::<u64>(10, R1, 1).unwrap();
            group.barrier().unwrap();
            assert_eq!(any.wait().unwrap().status.source, R1);
            assert_eq!(from_rank_2.wait().unwrap().elements, [3]);
            assert_eq!((first.wait().unwrap().elements, second.wait().unwrap().elements), (vec![1], vec![2]));
            return;
        }
        group.barrier().unwrap();
        if group.rank() == R1 {
            group.send(&[1u64], R0, 1).unwrap();
            group.send(&[2u64], R0, 1).unwrap();
            group.send(&[0u64], R0, 7).unwrap();
        } else {
            group.send(&[3u64], R0, 9).unwrap();
        }
    });
}

fn a_probe_describes_a_message_without_receiving_it(transport: TestTransport) {
    transport.run(2, |mut group| {
        if group.rank() == R1 {
            group.send(&message_elements(5, 123), R0, 17).unwrap();
            let long = group.send_async(message_elements(6, 100_000), R0, 18).unwrap();
            group.send(&[0u64], R0, 19).unwrap();
            long.wait().unwrap();
            group.barrier().unwrap();
            return;
        }
        // Messages begin to arrive in the order of their sends. After tag 19 has arrived, each earlier message has
        // arrived at least in part.
        receive(&mut group, 1, R1, 19);
        let expected = Status { source: R1, tag: 17, dtype: DType::U64, count: 123 };
        assert_eq!(group.probe(R1, 17, Duration::ZERO), Ok(Some(expected)));
        assert_eq!(group.probe(Source::Any, None, TEST_TIMEOUT), Ok(Some(expected)));
        assert_eq!(group.probe(R1, 99, Duration::ZERO), Ok(None));
        let long = group.probe(R1, 18, Duration::ZERO).unwrap().expect("the message has begun to come");
        assert_eq!(long.count, 100_000);
        assert_eq!(receive(&mut group, long.count, R1, 18), message_elements(6, 100_000));
        assert_eq!(receive(&mut group, expected.count, R1, 17), message_elements(5, 123));
        assert_eq!(group.probe(Source::Any, None, Duration::ZERO), Ok(None));
        assert_eq!(group.probe(Source::Any, None, Duration::from_millis(20)), Ok(None));
        group.barrier().unwrap();
    });
}

/// No other operation runs while the probe waits.
fn a_probe_waits_for_a_message(transport: TestTransport) {
    transport.run(2, |mut group| {
        if group.rank() == R1 {
            group.send(&[1u8], R0, 3).unwrap();
        } else {
            let found = group.probe(R1, None, TEST_TIMEOUT).unwrap().expect("the message comes");
            assert_eq!((found.tag, found.count), (3, 1));
            group.receive(&mut [0u8], R1, None).unwrap();
        }
        group.barrier().unwrap();
    });
}

/// If the progress thread is the one that waits for the sockets, the progress thread must wake the probing thread as
/// soon as a message arrives.
fn a_probe_returns_while_another_operation_runs(transport: TestTransport) {
    transport.run(2, |mut group| {
        let other = Rank::new(1 - group.rank().get());
        let pending = group.receive_async::<u8>(1, other, 1).unwrap();
        group.barrier().unwrap();
        // Which of the two threads waits for the sockets is random, so the test repeats the exchange.
        for _ in 0..200 {
            if group.rank() == R1 {
                let request = group.receive_async::<u8>(1, R0, 2).unwrap().wait().unwrap();
                group.send(&request.elements, R0, 3).unwrap();
            } else {
                group.send(&[1u8], R1, 2).unwrap();
                let started = Instant::now();
                assert!(group.probe(R1, 3, TEST_TIMEOUT / 6).unwrap().is_some());
                assert!(started.elapsed() < TEST_TIMEOUT / 6, "the probe took {:?}", started.elapsed());
                group.receive(&mut [0u8], R1, 3).unwrap();
            }
        }
        group.send(&[0u8], other, 1).unwrap();
        pending.wait().unwrap();
    });
}

/// Repeated calls of `probe` find the message, although none of these calls waits.
fn repeated_probes_find_a_message(transport: TestTransport) {
    transport.run(2, |mut group| {
        if group.rank() == R1 {
            group.send(&[1u8], R0, 3).unwrap();
        } else {
            let found =
                crate::util::wait_for("the message comes", || group.probe(R1, None, Duration::ZERO).unwrap());
            assert_eq!((found.tag, found.count), (3, 1));
            group.receive(&mut [0u8], R1, None).unwrap();
        }
        group.barrier().unwrap();
    });
}

fn neighbours_exchange_long_messages_without_a_deadlock(transport: TestTransport) {
    for n in [2, 3, 5] {
        transport.run(n, move |group| {
            let (size, rank) = (group.size(), group.rank());
            let own = message_elements(rank.get().into(), 500_000);
            let (right, left) = (size.rank_after(rank, 1), size.rank_before(rank, 1));
            let mut buffer = vec![0; own.len()];
            let status =
                group.send_receive((&own, right, 4), (&mut buffer, Source::Rank(left), Some(4))).unwrap();
            assert_eq!((status.source, status.count), (left, own.len()));
            assert!(buffer == message_elements(left.get().into(), own.len()));
        });
    }
}

/// A segment has 1 MiB, and only 256 KiB of a message may be sent before a receive matches the message.
fn segments_longer_than_the_eager_limit_are_delivered(transport: TestTransport) {
    transport.run_with(
        2,
        |options: &mut JoinOptions| options.segment_bytes = 1 << 20,
        |mut group| {
            if group.rank() == R0 {
                let long = group.send_async(message_elements(1, 300_000), R1, 1).unwrap();
                let short = group.send_async(message_elements(2, 10), R1, 2).unwrap();
                wait_all([long, short]).unwrap();
            } else {
                assert_eq!(receive(&mut group, 10, R0, 2), message_elements(2, 10));
                assert_eq!(receive(&mut group, 300_000, R0, 1), message_elements(1, 300_000));
            }
            let mut sum = vec![1u64; 1_000_000];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert!(sum.iter().all(|&element| element == 2));
        },
    );
}

/// A stored message can still be received after its sender has closed its group.
fn messages_of_a_rank_that_has_left_can_still_be_received(transport: TestTransport) {
    let has_left = Arc::new(Barrier::new(3));
    transport.run(3, move |mut group| {
        if group.rank() == R0 {
            group.send(&message_elements(1, 1000), R1, 1).unwrap();
            group.close();
            has_left.wait();
            return;
        }
        has_left.wait();
        // While ranks 1 and 2 exchange these messages, both also read the goodbye of rank 0, the frame which says
        // that rank 0 has closed its group.
        let (own, other) = (group.rank(), Rank::new(3 - group.rank().get()));
        for _ in 0..20 {
            let mut buffer = [0; 1000];
            group
                .send_receive(
                    (&message_elements(2, 1000), other, 2),
                    (&mut buffer, Source::Rank(other), Some(2)),
                )
                .unwrap();
        }
        if own == R1 {
            assert_eq!(receive(&mut group, 1000, R0, 1), message_elements(1, 1000));
        }
    });
}

fn wait_any_returns_each_message_once(transport: TestTransport) {
    transport.run(3, |group| {
        if group.rank() != R0 {
            let rank = u64::from(group.rank().get());
            group.send(&message_elements(rank, 50_000), R0, 5).unwrap();
            return;
        }
        let mut handles: Vec<_> =
            [R1, Rank::new(2)].map(|source| group.receive_async::<u64>(50_000, source, 5).unwrap()).into();
        let mut sources = Vec::new();
        while let Some(index) = wait_any(&handles, None) {
            let Received { elements, status } = handles.remove(index).wait().unwrap();
            assert_eq!(elements, message_elements(status.source.get().into(), 50_000));
            sources.push(status.source.get());
        }
        sources.sort_unstable();
        assert_eq!(sources, [1, 2]);
    });
}

/// Checks that both ranks fail with the same cause. The text of the cause must contain `expected` and the source
/// lines of both calls. `send` and `receive` each make one call, and return its source line and its result.
fn assert_mismatch(
    transport: TestTransport,
    send: impl Fn(&mut Group) -> (u32, Result<(), Error>) + Send + Sync + 'static,
    receive: impl Fn(&mut Group) -> (u32, Result<(), Error>) + Send + Sync + 'static,
    expected: [&str; 2],
) {
    let reports = transport.run(2, move |mut group| {
        // Collectives, sent messages and received messages are counted separately, so a collective and a message can
        // have the same number. The error must name the right operation.
        let other = Rank::new(1 - group.rank().get());
        for _ in 0..10 {
            group.barrier().unwrap();
            group.send_receive((&[1u8], other, 1), (&mut [0u8], Source::Any, Some(1))).unwrap();
        }
        let (line, result) = if group.rank() == R0 { send(&mut group) } else { receive(&mut group) };
        // The send of a short message may succeed before the receiver detects the mismatch. Then the barrier fails.
        let error = result.and_then(|()| group.barrier()).expect_err("both ranks fail");
        (line, error.cause().expect("the job failed").clone())
    });
    let (lines, causes): (Vec<u32>, Vec<Cause>) = reports.into_iter().unzip();
    assert_eq!(causes[0], causes[1]);
    let text = causes[0].to_string();
    for expected in expected {
        assert!(text.contains(expected), "no `{expected}` in: {text}");
    }
    let Cause::Mismatch { first_site, second_site, .. } = &causes[0] else { panic!("{text}") };
    for (line, site) in lines.iter().zip([first_site, second_site]) {
        assert_eq!(*site, format!("{}:{line}", file!()), "{text}");
    }
}

fn a_message_that_is_too_long_fails_both_ranks(transport: TestTransport) {
    for count in [11, 1_000_000] {
        assert_mismatch(
            transport,
            move |group| (line!(), group.send(&vec![0u64; count], R1, 3)),
            |group| (line!(), group.receive(&mut [0u64; 10], R0, 3).map(|_| ())),
            [
                &format!("rank 0 called message(tag 3, {count} x u64)"),
                "rank 1 called message(tag 3, 10 x u64)",
            ],
        );
    }
}

fn a_message_of_another_type_fails_both_ranks(transport: TestTransport) {
    assert_mismatch(
        transport,
        |group| (line!(), group.send(&[1.0f32; 2], R1, 3)),
        |group| (line!(), group.receive(&mut [0u64; 10], R0, 3).map(|_| ())),
        ["rank 0 called message(tag 3, 2 x f32)", "rank 1 called message(tag 3, 10 x u64)"],
    );
}

fn invalid_ranks_and_tags_are_refused_before_anything_is_sent(transport: TestTransport) {
    transport.run(2, |mut group| {
        let own = group.rank();
        let peer = Rank::new(2);
        assert!(
            matches!(group.send(&[1u8], peer, 0), Err(Error::InvalidPeer { peer: found, .. }) if found == peer)
        );
        assert!(matches!(group.receive(&mut [1u8], peer, 0), Err(Error::InvalidPeer { .. })));
        assert!(matches!(group.probe(peer, 0, Duration::ZERO), Err(Error::InvalidPeer { .. })));
        // `u32::MAX` stands for any tag, so no message can have this tag.
        let other = Rank::new(1 - own.get());
        assert_eq!(group.send(&[1u8], other, u32::MAX), Err(Error::InvalidTag));
        assert_eq!(group.receive(&mut [1u8], other, u32::MAX), Err(Error::InvalidTag));
        assert_eq!(group.receive_async::<u8>(1, other, u32::MAX).map(|_| ()), Err(Error::InvalidTag));
        assert_eq!(group.probe(other, u32::MAX, Duration::ZERO), Err(Error::InvalidTag));
        let exchange = |source, tag| {
            group.send_receive((&[1u8], other, 3), (&mut [0u8], Source::Rank(source), Some(tag))).unwrap_err()
        };
        assert!(matches!(exchange(peer, 3), Error::InvalidPeer { .. }));
        assert_eq!(exchange(other, u32::MAX), Error::InvalidTag);
        group.barrier().unwrap();
        assert_eq!(group.probe(Source::Any, None, Duration::ZERO), Ok(None), "no message was sent");
    });
}

on_every_transport! {
    messages_of_a_tag_keep_their_order_if_other_tags_are_received_first,
    a_message_overtakes_messages_without_a_receive,
    receives_with_any_source_and_any_tag_keep_the_order_of_each_sender,
    receives_match_messages_in_the_order_in_which_they_were_posted,
    a_probe_describes_a_message_without_receiving_it,
    a_probe_waits_for_a_message,
    a_probe_returns_while_another_operation_runs,
    repeated_probes_find_a_message,
    neighbours_exchange_long_messages_without_a_deadlock,
    segments_longer_than_the_eager_limit_are_delivered,
    messages_of_a_rank_that_has_left_can_still_be_received,
    wait_any_returns_each_message_once,
    a_message_that_is_too_long_fails_both_ranks,
    a_message_of_another_type_fails_both_ranks,
    invalid_ranks_and_tags_are_refused_before_anything_is_sent,
}
