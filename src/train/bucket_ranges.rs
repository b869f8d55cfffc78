//! The buckets in which ranks reduce gradients, as ranges of the vector of gradients.

use std::ops::{Range, RangeInclusive};

use super::batches::range_of_rank;
use crate::types::{Rank, WorldSize};

/// The largest default size of a bucket in bytes: see `docs/results/training-and-python.md`.
pub const BUCKET_BYTES_MAX: usize = 1 << 20;
/// By default, a model of more bytes has at least 4 buckets, so that the ranks send gradients during the backward pass.
const SINGLE_BUCKET_BYTES_MAX: usize = 1 << 18;
/// The smallest and the largest bucket that `--bucket-bytes auto` tries, in bytes. Smaller buckets cost more than they hide, and
/// larger ones leave late.
const TRIED_BYTES: RangeInclusive<usize> = 1 << 16..=1 << 24;
/// The first bucket of several is this number of times smaller than the others, so that it leaves early.
const FIRST_BUCKET_DIVISOR: usize = 4;

/// `--bucket-bytes auto` divides a model into at most this number of parts. Ranks in shared memory need a buffer for each
/// bucket, and a group has at most 1,024 buffers: see [`Group::alloc`](crate::Group::alloc).
const TRIED_PARTS_MAX: usize = 256;
/// `--bucket-bytes auto` does not compare two sizes whose ratio is at most this number.
const SIMILAR_SIZES: f64 = 1.25;

/// The numbers of elements of the buckets of a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BucketSizes {
    /// The number of elements of the first bucket.
    pub(crate) first: usize,
    /// The number of elements of each other bucket. The last one may be shorter.
    pub(crate) others: usize,
}

impl BucketSizes {
    /// Returns sizes of `bytes` bytes for a model of `parameter_count` parameters. `None` chooses sizes.
    pub(crate) fn new(bytes: Option<usize>, parameter_count: usize) -> Self {
        let model_bytes = size_of::<f32>().saturating_mul(parameter_count);
        let elements = |bytes: usize| (bytes / size_of::<f32>()).max(1);
        match bytes {
            Some(bytes) => Self { first: elements(bytes), others: elements(bytes) },
            None if model_bytes <= SINGLE_BUCKET_BYTES_MAX => Self::whole(parameter_count),
            None => Self::with_small_first(model_bytes.div_ceil(4).min(BUCKET_BYTES_MAX)),
        }
    }

    /// Returns the sizes that `--bucket-bytes auto` tries: first the default, and then those of the model in 1, 2, 4, 8, ...
    /// parts whose buckets have [`TRIED_BYTES`]. Sizes that are nearly equal to the default are left out.
    pub(crate) fn candidates(parameter_count: usize) -> Vec<Self> {
        let default = Self::new(None, parameter_count);
        let model_bytes = size_of::<f32>().saturating_mul(parameter_count);
        let parts = std::iter::successors(Some(1), |parts| Some(2 * parts))
            .take_while(|parts| *parts <= TRIED_PARTS_MAX);
        let bytes = parts.map(|parts| model_bytes.div_ceil(parts));
        let sizes = bytes
            .take_while(|bytes| TRIED_BYTES.start() <= bytes)
            .filter(|bytes| TRIED_BYTES.contains(bytes));
        let sizes = sizes.map(|bytes| match bytes {
            bytes if bytes == model_bytes => Self::whole(parameter_count),
            bytes => Self::with_small_first(bytes),
        });
        let differ = |sizes: &Self| {
            let (smaller, larger) = (sizes.others.min(default.others), sizes.others.max(default.others));
            larger as f64 > SIMILAR_SIZES * smaller as f64
        };
        std::iter::once(default).chain(sizes.filter(differ)).collect()
    }

    /// Returns buckets of `bytes` bytes, and a smaller first bucket.
    fn with_small_first(bytes: usize) -> Self {
        let others = (bytes / size_of::<f32>()).max(1);
        Self { first: (others / FIRST_BUCKET_DIVISOR).max(1), others }
    }

    /// Returns the size of a bucket in bytes.
    pub(crate) fn bytes(self) -> usize {
        self.others.saturating_mul(size_of::<f32>())
    }

    /// Returns the size of a single bucket.
    pub(crate) fn whole(parameter_count: usize) -> Self {
        Self { first: parameter_count.max(1), others: parameter_count.max(1) }
    }

    /// Rounds the sizes up to multiples of `count`.
    pub(crate) fn round_up_to_multiples(self, count: usize) -> Self {
        let round = |elements: usize| elements.checked_next_multiple_of(count).unwrap_or(usize::MAX);
        Self { first: round(self.first), others: round(self.others) }
    }

    /// Divides `count` parameters into buckets, and returns the ranges of the buckets. Starts with the last parameters, whose
    /// gradients the backward pass computes first.
    pub(crate) fn ranges(self, count: usize) -> impl Iterator<Item = Range<usize>> {
        let before = |end: usize, elements: usize| (end > 0).then(|| end.saturating_sub(elements)..end);
        std::iter::successors(before(count, self.first), move |bucket| before(bucket.start, self.others))
    }
}

/// Returns the part of a bucket that belongs to `rank` in a reduce-scatter and an all-gather: see
/// [`Group::chunk`](crate::Group::chunk).
pub(crate) fn chunk_of_bucket(bucket: &Range<usize>, (rank, size): (Rank, WorldSize)) -> Range<usize> {
    let chunk = range_of_rank(bucket.len(), rank, size);
    bucket.start + chunk.start..bucket.start + chunk.end
}

/// Returns the intersection of two ranges. If the intersection is empty, returns an empty range within `second`.
pub(crate) fn overlap(first: &Range<usize>, second: &Range<usize>) -> Range<usize> {
    let start = first.start.clamp(second.start, second.end);
    start..first.end.clamp(start, second.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_models_have_several_buckets_of_which_the_first_is_small() {
        for (parameters, first_bytes, bytes, count) in [
            (0, 4, 4, 0),
            (10, 40, 40, 1),
            (1 << 16, 1 << 18, 1 << 18, 1),
            // `mlp:256,128` with 784 inputs and 10 outputs: 0.9 MB.
            (235_146, 58_784, 235_144, 5),
            (25 << 18, 1 << 18, 1 << 20, 26),
        ] {
            let sizes = BucketSizes::new(None, parameters);
            let ranges: Vec<Range<usize>> = sizes.ranges(parameters).collect();
            let found = (sizes.first * 4, sizes.others * 4, ranges.len());
            assert_eq!(found, (first_bytes, bytes, count), "{parameters}");
            assert_eq!(ranges.iter().map(Range::len).sum::<usize>(), parameters);
        }
    }

    #[test]
    fn auto_tries_few_sizes_for_large_models_too() {
        for (parameters, expected) in [(25_000_000, 7), (250_000_000, 4), (10_000_000_000, 1)] {
            let sizes = BucketSizes::candidates(parameters);
            let counts: Vec<usize> = sizes.iter().map(|sizes| sizes.ranges(parameters).count()).collect();
            assert_eq!(counts.len(), expected, "{parameters}: {counts:?}");
            assert!(
                counts[1..].iter().all(|count| *count <= TRIED_PARTS_MAX + 1),
                "{parameters}: {counts:?}"
            );
        }
    }

    #[test]
    fn auto_tries_the_default_and_buckets_from_coarse_to_fine() {
        for (parameters, expected) in [
            (10, &[(1, 40)][..]),
            (1 << 15, &[(1, 1 << 17), (3, 1 << 16)]),
            (235_146, &[(5, 235_144), (1, 940_584), (3, 470_292), (9, 117_572)]),
            (
                25 << 18,
                &[
                    (26, 1 << 20),
                    (3, 13_107_200),
                    (5, 6_553_600),
                    (9, 3_276_800),
                    (17, 1_638_400),
                    (33, 819_200),
                ],
            ),
        ] {
            let sizes = BucketSizes::candidates(parameters);
            let found: Vec<(usize, usize)> =
                sizes.iter().map(|sizes| (sizes.ranges(parameters).count(), sizes.bytes())).collect();
            assert_eq!(found[..found.len().min(6)], *expected, "{parameters}: {found:?}");
            assert!(
                sizes[1..].iter().all(|sizes| TRIED_BYTES.contains(&sizes.bytes())),
                "{parameters}: {found:?}"
            );
        }
    }
}
