//! Before the first measurement, checks that all ranks were started with the same flags.

use sha2::{Digest as _, Sha256};

use super::BenchError;
use super::plan::BenchPlan;
use crate::group::Group;
use crate::group::verbs::AllGather;

/// Compares the flags of every rank with the flags of rank 0.
///
/// # Errors
///
/// [`BenchError::FlagsDiffer`] on all ranks. This error names the flags that differ, and the lowest rank whose flags
/// differ from those of rank 0.
pub(super) fn check_flags_agree(group: &mut Group, plan: &BenchPlan) -> Result<(), BenchError> {
    let flags = plan.shared_flags();
    let own_digests: Vec<u64> = flags.iter().map(|(_, value)| digest(value)).collect();
    let all_digests = group.call(AllGather::new()).run_from(&own_digests)?;
    let Some((digests_of_rank_0, other_digests)) = all_digests.split_at_checked(own_digests.len()) else {
        return Ok(());
    };
    let differs = |row: &&[u64]| *row != digests_of_rank_0;
    let Some((rank, row)) = group
        .size()
        .ranks()
        .skip(1)
        .zip(other_digests.chunks_exact(own_digests.len()))
        .find(|(_, row)| differs(row))
    else {
        return Ok(());
    };
    let different = flags.iter().zip(row.iter().zip(digests_of_rank_0)).filter(|(_, (a, b))| a != b);
    let names: Vec<&str> = different.map(|((name, _), _)| *name).collect();
    Err(BenchError::FlagsDiffer { rank, flags: names.join(", ") })
}

/// Returns the first 8 bytes of the SHA-256 of `text`.
fn digest(text: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(text).into();
    u64::from_le_bytes(*digest.first_chunk().expect("32 bytes have a first 8"))
}
