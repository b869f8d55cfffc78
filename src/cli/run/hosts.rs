//! Computes the number of ranks from the options, and checks that every named host is this host.

use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::thread::available_parallelism;

use super::{RankCount, RunArgs};
use crate::launch::LOCAL_RANKS_MAX;
use crate::rendezvous::host_name;
use crate::types::WorldSize;

/// The maximal length of a hostfile, in bytes. A real hostfile is much shorter.
const HOSTFILE_BYTES_MAX: u64 = 1 << 20;

/// Returns the number of ranks. Without `-n` and `--nproc-per-node`, the number of ranks is the sum of the hosts'
/// slots. Returns an error if `--host` or the hostfile names a host other than this host.
pub(super) fn count_ranks(args: &RunArgs) -> Result<WorldSize, String> {
    let slots = match &args.hostfile {
        Some(path) => sum_slots_of_file(path)?,
        None => sum_slots(args.hosts.iter().map(String::as_str))?,
    };
    let ranks = args.ranks.or(args.ranks_per_host).unwrap_or(RankCount::Number(slots.into()));
    let world = to_world_size(ranks)?;
    if let (Some(_), Some(per_host)) = (args.ranks, args.ranks_per_host)
        && to_world_size(per_host)?.get() < world.get()
    {
        return Err(format!(
            "-n {world} is more than the number of ranks per host, so the job needs several hosts; {THIS_HOST_ONLY}"
        ));
    }
    Ok(world)
}

const THIS_HOST_ONLY: &str = "ringrun starts ranks on this host only; on several hosts start each rank yourself, for example \
    `ringtrain --peers hosts.txt --rank R`";

/// Converts a number of ranks to a world size, and checks that ringrun can start this number of ranks.
fn to_world_size(ranks: RankCount) -> Result<WorldSize, String> {
    let number = match ranks {
        RankCount::Auto => {
            available_parallelism().map_or(1, |count| count.get() as i64).min(LOCAL_RANKS_MAX.into())
        }
        RankCount::Number(number) => number,
    };
    let world = u32::try_from(number).ok().and_then(WorldSize::new);
    world.filter(|world| world.get() <= LOCAL_RANKS_MAX).ok_or_else(|| {
        format!("-n {number}: ringrun starts at least 1 and at most {LOCAL_RANKS_MAX} ranks on one machine")
    })
}

/// Returns the sum of the slots in a hostfile.
fn sum_slots_of_file(path: &Path) -> Result<u32, String> {
    let read_error =
        |error: std::io::Error| format!("--hostfile {}: it cannot be read: {error}", path.display());
    let mut text = String::new();
    let file = File::open(path).map_err(read_error)?;
    // Read one byte more than the limit, to detect a file that is too long.
    file.take(HOSTFILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(read_error)?;
    if text.len() as u64 > HOSTFILE_BYTES_MAX {
        return Err(format!("--hostfile {}: it is longer than {HOSTFILE_BYTES_MAX} bytes", path.display()));
    }
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    sum_slots(lines.filter(|line| !line.is_empty()))
        .map_err(|error| format!("--hostfile {}: {error}", path.display()))
}

/// Returns the sum of the slots of entries such as `host`, `host:2` and `host slots=2`.
fn sum_slots<'a>(entries: impl Iterator<Item = &'a str>) -> Result<u32, String> {
    let mut sum = 0_u32;
    for entry in entries {
        let words: Vec<&str> = entry.split_whitespace().collect();
        let first_word = words.first().copied().unwrap_or_default();
        // An IPv6 address contains colons, so the text after its last colon is not a number of slots.
        let (host, slots) = match first_word.rsplit_once(':') {
            Some((host, slots)) if first_word.parse::<IpAddr>().is_err() => (host, slots),
            _ => (first_word, "1"),
        };
        let value_of = |key: &str| words.iter().find_map(|word| word.strip_prefix(key));
        // As in Open MPI, `max_slots` counts only if there is no `slots`.
        let slots = value_of("slots=").or_else(|| value_of("max_slots=")).unwrap_or(slots);
        if !is_this_host(host) {
            return Err(format!("`{host}` is not this host; {THIS_HOST_ONLY}"));
        }
        let slots: u32 =
            slots.parse().map_err(|_| format!("`{entry}`: `{slots}` is not a number of ranks"))?;
        sum = sum.saturating_add(slots);
    }
    Ok(sum)
}

/// Returns whether `host` is a name or an address of this machine.
fn is_this_host(host: &str) -> bool {
    let this_host = host_name();
    let short_name = this_host.split('.').next().unwrap_or_default();
    if host == "localhost" || host == this_host || (!host.is_empty() && host == short_name) {
        return true;
    }
    let Ok(address) = host.trim_matches(['[', ']']).parse::<IpAddr>() else { return false };
    // The kernel binds a socket only to an address of this host.
    !address.is_unspecified() && UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_this_host_are_counted() {
        let this_host = format!("{}:3", host_name());
        for (entry, expected) in [
            ("localhost", 1),
            ("localhost:4", 4),
            ("127.0.0.1:2", 2),
            ("::1", 1),
            ("localhost slots=5", 5),
            ("localhost slots=2 max_slots=4", 2),
            ("localhost max_slots=4", 4),
            (this_host.as_str(), 3),
        ] {
            // In a container without IPv6, `::1` is not an address of this host.
            if entry != "::1" || is_this_host("::1") {
                assert_eq!(sum_slots([entry].into_iter()), Ok(expected), "{entry}");
            }
        }
        assert_eq!(sum_slots(["localhost:1", "localhost:2"].into_iter()), Ok(3));
    }

    #[test]
    fn a_hostfile_that_is_too_long_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hosts");
        std::fs::write(&path, "localhost\n".repeat(HOSTFILE_BYTES_MAX as usize / 10 + 1)).unwrap();
        let error = sum_slots_of_file(&path).unwrap_err();
        assert!(error.ends_with("it is longer than 1048576 bytes"), "{error}");
    }

    #[test]
    fn other_hosts_are_rejected_with_a_reason() {
        for (entry, part) in [
            ("node7:4", "`node7` is not this host; ringrun starts ranks on this host only"),
            ("192.0.2.7", "`192.0.2.7` is not this host"),
            ("localhost:x", "`x` is not a number of ranks"),
            ("0.0.0.0", "is not this host"),
        ] {
            let error = sum_slots([entry].into_iter()).expect_err(entry);
            assert!(error.contains(part), "{entry}: {error}");
        }
    }
}
