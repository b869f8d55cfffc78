//! Checks that the shared memory of ranks needs no space in /dev/shm, and that no memory is left behind on the host.

use std::fs;
use std::process::{Command, Stdio};

use crate::util::{run, send_signal, wait_for, wait_until_gone};

/// Returns a command that runs `ringrun` in a new mount namespace in which /dev/shm is full. Returns
/// `None` if the user is not root.
fn command_with_full_dev_shm(arguments: &[&str]) -> Option<Command> {
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
fn a_full_dev_shm_does_not_change_results() {
    let ringbench = env!("CARGO_BIN_EXE_ringbench");
    let bench =
        ["-n", "3", ringbench, "all_reduce", "--transport", "shm", "-b", "64", "-e", "4M", "-f", "16"];
    for buffers in [&[][..], &["--alloc"]] {
        let arguments = [&bench[..], &["-n", "3", "-w", "1"], buffers].concat();
        let Some(mut command) = command_with_full_dev_shm(&arguments) else { return };
        let done = run(&mut command);
        assert_eq!(done.code(), Some(0), "{}{}", done.stdout(), done.stderr());
        assert!(done.stdout().contains("Out of bounds values : 0 OK"), "{}", done.stdout());
    }
}

/// Returns how many shared mappings of ringtrain's anonymous memory files the process has.
fn count_shared_mappings(pid: u32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines().filter(|line| line.contains(" rw-s ") && line.contains("memfd:ringtrain")).count()
}

/// The shared memory has no name in a file system, and the kernel frees the memory when the last rank ends.
#[test]
fn killed_ranks_leave_no_shared_memory() {
    let before = names_in_dev_shm();
    let mark = format!("SHARED_MEMORY_TEST={}", rand::random::<u64>());
    let job = crate::util::ringrun(&["-n", "3", "-x", &mark, "ringtrain", "--transport", "shm"])
        .args(["--epochs", "1000000"])
        .spawn()
        .unwrap();
    let ranks = wait_for("three ranks that share memory", || {
        let mut found = crate::util::processes_with_environment(&mark);
        found.retain(|&pid| count_shared_mappings(pid) > 0);
        (found.len() == 3).then_some(found)
    });
    // Stop all ranks before killing them, so that no rank exits because it lost another rank.
    for name in ["STOP", "KILL"] {
        for &pid in &ranks {
            send_signal(name, pid);
        }
    }
    let done = crate::util::finish(job);
    assert_eq!(done.code(), Some(128 + 9), "{}", done.stderr());
    wait_until_gone(&ranks);
    assert_eq!(names_in_dev_shm(), before);
}

/// A rank is killed while the ranks read and write each other's buffers. The survivors must name the killed rank, and
/// no shared memory may be left.
#[test]
fn a_rank_that_is_killed_during_an_all_reduce_in_shared_buffers_is_named() {
    let before = names_in_dev_shm();
    for victim in 0..3 {
        let mark = format!("SHARED_MEMORY_TEST={}", rand::random::<u64>());
        let job =
            crate::util::ringrun(&["-n", "3", "-x", &mark, env!("CARGO_BIN_EXE_ringbench"), "all_reduce"])
                .args(["--alloc", "--transport", "shm", "-b", "16M", "-e", "16M", "-n", "1000000"])
                .spawn()
                .unwrap();
        // Five mappings: the queues between the ranks, the memory of their rounds, and the buffers of three ranks.
        let ranks = wait_for("three ranks with shared buffers", || {
            let mut found = crate::util::processes_with_environment(&mark);
            found.retain(|&pid| count_shared_mappings(pid) == 5);
            (found.len() == 3).then_some(found)
        });
        let of_victim = crate::util::processes_with_environment(&format!("RING_RANK={victim}"));
        send_signal(
            "KILL",
            *ranks.iter().find(|pid| of_victim.contains(pid)).expect("the victim is one of the ranks"),
        );
        let done = crate::util::finish(job);
        let errors = done.stderr();
        assert_eq!(done.code(), Some(128 + 9), "{errors}");
        for survivor in (0..3).filter(|&rank| rank != victim) {
            let line =
                errors.lines().find(|line| line.starts_with(&format!("[{survivor}]<stderr>:ringbench: ")));
            assert!(line.is_some_and(|line| line.contains(&format!("rank {victim} on "))), "{errors}");
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
