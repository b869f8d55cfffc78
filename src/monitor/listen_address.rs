//! The address at which a rank serves its status: the value of `--metrics`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// The address of the first rank of a host. Rank n of the host listens at this port plus n.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ListenAddress {
    ip: IpAddr,
    /// If this is 0, each rank listens at a port that the kernel chooses.
    port: u16,
}

impl ListenAddress {
    /// Returns whether the kernel chooses the ports.
    pub(crate) fn has_any_port(self) -> bool {
        self.port == 0
    }

    /// Returns the address of a rank with this number on its host.
    ///
    /// # Errors
    ///
    /// If the port would exceed 65535.
    pub(crate) fn of_local_rank(self, local_rank: u32) -> Result<SocketAddr, String> {
        if self.has_any_port() {
            return Ok(SocketAddr::new(self.ip, 0));
        }
        let port = u32::from(self.port) + local_rank;
        u16::try_from(port).map(|port| SocketAddr::new(self.ip, port)).map_err(|_| {
            format!(
                "rank {local_rank} of this host would listen at port {port}, but the highest port is 65535; pass a lower port"
            )
        })
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(port) = text.parse() {
            return Ok(Self { ip: Ipv4Addr::LOCALHOST.into(), port });
        }
        let numeric = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
        let address: SocketAddr = numeric.as_deref().unwrap_or(text).parse().map_err(|_| {
            "pass a port such as 9400, or an address of this host and a port such as 0.0.0.0:9400 or [::1]:9400"
                .to_owned()
        })?;
        Ok(Self { ip: address.ip(), port: address.port() })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.ip, self.port).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_a_host_has_its_own_port() {
        for (text, local_rank, expected) in [
            ("9400", 0, Ok("127.0.0.1:9400")),
            ("9400", 3, Ok("127.0.0.1:9403")),
            ("localhost:9400", 1, Ok("127.0.0.1:9401")),
            ("0.0.0.0:80", 2, Ok("0.0.0.0:82")),
            ("[::1]:80", 2, Ok("[::1]:82")),
            ("0", 5, Ok("127.0.0.1:0")),
            ("65535", 1, Err("the highest port is 65535")),
            ("65536", 0, Err("pass a port")),
            ("-1", 0, Err("pass a port")),
            ("node7:80", 0, Err("pass a port")),
            ("127.0.0.1", 0, Err("pass a port")),
            ("", 0, Err("pass a port")),
        ] {
            let parsed: Result<ListenAddress, String> = text.parse();
            match (parsed.and_then(|address| address.of_local_rank(local_rank)), expected) {
                (Ok(address), Ok(expected)) => assert_eq!(address.to_string(), expected),
                (Err(error), Err(part)) => assert!(error.contains(part), "{text}: {error}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }
}
