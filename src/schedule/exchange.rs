//! Schedules in which every rank exchanges a message with every other one.

use super::partition::Partition;
use super::{Action, Inbound, Outbound, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// All-to-all: n-1 steps; each rank sends one part to each other rank and receives one from each, S bytes minus its
/// own part each way, (n-1)/n S if the parts are even.
///
/// The buffer holds the elements to send, cut as `send` says, and then those to receive, cut as `receive` says; a
/// rank's part in `send` for a peer is as long as the peer's part in `receive` for the rank. The caller copies the
/// own part.
///
/// In step k a rank sends to the rank k places after it and receives from the rank k places before it, so that the
/// ranks have different targets: the pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective
/// communication operations in MPICH", Int. J. High Performance Computing Applications 19 (2005). No step waits for
/// another.
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
