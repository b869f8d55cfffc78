//! Tests of the handshake: between a dialer and an acceptor, and between either side and another program.

use super::Secret;
use super::handshake::{
    Acceptor, ConnectionPurpose, Dialer, Handshake as _, HandshakeError, Introduction, Job, Refusal,
    STREAMS_MAX, StreamId,
};
use crate::types::Rank;

/// The length of the acceptor's hello in bytes, as in docs/wire-format.md.
const ACCEPTOR_HELLO_BYTES: usize = 80;

fn job() -> Job {
    Job { id: [7; 16], world: 4, peers_digest: [9; 32] }
}

fn secret(text: &[u8]) -> Secret {
    Secret::new(text).unwrap()
}

fn dialer(job: &Job, from: u32, to: u32) -> Dialer {
    dialer_with_stream(job, from, to, StreamId::ONLY)
}

fn dialer_with_stream(job: &Job, from: u32, to: u32, stream: StreamId) -> Dialer {
    let (from, to) = (Rank::new(from), Rank::new(to));
    new_dialer(job, Introduction { purpose: ConnectionPurpose::Link, from, to, stream })
}

fn new_dialer(job: &Job, introduction: Introduction) -> Dialer {
    Dialer::new(secret(b"sixteen bytes or more"), job, introduction, [1; 32])
}

fn acceptor(job: &Job, secret_text: &[u8]) -> Acceptor {
    Acceptor::new(secret(secret_text), job.clone(), Some(Rank::new(2)), [2; 32])
}

/// Passes messages between the two sides, in pieces of `piece_bytes` bytes, until neither side has more to send.
/// Returns the results of the dialer and the acceptor.
fn run_handshake(
    dialer: &mut Dialer,
    acceptor: &mut Acceptor,
    piece_bytes: usize,
) -> (Result<(), HandshakeError>, Result<(), HandshakeError>) {
    let (mut dialed, mut accepted) = (Ok(()), Ok(()));
    loop {
        let to_acceptor = dialer.take_output();
        for bytes in to_acceptor.chunks(piece_bytes) {
            accepted = accepted.and_then(|()| acceptor.feed(bytes));
        }
        let to_dialer = acceptor.take_output();
        for bytes in to_dialer.chunks(piece_bytes) {
            dialed = dialed.and_then(|()| dialer.feed(bytes));
        }
        if to_acceptor.is_empty() && to_dialer.is_empty() {
            return (dialed, accepted);
        }
    }
}

#[test]
fn the_handshake_succeeds_with_pieces_of_any_size() {
    for piece_bytes in [1, 7, 80, 104, 1000] {
        let (mut dialer, mut acceptor) = (dialer(&job(), 1, 2), acceptor(&job(), b"sixteen bytes or more"));
        assert_eq!(run_handshake(&mut dialer, &mut acceptor, piece_bytes), (Ok(()), Ok(())));
        assert_eq!((dialer.wanted_bytes(), acceptor.wanted_bytes()), (0, 0));
        assert_eq!(acceptor.introduction().unwrap().from, Rank::new(1));
    }
}

#[test]
fn both_sides_report_that_their_secrets_differ() {
    let (mut dialer, mut acceptor) = (dialer(&job(), 1, 2), acceptor(&job(), b"another secret altogether"));
    let (dialed, _) = run_handshake(&mut dialer, &mut acceptor, 50);
    assert_eq!(dialed, Err(HandshakeError::Secret));
    assert_eq!(acceptor.introduction(), None);

    // A dialer that sends a wrong proof, for example zeros, is refused.
    let mut acceptor = self::acceptor(&job(), b"sixteen bytes or more");
    acceptor.feed(&self::dialer(&job(), 1, 2).take_output()).unwrap();
    assert_eq!(acceptor.feed(&[0; 32]), Err(HandshakeError::Secret));
    assert_eq!(acceptor.introduction(), None);
}

#[test]
fn a_dialer_with_a_valid_proof_learns_the_reason_of_the_refusal() {
    let base = job();
    let cases = [
        (Job { id: [8; 16], ..base.clone() }, 1, 2, Refusal::Job),
        (Job { world: 5, ..base.clone() }, 1, 2, Refusal::World),
        (Job { peers_digest: [1; 32], ..base.clone() }, 1, 2, Refusal::PeersFile),
        (base.clone(), 4, 2, Refusal::Rank),
        (base.clone(), 1, 3, Refusal::Rank),
        (base.clone(), 2, 2, Refusal::SameRank),
    ];
    for (theirs, from, to, refusal) in cases {
        let (mut dialer, mut acceptor) =
            (dialer(&theirs, from, to), acceptor(&base, b"sixteen bytes or more"));
        let (dialed, accepted) = run_handshake(&mut dialer, &mut acceptor, 1000);
        assert_eq!(dialed, Err(HandshakeError::Refused(refusal)));
        assert_eq!(accepted, Err(HandshakeError::RefusedPeer(refusal)));
    }
}

#[test]
fn both_sides_report_that_their_versions_differ() {
    let mut acceptor = acceptor(&job(), b"sixteen bytes or more");
    let mut hello = dialer(&job(), 1, 2).take_output();
    hello[8] = 88;
    assert_eq!(acceptor.feed(&hello), Err(HandshakeError::Version { theirs: 88 }));
    let mut answer = acceptor.take_output();
    assert_eq!(answer.len(), ACCEPTOR_HELLO_BYTES);
    answer[8] = 99;
    assert_eq!(dialer(&job(), 1, 2).feed(&answer), Err(HandshakeError::Version { theirs: 99 }));
}

#[test]
fn other_protocols_are_refused_at_their_first_byte() {
    for bytes in [&b"GET / HTTP/1.1\r\n"[..], b"\x16\x03\x01", b"\0", b"SSH-2.0-OpenSSH"] {
        let result = acceptor(&job(), b"sixteen bytes or more").feed(bytes);
        assert!(matches!(result, Err(HandshakeError::NotRingtrain { .. })), "{result:?}");
    }
    let shown = acceptor(&job(), b"sixteen bytes or more").feed(b"GET / HTTP/1.1\r\n").unwrap_err();
    assert!(shown.to_string().contains("\"GET / HTTP/1.1"), "{shown}");
}

/// The acceptor must refuse a dialer that sends back the acceptor's proof instead of its own proof.
#[test]
fn a_reflected_proof_is_refused() {
    let mut acceptor = acceptor(&job(), b"sixteen bytes or more");
    acceptor.feed(&dialer(&job(), 1, 2).take_output()).unwrap();
    let answer = acceptor.take_output();
    assert_eq!(acceptor.feed(&answer[48..]), Err(HandshakeError::Secret));
}

#[test]
fn the_acceptor_learns_the_purpose() {
    for purpose in [
        ConnectionPurpose::Link,
        ConnectionPurpose::Rendezvous,
        ConnectionPurpose::IsolatedLink(0),
        ConnectionPurpose::IsolatedLink(u64::MAX - 1),
    ] {
        let introduction =
            Introduction { purpose, from: Rank::new(1), to: Rank::new(2), stream: StreamId::ONLY };
        let mut acceptor = acceptor(&job(), b"sixteen bytes or more");
        let results = run_handshake(&mut new_dialer(&job(), introduction), &mut acceptor, 1000);
        assert_eq!((results, acceptor.introduction()), ((Ok(()), Ok(())), Some(introduction)));
    }
    let mut hello = dialer(&job(), 1, 2).take_output();
    for purpose in [0, 4, 255] {
        hello[10] = purpose;
        let refused = acceptor(&job(), b"sixteen bytes or more").feed(&hello);
        assert_eq!(refused, Err(HandshakeError::Unknown("purpose")));
    }
}

#[test]
fn the_acceptor_learns_the_stream_and_refuses_invalid_streams() {
    for (index, total) in [(0, 1), (0, 2), (3, 4), (7, STREAMS_MAX)] {
        let stream = StreamId { index, total };
        let mut acceptor = acceptor(&job(), b"sixteen bytes or more");
        let results = run_handshake(&mut dialer_with_stream(&job(), 1, 2, stream), &mut acceptor, 1000);
        assert_eq!(results, (Ok(()), Ok(())));
        assert_eq!(acceptor.introduction().unwrap().stream, stream);
    }
    for (index, total) in [(0, 0), (1, 1), (4, 4), (255, 4), (0, STREAMS_MAX + 1), (255, 255)] {
        let mut dialer = dialer_with_stream(&job(), 1, 2, StreamId { index, total });
        let results = run_handshake(&mut dialer, &mut acceptor(&job(), b"sixteen bytes or more"), 1000);
        let refused = Err(HandshakeError::Refused(Refusal::Stream));
        assert_eq!(results, (refused, Err(HandshakeError::RefusedPeer(Refusal::Stream))));
    }
}
