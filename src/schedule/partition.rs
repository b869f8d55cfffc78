//! Elements -> a chunk per rank -> segments.

use std::ops::Range;

use crate::types::{Rank, WorldSize};

/// The elements of `count` that belong to `rank`: contiguous, in rank order, sizes differing by at most one, the first
/// `count % world` chunks being the longer ones.
pub fn chunk(count: usize, world: WorldSize, rank: Rank) -> Range<usize> {
    let (base, longer) = (count / world.as_usize(), count % world.as_usize());
    let index = rank.index();
    let start = index * base + index.min(longer);
    start..start + base + usize::from(index < longer)
}

/// The segment of `range` that starts `sent` elements into it: at most `segment` elements, empty for an empty range.
pub fn segment(range: &Range<usize>, sent: usize, segment: usize) -> Range<usize> {
    let start = range.start + sent;
    start..range.end.min(start + segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_element_once() {
        for ranks in 1..=17 {
            let world = WorldSize::new(ranks).unwrap();
            for count in 0..60 {
                let mut next = 0;
                for rank in world.ranks() {
                    let chunk = chunk(count, world, rank);
                    assert_eq!(chunk.start, next);
                    assert!(
                        chunk.len() == count / ranks as usize || chunk.len() == count / ranks as usize + 1
                    );
                    next = chunk.end;
                }
                assert_eq!(next, count);
            }
        }
    }

    #[test]
    fn segments_cover_a_range_once() {
        let range = 10..31;
        let mut sent = 0;
        let mut seen = Vec::new();
        while sent < range.len() {
            let segment = segment(&range, sent, 8);
            seen.push(segment.clone());
            sent += segment.len();
        }
        assert_eq!(seen, [10..18, 18..26, 26..31]);
        assert_eq!(segment(&(4..4), 0, 8), 4..4);
    }
}
