//! ringrun: whom it blames when a rank of the library's own fails while the others wait for it.
//!
//! The ranks are this test program again, each of which walks into `rank` alone.

use std::error::Error;
use std::process::exit;

use crate::util::{Done, ringrun, run};
use ringtrain::Group;

const HOW: &str = "LAUNCH_BLAME_HOW";

/// What a rank does. Without a launcher, as a plain test, it does nothing.
#[test]
fn rank() -> Result<(), Box<dyn Error>> {
    let Ok(how) = std::env::var(HOW) else { return Ok(()) };
    let mut group = Group::from_environment()?;
    group.barrier()?;
    if group.rank().get() == 2 {
        match how.as_str() {
            "panic" => panic!("a mistake in the program"),
            "abort" => return Err(group.abort("out of ideas").into()),
            "leave" => return Err("a file is missing".into()),
            _ => exit(33),
        }
    }
    Ok(group.barrier()?)
}

fn job(how: &str) -> Done {
    let program = std::env::current_exe().unwrap();
    run(ringrun(&["-n", "4", "--", program.to_str().unwrap()])
        .args(["--exact", "blame::rank", "--nocapture"])
        .env(HOW, how))
}

#[test]
fn the_first_failed_rank_is_named_for_every_exit_code_of_the_others() {
    for (how, code, said) in [
        ("panic", 101, "rank 2 on "),
        ("abort", 101, "stopped the job: out of ideas"),
        ("leave", 101, "closed its group while others still had work"),
        ("exit", 33, "rank 2 on "),
    ] {
        let done = job(how);
        let told = done.stderr();
        assert_eq!(done.code(), Some(code), "{how}: {told}");
        let headline = told.lines().find(|line| line.contains("the other ranks were stopped"));
        assert!(headline.is_some_and(|line| line.starts_with("ringrun: rank 2 (pid ")), "{how}: {told}");
        assert!(told.contains(said), "{how}: {told}");
        // As people read it, not as `derive(Debug)` writes it.
        assert!(!told.contains("Failed {"), "{how}: {told}");
    }
}

#[test]
fn a_panic_is_told_as_what_it_is() {
    let told = job("panic").stderr();
    let victims =
        told.lines().filter(|line| line.contains("rank 2 on ") && line.contains("its program panicked"));
    assert!(victims.count() >= 3, "{told}");
    assert!(told.contains("  | ") && told.contains("a mistake in the program"), "{told}");
}
