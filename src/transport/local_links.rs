//! Links to the ranks of this host, whose bytes go through queues in shared memory.
//!
//! Every link begins on its socket. Each direction changes over to a queue on its own, even in the middle of a frame: the first
//! entry of the queue says how many bytes of the link the sender has sent over the socket. Afterwards the socket carries only
//! bytes that wake the receiver ([`QueueSignals`]), which drops them, and its end. That is the end of the link, after all
//! entries of the queue have been read: the entries may contain the reason.

mod message;
mod messages;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

pub use self::message::{LocalMessage, NextFrame};
use super::{SocketTransport, TransferError, TransferResult};
use crate::shm::{
    HostMemoryLayout, NextEntry, QueueError, QueueReceiver, QueueSender, QueueSignals, SegmentMemory,
    exceeds_caches,
};
use crate::types::{Rank, RankMap, WorldSize};
use crate::wire::frame::HEADER_BYTES;
use crate::wire::{FrameHeader, FrameKind};

/// The most times that one call reads wake bytes from a socket. A peer sends at most a few of them.
const WAKE_READS_MAX: usize = 256;

/// Links over sockets. The links to other ranks of this host can change over to queues in shared memory.
pub struct LinkTransport<S, M> {
    pub(crate) sockets: S,
    /// For each rank: the bytes of its link that have gone over the socket.
    socket_bytes: Vec<SocketBytes>,
    local: Option<LocalLinks<M>>,
}

/// The numbers of bytes of a link that have gone over its socket, without wake bytes.
#[derive(Clone, Copy, Default)]
struct SocketBytes {
    sent: u64,
    received: u64,
}

struct LocalLinks<M> {
    links: RankMap<LocalLink<M>>,
    signals: Arc<QueueSignals<M>>,
    /// Whether wake bytes have been read since the last [`LinkTransport::take_wake_bytes`].
    has_wake_bytes: bool,
}

struct LocalLink<M> {
    /// The number of the peer in [`QueueSignals`].
    index: usize,
    sender: QueueSender<M>,
    receiver: QueueReceiver<M>,
    /// Whether this rank sends through the queue.
    is_sending: bool,
    receiving: Receiving,
    /// The number of bytes of the link that the peer has sent over the socket; `None` until the peer changes over.
    socket_total: Option<u64>,
    /// The value of [`QueueSender::read_count`] when the queue to the peer was found full.
    full_at: Option<u64>,
    socket_end: Option<String>,
    /// What is wrong with the words of the peer, if this rank noticed it while sending.
    problem: Option<QueueError>,
    is_closed: bool,
    /// The header of a message that is being read as a frame, or of another frame whose header has already been read.
    header: [u8; HEADER_BYTES],
    /// How many of the last bytes of `header` have not been read.
    header_left: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Receiving {
    Socket,
    Queue,
    /// The peer has written wrong words. Only the end of the socket matters.
    Nothing,
}

/// The socket of a link, and the signals of this rank.
struct LinkContext<'a, S, M> {
    peer: Rank,
    sockets: &'a mut S,
    socket_bytes: &'a mut SocketBytes,
    signals: &'a QueueSignals<M>,
    has_wake_bytes: &'a mut bool,
}

impl<S: SocketTransport, M: SegmentMemory> LinkTransport<S, M> {
    pub fn new(sockets: S, world: WorldSize) -> Self {
        Self { sockets, socket_bytes: vec![SocketBytes::default(); world.as_usize()], local: None }
    }

    /// Returns what a thread that waits must look at in addition to the sockets; `None` without queues.
    pub fn signals(&self) -> Option<Arc<QueueSignals<M>>> {
        self.local.as_ref().map(|local| Arc::clone(&local.signals))
    }

    /// Adds the queues in `memory` to the links to the other ranks of this host. From now on, this rank receives through a queue
    /// if the peer sends through it. `ranks` are the ranks of the host, of which this rank is number `own`.
    pub fn add_queues(&mut self, memory: &Arc<M>, layout: HostMemoryLayout, ranks: &[Rank], own: usize) {
        let peers = ranks.iter().enumerate().filter(|&(number, _)| number != own);
        let mut links = RankMap::default();
        for (index, (number, &rank)) in peers.enumerate() {
            let sender = QueueSender::new(Arc::clone(memory), layout, own, number);
            let receiver = QueueReceiver::new(Arc::clone(memory), layout, number, own);
            links.insert(rank, LocalLink::new(index, sender, receiver));
        }
        let signals = Arc::new(QueueSignals::new(Arc::clone(memory), layout, own));
        self.local = Some(LocalLinks { links, signals, has_wake_bytes: false });
    }

    /// Removes the queues again. No rank of this host may have changed over.
    pub fn remove_queues(&mut self) {
        self.local = None;
    }

    /// Sends through the queues from now on. All ranks of this host must have added their queues. Returns the number of each of
    /// these ranks in the signals.
    pub fn change_over(&mut self) -> RankMap<usize> {
        let mut numbers = RankMap::default();
        for rank in (0..self.socket_bytes.len() as u32).map(Rank::new) {
            if let Some((link, mut context)) = self.local_link(rank) {
                link.begin_sending(&mut context);
                numbers.insert(rank, link.index);
            }
        }
        numbers
    }

    /// Returns whether wake bytes have been read since the last call. If another thread than the reader sleeps, the reader must
    /// wake it: the sleep flag is cleared, and the system reports no event for bytes that have been read.
    pub fn take_wake_bytes(&mut self) -> bool {
        self.local.as_mut().is_some_and(|local| std::mem::take(&mut local.has_wake_bytes))
    }

    /// Returns the link to a rank of this host and its context; `None` for a link that has no queues.
    fn local_link(&mut self, peer: Rank) -> Option<(&mut LocalLink<M>, LinkContext<'_, S, M>)> {
        let LocalLinks { links, signals, has_wake_bytes } = self.local.as_mut()?;
        let (link, socket_bytes) = (links.get_mut(peer)?, self.socket_bytes.get_mut(peer.index())?);
        Some((link, LinkContext { peer, sockets: &mut self.sockets, socket_bytes, signals, has_wake_bytes }))
    }

    pub fn send(&mut self, peer: Rank, parts: &[IoSlice<'_>]) -> TransferResult {
        if let Some((link, mut context)) = self.local_link(peer)
            && link.is_sending
        {
            return link.send(&mut context, parts);
        }
        let sent = self.sockets.send(peer, parts);
        if let Some(socket_bytes) = self.socket_bytes.get_mut(peer.index()) {
            socket_bytes.sent += *sent.as_ref().unwrap_or(&0) as u64;
        }
        sent
    }

    /// Copies the bytes that have arrived into `parts`, and fills each part before the next one. The parts belong to a buffer of
    /// `length` bytes: bytes of a queue go past the caches into a long buffer ([`copy_to_buffer`](crate::shm::copy_to_buffer)).
    pub fn receive(&mut self, peer: Rank, parts: &mut [IoSliceMut<'_>], length: usize) -> TransferResult {
        if let Some((link, mut context)) = self.local_link(peer) {
            link.receiver.is_target_long = exceeds_caches(2 * length);
            return link.receive(&mut context, parts);
        }
        let received = self.sockets.receive(peer, parts);
        if let Some(socket_bytes) = self.socket_bytes.get_mut(peer.index()) {
            socket_bytes.received += *received.as_ref().unwrap_or(&0) as u64;
        }
        received
    }

    pub fn close_sending(&mut self, peer: Rank) {
        if let Some((link, context)) = self.local_link(peer) {
            link.is_closed = true;
            link.full_at = None;
            context.signals.stop_waiting_for_space(link.index);
        }
        self.sockets.close_sending(peer);
    }
}

impl<M: SegmentMemory> LocalLink<M> {
    fn new(index: usize, sender: QueueSender<M>, receiver: QueueReceiver<M>) -> Self {
        Self {
            index,
            sender,
            receiver,
            is_sending: false,
            receiving: Receiving::Socket,
            socket_total: None,
            full_at: None,
            socket_end: None,
            problem: None,
            is_closed: false,
            header: [0; HEADER_BYTES],
            header_left: 0,
        }
    }

    fn begin_sending<S: SocketTransport>(&mut self, context: &mut LinkContext<'_, S, M>) {
        if !self.is_sending {
            self.is_sending = true;
            self.sender.begin(context.socket_bytes.sent);
            self.wake_receiver(context);
        }
    }

    #[inline]
    fn wake_receiver<S: SocketTransport>(&self, context: &mut LinkContext<'_, S, M>) {
        if context.signals.must_wake_receiver(self.index) {
            context.sockets.wake(context.peer);
        }
    }

    /// Sends as many bytes of `parts` through the queue as there is space for.
    fn send<S: SocketTransport>(
        &mut self,
        context: &mut LinkContext<'_, S, M>,
        parts: &[IoSlice<'_>],
    ) -> TransferResult {
        let wanted: usize = parts.iter().map(|part| part.len()).sum();
        let mut sent = 0;
        while sent < wanted {
            match self.sender.write(parts, sent) {
                Ok(0) if sent > 0 || self.full_at == Some(self.sender.read_count()) => break,
                // Look again after the signal: the peer may have read an entry before it could see the signal.
                Ok(0) => {
                    self.full_at = Some(self.sender.read_count());
                    context.signals.wait_for_space(self.index, self.sender.read_count());
                }
                Ok(count) => {
                    sent += count;
                    if self.full_at.take().is_some() {
                        context.signals.stop_waiting_for_space(self.index);
                    }
                    self.wake_receiver(context);
                }
                Err(error) => {
                    self.problem = Some(error);
                    return Err(TransferError::Corrupt(error.to_string()));
                }
            }
        }
        Ok(sent)
    }

    /// Receives bytes from the queue or, before the peer has changed over, from the socket.
    fn receive<S: SocketTransport>(
        &mut self,
        context: &mut LinkContext<'_, S, M>,
        parts: &mut [IoSliceMut<'_>],
    ) -> TransferResult {
        if let Some(error) = self.problem.take() {
            return self.refuse(context, error.to_string());
        }
        for _ in 0..WAKE_READS_MAX {
            match self.receive_from_queue(context, parts) {
                Ok(0) => {}
                Ok(count) => return Ok(count),
                Err(why) => return self.refuse(context, why),
            }
            // Entries that the peer wrote before its socket ended were there when this rank read the queue.
            if let Some(why) = self.socket_end.clone() {
                self.stop_waiting(context);
                return Err(TransferError::Lost(why));
            }
            if let Some(result) = self.receive_from_socket(context, parts) {
                return result;
            }
        }
        self.refuse(context, "it sent data over the connection instead of through shared memory".into())
    }

    /// Receives bytes from the queue, as many as are there. Changes over if all bytes of the socket have been received.
    fn receive_from_queue<S: SocketTransport>(
        &mut self,
        context: &mut LinkContext<'_, S, M>,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<usize, String> {
        let describe = |error: QueueError| error.to_string();
        if self.receiving == Receiving::Socket {
            self.look_for_change_over(context).map_err(describe)?;
            match self.socket_total.map(|total| total.cmp(&context.socket_bytes.received)) {
                Some(Ordering::Less) => return Err("it claims to have sent fewer bytes than it did".into()),
                Some(Ordering::Equal) => {
                    self.receiving = Receiving::Queue;
                    context.signals.resume_reading(self.index, self.receiver.next_entry());
                    // The peer has changed over, so it knows that this rank has its queues, and it may sleep until this rank
                    // wakes it. Wake bytes are allowed only after this rank has changed over, too.
                    self.begin_sending(context);
                }
                Some(Ordering::Greater) | None => return Ok(0),
            }
        }
        if self.receiving == Receiving::Nothing {
            return Ok(0);
        }
        let wanted: usize = parts.iter().map(|part| part.len()).sum();
        let mut received = 0;
        while received < wanted {
            let next_entry = self.receiver.next_entry();
            if self.header_left == 0 {
                self.begin_frame().map_err(describe)?;
            }
            let count = match self.header_left {
                0 => self.receiver.read(parts, received).map_err(describe)?,
                _ => self.take_header(parts, received),
            };
            if self.receiver.next_entry() != next_entry {
                self.report_freed_space(context);
            }
            if count == 0 {
                break;
            }
            received += count;
        }
        Ok(received)
    }

    /// If the next entry is a message, begins to read it as a frame.
    fn begin_frame(&mut self) -> Result<(), QueueError> {
        let NextEntry::Message(entry) = self.receiver.peek()? else { return Ok(()) };
        let message = LocalMessage::from_entry(&entry)?;
        self.receiver.begin_message(&entry);
        self.header = message.header().encode();
        self.header_left = self.header.len();
        Ok(())
    }

    /// Copies the unread bytes of `header` into `parts`, after their first `skip` bytes. Returns the number of bytes.
    fn take_header(&mut self, parts: &mut [IoSliceMut<'_>], mut skip: usize) -> usize {
        let left = self.header_left;
        for part in parts {
            let first = skip.min(part.len());
            skip -= first;
            let unread = &self.header[HEADER_BYTES - self.header_left..];
            let count = unread.len().min(part.len() - first);
            part[first..first + count].copy_from_slice(&unread[..count]);
            self.header_left -= count;
        }
        left - self.header_left
    }

    /// Reads the header of the next frame. If it is no credit frame, [`LinkTransport::receive`] returns it later. Call that
    /// before this rank sleeps, because the signals no longer tell of this header.
    #[cold]
    fn take_credit<S: SocketTransport>(&mut self, context: &mut LinkContext<'_, S, M>) -> NextFrame {
        let mut header = [0; HEADER_BYTES];
        self.receiver.is_target_long = false;
        // An error is found again when the link is received as bytes.
        let count = self.receiver.read(&mut [IoSliceMut::new(&mut header)], 0).unwrap_or(0);
        self.report_freed_space(context);
        if count == HEADER_BYTES
            && let Ok(FrameHeader { kind: FrameKind::Credit, offset, .. }) = FrameHeader::decode(&header)
        {
            return NextFrame::Credit(offset);
        }
        self.header[HEADER_BYTES - count..].copy_from_slice(&header[..count]);
        self.header_left = count;
        NextFrame::Other
    }

    /// Tells the peer, if it waits for that, that an entry has been read.
    #[inline]
    fn report_freed_space<S: SocketTransport>(&self, context: &mut LinkContext<'_, S, M>) {
        context.signals.set_next_entry(self.index, self.receiver.next_entry());
        // After this rank has closed its sending direction, it cannot wake the peer. So it must not clear the peer's sleep
        // flag, because then no other rank would wake the peer.
        if !self.is_closed && context.signals.must_wake_sender(self.index) {
            context.sockets.wake(context.peer);
        }
    }

    /// Reads the first entry of the queue, if the peer has changed over.
    fn look_for_change_over<S>(&mut self, context: &LinkContext<'_, S, M>) -> Result<(), QueueError> {
        if self.socket_total.is_none() {
            self.socket_total = self.receiver.read_begin()?;
            if self.socket_total.is_some() {
                // Entries are read after the last bytes of the socket, so a thread has to wait for the socket.
                context.signals.stop_reading(self.index);
            }
        }
        Ok(())
    }

    /// Reads the socket once. After wake bytes, and after its end, returns `None`: then look at the queue again.
    fn receive_from_socket<S: SocketTransport>(
        &mut self,
        context: &mut LinkContext<'_, S, M>,
        parts: &mut [IoSliceMut<'_>],
    ) -> Option<TransferResult> {
        let mut wake_bytes = [0; 64];
        let is_link = self.receiving == Receiving::Socket;
        let received = if is_link {
            context.sockets.receive(context.peer, parts)
        } else {
            context.sockets.receive(context.peer, &mut [IoSliceMut::new(&mut wake_bytes)])
        };
        match received {
            Ok(1..) if !is_link => {
                *context.has_wake_bytes = true;
                None
            }
            Ok(count @ 1..) => match self.count_link_bytes(context, count) {
                Ok(0) => None,
                Ok(count) => Some(Ok(count)),
                Err(error) => Some(self.refuse(context, error.to_string())),
            },
            Err(TransferError::Lost(why)) => {
                self.socket_end = Some(why);
                None
            }
            result => Some(result),
        }
    }

    /// Counts bytes that were read from the socket. Returns how many of them are bytes of the link: a peer that has changed over
    /// may have sent wake bytes after them. The peer wrote the first entry before it sent a wake byte.
    fn count_link_bytes<S>(
        &mut self,
        context: &mut LinkContext<'_, S, M>,
        count: usize,
    ) -> Result<usize, QueueError> {
        let before = context.socket_bytes.received;
        self.look_for_change_over(context)?;
        let left = self.socket_total.map_or(u64::MAX, |total| total.saturating_sub(before));
        *context.has_wake_bytes |= left < count as u64;
        let count = left.min(count as u64);
        context.socket_bytes.received = before + count;
        Ok(count as usize)
    }

    /// Reads and writes the queues no more, because the peer has written wrong words.
    fn refuse<S>(&mut self, context: &LinkContext<'_, S, M>, why: String) -> TransferResult {
        self.receiving = Receiving::Nothing;
        self.stop_waiting(context);
        Err(TransferError::Corrupt(why))
    }

    /// Records that this rank waits no more for entries or space: a link that is not read must not keep it awake.
    fn stop_waiting<S>(&mut self, context: &LinkContext<'_, S, M>) {
        self.full_at = None;
        context.signals.stop_reading(self.index);
        context.signals.stop_waiting_for_space(self.index);
    }
}
