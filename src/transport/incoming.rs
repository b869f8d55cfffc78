//! The connections that other processes open to this rank, until their handshakes are complete.
//!
//! If a [handshake](crate::wire::handshake) fails, [`IncomingConnections`] logs the failure and closes the connection, and the
//! job continues. The owner takes a connection with [`IncomingConnections::take`]. It then accepts the connection with
//! [`AcceptedConnection::confirm`], or closes it because it prefers another connection to the same peer.
//!
//! This module opens no sockets and reads no clock, so the simulation runs it with simulated connections.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mio::Token;
use mio::net::TcpStream;

use super::handshake::{DialError, Identity, advance_handshake};
use super::refusal_log::RefusalLog;
use crate::types::Rank;
use crate::wire::handshake::{
    Acceptor, ConnectionPurpose, Handshake as _, HandshakeError, Introduction, NONCE_BYTES, Refusal,
    StreamId, encode_verdict,
};

/// The time-out of a handshake, in which only the time counts that [`EXPIRE_INTERVAL_MAX`] allows.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of handshakes in progress. A further connection closes one that probably belongs to no rank.
pub const PENDING_HANDSHAKES_MAX: usize = 256;
/// While handshakes are in progress, a rank that is not busy calls [`IncomingConnections::expire`] again after at most
/// this time. If the rank calls later, for example after 60 s, only 1 s counts toward the time-out of the handshakes.
const EXPIRE_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// The maximum number of refused processes that the error message about missing ranks lists.
const REFUSED_RANKS_MAX: usize = 8;
/// The maximum number of connections that stay open after the reply to a late rank.
const LATE_REPLY_CONNECTIONS_MAX: usize = 64;

/// A connection whose other end has proved that it belongs to the job.
pub struct AcceptedConnection<S = TcpStream> {
    /// The connection, which is registered under `token`.
    pub stream: S,
    pub token: Token,
    pub introduction: Introduction,
    /// The last message of the handshake, for which the dialer waits; empty if it has been sent.
    verdict: Vec<u8>,
}

impl<S: Write> AcceptedConnection<S> {
    /// Sends the verdict, which accepts the connection for the link. Returns an error if the connection is lost.
    pub fn confirm(mut self) -> io::Result<S> {
        // The verdict fits into the send buffer, because the connection has carried only the handshake.
        self.stream.write_all(&self.verdict)?;
        Ok(self.stream)
    }
}

struct IncomingHandshake<S> {
    stream: S,
    address: SocketAddr,
    handshake: Acceptor,
    /// The time that counts toward the time-out.
    elapsed: Duration,
}

/// A connection of an isolated group: the number of the group, the dialing rank, and the number within the link.
type ExpectedConnection = (u64, Rank, u8);

/// Creates the reply to a rank that connects after the job has started, or after the start of the job has failed.
type LateReplyFunction = Box<dyn Fn(Rank) -> Vec<u8> + Send>;

/// The connections whose handshake is in progress, and the accepted connections that the owner has not taken yet.
pub struct IncomingConnections<S> {
    pub identity: Identity,
    pending: BTreeMap<Token, IncomingHandshake<S>>,
    accepted: VecDeque<AcceptedConnection<S>>,
    /// The connections of isolated groups that other ranks may open, each once.
    expected: BTreeSet<ExpectedConnection>,
    expired_at: Duration,
    pub(super) log: RefusalLog,
    /// Descriptions of the first refused processes that claim to belong to a job, at most [`REFUSED_RANKS_MAX`].
    pub refused: Vec<String>,
    late_reply: Option<LateReplyFunction>,
    replied: VecDeque<S>,
}

impl<S: Read + Write> IncomingConnections<S> {
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            pending: BTreeMap::new(),
            accepted: VecDeque::new(),
            expected: BTreeSet::new(),
            expired_at: Duration::ZERO,
            log: RefusalLog::default(),
            refused: Vec::new(),
            late_reply: None,
            replied: VecDeque::new(),
        }
    }

    /// Adds a connection, and begins its handshake. A later connection has a higher token. `nonce` must be random.
    pub fn add(
        &mut self,
        now: Duration,
        token: Token,
        stream: S,
        address: SocketAddr,
        nonce: [u8; NONCE_BYTES],
    ) {
        if self.pending.len() >= PENDING_HANDSHAKES_MAX {
            self.evict_connection(now);
        }
        let Identity { secret, job, rank } = self.identity.clone();
        let handshake = Acceptor::new(secret, job, rank, nonce);
        self.pending.insert(token, IncomingHandshake { stream, address, handshake, elapsed: Duration::ZERO });
        self.continue_handshake(now, token);
    }

    pub fn is_pending(&self, token: Token) -> bool {
        self.pending.contains_key(&token)
    }

    /// Removes and returns a connection for `purpose` whose dialer has proved that it belongs to the job.
    pub fn take(&mut self, purpose: ConnectionPurpose) -> Option<AcceptedConnection<S>> {
        let index = self.accepted.iter().position(|accepted| accepted.introduction.purpose == purpose)?;
        self.accepted.remove(index)
    }

    /// From now on, each of the ranks `from` may open a link of `streams` connections for this isolated group.
    pub fn expect_isolated_links(&mut self, group: u64, from: impl IntoIterator<Item = Rank>, streams: u8) {
        let connections =
            from.into_iter().flat_map(|rank| (0..streams).map(move |index| (group, rank, index)));
        self.expected.extend(connections);
    }

    /// From now on, refuses connections of this isolated group. Removes and returns those that have been accepted, in order.
    pub fn take_isolated_links(&mut self, group: u64) -> Vec<AcceptedConnection<S>> {
        self.expected.retain(|&(expected, ..)| expected != group);
        std::iter::from_fn(|| self.take(ConnectionPurpose::IsolatedLink(group))).collect()
    }

    /// From now on, sends the bytes that `reply(rank)` returns to each rank that connects to the rendezvous, and to those ranks
    /// whose connections the owner has not taken. Call this method when the job has started, or when its start has failed.
    pub fn reply_to_late_ranks(&mut self, now: Duration, reply: impl Fn(Rank) -> Vec<u8> + Send + 'static) {
        self.late_reply = Some(Box::new(reply));
        self.send_late_replies(now);
    }

    fn send_late_replies(&mut self, now: Duration) {
        let Some(reply) = self.late_reply.take() else { return };
        while let Some(accepted) = self.take(ConnectionPurpose::Rendezvous) {
            let AcceptedConnection { mut stream, introduction: Introduction { from, .. }, .. } = accepted;
            if let Err(error) = stream.write_all(&reply(from)) {
                self.log.log_or_count(now, format_args!("could not answer rank {from}: {error}"));
                continue;
            }
            let why = "the job already runs, or its start has failed";
            self.log.log_or_count(now, format_args!("refused rank {from}: {why}"));
            self.keep_open(stream);
        }
        self.late_reply = Some(reply);
    }

    /// Keeps a connection open on which the last reply has been sent. If the connection were closed while bytes of the
    /// other end arrive, the kernel would reset it, and the other end could lose the reply.
    pub fn keep_open(&mut self, stream: S) {
        self.replied.truncate(LATE_REPLY_CONNECTIONS_MAX - 1);
        self.replied.push_front(stream);
    }

    pub fn streams(&self) -> impl Iterator<Item = &S> {
        let pending = self.pending.values().map(|pending| &pending.stream);
        pending.chain(self.accepted.iter().map(|accepted| &accepted.stream)).chain(&self.replied)
    }

    /// Returns the time at which [`IncomingConnections::expire`] must be called again, even if there is no event.
    pub fn next_deadline(&self) -> Option<Duration> {
        let longest = self.pending.values().map(|pending| pending.elapsed).max();
        let handshakes = longest.map(|longest| {
            self.expired_at + HANDSHAKE_TIMEOUT.saturating_sub(longest).min(EXPIRE_INTERVAL_MAX)
        });
        handshakes.into_iter().chain(self.log.deadline()).min()
    }

    pub fn continue_handshake(&mut self, now: Duration, token: Token) {
        let Some(pending) = self.pending.get_mut(&token) else { return };
        let address = pending.address;
        let progress = advance_handshake(&mut pending.stream, &mut pending.handshake);
        if let Ok(false) = progress {
            return;
        }
        let Some(mut pending) = self.pending.remove(&token) else { return };
        match progress.and_then(|_| self.refuse_unexpected(&mut pending).map_err(DialError::from)) {
            Ok(()) => self.finish_handshake(now, pending, token),
            // This is usually no error: the dialer has chosen another connection to this rank.
            Err(DialError::Io(error)) if pending.handshake.requests_link() => {
                log::debug!("{address} closed its connection: {error}");
            }
            Err(error) => {
                self.log.log_or_count(now, format_args!("refused the connection from {address}: {error}"));
                if let DialError::Handshake(error) = error {
                    self.remember_refused(pending.handshake.claimed_rank(), address.ip(), &error);
                }
            }
        }
    }

    /// Updates the elapsed time of all handshakes, and closes the connections that exceed [`HANDSHAKE_TIMEOUT`].
    pub fn expire(&mut self, now: Duration) {
        self.log.end_interval_if_over(now);
        let elapsed = now.saturating_sub(self.expired_at).min(EXPIRE_INTERVAL_MAX);
        self.expired_at = now;
        let Self { pending, log, .. } = self;
        pending.retain(|_, pending| {
            pending.elapsed += elapsed;
            let is_in_time = pending.elapsed < HANDSHAKE_TIMEOUT;
            if !is_in_time {
                let (address, seconds) = (pending.address, HANDSHAKE_TIMEOUT.as_secs());
                log.log_or_count(
                    now,
                    format_args!("closed the connection from {address}: no handshake within {seconds} s"),
                );
            }
            is_in_time
        });
    }

    /// Closes the pending connection that is least likely to belong to a rank.
    fn evict_connection(&mut self, now: Duration) {
        let pending = self.pending.iter();
        let connections = pending
            .map(|(&token, pending)| (token, pending.address.ip(), pending.handshake.has_received_nothing()));
        let Some(token) = choose_for_eviction(connections) else { return };
        let Some(IncomingHandshake { address, .. }) = self.pending.remove(&token) else { return };
        self.log.log_or_count(
            now,
            format_args!("closed the connection from {address}: too many connections are in their handshake"),
        );
    }

    fn remember_refused(&mut self, claimed: Option<Rank>, host: IpAddr, error: &HandshakeError) {
        let reason = match error {
            HandshakeError::Secret => "its secret differs".to_owned(),
            HandshakeError::RefusedPeer(refusal) => refusal.to_string(),
            HandshakeError::Version { theirs } => format!("it speaks protocol version {theirs}"),
            // The process is another program, for example a port scanner.
            _ => return,
        };
        let claim = claimed.map(|rank| format!(" that says it is rank {rank}")).unwrap_or_default();
        let refused = format!("a process at {host}{claim} was refused: {reason}");
        if self.refused.len() < REFUSED_RANKS_MAX && !self.refused.contains(&refused) {
            self.refused.push(refused);
        }
    }

    /// Refuses a connection of an isolated group that the owner does not expect. Returns the reason.
    fn refuse_unexpected(&self, pending: &mut IncomingHandshake<S>) -> Result<(), HandshakeError> {
        let Some(introduction) = pending.handshake.introduction() else { return Ok(()) };
        if expectation(introduction).is_none_or(|expected| self.expected.contains(&expected)) {
            return Ok(());
        }
        // Tell the peer the reason. If this fails, the peer only learns that the connection was closed.
        let _ = pending.stream.write_all(&encode_verdict(Some(Refusal::Group)));
        Err(HandshakeError::RefusedPeer(Refusal::Group))
    }

    fn finish_handshake(&mut self, now: Duration, pending: IncomingHandshake<S>, token: Token) {
        let IncomingHandshake { mut stream, address, mut handshake, .. } = pending;
        let Some(introduction) = handshake.introduction() else { return };
        let mut verdict = handshake.take_output();
        // The owner of a link sends the verdict itself, because it may prefer another connection.
        if introduction.purpose != ConnectionPurpose::Link
            && let Err(error) = stream.write_all(&std::mem::take(&mut verdict))
        {
            self.log.log_or_count(now, format_args!("refused the connection from {address}: {error}"));
            return;
        }
        if let Some(expected) = expectation(introduction) {
            self.expected.remove(&expected);
        }
        self.accepted.push_back(AcceptedConnection { stream, token, introduction, verdict });
        self.send_late_replies(now);
    }
}

/// Returns the entry of a connection of an isolated group in the list of expected connections; `None` for other connections.
fn expectation(introduction: Introduction) -> Option<ExpectedConnection> {
    let Introduction { purpose, from, stream: StreamId { index, .. }, .. } = introduction;
    match purpose {
        ConnectionPurpose::IsolatedLink(group) => Some((group, from, index)),
        ConnectionPurpose::Link | ConnectionPurpose::Rendezvous => None,
    }
}

/// Returns which of the pending connections to close first: the oldest one of the address with the most connections. A later
/// connection has a higher token. If some connections are silent, only these count: a rank sends its hello at once.
fn choose_for_eviction(connections: impl Iterator<Item = (Token, IpAddr, bool)> + Clone) -> Option<Token> {
    let has_silent = connections.clone().any(|(.., is_silent)| is_silent);
    let mut by_address: BTreeMap<IpAddr, (usize, Reverse<Token>)> = BTreeMap::new();
    for (token, address, _) in connections.filter(|(.., is_silent)| *is_silent == has_silent) {
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
        let connection =
            |(token, last)| (Token(token), IpAddr::from([10, 0, 0, last]), ![3, 6].contains(&token));
        let mut connections = [(2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)].map(connection).to_vec();
        let mut closed = Vec::new();
        while let Some(chosen) = choose_for_eviction(connections.iter().copied()) {
            connections.retain(|(token, ..)| *token != chosen);
            closed.push(chosen.0);
        }
        // Address 2 has two silent connections, 4 and 5, so connection 4 is closed first. Then each address has one silent
        // connection, and the oldest of the three is closed: connection 2.
        assert_eq!(closed, [4, 2, 5, 7, 3, 6]);
    }
}
