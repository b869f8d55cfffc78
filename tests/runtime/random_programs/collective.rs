//! Runs one collective of a random program in one of its forms, and checks the result.

use std::ops::Range;

use rand::RngExt as _;
use ringtrain::verbs::{
    AllGather, AllReduce, AllToAll, Broadcast, Exscan, Gather, ReduceScatter, Scan, Scatter, function,
};
use ringtrain::{Group, Rank};

use super::program::CollectiveKind;
use super::{
    ProgramRunner, REDUCTIONS, apply_reduction, compose_affine, contributed_elements, reduce_in_rank_order,
};

/// Returns the lengths of `size` uneven parts of `count` elements.
fn uneven_counts(size: usize, count: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (0..size).map(|rank| count / size * (rank % 2)).collect();
    counts[size - 1] += count - counts.iter().sum::<usize>();
    counts
}

/// Returns the range of one rank's part in a buffer with parts of these lengths.
fn part_range(counts: &[usize], rank: usize) -> Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

impl ProgramRunner {
    /// Runs a collective. For the same collective, some ranks may make the blocking call, and other ranks the
    /// asynchronous call.
    pub(super) fn run_collective(
        &mut self,
        step: usize,
        group: &mut Group,
        kind: CollectiveKind,
        count: usize,
        root: usize,
    ) {
        let (size, me) = (group.size().as_usize(), group.rank().index());
        let root = root % size;
        let description = format!("step {step}: {kind:?} of {count} on rank {me} of {size}, root {root}");
        let contributions: Vec<Vec<u64>> =
            group.members().iter().map(|rank| contributed_elements(step, rank.get(), count)).collect();
        match kind {
            CollectiveKind::Scan
            | CollectiveKind::Exscan
            | CollectiveKind::AllReduce
            | CollectiveKind::AllReduceWith
            | CollectiveKind::Reduce
            | CollectiveKind::ReduceScatter => {
                self.run_reduction(step, group, kind, &contributions, root, description);
            }
            CollectiveKind::Barrier if self.rng.random_bool(0.5) => group.barrier().unwrap(),
            CollectiveKind::Barrier => {
                let handle = group.barrier_async().unwrap();
                self.check_handle_result_or_drop_handle(handle, (), description);
            }
            CollectiveKind::Object => {
                let object = |rank: usize| (format!("of rank {rank}"), contributions[rank].clone());
                let received = group.broadcast_object(&object(me), Rank::new(root as u32)).unwrap();
                assert!(received == object(root), "{description}");
            }
            _ => self.run_movement(group, kind, &contributions, root, description),
        }
    }

    /// Runs a collective that reduces. `contributions` has the contribution of each rank.
    fn run_reduction(
        &mut self,
        step: usize,
        group: &mut Group,
        kind: CollectiveKind,
        contributions: &[Vec<u64>],
        root: usize,
        description: String,
    ) {
        let me = group.rank().index();
        let op = REDUCTIONS[step % REDUCTIONS.len()];
        let combined = |ranks: Range<usize>| {
            reduce_in_rank_order(&contributions[ranks], |a, b| apply_reduction(op, a, b))
        };
        let whole = combined(0..contributions.len());
        let mut own = contributions[me].clone();
        let root_rank = Rank::new(root as u32);
        match kind {
            CollectiveKind::AllReduceWith => {
                group
                    .call(AllReduce::new(function(|&first, &second| compose_affine(first, second))))
                    .run(&mut own)
                    .unwrap();
                assert!(own == reduce_in_rank_order(contributions, compose_affine), "{description}");
            }
            CollectiveKind::AllReduce if self.rng.random_bool(0.5) => {
                group.all_reduce(&mut own, op).unwrap();
                assert!(own == whole, "{description}");
            }
            CollectiveKind::AllReduce => {
                let handle = group.all_reduce_async(own, op).unwrap();
                self.check_handle_result_or_drop_handle(handle, whole, description);
            }
            CollectiveKind::Scan => {
                let handle = group.call(Scan::new(op)).start(own).unwrap();
                self.check_handle_result_or_drop_handle(handle, combined(0..me + 1), description);
            }
            CollectiveKind::Exscan => {
                let handle = group.call(Exscan::new(op)).start_from(&own).unwrap();
                self.check_handle_result_or_drop_handle(
                    handle,
                    if me > 0 { combined(0..me) } else { Vec::new() },
                    description,
                );
            }
            CollectiveKind::ReduceScatter => {
                let counts = uneven_counts(contributions.len(), own.len());
                let handle = group.call(ReduceScatter::new(op).counts(&counts)).start_from(&own).unwrap();
                self.check_handle_result_or_drop_handle(
                    handle,
                    whole[part_range(&counts, me)].to_vec(),
                    description,
                );
            }
            _ => {
                group.reduce(&mut own, op, root_rank).unwrap();
                assert!(me != root || own == whole, "{description}");
            }
        }
    }

    /// Runs a collective that moves data and reduces nothing. `contributions` has the contribution of each rank.
    fn run_movement(
        &mut self,
        group: &mut Group,
        kind: CollectiveKind,
        contributions: &[Vec<u64>],
        root: usize,
        description: String,
    ) {
        let (size, me) = (contributions.len(), group.rank().index());
        let counts = uneven_counts(size, contributions[me].len());
        let each = contributions[me].len() / size;
        let root_rank = Rank::new(root as u32);
        let of_parts = || {
            (0..size)
                .flat_map(|rank| contributions[rank][part_range(&counts, rank)].iter().copied())
                .collect()
        };
        let (handle, expected) = match kind {
            CollectiveKind::AllGather => {
                let handle = group
                    .call(AllGather::new().counts(&counts))
                    .start_from(&contributions[me][part_range(&counts, me)])
                    .unwrap();
                (handle, of_parts())
            }
            CollectiveKind::Gather => {
                let found = group
                    .call(Gather::to(root_rank).counts(&counts))
                    .run_from(&contributions[me][part_range(&counts, me)])
                    .unwrap();
                assert!(found == if me == root { of_parts() } else { Vec::new() }, "{description}");
                return;
            }
            CollectiveKind::Scatter => {
                let input = if me == root { &contributions[root][..] } else { &[] };
                let handle = group
                    .call(Scatter::from(root_rank).count(contributions[me].len()))
                    .start_from(input)
                    .unwrap();
                (handle, contributions[root][group.chunk(contributions[me].len(), group.rank())].to_vec())
            }
            CollectiveKind::Broadcast => {
                let handle = group.call(Broadcast::from(root_rank)).start(contributions[me].clone()).unwrap();
                (handle, contributions[root].clone())
            }
            _ => {
                let handle =
                    group.call(AllToAll::new()).start_from(&contributions[me][..each * size]).unwrap();
                (
                    handle,
                    contributions
                        .iter()
                        .flat_map(|one| one[me * each..(me + 1) * each].iter().copied())
                        .collect(),
                )
            }
        };
        self.check_handle_result_or_drop_handle(handle, expected, description);
    }
}
