//! The public API of the parameter server.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::client::ServerClient;
use super::error::ParameterServerError;
use super::handler::{LinkOutcome, PushOrNote, RequestHandler};
use super::links::{Links, ShardLayout, connect_clients_to_servers};
use super::message::StrategyNote;
use super::options::ParameterServerOptions;
use super::server::{ShardServer, UpdateMode};
use super::shard::{PushOutcome, Shard, StalenessRule};
use crate::group::{Group, Messenger};
use crate::train::optimizer::Optimizer;
use crate::train::peer_link::PeerLink;
use crate::types::Rank;

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
    clients_state: Arc<ClientsState>,
    threads: Vec<JoinHandle<LinkOutcome>>,
    /// The connections in which this server is the client. Rank 0 is a client of every other server, and every other
    /// server is a client of rank 0.
    other_servers: ServerClient,
}

/// What the clients of a server have changed, apart from its shard.
struct ClientsState {
    /// The outcome of each client's link, or `None` while the link is open. Clients that are servers come first.
    links: Mutex<Vec<Option<LinkOutcome>>>,
    /// The number of clients that are servers.
    other_server_count: usize,
    /// Notified when a link ends.
    changed: Condvar,
    /// The bits of the learning rate.
    learning_rate: AtomicU32,
}

impl RequestHandler for ClientsState {
    /// A request with only a note sets the learning rate. The note holds the bits of the rate.
    fn reply_note(&self, _client: usize, kind: PushOrNote, note: &StrategyNote) -> StrategyNote {
        if kind == PushOrNote::Note {
            self.learning_rate.store(note[0] as u32, Ordering::SeqCst);
        }
        StrategyNote::default()
    }

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
    /// [`ParameterServerError`] if there is no worker, if servers cannot use this optimizer or these tensors, or if ranks cannot
    /// connect.
    pub fn start(
        group: &mut Group,
        parameters: &[f32],
        options: &ParameterServerOptions,
    ) -> Result<Self, ParameterServerError> {
        let tensors = options.whole_tensors(parameters.len()).map_err(ParameterServerError::Unsupported)?;
        let layout = ShardLayout::new(group.size(), options.servers, parameters.len(), tensors.as_deref())?;
        let mut initial = parameters.to_vec();
        group.broadcast(&mut initial, Rank::ZERO)?;
        let links = connect_clients_to_servers(group, &layout, false)?;
        let mut this = Self { len: parameters.len(), server: None, client: None, layout };
        if this.layout.is_server(group.rank()) {
            let rank = group.rank();
            let range = this.layout.range(rank);
            let mut optimizer =
                Optimizer::new(options.rule, options.learning_rate, options.weight_decay, range.len());
            if let Some(tensors) = tensors {
                let own = tensors.iter().filter(|tensor| range.contains(&tensor.start));
                optimizer.tensors =
                    own.map(|tensor| tensor.start - range.start..tensor.end - range.start).collect();
            }
            this.server = Some(this.run_server(rank, initial[range].to_vec(), optimizer, options, links)?);
        } else {
            this.client = Some(ServerClient::new(links.servers, &this.layout, options.synchronous));
        }
        Ok(this)
    }

    fn run_server(
        &self,
        rank: Rank,
        initial: Vec<f32>,
        optimizer: Optimizer,
        options: &ParameterServerOptions,
        links: Links,
    ) -> Result<RunningServer, ParameterServerError> {
        let workers = self.layout.workers().count();
        let update_mode = if options.synchronous {
            UpdateMode::Synchronous { workers, factor: 1.0 / workers as f32 }
        } else {
            // Only rank 0 decides which gradients are dropped.
            let max = options.staleness.filter(|_| rank == Rank::ZERO).unwrap_or(u64::MAX);
            UpdateMode::Asynchronous(StalenessRule { max, scales_rate: options.staleness_aware })
        };
        let clients_state = Arc::new(ClientsState {
            links: Mutex::new(vec![None; links.clients.len()]),
            other_server_count: links.clients.len() - workers,
            changed: Condvar::new(),
            learning_rate: AtomicU32::new(options.learning_rate.to_bits()),
        });
        let state = Arc::clone(&clients_state);
        let rate = move |_| f32::from_bits(state.learning_rate.load(Ordering::SeqCst));
        let shard = Shard::new(self.layout.range(rank), initial, optimizer, Box::new(rate));
        let handler = Arc::clone(&clients_state) as Arc<dyn RequestHandler>;
        let server = Arc::new(ShardServer::new(shard, update_mode, handler));
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
        Ok(RunningServer { server, clients, clients_state, threads, other_servers })
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
        let Some(RunningServer { clients_state: state, .. }) = &self.server else { return false };
        let is_open =
            |links: &mut Vec<Option<LinkOutcome>>| links[state.other_server_count..].contains(&None);
        let links = state.links.lock().unwrap_or_else(PoisonError::into_inner);
        match timeout {
            None => {
                drop(state.changed.wait_while(links, is_open));
                true
            }
            Some(timeout) => {
                let waited = state.changed.wait_timeout_while(links, timeout, is_open);
                !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            }
        }
    }

    /// On a server, returns each worker that this server has lost, and the cause of the loss. On a worker, returns an
    /// empty list.
    pub fn lost_workers(&self) -> Vec<(Rank, String)> {
        let Some(RunningServer { clients_state: state, clients, .. }) = &self.server else {
            return Vec::new();
        };
        let links = state.links.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = clients.iter().zip(links.iter()).skip(state.other_server_count);
        lost.filter_map(|(link, outcome)| match outcome {
            Some(LinkOutcome::Lost(problem)) => Some((link.peer, problem.clone())),
            _ => None,
        })
        .collect()
    }

    /// Sets the learning rate with which all servers apply the later gradients of all workers, so one call of one worker is
    /// enough. With synchronous servers, call this function before this worker pushes the gradient of the first step with
    /// the new rate.
    ///
    /// # Errors
    ///
    /// [`ParameterServerError::Unsupported`] if the rate is negative or not finite, and the errors of [`pull`](Self::pull).
    ///
    /// # Panics
    ///
    /// If this rank is a server.
    pub fn set_learning_rate(&mut self, rate: f32) -> Result<(), ParameterServerError> {
        if !(rate.is_finite() && rate >= 0.0) {
            let message = format!("the learning rate is {rate}; it must be a finite number of at least 0");
            return Err(ParameterServerError::Unsupported(message));
        }
        let mut note = StrategyNote::default();
        note[0] = rate.to_bits().into();
        self.client().send_note_to_all(note)
    }

    /// Receives the current parameters from all servers.
    ///
    /// # Errors
    ///
    /// [`ParameterServerError::ServerLost`], or [`ParameterServerError::Refused`] if a synchronous server has lost a worker. If a
    /// server is lost while it sends the parameters, some of `parameters` may have their new values.
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
        Ok(self.client().push(Some(gradient), StrategyNote::default(), None)?.outcomes)
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
        Ok(self.client().push(Some(gradient), StrategyNote::default(), Some(parameters))?.outcomes)
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
    /// the messengers: see [`Group::descriptors`]. The connections stay open until the messengers are dropped. Drop the
    /// messengers in their order: the end of a connection waits for the other rank.
    pub fn messengers(&self) -> Vec<Messenger> {
        let Some(RunningServer { clients, other_servers, .. }) = &self.server else {
            return self.client.iter().flat_map(ServerClient::messengers).collect();
        };
        let (of_clients, of_servers) = (clients.iter().map(PeerLink::messenger), other_servers.messengers());
        if ends_clients_first(clients) {
            of_clients.chain(of_servers).collect()
        } else {
            of_servers.into_iter().chain(of_clients).collect()
        }
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
        if let Some(RunningServer { server, clients, threads, mut other_servers, .. }) = self.server.take() {
            other_servers.close();
            clients.iter().for_each(|link| link.abort("the parameter server was closed"));
            for thread in threads {
                drop(thread.join());
            }
            drop(server);
            if ends_clients_first(&clients) {
                drop(clients);
                drop(other_servers);
            } else {
                drop(other_servers);
                drop(clients);
            }
        }
    }
}

/// Returns whether a server with these clients ends the connections with its clients before those with other servers. The end
/// of a connection waits for the other rank. If all servers first ended the connections with their clients, rank 0 and another
/// server would wait for each other.
fn ends_clients_first(clients: &[PeerLink]) -> bool {
    // Rank 0 is the first client of every other server.
    clients.first().is_none_or(|link| link.peer != Rank::ZERO)
}
