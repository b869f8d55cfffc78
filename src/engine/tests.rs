//! Two engines that hear each other without a network between them.

use std::collections::{BTreeMap, VecDeque};

use super::*;
use crate::schedule::Schedule;
use crate::types::{Algorithm, DType};
use crate::wire::Cause;

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);
const MINUTE: Duration = Duration::from_mins(1);

/// An engine, and what its driver would store for it.
struct Side {
    engine: Engine,
    stored: BTreeMap<OperationKey, VecDeque<FrameHeader>>,
}

struct Pair {
    sides: [Side; 2],
}

impl Pair {
    fn new(segment_bytes: usize, announced_max: usize) -> Self {
        let side = |rank| {
            let world = WorldSize::new(2).unwrap();
            let hosts = vec!["a".into(), "b".into()];
            let settings = Settings { rank, world, segment_bytes, checked_links: Vec::new(), hosts };
            let mut engine = Engine::new(settings);
            engine.announced_max = announced_max;
            Side { engine, stored: BTreeMap::new() }
        };
        Self { sides: [side(R0), side(R1)] }
    }

    /// One frame from a rank to the other; whether there was one.
    fn pass(&mut self, from: usize) -> bool {
        let (own, other) = (Rank::new(from as u32), Rank::new(1 - from as u32));
        let Some(transmit) = self.sides[from].engine.poll_transmit(other) else { return false };
        let (header, payload) = match transmit {
            Transmit::Segment { header, .. } => {
                self.sides[from].engine.transmitted(other);
                (header, Bytes::new())
            }
            Transmit::Control { header, payload } => (header, payload),
        };
        self.sides[1 - from].hear(own, &header, &payload);
        true
    }

    fn settle(&mut self) {
        while self.pass(0) | self.pass(1) {}
    }

    /// Begins to send so many messages of `count` bytes from rank 0, each with its number as its tag.
    fn flood(&mut self, messages: u32, count: u64) {
        for tag in 0..messages {
            self.sides[0].engine.send(Duration::ZERO, message(count, tag), R1).unwrap();
        }
    }

    fn receive(&mut self, tag: u32, count: u64) -> OpId {
        let pattern = Pattern { group: 0, source: Some(R0), tag: Some(tag) };
        let side = &mut self.sides[1];
        let id = side.engine.receive(Duration::ZERO, message(count, tag), pattern).unwrap();
        if let Some(key) = side.engine.key_of(id) {
            side.replay(R0, key);
        }
        id
    }

    fn begin(&mut self, side: usize, begin: Begin, schedule: Schedule) {
        let Side { engine, .. } = &mut self.sides[side];
        // It may know of the failure already.
        let key = engine.begin(Duration::ZERO, begin, schedule).ok().and_then(|id| engine.key_of(id));
        if let Some(key) = key {
            self.sides[side].replay(Rank::new(1 - side as u32), key);
        }
    }

    fn causes(&self) -> [Option<&Cause>; 2] {
        [0, 1].map(|side: usize| self.sides[side].engine.failure().map(|failure| &failure.cause))
    }

    fn completed(&mut self, side: usize) -> usize {
        std::iter::from_fn(|| self.sides[side].engine.take_completed()).count()
    }
}

impl Side {
    fn hear(&mut self, from: Rank, header: &FrameHeader, payload: &[u8]) {
        match self.engine.frame(from, header) {
            FrameVerdict::Apply { operation, .. } => {
                let key = self.engine.key_of(operation);
                self.engine.applied(operation, from, header, false);
                if let Some(key) = key {
                    self.replay(from, key);
                }
            }
            FrameVerdict::Store(key) => {
                self.stored.entry(key).or_default().push_back(*header);
                self.replay(from, key);
            }
            FrameVerdict::Control => self.engine.control(from, header, payload),
            FrameVerdict::Taken | FrameVerdict::Discard | FrameVerdict::Refuse => {}
        }
    }

    fn replay(&mut self, from: Rank, key: OperationKey) {
        while let Some(header) = self.stored.get(&key).and_then(|frames| frames.front().copied()) {
            let FrameVerdict::Apply { operation, .. } = self.engine.stored_frame(from, &header) else {
                return;
            };
            let frames = self.stored.get_mut(&key).unwrap();
            frames.pop_front();
            if frames.is_empty() {
                self.stored.remove(&key);
            }
            self.engine.applied(operation, from, &header, true);
        }
    }
}

fn asks(operation: Operation, algorithm: Algorithm, count: u64, layout: u32) -> Contract {
    Contract { operation, dtype: DType::U8, reduction: None, algorithm, root: R0, count, layout }
}

#[track_caller]
fn begin(contract: Contract) -> Begin {
    Begin {
        group: 0,
        contract,
        timeout: MINUTE,
        spent: Duration::ZERO,
        site: std::panic::Location::caller().into(),
        mode: SendMode::Standard,
    }
}

#[track_caller]
fn message(count: u64, tag: u32) -> Begin {
    begin(asks(Operation::Message, Algorithm::Direct, count, tag))
}

/// Messages in a test of very many. Miri takes a thousand times as long for each.
const MANY: u32 = if cfg!(miri) { 300 } else { 12_000 };

fn barrier(rank: Rank) -> Schedule {
    crate::schedule::barrier(WorldSize::new(2).unwrap(), rank)
}

/// The sender forgot what it had announced when credit came, the receiver did not, and so took its limit for passed.
#[test]
fn very_many_messages_come_in_whatever_order_they_are_received() {
    let (in_order, reversed): (Vec<u32>, Vec<u32>) = ((0..MANY).collect(), (0..MANY).rev().collect());
    let last_first = (0..MANY).map(|index| (index + MANY - 1) % MANY).collect();
    for order in [in_order, reversed, last_first] {
        let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
        pair.flood(MANY, 8);
        pair.settle();
        for (index, &tag) in order.iter().enumerate() {
            pair.receive(tag, 8);
            if index % 1000 == 0 || index + 10 > MANY as usize {
                pair.settle();
            }
        }
        pair.settle();
        assert_eq!(pair.causes(), [None, None]);
        assert_eq!([pair.completed(0), pair.completed(1)], [MANY as usize; 2]);
    }
}

/// What met the limit was not announced any more, and came only if credit did; what came after it overtook it.
#[test]
fn messages_beyond_the_limit_wait_and_keep_their_order() {
    for count in [8, 1000, 300_000] {
        let mut pair = Pair::new(256 << 10, 10);
        // They use up the credit and the limit, and short ones, even empty ones, stand behind a long one.
        for tag in 0..MANY / 60 {
            let count = if tag % 50 == 49 { 0 } else { count };
            pair.sides[0].engine.send(Duration::ZERO, message(count, tag), R1).unwrap();
        }
        pair.settle();
        for tag in 0..MANY / 60 {
            assert_eq!(pair.causes(), [None, None], "{count} bytes, message {tag}");
            pair.receive(tag, count);
            pair.settle();
        }
        assert_eq!([pair.completed(0), pair.completed(1)], [MANY as usize / 60; 2], "{count} bytes");
    }
}

/// Receives that were begun before, in the other order.
#[test]
fn very_many_receives_wait_for_their_messages() {
    let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
    for tag in (0..MANY / 2).rev() {
        pair.receive(tag, 8);
    }
    pair.flood(MANY / 2, 8);
    pair.settle();
    assert_eq!(pair.causes(), [None, None]);
    assert_eq!([pair.completed(0), pair.completed(1)], [MANY as usize / 2; 2]);
}

/// The oldest operation had the link until its end.
#[test]
fn a_barrier_does_not_wait_for_a_long_message_nor_for_many_short_ones() {
    let mut pair = Pair::new(1 << 10, ANNOUNCED_MAX);
    let long = 10_000 << 10;
    pair.receive(0, long);
    pair.sides[0].engine.send(Duration::ZERO, message(long, 0), R1).unwrap();
    while pair.pass(1) {}
    (0..20).for_each(|_| assert!(pair.pass(0) | pair.pass(1)));
    for tag in 1..MANY / 20 {
        pair.sides[0].engine.send(Duration::ZERO, message(100, tag), R1).unwrap();
    }
    let asked = begin(asks(Operation::Barrier, Algorithm::Dissemination, 0, 0));
    for (side, rank) in [(0, R0), (1, R1)] {
        pair.begin(side, asked, barrier(rank));
    }
    // A turn of the long one, a run of short ones, a turn of the barrier, and words in between.
    let mut passed = 0;
    while pair.completed(1) == 0 {
        assert!(pair.pass(0) | pair.pass(1));
        passed += 1;
    }
    assert!(passed <= 12, "the barrier ended after {passed} frames");
}

/// The root waited for the word that only who expects as much as it sends says unasked.
#[test]
fn lengths_that_differ_are_found_whatever_the_length_of_a_segment() {
    for segment_bytes in [256 << 10, 1 << 20, 4 << 20] {
        for counts in [[10 << 20, 1 << 10], [1 << 10, 10 << 20], [10 << 20, 9 << 20]] {
            for first in [0, 1] {
                let mut pair = Pair::new(segment_bytes, ANNOUNCED_MAX);
                let world = WorldSize::new(2).unwrap();
                for side in [first, 1 - first] {
                    let count = counts[side];
                    let schedule = crate::schedule::broadcast(world, Rank::new(side as u32), R0, count);
                    let asked = begin(asks(Operation::Broadcast, Algorithm::Chain, count as u64, 0));
                    pair.begin(side, asked, schedule);
                    pair.settle();
                }
                let [Some(one), Some(other)] = pair.causes() else { panic!("{segment_bytes} {counts:?}") };
                assert!(matches!(one, Cause::Mismatch { .. }), "{segment_bytes} {counts:?}: {one}");
                assert_eq!(one, other);
            }
        }
    }
}

/// Another operation of the same number was named instead.
#[test]
fn a_message_that_does_not_fit_is_named_by_both_of_its_lines() {
    // Both ways at once there are messages, and collectives, of all these numbers; the long one is still on its way.
    for count in [11, 1_000_000] {
        let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
        let barriers = begin(asks(Operation::Barrier, Algorithm::Dissemination, 0, 0));
        for tag in 0..5 {
            for (side, rank) in [(0, R0), (1, R1)] {
                pair.begin(side, barriers, barrier(rank));
            }
            pair.sides[1].engine.send(Duration::ZERO, message(4, tag), R0).unwrap();
            pair.sides[0].engine.send(Duration::ZERO, message(4, tag), R1).unwrap();
        }
        let (sent, asked) = (message(count, 9), message(10, 9));
        pair.sides[0].engine.send(Duration::ZERO, sent, R1).unwrap();
        for tag in 10..20 {
            pair.sides[0].engine.send(Duration::ZERO, message(1, tag), R1).unwrap();
        }
        pair.settle();
        let pattern = Pattern { group: 0, source: Some(R0), tag: Some(9) };
        pair.sides[1].engine.receive(Duration::ZERO, asked, pattern).unwrap_err();
        pair.settle();
        for cause in pair.causes() {
            let Some(Cause::Mismatch { sequence, first_site, second_site, .. }) = cause else {
                panic!("{cause:?}");
            };
            assert_eq!(*sequence, 5);
            assert!(first_site.ends_with(&format!("engine/tests.rs:{}", sent.site.line())), "{first_site}");
            assert!(
                second_site.ends_with(&format!("engine/tests.rs:{}", asked.site.line())),
                "{second_site}"
            );
        }
    }
}

/// A receive that is older and may wait for ever hid who waited, and for whom.
#[test]
fn the_operation_whose_time_is_over_is_the_one_that_is_named() {
    let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
    let any = Pattern { group: 0, source: None, tag: None };
    for side in &mut pair.sides {
        let patient = Begin { timeout: Duration::MAX, ..message(1, 1) };
        side.engine.receive(Duration::ZERO, patient, any).unwrap();
        let slow = Begin { timeout: 3 * MINUTE, ..message(1, 2) };
        side.engine.receive(Duration::ZERO, slow, any).unwrap();
    }
    let asked = begin(asks(Operation::Barrier, Algorithm::Dissemination, 0, 0));
    pair.begin(0, asked, barrier(R0));
    pair.sides.iter_mut().for_each(|side| side.engine.advance(MINUTE));
    pair.sides[0].engine.handle_timeout(MINUTE);
    pair.settle();
    for cause in pair.causes() {
        let Some(Cause::Timeout { timeout_ms: 60_000, waiting, .. }) = cause else { panic!("{cause:?}") };
        assert_eq!(waiting.len(), 1, "{cause:?}");
        assert_eq!((waiting[0].rank, waiting[0].asked), (R0, asked.contract));
        assert_eq!(waiting[0].awaited, [(R1, "b".to_owned())]);
    }
}

/// It swallowed the next message, and its deadline ended the job.
#[test]
fn a_receive_that_is_withdrawn_takes_no_message_and_has_no_deadline() {
    let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
    let (first, second) = (pair.receive(3, 8), pair.receive(3, 8));
    assert!(pair.sides[1].engine.cancel(first));
    assert!(!pair.sides[1].engine.cancel(first), "it is none any more");
    let sent = pair.sides[0].engine.send(Duration::ZERO, message(8, 3), R1).unwrap();
    assert!(!pair.sides[0].engine.cancel(sent));
    pair.settle();
    assert!(!pair.sides[1].engine.cancel(second), "it has its message");
    let completed = pair.sides[1].engine.take_completed().map(|(id, _)| id);
    assert_eq!(completed, Some(second));
    assert!(pair.sides[1].engine.is_idle() && pair.sides[1].engine.poll_timeout().is_none());
}

#[track_caller]
fn synchronous(count: u64, tag: u32) -> Begin {
    Begin { mode: SendMode::Synchronous, ..message(count, tag) }
}

/// Short ones were complete as soon as they had left.
#[test]
fn a_synchronous_send_is_complete_when_a_receive_has_matched_it() {
    for count in [0, 1, 4096, EAGER_BYTES as u64, 3 << 20] {
        let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
        for tag in [1, 2] {
            pair.sides[0].engine.send(Duration::ZERO, synchronous(count, tag), R1).unwrap();
        }
        // A later message passes them.
        pair.sides[0].engine.send(Duration::ZERO, message(1, 3), R1).unwrap();
        pair.settle();
        assert_eq!(pair.completed(0), 1, "{count}");
        let any = Pattern { group: 0, source: None, tag: None };
        assert_eq!(pair.sides[1].engine.probe(&any).map(|found| found.tag), Some(1));
        for tag in [2, 1] {
            pair.receive(tag, count);
            pair.settle();
            assert_eq!((pair.completed(0), pair.completed(1)), (1, 1), "{count}");
        }
        // And where the receive was there first.
        pair.receive(4, count);
        pair.sides[0].engine.send(Duration::ZERO, synchronous(count, 4), R1).unwrap();
        pair.settle();
        assert_eq!((pair.completed(0), pair.completed(1)), (1, 1), "{count}");
        assert!(pair.sides.iter().all(|side| side.engine.failure().is_none()));
    }
}

#[test]
fn a_synchronous_send_without_a_receive_ends_at_its_deadline_and_names_the_receiver() {
    for answer_is_lost in [false, true] {
        let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
        pair.sides[0].engine.send(Duration::ZERO, synchronous(8, 1), R1).unwrap();
        assert!(pair.pass(0));
        if answer_is_lost {
            pair.receive(1, 8);
            let answer = pair.sides[1].engine.poll_transmit(R0);
            assert!(
                matches!(answer, Some(Transmit::Control { header, .. }) if header.kind == FrameKind::Ready)
            );
        }
        let engine = &mut pair.sides[0].engine;
        engine.advance(MINUTE);
        engine.handle_timeout(MINUTE);
        assert!(engine.take_completed().is_none());
        let [Some(Cause::Timeout { waiting, .. }), None] = pair.causes() else {
            panic!("{:?}", pair.causes())
        };
        assert_eq!((waiting[0].rank, &waiting[0].awaited), (R0, &vec![(R1, "b".to_owned())]));
    }
}

#[test]
fn a_receiver_that_leaves_without_receiving_a_synchronous_send_ends_the_job() {
    let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
    pair.sides[0].engine.send(Duration::ZERO, synchronous(8, 1), R1).unwrap();
    pair.settle();
    pair.sides[1].engine.close();
    pair.settle();
    assert!(matches!(pair.causes()[0], Some(Cause::PeerLeft { rank: R1, .. })));
}
