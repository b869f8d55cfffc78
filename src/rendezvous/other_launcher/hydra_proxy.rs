//! Finds the process of Hydra that started this process. Hydra, the launcher of MPICH and Intel MPI, sets no variable that
//! differs between two jobs.

use std::fs;

/// The name of Hydra's process on each host. The ranks of this host are its children or further descendants.
const PROXY_NAME: &str = "hydra_pmi_proxy";
/// The maximum number of processes between a rank and the proxy, for example shells.
const DISTANCE_MAX: usize = 64;

/// Returns the process id and the start time of the proxy, which no other job on this host has. Returns `None` if no ancestor
/// of this process is a proxy.
pub(crate) fn hydra_proxy() -> Option<String> {
    let mut id = std::process::id();
    for _ in 0..DISTANCE_MAX {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let process = parse_stat(&stat)?;
        if process.name == PROXY_NAME {
            return Some(format!("{id} {}", process.start_time));
        }
        id = process.parent;
    }
    None
}

/// Fields of `/proc/PID/stat`.
#[derive(PartialEq, Eq, Debug)]
struct ProcessStat<'a> {
    name: &'a str,
    parent: u32,
    /// The time in clock ticks from the start of the machine to the start of the process.
    start_time: &'a str,
}

/// Parses the text of `/proc/PID/stat` (proc(5)). The name is in parentheses, and may contain spaces and parentheses.
fn parse_stat(text: &str) -> Option<ProcessStat<'_>> {
    let (before, after) = text.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    // The first field after the name is field 3. The parent is field 4, and the start time is field 22.
    let fields: Vec<&str> = after.split_ascii_whitespace().collect();
    Some(ProcessStat { name, parent: fields.get(1)?.parse().ok()?, start_time: fields.get(19)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_process_are_found() {
        let text = "41 (a (b) c) S 7 41 41 0 -1 4194304 181 0 0 0 1 2 3 4 20 0 1 0 98765 2 3\n";
        let expected = ProcessStat { name: "a (b) c", parent: 7, start_time: "98765" };
        assert_eq!(parse_stat(text), Some(expected));
        assert_eq!(parse_stat("41 (a) S 7"), None);
    }

    #[test]
    fn a_process_without_hydra_has_no_proxy() {
        assert_eq!(hydra_proxy(), None);
    }
}
