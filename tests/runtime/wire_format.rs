//! Checks the bytes in the diagrams of `docs/wire-format.md`. If you change one of these bytes, also change the page
//! and `wire::VERSION`.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::util::ranks::server_options;
use bytemuck::bytes_of;
use hmac::{Hmac, KeyInit as _, Mac as _};
use ringtrain::rendezvous::Server;
use ringtrain::types::{Algorithm, Contract, DType, Operation, ReduceOp};
use ringtrain::wire::cause::{SilentLink, WaitingRank};
use ringtrain::wire::frame::{CONTROL_BYTES_MAX, HEADER_BYTES, SEGMENT_BYTES_MAX};
use ringtrain::wire::handshake::{
    Acceptor, ConnectionPurpose, Dialer, Handshake as _, Introduction, Job, StreamId,
};
use ringtrain::wire::record::{RECORD_BYTES_MAX, RECORD_HEADER_BYTES, RecordHeader};
use ringtrain::wire::{Cause, FrameHeader, FrameKind, SECRET_BYTES_MAX, SECRET_BYTES_MIN, Secret, VERSION};
use ringtrain::{F32Loc, F64Loc, I32Loc, I64Loc, Rank, WorldSize};
use sha2::Sha256;

const SECRET: &[u8] = b"sixteen bytes or more";

fn make_job() -> Job {
    let mut peers_digest = [0xd2; 32];
    peers_digest[..16].fill(0xd1);
    Job { id: *b"the id of a job.", world: 0x0102, peers_digest }
}

fn make_dialer(job: &Job, purpose: ConnectionPurpose, from: u32, to: u32, stream: StreamId) -> Dialer {
    let introduction = Introduction { purpose, from: Rank::new(from), to: Rank::new(to), stream };
    Dialer::new(Secret::new(SECRET).unwrap(), job, introduction, [0xa1; 32])
}

fn hmac_of(parts: &[&[u8]]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).unwrap();
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().to_vec()
}

#[test]
fn the_limits_match_the_wire_format_page() {
    assert_eq!((VERSION, HEADER_BYTES, SEGMENT_BYTES_MAX, CONTROL_BYTES_MAX), (12, 64, 4_194_304, 4096));
    let page = include_str!("../../docs/wire-format.md");
    assert!(
        page.contains(&format!("in version {VERSION} of the format")),
        "the page describes another version"
    );
    assert_eq!((SECRET_BYTES_MIN, SECRET_BYTES_MAX), (16, 4096));
}

#[test]
fn a_frame_header_has_the_documented_bytes() {
    let header = FrameHeader {
        kind: FrameKind::Data,
        group: 0x0403_0201,
        sequence: 0x1817_1615_1413_1211,
        contract: Contract {
            operation: Operation::AllReduce,
            dtype: DType::F32,
            reduction: Some(ReduceOp::Average),
            algorithm: Algorithm::Ring,
            root: Rank::new(0x0807_0605),
            count: 0x2827_2625_2423_2221,
            layout: 0x6463_6261,
        },
        step: 0x7473_7271,
        offset: 0x3837_3635_3433_3231,
        eager: true,
        payload_bytes: 0x0020_4241,
        payload_crc: Some(0x5453_5251),
    };
    let mut expected = Vec::new();
    expected.extend_from_slice(b"RF"); // 0: magic
    expected.extend_from_slice(&[1, 3]); // 2: kind, flags
    expected.extend_from_slice(&[1, 3, 2, 1]); // 4: operation, dtype, reduction, algorithm
    expected.extend_from_slice(&[0x01, 0x02, 0x03, 0x04]); // 8: group
    expected.extend_from_slice(&[0x05, 0x06, 0x07, 0x08]); // 12: root
    expected.extend_from_slice(&[0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]); // 16: sequence
    expected.extend_from_slice(&[0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28]); // 24: count
    expected.extend_from_slice(&[0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38]); // 32: offset
    expected.extend_from_slice(&[0x41, 0x42, 0x20, 0x00]); // 40: payload bytes
    expected.extend_from_slice(&[0x51, 0x52, 0x53, 0x54]); // 44: payload CRC
    expected.extend_from_slice(&[0x61, 0x62, 0x63, 0x64]); // 48: layout
    expected.extend_from_slice(&[0x71, 0x72, 0x73, 0x74]); // 52: message
    expected.extend_from_slice(&[0; 4]); // 56: reserved
    expected.extend_from_slice(&[0xc2, 0xdf, 0xfb, 0xdf]); // 60: header CRC
    assert_eq!(header.encode()[..], expected);
    assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    let plain = FrameHeader {
        kind: FrameKind::Goodbye,
        payload_crc: None,
        eager: false,
        contract: Contract::NONE,
        ..header
    }
    .encode();
    assert_eq!((plain[2], plain[3], &plain[4..8], &plain[44..48]), (3, 0, &[5, 6, 0, 2][..], &[0; 4][..]));
}

#[test]
fn operations_types_reductions_and_algorithms_have_the_documented_numbers() {
    let numbered_from_1 = |names: &[&str]| -> Vec<(String, u8)> {
        names.iter().map(|&name| name.to_owned()).zip(1..).collect()
    };
    let to_owned_names = |all: Vec<(&str, u8)>| -> Vec<(String, u8)> {
        all.into_iter().map(|(name, byte)| (name.to_owned(), byte)).collect()
    };
    assert_eq!(
        to_owned_names(Operation::ALL.iter().map(|o| (o.name(), o.to_byte())).collect()),
        numbered_from_1(&[
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "barrier",
            "reduce",
            "gather",
            "scatter",
            "all_to_all",
            "scan",
            "exscan",
            "message"
        ])
    );
    assert_eq!(
        to_owned_names(DType::ALL.iter().map(|d| (d.name(), d.to_byte())).collect()),
        numbered_from_1(&[
            "f16", "bf16", "f32", "f64", "i8", "u8", "i32", "u32", "i64", "u64", "f32_loc", "f64_loc",
            "i32_loc", "i64_loc", "i16", "u16"
        ])
    );
    assert_eq!(
        to_owned_names(ReduceOp::ALL.iter().map(|r| (r.name(), r.to_byte())).collect()),
        numbered_from_1(&[
            "sum",
            "avg",
            "min",
            "max",
            "prod",
            "band",
            "bor",
            "bxor",
            "land",
            "lor",
            "lxor",
            "minloc",
            "maxloc",
            "premulsum",
            "custom"
        ])
    );
    assert_eq!(
        to_owned_names(Algorithm::ALL.iter().map(|a| (a.name(), a.to_byte())).collect()),
        numbered_from_1(&[
            "ring",
            "dissemination",
            "tree",
            "chain",
            "direct",
            "one-shot",
            "doubling",
            "butterfly",
            "double-tree",
            "hierarchy"
        ])
    );
}

#[test]
fn values_with_an_index_have_the_documented_bytes() {
    assert_eq!(bytes_of(&F32Loc::new(1.0, 0x0403_0201)), [0, 0, 0x80, 0x3f, 1, 2, 3, 4]);
    assert_eq!(bytes_of(&I32Loc::new(-2, 0x0403_0201)), [0xfe, 0xff, 0xff, 0xff, 1, 2, 3, 4]);
    let index = 0x0807_0605_0403_0201;
    assert_eq!(bytes_of(&F64Loc::new(1.0, index)), [0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(bytes_of(&I64Loc::new(0x0102, index)), [2, 1, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_record_header_has_the_documented_bytes() {
    let record = RecordHeader { number: 0x1817_1615_1413_1211, length: Some(0x0004_0302) };
    let mut expected = vec![0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]; // 0: number
    expected.extend_from_slice(&[2, 3, 4, 0]); // 8: length
    expected.extend_from_slice(&crc32c::crc32c(&expected).to_le_bytes()); // 12: checksum
    assert_eq!(record.encode(), expected[..]);
    let last = RecordHeader { number: 1, length: None }.encode();
    assert_eq!(last[..12], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((RECORD_HEADER_BYTES, RECORD_BYTES_MAX), (16, 1_048_576));
}

#[test]
fn a_handshake_has_the_documented_bytes() {
    let purpose = ConnectionPurpose::IsolatedLink(0x0807_0605_0403_0201);
    let mut dialer = make_dialer(&make_job(), purpose, 0x0101, 2, StreamId { index: 3, total: 4 });
    let hello = dialer.take_output();
    let mut expected = Vec::new();
    expected.extend_from_slice(b"RINGTRAI"); // 0: magic
    expected.extend_from_slice(&[12, 0]); // 8: version
    expected.push(3); // 10: purpose
    expected.extend_from_slice(&[0; 5]); // 11: reserved
    expected.extend_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]); // 16: group
    expected.extend_from_slice(&[0x02, 0x01, 0, 0]); // 24: world
    expected.extend_from_slice(&[0x01, 0x01, 0, 0]); // 28: from
    expected.extend_from_slice(&[2, 0, 0, 0]); // 32: to
    expected.extend_from_slice(&[3, 4]); // 36: stream, streams
    expected.extend_from_slice(&[0; 2]); // 38: reserved
    expected.extend_from_slice(b"the id of a job."); // 40: job id
    expected.extend_from_slice(&[0xd1; 16]); // 56: the digest's first half
    expected.extend_from_slice(&[0xa1; 32]); // 72: nonce
    assert_eq!(expected.len(), 104);
    assert_eq!(hello, expected);

    let mut acceptor =
        Acceptor::new(Secret::new(SECRET).unwrap(), make_job(), Some(Rank::new(2)), [0xb2; 32]);
    assert_eq!(acceptor.wanted_bytes(), 104);
    acceptor.feed(&hello).unwrap();
    let answer = acceptor.take_output();
    let mut expected = Vec::new();
    expected.extend_from_slice(b"RINGTRAI"); // 0: magic
    expected.extend_from_slice(&[12, 0]); // 8: version
    expected.push(0); // 10: refusal
    expected.extend_from_slice(&[0; 5]); // 11: reserved
    expected.extend_from_slice(&[0xb2; 32]); // 16: nonce
    expected.extend_from_slice(&hmac_of(&[b"ringtrain 1 acceptor", &hello, &expected[..48]])); // 48: proof
    assert_eq!(answer, expected);

    dialer.feed(&answer).unwrap();
    let proof = dialer.take_output();
    assert_eq!(proof, hmac_of(&[b"ringtrain 1 dialer", &hello, &answer]));
    assert_eq!((proof.len(), acceptor.wanted_bytes()), (32, 32));
    acceptor.feed(&proof).unwrap();
    assert_eq!(acceptor.take_output(), [0; 4]);
    assert_eq!(dialer.wanted_bytes(), 4);
}

#[test]
fn a_refusal_has_the_documented_bytes() {
    let acceptor_job = make_job();
    let cases = [
        (3, Job { id: [0; 16], ..make_job() }, 0, 2),
        (4, Job { world: 9, ..make_job() }, 0, 2),
        (5, Job { peers_digest: [0; 32], ..make_job() }, 0, 2),
        (6, make_job(), 0x0102, 2),
        (6, make_job(), 0, 3),
        (8, make_job(), 2, 2),
        (7, make_job(), 0, 2),
    ];
    for (byte, dialer_job, from, to) in cases {
        let stream = if byte == 7 { StreamId { index: 4, total: 4 } } else { StreamId::ONLY };
        let mut dialer = make_dialer(&dialer_job, ConnectionPurpose::Link, from, to, stream);
        let mut acceptor =
            Acceptor::new(Secret::new(SECRET).unwrap(), acceptor_job.clone(), Some(Rank::new(2)), [0; 32]);
        acceptor.feed(&dialer.take_output()).unwrap();
        dialer.feed(&acceptor.take_output()).unwrap();
        acceptor.feed(&dialer.take_output()).unwrap_err();
        assert_eq!(acceptor.take_output(), [byte, 0, 0, 0]);
    }
    let mut acceptor = Acceptor::new(Secret::new(SECRET).unwrap(), acceptor_job, None, [0xb2; 32]);
    let mut hello = make_dialer(&make_job(), ConnectionPurpose::Link, 0, 2, StreamId::ONLY).take_output();
    hello[9] = 1;
    acceptor.feed(&hello).unwrap_err();
    let answer = acceptor.take_output();
    assert_eq!((answer.len(), answer[10], &answer[48..]), (80, 1, &[0; 32][..]));
    for (purpose, byte) in [(ConnectionPurpose::Link, 1), (ConnectionPurpose::Rendezvous, 2)] {
        let hello = make_dialer(&make_job(), purpose, 0, 2, StreamId::ONLY).take_output();
        assert_eq!(hello[10..24], [byte, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}

/// Returns a missed deadline with one waiting rank and one link.
fn make_missed_deadline(contract: Contract) -> Cause {
    let (rank, silence_ms) = (Rank::new(3), 4);
    let awaited = vec![(rank, "h".to_owned())];
    let waiting = WaitingRank { rank, group: 3, sequence: 5, contract, site: "why".into(), awaited };
    let link = SilentLink { rank, peer: rank, silence_ms, is_acknowledged: true };
    Cause::Timeout { timeout_ms: 6, waiting: vec![waiting], links: vec![link] }
}

#[test]
fn every_abort_has_the_documented_bytes() {
    let rank = Rank::new(0x0102);
    let contract = Contract {
        operation: Operation::Broadcast,
        dtype: DType::U64,
        reduction: None,
        algorithm: Algorithm::Ring,
        root: Rank::new(7),
        count: 9,
        layout: 11,
    };
    let (host, text) = (|| "h".to_owned(), || "why".to_owned());
    let contract_bytes: &[u8] = &[4, 10, 0, 1, 7, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0];
    let (h, why): (&[u8], &[u8]) = (&[1, 0, b'h'], &[3, 0, b'w', b'h', b'y']);
    let number: &[u8] = &[5, 0, 0, 0, 0, 0, 0, 0];
    let later: &[u8] = &[6, 0, 0, 0, 0, 0, 0, 0];
    let other: &[u8] = &[3, 0, 0, 0];
    let cases: [(Cause, u8, &[&[u8]]); 6] = [
        (Cause::PeerLost { rank, host: host(), seen_by: Rank::new(3), detail: text() }, 1, &[h, why, other]),
        (Cause::PeerLeft { rank, host: host() }, 2, &[h]),
        (
            Cause::Mismatch {
                group: 3,
                sequence: 5,
                first: rank,
                first_contract: contract,
                first_site: text(),
                second: Rank::new(3),
                second_contract: contract,
                second_site: String::new(),
            },
            3,
            &[other, number, contract_bytes, why, other, contract_bytes, &[0, 0]],
        ),
        (
            make_missed_deadline(contract),
            5,
            &[
                later,
                &[1],
                other,
                other,
                number,
                contract_bytes,
                why,
                &[1],
                other,
                h,
                &[1],
                other,
                other,
                &[4, 0, 0, 0, 1],
            ],
        ),
        (Cause::Aborted { rank, host: host(), message: text() }, 6, &[h, why]),
        (Cause::Misbehaved { rank, host: host(), detail: text() }, 7, &[h, why]),
    ];
    for (cause, kind, fields) in cases {
        // The cause of a missed deadline (kind 5) lists ranks in later fields, so the field for the rank at fault is
        // 0.
        let rank = if kind == 5 { [0; 4] } else { [0x02, 0x01, 0, 0] };
        let mut expected = [&[kind][..], &rank].concat();
        expected.extend(fields.iter().copied().flatten());
        assert_eq!(cause.encode(), expected, "{cause}");
    }
}

/// Two clients register with the messages that the page shows, and get the list of all members.
#[test]
fn rendezvous_messages_have_the_documented_text() {
    let world = WorldSize::new(2).unwrap();
    let job = Job { id: [9; 16], world: 2, peers_digest: [0; 32] };
    let secret = Secret::new(SECRET).unwrap();
    let server = Server::start(server_options(world, secret, job.id, Duration::from_secs(30))).unwrap();
    let connect_as = |rank| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let mut dialer = make_dialer(&job, ConnectionPurpose::Rendezvous, rank, 0, StreamId::ONLY);
        while dialer.wanted_bytes() > 0 {
            stream.write_all(&dialer.take_output()).unwrap();
            let mut bytes = vec![0; dialer.wanted_bytes()];
            stream.read_exact(&mut bytes).unwrap();
            dialer.feed(&bytes).unwrap();
        }
        stream
    };
    let send_text = |stream: &mut TcpStream, text: &str| {
        stream.write_all(&(text.len() as u32).to_le_bytes()).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
    };
    let receive_text = |stream: &mut TcpStream| {
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut text = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    };
    let member = |rank: u32| {
        let shared =
            r#"{"segment_bytes":131072,"checksums":"auto","processors":2,"streams":4,"timeline":false}"#;
        format!(
            r#"{{"host":"h{rank}","machine":"m","address":"127.0.0.1:{}","shared":{shared}}}"#,
            4000 + rank
        )
    };
    let (mut rank_0, mut rank_1) = (connect_as(0), connect_as(1));
    send_text(&mut rank_1, r#""ask""#);
    assert_eq!(receive_text(&mut rank_1), r#"{"missing":{"ranks":[0,1],"refused":[]}}"#);
    send_text(&mut rank_1, &format!(r#"{{"register":{}}}"#, member(1)));
    send_text(&mut rank_1, r#""ask""#);
    assert_eq!(receive_text(&mut rank_1), r#"{"missing":{"ranks":[0],"refused":[]}}"#);
    // The server sends this message when rank 1 has waited for 2 s.
    assert_eq!(receive_text(&mut rank_1), r#"{"waiting":{"ranks":[0],"refused":[]}}"#);
    let mut second_rank_1 = connect_as(1);
    send_text(&mut second_rank_1, &format!(r#"{{"register":{}}}"#, member(1)));
    assert!(
        receive_text(&mut second_rank_1)
            .starts_with(r#"{"refused":{"reason":"rank 1 is already taken by a process on h1"#)
    );
    send_text(&mut rank_0, &format!(r#"{{"register":{}}}"#, member(0)));
    let roster = format!(r#"{{"ready":{{"members":[{},{}]}}}}"#, member(0), member(1));
    assert_eq!((receive_text(&mut rank_0), receive_text(&mut rank_1)), (roster.clone(), roster));
}
