//! Opens the extra connections of a link: all connections except the first one. The rank that dialed the link opens them once
//! the first connection is established. Each has a separate handshake. A link works without the connections that cannot be
//! opened.

use std::time::Duration;

use mio::Token;
use mio::net::TcpStream;

use super::bundle::Bundle;
use super::dial::DialOutcome;
use super::{TcpLink, TcpTransport};
use crate::transport::incoming::AcceptedConnection;
use crate::types::Rank;
use crate::wire::handshake::StreamId;

impl TcpTransport {
    /// Begins to open the extra connections of a link that this rank has dialed.
    pub(super) fn open_extra_connections(&mut self, now: Duration, peer: Rank) {
        let Some(bundle) = self.bundle_mut(peer) else { return };
        let total = bundle.stream_count();
        bundle.expect_connections(usize::from(total) - 1);
        for index in 1..total {
            self.open_extra_connection(now, peer, StreamId { index, total });
        }
    }

    fn open_extra_connection(&mut self, now: Duration, peer: Rank, stream_id: StreamId) {
        match self.open_connection(now, peer, stream_id) {
            Ok(dial) => {
                self.extras.insert(dial.token, dial);
            }
            Err(error) => self.handle_failed_extra_connection(peer, stream_id, &error.to_string()),
        }
    }

    /// Advances the opening of an extra connection as far as possible without blocking.
    pub(super) fn advance_extra_connection(&mut self, now: Duration, token: Token) {
        let Some(mut dial) = self.extras.remove(&token) else { return };
        let (peer, stream_id) = (dial.peer, dial.stream_id);
        match dial.advance(now) {
            DialOutcome::InProgress => {
                self.extras.insert(token, dial);
            }
            DialOutcome::Ready => {
                self.peers_by_token.insert(token, peer);
                if let Some(bundle) = self.bundle_mut(peer) {
                    bundle.decrement_expected_connections();
                    bundle.add_connection(stream_id.index, dial.stream, token);
                }
            }
            DialOutcome::Failed { was_too_slow: true, .. } => {
                self.open_extra_connection(now, peer, stream_id);
            }
            DialOutcome::Failed { why, .. } => self.handle_failed_extra_connection(peer, stream_id, &why),
        }
    }

    fn handle_failed_extra_connection(&mut self, peer: Rank, stream_id: StreamId, why: &str) {
        let StreamId { index, total } = stream_id;
        if let Some(bundle) = self.bundle_mut(peer) {
            if bundle.is_connection_missing(index) {
                log::info!("the link to rank {peer} works without connection {index} of {total}: {why}");
            }
            bundle.decrement_expected_connections();
        }
    }

    /// Adds an extra connection, which a peer has opened, to the link. Closes it if the link does not need it.
    pub(super) fn accept_extra_connection(&mut self, accepted: AcceptedConnection) {
        let (peer, token) = (accepted.introduction.from, accepted.token);
        let StreamId { index, total } = accepted.introduction.stream;
        let is_needed = |bundle: &Bundle<TcpStream>| {
            bundle.stream_count() == total && bundle.is_connection_missing(index)
        };
        if !self.bundle(peer).is_some_and(is_needed) {
            // For example, the link may already use only its first connection.
            log::debug!(
                "closed connection {} of {total} of the link to rank {peer}, because the link does not need it",
                u32::from(index) + 1
            );
            return;
        }
        match self.apply_options_and_confirm(accepted) {
            Ok(stream) => {
                self.peers_by_token.insert(token, peer);
                if let Some(bundle) = self.bundle_mut(peer) {
                    bundle.add_connection(index, stream, token);
                }
            }
            Err((failed_step, error)) => {
                let number = u32::from(index) + 1;
                log::info!(
                    "connection {number} of {total} of the link to rank {peer} {failed_step}: {error}"
                );
            }
        }
    }

    /// Sends only on the first `count` connections of each link, so that the caller can measure their speed.
    pub fn use_streams(&mut self, count: u8) {
        self.used_streams = count.clamp(1, self.streams);
        let used = self.used_streams;
        for link in self.links.values_mut() {
            if let TcpLink::Open(bundle) = link {
                bundle.use_streams(used.into());
                for connection in bundle.connections() {
                    if let Err(error) = self.options.apply_pacing(connection, bundle.stream_count().min(used))
                    {
                        log::debug!("the pacing rate of a connection could not be changed: {error}");
                    }
                }
            }
        }
    }

    /// Uses only the first connection of each link. The extra connections are closed once all their data have arrived.
    pub fn use_single_connection(&mut self) {
        self.use_streams(1);
        self.streams = 1;
        for link in self.links.values_mut() {
            if let TcpLink::Open(bundle) = link {
                bundle.use_single_connection();
            }
        }
    }
}
