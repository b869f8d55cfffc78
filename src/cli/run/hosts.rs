//! Places the ranks on the hosts that the options name.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::thread::available_parallelism;

use super::host_list::{HostEntry, parse_host_line, split_hosts};
use super::rank_count::RankCount;
use crate::launch::{HOSTS_MAX, LOCAL_RANKS_MAX, RankShare, RemoteHost};
use crate::rendezvous::host_name;
use crate::types::{WorldSize, counted};

/// The maximal length of a hostfile, in bytes. A real hostfile is much shorter.
const HOSTFILE_BYTES_MAX: u64 = 1 << 20;

/// The options that say how many ranks run where.
pub(super) struct HostOptions<'a> {
    /// The value of `-n`.
    pub(super) ranks: Option<RankCount>,
    /// The value of `--nproc-per-node`.
    pub(super) ranks_per_host: Option<RankCount>,
    /// The values of `--host`.
    pub(super) hosts: &'a [String],
    /// The value of `--hostfile`.
    pub(super) hostfile: Option<&'a Path>,
    /// The value of `--map-by`.
    pub(super) order: RankOrder,
}

/// The order in which the ranks are placed on the hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RankOrder {
    /// Fill the hosts one after the other.
    Slot,
    /// Place one rank on each host in turn, as long as the host has free slots.
    Node,
}

/// The hosts of a job and their ranks.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct JobHosts {
    pub(super) world: WorldSize,
    /// The ranks on this host.
    pub(super) share: RankShare,
    pub(super) remote_hosts: Vec<RemoteHost>,
}

/// Places the ranks on the hosts, which have the order in which the user has named them. Without `--host` and `--hostfile`, all
/// ranks run on this host.
pub(super) fn place_ranks(options: &HostOptions<'_>) -> Result<JobHosts, String> {
    let entries = match options.hostfile {
        Some(path) => {
            read_hostfile(path).map_err(|error| format!("--hostfile {}: {error}", path.display()))?
        }
        None => parse_hosts(options.hosts)?,
    };
    if entries.is_empty() {
        return place_on_this_host(options);
    }
    check_entries(&entries)?;
    let slots =
        entries.iter().map(|entry| count_slots(entry, options)).collect::<Result<Vec<u32>, String>>()?;
    let total: u64 = slots.iter().map(|&slots| u64::from(slots)).sum();
    let world = match options.ranks {
        None => to_world_size(total as i64)?,
        Some(RankCount::Number(number)) => to_world_size(number)?,
        Some(RankCount::Auto) if entries.iter().all(|entry| is_this_host(&entry.name)) => count_processors()?,
        Some(RankCount::Auto) => {
            return Err(
                "-n auto counts only the processors of this host; give the ranks of each host: HOST:N"
                    .to_owned(),
            );
        }
    };
    if u64::from(world.get()) > total {
        let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        return Err(format!(
            "-n {world} is more than the {} of {}; give the number of slots of each host, for example {}:{}",
            counted(total, "slot"),
            names.join(", "),
            names[0],
            world.get().div_ceil(entries.len() as u32)
        ));
    }
    Ok(fill_hosts(&entries, &assign_ranks(&slots, world, options.order), world))
}

fn place_on_this_host(options: &HostOptions<'_>) -> Result<JobHosts, String> {
    let world = match options.ranks.or(options.ranks_per_host) {
        Some(RankCount::Number(number)) => to_world_size(number)?,
        Some(RankCount::Auto) => count_processors()?,
        None if !options.hosts.is_empty() => return Err("the list of hosts is empty".to_owned()),
        None => {
            return Err("the number of ranks is missing: give it with --np N, or name the hosts with --host"
                .to_owned());
        }
    };
    if world.get() > LOCAL_RANKS_MAX {
        return Err(too_many_ranks(&format!("-n {world}")));
    }
    if let (Some(_), Some(RankCount::Number(per_host))) = (options.ranks, options.ranks_per_host)
        && to_world_size(per_host)?.get() < world.get()
    {
        return Err(format!(
            "-n {world} is more than the number of ranks per host, so the job needs several hosts; name them with --host"
        ));
    }
    Ok(JobHosts { world, share: RankShare::whole(world), remote_hosts: Vec::new() })
}

/// Returns how many ranks may run on a host.
fn count_slots(entry: &HostEntry, options: &HostOptions<'_>) -> Result<u32, String> {
    let HostEntry { name, slots } = entry;
    let slots = match (options.ranks_per_host, *slots) {
        (Some(RankCount::Auto), _) => {
            return Err(format!("ringrun does not count the processors of other hosts; write {name}:N"));
        }
        (Some(RankCount::Number(wanted)), slots) => {
            let wanted = to_world_size(wanted)?.get();
            if let Some(slots) = slots.filter(|&slots| slots < wanted) {
                return Err(format!(
                    "host {name} has {}, fewer than the {wanted} ranks per host",
                    counted(slots, "slot")
                ));
            }
            wanted
        }
        (None, slots) => slots.unwrap_or(1),
    };
    match slots {
        0 => Err(format!("host {name} has 0 slots; leave the host out, or give it at least 1")),
        1..=LOCAL_RANKS_MAX => Ok(slots),
        _ => Err(too_many_ranks(&format!("host {name}: {slots} slots"))),
    }
}

/// Refuses too many hosts, and hosts that occur twice.
fn check_entries(entries: &[HostEntry]) -> Result<(), String> {
    if entries.len() > HOSTS_MAX {
        return Err(format!("{} hosts: ringrun starts ranks on at most {HOSTS_MAX} hosts", entries.len()));
    }
    let mut known = BTreeSet::new();
    for HostEntry { name, .. } in entries {
        // This host has several names.
        let key = if is_this_host(name) { "localhost" } else { name };
        if !known.insert(key) {
            return Err(format!(
                "host {name} occurs twice; name each host once, with all its ranks: {name}:N"
            ));
        }
    }
    Ok(())
}

/// Returns the ranks of each host. The hosts have enough slots.
fn assign_ranks(slots: &[u32], world: WorldSize, order: RankOrder) -> Vec<Vec<u32>> {
    let mut assigned: Vec<Vec<u32>> = vec![Vec::new(); slots.len()];
    let mut ranks = 0..world.get();
    let chunk = match order {
        RankOrder::Slot => u32::MAX,
        RankOrder::Node => 1,
    };
    while !ranks.is_empty() {
        for (own, &slots) in assigned.iter_mut().zip(slots) {
            let free = slots - own.len() as u32;
            own.extend(ranks.by_ref().take(free.min(chunk) as usize));
        }
    }
    assigned
}

fn fill_hosts(entries: &[HostEntry], assigned: &[Vec<u32>], world: WorldSize) -> JobHosts {
    let used = entries.iter().zip(assigned).filter(|(_, ranks)| !ranks.is_empty());
    let hosts = used.clone().count() as u32;
    let mut placed = JobHosts { world, share: RankShare::empty(hosts), remote_hosts: Vec::new() };
    for (host, (entry, ranks)) in (0..).zip(used) {
        let share = RankShare { ranks: ranks.clone(), host, hosts };
        if is_this_host(&entry.name) {
            placed.share = share;
        } else {
            placed.remote_hosts.push(RemoteHost { name: entry.name.as_str().into(), share });
        }
    }
    placed
}

fn too_many_ranks(what: &str) -> String {
    format!("{what}: ringrun starts at least 1 and at most {LOCAL_RANKS_MAX} ranks on one machine")
}

/// Returns the number of ranks of one host.
pub(super) fn count_ranks(count: RankCount) -> Result<WorldSize, String> {
    let count = match count {
        RankCount::Number(number) => to_world_size(number)?,
        RankCount::Auto => count_processors()?,
    };
    if count.get() > LOCAL_RANKS_MAX { Err(too_many_ranks(&format!("-n {count}"))) } else { Ok(count) }
}

/// Converts a number of ranks to a world size.
fn to_world_size(number: i64) -> Result<WorldSize, String> {
    let world = u32::try_from(number).ok().and_then(WorldSize::new);
    world.ok_or_else(|| too_many_ranks(&format!("-n {number}")))
}

fn count_processors() -> Result<WorldSize, String> {
    let processors = available_parallelism().map_or(1, |count| count.get() as i64);
    to_world_size(processors.min(LOCAL_RANKS_MAX.into()))
}

fn parse_hosts(lists: &[String]) -> Result<Vec<HostEntry>, String> {
    let mut entries = Vec::new();
    for item in lists.iter().flat_map(|list| split_hosts(list)) {
        entries.extend(parse_host_line(item).map_err(|error| format!("--host: {error}"))?);
    }
    Ok(entries)
}

fn read_hostfile(path: &Path) -> Result<Vec<HostEntry>, String> {
    let read_error = |error: std::io::Error| format!("it cannot be read: {error}");
    let mut text = String::new();
    let file = File::open(path).map_err(read_error)?;
    // Read one byte more than the limit, to detect a file that is too long.
    file.take(HOSTFILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(read_error)?;
    if text.len() as u64 > HOSTFILE_BYTES_MAX {
        return Err(format!("it is longer than {HOSTFILE_BYTES_MAX} bytes"));
    }
    let mut entries = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            entries.extend(parse_host_line(line).map_err(|error| format!("line {number}: {error}"))?);
        }
    }
    if entries.is_empty() { Err("it names no host".to_owned()) } else { Ok(entries) }
}

/// Returns whether `host` is a name or an address of this machine.
fn is_this_host(host: &str) -> bool {
    let this_host = host_name();
    let short_name = this_host.split('.').next().unwrap_or_default();
    if host == "localhost" || host == this_host || (!host.is_empty() && host == short_name) {
        return true;
    }
    let Ok(address) = host.parse::<IpAddr>() else { return false };
    // The kernel binds a socket only to an address of this host.
    !address.is_unspecified() && UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the ranks of each host, such as `a:0-1 this:2-3`, or the error.
    fn place(ranks: Option<i64>, per_host: Option<i64>, hosts: &str) -> Result<String, String> {
        place_in_order(ranks, per_host, hosts, RankOrder::Slot)
    }

    fn place_in_order(
        ranks: Option<i64>,
        per_host: Option<i64>,
        hosts: &str,
        order: RankOrder,
    ) -> Result<String, String> {
        let hosts = [hosts.to_owned()];
        let placed = place_ranks(&HostOptions {
            ranks: ranks.map(RankCount::Number),
            ranks_per_host: per_host.map(RankCount::Number),
            hosts: if hosts[0].is_empty() { &[] } else { &hosts },
            hostfile: None,
            order,
        })?;
        let mut all: Vec<_> =
            placed.remote_hosts.iter().map(|host| (host.share.clone(), &*host.name)).collect();
        all.extend((placed.share.count() > 0).then_some((placed.share, "this")));
        all.sort_by_key(|(share, _)| share.ranks[0]);
        let numbers = (0..)
            .zip(&all)
            .all(|(number, (share, _))| share.host == number && share.hosts == all.len() as u32);
        assert!(numbers, "{all:?}");
        let text = |(share, name): &(RankShare, &str)| {
            let (first, last) = (share.ranks[0], share.ranks[share.ranks.len() - 1]);
            if last - first + 1 == share.count() {
                format!("{name}:{first}-{last}")
            } else {
                format!("{name}:{:?}", share.ranks).replace(", ", ",")
            }
        };
        Ok(all.iter().map(text).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn ranks_are_placed_on_one_host_after_the_other() {
        for (ranks, hosts, expected) in [
            (None, "a:2,localhost:2", "a:[0,2] this:[1,3]"),
            (None, "a:1,b:3,c:2", "a:0-0 b:[1,3,5] c:[2,4]"),
            (Some(3), "a:2,b:2", "a:[0,2] b:1-1"),
            (Some(1), "a:2,b:2", "a:0-0"),
        ] {
            let found = place_in_order(ranks, None, hosts, RankOrder::Node);
            assert_eq!(found.as_deref(), Ok(expected), "{hosts}");
        }
    }

    #[test]
    fn hosts_are_filled_in_their_order() {
        let this_host = format!("{}:3,a", host_name());
        for (ranks, per_host, hosts, expected) in [
            (Some(3), None, "", "this:0-2"),
            (None, Some(2), "", "this:0-1"),
            (None, None, "a:2,localhost:2", "a:0-1 this:2-3"),
            (None, None, "a,b", "a:0-0 b:1-1"),
            (Some(3), None, "a:2,b:2", "a:0-1 b:2-2"),
            (Some(2), None, "a:2,b:2", "a:0-1"),
            (None, Some(2), "a,b", "a:0-1 b:2-3"),
            (None, None, "n[1-2]:2,127.0.0.1", "n1:0-1 n2:2-3 this:4-4"),
            (None, None, &this_host, "this:0-2 a:3-3"),
            (None, None, "localhost:4", "this:0-3"),
        ] {
            assert_eq!(place(ranks, per_host, hosts).as_deref(), Ok(expected), "{hosts}");
        }
    }

    #[test]
    fn impossible_places_are_refused_and_name_the_host() {
        for (ranks, per_host, hosts, part) in [
            (
                Some(5),
                None,
                "a:2,b:2",
                "more than the 4 slots of a, b; give the number of slots of each host, for example a:3",
            ),
            (Some(2), None, "localhost", "more than the 1 slot of localhost"),
            (None, None, "a:0,b", "host a has 0 slots"),
            (None, None, "a,b,a:2", "host a occurs twice"),
            (None, None, "localhost,127.0.0.1", "host 127.0.0.1 occurs twice"),
            (None, Some(3), "a:2", "host a has 2 slots, fewer than the 3 ranks per host"),
            (None, None, "a:5000", "host a: 5000 slots: ringrun starts at least 1 and at most 1024"),
            (None, None, "n[1-300]", "at most 256 hosts"),
            (None, None, "a:x", "`x` is not a number of ranks"),
            (Some(4), Some(2), "", "several hosts"),
            (Some(5000), None, "", "at most 1024"),
            (Some(0), None, "a:2", "at least 1"),
        ] {
            let error = place(ranks, per_host, hosts).expect_err(hosts);
            assert!(error.contains(part), "{hosts}: {error}");
        }
    }

    #[test]
    fn a_hostfile_has_comments_and_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hosts");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_hostfile(&path)
        };
        let entries = read("# the cluster\na slots=2 # fast\n\nb:3\nn[1,3]\n").unwrap();
        let found: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.slots)).collect();
        assert_eq!(found, [("a", Some(2)), ("b", Some(3)), ("n1", None), ("n3", None)]);
        assert_eq!(read("a\nb:y\n").unwrap_err(), "line 2: `b:y`: `y` is not a number of ranks");
        assert_eq!(read("# nothing\n").unwrap_err(), "it names no host");
        let too_long = "localhost\n".repeat(HOSTFILE_BYTES_MAX as usize / 10 + 1);
        assert_eq!(read(&too_long).unwrap_err(), "it is longer than 1048576 bytes");
    }
}
