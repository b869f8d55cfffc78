//! An active operation: the progress of each transfer of its schedule. A transfer is all elements that one step sends or
//! receives. A long transfer is split into segments.

use std::ops::Range;

use super::interface::{OperationKey, OperationRequest, SendMode};
use crate::schedule::partition::segment;
use crate::schedule::{Action, Schedule, Step, StepDependency, StepTransfer};
use crate::types::Rank;

/// The most bytes of one operation that a rank may send to a peer before the peer's ready frame arrives.
pub const EAGER_BYTES: usize = 256 << 10;

pub(super) struct ExternalOperation {
    pub(super) key: OperationKey,
    pub(super) info: OperationRequest,
    pub(super) awaited: Vec<Rank>,
}

pub(super) struct RunningOperation {
    pub(super) key: OperationKey,
    pub(super) info: OperationRequest,
    steps: Vec<Step>,
    segment_elements: usize,
    /// The progress with each peer. The peers are sorted by rank, so that a binary search finds a peer.
    peers: Vec<(Rank, PeerProgress)>,
    unfinished_transfers: usize,
    /// The number of peers that need ready frames and to which this rank has not sent ready frames for all transfers.
    peers_without_ready: usize,
}

#[derive(Default)]
struct PeerProgress {
    sends: Transfers,
    /// The peer has sent ready frames for this number of sends, counted from the first one.
    ready_sends: usize,
    /// How many bytes were sent on credit, before the peer's ready frame arrived. At most [`EAGER_BYTES`].
    eager_bytes: usize,
    /// Whether this rank has announced the operation to the peer.
    announced: bool,
    receives: Transfers,
    /// This rank has sent ready frames for this number of receives, from the first one on; `None` if the peer needs none.
    ready_receives: Option<usize>,
}

/// The transfers in one direction between this rank and one peer.
#[derive(Default)]
struct Transfers {
    /// The steps with these transfers, in their order.
    steps: Vec<usize>,
    /// The index in `steps` of the first transfer that is not complete.
    next: usize,
    /// How many elements of this transfer have been sent, or received and applied.
    elements: usize,
    /// The bytes of all transfers together.
    bytes: usize,
}

impl PeerProgress {
    fn transfers(&mut self, is_sent: bool) -> &mut Transfers {
        if is_sent { &mut self.sends } else { &mut self.receives }
    }
}

impl Transfers {
    /// Returns the step of the first transfer that is not complete, if there is one.
    fn next_step(&self) -> Option<usize> {
        self.steps.get(self.next).copied()
    }

    fn is_complete(&self, step: usize) -> bool {
        self.next_step().is_none_or(|next| next > step)
    }

    /// Returns the next segment of the first transfer that is not complete, which has the elements `range`.
    fn next_segment(&self, range: &Range<usize>, segment_elements: usize) -> TransferSegment {
        TransferSegment {
            range: segment(range, self.elements, segment_elements),
            transfer_index: self.next as u32,
            offset: self.elements,
            transfer_elements: range.len(),
        }
    }

    /// Counts this segment. Returns whether its transfer is complete now.
    fn count_segment(&mut self, range: &Range<usize>, segment_elements: usize) -> bool {
        self.elements += segment(range, self.elements, segment_elements).len();
        let is_complete = self.elements == range.len();
        if is_complete {
            (self.next, self.elements) = (self.next + 1, 0);
        }
        is_complete
    }
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
        info: OperationRequest,
        (schedule, peers): (Schedule, &[Rank]),
        segment_elements: usize,
    ) -> Self {
        let mut peers: Vec<_> = peers.iter().map(|&peer| (peer, PeerProgress::default())).collect();
        let element_bytes = info.contract.dtype.size_bytes();
        let mut unfinished_transfers = 0;
        for (index, step) in schedule.steps.iter().enumerate() {
            for (transfer, is_sent) in [(&step.send, true), (&step.receive, false)] {
                if let Some(StepTransfer { peer, range, .. }) = transfer
                    && let Some(peer_progress) = find_peer(&mut peers, *peer)
                {
                    let transfers = peer_progress.transfers(is_sent);
                    transfers.steps.push(index);
                    transfers.bytes += range.len() * element_bytes;
                    unfinished_transfers += 1;
                }
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

    pub(super) fn receivers(&self) -> impl Iterator<Item = Rank> {
        self.peers_with(|progress| &progress.sends)
    }

    /// Returns the peers from which it still has to receive or, if there are none, those to which it still has to send.
    pub(super) fn awaited_peers(&self) -> impl Iterator<Item = Rank> {
        let is_receiving = self.peers_with(|progress| &progress.receives).next().is_some();
        self.peers_with(if is_receiving { |progress| &progress.receives } else { |progress| &progress.sends })
    }

    fn peers_with(&self, transfers: fn(&PeerProgress) -> &Transfers) -> impl Iterator<Item = Rank> {
        let has_next = move |(_, progress): &&(_, PeerProgress)| transfers(progress).next_step().is_some();
        self.peers.iter().filter(has_next).map(|&(peer, _)| peer)
    }

    /// Returns whether the operation still has to send to `peer`, or to receive more from it than the stored segments.
    pub(super) fn needs(&self, peer: Rank, stored_segments: usize) -> bool {
        self.sends_to(peer) || self.unapplied_segments(peer) > stored_segments
    }

    /// Returns the number of segments from `peer` that have not been applied.
    pub(super) fn unapplied_segments(&self, peer: Rank) -> usize {
        let Some(PeerProgress { receives, .. }) = self.peer_progress(peer) else { return 0 };
        let segments = |&step: &usize| {
            let length = self.steps[step].receive.as_ref().map_or(0, |receive| receive.range.len());
            length.div_ceil(self.segment_elements).max(1)
        };
        let all: usize = receives.steps[receives.next..].iter().map(segments).sum();
        all - receives.elements / self.segment_elements
    }

    pub(super) fn sends_to(&self, peer: Rank) -> bool {
        self.peer_progress(peer).is_some_and(|peer_progress| peer_progress.sends.next_step().is_some())
    }

    fn peer_progress(&self, peer: Rank) -> Option<&PeerProgress> {
        let index = self.peers.binary_search_by_key(&peer, |entry| entry.0).ok()?;
        Some(&self.peers[index].1)
    }

    /// Returns the segment to send to `peer` next, or why no segment may be sent now. `credit` is the number of bytes that may be
    /// sent on credit. The next call must come after [`RunningOperation::record_segment`].
    pub(super) fn take_next_send(&mut self, peer: Rank, credit: usize) -> NextSend {
        let element_bytes = self.info.contract.dtype.size_bytes();
        let Some(peer_progress) = self.peer_progress(peer) else { return NextSend::Nothing };
        let step = peer_progress.sends.next_step();
        let Some(send) = step.and_then(|step| self.steps[step].send.as_ref()) else {
            return NextSend::Nothing;
        };
        let segment = peer_progress.sends.next_segment(&send.range, self.segment_elements);
        if !self.is_dependency_applied(send, &segment.range) {
            return NextSend::Nothing;
        }
        let bytes = segment.range.len() * element_bytes;
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

    /// Records that the segment of the last [`RunningOperation::take_next_send`] has been sent, or if `is_sent` is false, that
    /// the segment that was due from `peer` has been applied.
    pub(super) fn record_segment(&mut self, peer: Rank, is_sent: bool) {
        let Some(peer_progress) = find_peer(&mut self.peers, peer) else { return };
        let transfers = peer_progress.transfers(is_sent);
        let Some(step) = transfers.next_step() else { return };
        let Step { send, receive, .. } = &self.steps[step];
        let Some(transfer) = (if is_sent { send } else { receive }) else { return };
        let is_complete = transfers.count_segment(&transfer.range, self.segment_elements);
        self.unfinished_transfers -= usize::from(is_complete);
    }

    /// Returns the segment that has to arrive from `peer` next; `None` if the operation receives nothing more from the peer.
    pub(super) fn due_segment(&self, peer: Rank) -> Option<DueSegment> {
        let peer_progress = self.peer_progress(peer)?;
        let step = peer_progress.receives.next_step()?;
        let receive = self.steps[step].receive.as_ref()?;
        let segment = peer_progress.receives.next_segment(&receive.range, self.segment_elements);
        let is_destination_free = self.is_destination_free(step, segment.offset + segment.range.len());
        let is_ready = is_destination_free && self.is_dependency_applied(receive, &segment.range);
        Some(DueSegment { segment, action: self.steps[step].action, is_ready, is_destination_free })
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
                let receive = self.steps[step].receive.as_ref();
                receive.is_none_or(|receive| self.is_dependency_applied(receive, &(0..0)))
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
        send.and_then(|send| self.peer_progress(send.peer)).is_none_or(|PeerProgress { sends, .. }| {
            sends.is_complete(step) || (sends.next_step() == Some(step) && sends.elements >= elements)
        })
    }

    /// Returns whether the data on which a segment depends have been applied. An empty segment depends on the whole awaited step.
    fn is_dependency_applied(&self, transfer: &StepTransfer, segment: &Range<usize>) -> bool {
        let Some(StepDependency(step)) = transfer.awaited_step else { return true };
        let Some(awaited) = &self.steps[step].receive else { return false };
        let Some(PeerProgress { receives, .. }) = self.peer_progress(awaited.peer) else { return false };
        let is_cut_through = !segment.is_empty() && awaited.range == transfer.range;
        let has_received = |elements| receives.next_step() == Some(step) && receives.elements >= elements;
        receives.is_complete(step) || (is_cut_through && has_received(segment.end - transfer.range.start))
    }
}

/// Returns the credit in bytes that a segment of `bytes` bytes uses: the bytes, and the overhead of storing the segment.
pub(super) const fn credit_cost(bytes: usize) -> usize {
    bytes + 128
}

fn find_peer(peers: &mut [(Rank, PeerProgress)], peer: Rank) -> Option<&mut PeerProgress> {
    let index = peers.binary_search_by_key(&peer, |entry| entry.0).ok()?;
    Some(&mut peers[index].1)
}
