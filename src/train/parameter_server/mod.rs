//! A parameter server: some ranks hold the parameters and apply gradients, and the other ranks compute gradients.
//!
//! The parameters are divided among the servers. A worker sends its gradient to all servers (it pushes), and receives the
//! new parameters from them (it pulls). Each pair of a worker and a server has an isolated group of two ranks, so the loss
//! of a worker fails only the operations in the groups of this worker. Source: Li et al., "Scaling distributed machine
//! learning with the parameter server", OSDI 2014.
//!
//! A worker has at most one request in progress with each server, so a server holds at most one request of each worker.
//! A server has a thread for each worker. If the server is asynchronous, a slow worker does not delay other workers.

mod api;
mod client;
mod error;
mod links;
mod message;
mod server;
mod shard;

pub use api::{ParameterServer, ParameterServerOptions};
pub(crate) use client::ServerClient;
pub use error::{ParameterServerError, RefusalReason};
pub(crate) use links::{Links, PairLink, ShardLayout, connect};
pub(crate) use message::Note;
pub(crate) use server::{AnsweredRequest, Handler, LinkOutcome, ShardServer, Synchrony};
pub use shard::PushOutcome;
pub(crate) use shard::{Shard, StalenessCounts, StalenessRule};
