//! What an engine knows of one peer beside the operations: what it may be sent, what it has been told, what is stored for it.

use std::collections::{BTreeMap, VecDeque};

use super::Timestamp;
use super::operation::{OperationKey, charge};
use super::send_queue::SendQueue;
use crate::types::{Contract, Site};
use crate::wire::{Cause, FrameHeader};

/// What a rank may send to another before that one is ready for it, over all operations. The receiver has to store it.
pub const CREDIT_BYTES: u64 = 1 << 20;
/// Announced operations that have not begun at their receiver. Who has announced so many waits with further ones.
pub(super) const ANNOUNCED_MAX: usize = 1 << 20;
/// How many of the last messages to a peer are remembered, to say where they were sent if it cannot take one.
const SITES_MAX: usize = 1024;

const _: () = assert!(charge(super::operation::EAGER_BYTES) as u64 <= CREDIT_BYTES / 2);

/// One peer.
#[derive(Default)]
pub(super) struct Link {
    /// It said goodbye.
    pub(super) left: bool,
    /// The connection is gone.
    pub(super) lost: bool,
    /// When its last frame arrived.
    pub(super) last_frame: Timestamp,
    /// We said goodbye.
    pub(super) said_goodbye: bool,
    /// The root cause as we told it last.
    pub(super) told: Option<Cause>,
    /// The root cause as the peer told it last.
    pub(super) heard: Option<Cause>,
    /// The operations that send to it.
    pub(super) send_queue: SendQueue,
    /// Headers that wait to be sent before any segment.
    pub(super) control: VecDeque<FrameHeader>,
    /// What it has announced and we have not begun, and what it asks for.
    pub(super) announced: BTreeMap<OperationKey, Contract>,
    /// For how many messages of operations that we have not begun it is ready.
    pub(super) cleared: BTreeMap<OperationKey, u64>,
    /// Messages sent to it, and messages that came from it.
    messages_sent: u64,
    pub(super) messages_seen: u64,
    /// Where in the caller's program the last messages to it were sent, the last one last.
    sites: VecDeque<Site>,
    /// What we have sent it on credit since the start, and how much of it has been made use of.
    charged: u64,
    returned: u64,
    /// The same the other way, and what we last told of it.
    used: u64,
    used_told: u64,
    stored: u64,
    /// How many of its segments are stored, by operation.
    segments: BTreeMap<OperationKey, usize>,
}

impl Link {
    /// Bytes that may be sent on credit now.
    pub(super) fn credit(&self) -> usize {
        (CREDIT_BYTES - (self.charged - self.returned).min(CREDIT_BYTES)) as usize
    }

    /// A segment of `bytes` is sent on credit.
    pub(super) fn spend(&mut self, bytes: usize) {
        self.charged += charge(bytes) as u64;
    }

    /// The number of the next message to it, which is sent at `site`.
    pub(super) fn number_message(&mut self, site: Site) -> u64 {
        if self.sites.len() == SITES_MAX {
            self.sites.pop_front();
        }
        self.sites.push_back(site);
        self.messages_sent += 1;
        self.messages_sent - 1
    }

    /// Where message `sequence` was sent, if that is remembered.
    pub(super) fn site_of(&self, sequence: u64) -> Option<Site> {
        let age = usize::try_from(self.messages_sent.checked_sub(sequence)?).ok()?;
        self.sites.get(self.sites.len().checked_sub(age)?).copied()
    }

    /// Takes the peer's word for how much it has made use of; whether that is possible.
    pub(super) fn receive_credit(&mut self, used: u64) -> bool {
        let is_possible = used <= self.charged && used >= self.returned;
        if is_possible {
            self.returned = used;
            let credit = self.credit();
            self.send_queue.feed(credit);
        }
        is_possible
    }

    /// Notes that a segment of `bytes` has to be stored; whether the peer had the credit.
    pub(super) fn store(&mut self, key: OperationKey, bytes: usize) -> bool {
        self.stored += charge(bytes) as u64;
        *self.segments.entry(key).or_default() += 1;
        self.stored <= CREDIT_BYTES
    }

    /// Notes that a segment is stored for which the peer needs no credit: it knows that its operation has begun.
    pub(super) fn keep(&mut self, key: OperationKey) {
        *self.segments.entry(key).or_default() += 1;
    }

    /// Notes that a stored segment of `bytes` is none any more, which came on credit or not.
    pub(super) fn unstore(&mut self, key: OperationKey, bytes: usize, was_eager: bool) {
        if was_eager {
            self.stored -= (charge(bytes) as u64).min(self.stored);
        }
        if let Some(segments) = self.segments.get_mut(&key) {
            *segments -= 1;
            if *segments == 0 {
                self.segments.remove(&key);
            }
        }
    }

    /// How many segments of an operation are stored.
    pub(super) fn stored_segments(&self, key: OperationKey) -> usize {
        self.segments.get(&key).copied().unwrap_or_default()
    }

    /// A segment of `bytes` that came on credit has been applied. Returns the total, if the peer is to be told.
    pub(super) fn make_use(&mut self, bytes: usize) -> Option<u64> {
        self.used += charge(bytes) as u64;
        if self.used - self.used_told < CREDIT_BYTES / 2 {
            return None;
        }
        self.used_told = self.used;
        Some(self.used)
    }
}
