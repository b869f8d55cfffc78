//! Schedules in which every rank exchanges a message with every other one.

use super::partition::Partition;
use super::{Action, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// All-to-all: n-1 steps; each rank sends what it has for the others and receives what they have for it, S bytes less
/// its own part each way, (n-1)/n S if the parts are even.
///
/// The buffer is what is sent, cut as `send` says, and behind it what is received, cut as `receive` says; a rank's part
/// in `send` for a peer is as long as the peer's part in `receive` for the rank. The own part is left to the caller, who
/// copies it.
///
/// In step k a rank sends to the one k places on and receives from the one k places back, so that no rank is the target
/// of all: the pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
/// in MPICH", Int. J. High Performance Computing Applications 19 (2005). No step waits for another.
///
/// # Panics
///
/// If a partition is not one of `world` parts, or if the buffer would have more elements than a `usize` can count.
pub fn all_to_all(world: WorldSize, rank: Rank, send: &Partition, receive: &Partition) -> Schedule {
    send.assert_fits(world);
    receive.assert_fits(world);
    let received = send.total();
    let length = received.checked_add(receive.total());
    assert!(length.is_some(), "a buffer's length can be counted");
    let step = |distance| {
        let (to, from) = (world.after(rank, distance), world.before(rank, distance));
        let part = receive.range(from);
        let range = received + part.start..received + part.end;
        Step {
            send: Some(Outbound { peer: to, range: send.range(to), after: None }),
            receive: Some(Inbound { peer: from, range, action: Action::Copy, after: None }),
        }
    };
    Schedule { steps: (1..world.get()).map(step).collect() }
}
