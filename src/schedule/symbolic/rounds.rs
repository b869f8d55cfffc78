//! Proofs of the collectives in shared memory. In each round, a rank *posts* elements in its slot and *takes*
//! elements from the slots of other ranks. In the simulation, all ranks are in the same round, and every rank posts
//! before any rank takes. Real ranks may be one round apart, but get the same results, because a rank takes only
//! elements that were posted in its own round.

use super::super::Action;
use super::super::CollectiveSpec;
use super::super::partition::Partition;
use super::super::rounds::{OrderedReduce, Round, RoundPlan};
use super::{
    SymbolicValue, all_contributions, every_part, own_contribution, own_part, proof_limits, tested_lengths,
    tested_partition, tested_roots,
};
use crate::types::{Rank, WorldSize};

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
                let plan = |rank| RoundPlan::new(world, rank, slot_len, 0, spec(world, count));
                let buffers = simulate_rounds(
                    world,
                    slot_len,
                    &plan,
                    world.ranks().map(|r| initial(world, r, count)).collect(),
                );
                for rank in world.ranks() {
                    check(world, rank, count, &buffers[rank.index()]);
                }
            }
        }
    }
}

/// Runs a plan on all ranks, of which none can access the buffer of another rank. Returns the final buffers.
pub(super) fn simulate_rounds(
    world: WorldSize,
    slot_len: usize,
    plan: &impl Fn(Rank) -> RoundPlan,
    buffers: Vec<Vec<SymbolicValue>>,
) -> Vec<Vec<SymbolicValue>> {
    simulate_rounds_with_shared_buffers(world, slot_len, plan, buffers, &|_| false)
}

/// Runs a plan on all ranks, and returns the final buffers. If `shares_buffer` returns true for a rank, other ranks can
/// access its buffer: in a round with `in_place_reduce`, the rank posts the address of its buffer and no elements.
fn simulate_rounds_with_shared_buffers(
    world: WorldSize,
    slot_len: usize,
    plan: &impl Fn(Rank) -> RoundPlan,
    mut buffers: Vec<Vec<SymbolicValue>>,
    shares_buffer: &impl Fn(Rank) -> bool,
) -> Vec<Vec<SymbolicValue>> {
    let rounds = plan(Rank::ZERO).round_count();
    let mut round = Round::default();
    let empty_slots = || vec![vec![SymbolicValue::UNSPECIFIED; slot_len]; world.as_usize()];
    let mut next_slots = empty_slots();
    for number in 0..rounds {
        let mut slots = std::mem::replace(&mut next_slots, empty_slots());
        for rank in world.ranks() {
            assert_eq!(plan(rank).round_count(), rounds, "all ranks have the same number of rounds");
            plan(rank).fill_round(number, &mut round);
            if round.in_place_reduce.is_some() && shares_buffer(rank) {
                continue;
            }
            for write in &round.slot_writes {
                let values = &buffers[rank.index()][write.range.clone()];
                let target =
                    &mut slots[rank.index()][write.slot_offset..write.slot_offset + write.range.len()];
                assert!(
                    target.iter().all(|&value| value == SymbolicValue::UNSPECIFIED),
                    "posted elements do not overlap"
                );
                target.copy_from_slice(values);
            }
        }
        for rank in world.ranks() {
            plan(rank).fill_round(number, &mut round);
            if let Some(ordered_reduce) = &round.ordered_reduce {
                assert!(
                    round.slot_reads.is_empty(),
                    "in a round with an ordered reduction, no rank takes elements"
                );
                for from in
                    world.ranks().filter(|&from| round.in_place_reduce.is_some() && shares_buffer(from))
                {
                    let shared = &buffers[from.index()][ordered_reduce.range.clone()];
                    slots[from.index()]
                        [ordered_reduce.slot_offset..ordered_reduce.slot_offset + shared.len()]
                        .copy_from_slice(shared);
                }
                let next = &mut next_slots[rank.index()];
                let result = reduce_in_order(world, rank, ordered_reduce, &buffers[rank.index()], &slots);
                if ordered_reduce.is_posted_next {
                    next[..result.len()].copy_from_slice(&result);
                }
                buffers[rank.index()][ordered_reduce.range.clone()].copy_from_slice(&result);
            }
            let mut sources: Vec<Rank> = round.slot_reads.iter().map(|read| read.from).collect();
            sources.sort_unstable();
            sources.dedup();
            assert_eq!(sources.len(), round.slot_reads.len(), "a rank takes from each slot at most once");
            for read in &round.slot_reads {
                let buffer = &mut buffers[rank.index()];
                let arrived =
                    &slots[read.from.index()][read.slot_offset..read.slot_offset + read.range.len()];
                for (mine, &arrived) in buffer[read.range.clone()].iter_mut().zip(arrived) {
                    if read.action == Action::Copy {
                        *mine = arrived;
                        continue;
                    }
                    assert_eq!(mine.element, arrived.element, "different elements are reduced");
                    assert!(mine.comes_just_before(arrived), "out of rank order");
                    mine.ranks |= arrived.ranks;
                    let is_last = read.action == Action::ReduceLast;
                    let has_all = mine.ranks == u64::MAX >> (64 - world.get());
                    assert_eq!(is_last, has_all, "the last contribution completes the result");
                }
            }
        }
    }
    buffers
}

/// Reduces the contributions of all ranks in rank order. Reads the contribution of `rank` from `buffer`, and every
/// other contribution from the slot of its rank.
fn reduce_in_order(
    world: WorldSize,
    rank: Rank,
    ordered_reduce: &OrderedReduce,
    buffer: &[SymbolicValue],
    slots: &[Vec<SymbolicValue>],
) -> Vec<SymbolicValue> {
    let mut result: Vec<SymbolicValue> = Vec::new();
    for from in world.ranks() {
        let in_slot = ordered_reduce.slot_offset..ordered_reduce.slot_offset + ordered_reduce.range.len();
        let arrived =
            if from == rank { &buffer[ordered_reduce.range.clone()] } else { &slots[from.index()][in_slot] };
        if from == Rank::ZERO {
            result = arrived.to_vec();
            continue;
        }
        for (sum, &arrived) in result.iter_mut().zip(arrived) {
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
        let plan = |rank| RoundPlan::new(world, rank, 100, 97, CollectiveSpec::AllReduce { count: 97 });
        let buffers = simulate_rounds(
            world,
            100,
            &plan,
            world.ranks().map(|rank| own_contribution(world, rank, 97)).collect(),
        );
        assert!(buffers.iter().all(|buffer| *buffer == all_contributions(world, 97)));
    }
}

/// All ranks can access the buffers of all ranks. The ranks reduce their chunks one after another, in ascending or
/// descending order. The order does not change the result, because no rank reads elements that another rank writes.
#[test]
fn in_place_all_reduce_gives_every_rank_every_contribution_in_order() {
    for ranks in 1..=proof_limits().world_size_max {
        let world = WorldSize::new(ranks).unwrap();
        let counts = tested_lengths(world).into_iter().filter(|&count| count > 0);
        for (count, is_reversed) in counts.flat_map(|count| [(count, false), (count, true)]) {
            let mut buffers: Vec<Vec<SymbolicValue>> =
                world.ranks().map(|rank| own_contribution(world, rank, count)).collect();
            let mut order: Vec<Rank> = world.ranks().collect();
            if is_reversed {
                order.reverse();
            }
            let mut round = Round::default();
            let mut times_reduced = vec![0; count];
            for rank in order {
                let mut plan = RoundPlan::new(world, rank, 7, 0, CollectiveSpec::AllReduce { count });
                plan.fill_round(0, &mut round);
                let range = round.in_place_reduce.take().expect("the first round can be done in place").range;
                times_reduced[range.clone()].iter_mut().for_each(|times| *times += 1);
                let ordered_reduce =
                    OrderedReduce { range: range.clone(), slot_offset: range.start, is_posted_next: false };
                let result = reduce_in_order(world, rank, &ordered_reduce, &buffers[rank.index()], &buffers);
                for buffer in &mut buffers {
                    buffer[range.clone()].copy_from_slice(&result);
                }
                plan.reduce_remaining_rounds_in_place();
                assert_eq!(plan.round_count(), 2, "an in-place all-reduce has two rounds for any length");
                plan.fill_round(1, &mut round);
                assert!(
                    round.slot_writes.is_empty()
                        && round.ordered_reduce.is_none()
                        && round.in_place_reduce.is_none()
                );
                let mut awaited: Vec<Rank> =
                    round.slot_reads.iter().map(|read| read.from).chain([rank]).collect();
                awaited.sort_unstable();
                assert!(awaited.into_iter().eq(world.ranks()), "no rank leaves before all are done");
            }
            assert!(times_reduced.iter().all(|&times| times == 1), "one rank reduces each element");
            assert!(buffers.iter().all(|buffer| *buffer == all_contributions(world, count)));
        }
    }
}

/// The operation uses slots, because only some ranks have a buffer that all ranks can access. In the first round, a
/// rank with a shared buffer posts the buffer's address and leaves its slot empty.
#[test]
fn all_reduce_uses_slots_if_only_some_buffers_are_shared() {
    for ranks in 2..=RANKS_MAX {
        let world = WorldSize::new(ranks).unwrap();
        for count in tested_lengths(world) {
            for shares_buffer in [|rank: Rank| rank.get() == 1, |rank: Rank| rank.get() > 0] {
                let slot_len = 2 * world.as_usize() + 1;
                let plan =
                    |rank| RoundPlan::new(world, rank, slot_len, 0, CollectiveSpec::AllReduce { count });
                let initial = world.ranks().map(|rank| own_contribution(world, rank, count)).collect();
                let buffers =
                    simulate_rounds_with_shared_buffers(world, slot_len, &plan, initial, &shares_buffer);
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
fn a_barrier_waits_for_all_ranks() {
    let mut round = Round::default();
    let world = WorldSize::new(5).unwrap();
    RoundPlan::new(world, Rank::new(3), 0, 0, CollectiveSpec::Barrier).fill_round(0, &mut round);
    let mut awaited: Vec<u32> = round.slot_reads.iter().map(|read| read.from.get()).collect();
    awaited.sort_unstable();
    assert_eq!(awaited, [0, 1, 2, 4]);
    let partition = Partition::even(0, world);
    assert_eq!(
        RoundPlan::new(world, Rank::ZERO, 9, 0, CollectiveSpec::AllGather(partition)).round_count(),
        1,
        "ranks synchronise even if all buffers are empty"
    );
}
