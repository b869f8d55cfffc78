//! Ranks, and the number of ranks of a job.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The largest number of ranks in a job. The library rejects larger numbers before it allocates memory for them.
pub const WORLD_SIZE_MAX: u32 = 65_536;

/// The number of a process in the job, from 0 to the world size minus one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(u32);

impl Rank {
    /// Rank 0. By convention, rank 0 prints results and broadcasts the initial parameters.
    pub const ZERO: Self = Self(0);

    /// Returns the rank with this number. Does not check whether the number is below a world size.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Returns the number of the rank.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the number of the rank as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// The number of ranks of the job: at least 1, at most [`WORLD_SIZE_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorldSize(u32);

impl WorldSize {
    /// The size of a world with a single rank.
    pub const ONE: Self = Self(1);

    /// Returns the size of a world of `ranks` ranks, or `None` if `ranks` is 0 or more than [`WORLD_SIZE_MAX`].
    pub const fn new(ranks: u32) -> Option<Self> {
        if ranks == 0 || ranks > WORLD_SIZE_MAX { None } else { Some(Self(ranks)) }
    }

    /// Returns the number of ranks.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the number of ranks as a `usize`.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// Returns an iterator over all ranks of this world, in ascending order.
    pub fn ranks(self) -> impl Iterator<Item = Rank> + Clone {
        (0..self.0).map(Rank)
    }

    /// Returns whether `rank` belongs to this world.
    pub const fn contains(self, rank: Rank) -> bool {
        rank.0 < self.0
    }

    /// Returns rank `rank + steps`, modulo the world size.
    pub const fn rank_after(self, rank: Rank, steps: u32) -> Rank {
        Rank(((rank.0 as u64 + steps as u64) % self.0 as u64) as u32)
    }

    /// Returns rank `rank - steps`, modulo the world size.
    pub const fn rank_before(self, rank: Rank, steps: u32) -> Rank {
        self.rank_after(rank, self.0 - steps % self.0)
    }
}

/// Returns the index of the part for the rank `to` among the parts of the rank `from`, which has a part for each other rank.
pub fn part_index(from: usize, to: usize) -> usize {
    to - usize::from(to > from)
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
