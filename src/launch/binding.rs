//! Assigns processors to ranks. Each rank gets an even share of the processors. If other jobs have left enough
//! processors unclaimed, the ranks use only unclaimed processors.
//!
//! By default, ringrun binds each rank to its share, so that ranks do not run on the same processor: between two ranks
//! on one processor, a small message takes 40 times as long as between ranks on two processors. The module
//! [`claims`](super::claims) counts the other jobs on each core.

use super::plan::Binding;
use super::topology::{PhysicalCore, Processor};
use crate::types::WorldSize;

/// The processors of a job's ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct BindingPlan {
    /// The processors of each rank, in ascending order. The list of ranks is empty if ranks are not bound.
    pub(super) processors: Vec<Vec<Processor>>,
    /// The indices of the cores that the job claims.
    pub(super) claimed_cores: Vec<usize>,
    /// The number of OpenMP threads of each rank: one thread for each core of the rank's share, or fewer if the CPU
    /// limit of a container is lower.
    pub(super) omp_threads: usize,
    /// The number of the job's processors that no other job has claimed, or of all processors if ranks are not bound.
    /// Ranks poll for messages only if this number is at least the number of ranks.
    pub(super) exclusive_processors: usize,
}

impl BindingPlan {
    /// Divides the cores among the ranks. `jobs_per_core` holds the number of other jobs on each core. `usable_processors` is
    /// the number of processors that this process may keep busy. With the CPU limit of a container, `usable_processors`
    /// can be lower than the number of processors.
    pub(super) fn new(
        binding: Binding,
        world: WorldSize,
        cores: &[PhysicalCore],
        jobs_per_core: &[usize],
        usable_processors: usize,
    ) -> Self {
        let ranks = world.as_usize();
        let processor_count: usize = cores.iter().map(|core| core.processors.len()).sum();
        let chosen = least_used_cores(ranks, jobs_per_core);
        let cores_per_rank = (chosen.len() / ranks).max(1);
        let omp_threads = cores_per_rank.min((usable_processors / ranks).max(1));
        if binding == Binding::None || cores.is_empty() {
            let exclusive_processors =
                if processor_count > 0 { processor_count.min(usable_processors) } else { usable_processors };
            return Self {
                processors: Vec::new(),
                claimed_cores: Vec::new(),
                omp_threads,
                exclusive_processors,
            };
        }
        let shares: Vec<Vec<usize>> = if chosen.len() >= ranks {
            chosen.chunks_exact(cores_per_rank).take(ranks).map(<[usize]>::to_vec).collect()
        } else {
            (0..ranks).map(|rank| vec![chosen[rank * chosen.len() / ranks]]).collect()
        };
        let mut processors: Vec<Vec<Processor>> = shares
            .iter()
            .map(|share| share.iter().flat_map(|&core| cores[core].processors.clone()).collect())
            .collect();
        if chosen.len() < ranks {
            divide_shared_cores(&mut processors);
        }
        if binding == Binding::Numa {
            for (rank_processors, share) in processors.iter_mut().zip(&shares) {
                let is_on_same_node = |core: &&PhysicalCore| {
                    share.iter().any(|&index| cores[index].numa_node == core.numa_node)
                };
                *rank_processors =
                    cores.iter().filter(is_on_same_node).flat_map(|core| core.processors.clone()).collect();
            }
        }
        for rank_processors in &mut processors {
            rank_processors.sort_unstable();
        }
        let mut claimed_cores = shares.concat();
        claimed_cores.dedup();
        let unclaimed = claimed_cores.iter().filter(|&&core| jobs_per_core[core] == 0);
        let exclusive_processors: usize = unclaimed.map(|&core| cores[core].processors.len()).sum();
        Self {
            processors,
            claimed_cores,
            omp_threads,
            exclusive_processors: exclusive_processors.min(usable_processors),
        }
    }
}

/// Returns the indices of the cores with the fewest jobs, in ascending order. Adds cores with more jobs until there is
/// one core for each rank, or no core is left.
fn least_used_cores(ranks: usize, jobs_per_core: &[usize]) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::new();
    let job_count_max = jobs_per_core.iter().copied().max().unwrap_or_default();
    for job_count in 0..=job_count_max {
        let cores: Vec<usize> =
            (0..jobs_per_core.len()).filter(|&core| jobs_per_core[core] == job_count).collect();
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

/// Divides the hardware threads of each core among the ranks that share the core, if there are more ranks than cores.
fn divide_shared_cores(processors: &mut [Vec<Processor>]) {
    for ranks_on_core in processors.chunk_by_mut(|a, b| a == b) {
        let (rank_count, core_processors) = (ranks_on_core.len(), ranks_on_core[0].clone());
        for (index, rank_processors) in ranks_on_core.iter_mut().enumerate() {
            *rank_processors = if rank_count <= core_processors.len() {
                core_processors[index * core_processors.len() / rank_count
                    ..(index + 1) * core_processors.len() / rank_count]
                    .to_vec()
            } else {
                vec![core_processors[index * core_processors.len() / rank_count]]
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::topology::format_processor_list;

    /// Returns cores with `threads` hardware threads each. Half of the cores are on each of two NUMA nodes. As on many
    /// machines, the first threads of all cores have lower numbers than the second threads.
    fn make_cores(cores: usize, threads: usize) -> Vec<PhysicalCore> {
        let core = |index: usize| PhysicalCore {
            numa_node: index * 2 / cores.max(2),
            processors: (0..threads).map(|thread| thread * cores + index).collect(),
        };
        (0..cores).map(core).collect()
    }

    fn make_plan(
        binding: Binding,
        ranks: u32,
        cores: &[PhysicalCore],
        jobs_per_core: &[usize],
    ) -> BindingPlan {
        BindingPlan::new(binding, WorldSize::new(ranks).unwrap(), cores, jobs_per_core, usize::MAX)
    }

    fn format_processors(plan: &BindingPlan) -> String {
        plan.processors.iter().map(|own| format_processor_list(own)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_rank_gets_an_even_share() {
        for (ranks, cores, threads, expected, omp_threads) in [
            (1, 1, 1, "0", 1),
            (2, 2, 1, "0 1", 1),
            (1, 2, 1, "0-1", 2),
            (2, 8, 1, "0-3 4-7", 4),
            (3, 8, 1, "0-1 2-3 4-5", 2),
            // There are more ranks than processors.
            (4, 2, 1, "0 0 1 1", 1),
            (3, 1, 1, "0 0 0", 1),
            (5, 2, 1, "0 0 0 1 1", 1),
            // Ranks get separate cores before they share the hardware threads of a core.
            (2, 2, 2, "0,2 1,3", 1),
            (4, 2, 2, "0 2 1 3", 1),
            (3, 2, 2, "0 2 1,3", 1),
            (8, 2, 2, "0 0 2 2 1 1 3 3", 1),
        ] {
            let plan = make_plan(Binding::Core, ranks, &make_cores(cores, threads), &vec![0; cores]);
            assert_eq!(
                (format_processors(&plan).as_str(), plan.omp_threads),
                (expected, omp_threads),
                "{ranks} on {cores} x {threads}"
            );
        }
    }

    #[test]
    fn ranks_get_processors_that_no_other_job_has_claimed() {
        for (ranks, jobs, expected, exclusive) in [
            (2, [1, 1, 0, 0], "2 3", 2),
            (1, [1, 1, 0, 0], "2-3", 2),
            (2, [1, 0, 0, 0], "1 2", 2),
            // Only one processor is free for two ranks. One rank gets the free processor, and the other rank gets a
            // processor that another job uses too.
            (2, [1, 1, 1, 0], "0 3", 1),
            (3, [2, 1, 1, 0], "1 2 3", 1),
            // No processor is free: the jobs share all processors evenly.
            (2, [1, 1, 1, 1], "0-1 2-3", 0),
            (4, [1, 1, 1, 1], "0 1 2 3", 0),
            (2, [2, 2, 1, 1], "2 3", 0),
            (8, [1, 1, 0, 0], "0 0 1 1 2 2 3 3", 2),
        ] {
            let plan = make_plan(Binding::Core, ranks, &make_cores(4, 1), &jobs);
            assert_eq!(
                (format_processors(&plan).as_str(), plan.exclusive_processors),
                (expected, exclusive),
                "{ranks} {jobs:?}"
            );
        }
    }

    #[test]
    fn bind_to_numa_binds_ranks_to_numa_nodes_and_bind_to_none_leaves_ranks_unbound() {
        let cores = make_cores(4, 1);
        assert_eq!(format_processors(&make_plan(Binding::Numa, 2, &cores, &[0; 4])), "0-1 2-3");
        assert_eq!(format_processors(&make_plan(Binding::Numa, 4, &cores, &[0; 4])), "0-1 0-1 2-3 2-3");
        assert_eq!(make_plan(Binding::Numa, 4, &cores, &[0; 4]).omp_threads, 1);
        let unbound = make_plan(Binding::None, 2, &cores, &[0; 4]);
        assert_eq!(
            (format_processors(&unbound).as_str(), unbound.omp_threads, unbound.exclusive_processors),
            ("", 2, 4)
        );
        assert!(unbound.claimed_cores.is_empty());
    }

    #[test]
    fn a_cpu_limit_reduces_the_number_of_openmp_threads() {
        let plan = BindingPlan::new(Binding::Core, WorldSize::new(2).unwrap(), &make_cores(8, 1), &[0; 8], 2);
        assert_eq!((plan.omp_threads, plan.exclusive_processors), (1, 2));
    }
}
