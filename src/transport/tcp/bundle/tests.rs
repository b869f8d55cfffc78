//! Bundles of connections without sockets: every order in which connections may deliver data, and peers that break the
//! protocol.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::*;
use crate::transport::Moved;
use crate::wire::record::{RECORD_HEADER_BYTES, Record};

/// One direction of a connection.
#[derive(Default)]
struct Line {
    /// Bytes in flight, and bytes that have arrived.
    flying: VecDeque<u8>,
    arrived: VecDeque<u8>,
    capacity: usize,
    is_finished: bool,
    has_failed: bool,
    /// The sender waits for an event when there is space again.
    wants_room: bool,
    written: usize,
}

impl Line {
    fn room(&self) -> SendSpace {
        let queued = self.flying.len() + self.arrived.len();
        SendSpace { queued, free: self.capacity.saturating_sub(queued) }
    }

    fn has_room(&self) -> bool {
        let SendSpace { queued, free } = self.room();
        free > 0 && free >= queued / 2
    }
}

/// An end of a connection.
struct End {
    out: Rc<RefCell<Line>>,
    into: Rc<RefCell<Line>>,
}

impl Connection for End {
    fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut line = self.into.borrow_mut();
        if line.arrived.is_empty() {
            return match (line.has_failed, line.is_finished && line.flying.is_empty()) {
                (true, _) => Err(io::ErrorKind::ConnectionReset.into()),
                (false, true) => Ok(0),
                (false, false) => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let mut count = 0;
        for part in parts {
            for byte in part.iter_mut() {
                let Some(arrived) = line.arrived.pop_front() else { return Ok(count) };
                *byte = arrived;
                count += 1;
            }
        }
        Ok(count)
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut line = self.out.borrow_mut();
        let free = line.room().free;
        let mut count = 0;
        for part in parts {
            let taken = part.len().min(free - count);
            line.flying.extend(&part[..taken]);
            count += taken;
        }
        line.written += count;
        if count < parts.iter().map(|part| part.len()).sum() {
            line.wants_room = true;
            if count == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        Ok(count)
    }

    fn room(&self) -> io::Result<SendSpace> {
        Ok(self.out.borrow().room())
    }

    fn is_writable(&self) -> io::Result<bool> {
        let mut line = self.out.borrow_mut();
        line.wants_room |= !line.has_room();
        Ok(line.has_room())
    }

    fn finish(&self) -> io::Result<()> {
        self.out.borrow_mut().is_finished = true;
        Ok(())
    }
}

/// Two ends of a link, and the lines between them by connection: to the second end, and to the first.
struct World {
    random: StdRng,
    ends: [Bundle<End>; 2],
    lines: Vec<[Rc<RefCell<Line>>; 2]>,
}

fn event(index: usize, is_readable: bool, is_writable: bool) -> Event {
    Event { token: Token(index), is_readable, is_writable, is_ended: false }
}

impl World {
    fn new(seed: u64, of: u8, capacity_max: usize) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut line = || {
            let capacity = random.random_range(1..=capacity_max);
            Rc::new(RefCell::new(Line { capacity, ..Line::default() }))
        };
        let lines: Vec<_> = (0..of).map(|_| [line(), line()]).collect();
        let ends = [0, 1].map(|side| Bundle::new(end(&lines[0], side), Token(0), of));
        Self { random, ends, lines }
    }

    /// Both ends get a further connection.
    fn add(&mut self, index: usize) {
        for side in 0..2 {
            let end = end(&self.lines[index], side);
            self.ends[side].add(index as u8, end, Token(index));
        }
    }

    /// Delivers bytes in one direction of one connection, and reports one event, as the kernel would.
    fn carry(&mut self) {
        let index = self.random.random_range(0..self.lines.len());
        let to = self.random.random_range(0..2);
        let mut line = self.lines[index][1 - to].borrow_mut();
        let count = self.random.random_range(0..=line.flying.len());
        let bytes: Vec<u8> = line.flying.drain(..count).collect();
        line.arrived.extend(bytes);
        let has_ended = line.is_finished && line.flying.is_empty();
        let has_room = line.wants_room && line.has_room();
        line.wants_room &= !has_room;
        drop(line);
        self.ends[to].note(Event { is_ended: has_ended, ..event(index, count > 0 || has_ended, false) });
        self.ends[1 - to].note(event(index, false, has_room));
    }
}

fn end(lines: &[Rc<RefCell<Line>>; 2], side: usize) -> End {
    End { out: Rc::clone(&lines[side]), into: Rc::clone(&lines[1 - side]) }
}

/// The bytes that one side sends, and those that the other side has received.
struct RecordFlow {
    from: usize,
    frames: VecDeque<Vec<u8>>,
    sent_of_first: usize,
    sent: Vec<u8>,
    got: Vec<u8>,
    expected: usize,
}

impl RecordFlow {
    fn new(from: usize, random: &mut StdRng) -> Self {
        let frames: VecDeque<Vec<u8>> = (0..random.random_range(1..8))
            .map(|_| {
                let long = random.random_bool(0.4);
                let length = random.random_range(1..if long { 200_000 } else { 200 });
                (0..length).map(|_| random.random()).collect()
            })
            .collect();
        let expected = frames.iter().map(Vec::len).sum();
        Self { from, frames, sent_of_first: 0, sent: Vec::new(), got: Vec::new(), expected }
    }

    fn step(&mut self, world: &mut World) {
        if let Some(frame) = self.frames.front() {
            let rest = &frame[self.sent_of_first..];
            let header = rest.len().min(64);
            let parts = [IoSlice::new(&rest[..header]), IoSlice::new(&rest[header..])];
            match world.ends[self.from].send(&parts) {
                Moved::Bytes(count) => {
                    self.sent.extend(&rest[..count]);
                    self.sent_of_first += count;
                    if self.sent_of_first == frame.len() {
                        self.frames.pop_front();
                        self.sent_of_first = 0;
                        if self.frames.is_empty() {
                            world.ends[self.from].finish();
                        }
                    }
                }
                Moved::Blocked => {}
                other => panic!("{other:?}"),
            }
        }
        let long = world.random.random_bool(0.5);
        let lengths = [world.random.random_range(1..if long { 100_000 } else { 100 }), 64];
        let mut buffers = lengths.map(|length| vec![0; length]);
        let mut parts = buffers.each_mut().map(|buffer| IoSliceMut::new(buffer));
        let count = world.random.random_range(1..=2);
        match world.ends[1 - self.from].receive(&mut parts[..count]) {
            Moved::Bytes(count) => self.got.extend(buffers.concat().into_iter().take(count)),
            Moved::Blocked => {}
            Moved::Lost(_) if self.is_done() => {}
            other => panic!("after {} of {} bytes: {other:?}", self.got.len(), self.expected),
        }
    }

    fn is_done(&self) -> bool {
        self.got.len() == self.expected
    }
}

/// Sends frames in both directions. Connections are added at any time, and a side may change to one connection at any time.
fn converse(seed: u64, of: u8, capacity_max: usize, becomes_one: bool) -> World {
    let mut world = World::new(seed, of, capacity_max);
    let mut flows = [0, 1].map(|from| RecordFlow::new(from, &mut world.random));
    let mut missing: Vec<usize> = (1..of.into()).collect();
    let mut to_decide = if becomes_one { vec![0, 1] } else { Vec::new() };
    let mut idle = 0;
    while !flows.iter().all(RecordFlow::is_done) {
        let before: usize = flows.iter().map(|flow| flow.sent.len() + flow.got.len()).sum();
        match world.random.random_range(0..20) {
            0 if !missing.is_empty() => {
                let which = world.random.random_range(0..missing.len());
                let index = missing.swap_remove(which);
                world.add(index);
            }
            1 if !to_decide.is_empty() => {
                if let Some(side) = to_decide.pop() {
                    world.ends[side].use_single_connection();
                }
            }
            2..=9 => world.carry(),
            _ => {
                let which = world.random.random_range(0..2);
                flows[which].step(&mut world);
            }
        }
        let after: usize = flows.iter().map(|flow| flow.sent.len() + flow.got.len()).sum();
        idle = if after == before { idle + 1 } else { 0 };
        assert!(idle < 20_000, "seed {seed}: nothing moves, though the kernel has told of everything");
    }
    for flow in &flows {
        assert!(flow.got == flow.sent, "seed {seed}: what came is not what was sent");
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn what_is_sent_comes_in_order(seed: u64, of in 1..=8u8, capacity in prop_oneof![1..2000usize, 1000..300_000usize]) {
        converse(seed, of, capacity, false);
    }

    #[test]
    fn a_link_may_go_on_with_one_connection(seed: u64, of in 2..=8u8, capacity in 100..300_000usize) {
        converse(seed, of, capacity, true);
    }
}

#[test]
fn all_connections_carry_about_as_much_where_all_are_as_fast() {
    let mut world = World::new(3, 4, 300_000);
    (1..4).for_each(|index| world.add(index));
    world.lines.iter().for_each(|line| line[0].borrow_mut().capacity = 300_000);
    let frame = vec![7; 256 << 10];
    for _ in 0..100 {
        assert_eq!(world.ends[0].send(&[IoSlice::new(&frame)]), Moved::Bytes(frame.len()));
        for line in &world.lines {
            line[0].borrow_mut().flying.clear();
        }
    }
    for line in &world.lines {
        assert_eq!(line[0].borrow().written, 100 * ((64 << 10) + RECORD_HEADER_BYTES));
    }
}

#[test]
fn a_full_connection_is_passed_over() {
    let mut world = World::new(3, 2, 300_000);
    world.add(1);
    let capacities = [200_000, 3_000_000];
    for (line, capacity) in world.lines.iter().zip(capacities) {
        line[0].borrow_mut().capacity = capacity;
    }
    let frame = vec![7; 2_000_000];
    let Moved::Bytes(moved) = world.ends[0].send(&[IoSlice::new(&frame)]) else {
        panic!("nothing was taken")
    };
    assert_eq!(moved, frame.len());
    let written = |index: usize| world.lines[index][0].borrow().written;
    assert!(written(0) <= 200_000 && written(0) > 60_000, "{}", written(0));
    assert!(written(1) > 1_800_000);
}

/// A link whose peer writes arbitrary bytes. Returns the result.
fn receive_from(of: u8, streams: &[(u8, Vec<u8>)]) -> Vec<Moved> {
    let mut world = World::new(1, of, 1);
    for (index, bytes) in streams {
        world.lines[usize::from(*index)][1].borrow_mut().arrived.extend(bytes);
        if *index > 0 {
            world.add((*index).into());
        }
    }
    let mut all = Vec::new();
    loop {
        let mut buffer = [0; 100];
        let moved = world.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)]);
        let is_over = !matches!(moved, Moved::Bytes(_));
        all.push(moved);
        if is_over {
            return all;
        }
    }
}

fn record(number: u64, length: usize) -> Vec<u8> {
    let header = Record { number, length: (length > 0).then_some(length as u32) };
    header.encode().into_iter().chain(std::iter::repeat_n(9, length)).collect()
}

#[test]
fn a_record_that_comes_twice_is_told_of() {
    for streams in [
        [(0, [record(0, 5), record(0, 5)].concat()), (1, Vec::new())],
        [(0, record(1, 5)), (1, record(1, 5))],
        [(0, record(0, 5)), (1, [record(1, 5), record(0, 1)].concat())],
    ] {
        let last = receive_from(2, &streams).pop();
        let is_told = matches!(&last, Some(Moved::Corrupt(why)) if why.contains("twice"));
        assert!(is_told, "{last:?}");
    }
}

#[test]
fn a_record_that_is_left_out_is_told_of_once_no_connection_can_bring_it() {
    let streams = [(0, record(1, 5)), (1, record(2, 5))];
    let last = receive_from(2, &streams).pop();
    assert!(matches!(&last, Some(Moved::Corrupt(why)) if why.contains("left out")), "{last:?}");
    assert_eq!(receive_from(3, &streams), [Moved::Blocked], "the third connection may bring it");
}

#[test]
fn bytes_that_are_no_record_are_told_of_once_and_then_read_to_the_end() {
    let mut bytes = record(0, 5);
    bytes[3] ^= 1;
    let mut world = World::new(1, 2, 1);
    world.lines[0][1].borrow_mut().arrived.extend(&bytes);
    world.lines[0][1].borrow_mut().is_finished = true;
    let mut buffer = [0; 3];
    let mut receive = || world.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)]);
    assert!(matches!(receive(), Moved::Corrupt(why) if why.contains("corrupt")));
    assert_eq!([receive(), receive()], [Moved::Bytes(3), Moved::Bytes(2)]);
    assert!(matches!(receive(), Moved::Lost(_)));
}

#[test]
fn the_last_record_is_on_the_first_connection() {
    let last = receive_from(2, &[(0, Vec::new()), (1, record(0, 0))]).pop();
    assert!(matches!(&last, Some(Moved::Corrupt(why)) if why.contains("first connection")), "{last:?}");
    let streams = [(0, [record(1, 0), vec![1; 300]].concat()), (1, record(0, 7))];
    let moved = receive_from(2, &streams);
    assert_eq!(moved.last(), Some(&Moved::Blocked));
    let bytes = |moved: &Moved| if let Moved::Bytes(count) = moved { *count } else { 0 };
    assert_eq!(moved.iter().map(bytes).sum::<usize>(), 307);
}

/// The last data may be on any connection: the end of one connection is not the end of the link, and neither is the end of all
/// while others are being opened.
#[test]
fn a_link_ends_when_all_its_connections_have() {
    let mut world = World::new(1, 3, 1000);
    world.add(1);
    let finish = |world: &mut World, index: usize| {
        world.lines[index][1].borrow_mut().is_finished = true;
        world.ends[0].note(Event { is_ended: true, ..event(index, true, false) });
    };
    let receive = |world: &mut World| {
        let mut buffer = [0; 100];
        world.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)])
    };
    world.ends[0].expect_connections(1);
    finish(&mut world, 0);
    assert_eq!(receive(&mut world), Moved::Blocked);
    world.lines[1][1].borrow_mut().arrived.extend(record(0, 5));
    finish(&mut world, 1);
    assert_eq!(receive(&mut world), Moved::Bytes(5));
    assert_eq!(receive(&mut world), Moved::Blocked, "the third connection is still being opened");
    world.ends[0].expect_one_less();
    assert!(matches!(receive(&mut world), Moved::Lost(why) if why.contains("without saying why")));
}

/// Data on the other connections are read first.
#[test]
fn a_connection_that_breaks_takes_the_link_with_it() {
    let mut world = World::new(1, 2, 1000);
    world.add(1);
    world.lines[0][1].borrow_mut().has_failed = true;
    world.lines[1][1].borrow_mut().arrived.extend(record(0, 5));
    let mut buffer = [0; 100];
    let mut receive = || world.ends[0].receive(&mut [IoSliceMut::new(&mut buffer)]);
    assert_eq!(receive(), Moved::Bytes(5));
    assert!(matches!(receive(), Moved::Lost(why) if why.contains("reset")));
}

#[test]
fn a_connection_has_one_place() {
    let mut world = World::new(1, 3, 1000);
    world.add(1);
    let has_place = |world: &World| [0, 1, 2, 3, 255].map(|index| world.ends[0].is_missing(index));
    assert_eq!(has_place(&world), [false, false, true, false, false]);
    // The sending side of a connection that is added after the last byte is closed at once.
    world.ends[0].finish();
    world.add(2);
    assert!(world.lines.iter().all(|line| line[0].borrow().is_finished));
}
