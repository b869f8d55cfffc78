//! All processes of a job are killed at a random step, and a job with fewer ranks continues the run.

use std::fs;
use std::path::Path;
use std::process::Child;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::train::Report;
use rustix::process::{Pid, Signal, kill_process};

use super::checkpoints::sorted_file_names;
use super::util::{
    finish, processes_with_environment, retry_on_busy_machine, ringrun, runs_long_tests, wait_until,
};

/// The options of a run of 3 epochs with 100 steps each.
const OPTIONS: &str =
    "--data synthetic:800x5 --task regression --model mlp:7 --batch-size 8 --epochs 3 --test-fraction 0";
const EPOCHS: usize = 3;
const STEPS: u64 = 300;

/// The variable that marks all processes of a job. Its value is the directory of the job.
const DIRECTORY_VARIABLE: &str = "KILLED_JOB_DIRECTORY";

fn processes_of_job(directory: &Path) -> Vec<u32> {
    processes_with_environment(&format!("{DIRECTORY_VARIABLE}={}", directory.display()))
}

/// Starts `ringtrain` on `n` ranks. The job writes its report to the file `report.json` in `directory`.
fn start(n: u32, options: &str, directory: &Path) -> Child {
    let temporary = directory.join("temporary");
    fs::create_dir_all(&temporary).unwrap();
    ringrun(&["-n", &n.to_string(), env!("CARGO_BIN_EXE_ringtrain"), "--report", "report.json"])
        .args(options.split(' '))
        .current_dir(directory)
        .env(DIRECTORY_VARIABLE, directory)
        .env("TMPDIR", temporary)
        .spawn()
        .unwrap()
}

/// Waits until the job has ended, and returns its report and what rank 0 printed. The job must leave no process and no
/// temporary file.
fn finish_job(job: Child, directory: &Path) -> (Report, String) {
    let done = finish(job);
    assert_eq!(done.code(), Some(0), "{done:?}");
    wait_until("all processes of the job end", || processes_of_job(directory).is_empty());
    let mut names = sorted_file_names(directory);
    names.retain(|name| name != "checkpoints");
    assert_eq!(names, ["report.json", "temporary"]);
    assert!(sorted_file_names(&directory.join("temporary")).is_empty());
    let report = fs::read_to_string(directory.join("report.json")).unwrap();
    (serde_json::from_str(&report).unwrap(), done.stdout())
}

/// Returns the steps of the checkpoint before the latest one, or 0 if there is no such checkpoint.
fn saved_steps(checkpoints: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(checkpoints) else { return 0 };
    let steps = entries.flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("checkpoint-")?.strip_suffix(".safetensors")?.parse().ok()
    });
    steps.max().unwrap_or(0)
}

/// Kills ringrun and its four ranks after a random step, and resumes the run on two ranks.
fn kill_and_resume(seed: u64, expected: &Report) {
    let mut random = StdRng::seed_from_u64(seed);
    let (interval, step) = (random.random_range(1..=9), random.random_range(1..STEPS * 2 / 3));
    let folder = tempfile::tempdir().unwrap();
    let (directory, checkpoints) = (folder.path(), folder.path().join("checkpoints"));
    let text = format!("seed {seed}, a checkpoint every {interval} steps, killed after step {step}");

    let save = format!("--checkpoint checkpoints --checkpoint-steps {interval} --keep-checkpoints 2");
    let mut job = start(4, &format!("{OPTIONS} {save}"), directory);
    wait_until("the step or the end of the run", || {
        saved_steps(&checkpoints) >= step || job.try_wait().unwrap().is_some()
    });
    let pids = processes_of_job(directory);
    for &pid in &pids {
        // A process may end by itself after another process was killed.
        let _ = kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL);
    }
    job.wait().unwrap();
    wait_until("all processes of the killed job end", || processes_of_job(directory).is_empty());
    assert!(pids.len() >= 5 && !directory.join("report.json").exists(), "{text}: the run ended before");

    let resumed = start(2, "--resume checkpoints", directory);
    let (report, stdout) = finish_job(resumed, directory);
    let start = stdout.split("resuming from the checkpoint at step ").nth(1).unwrap_or_default();
    let start: u64 = start.split(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{text}: {stdout}"));
    assert!((step..STEPS).contains(&start), "{text}: resumed at step {start}");
    assert_eq!((report.world_size, report.steps), (2, STEPS), "{text}");
    assert_eq!((report.history.len(), expected.history.len()), (EPOCHS, EPOCHS), "{text}");
    for (found, expected) in report.history.iter().zip(&expected.history) {
        let (found, expected) = (found.train_loss, expected.train_loss);
        assert!((found - expected).abs() <= 1e-5 * expected, "{text}: {found}, expected {expected}");
    }
    let mut names = sorted_file_names(&checkpoints);
    names.retain(|name| !name.starts_with("checkpoint-"));
    assert_eq!(names, ["checkpoint.safetensors", "config.toml"], "{text}");
}

#[test]
#[ignore = "runs with tools/test --full"]
fn a_job_whose_processes_are_all_killed_resumes_on_fewer_ranks_with_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let (expected, _) = finish_job(start(4, OPTIONS, folder.path()), folder.path());
    assert_eq!((expected.world_size, expected.steps), (4, STEPS));
    for seed in 0..if runs_long_tests() { 50 } else { 2 } {
        // If the system suspends the test for long, the run ends before the test kills it.
        retry_on_busy_machine(|_| kill_and_resume(seed, &expected));
    }
}
