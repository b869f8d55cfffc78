//! Schedules of ceil(log2 n) steps. In the step of distance d = 1, 2, 4, .. a rank exchanges a message with the ranks at this
//! distance. Each step waits for the receive of the previous step, and a rank must store data that arrives early. So these
//! schedules are only for short messages. The comments of `schedule/mod.rs` define n and S.

use std::ops::Range;

use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Synchronises n ranks in ceil(log2 n) rounds. In round k, counted from 0, rank r sends an empty message to rank r +
/// 2^k and waits for the message of rank r - 2^k (modulo n). A rank sends a message only after it has received the
/// message of the previous round. After the last round, each rank has therefore heard from all ranks, directly or
/// through other ranks, and knows that all ranks have entered the barrier. This is the dissemination barrier of Hensgen,
/// Finkel and Manber, "Two algorithms for barrier synchronization", International Journal of Parallel Programming 17 (1988).
pub fn barrier(world: WorldSize, rank: Rank) -> Schedule {
    let mut schedule = Schedule::default();
    for distance in distances(world) {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        push_exchange(&mut schedule, (to, 0..0), (from, 0..0), Action::Copy);
    }
    schedule
}

/// Creates an all-gather of `count` elements from each rank in ceil(log2 n) steps, for any n. Each rank sends
/// (n-1) * `count` elements. Panics if the number of elements in all slots overflows a `usize`.
///
/// The buffer has a slot of `count` elements for each rank. Slot i of rank r is for the data of rank r + i (modulo
/// n), so slot 0 contains the rank's own data. Before the step of distance d = 1, 2, 4, .., the first d slots are
/// filled. In the step of distance d, rank r sends slots 0 to d-1 to rank r - d, and receives slots d to 2d-1 from
/// rank r + d. The last step may transfer fewer slots. This is the algorithm of Bruck, Ho, Kipnis, Upfal and
/// Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE
/// Transactions on Parallel and Distributed Systems 8 (1997).
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

/// Creates a butterfly: an all-reduce in log2 n steps, for worlds whose size is a power of two. Each rank sends S log2 n bytes.
/// Panics if the world's size is not a power of two.
///
/// In the step of distance d = 1, 2, 4, .. rank r exchanges its whole buffer with rank r XOR d. After this step, both
/// ranks have the reduction of the contributions of 2d ranks. The algorithm is recursive doubling, as in Thakur,
/// Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International Journal of
/// High Performance Computing Applications 19 (2005). The two ranks of a pair reduce the same two values in opposite
/// orders. Every built-in reduction gives the same bits in both orders, so the result has the same bits on all ranks.
///
/// A step sends the whole buffer and receives into the whole buffer, so a rank must also store arriving data until it has
/// sent its own buffer.
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
