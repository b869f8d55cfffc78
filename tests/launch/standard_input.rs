//! Checks which rank reads the standard input of `ringrun`.

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom, Write as _, pipe};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use crate::progress::open_terminal;
use crate::util::{finish, ringrun, ringrun_script, run};

/// Each rank prints its number and its standard input.
const PRINT_INPUT: &str = "echo \"$RING_RANK: $(cat)\"";

#[test]
fn rank_0_reads_pipes_files_and_sockets() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("input");
    fs::write(&path, "already read, input").unwrap();
    let mut file = File::open(&path).unwrap();
    file.seek(SeekFrom::Start("already read, ".len() as u64)).unwrap();
    let (pipe, mut pipe_writer) = pipe().unwrap();
    pipe_writer.write_all(b"input").unwrap();
    drop(pipe_writer);
    let (socket, mut socket_writer) = UnixStream::pair().unwrap();
    socket_writer.write_all(b"input").unwrap();
    socket_writer.shutdown(Shutdown::Write).unwrap();
    let inputs = [Stdio::from(file), Stdio::from(pipe), Stdio::from(OwnedFd::from(socket))];
    for (index, input) in inputs.into_iter().enumerate() {
        let done = run(ringrun_script(&["-n", "3", "--no-tag-output"], PRINT_INPUT).stdin(input));
        assert_eq!(done.sorted_lines(), ["0: input", "1: ", "2: "], "{index}: {}", done.stderr());
    }
}

#[test]
fn no_rank_reads_standard_input_with_stdin_none() {
    let (pipe, mut writer) = pipe().unwrap();
    writer.write_all(b"input").unwrap();
    let options = ["-n", "2", "--no-tag-output", "--stdin", "none"];
    let done = run(ringrun_script(&options, "readlink /proc/self/fd/0").stdin(pipe));
    assert_eq!(done.sorted_lines(), ["/dev/null", "/dev/null"], "{}", done.stderr());
}

/// The input is longer than all buffers, and one rank does not read it.
#[test]
fn all_ranks_read_a_copy_with_stdin_all() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("input");
    fs::write(&path, "0123456789abcde\n".repeat(100_000)).unwrap();
    let script = "[ $RANK = 1 ] || cksum";
    let expected =
        run(Command::new("cksum").stdin(File::open(&path).unwrap()).stdout(Stdio::piped())).stdout();
    let options = ["-n", "3", "--no-tag-output", "--stdin", "all"];
    let done = run(ringrun_script(&options, script).stdin(File::open(&path).unwrap()));
    assert_eq!(done.stdout(), expected.repeat(2), "{}", done.stderr());
    let done = run(ringrun_script(&options, PRINT_INPUT).stdin(Stdio::null()));
    assert_eq!(done.sorted_lines(), ["0: ", "1: ", "2: "], "{}", done.stderr());
}

/// If a rank read the terminal, the kernel would stop the rank, because ringrun runs in the background. Then `--job-timeout`
/// would end the job.
#[test]
fn a_background_job_on_a_terminal_is_not_stopped() {
    let (_master, slave) = open_terminal();
    let options = "-n 2 --no-tag-output --job-timeout 60";
    let script = format!("set -m; \"$@\" {options} -- sh -c '{PRINT_INPUT}' & wait $!; echo \"code $?\"");
    let mut command = Command::new("setsid");
    command.args(["--ctty", "bash", "-c", &script, "bash", env!("CARGO_BIN_EXE_ringrun")]);
    let done = finish(command.stdin(slave).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(done.sorted_lines(), ["0: ", "1: ", "code 0"], "{}", done.stderr());
}

/// Rank 0 gets `/dev/null` instead of the terminal, so ringrun itself has to report the terminal.
#[test]
fn ringtrain_does_not_read_a_table_from_a_terminal() {
    let (_master, slave) = open_terminal();
    let arguments = ["ringtrain", "--data", "-", "--target", "y"];
    let single = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringtrain"));
        command.args(&arguments[1..]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    for mut command in [ringrun(&[&["-n", "2"][..], &arguments].concat()), single()] {
        let done = run(command.stdin(slave.try_clone().unwrap()));
        let expected = "error: standard input: is a terminal; pipe a table into it";
        assert!(done.stderr().contains(expected), "{}", done.stderr());
        assert_eq!((done.code(), done.stderr().lines().count()), (Some(4), 1), "{}", done.stderr());
    }
}
