//! What is said at the rendezvous, after the handshake: JSON behind its length.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Member, Roster};
use crate::types::{Rank, WorldSize};

/// The longest message of a rank, in bytes.
pub(super) const FROM_RANK_BYTES_MAX: usize = 4096;
/// What each member may take of a roster, in bytes.
const MEMBER_BYTES_MAX: usize = 1024;
/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;

const _: () = assert!(FROM_RANK_BYTES_MAX > MEMBER_BYTES_MAX);

/// What a rank says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank {
    /// Here I am.
    Register(Member),
    /// Who is missing?
    Ask,
}

/// What the rendezvous says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToRank {
    /// Everybody has come.
    Ready(Roster),
    /// These have not come yet; the answer to [`FromRank::Ask`].
    Missing { ranks: Vec<Rank> },
    /// The time is over, and these have not come.
    TimedOut { ranks: Vec<Rank>, timeout_ms: u64 },
    /// This rank cannot take part.
    Refused { reason: String },
    /// A rank that had registered is gone.
    Lost { rank: Rank, host: String, detail: String },
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
pub(super) fn decode<M: DeserializeOwned>(
    input: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<Option<M>, String> {
    let Some((length, rest)) = input.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > bytes_max {
        return Err(format!("it announces a message of {length} bytes, more than {bytes_max}"));
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    let message =
        serde_json::from_slice(body).map_err(|error| format!("it sent a message that is none: {error}"))?;
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

    #[test]
    fn lengths_are_bounded_before_anything_is_allocated() {
        assert!(decode::<FromRank>(&mut vec![0xff; 4], 4096).unwrap_err().contains("4294967295"));
        assert!(decode::<FromRank>(&mut vec![2, 0, 0, 0, b'h', b'i'], 4096).unwrap_err().contains("none"));
    }
}
