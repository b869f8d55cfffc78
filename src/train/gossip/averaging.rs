//! Starts averages with random ranks, and applies their results when they arrive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::Rng as _;

use super::message::{GossipReplyStatus, GossipRequestKind, HEADER_WORDS, Message};
use super::service::GossipState;
use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink, PendingReply};
use crate::train::random::RandomStream;

/// A rank starts its next average only when its previous averages are complete, or when this time has passed since it
/// started the last average.
const NEXT_AVERAGE_WAIT_MAX: Duration = Duration::from_secs(1);

/// When its training ends, a rank waits at most this long for the replies to the averages that it has started.
const FINAL_AVERAGES_WAIT_MAX: Duration = Duration::from_secs(1);

/// The averages that this rank has started: at most one at a time with each other rank.
pub(super) struct AveragesInProgress {
    links: Arc<[PeerLink]>,
    shared: Arc<GossipState>,
    /// For each connection, the pending reply of the average in progress.
    pending: Vec<Option<PendingReply>>,
    /// When this rank started its last average.
    last_start: Instant,
    random: RandomStream,
    /// The number of averages whose results this rank has applied.
    pub(super) completed: u64,
    /// The number of due averages that this rank did not start, that the other rank refused, or whose results did not
    /// arrive.
    pub(super) skipped: u64,
}

impl AveragesInProgress {
    pub(super) fn new(links: Arc<[PeerLink]>, shared: Arc<GossipState>, random: RandomStream) -> Self {
        let pending = links.iter().map(|_| None).collect();
        Self { links, shared, pending, last_start: Instant::now(), random, completed: 0, skipped: 0 }
    }

    /// Starts an average with a random rank. Chooses among the ranks with which no average is in progress. Skips the
    /// average if there is no such rank, or if another average is in progress and started only a short time ago.
    pub(super) fn start_average(&mut self) {
        if !self.try_to_start_average() {
            self.skipped += 1;
        }
    }

    /// Returns whether this rank has started an average.
    fn try_to_start_average(&mut self) -> bool {
        // Each average moves this rank's parameters halfway to the parameters of another rank. Several averages at
        // once would move this rank's parameters too far.
        if self.pending.iter().any(Option::is_some) && self.last_start.elapsed() < NEXT_AVERAGE_WAIT_MAX {
            return false;
        }
        let is_free = |&index: &usize| {
            self.pending[index].is_none()
                && !self.shared.coordinator.has_connection_ended(self.links[index].peer)
        };
        let free: Vec<usize> = (0..self.links.len()).filter(is_free).collect();
        if free.is_empty() {
            return false;
        }
        // Scale a random 64-bit number to an index of `free`.
        let chosen = (u128::from(self.random.next_u64()) * free.len() as u128) >> 64;
        let index = free[chosen as usize];
        let parameters = self.shared.replica.parameter_words();
        let words_max = HEADER_WORDS + parameters.len();
        let request = Message::new(GossipRequestKind::Average as u32, [0; 4], &parameters).encode();
        match self.links[index].start_request(request, MessageChannel::LateReply, words_max) {
            Ok(reply) => {
                self.pending[index] = Some(reply);
                self.last_start = Instant::now();
                true
            }
            Err(problem) => {
                self.record_lost_peer(index, problem);
                false
            }
        }
    }

    /// Applies the results of averages that have arrived.
    pub(super) fn apply_arrived_replies(&mut self) {
        for index in 0..self.links.len() {
            if let Some(reply) = self.pending[index].take_if(|reply| reply.is_complete()) {
                self.apply_reply(index, reply.wait());
            }
        }
    }

    /// Waits until the results of all averages have arrived, at most for [`FINAL_AVERAGES_WAIT_MAX`], and applies these
    /// results.
    pub(super) fn wait_for_all_replies(&mut self) {
        let until = Instant::now() + FINAL_AVERAGES_WAIT_MAX;
        for index in 0..self.links.len() {
            let Some(reply) = self.pending[index].take() else { continue };
            if reply.ends_within(until.saturating_duration_since(Instant::now())) {
                self.apply_reply(index, reply.wait());
            } else {
                self.skipped += 1;
            }
        }
    }

    fn apply_reply(&mut self, index: usize, reply: Result<Vec<u32>, LinkFailure>) {
        if self.subtract_differences(index, reply) {
            self.completed += 1;
        } else {
            self.skipped += 1;
        }
    }

    /// Subtracts the differences in the reply of an average. Returns `false` if the average has failed.
    fn subtract_differences(&self, index: usize, reply: Result<Vec<u32>, LinkFailure>) -> bool {
        let words = match reply {
            Ok(words) => words,
            Err(problem) => {
                self.record_lost_peer(index, problem);
                return false;
            }
        };
        let Some(message) = Message::decode(&words) else {
            let problem = "it sent a reply of an unexpected length".into();
            self.record_lost_peer(index, LinkFailure::Lost(problem));
            return false;
        };
        GossipReplyStatus::decode(message.code) == Some(GossipReplyStatus::Done)
            && self.shared.replica.subtract(bytemuck::cast_slice(message.payload))
    }

    fn record_lost_peer(&self, index: usize, failure: LinkFailure) {
        self.shared.record_lost_link(&self.links[index], failure);
    }
}
