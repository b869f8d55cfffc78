//! Checks that all ranks succeeded and that all ranks hold the same values.
//!
//! If only one rank returned an error, the other ranks would wait for this rank in the next collective. So the
//! functions of this module report the error to all ranks, and every rank returns an error.

use sha2::{Digest, Sha256};

use super::partition::PartPlace;
use super::{RunPhase, TrainError};
use crate::group::Group;
use crate::types::{Rank, ReduceOp, WORLD_SIZE_MAX, WorldSize};

/// The maximum length in bytes of an error message that is sent to the other ranks.
const ERROR_MESSAGE_BYTES_MAX: usize = 4096;

/// Returns `local` if `local` is `Ok` on every rank, or if this rank failed. If only other ranks failed, returns
/// [`TrainError::OtherRankFailed`] with the message of the lowest rank that failed.
///
/// All ranks must call this function. A call costs a small all-reduce and, after a failure, a broadcast.
pub(crate) fn check_all_succeeded<T>(
    group: &mut Group,
    phase: RunPhase,
    local: Result<T, TrainError>,
) -> Result<T, TrainError> {
    let mut failed = [local.as_ref().map_or_else(|_| u64::from(group.rank().get()), |_| u64::MAX)];
    group.all_reduce(&mut failed, ReduceOp::Min)?;
    let Some(rank) = u32::try_from(failed[0]).ok().map(Rank::new) else { return local };
    // The other ranks do not know how long the message is, so all ranks use a buffer of the same fixed length.
    let mut message = vec![0_u8; ERROR_MESSAGE_BYTES_MAX];
    if let Err(error) = &local {
        let text = error.to_string();
        let len = text.floor_char_boundary(ERROR_MESSAGE_BYTES_MAX);
        message[..len].copy_from_slice(&text.as_bytes()[..len]);
    }
    group.broadcast(&mut message, rank)?;
    local.and_then(|_| {
        let text = String::from_utf8_lossy(&message);
        Err(TrainError::OtherRankFailed { rank, phase, message: text.trim_end_matches('\0').to_owned() })
    })
}

/// Returns `local`. If `local` is an error of this rank alone, ends the job on all ranks, so that no other rank waits.
pub(crate) fn abort_if_failed<T, E>(group: &Group, local: Result<T, E>) -> Result<T, TrainError>
where
    E: Into<TrainError>,
{
    local.map_err(|error| {
        let error = error.into();
        if !matches!(error, TrainError::Group(_)) {
            // `abort` fails if another rank has already aborted the job. Even then, this rank returns its own message.
            let _ = group.abort(&error.to_string());
        }
        error
    })
}

/// Compares the `digests` of all ranks with the digests of rank 0. Returns the lowest rank whose digests differ, and
/// the indices of the digests that differ. All ranks must pass the same number of digests.
pub(crate) fn find_first_differing_rank(
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

/// Returns an error if the ranks have different `digests` of data. `name` returns the name of the data of the digest with an
/// index. All ranks must pass the same number of digests.
pub(crate) fn check_same_data(
    group: &mut Group,
    digests: &[u64],
    name: impl FnOnce(usize) -> String,
) -> Result<(), TrainError> {
    let Some((rank, differing)) = find_first_differing_rank(group, digests)? else { return Ok(()) };
    let hosts = [rank, Rank::ZERO].map(|rank| group.host(rank));
    Err(TrainError::DataDiffer { rank, hosts, name: name(differing[0]) })
}

/// Gathers one row from each rank and returns the rows in rank order. All rows must have the same length.
fn gather_rows(group: &mut Group, row: &[u64]) -> Result<Vec<u64>, TrainError> {
    let mut table = vec![0; row.len() * group.size().as_usize()];
    let start = row.len() * group.rank().index();
    table[start..start + row.len()].copy_from_slice(row);
    group.all_gather(&mut table)?;
    Ok(table)
}

/// A hash of this rank's parameters at the end of an epoch.
/// [`Strategy::parameter_agreement`](super::strategies::Strategy::parameter_agreement) says when the hashes of all replicas
/// must be equal. If the hashes differ at such a time, memory or the network corrupted a value.
pub(crate) struct ReplicaHash {
    /// The number of epochs that the run has completed.
    epoch: u64,
    /// Only ranks with the same part of the model compare their hashes.
    place: PartPlace,
    hash: u64,
}

impl ReplicaHash {
    /// Hashes the `parameters` at the end of `epoch`. Costs one pass over the parameters.
    pub(crate) fn new(epoch: u64, place: PartPlace, parameters: &[f32]) -> Self {
        Self { epoch, place, hash: hash_of_bits(parameters) }
    }

    /// Returns two numbers, which the caller sums over all ranks. If all hashes are equal, both sums are 0. If some
    /// hashes differ, the probability that both sums are 0 is about 2^-64. The sums can be part of another
    /// all-reduce, so the comparison needs no message of its own.
    ///
    /// For example, with 3 replicas of a part, the first adds `2 * hash`, and each other replica adds `-hash`. A hash
    /// is split into halves of 32 bits, so that the sums are exact.
    pub(crate) fn terms_that_cancel_if_equal(&self) -> [f64; 2] {
        const _: () = assert!((WORLD_SIZE_MAX as u64) << 33 < 1 << f64::MANTISSA_DIGITS);
        let PartPlace { replica, replicas, .. } = self.place;
        let weight = if replica == Rank::ZERO { f64::from(replicas.get()) - 1.0 } else { -1.0 };
        [self.hash >> 32, self.hash & u64::from(u32::MAX)].map(|half| weight * half as f64)
    }

    /// Compares the hashes of all replicas of each part. Returns [`TrainError::ParametersDiffer`] for the first part
    /// whose hashes differ. All ranks must call this function. A call costs one short all-gather.
    pub(crate) fn check_replicas_equal(&self, group: &mut Group) -> Result<(), TrainError> {
        if self.place.replicas == WorldSize::ONE {
            return Ok(());
        }
        let hashes = gather_rows(group, &[self.hash])?;
        let replicas = self.place.replicas.as_usize();
        for (part, hashes) in hashes.chunks_exact(replicas).enumerate() {
            let count = |hash: &u64| hashes.iter().filter(|other| *other == hash).count();
            // The most frequent hash. If several hashes are equally frequent, take the hash of the lowest rank.
            let reference = hashes.iter().rev().max_by_key(|hash| count(hash)).copied().unwrap_or_default();
            let ranks = || group.size().ranks().skip(part * replicas);
            let rows = ranks().zip(hashes);
            let differing: Vec<Rank> =
                rows.filter(|(_, hash)| **hash != reference).map(|(rank, _)| rank).collect();
            if differing.is_empty() {
                continue;
            }
            let majority = 2 * count(&reference) > replicas;
            let ranks = if majority { differing } else { ranks().take(replicas).collect() };
            return Err(TrainError::ParametersDiffer { ranks, majority, epoch: self.epoch });
        }
        Ok(())
    }
}

/// Returns a hash of the bits of `values`. Every change of a single bit changes the hash. The hash is not
/// cryptographic.
fn hash_of_bits(values: &[f32]) -> u64 {
    const HASH_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    values.iter().fold(0, |hash: u64, value| {
        (hash.rotate_left(5) ^ u64::from(value.to_bits())).wrapping_mul(HASH_MULTIPLIER)
    })
}

/// Returns the first 8 bytes of the SHA-256 of `text` as a number.
pub(crate) fn short_digest(text: &[u8]) -> u64 {
    let digest: [u8; 32] = Sha256::digest(text).into();
    u64::from_le_bytes(*digest.first_chunk().expect("a SHA-256 digest has more than 8 bytes"))
}
