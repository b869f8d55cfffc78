//! A simulated job: its ranks, their program and the network. The seed determines everything.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::engine::{DISCONNECT_TIMEOUT, NOTIFY_TIMEOUT, Settings};
use ringtrain::group::link_driver::LinkDriver;
use ringtrain::transport::sim::{Fault, SimConfig, SimNetwork, SimTransport};
use ringtrain::{Rank, WorldSize};

use crate::program::{Call, Members};
use crate::rank::{OPERATION_TIMEOUT, SimEnd, SimState, SimulatedRank};

/// The parameters of a simulation. The seed of the simulation determines all parameters.
pub(crate) struct Scenario {
    pub(crate) world: WorldSize,
    pub(crate) groups: Vec<Members>,
    pub(crate) program: Vec<Call>,
    pub(crate) running_max: usize,
    pub(crate) config: SimConfig,
    pub(crate) segment_bytes: usize,
    /// For each pair of ranks, whether the payloads on their link carry checksums.
    pub(crate) checked_links: Vec<Vec<bool>>,
    pub(crate) compute_max: Duration,
}

impl Scenario {
    pub(crate) fn random(seed: u64, with_faults: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let world = WorldSize::new(random.random_range(2..=6)).unwrap();
        let groups = random_groups(&mut random, world);
        let mut program: Vec<Call> =
            (0..random.random_range(1..8)).map(|_| Call::random(&mut random, &groups)).collect();
        program.push(Call::BARRIER);
        let mut faults = Vec::new();
        if with_faults {
            for _ in 0..random.random_range(1..=2) {
                faults.push(random_fault(&mut random, world));
            }
        }
        let config = SimConfig {
            seed: random.random_range(0..u64::MAX),
            latency: Duration::from_micros(random.random_range(1..200)),
            jitter: Duration::from_micros(random.random_range(0..500)),
            bandwidth: random.random_range(1_000_000..100_000_000),
            window_bytes: random.random_range(64..4096),
            piece_bytes_max: random.random_range(1..600),
            faults,
        };
        let segment_bytes = 8 * random.random_range(1..40);
        let compute_max = Duration::from_micros(random.random_range(0..300));
        let running_max = random.random_range(1..5);
        let checked_links = random_checked_links(&mut random, world);
        Self { world, groups, program, running_max, config, segment_bytes, checked_links, compute_max }
    }

    /// Runs the job. Returns how each rank has ended.
    pub(crate) fn run(&self, seed: u64) -> Vec<SimEnd> {
        let network = SimNetwork::new(self.config.clone());
        let mut random = StdRng::seed_from_u64(seed ^ 0x5eed);
        let mut ranks: Vec<_> = self.world.ranks().map(|rank| self.new_rank(rank, &network)).collect();
        // Each call has a time limit, and so has the whole simulation.
        let limit =
            (OPERATION_TIMEOUT + NOTIFY_TIMEOUT + DISCONNECT_TIMEOUT) * (self.program.len() as u32 + 2);
        loop {
            let now = network.borrow().now();
            assert!(now < limit, "seed {seed}: the program has not ended after {now:?} of virtual time");
            let moved_before = network.borrow().bytes_moved();
            for rank in &mut ranks {
                let (killed, stalled) =
                    (network.borrow().is_killed(rank.rank), network.borrow().is_stalled(rank.rank));
                if killed && !matches!(rank.state, SimState::Ended(_)) {
                    rank.state = SimState::Ended(SimEnd::Killed);
                }
                if !stalled {
                    rank.step(now, &mut random, self.compute_max);
                }
            }
            let is_over = |rank: &SimulatedRank| {
                matches!(rank.state, SimState::Ended(_)) || network.borrow().is_stalled(rank.rank)
            };
            if ranks.iter().all(is_over) {
                break;
            }
            if network.borrow().bytes_moved() != moved_before {
                // Continue at the same virtual time: a rank that reads bytes makes room for further bytes.
                continue;
            }
            let awake = ranks.iter().filter(|rank| !network.borrow().is_stalled(rank.rank));
            let next = awake.filter_map(|rank| rank.next_event(now)).min();
            let next = next.into_iter().chain(network.borrow().next_event()).min();
            let next = next.unwrap_or_else(|| panic!("seed {seed}: a rank waits, but no event can wake it"));
            network.borrow_mut().advance(next);
        }
        ranks
            .into_iter()
            .map(|rank| match rank.state {
                SimState::Ended(outcome) => outcome,
                // A rank that a fault has stopped does not end. Count it as killed.
                _ => SimEnd::Killed,
            })
            .collect()
    }

    /// Returns whether the network flips a bit on a link without checksums.
    fn may_change_results(&self) -> bool {
        self.config.faults.iter().any(|fault| {
            matches!(fault, Fault::Corrupt { from, to, .. } if !self.checked_links[from.index()][to.index()])
        })
    }

    fn new_rank(&self, rank: Rank, network: &Rc<RefCell<SimNetwork>>) -> SimulatedRank {
        let settings = Settings {
            rank,
            world: self.world,
            segment_bytes: self.segment_bytes,
            checked_links: self.checked_links[rank.index()].clone(),
            host_names: self.world.ranks().map(|rank| format!("host{rank}")).collect(),
        };
        let mut link_driver = LinkDriver::new(settings, SimTransport::new(Rc::clone(network), rank));
        // Open the links to both neighbours on the ring before the program begins.
        for neighbour in [self.world.rank_after(rank, 1), self.world.rank_before(rank, 1)] {
            network.borrow_mut().open_link(rank, neighbour);
            link_driver.connect(Duration::ZERO, neighbour);
        }
        SimulatedRank {
            rank,
            link_driver,
            program: self.program.clone(),
            groups: self.groups.clone(),
            next_call: 0,
            running: BTreeMap::new(),
            running_max: self.running_max,
            busy_until: Duration::ZERO,
            checks_results: !self.may_change_results(),
            state: SimState::Running,
        }
    }
}

/// Returns groups of all ranks, of the lower ranks, of the higher ranks, and of all ranks in reverse order.
fn random_groups(random: &mut StdRng, world: WorldSize) -> Vec<Members> {
    let all: Members = world.ranks().collect();
    let (low, high) = all.split_at(random.random_range(0..=all.len()));
    let mut groups = vec![all.clone(), low.to_vec(), high.to_vec(), all.iter().rev().copied().collect()];
    groups.retain(|members| !members.is_empty());
    groups
}

/// Returns which links carry checksums: none, about half of them, or all. Both ends of a link have the same setting.
fn random_checked_links(random: &mut StdRng, world: WorldSize) -> Vec<Vec<bool>> {
    let share = [0.0, 0.5, 1.0][random.random_range(0..3)];
    let count = world.as_usize();
    let mut checked_links = vec![vec![false; count]; count];
    for (low, high) in (0..count).flat_map(|high| (0..high).map(move |low| (low, high))) {
        let is_checked = random.random_bool(share);
        checked_links[low][high] = is_checked;
        checked_links[high][low] = is_checked;
    }
    checked_links
}

fn random_fault(random: &mut StdRng, world: WorldSize) -> Fault {
    let at = Duration::from_micros(random.random_range(0..8000));
    let a = Rank::new(random.random_range(0..world.get()));
    let b = world.rank_after(a, 1);
    let (from, to) = if random.random_bool(0.5) { (a, b) } else { (b, a) };
    match random.random_range(0..4) {
        0 => Fault::Kill { rank: a, at },
        1 => Fault::Cut { a, b, at },
        2 => Fault::Corrupt { from, to, at },
        _ => Fault::Stall { rank: a, at },
    }
}
