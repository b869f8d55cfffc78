//! Runs with the strategy `gossip`: each rank takes steps alone, and averages its parameters with random ranks.
//!
//! Each rank computes the gradients of parts of batches. The lowest rank that is not lost is the coordinator: it
//! assigns the parts to ranks, so each part of an epoch is used once and a fast rank gets more parts than a slow
//! rank. After every STEPS steps, rank i sends its parameters `p_i` to a random rank j. Rank j computes `d = (p_i -
//! p_j) / 2`, adds d to its own parameters and replies with d. When the reply arrives, rank i subtracts d from its
//! own parameters. Even if rank i has taken steps in the meantime, the average does not change the sum of the
//! parameters of all ranks. At the end of the run, the coordinator averages the parameters of all ranks that are not
//! lost.
//!
//! Rank i does not wait for the reply, but computes its next gradient. On rank j, a separate thread replies while the
//! training thread computes. So no rank waits for a slow rank before the end of the run.
//!
//! Sources: Lian et al., "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018, for the average of two
//! ranks during the computation of a gradient; Blot et al., "Gossip training for deep learning", 2016, and Jin et al., "How to
//! scale distributed deep learning?", 2016, for random peers.

mod api;
mod averaging;
mod coordinator;
mod coordinator_trainer;
mod error;
mod message;
mod quorum;
mod replica;
mod requests;
mod service;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use self::api::{AverageCounts, Gossip, GossipOptions};
use self::coordinator::PartCoordinator;
pub use self::error::GossipError;
use self::replica::SharedReplica;
use self::service::{DoneParts, GossipState};
use self::worker::Worker;
use super::TrainError;
use super::checkpoint::{Position, TrainingState};
use super::config::Config;
use super::peer_link::{PeerLink, connect_pairs};
use super::progress::{CompletedStep, Observer};
use super::run::Summary;
use super::setup::Setup;
use super::strategies::StrategySpec;
use crate::group::Group;
use crate::types::{Rank, WorldSize};

/// After a failure, the coordinator waits at most this long until the other ranks have received the error.
const TIMEOUT_AFTER_FAILURE_MAX: Duration = Duration::from_secs(5);

/// A new coordinator waits until the other ranks also know that the old coordinator is lost. It waits at most for
/// `--timeout`, or for this time if `--timeout` is shorter.
const TAKEOVER_TIMEOUT_MIN: Duration = Duration::from_secs(5);

/// The inputs of a run, its connections and its state.
struct GossipContext<'a> {
    config: &'a Config,
    setup: &'a Setup,
    /// Set when this rank has received a stop signal.
    stop: &'a AtomicBool,
    own_rank: Rank,
    size: WorldSize,
    links: &'a Arc<[PeerLink]>,
    shared: &'a Arc<GossipState>,
    batches_per_epoch: u64,
    /// The number of steps of a rank between two averages.
    steps_between_averages: u64,
    /// How long this rank waits for another rank to answer or to end its run.
    timeout: Duration,
    started: Instant,
}

impl GossipContext<'_> {
    /// Returns whether this rank has received a stop signal.
    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Returns how long a new coordinator waits at most until the other ranks also know that the old coordinator is lost.
    fn takeover_timeout(&self) -> Duration {
        self.timeout.max(TAKEOVER_TIMEOUT_MIN)
    }

    /// Returns how long the coordinator waits at most for the other ranks to end. The time is shorter if the run failed.
    fn timeout_after_run<T, E>(&self, result: &Result<T, E>) -> Duration {
        if result.is_ok() { self.timeout } else { self.timeout.min(TIMEOUT_AFTER_FAILURE_MAX) }
    }

    /// Returns the total number of steps when `batches` batches are done, counted from the first epoch. The run started
    /// at the position `start`.
    fn steps_total_after(&self, start: Position, batches: u64) -> u64 {
        let batches_at_start = start.epoch * self.batches_per_epoch + start.step;
        (start.steps_total + batches).saturating_sub(batches_at_start)
    }

    /// Describes the step of a batch (counted from 0) of a run that started at `start`. `rate` is the learning rate without the
    /// factor of the schedule.
    fn describe_step(&self, (start, batch): (Position, u64), loss: f64, rate: f32) -> CompletedStep {
        let settings = &self.setup.settings;
        CompletedStep {
            steps_total: self.steps_total_after(start, batch + 1),
            loss,
            learning_rate: self.setup.learning_rates.rate_at_step(rate, batch),
            samples: settings.batch_size.min(self.setup.dataset.train.len()) as u64,
            completed_at: Instant::now(),
        }
    }

    /// Returns the connection with another rank.
    fn link(&self, rank: Rank) -> &PeerLink {
        let index = self.links.binary_search_by_key(&rank, |link| link.peer);
        &self.links[index.expect("there is a connection with each other rank")]
    }
}

/// Trains from `state`, which is the same on all ranks. All ranks of `group` must call this function.
pub(super) fn run(
    group: &mut Group,
    (config, setup): (&Config, &Setup),
    mut state: TrainingState,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let started = Instant::now();
    if let Some(best) = &mut state.best
        && best.record.selected
    {
        // The checkpoint is from a completed run. Training continues from the parameters of the last step, not from
        // the best parameters.
        best.swap_parameters(&mut state.parameters);
    }
    let links: Arc<[PeerLink]> = connect_pairs(group)?.into();
    let (own, size) = (group.rank(), group.size());
    let batches_per_epoch = setup.dataset.train.len().div_ceil(setup.settings.batch_size) as u64;
    let shared = Arc::new(GossipState {
        replica: SharedReplica::new(
            std::mem::take(&mut state.parameters),
            setup.network.running_variances().map(|tensor| tensor.range).collect(),
        ),
        coordinator: PartCoordinator::new(own, size.as_usize(), batches_per_epoch),
        done_parts: DoneParts::default(),
        interrupt: None,
    });
    let context = GossipContext {
        config,
        setup,
        stop,
        own_rank: own,
        size,
        links: &links,
        shared: &shared,
        batches_per_epoch,
        steps_between_averages: match config.strategy {
            StrategySpec::Gossip { steps } => steps.get().into(),
            _ => 1,
        },
        timeout: group.timeout(),
        started,
    };
    let result = std::thread::scope(|scope| {
        for link in &*links {
            let shared = &shared;
            scope.spawn(move || shared.serve(link));
        }
        let result = Worker::new(&context, state).run(observer);
        let message = match &result {
            Ok(_) => "the run has ended".to_owned(),
            Err(error) => error.to_string(),
        };
        // An abort ends the thread of its connection. A connection that has already ended stays as it is.
        for link in &*links {
            link.abort(&message);
        }
        result
    });
    drop(links);
    result
}
