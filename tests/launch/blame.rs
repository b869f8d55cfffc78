//! Tests that ringrun blames the rank that failed first. Rank 2 fails while the other ranks wait in a barrier, and
//! the other ranks then fail because rank 2 has failed.
//!
//! Each rank runs this test program with a filter, so that only the test `program_of_a_rank` runs.

use std::error::Error;
use std::process::exit;

use crate::util::{FinishedProgram, ringrun, run};
use ringtrain::Group;

/// The environment variable that says how rank 2 fails.
const FAILURE_VARIABLE: &str = "LAUNCH_BLAME_FAILURE";

/// The program that ringrun starts for each rank. If the test program runs without ringrun, this test does nothing.
#[test]
fn program_of_a_rank() -> Result<(), Box<dyn Error>> {
    let Ok(failure) = std::env::var(FAILURE_VARIABLE) else { return Ok(()) };
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
        let headline = errors.lines().find(|line| line.contains("the other ranks were stopped"));
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
