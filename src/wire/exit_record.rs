//! The exit record: how a rank that fails tells `ringrun` which rank is at fault. `docs/wire-format.md` describes the bytes.
//!
//! A rank writes its record when the failure becomes known, and not when the process ends, because a program may end with
//! `_exit`, without a message or much later.

use std::fmt;

use super::Cause;
use super::missed_deadline::find_culprits;
use super::reader::{Reader, put_text};
use crate::types::Rank;

/// The first bytes of every record.
const MAGIC: [u8; 4] = *b"RNGX";
/// The version of the format.
const FORMAT_VERSION: u8 = 1;
/// The length in bytes of the magic number, the version and the length of the rest.
const HEADER_BYTES: usize = MAGIC.len() + 3;
/// The maximum number of ranks in a record.
const RANKS_MAX: usize = 16;
/// The maximum length in bytes of the host, and of the operation.
const TEXT_BYTES_MAX: u16 = 256;

/// The maximum length of an encoded record in bytes.
pub const EXIT_RECORD_BYTES_MAX: usize = HEADER_BYTES + 2 + 4 * RANKS_MAX + 2 * (2 + TEXT_BYTES_MAX as usize);

// The kernel writes up to 4096 bytes (`PIPE_BUF`) to a pipe in one piece, so the records of two processes never mix.
const _: () = assert!(EXIT_RECORD_BYTES_MAX <= 4096);

/// The kind of failure in an exit record. The numbers of the first six kinds are those of the encoded [`Cause`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum CauseKind {
    /// A connection to a rank was lost.
    PeerLost = 1,
    /// A rank closed its group although other ranks still needed it.
    PeerLeft = 2,
    /// Ranks called different operations.
    Mismatch = 3,
    /// An operation did not end before its deadline.
    Timeout = 5,
    /// The program of a rank stopped the job.
    Aborted = 6,
    /// A rank broke the protocol.
    Misbehaved = 7,
    /// A rank failed for a reason of its own, and told the other ranks.
    RankFailed = 8,
}

impl CauseKind {
    const ALL: [Self; 7] = [
        Self::PeerLost,
        Self::PeerLeft,
        Self::Mismatch,
        Self::Timeout,
        Self::Aborted,
        Self::Misbehaved,
        Self::RankFailed,
    ];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == byte)
    }

    fn description(self) -> &'static str {
        match self {
            Self::PeerLost => "a rank was lost",
            Self::PeerLeft => "a rank closed its group while other ranks still needed it",
            Self::Mismatch => "ranks called different operations",
            Self::Timeout => "an operation missed its deadline",
            Self::Aborted => "a rank stopped the job",
            Self::Misbehaved => "a rank broke the protocol",
            Self::RankFailed => "a rank failed",
        }
    }
}

/// The failure that a rank reports to `ringrun`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExitRecord {
    /// The kind of failure.
    pub kind: CauseKind,
    /// The ranks at fault; empty if they are not known. An encoded record has at most 16 ranks.
    pub ranks: Vec<Rank>,
    /// The host of the first rank at fault; empty if it is not known.
    pub host: String,
    /// The operation in which the reporting rank was, and its file and line; empty if there was no operation.
    pub operation: String,
}

impl ExitRecord {
    /// Returns the record for a failure of the job.
    pub fn new(cause: &Cause, operation: String) -> Self {
        let (kind, ranks, host) = match cause {
            Cause::PeerLost { rank, host, .. } => (CauseKind::PeerLost, vec![*rank], host.clone()),
            Cause::PeerLeft { rank, host } => (CauseKind::PeerLeft, vec![*rank], host.clone()),
            Cause::Mismatch { first, second, .. } => {
                (CauseKind::Mismatch, vec![*first, *second], String::new())
            }
            Cause::Timeout { waiting, links, .. } => {
                let culprits = find_culprits(waiting, links);
                let host = culprits.first().map(|(_, host)| host.clone()).unwrap_or_default();
                (CauseKind::Timeout, culprits.into_iter().map(|(rank, _)| *rank).collect(), host)
            }
            Cause::Aborted { rank, host, .. } => (CauseKind::Aborted, vec![*rank], host.clone()),
            Cause::Misbehaved { rank, host, .. } => (CauseKind::Misbehaved, vec![*rank], host.clone()),
        };
        Self { kind, ranks, host, operation }
    }

    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        let ranks = &self.ranks[..self.ranks.len().min(RANKS_MAX)];
        let mut body = vec![self.kind as u8, ranks.len() as u8];
        body.extend(ranks.iter().flat_map(|rank| rank.get().to_le_bytes()));
        put_text(&mut body, &self.host, TEXT_BYTES_MAX);
        put_text(&mut body, &self.operation, TEXT_BYTES_MAX);
        let mut out = MAGIC.to_vec();
        out.push(FORMAT_VERSION);
        out.extend_from_slice(&(body.len() as u16).to_le_bytes());
        out.extend_from_slice(&body);
        out
    }

    /// Decodes the bytes of one or more records, and returns the last record. Returns `None` if any of the bytes are not
    /// part of a record.
    pub fn decode_last(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let mut last = None;
        while !reader.0.is_empty() {
            last = Some(Self::read(&mut reader)?);
        }
        last
    }

    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        if reader.array::<4>()? != MAGIC || reader.u8()? != FORMAT_VERSION {
            return None;
        }
        let length = reader.u16()?;
        let mut body = Reader(reader.bytes(usize::from(length))?);
        let kind = CauseKind::from_byte(body.u8()?)?;
        let rank_count = usize::from(body.u8()?);
        if rank_count > RANKS_MAX {
            return None;
        }
        let ranks = (0..rank_count).map(|_| body.u32().map(Rank::new)).collect::<Option<_>>()?;
        let (host, operation) = (body.text()?, body.text()?);
        body.0.is_empty().then_some(Self { kind, ranks, host, operation })
    }
}

/// Describes the failure: `a rank was lost: rank 2 on node7; in barrier() at train.py:12`.
impl ExitRecord {
    /// Returns whether the record says no more than that `rank` has failed.
    pub fn only_says_that_failed(&self, rank: Rank) -> bool {
        self.kind == CauseKind::RankFailed && self.ranks == [rank] && self.operation.is_empty()
    }
}

impl fmt::Display for ExitRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.description())?;
        for (index, rank) in self.ranks.iter().enumerate() {
            let prefix = match index {
                0 if self.ranks.len() == 1 => ": rank",
                0 => ": ranks",
                _ => ",",
            };
            write!(f, "{prefix} {rank}")?;
        }
        if !self.host.is_empty() {
            write!(f, " on {}", self.host)?;
        }
        if !self.operation.is_empty() {
            write!(f, "; in {}", self.operation)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::cause::tests::causes;

    fn records() -> impl Strategy<Value = ExitRecord> {
        let kind = (0..CauseKind::ALL.len()).prop_map(|index| CauseKind::ALL[index]);
        let ranks = prop::collection::vec(any::<u32>().prop_map(Rank::new), 0..=RANKS_MAX);
        (kind, ranks, "[ -~]{0,40}", "[ -~]{0,40}").prop_map(|(kind, ranks, host, operation)| ExitRecord {
            kind,
            ranks,
            host,
            operation,
        })
    }

    proptest! {
        #[test]
        fn the_last_of_several_records_is_decoded(first in records(), last in records()) {
            let bytes = [first.encode(), last.encode()].concat();
            prop_assert_eq!(ExitRecord::decode_last(&bytes), Some(last));
        }

        /// Bytes that a process of the user wrote into the pipe, before, after or instead of a record.
        #[test]
        fn other_bytes_are_refused(
            record in records(),
            other in prop::collection::vec(any::<u8>(), 1..40),
            keep in 1..60usize,
        ) {
            let bytes = record.encode();
            prop_assert_eq!(ExitRecord::decode_last(&[&other[..], &bytes].concat()), None);
            prop_assert_eq!(ExitRecord::decode_last(&[&bytes[..], &other].concat()), None);
            if keep < bytes.len() {
                prop_assert_eq!(ExitRecord::decode_last(&bytes[..keep]), None);
            }
        }

        #[test]
        fn the_record_of_each_cause_can_be_decoded(cause in causes()) {
            let record = ExitRecord::new(&cause, "barrier()".into());
            prop_assert_eq!(ExitRecord::decode_last(&record.encode()).map(|decoded| decoded.kind), Some(record.kind));
            prop_assert_eq!(record.kind as u8, cause.encode()[0]);
        }
    }

    #[test]
    fn unknown_versions_kinds_and_too_many_ranks_are_refused() {
        let record = ExitRecord {
            kind: CauseKind::PeerLost,
            ranks: vec![Rank::new(2)],
            host: "h".into(),
            operation: String::new(),
        };
        let bytes = record.encode();
        assert_eq!(ExitRecord::decode_last(&bytes), Some(record));
        for (at, byte) in [(MAGIC.len(), FORMAT_VERSION + 1), (HEADER_BYTES, 4), (HEADER_BYTES + 1, 17)] {
            let mut changed = bytes.clone();
            changed[at] = byte;
            assert_eq!(ExitRecord::decode_last(&changed), None, "byte {at}");
        }
        assert_eq!(ExitRecord::decode_last(&[]), None);
    }

    #[test]
    fn a_record_is_short_and_its_text_cannot_control_a_terminal() {
        let record = ExitRecord {
            kind: CauseKind::Mismatch,
            ranks: (0..40).map(Rank::new).collect(),
            host: "é\u{1b}".repeat(1000),
            operation: "x".repeat(5000),
        };
        let bytes = record.encode();
        assert!(bytes.len() <= EXIT_RECORD_BYTES_MAX, "{}", bytes.len());
        let decoded = ExitRecord::decode_last(&bytes).unwrap();
        assert_eq!((decoded.ranks.len(), decoded.operation.len()), (RANKS_MAX, usize::from(TEXT_BYTES_MAX)));
        assert!(!decoded.to_string().contains('\u{1b}'));
    }

    #[test]
    fn a_record_is_described_in_one_sentence() {
        let record = |ranks: &[u32], host: &str, operation: &str| {
            let ranks = ranks.iter().copied().map(Rank::new).collect();
            ExitRecord { kind: CauseKind::PeerLost, ranks, host: host.into(), operation: operation.into() }
                .to_string()
        };
        assert_eq!(
            record(&[2], "h", "barrier() at a.py:1"),
            "a rank was lost: rank 2 on h; in barrier() at a.py:1"
        );
        assert_eq!(record(&[2, 4], "", ""), "a rank was lost: ranks 2, 4");
        assert_eq!(record(&[], "", ""), "a rank was lost");
    }
}
