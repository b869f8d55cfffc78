//! The rendezvous: how the ranks of a job find each other before the first link is opened.
//!
//! One process serves the rendezvous: `ringrun` or, if there is a peers file or another launcher, rank 0. All other ranks
//! of the job dial this process, prove that they know the job's secret, and register their addresses. When the last rank has
//! registered, all ranks receive the roster, which is the list of all ranks and their addresses.

// Bytes from other processes must not cause a panic.
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::panic, clippy::unreachable))]

mod client;
mod environment;
mod environment_error;
mod error;
mod exchange;
mod exit_report;
mod inherited_pipe;
mod message;
mod nodes;
mod other_launcher;
mod peers_file;
mod ports;
pub(crate) mod registration;
pub(crate) mod registry;
mod resolve;
mod roster;
mod server;
mod user_secret;

pub use client::register;
pub use environment::{
    FLIGHT_RECORDER_VARIABLE, JOB_ID_VARIABLE, JoinMethod, LaunchedRank, SECRET_VARIABLE, TIMELINE_VARIABLE,
    from_environment, path_from_environment, secret_from_environment,
};
pub use environment_error::EnvironmentError;
pub use error::StartError;
pub(crate) use exchange::{ExchangeOptions, exchange, user_secret_if_needed};
pub(crate) use exit_report::{EXIT_PIPE_VARIABLE, ReportImportance, report_to_launcher};
pub use nodes::{MetNodes, NodeOptions, meet_nodes};
pub use other_launcher::{DiscoveredRank, OtherLauncher, RendezvousHost};
pub use peers_file::{PeersFile, PeersFileError};
pub use ports::{LISTEN_PORTS_VARIABLE, PortRange, ports_from_environment};
pub use registration::Registration;
pub use registry::NoticeReceiver;
pub(crate) use resolve::{resolve_host, source_address};
pub(crate) use roster::is_loopback;
pub use roster::{Checksums, Member, Roster, SharedSettings, host_name, machine_id};
pub use server::{Server, ServerOptions, serve};
pub(crate) use user_secret::user_secret;
