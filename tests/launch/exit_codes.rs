//! Tests of the error messages and exit codes of `ringtrain` and `ringbench` when a job cannot start or its ranks
//! have different flags.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use crate::util::ranks::peers_text;
use crate::util::{FinishedProgram, finish};
use ringtrain::exit::Exit;

fn spawn(program: &str, folder: &Path, arguments: &[&str]) -> Child {
    let path = match program {
        "ringtrain" => env!("CARGO_BIN_EXE_ringtrain"),
        _ => env!("CARGO_BIN_EXE_ringbench"),
    };
    Command::new(path)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn assert_fails(done: &FinishedProgram, exit: Exit, message: &str) {
    let errors = done.stderr();
    assert_eq!(done.code(), Some(exit as i32), "{errors}");
    assert!(errors.contains(message), "`{message}` is missing: {errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}

/// Each case starts a single rank with wrong arguments or files.
#[test]
fn wrong_arguments_and_files_are_reported_with_the_right_exit_codes() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let two = peers_text(2);
    write("two.txt", &two);
    write("far.txt", "127.0.0.1:4001\n192.0.2.7:4001\n");
    write("twice.txt", "127.0.0.1:4001\n127.0.0.1:4001\n");
    write("port.txt", "127.0.0.1:4001\n127.0.0.1:99999\n");
    write("empty.txt", "# no rank\n");
    write("short-secret", "tooshort\n");
    let cases: &[(&[&str], Exit, &str)] = &[
        (&["--no-such-flag"], Exit::Usage, "--no-such-flag"),
        (&["--rank", "1"], Exit::Usage, "--peers"),
        (&["--peers", "two.txt"], Exit::Usage, "--rank"),
        (&["--timeout", "0"], Exit::Usage, "is not a number of seconds from 0.001"),
        (&["--timeout", "0.000001"], Exit::Usage, "from 0.001"),
        (&["--data", "X.npy,"], Exit::Usage, "has no second file name"),
        (&["--peers", "/dev/zero", "--rank", "0"], Exit::Configuration, "too long for a list of hosts"),
        (
            &["--peers", "two.txt", "--rank", "0", "--secret-file", "/dev/zero"],
            Exit::Configuration,
            "too many for a secret",
        ),
        (&["--segment-bytes", "100"], Exit::Usage, "is not a multiple of 64"),
        (&["--tcp-congestion", "no/such"], Exit::Usage, "is not a possible name of a congestion control"),
        (&["--tcp-pacing", "940"], Exit::Usage, "for example 940mbit"),
        (&["--streams", "9"], Exit::Usage, "neither auto nor a number from 1 to 8"),
        (
            &["--peers", "two.txt", "--rank", "1", "--tcp-congestion", "nosuch"],
            Exit::Configuration,
            "not available",
        ),
        (&["--peers", "two.txt", "--rank", "2"], Exit::Configuration, "rank 2 is out of range"),
        (&["--peers", "nowhere.txt", "--rank", "0"], Exit::Configuration, "nowhere.txt cannot be read"),
        (&["--peers", "far.txt", "--rank", "0"], Exit::Configuration, "the job has no secret"),
        (&["--peers", "twice.txt", "--rank", "0"], Exit::Configuration, "twice.txt, line 2"),
        (&["--peers", "port.txt", "--rank", "0"], Exit::Configuration, "`99999` is not a port"),
        (&["--peers", "empty.txt", "--rank", "0"], Exit::Configuration, "names no rank"),
        (
            &["--peers", "two.txt", "--rank", "0", "--secret-file", "short-secret"],
            Exit::Configuration,
            "at least 16",
        ),
        (
            &["--peers", "two.txt", "--rank", "0", "--secret-file", "no-secret"],
            Exit::Configuration,
            "no-secret",
        ),
        (&["--peers", "two.txt", "--rank", "0", "--start-timeout", "0.2"], Exit::Start, "missing rank 1"),
        (
            &["--peers", "two.txt", "--rank", "1", "--start-timeout", "0.2"],
            Exit::Start,
            "rank 0 at 127.0.0.1",
        ),
    ];
    for (arguments, exit, message) in cases {
        let done = finish(spawn("ringtrain", folder.path(), arguments));
        assert_fails(&done, *exit, message);
    }
}

/// If only some of torchrun's variables are set, ringtrain must not train alone.
#[test]
fn a_world_size_without_a_rank_is_an_error() {
    let done = Command::new(env!("CARGO_BIN_EXE_ringtrain")).env("WORLD_SIZE", "4").output().unwrap();
    assert_eq!(done.status.code(), Some(Exit::Configuration as i32));
    assert!(String::from_utf8_lossy(&done.stderr).contains("WORLD_SIZE is set but RANK is not"));
}

/// If only some of ringrun's variables are set, ringtrain must not train alone.
#[test]
fn a_rank_without_a_rendezvous_address_is_an_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringtrain"));
    let done = command.env("RING_RANK", "1").env("RING_WORLD_SIZE", "2").output().unwrap();
    assert_eq!(done.status.code(), Some(Exit::Configuration as i32));
    assert!(String::from_utf8_lossy(&done.stderr).contains("RING_RANK is set but RING_RENDEZVOUS is not"));
}

#[test]
fn a_port_in_use_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap();
    fs::write(folder.path().join("hosts.txt"), format!("{taken}\n{}\n", peers_text(1))).unwrap();
    let done = finish(spawn("ringtrain", folder.path(), &["--peers", "hosts.txt", "--rank", "0"]));
    assert_fails(&done, Exit::PortInUse, &format!("port {} on 127.0.0.1 is in use", taken.port()));
}

#[test]
fn a_wrong_secret_and_a_different_peers_file_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let text = peers_text(2);
    let lines: Vec<&str> = text.lines().collect();
    fs::write(folder.path().join("hosts.txt"), &text).unwrap();
    fs::write(folder.path().join("other.txt"), format!("{}\nlocalhost:{}\n", lines[0], 4003)).unwrap();
    fs::write(folder.path().join("ours"), "the secret of rank 0").unwrap();
    fs::write(folder.path().join("theirs"), "a different secret").unwrap();
    let rank0 = ["--peers", "hosts.txt", "--rank", "0", "--secret-file", "ours", "--start-timeout", "3"];
    let first = spawn("ringtrain", folder.path(), &rank0);
    let second = ["--peers", "hosts.txt", "--rank", "1", "--secret-file", "theirs"];
    assert_fails(
        &finish(spawn("ringtrain", folder.path(), &second)),
        Exit::Secret,
        "its secret differs from the secret of this rank",
    );
    let third = ["--peers", "other.txt", "--rank", "1", "--secret-file", "ours"];
    let done = finish(spawn("ringtrain", folder.path(), &third));
    assert_fails(&done, Exit::Configuration, "its peers file differs");
    // Rank 0 keeps waiting for a valid rank 1. When the start timeout has passed, rank 0 reports both refused
    // processes.
    let done = finish(first);
    assert_fails(&done, Exit::Start, "missing rank 1");
    for part in ["still waiting for rank 1 (", "its secret differs", "its peers file differs"] {
        assert!(done.stderr().contains(part), "{}", done.stderr());
    }
}

/// A protocol version that this program does not speak.
const OTHER_PROTOCOL_VERSION: u8 = 200;

#[test]
fn another_protocol_version_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    fs::write(folder.path().join("hosts.txt"), format!("{address}\n{}\n", peers_text(1))).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 104];
        stream.read_exact(&mut hello).unwrap();
        let mut answer = [0; 80];
        answer[..8].copy_from_slice(&hello[..8]);
        answer[8] = OTHER_PROTOCOL_VERSION;
        stream.write_all(&answer).unwrap();
    });
    let done = finish(spawn("ringtrain", folder.path(), &["--peers", "hosts.txt", "--rank", "1"]));
    assert_fails(&done, Exit::Version, &format!("protocol version {OTHER_PROTOCOL_VERSION}"));
    server.join().unwrap();
}

#[test]
fn flags_that_differ_between_ranks_are_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hosts.txt"), peers_text(2)).unwrap();
    let start = |rank: &str, flags: &[&str]| {
        let arguments = [flags, &["-b", "8", "--peers", "hosts.txt", "--rank", rank]].concat();
        spawn("ringbench", folder.path(), &arguments)
    };
    let cases: [(&[&str], &str); 3] = [
        (&["all_reduce", "-e", "16"], "-e (--max-bytes)"),
        (&["broadcast", "-e", "8"], "OPERATION"),
        (&["all_reduce", "-e", "8", "-n", "3", "-c", "0"], "-n (--iters), -c (--check)"),
    ];
    for (flags, expected) in cases {
        let (first, second) = (start("0", &["all_reduce", "-e", "8"]), start("1", flags));
        for done in [finish(first), finish(second)] {
            assert_fails(
                &done,
                Exit::Mismatch,
                &format!("rank 1 and rank 0 were started with different flags ({expected}"),
            );
            assert!(done.stdout.is_empty(), "unexpected results: {}", done.stdout());
        }
    }
}
