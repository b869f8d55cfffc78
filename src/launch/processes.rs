//! Finds processes through `/proc` and kills them. A process may end at any time, so every function may miss a
//! process.

use std::fs;

use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
};

/// Sends `signal` to every process of the group. Ignores a group that no longer exists.
pub(super) fn signal_group(group: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        let _ = kill_process_group(group, signal);
    }
}

/// Returns the processes whose parent is `parent`, including zombies.
pub(super) fn find_children(parent: Pid) -> Vec<Pid> {
    all_pids()
        .filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            parse_parent_pid(&stat) == Some(parent.as_raw_nonzero().get())
        })
        .collect()
}

/// Kills every process that was started with `entry` in its environment, and returns the number of killed processes.
/// `entry` has the form `NAME=value`. Processes that a rank starts inherit the rank's environment, even if they leave
/// the rank's process group and session.
pub(super) fn kill_by_environment(entry: &[u8]) -> usize {
    all_pids().filter(|&pid| kill_if_environment_contains(pid, entry)).count()
}

/// Kills the process if its environment contains `entry`. Opens the pidfd before the check, so that the signal goes
/// to the checked process even if its process id is reused.
fn kill_if_environment_contains(pid: Pid, entry: &[u8]) -> bool {
    let pidfd = pidfd_open(pid, PidfdFlags::empty());
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    if !environment.split(|&byte| byte == 0).any(|found| found == entry) {
        return false;
    }
    match pidfd {
        Ok(pidfd) => pidfd_send_signal(&pidfd, Signal::KILL).is_ok(),
        // Without pidfds (Linux before 5.3, some sandboxes), send the signal to the process id.
        Err(rustix::io::Errno::NOSYS) => kill_process(pid, Signal::KILL).is_ok(),
        Err(_) => false,
    }
}

/// Returns the ids of all processes.
fn all_pids() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
}

/// Returns the process id of the parent from the text of `/proc/PID/stat`, or `None` if the text has another format.
/// The process name, in parentheses, may itself contain spaces and parentheses.
fn parse_parent_pid(stat: &str) -> Option<i32> {
    stat[stat.rfind(')')? + 1..].split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Returns whether this process ignores `signal`. For example, a process that `nohup` started ignores SIGHUP.
pub(super) fn is_signal_ignored(signal: i32) -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| ignores_signal(&status, signal))
}

/// Returns whether the text of `/proc/PID/status` says that the process ignores `signal`.
fn ignores_signal(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Sets the name that `ps` and `top` show for this process. Without this call, `ps` and `top` show the name `exe` for
/// a process that was started from `/proc/self/exe`.
pub fn set_process_name(name: &str) {
    let _ = fs::write("/proc/self/comm", name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_parsed_although_names_contain_parentheses() {
        for (stat, expected) in [
            ("12 (sh) S 3 12 12 0", Some(3)),
            ("12 (a) R 1 (b)) Z 7 12", Some(7)),
            ("", None),
            ("12 (sh)", None),
            ("12 (sh) S x", None),
        ] {
            assert_eq!(parse_parent_pid(stat), expected, "{stat}");
        }
    }

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        let status = "Name:\tsh\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000000001\n";
        assert!(ignores_signal(status, 1));
        assert!(!ignores_signal(status, 2));
        assert!(!ignores_signal("", 1));
    }
}
