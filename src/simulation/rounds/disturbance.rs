//! What goes wrong in a run of the ranks of a host.

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::simulation::memory::{AccessSite, Mutation};

/// What goes wrong in a run.
#[derive(Clone, Copy, Default, Debug)]
pub struct Disturbance {
    /// The line of the source that is changed.
    pub mutation: Option<(AccessSite, Mutation)>,
    /// The rank that is killed, and the number of its accesses before that.
    pub kill: Option<(usize, u64)>,
    /// The rank whose operation fails, for example because of a deadline, and the number of the rank's accesses before that.
    pub failure: Option<(usize, u64)>,
    /// The rank that calls another operation.
    pub odd_rank: Option<usize>,
}

/// Returns a rank that is killed before a random access.
pub fn with_killed_rank(random: &mut StdRng) -> Disturbance {
    let kill = (random.random_range(0..2), random.random_range(0..300));
    Disturbance { kill: Some(kill), ..Disturbance::default() }
}

/// Returns a rank whose operation fails, and perhaps a rank that is killed.
pub fn with_failed_rank(random: &mut StdRng) -> Disturbance {
    let failing = random.random_range(0..2);
    let [failure, kill] = [0, 0].map(|_: u8| random.random_range(0..300));
    let kill = random.random_bool(0.3).then_some((1 - failing, kill));
    Disturbance { failure: Some((failing, failure)), kill, ..Disturbance::default() }
}

/// Returns a rank that calls another operation.
pub fn with_odd_rank(random: &mut StdRng) -> Disturbance {
    Disturbance { odd_rank: Some(random.random_range(0..2)), ..Disturbance::default() }
}
