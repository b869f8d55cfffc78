//! Answers the requests of another rank, in a thread for each connection.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::coordinator::{Answer, FailureKind, PartCoordinator, PeerConnectionEnd};
use super::message::{
    GossipReplyStatus, GossipRequestKind, HEADER_WORDS, Message, PartReply, PartRequest, TEXT_WORDS_MAX,
};
use super::replica::SharedReplica;
use crate::group::Interrupt;
use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink};
use crate::train::text_words::{decode_text, encode_text};
use crate::types::Rank;

/// The largest number of 32-bit words in a rank's list of the parts that it has done. Parts that do not fit into the
/// list are computed again.
pub(super) const DONE_PARTS_WORDS_MAX: usize = 1 << 26;

/// The state that the training loop and the connection threads of this rank share.
pub(super) struct GossipState {
    pub(super) replica: SharedReplica,
    pub(super) coordinator: PartCoordinator,
    pub(super) done_parts: DoneParts,
    /// The program's interrupt function. Only the thread of the training loop calls it.
    pub(super) interrupt: Option<Interrupt>,
}

/// The parts of batches that this rank has done. If the coordinator is lost, the next coordinator asks all ranks for these
/// parts.
#[derive(Default)]
pub(super) struct DoneParts(Mutex<DonePartsState>);

#[derive(Default)]
struct DonePartsState {
    /// All parts below this number are done, by this rank or by others.
    done_before: u64,
    /// The parts that this rank has done and that are not below `done_before`.
    own: BTreeSet<u64>,
}

impl DoneParts {
    fn lock(&self) -> MutexGuard<'_, DonePartsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a part that this rank has done.
    pub(super) fn add(&self, part: u64) {
        self.lock().own.insert(part);
    }

    /// Records that all parts below `done_before` are done. Deletes these parts from the list of this rank.
    pub(super) fn forget_before(&self, done_before: u64) {
        let mut state = self.lock();
        state.done_before = state.done_before.max(done_before);
        state.own = state.own.split_off(&done_before);
    }

    /// Returns the number below which all parts are done, and the other parts that this rank has done.
    pub(super) fn snapshot(&self) -> (u64, BTreeSet<u64>) {
        let state = self.lock();
        (state.done_before, state.own.clone())
    }
}

impl GossipState {
    /// Records that a connection has failed, and aborts the connection.
    pub(super) fn record_lost_link(&self, link: &PeerLink, failure: LinkFailure) {
        let message =
            format!("rank {} lost rank {}: {}", self.coordinator.own_rank(), link.peer, failure.problem());
        // Record the failure before the abort. After the abort, the thread of this connection records a second failure,
        // but only the first one counts.
        self.record_connection_end(link, PeerConnectionEnd::Failed(failure));
        link.abort(&message);
    }

    /// Answers the requests of another rank until the connection ends.
    pub(super) fn serve(&self, link: &PeerLink) {
        let end = self.serve_until_end(link);
        self.record_connection_end(link, end);
    }

    /// Records how a connection ended. Adds the host of the peer to the description of a failure.
    fn record_connection_end(&self, link: &PeerLink, end: PeerConnectionEnd) {
        let end = match end {
            PeerConnectionEnd::Failed(failure) => PeerConnectionEnd::Failed(failure.on_host(&link.host)),
            PeerConnectionEnd::Closed => PeerConnectionEnd::Closed,
        };
        self.coordinator.record_connection_end(link.peer, end);
    }

    fn serve_until_end(&self, link: &PeerLink) -> PeerConnectionEnd {
        let parameter_count = self.replica.with_parameters(|parameters| parameters.len());
        let words_max = HEADER_WORDS + parameter_count.max(TEXT_WORDS_MAX);
        loop {
            let words = match link.receive_request(words_max) {
                Ok(words) => words,
                Err(failure) => return PeerConnectionEnd::Failed(failure),
            };
            let request = Message::decode(&words);
            let Some((request, kind)) =
                request.and_then(|request| Some((request, GossipRequestKind::decode(request.code)?)))
            else {
                let problem = "it sent an unknown request";
                link.abort(problem);
                return PeerConnectionEnd::Failed(LinkFailure::Lost(problem.into()));
            };
            let channel = if kind == GossipRequestKind::Average {
                MessageChannel::LateReply
            } else {
                MessageChannel::Reply
            };
            let sent = link.send(&self.answer(link.peer, kind, &request), channel);
            match (kind, sent) {
                (GossipRequestKind::Close, _) => return PeerConnectionEnd::Closed,
                (_, Err(failure)) => return PeerConnectionEnd::Failed(failure),
                (_, Ok(())) => {}
            }
        }
    }

    /// Returns the reply to a request of a rank.
    fn answer(&self, rank: Rank, kind: GossipRequestKind, request: &Message<'_>) -> Vec<u32> {
        match kind {
            GossipRequestKind::Average => {
                match self.replica.average_with(bytemuck::cast_slice(request.payload)) {
                    Some(differences) => encode_done_reply([0; 4], bytemuck::cast_slice(&differences)),
                    None => encode_reply(GossipReplyStatus::Wait, [0; 4], &[]),
                }
            }
            GossipRequestKind::Part => {
                let answer = self.coordinator.answer_part_request(rank, PartRequest::decode(request.numbers));
                encode_answer(answer, |reply: PartReply| encode_done_reply(reply.encode(), &[]))
            }
            GossipRequestKind::DoneParts => {
                let (done_before, own) = self.done_parts.snapshot();
                let numbers = [done_before, u64::from(self.coordinator.coordinator_rank().get()), 0, 0];
                let parts = own.iter().take(DONE_PARTS_WORDS_MAX / 2);
                let words: Vec<u32> = parts.flat_map(|&part| [part as u32, (part >> 32) as u32]).collect();
                encode_done_reply(numbers, &words)
            }
            GossipRequestKind::FinalParameters => {
                let answer =
                    self.coordinator.add_final_parameters(rank, bytemuck::cast_slice(request.payload));
                encode_answer(answer, |()| encode_done_reply([0; 4], &[]))
            }
            GossipRequestKind::Results => {
                encode_answer(self.coordinator.wait_for_results(), |words: Vec<u32>| {
                    encode_done_reply([0; 4], &words)
                })
            }
            GossipRequestKind::Diverged => {
                let message = decode_text(request.payload, request.numbers[0]);
                self.coordinator.fail(FailureKind::Diverged, &message);
                encode_done_reply([0; 4], &[])
            }
            GossipRequestKind::Close => encode_done_reply([0; 4], &[]),
        }
    }
}

fn encode_reply(status: GossipReplyStatus, numbers: [u64; 4], payload: &[u32]) -> Vec<u32> {
    Message::new(status as u32, numbers, payload).encode()
}

fn encode_done_reply(numbers: [u64; 4], payload: &[u32]) -> Vec<u32> {
    encode_reply(GossipReplyStatus::Done, numbers, payload)
}

fn encode_answer<T>(answer: Answer<T>, encode_done: impl FnOnce(T) -> Vec<u32>) -> Vec<u32> {
    match answer {
        Answer::Done(value) => encode_done(value),
        Answer::Wait => encode_reply(GossipReplyStatus::Wait, [0; 4], &[]),
        Answer::Failed(kind, message) => encode_reply(
            GossipReplyStatus::Failed,
            [kind.to_number(), message.len() as u64, 0, 0],
            &encode_text(&message, TEXT_WORDS_MAX),
        ),
    }
}
