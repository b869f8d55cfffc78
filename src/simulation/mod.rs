//! Simulations of jobs in one thread, only for tests. Their networks, shared memory and clocks are simulated, and a seed
//! determines everything that happens. `docs/simulation.md` says what the simulations show.

pub(crate) mod bundles;
mod dials;
mod handshakes;
mod hosts;
mod job;
mod jobs;
mod many_seeds;
pub(crate) mod memory;
pub(crate) mod network;
pub(crate) mod program;
mod queues;
mod rank;
mod registrations;
mod rounds;
mod scenario;
mod sockets;
mod symbolic;
mod threads;

use std::ops::Range;

/// Each test divides its number of networks by this divisor. Miri takes seconds for each network, but a few networks
/// are enough to find undefined behaviour.
fn network_count_divisor() -> u64 {
    if cfg!(miri) {
        1000
    } else if std::env::var_os("TEST_FULL").is_some() {
        1
    } else {
        50
    }
}

/// Returns the seed in the variable `SIM_SEED`. If `SIM_SEED` is set, the tests simulate only this seed.
fn seed_of_environment() -> Option<u64> {
    std::env::var("SIM_SEED").ok().map(|seed| seed.parse().expect("SIM_SEED must be a number"))
}

/// Returns the seeds to simulate: only `SIM_SEED` if it is set, or else `count / network_count_divisor()` seeds.
pub(crate) fn seeds(count: u64) -> Range<u64> {
    seed_of_environment().map_or(0..count.div_ceil(network_count_divisor()), |seed| seed..seed + 1)
}

/// Returns whether a test simulates so many networks that some programs certainly complete and some certainly fail.
fn has_many_seeds() -> bool {
    !cfg!(miri) && seed_of_environment().is_none()
}
