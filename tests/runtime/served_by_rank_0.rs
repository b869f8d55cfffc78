//! Jobs of launchers other than `ringrun`: rank 0 serves the rendezvous.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use ringtrain::rendezvous::{DiscoveredRank, OtherLauncher, RendezvousHost, StartError};
use ringtrain::wire::Secret;
use ringtrain::{Group, JoinMethod, JoinOptions, ReduceOp, WorldSize};

fn options(rank: ringtrain::Rank, host: &RendezvousHost, port: u16) -> JoinOptions {
    let world = WorldSize::new(3).unwrap();
    let discovered = DiscoveredRank {
        launcher: OtherLauncher::Kubernetes,
        rank,
        world,
        host: host.clone(),
        port,
        job_id: [3; 16],
        start_timeout: None,
    };
    JoinOptions {
        method: JoinMethod::Discovered(discovered),
        secret: Secret::new(b"a secret for this test").unwrap(),
        start_timeout: Duration::from_secs(20),
        ..JoinOptions::default()
    }
}

/// The name `127.1` has the address 127.0.0.1, so rank 0 and the other ranks of its host listen on all addresses. An isolated
/// group exchanges addresses again.
#[test]
fn ranks_join_and_open_isolated_groups() {
    for host in [RendezvousHost::ThisHost, RendezvousHost::Named("127.1".into())] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let ranks: Vec<_> = crate::util::ranks::ranks(3)
            .map(|rank| {
                let options = options(rank, &host, port);
                thread::spawn(move || {
                    let mut group = Group::join(&options).unwrap();
                    let mut isolated = group.isolated().unwrap();
                    let mut ranks = [rank.get(), 1];
                    isolated.all_reduce(&mut ranks, ReduceOp::Sum).unwrap();
                    group.barrier().unwrap();
                    ranks
                })
            })
            .collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), [3, 3], "{host:?}");
        }
    }
}

#[test]
fn ranks_on_several_hosts_need_a_secret() {
    let host = RendezvousHost::Named("127.1".into());
    let options = JoinOptions { secret: Secret::none(), ..options(ringtrain::Rank::ZERO, &host, 1) };
    let error = Group::join(&options).err().unwrap();
    assert!(matches!(error, StartError::NeedsSecret { .. }), "{error}");
}
