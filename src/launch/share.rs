//! Which ranks of a job run on one host.

use serde::{Deserialize, Serialize};

use crate::types::{Rank, WorldSize};

/// The ranks of one host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankShare {
    /// The ranks of the host, in ascending order.
    pub ranks: Vec<u32>,
    /// The number of the host among the hosts of the job, from 0.
    pub host: u32,
    /// The number of hosts of the job.
    pub hosts: u32,
}

impl RankShare {
    /// Returns the share of the only host of a job.
    pub fn whole(world: WorldSize) -> Self {
        Self { ranks: (0..world.get()).collect(), host: 0, hosts: 1 }
    }

    /// Returns the share of a host that has no ranks of a job on `hosts` other hosts. Its number is no number of these hosts.
    pub fn empty(hosts: u32) -> Self {
        Self { ranks: Vec::new(), host: hosts, hosts }
    }

    /// Returns the number of ranks of the host.
    pub fn count(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Returns whether the ranks are in ascending order and belong to a job of this size.
    pub fn is_valid(&self, world: WorldSize) -> bool {
        self.ranks.is_sorted_by(|low, high| low < high)
            && self.ranks.last().is_none_or(|&last| last < world.get())
    }

    /// Returns the ranks of the host.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + Clone {
        self.ranks.iter().copied().map(Rank::new)
    }

    /// Returns whether the rank runs on the host.
    pub fn contains(&self, rank: Rank) -> bool {
        self.ranks.binary_search(&rank.get()).is_ok()
    }

    /// Returns the number of a rank among the ranks of its host, from 0. The rank must run on the host.
    pub fn local_rank(&self, rank: Rank) -> u32 {
        self.ranks.partition_point(|&own| own < rank.get()) as u32
    }
}
