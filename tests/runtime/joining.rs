//! Ranks that meet by a peers file, and everything that can be wrong with that.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::util::ranks::{options_by_file, peers_file, peers_text};
use ringtrain::rendezvous::PeersFile;
use ringtrain::wire::Secret;
use ringtrain::{Group, JoinOptions, Rank, ReduceOp, StartError};

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes()).unwrap()
}

/// Joins with each of the options in a separate thread, and returns the results without the groups.
fn join_all(options: Vec<JoinOptions>) -> Vec<Result<(), StartError>> {
    let threads: Vec<_> = options
        .into_iter()
        .map(|options| {
            thread::spawn(move || {
                let mut group = Group::join(&options)?;
                let mut ones = [1.0f64];
                group.all_reduce(&mut ones, ReduceOp::Sum).expect("the ring works");
                assert_eq!(ones[0], f64::from(group.size().get()));
                Ok(())
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn ranks_meet_by_a_file_in_any_order() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let (file, secret) = (peers_file(4), secret("a secret for this test"));
        let options = order.map(|rank| options_by_file(&file, rank, &secret));
        for result in join_all(options.into()) {
            result.unwrap();
        }
    }
}

#[test]
fn loopback_needs_no_secret_and_ipv6_works() {
    let file = peers_file(2);
    let options = [0, 1].map(|rank| options_by_file(&file, rank, &Secret::none()));
    for result in join_all(options.into()) {
        result.unwrap();
    }
    let ports: Vec<String> = peers_text(2).lines().map(|line| line.replace("127.0.0.1", "[::1]")).collect();
    let file = PeersFile::parse(Path::new("hosts.txt"), &ports.join("\n")).unwrap();
    let options = [0, 1].map(|rank| options_by_file(&file, rank, &Secret::none()));
    for result in join_all(options.into()) {
        result.unwrap();
    }
}

#[test]
fn other_addresses_need_a_secret() {
    let file = PeersFile::parse(Path::new("hosts.txt"), "127.0.0.1:4000\n192.0.2.1:4000\n").unwrap();
    let error = Group::join(&options_by_file(&file, 0, &Secret::none())).err().unwrap();
    assert!(matches!(error, StartError::NeedsSecret { .. }), "{error}");
    assert!(error.to_string().contains("192.0.2.1:4000"), "{error}");
}

#[test]
fn a_rank_beyond_the_file_is_refused() {
    let error = Group::join(&options_by_file(&peers_file(2), 2, &Secret::none())).err().unwrap();
    assert_eq!(error.to_string(), "rank 2 is out of range: there are 2 ranks, numbered 0 to 1");
}

#[test]
fn a_port_in_use_is_named() {
    let file = peers_file(2);
    let taken = file.resolve(Rank::new(1)).unwrap();
    let _holder = TcpListener::bind(taken).unwrap();
    let error = Group::join(&options_by_file(&file, 1, &Secret::none())).err().unwrap();
    assert!(matches!(error, StartError::PortInUse { address, .. } if address == taken), "{error}");
    assert!(error.to_string().contains(&taken.port().to_string()), "{error}");
}

#[test]
fn a_missing_rank_is_named() {
    let (file, secret) = (peers_file(4), secret("a secret for this test"));
    let options = [0, 2].map(|rank| JoinOptions {
        start_timeout: Duration::from_millis(700),
        ..options_by_file(&file, rank, &secret)
    });
    for result in join_all(options.into()) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(&file.name(Rank::new(1))), "{error}");
        assert!(error.contains(&file.name(Rank::new(3))), "{error}");
        assert!(!error.contains("rank 2"), "{error}");
    }
    let lonely = JoinOptions {
        start_timeout: Duration::from_millis(300),
        ..options_by_file(&peers_file(2), 1, &secret)
    };
    let error = Group::join(&lonely).err().unwrap();
    assert!(matches!(error, StartError::NoRendezvous { .. }), "{error}");
    assert!(error.to_string().starts_with("rank 0 at 127.0.0.1:"), "{error}");
}

/// The two ranks' secrets differ: the one that dials learns it at once, the other that somebody is missing.
#[test]
fn another_secret_is_told_to_the_rank_that_has_it() {
    let file = peers_file(2);
    let short = Duration::from_millis(1500);
    let ours =
        JoinOptions { start_timeout: short, ..options_by_file(&file, 0, &secret("the secret of rank 0")) };
    let theirs = options_by_file(&file, 1, &secret("a different secret"));
    let mut results = join_all(vec![ours, theirs]);
    let theirs = results.pop().unwrap().unwrap_err();
    assert!(theirs.is_secret(), "{theirs}");
    assert!(theirs.to_string().contains("--secret-file"), "{theirs}");
    let ours = results.pop().unwrap().unwrap_err();
    assert!(matches!(ours, StartError::Missing { .. }), "{ours}");
}

#[test]
fn a_peers_file_that_differs_is_told() {
    let text = peers_text(3);
    let secret = secret("a secret for this test");
    let file = PeersFile::parse(Path::new("hosts.txt"), &text).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let swapped =
        PeersFile::parse(Path::new("hosts.txt"), &[lines[0], lines[2], lines[1]].join("\n")).unwrap();
    let shorter = PeersFile::parse(Path::new("hosts.txt"), &lines[..2].join("\n")).unwrap();
    for (other, expected) in [(swapped, "peers file differs"), (shorter, "another number of ranks")] {
        let short = Duration::from_millis(1500);
        let ours = JoinOptions { start_timeout: short, ..options_by_file(&file, 0, &secret) };
        let theirs = options_by_file(&other, 1, &secret);
        let mut results = join_all(vec![ours, theirs]);
        let error = results.pop().unwrap().unwrap_err();
        assert!(error.is_configuration(), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(results.pop().unwrap().is_err());
    }
}

#[test]
fn the_same_rank_twice_is_refused() {
    let (file, secret) = (peers_file(3), secret("a secret for this test"));
    let second = JoinOptions {
        method: ringtrain::JoinMethod::Peers {
            file: file.clone(),
            rank: Rank::new(1),
            // The same rank on another address of this host, or its port would be found in use first.
            bind: Some("127.0.0.2".parse().unwrap()),
        },
        ..options_by_file(&file, 1, &secret)
    };
    let short = |options| JoinOptions { start_timeout: Duration::from_secs(2), ..options };
    let options = vec![
        short(options_by_file(&file, 0, &secret)),
        short(options_by_file(&file, 1, &secret)),
        short(second),
    ];
    let errors: Vec<String> =
        join_all(options).into_iter().map(|result| result.unwrap_err().to_string()).collect();
    let refused = errors.iter().filter(|error| error.contains("was it started twice?")).count();
    assert_eq!(refused, 1, "{errors:?}");
}

/// Something else listens where rank 0 should.
#[test]
fn a_stranger_at_the_rendezvous_is_recognised() {
    let file = peers_file(2);
    let listener = TcpListener::bind(file.resolve(Rank::ZERO).unwrap()).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    let error = Group::join(&options_by_file(&file, 1, &Secret::none())).err().unwrap();
    assert!(error.to_string().contains("does not speak ringtrain's protocol"), "{error}");
    server.join().unwrap();
}

/// A peer of another version says so before anything else is looked at.
#[test]
fn another_version_is_told() {
    let file = peers_file(2);
    let listener = TcpListener::bind(file.resolve(Rank::ZERO).unwrap()).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 104];
        stream.read_exact(&mut hello).unwrap();
        let mut answer = [0; 80];
        answer[..8].copy_from_slice(&hello[..8]);
        answer[8] = 99;
        answer[10] = 1;
        stream.write_all(&answer).unwrap();
    });
    let error = Group::join(&options_by_file(&file, 1, &Secret::none())).err().unwrap();
    assert!(error.is_version() && error.to_string().contains("version 99"), "{error}");
    server.join().unwrap();
}

/// A rank that dies between its registration and the start is named at once, not at the deadline.
#[test]
fn a_rank_that_dies_while_others_wait_is_named() {
    let (file, secret) = (peers_file(3), secret("a secret for this test"));
    let rank0 = thread::spawn({
        let options = options_by_file(&file, 0, &secret);
        move || Group::join(&options).err().unwrap()
    });
    let address = file.resolve(Rank::ZERO).unwrap();
    crate::util::wait_until("rank 0 listens", || TcpStream::connect(address).is_ok());
    // Registers by hand, as a process would that is killed right after.
    let mut stream = TcpStream::connect(address).unwrap();
    crate::util::shake_hands(&mut stream, &file, 2, &secret);
    let words = format!(
        r#"{{"register":{{"host":"doomed","machine":"m","address":"{}","shared":{{"segment_bytes":1024,"checks_payloads":false,"processors":2,"streams":1}}}}}}"#,
        file.resolve(Rank::new(2)).unwrap()
    );
    stream.write_all(&(words.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(words.as_bytes()).unwrap();
    drop(stream);
    let error = rank0.join().unwrap();
    assert!(
        matches!(&error, StartError::PeerLost { rank, host, .. } if rank.get() == 2 && host == "doomed"),
        "{error}"
    );
}
