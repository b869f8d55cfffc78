//! Tests of messages that a rank sends to itself, in jobs of one and of several ranks. Also tests calls that wait
//! for one or for all of several operations.

use std::time::Duration;

use crate::util::ranks::TestTransport;
use ndarray::{Array2, arr2};
use ringtrain::group::{Received, Source, Status};
use ringtrain::verbs::{AllGather, AllReduce};
use ringtrain::{DType, Error, Group, Handle, Rank, ReduceOp, SendOptions, wait_any};

/// Runs `check` in every kind of group: a world of one, a group of one within a larger world, and groups of several
/// ranks.
fn run_in_every_group(check: fn(&mut Group)) {
    check(&mut Group::solo());
    check(&mut Group::solo().duplicate().unwrap());
    for (transport, n) in
        TestTransport::ALL.into_iter().flat_map(|transport| [1, 2, 3].map(|n| (transport, n)))
    {
        transport.run(n, move |mut group| {
            check(&mut group);
            let rank = group.rank().get();
            check(&mut group.split(Some(rank), 0).unwrap().expect("a group of one"));
            check(&mut group.duplicate().unwrap());
            group.barrier().unwrap();
        });
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn a_message_of_a_rank_to_itself_is_kept_until_it_is_received() {
    run_in_every_group(|group| {
        let own = group.rank();
        // The send of a long message also returns at once.
        for (number, count) in [0, 1, 1000, 1_000_000].into_iter().enumerate() {
            group.send(&vec![number as u64; count], own, number as u32).unwrap();
        }
        let status = Status { source: own, tag: 1, dtype: DType::U64, count: 1 };
        assert_eq!(group.probe(own, 1, Duration::ZERO), Ok(Some(status)));
        // A receive with any tag gets the oldest message.
        assert_eq!(group.receive(&mut [0u64; 5], Source::Any, None).unwrap().tag, 0);
        let mut buffer = vec![0u64; 1_000_000];
        for tag in [3, 1, 2] {
            let status = group.receive(&mut buffer, own, tag).unwrap();
            assert_eq!((status.source, status.tag), (own, tag));
            assert!(buffer[..status.count].iter().all(|&element| element == u64::from(tag)));
        }
        assert_eq!(group.probe(own, None, Duration::ZERO), Ok(None));
        assert_eq!(group.probe(own, None, Duration::MAX), Ok(None), "the probe found a message");
    });
}

#[test]
fn receives_from_the_own_rank_match_in_posting_order() {
    run_in_every_group(|group| {
        let own = group.rank();
        let any = group.receive_async::<f32>(usize::MAX, Source::Any, None).unwrap();
        let second = group.receive_async::<f32>(usize::MAX, own, 7).unwrap();
        assert!(!any.test());
        let sent = group.send_async(vec![1f32; 10], own, 7).unwrap();
        group.send(&[2f32], own, 7).unwrap();
        assert_eq!(sent.wait().unwrap(), [1.0; 10]);
        let Received { elements, status } = any.wait().unwrap();
        assert_eq!((elements, status.source), (vec![1.0; 10], own));
        assert_eq!(second.wait().unwrap().elements, [2.0]);
    });
}

#[test]
fn a_rank_that_would_wait_for_itself_gets_an_error() {
    run_in_every_group(|group| {
        let own = group.rank();
        assert_eq!(group.receive(&mut [0u8], own, 0), Err(Error::NothingSent));
        group.send(&[1u8], own, 1).unwrap();
        assert_eq!(group.receive(&mut [0u8], own, 0), Err(Error::NothingSent));
        if group.size().get() == 1 {
            assert_eq!(group.receive(&mut [0u8], Source::Any, 2), Err(Error::NothingSent));
        }
        group.receive(&mut [0u8], own, 1).unwrap();
    });
}

#[test]
fn a_ring_exchange_works_with_any_number_of_ranks() {
    run_in_every_group(|group| {
        let (size, rank) = (group.size(), group.rank());
        let (right, left) = (size.rank_after(rank, 1), size.rank_before(rank, 1));
        let own = vec![rank.get(); 100_000];
        let mut buffer = own.clone();
        let status =
            group.send_receive((&own, right, 4), (&mut buffer, Source::Rank(left), Some(4))).unwrap();
        assert_eq!(status.source, left);
        assert!(buffer.iter().all(|&element| element == left.get()));
    });
}

/// A receive from any source matches messages from this rank and from other ranks.
fn a_rank_may_receive_from_itself_and_from_others_with_any_source(transport: TestTransport) {
    transport.run(3, |mut group| {
        let rank = group.rank();
        let handles: Vec<_> =
            (0..3).map(|_| group.receive_async::<u32>(1, Source::Any, 1).unwrap()).collect();
        for to in group.size().ranks() {
            group.send(&[rank.get()], to, 1).unwrap();
        }
        let mut found: Vec<u32> =
            handles.into_iter().map(|handle| handle.wait().unwrap().elements[0]).collect();
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2]);
        group.barrier().unwrap();
    });
}

fn a_message_of_a_rank_to_itself_with_another_type_fails_the_job(transport: TestTransport) {
    transport.run(2, |mut group| {
        let own = group.rank();
        if own == Rank::ZERO {
            group.send(&[1u8], own, 0).unwrap();
            let error = group.receive(&mut [0f32], own, 0).unwrap_err();
            assert!(error.to_string().contains(file!()), "{error}");
        } else {
            assert!(group.barrier().is_err());
        }
    });
}

#[test]
fn arrays_are_sent_and_received_in_place() {
    run_in_every_group(|group| {
        let own = group.rank();
        let array = arr2(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        group.send(&array, own, 0).unwrap();
        let mut received = Array2::<f32>::zeros((2, 3));
        group.receive(&mut received, own, 0).unwrap();
        assert_eq!(received, array);
        let n = group.size().get() as f32;
        let summed = group.call(AllReduce::new(ReduceOp::Sum)).run_from(&array).unwrap();
        assert_eq!(summed, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(|element| element * n));
        group.call(AllReduce::new(ReduceOp::Sum)).run_into(&array, &mut received).unwrap();
        assert_eq!(received, &array * n);
        assert_eq!(group.call(AllGather::new()).run_from(&array.t()), Err(Error::NotContiguous));
        assert_eq!(group.send(&array.t(), own, 0), Err(Error::NotContiguous));
    });
}

#[test]
fn wait_any_returns_the_index_of_the_completed_operation() {
    run_in_every_group(|group| {
        let own = group.rank();
        let mut handles: Vec<Handle<Received<u8>>> =
            (0..4).map(|tag| group.receive_async(1, own, tag).unwrap()).collect();
        assert_eq!(wait_any(&handles, Some(Duration::from_millis(5))), None);
        assert!(!handles.iter().any(Handle::test));
        group.send(&[2u8], own, 2).unwrap();
        assert_eq!(wait_any(&handles, None), Some(2));
        assert_eq!(handles.remove(2).wait().unwrap().elements, [2]);
        group.send(&[3u8], own, 3).unwrap();
        assert_eq!(wait_any(&handles, Some(Duration::MAX)), Some(2));
        // The operation has ended, so waiting for it again returns at once.
        assert_eq!(wait_any(&handles, Some(Duration::ZERO)), Some(2));
        handles.remove(2).wait().unwrap();
        let handle = handles.remove(0).wait_timeout(Duration::from_millis(5)).unwrap_err();
        group.send(&[0u8], own, 0).unwrap();
        assert!(handle.wait_timeout(Duration::MAX).is_ok_and(|result| result.is_ok()));
        assert_eq!(wait_any::<()>(&[], None), None);
    });
}

#[test]
fn wait_any_accepts_operations_of_several_jobs() {
    let mut groups = [Group::solo(), Group::solo()];
    let own = Rank::ZERO;
    let mut handles: Vec<Handle<Received<u8>>> =
        groups.iter_mut().map(|group| group.receive_async(1, own, 0).unwrap()).collect();
    assert_eq!(wait_any(&handles, Some(Duration::from_millis(5))), None);
    for (index, group) in groups.iter_mut().enumerate().rev() {
        group.send(&[index as u8], own, 0).unwrap();
        assert_eq!(wait_any(&handles, None), Some(index));
        assert_eq!(handles.remove(index).wait().unwrap().elements, [index as u8]);
    }
}

#[test]
fn operations_of_a_group_of_one_fail_after_an_abort() {
    let group = Group::solo();
    let pending = group.receive_async::<u8>(1, Rank::ZERO, 0).unwrap();
    group.abort("no more");
    assert!(pending.wait().is_err());
    assert!(group.send(&[1u8], Rank::ZERO, 0).is_err());
}

#[test]
fn a_synchronous_self_send_completes_when_a_receive_matches() {
    run_in_every_group(|group| {
        let own = group.rank();
        for count in [0, 3, 100_000] {
            let sent = group.send_async(vec![7u8; count], own, SendOptions::synchronous(1)).unwrap();
            assert!(!sent.test());
            let mut buffer = vec![0u8; count];
            group.receive(&mut buffer, own, 1).unwrap();
            assert_eq!(sent.wait().unwrap(), buffer);
            let received = group.receive_async::<u8>(count, own, 1).unwrap();
            group.send(&buffer, own, SendOptions::synchronous(1)).unwrap();
            assert_eq!(received.wait().unwrap().elements, buffer);
        }
    });
}

#[test]
fn a_synchronous_self_send_without_a_receive_fails_at_its_deadline() {
    let mut group = Group::solo();
    group.set_timeout(Duration::from_millis(50));
    let error = group.send(&[1u8], group.rank(), SendOptions::synchronous(1)).unwrap_err();
    assert!(matches!(error, Error::Failed { cause: ringtrain::wire::Cause::Timeout { .. }, .. }), "{error}");
}

on_every_transport! {
    a_rank_may_receive_from_itself_and_from_others_with_any_source,
    a_message_of_a_rank_to_itself_with_another_type_fails_the_job,
}
