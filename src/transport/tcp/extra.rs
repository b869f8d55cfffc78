//! The connections of a link beyond the first. Whoever has dialled the link opens them once it is settled on, each with a
//! handshake of its own. What becomes of one before both ends have it is no matter of life and death: the link works with
//! those that it has.

use std::time::Duration;

use mio::Token;
use mio::net::TcpStream;

use super::bundle::Bundle;
use super::{CONNECT_TIMEOUT, Dial, Link, State, TcpTransport};
use crate::transport::lobby::{Admitted, Dialled, HANDSHAKE_TIMEOUT};
use crate::types::Rank;
use crate::wire::handshake::Stream;

/// A connection that is being opened.
pub(super) struct Extra {
    peer: Rank,
    stream: Stream,
    dial: Dial,
}

impl Extra {
    /// When the peer's machine must have taken it.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.dial.deadline
    }
}

impl TcpTransport {
    fn bundle(&mut self, peer: Rank) -> Option<&mut Bundle<TcpStream>> {
        match self.links.get_mut(&peer) {
            Some(Link { state: State::Bundled(bundle), .. }) => Some(bundle),
            _ => None,
        }
    }

    /// Begins to open the other connections of a link that this rank has dialled.
    pub(super) fn open_extras(&mut self, now: Duration, peer: Rank) {
        let Some(bundle) = self.bundle(peer) else { return };
        let of = bundle.of();
        bundle.await_others(usize::from(of) - 1);
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

    /// Lets a connection that is being opened go as far as it can.
    pub(super) fn pursue_extra(&mut self, now: Duration, token: Token) {
        let Some(mut extra) = self.extras.remove(&token) else { return };
        let dial = &mut extra.dial;
        match dial.handshake.pursue(&mut dial.stream) {
            Dialled::Connecting => {}
            Dialled::Pending => dial.deadline = None,
            Dialled::Ready => {
                let Extra { peer, stream: Stream { index, .. }, dial } = extra;
                self.ranks.insert(token, peer);
                if let Some(bundle) = self.bundle(peer) {
                    bundle.despair();
                    bundle.add(index, dial.stream, token);
                }
                return;
            }
            // We were away in the middle of the handshake, as with a link's first connection.
            Dialled::Closed(_) if now >= dial.began + HANDSHAKE_TIMEOUT => {
                return self.open_extra(now, extra.peer, extra.stream);
            }
            Dialled::Closed(error) => return self.give_up(extra.peer, extra.stream, &error.to_string()),
            Dialled::Failed(error) => return self.give_up(extra.peer, extra.stream, &error.to_string()),
        }
        self.extras.insert(token, extra);
    }

    fn give_up(&mut self, peer: Rank, stream: Stream, why: &str) {
        let Stream { index, of } = stream;
        if let Some(bundle) = self.bundle(peer) {
            if bundle.lacks(index) {
                log::info!("the link with rank {peer} goes on without connection {index} of {of}: {why}");
            }
            bundle.despair();
        }
    }

    pub(super) fn expire_extras(&mut self, now: Duration) {
        let is_late = |extra: &Extra| extra.deadline().is_some_and(|deadline| now >= deadline);
        let late: Vec<Token> =
            self.extras.iter().filter(|(_, extra)| is_late(extra)).map(|(&token, _)| token).collect();
        for token in late {
            // Perhaps it is we who were away, and there is a connection by now.
            self.pursue_extra(now, token);
            if self.extras.get(&token).is_some_and(is_late)
                && let Some(Extra { peer, stream, .. }) = self.extras.remove(&token)
            {
                self.give_up(peer, stream, &format!("no connection within {} s", CONNECT_TIMEOUT.as_secs()));
            }
        }
    }

    /// A peer has opened a further connection of a link and proved itself.
    pub(super) fn meet_extra(&mut self, admitted: Admitted) {
        let (peer, token) = (admitted.introduction.from, admitted.token);
        let Stream { index, of } = admitted.introduction.stream;
        let has_place = |bundle: &mut Bundle<TcpStream>| bundle.of() == of && bundle.lacks(index);
        if !self.bundle(peer).is_some_and(has_place) {
            // A link that has closed its others is one reason.
            log::debug!(
                "rank {peer} opened connection {index} of {of}, which its link does not lack; closed"
            );
            return;
        }
        match self.take_in(admitted) {
            Ok(stream) => {
                self.ranks.insert(token, peer);
                if let Some(bundle) = self.bundle(peer) {
                    bundle.add(index, stream, token);
                }
            }
            Err((what, error)) => log::info!("connection {index} of {of} of rank {peer} {what}: {error}"),
        }
    }

    /// Sends on the first `used` connections of each link alone, as a trial.
    pub fn use_streams(&mut self, used: u8) {
        self.used = used.clamp(1, self.streams);
        let used = self.used;
        for link in self.links.values_mut() {
            if let State::Bundled(bundle) = &mut link.state {
                bundle.use_streams(used.into());
                for pipe in bundle.pipes() {
                    if let Err(error) = self.options.pace(pipe, bundle.of().min(used)) {
                        log::debug!("a connection keeps its rate: {error}");
                    }
                }
            }
        }
    }

    /// From now on links have one connection alone. What the others still carry arrives, and then they are closed.
    pub fn become_one(&mut self) {
        self.use_streams(1);
        self.streams = 1;
        for link in self.links.values_mut() {
            if let State::Bundled(bundle) = &mut link.state {
                bundle.become_one();
            }
        }
    }
}
