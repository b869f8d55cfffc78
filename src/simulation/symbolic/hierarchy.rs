//! Proofs of the hierarchical collectives. These collectives first run rounds in the shared memory of each host, then
//! a schedule over the links between hosts, and then rounds in shared memory again.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::rounds::simulate_rounds;
use super::{
    MoveOrder, Proof, SimulatedWorld, SymbolicValue, all_contributions, own_contribution, proof_limits,
    tested_lengths, tested_roots,
};
use crate::schedule::hierarchy::CollectiveStage;
use crate::schedule::hierarchy::HostLayout;
use crate::schedule::plan::{SharedSlots, plan};
use crate::schedule::program::Program;
use crate::schedule::{CollectiveSpec, Schedule};
use crate::types::{Algorithm, Rank, WorldSize};

/// Returns the number of ranks in the largest random placement.
fn random_placement_ranks_max() -> u32 {
    match proof_limits().world_size_max {
        small @ ..=4 => small + 1,
        limit => limit.min(24),
    }
}

/// Returns placements of ranks on hosts: in blocks, round-robin and random, on hosts of equal and of different sizes.
/// Entry r of a placement is the host of rank r.
fn tested_placements() -> Vec<Vec<u32>> {
    let mut all: Vec<Vec<u32>> =
        [&[0, 0, 1][..], &[0, 1, 1], &[0, 0, 1, 1], &[0, 1, 0, 1], &[5, 5, 5, 2], &[0, 1, 1, 2, 2, 2]]
            .map(<[u32]>::to_vec)
            .into();
    all.push((0..16).map(|rank| rank / 4).collect());
    all.push((0..12).map(|rank| rank % 3).collect());
    let mut random = StdRng::seed_from_u64(7);
    for ranks in 3..=random_placement_ranks_max() {
        let hosts = random.random_range(2..ranks);
        all.push((0..ranks).map(|_| random.random_range(0..hosts)).collect());
    }
    all.truncate(if cfg!(miri) { 3 } else { usize::MAX });
    all
}

/// Returns the schedule of the stage between hosts.
fn between_hosts(stages: &[CollectiveStage]) -> Schedule {
    let schedule = |stage: &CollectiveStage| match stage {
        CollectiveStage::OverLinks(schedule) => Some(schedule.clone()),
        CollectiveStage::OnHost(..) | CollectiveStage::Encoded(_) => None,
    };
    stages.iter().find_map(schedule).expect("every rank has a stage between hosts")
}

/// Returns the collective of a host in the shared memory with this number.
fn on_host(stages: &[CollectiveStage], memory_number: usize) -> CollectiveSpec {
    let spec = |stage: &CollectiveStage| match stage {
        CollectiveStage::OnHost(number, spec) if *number == memory_number => Some(spec.clone()),
        _ => None,
    };
    stages.iter().find_map(spec).expect("a host with several ranks has a stage in each shared memory")
}

/// Replaces the local ranks in the values of a buffer by ranks of the group. `group_ranks` contains the rank in the
/// group for each local rank.
fn convert_local_to_group_ranks(buffer: Vec<SymbolicValue>, group_ranks: &[Rank]) -> Vec<SymbolicValue> {
    let convert = |value: SymbolicValue| {
        let contributors = group_ranks.iter().enumerate().filter(|(local, _)| value.ranks >> local & 1 == 1);
        SymbolicValue { ranks: contributors.fold(0, |ranks, (_, rank)| ranks | 1 << rank.get()), ..value }
    };
    buffer.into_iter().map(convert).collect()
}

/// Runs a stage in the shared memory of every host. Before the first stage (`is_first`), each rank's buffer contains only
/// its own contributions.
fn simulate_stage_on_hosts(
    layouts: &[HostLayout],
    stage: impl Fn(Rank) -> CollectiveSpec,
    mut buffers: Vec<Vec<SymbolicValue>>,
    slot_len: usize,
    is_first: bool,
) -> Vec<Vec<SymbolicValue>> {
    for (rank, layout) in layouts.iter().enumerate() {
        let ranks = layout.local_ranks();
        let local_world = WorldSize::new(ranks.len() as u32).expect("every host has a rank");
        if local_world == WorldSize::ONE || ranks[0].index() != rank {
            continue;
        }
        let with_local_rank = |local: usize, buffer: &[SymbolicValue]| {
            let value = |value: &SymbolicValue| SymbolicValue {
                ranks: if is_first { 1 << local } else { value.ranks },
                ..*value
            };
            buffer.iter().map(value).collect::<Vec<SymbolicValue>>()
        };
        let initial =
            ranks.iter().enumerate().map(|(local, rank)| with_local_rank(local, &buffers[rank.index()]));
        let slot_len = slot_len.max(local_world.as_usize());
        let slots = |rank| SharedSlots { world: local_world, rank, slot_len };
        let programs =
            local_world.ranks().map(|local| plan(&stage(ranks[local.index()]), slots(local), false));
        let programs: Vec<Program> = programs.collect();
        for (rank, buffer) in ranks.iter().zip(simulate_rounds(slot_len, &programs, initial.collect())) {
            buffers[rank.index()] =
                if is_first { convert_local_to_group_ranks(buffer, ranks) } else { buffer };
        }
    }
    buffers
}

/// Runs a collective for every placement and length, and for several orders of sends and receives between hosts.
/// Passes the final buffer of every rank to `check`. The last argument of `check` is the number of completed
/// reductions, summed over all elements and ranks.
fn run_and_check(
    algorithms: &[Algorithm],
    spec: impl Fn(WorldSize, usize) -> CollectiveSpec,
    check: impl Fn(WorldSize, Rank, usize, &[SymbolicValue], u32),
) {
    for host_ids in tested_placements() {
        let world = WorldSize::new(host_ids.len() as u32).unwrap();
        let layouts: Option<Vec<HostLayout>> =
            world.ranks().map(|rank| HostLayout::new(&host_ids, rank)).collect();
        let Some(layouts) = layouts else { continue };
        for (&algorithm, count) in
            algorithms.iter().flat_map(|a| tested_lengths(world).into_iter().map(move |c| (a, c)))
        {
            if algorithm == Algorithm::Butterfly && !layouts[0].host_count().get().is_power_of_two() {
                continue;
            }
            let stages: Vec<Vec<CollectiveStage>> =
                layouts.iter().map(|layout| layout.stages(&spec(world, count), algorithm, 5)).collect();
            let schedules: Vec<_> = stages.iter().map(|stages| between_hosts(stages)).collect();
            Proof { receives_may_wait: true, ..Proof::new() }.check_schedules(&schedules);
            for (seed, segment_len, slot_len) in [(0, 1, 1), (1, 3, 1000), (2, usize::MAX >> 1, 7)] {
                let buffers = world.ranks().map(|rank| own_contribution(world, rank, count)).collect();
                let first_on_host = |rank: Rank| on_host(&stages[rank.index()], 0);
                let buffers = simulate_stage_on_hosts(&layouts, first_on_host, buffers, slot_len, true);
                let mut links = SimulatedWorld::new(schedules.clone(), buffers, segment_len);
                links.run(&mut match seed {
                    0 => MoveOrder::Eager,
                    1 => MoveOrder::Lockstep,
                    _ => MoveOrder::Random(Box::new(StdRng::seed_from_u64(seed))),
                });
                let completions: Vec<u32> =
                    links.ranks.iter().flat_map(|rank| rank.completions.clone()).collect();
                let total = completions.iter().sum::<u32>();
                let buffers = links.ranks.into_iter().map(|rank| rank.buffer).collect();
                let last_on_host = |rank: Rank| on_host(&stages[rank.index()], 1);
                let buffers = simulate_stage_on_hosts(&layouts, last_on_host, buffers, slot_len, false);
                for rank in world.ranks() {
                    check(world, rank, count, &buffers[rank.index()], total);
                }
            }
        }
    }
}

#[test]
fn all_reduce_gives_every_rank_every_contribution_once() {
    let algorithms = [Algorithm::Ring, Algorithm::Direct, Algorithm::Butterfly, Algorithm::DoubleTree];
    run_and_check(
        &algorithms,
        |_, count| CollectiveSpec::AllReduce { count },
        |world, rank, count, buffer, completions| {
            assert_eq!(buffer, all_contributions(world, count), "rank {rank} of {world}");
            assert!(completions as usize >= count, "every result is completed");
        },
    );
}

#[test]
fn reduce_gives_the_root_every_contribution_once() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        run_and_check(
            &[Algorithm::Chain, Algorithm::Tree],
            |world, count| CollectiveSpec::Reduce { count, root: root(world) },
            |world, rank, count, buffer, completions| {
                assert!(rank != root(world) || *buffer == all_contributions(world, count));
                assert_eq!(completions as usize, count, "every result is completed once");
            },
        );
    }
}

#[test]
fn broadcast_gives_every_rank_the_roots_buffer() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        run_and_check(
            &[Algorithm::Ring, Algorithm::Tree],
            |world, count| CollectiveSpec::Broadcast { count, root: root(world) },
            |world, _, count, buffer, _| assert_eq!(buffer, own_contribution(world, root(world), count)),
        );
    }
}

#[test]
fn only_the_first_ranks_of_hosts_exchange_messages_in_a_barrier() {
    run_and_check(&[Algorithm::Dissemination], |_, _| CollectiveSpec::Barrier, |_, _, _, _, _| {});
    let layout = |rank| HostLayout::new(&[0, 0, 1, 1, 2], Rank::new(rank)).unwrap();
    let schedule =
        |rank| between_hosts(&layout(rank).stages(&CollectiveSpec::Barrier, Algorithm::Dissemination, 1));
    assert_eq!(schedule(0).peers(), [Rank::new(2), Rank::new(4)]);
    assert!(schedule(1).steps.is_empty() && schedule(3).steps.is_empty());
}

#[test]
fn every_rank_carries_a_slice_and_sends_only_to_other_hosts() {
    for host_ids in tested_placements() {
        let world = WorldSize::new(host_ids.len() as u32).unwrap();
        for rank in world.ranks() {
            let Some(layout) = HostLayout::new(&host_ids, rank) else { continue };
            let stages = layout.stages(&CollectiveSpec::AllReduce { count: 1000 }, Algorithm::Ring, 1000);
            let schedule = between_hosts(&stages);
            assert!(!schedule.steps.is_empty(), "every rank carries a slice: {host_ids:?}");
            let is_local = |peer: &Rank| layout.local_ranks().contains(peer);
            assert!(!schedule.peers().iter().any(is_local), "ranks of one host exchange no messages");
        }
    }
    assert_eq!(HostLayout::new(&[3, 3, 3], Rank::ZERO), None);
    assert_eq!(HostLayout::new(&[0, 1, 2], Rank::ZERO), None);
}
