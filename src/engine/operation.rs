//! One operation under way: how far each step of its schedule has come.

use std::ops::Range;
use std::time::Duration;

use super::Timestamp;
use crate::schedule::partition::segment;
use crate::schedule::{Action, After, Schedule, Step};
use crate::types::{Contract, Rank};

/// An operation and its progress.
pub(super) struct Running {
    pub(super) sequence: u64,
    pub(super) contract: Contract,
    pub(super) deadline: Timestamp,
    pub(super) timeout: Duration,
    steps: Vec<Step>,
    segment_elements: usize,
    /// What has been applied, by step.
    applied: Vec<Progress>,
    lanes: Vec<Lane>,
    /// Sends and receives that are not over.
    open: usize,
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
    /// The steps that receive from the peer; how far they are stands in `applied`.
    receives: Vec<usize>,
    next_receive: usize,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    elements: usize,
    done: bool,
}

/// What is due from a peer next.
pub(super) enum Due {
    /// Nothing more in this operation.
    Nothing,
    /// A segment.
    Segment {
        range: Range<usize>,
        action: Action,
        /// Whether it may be applied already.
        is_ready: bool,
    },
}

impl Running {
    pub(super) fn new(
        sequence: u64,
        contract: Contract,
        schedule: Schedule,
        segment_elements: usize,
        now: Timestamp,
        timeout: Duration,
    ) -> Self {
        let mut lanes: Vec<Lane> = schedule.peers().into_iter().map(Lane::new).collect();
        let mut open = 0;
        for (index, step) in schedule.steps.iter().enumerate() {
            for lane in &mut lanes {
                if step.send.as_ref().is_some_and(|send| send.peer == lane.peer) {
                    lane.sends.push(index);
                    open += 1;
                }
                if step.receive.as_ref().is_some_and(|receive| receive.peer == lane.peer) {
                    lane.receives.push(index);
                    open += 1;
                }
            }
        }
        Self {
            sequence,
            contract,
            deadline: now.saturating_add(timeout),
            timeout,
            applied: vec![Progress::default(); schedule.steps.len()],
            steps: schedule.steps,
            segment_elements,
            lanes,
            open,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.open == 0
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> {
        self.lanes.iter().map(|lane| lane.peer)
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

    /// Whether the operation cannot end without `peer`.
    pub(super) fn needs(&self, peer: Rank) -> bool {
        self.lanes.iter().any(|lane| {
            lane.peer == peer
                && (lane.next_send < lane.sends.len() || lane.next_receive < lane.receives.len())
        })
    }

    /// The next segment for `peer`, if it may leave; it is then in flight until [`Running::transmitted`].
    pub(super) fn next_segment(&mut self, peer: Rank) -> Option<Range<usize>> {
        let index = self.lanes.iter().position(|lane| lane.peer == peer)?;
        let lane = &self.lanes[index];
        if lane.in_flight.is_some() {
            return None;
        }
        let send = self.steps[*lane.sends.get(lane.next_send)?].send.as_ref()?;
        let range = segment(&send.range, lane.sent, self.segment_elements);
        if !self.satisfied(send.after, &send.range, &range) {
            return None;
        }
        self.lanes[index].in_flight = Some(range.clone());
        Some(range)
    }

    pub(super) fn transmitted(&mut self, peer: Rank) {
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.peer == peer) else { return };
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
        let lane = self.lanes.iter().find(|lane| lane.peer == peer);
        let step = lane.and_then(|lane| lane.receives.get(lane.next_receive));
        let Some((step, receive)) = step.and_then(|&step| Some((step, self.steps[step].receive.as_ref()?)))
        else {
            return Due::Nothing;
        };
        let range = segment(&receive.range, self.applied[step].elements, self.segment_elements);
        let is_ready = self.satisfied(receive.after, &receive.range, &range);
        Due::Segment { range, action: receive.action, is_ready }
    }

    pub(super) fn applied(&mut self, peer: Rank) {
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.peer == peer) else { return };
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

    /// Whether what `segment` of `range` depends on has been applied.
    fn satisfied(&self, after: Option<After>, range: &Range<usize>, segment: &Range<usize>) -> bool {
        let Some(After(step)) = after else { return true };
        let progress = self.applied[step];
        let is_same = self.steps[step].receive.as_ref().is_some_and(|receive| receive.range == *range);
        progress.done || (is_same && !segment.is_empty() && progress.elements >= segment.end - range.start)
    }
}

impl Lane {
    fn new(peer: Rank) -> Self {
        Self {
            peer,
            sends: Vec::new(),
            next_send: 0,
            sent: 0,
            in_flight: None,
            receives: Vec::new(),
            next_receive: 0,
        }
    }
}
