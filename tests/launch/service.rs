//! Tests of `ringtrain` as a service: the test plays the service manager.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::util::ranks::peers_text;
use crate::util::{TEST_TIMEOUT, finish, read_pid, send_signal};

/// A run that does not end before the test stops it.
const RUN: &str = "--data synthetic:800x5 --task regression --model mlp:7 --batch-size 8 --epochs 1000000 --test-fraction 0 \
                   --timeout 600 --quiet";
/// The time within which the service manager of the test expects a sign of life.
const WATCHDOG_TIMEOUT: Duration = Duration::from_millis(400);

/// Starts a rank of a job of two ranks.
fn start_rank(directory: &Path, rank: u32, options: &[&str], add: impl FnOnce(&mut Command)) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringtrain"));
    command
        .args(RUN.split_whitespace())
        .args(["--peers", "hosts.txt", "--rank", &rank.to_string()])
        .args(options);
    command.current_dir(directory).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    add(&mut command);
    command.spawn().expect("ringtrain starts")
}

/// The socket of the service manager.
struct Manager(UnixDatagram);

impl Manager {
    /// Returns the next message, or `None` if there is none within `timeout`.
    fn receive(&self, timeout: Duration) -> Option<String> {
        let mut bytes = [0; 4096];
        self.0.set_read_timeout(Some(timeout)).expect("a timeout");
        let length = self.0.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }

    /// Waits for a message that begins with `text`, and returns it.
    fn wait_for(&self, text: &str) -> String {
        loop {
            let message = self.receive(TEST_TIMEOUT).unwrap_or_else(|| panic!("no message `{text}`"));
            if message.starts_with(text) {
                return message;
            }
        }
    }
}

#[test]
fn the_service_manager_learns_the_state_of_a_rank() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    fs::write(path("hosts.txt"), peers_text(2)).expect("a file");
    fs::write(path("pid"), "4194304\n").expect("a file");
    let manager = Manager(UnixDatagram::bind(path("notify")).expect("a socket"));
    let journal = File::create(path("journal")).expect("a file");
    let stream = journal.metadata().map(|journal| format!("{}:{}", journal.dev(), journal.ino()));
    let options = ["--pid-file", "pid", "--log-level-file", "level"];
    let watched = start_rank(directory.path(), 0, &options, |command| {
        command.env("NOTIFY_SOCKET", path("notify"));
        command.env("WATCHDOG_USEC", WATCHDOG_TIMEOUT.as_micros().to_string());
        command.env("JOURNAL_STREAM", stream.expect("metadata")).stderr(journal);
    });
    assert_eq!(manager.wait_for("STATUS"), "STATUS=waiting until all ranks have joined");
    let second = start_rank(directory.path(), 1, &["--pid-file", "pid"], |_| ());
    let refused = finish(second);
    assert_eq!(refused.code(), Some(3), "{}", refused.stderr());
    let expected = format!("--pid-file pid: process {} is running and holds this file", watched.id());
    assert!(refused.stderr().contains(&expected), "{}", refused.stderr());

    let other = start_rank(directory.path(), 1, &[], |_| ());
    manager.wait_for("READY=1");
    assert_eq!(read_pid(&path("pid")), watched.id());
    manager.wait_for("WATCHDOG=1");
    assert!(manager.wait_for("STATUS=epoch ").contains(" of 1000000, step "));

    fs::write(path("level"), "info\n").expect("a file");
    send_signal("HUP", watched.id());
    assert!(manager.wait_for("RELOADING=1").contains("\nMONOTONIC_USEC="));
    assert_eq!(manager.wait_for("READY=1"), "READY=1");

    // While the other rank does not compute, the loop of the watched rank cannot take a step.
    send_signal("STOP", other.id());
    let is_silent = (0..50).any(|_| manager.receive(2 * WATCHDOG_TIMEOUT).is_none());
    assert!(is_silent, "the rank gives signs of life while its training loop hangs");
    send_signal("CONT", other.id());
    manager.wait_for("WATCHDOG=1");

    send_signal("TERM", watched.id());
    manager.wait_for("STOPPING=1");
    for rank in [watched, other] {
        let done = finish(rank);
        assert_eq!(done.code(), Some(0), "{}", done.stderr());
    }
    assert!(!path("pid").exists());
    let log = fs::read_to_string(path("journal")).expect("a log");
    assert!(log.contains("<6>ringtrain::cli::train::service: the log level is INFO\n"), "{log}");
    assert!(log.lines().all(|line| line.starts_with('<')), "{log}");
}

#[test]
fn systemd_accepts_the_unit() {
    let found = Command::new("systemd-analyze").arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        eprintln!("the check of the unit is SKIPPED, because there is no systemd-analyze");
        return;
    }
    let text = include_str!("../../deploy/systemd/ringtrain@.service");
    let directory = tempfile::tempdir().expect("a directory");
    let verify = |text: &str| {
        let unit = directory.path().join("ringtrain@1.service");
        let program = env!("CARGO_BIN_EXE_ringtrain");
        fs::write(&unit, text.replace("/usr/bin/ringtrain", program)).expect("a file");
        let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output();
        let output = output.expect("systemd-analyze runs");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(verify(text), (true, String::new()));
    let (_, errors) = verify(&text.replace("WatchdogSec", "WatchdogSecond"));
    assert!(errors.contains("Unknown key"), "{errors}");
}
