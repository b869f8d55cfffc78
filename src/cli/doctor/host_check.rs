//! The program `ringtrain host-check`, which `ringrun doctor` starts on each host: it measures the connections to all
//! other hosts, and prints a [`HostReport`] as one line of JSON.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::facts::HostFacts;
use super::link_check::{LinkMeasurement, Token, answer_connections, measure_link};
use crate::group::{Checksums, SEGMENT_BYTES, START_TIMEOUT};
use crate::rendezvous::{
    JoinMethod, LaunchedRank, Member, Registration, Roster, SECRET_VARIABLE, SharedSettings, StartError,
    from_environment, machine_id, ports_from_environment, register, secret_from_environment,
};
use crate::transport::handshake::Identity;
use crate::types::{Rank, WorldSize};
use crate::wire::{Secret, handshake};

/// The time in which two hosts measure the connection between them. Each host measures one connection at a time, so that
/// measurements do not disturb each other.
const SLOT: Duration = Duration::from_secs(3);

/// What a host measures.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct HostReport {
    pub(super) rank: usize,
    pub(super) facts: HostFacts,
    /// The connection that this host opened to each other host, in the order of the hosts. `None` for the host itself.
    pub(super) links: Vec<Option<Result<LinkMeasurement, String>>>,
}

/// Runs the check on this host, which has the rank of its process. `names` has the names of all hosts in rank order.
///
/// # Errors
///
/// If this process was not started by ringrun, or could not reach the other hosts through the rendezvous.
pub(super) fn check_host(names: &[String]) -> Result<HostReport, StartError> {
    let launched = match from_environment().map_err(StartError::Environment)? {
        JoinMethod::Launched(launched) if launched.world != WorldSize::ONE => launched,
        _ => {
            let facts = HostFacts::collect(IpAddr::from([127, 0, 0, 1]), names);
            return Ok(HostReport { rank: 0, facts, links: vec![None] });
        }
    };
    let (roster, listener) = exchange_addresses(&launched)?;
    // The hosts get the roster at nearly the same time, so their slots coincide.
    let started = Instant::now();
    let token = token_of(&launched);
    answer_connections(listener, token);
    let own = launched.rank.index();
    let facts = HostFacts::collect(roster.members[own].address.ip(), names);
    let mut links = vec![None; roster.members.len()];
    for (slot, peer) in partners(own, roster.members.len()) {
        thread::sleep((slot * SLOT).saturating_sub(started.elapsed()));
        // Both hosts dial, to test both directions. One of them measures the rates.
        let measured = measure_link(roster.members[peer].address, &token, own < peer);
        links[peer] = Some(measured.map_err(|error| error.to_string()));
    }
    let slots = partners(own, roster.members.len()).last().map_or(0, |(slot, _)| slot + 1);
    // The partner of the last slot may still measure.
    thread::sleep((slots * SLOT).saturating_sub(started.elapsed()));
    Ok(HostReport { rank: own, facts, links })
}

/// Returns the slots of a host, and its partner in each: every two hosts meet in one slot, and no host has two partners at a time
/// (the circle method of round-robin tournaments).
fn partners(own: usize, hosts: usize) -> impl Iterator<Item = (u32, usize)> {
    let places = hosts + hosts % 2;
    (0..places.saturating_sub(1)).filter_map(move |slot| {
        // The last place stays, and the others rotate.
        let rotating = places - 1;
        let partner = if own == rotating {
            (0..rotating).find(|&other| (2 * other) % rotating == slot % rotating)
        } else {
            let other = (slot + rotating - own % rotating) % rotating;
            Some(if other == own { rotating } else { other })
        };
        partner.filter(|&partner| partner < hosts).map(|partner| (slot as u32, partner))
    })
}

/// Registers this host at the rendezvous of ringrun. Returns the addresses of all hosts, and this host's listener.
fn exchange_addresses(launched: &LaunchedRank) -> Result<(Roster, TcpListener), StartError> {
    let secret = secret_from_environment().map_err(StartError::Secret)?.unwrap_or_else(Secret::none);
    let job = handshake::Job { id: launched.job_id, world: launched.world.get(), peers_digest: [0; 32] };
    let identity = Identity { secret, job, rank: Some(launched.rank) };
    let registration = Registration {
        identity: &identity,
        rank: launched.rank,
        world: launched.world,
        address: launched.rendezvous,
        server_name: "the rendezvous of ringrun".into(),
        start_timeout: launched.start_timeout.unwrap_or(START_TIMEOUT),
    };
    let mut listener = None;
    let listen = |local: IpAddr| {
        let ip = launched.listen.unwrap_or(local);
        let failed = |source| StartError::CannotListen {
            address: SocketAddr::new(ip, 0),
            rank: launched.rank,
            source,
        };
        let bind = |port| TcpListener::bind((ip, port));
        let listening = match ports_from_environment()? {
            Some(ports) => ports.listen(launched.rank.get(), bind),
            None => bind(0),
        }
        .map_err(failed)?;
        let address = listening.local_addr().map_err(failed)?;
        listener = Some(listening);
        let shared = SharedSettings {
            segment_bytes: SEGMENT_BYTES,
            checksums: Checksums::Auto,
            processors: 1,
            streams: 1,
            timeline: false,
        };
        Ok(Member { host: crate::rendezvous::host_name(), machine: machine_id(None), address, shared })
    };
    let roster = register(&registration, listen, |rank: Rank| format!("host {rank}"))?;
    let refused = || StartError::Refused("the rendezvous did not ask for the address of this host".into());
    Ok((roster, listener.ok_or_else(refused)?))
}

/// Returns the first bytes of the connections of this job.
fn token_of(launched: &LaunchedRank) -> Token {
    let secret = std::env::var_os(SECRET_VARIABLE).unwrap_or_default();
    let mac = Hmac::<Sha256>::new_from_slice(secret.as_encoded_bytes());
    let mut mac = mac.expect("HMAC takes keys of any length");
    mac.update(b"ringrun doctor");
    mac.update(&launched.job_id);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_two_hosts_meet_once_and_each_host_has_one_partner_at_a_time() {
        for hosts in 1..=17 {
            let meetings: Vec<(u32, usize, usize)> = (0..hosts)
                .flat_map(|own| partners(own, hosts).map(move |(slot, peer)| (slot, own, peer)))
                .collect();
            let distinct: BTreeSet<_> = meetings.iter().map(|&(_, own, peer)| (own, peer)).collect();
            assert_eq!(
                (meetings.len(), distinct.len()),
                (hosts * (hosts - 1), hosts * (hosts - 1)),
                "{hosts}"
            );
            for (slot, own, peer) in &meetings {
                assert!(
                    own != peer && meetings.contains(&(*slot, *peer, *own)),
                    "{hosts}: {slot} {own} {peer}"
                );
            }
        }
    }
}
