//! The messages of the rendezvous after the handshake: a length, then JSON.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Member, Roster};
use crate::types::{Rank, WorldSize};
use crate::wire::printable;

/// The longest message from a rank, in bytes.
pub(super) const FROM_RANK_BYTES_MAX: usize = 4096;
/// What each member may take of a roster, in bytes.
const MEMBER_BYTES_MAX: usize = 1024;
/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;

const _: () = assert!(FROM_RANK_BYTES_MAX > MEMBER_BYTES_MAX);

/// A message from a rank.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank {
    /// This rank takes part.
    Register(Member),
    /// Which ranks are missing?
    Ask,
}

/// A message from the rendezvous.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToRank {
    /// All ranks have registered.
    Ready(Roster),
    /// The start takes long: these ranks have not registered so far.
    Waiting(Absent),
    /// These ranks have not registered; the answer to [`FromRank::Ask`].
    Missing(Absent),
    /// The start timeout is over, and these ranks have not registered.
    TimedOut { absent: Absent, timeout_ms: u64 },
    /// This rank cannot take part.
    Refused { reason: String },
    /// A rank has ended before the job has started.
    Lost { rank: Rank, host: String, detail: String },
}

/// The ranks that a job waits for.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct Absent {
    /// The ranks.
    pub(super) ranks: Vec<Rank>,
    /// Processes that were refused, each in a sentence: one of them may be such a rank.
    pub(super) refused: Vec<String>,
}

/// Replaces control characters in the texts of a message, which a peer chose.
pub(super) trait Printable {
    fn make_printable(&mut self);
}

fn clean<'a>(texts: impl IntoIterator<Item = &'a mut String>) {
    for text in texts {
        *text = printable(text);
    }
}

impl Printable for FromRank {
    fn make_printable(&mut self) {
        match self {
            Self::Register(member) => clean([&mut member.host, &mut member.machine]),
            Self::Ask => {}
        }
    }
}

impl Printable for ToRank {
    fn make_printable(&mut self) {
        match self {
            Self::Ready(Roster { members }) => {
                for member in members {
                    clean([&mut member.host, &mut member.machine]);
                }
            }
            Self::Waiting(absent) | Self::Missing(absent) | Self::TimedOut { absent, .. } => {
                clean(&mut absent.refused);
            }
            Self::Refused { reason } => clean([reason]),
            Self::Lost { host, detail, .. } => clean([host, detail]),
        }
    }
}

/// The longest message of the rendezvous of a world of this size, in bytes.
pub(super) fn to_rank_bytes_max(world: WorldSize) -> usize {
    FROM_RANK_BYTES_MAX + world.as_usize() * MEMBER_BYTES_MAX
}

/// The message with its length before it.
pub(super) fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    let body = serde_json::to_vec(message).expect("a message of plain fields can be written as JSON");
    let mut out = Vec::with_capacity(LENGTH_BYTES + body.len());
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&body);
    out
}

/// The first whole message in `input`, which is then removed; `None` if it is not whole yet.
///
/// # Errors
///
/// A sentence for a person, if it is longer than `bytes_max` or no message.
pub(super) fn decode<M: DeserializeOwned + Printable>(
    input: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<Option<M>, String> {
    let Some((length, rest)) = input.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > bytes_max {
        return Err(format!("it announces a message of {length} bytes, more than {bytes_max}"));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    let mut message: M = serde_json::from_slice(body)
        .map_err(|error| format!("it sent an invalid message: {}", printable(&error.to_string())))?;
    message.make_printable();
    input.drain(..LENGTH_BYTES + length);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_out_of_a_stream() {
        let mut input = encode(&FromRank::Ask);
        input.extend_from_slice(&encode(&ToRank::Refused { reason: "no".into() })[..6]);
        assert!(matches!(decode(&mut input, 100), Ok(Some(FromRank::Ask))));
        assert!(matches!(decode::<ToRank>(&mut input, 100), Ok(None)));
        assert_eq!(input.len(), 6);
    }

    /// A host name with escape sequences was printed raw.
    #[test]
    fn control_characters_are_replaced() {
        let evil = "h\u{1b}[31m\n".to_owned();
        let lost = ToRank::Lost { rank: Rank::ZERO, host: evil.clone(), detail: evil.clone() };
        let refused = ToRank::Refused { reason: evil.clone() };
        let absent = Absent { ranks: Vec::new(), refused: vec![evil.clone()] };
        for message in [lost, refused, ToRank::Waiting(absent)] {
            let decoded = decode::<ToRank>(&mut encode(&message), 1000).unwrap().unwrap();
            let shown = serde_json::to_string(&decoded).unwrap();
            assert!(shown.contains("h\u{fffd}[31m\u{fffd}") && !shown.contains("u001b"), "{shown}");
        }
        let body = br#"{"h\u001b[31m":1}"#;
        let mut input = (body.len() as u32).to_le_bytes().to_vec();
        input.extend_from_slice(body);
        let error = decode::<ToRank>(&mut input, 1000).unwrap_err();
        assert!(!error.contains('\u{1b}'), "{error}");
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_allocated() {
        assert!(decode::<FromRank>(&mut vec![0xff; 4], 4096).unwrap_err().contains("4294967295"));
        assert!(decode::<FromRank>(&mut vec![2, 0, 0, 0, b'h', b'i'], 4096).unwrap_err().contains("invalid"));
    }
}
