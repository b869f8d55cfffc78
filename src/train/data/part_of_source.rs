//! The samples of a source that one rank has read, and what the ranks tell each other about their samples.
//!
//! Every format other than tables is loaded in the same way: [`load_parts`] calls a function that reads the samples of
//! this rank, which are consecutive, and then merges what depends on the samples of all ranks.

use ndarray::{Axis, concatenate};

use super::image_folder::check_pixel_count;
use super::npy::ArrayRounding;
use super::row_map::RowMap;
use super::unsplit_data::UnsplitData;
use super::{BlocksOfRank, DataError, ELEMENTS_MAX, Features, ImageShape, UninterpretedSamples};
use crate::group::{Error, Group};
use crate::train::rank_checks::{check_all_succeeded, find_first_differing_rank};
use crate::train::{RunPhase, TrainError};
use crate::types::ReduceOp;

/// The samples of a source that one rank has read. The parts of the ranks follow each other in the order of the ranks.
#[derive(Debug)]
pub(crate) struct PartOfSource {
    pub(crate) samples: UninterpretedSamples,
    /// The shape of the images. `None` if the samples are not images.
    pub(crate) image: Option<ImageShape>,
    /// A hash of what this rank knows about the whole source. If the hashes of two ranks differ, the ranks have read
    /// different files.
    pub(crate) fingerprint: u64,
    /// Messages for the user, which are the same on all ranks.
    pub(crate) notes: Vec<String>,
    /// What the numbers lose when they are rounded. `None` if the samples are not arrays.
    pub(crate) rounding: Option<ArrayRounding>,
}

/// Loads a source. `read` reads the samples of this rank. `name` is the name of the source in errors. All ranks must call this
/// function.
///
/// # Errors
///
/// If `read` fails on any rank, or if the ranks have read different files. Then all ranks return an error.
pub(crate) fn load_parts(
    name: &str,
    group: &mut Group,
    read: impl FnOnce(BlocksOfRank) -> Result<PartOfSource, DataError>,
) -> Result<UnsplitData, TrainError> {
    let share = BlocksOfRank::of_rank(group);
    let part = check_all_succeeded(group, RunPhase::Data, read(share).map_err(TrainError::from))?;
    if let Some((rank, _)) = find_first_differing_rank(group, &[part.fingerprint])? {
        return Err(TrainError::DataDiffer { rank, name: name.to_owned() });
    }
    part.merge(name, share, group)
}

impl PartOfSource {
    /// Gives the samples of this rank the same format on all ranks, and counts the samples of each rank.
    fn merge(self, name: &str, share: BlocksOfRank, group: &mut Group) -> Result<UnsplitData, TrainError> {
        let Self { mut samples, mut image, notes: notes_of_source, rounding, fingerprint: _ } = self;
        let mut notes = match rounding {
            Some(rounding) => rounding.into_notes(group)?,
            None => Vec::new(),
        };
        notes.extend(notes_of_source);
        let too_large = |what: &str| {
            DataError::Unsuitable(format!("{name} holds more than {ELEMENTS_MAX} {what}, which is the limit"))
        };
        let row_counts = group.all_gather_from(&[samples.features.rows() as u64])?;
        let total = row_counts.iter().try_fold(0_u64, |total, &count| total.checked_add(count));
        if total.is_none_or(|total| total > ELEMENTS_MAX) {
            return Err(too_large("samples").into());
        }
        let mut row_map = RowMap::new(share, &row_counts);
        if matches!(samples.features, Features::Sparse(_)) {
            let value_counts = merge_sparse_format(&mut samples.features, &row_map, group)?;
            row_map = row_map.with_value_counts(value_counts);
            if row_map.total_value_count() as u64 > ELEMENTS_MAX {
                return Err(too_large("values").into());
            }
        }
        if let Some(shape) = &mut image {
            merge_image_format(&mut samples.features, shape, group)?;
            check_pixel_count(*shape, row_map.rows())
                .map_err(|problem| DataError::Unsuitable(format!("{name}: {problem}")))?;
        }
        Ok(UnsplitData { samples, row_map: Some(row_map), image, notes })
    }
}

/// Gives sparse rows the largest number of columns of any rank. Returns the number of stored values of each row of all ranks.
fn merge_sparse_format(
    features: &mut Features,
    row_map: &RowMap,
    group: &mut Group,
) -> Result<Vec<u32>, Error> {
    let mut columns = [features.columns() as u64];
    group.all_reduce(&mut columns, ReduceOp::Max)?;
    let Features::Sparse(rows) = features else { return Ok(Vec::new()) };
    rows.widen(columns[0] as usize);
    let value_counts: Vec<u32> = (0..rows.rows()).map(|row| rows.value_count(row) as u32).collect();
    group.all_gather_uneven(&value_counts, &row_map.row_counts_of_ranks())
}

/// Converts grey images to colour images if any rank has read an image with colours.
fn merge_image_format(
    features: &mut Features,
    shape: &mut ImageShape,
    group: &mut Group,
) -> Result<(), Error> {
    let mut channels = [shape.channels as u64];
    group.all_reduce(&mut channels, ReduceOp::Max)?;
    if let Features::Pixels { values, .. } = features
        && (shape.channels, channels) == (1, [3])
    {
        *values = concatenate![Axis(1), *values, *values, *values];
        shape.channels = 3;
    }
    Ok(())
}
