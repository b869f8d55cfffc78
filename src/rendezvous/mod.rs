//! The rendezvous: how the ranks of a job find each other before the first link is opened.
//!
//! One process serves the rendezvous: the launcher, or rank 0 if there is a peers file. Every other rank dials it, proves that
//! it knows the job's secret, registers its address, and gets the roster when the last rank has joined.

mod client;
mod environment;
mod error;
mod message;
mod peers_file;
mod server;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use client::{Registration, register};
pub use environment::{
    EnvironmentError, Launched, SECRET_VARIABLE, from_environment, secret_from_environment,
};
pub use error::StartError;
pub use peers_file::{PeersFile, PeersFileError};
pub use server::{Server, serve};

use crate::types::{Rank, WorldSize};

/// The separator between the name of a machine and the name from `--host-id`.
const CHOSEN: &str = " as ";

/// A rank as it registers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// How its host is named in errors.
    pub host: String,
    /// Identifies its machine, also among machines with the same name: the kernel's boot id, its network, and the name from
    /// `--host-id`.
    pub machine: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// The settings that all ranks must share. Those of rank 0 apply to all ranks.
    pub shared: Shared,
}

/// Which links between ranks carry a CRC32C of each payload. Rank 0's setting applies to all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksums {
    /// Links between hosts. Data within one host never passes a network.
    #[default]
    Auto,
    /// All links.
    On,
    /// None.
    Off,
}

/// Settings that must be the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shared {
    /// Bytes of a whole segment.
    pub segment_bytes: usize,
    /// Which links carry checksums of payloads.
    pub checksums: Checksums,
    /// The number of the host's processors; with the number of ranks on it, this decides how an all-reduce is cut.
    pub processors: u32,
    /// The number of connections of a link; 0 if the start measures which number is best.
    pub streams: u8,
}

/// All ranks of the job.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Roster {
    /// The members, in rank order.
    pub members: Vec<Member>,
}

impl Roster {
    /// Where each rank listens, in rank order.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.members.iter().map(|member| member.address).collect()
    }

    /// How to name each rank's host in an error: its name and address.
    pub fn hosts(&self) -> Vec<String> {
        self.members.iter().map(|member| format!("{} ({})", member.host, member.address)).collect()
    }

    /// The machine of each rank, as a number: ranks of one machine have the same.
    pub fn machines(&self) -> Arc<[u32]> {
        let first = |member: &Member| self.members.iter().position(|other| other.machine == member.machine);
        self.members.iter().map(|member| first(member).unwrap_or_default() as u32).collect()
    }

    /// Whether the link from `rank` to each rank carries checksums of payloads. Both ends of a link find the same answer.
    pub fn checked_links(&self, rank: Rank) -> Vec<bool> {
        let machines = self.machines();
        let own = machines.get(rank.index());
        let is_checked = |other| match self.shared().map(|shared| shared.checksums).unwrap_or_default() {
            Checksums::Auto => Some(other) != own,
            Checksums::On => true,
            Checksums::Off => false,
        };
        machines.iter().map(is_checked).collect()
    }

    /// The number of `rank` among the ranks of its machine, and how many those are.
    pub fn local(&self, rank: Rank) -> (Rank, WorldSize) {
        let machine = self.members.get(rank.index()).map(|member| &member.machine);
        let same = |members: &[Member]| members.iter().filter(|m| Some(&m.machine) == machine).count() as u32;
        let before = same(&self.members[..rank.index().min(self.members.len())]);
        (Rank::new(before), WorldSize::new(same(&self.members)).unwrap_or(WorldSize::ONE))
    }

    /// The number of ranks that share processors with `rank`, regardless of `--host-id`.
    pub fn at_processors_of(&self, rank: Rank) -> usize {
        let place = |member: &Member| member.machine.split(CHOSEN).next().unwrap_or_default().to_owned();
        let own = self.members.get(rank.index()).map(place);
        self.members.iter().filter(|member| Some(place(member)) == own).count()
    }

    /// What all ranks share: rank 0's settings.
    pub fn shared(&self) -> Option<Shared> {
        self.members.first().map(|member| member.shared)
    }
}

/// This host's name, as errors on other hosts will show it.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Identifies this machine, also among machines with the same name: its boot id; its network, because a container may count as
/// a separate host; and the name from `--host-id`.
pub fn machine(host_id: Option<&str>) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    // The name has any length, but the rendezvous accepts only short ones.
    let digest =
        |id: &str| Sha256::digest(id).iter().take(16).fold(0u128, |all, &byte| all << 8 | u128::from(byte));
    let chosen = host_id.map(|id| format!("{CHOSEN}{:032x}", digest(id))).unwrap_or_default();
    format!("{} {} {}{chosen}", host_name(), boot.trim(), network.display())
}

/// Whether a job on this address needs no secret: only processes of this machine can reach it.
pub(crate) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Lists ranks as text: `1, 3-5 and 9`.
fn list(ranks: &[Rank]) -> String {
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
            shared: Shared { segment_bytes: 1, checksums: Checksums::Auto, processors: 2, streams: 1 },
        }
    }

    #[test]
    fn ranks_of_one_machine_are_counted() {
        let roster = Roster { members: ["a", "b", "a", "b", "a"].map(member).into() };
        let local = |rank| {
            let (local, size) = roster.local(Rank::new(rank));
            (local.get(), size.get())
        };
        assert_eq!(
            [local(0), local(1), local(2), local(3), local(4)],
            [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]
        );
    }

    #[test]
    fn both_ends_of_a_link_agree_whether_it_has_checksums() {
        let mut roster = Roster { members: ["a", "b", "a"].map(member).into() };
        let links = |roster: &Roster| [0, 1, 2].map(|rank| roster.checked_links(Rank::new(rank)));
        let between_hosts = [[false, true, false], [true, false, true], [false, true, false]];
        assert_eq!(links(&roster), between_hosts);
        for (checksums, expected) in [(Checksums::On, true), (Checksums::Off, false)] {
            // Only rank 0's setting counts.
            roster.members[0].shared.checksums = checksums;
            assert_eq!(links(&roster), [[expected; 3]; 3]);
        }
    }

    #[test]
    fn ranks_that_count_as_other_hosts_use_the_same_processors() {
        let names = [machine(None), machine(Some("a")), machine(Some("b")), "elsewhere".into()];
        let roster = Roster { members: names.iter().map(|name| member(name)).collect() };
        let rank = |rank| Rank::new(rank);
        assert_eq!((roster.at_processors_of(rank(1)), roster.at_processors_of(rank(3))), (3, 1));
        assert_eq!((roster.local(rank(1)).1.get(), roster.local(rank(2)).1.get()), (1, 1));
        assert_eq!(machine(Some("a")), names[1]);
        assert!(machine(Some(&"long".repeat(10_000))).len() < 300);
    }

    #[test]
    fn ranks_are_listed_as_a_person_would() {
        let ranks = |numbers: &[u32]| numbers.iter().map(|&n| Rank::new(n)).collect::<Vec<_>>();
        assert_eq!(list(&ranks(&[1, 3, 4, 5, 9])), "1, 3-5, 9");
        assert_eq!(list(&ranks(&[0, 1])), "0, 1");
        assert_eq!(list(&[]), "");
    }
}
