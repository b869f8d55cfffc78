//! One operation under way: how far each message of its schedule has come.

use std::ops::Range;
use std::time::Duration;

use super::Timestamp;
use crate::schedule::partition::segment;
use crate::schedule::{Action, After, Schedule, Step};
use crate::types::{Contract, Rank, Site};

/// Bytes of an operation that a rank may send to another before that one has said that it is ready. What comes before it
/// has begun is stored.
pub const EAGER_BYTES: usize = 256 << 10;

/// Which operation: what the headers of its frames say.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Key {
    /// An operation of a group, by its number in it.
    Collective {
        /// The group.
        group: u32,
        /// The number.
        sequence: u64,
    },
    /// A message, by its number on the link from one rank to another.
    Message {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The number.
        sequence: u64,
    },
}

/// Everything about an operation but its schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) key: Key,
    /// The group, of a message too.
    pub(super) group: u32,
    pub(super) contract: Contract,
    pub(super) site: Site,
    pub(super) deadline: Timestamp,
    pub(super) timeout: Duration,
}

impl Call {
    /// Its number, in its group or on its link.
    pub(super) fn sequence(&self) -> u64 {
        match self.key {
            Key::Collective { sequence, .. } | Key::Message { sequence, .. } => sequence,
        }
    }
}

/// An operation and its progress.
pub(super) struct Running {
    pub(super) call: Call,
    steps: Vec<Step>,
    segment_elements: usize,
    /// What has been applied, by step.
    applied: Vec<Progress>,
    lanes: Vec<Lane>,
    /// Sends and receives that are not over.
    open: usize,
    /// Peers that are to be told of more that we are ready for.
    untold: usize,
}

/// What passes between this rank and one peer, in its order.
struct Lane {
    peer: Rank,
    /// The steps that send to the peer, and how far the first open one has come.
    sends: Vec<usize>,
    next_send: usize,
    sent: usize,
    /// The segment that has been given out and is not sent yet.
    in_flight: Option<Range<usize>>,
    /// How many of the sends the peer has said that it is ready for.
    cleared: usize,
    /// Bytes sent for which it had not.
    eager_bytes: usize,
    /// Bytes that all sends come to.
    outbound_bytes: usize,
    /// And all receives.
    inbound_bytes: usize,
    /// The peer has been told that something waits for it.
    announced: bool,
    /// The steps that receive from the peer; how far they are stands in `applied`.
    receives: Vec<usize>,
    next_receive: usize,
    /// How many of the receives the peer has been told that we are ready for; `None` while it need not be told.
    told_ready: Option<usize>,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    elements: usize,
    done: bool,
}

/// What may be sent to a peer next.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Nothing, until something else has happened.
    Nothing,
    /// Nothing before the peer is ready.
    Held {
        /// The credit that would do as well; `None` if none does.
        charge: Option<usize>,
        /// The peer does not know that it is to say when it is ready, and should be told.
        announce: bool,
    },
    /// A segment.
    Segment(Outgoing),
}

/// A segment to send.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Outgoing {
    /// The elements.
    pub(super) range: Range<usize>,
    /// The number of its message in the lane.
    pub(super) message: u32,
    /// Its first element within the message.
    pub(super) offset: usize,
    /// Elements of the whole message.
    pub(super) total: usize,
    pub(super) eager: bool,
}

/// What is due from a peer next.
pub(super) enum Due {
    /// Nothing more in this operation.
    Nothing,
    /// A segment.
    Segment {
        range: Range<usize>,
        action: Action,
        message: u32,
        offset: usize,
        /// Elements of the whole message.
        total: usize,
        /// Whether it may be applied already.
        is_ready: bool,
        /// Whether nothing has to leave from its place before.
        is_vacated: bool,
    },
}

impl Running {
    pub(super) fn new(call: Call, schedule: Schedule, segment_elements: usize) -> Self {
        // In the order of their peers, so that a lane is found without looking at all of them.
        let mut lanes: Vec<Lane> = schedule.peers().into_iter().map(Lane::new).collect();
        let element_bytes = call.contract.dtype.size_bytes();
        let mut open = 0;
        for (index, step) in schedule.steps.iter().enumerate() {
            if let Some(send) = &step.send
                && let Some(lane) = find(&mut lanes, send.peer)
            {
                lane.sends.push(index);
                lane.outbound_bytes += send.range.len() * element_bytes;
                open += 1;
            }
            if let Some(receive) = &step.receive
                && let Some(lane) = find(&mut lanes, receive.peer)
            {
                lane.receives.push(index);
                lane.inbound_bytes += receive.range.len() * element_bytes;
                open += 1;
            }
        }
        let mut untold = 0;
        for lane in lanes.iter_mut().filter(|lane| lane.inbound_bytes > EAGER_BYTES) {
            lane.told_ready = Some(0);
            untold += 1;
        }
        Self {
            call,
            applied: vec![Progress::default(); schedule.steps.len()],
            steps: schedule.steps,
            segment_elements,
            lanes,
            open,
            untold,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.open == 0
    }

    /// The number of peers.
    pub(super) fn peers(&self) -> usize {
        self.lanes.len()
    }

    /// A peer by its place among them, and whether it is sent something.
    pub(super) fn peer(&self, index: usize) -> (Rank, bool) {
        (self.lanes[index].peer, !self.lanes[index].sends.is_empty())
    }

    /// The peers from which something is due; if there are none, those that still have to be sent something.
    pub(super) fn awaited(&self) -> impl Iterator<Item = Rank> {
        let receives = |lane: &&Lane| lane.next_receive < lane.receives.len();
        let any_receives = self.lanes.iter().any(|lane| receives(&lane));
        self.lanes
            .iter()
            .filter(move |lane| if any_receives { receives(lane) } else { lane.next_send < lane.sends.len() })
            .map(|lane| lane.peer)
    }

    /// Whether the operation cannot end without `peer`, of whose segments so many are stored.
    pub(super) fn needs(&self, peer: Rank, stored: usize) -> bool {
        self.lane(peer)
            .is_some_and(|lane| lane.next_send < lane.sends.len() || self.due_segments(lane) > stored)
    }

    /// How many segments of `peer` are still to be applied.
    pub(super) fn open_segments(&self, peer: Rank) -> usize {
        self.lane(peer).map_or(0, |lane| self.due_segments(lane))
    }

    /// How many segments are still to be applied.
    fn due_segments(&self, lane: &Lane) -> usize {
        let segments = |&step: &usize| {
            let length = self.steps[step].receive.as_ref().map_or(0, |receive| receive.range.len());
            let left = length - self.applied[step].elements.min(length);
            left.div_ceil(self.segment_elements).max(1)
        };
        lane.receives[lane.next_receive..].iter().map(segments).sum()
    }

    /// Whether something is still to be sent to `peer`.
    pub(super) fn sends_to(&self, peer: Rank) -> bool {
        self.lane(peer).is_some_and(|lane| lane.next_send < lane.sends.len())
    }

    fn lane(&self, peer: Rank) -> Option<&Lane> {
        let index = self.lanes.binary_search_by_key(&peer, |lane| lane.peer).ok()?;
        Some(&self.lanes[index])
    }

    fn lane_mut(&mut self, peer: Rank) -> Option<&mut Lane> {
        find(&mut self.lanes, peer)
    }

    /// What may be sent to `peer` next, if at most `credit` bytes (see [`charge`]) may be sent before it is ready. A
    /// segment is in flight until [`Running::transmitted`].
    pub(super) fn next(&mut self, peer: Rank, credit: usize) -> Next {
        let element_bytes = self.call.contract.dtype.size_bytes();
        let Some(lane) = self.lane(peer).filter(|lane| lane.in_flight.is_none()) else {
            return Next::Nothing;
        };
        let step = lane.sends.get(lane.next_send).and_then(|&step| self.steps[step].send.as_ref());
        let Some(send) = step else { return Next::Nothing };
        let range = segment(&send.range, lane.sent, self.segment_elements);
        if !self.satisfied(send.after, &send.range, &range) {
            return Next::Nothing;
        }
        let bytes = range.len() * element_bytes;
        let eager = lane.next_send >= lane.cleared;
        if eager {
            let is_message = matches!(self.call.key, Key::Message { .. });
            // The receiver of a longer lane says when it is ready without being asked, if it asks for the same; that it does
            // not, it learns from a first segment or an announcement. That of a message learns how long it is from either.
            let is_begun = lane.next_send > 0 || lane.eager_bytes > 0;
            let is_long = is_message || lane.outbound_bytes > EAGER_BYTES;
            let is_known = lane.announced || (is_begun && is_long);
            let has_budget = lane.eager_bytes + bytes <= EAGER_BYTES;
            if !has_budget || charge(bytes) > credit {
                let charge = has_budget.then(|| charge(bytes));
                return Next::Held { charge, announce: !is_known };
            }
        }
        let outgoing = Outgoing {
            message: lane.next_send as u32,
            offset: lane.sent,
            total: send.range.len(),
            range: range.clone(),
            eager,
        };
        if let Some(lane) = self.lane_mut(peer) {
            lane.in_flight = Some(range);
            lane.eager_bytes += if eager { bytes } else { 0 };
        }
        Next::Segment(outgoing)
    }

    /// Notes that the peer knows that something waits for it.
    pub(super) fn announced(&mut self, peer: Rank) {
        if let Some(lane) = self.lane_mut(peer) {
            lane.announced = true;
        }
    }

    /// Takes the peer's word that it is ready for this many messages.
    pub(super) fn cleared(&mut self, peer: Rank, messages: u64) {
        if let Some(lane) = self.lane_mut(peer) {
            lane.cleared = lane.cleared.max(usize::try_from(messages).unwrap_or(usize::MAX));
        }
    }

    pub(super) fn transmitted(&mut self, peer: Rank) {
        let Some(lane) = find(&mut self.lanes, peer) else { return };
        let Some(range) = lane.in_flight.take() else { return };
        lane.sent += range.len();
        let step = lane.sends.get(lane.next_send).and_then(|&step| self.steps[step].send.as_ref());
        if step.is_some_and(|send| lane.sent == send.range.len()) {
            lane.next_send += 1;
            lane.sent = 0;
            self.open -= 1;
        }
    }

    /// What has to come from `peer` next.
    pub(super) fn due(&self, peer: Rank) -> Due {
        let Some(lane) = self.lane(peer) else { return Due::Nothing };
        let Some(&step) = lane.receives.get(lane.next_receive) else { return Due::Nothing };
        let Some(receive) = &self.steps[step].receive else { return Due::Nothing };
        let offset = self.applied[step].elements;
        let range = segment(&receive.range, offset, self.segment_elements);
        let is_vacated = self.is_vacated(step, offset + range.len());
        let is_ready = is_vacated && self.satisfied(receive.after, &receive.range, &range);
        let (message, total) = (lane.next_receive as u32, receive.range.len());
        Due::Segment { range, action: receive.action, message, offset, total, is_ready, is_vacated }
    }

    pub(super) fn applied(&mut self, peer: Rank) {
        let Some(lane) = find(&mut self.lanes, peer) else { return };
        let Some(&step) = lane.receives.get(lane.next_receive) else { return };
        let Some(receive) = &self.steps[step].receive else { return };
        let progress = &mut self.applied[step];
        progress.elements += segment(&receive.range, progress.elements, self.segment_elements).len();
        if progress.elements == receive.range.len() {
            progress.done = true;
            lane.next_receive += 1;
            self.open -= 1;
        }
    }

    /// From now on `peer` is to be told when we are ready: it asked, or has more for us than it may send before.
    pub(super) fn tell_when_ready(&mut self, peer: Rank) {
        if let Some(lane) = find(&mut self.lanes, peer)
            && lane.told_ready.is_none()
            && !lane.receives.is_empty()
        {
            lane.told_ready = Some(0);
            self.untold += 1;
        }
    }

    /// The peers that do not know yet for how many messages we are ready, and that number.
    pub(super) fn take_ready(&mut self) -> Vec<(Rank, usize)> {
        let mut ready = Vec::new();
        if self.untold == 0 {
            return ready;
        }
        for index in 0..self.lanes.len() {
            let lane = &self.lanes[index];
            let Some(told) = lane.told_ready.filter(|&told| told < lane.receives.len()) else { continue };
            let is_ready = |&&step: &&usize| {
                let receive = self.steps[step].receive.as_ref();
                receive.is_some_and(|receive| receive.after.is_none_or(|After(step)| self.applied[step].done))
            };
            let now = told + lane.receives[told..].iter().take_while(is_ready).count();
            if now > told {
                ready.push((lane.peer, now));
                self.untold -= usize::from(now == lane.receives.len());
                self.lanes[index].told_ready = Some(now);
            }
        }
        ready
    }

    /// Whether the first so many elements that a step receives do not go where something lies that it has not sent yet.
    fn is_vacated(&self, step: usize, elements: usize) -> bool {
        let Some(send) = self.steps[step].send.as_ref().filter(|_| self.steps[step].leaves_first(step))
        else {
            return true;
        };
        self.lane(send.peer).is_none_or(|lane| {
            let next = lane.sends.get(lane.next_send);
            next.is_none_or(|&next| next > step || (next == step && lane.sent >= elements))
        })
    }

    /// Whether what `segment` of `range` depends on has been applied.
    fn satisfied(&self, after: Option<After>, range: &Range<usize>, segment: &Range<usize>) -> bool {
        let Some(After(step)) = after else { return true };
        let progress = self.applied[step];
        let is_same = self.steps[step].receive.as_ref().is_some_and(|receive| receive.range == *range);
        progress.done || (is_same && !segment.is_empty() && progress.elements >= segment.end - range.start)
    }
}

/// What a segment of so many bytes costs its receiver to store, at most: its bytes and what it takes to remember them.
pub(super) const fn charge(bytes: usize) -> usize {
    bytes + 128
}

/// The lane of a peer, of lanes in the order of their peers.
fn find(lanes: &mut [Lane], peer: Rank) -> Option<&mut Lane> {
    let index = lanes.binary_search_by_key(&peer, |lane| lane.peer).ok()?;
    Some(&mut lanes[index])
}

impl Lane {
    fn new(peer: Rank) -> Self {
        Self {
            peer,
            sends: Vec::new(),
            next_send: 0,
            sent: 0,
            in_flight: None,
            cleared: 0,
            eager_bytes: 0,
            outbound_bytes: 0,
            inbound_bytes: 0,
            announced: false,
            receives: Vec::new(),
            next_receive: 0,
            told_ready: None,
        }
    }
}
