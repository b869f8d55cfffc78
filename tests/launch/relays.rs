//! Hosts that ringrun reaches through other hosts (`--ssh-fanout`), and the relay, which passes on the bytes.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use crate::hosts::{Lab, assert_failed};
use crate::util::{finish, read_pid, run, runs_long_tests, send_signal, wait_until};

const HOSTS: &str = "@0:2,@1,@2,@3:2";
const CHAIN: [&str; 2] = ["--ssh-fanout", "1"];

#[test]
fn no_host_runs_more_programs_ssh_than_the_fanout() {
    if !runs_long_tests() {
        return;
    }
    let Some(lab) = Lab::start(4) else { return };
    let long = format!("{}/input", lab.get("DIRECTORY"));
    fs::write(&long, "x".repeat(2_400_000)).expect("a file");
    for (fanout, programs_ssh) in [("1", [1, 1, 1, 0]), ("2", [1, 0, 1, 0])] {
        let option = ["--ssh-fanout", fanout];
        let print = ["--stdin", "all", "--", "sh", "-c", "echo $RANK $GROUP_RANK $(wc -c); echo error >&2"];
        let input = fs::File::open(&long).expect("a file");
        let job = run(lab.ringrun(HOSTS, &[&option[..], &print].concat()).stdin(input));
        let expected = [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 3)];
        let expected = expected.map(|(rank, host)| format!("[{rank}]<stdout>:{rank} {host} 2400000"));
        assert_eq!(job.sorted_lines(), expected, "{}", job.stderr());
        assert_eq!(job.stderr().matches("<stderr>:error").count(), 6, "{}", job.stderr());
        let train = ["ringtrain", "--epochs", "1", "--data", "synthetic:256x4"];
        let job = run(&mut lab.ringrun(HOSTS, &[&option[..], &train].concat()));
        assert_eq!(job.code(), Some(0), "{}", job.stderr());
        let job = lab.start_sleeping_ranks(HOSTS, &option, 6);
        let found = [0, 1, 2, 3].map(|host| lab.processes(host, "ssh").len());
        assert_eq!(found, programs_ssh, "fanout {fanout}");
        send_signal("TERM", job.id());
        assert_failed(&lab, &finish(job), 143, &["SIGTERM"]);
    }
}

#[test]
fn hosts_behind_a_lost_host_are_lost_with_it() {
    if !runs_long_tests() {
        return;
    }
    let Some(lab) = Lab::start(4) else { return };
    let host = |number: usize| lab.get(&format!("HOST_{number}")).to_owned();
    let behind = |number: usize| format!("host {}, reached from host {}: ", host(number), host(number - 1));
    let start = || lab.start_sleeping_ranks(HOSTS, &[&CHAIN[..], &["--grace", "0"]].concat(), 6);
    // Only the agent of host 0 is killed, and not its relay.
    let job = start();
    lab.kill(0, "ring-agent");
    let job = finish(job);
    assert_failed(&lab, &job, 6, &[&format!("host {}: its agent ended with exit code 137", host(0))]);
    assert!(!job.stderr().contains("it is lost with"), "{}", job.stderr());
    // ringrun is killed.
    let job = start();
    send_signal("KILL", job.id());
    finish(job);
    lab.wait_until_nothing_is_left();
    // The connection from host 0 to host 1 ends in three ways.
    for (number, program, reason) in [
        (0, "ssh", "a signal killed its ssh"),
        (1, "ring-relay", "the connection broke"),
        (1, "sshd", "the connection broke"),
    ] {
        let job = start();
        lab.kill(number, program);
        let with_it = format!("it is lost with host {}\n", host(1));
        let parts = [behind(1) + reason, behind(2) + &with_it, behind(3) + &with_it];
        let job = finish(job);
        assert_failed(&lab, &job, 6, &parts.each_ref().map(String::as_str));
        assert!(!job.stderr().contains(&format!("ringrun: host {}:", host(0))), "{}", job.stderr());
    }
}

#[test]
fn a_host_that_cannot_reach_another_host_is_named() {
    if !runs_long_tests() {
        return;
    }
    let Some(lab) = Lab::start(3) else { return };
    let host = |number: usize| lab.get(&format!("HOST_{number}")).to_owned();
    let hosts = "@0,@1,@2";
    // Host 1 does not have the key with which it should reach host 2.
    let key = lab.hide_directory(1, "keys") + "/key";
    fs::copy(lab.get("KEY"), &key).expect("a key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("permissions");
    let job = run(&mut lab.ringrun_with_key(&key, hosts, &[&CHAIN[..], &["true"]].concat()));
    let named = format!("host {}, reached from host {}: ssh failed: ", host(2), host(1));
    let advice = format!("allow ssh from {} to {}, or use --ssh-fanout 0", host(1), host(2));
    assert_failed(&lab, &job, 5, &[&named, "not accessible", "Permission denied", &advice]);
    assert_eq!(job.stderr().lines().count(), 1, "{}", job.stderr());
    // A program is missing on host 2 only.
    let program = lab.hide_directory(2, "only-0-and-1") + "/program";
    fs::copy("/bin/true", &program).expect("a program");
    let job = run(&mut lab.ringrun(hosts, &[&CHAIN[..], &[program.as_str()]].concat()));
    let named = format!("host {}, reached from host {}: command not found", host(2), host(1));
    assert_failed(&lab, &job, 127, &[&named]);
    // There is no ssh on host 0.
    let path = Command::new("sh").args(["-c", "command -v ssh"]).output().expect("sh runs").stdout;
    let path = String::from_utf8(path).expect("a path");
    let bind = ["-t", lab.get("SSHD_0"), "-m", "mount", "--bind", "/dev/null", path.trim()];
    assert!(Command::new("nsenter").args(bind).status().expect("nsenter runs").success());
    let job = run(&mut lab.ringrun(hosts, &[&CHAIN[..], &["true"]].concat()));
    assert_failed(&lab, &job, 5, &["ssh failed: cannot start ssh: ", "--ssh-fanout 0"]);
}

/// Starts a relay that finds this script as its ssh, and lets it open channel 1.
fn start_relay(directory: &Path, script: &str) -> Child {
    let ssh = directory.join("ssh");
    fs::write(&ssh, format!("#!/bin/sh\n{script}\n")).expect("a script");
    fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).expect("permissions");
    let mut relay = Command::new(env!("CARGO_BIN_EXE_ringrun"))
        .arg("--relay")
        .env("PATH", format!("{}:/usr/bin:/bin", directory.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the relay starts");
    // The frame of a message: the length, the kind 0, and JSON (see `frames.rs`).
    let message = br#"{"Open":{"channel":1,"ssh":[]}}"#;
    let open = [&(message.len() as u32).to_le_bytes()[..], &[0], message].concat();
    relay.stdin.as_mut().expect("a pipe").write_all(&open).expect("the relay reads");
    relay
}

/// Returns the value of a line of `/proc/PID/status`.
fn status_line(pid: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

fn wait_for_end(relay: &mut Child) -> ExitStatus {
    wait_until("the relay ends", || relay.try_wait().expect("a child").is_some());
    relay.wait().expect("a child")
}

/// A host that prints without end must not fill the memory of the relay while ringrun does not read.
#[test]
fn a_relay_stores_a_limited_number_of_bytes() {
    const BYTES: usize = 32 << 20;
    let directory = tempfile::tempdir().expect("a directory");
    let pid_file = directory.path().join("pid");
    let script =
        format!("echo $$ > {0}.new; mv {0}.new {0}; exec head -c {BYTES} /dev/zero", pid_file.display());
    let mut relay = start_relay(directory.path(), &script);
    let script = read_pid(&pid_file);
    // Nothing reads what the relay writes, so both of them soon sleep. A relay without a limit would sleep only at the end.
    let sleeps =
        |pid: u32| status_line(pid, "State").starts_with('S') || status_line(pid, "State").is_empty();
    wait_until("relay and script sleep", || {
        status_line(script, "Name") != "sh" && sleeps(script) && sleeps(relay.id())
    });
    let mut stdout = relay.stdout.take().expect("a pipe");
    let reader = thread::spawn(move || {
        let mut received = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        while !received.ends_with(br#"{"Ended":{"channel":1,"code":0}}"#) {
            let count = stdout.read(&mut buffer).expect("the relay writes");
            assert!(count > 0, "the relay has ended too early");
            received.extend_from_slice(&buffer[..count]);
        }
        received
    });
    wait_until("the relay has passed on everything", || reader.is_finished());
    let received = reader.join().expect("the reader ends");
    assert!(received.len() > BYTES && received.len() < BYTES + (1 << 18), "{} bytes", received.len());
    let peak = status_line(relay.id(), "VmHWM");
    let kib: usize = peak.trim_end_matches(" kB").parse().expect("a number");
    assert!(kib < BYTES >> 10, "the relay has used {peak}");
    drop(relay.stdin.take());
    assert!(wait_for_end(&mut relay).success());
}

/// The end of the relay's input is the end of the input of all its programs, also if the relay is killed.
#[test]
fn the_end_of_a_relay_ends_the_input_of_its_programs() {
    for is_killed in [false, true] {
        let directory = tempfile::tempdir().expect("a directory");
        let (started, ended) = (directory.path().join("started"), directory.path().join("ended"));
        let script = format!("touch {}; cat; touch {}", started.display(), ended.display());
        let mut relay = start_relay(directory.path(), &script);
        wait_until("the program runs", || started.exists());
        if is_killed {
            relay.kill().expect("the relay runs");
        } else {
            drop(relay.stdin.take());
        }
        wait_until("the program has read the end of its input", || ended.exists());
        assert_eq!(wait_for_end(&mut relay).success(), !is_killed);
    }
}
