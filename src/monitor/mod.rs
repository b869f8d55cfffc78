//! Shows runs that are in progress: each rank serves its status over HTTP, and `ringrun top` reads the status of all ranks.
//!
//! A rank has one thread for its [`HttpServer`]. This thread only reads the status that the rank's training thread writes, so
//! no request can stop the training.

mod http_client;
mod http_request;
mod http_server;
mod listen_address;
mod live_status;
mod prometheus;
mod run_directory;

pub(crate) use self::http_client::get;
pub(crate) use self::http_server::{HttpResponse, HttpServer};
pub(crate) use self::listen_address::ListenAddress;
pub(crate) use self::live_status::{
    EpochStatus, LinkStatus, LiveRankStatus, PartSeconds, RunStage, SlowestStatus,
};
pub(crate) use self::prometheus::write_metrics;
pub(crate) use self::run_directory::{RunDirectory, RunRegistration};
