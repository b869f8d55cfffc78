//! Tests of bundles, without sockets. Simulated connections deliver data in random orders, and some peers break the
//! protocol.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::*;
use crate::transport::TransferResult;
use crate::wire::record::RecordHeader;

/// One direction of a connection.
#[derive(Default)]
struct Pipe {
    /// The bytes that have been sent and have not arrived.
    in_flight: VecDeque<u8>,
    /// The bytes that have arrived and have not been read.
    arrived: VecDeque<u8>,
    /// The size of the send buffer in bytes.
    capacity: usize,
    /// Whether the sender has closed this direction.
    is_finished: bool,
    /// Whether the connection has failed. After the arrived bytes, a read returns an error.
    has_failed: bool,
    /// Whether the sender waits for an event that reports free space.
    waits_for_space: bool,
    /// The number of bytes that the sender has written.
    written: usize,
}

impl Pipe {
    fn send_space(&self) -> SendSpace {
        let queued = self.in_flight.len() + self.arrived.len();
        SendSpace { queued, free: self.capacity.saturating_sub(queued) }
    }

    fn has_space(&self) -> bool {
        let SendSpace { queued, free } = self.send_space();
        free > 0 && free >= queued / 2
    }
}

/// One end of a connection.
struct PipeEnd {
    outgoing: Rc<RefCell<Pipe>>,
    incoming: Rc<RefCell<Pipe>>,
}

impl Connection for PipeEnd {
    fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut pipe = self.incoming.borrow_mut();
        if pipe.arrived.is_empty() {
            return match (pipe.has_failed, pipe.is_finished && pipe.in_flight.is_empty()) {
                (true, _) => Err(io::ErrorKind::ConnectionReset.into()),
                (false, true) => Ok(0),
                (false, false) => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let mut count = 0;
        for part in parts {
            for byte in part.iter_mut() {
                let Some(arrived) = pipe.arrived.pop_front() else { return Ok(count) };
                *byte = arrived;
                count += 1;
            }
        }
        Ok(count)
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut pipe = self.outgoing.borrow_mut();
        let free = pipe.send_space().free;
        let mut count = 0;
        for part in parts {
            let length = part.len().min(free - count);
            pipe.in_flight.extend(&part[..length]);
            count += length;
        }
        pipe.written += count;
        if count < parts.iter().map(|part| part.len()).sum() {
            pipe.waits_for_space = true;
            if count == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        Ok(count)
    }

    fn send_space(&self) -> io::Result<SendSpace> {
        Ok(self.outgoing.borrow().send_space())
    }

    fn is_writable(&self) -> io::Result<bool> {
        let mut pipe = self.outgoing.borrow_mut();
        pipe.waits_for_space |= !pipe.has_space();
        Ok(pipe.has_space())
    }

    fn close_sending(&self) -> io::Result<()> {
        self.outgoing.borrow_mut().is_finished = true;
        Ok(())
    }
}

/// A simulated link: its two ends and, for each connection, one pipe in each direction. Pipe 0 leads from end 0 to
/// end 1, and pipe 1 leads back.
struct SimulatedLink {
    random: StdRng,
    ends: [Bundle<PipeEnd>; 2],
    pipes: Vec<[Rc<RefCell<Pipe>>; 2]>,
}

fn event(index: usize, is_readable: bool, is_writable: bool) -> Event {
    Event { token: Token(index), is_readable, is_writable, is_ended: false }
}

impl SimulatedLink {
    fn new(seed: u64, stream_count: u8, capacity_max: usize) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut pipe = || {
            let capacity = random.random_range(1..=capacity_max);
            Rc::new(RefCell::new(Pipe { capacity, ..Pipe::default() }))
        };
        let pipes: Vec<_> = (0..stream_count).map(|_| [pipe(), pipe()]).collect();
        let ends = [0, 1].map(|side| Bundle::new(pipe_end(&pipes[0], side), Token(0), stream_count));
        Self { random, ends, pipes }
    }

    /// Adds a further connection to both ends.
    fn add_connection(&mut self, index: usize) {
        for side in 0..2 {
            let end = pipe_end(&self.pipes[index], side);
            self.ends[side].add_connection(index as u8, end, Token(index));
        }
    }

    /// Delivers a random number of bytes in one direction of one connection, and reports events to both ends, as the
    /// kernel would.
    fn deliver_some_bytes(&mut self) {
        let index = self.random.random_range(0..self.pipes.len());
        let to = self.random.random_range(0..2);
        let mut pipe = self.pipes[index][1 - to].borrow_mut();
        let count = self.random.random_range(0..=pipe.in_flight.len());
        let bytes: Vec<u8> = pipe.in_flight.drain(..count).collect();
        pipe.arrived.extend(bytes);
        let has_ended = pipe.is_finished && pipe.in_flight.is_empty();
        let has_space = pipe.waits_for_space && pipe.has_space();
        pipe.waits_for_space &= !has_space;
        drop(pipe);
        self.ends[to]
            .handle_event(Event { is_ended: has_ended, ..event(index, count > 0 || has_ended, false) });
        self.ends[1 - to].handle_event(event(index, false, has_space));
    }
}

fn pipe_end(pipes: &[Rc<RefCell<Pipe>>; 2], side: usize) -> PipeEnd {
    PipeEnd { outgoing: Rc::clone(&pipes[side]), incoming: Rc::clone(&pipes[1 - side]) }
}

/// The stream of bytes that one side sends to the other side.
struct Flow {
    /// The index of the sending end.
    from: usize,
    total: usize,
    sent: usize,
    received: usize,
}

impl Flow {
    /// Returns bytes of the stream.
    fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        range.map(|position| ((position + self.from).wrapping_mul(0x9E37_79B9) >> 13) as u8).collect()
    }

    /// Sends and receives once. Most calls send less than 200 bytes, and the others less than `length_max`.
    fn step(&mut self, link: &mut SimulatedLink, length_max: usize) {
        if self.sent < self.total {
            let long = link.random.random_bool(0.4);
            let length = link.random.random_range(1..if long { length_max } else { 200 });
            let bytes = self.bytes(self.sent..self.total.min(self.sent + length));
            let (header, payload) = bytes.split_at(bytes.len().min(64));
            match link.ends[self.from].send(&[IoSlice::new(header), IoSlice::new(payload)]) {
                TransferResult::Bytes(count) => {
                    self.sent += count;
                    if self.sent == self.total {
                        link.ends[self.from].close_sending();
                    }
                }
                result => assert_eq!(result, TransferResult::Blocked),
            }
        }
        let long = link.random.random_bool(0.5);
        let lengths = [link.random.random_range(1..if long { 100_000 } else { 100 }), 64];
        let mut buffers = lengths.map(|length| vec![0; length]);
        let mut parts = buffers.each_mut().map(|buffer| IoSliceMut::new(buffer));
        let count = link.random.random_range(1..=2);
        match link.ends[1 - self.from].receive(&mut parts[..count]) {
            TransferResult::Bytes(count) => {
                let expected = self.bytes(self.received..self.received + count);
                assert!(
                    buffers.concat().starts_with(&expected),
                    "the received bytes differ from the sent bytes"
                );
                self.received += count;
            }
            TransferResult::Blocked => {}
            TransferResult::Lost(_) if self.received == self.total => {}
            other => panic!("after {} of {} bytes: {other:?}", self.received, self.total),
        }
    }
}

/// Sends bytes in both directions until all have arrived, and checks the received bytes. Connections are added at random times.
/// If `becomes_single` is set, each side begins at a random time to send on a single connection only.
fn exchange_bytes(seed: u64, stream_count: u8, capacity_max: usize, becomes_single: bool) {
    let mut link = SimulatedLink::new(seed, stream_count, capacity_max);
    // A small capacity moves only a few bytes in each step, so long streams would take seconds.
    let length_max = (100 * capacity_max).clamp(1000, 200_000);
    let mut flows = [0, 1].map(|from| {
        let total = link.random.random_range(1..3 * length_max);
        Flow { from, total, sent: 0, received: 0 }
    });
    let mut missing: Vec<usize> = (1..stream_count.into()).collect();
    let mut sides_to_change = if becomes_single { vec![0, 1] } else { Vec::new() };
    let mut idle = 0;
    let moved = |flows: &[Flow; 2]| flows.iter().map(|flow| flow.sent + flow.received).sum::<usize>();
    while flows.iter().any(|flow| flow.received < flow.total) {
        let before = moved(&flows);
        match link.random.random_range(0..20) {
            0 if !missing.is_empty() => {
                let which = link.random.random_range(0..missing.len());
                let index = missing.swap_remove(which);
                link.add_connection(index);
            }
            1 if !sides_to_change.is_empty() => {
                if let Some(side) = sides_to_change.pop() {
                    link.ends[side].use_single_connection();
                }
            }
            2..=9 => link.deliver_some_bytes(),
            _ => {
                let which = link.random.random_range(0..2);
                flows[which].step(&mut link, length_max);
            }
        }
        idle = if moved(&flows) == before { idle + 1 } else { 0 };
        assert!(idle < 20_000, "seed {seed}: no data are moved, although all events have been reported");
    }
}

proptest! {
    // The number of cases is low, because each case takes tens of milliseconds.
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("TEST_FULL").is_some() { 100 } else { 15 }))]

    #[test]
    fn sent_bytes_arrive_in_order(
        seed: u64,
        stream_count in 1..=8u8,
        capacity in prop_oneof![1..2000usize, 1000..300_000usize],
    ) {
        exchange_bytes(seed, stream_count, capacity, false);
    }

    #[test]
    fn a_link_can_change_to_one_connection(seed: u64, stream_count in 2..=8u8, capacity in 100..300_000usize) {
        exchange_bytes(seed, stream_count, capacity, true);
    }
}

#[test]
fn equally_fast_connections_carry_the_same_number_of_bytes() {
    let mut link = SimulatedLink::new(3, 4, 300_000);
    (1..4).for_each(|index| link.add_connection(index));
    link.pipes.iter().for_each(|pipe| pipe[0].borrow_mut().capacity = 300_000);
    let frame = vec![7; 256 << 10];
    for _ in 0..100 {
        assert_eq!(link.ends[0].send(&[IoSlice::new(&frame)]), TransferResult::Bytes(frame.len()));
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
    let TransferResult::Bytes(moved) = link.ends[0].send(&[IoSlice::new(&frame)]) else {
        panic!("nothing was sent")
    };
    assert_eq!(moved, frame.len());
    let written = |index: usize| link.pipes[index][0].borrow().written;
    assert!(written(0) <= 200_000 && written(0) > 60_000, "{}", written(0));
    assert!(written(1) > 1_800_000);
}

/// Receives on a link of `stream_count` connections. An element of `streams` is the number of a connection and the
/// bytes that the peer has sent on it. Returns the results, up to the first one that is not
/// [`TransferResult::Bytes`].
fn receive_from(stream_count: u8, streams: &[(u8, Vec<u8>)]) -> Vec<TransferResult> {
    let mut link = SimulatedLink::new(1, stream_count, 1);
    for (index, bytes) in streams {
        link.pipes[usize::from(*index)][1].borrow_mut().arrived.extend(bytes);
        if *index > 0 {
            link.add_connection((*index).into());
        }
    }
    let mut all = Vec::new();
    loop {
        let mut buffer = [0; 100];
        let moved = link.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)]);
        let is_last = !matches!(moved, TransferResult::Bytes(_));
        all.push(moved);
        if is_last {
            return all;
        }
    }
}

/// Returns the bytes of a record; length 0 stands for the last record.
fn make_record(number: u64, length: usize) -> Vec<u8> {
    let header = RecordHeader { number, length: (length > 0).then_some(length as u32) };
    header.encode().into_iter().chain(std::iter::repeat_n(9, length)).collect()
}

#[test]
fn a_repeated_record_number_is_an_error() {
    for streams in [
        [(0, [make_record(0, 5), make_record(0, 5)].concat()), (1, Vec::new())],
        [(0, make_record(1, 5)), (1, make_record(1, 5))],
        [(0, make_record(0, 5)), (1, [make_record(1, 5), make_record(0, 1)].concat())],
    ] {
        let last = receive_from(2, &streams).pop();
        let is_reported = matches!(&last, Some(TransferResult::Corrupt(why)) if why.contains("twice"));
        assert!(is_reported, "{last:?}");
    }
}

#[test]
fn a_missing_record_is_an_error_once_no_connection_can_deliver_it() {
    let streams = [(0, make_record(1, 5)), (1, make_record(2, 5))];
    let last = receive_from(2, &streams).pop();
    assert!(matches!(&last, Some(TransferResult::Corrupt(why)) if why.contains("left out")), "{last:?}");
    assert_eq!(
        receive_from(3, &streams),
        [TransferResult::Blocked],
        "the third connection may deliver the record"
    );
}

#[test]
fn a_corrupt_header_is_reported_once_and_the_following_bytes_are_read() {
    let mut bytes = make_record(0, 5);
    bytes[3] ^= 1;
    let mut link = SimulatedLink::new(1, 2, 1);
    link.pipes[0][1].borrow_mut().arrived.extend(&bytes);
    link.pipes[0][1].borrow_mut().is_finished = true;
    let mut buffer = [0; 3];
    let mut receive = || link.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)]);
    assert!(matches!(receive(), TransferResult::Corrupt(why) if why.contains("corrupt")));
    assert_eq!([receive(), receive()], [TransferResult::Bytes(3), TransferResult::Bytes(2)]);
    assert!(matches!(receive(), TransferResult::Lost(_)));
}

#[test]
fn the_last_record_must_be_on_the_first_connection() {
    let last = receive_from(2, &[(0, Vec::new()), (1, make_record(0, 0))]).pop();
    assert!(
        matches!(&last, Some(TransferResult::Corrupt(why)) if why.contains("first connection")),
        "{last:?}"
    );
    let streams = [(0, [make_record(1, 0), vec![1; 300]].concat()), (1, make_record(0, 7))];
    let moved = receive_from(2, &streams);
    assert_eq!(moved.last(), Some(&TransferResult::Blocked));
    let bytes = |moved: &TransferResult| if let TransferResult::Bytes(count) = moved { *count } else { 0 };
    assert_eq!(moved.iter().map(bytes).sum::<usize>(), 307);
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
    let receive = |link: &mut SimulatedLink| {
        let mut buffer = [0; 100];
        link.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)])
    };
    link.ends[0].expect_connections(1);
    finish(&mut link, 0);
    assert_eq!(receive(&mut link), TransferResult::Blocked);
    link.pipes[1][1].borrow_mut().arrived.extend(make_record(0, 5));
    finish(&mut link, 1);
    assert_eq!(receive(&mut link), TransferResult::Bytes(5));
    assert_eq!(receive(&mut link), TransferResult::Blocked, "the third connection is still being opened");
    link.ends[0].decrement_expected_connections();
    assert!(matches!(receive(&mut link), TransferResult::Lost(why) if why.contains("without saying why")));
}

/// If one connection breaks, the link is lost only after the data on the other connections have been received.
#[test]
fn a_link_is_lost_if_one_connection_breaks() {
    let mut link = SimulatedLink::new(1, 2, 1000);
    link.add_connection(1);
    link.pipes[0][1].borrow_mut().has_failed = true;
    link.pipes[1][1].borrow_mut().arrived.extend(make_record(0, 5));
    let mut buffer = [0; 100];
    let mut receive = || link.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)]);
    assert_eq!(receive(), TransferResult::Bytes(5));
    assert!(matches!(receive(), TransferResult::Lost(why) if why.contains("reset")));
}

#[test]
fn only_a_missing_connection_can_be_added() {
    let mut link = SimulatedLink::new(1, 3, 1000);
    link.add_connection(1);
    let missing =
        |link: &SimulatedLink| [0, 1, 2, 3, 255].map(|index| link.ends[0].is_connection_missing(index));
    assert_eq!(missing(&link), [false, false, true, false, false]);
    // If a connection is added after the last byte of the link was sent, the sending direction of this connection is
    // closed at once.
    link.ends[0].close_sending();
    link.add_connection(2);
    assert!(link.pipes.iter().all(|pipe| pipe[0].borrow().is_finished));
}
