//! Which ranks of a job run on one host.

use serde::{Deserialize, Serialize};

use crate::types::{Rank, WorldSize};

/// The ranks of one host. The ranks of a host are consecutive: the first host has the ranks from 0, and so on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankShare {
    /// The lowest rank of the host.
    pub first: u32,
    /// The number of ranks of the host.
    pub count: u32,
    /// The number of the host among the hosts of the job, from 0.
    pub host: u32,
    /// The number of hosts of the job.
    pub hosts: u32,
}

impl RankShare {
    /// Returns the share of the only host of a job.
    pub fn whole(world: WorldSize) -> Self {
        Self { first: 0, count: world.get(), host: 0, hosts: 1 }
    }

    /// Returns the share of a host that has no ranks of a job on `hosts` other hosts. Its number is no number of these hosts.
    pub fn empty(hosts: u32) -> Self {
        Self { first: 0, count: 0, host: hosts, hosts }
    }

    /// Returns the ranks of the host.
    pub fn ranks(self) -> impl Iterator<Item = Rank> + Clone {
        (self.first..self.first + self.count).map(Rank::new)
    }

    /// Returns whether the rank runs on the host.
    pub fn contains(self, rank: Rank) -> bool {
        rank.get().checked_sub(self.first).is_some_and(|local| local < self.count)
    }

    /// Returns the number of a rank among the ranks of its host, from 0. The rank must run on the host.
    pub fn local_rank(self, rank: Rank) -> u32 {
        rank.get() - self.first
    }
}
