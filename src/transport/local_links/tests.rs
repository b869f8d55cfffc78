//! Tests of links that have changed over to queues: the end of a link, messages, and peers that break the protocol. The
//! simulation of jobs tests the change-over itself.

use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::shm::Segment;
use crate::simulation::network::{SimConfig, SimNetwork, SimTransport};
use crate::types::DType;
use crate::wire::{FrameHeader, FrameKind};

/// A layout whose queues fill up after 8 entries or 512 bytes.
const SHORT: HostMemoryLayout = HostMemoryLayout::with_short_queues(2, 8, 512);

/// One of two ranks with a link between them.
struct LinkedRank {
    links: LinkTransport<SimTransport, Segment>,
    own: usize,
}

impl LinkedRank {
    fn peer(&self) -> Rank {
        Rank::new(1 - self.own as u32)
    }

    /// Sends bytes over the socket that do not belong to the link.
    fn send_over_socket(&mut self, mut bytes: &[u8]) {
        let peer = self.peer();
        while let Ok(count @ 1..) = self.links.sockets.send(peer, &[IoSlice::new(bytes)]) {
            bytes = &bytes[count..];
        }
    }
}

/// Creates two ranks with memory for their queues and a socket, on which bytes arrive at once and in pieces of random length.
fn new_ranks(seed: u64) -> ([LinkedRank; 2], [Arc<Segment>; 2]) {
    let network = SimNetwork::new(SimConfig {
        seed,
        latency: Duration::ZERO,
        jitter: Duration::ZERO,
        bandwidth: u64::MAX,
        window_bytes: usize::MAX,
        piece_bytes_max: 300,
        wake_delay: Duration::ZERO,
        lost_wakes: None,
        faults: Vec::new(),
    });
    network.borrow_mut().open_link(Rank::ZERO, Rank::new(1));
    let ranks = [0, 1].map(|own| {
        let socket = SimTransport::new(Rc::clone(&network), Rank::new(own as u32));
        LinkedRank { links: LinkTransport::new(socket, WorldSize::new(2).unwrap()), own }
    });
    let mut memories = Segment::for_tests(SHORT.bytes(), 2).into_iter().map(Arc::new);
    (ranks, [0, 1].map(|_| memories.next().unwrap()))
}

fn add_queues(rank: &mut LinkedRank, memory: &Arc<Segment>) {
    rank.links.add_queues(memory, SHORT, &[Rank::ZERO, Rank::new(1)], rank.own);
}

/// Returns two ranks that have queues. Rank 0 has changed over.
fn ranks_with_queues(seed: u64) -> ([LinkedRank; 2], [Arc<Segment>; 2]) {
    let (mut ranks, memories) = new_ranks(seed);
    ranks.iter_mut().zip(&memories).for_each(|(rank, memory)| add_queues(rank, memory));
    ranks[0].links.change_over();
    (ranks, memories)
}

fn receive(rank: &mut LinkedRank, length: usize) -> Result<Vec<u8>, TransferError> {
    let mut bytes = vec![0; length];
    let count = rank.links.receive(rank.peer(), &mut [IoSliceMut::new(&mut bytes)], 0)?;
    bytes.truncate(count);
    Ok(bytes)
}

#[test]
fn entries_that_a_peer_wrote_before_its_end_are_received() {
    let ([mut one, mut other], _) = ranks_with_queues(1);
    assert_eq!(one.links.send(one.peer(), &[IoSlice::new(b"goodbye")]), Ok(7));
    one.links.close_sending(one.peer());
    assert_eq!(receive(&mut other, 4), Ok(b"good".to_vec()));
    assert_eq!(receive(&mut other, 4), Ok(b"bye".to_vec()));
    for _ in 0..2 {
        assert_eq!(receive(&mut other, 4), Err(TransferError::Lost("the peer closed the connection".into())));
    }
}

/// Prevents a rank that never sleeps: it does not read a link that is lost, so later entries of this link must not keep it awake.
#[test]
fn an_entry_of_a_lost_link_keeps_no_rank_awake() {
    let ([mut one, mut other], _) = ranks_with_queues(1);
    one.links.close_sending(one.peer());
    assert_eq!(receive(&mut other, 4), Err(TransferError::Lost("the peer closed the connection".into())));
    assert_eq!(one.links.send(one.peer(), &[IoSlice::new(b"late")]), Ok(4));
    assert!(other.links.signals().is_some_and(|signals| signals.mark_asleep_unless_changed()));
}

#[test]
fn a_peer_that_claims_a_wrong_number_of_bytes_or_sends_data_over_the_socket_is_refused() {
    for (claimed, wake_bytes, expected) in [
        (0, 0, "it claims to have sent fewer bytes than it did"),
        (3, WAKE_READS_MAX * 64, "it sent data over the connection instead of through shared memory"),
    ] {
        let ([mut one, mut other], memories) = new_ranks(2);
        one.send_over_socket(b"abc");
        receive_exactly(&mut other, 3);
        add_queues(&mut one, &memories[0]);
        add_queues(&mut other, &memories[1]);
        one.links.socket_bytes[1].sent = claimed;
        one.links.change_over();
        one.send_over_socket(&vec![1; wake_bytes]);
        assert_eq!(receive(&mut other, 10), Err(TransferError::Corrupt(expected.into())));
        assert!(receive(&mut other, 10).unwrap_or_default().is_empty(), "nothing more is received");
    }
}

/// Receives `length` bytes of the link.
fn receive_exactly(rank: &mut LinkedRank, length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < length {
        let next = receive(rank, (length - bytes.len()).min(50)).unwrap();
        assert!(!next.is_empty(), "a byte is missing");
        bytes.extend(next);
    }
    bytes
}

/// A message that is received whole has the same fields as the frame for which it stands. The simulation of jobs tests both ways.
#[test]
fn messages_are_received_whole_or_as_frames() {
    let ([mut one, mut other], _) = ranks_with_queues(4);
    assert_eq!(receive(&mut other, 1), Ok(Vec::new()));
    let (to, from, payload) = (one.peer(), other.peer(), [5; 300]);
    for (sequence, bytes) in [(0, 0), ((1 << 56) - 1, 24), (7, 128), (8, 200)] {
        let message = LocalMessage { group: u32::MAX, tag: u32::MAX - 1, sequence, dtype: DType::F32, bytes };
        let mut target = [7; 300];
        assert!(one.links.send_message(to, &message, &payload[..bytes]));
        let refused = other.links.receive_message(from, &mut target, 0, |next| *next != message);
        assert_eq!(refused, NextFrame::Other);
        let received = other.links.receive_message(from, &mut target, 1, |next| *next == message);
        assert_eq!(received, NextFrame::Message(message, bytes));
        assert_eq!((&target[..bytes], &target[bytes..]), (&payload[..bytes], &[7; 300][bytes..]));
        assert!(one.links.send_message(to, &message, &payload[..bytes]));
        let header = FrameHeader::decode(&receive_exactly(&mut other, HEADER_BYTES).try_into().unwrap());
        assert_eq!(header.unwrap(), message.header());
        let is_empty = other.links.receive_message(from, &mut [], 0, |_| false) == NextFrame::Nothing;
        assert_eq!(is_empty, bytes == 0, "the payload follows");
        assert_eq!(receive_exactly(&mut other, bytes), payload[..bytes]);
    }
}

#[test]
fn only_a_credit_frame_is_received_without_its_link() {
    let ([mut one, mut other], _) = ranks_with_queues(8);
    assert_eq!(receive(&mut other, 1), Ok(Vec::new()));
    let (to, from) = (one.peer(), other.peer());
    for (kind, first) in [(FrameKind::Credit, 68), (FrameKind::Wake, 68), (FrameKind::Credit, 10)] {
        let is_credit = kind == FrameKind::Credit && first > HEADER_BYTES;
        let expected = if is_credit { NextFrame::Credit(9) } else { NextFrame::Other };
        let header = FrameHeader { kind, offset: 9, ..FrameHeader::EMPTY }.encode();
        let bytes = [&header[..], &[5; 4]].concat();
        assert_eq!(one.links.send(to, &[IoSlice::new(&bytes[..first])]), Ok(first));
        assert_eq!(other.links.receive_message(from, &mut [], 0, |_| false), expected);
        assert_eq!(one.links.send(to, &[IoSlice::new(&bytes[first..])]), Ok(bytes.len() - first));
        let left = if is_credit { &bytes[HEADER_BYTES..] } else { &bytes };
        assert_eq!(receive_exactly(&mut other, left.len()), left);
    }
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
        assert_eq!(receive(&mut other, 1), Ok(Vec::new()));
        assert_eq!(liar.write_message([0, label], &vec![1; bytes], &mut Vec::new()), Ok(true));
        assert_eq!(other.links.receive_message(other.peer(), &mut [0; 64], 0, |_| true), NextFrame::Other);
        let result = receive(&mut other, 100);
        assert!(matches!(&result, Err(TransferError::Corrupt(why)) if why.contains(expected)), "{result:?}");
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
    let ([mut one, mut other], _) = ranks_with_queues(7);
    assert_eq!(receive(&mut other, 1), Ok(Vec::new()));
    assert!(!other.links.take_wake_bytes());
    assert!(other.links.signals().unwrap().mark_asleep_unless_changed());
    assert_eq!(one.links.send(one.peer(), &[IoSlice::new(b"a")]), Ok(1));
    assert_eq!(receive(&mut other, 2), Ok(b"a".to_vec()));
    assert_eq!(receive(&mut other, 2), Ok(Vec::new()));
    assert!(other.links.take_wake_bytes() && !other.links.take_wake_bytes());
}
