//! The all-to-all: every rank exchanges messages with every other rank. In the comments, n is the number of ranks.

use super::partition::Partition;
use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// Exchanges one part between each pair of ranks (all-to-all) in n-1 steps. If all parts have the same length, each
/// rank sends (n-1)/n S bytes. Here S is the number of bytes that the partition `send` divides.
///
/// The first `send.total()` elements of the buffer are the data to send: `send` says which part is for which rank. The
/// rest of the buffer is for the received data: `receive` says which part is from which rank. For ranks a and b, part b
/// in the `send` of rank a must be as long as part a in the `receive` of rank b. No step copies the part of a rank for
/// itself; the caller copies this part.
///
/// In step k rank r sends to rank r + k and receives from rank r - k (modulo n), so no two ranks send to the same
/// rank. This is the pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective communication
/// operations in MPICH", International Journal of High Performance Computing Applications 19 (2005). No step waits
/// for another step.
///
/// # Panics
///
/// If a partition does not have `world` parts, or if the number of elements in the buffer overflows a `usize`.
pub fn all_to_all(world: WorldSize, rank: Rank, send: &Partition, receive: &Partition) -> Schedule {
    send.assert_fits(world);
    receive.assert_fits(world);
    let receive_start = send.total();
    let length = receive_start.checked_add(receive.total());
    assert!(length.is_some(), "the length of the buffer must fit a usize");
    let step = |distance| {
        let (to, from) = (world.rank_after(rank, distance), world.rank_before(rank, distance));
        let part = receive.range(from);
        let range = receive_start + part.start..receive_start + part.end;
        Step::send(to, send.range(to), None).and(Step::receive(from, range, Action::Copy, None))
    };
    (1..world.get()).map(step).collect::<Vec<Step>>().into()
}
