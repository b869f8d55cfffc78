//! Sends requests to another rank and waits for the replies.

use std::time::Duration;

use super::GossipError;
use super::coordinator::{Answer, FailureKind};
use super::message::{
    GossipReplyStatus, GossipRequestKind, HEADER_WORDS, Message, PartReply, PartRequest, TEXT_WORDS_MAX,
};
use super::service::GossipState;
use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink, PendingReply};
use crate::train::text_words::decode_text;

/// A waiting rank calls the program's interrupt function at this interval.
pub(super) const INTERRUPT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The content of a successful reply.
pub(super) struct ReplyData {
    pub(super) numbers: [u64; 4],
    pub(super) payload: Vec<u32>,
}

/// How the coordinator replied to the final parameters of this rank.
pub(super) enum FinalReply {
    /// The results of the run.
    Results(Vec<u32>),
    /// The run has failed.
    Failed(FailureKind, String),
    /// The coordinator was lost before it accepted this rank's final parameters.
    CoordinatorLost,
}

impl<T> Answer<T> {
    fn map<S>(self, convert: impl FnOnce(T) -> S) -> Answer<S> {
        match self {
            Self::Done(value) => Answer::Done(convert(value)),
            Self::Wait => Answer::Wait,
            Self::Failed(kind, message) => Answer::Failed(kind, message),
        }
    }
}

impl GossipState {
    /// Sends the encoded request `words` to another rank, and waits for its reply of at most `reply_words_max` words, or for
    /// an error text. Returns `None` if that rank is lost. A rank that does not answer before the deadline counts as lost.
    pub(super) fn send_request(
        &self,
        link: &PeerLink,
        words: Vec<u32>,
        reply_words_max: usize,
    ) -> Result<Option<Answer<ReplyData>>, GossipError> {
        let words_max = reply_words_max.max(HEADER_WORDS + TEXT_WORDS_MAX);
        let reply = match link.start_request(words, MessageChannel::Reply, words_max) {
            Ok(pending) => self.wait_for_reply(pending)?,
            Err(failure) => Err(failure),
        };
        let record_loss = |failure: LinkFailure| {
            self.record_lost_link(link, failure);
            Ok(None)
        };
        let words = match reply {
            Ok(words) => words,
            Err(failure) => return record_loss(failure),
        };
        let Some(message) = Message::decode(&words) else {
            return record_loss(LinkFailure::Lost("it sent a reply of an unexpected length".into()));
        };
        match GossipReplyStatus::decode(message.code) {
            Some(GossipReplyStatus::Done) => {
                let payload = message.payload.to_vec();
                Ok(Some(Answer::Done(ReplyData { numbers: message.numbers, payload })))
            }
            Some(GossipReplyStatus::Wait) => Ok(Some(Answer::Wait)),
            Some(GossipReplyStatus::Failed) => {
                let problem = decode_text(message.payload, message.numbers[1]);
                Ok(Some(Answer::Failed(FailureKind::from_number(message.numbers[0]), problem)))
            }
            None => record_loss(LinkFailure::Lost("it sent a reply of an unknown kind".into())),
        }
    }

    /// Waits for a reply, and calls the program's interrupt function during the wait.
    fn wait_for_reply(&self, pending: PendingReply) -> Result<Result<Vec<u32>, LinkFailure>, GossipError> {
        while self.interrupt.is_some() && !pending.ends_within(INTERRUPT_CHECK_INTERVAL) {
            self.check_interrupt()?;
        }
        Ok(pending.wait())
    }

    /// Calls the program's interrupt function. Returns an error if the function returns true: this rank must stop waiting.
    pub(super) fn check_interrupt(&self) -> Result<(), GossipError> {
        match self.interrupt {
            Some(is_interrupted) if is_interrupted() => Err(GossipError::Interrupted),
            _ => Ok(()),
        }
    }

    /// Requests a part of a batch from the coordinator. Returns `None` if the coordinator is lost.
    pub(super) fn request_part(
        &self,
        coordinator: &PeerLink,
        request: PartRequest,
    ) -> Result<Option<Answer<PartReply>>, GossipError> {
        let words = Message::new(GossipRequestKind::Part as u32, request.encode(), &[]).encode();
        let answer = self.send_request(coordinator, words, HEADER_WORDS)?;
        Ok(answer.map(|answer| answer.map(|reply| PartReply::decode(reply.numbers))))
    }

    /// Sends the parameters of this rank to the coordinator, and waits for the results of the run. The results have at
    /// most `result_words_max` words.
    pub(super) fn send_final_parameters(
        &self,
        link: &PeerLink,
        result_words_max: usize,
    ) -> Result<FinalReply, GossipError> {
        let coordinator = link.peer;
        let parameters = self.replica.parameter_words();
        let request = Message::new(GossipRequestKind::FinalParameters as u32, [0; 4], &parameters).encode();
        let (mut is_sent, mut is_delivered) = (false, false);
        while self.coordinator.coordinator_rank() == coordinator {
            let answer = if is_delivered {
                let request = Message::new(GossipRequestKind::Results as u32, [0; 4], &[]).encode();
                self.send_request(link, request, HEADER_WORDS + result_words_max)?
            } else {
                is_sent = true;
                self.send_request(link, request.clone(), HEADER_WORDS)?
            };
            match answer {
                Some(Answer::Done(reply)) if is_delivered => return Ok(FinalReply::Results(reply.payload)),
                Some(Answer::Done(_)) => is_delivered = true,
                // The coordinator has not accepted the parameters, or has no results yet.
                Some(Answer::Wait) => is_sent = is_delivered,
                Some(Answer::Failed(kind, problem)) => return Ok(FinalReply::Failed(kind, problem)),
                None => {}
            }
        }
        if is_sent {
            // The lost coordinator may have counted this rank's parameters. If a new coordinator counted them too, both
            // coordinators could have a quorum, and complete the run with two models.
            let failure = self.coordinator.link_failure(coordinator);
            let problem =
                failure.map_or_else(|| "it has ended".into(), |failure| failure.problem().to_owned());
            return Err(GossipError::CoordinatorLostAtEnd { coordinator, problem });
        }
        Ok(FinalReply::CoordinatorLost)
    }
}
