//! The messages between a rank and the rendezvous after the handshake. Each message consists of its length in four
//! bytes, followed by JSON.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::roster::{Member, Roster, format_ranks};
use crate::types::{Rank, WorldSize};
use crate::wire::printable;

/// The maximum length in bytes of a message from a rank.
pub(super) const FROM_RANK_BYTES_MAX: usize = 4096;
/// The maximum length in bytes of one member in an encoded roster. The rendezvous refuses a longer member.
pub(super) const MEMBER_BYTES_MAX: usize = 1024;
/// The size in bytes of the length field that begins each message.
const LENGTH_PREFIX_BYTES: usize = 4;

/// The maximum number of characters of an error about an invalid message. The peers receive this error.
const ERROR_CHARACTERS_MAX: usize = 200;

const _: () = assert!(FROM_RANK_BYTES_MAX > MEMBER_BYTES_MAX);

/// A message from a rank.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank {
    /// Registers the rank.
    Register(Member),
    /// Requests the list of missing ranks.
    Ask,
}

/// A message from the rendezvous.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToRank {
    /// All ranks have registered. The message contains the roster, which is the list of all ranks and their
    /// addresses.
    Ready(Roster),
    /// The job still waits for these ranks, which have not registered yet.
    Waiting(AbsentRanks),
    /// The answer to [`FromRank::Ask`]: these ranks have not registered yet.
    Missing(AbsentRanks),
    /// The start timeout is over, and these ranks have not registered.
    TimedOut { absent: AbsentRanks, timeout_ms: u64 },
    /// The rank cannot register.
    Refused { reason: String },
    /// A rank has ended or disconnected before the job has started.
    Lost { rank: Rank, host: String, detail: String },
}

/// The ranks for which a job waits.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct AbsentRanks {
    /// The ranks that have not registered.
    pub(super) ranks: Vec<Rank>,
    /// A sentence for each refused process. A refused process may be a missing rank that was started with wrong options.
    pub(super) refused: Vec<String>,
}

impl AbsentRanks {
    /// Returns the notice that the job has waited for these ranks for the time `waited`.
    pub(super) fn describe_wait(&self, name: &dyn Fn(Rank) -> String, waited: Duration) -> String {
        let missing = self.describe(name);
        format!("still waiting for {missing} to join the job, after {} s", waited.as_secs())
    }

    /// Formats the missing ranks, and the processes that were refused. Lists up to 8 missing ranks by name, and more ranks
    /// only by number. `name(rank)` returns the name of a rank, with its address if the address is known.
    pub(super) fn describe(&self, name: &dyn Fn(Rank) -> String) -> String {
        let mut text = if self.ranks.len() <= 8 {
            self.ranks.iter().map(|&rank| name(rank)).collect::<Vec<_>>().join(", ")
        } else {
            format!("ranks {}", format_ranks(&self.ranks))
        };
        for refused in &self.refused {
            text.push_str(" (");
            text.push_str(refused);
            text.push(')');
        }
        text
    }
}

/// A message with texts from a peer. A peer may send control characters, which must be replaced before a text is
/// printed.
pub(super) trait Printable {
    /// Replaces the control characters in all texts.
    fn make_printable(&mut self);
}

fn replace_control_characters<'a>(texts: impl IntoIterator<Item = &'a mut String>) {
    for text in texts {
        *text = printable(text);
    }
}

impl Printable for FromRank {
    fn make_printable(&mut self) {
        match self {
            Self::Register(member) => replace_control_characters([&mut member.host, &mut member.machine]),
            Self::Ask => {}
        }
    }
}

impl Printable for ToRank {
    fn make_printable(&mut self) {
        match self {
            Self::Ready(Roster { members }) => {
                for member in members {
                    replace_control_characters([&mut member.host, &mut member.machine]);
                }
            }
            Self::Waiting(absent) | Self::Missing(absent) | Self::TimedOut { absent, .. } => {
                replace_control_characters(&mut absent.refused);
            }
            Self::Refused { reason } => replace_control_characters([reason]),
            Self::Lost { host, detail, .. } => replace_control_characters([host, detail]),
        }
    }
}

/// Returns the maximum length in bytes of a message from the rendezvous, for a job with this number of ranks.
pub(super) fn to_rank_bytes_max(world: WorldSize) -> usize {
    FROM_RANK_BYTES_MAX + world.as_usize() * MEMBER_BYTES_MAX
}

/// Encodes a message as its length in four bytes, followed by JSON.
pub(super) fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    let body = serde_json::to_vec(message).expect("a message of plain fields can be written as JSON");
    let mut out = Vec::with_capacity(LENGTH_PREFIX_BYTES + body.len());
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&body);
    out
}

/// Returns the first characters of an error. The errors of a parser contain texts of the peer, which may be long.
fn excerpt(error: &str) -> String {
    error.chars().take(ERROR_CHARACTERS_MAX).collect()
}

/// Removes and decodes the first message in `input`. Returns `None` if the message has not arrived completely.
///
/// # Errors
///
/// A text for the user, in which "it" means the sender, if the message is longer than `bytes_max` or is invalid.
pub(super) fn decode<M: DeserializeOwned + Printable>(
    input: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<Option<M>, String> {
    let Some((length, rest)) = input.split_first_chunk::<LENGTH_PREFIX_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > bytes_max {
        return Err(format!("it announces a message of {length} bytes, more than {bytes_max}"));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    let mut message: M = serde_json::from_slice(body).map_err(|error| {
        format!("it sent an invalid message: {}", printable(&excerpt(&error.to_string())))
    })?;
    message.make_printable();
    input.drain(..LENGTH_PREFIX_BYTES + length);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded_one_after_another_from_a_stream() {
        let mut input = encode(&FromRank::Ask);
        input.extend_from_slice(&encode(&ToRank::Refused { reason: "no".into() })[..6]);
        assert!(matches!(decode(&mut input, 100), Ok(Some(FromRank::Ask))));
        assert!(matches!(decode::<ToRank>(&mut input, 100), Ok(None)));
        assert_eq!(input.len(), 6);
    }

    /// Regression test: before the fix, escape sequences in a host name were printed unchanged.
    #[test]
    fn control_characters_are_replaced() {
        let unsafe_text = "h\u{1b}[31m\n".to_owned();
        let lost = ToRank::Lost { rank: Rank::ZERO, host: unsafe_text.clone(), detail: unsafe_text.clone() };
        let refused = ToRank::Refused { reason: unsafe_text.clone() };
        let absent = AbsentRanks { ranks: Vec::new(), refused: vec![unsafe_text.clone()] };
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
    fn a_length_above_the_limit_is_an_error() {
        assert!(decode::<FromRank>(&mut vec![0xff; 4], 4096).unwrap_err().contains("4294967295"));
        assert!(decode::<FromRank>(&mut vec![2, 0, 0, 0, b'h', b'i'], 4096).unwrap_err().contains("invalid"));
    }
}
