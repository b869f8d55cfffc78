//! Checks the ports of `--port` before any rank starts, so that an error names the host and the ports.

use std::io;
use std::net::{IpAddr, TcpListener};

use super::error::LaunchError;
use super::plan::LaunchPlan;
use crate::rendezvous::host_name;
use crate::types::{counted, plural};

/// The most ports in use that an error lists.
const LISTED_PORTS_MAX: usize = 8;

/// Checks that the ranks of this host can listen on `address`.
///
/// # Errors
///
/// If fewer ports are free than this host has ranks, or the operating system does not let a program listen on them.
pub(super) fn check_ports(plan: &LaunchPlan, address: IpAddr) -> Result<(), LaunchError> {
    let Some(ports) = plan.ports else { return Ok(()) };
    let needed = plan.share.count() as usize;
    let (mut free, mut used) = (0, Vec::new());
    for port in ports.ports_from(0) {
        if free == needed {
            break;
        }
        match TcpListener::bind((address, port)) {
            Ok(_) => free += 1,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => used.push(port),
            Err(error) => {
                let host = host_name();
                return Err(LaunchError::Ports(format!(
                    "--port {ports}: {host} cannot listen on port {port} of {address}: {error}; choose other ports (only root \
                     may listen on ports below 1024)"
                )));
            }
        }
    }
    if free == needed {
        return Ok(());
    }
    let mut listed: Vec<String> = used.iter().take(LISTED_PORTS_MAX).map(u16::to_string).collect();
    if used.len() > LISTED_PORTS_MAX {
        listed.push(counted(used.len() - LISTED_PORTS_MAX, "other"));
    }
    Err(LaunchError::Ports(format!(
        "--port {ports}: the ranks on {} need {} on {address}, and {free} {} free; in use: {}; `ss -ltnp` lists the \
         programs that use them; end these programs, or choose other ports",
        host_name(),
        counted(needed, "free port"),
        plural(free, "is", "are"),
        listed.join(", ")
    )))
}
