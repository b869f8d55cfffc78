//! Proof of the all-gather in which every step doubles the amount of data that a rank has.

use super::{Proof, SymbolicValue};
use crate::schedule::doubling;
use crate::types::Rank;

#[test]
fn doubling_all_gather_gives_every_rank_every_part() {
    // The data of rank r are the elements r * count to (r + 1) * count - 1 of the operation.
    let data_of_rank = |rank: Rank, count: usize| {
        (0..count).map(move |e| SymbolicValue::contribution(rank, rank.index() * count + e))
    };
    let proof = Proof { receives_may_wait: true, ..Proof::new() };
    proof.run(
        doubling::all_gather,
        |world, rank, count| {
            let mut buffer: Vec<SymbolicValue> = data_of_rank(rank, count).collect();
            buffer.resize(world.as_usize() * count, SymbolicValue::UNSPECIFIED);
            buffer
        },
        |world, rank, count, state| {
            let in_order =
                (0..world.get()).flat_map(|distance| data_of_rank(world.rank_after(rank, distance), count));
            assert_eq!(state.buffer, in_order.collect::<Vec<SymbolicValue>>());
        },
    );
}
