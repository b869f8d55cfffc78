//! The details of a missed deadline: which ranks wait, for which ranks they wait, and the state of their links.

use std::collections::BTreeMap;
use std::fmt;

use super::contract::{put_contract, read_contract};
use super::frame::CONTROL_BYTES_MAX;
use super::reader::{Reader, put_text};
use crate::types::{Contract, Rank};

/// A rank that waits in an operation.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct WaitingRank {
    /// The rank that waits.
    pub rank: Rank,
    /// The number of the operation's group.
    pub group: u32,
    /// The number of the operation within the group, counted from 0.
    pub sequence: u64,
    /// The contract of the rank's call: the operation and its arguments.
    pub contract: Contract,
    /// The file and line of the call.
    pub site: String,
    /// The ranks for which this rank waits, with the host of each. At most [`AWAITED_RANKS_MAX`] ranks are listed.
    pub awaited: Vec<(Rank, String)>,
}

/// The maximum number of waiting ranks that a cause names. If more ranks wait, the cause names the ranks with the
/// lowest numbers.
pub const WAITING_RANKS_MAX: usize = 12;
/// The maximum number of awaited ranks that a cause names for each waiting rank.
pub const AWAITED_RANKS_MAX: usize = 3;
/// The maximum length of a call's file and line on the wire, in bytes.
pub(super) const SITE_BYTES_MAX: u16 = 80;
/// The maximum length of an awaited rank's host on the wire, in bytes.
const HOST_BYTES_MAX: u16 = 40;
/// The length of an encoded contract in bytes.
const CONTRACT_BYTES: usize = 20;

/// The maximum length of an encoded [`WaitingRank`] in bytes. The rank, the group, the sequence, the length of the site
/// and the number of awaited ranks take 19 bytes. Each awaited rank takes 6 bytes and the bytes of its host.
const WAITING_RANK_BYTES_MAX: usize =
    19 + CONTRACT_BYTES + SITE_BYTES_MAX as usize + AWAITED_RANKS_MAX * (6 + HOST_BYTES_MAX as usize);

/// The maximum number of links that a cause names.
pub const SILENT_LINKS_MAX: usize = 12;
/// The length of an encoded [`SilentLink`] in bytes.
const SILENT_LINK_BYTES: usize = 13;

const _: () = assert!(
    WAITING_RANKS_MAX * WAITING_RANK_BYTES_MAX + SILENT_LINKS_MAX * SILENT_LINK_BYTES + 32
        <= CONTROL_BYTES_MAX
);

/// Displays the file and line of a call, if they are known.
pub(super) struct AtCallSite<'a>(pub(super) &'a str);

impl fmt::Display for AtCallSite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " at {}", self.0) }
    }
}

/// A link on which a rank waits for data, and the time since the last data arrived.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SilentLink {
    /// The rank that waits.
    pub rank: Rank,
    /// The rank at the other end of the link.
    pub peer: Rank,
    /// The time in milliseconds since the last data arrived from `peer`.
    pub silence_ms: u32,
    /// Whether the host of `peer` acknowledges the data of `rank`. The kernel of a host acknowledges data even if the
    /// program hangs or is stopped.
    pub is_acknowledged: bool,
}

/// The fields of [`Cause::Timeout`](super::Cause::Timeout), for writing the `Display` text of this cause. The text
/// begins with the faulty links or, if there are none, with the ranks that probably cause the delay. After this
/// beginning, the text says which rank waits for which ranks.
pub(super) struct MissedDeadline<'a> {
    pub(super) timeout_ms: u64,
    pub(super) waiting: &'a [WaitingRank],
    pub(super) links: &'a [SilentLink],
}

impl fmt::Display for MissedDeadline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an operation did not end within {} ms: ", self.timeout_ms)?;
        let faulty: Vec<_> = self.links.iter().filter(|link| !link.is_acknowledged).collect();
        if faulty.is_empty() {
            self.write_culprits(f)?;
        }
        for (index, link) in faulty.iter().enumerate() {
            self.write_faulty_link(f, link, index == 0)?;
        }
        // The beginning of the text has named the hosts of the culprits or of the peers with a faulty link.
        let is_host_named = |peer: Rank| match &faulty[..] {
            [] => !self.is_waiting(peer),
            links => links.iter().any(|link| link.peer == peer),
        };
        for WaitingRank { rank, group, sequence, contract, site, awaited } in self.waiting {
            write!(
                f,
                "; rank {rank} waits in {contract}, operation {sequence} of group {group}{}",
                AtCallSite(site)
            )?;
            for (index, (peer, host)) in awaited.iter().enumerate() {
                write!(f, "{} {peer}", if index == 0 { ", for rank" } else { " and" })?;
                if !is_host_named(*peer) {
                    write!(f, " on {host}")?;
                }
                if let Some(link) = self.links.iter().find(|link| (link.rank, link.peer) == (*rank, *peer)) {
                    write!(f, " (which sent its last data {:.1} s ago)", link.silence_seconds())?;
                }
            }
        }
        Ok(())
    }
}

impl MissedDeadline<'_> {
    /// Writes the culprits.
    fn write_culprits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let culprits = awaited_culprits(self.waiting);
        for (index, (rank, host)) in culprits.iter().enumerate() {
            let prefix = if index == 0 { "all other ranks wait for" } else { " and" };
            write!(f, "{prefix} rank {rank} on {host}")?;
        }
        f.write_str(if culprits.is_empty() {
            "the ranks wait for each other; check the network between them (check addresses, MTU and firewall)"
        } else {
            ", where the program hangs, is stopped, is slow (then raise --timeout) or did not call the operation, or the network to this rank loses data (then check addresses, MTU and firewall)"
        })
    }

    /// Returns whether `rank` waits for other ranks.
    fn is_waiting(&self, rank: Rank) -> bool {
        self.waiting.iter().any(|waiting| waiting.rank == rank)
    }

    fn write_faulty_link(
        &self,
        f: &mut fmt::Formatter<'_>,
        link: &SilentLink,
        is_first: bool,
    ) -> fmt::Result {
        let SilentLink { rank, peer, .. } = link;
        let waiting = self.waiting.iter().find(|waiting| waiting.rank == *rank);
        let host = waiting.and_then(|waiting| waiting.awaited.iter().find(|(rank, _)| rank == peer));
        write!(f, "{}the network between rank {rank} and rank {peer}", if is_first { "" } else { "; " })?;
        if let Some((_, host)) = host {
            write!(f, " on {host}")?;
        }
        let silence = link.silence_seconds();
        write!(f, " is suspect: the host of rank {peer} does not acknowledge the data of rank {rank}")?;
        write!(f, ", and the last data from rank {peer} arrived {silence:.1} s ago")?;
        if is_first {
            f.write_str(" (check addresses, MTU and firewall, and that both hosts run)")?;
        }
        Ok(())
    }
}

impl SilentLink {
    /// Returns the time in seconds since the last data arrived from `peer`.
    fn silence_seconds(&self) -> f64 {
        f64::from(self.silence_ms) / 1000.0
    }
}

/// Returns the ranks that are at fault for a missed deadline, in rank order, with their hosts. Returns no rank if a link is
/// suspect.
pub(super) fn find_culprits<'a>(waiting: &'a [WaitingRank], links: &[SilentLink]) -> Vec<&'a (Rank, String)> {
    if links.iter().any(|link| !link.is_acknowledged) { Vec::new() } else { awaited_culprits(waiting) }
}

/// Returns the ranks that do not wait for any rank, but for which other ranks wait.
fn awaited_culprits(waiting: &[WaitingRank]) -> Vec<&(Rank, String)> {
    let is_waiting = |rank: Rank| waiting.iter().any(|waiting| waiting.rank == rank);
    let awaited = waiting.iter().flat_map(|waiting| &waiting.awaited);
    let mut culprits: Vec<&(Rank, String)> = awaited.filter(|(rank, _)| !is_waiting(*rank)).collect();
    culprits.sort();
    culprits.dedup();
    culprits
}

/// Merges the waiting ranks of two causes. The order of the two arguments does not matter.
pub(super) fn merge_waiting_ranks(waiting: Vec<WaitingRank>, more: Vec<WaitingRank>) -> Vec<WaitingRank> {
    let mut known: BTreeMap<Rank, WaitingRank> = BTreeMap::new();
    for waiting in waiting.into_iter().chain(more) {
        let entry = known.entry(waiting.rank).or_insert_with(|| waiting.clone());
        if waiting < *entry {
            *entry = waiting;
        }
    }
    known.into_values().take(WAITING_RANKS_MAX).collect()
}

/// Merges the links of two causes. The order of the two arguments does not matter.
pub(super) fn merge_links(links: Vec<SilentLink>, more: Vec<SilentLink>) -> Vec<SilentLink> {
    let mut known: BTreeMap<(Rank, Rank), SilentLink> = BTreeMap::new();
    for link in links.into_iter().chain(more) {
        let entry = known.entry((link.rank, link.peer)).or_insert(link);
        entry.silence_ms = entry.silence_ms.max(link.silence_ms);
        entry.is_acknowledged &= link.is_acknowledged;
    }
    known.into_values().take(SILENT_LINKS_MAX).collect()
}

/// Appends the waiting ranks and the links to `out`.
pub(super) fn put_ranks_and_links(out: &mut Vec<u8>, waiting: &[WaitingRank], links: &[SilentLink]) {
    out.push(waiting.len().min(WAITING_RANKS_MAX) as u8);
    for waiting in waiting.iter().take(WAITING_RANKS_MAX) {
        put_waiting_rank(out, waiting);
    }
    out.push(links.len().min(SILENT_LINKS_MAX) as u8);
    for SilentLink { rank, peer, silence_ms, is_acknowledged } in links.iter().take(SILENT_LINKS_MAX) {
        out.extend_from_slice(&rank.get().to_le_bytes());
        out.extend_from_slice(&peer.get().to_le_bytes());
        out.extend_from_slice(&silence_ms.to_le_bytes());
        out.push(u8::from(*is_acknowledged));
    }
}

/// Reads the waiting ranks and the links that [`put_ranks_and_links`] has written.
pub(super) fn read_ranks_and_links(reader: &mut Reader<'_>) -> Option<(Vec<WaitingRank>, Vec<SilentLink>)> {
    let count = usize::from(reader.u8()?).min(WAITING_RANKS_MAX);
    let waiting = (0..count).map(|_| read_waiting_rank(reader)).collect::<Option<_>>()?;
    let count = usize::from(reader.u8()?).min(SILENT_LINKS_MAX);
    let links = (0..count).map(|_| read_link(reader)).collect::<Option<_>>()?;
    Some((waiting, links))
}

fn read_link(reader: &mut Reader<'_>) -> Option<SilentLink> {
    Some(SilentLink {
        rank: Rank::new(reader.u32()?),
        peer: Rank::new(reader.u32()?),
        silence_ms: reader.u32()?,
        is_acknowledged: reader.u8()? != 0,
    })
}

fn put_waiting_rank(out: &mut Vec<u8>, waiting: &WaitingRank) {
    let WaitingRank { rank, group, sequence, contract, site, awaited } = waiting;
    out.extend_from_slice(&rank.get().to_le_bytes());
    out.extend_from_slice(&group.to_le_bytes());
    out.extend_from_slice(&sequence.to_le_bytes());
    put_contract(out, contract);
    put_text(out, site, SITE_BYTES_MAX);
    out.push(awaited.len().min(AWAITED_RANKS_MAX) as u8);
    for (rank, host) in awaited.iter().take(AWAITED_RANKS_MAX) {
        out.extend_from_slice(&rank.get().to_le_bytes());
        put_text(out, host, HOST_BYTES_MAX);
    }
}

fn read_waiting_rank(reader: &mut Reader<'_>) -> Option<WaitingRank> {
    Some(WaitingRank {
        rank: Rank::new(reader.u32()?),
        group: reader.u32()?,
        sequence: reader.u64()?,
        contract: read_contract(reader)?,
        site: reader.text()?,
        awaited: {
            let count = usize::from(reader.u8()?).min(AWAITED_RANKS_MAX);
            (0..count).map(|_| Some((Rank::new(reader.u32()?), reader.text()?))).collect::<Option<_>>()?
        },
    })
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::Cause;
    use crate::wire::frame::tests::contracts;

    fn waiting_ranks() -> impl Strategy<Value = WaitingRank> {
        let awaited = (any::<u32>().prop_map(Rank::new), "[ -~]{0,20}");
        (
            (0..20u32, any::<u32>(), any::<u64>()),
            contracts(),
            "[ -~]{0,60}",
            proptest::collection::vec(awaited, 0..=AWAITED_RANKS_MAX),
        )
            .prop_map(|((rank, group, sequence), contract, site, awaited)| WaitingRank {
                rank: Rank::new(rank),
                group,
                sequence,
                contract,
                site,
                awaited,
            })
    }

    fn silent_links() -> impl Strategy<Value = SilentLink> {
        (0..20u32, 0..20u32, any::<u32>(), any::<bool>()).prop_map(
            |(rank, peer, silence_ms, is_acknowledged)| SilentLink {
                rank: Rank::new(rank),
                peer: Rank::new(peer),
                silence_ms,
                is_acknowledged,
            },
        )
    }

    /// Generates the waiting ranks and the links of a missed deadline.
    pub(in crate::wire) fn missed_deadlines() -> impl Strategy<Value = (Vec<WaitingRank>, Vec<SilentLink>)> {
        (
            proptest::collection::vec(waiting_ranks(), 0..WAITING_RANKS_MAX),
            proptest::collection::vec(silent_links(), 0..SILENT_LINKS_MAX),
        )
    }

    /// If a host does not acknowledge data, the text must not blame the rank's program, because the kernel
    /// acknowledges data.
    #[test]
    fn the_text_blames_only_the_network_if_a_host_does_not_acknowledge_data() {
        let (rank, peer) = (Rank::new(0), Rank::new(1));
        let contract = crate::wire::FrameHeader::EMPTY.contract;
        let awaited = vec![(peer, "h".to_owned())];
        let (group, sequence, site) = (0, 7, "a.rs:3".to_owned());
        let waiting = vec![WaitingRank { rank, group, sequence, contract, site, awaited }];
        let text = |is_acknowledged| {
            let links = vec![SilentLink { rank, peer, silence_ms: 2500, is_acknowledged }];
            Cause::Timeout { timeout_ms: 2000, waiting: waiting.clone(), links }.to_string()
        };
        assert!(text(true).contains("all other ranks wait for rank 1 on h, where the program hangs"));
        assert!(text(true).contains("for rank 1 (which sent its last data 2.5 s ago)"), "{}", text(true));
        let start = "an operation did not end within 2000 ms: the network between rank 0 and rank 1 on h is suspect: the host of \
            rank 1 does not acknowledge the data of rank 0, and the last data from rank 1 arrived 2.5 s ago";
        assert!(text(false).starts_with(start), "{}", text(false));
        assert!(!text(false).contains("hangs"), "{}", text(false));
    }
}
