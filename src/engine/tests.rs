//! Tests with two engines that exchange frames without a transport.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::*;
use crate::schedule::Schedule;
use crate::types::{Algorithm, DType, HOSTS_GROUP_BIT, SETUP_GROUP, WorldSize};

const R0: Rank = Rank::ZERO;
const R1: Rank = Rank::new(1);
const MINUTE: Duration = Duration::from_mins(1);

/// The engine of one rank, and its driver's stored frames.
struct EngineState {
    engine: Engine,
    stored: BTreeMap<OperationKey, VecDeque<FrameHeader>>,
}

/// The engines of ranks 0 and 1.
struct Pair {
    ranks: [EngineState; 2],
}

impl Pair {
    fn new(segment_bytes: usize, announced_max: usize) -> Self {
        let new_rank = |rank| {
            let host_names = vec!["a".into(), "b".into()];
            let settings = Settings { rank, segment_bytes, checked_links: Vec::new(), host_names };
            let mut engine = Engine::new(settings);
            engine.announced_max = announced_max;
            EngineState { engine, stored: BTreeMap::new() }
        };
        Self { ranks: [new_rank(R0), new_rank(R1)] }
    }

    /// Passes one frame from rank `from` to the other rank. Returns whether there was a frame.
    fn pass_frame(&mut self, from: usize) -> bool {
        let (own, other) = (Rank::new(from as u32), Rank::new(1 - from as u32));
        let Some(transmit) = self.ranks[from].engine.poll_transmit(other) else { return false };
        let (header, payload) = match transmit {
            Transmit::Segment { operation, header, .. } => {
                self.ranks[from].engine.handle_sent_segment(operation, other);
                (header, Bytes::new())
            }
            Transmit::Control { header, payload } => (header, payload),
        };
        self.ranks[1 - from].handle_frame(own, &header, &payload);
        true
    }

    /// Passes frames between both ranks until neither rank has a frame to send.
    fn pass_all_frames(&mut self) {
        while self.pass_frame(0) | self.pass_frame(1) {}
    }

    /// Begins to send `messages` messages of `count` bytes from rank 0 to rank 1. The tag of each message is its number.
    fn send_messages(&mut self, messages: u32, count: u64) {
        for tag in 0..messages {
            self.ranks[0].engine.send(Duration::ZERO, message_request(count, tag), R1).unwrap();
        }
    }

    /// Begins on rank 1 to receive a message of `count` bytes with `tag` from rank 0.
    fn receive(&mut self, tag: u32, count: u64) -> OpId {
        let pattern = Pattern { group: 0, source: Some(R0), tag: Some(tag) };
        let receiver = &mut self.ranks[1];
        let id = receiver.engine.receive(Duration::ZERO, message_request(count, tag), pattern).unwrap();
        if let Some(key) = receiver.engine.key_of(id) {
            receiver.apply_stored(R0, key);
        }
        id
    }

    /// Begins a collective on one rank. A hierarchical collective has two blocks with this schedule.
    fn begin(&mut self, rank: usize, request: OperationRequest, schedule: &Schedule) {
        let OperationRequest { group, contract, site, .. } = request;
        // `assign_number` and `begin` return an error if the job has already failed.
        let Ok(number) = self.ranks[rank].engine.assign_number(group, (contract, site)) else { return };
        let (group, numbers) = if contract.algorithm == Algorithm::Hierarchy {
            (group | HOSTS_GROUP_BIT, [0, 1].map(|block| OperationKey::block_number(number, block)).to_vec())
        } else {
            (group, vec![number])
        };
        for number in numbers {
            let EngineState { engine, .. } = &mut self.ranks[rank];
            let request = OperationRequest { group, ..request };
            let begun = engine.begin(Duration::ZERO, request, number, schedule.clone());
            if let Some(key) = begun.ok().and_then(|id| engine.key_of(id)) {
                self.ranks[rank].apply_stored(Rank::new(1 - rank as u32), key);
            }
        }
    }

    fn causes(&self) -> [Option<&Cause>; 2] {
        [0, 1].map(|rank: usize| self.ranks[rank].engine.failure().map(|failure| &failure.cause))
    }

    /// Returns the cause that both ranks report.
    #[track_caller]
    fn common_cause(&self) -> &Cause {
        let [Some(cause), Some(other)] = self.causes() else { panic!("{:?}", self.causes()) };
        assert_eq!(cause, other);
        cause
    }

    /// Returns the number of operations that each rank has completed since the last call of this function.
    fn take_completed_counts(&mut self) -> [usize; 2] {
        [0, 1].map(|rank: usize| std::iter::from_fn(|| self.ranks[rank].engine.take_completed()).count())
    }
}

impl EngineState {
    fn handle_frame(&mut self, from: Rank, header: &FrameHeader, payload: &[u8]) {
        match self.engine.handle_header(from, header) {
            FrameVerdict::Apply { operation, .. } => {
                let key = self.engine.key_of(operation);
                self.engine.handle_applied_segment(operation, from, header, false);
                if let Some(key) = key {
                    self.apply_stored(from, key);
                }
            }
            FrameVerdict::Store(key) => {
                self.stored.entry(key).or_default().push_back(*header);
                self.apply_stored(from, key);
            }
            FrameVerdict::Control => self.engine.handle_control_frame(from, header, payload),
            FrameVerdict::Discard | FrameVerdict::Refuse => {}
        }
    }

    /// Applies the stored frames of an operation that may be applied now.
    fn apply_stored(&mut self, from: Rank, key: OperationKey) {
        while let Some(header) = self.stored.get(&key).and_then(|frames| frames.front().copied()) {
            let FrameVerdict::Apply { operation, .. } = self.engine.check_stored_frame(from, &header) else {
                return;
            };
            let frames = self.stored.get_mut(&key).unwrap();
            frames.pop_front();
            if frames.is_empty() {
                self.stored.remove(&key);
            }
            self.engine.handle_applied_segment(operation, from, &header, true);
        }
    }
}

fn contract(operation: Operation, algorithm: Algorithm, count: u64, layout: u32) -> Contract {
    Contract { operation, dtype: DType::U8, reduction: None, algorithm, root: R0, count, layout }
}

#[track_caller]
fn request_with(contract: Contract) -> OperationRequest {
    OperationRequest::new(0, contract, MINUTE, std::panic::Location::caller().into())
}

#[track_caller]
fn message_request(count: u64, tag: u32) -> OperationRequest {
    request_with(Contract::message(DType::U8, count, tag))
}

/// The number of messages in the test with the most messages. Under Miri, which is a thousand times slower, it is smaller.
const MESSAGES_MAX: u32 = if cfg!(miri) { 300 } else { 12_000 };

fn barrier_schedule(rank: Rank) -> Schedule {
    crate::schedule::doubling::barrier(WorldSize::new(2).unwrap(), rank)
}

/// In an earlier version, the sender stopped counting its announcements when credit came, but the receiver still counted them.
/// So the receiver reported that the sender had exceeded the limit.
#[test]
fn many_messages_may_be_received_in_any_order_and_before_they_are_sent() {
    let in_order: Vec<u32> = (0..MESSAGES_MAX).collect();
    let reversed: Vec<u32> = (0..MESSAGES_MAX).rev().collect();
    let last_first = (0..MESSAGES_MAX).map(|index| (index + MESSAGES_MAX - 1) % MESSAGES_MAX).collect();
    let orders = [(in_order, false), (reversed.clone(), false), (last_first, false), (reversed, true)];
    for (order, are_receives_first) in orders {
        let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
        if !are_receives_first {
            pair.send_messages(MESSAGES_MAX, 8);
            pair.pass_all_frames();
        }
        for (index, &tag) in order.iter().enumerate() {
            pair.receive(tag, 8);
            if index % 1000 == 0 || index + 10 > MESSAGES_MAX as usize {
                pair.pass_all_frames();
            }
        }
        if are_receives_first {
            pair.send_messages(MESSAGES_MAX, 8);
        }
        pair.pass_all_frames();
        assert_eq!(pair.causes(), [None, None]);
        assert_eq!(pair.take_completed_counts(), [MESSAGES_MAX as usize; 2]);
    }
}

/// In an earlier version, messages beyond the limit were never announced and left only with credit. Later messages overtook them.
#[test]
fn messages_beyond_the_announcement_limit_wait_and_keep_their_order() {
    for count in [8, 1000, 300_000] {
        let mut pair = Pair::new(256 << 10, 10);
        // The messages use up the credit and the limit. Every 50th message is empty and waits behind longer messages.
        for tag in 0..MESSAGES_MAX / 60 {
            let count = if tag % 50 == 49 { 0 } else { count };
            pair.ranks[0].engine.send(Duration::ZERO, message_request(count, tag), R1).unwrap();
        }
        pair.pass_all_frames();
        for tag in 0..MESSAGES_MAX / 60 {
            assert_eq!(pair.causes(), [None, None], "{count} bytes, message {tag}");
            pair.receive(tag, count);
            pair.pass_all_frames();
        }
        assert_eq!(pair.take_completed_counts(), [MESSAGES_MAX as usize / 60; 2], "{count} bytes");
    }
}

/// In an earlier version, the oldest operation sent all its data before any other operation could use the link.
#[test]
fn a_barrier_does_not_wait_for_a_long_message_or_for_many_short_messages() {
    let mut pair = Pair::new(1 << 10, ANNOUNCED_MAX);
    let long = 10_000 << 10;
    pair.receive(0, long);
    pair.ranks[0].engine.send(Duration::ZERO, message_request(long, 0), R1).unwrap();
    while pair.pass_frame(1) {}
    (0..20).for_each(|_| assert!(pair.pass_frame(0) | pair.pass_frame(1)));
    for tag in 1..MESSAGES_MAX / 20 {
        pair.ranks[0].engine.send(Duration::ZERO, message_request(100, tag), R1).unwrap();
    }
    let request = request_with(contract(Operation::Barrier, Algorithm::Dissemination, 0, 0));
    for (index, rank) in [(0, R0), (1, R1)] {
        pair.begin(index, request, &barrier_schedule(rank));
    }
    // One segment of the long message, one turn of short messages, the barrier, and control frames between them.
    let mut passed = 0;
    while pair.take_completed_counts()[1] == 0 {
        assert!(pair.pass_frame(0) | pair.pass_frame(1));
        passed += 1;
    }
    assert!(passed <= 12, "the barrier was complete only after {passed} frames");
}

/// In an earlier version, the root waited forever for a ready frame, which a rank that expects fewer than 256 KiB does not send.
#[test]
fn different_lengths_of_a_broadcast_are_detected_for_every_segment_size() {
    for segment_bytes in [256 << 10, 1 << 20, 4 << 20] {
        for counts in [[10 << 20, 1 << 10], [1 << 10, 10 << 20], [10 << 20, 9 << 20]] {
            for first_rank in [0, 1] {
                let mut pair = Pair::new(segment_bytes, ANNOUNCED_MAX);
                let world = WorldSize::new(2).unwrap();
                for rank in [first_rank, 1 - first_rank] {
                    let count = counts[rank];
                    let schedule = crate::schedule::ring::broadcast(world, Rank::new(rank as u32), R0, count);
                    let request =
                        request_with(contract(Operation::Broadcast, Algorithm::Chain, count as u64, 0));
                    pair.begin(rank, request, &schedule);
                    pair.pass_all_frames();
                }
                let cause = pair.common_cause();
                assert!(matches!(cause, Cause::Mismatch { .. }), "{segment_bytes} {counts:?}: {cause}");
            }
        }
    }
}

/// In an earlier version, the blocks of a group were numbered one after another. After a call of another collective, a rank
/// compared the blocks of one call with those of another. So the error named a rank whose calls were like those of all other
/// ranks. In another version, the number of the group in which a job starts was like that of a block.
#[test]
fn blocks_are_compared_with_those_of_the_call_with_the_same_number() {
    let odd_call = contract(Operation::AllGather, Algorithm::Ring, 10, 0);
    let barrier = contract(Operation::Barrier, Algorithm::Hierarchy, 0, 0);
    let all_reduce = contract(Operation::AllReduce, Algorithm::Hierarchy, 20, 0);
    for (case, own_group) in (0..16).flat_map(|case| [(case, 0), (case, SETUP_GROUP)]) {
        let [odd_rank, first_rank, is_long, has_same_calls] = [0, 1, 2, 3].map(|bit| case >> bit & 1);
        let call = if has_same_calls == 1 { all_reduce } else { barrier };
        let mut pair = Pair::new(1 << 20, ANNOUNCED_MAX);
        for rank in [first_rank, 1 - first_rank] {
            let own_rank = Rank::new(rank as u32);
            let schedule = if is_long == 1 {
                crate::schedule::ring::broadcast(WorldSize::new(2).unwrap(), own_rank, R0, 1 << 20)
            } else {
                barrier_schedule(own_rank)
            };
            for contract in [if rank == odd_rank { odd_call } else { call }, all_reduce] {
                let request = OperationRequest { group: own_group, ..request_with(contract) };
                pair.begin(rank, request, &schedule);
            }
            pair.pass_all_frames();
        }
        let cause = pair.common_cause();
        let Cause::Mismatch { group, sequence, first_contract, first_site, second_site, .. } = cause else {
            panic!("{case}: {cause:?}")
        };
        let expected = if odd_rank == 0 { odd_call } else { call };
        assert_eq!((*group, *sequence, *first_contract), (own_group, 0, expected), "{case}");
        assert!(![first_site, second_site].iter().any(|site| site.is_empty()), "{case}: {cause:?}");
    }
}

/// A rank finds in shared memory that a peer is already in a later operation. The peer adds its earlier call.
#[test]
fn a_mismatch_in_shared_memory_names_the_first_calls_that_differ() {
    let odd_call = contract(Operation::AllGather, Algorithm::Ring, 10, 0);
    let all_reduce = contract(Operation::AllReduce, Algorithm::Hierarchy, 20, 0);
    for reporter in [0, 1] {
        let mut pair = Pair::new(1 << 20, ANNOUNCED_MAX);
        for (rank, first_call) in [(0, odd_call), (1, all_reduce)] {
            for contract in [first_call, all_reduce] {
                pair.ranks[rank].engine.assign_number(0, (contract, request_with(contract).site)).unwrap();
            }
        }
        // Rank 1 executes its first call, and rank 0 its second one.
        let block_of = |rank: usize| OperationKey::block_number(1 - rank as u64, 0);
        let EngineState { engine, .. } = &mut pair.ranks[reporter];
        engine.report_mismatch(
            HOSTS_GROUP_BIT,
            (block_of(reporter), (all_reduce, request_with(all_reduce).site)),
            (Rank::new(1 - reporter as u32), (block_of(1 - reporter), Some(all_reduce))),
        );
        engine.links.get_or_default(Rank::new(1 - reporter as u32));
        pair.pass_all_frames();
        let cause = pair.common_cause();
        let Cause::Mismatch { group, sequence, first_contract, second_contract, .. } = cause else {
            panic!("{cause:?}")
        };
        assert_eq!((*group, *sequence, *first_contract, *second_contract), (0, 0, odd_call, all_reduce));
    }
}

/// In an earlier version, the error named an older receive without a deadline, and not the operation that missed its deadline.
#[test]
fn a_timeout_names_the_operation_that_missed_its_deadline() {
    let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
    let any = Pattern { group: 0, source: None, tag: None };
    for rank in &mut pair.ranks {
        let patient = OperationRequest { timeout: Duration::MAX, ..message_request(1, 1) };
        rank.engine.receive(Duration::ZERO, patient, any).unwrap();
        let slow = OperationRequest { timeout: 3 * MINUTE, ..message_request(1, 2) };
        rank.engine.receive(Duration::ZERO, slow, any).unwrap();
    }
    let request = request_with(contract(Operation::Barrier, Algorithm::Dissemination, 0, 0));
    pair.begin(0, request, &barrier_schedule(R0));
    pair.ranks.iter_mut().for_each(|rank| rank.engine.advance(MINUTE));
    pair.ranks[0].engine.handle_timeout(MINUTE);
    pair.pass_all_frames();
    for cause in pair.causes() {
        let Some(Cause::Timeout { timeout_ms: 60_000, waiting, .. }) = cause else { panic!("{cause:?}") };
        assert_eq!(waiting.len(), 1, "{cause:?}");
        assert_eq!((waiting[0].rank, waiting[0].contract), (R0, request.contract));
        assert_eq!(waiting[0].awaited, [(R1, "b".to_owned())]);
    }
}

/// The arguments of a synchronous send.
#[track_caller]
fn synchronous_request(count: u64, tag: u32) -> OperationRequest {
    OperationRequest { mode: SendMode::Synchronous, ..message_request(count, tag) }
}

#[test]
fn a_synchronous_send_without_a_receive_ends_at_its_deadline_and_names_the_receiver() {
    for is_answer_lost in [false, true] {
        let mut pair = Pair::new(256 << 10, ANNOUNCED_MAX);
        pair.ranks[0].engine.send(Duration::ZERO, synchronous_request(8, 1), R1).unwrap();
        assert!(pair.pass_frame(0));
        if is_answer_lost {
            pair.receive(1, 8);
            let answer = pair.ranks[1].engine.poll_transmit(R0);
            assert!(
                matches!(answer, Some(Transmit::Control { header, .. }) if header.kind == FrameKind::Ready)
            );
        }
        let engine = &mut pair.ranks[0].engine;
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
    pair.ranks[0].engine.send(Duration::ZERO, synchronous_request(8, 1), R1).unwrap();
    pair.pass_all_frames();
    pair.ranks[1].engine.close();
    pair.pass_all_frames();
    assert!(matches!(pair.causes()[0], Some(Cause::PeerLeft { rank: R1, .. })));
}
