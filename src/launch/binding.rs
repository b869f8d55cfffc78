//! Which processors each rank may use: an even share for each, of processors that no other job has, if there are enough.
//!
//! Two ranks on one processor make a small message 40 times slower, so ranks are bound by default. The plan is a pure function of
//! the cores and of the number of jobs on each; [`claims`](super::claims) knows that number.

use super::Binding;
use super::topology::{Core, Processor};
use crate::types::WorldSize;

/// The processors of a job's ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BindingPlan {
    /// The processors of each rank, in ascending order; empty if ranks are not bound.
    pub(super) processors: Vec<Vec<Processor>>,
    /// The cores that the job claims, as indices, each with the number of jobs that had it before.
    pub(super) claimed: Vec<usize>,
    /// The number of threads that fit the share of a rank: one for each core.
    pub(super) threads: usize,
    /// How many processors the job has to itself; its ranks poll for messages only if this is at least their number.
    pub(super) exclusive_processors: usize,
}

impl BindingPlan {
    /// Divides the cores among the ranks. `jobs` is the number of other jobs on each core, `usable` how many processors the
    /// process may keep busy, which a container may limit below the number of its processors.
    pub(super) fn new(
        binding: Binding,
        world: WorldSize,
        cores: &[Core],
        jobs: &[usize],
        usable: usize,
    ) -> Self {
        let ranks = world.as_usize();
        let total: usize = cores.iter().map(|core| core.processors.len()).sum();
        let chosen = least_used(ranks, jobs);
        let per_rank = (chosen.len() / ranks).max(1);
        let threads = per_rank.min((usable / ranks).max(1));
        if binding == Binding::None || cores.is_empty() {
            let exclusive_processors = if total > 0 { total.min(usable) } else { usable };
            return Self { processors: Vec::new(), claimed: Vec::new(), threads, exclusive_processors };
        }
        let shares: Vec<Vec<usize>> = if chosen.len() >= ranks {
            chosen.chunks_exact(per_rank).take(ranks).map(<[usize]>::to_vec).collect()
        } else {
            (0..ranks).map(|rank| vec![chosen[rank * chosen.len() / ranks]]).collect()
        };
        let mut processors: Vec<Vec<Processor>> = shares
            .iter()
            .map(|share| share.iter().flat_map(|&core| cores[core].processors.clone()).collect())
            .collect();
        if chosen.len() < ranks {
            split_cores(&mut processors);
        }
        if binding == Binding::Numa {
            for (own, share) in processors.iter_mut().zip(&shares) {
                let is_near =
                    |core: &&Core| share.iter().any(|&index| cores[index].numa_node == core.numa_node);
                *own = cores.iter().filter(is_near).flat_map(|core| core.processors.clone()).collect();
            }
        }
        for own in &mut processors {
            own.sort_unstable();
        }
        let mut claimed = shares.concat();
        claimed.dedup();
        let free = claimed.iter().filter(|&&core| jobs[core] == 0);
        let exclusive: usize = free.map(|&core| cores[core].processors.len()).sum();
        Self { processors, claimed, threads, exclusive_processors: exclusive.min(usable) }
    }
}

/// The cores with the fewest jobs, in their order: all that are used equally little, if these are enough for one each, otherwise
/// as many as there are ranks.
fn least_used(ranks: usize, jobs: &[usize]) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::new();
    let most = jobs.iter().copied().max().unwrap_or_default();
    for level in 0..=most {
        let cores: Vec<usize> = (0..jobs.len()).filter(|&core| jobs[core] == level).collect();
        if chosen.is_empty() {
            chosen = cores;
        } else {
            chosen.extend(cores.into_iter().take(ranks - chosen.len()));
        }
        if chosen.len() >= ranks {
            break;
        }
    }
    chosen.sort_unstable();
    chosen
}

/// Ranks outnumber cores: those that share a core divide its hardware threads among them.
fn split_cores(processors: &mut [Vec<Processor>]) {
    for sharing in processors.chunk_by_mut(|a, b| a == b) {
        let (count, all) = (sharing.len(), sharing[0].clone());
        for (index, own) in sharing.iter_mut().enumerate() {
            *own = if count <= all.len() {
                all[index * all.len() / count..(index + 1) * all.len() / count].to_vec()
            } else {
                vec![all[index * all.len() / count]]
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::topology::list;

    /// Cores with so many hardware threads each, the second ones numbered after all the first, half of the cores on each of two
    /// NUMA nodes.
    fn machine(cores: usize, threads: usize) -> Vec<Core> {
        let core = |index: usize| Core {
            numa_node: index * 2 / cores.max(2),
            processors: (0..threads).map(|thread| thread * cores + index).collect(),
        };
        (0..cores).map(core).collect()
    }

    fn plan(binding: Binding, ranks: u32, cores: &[Core], jobs: &[usize]) -> BindingPlan {
        BindingPlan::new(binding, WorldSize::new(ranks).unwrap(), cores, jobs, usize::MAX)
    }

    fn lists(plan: &BindingPlan) -> String {
        plan.processors.iter().map(|own| list(own)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_rank_gets_an_even_share() {
        for (ranks, cores, threads, expected, omp) in [
            (1, 1, 1, "0", 1),
            (2, 2, 1, "0 1", 1),
            (1, 2, 1, "0-1", 2),
            (2, 8, 1, "0-3 4-7", 4),
            (3, 8, 1, "0-1 2-3 4-5", 2),
            // Ranks outnumber processors.
            (4, 2, 1, "0 0 1 1", 1),
            (3, 1, 1, "0 0 0", 1),
            (5, 2, 1, "0 0 0 1 1", 1),
            // Cores count before hardware threads.
            (2, 2, 2, "0,2 1,3", 1),
            (4, 2, 2, "0 2 1 3", 1),
            (3, 2, 2, "0 2 1,3", 1),
            (8, 2, 2, "0 0 2 2 1 1 3 3", 1),
        ] {
            let plan = plan(Binding::Core, ranks, &machine(cores, threads), &vec![0; cores]);
            assert_eq!(
                (lists(&plan).as_str(), plan.threads),
                (expected, omp),
                "{ranks} on {cores} x {threads}"
            );
        }
    }

    #[test]
    fn ranks_take_processors_that_no_other_job_has() {
        for (ranks, jobs, expected, exclusive) in [
            (2, [1, 1, 0, 0], "2 3", 2),
            (1, [1, 1, 0, 0], "2-3", 2),
            (2, [1, 0, 0, 0], "1 2", 2),
            // One is free for two ranks: it is used before any other is shared.
            (2, [1, 1, 1, 0], "0 3", 1),
            (3, [2, 1, 1, 0], "1 2 3", 1),
            // None is free: they are shared evenly.
            (2, [1, 1, 1, 1], "0-1 2-3", 0),
            (4, [1, 1, 1, 1], "0 1 2 3", 0),
            (2, [2, 2, 1, 1], "2 3", 0),
            (8, [1, 1, 0, 0], "0 0 1 1 2 2 3 3", 2),
        ] {
            let plan = plan(Binding::Core, ranks, &machine(4, 1), &jobs);
            assert_eq!(
                (lists(&plan).as_str(), plan.exclusive_processors),
                (expected, exclusive),
                "{ranks} {jobs:?}"
            );
        }
    }

    #[test]
    fn numa_nodes_and_none() {
        let cores = machine(4, 1);
        assert_eq!(lists(&plan(Binding::Numa, 2, &cores, &[0; 4])), "0-1 2-3");
        assert_eq!(lists(&plan(Binding::Numa, 4, &cores, &[0; 4])), "0-1 0-1 2-3 2-3");
        assert_eq!(plan(Binding::Numa, 4, &cores, &[0; 4]).threads, 1);
        let unbound = plan(Binding::None, 2, &cores, &[0; 4]);
        assert_eq!((lists(&unbound).as_str(), unbound.threads, unbound.exclusive_processors), ("", 2, 4));
        assert!(unbound.claimed.is_empty());
    }

    #[test]
    fn a_limit_on_processor_time_limits_the_threads() {
        let plan = BindingPlan::new(Binding::Core, WorldSize::new(2).unwrap(), &machine(8, 1), &[0; 8], 2);
        assert_eq!((plan.threads, plan.exclusive_processors), (1, 2));
    }
}
