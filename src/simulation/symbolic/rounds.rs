//! Proofs of the collectives in shared memory. In each round, a rank *posts* elements in its slot and *takes*
//! elements from the slots of other ranks. In the simulation, all ranks are in the same round, and every rank posts
//! before any rank takes. Real ranks may be one round apart, but get the same results, because a rank takes only
//! elements that were posted in its own round.

use std::sync::Arc;

use super::{
    SymbolicValue, all_contributions, every_part, own_contribution, own_part, proof_limits, tested_lengths,
    tested_partition, tested_roots,
};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::schedule::plan::{SharedSlots, plan};
use crate::schedule::program::{Execution, Program, RoundWork};
use crate::types::{Rank, RankSet, WorldSize, part_index};

/// The number of ranks in the largest tested world. Under Miri, tests run a thousand times slower, so the largest world
/// is smaller.
const RANKS_MAX: u32 = if cfg!(miri) { 3 } else { 16 };

/// Runs a collective on all ranks with small and large slots, and passes the final buffer of every rank to `check`.
fn run_and_check(
    spec: impl Fn(WorldSize, usize) -> CollectiveSpec,
    initial: impl Fn(WorldSize, Rank, usize) -> Vec<SymbolicValue>,
    check: impl Fn(WorldSize, Rank, usize, &[SymbolicValue]),
) {
    for ranks in 1..=RANKS_MAX {
        let world = WorldSize::new(ranks).unwrap();
        for count in tested_lengths(world) {
            for slot_len in [world.as_usize(), 2 * world.as_usize() + 1, 1000] {
                let initial = world.ranks().map(|rank| initial(world, rank, count)).collect();
                let buffers =
                    simulate_rounds(slot_len, &programs(world, slot_len, &spec(world, count)), initial);
                for rank in world.ranks() {
                    check(world, rank, count, &buffers[rank.index()]);
                }
            }
        }
    }
}

/// Returns the program of each rank. No all-reduce is one-shot.
fn programs(world: WorldSize, slot_len: usize, spec: &CollectiveSpec) -> Vec<Program> {
    world.ranks().map(|rank| plan(spec, SharedSlots { world, rank, slot_len }, false)).collect()
}

/// Runs the programs of all ranks, of which none can access the buffer of another rank. Returns the final buffers.
pub(super) fn simulate_rounds(
    slot_len: usize,
    programs: &[Program],
    buffers: Vec<Vec<SymbolicValue>>,
) -> Vec<Vec<SymbolicValue>> {
    let order: Vec<usize> = (0..programs.len()).collect();
    simulate_rounds_with_shared_buffers(slot_len, programs, buffers, &|_| false, &order).0
}

/// Runs the programs of all ranks. Returns the final buffers and the number of rounds. If `shares_buffer` returns true for a
/// rank, other ranks can access its buffer: in a first round in which ranks may post addresses, the rank posts the address
/// of its buffer and no elements. In each round, the ranks work in this `order`, one after another.
fn simulate_rounds_with_shared_buffers(
    slot_len: usize,
    programs: &[Program],
    mut buffers: Vec<Vec<SymbolicValue>>,
    shares_buffer: &impl Fn(usize) -> bool,
    order: &[usize],
) -> (Vec<Vec<SymbolicValue>>, usize) {
    let world = programs.len();
    let empty_slots = || vec![vec![SymbolicValue::UNSPECIFIED; slot_len]; world];
    let executions = programs.iter().map(|program| Execution::new(Arc::new(program.clone())));
    let mut executions: Vec<Execution> = executions.collect();
    let (mut rounds, mut next_slots) = (0, empty_slots());
    loop {
        let may_expose = executions[0].may_expose();
        let exposes = |rank: usize| may_expose && shares_buffer(rank);
        let mut slots = std::mem::replace(&mut next_slots, empty_slots());
        for rank in (0..world).filter(|&rank| !exposes(rank)) {
            let (round, block) = executions[rank].round();
            for write in &round.writes {
                let values = &buffers[rank][write.elements.block(block)];
                let target = &mut slots[rank][write.part * round.part_len..][..values.len()];
                let is_empty = target.iter().all(|&value| value == SymbolicValue::UNSPECIFIED);
                assert!(is_empty, "posted elements do not overlap");
                target.copy_from_slice(values);
            }
        }
        if (0..world).all(exposes) {
            executions.iter_mut().for_each(Execution::handle_all_exposed);
        }
        for &rank in order {
            executions[rank].handle_posted();
            work((rank, &executions[rank]), &mut buffers, (&slots, &mut next_slots[rank]), &exposes);
        }
        rounds += 1;
        let are_done: Vec<bool> = executions.iter_mut().map(Execution::handle_worked).collect();
        assert!(
            are_done.iter().all(|&is_done| is_done == are_done[0]),
            "all ranks have the same number of rounds"
        );
        if are_done[0] {
            return (buffers, rounds);
        }
    }
}

/// Does the work of one rank in a round. `slots` are the posts of all ranks, and `next_slot` is what the rank posts in the next
/// round. If `exposes` returns true for a rank, its buffer is read instead of its slot.
fn work(
    (rank, execution): (usize, &Execution),
    buffers: &mut [Vec<SymbolicValue>],
    (slots, next_slot): (&[Vec<SymbolicValue>], &mut [SymbolicValue]),
    exposes: &impl Fn(usize) -> bool,
) {
    let sources: Vec<usize> = execution.awaited().unwrap().indices().collect();
    let (round, block) = execution.round();
    assert!(!sources.contains(&rank), "a rank does not wait for itself");
    let own_part_of = |from: usize| match round.part_len {
        0 => &slots[from][..],
        part_len => &slots[from][part_index(from, rank) * part_len..][..part_len],
    };
    match &round.work {
        RoundWork::Take(takes) => {
            let takes_from: RankSet = takes.iter().map(|take| take.from.index()).collect();
            assert_eq!(takes_from.count(), takes.len(), "a rank takes from each slot at most once");
            for take in takes {
                assert!(
                    sources.contains(&take.from.index()),
                    "a rank waits for the slots from which it takes"
                );
                let target = take.elements.block(block);
                let slot = own_part_of(take.from.index());
                buffers[rank][target.clone()].copy_from_slice(&slot[..target.len()]);
            }
        }
        RoundWork::Fold(fold) => {
            let target = fold.elements.block(block);
            let contribution_of = |from: usize| {
                assert!(from == rank || sources.contains(&from), "a rank waits for every contribution");
                if from == rank || exposes(from) {
                    buffers[from][target.clone()].to_vec()
                } else {
                    own_part_of(from)[..target.len()].to_vec()
                }
            };
            let result = reduce_in_order((0..fold.ranks as usize).map(contribution_of));
            if fold.ranks > 0 {
                buffers[rank][target].copy_from_slice(&result);
            }
            if fold.is_posted_next {
                next_slot[..result.len()].copy_from_slice(&result);
            }
        }
        RoundWork::FoldInPlace(range) => {
            assert_eq!(sources.len() + 1, buffers.len(), "a rank waits for the addresses of all ranks");
            let result = reduce_in_order(buffers.iter().map(|buffer| buffer[range.clone()].to_vec()));
            for buffer in buffers {
                buffer[range.clone()].copy_from_slice(&result);
            }
        }
    }
}

/// Reduces contributions in their order.
fn reduce_in_order(mut contributions: impl Iterator<Item = Vec<SymbolicValue>>) -> Vec<SymbolicValue> {
    let mut result = contributions.next().unwrap_or_default();
    for contribution in contributions {
        for (sum, arrived) in result.iter_mut().zip(contribution) {
            assert_eq!(sum.element, arrived.element, "different elements are reduced");
            assert!(sum.comes_just_before(arrived), "out of rank order");
            sum.ranks |= arrived.ranks;
        }
    }
    result
}

#[test]
fn all_reduce_gives_every_rank_every_contribution_in_order() {
    let two_shot = |_, count| CollectiveSpec::AllReduce { count };
    run_and_check(two_shot, own_contribution, |world, _, count, buffer| {
        assert_eq!(buffer, all_contributions(world, count));
    });
    for ranks in 1..=RANKS_MAX {
        let world = WorldSize::new(ranks).unwrap();
        let slots = |rank| SharedSlots { world, rank, slot_len: 100 };
        let spec = CollectiveSpec::AllReduce { count: 97 };
        let one_shot: Vec<Program> = world.ranks().map(|rank| plan(&spec, slots(rank), true)).collect();
        let initial = world.ranks().map(|rank| own_contribution(world, rank, 97)).collect();
        let buffers = simulate_rounds(100, &one_shot, initial);
        assert!(buffers.iter().all(|buffer| *buffer == all_contributions(world, 97)));
    }
}

/// All ranks can access the buffers of all ranks. The ranks reduce their chunks one after another, in ascending or
/// descending order. The order does not change the result, because no rank reads elements that another rank writes.
#[test]
fn in_place_all_reduce_gives_every_rank_every_contribution_in_order() {
    for ranks in 1..=proof_limits().world_size_max {
        let world = WorldSize::new(ranks).unwrap();
        for (count, is_reversed) in
            tested_lengths(world).into_iter().flat_map(|count| [(count, false), (count, true)])
        {
            let mut order: Vec<usize> = (0..world.as_usize()).collect();
            if is_reversed {
                order.reverse();
            }
            let programs = programs(world, 7, &CollectiveSpec::AllReduce { count });
            let initial = world.ranks().map(|rank| own_contribution(world, rank, count)).collect();
            let (buffers, rounds) =
                simulate_rounds_with_shared_buffers(64, &programs, initial, &|_| true, &order);
            assert_eq!(rounds, 2, "an in-place all-reduce has two rounds for any length");
            assert!(buffers.iter().all(|buffer| *buffer == all_contributions(world, count)));
            for program in &programs {
                let in_place = program.if_all_expose.as_ref().unwrap();
                let [first, last] = &in_place.phases[0].rounds[..] else { panic!("two rounds") };
                assert_eq!(first.sources, program.phases[0].rounds[0].sources);
                assert!(last.writes.is_empty() && last.work == RoundWork::Take([].into()));
                assert_eq!(last.sources.count() + 1, programs.len(), "no rank leaves before all are done");
            }
        }
    }
}

/// The operation uses slots, because only some ranks have a buffer that all ranks can access. In the first round, a
/// rank with a shared buffer posts the buffer's address and leaves its slot empty.
#[test]
fn all_reduce_uses_slots_if_only_some_buffers_are_shared() {
    for ranks in 2..=RANKS_MAX {
        let world = WorldSize::new(ranks).unwrap();
        let order: Vec<usize> = (0..world.as_usize()).collect();
        for count in tested_lengths(world) {
            for shares_buffer in [|rank: usize| rank == 1, |rank: usize| rank > 0] {
                let slot_len = 2 * world.as_usize() + 1;
                let programs = programs(world, slot_len, &CollectiveSpec::AllReduce { count });
                let initial = world.ranks().map(|rank| own_contribution(world, rank, count)).collect();
                let (buffers, rounds) =
                    simulate_rounds_with_shared_buffers(slot_len, &programs, initial, &shares_buffer, &order);
                // Only slots of up to 2n + 1 elements may be too short for blocks of their length.
                let block_lens = [slot_len, 2 * world.as_usize()];
                let expected = block_lens.map(|block_len| 2 * count.div_ceil(block_len).max(1));
                assert!(expected.contains(&rounds), "{ranks} ranks, {count} elements: {rounds} rounds");
                assert!(buffers.iter().all(|buffer| *buffer == all_contributions(world, count)));
            }
        }
    }
}

#[test]
fn reduce_gives_the_root_every_contribution() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        let spec = |world, count| CollectiveSpec::Reduce { count, root: root(world) };
        run_and_check(spec, own_contribution, |world, rank, count, buffer| {
            assert!(rank != root(world) || *buffer == all_contributions(world, count));
        });
    }
}

#[test]
fn reduce_scatter_and_all_gather_give_every_rank_its_parts() {
    for case in 0..2 {
        let scattered = |world, count| CollectiveSpec::ReduceScatter(tested_partition(count, world, case));
        run_and_check(scattered, own_contribution, |world, rank, count, buffer| {
            for element in tested_partition(count, world, case).range(rank) {
                assert_eq!(buffer[element], SymbolicValue::from_first_ranks(world.get(), element));
            }
        });
        run_and_check(
            |world, count| CollectiveSpec::AllGather(tested_partition(count, world, case)),
            |world, rank, count| own_part(&tested_partition(count, world, case), rank),
            |world, _, count, buffer| {
                assert_eq!(buffer, every_part(&tested_partition(count, world, case), world));
            },
        );
    }
}

#[test]
fn broadcast_gather_and_scatter_move_the_data_from_or_to_the_root() {
    for case in 0..4 {
        let root = |world: WorldSize| tested_roots(world)[case % tested_roots(world).len()];
        let parts = |world, count| tested_partition(count, world, case);
        run_and_check(
            |world, count| CollectiveSpec::Broadcast { count, root: root(world) },
            own_contribution,
            |world, _, count, buffer| assert_eq!(buffer, own_contribution(world, root(world), count)),
        );
        run_and_check(
            |world, count| CollectiveSpec::Gather { partition: parts(world, count), root: root(world) },
            |world, rank, count| {
                let whole_buffer = own_part(&parts(world, count), rank);
                if rank == root(world) {
                    whole_buffer
                } else {
                    whole_buffer[parts(world, count).range(rank)].to_vec()
                }
            },
            |world, rank, count, buffer| {
                assert!(rank != root(world) || *buffer == every_part(&parts(world, count), world));
            },
        );
        run_and_check(
            |world, count| CollectiveSpec::Scatter { partition: parts(world, count), root: root(world) },
            |world, rank, count| {
                let length = parts(world, count).range(rank).len();
                if rank == root(world) {
                    own_contribution(world, rank, count)
                } else {
                    vec![SymbolicValue::UNSPECIFIED; length]
                }
            },
            |world, rank, count, buffer| {
                let whole_buffer = own_contribution(world, root(world), count);
                let part = whole_buffer[parts(world, count).range(rank)].to_vec();
                assert_eq!(buffer, if rank == root(world) { whole_buffer } else { part });
            },
        );
    }
}

#[test]
fn scan_and_exscan_combine_lower_ranks_in_rank_order() {
    run_and_check(
        |_, count| CollectiveSpec::Scan { count },
        own_contribution,
        |_, rank, count, buffer| {
            let expected = (0..count).map(|element| SymbolicValue::from_first_ranks(rank.get() + 1, element));
            assert_eq!(buffer, expected.collect::<Vec<SymbolicValue>>());
        },
    );
    let with_result_space = |world, rank, count| {
        [own_contribution(world, rank, count), vec![SymbolicValue::UNSPECIFIED; count]].concat()
    };
    run_and_check(
        |_, count| CollectiveSpec::Exscan { count },
        with_result_space,
        |_, rank, count, buffer| {
            let expected = |element| {
                if rank == Rank::ZERO {
                    SymbolicValue::UNSPECIFIED
                } else {
                    SymbolicValue::from_first_ranks(rank.get(), element)
                }
            };
            assert_eq!(buffer[count..], (0..count).map(expected).collect::<Vec<SymbolicValue>>());
        },
    );
}

#[test]
fn all_to_all_gives_each_rank_the_parts_for_it() {
    let value =
        |from: Rank, to: Rank, index: usize| SymbolicValue::contribution(from, to.index() << 32 | index);
    run_and_check(
        |world, part| {
            let parts = Partition::of_equal_parts(part, world);
            CollectiveSpec::AllToAll { send: parts.clone(), receive: parts, is_even: true }
        },
        |world, rank, part| {
            let sent = world.ranks().flat_map(|to| (0..part).map(move |index| value(rank, to, index)));
            let mut buffer: Vec<SymbolicValue> = sent.collect();
            buffer.resize(2 * buffer.len(), SymbolicValue::UNSPECIFIED);
            buffer
        },
        |world, rank, part, buffer| {
            for (from, received) in world.ranks().zip(buffer[world.as_usize() * part..].chunks(part.max(1))) {
                let expected =
                    |index| if from == rank { SymbolicValue::UNSPECIFIED } else { value(from, rank, index) };
                assert_eq!(received, (0..part).map(expected).collect::<Vec<SymbolicValue>>());
            }
        },
    );
}

#[test]
fn ranks_synchronise_even_if_all_buffers_are_empty() {
    let world = WorldSize::new(5).unwrap();
    for spec in [CollectiveSpec::Barrier, CollectiveSpec::AllGather(Partition::even(0, world))] {
        let program = plan(&spec, SharedSlots { world, rank: Rank::new(3), slot_len: 9 }, false);
        let mut execution = Execution::new(Arc::new(program));
        let awaited: Vec<usize> = execution.round().0.sources.indices().collect();
        assert_eq!((awaited, execution.handle_worked()), (vec![0, 1, 2, 4], true));
    }
}
