//! A parameter server: some ranks hold the parameters and apply gradients, and the other ranks compute gradients.
//!
//! Each server holds a part of the parameters. A worker pushes its gradient to all servers, and pulls the new
//! parameters from all servers. Each pair of a worker and a server has an isolated group of two ranks. If a worker
//! is lost, only the operations in the groups of this worker fail. Source: Li et al., "Scaling distributed machine
//! learning with the parameter server", OSDI 2014.
//!
//! A worker has at most one request in progress with each server. This bounds the memory of a server. A server has a
//! thread for each client, so a slow worker does not delay the other workers of an asynchronous server.

mod api;
mod client;
mod encoding;
mod error;
mod handler;
mod links;
mod message;
mod options;
mod server;
mod server_link;
mod shard;

pub use api::ParameterServer;
pub(crate) use client::ServerClient;
pub(crate) use encoding::MessageCodecs;
pub use error::{ParameterServerError, RefusalReason};
pub(crate) use handler::{LinkOutcome, PushOrNote, RequestHandler};
pub(crate) use links::{Links, ShardLayout, connect_clients_to_servers};
pub(crate) use message::StrategyNote;
pub use options::ParameterServerOptions;
pub(crate) use server::{ShardServer, UpdateMode};
pub use shard::PushOutcome;
pub(crate) use shard::{Shard, StalenessCounts, StalenessRule};
