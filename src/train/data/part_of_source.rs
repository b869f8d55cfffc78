//! The samples of a source that one rank has read, and what the ranks tell each other about their samples.
//!
//! Every format other than tables is loaded in the same way: [`load_parts`] calls a function that reads the samples of
//! this rank, which are consecutive, and then merges what depends on the samples of all ranks.

use std::path::Path;

use super::disk_features::FeatureWriter;
use super::file_digest::FileDigest;
use super::image_folder::check_pixel_count;
use super::npy::ArrayRounding;
use super::row_map::RowMap;
use super::sample_blocks::BlockReader;
use super::unsplit_data::UnsplitData;
use super::{
    BlocksOfRank, DataError, ELEMENTS_MAX, Features, HeldFeatures, ImageShape, UninterpretedSamples,
};
use crate::group::verbs::AllGather;
use crate::group::{Error, Group};
use crate::train::rank_checks::{check_all_succeeded, check_same_data};
use crate::train::{RunPhase, TrainError};
use crate::types::ReduceOp;

/// The most files of a source that have digests.
const DIGESTS_MAX: usize = 2;

/// The samples of a source that one rank has read. The parts of the ranks follow each other in the order of the ranks.
#[derive(Debug)]
pub(crate) struct PartOfSource {
    pub(crate) samples: UninterpretedSamples<HeldFeatures>,
    /// The shape of the images. `None` if the samples are not images.
    pub(crate) image: Option<ImageShape>,
    /// Digests of the files of the whole source, at most [`DIGESTS_MAX`].
    pub(crate) digests: Vec<FileDigest>,
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
    // Hosts may have data of different formats, so the ranks may have different numbers of digests.
    let mut values = [0; DIGESTS_MAX];
    values.iter_mut().zip(&part.digests).for_each(|(value, digest)| *value = digest.value);
    let file = |index: usize| part.digests.get(index).map(|digest| digest.path.display().to_string());
    check_same_data(group, &values, |index| file(index).unwrap_or_else(|| name.to_owned()))?;
    part.merge(name, share, group)
}

/// Reads all samples of `reader`. The features are in memory, or in a temporary file in `stream_directory` if there is one. Then
/// memory holds only one block of features at a time.
///
/// # Errors
///
/// If `reader` fails, or if the temporary file cannot be written.
pub(crate) fn read_samples(
    reader: &mut dyn BlockReader,
    stream_directory: Option<&Path>,
) -> Result<UninterpretedSamples<HeldFeatures>, DataError> {
    let Some(directory) = stream_directory else {
        let UninterpretedSamples { features, target } = reader.read_block(usize::MAX)?.samples;
        return Ok(UninterpretedSamples { features: HeldFeatures::InMemory(features), target });
    };
    // The size of a sample is unknown at first, so the blocks grow.
    let mut rows_max = 1;
    let UninterpretedSamples { features, mut target } = reader.read_block(rows_max)?.samples;
    let mut writer = FeatureWriter::create(directory, &features)?;
    writer.append(&features)?;
    loop {
        rows_max = writer.block_rows().min(2 * rows_max);
        let block = reader.read_block(rows_max)?.samples;
        if block.features.rows() == 0 {
            return Ok(UninterpretedSamples { features: HeldFeatures::OnDisk(writer.finish()), target });
        }
        let has_colours = matches!(block.features, Features::Pixels { .. })
            && block.features.columns() > writer.format().columns();
        if has_colours {
            // All earlier images are grey.
            writer = writer.finish().rewrite(Features::into_colour)?;
        }
        writer.append(&block.features)?;
        target.append(block.target);
    }
}

impl PartOfSource {
    /// Gives the samples of this rank the same format on all ranks, and counts the samples of each rank.
    fn merge(self, name: &str, share: BlocksOfRank, group: &mut Group) -> Result<UnsplitData, TrainError> {
        let Self { mut samples, mut image, notes: notes_of_source, rounding, digests: _ } = self;
        let mut notes = match rounding {
            Some(rounding) => rounding.into_notes(group)?,
            None => Vec::new(),
        };
        notes.extend(notes_of_source);
        let too_large = |what: &str| {
            DataError::Unsuitable(format!("{name} holds more than {ELEMENTS_MAX} {what}, which is the limit"))
        };
        let row_counts = group.call(AllGather::new()).run_from(&[samples.features.rows() as u64])?;
        let total = row_counts.iter().try_fold(0_u64, |total, &count| total.checked_add(count));
        if total.is_none_or(|total| total > ELEMENTS_MAX) {
            return Err(too_large("samples").into());
        }
        let mut row_map = RowMap::new(share, &row_counts);
        if matches!(samples.features.format(), Features::Sparse(_)) {
            let value_counts = merge_sparse_format(&mut samples.features, &row_map, group)?;
            row_map = row_map.with_value_counts(value_counts);
            if row_map.total_value_count() as u64 > ELEMENTS_MAX {
                return Err(too_large("values").into());
            }
        }
        if let Some(shape) = &mut image {
            samples.features = merge_image_format(samples.features, shape, group)?;
            check_pixel_count(*shape, row_map.rows())
                .map_err(|problem| DataError::Unsuitable(format!("{name}: {problem}")))?;
        }
        Ok(UnsplitData { samples, row_map: Some(row_map), image, notes })
    }
}

/// Gives sparse rows the largest number of columns of any rank. Returns the number of stored values of each row of all ranks.
fn merge_sparse_format(
    features: &mut HeldFeatures,
    row_map: &RowMap,
    group: &mut Group,
) -> Result<Vec<u32>, Error> {
    let mut columns = [features.format().columns() as u64];
    group.all_reduce(&mut columns, ReduceOp::Max)?;
    features.widen(columns[0] as usize);
    group.call(AllGather::new().counts(&row_map.row_counts_of_ranks())).run_from(&features.value_counts())
}

/// Converts grey images to colour images if any rank has read an image with colours.
fn merge_image_format(
    features: HeldFeatures,
    shape: &mut ImageShape,
    group: &mut Group,
) -> Result<HeldFeatures, TrainError> {
    let mut channels = [shape.channels as u64];
    group.all_reduce(&mut channels, ReduceOp::Max)?;
    let mut converted = Ok(features);
    if let (1, [3]) = (shape.channels, channels) {
        converted = converted.and_then(|features| features.convert(Features::into_colour));
        shape.channels = 3;
    }
    check_all_succeeded(group, RunPhase::Data, converted.map_err(TrainError::from))
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::super::sample_blocks::{RowOrigins, SampleBlock};
    use super::super::sparse::SparseRowsBuilder;
    use super::super::{Column, Texts};
    use super::*;

    /// Returns rows, and records the largest block.
    struct RecordingReader {
        make_rows: fn(usize, usize) -> Features,
        /// The number of rows that have been read, and the number of all rows.
        rows: (usize, usize),
        /// The number of words of the largest block.
        largest_block: usize,
    }

    impl BlockReader for RecordingReader {
        fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError> {
            let (first, end) = (self.rows.0, self.rows.1.min(self.rows.0.saturating_add(rows_max)));
            self.rows.0 = end;
            let features = (self.make_rows)(first, end);
            let mut words = Vec::new();
            (0..end - first).for_each(|row| features.append_words(row, &mut words));
            self.largest_block = self.largest_block.max(words.len());
            let texts = (first..end).map(|row| if row % 7 < 3 { "a" } else { ["b", "c"][row / 200 % 2] });
            let target = Column::Text(texts.collect::<Texts>());
            let samples = UninterpretedSamples { features, target };
            Ok(SampleBlock { samples, origins: RowOrigins::Numbers("rows".into(), first) })
        }
    }

    /// The rows of each format are larger than a block of 2^18 words. The last images have colours.
    #[test]
    fn a_reader_that_streams_holds_only_one_block_of_features() {
        let make_sparse = |first: usize, end: usize| {
            let mut rows = SparseRowsBuilder::default();
            for row in first..end {
                (0..1000 * (row % 3)).for_each(|column| rows.push((row + column) as u32, 1.0));
                rows.end_row();
            }
            Features::Sparse(rows.build(end + 2000))
        };
        let make_images = |first: usize, end: usize| {
            let columns = if end > 290 { 3 * 4000 } else { 4000 };
            let values = Array2::from_shape_fn((end - first, columns), |(row, column)| {
                ((first + row) * 31 + column % 4000) as u8
            });
            Features::Pixels { values, divisor: 255.0 }
        };
        let make_numbers = |first: usize, end| {
            Features::Numbers(Array2::from_shape_fn((end - first, 1001), |(row, column)| {
                ((first + row) * column) as f32
            }))
        };
        let directory = tempfile::tempdir().unwrap();
        // The first image with colours is found when its block is read, and has three times as many values.
        for (name, make_rows, words_max) in [
            ("sparse", make_sparse as fn(usize, usize) -> Features, 1 << 18),
            ("images", make_images, 3 << 18),
            ("numbers", make_numbers, 1 << 18),
        ] {
            let read = |stream_directory: Option<&Path>| {
                let mut reader = RecordingReader { make_rows, rows: (0, 400), largest_block: 0 };
                let samples = read_samples(&mut reader, stream_directory).unwrap();
                (samples.features, samples.target, reader.largest_block)
            };
            let (memory, targets, all_words) = read(None);
            let (disk, disk_targets, largest_block) = read(Some(directory.path()));
            assert!(
                all_words > words_max && largest_block <= words_max,
                "{name}: {all_words} {largest_block}"
            );
            assert!(matches!(&disk, HeldFeatures::OnDisk(held) if held.format().rows() == 0), "{name}");
            assert_eq!(disk.value_counts(), memory.value_counts(), "{name}");
            let all: Vec<usize> = (0..400).collect();
            assert!(disk.into_memory() == memory.into_memory(), "{name}");
            let texts = |column: &Column| match column {
                Column::Text(texts) => {
                    all.iter().map(|&row| texts.distinct[texts.indices[row] as usize].to_string()).collect()
                }
                Column::Numbers(_) => Vec::new(),
            };
            assert_eq!(texts(&disk_targets), texts(&targets), "{name}");
        }
    }
}
