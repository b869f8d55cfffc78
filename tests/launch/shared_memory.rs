//! What shared memory needs of its host, and what it leaves there: nothing that has a name.

use std::fs;
use std::process::{Command, Stdio};

use crate::util::{run, signal, wait_for, wait_until_gone};

/// `ringrun` in a new mount namespace, where /dev/shm has 4 KiB, all of which are taken; `None` without the right to
/// make one.
fn with_full_dev_shm(arguments: &[&str]) -> Option<Command> {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIPPED: only root can mount a small /dev/shm");
        return None;
    }
    let mut command = Command::new("unshare");
    let script =
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full || exit 70
        ! echo more 2> /dev/null > /dev/shm/more || exit 71; rm -f /dev/shm/more; \"$@\"; code=$?
        test \"$(ls /dev/shm)\" = full || exit 72; exit $code";
    command.args(["--mount", "sh", "-c", script, "sh", env!("CARGO_BIN_EXE_ringrun")]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(command)
}

#[test]
fn a_full_dev_shm_makes_no_difference() {
    let ringbench = env!("CARGO_BIN_EXE_ringbench");
    let bench =
        ["-n", "3", ringbench, "all_reduce", "--transport", "shm", "-b", "64", "-e", "4M", "-f", "16"];
    for buffers in [&[][..], &["--alloc"]] {
        let arguments = [&bench[..], &["-n", "3", "-w", "1"], buffers].concat();
        let Some(mut command) = with_full_dev_shm(&arguments) else { return };
        let done = run(&mut command);
        assert_eq!(done.code(), Some(0), "{}{}", done.stdout(), done.stderr());
        assert!(done.stdout().contains("Out of bounds values : 0 OK"), "{}", done.stdout());
    }
}

/// Open files and mappings of a process that belong to memory without a name.
fn shared_mappings(pid: u32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains(" rw-s ") && line.contains("memfd:ringtrain")).count()
}

/// The memory is there while the job is, in no folder, and goes with its last process, however that ends.
#[test]
fn killed_ranks_leave_no_memory_behind() {
    let before = names_in_dev_shm();
    let mark = format!("SHARED_MEMORY_TEST={}", rand::random::<u64>());
    let job = crate::util::ringrun(&["-n", "3", "-x", &mark, "ringtrain", "--transport", "shm"])
        .args(["--epochs", "1000000"])
        .spawn()
        .unwrap();
    let ranks = wait_for("three ranks that share memory", || {
        let mut found = crate::util::processes_with(&mark);
        found.retain(|&pid| shared_mappings(pid) > 0);
        (found.len() == 3).then_some(found)
    });
    // Stopped first, so that none ends because it lost another.
    for name in ["STOP", "KILL"] {
        for &pid in &ranks {
            signal(name, pid);
        }
    }
    let done = crate::util::finish(job);
    assert_eq!(done.code(), Some(128 + 9), "{}", done.stderr());
    wait_until_gone(&ranks);
    assert_eq!(names_in_dev_shm(), before);
}

/// A rank dies while others read and write its buffer, and it theirs: they say who it was, and nothing stays.
#[test]
fn a_rank_that_is_killed_while_buffers_are_lent_is_named() {
    let before = names_in_dev_shm();
    for victim in 0..3 {
        let mark = format!("SHARED_MEMORY_TEST={}", rand::random::<u64>());
        let job =
            crate::util::ringrun(&["-n", "3", "-x", &mark, env!("CARGO_BIN_EXE_ringbench"), "all_reduce"])
                .args(["--alloc", "--transport", "shm", "-b", "16M", "-e", "16M", "-n", "1000000"])
                .spawn()
                .unwrap();
        // The board, and three buffers.
        let ranks = wait_for("three ranks that lend buffers", || {
            let mut found = crate::util::processes_with(&mark);
            found.retain(|&pid| shared_mappings(pid) == 4);
            (found.len() == 3).then_some(found)
        });
        let of_victim = crate::util::processes_with(&format!("RING_RANK={victim}"));
        signal("KILL", *ranks.iter().find(|pid| of_victim.contains(pid)).expect("it is one of them"));
        let done = crate::util::finish(job);
        let told = done.stderr();
        assert_eq!(done.code(), Some(128 + 9), "{told}");
        for survivor in (0..3).filter(|&rank| rank != victim) {
            let line =
                told.lines().find(|line| line.starts_with(&format!("[{survivor}]<stderr>:ringbench: ")));
            assert!(line.is_some_and(|line| line.contains(&format!("rank {victim} on "))), "{told}");
        }
        wait_until_gone(&ranks);
    }
    assert_eq!(names_in_dev_shm(), before);
}

fn names_in_dev_shm() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return Vec::new() };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.contains("ring"))
        .collect();
    names.sort();
    names
}
