//! Tests how ranks join a job, with a peers file or under a launcher, and which error a rank gets if it cannot join.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::util::ranks::{peers_file, peers_file_options, peers_text, server_options};
use crate::util::wait_until;
use ringtrain::rendezvous::{PeersFile, Server};
use ringtrain::wire::Secret;
use ringtrain::{Group, JoinOptions, Rank, ReduceOp, StartError};

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes()).unwrap()
}

/// Starts a thread for each element of `options`. Each thread joins the job as one rank, with these options. Returns
/// the results in the order of `options`: `Ok` if the thread has joined, or its error.
fn join_all(options: Vec<JoinOptions>) -> Vec<Result<(), StartError>> {
    let threads: Vec<_> = options
        .into_iter()
        .map(|options| {
            thread::spawn(move || {
                let mut group = Group::join(&options)?;
                let mut ones = [1.0f64];
                group.all_reduce(&mut ones, ReduceOp::Sum).expect("the links work");
                assert_eq!(ones[0], f64::from(group.size().get()));
                Ok(())
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn ranks_join_with_a_peers_file_in_any_order() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let (file, secret) = (peers_file(4), secret("a secret for this test"));
        let options = order.map(|rank| peers_file_options(&file, rank, &secret));
        for result in join_all(options.into()) {
            result.unwrap();
        }
    }
}

#[test]
fn a_job_on_loopback_needs_no_secret_with_ipv4_or_ipv6() {
    let file = peers_file(2);
    let options = [0, 1].map(|rank| peers_file_options(&file, rank, &Secret::none()));
    for result in join_all(options.into()) {
        result.unwrap();
    }
    let ports: Vec<String> = peers_text(2).lines().map(|line| line.replace("127.0.0.1", "[::1]")).collect();
    let file = PeersFile::parse(Path::new("hosts.txt"), &ports.join("\n")).unwrap();
    let options = [0, 1].map(|rank| peers_file_options(&file, rank, &Secret::none()));
    for result in join_all(options.into()) {
        result.unwrap();
    }
}

#[test]
fn addresses_beyond_loopback_need_a_secret() {
    let file = PeersFile::parse(Path::new("hosts.txt"), "127.0.0.1:4000\n192.0.2.1:4000\n").unwrap();
    let error = Group::join(&peers_file_options(&file, 0, &Secret::none())).err().unwrap();
    assert!(matches!(error, StartError::NeedsSecret { .. }), "{error}");
    assert!(error.to_string().contains("192.0.2.1:4000"), "{error}");
}

#[test]
fn a_rank_that_is_not_in_the_peers_file_is_refused() {
    let error = Group::join(&peers_file_options(&peers_file(2), 2, &Secret::none())).err().unwrap();
    assert_eq!(error.to_string(), "rank 2 is out of range: the job has 2 ranks, numbered from 0");
}

#[test]
fn a_port_in_use_is_named() {
    let file = peers_file(2);
    let taken = file.resolve(Rank::new(1)).unwrap();
    let _holder = TcpListener::bind(taken).unwrap();
    let error = Group::join(&peers_file_options(&file, 1, &Secret::none())).err().unwrap();
    assert!(matches!(error, StartError::PortInUse { address, .. } if address == taken), "{error}");
    assert!(error.to_string().contains(&taken.port().to_string()), "{error}");
}

#[test]
fn a_missing_rank_is_named() {
    let (file, secret) = (peers_file(4), secret("a secret for this test"));
    // Rank 2 waits longer. If it gave up first, rank 0 would name it as lost.
    let options =
        [(0, Duration::from_millis(700)), (2, Duration::from_secs(20))].map(|(rank, start_timeout)| {
            JoinOptions { start_timeout, ..peers_file_options(&file, rank, &secret) }
        });
    for result in join_all(options.into()) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(&file.name(Rank::new(1))), "{error}");
        assert!(error.contains(&file.name(Rank::new(3))), "{error}");
        assert!(!error.contains("rank 2"), "{error}");
    }
    let without_rank_0 = JoinOptions {
        start_timeout: Duration::from_millis(300),
        ..peers_file_options(&peers_file(2), 1, &secret)
    };
    let error = Group::join(&without_rank_0).err().unwrap();
    assert!(matches!(error, StartError::NoRendezvous { .. }), "{error}");
    assert!(error.to_string().starts_with("rank 0 at 127.0.0.1:"), "{error}");
}

/// Regression test: before the fix, the error of rank 0 said that rank 1 was missing. The error must say that rank 1
/// was refused because of its secret.
#[test]
fn a_wrong_secret_is_reported_on_both_ranks() {
    let file = peers_file(2);
    let short = Duration::from_millis(1500);
    let rank_0 =
        JoinOptions { start_timeout: short, ..peers_file_options(&file, 0, &secret("the secret of rank 0")) };
    let rank_1 = peers_file_options(&file, 1, &secret("a different secret"));
    let mut results = join_all(vec![rank_0, rank_1]);
    let error = results.pop().unwrap().unwrap_err();
    assert!(error.is_wrong_secret(), "{error}");
    assert!(error.to_string().contains("--secret-file"), "{error}");
    let error = results.pop().unwrap().unwrap_err();
    assert!(matches!(error, StartError::Missing { .. }), "{error}");
    let why = "that says it is rank 1 was refused: its secret differs";
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn a_different_peers_file_is_reported_on_both_ranks() {
    let text = peers_text(3);
    let secret = secret("a secret for this test");
    let file = PeersFile::parse(Path::new("hosts.txt"), &text).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let swapped =
        PeersFile::parse(Path::new("hosts.txt"), &[lines[0], lines[2], lines[1]].join("\n")).unwrap();
    let shorter = PeersFile::parse(Path::new("hosts.txt"), &lines[..2].join("\n")).unwrap();
    for (other, expected) in [(swapped, "peers file differs"), (shorter, "another number of ranks")] {
        let short = Duration::from_millis(1500);
        let rank_0 = JoinOptions { start_timeout: short, ..peers_file_options(&file, 0, &secret) };
        let rank_1 = peers_file_options(&other, 1, &secret);
        let mut results = join_all(vec![rank_0, rank_1]);
        let error = results.pop().unwrap().unwrap_err();
        assert!(error.is_configuration_error(), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        let error = results.pop().unwrap().unwrap_err().to_string();
        assert!(error.contains("that says it is rank 1 was refused") && error.contains(expected), "{error}");
    }
}

#[test]
fn a_second_process_with_the_same_rank_is_refused() {
    let (file, secret) = (peers_file(3), secret("a secret for this test"));
    let second = JoinOptions {
        method: ringtrain::JoinMethod::Peers {
            file: file.clone(),
            rank: Rank::new(1),
            // With the address of the first process, the error would be that the port is in use.
            bind: Some("127.0.0.2".parse().unwrap()),
        },
        ..peers_file_options(&file, 1, &secret)
    };
    let short = |options| JoinOptions { start_timeout: Duration::from_secs(2), ..options };
    let options = vec![
        short(peers_file_options(&file, 0, &secret)),
        short(peers_file_options(&file, 1, &secret)),
        short(second),
    ];
    let errors: Vec<String> =
        join_all(options).into_iter().map(|result| result.unwrap_err().to_string()).collect();
    let refused = errors.iter().filter(|error| error.contains("was this rank started twice?")).count();
    assert_eq!(refused, 1, "{errors:?}");
}

/// An HTTP server, and not rank 0, listens at the address of the rendezvous.
#[test]
fn a_server_of_another_protocol_at_the_rendezvous_is_reported() {
    let file = peers_file(2);
    let listener = TcpListener::bind(file.resolve(Rank::ZERO).unwrap()).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    let error = Group::join(&peers_file_options(&file, 1, &Secret::none())).err().unwrap();
    assert!(error.to_string().contains("does not speak ringtrain's protocol"), "{error}");
    server.join().unwrap();
}

/// A rank first checks the protocol version in a peer's answer. The rest of this answer is invalid.
#[test]
fn a_peer_with_another_version_is_reported() {
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
    let error = Group::join(&peers_file_options(&file, 1, &Secret::none())).err().unwrap();
    assert!(error.is_version_mismatch() && error.to_string().contains("version 99"), "{error}");
    server.join().unwrap();
}

/// If a rank dies between its registration and the start of the job, rank 0 names the dead rank before the start
/// timeout.
#[test]
fn a_rank_that_dies_while_others_wait_is_named() {
    let (file, secret) = (peers_file(3), secret("a secret for this test"));
    let rank0 = thread::spawn({
        let options = peers_file_options(&file, 0, &secret);
        move || Group::join(&options).err().unwrap()
    });
    let address = file.resolve(Rank::ZERO).unwrap();
    crate::util::wait_until("rank 0 listens", || TcpStream::connect(address).is_ok());
    // Registers as rank 2 and closes the connection, as if the process of rank 2 were killed.
    let mut stream = TcpStream::connect(address).unwrap();
    crate::util::shake_hands(&mut stream, &file, 2, &secret);
    let shared = r#"{"segment_bytes":1024,"checksums":"auto","processors":2,"streams":1}"#;
    let message = format!(
        r#"{{"register":{{"host":"doomed","machine":"m","address":"{}","shared":{shared}}}}}"#,
        file.resolve(Rank::new(2)).unwrap()
    );
    stream.write_all(&(message.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(message.as_bytes()).unwrap();
    drop(stream);
    let error = rank0.join().unwrap();
    assert!(
        matches!(&error, StartError::PeerLost { rank, host, .. } if rank.get() == 2 && host == "doomed"),
        "{error}"
    );
}

/// Regression test: before the fix, ranks that waited for a dead rank failed only at the start timeout, although the
/// launcher knew that this rank was dead.
#[test]
fn the_launcher_tells_waiting_ranks_which_rank_has_died() {
    let (world, secret, job_id) =
        (ringtrain::WorldSize::new(2).unwrap(), secret("a secret for this test"), [7; 16]);
    let start_timeout = Duration::from_secs(20);
    let server = Server::start(server_options(world, secret.clone(), job_id, start_timeout)).unwrap();
    let rendezvous = server.address();
    let rank = Rank::ZERO;
    let launched = ringtrain::rendezvous::LaunchedRank {
        listen: None,
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

/// Regression test: before the fix, the rendezvous ended when the start timeout had passed since the launch. Programs that
/// imported modules for longer than this timeout before they joined could not start.
#[test]
fn ranks_may_join_long_after_the_launch() {
    let world = ringtrain::WorldSize::new(2).unwrap();
    let secret = secret("a secret for this test");
    let started = std::time::Instant::now();
    let server_timeout = Duration::from_secs(2);
    let server = Server::start(server_options(world, secret.clone(), [7; 16], server_timeout)).unwrap();
    wait_until("the start timeout has passed since the launch", || started.elapsed() > server_timeout);
    let options = world.ranks().map(|rank| JoinOptions {
        method: ringtrain::JoinMethod::Launched(ringtrain::rendezvous::LaunchedRank {
            listen: None,
            rank,
            world,
            rendezvous: server.address(),
            job_id: [7; 16],
            start_timeout: None,
            local_processors: None,
        }),
        secret: secret.clone(),
        start_timeout: Duration::from_secs(20),
        ..JoinOptions::default()
    });
    for result in join_all(options.collect()) {
        result.unwrap();
    }
}

/// Regression test: before the fix, a rendezvous handled only one command after each wake-up. So if
/// a launcher reported two ended ranks and then stopped its rendezvous, the launcher waited until the start timeout.
#[test]
fn a_rendezvous_stops_at_once_after_several_ranks_have_ended() {
    let start_timeout = Duration::from_mins(1);
    let started = std::time::Instant::now();
    for _ in 0..100 {
        let world = ringtrain::WorldSize::new(4).unwrap();
        let secret = secret("a secret for this test");
        let server = Server::start(server_options(world, secret, [7; 16], start_timeout)).unwrap();
        for rank in 0..4 {
            server.rank_ended(Rank::new(rank), "it exited with code 1".into());
        }
    }
    assert!(started.elapsed() < start_timeout, "{:?}", started.elapsed());
}

/// Regression test: before the fix, a second process with rank 1 failed only at its timeout, and its error said that
/// the rendezvous did not answer.
#[test]
fn a_rank_that_is_started_again_is_told_that_the_job_runs() {
    let (file, secret) = (peers_file(2), secret("a secret for this test"));
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let is_done = std::sync::Mutex::new(is_done);
    let (file, secret) = (&file, &secret);
    thread::scope(|scope| {
        let (joined, has_joined) = std::sync::mpsc::channel();
        let rank0 = scope.spawn(move || {
            let mut group = Group::join(&peers_file_options(file, 0, secret)).unwrap();
            joined.send(()).unwrap();
            // Rank 0 answers peers only inside a call of the library. During this call, rank 0 answers the second
            // process that claims to be rank 1.
            group.barrier().unwrap();
        });
        let rank1 = scope.spawn(move || {
            let mut group = Group::join(&peers_file_options(file, 1, secret)).unwrap();
            is_done.lock().unwrap().recv().unwrap();
            group.barrier().unwrap();
        });
        has_joined.recv().unwrap();
        let bind = Some("127.0.0.2".parse().unwrap());
        let method = ringtrain::JoinMethod::Peers { file: file.clone(), rank: Rank::new(1), bind };
        let again =
            Group::join(&JoinOptions { method, ..peers_file_options(file, 1, secret) }).err().unwrap();
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
