//! The sans-IO state machine of one rank: inputs in, outputs out.
//!
//! It walks one operation's [schedule](crate::schedule) at a time, decides what each peer may be sent next, judges every
//! frame that arrives, knows the deadline, and turns whatever goes wrong into one root cause that all ranks come to share.
//! It never reads a clock, opens a socket, starts a thread or touches a byte of data: time is an argument, and data are
//! ranges of elements that its driver maps to memory.
//!
//! The driver's duties: offer every frame header in the order of its link ([`Engine::frame`]); say when a segment has
//! been applied ([`Engine::applied`]); ask what to send ([`Engine::poll_transmit`]) after every input, and send it whole;
//! report lost links and the passing of [`Engine::poll_timeout`].

mod operation;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

use self::operation::{Due, Running};
use crate::schedule::{Action, Schedule};
use crate::types::{Contract, Rank, WorldSize};
use crate::wire::{Cause, Header, Kind};

/// How many past operations an engine remembers, to tell a rank that it asked for something else.
const HISTORY_MAX: usize = 64;

/// A moment, as the time since an epoch of the driver's choice.
pub type Timestamp = Duration;

/// What an engine has to know from the start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whose engine this is.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: WorldSize,
    /// The group within the job.
    pub group: u32,
    /// Bytes of a whole segment; the same on all ranks.
    pub segment_bytes: usize,
    /// Whether every segment carries a CRC32C; the same on all ranks.
    pub checks_payloads: bool,
    /// How to name each rank's host in an error, in rank order.
    pub hosts: Vec<String>,
}

/// Something to send, whole and before anything else to that peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Transmit {
    /// A segment: the header, then the elements of the operation's buffer. Its checksum is the driver's to fill in.
    Segment {
        /// The frame's header.
        header: Header,
        /// The elements.
        range: Range<usize>,
    },
    /// A control frame: the header, then these bytes.
    Control {
        /// The frame's header.
        header: Header,
        /// The payload.
        payload: Bytes,
    },
}

/// What to do with a frame whose header has arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Receive the payload for these elements, apply it, and say so with [`Engine::applied`].
    Apply {
        /// The elements.
        range: Range<usize>,
        /// What to do with them.
        action: Action,
    },
    /// Nothing yet: offer the same header again after the next input or the next operation's begin.
    Hold,
    /// Receive the payload and pass it to [`Engine::control`].
    Control,
    /// The engine has failed; read no more from this link.
    Refuse,
}

/// Why and by whom the job failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The root cause.
    pub cause: Cause,
    /// The rank that told us, if we did not see it ourselves.
    pub reported_by: Option<Rank>,
}

/// What the engine knows of a peer beside the running operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Peer {
    /// It said goodbye.
    left: bool,
    /// Its link is gone.
    lost: bool,
    /// It has been sent, or has itself sent, the root cause or the goodbye.
    notified: bool,
}

/// One rank's state machine.
pub struct Engine {
    settings: Settings,
    sequence: u64,
    running: Option<Running>,
    failure: Option<Failure>,
    closing: bool,
    peers: BTreeMap<Rank, Peer>,
    /// What was asked for in the last operations, oldest first.
    history: VecDeque<(u64, Contract)>,
}

impl Engine {
    /// An engine with nothing to do.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            sequence: 0,
            running: None,
            failure: None,
            closing: false,
            peers: BTreeMap::new(),
            history: VecDeque::new(),
        }
    }

    /// Begins the next operation; every rank has to begin the same one. Peers get `timeout` to do their part.
    ///
    /// # Errors
    ///
    /// The failure, if the job has failed before or a peer that is needed has already left.
    ///
    /// # Panics
    ///
    /// If the operation before is still running.
    pub fn begin(
        &mut self,
        now: Timestamp,
        contract: Contract,
        schedule: Schedule,
        timeout: Duration,
    ) -> Result<(), Failure> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        assert!(self.running.is_none(), "an operation is begun when the one before has ended");
        let segment_elements = (self.settings.segment_bytes / contract.dtype.size_bytes()).max(1);
        let running = Running::new(self.sequence, contract, schedule, segment_elements, now, timeout);
        self.sequence += 1;
        let gone = running.peers().find(|peer| self.peers.get(peer).is_some_and(|p| p.left));
        self.running = Some(running);
        if let Some(rank) = gone {
            return Err(self.fail(Cause::PeerLeft { rank, host: self.host(rank) }));
        }
        Ok(())
    }

    /// Whether the operation begun last has ended: all sent, all applied.
    pub fn is_idle(&self) -> bool {
        self.running.as_ref().is_none_or(Running::is_complete)
    }

    /// Takes note that the operation has ended, so that the next can begin. The driver calls it once
    /// [`Engine::is_idle`].
    pub fn finish(&mut self) {
        if let Some(running) = self.running.take_if(|running| running.is_complete()) {
            self.history.push_back((running.sequence, running.contract));
            if self.history.len() > HISTORY_MAX {
                self.history.pop_front();
            }
        }
    }

    /// Why the job failed, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// When [`Engine::handle_timeout`] is due next.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        if self.failure.is_some() {
            return None;
        }
        self.running.as_ref().filter(|running| !running.is_complete()).map(|running| running.deadline)
    }

    /// Ends the operation if its deadline has passed.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        let Some(running) = self.running.as_ref().filter(|r| !r.is_complete() && now >= r.deadline) else {
            return;
        };
        let waiting_for: Vec<String> =
            running.awaited().map(|rank| format!("rank {rank} on {}", self.host(rank))).collect();
        let cause = Cause::Timeout {
            rank: self.settings.rank,
            sequence: running.sequence,
            asked: running.contract,
            timeout_ms: running.timeout.as_millis() as u64,
            waiting_for: waiting_for.join(" and "),
        };
        self.fail(cause);
    }

    /// What to send to `peer` next, if anything may be sent. Once it has been given out, it has to be sent whole.
    pub fn poll_transmit(&mut self, peer: Rank) -> Option<Transmit> {
        if self.failure.is_some() || self.closing {
            return self.notification(peer);
        }
        let running = self.running.as_mut()?;
        let range = running.next_segment(peer)?;
        let payload_bytes = range.len() * running.contract.dtype.size_bytes();
        let header = Header {
            kind: Kind::Data,
            group: self.settings.group,
            sequence: running.sequence,
            contract: running.contract,
            offset: range.start as u64,
            payload_bytes: payload_bytes as u32,
            payload_crc: self.settings.checks_payloads.then_some(0),
        };
        Some(Transmit::Segment { header, range })
    }

    /// The segment that [`Engine::poll_transmit`] gave for `peer` has been sent whole.
    pub fn transmitted(&mut self, peer: Rank) {
        if let Some(running) = &mut self.running {
            running.transmitted(peer);
        }
    }

    /// Judges a frame from `peer` by its header.
    pub fn frame(&mut self, peer: Rank, header: &Header) -> Verdict {
        if self.failure.is_some() {
            return Verdict::Refuse;
        }
        if header.group != self.settings.group {
            return self.refuse(self.misbehaved(peer, format!("it sent a frame of group {}", header.group)));
        }
        match header.kind {
            Kind::Abort => Verdict::Control,
            Kind::Goodbye => {
                self.peer_left(peer);
                Verdict::Control
            }
            Kind::Data => self.segment(peer, header),
        }
    }

    fn segment(&mut self, peer: Rank, header: &Header) -> Verdict {
        let current = self.running.as_ref().map_or(self.sequence, |running| running.sequence);
        if header.sequence < current {
            return self.refuse(self.belated(peer, header));
        }
        let Some(running) = &self.running else { return Verdict::Hold };
        let due = running.due(peer);
        if header.sequence > running.sequence {
            if matches!(due, Due::Nothing) {
                return Verdict::Hold;
            }
            return self.refuse(Cause::OutOfOrder {
                rank: self.settings.rank,
                sequence: running.sequence,
                asked: running.contract,
                ahead: peer,
                ahead_sequence: header.sequence,
                ahead_asked: header.contract,
            });
        }
        if header.contract != running.contract {
            let cause =
                mismatch(running.sequence, (self.settings.rank, running.contract), (peer, header.contract));
            return self.refuse(cause);
        }
        let (range, action, is_ready) = match due {
            Due::Nothing => {
                let detail = format!("it sent more than its part of operation {}", running.sequence);
                return self.refuse(self.misbehaved(peer, detail));
            }
            Due::Segment { range, action, is_ready } => (range, action, is_ready),
        };
        let bytes = range.len() * running.contract.dtype.size_bytes();
        if header.offset != range.start as u64 || header.payload_bytes as usize != bytes {
            let detail = format!(
                "it sent {} bytes for element {} of operation {} where {bytes} bytes for element {} were due",
                header.payload_bytes, header.offset, running.sequence, range.start
            );
            return self.refuse(self.misbehaved(peer, detail));
        }
        if header.payload_crc.is_some() != self.settings.checks_payloads {
            let detail = "it does not agree whether payloads carry checksums".to_owned();
            return self.refuse(self.misbehaved(peer, detail));
        }
        if is_ready { Verdict::Apply { range, action } } else { Verdict::Hold }
    }

    /// A segment of an operation that is over here: a root, say, ends a broadcast without hearing from anybody, and learns
    /// only now that others meant another root.
    fn belated(&self, peer: Rank, header: &Header) -> Cause {
        let past = self.history.iter().find(|(sequence, _)| *sequence == header.sequence);
        match past {
            Some(&(sequence, contract)) if contract != header.contract => {
                mismatch(sequence, (self.settings.rank, contract), (peer, header.contract))
            }
            _ => self.misbehaved(peer, format!("it repeats operation {}, which is over", header.sequence)),
        }
    }

    /// The segment that [`Verdict::Apply`] asked for has been received and applied.
    pub fn applied(&mut self, peer: Rank) {
        if let Some(running) = &mut self.running {
            running.applied(peer);
        }
    }

    /// A control frame's payload has arrived.
    pub fn control(&mut self, peer: Rank, header: &Header, payload: &[u8]) {
        if header.kind != Kind::Abort || self.failure.is_some() {
            return;
        }
        self.peers.entry(peer).or_default().notified = true;
        if let Some(cause) = Cause::decode(payload) {
            self.failure = Some(Failure { cause, reported_by: Some(peer) });
        } else {
            let cause = self.misbehaved(peer, "it sent an abort that cannot be read".into());
            self.fail(cause);
        }
    }

    /// The link to `peer` is gone; `detail` is what the transport says about it.
    pub fn link_lost(&mut self, peer: Rank, detail: &str) {
        let host = self.host(peer);
        let state = self.peers.entry(peer).or_default();
        let already_lost = std::mem::replace(&mut state.lost, true);
        if state.left || already_lost || self.closing {
            return;
        }
        self.fail(Cause::PeerLost { rank: peer, host, detail: detail.to_owned() });
    }

    /// Bytes that came from `peer` are wrong: a corrupt header or payload.
    pub fn corrupt(&mut self, peer: Rank, detail: String) {
        let cause = self.misbehaved(peer, detail);
        self.fail(cause);
    }

    /// This rank gives up, and says why.
    pub fn abort(&mut self, message: &str) -> Failure {
        let rank = self.settings.rank;
        self.fail(Cause::Aborted { rank, host: self.host(rank), message: message.to_owned() })
    }

    /// This rank has no more to do: peers are told goodbye.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// The abort or goodbye that `peer` has not been told yet.
    fn notification(&mut self, peer: Rank) -> Option<Transmit> {
        let state = self.peers.entry(peer).or_default();
        if state.lost || std::mem::replace(&mut state.notified, true) {
            return None;
        }
        let (kind, payload) = match &self.failure {
            Some(failure) => (Kind::Abort, Bytes::from(failure.cause.encode())),
            None => (Kind::Goodbye, Bytes::new()),
        };
        let header = Header {
            kind,
            group: self.settings.group,
            sequence: self.sequence,
            contract: Contract::NONE,
            offset: 0,
            payload_bytes: payload.len() as u32,
            payload_crc: Some(crc32c::crc32c(&payload)),
        };
        Some(Transmit::Control { header, payload })
    }

    fn peer_left(&mut self, peer: Rank) {
        self.peers.entry(peer).or_default().left = true;
        if self.running.as_ref().is_some_and(|running| running.needs(peer)) {
            self.fail(Cause::PeerLeft { rank: peer, host: self.host(peer) });
        }
    }

    fn refuse(&mut self, cause: Cause) -> Verdict {
        self.fail(cause);
        Verdict::Refuse
    }

    /// The first failure is the one that counts.
    fn fail(&mut self, cause: Cause) -> Failure {
        self.failure.get_or_insert(Failure { cause, reported_by: None }).clone()
    }

    fn misbehaved(&self, rank: Rank, detail: String) -> Cause {
        Cause::Misbehaved { rank, host: self.host(rank), detail }
    }

    fn host(&self, rank: Rank) -> String {
        self.settings.hosts.get(rank.index()).cloned().unwrap_or_else(|| "an unknown host".into())
    }
}

/// The same words on whichever of the two ranks they are found.
fn mismatch(sequence: u64, one: (Rank, Contract), other: (Rank, Contract)) -> Cause {
    let (first, second) = if one.0 < other.0 { (one, other) } else { (other, one) };
    Cause::Mismatch {
        sequence,
        first: first.0,
        first_asked: first.1,
        second: second.0,
        second_asked: second.1,
    }
}
