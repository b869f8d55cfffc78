//! ringrun: which processors its ranks may use. Other jobs may run meanwhile, those of other tests too, so these tests do not
//! assume which processors are free.

use std::fs;

use crate::util::{Done, finish, read_pid, ringrun, ringrun_script, run, signal};

/// Prints the rank, its processors and its number of threads.
const SCRIPT: &str = "echo $RANK $(sed -n 's/Cpus_allowed_list:\t//p' /proc/self/status) $OMP_NUM_THREADS";

/// The numbers of a list such as `0-3,8`.
fn numbers(list: &str) -> Vec<usize> {
    let run = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        first.parse().unwrap()..=last.parse().unwrap()
    };
    list.split(',').flat_map(run).collect()
}

fn own() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    numbers(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t")).unwrap())
}

/// The processors and the threads of each rank.
fn shares(done: &Done) -> Vec<(Vec<usize>, usize)> {
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
    let share = |line: &String| {
        let words: Vec<&str> = line.split(' ').collect();
        (numbers(words[1]), words[2].parse().unwrap())
    };
    done.sorted_lines().iter().map(share).collect()
}

fn job(arguments: &[&str]) -> Done {
    let all = [&["--no-tag-output"], arguments].concat();
    run(ringrun_script(&all, SCRIPT).env_remove("OMP_NUM_THREADS"))
}

/// Two ranks on one processor take 20 us for a small message instead of 0.5.
#[test]
fn every_rank_is_bound_to_an_even_share() {
    let processors = own().len();
    for ranks in [2, 3, processors, 2 * processors + 1] {
        let found = shares(&job(&["-n", &ranks.to_string()]));
        assert_eq!(found.len(), ranks);
        let mut ranks_on = vec![0; own().last().unwrap() + 1];
        for (share, threads) in &found {
            assert!(share.iter().all(|processor| own().contains(processor)));
            assert!((1..=share.len()).contains(threads), "{share:?} {threads}");
            for &processor in share {
                ranks_on[processor] += 1;
            }
        }
        let most = ranks_on.iter().max().unwrap();
        assert!(*most <= ranks.div_ceil(processors), "{ranks} ranks on {processors}: {found:?}");
    }
}

#[test]
fn bindings_are_reported_and_can_be_turned_off() {
    let done = job(&["-n", "2", "--report-bindings"]);
    let told = done.stderr();
    for (rank, (share, _)) in shares(&done).iter().enumerate() {
        let start = format!("ringrun: rank {rank} is bound to processor");
        let line = told.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{told}"));
        assert_eq!(&numbers(line.rsplit(' ').next().unwrap()), share, "{told}");
    }
    let done = job(&["-n", "2", "--bind-to", "none", "--report-bindings"]);
    assert!(done.stderr().contains("rank 1 is not bound"), "{}", done.stderr());
    assert!(shares(&done).iter().all(|(share, _)| *share == own()));
}

/// As under taskset, Slurm and in containers.
#[test]
fn an_inherited_mask_is_respected() {
    let Some(&last) = own().last() else { return };
    let mut command = std::process::Command::new("taskset");
    command.args([
        "-c",
        &last.to_string(),
        env!("CARGO_BIN_EXE_ringrun"),
        "-n",
        "3",
        "--no-tag-output",
        "--",
        "sh",
        "-c",
        SCRIPT,
    ]);
    command
        .env_remove("OMP_NUM_THREADS")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let Ok(child) = command.spawn() else { return eprintln!("SKIPPED: there is no taskset") };
    assert_eq!(shares(&finish(child)), vec![(vec![last], 1); 3]);
}

#[test]
fn a_number_of_threads_that_the_user_chose_is_kept() {
    let done = run(ringrun_script(&["-n", "2"], "echo $OMP_NUM_THREADS").env("OMP_NUM_THREADS", "7"));
    assert_eq!(done.sorted_lines(), ["[0]<stdout>:7", "[1]<stdout>:7"]);
    let done = run(&mut ringrun_script(&["-n", "1", "-x", "OMP_NUM_THREADS=5"], "echo $OMP_NUM_THREADS"));
    assert_eq!(done.sorted_lines(), ["[0]<stdout>:5"]);
}

/// Also after SIGKILL a job leaves no claim. While it runs, another has no processor to itself and does not poll for messages.
#[test]
fn a_job_knows_whether_it_shares_its_processors() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = own().len().to_string();
    let script = "echo $$ > \"$DIR/part.$RANK\" && mv \"$DIR/part.$RANK\" \"$DIR/pid.$RANK\"; sleep 1000";
    let first = ringrun_script(&["-n", &ranks], script).env("DIR", folder.path()).spawn().unwrap();
    read_pid(&folder.path().join("pid.0"));
    let done = run(&mut ringrun_script(&["-n", "1", "--no-tag-output"], "echo $RING_LOCAL_PROCESSORS"));
    assert_eq!(done.stdout(), "0\n", "{}", done.stderr());
    signal("KILL", first.id());
    finish(first);
}

#[test]
fn what_cannot_be_bound_to_is_a_usage_error() {
    let done = run(&mut ringrun(&["-n", "2", "--bind-to", "socket", "true"]));
    assert_eq!(done.code(), Some(2));
    assert!(done.stderr().contains("core, numa or none"), "{}", done.stderr());
}
