//! The further connections of a link. The rank that dialed the link opens them once the first connection is established, each
//! with a separate handshake. A connection that fails before both ends have it is not an error: the link works with the
//! connections that it has.

use std::time::Duration;

use mio::Token;
use mio::net::TcpStream;

use super::bundle::Bundle;
use super::{CONNECT_TIMEOUT, Dial, Link, LinkState, TcpTransport};
use crate::transport::handshake::DialProgress;
use crate::transport::listener::{Accepted, HANDSHAKE_TIMEOUT};
use crate::types::Rank;
use crate::wire::handshake::Stream;

/// A connection that is being opened.
pub(super) struct Extra {
    peer: Rank,
    stream: Stream,
    dial: Dial,
}

impl Extra {
    /// The deadline for the TCP connection.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.dial.deadline
    }
}

impl TcpTransport {
    fn bundle(&mut self, peer: Rank) -> Option<&mut Bundle<TcpStream>> {
        match self.links.get_mut(&peer) {
            Some(Link { state: LinkState::Bundled(bundle), .. }) => Some(bundle),
            _ => None,
        }
    }

    /// Begins to open the further connections of a link that this rank has dialed.
    pub(super) fn open_extras(&mut self, now: Duration, peer: Rank) {
        let Some(bundle) = self.bundle(peer) else { return };
        let of = bundle.of();
        bundle.expect_connections(usize::from(of) - 1);
        for index in 1..of {
            self.open_extra(now, peer, Stream { index, of });
        }
    }

    fn open_extra(&mut self, now: Duration, peer: Rank, stream: Stream) {
        match self.open(now, peer, stream) {
            Ok(dial) => {
                self.extras.insert(dial.token, Extra { peer, stream, dial });
            }
            Err(error) => self.give_up(peer, stream, &error.to_string()),
        }
    }

    /// Advances a connection that is being opened as far as possible.
    pub(super) fn advance_extra(&mut self, now: Duration, token: Token) {
        let Some(mut extra) = self.extras.remove(&token) else { return };
        let dial = &mut extra.dial;
        match dial.handshake.advance(&mut dial.stream) {
            DialProgress::Connecting => {}
            DialProgress::Pending => dial.deadline = None,
            DialProgress::Ready => {
                let Extra { peer, stream: Stream { index, .. }, dial } = extra;
                self.ranks.insert(token, peer);
                if let Some(bundle) = self.bundle(peer) {
                    bundle.expect_one_less();
                    bundle.add(index, dial.stream, token);
                }
                return;
            }
            // This rank was too slow in the handshake; handled as for a link's first connection.
            DialProgress::Closed(_) if now >= dial.began + HANDSHAKE_TIMEOUT => {
                return self.open_extra(now, extra.peer, extra.stream);
            }
            DialProgress::Closed(error) => return self.give_up(extra.peer, extra.stream, &error.to_string()),
            DialProgress::Failed(error) => return self.give_up(extra.peer, extra.stream, &error.to_string()),
        }
        self.extras.insert(token, extra);
    }

    fn give_up(&mut self, peer: Rank, stream: Stream, why: &str) {
        let Stream { index, of } = stream;
        if let Some(bundle) = self.bundle(peer) {
            if bundle.is_missing(index) {
                log::info!("the link with rank {peer} goes on without connection {index} of {of}: {why}");
            }
            bundle.expect_one_less();
        }
    }

    pub(super) fn expire_extras(&mut self, now: Duration) {
        let is_late = |extra: &Extra| extra.deadline().is_some_and(|deadline| now >= deadline);
        let late: Vec<Token> =
            self.extras.iter().filter(|(_, extra)| is_late(extra)).map(|(&token, _)| token).collect();
        for token in late {
            // This rank may have been too slow itself, and the connection may be there by now.
            self.advance_extra(now, token);
            if self.extras.get(&token).is_some_and(is_late)
                && let Some(Extra { peer, stream, .. }) = self.extras.remove(&token)
            {
                self.give_up(peer, stream, &format!("no connection within {} s", CONNECT_TIMEOUT.as_secs()));
            }
        }
    }

    /// A peer has opened a further connection of a link, and its handshake is complete.
    pub(super) fn accept_extra(&mut self, accepted: Accepted) {
        let (peer, token) = (accepted.introduction.from, accepted.token);
        let Stream { index, of } = accepted.introduction.stream;
        let has_place = |bundle: &mut Bundle<TcpStream>| bundle.of() == of && bundle.is_missing(index);
        if !self.bundle(peer).is_some_and(has_place) {
            // For example, the link may have closed its further connections.
            log::debug!(
                "rank {peer} opened connection {index} of {of}, which its link does not lack; closed"
            );
            return;
        }
        match self.confirm(accepted) {
            Ok(stream) => {
                self.ranks.insert(token, peer);
                if let Some(bundle) = self.bundle(peer) {
                    bundle.add(index, stream, token);
                }
            }
            Err((what, error)) => log::info!("connection {index} of {of} of rank {peer} {what}: {error}"),
        }
    }

    /// Sends only on the first `used` connections of each link, to measure them.
    pub fn use_streams(&mut self, used: u8) {
        self.used = used.clamp(1, self.streams);
        let used = self.used;
        for link in self.links.values_mut() {
            if let LinkState::Bundled(bundle) = &mut link.state {
                bundle.use_streams(used.into());
                for connection in bundle.connections() {
                    if let Err(error) = self.options.pace(connection, bundle.of().min(used)) {
                        log::debug!("a connection keeps its rate: {error}");
                    }
                }
            }
        }
    }

    /// From now on links use only their first connection. The others are closed when all their data have arrived.
    pub fn use_single_connection(&mut self) {
        self.use_streams(1);
        self.streams = 1;
        for link in self.links.values_mut() {
            if let LinkState::Bundled(bundle) = &mut link.state {
                bundle.use_single_connection();
            }
        }
    }
}
