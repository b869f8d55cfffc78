//! The public API of the parameter server.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::client::ServerClient;
use super::error::ParameterServerError;
use super::links::{Links, ShardLayout, connect_clients_to_servers};
use super::message::StrategyNote;
use super::server::{LinkOutcome, RequestHandler, ShardServer, UpdateMode};
use super::shard::{PushOutcome, Shard, StalenessRule};
use crate::group::{Group, Messenger};
use crate::train::optimizer::{Optimizer, Rule};
use crate::train::peer_link::PeerLink;
use crate::types::Rank;

/// The settings of a [`ParameterServer`]. All ranks must pass the same settings.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ParameterServerOptions {
    /// The number of servers: ranks `0..servers` hold parameters. All other ranks are workers.
    pub servers: NonZeroU32,
    /// The rule with which servers apply gradients. [`ParameterServer::start`] refuses [`Rule::Accelerated`].
    pub rule: Rule,
    /// The learning rate.
    pub learning_rate: f32,
    /// The weight decay, as in [`Optimizer::weight_decay`].
    pub weight_decay: f32,
    /// If true, a server waits in each step for the gradients of all workers, and applies their mean. If false, a server
    /// applies each gradient as soon as the gradient arrives.
    pub synchronous: bool,
    /// The maximum staleness of a gradient. The staleness is the number of updates between the pull of the parameters
    /// and the push of the gradient. Servers drop gradients with a larger staleness. `None` means no maximum.
    /// Synchronous servers ignore this setting, because their gradients always have a staleness of 0.
    pub staleness: Option<u64>,
    /// If true, a server divides the learning rate by the staleness of the gradient that it applies. Gradients with a
    /// staleness of 0 or 1 keep the full learning rate.
    pub staleness_aware: bool,
}

impl Default for ParameterServerOptions {
    /// One asynchronous server that applies SGD with a learning rate of 0.01.
    fn default() -> Self {
        Self {
            servers: NonZeroU32::MIN,
            rule: Rule::Sgd,
            learning_rate: 0.01,
            weight_decay: 0.0,
            synchronous: false,
            staleness: None,
            staleness_aware: false,
        }
    }
}

/// This rank's part of a parameter server. Ranks `0..servers` are servers: they hold parameters and apply gradients.
/// All other ranks are workers: they compute gradients. `docs/parameter-server.md` describes the protocol for users.
///
/// If the servers are asynchronous, no worker waits for another worker, and all other ranks continue if a worker
/// fails.
///
/// # Example
///
/// ```no_run
/// use ringtrain::train::{ParameterServer, ParameterServerOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut world = ringtrain::Group::from_environment()?;
/// let mut parameters = vec![0.0; 10];
/// let options = ParameterServerOptions { learning_rate: 0.1, ..ParameterServerOptions::default() };
/// let mut server = ParameterServer::start(&mut world, &parameters, &options)?;
/// if server.is_server() {
///     server.wait_for_workers(None);
/// } else {
///     for _ in 0..1000 {
///         server.pull(&mut parameters)?;
///         let gradient: Vec<f32> = parameters.iter().map(|p| p - 1.0).collect();
///         server.push(&gradient)?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct ParameterServer {
    layout: ShardLayout,
    /// The number of parameters on all servers together.
    len: usize,
    /// `Some` on a server.
    server: Option<RunningServer>,
    /// `Some` on a worker.
    client: Option<ServerClient>,
}

/// A server with one thread for each client.
struct RunningServer {
    server: Arc<ShardServer<'static>>,
    clients: Arc<Vec<PeerLink>>,
    outcomes: Arc<LinkOutcomes>,
    threads: Vec<JoinHandle<LinkOutcome>>,
    /// The connections in which this server is the client. Rank 0 is a client of every other server, and every other
    /// server is a client of rank 0.
    other_servers: ServerClient,
}

/// The state of the link with each client. Clients that are servers come first.
struct LinkOutcomes {
    /// The outcome of each client's link, or `None` while the link is open.
    links: Mutex<Vec<Option<LinkOutcome>>>,
    /// The number of clients that are servers.
    other_server_count: usize,
    changed: Condvar,
}

impl RequestHandler for LinkOutcomes {
    fn record_link_end(&self, client: usize, outcome: &LinkOutcome) {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)[client] = Some(outcome.clone());
        self.changed.notify_all();
    }
}

impl ParameterServer {
    /// Connects the servers and the workers. All ranks of `group` must call this function with the same options and with
    /// parameters of the same length. The parameters of rank 0 are the initial parameters. Each server answers requests
    /// until its `ParameterServer` is dropped.
    ///
    /// # Errors
    ///
    /// [`ParameterServerError`] if there is no worker, if a parameter server cannot use this optimizer, or if ranks cannot
    /// connect.
    pub fn start(
        group: &mut Group,
        parameters: &[f32],
        options: &ParameterServerOptions,
    ) -> Result<Self, ParameterServerError> {
        let unsupported = |message: &str| Err(ParameterServerError::Unsupported(message.to_owned()));
        match options.rule {
            Rule::Accelerated => {
                return unsupported(
                    "a parameter server cannot use the optimizer accelerated; use another optimizer",
                );
            }
            rule if rule.needs_whole_tensors() && options.servers.get() > 1 => {
                return unsupported(&format!(
                    "several servers cannot use the optimizer {}, which needs whole tensors; use 1 server",
                    rule.name()
                ));
            }
            _ => {}
        }
        let layout = ShardLayout::new(group.size(), options.servers, parameters.len(), None)?;
        let mut initial = parameters.to_vec();
        group.broadcast(&mut initial, Rank::ZERO)?;
        let links = connect_clients_to_servers(group, &layout)?;
        let mut this = Self { len: parameters.len(), server: None, client: None, layout };
        if this.layout.is_server(group.rank()) {
            this.server = Some(this.run_server(group.rank(), &initial, options, links)?);
        } else {
            this.client = Some(ServerClient::new(links.servers, &this.layout, options.synchronous));
        }
        Ok(this)
    }

    fn run_server(
        &self,
        rank: Rank,
        initial: &[f32],
        options: &ParameterServerOptions,
        links: Links,
    ) -> Result<RunningServer, ParameterServerError> {
        let range = self.layout.range(rank);
        let optimizer =
            Optimizer::new(options.rule, options.learning_rate, options.weight_decay, range.len());
        let rate = options.learning_rate;
        let shard = Shard::new(range.clone(), initial[range].to_vec(), optimizer, Box::new(move |_| rate));
        let workers = self.layout.workers().count();
        let update_mode = if options.synchronous {
            UpdateMode::Synchronous { workers, factor: 1.0 / workers as f32 }
        } else {
            // Only rank 0 decides which gradients are dropped.
            let max = options.staleness.filter(|_| rank == Rank::ZERO).unwrap_or(u64::MAX);
            UpdateMode::Asynchronous(StalenessRule { max, scales_rate: options.staleness_aware })
        };
        let outcomes = Arc::new(LinkOutcomes {
            links: Mutex::new(vec![None; links.clients.len()]),
            other_server_count: links.clients.len() - workers,
            changed: Condvar::new(),
        });
        let server =
            Arc::new(ShardServer::new(shard, update_mode, Arc::clone(&outcomes) as Arc<dyn RequestHandler>));
        let clients = Arc::new(links.clients);
        let spawn = |client: usize| {
            let (server, clients) = (Arc::clone(&server), Arc::clone(&clients));
            std::thread::Builder::new()
                .name(format!("ringtrain-server-{client}"))
                .spawn(move || server.serve(client, &clients[client]))
                .map_err(|error| ParameterServerError::Thread(error.to_string()))
        };
        let threads = (0..clients.len()).map(spawn).collect::<Result<_, _>>()?;
        let other_servers = ServerClient::new(links.servers, &self.layout, options.synchronous);
        Ok(RunningServer { server, clients, outcomes, threads, other_servers })
    }

    /// Returns whether this rank is a server.
    pub fn is_server(&self) -> bool {
        self.server.is_some()
    }

    /// Returns the ranks that are workers.
    pub fn workers(&self) -> Vec<Rank> {
        self.layout.workers().collect()
    }

    /// On a server, waits until every worker has closed its connections or is lost, and returns `true`. Returns
    /// `false` if `timeout` passes first. On a worker, returns `false` at once.
    pub fn wait_for_workers(&self, timeout: Option<Duration>) -> bool {
        let Some(RunningServer { outcomes, .. }) = &self.server else { return false };
        let is_open =
            |links: &mut Vec<Option<LinkOutcome>>| links[outcomes.other_server_count..].contains(&None);
        let links = outcomes.links.lock().unwrap_or_else(PoisonError::into_inner);
        match timeout {
            None => {
                drop(outcomes.changed.wait_while(links, is_open));
                true
            }
            Some(timeout) => {
                let waited = outcomes.changed.wait_timeout_while(links, timeout, is_open);
                !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            }
        }
    }

    /// On a server, returns each worker that this server has lost, and the cause of the loss. On a worker, returns an
    /// empty list.
    pub fn lost_workers(&self) -> Vec<(Rank, String)> {
        let Some(RunningServer { outcomes, clients, .. }) = &self.server else { return Vec::new() };
        let links = outcomes.links.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = clients.iter().zip(links.iter()).skip(outcomes.other_server_count);
        lost.filter_map(|(link, outcome)| match outcome {
            Some(LinkOutcome::Lost(problem)) => Some((link.peer, problem.clone())),
            _ => None,
        })
        .collect()
    }

    /// Receives the current parameters from all servers.
    ///
    /// # Errors
    ///
    /// [`ParameterServerError::ServerLost`], or [`ParameterServerError::Refused`] if a synchronous server has lost a worker.
    ///
    /// # Panics
    ///
    /// If the length of `parameters` differs from the length of the initial parameters, or if this rank is a server.
    pub fn pull(&mut self, parameters: &mut [f32]) -> Result<(), ParameterServerError> {
        assert_eq!(parameters.len(), self.len, "there must be as many parameters as at the start");
        self.client().pull(parameters)
    }

    /// Sends the gradient of all parameters. Compute the gradient with the parameters that this worker received last.
    /// Returns what each server did with its part of the gradient.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`pull`](Self::pull).
    ///
    /// # Panics
    ///
    /// If the length of `gradient` differs from the length of the initial parameters, or if this rank is a server.
    pub fn push(&mut self, gradient: &[f32]) -> Result<Vec<PushOutcome>, ParameterServerError> {
        assert_eq!(gradient.len(), self.len, "there must be a gradient for each parameter");
        Ok(self.client().push(gradient, StrategyNote::default(), None)?.outcomes)
    }

    /// Does the same as [`push`](Self::push) and then [`pull`](Self::pull), but with one request to each server
    /// instead of two. Compute the gradient with the parameters that this worker received last. Returns what each
    /// server did with its part of the gradient.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`pull`](Self::pull).
    ///
    /// # Panics
    ///
    /// For the same reasons as [`push`](Self::push) and [`pull`](Self::pull).
    pub fn push_pull(
        &mut self,
        gradient: &[f32],
        parameters: &mut [f32],
    ) -> Result<Vec<PushOutcome>, ParameterServerError> {
        assert_eq!(
            (gradient.len(), parameters.len()),
            (self.len, self.len),
            "there must be as many gradients and parameters as at the start"
        );
        Ok(self.client().push(gradient, StrategyNote::default(), Some(parameters))?.outcomes)
    }

    /// Sends the gradients of some ranges of the parameters, for example of some rows of an embedding. Servers update
    /// the parameters and the state of the optimizer only in these ranges. The ranges must be ascending and must not
    /// overlap. `gradients` holds the gradients of all ranges, in the order of `ranges`.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`pull`](Self::pull).
    ///
    /// # Panics
    ///
    /// If this rank is a server. If the ranges are not ascending, overlap, or exceed the parameters. If the ranges
    /// together do not have as many elements as `gradients`.
    pub fn push_ranges(
        &mut self,
        ranges: &[Range<usize>],
        gradients: &[f32],
    ) -> Result<Vec<PushOutcome>, ParameterServerError> {
        self.check_ranges(ranges, gradients.len());
        Ok(self.client().push_ranges(ranges, gradients, StrategyNote::default())?.outcomes)
    }

    /// Receives the current parameters of some ranges, and writes them to `values` in the order of `ranges`.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`pull`](Self::pull).
    ///
    /// # Panics
    ///
    /// For the same reasons as [`push_ranges`](Self::push_ranges), with `values` in place of `gradients`.
    pub fn pull_ranges(
        &mut self,
        ranges: &[Range<usize>],
        values: &mut [f32],
    ) -> Result<(), ParameterServerError> {
        self.check_ranges(ranges, values.len());
        self.client().pull_ranges(ranges, values)
    }

    fn check_ranges(&self, ranges: &[Range<usize>], len: usize) {
        let mut end = 0;
        for range in ranges {
            assert!(
                end <= range.start && range.start <= range.end,
                "the ranges must be ascending and must not overlap"
            );
            end = range.end;
        }
        assert!(end <= self.len, "the ranges exceed the parameters");
        assert_eq!(
            ranges.iter().map(Range::len).sum::<usize>(),
            len,
            "the ranges must have as many elements as there are values"
        );
    }

    /// On a server, calls `use_shard` with the server's range of parameters, with these parameters and with their
    /// optimizer. The server applies no gradient during the call, so `use_shard` can save or restore this state. On a
    /// worker, returns `None`.
    pub fn with_shard<R>(
        &self,
        use_shard: impl FnOnce(Range<usize>, &mut [f32], &mut Optimizer) -> R,
    ) -> Option<R> {
        let RunningServer { server, .. } = self.server.as_ref()?;
        Some(
            server.with_shard(|shard| {
                use_shard(shard.range.clone(), &mut shard.parameters, &mut shard.optimizer)
            }),
        )
    }

    /// Returns `(applied, dropped)`. `applied[s]` is the number of gradients with a staleness of s that this server
    /// applied; `applied[1023]` also counts all larger values. `dropped` is the number of gradients that this server
    /// dropped because of their staleness. On a worker, returns an empty vector and 0.
    pub fn staleness_counts(&self) -> (Vec<u64>, u64) {
        let counts =
            self.server.as_ref().map(|running| running.server.with_shard(|shard| shard.staleness.clone()));
        counts.map(|counts| (counts.accepted, counts.dropped)).unwrap_or_default()
    }

    /// Ends all connections because this rank has failed. The errors on the other ranks contain `message`. All later
    /// requests of this rank fail.
    pub fn abort(&self, message: &str) {
        // A connection that has already failed keeps its first error.
        if let Some(client) = &self.client {
            client.abort(message);
        }
        if let Some(running) = &self.server {
            running.other_servers.abort(message);
            running.clients.iter().for_each(|link| link.abort(message));
        }
    }

    /// Returns a messenger for each connection. After a fork, the child process should close the file descriptors of
    /// the messengers: see [`Group::descriptors`]. The connections stay open until the messengers are dropped.
    pub fn messengers(&self) -> Vec<Messenger> {
        let clients = self.server.iter().flat_map(|running| running.clients.iter());
        let of_clients = clients.map(PeerLink::messenger);
        let servers = self.server.iter().map(|running| &running.other_servers).chain(&self.client);
        of_clients.chain(servers.flat_map(ServerClient::messengers)).collect()
    }

    fn client(&mut self) -> &mut ServerClient {
        self.client.as_mut().expect("only workers push and pull")
    }
}

impl Drop for ParameterServer {
    /// Ends the connections. If a server is dropped before a worker, the next request of the worker fails with
    /// [`ParameterServerError::ServerLost`].
    fn drop(&mut self) {
        if let Some(client) = &mut self.client {
            client.close();
        }
        if let Some(running) = &mut self.server {
            running.other_servers.close();
            running.clients.iter().for_each(|link| link.abort("the parameter server was closed"));
            for thread in running.threads.drain(..) {
                drop(thread.join());
            }
        }
    }
}
