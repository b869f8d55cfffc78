//! Checks `ringrun --tolerate-failures`: a rank that fails after the start of the job does not end the other ranks.
//!
//! Each rank runs this test program with a filter, so that only the test `program_of_a_rank` runs. Each rank joins
//! the job, and then waits until the test tells the rank how to end.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, exit};

use crate::util::{
    is_alive, processes_with_environment, read_pid, ringrun, ringrun_script, run, send_signal, wait_for,
    wait_until,
};
use ringtrain::Group;

/// The environment variable that names the folder in which the test and the ranks exchange files.
const FOLDER_VARIABLE: &str = "TOLERATED_FAILURES_FOLDER";

/// How the test ends a rank.
#[derive(Clone, Copy, Debug)]
enum RankEnding {
    Exit(i32),
    Kill,
}

use RankEnding::{Exit, Kill};

/// Writes a file. Other processes see the file only when it is complete.
fn write_file_at_once(path: &Path, text: &str) {
    let part = path.with_file_name(format!("part.{}", std::process::id()));
    fs::write(&part, text).unwrap();
    fs::rename(part, path).unwrap();
}

/// The program that ringrun starts for each rank. If the test program runs without ringrun, this test does nothing.
#[test]
fn program_of_a_rank() -> Result<(), Box<dyn Error>> {
    let Some(folder) = std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from) else { return Ok(()) };
    let mut group = Group::from_environment()?;
    group.barrier()?;
    // `setsid` moves this process out of the rank's process group. ringrun must kill it nevertheless.
    Command::new("sh").args(["-c", "setsid sleep 1000 &"]).status()?;
    let rank = group.rank();
    write_file_at_once(&folder.join(format!("joined.{rank}")), &std::process::id().to_string());
    let command = folder.join(format!("exit.{rank}"));
    exit(wait_for("a command of the test", || fs::read_to_string(&command).ok()?.parse().ok()))
}

/// Starts a job of 3 ranks, and waits until all ranks have joined. Returns the process of ringrun, and the process
/// ids of the ranks.
fn start_job(folder: &Path) -> (Child, Vec<u32>) {
    let program = std::env::current_exe().unwrap();
    let child = ringrun(&["-n", "3", "--tolerate-failures", "--", program.to_str().unwrap()])
        .args(["--exact", "tolerated_failures::program_of_a_rank", "--nocapture"])
        .env(FOLDER_VARIABLE, folder)
        .stderr(fs::File::create(folder.join("stderr")).unwrap())
        .spawn()
        .unwrap();
    let pids = (0..3).map(|rank| read_pid(&folder.join(format!("joined.{rank}")))).collect();
    (child, pids)
}

fn assert_no_process_left(folder: &Path) {
    let entry = format!("{FOLDER_VARIABLE}={}", folder.display());
    wait_until("no process of the job is left", || processes_with_environment(&entry).is_empty());
}

#[test]
fn the_other_ranks_continue_after_a_failure() {
    for (ends, code, last_message) in [
        (
            [(2, Kill), (0, Exit(0)), (1, Exit(0))],
            0,
            "--tolerate-failures: 2 of 3 ranks exited with 0, rank 2 was killed by signal 9 (SIGKILL)",
        ),
        (
            [(0, Exit(3)), (1, Exit(3)), (2, Exit(0))],
            0,
            "--tolerate-failures: 1 of 3 ranks exited with 0, ranks 0-1 exited with code 3",
        ),
        (
            [(0, Exit(0)), (1, Exit(0)), (2, Exit(3))],
            0,
            "--tolerate-failures: 2 of 3 ranks exited with 0, rank 2 exited with code 3",
        ),
        ([(0, Exit(0)), (1, Exit(0)), (2, Exit(0))], 0, ""),
        ([(1, Exit(3)), (2, Exit(4)), (0, Exit(5))], 3, "rank 2 exited with code 4"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (child, pids) = start_job(folder.path());
        let messages = || fs::read_to_string(folder.path().join("stderr")).unwrap();
        let mut tolerated = 0;
        for (ended_before, (rank, end)) in ends.into_iter().enumerate() {
            match end {
                Kill => send_signal("KILL", pids[rank]),
                Exit(code) => {
                    write_file_at_once(&folder.path().join(format!("exit.{rank}")), &code.to_string());
                }
            }
            wait_until("the rank has ended", || !is_alive(pids[rank]));
            let others_run = ended_before < 2;
            if others_run && !matches!(end, Exit(0)) {
                let start = format!("ringrun: rank {rank} (pid {})", pids[rank]);
                wait_until("ringrun has printed the failure", || {
                    let is_note = |line: &str| line.starts_with(&start) && line.ends_with("ranks continue");
                    messages().lines().any(is_note)
                });
                tolerated += 1;
            }
        }
        let done = crate::util::finish(child);
        let text = messages();
        assert_eq!(done.code(), Some(code), "{ends:?}: {text}");
        assert_eq!(text.matches("the other ranks continue").count(), tolerated, "{ends:?}: {text}");
        let last = text.lines().rfind(|line| line.starts_with("ringrun: ")).unwrap_or("ringrun: ");
        assert_eq!(last, format!("ringrun: {last_message}"), "{ends:?}: {text}");
        assert_no_process_left(folder.path());
    }
}

#[test]
fn a_rank_that_fails_before_it_has_joined_ends_the_job() {
    for (script, code) in
        [("[ $RANK = 1 ] && exit 3; sleep 1000", 3), (r#"[ $RANK = 1 ] && kill -9 $$; exec "$0""#, 128 + 9)]
    {
        let folder = tempfile::tempdir().unwrap();
        let options = ["-n", "3", "--tolerate-failures", "--grace", "0"];
        let mut command = ringrun_script(&options, script);
        let done = run(command.arg(env!("CARGO_BIN_EXE_ringtrain")).env(FOLDER_VARIABLE, folder.path()));
        let errors = done.stderr();
        assert_eq!(done.code(), Some(code), "{errors}");
        for part in ["and before all ranks had joined the job", "the job has ended"] {
            assert!(errors.contains(part), "`{part}` is not in: {errors}");
        }
        assert!(!errors.contains("--tolerate-failures"), "{errors}");
        assert_no_process_left(folder.path());
    }
}
