//! Tests of `--flight-recorder`, `--timeline` and `--log-format`.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::util::{FinishedProgram, finish, ringrun, run, send_signal, wait_until};
use ringtrain::exit::Exit;
use ringtrain::observe::flight_record::{FlightRecord, OperationRecord};

/// Returns the record of a rank.
fn read_record(directory: &Path, rank: usize) -> FlightRecord {
    FlightRecord::read(&directory.join(format!("rank.{rank}.json"))).unwrap()
}

fn active(record: &FlightRecord) -> Vec<&OperationRecord> {
    record.operations.iter().filter(|operation| operation.result == "active").collect()
}

/// Runs `ringtrain flight DIR`.
fn flight(directory: &Path) -> FinishedProgram {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringtrain"));
    run(command.arg("flight").arg(directory).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// Starts an endless training run on 3 ranks with a flight recorder in the folder `flight`, and waits until training is under
/// way.
fn start_and_wait(folder: &Path, options: &[&str]) -> Child {
    let script = r#"echo $$ > pid.$RING_RANK; exec "$0" "$@""#;
    let job = ringrun(&["-n", "3", "--output-dir", "logs", "--", "sh", "-c", script])
        .arg(env!("CARGO_BIN_EXE_ringtrain"))
        .args(["--flight-recorder", "flight", "--epochs", "1000000"])
        .args(options)
        .current_dir(folder)
        .spawn()
        .unwrap();
    let output = folder.join("logs/rank.0/stdout");
    wait_until("training is under way", || {
        fs::read_to_string(&output).is_ok_and(|text| text.contains("\nepoch "))
    });
    job
}

fn pid_of_rank_1(folder: &Path) -> u32 {
    fs::read_to_string(folder.join("pid.1")).unwrap().trim().parse().unwrap()
}

/// Rank 1 is killed in the middle of training. The records of the other ranks must show the operation in which they waited for
/// it.
#[test]
fn the_survivors_of_a_killed_rank_record_the_operation_that_waits_for_it() {
    for transport in ["tcp", "shm"] {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("flight");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("rank.1.json"), "of an earlier job").unwrap();
        let job = start_and_wait(folder.path(), &["--transport", transport]);
        assert!(!directory.join("rank.1.json").exists(), "the record of the earlier job is removed");
        send_signal("KILL", pid_of_rank_1(folder.path()));
        let done = finish(job);
        assert_ne!(done.code(), Some(0));
        for rank in [0, 2] {
            let record = read_record(&directory, rank);
            let active = active(&record);
            assert!(record.reason.contains("rank 1"), "{transport}: {}", record.reason);
            assert_eq!((record.identity.rank, record.identity.ranks), (rank as u32, 3));
            assert!(record.operations_total > 20 && record.operations.len() > 20, "{transport}");
            // Of several operations in progress, the first one waits for the killed rank, or for a rank that waits for it.
            let last = active.first().unwrap_or_else(|| panic!("{transport}: no operation is active"));
            assert!(last.line.as_ref().is_some_and(|line| line.contains(".rs:")), "{last:?}");
            let earlier = record
                .operations
                .iter()
                .filter(|other| other.sequence.is_some() && other.number < last.number);
            assert!(earlier.clone().all(|other| other.result == "completed"), "{transport}");
            let times = earlier.map(|other| (other.submitted, other.begun.unwrap(), other.finished.unwrap()));
            assert!(
                times.into_iter().all(|(submitted, begun, finished)| submitted <= begun && begun <= finished)
            );
        }
        let waits: Vec<u32> = [0, 2]
            .iter()
            .flat_map(|&rank| read_record(&directory, rank).operations)
            .flat_map(|operation| operation.waits_for)
            .collect();
        assert!(waits.contains(&1), "{transport}: no rank says that it waits for rank 1, only for {waits:?}");
        let comparison = flight(&directory);
        assert!(
            comparison.stdout().contains("records of 2 of 3 ranks\nno record of rank 1"),
            "{comparison:?}"
        );
        assert!(comparison.stdout().contains("in progress for"), "{comparison:?}");
    }
}

/// SIGTERM ends `ringbench`. `ringtrain` saves and ends normally.
#[test]
fn a_signal_makes_the_ranks_write_their_records() {
    let folder = tempfile::tempdir().unwrap();
    for (program, arguments) in [
        ("ringbench", &["allreduce", "-b", "4", "-e", "64M", "-n", "1000000"][..]),
        ("ringtrain", &["--epochs", "1000000"]),
    ] {
        let directory = folder.path().join(program);
        let job = ringrun(&["-n", "2", program])
            .args(arguments)
            .arg("--flight-recorder")
            .arg(&directory)
            .spawn()
            .unwrap();
        wait_until("the ranks have started", || has_started(job.id()));
        send_signal("TERM", job.id());
        finish(job);
        for rank in 0..2 {
            let record = read_record(&directory, rank);
            // A rank of `ringbench` may notice that the other rank has ended before it handles its own signal.
            let is_lost = program == "ringbench" && record.reason.contains(&format!("rank {}", 1 - rank));
            assert!(record.reason == "the process got SIGTERM" || is_lost, "{program}: {}", record.reason);
        }
    }
}

/// Returns whether a child of the process has two threads: a rank starts the thread that waits for signals after it has joined.
fn has_started(launcher: u32) -> bool {
    let children =
        fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap_or_default();
    let ranks: Vec<&str> = children.split_whitespace().collect();
    let has_thread = |rank: &&str| {
        let tasks = fs::read_dir(format!("/proc/{rank}/task")).into_iter().flatten().flatten();
        tasks.into_iter().any(|task| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "signals")
        })
    };
    ranks.iter().filter(|rank| has_thread(rank)).count() == 2
}

#[test]
fn files_that_cannot_be_written_are_errors_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    for (option, path, what) in [
        ("--flight-recorder", "file/flight", "the flight recorder cannot write to file/flight"),
        ("--timeline", "missing/timeline", "the timeline cannot write to missing/timeline"),
    ] {
        let done =
            run(ringrun(&["-n", "2", "ringtrain", "--epochs", "1", option, path]).current_dir(folder.path()));
        assert!(done.stderr().contains(what), "{}", done.stderr());
        assert_eq!(done.code(), Some(Exit::Configuration as i32), "{}", done.stderr());
    }
    let done = flight(folder.path());
    assert_eq!(done.code(), Some(Exit::Data as i32));
    assert!(done.stderr().contains("there is no file rank.N.json"), "{}", done.stderr());
    fs::write(folder.path().join("rank.0.json"), "{").unwrap();
    let done = flight(folder.path());
    assert!(done.stderr().contains("rank.0.json: EOF while parsing"), "{}", done.stderr());
}

/// The error of the job must still be the one that users see.
#[test]
fn a_record_that_cannot_be_written_does_not_hide_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let job = start_and_wait(folder.path(), &[]);
    fs::remove_dir_all(folder.path().join("flight")).unwrap();
    send_signal("KILL", pid_of_rank_1(folder.path()));
    let done = finish(job);
    let log = fs::read_to_string(folder.path().join("logs/rank.0/stderr")).unwrap();
    assert!(log.contains("the flight recorder could not write flight/rank.0.json: No such file"), "{log}");
    assert!(
        log.contains("'s connection to rank 1 on ")
            && log.contains("ringtrain: error: ")
            && !done.status.success(),
        "{log}"
    );
}

#[test]
fn a_timeline_is_written_by_rank_0_and_parts_by_each_rank_if_the_job_fails() {
    let folder = tempfile::tempdir().unwrap();
    let files = || {
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let run_with = |arguments: &[&str]| {
        let fixed =
            ["-n", "2", "ringtrain", "--epochs", "1", "--timeline", "t", "--flight-recorder", "flight"];
        run(ringrun(&fixed).args(arguments).current_dir(folder.path()))
    };
    let done = run_with(&[]);
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
    let line = done.stdout().lines().find(|line| line.contains("timeline t: ")).map(str::to_owned).unwrap();
    assert!(line.contains(" operations of 2 ranks, clocks within "), "{line}");
    assert_eq!(files(), ["flight", "t"]);
    assert_eq!(
        fs::read_dir(folder.path().join("flight")).unwrap().count(),
        0,
        "a run that succeeds has no record"
    );
    fs::remove_file(folder.path().join("t")).unwrap();
    let done = run_with(&["--lr", "1e30", "--no-standardize"]);
    assert_eq!(done.code(), Some(Exit::Diverged as i32), "{}", done.stderr());
    assert_eq!(files(), ["flight", "t.rank.0", "t.rank.1"]);
    assert!(
        (0..2).all(|rank| read_record(&folder.path().join("flight"), rank).reason.contains("the loss is"))
    );
}

#[test]
fn a_log_in_json_has_the_rank_and_the_error_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = ringrun(&[
        "-n",
        "2",
        "--no-tag-output",
        "ringtrain",
        "--epochs",
        "1",
        "--lr",
        "1e30",
        "--no-standardize",
    ]);
    let done = run(command
        .args(["--log-format", "json"])
        .env("RUST_LOG", "ringtrain=debug")
        .current_dir(folder.path()));
    let mut ranks_with_errors = Vec::new();
    for line in done.stderr().lines().filter(|line| line.starts_with('{')) {
        let line: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(line["program"], "ringtrain");
        assert!(line["time"].as_str().is_some_and(|time| time.ends_with('Z')) && line["host"].is_string());
        if line["level"] == "ERROR" {
            assert!(
                line["message"].as_str().unwrap().contains("the loss is") && line["step"].as_u64() >= Some(1),
                "{line}"
            );
            ranks_with_errors.push(line["rank"].as_u64().unwrap());
        }
    }
    ranks_with_errors.sort_unstable();
    assert_eq!(ranks_with_errors, [0, 1], "{}", done.stderr());
    let done = run(ringrun(&["-n", "1", "ringtrain"]).env("RING_LOG_FORMAT", "xml"));
    assert_eq!(done.code(), Some(Exit::Usage as i32));
    assert!(done.stderr().contains("RING_LOG_FORMAT is xml, and must be text or json"), "{}", done.stderr());
}

/// Returns the lines of standard error that ringrun has written as JSON.
fn ringrun_messages(stderr: &str) -> Vec<serde_json::Value> {
    let lines = stderr.lines().filter(|line| !line.starts_with("[1]<stderr>:"));
    let parsed =
        lines.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")));
    let messages: Vec<serde_json::Value> = parsed.collect();
    for message in &messages {
        let fields: Vec<&str> = message.as_object().expect("an object").keys().map(String::as_str).collect();
        assert_eq!(fields, ["host", "level", "message", "program", "rank", "step", "target", "time"]);
        assert_eq!((message["program"].as_str(), message["step"].as_u64()), (Some("ringrun"), None));
    }
    messages
}

#[test]
fn messages_of_ringrun_can_be_json() {
    let script = "[ $RANK = 1 ] || exec sleep 300; echo a line >&2; exit 3";
    let arguments = ["--log-format", "json", "-n", "2", "--grace", "0", "--", "sh", "-c", script];
    let done = run(&mut ringrun(&arguments));
    let text = done.stderr();
    assert_eq!(done.code(), Some(3), "{text}");
    assert!(text.contains("[1]<stderr>:a line\n"), "{text}");
    let messages = ringrun_messages(&text);
    let has = |level: &str, rank: u64, part: &str| {
        messages.iter().any(|message| {
            message["level"] == level
                && message["rank"] == rank
                && message["message"].as_str().is_some_and(|text| text.contains(part))
        })
    };
    assert!(has("ERROR", 1, "exited with code 3 after") && has("ERROR", 1, "rank 1:\n  | a line"), "{text}");
    // The variable selects the format too, also of errors before the start.
    let done = run(ringrun(&["-n", "2", "/no/such/program"]).env("RING_LOG_FORMAT", "json"));
    assert_eq!(done.code(), Some(Exit::CommandNotFound as i32));
    let [message] = &ringrun_messages(&done.stderr())[..] else { panic!("{}", done.stderr()) };
    assert!(
        message["message"].as_str().is_some_and(|text| text.starts_with("command not found: ")),
        "{message}"
    );
}
