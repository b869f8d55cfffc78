//! Connections between pairs of ranks, for parameter servers and gossip. A failed connection ends only the operations with one
//! other rank.
//!
//! Parameter servers and gossip send and receive only through this file. So a change of the messages of [`Group`] changes this
//! file, but no strategy.

use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::group::{Cause, Error, Group, Handle, HandoverBuffer, Messenger, Received, wait_any};
use crate::types::Rank;

/// A rank waits at most this long for a request. One year is in effect no limit: the peer may compute for any time between two
/// requests. TCP keepalive detects a peer whose machine does not answer.
const IDLE_TIME_MAX: Duration = Duration::from_hours(24 * 365);

/// A rank waits at least this long for a reply, even if the deadline of an operation is shorter. The time must be longer than
/// 500 ms, because a parameter server may delay a reply by 500 ms.
const REPLY_TIMEOUT_MIN: Duration = Duration::from_secs(2);

/// The purpose of a message. Messages of different channels do not wait for each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MessageChannel {
    /// Requests.
    Request,
    /// Replies for which the requesting rank waits.
    Reply,
    /// Replies for which the requesting rank does not wait.
    LateReply,
}

/// A connection to one other rank, the peer. Several threads may use the connection.
pub(crate) struct PeerLink {
    pub(crate) peer: Rank,
    /// The name and the address of the peer's host.
    pub(crate) host: String,
    /// An isolated group of the two ranks.
    group: Group,
    /// Receives requests in `group`, with the deadline [`IDLE_TIME_MAX`].
    request_receiver: Messenger,
    /// The rank of the peer in `group`.
    peer_in_group: Rank,
    /// The bytes that this rank sent before the first message, for example to measure the link. Their number depends on the time
    /// that they took.
    bytes_of_setup: u64,
    /// Memory that the two ranks use in turns.
    memory: Option<Mutex<HandoverBuffer>>,
    /// Whether the connection has failed. Then it is not known which rank has the memory.
    has_failed: AtomicBool,
}

/// A reply that may not have arrived yet.
pub(crate) struct PendingReply {
    /// The request that this rank sends.
    request: Handle<Vec<u32>>,
    /// The reply that this rank receives.
    reply: Handle<Received<u32>>,
}

/// Connects each pair of ranks. All ranks of `group` must call this function. Returns the connections of this rank, sorted
/// by the rank of the peer. An error names the two ranks that cannot connect.
pub(crate) fn connect_pairs(group: &mut Group) -> Result<Vec<PeerLink>, ConnectError> {
    let mut links = Vec::new();
    for low in group.size().ranks() {
        for high in group.size().ranks().skip(low.index() + 1) {
            links.extend(connect_pair(group, [low, high])?);
        }
    }
    links.sort_by_key(|link| link.peer);
    // From now on, a lost rank does not prevent other ranks from connecting.
    group.barrier().map_err(ConnectError::Group)?;
    Ok(links)
}

/// Connects two ranks. All ranks of `group` must call this function. Returns `None` on the other ranks.
pub(crate) fn connect_pair(group: &mut Group, pair: [Rank; 2]) -> Result<Option<PeerLink>, ConnectError> {
    let own_rank = group.rank();
    let Some(mut subgroup) = group.subgroup(&pair).map_err(ConnectError::Group)? else { return Ok(None) };
    let mut isolated =
        subgroup.isolated().map_err(|error| ConnectError::Pair { pair, problem: error.to_string() })?;
    let timeout = isolated.timeout().max(REPLY_TIMEOUT_MIN);
    isolated.set_timeout(IDLE_TIME_MAX);
    let request_receiver = isolated.messenger();
    isolated.set_timeout(timeout);
    let peer_in_group = if own_rank == pair[0] { Rank::new(1) } else { Rank::ZERO };
    let (peer, host) = (pair[peer_in_group.index()], isolated.host(peer_in_group));
    let bytes_of_setup = isolated.statistics().bytes_sent;
    Ok(Some(PeerLink {
        peer,
        host,
        group: isolated,
        request_receiver,
        peer_in_group,
        bytes_of_setup,
        memory: None,
        has_failed: AtomicBool::new(false),
    }))
}

/// Why a connection failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LinkFailure {
    /// One of the two ranks has ended the connection with this message.
    Aborted(String),
    /// The connection is broken, or the peer does not answer.
    Lost(String),
}

/// Why ranks could not connect.
pub(crate) enum ConnectError {
    /// An operation between all ranks failed.
    Group(Error),
    /// Two ranks cannot connect.
    Pair { pair: [Rank; 2], problem: String },
}

impl PeerLink {
    /// Waits for a request of at most `words_max` words.
    pub(crate) fn receive_request(&self, words_max: usize) -> Result<Vec<u32>, LinkFailure> {
        let received = self.request_receiver.receive_async(
            words_max,
            self.peer_in_group,
            MessageChannel::Request as u32,
        );
        received
            .and_then(Handle::wait)
            .map(|received| received.elements)
            .map_err(|error| self.record_failure(&error))
    }

    /// Creates memory of `count` words that the two ranks use in turns, if they share memory. Both ranks must call this method.
    pub(crate) fn share_memory(&mut self, count: usize) -> Result<(), LinkFailure> {
        let memory = self.group.share_in_turns(count).map_err(|error| self.record_failure(&error))?;
        self.memory = memory.map(Mutex::new);
        self.bytes_of_setup = self.group.statistics().bytes_sent;
        Ok(())
    }

    /// Returns the memory that the two ranks use in turns. Returns `None` if there is no such memory, or if the connection has
    /// failed, because then the peer may still use the memory.
    pub(crate) fn memory(&self) -> Option<MutexGuard<'_, HandoverBuffer>> {
        let memory = self.memory.as_ref().filter(|_| !self.has_failed())?;
        Some(memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on, this rank waits for a message of any channel as long as it waits for a request.
    pub(crate) fn wait_for_requests(&mut self) {
        self.group.set_timeout(IDLE_TIME_MAX);
    }

    /// Waits for a message of at most `buffer.len()` words. Returns the number of words.
    pub(crate) fn receive(&self, buffer: &mut [u32], channel: MessageChannel) -> Result<usize, LinkFailure> {
        let received = self.group.receive(buffer, self.peer_in_group, channel as u32);
        received.map(|status| status.count).map_err(|error| self.record_failure(&error))
    }

    /// Sends a message. `channel` is the channel on which the peer waits for the message.
    pub(crate) fn send(&self, words: &[u32], channel: MessageChannel) -> Result<(), LinkFailure> {
        self.group
            .send(words, self.peer_in_group, channel as u32)
            .map_err(|error| self.record_failure(&error))
    }

    /// Sends a request, and returns before its reply of at most `words_max` words has arrived.
    pub(crate) fn start_request(
        &self,
        words: Vec<u32>,
        channel: MessageChannel,
        words_max: usize,
    ) -> Result<PendingReply, LinkFailure> {
        let start = || {
            let reply = self.group.receive_async(words_max, self.peer_in_group, channel as u32)?;
            let request = self.group.send_async(words, self.peer_in_group, MessageChannel::Request as u32)?;
            Ok(PendingReply { request, reply })
        };
        start().map_err(|error: Error| self.record_failure(&error))
    }

    /// Returns whether an operation of the connection has failed, or this rank has ended the connection.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    fn record_failure(&self, error: &Error) -> LinkFailure {
        self.has_failed.store(true, Ordering::Relaxed);
        LinkFailure::new(error)
    }

    /// Ends the connection. The error on the peer contains `message`.
    pub(crate) fn abort(&self, message: &str) {
        self.has_failed.store(true, Ordering::Relaxed);
        // Ignore the result: a group that has already failed keeps its first error.
        drop(self.group.abort(message));
    }

    /// Makes threads poll longer for messages of this connection while their waits are short.
    pub(crate) fn adapt_polling(&self) {
        self.group.adapt_polling();
    }

    /// Returns a messenger of the connection.
    pub(crate) fn messenger(&self) -> Messenger {
        self.group.messenger()
    }

    /// Returns the number of bytes that this rank has sent to the peer in messages.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.group.statistics().bytes_sent - self.bytes_of_setup
    }
}

impl PendingReply {
    /// Returns whether the reply has arrived, or will never arrive.
    pub(crate) fn is_complete(&self) -> bool {
        self.reply.test()
    }

    /// Waits until the reply has arrived or will never arrive, at most for `timeout`. Returns `false` if `timeout` passes
    /// first.
    pub(crate) fn ends_within(&self, timeout: Duration) -> bool {
        wait_any(slice::from_ref(&self.reply), Some(timeout)).is_some()
    }

    /// Waits for the reply.
    pub(crate) fn wait(self) -> Result<Vec<u32>, LinkFailure> {
        let Self { request, reply } = self;
        let wait = || {
            let received = reply.wait()?;
            request.wait()?;
            Ok(received.elements)
        };
        wait().map_err(|error: Error| LinkFailure::new(&error))
    }
}

impl LinkFailure {
    fn new(error: &Error) -> Self {
        match error.cause() {
            Some(Cause::Aborted { message, .. }) => Self::Aborted(message.clone()),
            _ => Self::Lost(describe_link_failure(error)),
        }
    }

    /// Adds the host of the peer to the description of the failure.
    pub(crate) fn on_host(self, host: &str) -> Self {
        match self {
            Self::Aborted(problem) => Self::Aborted(format!("on {host}: {problem}")),
            Self::Lost(problem) => Self::Lost(format!("on {host}: {problem}")),
        }
    }

    /// Returns the description of the failure.
    pub(crate) fn problem(&self) -> &str {
        let (Self::Aborted(problem) | Self::Lost(problem)) = self;
        problem
    }
}

/// Describes why the link with another rank failed. The text names no rank, because the link's group has its own rank
/// numbers, 0 and 1.
fn describe_link_failure(error: &Error) -> String {
    match error.cause() {
        Some(Cause::PeerLost { detail, .. }) => format!("the connection failed ({detail})"),
        Some(Cause::PeerLeft { .. }) => "it closed the connection".into(),
        Some(Cause::Aborted { message, .. }) => message.clone(),
        Some(Cause::Timeout { .. }) => "it did not answer before the deadline (--timeout)".into(),
        Some(Cause::Mismatch { .. }) => "it sent a message of an unexpected length".into(),
        Some(Cause::Misbehaved { .. }) | None => error.to_string(),
    }
}
