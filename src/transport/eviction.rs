//! Chooses which connection to close when the handshakes of too many connections are incomplete.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use mio::Token;

/// The connections with an unfinished handshake, in the order in which the listener closes them to make room. A rank
/// sends its hello as soon as it is connected, so silent connections are closed first, beginning with the oldest one
/// of the address that has the most. Connections that have sent data are closed later, also beginning with the oldest
/// one of the address that has the most. Each method takes time logarithmic in the number of connections.
#[derive(Default)]
pub(super) struct EvictionOrder {
    silent: ConnectionRanking,
    talking: ConnectionRanking,
}

impl EvictionOrder {
    /// Adds a new connection from `address`. A later connection must have a higher token.
    pub(super) fn add(&mut self, token: Token, address: IpAddr) {
        self.silent.insert(token, address);
    }

    /// Records that a connection has sent data.
    pub(super) fn mark_as_talking(&mut self, token: Token, address: IpAddr) {
        if self.silent.remove(token, address) {
            self.talking.insert(token, address);
        }
    }

    /// Removes a connection.
    pub(super) fn remove(&mut self, token: Token, address: IpAddr) {
        if !self.silent.remove(token, address) {
            self.talking.remove(token, address);
        }
    }

    /// Returns the connection to close first, or `None` if there are no connections.
    pub(super) fn first(&self) -> Option<Token> {
        self.silent.first().or_else(|| self.talking.first())
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
    fn the_oldest_connection_of_the_most_frequent_address_is_closed_first() {
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mut order = EvictionOrder::default();
        let connections = [(2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)];
        for (token, last) in connections {
            order.add(Token(token), address(last));
        }
        order.mark_as_talking(Token(3), address(2));
        order.mark_as_talking(Token(6), address(3));
        let mut closed = Vec::new();
        while let Some(token) = order.first() {
            let (_, last) = connections.into_iter().find(|&(other, _)| other == token.0).unwrap();
            order.remove(token, address(last));
            closed.push(token.0);
        }
        // Address 2 has two silent connections, 4 and 5, so 4 is closed first. Then each address has one silent
        // connection, and the oldest of them is closed: 2.
        assert_eq!(closed, [4, 2, 5, 7, 3, 6]);
        assert!(order.silent.by_address.is_empty() && order.talking.by_address.is_empty());
    }
}
