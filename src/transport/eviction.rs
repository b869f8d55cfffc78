//! Chooses which connection to close if too many handshakes are in progress.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;

use mio::Token;

/// A connection whose handshake is in progress.
#[derive(Clone, Copy)]
pub(super) struct PendingConnection {
    /// A later connection has a higher token.
    pub(super) token: Token,
    pub(super) address: IpAddr,
    /// Whether the other end has sent no data. A rank sends its hello as soon as it is connected.
    pub(super) is_silent: bool,
}

/// Returns the connection to close first: the oldest connection of the address with the most connections. If there are silent
/// connections, only these count.
pub(super) fn choose(connections: impl Iterator<Item = PendingConnection> + Clone) -> Option<Token> {
    let has_silent = connections.clone().any(|connection| connection.is_silent);
    let mut by_address: BTreeMap<IpAddr, (usize, Reverse<Token>)> = BTreeMap::new();
    for PendingConnection { token, address, .. } in connections.filter(|one| one.is_silent == has_silent) {
        let (count, oldest) = by_address.entry(address).or_insert((0, Reverse(token)));
        *count += 1;
        *oldest = Reverse(token).max(*oldest);
    }
    by_address.into_values().max().map(|(_, Reverse(oldest))| oldest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_connection_of_the_address_with_the_most_connections_is_closed_first() {
        let mut connections: Vec<PendingConnection> = [(2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)]
            .map(|(token, last)| PendingConnection {
                token: Token(token),
                address: IpAddr::from([10, 0, 0, last]),
                is_silent: ![3, 6].contains(&token),
            })
            .into();
        let mut closed = Vec::new();
        while let Some(token) = choose(connections.iter().copied()) {
            connections.retain(|connection| connection.token != token);
            closed.push(token.0);
        }
        // Address 2 has two silent connections, 4 and 5, so connection 4 is closed first. Then each address has one silent
        // connection, and the oldest of the three is closed: connection 2.
        assert_eq!(closed, [4, 2, 5, 7, 3, 6]);
    }
}
