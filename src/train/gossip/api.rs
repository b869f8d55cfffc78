//! Gossip averaging for training loops outside this crate.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::averaging::AveragesInProgress;
use super::coordinator::{Answer, PartCoordinator};
use super::message::{GossipRequestKind, HEADER_WORDS, Message, PartRequest};
use super::replica::SharedReplica;
use super::requests::{FinalReply, INTERRUPT_CHECK_INTERVAL};
use super::service::{DoneParts, GossipState};
use super::{GossipError, TAKEOVER_TIMEOUT_MIN};
use crate::group::{Group, Messenger};
use crate::train::batch_queue::Assignment;
use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink, connect_pairs};
use crate::train::random;
use crate::types::Rank;

/// A rank that has the final average sends all other ranks a request to close the connection, and waits at most this long
/// for their replies.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(1);

/// The settings of a [`Gossip`]. Different ranks may pass different settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GossipOptions {
    /// This rank starts an average each time it has taken this number of steps.
    pub steps_between_averages: NonZeroU32,
    /// The seed of the random choice of peers.
    pub seed: u64,
}

impl Default for GossipOptions {
    /// An average after each step, and the seed 0.
    fn default() -> Self {
        Self { steps_between_averages: NonZeroU32::MIN, seed: 0 }
    }
}

/// How many averages a rank has done and skipped. One average is due after every `steps_between_averages` of its steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AverageCounts {
    /// The number of averages whose results this rank has applied.
    pub done: u64,
    /// The number of due averages that had no effect. Either this rank did not start the average, because its previous
    /// average was still in progress or all other ranks had ended; or the other rank refused or did not answer.
    pub skipped: u64,
}

/// Averages the parameters of ranks that take their training steps alone: after some of its steps, a rank averages its
/// parameters with those of one random other rank. No rank waits for another rank before the end of the training. If a rank
/// is lost, the other ranks continue. `docs/gossip.md` describes the mathematics and the sources.
///
/// The replica of a rank is a copy of its parameters at its last call of [`step`](Gossip::step). Threads of this rank
/// average its replica with the replicas of other ranks while the program computes.
///
/// # Example
///
/// ```no_run
/// use ringtrain::train::{Gossip, GossipOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut world = ringtrain::Group::from_environment()?;
/// let mut parameters = vec![0.0; 10];
/// let mut gossip = Gossip::start(&mut world, &mut parameters, &GossipOptions::default())?;
/// for _ in 0..1000 {
///     parameters.iter_mut().for_each(|p| *p -= 0.1 * (*p - 1.0));
///     gossip.step(&mut parameters);
/// }
/// gossip.finish(&mut parameters, world.timeout())?; // now all ranks have the same parameters
/// # Ok(())
/// # }
/// ```
pub struct Gossip {
    own_rank: Rank,
    rank_count: usize,
    links: Arc<[PeerLink]>,
    /// The same state as in a run of `ringtrain`. But a program divides its samples itself, so the coordinator has no
    /// parts of batches to assign, and only averages the final parameters.
    shared: Arc<GossipState>,
    averages: AveragesInProgress,
    /// One thread for each other rank, which answers the requests of that rank.
    threads: Vec<JoinHandle<()>>,
    /// The parameters that the last call of `step` wrote for the program: the replica at that time.
    last_read: Vec<f32>,
    /// The number of calls of `step`.
    steps: u64,
    steps_between_averages: u64,
    /// Each lost rank and the cause of its loss, at the end of the gossip. `None` while the connections are open.
    lost_at_end: Option<Vec<(Rank, String)>>,
}

impl Gossip {
    /// Connects each pair of ranks. All ranks of `group` must call this function, with parameters of the same length. On
    /// all ranks, `parameters` then holds the parameters of rank 0.
    ///
    /// # Errors
    ///
    /// [`GossipError::Group`] if the lengths differ or a rank is lost, [`GossipError::Connect`] if two ranks cannot
    /// connect, and [`GossipError::Thread`] if this rank cannot start a thread.
    pub fn start(
        group: &mut Group,
        parameters: &mut [f32],
        options: &GossipOptions,
    ) -> Result<Self, GossipError> {
        group.broadcast(parameters, Rank::ZERO)?;
        let links: Arc<[PeerLink]> = connect_pairs(group)?.into();
        let (own_rank, rank_count) = (group.rank(), group.size().as_usize());
        let shared = Arc::new(GossipState {
            replica: SharedReplica::new(parameters.to_vec(), Vec::new()),
            coordinator: PartCoordinator::new(own_rank, rank_count, 1),
            done_parts: DoneParts::default(),
            interrupt: group.interrupt(),
        });
        let random = random::random_stream("gossip", options.seed, own_rank.get().into());
        let mut this = Self {
            own_rank,
            rank_count,
            averages: AveragesInProgress::new(Arc::clone(&links), Arc::clone(&shared), random),
            links,
            shared,
            threads: Vec::with_capacity(rank_count - 1),
            last_read: parameters.to_vec(),
            steps: 0,
            steps_between_averages: options.steps_between_averages.get().into(),
            lost_at_end: None,
        };
        for index in 0..this.links.len() {
            let (links, shared) = (Arc::clone(&this.links), Arc::clone(&this.shared));
            let thread = std::thread::Builder::new()
                .name(format!("ringtrain-gossip-{}", links[index].peer))
                .spawn(move || shared.serve(&links[index]))
                .map_err(|error| GossipError::Thread(error.to_string()))?;
            this.threads.push(thread);
        }
        Ok(this)
    }

    /// Call this function after each step of this rank, with the parameters after the step. The call adds to the replica
    /// how the parameters have changed since the last call, and copies the replica back to `parameters`. After every
    /// `steps_between_averages` calls, it starts an average with a random rank. It does not wait for the result: a later
    /// call applies the result. Returns whether averages have changed the parameters.
    ///
    /// # Panics
    ///
    /// If the length of `parameters` differs from the length at the start, or after [`finish`](Self::finish).
    pub fn step(&mut self, parameters: &mut [f32]) -> bool {
        self.add_change(parameters);
        self.averages.apply_arrived_replies();
        self.steps += 1;
        if self.steps.is_multiple_of(self.steps_between_averages) {
            self.averages.start_average();
        }
        self.shared.replica.copy_to(&mut self.last_read);
        let is_changed = parameters.iter().zip(&self.last_read).any(|(a, b)| a.to_bits() != b.to_bits());
        parameters.copy_from_slice(&self.last_read);
        is_changed
    }

    /// Ends the gossip with the average of the parameters of all ranks that finish, and writes the average to
    /// `parameters`. All ranks then have the same parameters, bit for bit. After an error, `parameters` is unchanged.
    ///
    /// Each rank calls this function after its last step. The coordinator, the lowest rank that is not lost, computes the
    /// average. A rank that calls this function more than `timeout` after the other ranks is left out of the average, and
    /// its own call fails. The call takes at most about twice `timeout`. For each coordinator that is lost, it can take twice
    /// `timeout` and 5 s longer.
    ///
    /// # Errors
    ///
    /// - [`GossipError::TooFewRanks`] if fewer than half of the ranks can finish together, or exactly half of them
    ///   without rank 0. The error says why the other ranks are missing.
    /// - [`GossipError::CoordinatorLostAtEnd`] or [`GossipError::CoordinatorFailed`] if the coordinator fails after this
    ///   rank has sent its parameters.
    /// - [`GossipError::Interrupted`] if the interrupt function of this rank returns true.
    ///
    /// # Panics
    ///
    /// For the same reasons as [`step`](Self::step).
    pub fn finish(&mut self, parameters: &mut [f32], timeout: Duration) -> Result<(), GossipError> {
        self.add_change(parameters);
        self.averages.wait_for_all_replies();
        let average = self.average_final_parameters(timeout);
        match &average {
            Ok(_) => self.end_connections("it has finished its gossip"),
            Err(error) => self.end_connections(&format!("it could not finish its gossip: {error}")),
        }
        parameters.copy_from_slice(&average?);
        Ok(())
    }

    /// Returns how many averages this rank has done and skipped.
    pub fn averages(&self) -> AverageCounts {
        AverageCounts { done: self.averages.completed, skipped: self.averages.skipped }
    }

    /// Returns each lost rank and the cause of its loss, as far as this rank knows. After a successful
    /// [`finish`](Self::finish), these are the ranks that are left out of the average, the same on all ranks.
    pub fn lost_ranks(&self) -> Vec<(Rank, String)> {
        self.lost_at_end.clone().unwrap_or_else(|| self.shared.coordinator.lost_ranks())
    }

    /// Ends all connections because this rank has failed. The other ranks then count this rank as lost, with `message` as
    /// the cause.
    pub fn abort(&self, message: &str) {
        self.links.iter().for_each(|link| link.abort(message));
    }

    /// Returns a messenger for each connection. After a fork, the child process should close the file descriptors of
    /// the messengers: see [`Group::descriptors`]. The connections stay open until the messengers are dropped.
    pub fn messengers(&self) -> Vec<Messenger> {
        self.links.iter().map(PeerLink::messenger).collect()
    }

    fn add_change(&self, parameters: &[f32]) {
        assert!(self.lost_at_end.is_none(), "this rank has finished its gossip");
        assert_eq!(
            parameters.len(),
            self.last_read.len(),
            "there must be as many parameters as at the start"
        );
        self.shared.replica.add_change(&self.last_read, parameters);
    }

    fn link(&self, rank: Rank) -> &PeerLink {
        let index = self.links.binary_search_by_key(&rank, |link| link.peer);
        &self.links[index.expect("there is a connection with each other rank")]
    }

    fn average_final_parameters(&mut self, timeout: Duration) -> Result<Vec<f32>, GossipError> {
        loop {
            let coordinator = self.shared.coordinator.coordinator_rank();
            if coordinator == self.own_rank {
                return self.average_as_coordinator(timeout);
            }
            if let Some(average) = self.receive_average(coordinator, timeout)? {
                return Ok(average);
            }
        }
    }

    /// Averages the final parameters of all ranks that send them within `timeout`, and sends these ranks the average.
    fn average_as_coordinator(&mut self, timeout: Duration) -> Result<Vec<f32>, GossipError> {
        let shared = Arc::clone(&self.shared);
        let (coordinator, replica) = (&shared.coordinator, &shared.replica);
        // There are no parts to assign, so from now on the other ranks may send their final parameters.
        coordinator.take_over((0, 0), [], (0.0, 0));
        // If an earlier coordinator is lost, the other ranks may notice this later than this rank.
        let takeover = if self.own_rank == Rank::ZERO { Duration::ZERO } else { TAKEOVER_TIMEOUT_MIN };
        let limit = timeout.saturating_add(takeover);
        let missing =
            self.wait_for_ranks(limit, |interval| coordinator.wait_for_final_parameters(interval))?;
        for rank in missing {
            let link = self.link(rank);
            shared.record_lost_link(link, late_rank_failure(timeout));
        }
        replica.set_refuses_averages(true);
        let mut average = replica.with_parameters(|parameters| parameters.to_vec());
        coordinator.add_final_parameters(self.own_rank, &average);
        coordinator.check_quorum_of_final_parameters()?;
        coordinator.write_average_parameters(&mut average);
        let left_out = coordinator.ranks_left_out();
        let mut results: Vec<u32> = bytemuck::cast_slice(&average).to_vec();
        results.extend(left_out.iter().map(|rank| rank.get()));
        coordinator.publish_results(results);
        self.lost_at_end = Some(self.describe_left_out(&left_out, self.own_rank));
        // A rank that does not fetch its results in time ends with an error.
        self.wait_for_ranks(timeout, |interval| coordinator.wait_for_connection_ends(interval))?;
        Ok(average)
    }

    /// Calls `wait` until no rank is missing or `timeout` has passed. `wait` waits at most for the time that it gets as its
    /// argument, and returns the missing ranks. This function returns the result of the last call.
    fn wait_for_ranks(
        &self,
        timeout: Duration,
        wait: impl Fn(Duration) -> Vec<Rank>,
    ) -> Result<Vec<Rank>, GossipError> {
        let started = Instant::now();
        loop {
            let missing = wait(INTERRUPT_CHECK_INTERVAL.min(timeout.saturating_sub(started.elapsed())));
            if missing.is_empty() || started.elapsed() >= timeout {
                return Ok(missing);
            }
            self.shared.check_interrupt()?;
        }
    }

    /// Sends the final parameters to the coordinator and receives the average. Returns `None` if the coordinator is lost
    /// and another rank can compute the average.
    fn receive_average(
        &mut self,
        coordinator: Rank,
        timeout: Duration,
    ) -> Result<Option<Vec<f32>>, GossipError> {
        let shared = Arc::clone(&self.shared);
        let link = self.link(coordinator);
        let failed = |problem: &str| GossipError::CoordinatorFailed {
            coordinator,
            problem: format!("on {}: {problem}", link.host),
        };
        if !self.wait_for_coordinator(link, timeout)? {
            return Ok(None);
        }
        shared.replica.set_refuses_averages(true);
        let words = match shared.send_final_parameters(link, self.last_read.len() + self.rank_count)? {
            FinalReply::Results(words) => words,
            FinalReply::Failed(_, problem) => return Err(failed(&problem)),
            FinalReply::CoordinatorLost => {
                shared.replica.set_refuses_averages(false);
                return Ok(None);
            }
        };
        let Some((average, left_out)) = words.split_at_checked(self.last_read.len()) else {
            return Err(failed("its results have an unexpected length"));
        };
        let left_out: Vec<Rank> = left_out.iter().copied().map(Rank::new).collect();
        self.lost_at_end = Some(self.describe_left_out(&left_out, coordinator));
        self.close_connections();
        Ok(Some(bytemuck::cast_slice(average).to_vec()))
    }

    /// Waits until the coordinator accepts final parameters. Returns `false` if the coordinator is lost. If `timeout`
    /// passes, the coordinator counts as lost. During the wait, this rank still answers other ranks' requests for averages.
    fn wait_for_coordinator(&self, link: &PeerLink, timeout: Duration) -> Result<bool, GossipError> {
        let started = Instant::now();
        loop {
            match self.shared.request_part(link, PartRequest::default())? {
                None => return Ok(false),
                Some(Answer::Failed(_, problem)) => {
                    let problem = format!("on {}: {problem}", link.host);
                    return Err(GossipError::CoordinatorFailed { coordinator: link.peer, problem });
                }
                Some(Answer::Done(reply)) if reply.assignment == Assignment::Finished => return Ok(true),
                Some(Answer::Done(_) | Answer::Wait) => {}
            }
            if started.elapsed() >= timeout {
                self.shared.record_lost_link(link, late_rank_failure(timeout));
                return Ok(false);
            }
            self.shared.check_interrupt()?;
        }
    }

    /// Returns why each of the ranks `left_out` is missing in the average of `coordinator`.
    fn describe_left_out(&self, left_out: &[Rank], coordinator: Rank) -> Vec<(Rank, String)> {
        let known = self.shared.coordinator.lost_ranks();
        let describe = |&rank: &Rank| {
            let reason = known.iter().find(|(lost, _)| *lost == rank).map(|(_, problem)| problem.clone());
            (
                rank,
                reason
                    .unwrap_or_else(|| format!("rank {coordinator} could not average its final parameters")),
            )
        };
        left_out.iter().map(describe).collect()
    }

    /// Asks the other ranks to close their connections with this rank, so that they do not count this rank as lost.
    fn close_connections(&self) {
        let close = Message::new(GossipRequestKind::Close as u32, [0; 4], &[]).encode();
        let is_open = |link: &&PeerLink| !self.shared.coordinator.has_connection_ended(link.peer);
        let request =
            |link: &PeerLink| link.start_request(close.clone(), MessageChannel::Reply, HEADER_WORDS).ok();
        let replies: Vec<_> = self.links.iter().filter(is_open).filter_map(request).collect();
        let until = Instant::now() + CLOSE_WAIT_MAX;
        for reply in replies {
            // A rank that does not reply has ended or is lost.
            reply.ends_within(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Ends all connections and their threads. A connection that has failed before keeps its first error.
    fn end_connections(&mut self, message: &str) {
        if self.lost_at_end.is_none() {
            self.lost_at_end = Some(self.shared.coordinator.lost_ranks());
        }
        self.abort(message);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

/// Returns the failure of a rank that has not called `finish` within `timeout` after another rank.
fn late_rank_failure(timeout: Duration) -> LinkFailure {
    LinkFailure::Lost(format!("it did not finish within {} s", timeout.as_secs_f64()))
}

impl Drop for Gossip {
    /// Ends the connections. If this rank has not finished, the other ranks count it as lost.
    fn drop(&mut self) {
        self.end_connections("it closed its gossip before it finished");
    }
}
