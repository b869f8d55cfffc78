//! The list of `--interface`: which addresses of a host the ranks and the rendezvous may use.
//!
//! An entry is the name of an interface (`eth0`), a glob (`ib*`), or a network (`10.0.0.0/8`). `^` before an entry excludes
//! what it names. An address is allowed if no exclusion names it and, unless all entries are exclusions, another entry names
//! it.

use std::net::IpAddr;
use std::str::FromStr;

use glob::Pattern;

use super::error::LaunchError;

/// The parsed list of `--interface`.
#[derive(Clone, PartialEq, Debug)]
pub struct InterfaceFilter {
    /// The list as the user has written it.
    text: String,
    entries: Vec<FilterEntry>,
}

#[derive(Clone, PartialEq, Debug)]
struct FilterEntry {
    is_exclusion: bool,
    what: AddressSet,
}

/// What an entry names.
#[derive(Clone, PartialEq, Debug)]
enum AddressSet {
    Interfaces(Pattern),
    Network { address: IpAddr, prefix_bits: u32 },
}

impl InterfaceFilter {
    /// Returns the list as the user has written it.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn allows(&self, name: &str, address: IpAddr) -> bool {
        let names = |entry: &FilterEntry| entry.what.contains(name, address);
        let is_excluded = self.entries.iter().any(|entry| entry.is_exclusion && names(entry));
        let mut wanted = self.entries.iter().filter(|entry| !entry.is_exclusion).peekable();
        !is_excluded && (wanted.peek().is_none() || wanted.any(names))
    }

    /// Chooses an address among `addresses`, each with the name of its interface: `route` if it is allowed, otherwise the first
    /// that is allowed and belongs to the same protocol. Never chooses a loopback address.
    fn choose(&self, addresses: &[(String, IpAddr)], route: IpAddr) -> Option<IpAddr> {
        let allowed = addresses.iter().filter(|(name, address)| {
            !address.is_loopback() && address.is_ipv4() == route.is_ipv4() && self.allows(name, *address)
        });
        let mut allowed = allowed.map(|(_, address)| *address);
        allowed.clone().find(|address| *address == route).or_else(|| allowed.next())
    }
}

impl AddressSet {
    fn contains(&self, name: &str, address: IpAddr) -> bool {
        match (self, address) {
            (Self::Interfaces(pattern), _) => pattern.matches(name),
            (Self::Network { address: IpAddr::V4(network), prefix_bits }, IpAddr::V4(address)) => {
                let shift = 32 - prefix_bits;
                network.to_bits().checked_shr(shift) == address.to_bits().checked_shr(shift)
            }
            (Self::Network { address: IpAddr::V6(network), prefix_bits }, IpAddr::V6(address)) => {
                let shift = 128 - prefix_bits;
                network.to_bits().checked_shr(shift) == address.to_bits().checked_shr(shift)
            }
            (Self::Network { .. }, _) => false,
        }
    }
}

impl FromStr for AddressSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((address, prefix)) = text.split_once('/') {
            let address: IpAddr = address.parse().map_err(|_| format!("`{address}` is not an address"))?;
            let bits_max = if address.is_ipv4() { 32 } else { 128 };
            let prefix_bits = prefix.parse().ok().filter(|&bits| bits <= bits_max);
            let prefix_bits =
                prefix_bits.ok_or_else(|| format!("`/{prefix}` is not a length of 0 to {bits_max} bits"))?;
            return Ok(Self::Network { address, prefix_bits });
        }
        if text.is_empty() {
            return Err("an entry is empty".to_owned());
        }
        let pattern = Pattern::new(text).map_err(|error| format!("`{text}` is not a pattern: {error}"))?;
        Ok(Self::Interfaces(pattern))
    }
}

impl FromStr for InterfaceFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |entry: &str| {
            let included = entry.strip_prefix('^');
            Ok(FilterEntry { is_exclusion: included.is_some(), what: included.unwrap_or(entry).parse()? })
        };
        let entries = text.split(',').map(|entry| parse(entry.trim())).collect::<Result<_, String>>()?;
        Ok(Self { text: text.to_owned(), entries })
    }
}

/// Returns the address of this host that the ranks use. `route` is the source address of the route to the other hosts, which is
/// the address without `--interface`.
///
/// # Errors
///
/// If no interface has an address that `filter` allows. The error lists the addresses of this host.
pub(super) fn choose_address(filter: Option<&InterfaceFilter>, route: IpAddr) -> Result<IpAddr, LaunchError> {
    let Some(filter) = filter else { return Ok(route) };
    let interfaces = if_addrs::get_if_addrs()
        .map_err(|source| LaunchError::System { resource: "the list of network interfaces", source })?;
    let addresses: Vec<(String, IpAddr)> =
        interfaces.into_iter().map(|interface| (interface.name.clone(), interface.ip())).collect();
    filter.choose(&addresses, route).ok_or_else(|| {
        let found: Vec<String> = addresses.iter().map(|(name, address)| format!("{name} {address}")).collect();
        LaunchError::Address(format!(
            "--interface {}: no interface has such an address that other hosts can reach; the addresses are {}",
            filter.text,
            found.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_chosen_by_name_pattern_and_network() {
        let addresses: Vec<(String, IpAddr)> = [
            ("lo", "127.0.0.1"),
            ("docker0", "172.17.0.1"),
            ("eth0", "192.168.1.5"),
            ("eth0", "fe80::5"),
            ("ib0", "10.1.0.5"),
            ("ib1", "10.2.0.5"),
        ]
        .map(|(name, address)| (name.to_owned(), address.parse().unwrap()))
        .into();
        for (list, route, expected) in [
            ("eth0", "10.1.0.5", Some("192.168.1.5")),
            ("ib*", "192.168.1.5", Some("10.1.0.5")),
            ("ib*", "10.2.0.5", Some("10.2.0.5")),
            ("10.2.0.0/16", "192.168.1.5", Some("10.2.0.5")),
            ("^docker*,^eth0", "192.168.1.5", Some("10.1.0.5")),
            ("^docker*", "192.168.1.5", Some("192.168.1.5")),
            ("10.0.0.0/8, ^ib0", "192.168.1.5", Some("10.2.0.5")),
            ("0.0.0.0/0,^172.16.0.0/12", "172.17.0.1", Some("192.168.1.5")),
            ("fe80::/10", "fe80::1", Some("fe80::5")),
            ("lo", "192.168.1.5", None),
            ("eth1", "192.168.1.5", None),
        ] {
            let filter: InterfaceFilter = list.parse().unwrap();
            let found = filter.choose(&addresses, route.parse().unwrap());
            assert_eq!(found, expected.map(|address| address.parse().unwrap()), "{list} {route}");
        }
    }

    #[test]
    fn wrong_lists_are_refused() {
        for (list, part) in [
            ("", "empty"),
            ("eth0,,ib0", "empty"),
            ("^", "empty"),
            ("10.0.0/8", "`10.0.0` is not an address"),
            ("10.0.0.0/33", "0 to 32 bits"),
            ("10.0.0.0/x", "0 to 32 bits"),
            ("eth[", "not a pattern"),
        ] {
            let error = list.parse::<InterfaceFilter>().expect_err(list);
            assert!(error.contains(part), "{list}: {error}");
        }
    }
}
