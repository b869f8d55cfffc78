//! Tests of named tensors: submission in any order and from any thread, fusion, the response cache, `join`, stalls
//! and errors.

use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use crate::util::ranks::TestTransport;
use crate::util::{if_long_tests_else, wait_until};
use ringtrain::named;
use ringtrain::wire::Cause;
use ringtrain::{
    Group, NamedError, NamedHandle, NamedOptions, NamedStatistics, NamedTensors, Rank, ReduceOp,
};

const WORLD_SIZES: [u32; 4] = [1, 2, 3, 4];

fn create_named_tensors(group: &mut Group, adjust: impl FnOnce(&mut NamedOptions)) -> NamedTensors {
    let mut options = NamedOptions::default();
    adjust(&mut options);
    NamedTensors::new(group, options).expect("the group works")
}

/// Returns the numbers below `count` in an order that depends on the seed.
fn shuffled_indices(count: usize, seed: u64) -> Vec<usize> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut order: Vec<usize> = (0..count).collect();
    for index in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(index, (state >> 33) as usize % (index + 1));
    }
    order
}

/// Returns the values that `rank` submits as tensor `tensor` in `step`. The values are small whole numbers, so that
/// sums are exact.
fn submitted_values(tensor: usize, step: usize, rank: u32) -> Vec<f32> {
    let length = [1, 3, 0, 17, 1000, 33, 20_000][tensor % 7] + tensor / 7;
    (0..length).map(|index| ((index + 3 * tensor + 5 * step) % 11 + rank as usize) as f32).collect()
}

fn expected_sums(tensor: usize, step: usize, n: u32) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..n).map(|rank| submitted_values(tensor, step, rank)).collect();
    (0..all[0].len()).map(|index| all.iter().map(|one| one[index]).sum()).collect()
}

const TENSORS: usize = 150;
const STEPS: usize = 3;
const THREADS: usize = 3;

/// Each thread of a rank submits a third of the tensors in a random order, and then waits for these tensors in
/// another order.
fn reduce_in_any_order(transport: TestTransport, n: u32) -> Vec<NamedStatistics> {
    transport.run(n, move |mut group| {
        let tensors = create_named_tensors(&mut group, |_| {});
        let rank = group.rank().get();
        thread::scope(|scope| {
            for part in 0..THREADS {
                let tensors = &tensors;
                scope.spawn(move || {
                    for step in 0..STEPS {
                        let seed = u64::from(rank) * 100 + (step * 10 + part) as u64;
                        let order = shuffled_indices(TENSORS / THREADS, seed);
                        let mut handles: Vec<(usize, NamedHandle<Vec<f32>>)> = Vec::new();
                        for tensor in order.iter().map(|index| index * THREADS + part) {
                            let name = format!("layer{tensor}/weights");
                            let submitted = tensors.all_reduce(
                                &name,
                                submitted_values(tensor, step, rank),
                                ReduceOp::Sum,
                            );
                            handles.push((tensor, submitted.expect("the tensor is accepted")));
                        }
                        for index in shuffled_indices(handles.len(), seed + 7) {
                            // Call `test` instead of `wait` here, because `wait` consumes the handle.
                            wait_until("the tensor has been reduced", || handles[index].1.test());
                        }
                        for (tensor, handle) in handles {
                            assert_eq!(
                                handle.wait().expect("the tensor is reduced"),
                                expected_sums(tensor, step, n)
                            );
                        }
                    }
                });
            }
        });
        let statistics = tensors.statistics();
        tensors.close().expect("all ranks close");
        statistics
    })
}

fn tensors_submitted_in_any_order_are_fused_and_have_exact_results(transport: TestTransport) {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[3]) {
        for statistics in reduce_in_any_order(transport, n) {
            let NamedStatistics { tensors, cached, operations, reports, .. } = statistics;
            assert_eq!(tensors, (TENSORS * STEPS) as u64);
            // The cache has all tensors after the first step.
            assert_eq!(cached, (TENSORS * (STEPS - 1)) as u64, "{statistics:?}");
            assert!(operations <= tensors && reports <= tensors + 1, "{statistics:?}");
            if n > 1 {
                assert!(operations < tensors, "{statistics:?}");
            }
        }
    }
}

fn tensors_that_are_ready_together_are_fused_up_to_the_threshold(transport: TestTransport) {
    const TENSOR_COUNT: u64 = 40;
    for (fusion_bytes, operations_max) in [(1 << 20, TENSOR_COUNT - 1), (0, TENSOR_COUNT)] {
        let all = transport.run(2, move |mut group| {
            let tensors = create_named_tensors(&mut group, |options| options.fusion_bytes = fusion_bytes);
            let submit = |rank: Rank| {
                (0..TENSOR_COUNT)
                    .map(|index| tensors.all_reduce(&index.to_string(), vec![rank.get()], ReduceOp::Sum))
                    .collect::<Result<Vec<_>, _>>()
                    .expect("the tensors are accepted")
            };
            // No tensor is ready before rank 1 submits it. When rank 1 submits the tensors, nearly all of them become
            // ready at once.
            let handles = if group.rank() == Rank::ZERO { submit(Rank::ZERO) } else { Vec::new() };
            group.barrier().expect("the group can be used");
            let handles = if group.rank() == Rank::ZERO { handles } else { submit(Rank::new(1)) };
            for handle in handles {
                assert_eq!(handle.wait(), Ok(vec![1]));
            }
            tensors.statistics().operations
        });
        assert_eq!(all[0], all[1]);
        assert!(all[0] <= operations_max, "{all:?}");
        if fusion_bytes == 0 {
            assert_eq!(all[0], TENSOR_COUNT);
        }
    }
}

fn broadcasts_gathers_and_reductions_of_named_tensors_are_right(transport: TestTransport) {
    transport.run(3, |mut group| {
        let tensors = create_named_tensors(&mut group, |_| {});
        let rank = group.rank().get();
        let gathered = tensors.all_gather("g", vec![u64::from(rank); 2]).unwrap();
        let told = tensors.broadcast("b", vec![rank as u8; 3], Rank::new(2)).unwrap();
        let also = tensors.broadcast("c", vec![rank as u8; 2], Rank::new(2)).unwrap();
        let most = tensors.all_reduce("m", vec![f64::from(rank)], ReduceOp::Max).unwrap();
        let average = tensors.all_reduce("a", vec![i32::try_from(rank).unwrap()], ReduceOp::Average).unwrap();
        assert_eq!(average.wait(), Ok(vec![1]));
        assert_eq!(most.wait(), Ok(vec![2.0]));
        assert_eq!(told.wait(), Ok(vec![2, 2, 2]));
        assert_eq!(also.wait(), Ok(vec![2, 2]));
        assert_eq!(gathered.wait(), Ok(vec![0, 0, 1, 1, 2, 2]));
        assert!(matches!(tensors.all_reduce("x", vec![1f32], ReduceOp::BitAnd), Err(NamedError::Job(_))));
        assert!(matches!(tensors.broadcast("x", vec![1f32], Rank::new(3)), Err(NamedError::Job(_))));
    });
}

fn a_disagreement_fails_only_its_tensor_but_on_every_rank(transport: TestTransport) {
    let all = transport.run(3, |mut group| {
        let tensors = create_named_tensors(&mut group, |_| {});
        let length = if group.rank().get() == 1 { 20 } else { 10 };
        let bad = tensors.all_reduce("x", vec![0f32; length], ReduceOp::Sum).unwrap();
        let good = tensors.all_reduce("y", vec![1f32; 5], ReduceOp::Sum).unwrap();
        assert_eq!(good.wait(), Ok(vec![3.0; 5]));
        let error = bad.wait().expect_err("the ranks do not agree");
        // After the error, the name can be used again.
        let again = tensors.all_reduce("x", vec![1f32; 2], ReduceOp::Sum).unwrap();
        assert_eq!(again.wait(), Ok(vec![3.0; 2]));
        error.to_string()
    });
    let expected = "the ranks do not agree about tensor `x`: ranks 0 and 2: all_reduce(sum, 10 x f32); \
                    rank 1: all_reduce(sum, 20 x f32)";
    assert_eq!(all, [expected; 3]);
}

fn a_second_tensor_with_a_name_in_flight_is_refused(transport: TestTransport) {
    transport.run(2, |mut group| {
        let tensors = create_named_tensors(&mut group, |_| {});
        let first = (group.rank() == Rank::ZERO).then(|| {
            let first = tensors.all_reduce("x", vec![1u8], ReduceOp::Sum).unwrap();
            let second = tensors.all_reduce("x", vec![1u8], ReduceOp::Sum);
            assert_eq!(second.map(|_| ()), Err(NamedError::InFlight("x".into())));
            let first = first.wait_timeout(Duration::from_millis(1));
            first.map(|_| ()).expect_err("the other rank has not submitted it")
        });
        group.barrier().unwrap();
        let first = first.unwrap_or_else(|| tensors.all_reduce("x", vec![2u8], ReduceOp::Sum).unwrap());
        assert_eq!(first.wait(), Ok(vec![3]));
    });
}

fn a_cache_that_is_too_small_gives_right_results(transport: TestTransport) {
    transport.run(3, |mut group| {
        let tensors = create_named_tensors(&mut group, |options| options.cache_capacity = 5);
        for step in 0..30usize {
            let order = shuffled_indices(12, step as u64 * 10 + u64::from(group.rank().get()));
            let submit = |index: &usize| {
                // Some tensors change their length every 10 steps.
                let length = 1 + (step / 10) * (index % 3);
                tensors.all_reduce(&format!("t{index}"), vec![1u32; length], ReduceOp::Sum).unwrap()
            };
            for handle in order.iter().map(submit).collect::<Vec<_>>() {
                assert!(handle.wait().unwrap().iter().all(|&sum| sum == 3));
            }
        }
    });
}

fn a_rank_that_runs_out_of_data_contributes_zeros(transport: TestTransport) {
    for n in WORLD_SIZES {
        let all = transport.run(n, move |mut group| {
            let tensors = create_named_tensors(&mut group, |_| {});
            let rank = group.rank().get();
            for epoch in 0..2 {
                // Rank r has r + 1 batches, so rank b and all higher ranks take part in batch b.
                for batch in 0..=rank {
                    let sum = tensors.all_reduce("x", vec![1u32; 3], ReduceOp::Sum).unwrap();
                    let other = tensors.all_reduce(&format!("{batch}"), vec![2u32], ReduceOp::Sum).unwrap();
                    assert_eq!(sum.wait(), Ok(vec![n - batch; 3]), "epoch {epoch}");
                    assert_eq!(other.wait(), Ok(vec![2 * (n - batch)]));
                }
                assert_eq!(tensors.join(), Ok(Rank::new(n - 1)));
            }
            tensors.close()
        });
        assert!(all.iter().all(Result::is_ok));
    }
}

fn a_maximum_fails_after_a_rank_has_called_join(transport: TestTransport) {
    let all = transport.run(3, |mut group| {
        let tensors = create_named_tensors(&mut group, |_| {});
        if group.rank().get() == 2 {
            tensors.join().unwrap();
            return String::new();
        }
        let most = tensors.all_reduce("x", vec![1f32], ReduceOp::Max).unwrap();
        let error = most.wait().expect_err("rank 2 does not take part").to_string();
        tensors.join().unwrap();
        error
    });
    assert_eq!(all[0], all[1]);
    assert!(all[0].contains("tensor `x`") && all[0].contains("rank 2 joined"), "{}", all[0]);
}

fn rank_0_reports_a_stalled_tensor_until_it_is_reduced(transport: TestTransport) {
    transport.run(3, |mut group| {
        let tensors = create_named_tensors(&mut group, |options| {
            options.stall_warning = Duration::from_millis(20);
            options.stall_abort = None;
        });
        let submit = || tensors.all_reduce("slow", vec![1u8], ReduceOp::Sum).unwrap();
        let rank = group.rank();
        let early = (rank != Rank::new(1)).then(submit);
        if rank == Rank::ZERO {
            wait_until("rank 0 reports the stall", || !tensors.stalled().is_empty());
            let stalls = tensors.stalled();
            assert_eq!(stalls[0].tensor.as_deref(), Some("slow"));
            // Rank 2's report may not have arrived yet.
            assert!(stalls[0].missing.contains(&Rank::new(1)), "{stalls:?}");
            assert!(stalls[0].to_string().contains("tensor `slow` has waited"), "{}", stalls[0]);
        }
        group.barrier().unwrap();
        let handle = early.unwrap_or_else(submit);
        assert_eq!(handle.wait(), Ok(vec![3]));
        assert_eq!(tensors.stalled(), []);
    });
}

/// Returns the causes of the ranks' errors.
fn causes_of_job_errors(errors: &[NamedError]) -> Vec<&Cause> {
    let mut causes = Vec::new();
    for error in errors {
        match error {
            NamedError::Job(error) => causes.push(error.cause().expect("the job failed")),
            other => panic!("{other:?}"),
        }
    }
    causes
}

fn a_stall_that_lasts_too_long_fails_every_rank_with_the_same_error(transport: TestTransport) {
    let errors = transport.run(3, |mut group| {
        let tensors = create_named_tensors(&mut group, |options| {
            options.stall_warning = Duration::from_millis(20);
            options.stall_abort = Some(Duration::from_millis(300));
        });
        if group.rank().get() == 1 {
            // Rank 1 waits for another tensor, which the other ranks never submit.
            return tensors.all_reduce("other", vec![1u8], ReduceOp::Sum).unwrap().wait().unwrap_err();
        }
        let handle = tensors.all_reduce("slow", vec![1u8], ReduceOp::Sum).unwrap();
        let error = handle.wait().unwrap_err();
        let later = tensors.all_reduce("later", vec![1u8], ReduceOp::Sum).map(|_| ());
        assert_eq!(later, Err(error.clone()));
        assert_eq!(tensors.join(), Err(error.clone()));
        assert_eq!(tensors.close(), Err(error.clone()));
        error
    });
    let causes = causes_of_job_errors(&errors);
    assert!(causes.windows(2).all(|pair| pair[0] == pair[1]), "{causes:#?}");
    let text = causes[0].to_string();
    let slow = text.contains("tensor `slow` has waited") && text.contains("for rank 1 to submit it");
    let other = text.contains("tensor `other` has waited") && text.contains("for ranks 0 and 2 to submit it");
    assert!(slow || other, "{text}");
}

/// Regression test: before the fix, the drop waited until the stuck rank exited, because a thread of rank 0 slept in
/// the event queue.
fn a_drop_after_a_stall_abort_does_not_wait_for_the_stuck_rank(transport: TestTransport) {
    let is_over = Barrier::new(2);
    transport.run(2, move |mut group| {
        if group.rank().get() == 1 {
            // Rank 1 makes the two collective calls with which every rank creates its named tensors. After these
            // calls, rank 1 makes no further call, as if its process were stopped.
            let _groups = [group.duplicate().unwrap(), group.duplicate().unwrap()];
            is_over.wait();
            return;
        }
        let tensors = create_named_tensors(&mut group, |options| {
            options.stall_warning = Duration::from_millis(20);
            options.stall_abort = Some(Duration::from_millis(100));
        });
        let error = tensors.all_reduce("x", vec![1u8], ReduceOp::Sum).unwrap().wait().unwrap_err();
        assert!(error.to_string().contains("tensor `x` has waited"), "{error}");
        let (dropped, is_dropped) = mpsc::channel();
        let thread = thread::spawn(move || {
            drop(tensors);
            dropped.send(())
        });
        let result = is_dropped.recv_timeout(Duration::from_secs(4));
        is_over.wait();
        assert_eq!(result, Ok(()), "the drop waits for the stuck rank");
        thread.join().unwrap().unwrap();
    });
}

fn a_rank_that_waits_alone_in_join_fails_the_job(transport: TestTransport) {
    let errors = transport.run(2, |mut group| {
        let tensors = create_named_tensors(&mut group, |options| {
            options.stall_warning = Duration::from_millis(20);
            options.stall_abort = Some(Duration::from_millis(200));
        });
        if group.rank().get() == 1 {
            return tensors.join().unwrap_err();
        }
        // Rank 1 has called `join`. After `join`, a sum is possible and a maximum is not, so only this tensor fails.
        // Rank 1 then waits alone in `join`, until the stall ends the job. This makes the barrier below fail.
        let error = tensors.all_reduce("x", vec![1u8], ReduceOp::Max).unwrap().wait().unwrap_err();
        assert!(matches!(error, NamedError::NeedsJoinedRanks { .. }), "{error}");
        NamedError::Job(group.barrier().unwrap_err())
    });
    let causes = causes_of_job_errors(&errors);
    assert_eq!(causes[0], causes[1]);
    assert!(causes[0].to_string().contains("joined or closed"), "{}", causes[0]);
}

fn a_tensor_that_a_closed_rank_never_submitted_fails(transport: TestTransport) {
    transport.run(3, |mut group| {
        let tensors = create_named_tensors(&mut group, |_| {});
        let both = tensors.all_reduce("both", vec![1u8], ReduceOp::Sum).unwrap();
        if group.rank().get() == 1 {
            // Rank 1 drops the handle and calls `close`. Ranks 0 and 2 still get the sum of all ranks.
            drop(both);
            tensors.close().unwrap();
            return;
        }
        let never = tensors.all_reduce("never", vec![1u8], ReduceOp::Sum).unwrap();
        assert_eq!(both.wait(), Ok(vec![3]));
        let error = never.wait().unwrap_err();
        assert!(error.to_string().contains("rank 1 closed without submitting it"), "{error}");
    });
}

fn named_tensors_can_be_closed_and_created_again(transport: TestTransport) {
    transport.run(2, |mut group| {
        for round in 0..3u32 {
            let tensors = create_named_tensors(&mut group, |_| {});
            let sum = tensors.all_reduce("x", vec![round], ReduceOp::Sum).unwrap();
            assert_eq!(sum.wait(), Ok(vec![2 * round]));
            tensors.close().unwrap();
            let mut own = [1u8];
            group.all_reduce(&mut own, ReduceOp::Sum).unwrap();
            assert_eq!(own, [2]);
        }
    });
}

fn every_pending_tensor_gets_the_error_of_a_failed_job(transport: TestTransport) {
    let errors = transport.run(4, |mut group| {
        let tensors = create_named_tensors(&mut group, |_| {});
        let submit = |index: usize| tensors.all_reduce(&format!("{index}"), vec![0f32; 1000], ReduceOp::Sum);
        if group.rank().get() == 3 {
            let some: Vec<_> = (0..20).map(|index| submit(index).unwrap()).collect();
            for handle in some {
                drop(handle.wait().unwrap());
            }
            return vec![NamedError::Job(group.abort("out of coffee"))];
        }
        let handles: Vec<_> = (0..50).map(submit).collect();
        let results = handles.into_iter().map(|handle| handle.and_then(NamedHandle::wait));
        results.filter_map(Result::err).collect()
    });
    for of_rank in &errors {
        assert!(of_rank.len() == 1 || of_rank.len() >= 30, "{} errors", of_rank.len());
        assert!(
            causes_of_job_errors(of_rank).iter().all(|cause| cause.to_string().contains("out of coffee"))
        );
    }
}

fn pending_tensors_fail_when_a_rank_has_left(transport: TestTransport) {
    let meet = Arc::new(Barrier::new(3));
    transport.run(3, move |mut group| {
        let (told, waited) = mpsc::channel();
        let tensors = create_named_tensors(&mut group, |_| {});
        let first = tensors.all_reduce("first", vec![1u8], ReduceOp::Sum).unwrap();
        assert_eq!(first.wait(), Ok(vec![3]));
        if group.rank().get() == 2 {
            meet.wait();
            drop(tensors);
            drop(group);
            return;
        }
        let pending = tensors.all_reduce("pending", vec![1u8], ReduceOp::Sum).unwrap();
        meet.wait();
        let waiting = thread::spawn(move || told.send(pending.wait()));
        let error = waited.recv_timeout(crate::util::TEST_TIMEOUT).expect("the wait ends").unwrap_err();
        assert!(matches!(error, NamedError::RankClosed { .. } | NamedError::Job(_)), "{error}");
        waiting.join().unwrap().unwrap();
    });
}

fn uneven_gathers_reduce_scatters_and_scaled_sums_are_right(transport: TestTransport) {
    for n in WORLD_SIZES {
        transport.run(n, |mut group| {
            let (size, rank) = (group.size(), group.rank());
            let tensors = create_named_tensors(&mut group, |_| {});
            for step in 0..3 {
                // The length differs between ranks and between steps.
                let own = vec![rank.get(); (rank.index() + step) % 3];
                let gathered = tensors.all_gather("uneven", own).unwrap();
                let part = tensors.reduce_scatter("part", vec![1i64; 10], ReduceOp::Sum).unwrap();
                let factor = f64::from(rank.get() + 1);
                let scaled = tensors.all_reduce_scaled("scaled", vec![1.0; 3], ReduceOp::Sum, (factor, 0.5));
                let expected: Vec<u32> =
                    size.ranks().flat_map(|rank| vec![rank.get(); (rank.index() + step) % 3]).collect();
                assert_eq!(gathered.wait().unwrap(), expected);
                let chunk = group.chunk(10, rank).len();
                assert_eq!(part.wait().unwrap(), vec![i64::from(size.get()); chunk]);
                let sum: f64 = (1..=size.get()).map(f64::from).sum();
                assert_eq!(scaled.unwrap().wait().unwrap(), [sum * 0.5; 3]);
            }
            let handles = (0..5).map(|i| tensors.all_reduce(&i.to_string(), vec![i], ReduceOp::Max).unwrap());
            assert_eq!(named::wait_all(handles).unwrap(), [[0], [1], [2], [3], [4]]);
            let mut handles: Vec<_> =
                (0..5).map(|i| tensors.all_reduce(&i.to_string(), vec![i], ReduceOp::Max).unwrap()).collect();
            let mut left: Vec<i32> = (0..5).collect();
            while let Some((place, result)) = named::wait_any(&mut handles) {
                assert_eq!(result.unwrap(), [left.remove(place)]);
            }
            assert!(left.is_empty());
            tensors.close().unwrap();
        });
    }
}

on_every_transport! {
    tensors_submitted_in_any_order_are_fused_and_have_exact_results,
    tensors_that_are_ready_together_are_fused_up_to_the_threshold,
    broadcasts_gathers_and_reductions_of_named_tensors_are_right,
    a_disagreement_fails_only_its_tensor_but_on_every_rank,
    a_second_tensor_with_a_name_in_flight_is_refused,
    a_cache_that_is_too_small_gives_right_results,
    a_rank_that_runs_out_of_data_contributes_zeros,
    a_maximum_fails_after_a_rank_has_called_join,
    rank_0_reports_a_stalled_tensor_until_it_is_reduced,
    a_stall_that_lasts_too_long_fails_every_rank_with_the_same_error,
    a_drop_after_a_stall_abort_does_not_wait_for_the_stuck_rank,
    a_rank_that_waits_alone_in_join_fails_the_job,
    a_tensor_that_a_closed_rank_never_submitted_fails,
    named_tensors_can_be_closed_and_created_again,
    every_pending_tensor_gets_the_error_of_a_failed_job,
    pending_tensors_fail_when_a_rank_has_left,
    uneven_gathers_reduce_scatters_and_scaled_sums_are_right,
}
