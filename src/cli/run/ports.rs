//! Checks that the ports of `--port` are enough for the processes that listen on each host.

use super::hosts::JobHosts;
use crate::rendezvous::PortRange;
use crate::types::WorldSize;

/// Returns how many ports each host needs, with its name: one for each rank and, on this host, one for the rendezvous.
pub(super) fn needed_ports(hosts: &JobHosts) -> Vec<(String, u32)> {
    // The only rank of a job does not listen.
    let ranks = if hosts.world == WorldSize::ONE { 0 } else { hosts.share.count() };
    let remote = hosts.remote_hosts.iter().map(|host| (format!("host {}", host.name), host.share.count()));
    [("this host".to_owned(), ranks + 1)].into_iter().chain(remote).collect()
}

/// Checks that the range has a port for each process that listens.
pub(super) fn check_port_count(ports: PortRange, hosts: &JobHosts) -> Result<(), String> {
    let too_small = needed_ports(hosts).into_iter().find(|(_, needed)| *needed > ports.count());
    let Some((host, needed)) = too_small else { return Ok(()) };
    let rendezvous = if host == "this host" { " and one for the rendezvous of ringrun" } else { "" };
    Err(format!(
        "--port {ports}: {host} needs {needed} ports, one for each rank{rendezvous}; give a range of at least {needed} ports, \
         such as --port {}",
        ports.suggest(needed)
    ))
}
