//! Why a job failed, as every rank comes to report it.

use super::frame::CONTROL_BYTES_MAX;
use super::reader::{Reader, put_text};
use crate::types::{Algorithm, Contract, DType, Operation, Rank, ReduceOp};

/// The root cause of a failure: decided by the rank that saw it first, passed on unchanged to all others.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// A process died, or the network between it and a neighbour failed.
    #[error("rank {rank} on {host} was lost: {detail}; look at that rank's own output for why")]
    PeerLost {
        /// The rank that is gone.
        rank: Rank,
        /// Its host and address.
        host: String,
        /// What the neighbour's socket said.
        detail: String,
    },
    /// A rank closed its group in order while others still had operations to do with it.
    #[error(
        "rank {rank} on {host} closed its group while others still had work to do with it; do all ranks run the same number of steps?"
    )]
    PeerLeft {
        /// The rank that left.
        rank: Rank,
        /// Its host and address.
        host: String,
    },
    /// Two ranks called different things at the same place of the program.
    #[error(
        "ranks do not agree on operation {sequence}: rank {first} called {first_asked}, rank {second} called {second_asked}"
    )]
    Mismatch {
        /// The operation's number within its group, counted from 0.
        sequence: u64,
        /// The lower of the two ranks.
        first: Rank,
        /// What the lower rank asked for.
        first_asked: Contract,
        /// The higher of the two ranks.
        second: Rank,
        /// What the higher rank asked for.
        second_asked: Contract,
    },
    /// Two ranks are at different places of the program.
    #[error(
        "ranks do not agree on the order of operations: rank {rank} is in operation {sequence}, {asked}, while rank {ahead} has left it and is in operation {ahead_sequence}, {ahead_asked}"
    )]
    OutOfOrder {
        /// The rank that waits.
        rank: Rank,
        /// The operation it waits in.
        sequence: u64,
        /// What it asked for.
        asked: Contract,
        /// The rank that went on.
        ahead: Rank,
        /// The operation it is in.
        ahead_sequence: u64,
        /// What it asked for.
        ahead_asked: Contract,
    },
    /// An operation did not end within its deadline.
    #[error(
        "{asked}, operation {sequence}, did not end within {timeout_ms} ms on rank {rank}, which waits for {waiting_for}; a rank there hangs, is stopped or is slow (raise --timeout if it may be)"
    )]
    Timeout {
        /// The rank whose patience ended first.
        rank: Rank,
        /// The operation's number.
        sequence: u64,
        /// What the rank asked for.
        asked: Contract,
        /// The deadline in milliseconds.
        timeout_ms: u64,
        /// The ranks it still waits for, in words.
        waiting_for: String,
    },
    /// The program on a rank gave up and said why.
    #[error("rank {rank} on {host} stopped the job: {message}")]
    Aborted {
        /// The rank that gave up.
        rank: Rank,
        /// Its host.
        host: String,
        /// Its reason.
        message: String,
    },
    /// A peer broke the protocol, or the network corrupted what it said.
    #[error(
        "rank {rank} on {host} broke the protocol: {detail}; the network corrupts data or a build differs"
    )]
    Misbehaved {
        /// The rank whose bytes were wrong.
        rank: Rank,
        /// Its host and address.
        host: String,
        /// What was wrong.
        detail: String,
    },
}

/// Longest text of a cause on the wire, in bytes: a message of a person's, not a file.
const TEXT_BYTES_MAX: u16 = 1024;

const _: () = assert!(2 * (TEXT_BYTES_MAX as usize + 2) + 128 <= CONTROL_BYTES_MAX);

impl Cause {
    /// The cause as an abort frame's payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        match self {
            Self::PeerLost { rank, host, detail } => {
                put_words(&mut out, 1, *rank, &[host, detail]);
            }
            Self::PeerLeft { rank, host } => put_words(&mut out, 2, *rank, &[host]),
            Self::Mismatch { sequence, first, first_asked, second, second_asked } => {
                put_words(&mut out, 3, *first, &[]);
                out.extend_from_slice(&sequence.to_le_bytes());
                put_contract(&mut out, first_asked);
                out.extend_from_slice(&second.get().to_le_bytes());
                put_contract(&mut out, second_asked);
            }
            Self::OutOfOrder { rank, sequence, asked, ahead, ahead_sequence, ahead_asked } => {
                put_words(&mut out, 4, *rank, &[]);
                out.extend_from_slice(&sequence.to_le_bytes());
                put_contract(&mut out, asked);
                out.extend_from_slice(&ahead.get().to_le_bytes());
                out.extend_from_slice(&ahead_sequence.to_le_bytes());
                put_contract(&mut out, ahead_asked);
            }
            Self::Timeout { rank, sequence, asked, timeout_ms, waiting_for } => {
                put_words(&mut out, 5, *rank, &[waiting_for]);
                out.extend_from_slice(&sequence.to_le_bytes());
                put_contract(&mut out, asked);
                out.extend_from_slice(&timeout_ms.to_le_bytes());
            }
            Self::Aborted { rank, host, message } => put_words(&mut out, 6, *rank, &[host, message]),
            Self::Misbehaved { rank, host, detail } => put_words(&mut out, 7, *rank, &[host, detail]),
        }
        out
    }

    /// The cause that an abort frame's payload holds; `None` if it holds none that this version knows.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let kind = reader.u8()?;
        let rank = Rank::new(reader.u32()?);
        Some(match kind {
            1 => Self::PeerLost { rank, host: reader.text()?, detail: reader.text()? },
            2 => Self::PeerLeft { rank, host: reader.text()? },
            3 => Self::Mismatch {
                first: rank,
                sequence: reader.u64()?,
                first_asked: contract(&mut reader)?,
                second: Rank::new(reader.u32()?),
                second_asked: contract(&mut reader)?,
            },
            4 => Self::OutOfOrder {
                rank,
                sequence: reader.u64()?,
                asked: contract(&mut reader)?,
                ahead: Rank::new(reader.u32()?),
                ahead_sequence: reader.u64()?,
                ahead_asked: contract(&mut reader)?,
            },
            5 => Self::Timeout {
                rank,
                waiting_for: reader.text()?,
                sequence: reader.u64()?,
                asked: contract(&mut reader)?,
                timeout_ms: reader.u64()?,
            },
            6 => Self::Aborted { rank, host: reader.text()?, message: reader.text()? },
            7 => Self::Misbehaved { rank, host: reader.text()?, detail: reader.text()? },
            _ => return None,
        })
    }
}

fn put_words(out: &mut Vec<u8>, kind: u8, rank: Rank, words: &[&str]) {
    out.push(kind);
    out.extend_from_slice(&rank.get().to_le_bytes());
    for word in words {
        put_text(out, word, TEXT_BYTES_MAX);
    }
}

fn put_contract(out: &mut Vec<u8>, contract: &Contract) {
    out.push(contract.operation.to_byte());
    out.push(contract.dtype.to_byte());
    out.push(contract.reduction.map_or(0, ReduceOp::to_byte));
    out.push(contract.algorithm.to_byte());
    out.extend_from_slice(&contract.root.get().to_le_bytes());
    out.extend_from_slice(&contract.count.to_le_bytes());
}

fn contract(reader: &mut Reader<'_>) -> Option<Contract> {
    let [operation, dtype, reduction, algorithm] = reader.array()?;
    Some(Contract {
        operation: Operation::from_byte(operation)?,
        dtype: DType::from_byte(dtype)?,
        reduction: if reduction == 0 { None } else { Some(ReduceOp::from_byte(reduction)?) },
        algorithm: Algorithm::from_byte(algorithm)?,
        root: Rank::new(reader.u32()?),
        count: reader.u64()?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::frame::tests::contracts;

    fn causes() -> impl Strategy<Value = Cause> {
        let rank = || any::<u32>().prop_map(Rank::new);
        let text = || "[ -~]{0,40}";
        prop_oneof![
            (rank(), text(), text()).prop_map(|(rank, host, detail)| Cause::PeerLost { rank, host, detail }),
            (rank(), text()).prop_map(|(rank, host)| Cause::PeerLeft { rank, host }),
            (any::<u64>(), rank(), contracts(), rank(), contracts()).prop_map(
                |(sequence, first, a, second, b)| {
                    Cause::Mismatch { sequence, first, first_asked: a, second, second_asked: b }
                }
            ),
            (any::<u64>(), rank(), contracts(), rank(), contracts()).prop_map(
                |(sequence, rank, asked, ahead, b)| {
                    Cause::OutOfOrder {
                        rank,
                        sequence,
                        asked,
                        ahead,
                        ahead_sequence: sequence / 2,
                        ahead_asked: b,
                    }
                }
            ),
            (rank(), any::<u64>(), contracts(), text()).prop_map(|(rank, sequence, asked, waiting_for)| {
                Cause::Timeout { rank, sequence, asked, timeout_ms: sequence ^ 7, waiting_for }
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
        fn a_cause_comes_back(cause in causes()) {
            prop_assert_eq!(Cause::decode(&cause.encode()), Some(cause));
        }

        #[test]
        fn a_shortened_cause_is_none_or_a_cause(cause in causes(), keep in 0..200usize) {
            let bytes = cause.encode();
            let _ = Cause::decode(&bytes[..keep.min(bytes.len())]);
        }
    }

    #[test]
    fn long_and_hostile_texts_are_tamed() {
        let cause =
            Cause::Aborted { rank: Rank::new(3), host: "h\u{1b}[31m".into(), message: "é".repeat(5000) };
        let bytes = cause.encode();
        assert!(bytes.len() <= CONTROL_BYTES_MAX);
        let Some(Cause::Aborted { host, message, .. }) = Cause::decode(&bytes) else { panic!("it decodes") };
        assert_eq!(host, "h\u{fffd}[31m");
        assert_eq!(message, "é".repeat(512));
    }
}
