//! Chooses which connection to close if too many handshakes are in progress.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use mio::Token;

/// The connections whose handshake is in progress, in the order in which the listener closes them if there are too many.
/// A rank sends its hello as soon as it is connected, so the listener first closes silent connections, which have sent no
/// data. Among the silent connections, the listener closes the oldest connection of the address with the most silent
/// connections. If no connection is silent, the same rule applies to the active connections, which have sent data. Each
/// method takes time logarithmic in the number of connections.
#[derive(Default)]
pub(super) struct EvictionOrder {
    silent: ConnectionRanking,
    active: ConnectionRanking,
}

impl EvictionOrder {
    /// Adds a new connection from `address`. A later connection must have a higher token.
    pub(super) fn add(&mut self, token: Token, address: IpAddr) {
        self.silent.insert(token, address);
    }

    /// Records that a connection has sent data.
    pub(super) fn mark_as_active(&mut self, token: Token, address: IpAddr) {
        if self.silent.remove(token, address) {
            self.active.insert(token, address);
        }
    }

    /// Removes a connection.
    pub(super) fn remove(&mut self, token: Token, address: IpAddr) {
        if !self.silent.remove(token, address) {
            self.active.remove(token, address);
        }
    }

    /// Returns the connection to close first, or `None` if there are no connections.
    pub(super) fn first(&self) -> Option<Token> {
        self.silent.first().or_else(|| self.active.first())
    }
}

/// Connections in the order in which they are closed: first the oldest connection of the address with the most
/// connections.
#[derive(Default)]
struct ConnectionRanking {
    by_address: BTreeMap<IpAddr, BTreeSet<Token>>,
    /// For each address: the number of its connections, the oldest of its connections, and the address.
    addresses: BTreeSet<(Reverse<usize>, Token, IpAddr)>,
}

impl ConnectionRanking {
    fn first(&self) -> Option<Token> {
        self.addresses.first().map(|&(_, token, _)| token)
    }

    fn insert(&mut self, token: Token, address: IpAddr) {
        self.change_connections_of_address(address, |tokens| tokens.insert(token));
    }

    /// Removes the connection, and returns whether it was present.
    fn remove(&mut self, token: Token, address: IpAddr) -> bool {
        self.change_connections_of_address(address, |tokens| tokens.remove(&token))
    }

    /// Applies `change` to the set of connections of `address`, and updates the order. Returns the result of
    /// `change`.
    fn change_connections_of_address(
        &mut self,
        address: IpAddr,
        change: impl FnOnce(&mut BTreeSet<Token>) -> bool,
    ) -> bool {
        let mut tokens = self.by_address.remove(&address).unwrap_or_default();
        if let Some(&oldest) = tokens.first() {
            self.addresses.remove(&(Reverse(tokens.len()), oldest, address));
        }
        let is_changed = change(&mut tokens);
        if let Some(&oldest) = tokens.first() {
            self.addresses.insert((Reverse(tokens.len()), oldest, address));
            self.by_address.insert(address, tokens);
        }
        is_changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_connection_of_the_address_with_the_most_connections_is_closed_first() {
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mut order = EvictionOrder::default();
        let connections = [(2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)];
        for (token, last) in connections {
            order.add(Token(token), address(last));
        }
        order.mark_as_active(Token(3), address(2));
        order.mark_as_active(Token(6), address(3));
        let mut closed = Vec::new();
        while let Some(token) = order.first() {
            let (_, last) = connections.into_iter().find(|&(other, _)| other == token.0).unwrap();
            order.remove(token, address(last));
            closed.push(token.0);
        }
        // Address 2 has two silent connections, 4 and 5, so connection 4 is closed first. Then each address has one silent
        // connection, and the oldest of the three is closed: connection 2.
        assert_eq!(closed, [4, 2, 5, 7, 3, 6]);
        assert!(order.silent.by_address.is_empty() && order.active.by_address.is_empty());
    }
}
