//! The roster: the list of all ranks of a job, with the host, the address and the settings of each.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::types::{Rank, WorldSize};

/// In the text that [`machine_id`] returns, the separator before the digest of the name from `--host-id`.
const HOST_ID_SEPARATOR: &str = " as ";

/// What a rank registers about itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// The name of the rank's host in errors.
    pub host: String,
    /// The text that [`machine_id`] returns to identify the rank's machine.
    pub machine: String,
    /// The address on which the rank listens.
    pub address: SocketAddr,
    /// This rank's values for the shared settings. If the values of the ranks differ, those of rank 0 apply.
    pub shared: SharedSettings,
}

/// Which links between ranks carry a CRC32C of each payload. Rank 0's setting applies to all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksums {
    /// Only links between hosts have checksums, because only data between hosts travel over a network.
    #[default]
    Auto,
    /// All links have checksums.
    On,
    /// No link has checksums.
    Off,
}

/// The settings for which all ranks of a job use the values of rank 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SharedSettings {
    /// The maximum length of a segment in bytes.
    pub segment_bytes: usize,
    /// Which links carry checksums of payloads.
    pub checksums: Checksums,
    /// The number of the host's processors. If all ranks are on one host with at least one processor for each rank,
    /// an all-reduce uses chunks of 256 KiB instead of 2 MiB.
    pub processors: u32,
    /// The number of connections of a link; 0 means that the ranks measure at the start which number is fastest.
    pub streams: u8,
    /// Whether the ranks record a timeline.
    #[serde(default)]
    pub timeline: bool,
}

/// The list of all ranks of the job and their addresses.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Roster {
    /// The members, in rank order.
    pub members: Vec<Member>,
}

impl Roster {
    /// Returns the address on which each rank listens, in rank order.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.members.iter().map(|member| member.address).collect()
    }

    /// Sets the IP address of all ranks that listen on all addresses of their host, and have registered none. These ranks are on
    /// the host of rank 0, and `host` is an address at which this rank reaches that host.
    pub fn replace_unspecified_hosts(&mut self, host: IpAddr) {
        for member in self.members.iter_mut().filter(|member| member.address.ip().is_unspecified()) {
            member.address.set_ip(host);
        }
    }

    /// Returns each rank's host for use in errors: the name and the address.
    pub fn hosts(&self) -> Vec<String> {
        self.members.iter().map(|member| format!("{} ({})", member.host, member.address)).collect()
    }

    /// Returns a number for each rank's machine. Ranks on the same machine have the same number.
    pub fn machine_numbers(&self) -> Arc<[u32]> {
        let first_on_machine =
            |member: &Member| self.members.iter().position(|other| other.machine == member.machine);
        self.members.iter().map(|member| first_on_machine(member).unwrap_or_default() as u32).collect()
    }

    /// Returns, for each rank, whether the link between `rank` and that rank carries checksums of payloads. Both ends
    /// of a link get the same result.
    pub fn links_with_checksums(&self, rank: Rank) -> Vec<bool> {
        let machines = self.machine_numbers();
        let own = machines.get(rank.index());
        let is_checked =
            |other| match self.shared_settings().map(|shared| shared.checksums).unwrap_or_default() {
                Checksums::Auto => Some(other) != own,
                Checksums::On => true,
                Checksums::Off => false,
            };
        machines.iter().map(is_checked).collect()
    }

    /// Returns the local rank of `rank` on its machine, and the number of ranks on this machine.
    pub fn local_rank_and_size(&self, rank: Rank) -> (Rank, WorldSize) {
        let machine = self.members.get(rank.index()).map(|member| &member.machine);
        let count_on_machine =
            |members: &[Member]| members.iter().filter(|m| Some(&m.machine) == machine).count() as u32;
        let local_rank = count_on_machine(&self.members[..rank.index().min(self.members.len())]);
        let local_size = count_on_machine(&self.members);
        (Rank::new(local_rank), WorldSize::new(local_size).unwrap_or(WorldSize::ONE))
    }

    /// Returns the number of ranks on the machine of `rank`, including `rank`. Ranks on one machine use the same
    /// processors, even if `--host-id` gives them different host names.
    pub fn count_ranks_on_same_processors(&self, rank: Rank) -> usize {
        let kernel_id =
            |member: &Member| member.machine.split(HOST_ID_SEPARATOR).next().unwrap_or_default().to_owned();
        let own = self.members.get(rank.index()).map(kernel_id);
        self.members.iter().filter(|member| Some(kernel_id(member)) == own).count()
    }

    /// Returns the settings of rank 0, which apply to all ranks.
    pub fn shared_settings(&self) -> Option<SharedSettings> {
        self.members.first().map(|member| member.shared)
    }
}

/// Returns the name of this host, which errors on other hosts show.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns a text that identifies this machine, even if another machine has the same name. The text contains the
/// host's name, the kernel's boot id, the network namespace (so that a container with its own network counts as a
/// separate host), and a digest of the name from `--host-id`.
pub fn machine_id(host_id: Option<&str>) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    // Use a digest, because the name may be longer than the rendezvous accepts.
    let digest =
        |id: &str| Sha256::digest(id).iter().take(16).fold(0u128, |all, &byte| all << 8 | u128::from(byte));
    let host_id_part =
        host_id.map(|id| format!("{HOST_ID_SEPARATOR}{:032x}", digest(id))).unwrap_or_default();
    format!("{} {} {}{host_id_part}", host_name(), boot.trim(), network.display())
}

/// Returns whether only processes of this machine can reach the address. A job on such an address needs no secret.
pub(crate) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Formats a sorted list of ranks, for example as `1, 3-5, 9`.
pub(super) fn format_ranks(ranks: &[Rank]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut index = 0;
    while index < ranks.len() {
        let start = ranks[index].get();
        let mut end = start;
        while ranks.get(index + 1).is_some_and(|next| next.get() == end + 1) {
            index += 1;
            end += 1;
        }
        parts.push(if end > start + 1 {
            format!("{start}-{end}")
        } else if end > start {
            format!("{start}, {end}")
        } else {
            start.to_string()
        });
        index += 1;
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(machine: &str) -> Member {
        Member {
            host: "h".into(),
            machine: machine.into(),
            address: "127.0.0.1:1".parse().unwrap(),
            shared: SharedSettings {
                segment_bytes: 1,
                checksums: Checksums::Auto,
                processors: 2,
                streams: 1,
                timeline: false,
            },
        }
    }

    #[test]
    fn local_ranks_are_numbered_on_each_machine() {
        let roster = Roster { members: ["a", "b", "a", "b", "a"].map(member).into() };
        let local = |rank| {
            let (local, size) = roster.local_rank_and_size(Rank::new(rank));
            (local.get(), size.get())
        };
        assert_eq!(
            [local(0), local(1), local(2), local(3), local(4)],
            [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]
        );
    }

    #[test]
    fn both_ends_of_a_link_agree_on_its_checksums() {
        let mut roster = Roster { members: ["a", "b", "a"].map(member).into() };
        let links = |roster: &Roster| [0, 1, 2].map(|rank| roster.links_with_checksums(Rank::new(rank)));
        let between_hosts = [[false, true, false], [true, false, true], [false, true, false]];
        assert_eq!(links(&roster), between_hosts);
        for (checksums, expected) in [(Checksums::On, true), (Checksums::Off, false)] {
            // Only rank 0's setting applies.
            roster.members[0].shared.checksums = checksums;
            assert_eq!(links(&roster), [[expected; 3]; 3]);
        }
    }

    #[test]
    fn ranks_with_different_host_ids_share_processors() {
        let names = [machine_id(None), machine_id(Some("a")), machine_id(Some("b")), "elsewhere".into()];
        let roster = Roster { members: names.iter().map(|name| member(name)).collect() };
        let rank = |rank| Rank::new(rank);
        assert_eq!(
            (roster.count_ranks_on_same_processors(rank(1)), roster.count_ranks_on_same_processors(rank(3))),
            (3, 1)
        );
        assert_eq!(
            (roster.local_rank_and_size(rank(1)).1.get(), roster.local_rank_and_size(rank(2)).1.get()),
            (1, 1)
        );
        assert_eq!(machine_id(Some("a")), names[1]);
        assert!(machine_id(Some(&"long".repeat(10_000))).len() < 300);
    }

    #[test]
    fn consecutive_ranks_are_formatted_as_a_range() {
        let ranks = |numbers: &[u32]| numbers.iter().map(|&n| Rank::new(n)).collect::<Vec<_>>();
        assert_eq!(format_ranks(&ranks(&[1, 3, 4, 5, 9])), "1, 3-5, 9");
        assert_eq!(format_ranks(&ranks(&[0, 1])), "0, 1");
        assert_eq!(format_ranks(&[]), "");
    }
}
