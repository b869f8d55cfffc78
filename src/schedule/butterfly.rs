//! An all-reduce in which each rank exchanges its whole buffer with one partner after another. In the comments, n is
//! the number of ranks and S the size of the buffer in bytes.

use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Creates an all-reduce in log2 n steps, for worlds whose size is a power of two. Each rank sends S log2 n bytes.
///
/// In the step of distance d = 1, 2, 4, .. rank r exchanges its whole buffer with rank r XOR d. After this step, both
/// ranks have the reduction of the contributions of 2d ranks. The algorithm is recursive doubling, as in Thakur,
/// Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International Journal of
/// High Performance Computing Applications 19 (2005). The two ranks of a pair reduce the same two values in opposite
/// orders. Every built-in reduction gives the same bits in both orders, so the result has the same bits on all ranks.
///
/// A step sends the whole buffer and receives into the whole buffer. A rank must store arriving data until the rank
/// has sent its buffer and applied the data of the previous step. The algorithm is therefore only for short messages.
///
/// # Panics
///
/// If the world's size is not a power of two.
pub fn all_reduce(world: WorldSize, rank: Rank, count: usize) -> Schedule {
    assert!(world.get().is_power_of_two(), "the size of the world must be a power of two");
    let mut schedule = Schedule::default();
    let mut distance = 1;
    while distance < world.get() {
        let peer = Rank::new(rank.get() ^ distance);
        let awaited_step = schedule.last_step();
        distance *= 2;
        let action = if distance == world.get() { Action::ReduceLast } else { Action::Reduce };
        let receive = Step::receive(peer, 0..count, action, awaited_step);
        schedule.steps.push(Step::send(peer, 0..count, awaited_step).and(receive));
    }
    schedule
}
