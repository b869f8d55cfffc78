//! The programs of the ranks of a host.

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::simulation::program::{OPERATIONS, SimCall};
use crate::types::{Algorithm, Operation, Rank, WorldSize};

/// Returns up to 8 collectives, or many short ones in which some ranks wait for no other ranks, and a barrier.
pub fn random_program(random: &mut StdRng, world: WorldSize, slot_bytes: usize) -> Vec<SimCall> {
    let groups = [world.ranks().collect()];
    let mut program = Vec::new();
    if random.random_bool(0.2) {
        // In a program of one kind, the same ranks are ahead of the others all the time.
        let one_way = [Operation::Broadcast, Operation::Scatter, Operation::Gather];
        let kinds = [&one_way[..2], &one_way[2..], &one_way[..]][random.random_range(0..3)];
        let count_maxima = if slot_bytes > 256 { [4, 30, 1500] } else { [4, 30, 30] };
        let (count_max, other_root) = (count_maxima[random.random_range(0..3)], random.random_bool(0.3));
        for _ in 0..random.random_range(50..150) {
            let call = SimCall::random_call_of(kinds[random.random_range(0..kinds.len())], random, &groups);
            let root = Rank::new(u32::from(other_root && random.random_bool(0.1)));
            let count = random.random_range(0..=count_max);
            program.push(SimCall { algorithm: Algorithm::Direct, count, root, ..call });
        }
        program.push(SimCall { algorithm: Algorithm::Direct, ..SimCall::BARRIER });
        return program;
    }
    for _ in 0..random.random_range(1..=8) {
        let operation = OPERATIONS[random.random_range(0..OPERATIONS.len() - 1)];
        let call = SimCall::random_call_of(operation, random, &groups);
        let count_max = if slot_bytes > 256 { 4000 } else { 60 };
        let count = if operation == Operation::Barrier { 0 } else { random.random_range(0..count_max) };
        program.push(SimCall { algorithm: Algorithm::Direct, count, ..call });
    }
    program.push(SimCall { algorithm: Algorithm::Direct, ..SimCall::BARRIER });
    program
}

/// Replaces about half of the calls by all-reduces, which are the only operations that expose buffers. The last call stays.
pub fn add_all_reduces(program: &mut [SimCall], random: &mut StdRng) {
    let last = program.len() - 1;
    for call in &mut program[..last] {
        if random.random_bool(0.5) {
            call.operation = Operation::AllReduce;
        }
    }
}
