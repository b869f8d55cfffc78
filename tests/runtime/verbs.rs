//! Runs every verb with every method of `Collective` and compares the results with the expected elements.

use ringtrain::verbs::{
    AllGather, AllReduce, AllToAll, Broadcast, Exscan, Gather, InPlace, OutOfPlace, Reduce, ReduceScatter,
    Scan, Scatter, function, scaled_sum,
};
use ringtrain::{Compression, Error, Group, Rank, ReduceOp};

use crate::util::ranks::{self, TestTransport};

/// Checks the methods that leave the input unchanged.
fn check_separate<V: OutOfPlace<u64> + Clone>(
    group: &mut Group,
    what: &str,
    verb: &V,
    input: &[u64],
    expected: &[u64],
) {
    let rank = group.rank();
    let handle = group.call(verb.clone()).start_from(input).unwrap();
    assert_eq!(group.call(verb.clone()).run_from(input).unwrap(), expected, "{what}: run_from, rank {rank}");
    // A rank that gets no result may pass an output of any length, except in an exscan.
    let mut output = vec![7; if expected.is_empty() { input.len() } else { expected.len() }];
    group.call(verb.clone()).run_into(input, &mut output).unwrap();
    let filler = vec![7; output.len()];
    let written = if expected.is_empty() { &filler[..] } else { expected };
    assert_eq!(output, written, "{what}: run_into, rank {rank}");
    assert_eq!(handle.wait().unwrap(), expected, "{what}: start_from, rank {rank}");
    // The group keeps the plan of a repeated call in shared memory.
    for repetition in 0..3 {
        let found = group.call(verb.clone()).run_from(input).unwrap();
        assert_eq!(found, expected, "{what}: run_from, rank {rank}, repetition {repetition}");
        let mut output = filler.clone();
        group.call(verb.clone()).run_into(input, &mut output).unwrap();
        assert_eq!(output, written, "{what}: run_into, rank {rank}, repetition {repetition}");
    }
}

/// Checks the methods that work in place. `before` is the buffer before the call.
fn check_in_place<V: InPlace<u64> + Clone>(
    group: &mut Group,
    what: &str,
    verb: &V,
    before: &[u64],
    expected: &[u64],
) {
    let rank = group.rank();
    let handle = group.call(verb.clone()).start(before.to_vec()).unwrap();
    let mut buffer = before.to_vec();
    let range = group.call(verb.clone()).run(&mut buffer).unwrap();
    assert_eq!(buffer[range.clone()], *expected, "{what}: run, rank {rank}");
    assert_eq!(handle.wait().unwrap()[range], *expected, "{what}: start, rank {rank}");
    for repetition in 0..3 {
        let mut buffer = before.to_vec();
        let range = group.call(verb.clone()).run(&mut buffer).unwrap();
        assert_eq!(buffer[range], *expected, "{what}: run, rank {rank}, repetition {repetition}");
    }
}

/// A group keeps a limited number of plans. The ranks repeat more different calls than that, in place and out of place, with two
/// reductions and several roots.
#[test]
fn many_different_repeated_calls_give_the_right_results() {
    TestTransport::Shm.run(3, |mut group| {
        let rank = u64::from(group.rank().get());
        for _ in 0..3 {
            for count in 1..25usize {
                let own: Vec<u64> = (0..count as u64).map(|index| index + rank).collect();
                let (mut sum, mut highest, mut from_root) = (own.clone(), own.clone(), own.clone());
                let root = Rank::new(count as u32 % 3);
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                group.all_reduce(&mut highest, ReduceOp::Max).unwrap();
                group.broadcast(&mut from_root, root).unwrap();
                let gathered = group.call(Gather::to(root)).run_from(&own[..1]).unwrap();
                group.barrier().unwrap();
                let all =
                    |factor: u64, term: u64| (0..count as u64).map(|index| factor * index + term).collect();
                let expected: [Vec<u64>; 3] = [all(3, 3), all(1, 2), all(1, u64::from(root.get()))];
                assert_eq!([sum, highest, from_root], expected, "rank {rank}, {count} elements");
                let of_root: &[u64] = if group.rank() == root { &[0, 1, 2] } else { &[] };
                assert_eq!(gathered, of_root, "rank {rank}");
            }
        }
        // A kept plan does not hide wrong arguments.
        let scattered = [1u64, 2, 3];
        let root = Rank::ZERO;
        for _ in 0..2 {
            let own = group.call(Scatter::from(root).count(3)).run_from(&scattered).unwrap();
            assert_eq!(own, [rank + 1]);
        }
        if group.rank() == root {
            let error = group.call(Scatter::from(root).count(3)).run_from(&scattered[..2]).unwrap_err();
            assert!(matches!(error, Error::InvalidCounts(_)), "{error}");
        }
        let outside = Rank::new(3);
        assert!(matches!(group.broadcast(&mut [0u64], outside), Err(Error::InvalidRoot { .. })));
        group.barrier().unwrap();
    });
}

/// Checks a verb with both kinds of methods. In place, the buffer is the input.
fn check<V: InPlace<u64> + OutOfPlace<u64> + Clone>(
    group: &mut Group,
    what: &str,
    verb: &V,
    input: &[u64],
    expected: &[u64],
) {
    check_separate(group, what, verb, input, expected);
    check_in_place(group, what, verb, input, expected);
}

/// The number of elements for each rank in a buffer of even parts.
const EACH: usize = 2;

fn check_reductions(group: &mut Group, root: Rank) {
    let (n, rank) = (group.size().get(), group.rank());
    let count = EACH * n as usize;
    let of = |rank: u32| move |index: usize| u64::from(rank) * 100 + index as u64 + 1;
    let own: Vec<u64> = (0..count).map(of(rank.get())).collect();
    let sums = |ranks: std::ops::Range<u32>| -> Vec<u64> {
        if ranks.is_empty() {
            return Vec::new();
        }
        (0..count).map(|index| ranks.clone().map(|rank| of(rank)(index)).sum()).collect()
    };
    let all = sums(0..n);
    let of_root = if rank == root { &all[..] } else { &[] };
    let sum = ReduceOp::Sum;
    check(group, "all_reduce", &AllReduce::new(sum), &own, &all);
    check(group, "reduce", &Reduce::to(root, sum), &own, of_root);
    check(group, "scan", &Scan::new(sum), &own, &sums(0..rank.get() + 1));
    check(group, "exscan", &Exscan::new(sum), &own, &sums(0..rank.get()));
    let even = group.chunk(count, rank);
    check(group, "reduce_scatter", &ReduceScatter::new(sum), &own, &all[even]);
    // The last rank gets everything.
    let mut counts = vec![0; n as usize];
    counts[n as usize - 1] = count;
    let part = if rank.get() == n - 1 { &all[..] } else { &[] };
    check_in_place(group, "reduce_scatter", &ReduceScatter::new(sum).counts(&counts), &own, part);
    let found = group.call(ReduceScatter::new(sum).counts(&counts)).run_from(&own).unwrap();
    assert_eq!(found, part);

    // `first` is associative and does not commute: the result is the contribution of rank 0.
    let first = || function(|lower: &u64, _: &u64| *lower);
    let of_0: Vec<u64> = (0..count).map(of(0)).collect();
    check(group, "all_reduce with a function", &AllReduce::new(first()), &own, &of_0);
    let of_root = if rank == root { &of_0[..] } else { &[] };
    check(group, "reduce with a function", &Reduce::to(root, first()), &own, of_root);
    check(group, "scan with a function", &Scan::new(first()), &own, &of_0);
    // Each rank multiplies its elements by its rank.
    let factor = u64::from(rank.get());
    let scaled: Vec<u64> =
        (0..count).map(|index| (0..n).map(|rank| of(rank)(index) * u64::from(rank)).sum()).collect();
    check(group, "scaled all_reduce", &AllReduce::new(scaled_sum(factor)), &own, &scaled);
}

fn check_movements(group: &mut Group, root: Rank) {
    let (size, rank) = (group.size(), group.rank());
    let (n, is_root) = (size.as_usize(), rank == root);
    // Rank r contributes r + 1 elements if the parts are uneven.
    let counts: Vec<usize> = (1..=n).collect();
    for counts in [None, Some(&counts[..])] {
        let part = |of: Rank| vec![u64::from(of.get()) + 1; counts.map_or(EACH, |counts| counts[of.index()])];
        let own = part(rank);
        let all: Vec<u64> = size.ranks().flat_map(part).collect();
        // A buffer in which the ranks know only their own parts.
        let own_in_place: Vec<u64> =
            all.iter().map(|&one| if one == u64::from(rank.get()) + 1 { one } else { 0 }).collect();
        let of_root = if is_root { &all[..] } else { &[] };
        let (all_gather, gather) = match counts {
            Some(counts) => (AllGather::new().counts(counts), Gather::to(root).counts(counts)),
            None => (AllGather::new(), Gather::to(root)),
        };
        check_separate(group, "all_gather", &all_gather, &own, &all);
        check_in_place(group, "all_gather", &all_gather, &own_in_place, &all);
        check_separate(group, "gather", &gather, &own, of_root);
        check_in_place(group, "gather", &gather, &own_in_place, of_root);
        let input = if is_root { &all[..] } else { &[] };
        if let Some(counts) = counts {
            check_separate(group, "scatter", &Scatter::from(root).counts(counts), input, &own);
        } else {
            check_separate(group, "scatter", &Scatter::from(root).count(all.len()), input, &own);
            let buffer = if is_root { all.clone() } else { vec![0; all.len()] };
            check_in_place(group, "scatter", &Scatter::from(root), &buffer, &own);
        }
    }
    let model = [5, 6, 7];
    let own = if is_root { model } else { [0; 3] };
    check_in_place(group, "broadcast", &Broadcast::from(root), &own, &model);
    check_separate(
        group,
        "broadcast",
        &Broadcast::from(root).count(3),
        if is_root { &own[..] } else { &[] },
        &model,
    );

    // The part that one rank sends to another names both ranks.
    let part = |from: Rank, to: Rank| [u64::from(from.get() * 10 + to.get()); EACH];
    let sent: Vec<u64> = size.ranks().flat_map(|to| part(rank, to)).collect();
    let received: Vec<u64> = size.ranks().flat_map(|from| part(from, rank)).collect();
    check(group, "all_to_all", &AllToAll::new(), &sent, &received);
    let counts = vec![EACH; n];
    check_separate(group, "all_to_all", &AllToAll::new().counts(&counts, &counts), &sent, &received);
}

#[test]
fn every_verb_gives_the_right_result_with_every_method() {
    for n in 1..=3 {
        for transport in TestTransport::ALL {
            ranks::run_with(
                n,
                move |options| transport.apply(options),
                move |mut group| {
                    for root in group.size().ranks() {
                        check_reductions(&mut group, root);
                        check_movements(&mut group, root);
                    }
                    let verb = AllReduce::new(ReduceOp::Sum).compressed(Compression::Bf16);
                    let handle = group.call(verb.clone()).start_from(&[1.0f32, 2.0]).unwrap();
                    let sums = group.call(verb).run_from(&[1.0f32, 2.0]).unwrap();
                    assert_eq!(sums, [n as f32, 2.0 * n as f32]);
                    assert_eq!(handle.wait().unwrap(), sums);
                },
            );
        }
    }
}

/// A call that cannot be right fails on this rank alone, before anything is sent, and the group can still be used.
#[test]
fn calls_with_wrong_lengths_and_roots_are_refused() {
    ranks::run(2, |mut group| {
        let root = Rank::new(2);
        let world = group.size();
        let no_root = Err(Error::InvalidRoot { root, world });
        assert_eq!(group.call(Gather::to(root)).run_from(&[1u8]), no_root);
        assert_eq!(group.call(Broadcast::from(root).count(1)).run_from(&[1u8]), no_root);
        let refused = |result: Result<(), Error>| assert!(matches!(result, Err(Error::InvalidCounts(_))));
        refused(group.call(AllGather::new().counts(&[1, 1])).run(&mut [1u8; 3]).map(drop));
        refused(group.call(Gather::to(Rank::ZERO).counts(&[1])).run(&mut [1u8; 3]).map(drop));
        refused(group.call(AllToAll::new()).run(&mut [1u8; 3]).map(drop));
        refused(group.call(AllToAll::new()).start(vec![1u8; 3]).map(drop));
        let average = group.call(Exscan::new(ReduceOp::Average)).run(&mut [1f32]);
        assert!(matches!(average, Err(Error::Unsupported { .. })));
        group.barrier().unwrap();
    });
}
