//! Schedules in which the data of a rank doubles with every step.

use super::{Action, After, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// All-gather of `count` elements from each rank in ceil(log2 n) steps, for any n; n-1 times `count` elements sent by each
/// rank.
///
/// The buffer has a slot of `count` elements for each rank. Slot i is for the rank i places after this one; so slot 0
/// is the rank's own, and its data is always at the beginning. In the step of distance d a rank has the slots of the
/// d ranks from itself on; it sends them to the rank d places before it and receives as many from the rank d places
/// after it. Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
/// multiport message-passing systems", IEEE Trans. Parallel and Distributed Systems 8 (1997).
///
/// A step sends what all earlier steps have received, so a receive waits for the one before it: this is for short
/// messages.
///
/// # Panics
///
/// If the slots together have more elements than a `usize` can count.
pub fn all_gather(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    let n = world.as_usize();
    assert!(count.checked_mul(n).is_some(), "a buffer's length can be counted");
    let mut schedule = Schedule::default();
    let mut distance = 1;
    while distance < n {
        let slots = distance.min(n - distance);
        let after = schedule.steps.len().checked_sub(1).map(After);
        let send = Outbound { peer: world.before(rank, distance as u32), range: 0..slots * count, after };
        let receive = Inbound {
            peer: world.after(rank, distance as u32),
            range: distance * count..(distance + slots) * count,
            action: Action::Copy,
            after,
        };
        schedule.steps.push(Step { send: Some(send), receive: Some(receive) });
        distance *= 2;
    }
    schedule
}
