//! How a rank ends its links: after a failure, and when it leaves the job.

use std::io::IoSliceMut;
use std::mem;

use super::{DISCARD_BYTES, LinkDriver};
use crate::runtime::link_io::{ActiveOperations, FramePayload, IncomingFrame, LinkIo, PayloadTarget};
use crate::shm::SegmentMemory;
use crate::transport::{SocketTransport, TransferError};
use crate::types::Rank;

impl<S: SocketTransport, M: SegmentMemory> LinkDriver<S, M> {
    /// Sends the failure to the peers and reads their reports. Returns whether all peers have it and agree on the cause.
    pub fn notify_peers(&mut self) -> bool {
        self.add_incoming_links();
        let mut all_notified = true;
        for peer in self.peers.clone() {
            while self.receive(peer) {}
            while self.send(peer) {}
            let is_notified = |link: &LinkIo| link.is_lost || link.outgoing.is_none();
            all_notified &=
                !self.transport.sockets.is_open(peer) || self.links.get(peer).is_none_or(is_notified);
        }
        all_notified && self.engine.do_peers_agree()
    }

    /// Releases all buffers after a failure. Segments that are partly sent are not completed.
    pub fn release(&mut self) {
        let meter = mem::take(&mut self.operations.meter);
        self.operations = ActiveOperations { meter, ..ActiveOperations::default() };
        for link in self.links.values_mut() {
            // If nothing of a segment has been sent, for example because the link has not opened, the peer still gets the cause.
            link.outgoing
                .take_if(|frame| frame.sent == 0 && matches!(frame.payload, FramePayload::Segment(..)));
            if let IncomingFrame::Payload { target: target @ PayloadTarget::Segment { .. }, .. } =
                &mut link.incoming
            {
                *target = PayloadTarget::Discarded;
            }
        }
    }

    /// Disconnects from the peers: sends each peer the failure or a goodbye, and closes our side of every link. Also reads every
    /// link to its end, because a TCP reset could destroy the last frames. Call this method again until it returns true.
    pub fn disconnect(&mut self) -> bool {
        self.add_incoming_links();
        self.engine.close();
        let mut all_closed = true;
        for peer in self.peers.clone() {
            while self.send(peer) {}
            self.close_and_drain(peer);
            let is_lost = self.links.get(peer).is_none_or(|link| link.is_lost);
            all_closed &= is_lost || !self.transport.sockets.is_open(peer);
        }
        all_closed
    }

    /// Closes our side of a link if no frame is partly sent. Then discards all bytes that have arrived from the peer.
    fn close_and_drain(&mut self, peer: Rank) {
        let Some(link) = self.links.get_mut(peer) else { return };
        if link.is_lost {
            return;
        }
        if link.outgoing.is_none() && !link.is_closed_for_sending {
            link.is_closed_for_sending = true;
            self.transport.close_sending(peer);
        }
        let mut discarded = [0; DISCARD_BYTES];
        loop {
            match self.transport.receive(peer, &mut [IoSliceMut::new(&mut discarded)], 0) {
                Ok(0) => return,
                Ok(_) | Err(TransferError::Corrupt(_)) => {}
                Err(TransferError::Lost(_)) => break,
            }
        }
        link.is_lost = true;
    }

    /// Tells the engine which hosts do not acknowledge the data of this rank.
    pub fn report_unacknowledged_links(&mut self) {
        for &peer in &self.peers {
            if self.transport.sockets.is_retransmission_unanswered(peer) {
                self.engine.report_unacknowledged(peer);
            }
        }
    }

    /// Returns the peers to which this rank has not sent everything, or whose machines have not acknowledged everything. A
    /// message to such a peer may be lost if this rank closes the link now.
    pub fn peers_with_undelivered_bytes(&self) -> Vec<Rank> {
        let has_undelivered_bytes = |peer: &&Rank| {
            self.links.get(**peer).is_some_and(|link| {
                !link.is_lost
                    && (link.outgoing.is_some() || self.transport.sockets.has_unacknowledged_bytes(**peer))
            })
        };
        self.peers.iter().filter(has_undelivered_bytes).copied().collect()
    }
}
