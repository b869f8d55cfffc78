//! Messages and receives that look for each other.
//!
//! A receive names a source and a tag, or leaves either open, and takes the first message that fits in the order in which
//! it came; a message takes the first receive that fits in the order in which they were begun. Messages of the same source
//! and tag keep their order (MPI-4.1, 3.5).

use std::collections::{BTreeSet, VecDeque};

use super::OpId;
use super::operation::{Call, Key};
use crate::types::{Contract, Rank};

/// What a receive asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pattern {
    /// The group.
    pub group: u32,
    /// The sender; `None` for any.
    pub source: Option<Rank>,
    /// The tag; `None` for any.
    pub tag: Option<u32>,
}

/// A message as its first frame describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// The group.
    pub group: u32,
    /// The sender.
    pub source: Rank,
    /// The tag.
    pub tag: u32,
    /// What the sender asked for: the element type and how many.
    pub contract: Contract,
}

impl Pattern {
    fn fits(&self, envelope: &Envelope) -> bool {
        self.group == envelope.group
            && self.source.is_none_or(|source| source == envelope.source)
            && self.tag.is_none_or(|tag| tag == envelope.tag)
    }
}

/// A receive without a message.
pub(super) struct Posted {
    pub(super) id: OpId,
    pub(super) pattern: Pattern,
    /// The contract's count is the most elements that it takes; its key means nothing.
    pub(super) call: Call,
}

/// The receives without a message and the messages without a receive.
#[derive(Default)]
pub(super) struct Matching {
    posted: VecDeque<Posted>,
    arrived: VecDeque<(Key, Envelope)>,
    /// The keys of those that have arrived: there may be very many.
    keys: BTreeSet<Key>,
    arrivals: u64,
}

impl Matching {
    /// The first receive that the message fits, taken off the list.
    pub(super) fn take_posted(&mut self, envelope: &Envelope) -> Option<Posted> {
        let index = self.posted.iter().position(|posted| posted.pattern.fits(envelope))?;
        self.posted.remove(index)
    }

    /// The first message that fits, taken off the list.
    pub(super) fn take_arrived(&mut self, pattern: &Pattern) -> Option<(Key, Envelope)> {
        let index = self.arrived.iter().position(|(_, envelope)| pattern.fits(envelope))?;
        let (key, envelope) = self.arrived.remove(index)?;
        self.keys.remove(&key);
        Some((key, envelope))
    }

    /// The first message that fits.
    pub(super) fn probe(&self, pattern: &Pattern) -> Option<Envelope> {
        self.arrived.iter().find(|(_, envelope)| pattern.fits(envelope)).map(|(_, envelope)| *envelope)
    }

    pub(super) fn post(&mut self, posted: Posted) {
        self.posted.push_back(posted);
    }

    pub(super) fn arrive(&mut self, key: Key, envelope: Envelope) {
        self.arrived.push_back((key, envelope));
        self.keys.insert(key);
        self.arrivals += 1;
    }

    /// Whether this message waits for a receive.
    pub(super) fn has_arrived(&self, key: Key) -> bool {
        self.keys.contains(&key)
    }

    /// How many messages have come without a receive, since the start.
    pub(super) fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// The receives without a message, oldest first.
    pub(super) fn posted(&self) -> impl Iterator<Item = &Posted> {
        self.posted.iter()
    }
}
