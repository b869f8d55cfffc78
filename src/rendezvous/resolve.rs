//! Finds the address of the host of rank 0.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs as _, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use super::error::StartError;

/// The pause between two attempts. A pod of Kubernetes has a name only after it has started.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Returns an address of `host`, a name or an address. Tries again until `timeout` is over. All ranks prefer IPv4 addresses, so
/// that all ranks use the same version.
///
/// # Errors
///
/// [`StartError::UnknownHost`] if the name has no address.
pub(crate) fn resolve_host(host: &str, timeout: Duration) -> Result<IpAddr, StartError> {
    let started = Instant::now();
    loop {
        let resolved = (host, 0).to_socket_addrs().and_then(|addresses| {
            let addresses: Vec<IpAddr> = addresses.map(|address| address.ip()).collect();
            let preferred = addresses.iter().find(|address| address.is_ipv4()).or(addresses.first());
            preferred.copied().ok_or_else(|| io::ErrorKind::NotFound.into())
        });
        match resolved {
            Ok(address) => return Ok(address),
            Err(source) if started.elapsed() + RETRY_PAUSE >= timeout => {
                return Err(StartError::UnknownHost { host: host.to_owned(), source });
            }
            Err(_) => thread::sleep(RETRY_PAUSE),
        }
    }
}

/// Returns the address of this host from which packets to `remote` leave. Sends no packet.
///
/// # Errors
///
/// If there is no route to `remote`.
pub fn source_address(remote: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if remote.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    // The port has no meaning, because nothing is sent.
    socket.connect((remote, 9))?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_resolved() {
        assert_eq!(resolve_host("127.0.0.3", Duration::ZERO).unwrap(), IpAddr::from([127, 0, 0, 3]));
        assert!(resolve_host("localhost", Duration::ZERO).unwrap().is_loopback());
        let error = resolve_host("no host has this name", Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("`no host has this name`") && error.contains("RING_MASTER_ADDR"), "{error}");
    }
}
