//! A set of ranks, as their indices.

/// A set of ranks that share memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankSet(u64);

impl RankSet {
    /// The highest number of ranks.
    pub const RANKS_MAX: u32 = u64::BITS;

    /// Returns the ranks from 0 to `count` - 1 without `excluded`.
    pub fn first_without(count: u32, excluded: usize) -> Self {
        (0..count as usize).filter(|&index| index != excluded).collect()
    }

    /// Returns the indices of the ranks, in ascending order.
    pub fn indices(self) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(self.0), |left| Some(left & left.wrapping_sub(1)))
            .take_while(|&left| left != 0)
            .map(|left| left.trailing_zeros() as usize)
    }

    /// Returns the number of ranks.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }
}

impl FromIterator<usize> for RankSet {
    fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> Self {
        Self(indices.into_iter().fold(0, |set, index| set | 1 << index))
    }
}
