//! How ranks come to agree: that nobody failed, and that all hold the same.
//!
//! A rank that returned early with an error of its own would leave the others waiting for it; here everybody learns what
//! happened, and everybody returns.

use sha2::{Digest, Sha256};

use super::{Phase, TrainError};
use crate::group::Group;
use crate::types::{Rank, ReduceOp};

/// The longest message that is passed on.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Returns what `local` holds if it is `Ok` on every rank. Otherwise every rank returns an error: its own, or
/// [`TrainError::Elsewhere`] with the words of the lowest rank that failed.
///
/// Two small collectives; all ranks must call it at the same place.
pub(crate) fn all_succeeded<T>(
    group: &mut Group,
    phase: Phase,
    local: Result<T, TrainError>,
) -> Result<T, TrainError> {
    let mut failed = [local.as_ref().map_or_else(|_| u64::from(group.rank().get()), |_| u64::MAX)];
    group.all_reduce(&mut failed, ReduceOp::Min)?;
    let Some(rank) = u32::try_from(failed[0]).ok().map(Rank::new) else { return local };
    // A fixed length: the others cannot know how long the message is.
    let mut message = vec![0_u8; MESSAGE_BYTES_MAX];
    if let Err(error) = &local {
        let text = error.to_string();
        let len = text.floor_char_boundary(MESSAGE_BYTES_MAX);
        message[..len].copy_from_slice(&text.as_bytes()[..len]);
    }
    group.broadcast(&mut message, rank)?;
    local.and_then(|_| {
        let text = String::from_utf8_lossy(&message);
        Err(TrainError::Elsewhere { rank, phase, message: text.trim_end_matches('\0').to_owned() })
    })
}

/// Compares `digests` (as many on every rank) with rank 0's. Returns the lowest rank that differs, and in which of them.
pub(crate) fn first_difference(
    group: &mut Group,
    digests: &[u64],
) -> Result<Option<(Rank, Vec<usize>)>, TrainError> {
    let width = digests.len();
    let mut table = vec![0_u64; width * group.size().as_usize()];
    let start = width * group.rank().index();
    table[start..start + width].copy_from_slice(digests);
    // Each rank fills its own row, so the sum is everybody's.
    group.all_reduce(&mut table, ReduceOp::Sum)?;
    let Some(reference) = table.chunks_exact(width).next() else { return Ok(None) };
    let differing = table.chunks_exact(width).zip(group.size().ranks()).find(|(row, _)| *row != reference);
    Ok(differing
        .map(|(row, rank)| (rank, (0..width).filter(|&index| row[index] != reference[index]).collect())))
}

/// The first 8 bytes of the SHA-256 of `text`.
pub(crate) fn short_digest(text: &[u8]) -> u64 {
    let digest: [u8; 32] = Sha256::digest(text).into();
    u64::from_le_bytes(*digest.first_chunk().expect("32 bytes have a first 8"))
}
