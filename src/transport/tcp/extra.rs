//! Opens the extra connections of a link: all connections except the first one. The rank that dialed the link opens them once
//! the first connection is established. A link works without the connections that cannot be opened.

use std::time::Duration;

use mio::net::TcpStream;

use super::bundle::Bundle;
use super::dial::Dial;
use super::{TcpLink, TcpTransport};
use crate::transport::incoming::AcceptedConnection;
use crate::types::Rank;
use crate::wire::handshake::StreamId;

impl TcpTransport {
    pub(super) fn open_extra_connections(&mut self, now: Duration, peer: Rank) {
        let Some(bundle) = self.bundle_mut(peer) else { return };
        let total = bundle.stream_count();
        bundle.expected_connections = usize::from(total) - 1;
        for stream_id in (1..total).map(|index| StreamId { index, total }) {
            if let Err(why) = self.dial(now, peer, stream_id) {
                self.handle_failed_extra_connection(peer, stream_id, &why);
            }
        }
    }

    /// Adds an extra connection, which the peer has accepted, to the link.
    pub(super) fn add_extra_connection(&mut self, dial: Dial) {
        self.peers_by_token.insert(dial.token, dial.peer);
        if let Some(bundle) = self.bundle_mut(dial.peer) {
            bundle.decrement_expected_connections();
            bundle.add_connection(dial.stream_id.index, dial.stream, dial.token);
        }
    }

    pub(super) fn handle_failed_extra_connection(&mut self, peer: Rank, stream_id: StreamId, why: &str) {
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
        let number = u32::from(index) + 1;
        let is_needed = |bundle: &Bundle<TcpStream>| {
            bundle.stream_count() == total && bundle.is_connection_missing(index)
        };
        if !self.bundle(peer).is_some_and(is_needed) {
            // For example, the link may already use only its first connection.
            let connection = format_args!("connection {number} of {total} of the link to rank {peer}");
            return log::debug!("closed {connection}, because the link does not need it");
        }
        match self.apply_options_and_confirm(accepted) {
            Ok(stream) => {
                self.peers_by_token.insert(token, peer);
                if let Some(bundle) = self.bundle_mut(peer) {
                    bundle.add_connection(index, stream, token);
                }
            }
            Err((failed_step, error)) => {
                log::info!(
                    "connection {number} of {total} of the link to rank {peer} {failed_step}: {error}"
                );
            }
        }
    }

    /// Sends only on the first `count` connections of each link, so that the caller can measure their speed.
    pub fn use_streams(&mut self, count: u8) {
        self.used_streams = count.clamp(1, self.streams);
        let Self { options, streams, used_streams, links, .. } = self;
        for link in links.values_mut() {
            let TcpLink::Open(bundle) = link else { continue };
            bundle.use_streams((*used_streams).into());
            if *streams == 1 {
                bundle.use_single_connection();
            }
            let rate_divisor = bundle.stream_count().min(*used_streams);
            for connection in bundle.connections() {
                if let Err(error) = options.apply_pacing(connection, rate_divisor) {
                    log::debug!("the pacing rate of a connection could not be changed: {error}");
                }
            }
        }
    }

    /// Uses only the first connection of each link. The extra connections are closed once all their data have arrived.
    pub fn use_single_connection(&mut self) {
        self.streams = 1;
        self.use_streams(1);
    }
}
