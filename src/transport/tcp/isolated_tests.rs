//! Tests of the links of isolated groups, over real sockets and in virtual time.

use std::sync::Arc;
use std::time::Duration;

use super::tests::{
    DELIVERY_TIMEOUT, SECOND, TestRank, assert_linked, handle_events_until, make_test_ranks, options,
};
use super::{IsolatedGroup, TcpTransport};
use crate::transport::SocketTransport as _;
use crate::transport::handshake::{DialError, DialProgress};
use crate::types::Rank;
use crate::wire::handshake::{HandshakeError, Refusal, StreamId};

const NOW: Duration = SECOND;

/// Returns an isolated group with the number 7.
fn group_of(members: &[u32]) -> IsolatedGroup {
    IsolatedGroup { id: 7, members: members.iter().copied().map(Rank::new).collect::<Arc<[Rank]>>() }
}

/// Returns the transport of the rank number `rank` of an isolated group, whose port is that of a rank in `job`.
fn isolate(job: &mut [TestRank], group: &IsolatedGroup, rank: usize, streams: u8) -> TestRank {
    let port = &mut job[group.members[rank].index()].transport;
    let mut transport =
        port.create_isolated(group.clone(), Rank::new(rank as u32), options(), streams).unwrap();
    // The tests wait for events themselves.
    let poller = transport.take_poller().unwrap();
    TestRank { transport, poller }
}

fn take_accepted(job: &mut [TestRank], isolated: &mut TestRank) {
    let group = isolated.transport.isolated.clone().unwrap();
    let own = group.members[isolated.transport.rank.index()];
    isolated.transport.take_accepted_from(&mut job[own.index()].transport, NOW).unwrap();
}

/// All ranks of an isolated group dial at once. The links arrive on the ports of the job, and still work after its end.
#[test]
fn the_links_of_an_isolated_group_arrive_on_the_ports_of_the_job() {
    for (world, members, streams) in [(2, &[0, 1][..], 1), (2, &[1, 0], 3), (4, &[3, 0, 2], 2)] {
        let mut all = make_test_ranks(world, 1);
        let group = group_of(members);
        for rank in 0..members.len() {
            let mut isolated = isolate(&mut all, &group, rank, streams);
            assert!(all[0].transport.has_port() && !isolated.transport.has_port());
            isolated.transport.dial_higher_ranks(NOW);
            all.push(isolated);
        }
        let indices: Vec<usize> = (0..all.len()).collect();
        handle_events_until(&mut all, &indices, NOW, |all| {
            all.iter().all(|rank| rank.transport.has_dialed() && rank.transport.missing_link().is_none())
        });
        let mut isolated = all.split_off(world as usize);
        for isolated in &mut isolated {
            take_accepted(&mut all, isolated);
        }
        assert!(all.iter().all(|rank| rank.transport.descriptors().len() == 1), "only the listener is left");
        drop(all);
        let peers = members.len() - 1;
        for TestRank { transport, .. } in &isolated {
            assert_eq!(transport.descriptors().len(), peers * usize::from(streams));
            assert_eq!(transport.incoming_links.len(), peers);
        }
        assert_linked(&mut isolated[..2], NOW);
    }
}

/// Opens a connection of the isolated group that `dialer` is in, and returns why the rank `accepting` of `job` refuses it.
fn dial_and_be_refused(job: &mut [TestRank], accepting: usize, dialer: &mut TcpTransport) -> HandshakeError {
    let mut dial = dialer.open_connection(NOW, Rank::new(1), StreamId::ONLY).unwrap();
    let started = std::time::Instant::now();
    loop {
        assert!(started.elapsed() < DELIVERY_TIMEOUT, "the connection was not refused");
        job[accepting].wait_and_handle_events(NOW, Duration::from_millis(1));
        match dial.handshake.advance(&mut dial.stream) {
            DialProgress::Connecting | DialProgress::Pending => {}
            DialProgress::Failed(DialError::Handshake(error)) => return error,
            DialProgress::Failed(DialError::Io(error)) | DialProgress::Closed(error) => panic!("{error}"),
            DialProgress::Ready => panic!("the connection was accepted"),
        }
    }
}

/// A rank accepts only the connections of isolated groups that it expects, and each of them once. So another rank cannot make it
/// hold many connections.
#[test]
fn connections_of_isolated_groups_that_a_rank_does_not_expect_are_refused() {
    let mut job = make_test_ranks(3, 1);
    let refused = HandshakeError::Refused(Refusal::Group);
    let group = group_of(&[0, 1]);
    let mut dialer = isolate(&mut job, &group, 0, 1);
    assert_eq!(dial_and_be_refused(&mut job, 1, &mut dialer.transport), refused, "rank 1 expects no group");
    let acceptor = isolate(&mut job, &group, 1, 1);
    let mut other_rank = isolate(&mut job, &group_of(&[2, 1]), 0, 1);
    assert_eq!(
        dial_and_be_refused(&mut job, 1, &mut other_rank.transport),
        refused,
        "rank 2 is not expected"
    );
    let other_group = IsolatedGroup { id: 8, ..group };
    let mut other_group = isolate(&mut job, &other_group, 0, 1);
    assert_eq!(dial_and_be_refused(&mut job, 1, &mut other_group.transport), refused, "another number");
    dialer.transport.dial_higher_ranks(NOW);
    job.extend([dialer, acceptor]);
    handle_events_until(&mut job, &[1, 3], NOW, |all| all[3].transport.has_dialed());
    let mut isolated = job.split_off(3);
    for _ in 0..20 {
        let error = dial_and_be_refused(&mut job, 1, &mut isolated[0].transport);
        assert_eq!(error, refused, "the link exists");
        assert_eq!(job[1].transport.descriptors().len(), 2, "the listener and the expected connection");
    }
    take_accepted(&mut job, &mut isolated[1]);
    let error = dial_and_be_refused(&mut job, 1, &mut isolated[0].transport);
    assert_eq!(error, refused, "the group has been connected");
    assert_linked(&mut isolated, NOW);
}

/// The peer of a connection that is being opened ends: before the connection, or in the middle of the handshake.
#[test]
fn a_link_to_a_rank_that_ends_meanwhile_is_lost() {
    for ends_before in [true, false] {
        let mut job = make_test_ranks(2, 1);
        let group = group_of(&[0, 1]);
        let mut ranks = [isolate(&mut job, &group, 0, 1)];
        let peer = job.pop().unwrap();
        let peer = (!ends_before).then_some(peer);
        ranks[0].transport.dial_higher_ranks(NOW);
        if let Some(peer) = peer {
            let is_established = |ranks: &[TestRank]| ranks[0].transport.next_deadline().is_none();
            handle_events_until(&mut ranks, &[0], NOW, is_established);
            drop(peer);
        }
        handle_events_until(&mut ranks, &[0], NOW, |ranks| ranks[0].transport.has_dialed());
        let (peer, why) = ranks[0].transport.missing_link().expect("there is no link");
        assert!(peer == Rank::new(1) && why.starts_with("no connection: "), "rank {peer}: {why}");
    }
}
