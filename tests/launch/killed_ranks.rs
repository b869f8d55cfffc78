//! kill -9 of any rank, at any moment: the others say who died, nothing is left behind.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::util::{finish, is_alive, processes_with, ringrun, signal, wait_for, wait_until, wait_until_gone};
use ringtrain::exit::Exit;

/// Arguments of a training that goes on for longer than any test waits.
const ENDLESS: [&str; 6] = ["--epochs", "1000000", "--report", "report.json", "--start-timeout", "2"];

/// How ranks talk to each other.
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "hosts"];

/// Ranks that meet by a peers file, as from so many terminals, in a folder of their own.
fn start_by_file(folder: &Path, n: usize, transport: &str) -> Vec<Child> {
    fs::write(folder.join("hosts.txt"), crate::util::ranks::peers_text(n)).unwrap();
    (0..n)
        .map(|rank| {
            Command::new(env!("CARGO_BIN_EXE_ringtrain"))
                .args(["--peers", "hosts.txt", "--rank", &rank.to_string()])
                .args(ENDLESS)
                .args(grounds(transport, rank))
                .current_dir(folder)
                .stdin(Stdio::null())
                .stdout(fs::File::create(folder.join(format!("{rank}.out"))).unwrap())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

/// Arguments for a rank that shares memory with all ranks, with none, or with one.
fn grounds(transport: &str, rank: usize) -> Vec<String> {
    match transport {
        "hosts" => vec!["--host-id".into(), (rank / 2).to_string()],
        other => vec!["--transport".into(), other.into()],
    }
}

/// The same as a script that adds them to the command behind it.
fn with_host_id(transport: &str) -> &'static str {
    match transport {
        "hosts" => r#"exec "$0" "$@" --host-id $((RING_RANK / 2))"#,
        "tcp" => r#"exec "$0" "$@" --transport tcp"#,
        _ => r#"exec "$0" "$@" --transport shm"#,
    }
}

/// Kills `victim` and returns how long the last survivor took, having checked what all of them said.
fn kill_and_check(mut ranks: Vec<Child>, victim: usize, folder: &Path) -> Duration {
    let mut dead = ranks.remove(victim);
    signal("KILL", dead.id());
    let killed = Instant::now();
    dead.wait().unwrap();
    for survivor in ranks {
        let done = finish(survivor);
        let told = done.stderr();
        // Killed before it had proved its identity, a rank counts as one that never came.
        let never_came = done.code() == Some(Exit::Start as i32)
            && (told.contains("missing rank") || (victim == 0 && told.contains("did not answer")));
        assert!(never_came || done.code() == Some(Exit::PeerLost as i32), "{told}");
        assert!(told.contains(&format!("rank {victim}")), "victim {victim}: {told}");
        assert!(told.contains("127.0.0.1"), "the host is named: {told}");
    }
    let took = killed.elapsed();
    // No listener, and no file but those that the test made itself.
    for line in fs::read_to_string(folder.join("hosts.txt")).unwrap().lines() {
        let address: SocketAddr = line.parse().unwrap();
        wait_until("the port is free again", || TcpListener::bind(address).is_ok());
    }
    let mut left: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.retain(|name| name != "hosts.txt" && name.split_once('.').is_none_or(|(_, end)| end != "out"));
    assert!(left.is_empty(), "{left:?} left behind");
    took
}

#[test]
fn any_rank_that_is_killed_while_training_is_named_by_all_others() {
    for (victim, transport) in (0..4).flat_map(|victim| TRANSPORTS.map(|transport| (victim, transport))) {
        let folder = tempfile::tempdir().unwrap();
        let ranks = start_by_file(folder.path(), 4, transport);
        wait_until("training is under way", || {
            fs::read_to_string(folder.path().join("0.out")).unwrap().contains("epoch 2/")
        });
        let took = kill_and_check(ranks, victim, folder.path());
        println!("{transport}, rank {victim} killed: the last survivor ended after {took:?}");
    }
}

/// Moments from the rendezvous to well into training, which nothing that the victim prints tells apart.
#[test]
fn any_rank_that_is_killed_while_starting_is_named_by_all_others() {
    let moments = [(1, 0), (2, 3), (3, 8), (1, 15), (2, 25), (3, 40), (0, 30), (1, 80), (0, 120)];
    for ((victim, delay_ms), transport) in
        moments.into_iter().flat_map(|moment| TRANSPORTS.map(|transport| (moment, transport)))
    {
        let folder = tempfile::tempdir().unwrap();
        let ranks = start_by_file(folder.path(), 4, transport);
        // Rank 0 has to be there at least: those who never meet it can only say that it did not answer.
        let rank0: SocketAddr = fs::read_to_string(folder.path().join("hosts.txt"))
            .unwrap()
            .lines()
            .next()
            .unwrap()
            .parse()
            .unwrap();
        let registered = format!(":{:04X}", rank0.port());
        wait_until("every rank has reached rank 0", || {
            let table = fs::read_to_string("/proc/net/tcp").unwrap();
            let is_established = |line: &&str| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                fields.get(1).is_some_and(|local| local.ends_with(&registered))
                    && fields.get(3) == Some(&"01")
            };
            table.lines().filter(is_established).count() >= 3
                || fs::read_to_string(folder.path().join("0.out")).unwrap().contains("epoch")
        });
        let moment = Instant::now() + Duration::from_millis(delay_ms);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        let took = kill_and_check(ranks, victim, folder.path());
        println!(
            "{transport}, rank {victim} killed after {delay_ms} ms: the last survivor ended after {took:?}"
        );
    }
}

#[test]
fn ringrun_reports_the_rank_that_was_killed_and_leaves_nothing() {
    for victim in [0, 3] {
        let mark = format!("DEATH_TEST={}", rand::random::<u64>());
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("logs");
        let job = ringrun(&["-n", "4", "-x", &mark, "--output-dir", output.to_str().unwrap(), "ringtrain"])
            .args(["--epochs", "1000000"])
            .spawn()
            .unwrap();
        wait_until("training is under way", || {
            fs::read_to_string(output.join("rank.0/stdout")).unwrap_or_default().contains("epoch 2/")
        });
        let rank = format!("RING_RANK={victim}");
        let pid = wait_for("the victim", || {
            let (marked, of_rank) = (processes_with(&mark), processes_with(&rank));
            marked.into_iter().find(|pid| of_rank.contains(pid))
        });
        signal("KILL", pid);
        let done = finish(job);
        let told = done.stderr();
        assert_eq!(done.code(), Some(128 + 9), "{told}");
        assert!(told.contains(&format!("rank {victim}")) && told.contains("SIGKILL"), "{told}");
        for survivor in (0..4).filter(|&rank| rank != victim) {
            let line =
                told.lines().find(|line| line.starts_with(&format!("[{survivor}]<stderr>:ringtrain: error")));
            assert!(
                line.is_some_and(|line| line.contains(&format!("rank {victim} on "))),
                "{survivor}: {told}"
            );
        }
        assert!(!is_alive(pid));
        wait_until_gone(&processes_with(&mark));
    }
}

/// A stopped rank is no dead one: its sockets are open. The operation's deadline finds it.
#[test]
fn a_stopped_rank_is_found_by_the_deadline() {
    for transport in TRANSPORTS {
        let mark = format!("DEATH_TEST={}", rand::random::<u64>());
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("logs");
        let job = ringrun(&["-n", "3", "-x", &mark, "--grace", "1", "--kill-after", "1"])
            .args(["--output-dir", output.to_str().unwrap(), "--", "sh", "-c", with_host_id(transport)])
            .args([env!("CARGO_BIN_EXE_ringtrain"), "--epochs", "1000000", "--timeout", "0.5"])
            .spawn()
            .unwrap();
        wait_until("training is under way", || {
            fs::read_to_string(output.join("rank.0/stdout")).unwrap_or_default().contains("epoch 2/")
        });
        let (marked, of_rank) = (processes_with(&mark), processes_with("RING_RANK=1"));
        let pid = marked.into_iter().find(|pid| of_rank.contains(pid)).unwrap();
        signal("STOP", pid);
        let done = finish(job);
        let told = done.stderr();
        assert_eq!(done.code(), Some(Exit::Timeout as i32), "{transport}: {told}");
        assert!(told.contains("did not end within 500 ms"), "{transport}: {told}");
        assert!(told.contains("all other ranks wait for rank 1 "), "{transport}: {told}");
        wait_until_gone(&processes_with(&mark));
    }
}
