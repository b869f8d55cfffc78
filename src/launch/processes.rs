//! What `/proc` says about processes, and killing them. Everything here is best effort: a process may end while it is looked at.

use std::fs;

use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
};

/// Sends `signal` to every process of the group. A group that has gone is no error: that is what we want of it.
pub(super) fn signal_group(group: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        let _ = kill_process_group(group, signal);
    }
}

/// The processes whose parent is `parent`, those among them that have ended but were not yet waited for.
pub(super) fn children(parent: Pid) -> Vec<Pid> {
    all()
        .filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            parse_parent(&stat) == Some(parent.as_raw_nonzero().get())
        })
        .collect()
}

/// Kills every process that began with this `NAME=value` in its environment, and returns how many there were. The
/// processes that a rank starts inherit its environment, also those that leave its process group and session.
pub(super) fn kill_by_environment(entry: &[u8]) -> usize {
    all().filter(|&pid| kill_if(pid, entry)).count()
}

/// The process is pinned before it is looked at, so that its number cannot come to mean another in between.
fn kill_if(pid: Pid, entry: &[u8]) -> bool {
    let pinned = pidfd_open(pid, PidfdFlags::empty());
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    if !environment.split(|&byte| byte == 0).any(|found| found == entry) {
        return false;
    }
    match pinned {
        Ok(pinned) => pidfd_send_signal(&pinned, Signal::KILL).is_ok(),
        // Linux before 5.3 and some sandboxes have no pidfd.
        Err(rustix::io::Errno::NOSYS) => kill_process(pid, Signal::KILL).is_ok(),
        Err(_) => false,
    }
}

fn all() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
}

/// The parent from `/proc/PID/stat`. The name, in parentheses, may itself hold spaces and parentheses.
fn parse_parent(stat: &str) -> Option<i32> {
    stat[stat.rfind(')')? + 1..].split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Whether this process was started with `signal` ignored, as `nohup` does with SIGHUP.
pub(super) fn is_ignored(signal: i32) -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| mask_has(&status, signal))
}

fn mask_has(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses() {
        for (stat, expected) in [
            ("12 (sh) S 3 12 12 0", Some(3)),
            ("12 (a) R 1 (b)) Z 7 12", Some(7)),
            ("", None),
            ("12 (sh)", None),
            ("12 (sh) S x", None),
        ] {
            assert_eq!(parse_parent(stat), expected, "{stat}");
        }
    }

    #[test]
    fn ignored_signals() {
        let status = "Name:\tsh\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000000001\n";
        assert!(mask_has(status, 1));
        assert!(!mask_has(status, 2));
        assert!(!mask_has("", 1));
    }
}
