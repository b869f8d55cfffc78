//! Schedules of ceil(log2 n) steps. In the step of distance d = 1, 2, 4, .. a rank exchanges a message with the ranks at this
//! distance. Each step waits for the receive of the previous step, and a rank must store data that arrive early.

use std::ops::Range;

use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Creates a dissemination barrier, which sends empty messages.
pub fn barrier(world: WorldSize, rank: Rank) -> Schedule {
    let mut schedule = Schedule::default();
    for distance in distances(world) {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        push_exchange(&mut schedule, (to, 0..0), (from, 0..0), Action::Copy);
    }
    schedule
}

/// Creates an all-gather of `count` elements from each rank. Panics if the number of elements in all slots overflows a `usize`.
///
/// The buffer has a slot of `count` elements for each rank. Slot i of rank r is for the data of rank r + i (modulo n), so slot
/// 0 contains the rank's own data. The last step may transfer fewer slots than all filled ones.
pub fn all_gather(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let n = world.as_usize();
    assert!(count.checked_mul(n).is_some(), "the length of the buffer must fit a usize");
    let mut schedule = Schedule::default();
    for distance in distances(world) {
        let (to, from) = (world.rank_before(rank, distance), world.rank_after(rank, distance));
        let filled = distance as usize;
        let slots = filled.min(n - filled);
        let received = filled * count..(filled + slots) * count;
        push_exchange(&mut schedule, (to, 0..slots * count), (from, received), Action::Copy);
    }
    schedule
}

/// Creates a butterfly: an all-reduce in log2 n steps. Panics if the world's size is not a power of two.
///
/// In each step, two ranks reduce the same two values in opposite orders. Every built-in reduction gives the same bits in both
/// orders, so the result has the same bits on all ranks.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    assert!(world.get().is_power_of_two(), "the size of the world must be a power of two");
    let mut schedule = Schedule::default();
    for distance in distances(world) {
        let peer = Rank::new(rank.get() ^ distance);
        let action = if 2 * distance == world.get() { Action::ReduceLast } else { Action::Reduce };
        push_exchange(&mut schedule, (peer, 0..count), (peer, 0..count), action);
    }
    schedule
}

/// Returns 1, 2, 4, .., as far as these distances are less than the number of ranks.
fn distances(world: WorldSize) -> impl Iterator<Item = u32> {
    (0..u32::BITS).map(|power| 1 << power).take_while(move |&distance| distance < world.get())
}

/// Adds a step that sends and receives, each after the receive of the previous step.
fn push_exchange(
    schedule: &mut Schedule,
    (to, sent): (Rank, Range<usize>),
    (from, received): (Rank, Range<usize>),
    action: Action,
) {
    let awaited_step = schedule.last_step();
    let receive = Step::receive(from, received, action, awaited_step);
    schedule.steps.push(Step::send(to, sent, awaited_step).and(receive));
}
