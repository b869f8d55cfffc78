//! Runs one collective of a random program in one of its forms, and checks the result.

use std::ops::Range;

use rand::RngExt as _;
use ringtrain::{Group, Rank};

use super::program::Kind;
use super::{OPS, Runner, combine, compose, content, reduce};

/// Returns the lengths of `size` uneven parts of `count` elements.
fn uneven_counts(size: usize, count: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = (0..size).map(|rank| count / size * (rank % 2)).collect();
    counts[size - 1] += count - counts.iter().sum::<usize>();
    counts
}

fn part_range(counts: &[usize], rank: usize) -> Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

impl Runner {
    /// Runs a collective. In the same operation, some ranks may make the blocking call and other ranks the asynchronous call.
    pub(super) fn run_collective(
        &mut self,
        step: usize,
        group: &mut Group,
        kind: Kind,
        count: usize,
        root: usize,
    ) {
        let (size, me) = (group.size().as_usize(), group.rank().index());
        let root = root % size;
        let what = format!("step {step}: {kind:?} of {count} on rank {me} of {size}, root {root}");
        let all: Vec<Vec<u64>> =
            group.members().iter().map(|rank| content(step, rank.get(), count)).collect();
        match kind {
            Kind::Scan
            | Kind::Exscan
            | Kind::AllReduce
            | Kind::AllReduceWith
            | Kind::Reduce
            | Kind::ReduceScatter => {
                self.run_reduction(step, group, kind, &all, root, what);
            }
            Kind::Barrier if self.rng.random_bool(0.5) => group.barrier().unwrap(),
            Kind::Barrier => {
                let handle = group.barrier_async().unwrap();
                self.check_or_drop(handle, (), what);
            }
            Kind::Object => {
                let object = |rank: usize| (format!("of rank {rank}"), all[rank].clone());
                let received = group.broadcast_object(&object(me), Rank::new(root as u32)).unwrap();
                assert!(received == object(root), "{what}");
            }
            _ => self.run_movement(group, kind, &all, root, what),
        }
    }

    fn run_reduction(
        &mut self,
        step: usize,
        group: &mut Group,
        kind: Kind,
        all: &[Vec<u64>],
        root: usize,
        what: String,
    ) {
        let me = group.rank().index();
        let op = OPS[step % OPS.len()];
        let combined = |ranks: Range<usize>| reduce(&all[ranks], |a, b| combine(op, a, b));
        let whole = combined(0..all.len());
        let mut own = all[me].clone();
        let root_rank = Rank::new(root as u32);
        match kind {
            Kind::AllReduceWith => {
                group.all_reduce_with(&mut own, |&first, &second| compose(first, second)).unwrap();
                assert!(own == reduce(all, compose), "{what}");
            }
            Kind::AllReduce if self.rng.random_bool(0.5) => {
                group.all_reduce(&mut own, op).unwrap();
                assert!(own == whole, "{what}");
            }
            Kind::AllReduce => {
                let handle = group.all_reduce_async(own, op).unwrap();
                self.check_or_drop(handle, whole, what);
            }
            Kind::Scan => {
                let handle = group.scan_async(own, op).unwrap();
                self.check_or_drop(handle, combined(0..me + 1), what);
            }
            Kind::Exscan => {
                let handle = group.exscan_async(&own, op).unwrap();
                self.check_or_drop(handle, (me > 0).then(|| combined(0..me)), what);
            }
            Kind::ReduceScatter => {
                let counts = uneven_counts(all.len(), own.len());
                let handle = group.reduce_scatter_uneven_async(&own, &counts, op).unwrap();
                self.check_or_drop(handle, whole[part_range(&counts, me)].to_vec(), what);
            }
            _ => {
                group.reduce(&mut own, op, root_rank).unwrap();
                assert!(me != root || own == whole, "{what}");
            }
        }
    }

    fn run_movement(&mut self, group: &mut Group, kind: Kind, all: &[Vec<u64>], root: usize, what: String) {
        let (size, me) = (all.len(), group.rank().index());
        let counts = uneven_counts(size, all[me].len());
        let each = all[me].len() / size;
        let root_rank = Rank::new(root as u32);
        let of_parts =
            || (0..size).flat_map(|rank| all[rank][part_range(&counts, rank)].iter().copied()).collect();
        let (handle, expected) = match kind {
            Kind::AllGather => {
                let handle =
                    group.all_gather_uneven_async(&all[me][part_range(&counts, me)], &counts).unwrap();
                (handle, of_parts())
            }
            Kind::Gather => {
                let found =
                    group.gather_uneven(&all[me][part_range(&counts, me)], &counts, root_rank).unwrap();
                assert!(found == if me == root { of_parts() } else { Vec::new() }, "{what}");
                return;
            }
            Kind::Scatter => {
                let input = if me == root { &all[root][..] } else { &[] };
                let handle = group.scatter_async(input, all[me].len(), root_rank).unwrap();
                (handle, all[root][group.chunk(all[me].len(), group.rank())].to_vec())
            }
            Kind::Broadcast => {
                let handle = group.broadcast_async(all[me].clone(), root_rank).unwrap();
                (handle, all[root].clone())
            }
            _ => {
                let handle = group.all_to_all_async(&all[me][..each * size]).unwrap();
                (handle, all.iter().flat_map(|one| one[me * each..(me + 1) * each].iter().copied()).collect())
            }
        };
        self.check_or_drop(handle, expected, what);
    }
}
