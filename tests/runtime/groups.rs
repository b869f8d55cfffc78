//! Tests of groups made with `split`, `subgroup` and `duplicate`. Each group has the right members in the right
//! order, and the operations of one group do not disturb the operations of another group.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use crate::util::ranks::TestTransport;
use crate::util::{if_long_tests_else, runs_long_tests};
use ringtrain::verbs::{
    AllGather, AllReduce, AllToAll, Exscan, Gather, Reduce, ReduceScatter, Scatter, function,
};
use ringtrain::{Error, Group, Rank, ReduceOp};

fn rank_numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.get()).collect()
}

/// Checks the members of a group and their order, and that the collectives of the group reach exactly these members.
fn check_members(transport: TestTransport, group: &mut Group, world_rank: u32, members: &[u32]) {
    assert_eq!(rank_numbers(group.members()), members);
    assert_eq!(group.size().as_usize(), members.len());
    assert_eq!(members[group.rank().index()], world_rank);
    if transport != TestTransport::Hosts {
        assert_eq!((group.local_rank(), group.local_size()), (group.rank(), group.size()));
    }
    assert_eq!(group.call(AllGather::new()).run_from(&[world_rank]).unwrap(), members);
    let mut sum = vec![u64::from(world_rank); 100_000];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    let expected: u64 = members.iter().map(|&member| u64::from(member)).sum();
    assert!(sum.iter().all(|&element| element == expected));
    for root in group.size().ranks() {
        let mut received = [world_rank];
        group.broadcast(&mut received, root).unwrap();
        assert_eq!(received, [members[root.index()]]);
    }
    group.barrier().unwrap();
}

fn a_split_sorts_by_colour_then_key_then_rank(transport: TestTransport) {
    transport.run(7, move |mut world| {
        let rank = world.rank().get();
        // Two colours, each with its ranks in descending order.
        let mut half = world.split(Some(rank % 2), -i64::from(rank)).unwrap().unwrap();
        check_members(
            transport,
            &mut half,
            rank,
            if rank.is_multiple_of(2) { &[6, 4, 2, 0] } else { &[5, 3, 1] },
        );
        // Ranks with equal keys keep their order. A rank without a colour gets no group.
        let part = world.split((rank != 3).then_some(9), i64::from(rank < 2)).unwrap();
        assert_eq!(part.is_none(), rank == 3);
        if let Some(mut part) = part {
            check_members(transport, &mut part, rank, &[2, 4, 5, 6, 0, 1]);
        }
        // Keys at the limits: the largest possible key on rank 0, and keys close to the smallest on all other ranks.
        // The colour is the largest possible.
        let key = if rank == 0 { i64::MAX } else { i64::MIN + i64::from(rank) };
        let mut all = world.split(Some(u32::MAX), key).unwrap().unwrap();
        check_members(transport, &mut all, rank, &[1, 2, 3, 4, 5, 6, 0]);
        // Split a subgroup: `half.rank()` is the rank within the subgroup, not in the world.
        let mut quarter = half.split(Some(half.rank().get() / 2), 0).unwrap().unwrap();
        let members: &[u32] = match rank {
            6 | 4 => &[6, 4],
            2 | 0 => &[2, 0],
            5 | 3 => &[5, 3],
            _ => &[1],
        };
        check_members(transport, &mut quarter, rank, members);
        check_members(
            transport,
            &mut half,
            rank,
            if rank.is_multiple_of(2) { &[6, 4, 2, 0] } else { &[5, 3, 1] },
        );
        check_members(transport, &mut world, rank, &[0, 1, 2, 3, 4, 5, 6]);
    });
}

fn a_split_without_colours_gives_no_group(transport: TestTransport) {
    transport.run(3, |mut world| {
        assert!(world.split(None, 0).unwrap().is_none());
        assert!(world.subgroup(&[]).unwrap().is_none());
        world.barrier().unwrap();
    });
}

fn a_subgroup_has_the_order_of_its_list(transport: TestTransport) {
    transport.run(5, move |mut world| {
        let rank = world.rank().get();
        let group = world.subgroup(&[4, 0, 3].map(Rank::new)).unwrap();
        assert_eq!(group.is_some(), [4, 0, 3].contains(&rank));
        let Some(mut group) = group else { return };
        check_members(transport, &mut group, rank, &[4, 0, 3]);
        for wrong in [&[Rank::new(3)][..], &[Rank::ZERO, Rank::ZERO]] {
            assert!(matches!(group.subgroup(wrong), Err(Error::InvalidPeer { .. })));
        }
        // 2 and 0 are ranks in `group`, not in the world.
        let pair = group.subgroup(&[2, 0].map(Rank::new)).unwrap();
        assert_eq!(pair.is_some(), rank != 0);
        if let Some(mut pair) = pair {
            check_members(transport, &mut pair, rank, &[3, 4]);
            let other = Rank::new(1 - pair.rank().get());
            let mut received = [0];
            pair.send_receive((&[rank], other, 1), (&mut received, other.into(), Some(1))).unwrap();
            assert_eq!(received, [7 - rank]);
        }
    });
}

/// A group of one rank uses no links, even if the job of the group has links.
fn a_group_of_one_gives_the_same_results_as_a_world_of_one(transport: TestTransport) {
    transport.run(3, move |mut world| {
        let rank = world.rank().get();
        let mut alone = world.split(Some(rank), 0).unwrap().unwrap();
        check_members(transport, &mut alone, rank, &[rank]);
        let solo = Group::solo();
        for (mut group, what) in [(solo, "a world of one"), (alone, "a group of one")] {
            let mut values = [0u8, 5, 1];
            group.all_reduce(&mut values, ReduceOp::LogicalOr).unwrap();
            assert_eq!(values, [0, 1, 1], "{what}: all_reduce");
            let values = group.all_reduce_async(vec![7i32, 0], ReduceOp::LogicalAnd).unwrap().wait().unwrap();
            assert_eq!(values, [1, 0], "{what}: all_reduce_async");
            let mut values = [3.5f32, 0.0];
            group.reduce(&mut values, ReduceOp::LogicalXor, Rank::ZERO).unwrap();
            assert_eq!(values, [1.0, 0.0], "{what}: reduce");
            let mut values = [3u8, 0];
            group.scan(&mut values, ReduceOp::LogicalOr).unwrap();
            assert_eq!(values, [1, 0], "{what}: scan");
            assert_eq!(group.call(Exscan::new(ReduceOp::Sum)).run_from(&values), Ok(Vec::new()), "{what}");
            assert_eq!(
                group.call(ReduceScatter::new(ReduceOp::LogicalOr).counts(&[1])).run_from(&[4u8]),
                Ok(vec![1]),
                "{what}"
            );
            let mut mean = [6i32];
            group.all_reduce(&mut mean, ReduceOp::Average).unwrap();
            group.call(AllReduce::new(function(|a: &i32, b: &i32| a + b))).run(&mut mean).unwrap();
            assert_eq!(mean, [6], "{what}");
            assert_eq!(group.call(AllToAll::new()).run_from(&[1, 2]), Ok(vec![1, 2]), "{what}");
            assert_eq!(
                group.call(Scatter::from(Rank::ZERO).count(2)).run_from(&[1, 2]),
                Ok(vec![1, 2]),
                "{what}"
            );
            assert_eq!(group.call(Gather::to(Rank::ZERO)).run_from(&[1, 2]), Ok(vec![1, 2]), "{what}");
            assert_eq!(group.all_gather_object(&"x".to_owned()), Ok(vec!["x".to_owned()]), "{what}");
            group.send(&[1], Rank::ZERO, 0).unwrap();
            let mut own = [0];
            group.receive(&mut own, Rank::ZERO, 0).unwrap();
            assert_eq!(own, [1], "{what}");
            let mut again = group.duplicate().unwrap();
            again.barrier().unwrap();
        }
        world.barrier().unwrap();
    });
}

/// A message that was sent in a group is not received in the duplicate of this group, although both have the same
/// ranks. The same holds for collectives.
fn a_duplicate_has_separate_messages_and_collectives(transport: TestTransport) {
    transport.run(2, |mut world| {
        let mut twin = world.duplicate().unwrap();
        let other = Rank::new(1 - world.rank().get());
        if world.rank() == Rank::ZERO {
            twin.send(&[1u8], other, 5).unwrap();
            world.send(&[2u8], other, 5).unwrap();
        } else {
            let mut buffer = [0u8];
            world.receive(&mut buffer, other, 5).unwrap();
            assert_eq!(buffer, [2]);
            assert!(world.probe(other, None, std::time::Duration::ZERO).unwrap().is_none());
            twin.receive(&mut buffer, other, None).unwrap();
            assert_eq!(buffer, [1]);
        }
        // Each rank may begin the operations of the two groups in a different order.
        let begin = |group: &mut Group, value: u32| {
            group.all_reduce_async(vec![value; 200_000], ReduceOp::Sum).unwrap()
        };
        let (first, second) = if world.rank() == Rank::ZERO {
            let first = begin(&mut world, 1);
            (first, begin(&mut twin, 10))
        } else {
            let second = begin(&mut twin, 20);
            (begin(&mut world, 2), second)
        };
        assert!(first.wait().unwrap().iter().all(|&sum| sum == 3));
        assert!(second.wait().unwrap().iter().all(|&sum| sum == 30));
    });
}

/// Runs all-reduces and exchanges with both neighbours. `salt` makes the values of each thread of a rank different.
fn run_rounds(mut group: Group, salt: u64, rounds: u64) {
    let n = u64::from(group.size().get());
    let rank = u64::from(group.rank().get());
    for round in 0..rounds {
        let count = [10, 30_000, 0, 1000][(round + salt) as usize % 4];
        let mut sum = vec![salt + round + rank; count];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        let expected = n * (salt + round) + n * (n - 1) / 2;
        assert!(sum.iter().all(|&element| element == expected), "thread {salt}, round {round}");
        let (to, from) =
            (group.size().rank_after(group.rank(), 1), group.size().rank_before(group.rank(), 1));
        let mut received = [0];
        group.send_receive((&[salt << 32 | rank], to, 1), (&mut received, from.into(), None)).unwrap();
        assert_eq!(received, [salt << 32 | u64::from(from.get())]);
    }
}

fn threads_of_one_rank_use_groups_at_the_same_time(transport: TestTransport) {
    for &n in if_long_tests_else(&[2, 3, 5][..], &[3]) {
        transport.run(n, |mut world| {
            let groups: Vec<Group> = (0..4).map(|_| world.duplicate().unwrap()).collect();
            let threads: Vec<_> = (0..)
                .zip(groups)
                .map(|(salt, group)| thread::spawn(move || run_rounds(group, salt * 1000, 40)))
                .collect();
            run_rounds(world, 77_000, 40);
            for thread in threads {
                thread.join().expect("the thread does not panic");
            }
        });
    }
}

/// If a thread that calls `test` completes operations for which other threads wait, the other threads must wake up at
/// once.
fn a_thread_that_polls_with_test_does_not_delay_other_threads(transport: TestTransport) {
    let rounds = if runs_long_tests() { 300 } else { 100 };
    transport.run(2, move |mut world| {
        let mut busy = world.duplicate().unwrap();
        let groups: Vec<Group> = (0..3).map(|_| world.duplicate().unwrap()).collect();
        let is_over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_over);
        let tester = thread::spawn(move || {
            loop {
                // The minimum is 1 only if all ranks want to stop, so all ranks stop in the same round.
                let own = vec![u32::from(stop.load(Ordering::SeqCst)); 1000];
                let handle = busy.all_reduce_async(own, ReduceOp::Min).unwrap();
                while !handle.test() {}
                if handle.wait().unwrap()[0] == 1 {
                    return;
                }
            }
        });
        let started = Instant::now();
        let workers: Vec<_> = (0..)
            .zip(groups)
            .map(|(salt, group)| thread::spawn(move || run_rounds(group, salt * 1000, rounds)))
            .collect();
        for thread in workers {
            thread.join().expect("the thread does not panic");
        }
        let elapsed = started.elapsed();
        is_over.store(true, Ordering::SeqCst);
        tester.join().expect("the thread does not panic");
        assert!(elapsed < world.timeout() / 2, "the work took {elapsed:?}");
    });
}

/// Threads that split their groups at the same time get separate groups.
fn threads_of_one_rank_split_groups_at_the_same_time(transport: TestTransport) {
    transport.run(3, |mut world| {
        let groups: Vec<Group> = (0..3).map(|_| world.duplicate().unwrap()).collect();
        let start = Arc::new(Barrier::new(groups.len()));
        let threads: Vec<_> = (0..)
            .zip(groups)
            .map(|(salt, mut group)| {
                let start = Arc::clone(&start);
                thread::spawn(move || {
                    for round in 0..10 {
                        start.wait();
                        let part = group.duplicate().unwrap();
                        // All threads have their new groups now, and use them at the same time.
                        start.wait();
                        run_rounds(part, salt * 1000 + round, 4);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("the thread does not panic");
        }
    });
}

fn other_groups_still_work_after_a_group_is_dropped(transport: TestTransport) {
    transport.run(4, move |mut world| {
        let rank = world.rank().get();
        for round in 0..20 {
            let mut half = world.split(Some((rank + round) % 2), 0).unwrap().unwrap();
            let handle = half.all_reduce_async(vec![1u32; 50_000], ReduceOp::Sum).unwrap();
            drop(half);
            world.barrier().unwrap();
            assert!(handle.wait().unwrap().iter().all(|&sum| sum == 2));
        }
        let mut twin = world.duplicate().unwrap();
        // Close the first group. The duplicate can still be used.
        world.close();
        check_members(transport, &mut twin, rank, &[0, 1, 2, 3]);
    });
}

/// An operation keeps its job alive: a rank that drops the handle and the group still takes part in the operation.
fn operations_outlive_their_groups(transport: TestTransport) {
    transport.run(3, |mut world| {
        let unawaited = world.all_reduce_async(vec![1u32; 500_000], ReduceOp::Sum).unwrap();
        let handle = world.all_reduce_async(vec![1u32; 500_000], ReduceOp::Sum).unwrap();
        if world.rank() == Rank::ZERO {
            drop((unawaited, handle, world));
            return;
        }
        drop((unawaited, world));
        assert!(handle.wait().unwrap().iter().all(|&sum| sum == 3));
    });
}

/// A failure ends the whole job: a group that took no part in the failed operation fails too, with the same cause.
fn a_failure_in_one_group_ends_all_groups_of_the_job(transport: TestTransport) {
    let causes = transport.run(4, |mut world| {
        let rank = world.rank().get();
        let mut half = world.split(Some(rank / 2), 0).unwrap().unwrap();
        // After rank 0 aborts, another rank may still be in this barrier, and then gets the error here.
        let mut called = world.barrier();
        if rank == 0 {
            called = Err(half.abort("enough"));
        }
        while called.is_ok() {
            called = half.barrier().and_then(|()| world.barrier());
        }
        let error = called.unwrap_err();
        assert_eq!(world.barrier(), Err(error.clone()));
        error.cause().expect("the job failed").clone()
    });
    assert!(causes.iter().all(|cause| *cause == causes[0]), "{causes:#?}");
}

/// Asynchronous calls give the same results as blocking calls, also with uneven parts and custom functions.
fn asynchronous_operations_accept_uneven_parts_and_custom_functions(transport: TestTransport) {
    transport.run(3, |mut group| {
        let (rank, root) = (group.rank().index(), Rank::new(1));
        let counts = [2, 0, 3];
        let own = vec![rank as u32; counts[rank]];
        // Contributions are combined in rank order, so the digits of the result are in rank order too.
        let follow = |left: &u32, right: &u32| left * 10 + right;
        let gathered = group.call(Gather::to(root).counts(&counts)).start_from(&own).unwrap();
        let all = [5u32, 6, 7, 8, 9];
        let scattered = group.call(Scatter::from(root).counts(&counts)).start_from(&all).unwrap();
        let everywhere =
            group.call(AllReduce::new(function(follow))).start(vec![rank as u32 + 1; 4]).unwrap();
        let at_root = group.call(Reduce::to(root, function(follow))).start(vec![rank as u32 + 1; 4]).unwrap();
        let at_root = at_root.wait().unwrap();
        assert_eq!(everywhere.wait().unwrap(), [123; 4]);
        assert_eq!(scattered.wait().unwrap(), [&all[..2], &[], &all[2..]][rank]);
        let gathered = gathered.wait().unwrap();
        if group.rank() == root {
            assert_eq!((gathered, at_root), (vec![0, 0, 2, 2, 2], vec![123; 4]));
        } else {
            assert!(gathered.is_empty());
        }
    });
}

/// If one rank passes a different list of members, the errors of all ranks name that rank and the lines of the calls.
fn all_ranks_fail_if_one_lists_different_members(transport: TestTransport) {
    let errors = transport.run(3, |mut world| {
        let is_rank_1 = world.rank().get() == 1;
        let list: &[u32] = if is_rank_1 { &[1, 0] } else { &[0, 1] };
        let list: Vec<Rank> = list.iter().copied().map(Rank::new).collect();
        let made = world.subgroup(&list).map(|_| ());
        made.and_then(|()| world.barrier()).unwrap_err().to_string()
    });
    for text in &errors {
        assert!(text.contains("rank 1 called") && text.contains(concat!(file!(), ":")), "{text}");
    }
}

on_every_transport! {
    a_split_sorts_by_colour_then_key_then_rank,
    a_split_without_colours_gives_no_group,
    a_subgroup_has_the_order_of_its_list,
    a_group_of_one_gives_the_same_results_as_a_world_of_one,
    a_duplicate_has_separate_messages_and_collectives,
    threads_of_one_rank_use_groups_at_the_same_time,
    a_thread_that_polls_with_test_does_not_delay_other_threads,
    threads_of_one_rank_split_groups_at_the_same_time,
    other_groups_still_work_after_a_group_is_dropped,
    operations_outlive_their_groups,
    a_failure_in_one_group_ends_all_groups_of_the_job,
    asynchronous_operations_accept_uneven_parts_and_custom_functions,
    all_ranks_fail_if_one_lists_different_members,
}
