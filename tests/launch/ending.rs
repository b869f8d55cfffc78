//! Checks how jobs of ringrun end: their exit codes and messages, and that no process is left.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use crate::util::{
    FinishedProgram, finish, processes_with_environment, read_pid, ringrun, ringrun_script, run, send_signal,
    wait_until, wait_until_gone,
};

/// A script for a rank. The rank starts one child in the process group of the rank, and one child in a new session.
/// The rank and both children write their process ids to the directory `$DIR`.
const RANK_WITH_CHILDREN_SCRIPT: &str = r#"
    put() { echo "$2" > "$DIR/part.$RANK.$1" && mv "$DIR/part.$RANK.$1" "$DIR/$1.$RANK"; }
    sleep 1000 & put child $!
    setsid sh -c 'echo $$ > "$DIR/part.$RANK.daemon" && mv "$DIR/part.$RANK.daemon" "$DIR/daemon.$RANK"; sleep 1000' &
    put rank $$
    wait"#;

/// Starts a job whose ranks run `script`, which must contain [`RANK_WITH_CHILDREN_SCRIPT`]. Waits until all processes of the
/// job run. Returns the process of ringrun and the ids of the job's processes.
fn start_ranks_with_children(
    ranks: u32,
    arguments: &[&str],
    script: &str,
    folder: &Path,
) -> (Child, Vec<u32>) {
    let count = ranks.to_string();
    let mut all = vec!["-n", &count];
    all.extend(arguments);
    let child = ringrun_script(&all, script).env("DIR", folder).spawn().unwrap();
    let mut pids = Vec::new();
    for rank in 0..ranks {
        for name in ["rank", "child", "daemon"] {
            pids.push(read_pid(&folder.join(format!("{name}.{rank}"))));
        }
    }
    (child, pids)
}

/// Returns the process id of ringrun's watchdog.
fn find_watchdog(ringrun: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{ringrun}/task/{ringrun}/children")).unwrap();
    let is_watchdog = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "ring-watchdog")
    };
    let watchdogs: Vec<u32> =
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_watchdog).collect();
    assert_eq!(watchdogs.len(), 1);
    watchdogs[0]
}

fn assert_no_process_left(folder: &Path, pids: &[u32]) {
    wait_until_gone(pids);
    let entry = format!("DIR={}", folder.display());
    wait_until("no process of the job is left", || processes_with_environment(&entry).is_empty());
}

#[track_caller]
fn assert_stderr_contains(done: &FinishedProgram, parts: &[&str]) {
    let text = done.stderr();
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
}

#[test]
fn the_job_has_the_exit_code_of_the_rank_that_failed_first() {
    let script = r#"echo "I am $RANK"; [ $RANK = 1 ] && exit 7; sleep 1000"#;
    let done = run(&mut ringrun_script(&["-n", "3", "--grace", "0"], script));
    assert_eq!(done.code(), Some(7));
    assert_stderr_contains(
        &done,
        &[
            "ringrun: rank 1 (pid ",
            "exited with code 7",
            "last lines of rank 1:\n  | I am 1\n",
            "ranks 0,2 were killed by signal 15",
        ],
    );
}

/// Rank 1 is killed, and rank 0 exits with code 6, which means a lost peer. ringrun blames only rank 1, even if
/// ringrun notices the end of rank 0 first.
#[test]
fn survivors_that_exit_because_of_a_lost_peer_are_not_blamed() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    let script =
        r#"[ $RANK = 1 ] && { exec 3> "$FIFO"; kill -9 $$; }; cat "$FIFO"; echo "lost rank 1"; exit 6"#;
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let done = run(ringrun_script(&["-n", "2"], script).env("FIFO", &fifo));
    assert_eq!(done.code(), Some(137));
    assert_stderr_contains(
        &done,
        &["rank 1 (pid ", "was killed by signal 9 (SIGKILL)", "ringrun: rank 0 exited with code 6"],
    );
}

#[test]
fn a_killed_rank_ends_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let (child, pids) =
        start_ranks_with_children(3, &["--grace", "0.1"], RANK_WITH_CHILDREN_SCRIPT, folder.path());
    send_signal("KILL", read_pid(&folder.path().join("rank.1")));
    let done = finish(child);
    assert_eq!(done.code(), Some(137));
    assert_stderr_contains(
        &done,
        &["rank 1 (pid ", "killed by signal 9 (SIGKILL)", "ranks 0,2 were killed by signal 15 (SIGTERM)"],
    );
    assert_no_process_left(folder.path(), &pids);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Rank 0 fails only after rank 1 has begun to ignore SIGTERM.
    let script = r#"
        [ $RANK = 0 ] && { read x < "$FIFO"; exit 5; }
        trap '' TERM; echo ready > "$FIFO"; while :; do sleep 1000; done"#;
    let arguments = ["-n", "2", "--grace", "0", "--kill-after", "0.2"];
    let done = run(ringrun_script(&arguments, script).env("FIFO", &fifo));
    assert_eq!(done.code(), Some(5));
    assert_stderr_contains(&done, &["ringrun: rank 1 was killed by signal 9 (SIGKILL)"]);
}

#[test]
fn no_process_is_left_when_ringrun_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (child, pids) = start_ranks_with_children(3, &[], RANK_WITH_CHILDREN_SCRIPT, folder.path());
    send_signal("KILL", child.id());
    assert_eq!(finish(child).code(), None);
    assert_no_process_left(folder.path(), &pids);
}

/// The watchdog is a process that kills the ranks if ringrun dies. The test kills ringrun at different moments of its
/// start, for example before ringrun has told the watchdog about a rank.
#[test]
fn no_process_is_left_when_ringrun_is_killed_while_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let script = "sleep 1000 & setsid sleep 1000 & sleep 1000";
    for step in 0..12 {
        let mut child = ringrun_script(&["-n", "16"], script).env("DIR", folder.path()).spawn().unwrap();
        // Each round kills ringrun after a different time. The test sleeps, because it cannot observe how far
        // ringrun's start has progressed.
        std::thread::sleep(Duration::from_millis(step * 2));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_no_process_left(folder.path(), &[]);
    }
    assert_no_process_left(folder.path(), &[]);
}

#[test]
fn ctrl_c_ends_all_processes() {
    let folder = tempfile::tempdir().unwrap();
    let (child, pids) = start_ranks_with_children(2, &[], RANK_WITH_CHILDREN_SCRIPT, folder.path());
    send_signal("INT", child.id());
    let done = finish(child);
    assert_eq!(done.code(), Some(130));
    assert_stderr_contains(&done, &["ringrun: stopped by signal 2 (SIGINT)"]);
    assert_no_process_left(folder.path(), &pids);
}

#[test]
fn a_second_ctrl_c_kills_all_processes_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let ignores_ctrl_c = format!(
        "trap 'echo > \"$DIR/trapped.$RANK\"' INT; {RANK_WITH_CHILDREN_SCRIPT}; while :; do wait; done"
    );
    let (child, pids) =
        start_ranks_with_children(1, &["--kill-after", "1000"], &ignores_ctrl_c, folder.path());
    send_signal("INT", child.id());
    wait_until("the rank has got the first signal", || folder.path().join("trapped.0").exists());
    send_signal("INT", child.id());
    assert_eq!(finish(child).code(), Some(130));
    assert_no_process_left(folder.path(), &pids);
}

#[test]
fn ranks_have_time_to_save_after_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    for (code, expected) in [(0, 0), (3, 143)] {
        let script = format!("trap 'echo saved; exit {code}' TERM; {RANK_WITH_CHILDREN_SCRIPT}");
        let (child, pids) = start_ranks_with_children(2, &[], &script, folder.path());
        send_signal("TERM", child.id());
        let done = finish(child);
        assert_eq!(
            (done.code(), done.sorted_lines()),
            (Some(expected), vec!["[0]<stdout>:saved".to_owned(), "[1]<stdout>:saved".to_owned()])
        );
        assert_no_process_left(folder.path(), &pids);
        for file in fs::read_dir(folder.path()).unwrap().flatten() {
            fs::remove_file(file.path()).unwrap();
        }
    }
}

#[test]
fn other_signals_are_forwarded_to_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("trap 'echo got it; exit 0' USR1; {RANK_WITH_CHILDREN_SCRIPT}");
    let (child, _) = start_ranks_with_children(2, &[], &script, folder.path());
    send_signal("USR1", child.id());
    let done = finish(child);
    assert_eq!((done.code(), done.stdout().lines().count()), (Some(0), 2));
}

#[test]
fn a_job_timeout_stops_the_job() {
    let done = run(&mut ringrun(&["-n", "2", "--job-timeout", "0.2", "sleep", "1000"]));
    assert_eq!(done.code(), Some(124));
    assert_stderr_contains(&done, &["--job-timeout"]);
}

#[test]
fn the_watchdog_ignores_signals_and_its_death_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (child, pids) = start_ranks_with_children(1, &[], RANK_WITH_CHILDREN_SCRIPT, folder.path());
    let watchdog = find_watchdog(child.id());
    send_signal("TERM", watchdog);
    send_signal("INT", watchdog);
    assert!(crate::util::is_alive(watchdog), "SIGTERM or SIGINT ended the watchdog");
    send_signal("KILL", watchdog);
    wait_until_gone(&[watchdog]);
    send_signal("INT", child.id());
    let done = finish(child);
    assert_eq!(done.code(), Some(130));
    assert_stderr_contains(&done, &["watchdog process was killed"]);
    assert_no_process_left(folder.path(), &pids);
}

/// When ringrun dies, the kernel continues a watchdog that was stopped with SIGSTOP.
#[test]
fn a_stopped_watchdog_still_kills_the_job_when_ringrun_dies() {
    let folder = tempfile::tempdir().unwrap();
    let (child, pids) = start_ranks_with_children(2, &[], RANK_WITH_CHILDREN_SCRIPT, folder.path());
    let watchdog = find_watchdog(child.id());
    for &pid in pids.iter().chain(&[watchdog]) {
        send_signal("STOP", pid);
    }
    send_signal("KILL", child.id());
    assert_eq!(finish(child).code(), None);
    assert_no_process_left(folder.path(), &pids);
    wait_until_gone(&[watchdog]);
}

#[test]
fn commands_that_cannot_run_are_reported_once() {
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    fs::write(&plain, "no program").unwrap();
    let orphan = folder.path().join("orphan");
    fs::write(&orphan, "#!/no/such/interpreter\n").unwrap();
    assert!(std::process::Command::new("chmod").arg("+x").arg(&orphan).status().unwrap().success());
    for (command, code, part) in [
        ("no-such-command-anywhere", 127, "`no-such-command-anywhere` is not on PATH"),
        ("./no-such-command", 127, "command not found"),
        ("train.py", 127, "start a script as `python SCRIPT`"),
        ("", 127, "command not found"),
        (plain.to_str().unwrap(), 126, "you may not execute it"),
        (folder.path().to_str().unwrap(), 126, "it is a directory"),
        (orphan.to_str().unwrap(), 127, "could not execute its command: No such file"),
    ] {
        let done = run(&mut ringrun(&["-n", "3", "--", command]));
        assert_eq!(done.code(), Some(code), "{command}: {}", done.stderr());
        assert_stderr_contains(&done, &[part]);
        assert!(done.stderr().lines().count() <= 4, "{}", done.stderr());
    }
}

#[test]
fn ringrun_refuses_bad_arguments() {
    for (arguments, code, part) in [
        (&["-n", "0", "true"][..], 2, "at least 1 and at most 1024 ranks"),
        (&["-n", "1000000", "true"], 2, "at most 1024"),
        (&["-n", "2"], 2, "COMMAND"),
        (&["-n", "2", "-n", "3", "true"], 2, "multiple times"),
        (&[], 2, "required"),
        (&["--frobnicate", "-n", "2", "true"], 2, "--frobnicate"),
        (&["-n", "2", "-x", "NO_SUCH_VARIABLE", "true"], 2, "is not set"),
        (&["-hostfile", "/no/such", "-np", "2", "true"], 2, "--hostfile /no/such: it cannot be read"),
        (&["-n", "1", "true", ":", "true"], 2, "each of them needs the number of its ranks"),
        (&["-n", "2", "--mca", "btl", "^openib", "true"], 2, "--mca: ringrun has no MCA parameters"),
        (&["-n", "2", "--wdir", "/no/such", "true"], 3, "/no/such"),
        (&["-n", "2", "--wdir", "/dev/null", "true"], 3, "/dev/null"),
    ] {
        let done = run(&mut ringrun(arguments));
        assert_eq!(done.code(), Some(code), "{arguments:?}: {}", done.stderr());
        assert_stderr_contains(&done, &[part]);
    }
}

#[test]
fn ringrun_accepts_options_of_other_launchers() {
    for arguments in [
        &["-np=2", "--allow-run-as-root", "--oversubscribe", "-q"][..],
        &["--nproc_per_node=2", "--nnodes=1", "--standalone"],
        &["-H", "localhost:2", "-genv", "A", "1"],
    ] {
        let done = run(ringrun(arguments).args(["echo", "here"]));
        assert_eq!(
            done.sorted_lines(),
            ["[0]<stdout>:here", "[1]<stdout>:here"],
            "{arguments:?}: {}",
            done.stderr()
        );
    }
}

/// ringrun itself checks the arguments of `ringtrain` and `ringbench`, because otherwise every rank would print the
/// same error.
#[test]
fn wrong_arguments_of_built_in_programs_are_reported_once() {
    for (command, part) in [
        (&["ringtrain", "--epohcs", "3"][..], "--epohcs"),
        (&["ringtrain", "--resume"], "--resume needs the directory"),
        (&["ringbench", "all_reduce", "--root", "x"], "invalid value"),
        (&["ringbench", "broadcast", "--root", "9"], "root 9 is not a rank of this job of 4"),
    ] {
        let done = run(ringrun(&["-n", "4"]).args(command));
        assert_eq!((done.code(), done.stdout().as_str()), (Some(2), ""), "{}", done.stderr());
        assert_eq!(done.stderr().matches(part).count(), 1, "{}", done.stderr());
        assert!(!done.stderr().contains("rank 0 (pid"), "{}", done.stderr());
    }
    let done = run(ringrun(&["-n", "4"]).args(["ringtrain", "--help"]));
    assert_eq!((done.code(), done.stdout().matches("Usage:").count()), (Some(0), 1));
}

#[test]
fn help_and_version_exit_with_0() {
    for argument in ["--help", "--version"] {
        let done = run(&mut ringrun(&[argument]));
        assert_eq!((done.code(), done.stderr()), (Some(0), String::new()));
        assert!(done.stdout().contains("ringrun"));
    }
}
