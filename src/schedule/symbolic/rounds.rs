//! Rounds on a board. All ranks post in a round before any rank takes: the board ensures that. Ranks may be a round
//! apart; no result can depend on that, because what a rank takes was posted in the same round.

use super::super::Action;
use super::super::CollectiveSpec;
use super::super::partition::Partition;
use super::super::rounds::{OrderedReduce, Round, RoundPlan};
use super::{Value, cut, every_part, everyone, extent, lengths, own, own_part, roots};
use crate::types::{Rank, WorldSize};

/// Miri takes a thousand times as long.
const RANKS_MAX: u32 = if cfg!(miri) { 3 } else { 16 };

/// Runs a plan on all ranks, for slots that hold everything and slots that do not, and hands the end to `check`.
fn run(
    spec: impl Fn(WorldSize, usize) -> CollectiveSpec,
    initial: impl Fn(WorldSize, Rank, usize) -> Vec<Value>,
    check: impl Fn(WorldSize, Rank, usize, &[Value]),
) {
    for ranks in 1..=RANKS_MAX {
        let world = WorldSize::new(ranks).unwrap();
        for count in lengths(world) {
            for slot in [world.as_usize(), 2 * world.as_usize() + 1, 1000] {
                let plan = |rank| RoundPlan::new(world, rank, slot, 0, spec(world, count));
                let buffers =
                    play(world, slot, &plan, world.ranks().map(|r| initial(world, r, count)).collect());
                for rank in world.ranks() {
                    check(world, rank, count, &buffers[rank.index()]);
                }
            }
        }
    }
}

pub(super) fn play(
    world: WorldSize,
    slot: usize,
    plan: &impl Fn(Rank) -> RoundPlan,
    buffers: Vec<Vec<Value>>,
) -> Vec<Vec<Value>> {
    play_with(world, slot, plan, buffers, &|_| false)
}

/// Some ranks lend their buffers in the round in which all of them could.
fn play_with(
    world: WorldSize,
    slot: usize,
    plan: &impl Fn(Rank) -> RoundPlan,
    mut buffers: Vec<Vec<Value>>,
    lends: &impl Fn(Rank) -> bool,
) -> Vec<Vec<Value>> {
    let rounds = plan(Rank::ZERO).rounds();
    let mut round = Round::default();
    let blank = || vec![vec![Value::BLANK; slot]; world.as_usize()];
    let mut next_slots = blank();
    for number in 0..rounds {
        let mut slots = std::mem::replace(&mut next_slots, blank());
        for rank in world.ranks() {
            assert_eq!(plan(rank).rounds(), rounds, "all ranks have as many rounds");
            plan(rank).fill(number, &mut round);
            if round.exchange.is_some() && lends(rank) {
                continue;
            }
            for put in &round.puts {
                let values = &buffers[rank.index()][put.range.clone()];
                let place = &mut slots[rank.index()][put.at..put.at + put.range.len()];
                assert!(place.iter().all(|&value| value == Value::BLANK), "nothing is posted over");
                place.copy_from_slice(values);
            }
        }
        for rank in world.ranks() {
            plan(rank).fill(number, &mut round);
            if let Some(ordered_reduce) = &round.ordered_reduce {
                assert!(round.takes.is_empty(), "one or the other");
                for from in world.ranks().filter(|&from| round.exchange.is_some() && lends(from)) {
                    let lent = &buffers[from.index()][ordered_reduce.range.clone()];
                    slots[from.index()][ordered_reduce.at..ordered_reduce.at + lent.len()]
                        .copy_from_slice(lent);
                }
                let next = &mut next_slots[rank.index()];
                let result = reduced(world, rank, ordered_reduce, &buffers[rank.index()], &slots);
                if ordered_reduce.is_posted_next {
                    next[..result.len()].copy_from_slice(&result);
                }
                buffers[rank.index()][ordered_reduce.range.clone()].copy_from_slice(&result);
            }
            let mut sources: Vec<Rank> = round.takes.iter().map(|take| take.from).collect();
            sources.sort_unstable();
            sources.dedup();
            assert_eq!(sources.len(), round.takes.len(), "each slot is looked into once");
            for take in &round.takes {
                let buffer = &mut buffers[rank.index()];
                let arrived = &slots[take.from.index()][take.at..take.at + take.range.len()];
                for (mine, &arrived) in buffer[take.range.clone()].iter_mut().zip(arrived) {
                    if take.action == Action::Copy {
                        *mine = arrived;
                        continue;
                    }
                    assert_eq!(mine.element, arrived.element, "different elements");
                    assert!(mine.comes_just_before(arrived), "out of rank order");
                    mine.ranks |= arrived.ranks;
                    let is_whole = take.action == Action::ReduceLast;
                    assert_eq!(is_whole, mine.ranks == u64::MAX >> (64 - world.get()), "finished once");
                }
            }
        }
    }
    buffers
}

/// The contributions in rank order: the rank's own in its buffer, all others in slots.
fn reduced(
    world: WorldSize,
    rank: Rank,
    ordered_reduce: &OrderedReduce,
    buffer: &[Value],
    slots: &[Vec<Value>],
) -> Vec<Value> {
    let mut result: Vec<Value> = Vec::new();
    for from in world.ranks() {
        let place = ordered_reduce.at..ordered_reduce.at + ordered_reduce.range.len();
        let arrived =
            if from == rank { &buffer[ordered_reduce.range.clone()] } else { &slots[from.index()][place] };
        if from == Rank::ZERO {
            result = arrived.to_vec();
            continue;
        }
        for (sum, &arrived) in result.iter_mut().zip(arrived) {
            assert_eq!(sum.element, arrived.element, "different elements");
            assert!(sum.comes_just_before(arrived), "out of rank order");
            sum.ranks |= arrived.ranks;
        }
    }
    result
}

#[test]
fn all_reduce_gives_every_rank_every_contribution_in_order() {
    let two_shot = |_, count| CollectiveSpec::AllReduce { count };
    run(two_shot, own, |world, _, count, buffer| assert_eq!(buffer, everyone(world, count)));
    for ranks in 1..=RANKS_MAX {
        let world = WorldSize::new(ranks).unwrap();
        let plan = |rank| RoundPlan::new(world, rank, 100, 97, CollectiveSpec::AllReduce { count: 97 });
        let buffers = play(world, 100, &plan, world.ranks().map(|rank| own(world, rank, 97)).collect());
        assert!(buffers.iter().all(|buffer| *buffer == everyone(world, 97)));
    }
}

/// All ranks can access every rank's buffer; an empty one takes a single round. Ranks reduce their chunks one after
/// another, in one order or the other: no rank reads what another one has written.
#[test]
fn in_place_every_rank_gets_every_contribution_in_order() {
    for ranks in 1..=extent().worlds_max {
        let world = WorldSize::new(ranks).unwrap();
        let counts = lengths(world).into_iter().filter(|&count| count > 0);
        for (count, is_reversed) in counts.flat_map(|count| [(count, false), (count, true)]) {
            let mut buffers: Vec<Vec<Value>> = world.ranks().map(|rank| own(world, rank, count)).collect();
            let mut order: Vec<Rank> = world.ranks().collect();
            if is_reversed {
                order.reverse();
            }
            let mut round = Round::default();
            let mut touched = vec![0; count];
            for rank in order {
                let mut plan = RoundPlan::new(world, rank, 7, 0, CollectiveSpec::AllReduce { count });
                plan.fill(0, &mut round);
                let range = round.exchange.take().expect("the first round can be done in place").range;
                touched[range.clone()].iter_mut().for_each(|times| *times += 1);
                let ordered_reduce =
                    OrderedReduce { range: range.clone(), at: range.start, is_posted_next: false };
                let result = reduced(world, rank, &ordered_reduce, &buffers[rank.index()], &buffers);
                for buffer in &mut buffers {
                    buffer[range.clone()].copy_from_slice(&result);
                }
                plan.go_in_place();
                assert_eq!(plan.rounds(), 2, "for any length");
                plan.fill(1, &mut round);
                assert!(round.puts.is_empty() && round.ordered_reduce.is_none() && round.exchange.is_none());
                let mut awaited: Vec<Rank> = round.takes.iter().map(|take| take.from).chain([rank]).collect();
                awaited.sort_unstable();
                assert!(awaited.into_iter().eq(world.ranks()), "no rank leaves before all are done");
            }
            assert!(touched.iter().all(|&times| times == 1), "each element belongs to one rank");
            assert!(buffers.iter().all(|buffer| *buffer == everyone(world, count)));
        }
    }
}

/// Some ranks' buffers are accessible to all, others' are not. The operation uses slots, but reads the accessible
/// buffers instead of their ranks' slots in the first round. The order in which ranks reduce does not matter.
#[test]
fn where_some_lend_their_buffers_all_go_by_slots() {
    for ranks in 2..=RANKS_MAX {
        let world = WorldSize::new(ranks).unwrap();
        for count in lengths(world) {
            for lending in [|rank: Rank| rank.get() == 1, |rank: Rank| rank.get() > 0] {
                let slot = 2 * world.as_usize() + 1;
                let plan = |rank| RoundPlan::new(world, rank, slot, 0, CollectiveSpec::AllReduce { count });
                let initial = world.ranks().map(|rank| own(world, rank, count)).collect();
                let buffers = play_with(world, slot, &plan, initial, &lending);
                assert!(buffers.iter().all(|buffer| *buffer == everyone(world, count)));
            }
        }
    }
}

#[test]
fn reduce_gives_the_root_every_contribution() {
    for which in 0..4 {
        let root = |world: WorldSize| roots(world)[which % roots(world).len()];
        let spec = |world, count| CollectiveSpec::Reduce { count, root: root(world) };
        run(spec, own, |world, rank, count, buffer| {
            assert!(rank != root(world) || *buffer == everyone(world, count));
        });
    }
}

#[test]
fn parts_are_reduced_and_gathered() {
    for which in 0..2 {
        let scattered = |world, count| CollectiveSpec::ReduceScatter(cut(count, world, which));
        run(scattered, own, |world, rank, count, buffer| {
            for element in cut(count, world, which).range(rank) {
                assert_eq!(buffer[element], Value::of_first(world.get(), element));
            }
        });
        run(
            |world, count| CollectiveSpec::AllGather(cut(count, world, which)),
            |world, rank, count| own_part(&cut(count, world, which), rank),
            |world, _, count, buffer| assert_eq!(buffer, every_part(&cut(count, world, which), world)),
        );
    }
}

#[test]
fn roots_give_and_get() {
    for which in 0..4 {
        let root = |world: WorldSize| roots(world)[which % roots(world).len()];
        let parts = |world, count| cut(count, world, which);
        run(
            |world, count| CollectiveSpec::Broadcast { count, root: root(world) },
            own,
            |world, _, count, buffer| assert_eq!(buffer, own(world, root(world), count)),
        );
        run(
            |world, count| CollectiveSpec::Gather { partition: parts(world, count), root: root(world) },
            |world, rank, count| {
                let whole = own_part(&parts(world, count), rank);
                if rank == root(world) { whole } else { whole[parts(world, count).range(rank)].to_vec() }
            },
            |world, rank, count, buffer| {
                assert!(rank != root(world) || *buffer == every_part(&parts(world, count), world));
            },
        );
        run(
            |world, count| CollectiveSpec::Scatter { partition: parts(world, count), root: root(world) },
            |world, rank, count| {
                let length = parts(world, count).range(rank).len();
                if rank == root(world) { own(world, rank, count) } else { vec![Value::BLANK; length] }
            },
            |world, rank, count, buffer| {
                let whole = own(world, root(world), count);
                let part = whole[parts(world, count).range(rank)].to_vec();
                assert_eq!(buffer, if rank == root(world) { whole } else { part });
            },
        );
    }
}

#[test]
fn prefixes_are_those_of_the_ranks_before() {
    run(
        |_, count| CollectiveSpec::Scan { count },
        own,
        |_, rank, count, buffer| {
            let expected = (0..count).map(|element| Value::of_first(rank.get() + 1, element));
            assert_eq!(buffer, expected.collect::<Vec<Value>>());
        },
    );
    let with_result_space =
        |world, rank, count| [own(world, rank, count), vec![Value::BLANK; count]].concat();
    run(
        |_, count| CollectiveSpec::Exscan { count },
        with_result_space,
        |_, rank, count, buffer| {
            let expected = |element| {
                if rank == Rank::ZERO { Value::BLANK } else { Value::of_first(rank.get(), element) }
            };
            assert_eq!(buffer[count..], (0..count).map(expected).collect::<Vec<Value>>());
        },
    );
}

#[test]
fn each_rank_gets_the_parts_that_all_ranks_have_for_it() {
    let name = |from: Rank, to: Rank, index: usize| Value::own(from, to.index() << 32 | index);
    run(
        |world, part| {
            let parts = Partition::alike(part, world);
            CollectiveSpec::AllToAll { send: parts.clone(), receive: parts, is_even: true }
        },
        |world, rank, part| {
            let sent = world.ranks().flat_map(|to| (0..part).map(move |index| name(rank, to, index)));
            let mut buffer: Vec<Value> = sent.collect();
            buffer.resize(2 * buffer.len(), Value::BLANK);
            buffer
        },
        |world, rank, part, buffer| {
            for (from, received) in world.ranks().zip(buffer[world.as_usize() * part..].chunks(part.max(1))) {
                let expected = |index| if from == rank { Value::BLANK } else { name(from, rank, index) };
                assert_eq!(received, (0..part).map(expected).collect::<Vec<Value>>());
            }
        },
    );
}

#[test]
fn a_barrier_waits_for_all_ranks() {
    let mut round = Round::default();
    let world = WorldSize::new(5).unwrap();
    RoundPlan::new(world, Rank::new(3), 0, 0, CollectiveSpec::Barrier).fill(0, &mut round);
    let mut awaited: Vec<u32> = round.takes.iter().map(|take| take.from.get()).collect();
    awaited.sort_unstable();
    assert_eq!(awaited, [0, 1, 2, 4]);
    let partition = Partition::even(0, world);
    assert_eq!(
        RoundPlan::new(world, Rank::ZERO, 9, 0, CollectiveSpec::AllGather(partition)).rounds(),
        1,
        "ranks with empty buffers synchronise too"
    );
}
