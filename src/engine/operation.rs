//! An active operation: the progress of each transfer of its schedule. A transfer is all elements that one step sends or
//! receives. A long transfer is split into segments.

use std::ops::Range;

use super::interface::{OperationKey, OperationRequest, SendMode, Timestamp};
use crate::schedule::partition::segment;
use crate::schedule::{Action, Schedule, Step, StepDependency};
use crate::types::{Contract, Rank, Site};

/// The most bytes of one operation that a rank may send to a peer before the peer's ready frame arrives.
pub const EAGER_BYTES: usize = 256 << 10;

/// The contract and the deadline of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperationInfo {
    pub(super) group: u32,
    pub(super) contract: Contract,
    pub(super) site: Site,
    pub(super) deadline: Timestamp,
    pub(super) timeout: Timestamp,
    pub(super) mode: SendMode,
}

impl OperationInfo {
    pub(super) fn new(now: Timestamp, request: OperationRequest) -> Self {
        let OperationRequest { group, contract, timeout, spent, site, mode } = request;
        let deadline = now.saturating_add(timeout.saturating_sub(spent));
        Self { group, contract, site, deadline, timeout, mode }
    }
}

pub(super) struct ExternalOperation {
    pub(super) key: OperationKey,
    pub(super) info: OperationInfo,
    /// The ranks for which the operation waits.
    pub(super) awaited: Vec<Rank>,
}

pub(super) struct RunningOperation {
    pub(super) key: OperationKey,
    pub(super) info: OperationInfo,
    steps: Vec<Step>,
    segment_elements: usize,
    /// The progress of the receive of each step, in the order of the steps.
    receive_progress: Vec<ReceiveProgress>,
    /// The progress with each peer. The peers are sorted by rank, so that a binary search finds a peer.
    peers: Vec<(Rank, PeerProgress)>,
    /// The number of sends and receives that are not complete.
    unfinished_transfers: usize,
    /// The number of peers that need ready frames and to which this rank has not sent ready frames for all transfers.
    peers_without_ready: usize,
}

/// The progress of the transfers between this rank and one peer.
#[derive(Default)]
struct PeerProgress {
    sends: Transfers,
    /// How many elements of the first incomplete send have been sent.
    sent_elements: usize,
    /// The peer has sent ready frames for this number of sends, counted from the first one.
    ready_sends: usize,
    /// How many bytes were sent on credit, before the peer's ready frame arrived. At most [`EAGER_BYTES`].
    eager_bytes: usize,
    /// Whether this rank has announced the operation to the peer.
    announced: bool,
    /// The progress of the receives is in the field `receive_progress` of [`RunningOperation`].
    receives: Transfers,
    /// This rank has sent ready frames for this number of receives, counted from the first one; `None` if the peer needs no ready
    /// frame.
    ready_receives: Option<usize>,
}

/// The transfers in one direction between this rank and one peer.
#[derive(Default)]
struct Transfers {
    /// The steps with these transfers, in their order.
    steps: Vec<usize>,
    /// The index in `steps` of the first transfer that is not complete.
    next: usize,
    /// The bytes of all transfers together.
    bytes: usize,
}

impl Transfers {
    fn add(&mut self, step: usize, bytes: usize) {
        self.steps.push(step);
        self.bytes += bytes;
    }

    /// Returns the step of the first transfer that is not complete, if there is one.
    fn next_step(&self) -> Option<usize> {
        self.steps.get(self.next).copied()
    }
}

/// The progress of the receive of one step.
#[derive(Clone, Copy, Default)]
struct ReceiveProgress {
    /// The number of elements that have been received and applied.
    elements: usize,
    is_complete: bool,
}

#[derive(PartialEq, Eq, Debug)]
pub(super) enum NextSend {
    /// There is nothing to send now: everything is sent, or the data to send have not arrived.
    Nothing,
    /// The next segment must wait for a ready frame or for credit.
    MustWait {
        /// The credit in bytes with which the segment may be sent; `None` if only a ready frame allows the segment.
        credit_needed: Option<usize>,
        /// Whether this rank has to announce the operation, because otherwise the peer sends no ready frame.
        must_announce: bool,
    },
    /// The segment to send. If `eager` is true, it is sent on credit.
    Segment { segment: TransferSegment, eager: bool },
}

#[derive(PartialEq, Eq, Debug)]
pub(super) struct TransferSegment {
    /// The elements of the operation's buffer.
    pub(super) range: Range<usize>,
    /// The index of the transfer among the operation's transfers in this direction between this rank and this peer.
    pub(super) transfer_index: u32,
    /// The index of the segment's first element within the transfer.
    pub(super) offset: usize,
    /// The number of elements of the whole transfer.
    pub(super) transfer_elements: usize,
}

/// The segment that has to arrive from a peer next.
pub(super) struct DueSegment {
    pub(super) segment: TransferSegment,
    pub(super) action: Action,
    /// Whether the segment may be applied now.
    pub(super) is_ready: bool,
    /// False if the segment would overwrite elements that this rank still has to send.
    pub(super) is_destination_free: bool,
}

impl RunningOperation {
    pub(super) fn new(
        key: OperationKey,
        info: OperationInfo,
        schedule: Schedule,
        segment_elements: usize,
    ) -> Self {
        let mut peers: Vec<(Rank, PeerProgress)> =
            schedule.peers().into_iter().map(|peer| (peer, PeerProgress::default())).collect();
        let element_bytes = info.contract.dtype.size_bytes();
        let mut unfinished_transfers = 0;
        for (index, step) in schedule.steps.iter().enumerate() {
            if let Some(send) = &step.send
                && let Some(peer_progress) = find_peer(&mut peers, send.peer)
            {
                peer_progress.sends.add(index, send.range.len() * element_bytes);
                unfinished_transfers += 1;
            }
            if let Some(receive) = &step.receive
                && let Some(peer_progress) = find_peer(&mut peers, receive.peer)
            {
                peer_progress.receives.add(index, receive.range.len() * element_bytes);
                unfinished_transfers += 1;
            }
        }
        let mut peers_without_ready = 0;
        for (_, peer_progress) in peers.iter_mut().filter(|peer| peer.1.receives.bytes > EAGER_BYTES) {
            peer_progress.ready_receives = Some(0);
            peers_without_ready += 1;
        }
        Self {
            key,
            info,
            receive_progress: vec![ReceiveProgress::default(); schedule.steps.len()],
            steps: schedule.steps,
            segment_elements,
            peers,
            unfinished_transfers,
            peers_without_ready,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.unfinished_transfers == 0
    }

    pub(super) fn peer_count(&self) -> usize {
        self.peers.len()
    }

    /// Returns the peer with this index, and whether the operation has any transfers to the peer.
    pub(super) fn peer_at(&self, index: usize) -> (Rank, bool) {
        let (peer, peer_progress) = &self.peers[index];
        (*peer, !peer_progress.sends.steps.is_empty())
    }

    /// Returns the peers from which the operation still has to receive or, if there are none, those to which it still has to
    /// send.
    pub(super) fn awaited_peers(&self) -> impl Iterator<Item = Rank> {
        let is_receiving = |(_, progress): &&(Rank, PeerProgress)| progress.receives.next_step().is_some();
        let is_sending = |(_, progress): &&(Rank, PeerProgress)| progress.sends.next_step().is_some();
        let any_receives = self.peers.iter().any(|peer| is_receiving(&peer));
        let is_awaited = move |peer: &&_| if any_receives { is_receiving(peer) } else { is_sending(peer) };
        self.peers.iter().filter(is_awaited).map(|&(peer, _)| peer)
    }

    /// Returns whether the operation still has to send to `peer`, or to receive more from it than the stored segments.
    pub(super) fn needs(&self, peer: Rank, stored_segments: usize) -> bool {
        self.sends_to(peer) || self.unapplied_segments(peer) > stored_segments
    }

    /// Returns the number of segments from `peer` that have not been applied.
    pub(super) fn unapplied_segments(&self, peer: Rank) -> usize {
        let Some(peer_progress) = self.peer_progress(peer) else { return 0 };
        let segments = |&step: &usize| {
            let length = self.steps[step].receive.as_ref().map_or(0, |receive| receive.range.len());
            let missing = length - self.receive_progress[step].elements.min(length);
            missing.div_ceil(self.segment_elements).max(1)
        };
        peer_progress.receives.steps[peer_progress.receives.next..].iter().map(segments).sum()
    }

    pub(super) fn sends_to(&self, peer: Rank) -> bool {
        self.peer_progress(peer).is_some_and(|peer_progress| peer_progress.sends.next_step().is_some())
    }

    fn peer_progress(&self, peer: Rank) -> Option<&PeerProgress> {
        let index = self.peers.binary_search_by_key(&peer, |entry| entry.0).ok()?;
        Some(&self.peers[index].1)
    }

    /// Returns the segment to send to `peer` next, or why no segment may be sent now. `credit` is the number of bytes that may be
    /// sent on credit. The next call must come after [`RunningOperation::record_sent_segment`].
    pub(super) fn take_next_send(&mut self, peer: Rank, credit: usize) -> NextSend {
        let element_bytes = self.info.contract.dtype.size_bytes();
        let Some(peer_progress) = self.peer_progress(peer) else { return NextSend::Nothing };
        let step = peer_progress.sends.next_step();
        let Some(send) = step.and_then(|step| self.steps[step].send.as_ref()) else {
            return NextSend::Nothing;
        };
        let range = segment(&send.range, peer_progress.sent_elements, self.segment_elements);
        if !self.is_dependency_applied(send.awaited_step, &send.range, &range) {
            return NextSend::Nothing;
        }
        let bytes = range.len() * element_bytes;
        let eager = peer_progress.sends.next >= peer_progress.ready_sends;
        if eager {
            let is_message = matches!(self.key, OperationKey::Message { .. });
            // If an operation sends more than 256 KiB to the peer, the peer sends ready frames without an announcement. But the
            // peer needs one frame first. Only a frame shows the length of a message, or that the contracts differ.
            let is_begun = peer_progress.sends.next > 0 || peer_progress.eager_bytes > 0;
            let is_long = is_message || peer_progress.sends.bytes > EAGER_BYTES;
            let is_known = peer_progress.announced || (is_begun && is_long);
            // A synchronous message is never sent on credit. The receiver answers the announcement of the message with a ready
            // frame when a receive has matched the message.
            let is_standard = self.info.mode == SendMode::Standard;
            let may_use_credit = is_standard && peer_progress.eager_bytes + bytes <= EAGER_BYTES;
            if !may_use_credit || credit_cost(bytes) > credit {
                let credit_needed = may_use_credit.then(|| credit_cost(bytes));
                return NextSend::MustWait { credit_needed, must_announce: !is_known };
            }
        }
        let segment = TransferSegment {
            range,
            transfer_index: peer_progress.sends.next as u32,
            offset: peer_progress.sent_elements,
            transfer_elements: send.range.len(),
        };
        if eager && let Some(peer_progress) = find_peer(&mut self.peers, peer) {
            peer_progress.eager_bytes += bytes;
        }
        NextSend::Segment { segment, eager }
    }

    pub(super) fn set_announced(&mut self, peer: Rank) {
        if let Some(peer_progress) = find_peer(&mut self.peers, peer) {
            peer_progress.announced = true;
        }
    }

    /// Handles a ready frame: the peer is ready to receive the first `transfers` transfers from this rank.
    pub(super) fn set_ready_sends(&mut self, peer: Rank, transfers: u64) {
        if let Some(peer_progress) = find_peer(&mut self.peers, peer) {
            peer_progress.ready_sends =
                peer_progress.ready_sends.max(usize::try_from(transfers).unwrap_or(usize::MAX));
        }
    }

    /// Records that the segment of the last [`RunningOperation::take_next_send`] has been sent.
    pub(super) fn record_sent_segment(&mut self, peer: Rank) {
        let Some(peer_progress) = find_peer(&mut self.peers, peer) else { return };
        let Some(step) = peer_progress.sends.next_step() else { return };
        let Some(send) = &self.steps[step].send else { return };
        let sent = segment(&send.range, peer_progress.sent_elements, self.segment_elements);
        peer_progress.sent_elements += sent.len();
        if peer_progress.sent_elements == send.range.len() {
            peer_progress.sends.next += 1;
            peer_progress.sent_elements = 0;
            self.unfinished_transfers -= 1;
        }
    }

    /// Returns the segment that has to arrive from `peer` next; `None` if the operation receives nothing more from the peer.
    pub(super) fn due_segment(&self, peer: Rank) -> Option<DueSegment> {
        let peer_progress = self.peer_progress(peer)?;
        let step = peer_progress.receives.next_step()?;
        let receive = self.steps[step].receive.as_ref()?;
        let offset = self.receive_progress[step].elements;
        let range = segment(&receive.range, offset, self.segment_elements);
        let is_destination_free = self.is_destination_free(step, offset + range.len());
        let is_ready =
            is_destination_free && self.is_dependency_applied(receive.awaited_step, &receive.range, &range);
        let segment = TransferSegment {
            range,
            transfer_index: peer_progress.receives.next as u32,
            offset,
            transfer_elements: receive.range.len(),
        };
        Some(DueSegment { segment, action: self.steps[step].action, is_ready, is_destination_free })
    }

    /// Records that the segment that was due from `peer` has been applied.
    pub(super) fn record_applied_segment(&mut self, peer: Rank) {
        let Some(peer_progress) = find_peer(&mut self.peers, peer) else { return };
        let Some(step) = peer_progress.receives.next_step() else { return };
        let Some(receive) = &self.steps[step].receive else { return };
        let progress = &mut self.receive_progress[step];
        progress.elements += segment(&receive.range, progress.elements, self.segment_elements).len();
        if progress.elements == receive.range.len() {
            progress.is_complete = true;
            peer_progress.receives.next += 1;
            self.unfinished_transfers -= 1;
        }
    }

    /// Makes this rank send ready frames to `peer`, because the peer has announced the operation.
    pub(super) fn enable_ready_frames(&mut self, peer: Rank) {
        if let Some(peer_progress) = find_peer(&mut self.peers, peer)
            && peer_progress.ready_receives.is_none()
            && !peer_progress.receives.steps.is_empty()
        {
            peer_progress.ready_receives = Some(0);
            self.peers_without_ready += 1;
        }
    }

    /// Returns the ready frames to send now: the peers, and the number of transfers from each for which this rank is ready.
    pub(super) fn take_ready_frames(&mut self) -> Vec<(Rank, usize)> {
        let mut ready_frames = Vec::new();
        if self.peers_without_ready == 0 {
            return ready_frames;
        }
        for index in 0..self.peers.len() {
            let (peer, PeerProgress { ready_receives, receives: Transfers { steps, .. }, .. }) =
                &self.peers[index];
            let Some(reported) = ready_receives.filter(|&reported| reported < steps.len()) else { continue };
            let is_ready = |&&step: &&usize| {
                let awaited_step = self.steps[step].receive.as_ref().and_then(|receive| receive.awaited_step);
                awaited_step.is_none_or(|StepDependency(step)| self.receive_progress[step].is_complete)
            };
            let ready = reported + steps[reported..].iter().take_while(is_ready).count();
            if ready > reported {
                ready_frames.push((*peer, ready));
                self.peers_without_ready -= usize::from(ready == steps.len());
                self.peers[index].1.ready_receives = Some(ready);
            }
        }
        ready_frames
    }

    /// Returns false if the first `elements` elements of a step's receive would overwrite elements that it still has to send.
    fn is_destination_free(&self, step: usize, elements: usize) -> bool {
        let send =
            self.steps[step].send.as_ref().filter(|_| self.steps[step].must_send_before_receiving(step));
        send.and_then(|send| self.peer_progress(send.peer)).is_none_or(|peer_progress| {
            let next = peer_progress.sends.next_step();
            next.is_none_or(|next| next > step || (next == step && peer_progress.sent_elements >= elements))
        })
    }

    /// Returns whether the data have been applied on which a segment of the transfer `range` depends.
    fn is_dependency_applied(
        &self,
        awaited_step: Option<StepDependency>,
        range: &Range<usize>,
        segment: &Range<usize>,
    ) -> bool {
        let Some(StepDependency(step)) = awaited_step else { return true };
        let progress = self.receive_progress[step];
        let has_same_range = self.steps[step].receive.as_ref().is_some_and(|receive| receive.range == *range);
        progress.is_complete
            || (has_same_range && !segment.is_empty() && progress.elements >= segment.end - range.start)
    }
}

/// Returns the credit in bytes that a segment of `bytes` bytes uses: the bytes, and the overhead of storing the segment.
pub(super) const fn credit_cost(bytes: usize) -> usize {
    bytes + 128
}

/// Returns the progress of a peer. `peers` is sorted by rank.
fn find_peer(peers: &mut [(Rank, PeerProgress)], peer: Rank) -> Option<&mut PeerProgress> {
    let index = peers.binary_search_by_key(&peer, |entry| entry.0).ok()?;
    Some(&mut peers[index].1)
}
