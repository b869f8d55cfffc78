//! Tests of bundles on simulated connections, some with peers that break the protocol.

use std::io::IoSliceMut;

use super::*;
use crate::simulation::bundles::{SimulatedLink, event};
use crate::wire::record::RecordHeader;

#[test]
fn equally_fast_connections_carry_the_same_number_of_bytes() {
    let mut link = SimulatedLink::new(3, 4, 300_000);
    (1..4).for_each(|index| link.add_connection(index));
    link.pipes.iter().for_each(|pipe| pipe[0].borrow_mut().capacity = 300_000);
    let frame = vec![7; 256 << 10];
    for _ in 0..100 {
        assert_eq!(link.ends[0].send(&[IoSlice::new(&frame)]), Ok(frame.len()));
        for pipe in &link.pipes {
            pipe[0].borrow_mut().in_flight.clear();
        }
    }
    for pipe in &link.pipes {
        assert_eq!(pipe[0].borrow().written, 100 * ((64 << 10) + RECORD_HEADER_BYTES));
    }
}

#[test]
fn a_full_connection_is_skipped() {
    let mut link = SimulatedLink::new(3, 2, 300_000);
    link.add_connection(1);
    let capacities = [200_000, 3_000_000];
    for (pipe, capacity) in link.pipes.iter().zip(capacities) {
        pipe[0].borrow_mut().capacity = capacity;
    }
    let frame = vec![7; 2_000_000];
    assert_eq!(link.ends[0].send(&[IoSlice::new(&frame)]), Ok(frame.len()));
    let written = |index: usize| link.pipes[index][0].borrow().written;
    assert!(written(0) <= 200_000 && written(0) > 60_000, "{}", written(0));
    assert!(written(1) > 1_800_000);
}

/// Receives at most `length` bytes.
fn receive(link: &mut SimulatedLink, length: usize) -> TransferResult {
    link.ends[0].receive(&mut [IoSliceMut::new(&mut vec![0; length])])
}

/// Receives what the peer has sent on the first two of `stream_count` connections. Returns the results up to the first empty one.
fn receive_from(stream_count: u8, streams: &[Vec<u8>; 2]) -> Vec<TransferResult> {
    let mut link = SimulatedLink::new(1, stream_count, 1);
    link.add_connection(1);
    for (bytes, pipe) in streams.iter().zip(&link.pipes) {
        pipe[1].borrow_mut().arrived.extend(bytes);
    }
    let mut all = Vec::new();
    while all.last().is_none_or(|moved| matches!(moved, Ok(1..))) {
        all.push(receive(&mut link, 100));
    }
    all
}

/// Returns the bytes of a record; length 0 stands for the last record.
fn make_record(number: u64, length: usize) -> Vec<u8> {
    let header = RecordHeader { number, length: (length > 0).then_some(length as u32) };
    header.encode().into_iter().chain(std::iter::repeat_n(9, length)).collect()
}

#[test]
fn repeated_missing_and_misplaced_records_are_errors() {
    for (streams, expected) in [
        ([[make_record(0, 5), make_record(0, 5)].concat(), Vec::new()], "twice"),
        ([make_record(1, 5), make_record(1, 5)], "twice"),
        ([make_record(0, 5), [make_record(1, 5), make_record(0, 1)].concat()], "twice"),
        ([make_record(1, 5), make_record(2, 5)], "left out"),
        ([Vec::new(), make_record(0, 0)], "its last record is not on its first connection"),
    ] {
        let last = receive_from(2, &streams).pop();
        let is_reported = matches!(&last, Some(Err(TransferError::Corrupt(why))) if why.contains(expected));
        assert!(is_reported, "{expected}: {last:?}");
    }
    let moved = receive_from(3, &[make_record(1, 5), make_record(2, 5)]);
    assert_eq!(moved, [Ok(0)], "the third connection may deliver the record");
    let moved = receive_from(2, &[[make_record(1, 0), vec![1; 300]].concat(), make_record(0, 7)]);
    assert_eq!(moved.last(), Some(&Ok(0)));
    assert_eq!(moved.iter().flatten().sum::<usize>(), 307);
}

#[test]
fn a_corrupt_header_is_reported_once_and_the_following_bytes_are_read() {
    let mut bytes = make_record(0, 5);
    bytes[3] ^= 1;
    let mut link = SimulatedLink::new(1, 2, 1);
    link.pipes[0][1].borrow_mut().arrived.extend(&bytes);
    link.pipes[0][1].borrow_mut().is_finished = true;
    let mut receive = || receive(&mut link, 3);
    assert!(matches!(receive(), Err(TransferError::Corrupt(why)) if why.contains("corrupt")));
    assert_eq!([receive(), receive()], [Ok(3), Ok(2)]);
    assert!(matches!(receive(), Err(TransferError::Lost(_))));
}

/// The last data of a link may be on any connection, even on one that this rank is still opening. The link ends only
/// when all connections have ended and no further connection is being opened.
#[test]
fn a_link_ends_when_all_its_connections_have_ended() {
    let mut link = SimulatedLink::new(1, 3, 1000);
    link.add_connection(1);
    let finish = |link: &mut SimulatedLink, index: usize| {
        link.pipes[index][1].borrow_mut().is_finished = true;
        link.ends[0].handle_event(Event { is_ended: true, ..event(index, true, false) });
    };
    link.ends[0].expected_connections = 1;
    finish(&mut link, 0);
    assert_eq!(receive(&mut link, 100), Ok(0));
    link.pipes[1][1].borrow_mut().arrived.extend(make_record(0, 5));
    finish(&mut link, 1);
    assert_eq!(receive(&mut link, 100), Ok(5));
    assert_eq!(receive(&mut link, 100), Ok(0), "the third connection is still being opened");
    link.ends[0].decrement_expected_connections();
    let end = receive(&mut link, 100);
    assert!(matches!(&end, Err(TransferError::Lost(why)) if why.contains("without saying why")), "{end:?}");
}

/// If one connection breaks, the link is lost only after the data on the other connections have been received.
#[test]
fn a_link_is_lost_if_one_connection_breaks() {
    let mut link = SimulatedLink::new(1, 2, 1000);
    link.add_connection(1);
    link.pipes[0][1].borrow_mut().has_failed = true;
    link.pipes[1][1].borrow_mut().arrived.extend(make_record(0, 5));
    assert_eq!(receive(&mut link, 100), Ok(5));
    assert!(matches!(receive(&mut link, 100), Err(TransferError::Lost(why)) if why.contains("reset")));
}

#[test]
fn only_a_missing_connection_can_be_added() {
    let mut link = SimulatedLink::new(1, 3, 1000);
    link.add_connection(1);
    let missing =
        |link: &SimulatedLink| [0, 1, 2, 3, 255].map(|index| link.ends[0].is_connection_missing(index));
    assert_eq!(missing(&link), [false, false, true, false, false]);
    // A connection that is added after the last byte of the link was sent is closed for sending at once.
    link.ends[0].close_sending();
    link.add_connection(2);
    assert!(link.pipes.iter().all(|pipe| pipe[0].borrow().is_finished));
}
