//! Kills ranks by SIGKILL at different moments. The surviving ranks must name the killed rank, and no process, file
//! or listening socket may be left behind.

use std::fs;
use std::io::Read as _;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::{RngExt as _, SeedableRng as _};

use crate::util::{
    finish, is_alive, processes_with_environment, ringrun, runs_long_tests, send_signal, wait_for,
    wait_until, wait_until_gone,
};
use ringtrain::exit::Exit;

/// The arguments of a training run that lasts longer than any test.
const ENDLESS_RUN_ARGUMENTS: [&str; 6] =
    ["--epochs", "1000000", "--report", "report.json", "--start-timeout", "5"];

/// The names of the tested transports: shared memory, TCP, and two simulated hosts with two ranks each (`hosts`).
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "hosts"];

/// Combines each case with every transport. Without `--full`, combines each case with only one transport.
fn with_transports<T: Copy>(cases: &[T]) -> Vec<(T, &'static str)> {
    let is_chosen =
        |index: usize, transport: usize| runs_long_tests() || index % TRANSPORTS.len() == transport;
    let all = cases.iter().enumerate().flat_map(|(index, &case)| {
        TRANSPORTS.into_iter().enumerate().map(move |(transport, name)| (index, transport, case, name))
    });
    all.filter(|&(index, transport, ..)| is_chosen(index, transport))
        .map(|(_, _, case, name)| (case, name))
        .collect()
}

/// Starts `n` ranks in the folder without a launcher. The ranks find each other by a peers file, which lists the
/// addresses of all ranks.
fn start_with_peers_file(folder: &Path, n: usize, transport: &str) -> Vec<Child> {
    fs::write(folder.join("hosts.txt"), crate::util::ranks::peers_text(n)).unwrap();
    (0..n)
        .map(|rank| {
            Command::new(env!("CARGO_BIN_EXE_ringtrain"))
                .args(["--peers", "hosts.txt", "--rank", &rank.to_string()])
                .args(ENDLESS_RUN_ARGUMENTS)
                .args(transport_arguments(transport, rank))
                .current_dir(folder)
                .stdin(Stdio::null())
                .stdout(fs::File::create(folder.join(format!("{rank}.out"))).unwrap())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

/// Waits until `condition` returns true. Panics with the error of a rank that ends before.
fn wait_while_ranks_run(what: &str, ranks: &mut [Child], mut condition: impl FnMut() -> bool) {
    wait_until(what, || {
        let ended =
            ranks.iter_mut().find_map(|rank| rank.try_wait().unwrap().and_then(|_| rank.stderr.take()));
        if let Some(mut stderr) = ended {
            let mut error = String::new();
            stderr.read_to_string(&mut error).unwrap();
            panic!("a rank ended while the test waited for: {what}\n{error}");
        }
        condition()
    });
}

/// Returns the arguments of `ringtrain` that make a rank use the transport.
fn transport_arguments(transport: &str, rank: usize) -> Vec<String> {
    match transport {
        "hosts" => vec!["--host-id".into(), (rank / 2).to_string()],
        other => vec!["--transport".into(), other.into()],
    }
}

/// Returns a shell script that runs the command in the script's arguments. The script adds arguments to the command,
/// so that the command uses the transport.
fn transport_script(transport: &str) -> &'static str {
    match transport {
        "hosts" => r#"exec "$0" "$@" --host-id $((RING_RANK / 2))"#,
        "tcp" => r#"exec "$0" "$@" --transport tcp"#,
        _ => r#"exec "$0" "$@" --transport shm"#,
    }
}

/// Kills `victim`, checks the messages of all survivors, and returns the time until the last survivor ended.
fn kill_rank_and_check_survivors(mut ranks: Vec<Child>, victim: usize, folder: &Path) -> Duration {
    let mut killed = ranks.remove(victim);
    send_signal("KILL", killed.id());
    let killed_at = Instant::now();
    killed.wait().unwrap();
    let mut unaccepted = 0;
    for survivor in ranks {
        let done = finish(survivor);
        let errors = done.stderr();
        // If rank 0 ends before it has accepted a survivor's connection, this survivor only knows that rank 0 did not
        // answer.
        if victim != 0 && done.code() == Some(Exit::Start as i32) && errors.contains("did not answer") {
            unaccepted += 1;
            continue;
        }
        // A victim that was killed during its handshake is a missing rank for the survivors, and not a lost peer. The
        // two cases have different messages and exit codes.
        let was_missing = done.code() == Some(Exit::Start as i32)
            && (errors.contains("missing rank") || (victim == 0 && errors.contains("did not answer")));
        assert!(was_missing || done.code() == Some(Exit::PeerLost as i32), "{errors}");
        assert!(errors.contains(&format!("rank {victim}")), "victim {victim}: {errors}");
        assert!(errors.contains("127.0.0.1"), "the message should name the host: {errors}");
    }
    assert!(unaccepted <= 1, "rank 0 did not answer {unaccepted} of the survivors");
    let took = killed_at.elapsed();
    // No listening socket may be left, and no file except the files of the test.
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
fn all_other_ranks_name_a_rank_that_is_killed_while_training() {
    for (victim, transport) in with_transports(&[0, 1, 2, 3]) {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = start_with_peers_file(folder.path(), 4, transport);
        wait_while_ranks_run("training is under way", &mut ranks, || {
            fs::read_to_string(folder.path().join("0.out")).unwrap().contains("epoch 2/")
        });
        let took = kill_rank_and_check_survivors(ranks, victim, folder.path());
        println!("{transport}, rank {victim} killed: the last survivor ended after {took:?}");
    }
}

/// The test kills the victim after delays of 0 to 120 ms, between the rendezvous and the first epochs. The test uses
/// delays, because the victim prints nothing that the test could wait for.
#[test]
fn all_other_ranks_name_a_rank_that_is_killed_while_starting() {
    let moments = [(1, 0), (2, 3), (3, 8), (1, 15), (2, 25), (3, 40), (0, 30), (1, 80), (0, 120)];
    for ((victim, delay_ms), transport) in with_transports(&moments) {
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = start_with_peers_file(folder.path(), 4, transport);
        // Wait until every rank has connected to rank 0. A rank that has not connected can only report that rank 0
        // did not answer.
        let rank0: SocketAddr = fs::read_to_string(folder.path().join("hosts.txt"))
            .unwrap()
            .lines()
            .next()
            .unwrap()
            .parse()
            .unwrap();
        let registered = format!(":{:04X}", rank0.port());
        wait_while_ranks_run("every rank has reached rank 0", &mut ranks, || {
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
        let took = kill_rank_and_check_survivors(ranks, victim, folder.path());
        println!(
            "{transport}, rank {victim} killed after {delay_ms} ms: the last survivor ended after {took:?}"
        );
    }
}

/// Regression test: before the fix, the launcher did not tell the waiting ranks that a rank had died. After 25 of 276
/// kills, the job needed 2 s to end.
#[test]
fn a_job_ends_soon_after_a_rank_is_killed_at_a_random_moment() {
    let seed = std::env::var("KILLS_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    let count = if runs_long_tests() { 300 } else { 4 };
    let mut random = rand::rngs::StdRng::seed_from_u64(seed);
    let mut times: Vec<Duration> = (0..count)
        .map(|kill| {
            let victim = random.random_range(0..4);
            // The delays also cover the start of the job, which takes about 150 ms.
            let delay = Duration::from_micros(random.random_range(0..300_000));
            let case = format!("KILLS_SEED={seed}, kill {kill}: rank {victim} after {delay:?}");
            let took = kill_rank_after(victim, delay, ["auto", "tcp"][kill % 2]);
            assert!(took < Duration::from_millis(1500), "{case}: the job ended after {took:?}");
            took
        })
        .collect();
    times.sort();
    let slow = times.iter().filter(|&&took| took > Duration::from_secs(1)).count();
    let (median, max) = (times[count / 2], times[count - 1]);
    println!("{count} kills (KILLS_SEED={seed}): median {median:?}, max {max:?}, {slow} over 1 s");
}

/// Starts a job of 4 ranks, and kills the process of rank `victim` after this process has run for `delay`. Returns
/// the time until the job ended.
fn kill_rank_after(victim: u32, delay: Duration, transport: &str) -> Duration {
    let mark = format!("KILLED_RANKS_TEST={}", rand::random::<u64>());
    let job =
        ringrun(&["-n", "4", "-x", &mark, "ringtrain", "--epochs", "1000000", "--transport", transport])
            .spawn()
            .unwrap();
    let rank = format!("RING_RANK={victim}");
    let pid = wait_for("the victim", || {
        let of_rank = processes_with_environment(&rank);
        processes_with_environment(&mark).into_iter().find(|pid| of_rank.contains(pid))
    });
    let moment = Instant::now() + delay;
    wait_until("the moment of the kill", || Instant::now() >= moment);
    send_signal("KILL", pid);
    let killed_at = Instant::now();
    let done = finish(job);
    let took = killed_at.elapsed();
    assert_eq!(done.code(), Some(128 + 9), "{}", done.stderr());
    wait_until_gone(&processes_with_environment(&mark));
    took
}

#[test]
fn ringrun_reports_the_rank_that_was_killed_and_leaves_no_process() {
    for victim in [0, 3] {
        let mark = format!("KILLED_RANKS_TEST={}", rand::random::<u64>());
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
            let (marked, of_rank) = (processes_with_environment(&mark), processes_with_environment(&rank));
            marked.into_iter().find(|pid| of_rank.contains(pid))
        });
        send_signal("KILL", pid);
        let done = finish(job);
        let errors = done.stderr();
        assert_eq!(done.code(), Some(128 + 9), "{errors}");
        assert!(errors.contains(&format!("rank {victim}")) && errors.contains("SIGKILL"), "{errors}");
        // The killed rank has written no exit record, so ringrun shows that of another rank.
        assert!(errors.contains(&format!("reported: a rank was lost: rank {victim} on ")), "{errors}");
        assert!(!errors.contains(&format!("ringrun: rank {victim} reported")), "{errors}");
        for survivor in (0..4).filter(|&rank| rank != victim) {
            let line = errors
                .lines()
                .find(|line| line.starts_with(&format!("[{survivor}]<stderr>:ringtrain: error")));
            assert!(
                line.is_some_and(|line| line.contains(&format!("rank {victim} on "))),
                "{survivor}: {errors}"
            );
        }
        assert!(!is_alive(pid));
        wait_until_gone(&processes_with_environment(&mark));
    }
}

/// Regression test: before the fix, ringrun did not tell the waiting ranks that a rank had died, so these ranks ended
/// only when ringrun stopped them.
#[test]
fn other_ranks_name_a_rank_that_dies_before_it_registers() {
    let script = r#"[ "$RING_RANK" = 1 ] && kill -9 $$; exec "$0" --start-timeout 10"#;
    let program = env!("CARGO_BIN_EXE_ringtrain");
    let done = finish(ringrun(&["-n", "2", "--grace", "100", "sh", "-c", script, program]).spawn().unwrap());
    let errors = done.stderr();
    let line = errors.lines().find(|line| line.starts_with("[0]<stderr>:ringtrain: error"));
    let parts = ["rank 1", "was lost while the job was starting", "SIGKILL"];
    assert!(line.is_some_and(|line| parts.iter().all(|part| line.contains(part))), "{errors}");
}

/// The sockets of a rank stopped by SIGSTOP stay open, so the other ranks notice the stopped rank only when an
/// operation passes its deadline.
#[test]
fn a_stopped_rank_is_named_when_an_operation_passes_its_deadline() {
    // Simulated networks also stop ranks in shared memory and over TCP.
    let transports = if runs_long_tests() { &TRANSPORTS[..] } else { &["hosts"] };
    for &transport in transports {
        let mark = format!("KILLED_RANKS_TEST={}", rand::random::<u64>());
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("logs");
        let job = ringrun(&["-n", "3", "-x", &mark, "--grace", "1", "--kill-after", "1"])
            .args(["--output-dir", output.to_str().unwrap(), "--", "sh", "-c", transport_script(transport)])
            .args([env!("CARGO_BIN_EXE_ringtrain"), "--epochs", "1000000", "--timeout", "0.5"])
            .spawn()
            .unwrap();
        wait_until("training is under way", || {
            fs::read_to_string(output.join("rank.0/stdout")).unwrap_or_default().contains("epoch 2/")
        });
        let (marked, of_rank) =
            (processes_with_environment(&mark), processes_with_environment("RING_RANK=1"));
        let pid = marked.into_iter().find(|pid| of_rank.contains(pid)).unwrap();
        send_signal("STOP", pid);
        let done = finish(job);
        let errors = done.stderr();
        assert_eq!(done.code(), Some(Exit::Timeout as i32), "{transport}: {errors}");
        assert!(errors.contains("did not end within 500 ms"), "{transport}: {errors}");
        assert!(errors.contains("all other ranks wait for rank 1 "), "{transport}: {errors}");
        wait_until_gone(&processes_with_environment(&mark));
    }
}
