//! Messages and receives that look for each other.
//!
//! A receive names a source and a tag, or leaves either open, and takes the first message that fits in the order in which
//! it came; a message takes the first receive that fits in the order in which they were begun. Messages of the same source
//! and tag keep their order (MPI-4.1, 3.5).

use std::collections::{BTreeMap, BTreeSet};

use super::OpId;
use super::operation::{OperationInfo, OperationKey};
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
pub(super) struct PostedReceive {
    pub(super) id: OpId,
    pub(super) pattern: Pattern,
    /// The contract's count is the most elements that it takes; its key means nothing.
    pub(super) call: OperationInfo,
}

/// The receives without a message and the messages without a receive.
///
/// Both may be very many, so each has an index by what is looked for. A receive that leaves source or tag open looks through
/// the messages in their order.
#[derive(Default)]
pub(super) struct Matching {
    /// Oldest first.
    posted: BTreeMap<OpId, PostedReceive>,
    posted_by: BTreeSet<(u32, Option<Rank>, Option<u32>, OpId)>,
    /// By the order in which they came.
    arrived: BTreeMap<u64, (OperationKey, Envelope)>,
    arrived_by: BTreeSet<(u32, Rank, u32, u64)>,
    keys: BTreeSet<OperationKey>,
    arrivals: u64,
}

impl Matching {
    /// The first receive that the message fits, taken off the list.
    pub(super) fn take_posted(&mut self, envelope: &Envelope) -> Option<PostedReceive> {
        if self.posted.is_empty() {
            return None;
        }
        let &Envelope { group, source, tag, .. } = envelope;
        let places = [(Some(source), Some(tag)), (Some(source), None), (None, Some(tag)), (None, None)];
        let first = |(source, tag): (Option<Rank>, Option<u32>)| {
            let place = |id| (group, source, tag, id);
            self.posted_by.range(place(OpId(0))..=place(OpId(u64::MAX))).next().map(|found| found.3)
        };
        let id = places.into_iter().filter_map(first).min()?;
        self.withdraw(id)
    }

    /// The first message that fits, taken off the list.
    pub(super) fn take_arrived(&mut self, pattern: &Pattern) -> Option<(OperationKey, Envelope)> {
        let number = self.find_arrived(pattern)?;
        let (key, envelope) = self.arrived.remove(&number)?;
        self.arrived_by.remove(&(envelope.group, envelope.source, envelope.tag, number));
        self.keys.remove(&key);
        Some((key, envelope))
    }

    /// The first message that fits.
    pub(super) fn probe(&self, pattern: &Pattern) -> Option<Envelope> {
        self.find_arrived(pattern).and_then(|number| self.arrived.get(&number)).map(|(_, envelope)| *envelope)
    }

    fn find_arrived(&self, pattern: &Pattern) -> Option<u64> {
        if let (Some(source), Some(tag)) = (pattern.source, pattern.tag) {
            let place = |number| (pattern.group, source, tag, number);
            return self.arrived_by.range(place(0)..=place(u64::MAX)).next().map(|found| found.3);
        }
        let mut arrived = self.arrived.iter();
        arrived.find(|(_, (_, envelope))| pattern.fits(envelope)).map(|(&number, _)| number)
    }

    pub(super) fn post(&mut self, posted: PostedReceive) {
        let Pattern { group, source, tag } = posted.pattern;
        self.posted_by.insert((group, source, tag, posted.id));
        self.posted.insert(posted.id, posted);
    }

    /// Takes a receive off the list, if it is on it.
    pub(super) fn withdraw(&mut self, id: OpId) -> Option<PostedReceive> {
        let posted = self.posted.remove(&id)?;
        let Pattern { group, source, tag } = posted.pattern;
        self.posted_by.remove(&(group, source, tag, id));
        Some(posted)
    }

    pub(super) fn arrive(&mut self, key: OperationKey, envelope: Envelope) {
        self.arrived.insert(self.arrivals, (key, envelope));
        self.arrived_by.insert((envelope.group, envelope.source, envelope.tag, self.arrivals));
        self.keys.insert(key);
        self.arrivals += 1;
    }

    /// Whether this message waits for a receive.
    pub(super) fn has_arrived(&self, key: OperationKey) -> bool {
        self.keys.contains(&key)
    }

    /// How many messages have come without a receive, since the start.
    pub(super) fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// Whether there is a receive without a message.
    pub(super) fn has_posted(&self) -> bool {
        !self.posted.is_empty()
    }

    /// A receive without a message.
    pub(super) fn find_posted(&self, id: OpId) -> Option<&PostedReceive> {
        self.posted.get(&id)
    }

    /// The receives without a message, oldest first.
    pub(super) fn posted(&self) -> impl Iterator<Item = &PostedReceive> {
        self.posted.values()
    }
}
