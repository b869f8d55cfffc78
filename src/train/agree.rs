//! How ranks agree that all of them succeeded and that they hold the same values.
//!
//! A rank that returned early with an error would leave the others waiting for it. These functions tell all ranks of the
//! error, so that all return.

use sha2::{Digest, Sha256};

use super::{Phase, TrainError};
use crate::group::Group;
use crate::types::{Rank, ReduceOp, WorldSize};

/// The longest message that is sent to the other ranks.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Returns `local` if it is `Ok` on every rank. Otherwise every rank returns an error: its own, or
/// [`TrainError::Elsewhere`] with the message of the lowest rank that failed.
///
/// All ranks must call it in the same order. Costs a small all-reduce, and a broadcast after a failure.
pub(crate) fn all_succeeded<T>(
    group: &mut Group,
    phase: Phase,
    local: Result<T, TrainError>,
) -> Result<T, TrainError> {
    let mut failed = [local.as_ref().map_or_else(|_| u64::from(group.rank().get()), |_| u64::MAX)];
    group.all_reduce(&mut failed, ReduceOp::Min)?;
    let Some(rank) = u32::try_from(failed[0]).ok().map(Rank::new) else { return local };
    // The other ranks do not know how long the message is, so it has a fixed length.
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

/// Compares `digests`, of which all ranks have the same number, with rank 0's. Returns the lowest rank that differs, and the
/// indices of the digests in which it does.
pub(crate) fn first_difference(
    group: &mut Group,
    digests: &[u64],
) -> Result<Option<(Rank, Vec<usize>)>, TrainError> {
    let width = digests.len();
    let table = gather_rows(group, digests)?;
    let Some(reference) = table.chunks_exact(width).next() else { return Ok(None) };
    let differing = table.chunks_exact(width).zip(group.size().ranks()).find(|(row, _)| *row != reference);
    Ok(differing
        .map(|(row, rank)| (rank, (0..width).filter(|&index| row[index] != reference[index]).collect())))
}

/// The rows of all ranks, one after another.
fn gather_rows(group: &mut Group, row: &[u64]) -> Result<Vec<u64>, TrainError> {
    let mut table = vec![0; row.len() * group.size().as_usize()];
    let start = row.len() * group.rank().index();
    table[start..start + row.len()].copy_from_slice(row);
    group.all_gather(&mut table)?;
    Ok(table)
}

/// Checks that `parameters` are the same on all ranks, bit for bit, as data parallelism requires after every step. Ranks
/// exchange hashes of 8 bytes, so the check costs one pass over the parameters and one short all-gather.
///
/// A difference means that memory or the network corrupted a value: the job would go on with several models.
pub(crate) fn check_replicas(group: &mut Group, epoch: u64, parameters: &[f32]) -> Result<(), TrainError> {
    if group.size() == WorldSize::ONE {
        return Ok(());
    }
    let hashes = gather_rows(group, &[hash(parameters)])?;
    let count = |hash: &u64| hashes.iter().filter(|other| *other == hash).count();
    // The most frequent hash; of several, that of the lowest rank.
    let usual = hashes.iter().rev().max_by_key(|hash| count(hash)).copied().unwrap_or_default();
    let differ: Vec<Rank> =
        group.size().ranks().zip(&hashes).filter(|(_, hash)| **hash != usual).map(|(rank, _)| rank).collect();
    if differ.is_empty() {
        return Ok(());
    }
    let majority = 2 * count(&usual) > hashes.len();
    let ranks = if majority { differ } else { group.size().ranks().collect() };
    Err(TrainError::ParametersDiffer { ranks, majority, epoch })
}

/// A hash of the bits of `values` that changes with every single bit; not for use against an attacker.
fn hash(values: &[f32]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    values
        .iter()
        .fold(0, |hash: u64, value| (hash.rotate_left(5) ^ u64::from(value.to_bits())).wrapping_mul(FACTOR))
}

/// The first 8 bytes of the SHA-256 of `text`.
pub(crate) fn short_digest(text: &[u8]) -> u64 {
    let digest: [u8; 32] = Sha256::digest(text).into();
    u64::from_le_bytes(*digest.first_chunk().expect("32 bytes have a first 8"))
}
