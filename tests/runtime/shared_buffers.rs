//! Tests of buffers from `Group::alloc`, which all-reduces reduce in place. With ordinary memory, the ranks copy the
//! elements to slots in shared memory. The results have the same bits in both cases.

use std::time::Duration;

use crate::util::{if_long_tests_else, ranks};
use half::bf16;
use ringtrain::group::LocalTransport;
use ringtrain::verbs::{AllReduce, function};
use ringtrain::{Element, Error, F64Loc, Group, Handle, JoinOptions, Rank, ReduceOp, SharedBuffer, wait_all};

const WORLD_SIZES: [u32; 6] = [1, 2, 3, 4, 5, 8];
/// The number of elements of a long buffer. With 4 bytes per element, the buffer needs three slots.
const LONG_COUNT: usize = 300_007;

/// An element type with a conversion from `f64`.
trait FromNumber: Element {
    fn from_f64(value: f64) -> Self;
}

macro_rules! from_numbers {
    ($($ty:ty: $from:expr);+ $(;)?) => { $( impl FromNumber for $ty {
        fn from_f64(value: f64) -> Self { let from: fn(f64) -> Self = $from; from(value) }
    } )+ };
}

from_numbers! {
    bf16: bf16::from_f64;
    f32: |v| v as f32;
    u8: |v| v.abs() as u8;
    u64: |v| v.abs() as u64;
    F64Loc: |v| F64Loc::new(f64::from(v as i32 % 3), v.abs() as u64);
}

/// Returns the number that `rank` contributes to the element `index`. Sums of these numbers are rounded, so a sum in
/// another order would have other bits.
fn contributed_value<T: FromNumber>(rank: Rank, index: usize) -> T {
    T::from_f64((index as f64 * 0.37 + f64::from(rank.get()) * 1.7).sin() * 100.0)
}

fn contribution<T: FromNumber>(group: &Group, count: usize) -> Vec<T> {
    (0..count).map(|index| contributed_value(group.rank(), index)).collect()
}

fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

/// Runs `work` on `n` ranks with this transport and the algorithm `direct`. By default the library would use this
/// algorithm only for long buffers.
fn run_ranks(n: u32, transport: LocalTransport, work: impl Fn(Group) + Send + Sync + 'static) {
    let adjust = |options: &mut JoinOptions| {
        options.transport = transport;
        options.algorithms = "direct".parse().expect("the algorithm exists");
    };
    ranks::run_with(n, adjust, work);
}

/// Checks that an all-reduce of a part of a group buffer gives the same bits as an all-reduce with slots. The part
/// begins at a different element on each rank. Ranks for which `passes_group_buffer` returns false pass ordinary
/// memory.
fn check_all_reduce<T: FromNumber>(
    group: &mut Group,
    count: usize,
    op: ReduceOp,
    passes_group_buffer: &dyn Fn(Rank) -> bool,
) {
    let (n, rank) = (group.size(), group.rank());
    let own = contribution::<T>(group, count);
    let mut expected = own.clone();
    group.all_reduce(&mut expected, op).unwrap();
    let start = rank.index() % 3;
    let mut buffer = group.alloc::<T>(start + count + 2).unwrap();
    assert_eq!(buffer.is_shared(), group.transport() == "shm");
    assert!(bytes_of(&buffer).iter().all(|&byte| byte == 0), "a new buffer must have zeros");
    buffer[start..start + count].copy_from_slice(&own);
    let mut private = own;
    let found = if passes_group_buffer(rank) { &mut buffer[start..start + count] } else { &mut private[..] };
    group.all_reduce(found, op).unwrap();
    let what = format!("{count} x {} {op}, rank {rank} of {n}", T::DTYPE);
    assert!(bytes_of(found) == bytes_of(&expected), "{what}");
    if passes_group_buffer(rank) {
        let around = [&buffer[..start], &buffer[start + count..]].concat();
        assert!(bytes_of(&around).iter().all(|&byte| byte == 0), "{what}: other elements were written");
    }
}

fn check_all_reduces_of_type<T: FromNumber>(group: &mut Group) {
    let n = group.size().as_usize();
    for op in ReduceOp::ALL.iter().copied().filter(|op| op.applies_to(T::DTYPE) && *op != ReduceOp::Custom) {
        for count in [0, 1, n - 1, n + 1, 4099] {
            check_all_reduce::<T>(group, count, op, &|_| true);
        }
    }
}

#[test]
fn all_reduces_in_place_give_the_same_bits_as_with_slots() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[2, 5]) {
        run_ranks(n, LocalTransport::Auto, |mut group| {
            check_all_reduces_of_type::<bf16>(&mut group);
            check_all_reduces_of_type::<f32>(&mut group);
            check_all_reduces_of_type::<u8>(&mut group);
            check_all_reduces_of_type::<F64Loc>(&mut group);
            check_all_reduce::<f32>(&mut group, LONG_COUNT, ReduceOp::Average, &|_| true);
            check_all_reduce::<F64Loc>(&mut group, LONG_COUNT / 4, ReduceOp::MaxLoc, &|_| true);
        });
    }
}

/// Some ranks pass a group buffer, and the other ranks pass a `Vec`. All ranks get the same result.
#[test]
fn ranks_may_mix_group_buffers_and_ordinary_memory() {
    let patterns: [fn(Rank) -> bool; 4] =
        [|rank| rank.get() == 0, |rank| rank.get() > 0, |rank| rank.get() % 2 == 1, |rank| rank.get() != 1];
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[3]) {
        run_ranks(n, LocalTransport::Auto, move |mut group| {
            for passes_group_buffer in patterns {
                for count in [0, 1, group.size().as_usize() + 1, 4099, LONG_COUNT] {
                    check_all_reduce::<f32>(&mut group, count, ReduceOp::Sum, &passes_group_buffer);
                    check_all_reduce::<bf16>(&mut group, count, ReduceOp::Average, &passes_group_buffer);
                }
                check_all_reduce::<F64Loc>(&mut group, 4099, ReduceOp::MinLoc, &passes_group_buffer);
            }
        });
    }
}

/// The function is neither commutative nor associative, so only rank order gives the expected result.
#[test]
fn custom_functions_are_applied_in_rank_order() {
    for &n in if_long_tests_else(&WORLD_SIZES[..], &[1, 3, 8]) {
        run_ranks(n, LocalTransport::Auto, |mut group| {
            let own = contribution::<u64>(&group, 10_001);
            let combine = |a: &u64, b: &u64| a.wrapping_mul(3).wrapping_add(*b);
            let mut expected = own.clone();
            group.call(AllReduce::new(function(combine))).run(&mut expected).unwrap();
            let mut buffer = group.alloc::<u64>(own.len()).unwrap();
            buffer.copy_from_slice(&own);
            group.call(AllReduce::new(function(combine))).run(&mut buffer).unwrap();
            assert!(*buffer == *expected);
        });
    }
}

#[test]
fn group_buffers_work_over_sockets() {
    for n in [1, 2, 3] {
        run_ranks(n, LocalTransport::Tcp, |mut group| {
            for count in [0, 1, 4099] {
                check_all_reduce::<f32>(&mut group, count, ReduceOp::Sum, &|_| true);
            }
            let mut buffer = group.alloc::<f32>(5).unwrap();
            buffer.fill(1.0);
            buffer = group.all_reduce_async(buffer, ReduceOp::Sum).unwrap().wait().unwrap();
            assert!(!buffer.is_shared() && *buffer == [group.size().get() as f32; 5]);
        });
    }
}

/// Collectives that do not work in place accept buffers of the group too.
#[test]
fn group_buffers_work_with_other_collectives_and_groups() {
    run_ranks(3, LocalTransport::Shm, |mut group| {
        let rank = group.rank();
        let mut buffer = group.alloc::<u32>(100_000).unwrap();
        buffer.fill(rank.get());
        group.broadcast(&mut buffer, Rank::new(2)).unwrap();
        assert!(buffer.iter().all(|&element| element == 2));
        group.reduce(&mut buffer, ReduceOp::Sum, Rank::new(1)).unwrap();
        assert!(rank != Rank::new(1) || buffer.iter().all(|&element| element == 6));
        buffer.fill(rank.get() + 1);
        assert!(
            group
                .call(AllReduce::new(ReduceOp::Max))
                .run_from(&buffer)
                .unwrap()
                .iter()
                .all(|&element| element == 3)
        );
        // The buffer belongs to `group`, so an all-reduce in the duplicate uses slots.
        let mut other = group.duplicate().unwrap();
        other.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert!(buffer.iter().all(|&element| element == 6));
        assert!(format!("{:?}", &group.alloc::<u8>(2).unwrap()) == "[0, 0]");
    });
}

#[test]
fn buffers_can_be_allocated_and_dropped_in_any_order() {
    run_ranks(3, LocalTransport::Shm, |mut group| {
        let (rank, n) = (group.rank(), group.size().get());
        let mut buffers: Vec<Option<SharedBuffer<f32>>> =
            (0..6).map(|index| Some(group.alloc(5000 + index).unwrap())).collect();
        for round in 0..30u32 {
            // Each rank drops one of its buffers and passes another one to the all-reduce. Different ranks drop and
            // pass buffers with different indices.
            let dropped = (round as usize + rank.index()) % buffers.len();
            buffers[dropped] = None;
            let mut kept: Vec<&mut SharedBuffer<f32>> = buffers.iter_mut().flatten().collect();
            let chosen = round as usize % kept.len();
            let buffer = &mut kept[chosen][..4099];
            buffer.fill(round as f32);
            group.all_reduce(buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|&sum| sum == (round * n) as f32));
            let count = 4099 + rank.index();
            buffers[dropped] = Some(group.alloc(count).unwrap());
        }
        // A buffer can be used after its group is dropped.
        let mut last = buffers.pop().flatten().unwrap();
        drop((buffers, group));
        last.fill(1.5);
        assert_eq!(last.iter().sum::<f32>(), 1.5 * last.len() as f32);
    });
}

/// One rank has dropped its buffer and passes a `Vec`. The other ranks pass their buffers.
#[test]
fn a_rank_may_drop_its_buffer_before_the_other_ranks() {
    run_ranks(4, LocalTransport::Shm, |mut group| {
        let rank = group.rank();
        let mut buffer = Some(group.alloc::<i32>(200_000).unwrap());
        for round in 0..4 {
            if rank.get() == round {
                buffer = None;
            }
            let mut own = vec![1; 200_000];
            let elements = buffer.as_deref_mut().unwrap_or(&mut own);
            elements.fill(1);
            group.all_reduce(elements, ReduceOp::Sum).unwrap();
            assert!(elements.iter().all(|&sum| sum == 4));
            assert!(group.alloc::<u8>(round as usize).unwrap().is_shared());
        }
    });
}

#[test]
fn asynchronous_all_reduces_return_the_buffer() {
    for n in WORLD_SIZES {
        run_ranks(n, LocalTransport::Auto, |mut group| {
            let own = contribution::<f32>(&group, 70_001);
            let mut expected = own.clone();
            group.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
            let mut buffers: Vec<SharedBuffer<f32>> =
                (0..3).map(|_| group.alloc(own.len()).unwrap()).collect();
            for _ in 0..3 {
                let mut handles = Vec::new();
                for mut buffer in buffers {
                    buffer.copy_from_slice(&own);
                    handles.push(group.all_reduce_async(buffer, ReduceOp::Sum).unwrap());
                }
                // Make a blocking call while asynchronous operations are in progress, so that another thread may
                // reduce the buffer of the blocking call.
                let mut blocking = group.alloc(own.len()).unwrap();
                blocking.copy_from_slice(&own);
                group.all_reduce(&mut blocking, ReduceOp::Sum).unwrap();
                assert!(bytes_of(&blocking) == bytes_of(&expected));
                buffers = wait_all(handles).unwrap();
                for buffer in &buffers {
                    assert_eq!(buffer.is_shared(), group.transport() == "shm");
                    assert!(bytes_of(buffer) == bytes_of(&expected));
                }
            }
            // Start an all-reduce and drop its handle.
            drop(group.all_reduce_async(buffers.remove(0), ReduceOp::Sum).unwrap());
            group.barrier().unwrap();
        });
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn a_rank_cannot_allocate_more_than_1024_buffers() {
    run_ranks(2, LocalTransport::Shm, |mut group| {
        let mut buffers: Vec<SharedBuffer<u8>> = (0..1024).map(|_| group.alloc(1).unwrap()).collect();
        if group.rank() == Rank::ZERO {
            buffers.clear();
        }
        for _ in 0..2 {
            let refused = group.alloc::<u8>(1).expect_err("rank 1 has 1024");
            assert_eq!(refused, Error::TooManyBuffers(1024));
        }
        buffers.pop();
        assert!(group.alloc::<u8>(1).unwrap().is_shared());
        group.barrier().unwrap();
    });
}

#[test]
fn a_buffer_that_exceeds_the_memory_is_refused_on_all_ranks() {
    run_ranks(3, LocalTransport::Shm, |mut group| {
        for count in [usize::MAX, usize::MAX / 8 + 1, isize::MAX as usize] {
            let count = if group.rank().get() == 1 { count } else { 7 };
            let refused = group.alloc::<f64>(count).expect_err("the length of rank 1 is too large");
            assert!(matches!(refused, Error::InvalidCounts(_)), "{refused}");
        }
        assert!(group.alloc::<f64>(7).unwrap().is_shared());
    });
    run_ranks(2, LocalTransport::Tcp, |mut group| assert!(group.alloc::<f64>(usize::MAX).is_err()));
}

/// A failed operation changes no elements outside its range. After the failure, no other rank uses the buffer.
#[test]
fn a_failed_operation_returns_the_buffer() {
    for is_busy in [false, true] {
        let adjust = |options: &mut JoinOptions| {
            options.transport = LocalTransport::Shm;
            options.operation_timeout = Duration::from_millis(300);
        };
        ranks::run_with(3, adjust, move |mut group| {
            let mut buffer = group.alloc::<u64>(400_000).unwrap();
            buffer.fill(7);
            if group.rank().get() == 2 {
                // Rank 2 does not call the operation, so the other ranks fail: when rank 2
                // leaves, or at their own deadline.
                return;
            }
            let handle = is_busy.then(|| group.all_reduce_async(vec![1u8; 100_000], ReduceOp::Sum));
            let error =
                group.all_reduce(&mut buffer[..200_000], ReduceOp::Sum).expect_err("a rank is missing");
            assert!(error.cause().is_some(), "{error}");
            assert!(buffer[200_000..].iter().all(|&element| element == 7));
            buffer.fill(8);
            assert!(buffer.iter().all(|&element| element == 8));
            assert!(handle.is_none_or(|handle| handle.and_then(Handle::wait).is_err()));
        });
    }
}

/// If the lengths of the ranks' buffers differ, all ranks get the same error as with ordinary memory.
#[test]
fn group_buffers_of_different_lengths_are_reported() {
    run_ranks(3, LocalTransport::Shm, |mut group| {
        let mut buffer = group.alloc::<f32>(50_000).unwrap();
        let count = if group.rank().get() == 1 { 40_000 } else { 50_000 };
        let error = group.all_reduce(&mut buffer[..count], ReduceOp::Sum).expect_err("lengths differ");
        assert!(error.to_string().contains("do not agree"), "{error}");
    });
}
