//! Checks the progress bar of rank 0 that ringrun shows on its terminal.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::util::{TEST_TIMEOUT, finish, ringrun, ringrun_script, run};

/// The control sequence that erases a line.
const ERASE_LINE_SEQUENCE: &str = "\r\x1b[K";

/// Opens a pseudo-terminal. Returns its master and its slave.
pub(crate) fn open_terminal() -> (File, File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let path = ptsname(&master, Vec::new()).unwrap();
    let slave = File::options().read(true).write(true).open(path.to_str().unwrap()).unwrap();
    (master.into(), slave)
}

/// A pseudo-terminal with 60 columns.
pub(crate) struct PseudoTerminal {
    /// The pieces that a thread reads from the terminal. The thread closes the channel when the terminal has ended.
    pieces: Receiver<Vec<u8>>,
    /// The bytes that the program has written so far.
    bytes: Vec<u8>,
    /// `bytes` as text.
    text: String,
}

impl PseudoTerminal {
    /// Starts a program whose standard error is a new terminal.
    fn start(command: &mut Command) -> (Self, Child) {
        let (master, slave) = Self::open();
        let child = command.stdout(Stdio::piped()).stderr(slave).spawn().unwrap();
        // `command` also holds the slave. The terminal ends only when no process has the slave open.
        command.stderr(Stdio::null());
        (Self::read(master), child)
    }

    /// Starts a program whose standard input and output are a new terminal. Also returns the keyboard of the terminal.
    pub(crate) fn start_interactive(command: &mut Command) -> (Self, Child, File) {
        let (master, slave) = Self::open();
        let keyboard = master.try_clone().unwrap();
        let child = command.stdin(slave.try_clone().unwrap()).stdout(slave).spawn().unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null());
        (Self::read(master), child, keyboard)
    }

    /// Returns what the program has written so far.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    fn open() -> (File, File) {
        let (master, slave) = open_terminal();
        tcsetwinsize(&master, Winsize { ws_row: 20, ws_col: 60, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        (master, slave)
    }

    /// Starts a thread that reads the terminal.
    fn read(mut master: File) -> Self {
        let (sender, pieces) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            // At the end of a pseudo-terminal, Linux returns an error.
            while let Ok(count @ 1..) = master.read(&mut buffer) {
                // After a failed test, the receiver is dropped, and this send fails.
                let _ = sender.send(buffer[..count].to_vec());
            }
        });
        Self { pieces, bytes: Vec::new(), text: String::new() }
    }

    /// Reads until the text contains `expected`. Reads to the end if `expected` is `None`.
    pub(crate) fn read_until(&mut self, expected: Option<&str>) {
        while !expected.is_some_and(|expected| self.text.contains(expected)) {
            match self.pieces.recv_timeout(TEST_TIMEOUT) {
                Ok(piece) => {
                    self.bytes.extend(piece);
                    self.text = String::from_utf8_lossy(&self.bytes).into_owned();
                }
                Err(RecvTimeoutError::Disconnected) if expected.is_none() => break,
                Err(error) => panic!("{error}: {expected:?} is not in {:?}", self.text),
            }
        }
    }
}

fn make_fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn the_unfinished_line_of_rank_0_stays_below_the_lines_of_all_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let fifos = [directory.path().join("0"), directory.path().join("1")];
    for path in &fifos {
        make_fifo(path);
    }
    let script = format!(
        "cd {}; if [ $RING_RANK = 0 ]; then printf '\\r10%%\\r50%%' >&2; read x < 0; printf '\\r\\033[K' >&2; \
         else read x < 1; printf '\\rone\\rtwo\\n' >&2; echo three; fi",
        directory.path().display()
    );
    let (mut terminal, child) = PseudoTerminal::start(&mut ringrun_script(&["-n", "2"], &script));
    terminal.read_until(Some("50%"));
    fs::write(&fifos[1], "go\n").unwrap();
    // Only the status line of rank 0 is shown. A line of another rank is printed unchanged.
    terminal.read_until(Some(&format!("{ERASE_LINE_SEQUENCE}[1]<stderr>:\rone\rtwo\r\n[0]<stderr>:50%")));
    fs::write(&fifos[0], "go\n").unwrap();
    terminal.read_until(None);
    let done = finish(child);
    assert_eq!((done.code(), done.stdout().as_str()), (Some(0), "[1]<stdout>:three\n"));
    assert!(
        terminal.text.starts_with(&format!("{ERASE_LINE_SEQUENCE}[0]<stderr>:50%")),
        "{:?}",
        terminal.text
    );
    assert!(terminal.text.ends_with(ERASE_LINE_SEQUENCE), "{:?}", terminal.text);
    assert_eq!(terminal.text.matches('\n').count(), 1, "{:?}", terminal.text);
}

#[test]
fn the_progress_bar_fits_and_leaves_standard_output_clean() {
    for (options, shows_bar) in [(&[][..], true), (&["--quiet"], false)] {
        let mut command = ringrun(&["-n", "2", "ringtrain", "--epochs", "1", "--data", "synthetic:1500x5"]);
        let (mut terminal, child) = PseudoTerminal::start(command.args(options));
        terminal.read_until(None);
        let done = finish(child);
        assert_eq!(done.code(), Some(0));
        assert!(!done.stdout().contains(['\r', '\x1b']), "{}", done.stdout());
        assert_eq!(done.stdout().contains("epoch 1/1: train loss"), shows_bar, "{}", done.stdout());
        assert_eq!(terminal.text.contains("[0]<stderr>:epoch 1/1 "), shows_bar, "{:?}", terminal.text);
        assert!(!terminal.text.contains('\n'), "{:?}", terminal.text);
        for line in terminal.text.split(ERASE_LINE_SEQUENCE) {
            assert!(line.chars().count() < 60, "{line:?}");
        }
    }
}

/// Log files, pipes and the files of `--output-dir` must not get progress bars.
#[test]
fn only_rank_0_gets_the_width_of_a_progress_bar_and_only_on_a_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let script = "echo columns=$RING_STATUS_COLUMNS";
    let piped = run(ringrun_script(&["-n", "2"], script).env("RING_STATUS_COLUMNS", "70"));
    assert_eq!(piped.sorted_lines(), ["[0]<stdout>:columns=", "[1]<stdout>:columns="]);
    for (options, expected) in [
        (&["-n", "2"][..], ["[0]<stdout>:columns=47", "[1]<stdout>:columns="]),
        (&["-n", "2", "--output-dir", place], ["[0]<stdout>:columns=", "[1]<stdout>:columns="]),
    ] {
        let (mut terminal, child) = PseudoTerminal::start(&mut ringrun_script(options, script));
        terminal.read_until(None);
        assert_eq!(finish(child).sorted_lines(), expected, "{options:?}");
    }
}
