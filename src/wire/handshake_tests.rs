//! Tests of both sides of the handshake with each other, and of each side with other programs.

use super::Secret;
use super::handshake::{
    Acceptor, Dialer, Handshake as _, HandshakeError, Introduction, Job, Purpose, Refusal, STREAMS_MAX,
    Stream,
};
use crate::types::Rank;

/// Bytes of the acceptor's hello, as in docs/wire-format.md.
const ACCEPTOR_HELLO_BYTES: usize = 80;

fn job() -> Job {
    Job { id: [7; 16], world: 4, peers_digest: [9; 32] }
}

fn secret(text: &[u8]) -> Secret {
    Secret::new(text).unwrap()
}

fn dialer(job: &Job, from: u32, to: u32) -> Dialer {
    dialer_of(job, from, to, Stream::ONLY)
}

fn dialer_of(job: &Job, from: u32, to: u32, stream: Stream) -> Dialer {
    let (from, to) = (Rank::new(from), Rank::new(to));
    let introduction = Introduction { purpose: Purpose::Link, from, to, stream };
    Dialer::new(secret(b"sixteen bytes or more"), job, introduction, [1; 32])
}

fn acceptor(job: &Job, text: &[u8]) -> Acceptor {
    Acceptor::new(secret(text), job.clone(), Some(Rank::new(2)), [2; 32])
}

/// Passes messages between the two sides, `piece` bytes at a time, until neither sends any more.
fn shake(
    dialer: &mut Dialer,
    acceptor: &mut Acceptor,
    piece: usize,
) -> (Result<(), HandshakeError>, Result<(), HandshakeError>) {
    let (mut dialed, mut accepted) = (Ok(()), Ok(()));
    loop {
        let to_acceptor = dialer.take_output();
        for bytes in to_acceptor.chunks(piece) {
            accepted = accepted.and_then(|()| acceptor.feed(bytes));
        }
        let to_dialer = acceptor.take_output();
        for bytes in to_dialer.chunks(piece) {
            dialed = dialed.and_then(|()| dialer.feed(bytes));
        }
        if to_acceptor.is_empty() && to_dialer.is_empty() {
            return (dialed, accepted);
        }
    }
}

#[test]
fn both_sides_agree_in_pieces_of_any_size() {
    for piece in [1, 7, 80, 104, 1000] {
        let (mut dialer, mut acceptor) = (dialer(&job(), 1, 2), acceptor(&job(), b"sixteen bytes or more"));
        assert_eq!(shake(&mut dialer, &mut acceptor, piece), (Ok(()), Ok(())));
        assert_eq!((dialer.wanted(), acceptor.wanted()), (0, 0));
        assert_eq!(acceptor.introduction().unwrap().from, Rank::new(1));
    }
}

#[test]
fn both_sides_report_different_secrets() {
    let (mut dialer, mut acceptor) = (dialer(&job(), 1, 2), acceptor(&job(), b"another secret altogether"));
    let (dialed, _) = shake(&mut dialer, &mut acceptor, 50);
    assert_eq!(dialed, Err(HandshakeError::Secret));
    assert_eq!(acceptor.introduction(), None);

    // If a dialer goes on in spite of that, its proof is wrong.
    let mut acceptor = self::acceptor(&job(), b"sixteen bytes or more");
    acceptor.feed(&self::dialer(&job(), 1, 2).take_output()).unwrap();
    assert_eq!(acceptor.feed(&[0; 32]), Err(HandshakeError::Secret));
    assert_eq!(acceptor.introduction(), None);
}

#[test]
fn the_exact_refusal_is_sent_after_the_proof() {
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
        let (dialed, accepted) = shake(&mut dialer, &mut acceptor, 1000);
        assert_eq!(dialed, Err(HandshakeError::Refused(refusal)));
        assert_eq!(accepted, Err(HandshakeError::Unwelcome(refusal)));
    }
}

#[test]
fn both_sides_report_different_versions() {
    let mut acceptor = acceptor(&job(), b"sixteen bytes or more");
    let mut hello = dialer(&job(), 1, 2).take_output();
    hello[8] = 9;
    assert_eq!(acceptor.feed(&hello), Err(HandshakeError::Version { theirs: 9 }));
    let mut answer = acceptor.take_output();
    assert_eq!(answer.len(), ACCEPTOR_HELLO_BYTES);
    answer[8] = 99;
    assert_eq!(dialer(&job(), 1, 2).feed(&answer), Err(HandshakeError::Version { theirs: 99 }));
}

#[test]
fn other_protocols_are_refused_at_their_first_byte() {
    for stranger in [&b"GET / HTTP/1.1\r\n"[..], b"\x16\x03\x01", b"\0", b"SSH-2.0-OpenSSH"] {
        let result = acceptor(&job(), b"sixteen bytes or more").feed(stranger);
        assert!(matches!(result, Err(HandshakeError::NotRingtrain { .. })), "{result:?}");
    }
    let shown = acceptor(&job(), b"sixteen bytes or more").feed(b"GET / HTTP/1.1\r\n").unwrap_err();
    assert!(shown.to_string().contains("\"GET / HTTP/1.1"), "{shown}");
}

/// An attacker must not be accepted by sending the acceptor's proof back.
#[test]
fn a_reflected_proof_is_refused() {
    let mut acceptor = acceptor(&job(), b"sixteen bytes or more");
    acceptor.feed(&dialer(&job(), 1, 2).take_output()).unwrap();
    let answer = acceptor.take_output();
    assert_eq!(acceptor.feed(&answer[48..]), Err(HandshakeError::Secret));
}

#[test]
fn the_acceptor_learns_the_stream_and_refuses_impossible_ones() {
    for (index, of) in [(0, 1), (0, 2), (3, 4), (7, STREAMS_MAX)] {
        let stream = Stream { index, of };
        let mut acceptor = acceptor(&job(), b"sixteen bytes or more");
        let shaken = shake(&mut dialer_of(&job(), 1, 2, stream), &mut acceptor, 1000);
        assert_eq!(shaken, (Ok(()), Ok(())));
        assert_eq!(acceptor.introduction().unwrap().stream, stream);
    }
    for (index, of) in [(0, 0), (1, 1), (4, 4), (255, 4), (0, STREAMS_MAX + 1), (255, 255)] {
        let mut dialer = dialer_of(&job(), 1, 2, Stream { index, of });
        let shaken = shake(&mut dialer, &mut acceptor(&job(), b"sixteen bytes or more"), 1000);
        let refused = Err(HandshakeError::Refused(Refusal::Stream));
        assert_eq!(shaken, (refused, Err(HandshakeError::Unwelcome(Refusal::Stream))));
    }
}
