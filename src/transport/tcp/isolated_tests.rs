//! Tests of the links of isolated groups, over real sockets and in virtual time.

use std::sync::Arc;
use std::time::Duration;

use super::IsolatedGroup;
use super::tests::{SECOND, TestRank, assert_linked, handle_events_until, make_test_ranks, options};
use crate::transport::SocketTransport as _;
use crate::types::Rank;

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
    let poller = transport.listener.poller.take().unwrap();
    TestRank { transport, poller }
}

/// All ranks of an isolated group dial at once. The links arrive on the ports of the job, and still work after its end.
#[test]
fn the_links_of_an_isolated_group_arrive_on_the_ports_of_the_job() {
    for (world, members, streams) in [(2, &[0, 1][..], 1), (2, &[1, 0], 3), (4, &[3, 0, 2], 2)] {
        let mut all = make_test_ranks(world, 1);
        let group = group_of(members);
        for rank in 0..members.len() {
            let mut isolated = isolate(&mut all, &group, rank, streams);
            assert!(all[0].transport.listener.has_port() && !isolated.transport.listener.has_port());
            isolated.transport.dial_higher_ranks(NOW);
            all.push(isolated);
        }
        let indices: Vec<usize> = (0..all.len()).collect();
        handle_events_until(&mut all, &indices, NOW, |all| {
            all.iter().all(|rank| rank.transport.has_dialed() && rank.transport.missing_link().is_none())
        });
        let mut isolated = all.split_off(world as usize);
        for (TestRank { transport, .. }, &member) in isolated.iter_mut().zip(members) {
            transport.take_accepted_from(&mut all[member as usize].transport).unwrap();
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

/// The peer of a connection that is being opened ends: before the connection, or in the middle of the handshake.
#[test]
fn a_link_to_a_rank_that_ends_meanwhile_is_lost() {
    for ends_before in [true, false] {
        let mut job = make_test_ranks(2, 1);
        let group = group_of(&[0, 1]);
        let mut ranks = [isolate(&mut job, &group, 0, 1)];
        let peer = job.pop().filter(|_| !ends_before);
        ranks[0].transport.dial_higher_ranks(NOW);
        if let Some(peer) = peer {
            let is_established = |ranks: &mut [TestRank]| ranks[0].transport.next_deadline().is_none();
            handle_events_until(&mut ranks, &[0], NOW, is_established);
            drop(peer);
        }
        handle_events_until(&mut ranks, &[0], NOW, |ranks| ranks[0].transport.has_dialed());
        let (peer, why) = ranks[0].transport.missing_link().expect("there is no link");
        assert!(peer == Rank::new(1) && why.starts_with("no connection: "), "rank {peer}: {why}");
    }
}
