//! What a caller asks of the engine, and what the engine knows of each operation.

use std::time::Duration;

use crate::types::{Contract, Rank, Site};

/// A time, measured from an epoch that the driver chooses.
pub type Timestamp = Duration;

/// The identifier of an operation of this rank. Operations are numbered in the order in which they begin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpId(pub(super) u64);

/// The settings of an engine, which never change.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The rank of this process.
    pub rank: Rank,
    /// The number of bytes of a full segment. All ranks have the same value.
    pub segment_bytes: usize,
    /// Whether payloads on the link to each rank carry a CRC32C, in rank order. Both ends of a link have the same setting.
    pub checked_links: Vec<bool>,
    /// The name of each rank's host for error messages, in rank order.
    pub host_names: Vec<String>,
}

impl Settings {
    /// Whether payloads on the link to `peer` carry a CRC32C.
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

/// The arguments that all kinds of operations need to begin.
#[derive(Clone, Copy, Debug)]
pub struct OperationRequest {
    /// The group.
    pub group: u32,
    /// The arguments of the call that must be the same on all ranks.
    pub contract: Contract,
    /// If the operation takes longer than this time, the job fails.
    pub timeout: Duration,
    /// The part of `timeout` that has already passed, if the operation is a part of a longer operation.
    pub spent: Duration,
    /// The line of the caller's program that called the operation.
    pub site: Site,
    /// The event that completes the send of a message. Operations that send no message ignore this field.
    pub mode: SendMode,
}

/// The identifier of an operation in the headers of its frames.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum OperationKey {
    /// A collective, identified by its number in its group.
    Collective {
        /// The group.
        group: u32,
        /// The number of the collective in the group.
        sequence: u64,
    },
    /// A point-to-point message, identified by its number among the messages from one rank to another.
    Message {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The number of the message.
        sequence: u64,
    },
}

/// The identity, the contract and the deadline of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperationInfo {
    pub(super) key: OperationKey,
    /// The group of the collective or of the message.
    pub(super) group: u32,
    pub(super) contract: Contract,
    pub(super) site: Site,
    pub(super) deadline: Timestamp,
    pub(super) timeout: Duration,
    pub(super) mode: SendMode,
}

impl OperationInfo {
    /// Returns the operation's number in its group, or the message's number on its link.
    pub(super) fn sequence(&self) -> u64 {
        match self.key {
            OperationKey::Collective { sequence, .. } | OperationKey::Message { sequence, .. } => sequence,
        }
    }
}

/// The part of an external operation that the engine knows.
pub(super) struct ExternalOperation {
    pub(super) info: OperationInfo,
    /// The ranks for which the operation waits.
    pub(super) awaited: Vec<Rank>,
}
