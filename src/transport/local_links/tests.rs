//! Tests of the change-over from sockets to queues, with sockets that move a random number of bytes.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::shm::{Segment, TOKEN_BYTES};
use crate::types::DType;
use crate::wire::FrameHeader;

/// A layout whose queues fill up after 8 entries or 512 bytes.
const SHORT: HostMemoryLayout = HostMemoryLayout::with_short_queues(2, 8, 512);

/// One direction of a socket.
#[derive(Default)]
struct FakePipe {
    bytes: VecDeque<u8>,
    has_ended: bool,
}

/// One end of the only socket of a rank. Each call moves at most as many bytes as a random number.
struct FakeSocket {
    outgoing: Rc<RefCell<FakePipe>>,
    incoming: Rc<RefCell<FakePipe>>,
    random: StdRng,
    wake_count: usize,
}

impl Transport for FakeSocket {
    fn connect(&mut self, _now: Duration, _peer: Rank) {}

    fn is_open(&self, _peer: Rank) -> bool {
        true
    }

    fn send(&mut self, _peer: Rank, parts: &[IoSlice<'_>]) -> TransferResult {
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        let count = self.random.random_range(0..=bytes.len());
        self.outgoing.borrow_mut().bytes.extend(&bytes[..count]);
        if count == 0 { TransferResult::Blocked } else { TransferResult::Bytes(count) }
    }

    fn receive(&mut self, _peer: Rank, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let mut pipe = self.incoming.borrow_mut();
        if pipe.bytes.is_empty() {
            return if pipe.has_ended {
                TransferResult::Lost("it ended".into())
            } else {
                TransferResult::Blocked
            };
        }
        let wanted = parts.iter().map(|part| part.len()).sum::<usize>();
        let count = self.random.random_range(1..=wanted.min(pipe.bytes.len()));
        let targets = parts.iter_mut().flat_map(|part| part.iter_mut());
        targets.zip(pipe.bytes.drain(..count)).for_each(|(target, byte)| *target = byte);
        TransferResult::Bytes(count)
    }

    fn close_sending(&mut self, _peer: Rank) {
        self.outgoing.borrow_mut().has_ended = true;
    }

    fn take_incoming_link(&mut self) -> Option<Rank> {
        None
    }
}

impl SocketTransport for FakeSocket {
    fn wake(&mut self, _peer: Rank) {
        self.outgoing.borrow_mut().bytes.push_back(0xEE);
        self.wake_count += 1;
    }

    fn next_deadline(&self) -> Option<Duration> {
        None
    }

    fn is_retransmission_unanswered(&self, _peer: Rank) -> bool {
        false
    }
}

/// A rank that sends a stream to its only peer, and checks the stream that it receives.
struct StreamRank {
    links: LinkTransport<FakeSocket, Segment>,
    own: usize,
    sent: usize,
    received: usize,
    is_asleep: bool,
}

/// Returns the byte at `position` of the stream that rank `from` sends.
fn byte_at(from: usize, position: usize) -> u8 {
    ((position + from).wrapping_mul(0x9E37_79B9) >> 13) as u8
}

impl StreamRank {
    fn peer(&self) -> Rank {
        Rank::new(1 - self.own as u32)
    }

    /// Sends and receives up to a random number of bytes. If that is not possible, falls asleep as a thread does that waits.
    fn step(&mut self, total: usize, random: &mut StdRng) {
        if self.is_asleep {
            // Only data on the socket wake the rank.
            if self.links.sockets().incoming.borrow().bytes.is_empty() {
                return;
            }
            self.is_asleep = false;
            if let Some(signals) = self.links.signals() {
                signals.mark_awake();
            }
        }
        let bytes: Vec<u8> =
            (self.sent..total.min(self.sent + 300)).map(|position| byte_at(self.own, position)).collect();
        let (first, second) = bytes.split_at(random.random_range(0..=bytes.len()));
        let mut has_moved = false;
        if !bytes.is_empty() && random.random_bool(0.7) {
            match self.links.send(self.peer(), &[IoSlice::new(first), IoSlice::new(second)]) {
                TransferResult::Bytes(count) => (self.sent, has_moved) = (self.sent + count, true),
                result => assert_eq!(result, TransferResult::Blocked),
            }
        }
        let mut received = vec![0; random.random_range(1..400)];
        match self.links.receive(self.peer(), &mut [IoSliceMut::new(&mut received)]) {
            TransferResult::Bytes(count) => {
                let expected =
                    (self.received..self.received + count).map(|position| byte_at(1 - self.own, position));
                assert!(received[..count].iter().copied().eq(expected), "the stream is wrong");
                (self.received, has_moved) = (self.received + count, true);
            }
            result => assert_eq!(result, TransferResult::Blocked),
        }
        // A rank sleeps only if its last send was blocked or if it has nothing to send.
        if has_moved || random.random_bool(0.3) {
            return;
        }
        let has_sent_all = self.sent == total
            || self.links.send(self.peer(), &[IoSlice::new(&[byte_at(self.own, self.sent)])])
                == TransferResult::Blocked;
        self.sent += usize::from(!has_sent_all);
        let uses_queue = self.links.local.as_ref().is_some_and(|local| local.links[&self.peer()].is_sending);
        self.is_asleep = has_sent_all
            && (uses_queue || self.sent == total)
            && self.links.signals().is_none_or(|signals| signals.mark_asleep_unless_changed());
    }
}

/// Creates two ranks with a socket between them, and the memory for their queues.
fn new_ranks(seed: u64) -> ([StreamRank; 2], [Arc<Segment>; 2]) {
    let pipes: [Rc<RefCell<FakePipe>>; 2] = Default::default();
    let token = [9; TOKEN_BYTES];
    let first = Segment::create(SHORT.bytes(), &token).unwrap();
    let second = Segment::open(first.location().unwrap(), SHORT.bytes(), &token).unwrap();
    let ranks = [0, 1].map(|own| {
        let socket = FakeSocket {
            outgoing: Rc::clone(&pipes[own]),
            incoming: Rc::clone(&pipes[1 - own]),
            random: StdRng::seed_from_u64(seed * 2 + own as u64),
            wake_count: 0,
        };
        let links = LinkTransport::new(socket, WorldSize::new(2).unwrap());
        StreamRank { links, own, sent: 0, received: 0, is_asleep: false }
    });
    (ranks, [Arc::new(first), Arc::new(second)])
}

fn add_queues(rank: &mut StreamRank, memory: &Arc<Segment>) {
    // The thread of the rank itself adds the queues.
    rank.is_asleep = false;
    rank.links.add_queues_with_layout(memory, SHORT, &[Rank::ZERO, Rank::new(1)], rank.own);
}

/// Both directions change over at random times. All bytes arrive in order, and no rank sleeps for ever.
#[test]
fn all_bytes_arrive_in_order_when_the_ranks_change_over_at_random_times() {
    let mut wake_count = 0;
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let total = random.random_range(0..20_000);
        let (mut ranks, memories) = new_ranks(seed);
        let begin_at = [0, 1].map(|_| random.random_range(0..200));
        let mut idle_steps = 0;
        for step in 0.. {
            // A rank may change over when both ranks have their queues.
            if step == 50 {
                ranks.iter_mut().zip(&memories).for_each(|(rank, memory)| add_queues(rank, memory));
            }
            for (rank, begin_at) in ranks.iter_mut().zip(begin_at) {
                if step >= 50 + begin_at {
                    rank.links.change_over();
                }
            }
            let chosen = random.random_range(0..2);
            let before = ranks.each_ref().map(|rank| (rank.sent, rank.received));
            ranks[chosen].step(total, &mut random);
            let is_idle = before == ranks.each_ref().map(|rank| (rank.sent, rank.received));
            idle_steps = if is_idle { idle_steps + 1 } else { 0 };
            if ranks.iter().all(|rank| rank.received == total) && step > 300 {
                break;
            }
            assert!(idle_steps < 1000, "seed {seed}: a rank sleeps although there is work");
        }
        wake_count += ranks.iter().map(|rank| rank.links.sockets().wake_count).sum::<usize>();
    }
    assert!(wake_count > 1000, "only {wake_count} wake-ups have been tested");
}

fn receive(rank: &mut StreamRank, length: usize) -> Result<Vec<u8>, TransferResult> {
    let mut bytes = vec![0; length];
    match rank.links.receive(rank.peer(), &mut [IoSliceMut::new(&mut bytes)]) {
        TransferResult::Bytes(count) => Ok(bytes[..count].to_vec()),
        result => Err(result),
    }
}

#[test]
fn entries_that_a_peer_wrote_before_its_end_are_received() {
    let ([mut one, mut other], memories) = new_ranks(1);
    add_queues(&mut one, &memories[0]);
    add_queues(&mut other, &memories[1]);
    one.links.change_over();
    assert_eq!(one.links.send(one.peer(), &[IoSlice::new(b"goodbye")]), TransferResult::Bytes(7));
    one.links.close_sending(one.peer());
    assert_eq!(receive(&mut other, 4), Ok(b"good".to_vec()));
    assert_eq!(receive(&mut other, 4), Ok(b"bye".to_vec()));
    for _ in 0..2 {
        assert_eq!(receive(&mut other, 4), Err(TransferResult::Lost("it ended".into())));
    }
}

/// Prevents a rank that never sleeps: it does not read a link that is lost, so later entries of this link must not keep it awake.
#[test]
fn an_entry_of_a_lost_link_keeps_no_rank_awake() {
    let ([mut one, mut other], memories) = new_ranks(1);
    add_queues(&mut one, &memories[0]);
    add_queues(&mut other, &memories[1]);
    one.links.change_over();
    one.links.close_sending(one.peer());
    assert_eq!(receive(&mut other, 4), Err(TransferResult::Lost("it ended".into())));
    assert_eq!(one.links.send(one.peer(), &[IoSlice::new(b"late")]), TransferResult::Bytes(4));
    assert!(other.links.signals().is_some_and(|signals| signals.mark_asleep_unless_changed()));
}

#[test]
fn a_peer_that_claims_a_wrong_number_of_bytes_or_sends_data_over_the_socket_is_refused() {
    for (claimed, wake_bytes, expected) in [
        (0, 0, "it claims to have sent fewer bytes than it did"),
        (3, WAKE_READS_MAX * 64, "it sent data over the connection instead of through shared memory"),
    ] {
        let ([mut one, mut other], memories) = new_ranks(2);
        other.links.sockets_mut().incoming.borrow_mut().bytes.extend(b"abc");
        let mut received = Vec::new();
        while received.len() < 3 {
            received.extend(receive(&mut other, 3).unwrap());
        }
        add_queues(&mut one, &memories[0]);
        add_queues(&mut other, &memories[1]);
        one.links.socket_bytes[1].sent = claimed;
        one.links.change_over();
        other.links.sockets_mut().incoming.borrow_mut().bytes.extend(std::iter::repeat_n(1, wake_bytes));
        assert_eq!(receive(&mut other, 10), Err(TransferResult::Corrupt(expected.into())));
        assert!(receive(&mut other, 10).is_err(), "nothing more is received");
    }
}

#[test]
fn a_peer_that_claims_to_have_read_too_much_is_refused() {
    let ([mut one, mut other], memories) = new_ranks(3);
    add_queues(&mut one, &memories[0]);
    add_queues(&mut other, &memories[1]);
    one.links.change_over();
    // Rank 1 counts eight entries, but rank 0 has written only one.
    let mut liar = QueueReceiver::new(Arc::clone(&memories[1]), SHORT, 0, 1);
    let mut writer = QueueSender::new(Arc::clone(&memories[1]), SHORT, 0, 1);
    for _ in 0..8 {
        writer.write(&[IoSlice::new(&[0; 8])], 0).unwrap();
    }
    while liar.read(&mut [IoSliceMut::new(&mut [0; 8])], 0).is_ok_and(|read| read.bytes > 0) {}
    let results: Vec<TransferResult> =
        (0..9).map(|_| one.links.send(one.peer(), &[IoSlice::new(&[1; 128])])).collect();
    assert!(results.iter().any(|result| matches!(result, TransferResult::Corrupt(_))));
    assert!(matches!(receive(&mut one, 4), Err(TransferResult::Corrupt(why)) if why.contains("impossible")));
}

/// Receives `length` bytes of the link.
fn receive_exactly(rank: &mut StreamRank, length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < length {
        let next = receive(rank, (length - bytes.len()).min(50));
        assert_ne!(next, Err(TransferResult::Blocked), "a byte is missing");
        bytes.extend(next.unwrap());
    }
    bytes
}

/// A rank may receive each message whole or as a frame. Both ways give the same message, in order with the bytes between
/// messages.
#[test]
fn messages_are_received_whole_or_as_frames() {
    let mut random = StdRng::seed_from_u64(8);
    let ([mut one, mut other], memories) = new_ranks(4);
    add_queues(&mut one, &memories[0]);
    add_queues(&mut other, &memories[1]);
    one.links.change_over();
    assert_eq!(receive(&mut other, 1), Err(TransferResult::Blocked));
    let (to, from) = (one.peer(), other.peer());
    let (mut whole, mut as_frames, mut divided) = (0, 0, 0);
    for sequence in 0..2_000 {
        let payload: Vec<u8> = (0..4 * random.random_range(0..110)).map(|_| random.random()).collect();
        let (group, tag, bytes) = (random.random(), random.random_range(0..u32::MAX), payload.len());
        let message = LocalMessage { group, tag, sequence, dtype: DType::F32, bytes };
        // An entry has at most 128 bytes, and the arena 512.
        let is_sent = one.links.send_message(to, &message, &payload);
        assert!(is_sent || bytes > 200, "{bytes} bytes");
        divided += u32::from(is_sent && bytes > 128);
        if !is_sent {
            assert_eq!(one.links.send(to, &[IoSlice::new(&payload)]), TransferResult::Bytes(bytes));
            assert_eq!(other.links.next_frame(from), NextFrame::Other);
            assert_eq!(receive_exactly(&mut other, bytes), payload);
        } else if random.random_bool(0.5) {
            assert_eq!(other.links.next_frame(from), NextFrame::Message(message));
            let mut target = vec![7; bytes + 3];
            let first_bytes = other.links.receive_message(from, &message, &mut target).unwrap();
            assert_eq!(first_bytes, bytes.min(128));
            if first_bytes < bytes {
                let rest = other.links.receive_from_queue(from, &mut target[first_bytes..bytes]);
                assert_eq!(rest, TransferResult::Bytes(bytes - first_bytes));
            }
            assert_eq!((&target[..bytes], &target[bytes..]), (&payload[..], &[7; 3][..]));
            whole += 1;
        } else {
            let header = FrameHeader::decode(&receive_exactly(&mut other, HEADER_BYTES).try_into().unwrap());
            let header = header.unwrap();
            assert_eq!(header, message.header());
            assert_eq!((header.contract.count, header.contract.layout), (bytes as u64 / 4, tag));
            let is_empty = other.links.next_frame(from) == NextFrame::Nothing;
            assert_eq!(is_empty, bytes == 0, "the payload follows");
            assert_eq!(receive_exactly(&mut other, bytes), payload);
            as_frames += 1;
        }
        assert_eq!(other.links.next_frame(from), NextFrame::Nothing);
    }
    assert!(whole > 300 && as_frames > 300 && divided > 300);
}

#[test]
fn a_message_with_a_wrong_label_is_refused_and_a_full_queue_takes_no_message() {
    for (label, bytes, expected) in
        [(255, 8, "invalid label 0xff"), (u64::from(DType::F64.to_byte()), 9, "label")]
    {
        let ([mut one, mut other], memories) = new_ranks(5);
        add_queues(&mut one, &memories[0]);
        add_queues(&mut other, &memories[1]);
        let mut liar = QueueSender::new(Arc::clone(&memories[0]), SHORT, 0, 1);
        liar.begin(0);
        assert_eq!(receive(&mut other, 1), Err(TransferResult::Blocked));
        assert_eq!(liar.write_message([0, label], &vec![1; bytes]), Ok(true));
        assert_eq!(other.links.next_frame(other.peer()), NextFrame::Other);
        let result = receive(&mut other, 100);
        assert!(matches!(&result, Err(TransferResult::Corrupt(why)) if why.contains(expected)), "{result:?}");
    }
    let ([mut one, _other], memories) = new_ranks(6);
    add_queues(&mut one, &memories[0]);
    one.links.change_over();
    let message = LocalMessage { group: 0, tag: 0, sequence: 0, dtype: DType::U8, bytes: 24 };
    let sent = (0..20).filter(|_| one.links.send_message(Rank::new(1), &message, &[0; 24])).count();
    assert_eq!(sent, 7, "the first of eight cells begins the queue");
}

/// A thread that reads wake bytes while another thread of its rank sleeps has to wake that thread.
#[test]
fn a_rank_knows_that_it_has_read_wake_bytes() {
    let ([mut one, mut other], memories) = new_ranks(7);
    add_queues(&mut one, &memories[0]);
    add_queues(&mut other, &memories[1]);
    one.links.change_over();
    assert_eq!(receive(&mut other, 1), Err(TransferResult::Blocked));
    assert!(!other.links.take_wake_bytes());
    assert!(other.links.signals().unwrap().mark_asleep_unless_changed());
    assert_eq!(one.links.send(one.peer(), &[IoSlice::new(b"a")]), TransferResult::Bytes(1));
    assert_eq!(receive(&mut other, 2), Ok(b"a".to_vec()));
    assert_eq!(receive(&mut other, 2), Err(TransferResult::Blocked));
    assert!(other.links.take_wake_bytes() && !other.links.take_wake_bytes());
}
