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

/// The rank that waited only heard that rank 1 was missing, and not that it had come with another secret.
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
    let why = "that says it is rank 1 was refused: its secret is another one";
    assert!(ours.to_string().contains(why), "{ours}");
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
        let ours = results.pop().unwrap().unwrap_err().to_string();
        assert!(ours.contains("that says it is rank 1 was refused") && ours.contains(expected), "{ours}");
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
    let shared = r#"{"segment_bytes":1024,"checksums":"auto","processors":2,"streams":1}"#;
    let words = format!(
        r#"{{"register":{{"host":"doomed","machine":"m","address":"{}","shared":{shared}}}}}"#,
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

/// The launcher knew that a rank had died, and the ranks that waited for it learned that only from the start timeout.
#[test]
fn the_launcher_tells_waiting_ranks_that_one_has_died() {
    let (world, secret, job_id) =
        (ringtrain::WorldSize::new(2).unwrap(), secret("a secret for this test"), [7; 16]);
    let start_timeout = Duration::from_secs(20);
    let host = std::net::Ipv4Addr::LOCALHOST.into();
    let server =
        ringtrain::rendezvous::Server::start(host, world, secret.clone(), job_id, start_timeout).unwrap();
    let rendezvous = server.address();
    let rank = Rank::ZERO;
    let launched = ringtrain::rendezvous::Launched {
        rank,
        world,
        rendezvous,
        job_id,
        start_timeout: None,
        local_processors: None,
    };
    let method = ringtrain::JoinMethod::Launched(launched);
    let options = JoinOptions { method, secret, start_timeout, ..JoinOptions::default() };
    let started = std::time::Instant::now();
    let waiting = thread::spawn(move || Group::join(&options).err().unwrap());
    server.rank_ended(Rank::new(1), "it was killed by signal 9 (SIGKILL)".into());
    let error = waiting.join().unwrap();
    assert!(started.elapsed() < start_timeout / 2, "{:?}", started.elapsed());
    let StartError::PeerLost { rank, ref detail, .. } = error else { panic!("{error}") };
    assert_eq!((rank, detail.as_str()), (Rank::new(1), "it was killed by signal 9 (SIGKILL)"));
}

/// A launcher that reported two ended ranks and then stopped its rendezvous waited for the start timeout: one wake-up stood for
/// several commands.
#[test]
fn a_rendezvous_stops_at_once_after_several_ranks_have_ended() {
    let start_timeout = Duration::from_mins(1);
    let host = std::net::Ipv4Addr::LOCALHOST.into();
    let started = std::time::Instant::now();
    for _ in 0..100 {
        let world = ringtrain::WorldSize::new(4).unwrap();
        let secret = secret("a secret for this test");
        let server =
            ringtrain::rendezvous::Server::start(host, world, secret, [7; 16], start_timeout).unwrap();
        for rank in 0..4 {
            server.rank_ended(Rank::new(rank), "it exited with code 1".into());
        }
    }
    assert!(started.elapsed() < start_timeout, "{:?}", started.elapsed());
}

/// A second rank 1 was accepted while the job ran, and told after the timeout that the rendezvous did not answer.
#[test]
fn a_rank_that_is_started_again_is_told_that_the_job_runs() {
    let (file, secret) = (peers_file(2), secret("a secret for this test"));
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let is_done = std::sync::Mutex::new(is_done);
    let (file, secret) = (&file, &secret);
    thread::scope(|scope| {
        let (joined, has_joined) = std::sync::mpsc::channel();
        let rank0 = scope.spawn(move || {
            let mut group = Group::join(&options_by_file(file, 0, secret)).unwrap();
            joined.send(()).unwrap();
            // A rank answers while it is inside a call.
            group.barrier().unwrap();
        });
        let rank1 = scope.spawn(move || {
            let mut group = Group::join(&options_by_file(file, 1, secret)).unwrap();
            is_done.lock().unwrap().recv().unwrap();
            group.barrier().unwrap();
        });
        has_joined.recv().unwrap();
        let bind = Some("127.0.0.2".parse().unwrap());
        let method = ringtrain::JoinMethod::Peers { file: file.clone(), rank: Rank::new(1), bind };
        let again = Group::join(&JoinOptions { method, ..options_by_file(file, 1, secret) }).err().unwrap();
        done.send(()).unwrap();
        let address = file.resolve(Rank::new(1)).unwrap();
        let text = again.to_string();
        let expected =
            format!("the job already runs, and its rank 1 is another process, on 127.0.0.1 at {address}");
        assert!(text.contains(&expected), "{text}");
        rank0.join().unwrap();
        rank1.join().unwrap();
    });
}
