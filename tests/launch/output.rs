//! Checks the environment of the ranks that ringrun starts, and their output.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::util::{finish, ringrun, ringrun_script, run, send_signal, wait_until, wait_until_gone};

#[test]
fn each_rank_finds_its_rank_and_the_world_size_in_its_environment() {
    let done = run(&mut ringrun_script(
        &["-n", "3"],
        "echo $RING_RANK $RING_WORLD_SIZE $RANK $WORLD_SIZE $LOCAL_RANK $HOROVOD_RANK $OMPI_COMM_WORLD_RANK",
    ));
    let expected: Vec<_> =
        (0..3).map(|rank| format!("[{rank}]<stdout>:{rank} 3 {rank} 3 {rank} {rank} {rank}")).collect();
    assert_eq!((done.code(), done.sorted_lines()), (Some(0), expected));
}

#[test]
fn a_job_has_one_secret_that_no_command_line_shows() {
    let script = "echo $RING_SECRET $RING_JOB_ID; tr '\\0' ' ' < /proc/$PPID/cmdline; echo";
    let lines = |done: &crate::util::FinishedProgram| -> BTreeSet<String> {
        done.stdout().lines().map(str::to_owned).collect()
    };
    let first = lines(&run(&mut ringrun_script(&["-n", "2", "--no-tag-output"], script)));
    let second = lines(&run(&mut ringrun_script(&["-n", "2", "--no-tag-output"], script)));
    let secrets: Vec<_> = first.iter().chain(&second).filter(|line| !line.contains("ringrun")).collect();
    assert_eq!(secrets.len(), 2, "each job should have a different secret: {secrets:?}");
    assert_ne!(secrets[0], secrets[1]);
    for line in secrets {
        let (secret, job) = line.split_once(' ').unwrap();
        assert_eq!((secret.len(), job.len()), (64, 32));
        assert!(first.iter().chain(&second).all(|other| other == line || !other.contains(secret)));
    }
}

#[test]
fn a_rank_can_listen_on_the_master_port() {
    let mut child =
        ringrun_script(&["-n", "1", "--no-tag-output"], "echo $MASTER_PORT; sleep 1000").spawn().unwrap();
    let mut port = String::new();
    let stdout = child.stdout.as_mut().unwrap();
    while !port.ends_with('\n') {
        let mut byte = [0];
        stdout.read_exact(&mut byte).unwrap();
        port.push(char::from(byte[0]));
    }
    let port: u16 = port.trim().parse().unwrap();
    for address in ["0.0.0.0", "127.0.0.1"] {
        TcpListener::bind((address, port)).unwrap_or_else(|error| panic!("{address}:{port}: {error}"));
    }
    send_signal("INT", child.id());
    assert_eq!(finish(child).code(), Some(130));
}

#[test]
fn ranks_get_the_variables_and_the_directory_of_the_options() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().canonicalize().unwrap();
    let arguments = [
        "-n",
        "2",
        "--no-tag-output",
        "--wdir",
        place.to_str().unwrap(),
        "-x",
        "A=1 2",
        "-x",
        "B",
        "-x",
        "MASTER_PORT=7",
    ];
    let done = run(ringrun_script(&arguments, "echo \"$A,$B,$MASTER_PORT,$(pwd)\"").env("B", "inherited"));
    let line = format!("1 2,inherited,7,{}", place.display());
    assert_eq!((done.code(), done.sorted_lines()), (Some(0), vec![line.clone(), line]));
}

#[test]
fn lines_are_tagged_with_rank_and_stream() {
    let done = run(&mut ringrun_script(&["-n", "2"], "echo out; echo err >&2; printf 'no newline'"));
    assert_eq!(
        done.sorted_lines(),
        ["[0]<stdout>:no newline", "[0]<stdout>:out", "[1]<stdout>:no newline", "[1]<stdout>:out"]
    );
    let errors: BTreeSet<_> = done.stderr().lines().map(str::to_owned).collect();
    assert_eq!(errors, ["[0]<stderr>:err", "[1]<stderr>:err"].map(str::to_owned).into());
}

#[test]
fn untagged_output_is_unchanged() {
    let done = run(&mut ringrun_script(&["-n", "1", "--no-tag-output"], r"printf 'a\377\000b\r\n\n\nlast'"));
    assert_eq!(done.stdout, b"a\xff\0b\r\n\n\nlast");
}

#[test]
fn the_output_goes_unchanged_to_output_dir_and_also_to_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("new/logs");
    let script = r#"printf 'rank %s\377' $RANK; echo "problem $RANK" >&2"#;
    let done = run(&mut ringrun_script(&["-n", "11", "--output-dir", logs.to_str().unwrap()], script));
    assert_eq!((done.code(), done.stdout().lines().count()), (Some(0), 11));
    for rank in 0..11 {
        let place = logs.join(format!("rank.{rank:02}"));
        assert_eq!(
            fs::read(place.join("stdout")).unwrap(),
            [format!("rank {rank}").as_bytes(), b"\xff"].concat()
        );
        assert_eq!(fs::read_to_string(place.join("stderr")).unwrap(), format!("problem {rank}\n"));
    }
}

#[test]
fn an_output_dir_that_cannot_be_created_is_reported_before_ranks_start() {
    let done = run(&mut ringrun(&["-n", "2", "--output-dir", "/proc/nowhere", "echo", "started"]));
    assert_eq!((done.code(), done.stdout().as_str()), (Some(3), ""));
    assert!(done.stderr().contains("/proc/nowhere"), "{}", done.stderr());
}

/// A program that reads the ranks' JSON lines from ringrun must get each record as one line. ringrun splits only
/// lines of more than 16 MiB, and prints a message for each line that it splits.
#[test]
fn lines_of_up_to_16_mib_are_not_split() {
    let megabyte = 1 << 20;
    let script = "head -c $SIZE /dev/zero | tr '\\0' x; echo";
    for (size, lengths) in [
        (3 * megabyte, vec![3 * megabyte; 2]),
        (17 * megabyte, vec![megabyte, megabyte, 16 * megabyte, 16 * megabyte]),
    ] {
        let done = run(ringrun_script(&["-n", "2"], script).env("SIZE", size.to_string()));
        let mut found: Vec<usize> =
            done.stdout().lines().map(|line| line.len() - "[0]<stdout>:".len()).collect();
        found.sort_unstable();
        assert_eq!(found, lengths);
        let messages =
            done.stderr().lines().filter(|line| line.contains("has a line of more than 16 MiB")).count();
        assert_eq!(messages, lengths.len() - 2, "{}", done.stderr());
    }
}

/// Lines of several ranks must not be mixed or lost, even if each line is longer than the
/// buffers between the ranks and the terminal.
#[test]
fn long_lines_of_several_ranks_are_not_mixed() {
    let script = "head -c 200000 /dev/zero | tr '\\0' $RANK; echo; head -c 200000 /dev/zero | tr '\\0' $RANK";
    let done = run(&mut ringrun_script(&["-n", "3"], script));
    assert_eq!(done.code(), Some(0));
    let mut counts = [0; 3];
    for line in done.stdout().lines() {
        let (tag, text) = line.split_once(':').unwrap();
        let rank = usize::from(tag.as_bytes()[1] - b'0');
        assert!(text.bytes().all(|byte| usize::from(byte - b'0') == rank), "a mixed line of rank {rank}");
        counts[rank] += text.len();
    }
    assert_eq!(counts, [400_000; 3]);
}

#[test]
fn the_report_has_the_output_of_a_rank_that_closed_its_output_early() {
    let done = run(&mut ringrun_script(&["-n", "2"], "echo before; exec >&- 2>&-; exit 4"));
    assert_eq!(done.code(), Some(4));
    assert!(done.stderr().contains("  | before"), "{}", done.stderr());
}

#[test]
fn a_job_of_64_ranks_runs() {
    let done = run(&mut ringrun(&["-n", "64", "true"]));
    assert_eq!((done.code(), done.stdout.len(), done.stderr()), (Some(0), 0, String::new()));
}

/// `ringrun ... | head -1` must neither panic nor continue the training.
#[test]
fn a_closed_stdout_stops_the_job() {
    let mut child = ringrun_script(&["-n", "2"], "while echo line; do sleep 0.01; done").spawn().unwrap();
    let mut some = [0; 10];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut some).unwrap();
    drop(stdout);
    let done = finish(child);
    assert_eq!(done.code(), Some(141), "{}", done.stderr());
    assert!(done.stderr().contains("standard output was closed"), "{}", done.stderr());
}

/// The job was stopped early, so ringrun exits with an error even if every rank handles SIGTERM and exits with 0.
#[test]
fn a_closed_stdout_is_an_error_even_if_every_rank_exits_with_0() {
    let script = "trap 'exit 0' TERM; while echo line; do sleep 0.01; done; exit 0";
    let mut child = ringrun_script(&["-n", "2"], script).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 10]).unwrap();
    drop(stdout);
    let done = finish(child);
    assert_eq!(done.code(), Some(141), "{}", done.stderr());
    assert!(done.stderr().contains("closed by its reader; the job was stopped"), "{}", done.stderr());
}

/// Opens a device on which every write fails for lack of space.
fn open_full_device() -> fs::File {
    fs::OpenOptions::new().write(true).open("/dev/full").unwrap()
}

#[test]
fn an_error_reports_that_the_device_of_stdout_is_full() {
    let done =
        run(ringrun_script(&["-n", "2"], "while echo line; do sleep 0.01; done").stdout(open_full_device()));
    assert_eq!(done.code(), Some(1), "{}", done.stderr());
    let expected = "ringrun: standard output cannot be written: No space left on device";
    assert!(done.stderr().contains(expected), "{}", done.stderr());
    // ringrun stops neither job. The first job ends before ringrun can stop it. With --output-dir, a full device does
    // not stop a job.
    let folder = tempfile::tempdir().unwrap();
    for arguments in [&["-n", "1"][..], &["-n", "1", "--output-dir", folder.path().to_str().unwrap()]] {
        let done = run(ringrun(arguments).args(["echo", "hello"]).stdout(open_full_device()));
        assert_eq!(done.code(), Some(1), "{}", done.stderr());
        assert!(done.stderr().contains("No space left on device"), "{}", done.stderr());
    }
}

#[test]
fn incomplete_files_of_output_dir_are_reported_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("rank.1");
    fs::create_dir(&logs).unwrap();
    std::os::unix::fs::symlink("/dev/full", logs.join("stdout")).unwrap();
    let arguments = ["-n", "2", "--output-dir", folder.path().to_str().unwrap()];
    for (code, expected) in [(0, 1), (4, 4)] {
        let done = run(&mut ringrun_script(&arguments, &format!("echo hello; exit {code}")));
        assert_eq!(done.code(), Some(expected), "{}", done.stderr());
        let errors = done.stderr();
        let last = errors.lines().last().unwrap();
        assert!(
            last.starts_with("ringrun: stdout of rank 1 in ") && last.contains("No space left"),
            "{errors}"
        );
        assert_eq!(fs::read_to_string(folder.path().join("rank.0/stdout")).unwrap(), "hello\n");
    }
}

#[test]
fn with_output_dir_a_closed_stdout_does_not_stop_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["-n", "1", "--output-dir", folder.path().to_str().unwrap()];
    let mut command = ringrun_script(&arguments, "read x < \"$GATE\"; for i in 1 2 3; do echo $i; done");
    let gate = folder.path().join("gate");
    assert!(std::process::Command::new("mkfifo").arg(&gate).status().unwrap().success());
    let mut child = command.env("GATE", &gate).spawn().unwrap();
    drop(child.stdout.take());
    fs::write(&gate, "go\n").unwrap();
    assert_eq!(finish(child).code(), Some(0));
    assert_eq!(fs::read_to_string(folder.path().join("rank.0/stdout")).unwrap(), "1\n2\n3\n");
}

/// A background process of a rank keeps the rank's output pipe open. ringrun must not wait until the background
/// process ends.
#[test]
fn a_background_process_that_keeps_the_pipe_open_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    for (name, start) in [("group", "sleep 1000 &"), ("session", "setsid sleep 1000 &")] {
        let file = folder.path().join(name);
        let script = format!("{start} echo $! > \"$FILE\"; echo done");
        let done = run(ringrun_script(&["-n", "1"], &script).env("FILE", &file));
        assert_eq!((done.code(), done.stdout().as_str()), (Some(0), "[0]<stdout>:done\n"), "{name}");
        let pid = fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        wait_until_gone(&[pid]);
    }
}

/// Regression test: before the fix, a rank whose program had no logger, such as a Python program, printed nothing
/// while it waited for another rank.
#[test]
fn a_rank_that_has_not_joined_is_named_after_two_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let script = "if [ $RANK = 1 ]; then read x < \"$GATE\"; fi; exec \"$RINGBENCH\" barrier";
    let gate = folder.path().join("gate");
    assert!(std::process::Command::new("mkfifo").arg(&gate).status().unwrap().success());
    let mut command = ringrun_script(&["-n", "2"], script);
    command.env("GATE", &gate).env("RINGBENCH", env!("CARGO_BIN_EXE_ringbench")).env("RUST_LOG", "off");
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ringrun: still waiting for rank 1 to join the job, after 2 s\n");
    fs::write(&gate, "go\n").unwrap();
    let done = finish(child);
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
}

/// Regression test: before the fix, if a rank exited before it joined, the other ranks waited until their start
/// timeout.
#[test]
fn a_rank_that_exits_before_it_joins_fails_the_start_at_once() {
    let script = "[ $RANK = 1 ] || exec \"$RINGBENCH\" barrier";
    let started = Instant::now();
    let done = run(ringrun_script(&["-n", "2"], script).env("RINGBENCH", env!("CARGO_BIN_EXE_ringbench")));
    let errors = done.stderr();
    assert!(started.elapsed() < Duration::from_secs(20), "{errors}");
    assert_ne!(done.code(), Some(0), "{errors}");
    assert!(errors.contains("it exited with code 0"), "{errors}");
}

/// The test begins to read the output only when all pipes are full, and must then get all output.
#[test]
fn a_reader_that_starts_late_gets_all_output() {
    let folder = tempfile::tempdir().unwrap();
    let script = "head -c 300000 /dev/zero | tr '\\0' 'x' | fold -w 100; echo > \"$FILE.$RANK\"";
    let mut command = ringrun_script(&["-n", "2", "--no-tag-output"], script);
    let child = command.env("FILE", folder.path().join("end")).stderr(Stdio::null()).spawn().unwrap();
    // The pipes between the ranks and this test hold only 64 KiB each, so the ranks block until the test reads.
    let id = child.id();
    wait_until("the pipe to this test is full", || {
        fs::read_to_string(format!("/proc/{id}/task/{id}/comm")).is_ok() && {
            let tasks = fs::read_dir(format!("/proc/{id}/task")).unwrap().flatten();
            tasks.into_iter().any(|task| {
                fs::read_to_string(task.path().join("wchan")).is_ok_and(|place| place.contains("pipe_write"))
            })
        }
    });
    let done = finish(child);
    assert_eq!((done.code(), done.stdout().matches('x').count()), (Some(0), 600_000));
}
