//! What the driver tells the engine, and what the engine tells the driver: operations to begin, frames to send, what to do with
//! each frame that arrives, and the failure of the job.

use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use bytes::Bytes;

use crate::schedule::Action;
use crate::schedule::hierarchy::BLOCKS_MAX;
use crate::types::{Contract, HOSTS_GROUP_BIT, RESULTS_GROUP_BIT, Rank, Site};
use crate::wire::{Cause, FrameHeader};

/// After a failure, a rank sends the cause to its peers and receives their reports for at most this time.
pub const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);
/// A rank that leaves the job waits for at most this time until the peers have closed their links.
pub const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A rank that leaves waits for at most this time until its peers' machines have accepted its last messages.
pub const DELIVERY_TIMEOUT: Duration = Duration::from_mins(1);

/// A time, measured from an epoch that the driver chooses.
pub type Timestamp = Duration;

/// The identifier of an operation of this rank. Operations are numbered in the order in which they begin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpId(pub(super) u64);

#[derive(Clone, Default, Debug)]
pub struct Settings {
    pub rank: Rank,
    /// The number of bytes of a full segment. All ranks have the same value.
    pub segment_bytes: usize,
    /// Whether payloads on the link to each rank carry a CRC32C, in rank order. Both ends of a link have the same setting.
    pub checked_links: Vec<bool>,
    /// The name of each rank's host for error messages, in rank order.
    pub host_names: Vec<String>,
}

impl Settings {
    pub(super) fn is_checked(&self, peer: Rank) -> bool {
        self.checked_links.get(peer.index()).is_some_and(|&is_checked| is_checked)
    }
}

/// The event that completes the send of a message.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SendMode {
    /// The send is complete when the bytes have left this rank. The receiver may not have posted a receive yet.
    #[default]
    Standard,
    /// The send is complete when a receive has matched the message and the bytes have left this rank.
    Synchronous,
}

#[derive(Clone, Copy, Debug)]
pub struct OperationRequest {
    pub group: u32,
    /// The arguments of the call that must be the same on all ranks.
    pub contract: Contract,
    /// If the operation takes longer than this time, the job fails.
    pub timeout: Duration,
    /// When the operation began, or the longer operation of which it is a part; `None` if it begins now.
    pub began: Option<Timestamp>,
    pub site: Site,
    /// The event that completes the send of a message. Operations that send no message ignore this field.
    pub mode: SendMode,
}

impl OperationRequest {
    /// Returns the request of an operation that is not a part of another operation and not a synchronous send.
    pub fn new(group: u32, contract: Contract, timeout: Duration, site: Site) -> Self {
        Self { group, contract, timeout, began: None, site, mode: SendMode::Standard }
    }

    /// Returns the request of an operation that begins `now`, unless it has begun before.
    pub fn begun(self, now: Timestamp) -> Self {
        Self { began: self.began.or(Some(now)), ..self }
    }

    pub(super) fn deadline(&self) -> Timestamp {
        self.began.unwrap_or_default().saturating_add(self.timeout)
    }
}

/// The identifier of an operation in the headers of its frames.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum OperationKey {
    /// A collective, or a block of a collective of several stages.
    Collective {
        /// The group. For a block, with [`HOSTS_GROUP_BIT`].
        group: u32,
        /// The number of the collective in the group, or the [number of the block](OperationKey::block_number).
        sequence: u64,
    },
    /// A point-to-point message, identified by its number among the messages from one rank to another.
    Message { from: Rank, to: Rank, sequence: u64 },
}

impl OperationKey {
    /// Returns the operation's number in its group, or the message's number on its link.
    pub(super) fn sequence(self) -> u64 {
        match self {
            Self::Collective { sequence, .. } | Self::Message { sequence, .. } => sequence,
        }
    }

    /// Returns the number of a block. Blocks of two ranks have the same number only if the ranks have made as many calls.
    pub fn block_number(call: u64, block: usize) -> u64 {
        call * BLOCKS_MAX as u64 + block as u64
    }

    /// Returns the group and the number of the call to which a collective or a block belongs.
    pub(super) fn call_of(group: u32, sequence: u64) -> (u32, u64) {
        if group & HOSTS_GROUP_BIT == 0 {
            (group, sequence)
        } else {
            (group & !(HOSTS_GROUP_BIT | RESULTS_GROUP_BIT), sequence / BLOCKS_MAX as u64)
        }
    }

    /// Returns the keys in the frames of a rank whose call with this number is of the other kind than this rank's call, which has
    /// this contract: with blocks if this rank's call has none, and without if it has.
    pub fn of_other_kind(group: u32, call: u64, contract: &Contract) -> RangeInclusive<Self> {
        if contract.has_blocks() {
            let key = Self::Collective { group, sequence: call };
            return key..=key;
        }
        let block = |index| {
            let sequence = Self::block_number(call, index);
            Self::Collective { group: group | HOSTS_GROUP_BIT, sequence }
        };
        block(0)..=block(BLOCKS_MAX - 1)
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Transmit {
    /// The header, then the elements `range` of the operation's buffer. The driver fills in the checksum, if there is one.
    Segment { operation: OpId, header: FrameHeader, range: Range<usize> },
    /// A control frame: the header, then the payload.
    Control { header: FrameHeader, payload: Bytes },
}

/// What the driver has to do with a frame whose header has arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrameVerdict {
    /// Receive the payload, apply it to the elements `range` of the operation's buffer, and then call
    /// [`Engine::handle_applied_segment`](super::Engine::handle_applied_segment).
    Apply { operation: OpId, range: Range<usize>, action: Action },
    /// Receive the payload and store it under this key until
    /// [`Engine::check_stored_frame`](super::Engine::check_stored_frame) returns [`FrameVerdict::Apply`].
    Store(OperationKey),
    /// Receive the payload and pass it to [`Engine::handle_control_frame`](super::Engine::handle_control_frame).
    Control,
    /// Receive the payload, if there is one, and throw it away: the engine has handled the frame, or the job has failed.
    Discard,
    /// Read no more from this link, because the peer broke the protocol.
    Refuse,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    pub cause: Cause,
    /// The rank that reported the cause to this rank; `None` if this rank detected the failure itself.
    pub reported_by: Option<Rank>,
}
