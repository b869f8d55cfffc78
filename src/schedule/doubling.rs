//! An all-gather in which every step doubles the amount of data that a rank has. In the comments, n is the number of
//! ranks.

use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Creates an all-gather of `count` elements from each rank in ceil(log2 n) steps, for any n. Each rank sends
/// (n-1) * `count` elements.
///
/// The buffer has a slot of `count` elements for each rank. Slot i of rank r is for the data of rank r + i (modulo
/// n), so slot 0 contains the rank's own data. Before the step of distance d = 1, 2, 4, .., the first d slots are
/// filled. In the step of distance d, rank r sends slots 0 to d-1 to rank r - d, and receives slots d to 2d-1 from
/// rank r + d. The last step may transfer fewer slots. This is the algorithm of Bruck, Ho, Kipnis, Upfal and
/// Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE
/// Transactions on Parallel and Distributed Systems 8 (1997).
///
/// In each step, a rank sends data that it has received before, so each step waits for the receive of the previous
/// step. A rank must store data that arrives early. The algorithm is therefore only for short messages.
///
/// # Panics
///
/// If the number of elements in all slots overflows a `usize`.
pub fn all_gather(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let n = world.as_usize();
    assert!(count.checked_mul(n).is_some(), "the length of the buffer must fit a usize");
    let mut schedule = Schedule::default();
    let mut distance = 1;
    while distance < n {
        let slots = distance.min(n - distance);
        let (to, from) = (world.rank_before(rank, distance as u32), world.rank_after(rank, distance as u32));
        let (awaited_step, received) = (schedule.last_step(), distance * count..(distance + slots) * count);
        let receive = Step::receive(from, received, Action::Copy, awaited_step);
        schedule.steps.push(Step::send(to, 0..slots * count, awaited_step).and(receive));
        distance *= 2;
    }
    schedule
}
