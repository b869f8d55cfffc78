//! The root cause of a job's failure, which all ranks report.

use rustix::io::Errno;

use super::contract::{put_contract, read_contract};
use super::frame::CONTROL_BYTES_MAX;
pub use super::missed_deadline::{
    AWAITED_RANKS_MAX, SILENT_LINKS_MAX, SilentLink, WAITING_RANKS_MAX, WaitingRank,
};
use super::missed_deadline::{
    AtCallSite, MissedDeadline, SITE_BYTES_MAX, merge_links, merge_waiting_ranks, put_ranks_and_links,
    read_ranks_and_links,
};
use super::reader::{Reader, put_text, truncate};
use crate::types::{Contract, INTERNAL_GROUP_BITS, Rank};

/// The root cause of a failure. The first rank that detects the failure sends the cause to all other ranks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// A connection to a rank was lost, because the rank's process ended or the network failed. The rank that reports the
    /// loss cannot tell which of the two happened.
    #[error(
        "rank {seen_by}'s connection to rank {rank} on {host} was lost: {detail}; {}",
        lost_link_advice(*seen_by, *rank, detail)
    )]
    PeerLost {
        /// The rank at the other end of the connection.
        rank: Rank,
        /// The host and address of `rank`.
        host: String,
        /// The rank that reports the failure.
        seen_by: Rank,
        /// The error of the connection.
        detail: String,
    },
    /// A rank closed its group although other ranks still had operations with that rank.
    #[error(
        "rank {rank} on {host} closed its group while other ranks still had operations with it; do all ranks run the same number of steps?"
    )]
    PeerLeft {
        /// The rank that closed its group.
        rank: Rank,
        /// The host and address of `rank`.
        host: String,
    },
    /// Two ranks called different operations at the same point of the program.
    #[error(
        "ranks do not agree on operation {sequence} of group {}: rank {first} called {first_contract}{}, rank {second} called {second_contract}{}",
        *group & !INTERNAL_GROUP_BITS,
        AtCallSite(first_site),
        AtCallSite(second_site)
    )]
    Mismatch {
        /// The number of the group.
        group: u32,
        /// The number of the collective in its group, or of the message on its link, counted from 0.
        sequence: u64,
        /// The lower of the two ranks.
        first: Rank,
        /// The operation that the lower rank called. If the two operations are equal, the call of one of the ranks is not known
        /// yet.
        first_contract: Contract,
        /// The file and line of the lower rank's call; empty if they are not known yet.
        first_site: String,
        /// The higher of the two ranks.
        second: Rank,
        /// The operation that the higher rank called.
        second_contract: Contract,
        /// The file and line of the higher rank's call; empty if they are not known yet.
        second_site: String,
    },
    /// An operation did not end before its deadline.
    #[error("{}", MissedDeadline { timeout_ms: *timeout_ms, waiting, links })]
    Timeout {
        /// The time-out of the operation in milliseconds.
        timeout_ms: u64,
        /// The waiting ranks, in rank order, at most [`WAITING_RANKS_MAX`]. Each entry describes the rank's oldest
        /// operation.
        waiting: Vec<WaitingRank>,
        /// The links on which ranks wait, in rank order, at most [`SILENT_LINKS_MAX`].
        links: Vec<SilentLink>,
    },
    /// The program on a rank stopped the job with a message.
    #[error("rank {rank} on {host} stopped the job: {message}")]
    Aborted {
        /// The rank whose program stopped the job.
        rank: Rank,
        /// The host of `rank`.
        host: String,
        /// The program's message.
        message: String,
    },
    /// A peer broke the protocol, or the network corrupted its data.
    #[error(
        "rank {rank} on {host} broke the protocol: {detail}; either the network corrupts data, or the ranks run different builds"
    )]
    Misbehaved {
        /// The rank whose bytes were wrong.
        rank: Rank,
        /// The host and address of `rank`.
        host: String,
        /// A description of the wrong bytes.
        detail: String,
    },
}

/// Returns advice for the user after `seen_by` has lost the connection to `rank`.
fn lost_link_advice(seen_by: Rank, rank: Rank, detail: &str) -> String {
    let network = format!("check the network between ranks {seen_by} and {rank}");
    if means_no_answer(detail) {
        return format!("{network}: addresses, MTU and firewall");
    }
    format!("see the output of rank {rank}, and if that rank still runs, {network}")
}

/// Returns whether `detail`, the error of a connection, means that no answer came from the other host. If only the
/// process on the other host has ended, the other host still answers, with another error.
pub fn means_no_answer(detail: &str) -> bool {
    let errors = [Errno::TIMEDOUT, Errno::HOSTUNREACH, Errno::HOSTDOWN, Errno::NETUNREACH, Errno::NETDOWN];
    let is_error = |error: &Errno| detail.contains(&format!("(os error {})", error.raw_os_error()));
    detail.contains(NO_ANSWER_TEXT) || errors.iter().any(is_error)
}

/// An error message of a transport contains this text if a host does not answer.
pub const NO_ANSWER_TEXT: &str = "no connection within";

/// The maximum length in bytes of a text in an encoded cause, such as the host or the message.
const TEXT_BYTES_MAX: u16 = 1024;

const _: () = assert!(2 * (TEXT_BYTES_MAX as usize + 2) + 128 <= CONTROL_BYTES_MAX);

impl Cause {
    /// Combines this cause with a cause that a peer has sent. The order in which several causes are combined does not
    /// matter.
    ///
    /// Merges two causes about the same mismatch, and two missed deadlines. Of two causes of different kinds, keeps
    /// the one that more likely explains the other. Of two different mismatches, keeps the one with the lower group
    /// number or, in the same group, with the lower operation number. Of two other causes of the same kind, keeps the
    /// one with the lower rank.
    #[must_use]
    pub fn combine_with(self, other: Self) -> Self {
        match (self, other) {
            (
                Self::Timeout { timeout_ms: a, waiting, links },
                Self::Timeout { timeout_ms: b, waiting: more, links: more_links },
            ) => Self::Timeout {
                timeout_ms: a.min(b),
                waiting: merge_waiting_ranks(waiting, more),
                links: merge_links(links, more_links),
            },
            (mut a, mut b) => {
                a.fill_missing_call_sites(&mut b);
                let key =
                    |cause: &Self| (cause.precedence(), cause.lacks_contract(), cause.encoded_contracts());
                if key(&b) < key(&a) { b } else { a }
            }
        }
    }

    /// Returns whether other ranks may know more about this cause, so that this rank should wait for their messages.
    pub fn other_ranks_may_add_reports(&self) -> bool {
        matches!(self, Self::Mismatch { .. } | Self::Timeout { .. })
    }

    /// Returns the ranks of a mismatch whose lines are not known yet.
    pub fn ranks_without_line(&self) -> [Option<Rank>; 2] {
        let Self::Mismatch { first, first_site, second, second_site, .. } = self else { return [None; 2] };
        [(first, first_site), (second, second_site)].map(|(&rank, site)| site.is_empty().then_some(rank))
    }

    /// Returns whether this is a mismatch in which the contract of one of the two ranks is not known yet: the contracts are
    /// equal.
    fn lacks_contract(&self) -> bool {
        matches!(self, Self::Mismatch { first_contract, second_contract, .. } if first_contract == second_contract)
    }

    /// If this cause is a mismatch that names `rank` and lacks a contract, adds `contract`: the rank's contract.
    pub fn add_contract(&mut self, rank: Rank, contract: Contract) {
        if !self.lacks_contract() {
            return;
        }
        if let Self::Mismatch { first, first_contract, second, second_contract, .. } = self {
            for (who, known) in [(*first, first_contract), (*second, second_contract)] {
                if who == rank {
                    *known = contract;
                }
            }
        }
    }

    /// If this cause is a mismatch that names `rank` without a file and line, adds `site`: the file and line of the
    /// rank's call.
    pub fn add_site(&mut self, rank: Rank, site: &str) {
        if let Self::Mismatch { first, first_site, second, second_site, .. } = self {
            for (who, known) in [(*first, first_site), (*second, second_site)] {
                if who == rank && known.is_empty() {
                    *known = truncate(site, SITE_BYTES_MAX);
                }
            }
        }
    }

    /// If both causes are about the same mismatch, copies each file and line that only one cause has into the other cause.
    fn fill_missing_call_sites(&mut self, other: &mut Self) {
        if self.precedence() != other.precedence() || self.encoded_contracts() != other.encoded_contracts() {
            return;
        }
        if let (
            Self::Mismatch { first_site: a, second_site: b, .. },
            Self::Mismatch { first_site: c, second_site: d, .. },
        ) = (self, other)
        {
            for (one, two) in [(a, c), (b, d)] {
                if one.is_empty() {
                    one.clone_from(two);
                } else {
                    two.clone_from(one);
                }
            }
        }
    }

    /// Returns a sort key: of two causes, [`Cause::combine_with`] keeps the cause with the lower key. If one kind of cause
    /// explains another kind, the explaining kind has the lower key.
    fn precedence(&self) -> (u8, u32, u64, Rank, Rank) {
        match self {
            Self::PeerLost { rank, seen_by, .. } => (0, 0, 0, *rank, *seen_by),
            Self::Misbehaved { rank, .. } => (1, 0, 0, *rank, *rank),
            Self::Aborted { rank, .. } => (2, 0, 0, *rank, *rank),
            Self::PeerLeft { rank, .. } => (3, 0, 0, *rank, *rank),
            Self::Mismatch { group, sequence, first, second, .. } => (4, *group, *sequence, *first, *second),
            Self::Timeout { .. } => (5, 0, 0, Rank::ZERO, Rank::ZERO),
        }
    }

    /// Returns the encoded contracts of a mismatch. Messages in the two directions of a link are numbered separately.
    /// Two mismatches can therefore have the same ranks and the same number, and differ only in their contracts.
    fn encoded_contracts(&self) -> Vec<u8> {
        let mut contracts = Vec::new();
        if let Self::Mismatch { first_contract, second_contract, .. } = self {
            put_contract(&mut contracts, first_contract);
            put_contract(&mut contracts, second_contract);
        }
        contracts
    }

    /// Encodes the cause as an abort frame's payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        match self {
            Self::PeerLost { rank, host, seen_by, detail } => {
                put_cause_start(&mut out, 1, *rank, &[host, detail]);
                out.extend_from_slice(&seen_by.get().to_le_bytes());
            }
            Self::PeerLeft { rank, host } => put_cause_start(&mut out, 2, *rank, &[host]),
            Self::Mismatch {
                group,
                sequence,
                first,
                first_contract,
                first_site,
                second,
                second_contract,
                second_site,
            } => {
                put_cause_start(&mut out, 3, *first, &[]);
                out.extend_from_slice(&group.to_le_bytes());
                out.extend_from_slice(&sequence.to_le_bytes());
                put_contract(&mut out, first_contract);
                put_text(&mut out, first_site, SITE_BYTES_MAX);
                out.extend_from_slice(&second.get().to_le_bytes());
                put_contract(&mut out, second_contract);
                put_text(&mut out, second_site, SITE_BYTES_MAX);
            }
            Self::Timeout { timeout_ms, waiting, links } => {
                put_cause_start(&mut out, 5, Rank::ZERO, &[]);
                out.extend_from_slice(&timeout_ms.to_le_bytes());
                put_ranks_and_links(&mut out, waiting, links);
            }
            Self::Aborted { rank, host, message } => put_cause_start(&mut out, 6, *rank, &[host, message]),
            Self::Misbehaved { rank, host, detail } => put_cause_start(&mut out, 7, *rank, &[host, detail]),
        }
        out
    }

    /// Decodes an abort frame's payload. Returns `None` if the payload is not a cause that this version knows.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let kind = reader.u8()?;
        let rank = Rank::new(reader.u32()?);
        Some(match kind {
            1 => {
                let (host, detail) = (reader.text()?, reader.text()?);
                Self::PeerLost { rank, host, detail, seen_by: Rank::new(reader.u32()?) }
            }
            2 => Self::PeerLeft { rank, host: reader.text()? },
            3 => Self::Mismatch {
                first: rank,
                group: reader.u32()?,
                sequence: reader.u64()?,
                first_contract: read_contract(&mut reader)?,
                first_site: reader.text()?,
                second: Rank::new(reader.u32()?),
                second_contract: read_contract(&mut reader)?,
                second_site: reader.text()?,
            },
            5 => {
                let timeout_ms = reader.u64()?;
                let (waiting, links) = read_ranks_and_links(&mut reader)?;
                Self::Timeout { timeout_ms, waiting, links }
            }
            6 => Self::Aborted { rank, host: reader.text()?, message: reader.text()? },
            7 => Self::Misbehaved { rank, host: reader.text()?, detail: reader.text()? },
            _ => return None,
        })
    }
}

/// Appends the fields with which every cause begins: its kind, its first rank and its texts.
fn put_cause_start(out: &mut Vec<u8>, kind: u8, rank: Rank, texts: &[&str]) {
    out.push(kind);
    out.extend_from_slice(&rank.get().to_le_bytes());
    for text in texts {
        put_text(out, text, TEXT_BYTES_MAX);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::frame::tests::contracts;
    use crate::wire::missed_deadline::tests::missed_deadlines;

    pub(in crate::wire) fn causes() -> impl Strategy<Value = Cause> {
        let rank = || any::<u32>().prop_map(Rank::new);
        let text = || "[ -~]{0,40}";
        prop_oneof![
            (rank(), text(), rank(), text()).prop_map(|(rank, host, seen_by, detail)| Cause::PeerLost {
                rank,
                host,
                seen_by,
                detail
            }),
            (rank(), text()).prop_map(|(rank, host)| Cause::PeerLeft { rank, host }),
            ((any::<u32>(), any::<u64>()), (rank(), contracts(), text()), (rank(), contracts(), text()))
                .prop_map(|((group, sequence), first, second)| Cause::Mismatch {
                    group,
                    sequence,
                    first: first.0,
                    first_contract: first.1,
                    first_site: first.2,
                    second: second.0,
                    second_contract: second.1,
                    second_site: second.2,
                }),
            (any::<u64>(), missed_deadlines()).prop_map(|(timeout_ms, (waiting, links))| Cause::Timeout {
                timeout_ms,
                waiting,
                links
            }),
            (rank(), text(), text()).prop_map(|(rank, host, message)| Cause::Aborted { rank, host, message }),
            (rank(), text(), text()).prop_map(|(rank, host, detail)| Cause::Misbehaved {
                rank,
                host,
                detail
            }),
        ]
    }

    proptest! {
        #[test]
        fn a_decoded_cause_equals_the_encoded_one(cause in causes()) {
            prop_assert_eq!(Cause::decode(&cause.encode()), Some(cause));
        }

        #[test]
        fn all_ranks_end_with_the_same_cause(a in causes(), b in causes(), c in causes()) {
            // Three ranks combine three causes in different orders, and then exchange the results.
            let combine = |x: &Cause, y: &Cause| x.clone().combine_with(y.clone());
            let results = [combine(&combine(&a, &b), &c), combine(&combine(&c, &a), &b), combine(&b, &combine(&c, &a))];
            let combine_all = |one| results.iter().fold(one, |combined: Cause, result| combine(&combined, result));
            let last: Vec<Cause> = results.iter().cloned().map(combine_all).collect();
            let precedence = |cause: &Cause| cause.precedence();
            prop_assert!(last.windows(2).all(|pair| precedence(&pair[0]) == precedence(&pair[1])));
            if matches!(a, Cause::Timeout { .. }) && matches!(b, Cause::Timeout { .. }) {
                prop_assert_eq!(combine(&a, &b), combine(&b, &a));
                prop_assert_eq!(combine(&combine(&a, &b), &b), combine(&a, &b));
            }
        }

        #[test]
        fn decoding_a_truncated_cause_does_not_panic(cause in causes(), keep in 0..200usize) {
            let bytes = cause.encode();
            let _ = Cause::decode(&bytes[..keep.min(bytes.len())]);
        }
    }

    #[test]
    fn long_texts_are_cut_and_control_characters_replaced() {
        let cause =
            Cause::Aborted { rank: Rank::new(3), host: "h\u{1b}[31m".into(), message: "é".repeat(5000) };
        let bytes = cause.encode();
        assert!(bytes.len() <= CONTROL_BYTES_MAX);
        let Some(Cause::Aborted { host, message, .. }) = Cause::decode(&bytes) else { panic!("not decoded") };
        assert_eq!(host, "h\u{fffd}[31m");
        assert_eq!(message, "é".repeat(512));
    }

    /// Regression test: before the fix, if a host did not answer, the error told the user to read the output of the
    /// rank on this host.
    #[test]
    fn the_advice_names_only_the_network_if_a_host_does_not_answer() {
        let error = |error: Errno| std::io::Error::from(error).to_string();
        let text = |detail: String| {
            let (rank, host, seen_by) = (Rank::new(1), "h".into(), Rank::new(0));
            Cause::PeerLost { rank, host, seen_by, detail }.to_string()
        };
        for detail in [error(Errno::TIMEDOUT), error(Errno::HOSTUNREACH), format!("{NO_ANSWER_TEXT} 5 s")] {
            let text = text(detail);
            assert!(!text.contains("see the output"), "{text}");
            assert!(
                text.ends_with("check the network between ranks 0 and 1: addresses, MTU and firewall"),
                "{text}"
            );
        }
        for detail in [error(Errno::CONNRESET), error(Errno::CONNREFUSED)] {
            assert!(
                text(detail)
                    .contains("see the output of rank 1, and if that rank still runs, check the network")
            );
        }
    }
}
