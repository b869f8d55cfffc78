//! Runs with a parameter server: `--strategy ps-sync` and `--strategy ps-async`.
//!
//! The first ranks are servers, and the other ranks are workers. Rank 0, the first server, also hands out batches,
//! and tests and saves the model. `docs/parameter-server.md` describes both strategies for users.
//!
//! **`ps-sync`**: in each step, every worker computes the gradient of its part of the batch. A server applies the sum
//! when it has the gradients of all workers: `p -= update(1/B * (g_1 + ... + g_n))`, the same as `allreduce`.
//!
//! **`ps-async`**: each worker computes the gradient of a whole batch with the parameters that it pulled last, and
//! the server applies this gradient as soon as it arrives: `p_(t+1) = p_t - update(g(p_(t-s)))`, where s is the
//! staleness. Source: Dean et al., "Large scale distributed deep networks", NIPS 2012. The maximum of s follows Ho et
//! al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013. Ho et al. make
//! fast workers wait. Here, no worker waits, and the first server drops gradients whose staleness exceeds the maximum.

mod coordinator;
mod first_server;
mod run_progress;
mod work_messages;
mod worker;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::work_messages::{WorkReply, WorkRequest};
use super::TrainError;
use super::bucket_ranges::overlap;
use super::checkpoint::TrainingState;
use super::config::Config;
use super::optimizer::Optimizer;
use super::parameter_server::{
    LinkOutcome, Links, MessageCodecs, ParameterServerError, RefusalReason, RequestHandler, ServerClient,
    Shard, ShardLayout, ShardServer, StalenessRule, UpdateMode, connect_clients_to_servers,
};
use super::progress::Observer;
use super::run::Summary;
use super::setup::Setup;
use super::strategies::StrategySpec;
use super::summary_words::{REPORT_WORDS_MAX, decode_summary};
use crate::codec::Compression;
use crate::group::Group;
use crate::types::{Rank, WorldSize};

/// After a failure, a server waits at most this long until its clients have closed their links.
const FAILURE_NOTICE_TIMEOUT: Duration = Duration::from_secs(5);

/// The values that stay the same during a run.
pub(super) struct RunContext<'a> {
    pub(super) config: &'a Config,
    pub(super) setup: &'a Setup,
    /// True after this rank has received a stop signal.
    stop: &'a AtomicBool,
    pub(super) layout: ShardLayout,
    pub(super) update_mode: UpdateMode,
    pub(super) is_synchronous: bool,
    /// How workers encode gradients. None if all ranks share memory.
    pub(super) compression: Compression,
    pub(super) size: WorldSize,
    /// The longest time that a rank waits for a reply, or for another rank to end.
    pub(super) timeout: Duration,
    /// The time at which the run started on this rank.
    pub(super) started: Instant,
}

impl RunContext<'_> {
    /// Returns whether this rank has received a stop signal.
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Returns how long a server waits until its clients have closed their links. The time is shorter if the run
    /// failed.
    fn link_end_timeout<T, E>(&self, result: &Result<T, E>) -> Duration {
        if result.is_ok() { self.timeout } else { self.timeout.min(FAILURE_NOTICE_TIMEOUT) }
    }
}

/// The place of this rank among the workers.
struct WorkerPlace {
    /// The number of workers with lower ranks.
    index: u32,
    /// The number of workers.
    workers: u32,
}

/// Trains with a parameter server. All ranks of `group` must call this function with the same `state`.
pub(super) fn train_with_servers(
    group: &mut Group,
    (config, setup): (&Config, &Setup),
    state: TrainingState,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let started = Instant::now();
    let tensors: Vec<_> = setup.network.parameter_tensors().into_iter().map(|tensor| tensor.range).collect();
    let needs_tensors = setup.settings.rule.needs_whole_tensors();
    let count = setup.network.parameter_count();
    let layout =
        ShardLayout::new(group.size(), config.server_count(), count, needs_tensors.then_some(&tensors[..]))?;
    let update_mode = match config.strategy {
        StrategySpec::PsAsync { .. } => {
            UpdateMode::Asynchronous(config.staleness_rule(layout.workers().count()))
        }
        _ => UpdateMode::Synchronous { workers: layout.workers().count(), factor: 1.0 },
    };
    let context = RunContext {
        config,
        setup,
        stop,
        update_mode,
        is_synchronous: matches!(update_mode, UpdateMode::Synchronous { .. }),
        compression: if group.shares_memory() { Compression::None } else { config.compression },
        size: group.size(),
        timeout: group.timeout(),
        started,
        layout,
    };
    let are_encoded = context.compression != Compression::None;
    let links = connect_clients_to_servers(group, &context.layout, are_encoded)?;
    let rank = group.rank();
    if rank == Rank::ZERO {
        first_server::run_first_server(&context, links, state, observer)
    } else if context.layout.is_server(rank) {
        run_other_server(&context, rank, links, state)
    } else {
        let first_worker = context.layout.workers().next().map_or(0, Rank::get);
        let place =
            WorkerPlace { index: rank.get() - first_worker, workers: context.size.get() - first_worker };
        let client = ServerClient::new(links.servers, &context.layout, context.is_synchronous);
        let mut client = client.compressed(context.compression, rank);
        let mut parameters = state.parameters;
        match worker::run_worker(&context, &place, &mut client, &mut parameters) {
            Ok(totals) => {
                let mut summary = wait_for_summary(&context, &mut client)?;
                summary.report.samples_per_second = totals.samples as f64 / totals.seconds.max(1e-9);
                client.close();
                Ok(summary)
            }
            Err(error) => {
                client.abort(&error.to_string());
                Err(error)
            }
        }
    }
}

/// Runs a server that is not the first server: holds a shard until the run has ended.
fn run_other_server(
    context: &RunContext<'_>,
    rank: Rank,
    links: Links,
    state: TrainingState,
) -> Result<Summary, TrainError> {
    let shard = create_shard(context, rank, &state);
    drop(state);
    let open_links = Arc::new(OpenLinks { count: Mutex::new(links.clients.len()), changed: Condvar::new() });
    let handler = Arc::clone(&open_links);
    // Only the first server drops gradients because of their staleness.
    let update_mode = match context.update_mode {
        UpdateMode::Asynchronous(rule) => UpdateMode::Asynchronous(StalenessRule { max: u64::MAX, ..rule }),
        synchronous @ UpdateMode::Synchronous { .. } => synchronous,
    };
    let codecs = MessageCodecs::new(context.compression);
    let server = ShardServer::new(shard, update_mode, handler).with_codecs(codecs);
    let mut client = ServerClient::new(links.servers, &context.layout, context.is_synchronous);
    std::thread::scope(|scope| {
        for (client, link) in links.clients.iter().enumerate() {
            let server = &server;
            scope.spawn(move || server.serve(client, link));
        }
        let summary = wait_for_summary(context, &mut client).map_err(TrainError::from);
        match &summary {
            Ok(_) => client.close(),
            Err(error) => {
                server.refuse_further_requests(refusal_reason(error), &error.to_string());
                client.abort(&error.to_string());
            }
        }
        open_links.wait_until_all_ended(context.link_end_timeout(&summary));
        // End the remaining links. The abort has no effect on links that have ended.
        links.clients.iter().for_each(|link| link.abort("the run has ended"));
        summary
    })
}

/// The number of clients whose links have not ended.
struct OpenLinks {
    count: Mutex<usize>,
    /// Notified when a link ends.
    changed: Condvar,
}

impl OpenLinks {
    /// Waits at most `timeout` until all links have ended.
    fn wait_until_all_ended(&self, timeout: Duration) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(count, timeout, |count| *count > 0));
    }
}

impl RequestHandler for OpenLinks {
    fn record_link_end(&self, _: usize, _: &LinkOutcome) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.changed.notify_all();
    }
}

/// Returns the reason that a server sends when it refuses requests after `error`.
fn refusal_reason(error: &TrainError) -> RefusalReason {
    match error {
        TrainError::Diverged(_) => RefusalReason::Diverged,
        TrainError::Checkpoint(_) | TrainError::ModelFile(_) => RefusalReason::Storage,
        TrainError::ParameterServer(ParameterServerError::Refused { reason, .. }) => *reason,
        TrainError::ParameterServer(_) | TrainError::Group(_) => RefusalReason::RankLost,
        _ => RefusalReason::Other,
    }
}

/// Creates the shard that the server `rank` holds.
fn create_shard<'a>(context: &RunContext<'a>, rank: Rank, state: &TrainingState) -> Shard<'a> {
    let (config, setup) = (context.config, context.setup);
    let range = context.layout.range(rank);
    let rate = state.learning_rate.unwrap_or_default();
    let mut optimizer = Optimizer::new(setup.settings.rule, rate, config.weight_decay, range.len());
    optimizer.steps = state.position.steps_total;
    if context.is_synchronous {
        optimizer.clip_norm = config.recipe.clip_norm;
    }
    optimizer.set_tensors(&setup.network.parameter_tensors(), |tensor| {
        let own = overlap(tensor, &range);
        (!own.is_empty()).then_some(own.start - range.start..own.end - range.start)
    });
    for (vector, saved) in optimizer.state.iter_mut().zip(&state.optimizer) {
        vector.copy_from_slice(&saved[range.clone()]);
    }
    let rates = move |updates| setup.learning_rates.rate_at_step(rate, updates);
    Shard::new(range.clone(), state.parameters[range].to_vec(), optimizer, Box::new(rates))
}

/// Waits until the first server has published the results of the run, and returns these results.
fn wait_for_summary(
    context: &RunContext<'_>,
    client: &mut ServerClient,
) -> Result<Summary, ParameterServerError> {
    let words = loop {
        let is_stopping = context.is_stopping();
        let request = WorkRequest { awaits_end: true, is_stopping, ..WorkRequest::default() };
        if let WorkReply::Published(words) = WorkReply::decode(&client.exchange_note(request.encode())?) {
            break words;
        }
    };
    let count = context.setup.network.parameter_count();
    let words = client.receive_results(words.min(count + REPORT_WORDS_MAX))?;
    decode_summary(&words, count).ok_or_else(|| ParameterServerError::ServerLost {
        server: Rank::ZERO,
        problem: "its results have an unknown format".into(),
    })
}

impl From<ParameterServerError> for TrainError {
    fn from(error: ParameterServerError) -> Self {
        match error {
            ParameterServerError::Group(error) => Self::Group(error),
            error => Self::ParameterServer(error),
        }
    }
}
