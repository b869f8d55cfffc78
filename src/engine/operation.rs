//! One operation under way: how far each message of its schedule has come.

use std::ops::Range;
use std::time::Duration;

use super::{SendMode, Timestamp};
use crate::schedule::partition::segment;
use crate::schedule::{Action, AfterStep, Schedule, Step};
use crate::types::{Contract, Rank, Site};

/// Bytes of an operation that a rank may send to another before that one has said that it is ready. What comes before it
/// has begun is stored.
pub const EAGER_BYTES: usize = 256 << 10;

/// Which operation: what the headers of its frames say.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum OperationKey {
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
pub(super) struct OperationInfo {
    pub(super) key: OperationKey,
    /// The group, of a message too.
    pub(super) group: u32,
    pub(super) contract: Contract,
    pub(super) site: Site,
    pub(super) deadline: Timestamp,
    pub(super) timeout: Duration,
    pub(super) mode: SendMode,
}

impl OperationInfo {
    /// Its number, in its group or on its link.
    pub(super) fn sequence(&self) -> u64 {
        match self.key {
            OperationKey::Collective { sequence, .. } | OperationKey::Message { sequence, .. } => sequence,
        }
    }
}

/// An operation and its progress.
pub(super) struct RunningOperation {
    pub(super) call: OperationInfo,
    steps: Vec<Step>,
    segment_elements: usize,
    /// What has been applied, by step.
    applied: Vec<StepProgress>,
    peers: Vec<PeerProgress>,
    /// Sends and receives that are not over.
    open: usize,
    /// Peers that are to be told of more that we are ready for.
    untold: usize,
}

/// What passes between this rank and one peer, in its order.
struct PeerProgress {
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
struct StepProgress {
    elements: usize,
    done: bool,
}

/// What may be sent to a peer next.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum NextSend {
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
    Segment(OutgoingSegment),
}

/// A segment to send.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct OutgoingSegment {
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
pub(super) enum DueReceive {
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

impl RunningOperation {
    pub(super) fn new(call: OperationInfo, schedule: Schedule, segment_elements: usize) -> Self {
        // In the order of their peers, so that a lane is found without looking at all of them.
        let mut peers: Vec<PeerProgress> = schedule.peers().into_iter().map(PeerProgress::new).collect();
        let element_bytes = call.contract.dtype.size_bytes();
        let mut open = 0;
        for (index, step) in schedule.steps.iter().enumerate() {
            if let Some(send) = &step.send
                && let Some(peer_progress) = find(&mut peers, send.peer)
            {
                peer_progress.sends.push(index);
                peer_progress.outbound_bytes += send.range.len() * element_bytes;
                open += 1;
            }
            if let Some(receive) = &step.receive
                && let Some(peer_progress) = find(&mut peers, receive.peer)
            {
                peer_progress.receives.push(index);
                peer_progress.inbound_bytes += receive.range.len() * element_bytes;
                open += 1;
            }
        }
        let mut untold = 0;
        for peer_progress in
            peers.iter_mut().filter(|peer_progress| peer_progress.inbound_bytes > EAGER_BYTES)
        {
            peer_progress.told_ready = Some(0);
            untold += 1;
        }
        Self {
            call,
            applied: vec![StepProgress::default(); schedule.steps.len()],
            steps: schedule.steps,
            segment_elements,
            peers,
            open,
            untold,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.open == 0
    }

    /// The number of peers.
    pub(super) fn peers(&self) -> usize {
        self.peers.len()
    }

    /// A peer by its place among them, and whether it is sent something.
    pub(super) fn peer(&self, index: usize) -> (Rank, bool) {
        (self.peers[index].peer, !self.peers[index].sends.is_empty())
    }

    /// The peers from which something is due; if there are none, those that still have to be sent something.
    pub(super) fn awaited(&self) -> impl Iterator<Item = Rank> {
        let receives =
            |peer_progress: &&PeerProgress| peer_progress.next_receive < peer_progress.receives.len();
        let any_receives = self.peers.iter().any(|peer_progress| receives(&peer_progress));
        self.peers
            .iter()
            .filter(move |peer_progress| {
                if any_receives {
                    receives(peer_progress)
                } else {
                    peer_progress.next_send < peer_progress.sends.len()
                }
            })
            .map(|peer_progress| peer_progress.peer)
    }

    /// Whether the operation cannot end without `peer`, of whose segments so many are stored.
    pub(super) fn needs(&self, peer: Rank, stored: usize) -> bool {
        self.peer_progress(peer).is_some_and(|peer_progress| {
            peer_progress.next_send < peer_progress.sends.len() || self.due_segments(peer_progress) > stored
        })
    }

    /// How many segments of `peer` are still to be applied.
    pub(super) fn open_segments(&self, peer: Rank) -> usize {
        self.peer_progress(peer).map_or(0, |peer_progress| self.due_segments(peer_progress))
    }

    /// How many segments are still to be applied.
    fn due_segments(&self, peer_progress: &PeerProgress) -> usize {
        let segments = |&step: &usize| {
            let length = self.steps[step].receive.as_ref().map_or(0, |receive| receive.range.len());
            let left = length - self.applied[step].elements.min(length);
            left.div_ceil(self.segment_elements).max(1)
        };
        peer_progress.receives[peer_progress.next_receive..].iter().map(segments).sum()
    }

    /// Whether something is still to be sent to `peer`.
    pub(super) fn sends_to(&self, peer: Rank) -> bool {
        self.peer_progress(peer)
            .is_some_and(|peer_progress| peer_progress.next_send < peer_progress.sends.len())
    }

    fn peer_progress(&self, peer: Rank) -> Option<&PeerProgress> {
        let index = self.peers.binary_search_by_key(&peer, |peer_progress| peer_progress.peer).ok()?;
        Some(&self.peers[index])
    }

    fn lane_mut(&mut self, peer: Rank) -> Option<&mut PeerProgress> {
        find(&mut self.peers, peer)
    }

    /// What may be sent to `peer` next, if at most `credit` bytes (see [`charge`]) may be sent before it is ready. A
    /// segment is in flight until [`RunningOperation::transmitted`].
    pub(super) fn next(&mut self, peer: Rank, credit: usize) -> NextSend {
        let element_bytes = self.call.contract.dtype.size_bytes();
        let Some(peer_progress) =
            self.peer_progress(peer).filter(|peer_progress| peer_progress.in_flight.is_none())
        else {
            return NextSend::Nothing;
        };
        let step =
            peer_progress.sends.get(peer_progress.next_send).and_then(|&step| self.steps[step].send.as_ref());
        let Some(send) = step else { return NextSend::Nothing };
        let range = segment(&send.range, peer_progress.sent, self.segment_elements);
        if !self.satisfied(send.after, &send.range, &range) {
            return NextSend::Nothing;
        }
        let bytes = range.len() * element_bytes;
        let eager = peer_progress.next_send >= peer_progress.cleared;
        if eager {
            let is_message = matches!(self.call.key, OperationKey::Message { .. });
            // The receiver of a longer lane says when it is ready without being asked, if it asks for the same; that it does
            // not, it learns from a first segment or an announcement. That of a message learns how long it is from either.
            let is_begun = peer_progress.next_send > 0 || peer_progress.eager_bytes > 0;
            let is_long = is_message || peer_progress.outbound_bytes > EAGER_BYTES;
            let is_known = peer_progress.announced || (is_begun && is_long);
            // The receiver answers the announcement of a message when a receive has matched it, so a synchronous message
            // leaves only after that answer.
            let is_standard = self.call.mode == SendMode::Standard;
            let has_budget = is_standard && peer_progress.eager_bytes + bytes <= EAGER_BYTES;
            if !has_budget || charge(bytes) > credit {
                let charge = has_budget.then(|| charge(bytes));
                return NextSend::Held { charge, announce: !is_known };
            }
        }
        let outgoing = OutgoingSegment {
            message: peer_progress.next_send as u32,
            offset: peer_progress.sent,
            total: send.range.len(),
            range: range.clone(),
            eager,
        };
        if let Some(peer_progress) = self.lane_mut(peer) {
            peer_progress.in_flight = Some(range);
            peer_progress.eager_bytes += if eager { bytes } else { 0 };
        }
        NextSend::Segment(outgoing)
    }

    /// Notes that the peer knows that something waits for it.
    pub(super) fn announced(&mut self, peer: Rank) {
        if let Some(peer_progress) = self.lane_mut(peer) {
            peer_progress.announced = true;
        }
    }

    /// Takes the peer's word that it is ready for this many messages.
    pub(super) fn cleared(&mut self, peer: Rank, messages: u64) {
        if let Some(peer_progress) = self.lane_mut(peer) {
            peer_progress.cleared =
                peer_progress.cleared.max(usize::try_from(messages).unwrap_or(usize::MAX));
        }
    }

    pub(super) fn transmitted(&mut self, peer: Rank) {
        let Some(peer_progress) = find(&mut self.peers, peer) else { return };
        let Some(range) = peer_progress.in_flight.take() else { return };
        peer_progress.sent += range.len();
        let step =
            peer_progress.sends.get(peer_progress.next_send).and_then(|&step| self.steps[step].send.as_ref());
        if step.is_some_and(|send| peer_progress.sent == send.range.len()) {
            peer_progress.next_send += 1;
            peer_progress.sent = 0;
            self.open -= 1;
        }
    }

    /// What has to come from `peer` next.
    pub(super) fn due(&self, peer: Rank) -> DueReceive {
        let Some(peer_progress) = self.peer_progress(peer) else { return DueReceive::Nothing };
        let Some(&step) = peer_progress.receives.get(peer_progress.next_receive) else {
            return DueReceive::Nothing;
        };
        let Some(receive) = &self.steps[step].receive else { return DueReceive::Nothing };
        let offset = self.applied[step].elements;
        let range = segment(&receive.range, offset, self.segment_elements);
        let is_vacated = self.is_vacated(step, offset + range.len());
        let is_ready = is_vacated && self.satisfied(receive.after, &receive.range, &range);
        let (message, total) = (peer_progress.next_receive as u32, receive.range.len());
        DueReceive::Segment { range, action: receive.action, message, offset, total, is_ready, is_vacated }
    }

    pub(super) fn applied(&mut self, peer: Rank) {
        let Some(peer_progress) = find(&mut self.peers, peer) else { return };
        let Some(&step) = peer_progress.receives.get(peer_progress.next_receive) else { return };
        let Some(receive) = &self.steps[step].receive else { return };
        let progress = &mut self.applied[step];
        progress.elements += segment(&receive.range, progress.elements, self.segment_elements).len();
        if progress.elements == receive.range.len() {
            progress.done = true;
            peer_progress.next_receive += 1;
            self.open -= 1;
        }
    }

    /// From now on `peer` is to be told when we are ready: it asked, or has more for us than it may send before.
    pub(super) fn tell_when_ready(&mut self, peer: Rank) {
        if let Some(peer_progress) = find(&mut self.peers, peer)
            && peer_progress.told_ready.is_none()
            && !peer_progress.receives.is_empty()
        {
            peer_progress.told_ready = Some(0);
            self.untold += 1;
        }
    }

    /// The peers that do not know yet for how many messages we are ready, and that number.
    pub(super) fn take_ready(&mut self) -> Vec<(Rank, usize)> {
        let mut ready = Vec::new();
        if self.untold == 0 {
            return ready;
        }
        for index in 0..self.peers.len() {
            let peer_progress = &self.peers[index];
            let Some(told) = peer_progress.told_ready.filter(|&told| told < peer_progress.receives.len())
            else {
                continue;
            };
            let is_ready = |&&step: &&usize| {
                let receive = self.steps[step].receive.as_ref();
                receive.is_some_and(|receive| {
                    receive.after.is_none_or(|AfterStep(step)| self.applied[step].done)
                })
            };
            let now = told + peer_progress.receives[told..].iter().take_while(is_ready).count();
            if now > told {
                ready.push((peer_progress.peer, now));
                self.untold -= usize::from(now == peer_progress.receives.len());
                self.peers[index].told_ready = Some(now);
            }
        }
        ready
    }

    /// Whether the first so many elements that a step receives do not go where something lies that it has not sent yet.
    fn is_vacated(&self, step: usize, elements: usize) -> bool {
        let Some(send) =
            self.steps[step].send.as_ref().filter(|_| self.steps[step].must_send_before_receiving(step))
        else {
            return true;
        };
        self.peer_progress(send.peer).is_none_or(|peer_progress| {
            let next = peer_progress.sends.get(peer_progress.next_send);
            next.is_none_or(|&next| next > step || (next == step && peer_progress.sent >= elements))
        })
    }

    /// Whether what `segment` of `range` depends on has been applied.
    fn satisfied(&self, after: Option<AfterStep>, range: &Range<usize>, segment: &Range<usize>) -> bool {
        let Some(AfterStep(step)) = after else { return true };
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
fn find(peers: &mut [PeerProgress], peer: Rank) -> Option<&mut PeerProgress> {
    let index = peers.binary_search_by_key(&peer, |peer_progress| peer_progress.peer).ok()?;
    Some(&mut peers[index])
}

impl PeerProgress {
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
