//! Matching of messages with receives.
//!
//! A new receive takes the message that arrived first among the messages that fit. A message that arrives takes the receive that
//! was posted first among the receives that fit. Messages with the same source and tag keep their order (MPI-4.1, section 3.5).

use super::interface::{OpId, OperationKey, OperationRequest};
use crate::types::{Contract, Rank, SortedMap, SortedSet};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pattern {
    pub group: u32,
    /// The sender; `None` accepts any sender.
    pub source: Option<Rank>,
    /// The tag; `None` accepts any tag.
    pub tag: Option<u32>,
}

/// The description of a message in its first frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    pub group: u32,
    pub source: Rank,
    pub tag: u32,
    /// The sender's contract, with the element type and the number of elements.
    pub contract: Contract,
}

impl Pattern {
    fn accepts(&self, envelope: &Envelope) -> bool {
        self.group == envelope.group
            && self.source.is_none_or(|source| source == envelope.source)
            && self.tag.is_none_or(|tag| tag == envelope.tag)
    }
}

pub(super) struct PostedReceive {
    pub(super) id: OpId,
    pub(super) pattern: Pattern,
    /// Its `contract.count` is the most elements that the receive accepts.
    pub(super) info: OperationRequest,
}

/// The receives that have not matched a message, and the arrived messages that no receive has matched. There may be very many, so
/// both have an index by group, source and tag. A receive that accepts any source or any tag searches all messages in the order
/// of their arrival.
#[derive(Default)]
pub(super) struct Matching {
    pub(super) posted: SortedMap<OpId, PostedReceive>,
    /// The posted receives by group, source and tag.
    posted_index: SortedSet<(u32, Option<Rank>, Option<u32>, OpId)>,
    /// The arrived messages by arrival number.
    pub(super) arrived: SortedMap<u64, (OperationKey, Envelope)>,
    /// The arrival numbers by group, source and tag.
    arrived_index: SortedSet<(u32, Rank, u32, u64)>,
    pub(super) arrived_keys: SortedSet<OperationKey>,
    /// The number of messages that have arrived before a matching receive was posted. It is also the next arrival number.
    pub(super) unexpected_messages: u64,
}

impl Matching {
    /// Removes and returns the oldest receive that accepts the message.
    pub(super) fn take_posted(&mut self, envelope: &Envelope) -> Option<PostedReceive> {
        if self.posted.is_empty() {
            return None;
        }
        let &Envelope { group, source, tag, .. } = envelope;
        let patterns = [(Some(source), Some(tag)), (Some(source), None), (None, Some(tag)), (None, None)];
        let oldest = |(source, tag): (Option<Rank>, Option<u32>)| {
            let entry = |id| (group, source, tag, id);
            self.posted_index.first_in(&(entry(OpId(0))..=entry(OpId(u64::MAX)))).map(|found| found.3)
        };
        let id = patterns.into_iter().filter_map(oldest).min()?;
        self.remove_posted(id)
    }

    /// Removes and returns the message that arrived first among the messages that fit the pattern.
    pub(super) fn take_arrived(&mut self, pattern: &Pattern) -> Option<(OperationKey, Envelope)> {
        let number = self.find_arrived(pattern)?;
        let (key, envelope) = self.arrived.remove(&number)?;
        self.arrived_index.remove(&(envelope.group, envelope.source, envelope.tag, number));
        self.arrived_keys.remove(&key);
        Some((key, envelope))
    }

    /// Returns the arrival number of the message that arrived first among those that fit.
    pub(super) fn find_arrived(&self, pattern: &Pattern) -> Option<u64> {
        if let (Some(source), Some(tag)) = (pattern.source, pattern.tag) {
            let entry = |number| (pattern.group, source, tag, number);
            return self.arrived_index.first_in(&(entry(0)..=entry(u64::MAX))).map(|found| found.3);
        }
        let mut arrived = self.arrived.iter();
        arrived.find(|(_, (_, envelope))| pattern.accepts(envelope)).map(|(&number, _)| number)
    }

    pub(super) fn add_posted(&mut self, posted: PostedReceive) {
        let Pattern { group, source, tag } = posted.pattern;
        self.posted_index.insert((group, source, tag, posted.id));
        self.posted.insert(posted.id, posted);
    }

    /// Removes and returns a posted receive. Returns `None` if the operation is no receive or has matched a message.
    pub(super) fn remove_posted(&mut self, id: OpId) -> Option<PostedReceive> {
        let posted = self.posted.remove(&id)?;
        let Pattern { group, source, tag } = posted.pattern;
        self.posted_index.remove(&(group, source, tag, id));
        Some(posted)
    }

    pub(super) fn add_arrived(&mut self, key: OperationKey, envelope: Envelope) {
        self.arrived.insert(self.unexpected_messages, (key, envelope));
        self.arrived_index.insert((envelope.group, envelope.source, envelope.tag, self.unexpected_messages));
        self.arrived_keys.insert(key);
        self.unexpected_messages += 1;
    }
}
