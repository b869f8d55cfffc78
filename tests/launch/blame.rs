//! Tests that ringrun blames the rank that failed first, and tests of the exit records that tell ringrun this rank. Rank 2
//! fails while the other ranks wait in a barrier, and the other ranks then fail because rank 2 has failed.
//!
//! Each rank runs this test program with a filter, so that only the test `program_of_a_rank` or
//! `program_of_a_silent_rank` runs.

use std::error::Error;
use std::ffi::OsString;
use std::fs::{File, read_link};
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, exit};

use crate::util::{FinishedProgram, ringrun, ringrun_script, run};
use ringtrain::Group;

/// The environment variable that says how rank 2 fails.
const FAILURE_VARIABLE: &str = "LAUNCH_BLAME_FAILURE";
/// The environment variable with the path of a FIFO.
const FIFO_VARIABLE: &str = "LAUNCH_BLAME_FIFO";

/// The program that ringrun starts for each rank. If the test program runs without ringrun, this test does nothing.
#[test]
fn program_of_a_rank() -> Result<(), Box<dyn Error>> {
    let Ok(failure) = std::env::var(FAILURE_VARIABLE) else { return Ok(()) };
    if failure == "none" {
        return check_that_children_do_not_inherit_the_exit_pipe();
    }
    let mut group = Group::from_environment()?;
    group.barrier()?;
    if group.rank().get() == 2 {
        match failure.as_str() {
            "panic" => panic!("a mistake in the program"),
            "abort" => return Err(group.abort("out of ideas").into()),
            "leave" => return Err("a file is missing".into()),
            _ => exit(33),
        }
    }
    Ok(group.barrier()?)
}

/// Joins the job, and checks that the rank has inherited a pipe to ringrun, but that a child of the rank does not inherit it.
fn check_that_children_do_not_inherit_the_exit_pipe() -> Result<(), Box<dyn Error>> {
    let variable = std::env::var("RING_EXIT_FD")?;
    let (number, inode) = variable.split_once(':').ok_or("RING_EXIT_FD has no colon")?;
    let pipe = format!("pipe:[{inode}]");
    assert_eq!(read_link(format!("/proc/self/fd/{number}"))?, Path::new(&pipe));
    let mut group = Group::from_environment()?;
    let script = "for file in /proc/$$/fd/*; do readlink $file; done";
    let files = String::from_utf8(Command::new("sh").args(["-c", script]).output()?.stdout)?;
    assert!(files.contains("/dev/null") && !files.contains(&pipe), "{pipe}: {files}");
    Ok(group.barrier()?)
}

/// The program of a rank that prints nothing about the failure of the job. All ranks but rank 2 end at once. Rank 2 ends last.
/// If the test program runs without ringrun, this test does nothing.
#[test]
fn program_of_a_silent_rank() -> Result<(), Box<dyn Error>> {
    let Some(fifo) = std::env::var_os(FIFO_VARIABLE) else { return Ok(()) };
    let mut group = Group::from_environment()?;
    let is_at_fault = group.rank().get() == 2;
    // Rank 2 reads the end of the FIFO when all other ranks have ended, because only these ranks have it open for writing.
    let mut fifo = File::options().read(is_at_fault).write(!is_at_fault).open(fifo)?;
    group.barrier()?;
    if is_at_fault {
        let _ = group.abort("out of ideas");
        fifo.read_to_end(&mut Vec::new())?;
        exit(33);
    }
    let failed = group.barrier().is_err();
    exit(if failed { 9 } else { 0 })
}

/// Makes a FIFO in a new directory. Returns the directory, which is removed when it is dropped, and the path of the FIFO.
fn make_fifo() -> (tempfile::TempDir, OsString) {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    (folder, fifo.into())
}

fn run_job(failure: &str) -> FinishedProgram {
    let program = std::env::current_exe().unwrap();
    run(ringrun(&["-n", "4", "--", program.to_str().unwrap()])
        .args(["--exact", "blame::program_of_a_rank", "--nocapture"])
        .env(FAILURE_VARIABLE, failure))
}

#[test]
fn the_rank_that_failed_first_is_blamed_for_every_kind_of_failure() {
    for (failure, code, message) in [
        ("panic", 101, "rank 2 on "),
        ("abort", 101, "stopped the job: out of ideas"),
        ("leave", 101, "closed its group while other ranks still had operations"),
        ("exit", 33, "rank 2 on "),
    ] {
        let done = run_job(failure);
        let errors = done.stderr();
        assert_eq!(done.code(), Some(code), "{failure}: {errors}");
        let headline = errors.lines().find(|line| line.contains("the job has ended"));
        assert!(
            headline.is_some_and(|line| line.starts_with("ringrun: rank 2 (pid ")),
            "{failure}: {errors}"
        );
        assert!(errors.contains(message), "{failure}: {errors}");
        // `Debug` of the error prints a sentence and not the fields of the enum.
        assert!(!errors.contains("Failed {"), "{failure}: {errors}");
    }
}

#[test]
fn other_ranks_report_that_the_program_of_rank_2_panicked() {
    let errors = run_job("panic").stderr();
    let victims =
        errors.lines().filter(|line| line.contains("rank 2 on ") && line.contains("its program panicked"));
    assert!(victims.count() >= 3, "{errors}");
    assert!(errors.contains("  | ") && errors.contains("a mistake in the program"), "{errors}");
}

/// Rank 2 ends after the ranks that it has made fail, and no rank prints why it ends. So only the exit records of the other
/// ranks say that rank 2 is at fault.
#[test]
fn the_rank_at_fault_is_blamed_although_it_ends_last_and_no_rank_prints_its_error() {
    let (_folder, fifo) = make_fifo();
    let program = std::env::current_exe().unwrap();
    let done = run(ringrun(&["-n", "4", "--grace", "60", "--", program.to_str().unwrap()])
        .args(["--exact", "blame::program_of_a_silent_rank", "--nocapture"])
        .env(FIFO_VARIABLE, fifo));
    let errors = done.stderr();
    assert_eq!(done.code(), Some(33), "{errors}");
    assert!(errors.contains("ringrun: rank 2 reported: a rank stopped the job: rank 2 on "), "{errors}");
    assert!(!errors.contains("out of ideas"), "a rank has printed the error: {errors}");
}

/// Regression test: before exit records, ringrun searched the output of the ranks for certain phrases.
#[test]
fn printed_text_does_not_decide_which_rank_is_blamed() {
    let (_folder, fifo) = make_fifo();
    let script = r#"case "$RANK" in
        1) echo $$ > "$FIFO"; echo "rank 3 on x was lost: reset"; exit 41;;
        3) read -r pid < "$FIFO"; tail -s 0.01 --pid="$pid" -f /dev/null; exit 42;;
    esac"#;
    let done = run(ringrun_script(&["-n", "4"], script).env("FIFO", fifo));
    assert_eq!(done.code(), Some(41), "{}", done.stderr());
    assert!(done.stderr().contains("ringrun: rank 1 (pid "), "{}", done.stderr());
    assert!(!done.stderr().contains("ringrun: rank 3 (pid "), "{}", done.stderr());
}

#[test]
fn bytes_that_are_not_a_record_are_ignored() {
    let script = r#"[ "$RANK" = 1 ] || exit 0; printf 'rank 0 failed: x' > "/proc/self/fd/${RING_EXIT_FD%%:*}"; exit 4"#;
    let done = run(ringrun_script(&["-n", "2"], script).env("RUST_LOG", "ringtrain::launch=debug"));
    assert_eq!(done.code(), Some(4), "{}", done.stderr());
    for part in ["rank 1 wrote 16 bytes that are not an exit record", "ringrun: rank 1 (pid "] {
        assert!(done.stderr().contains(part), "{}", done.stderr());
    }
}

#[test]
fn programs_that_a_rank_executes_do_not_inherit_the_exit_pipe() {
    let done = run_job("none");
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
}
