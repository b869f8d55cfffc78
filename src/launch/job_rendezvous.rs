//! The rendezvous of a job: the place at which its ranks find each other.

use std::net::{IpAddr, SocketAddr};

use super::error::LaunchError;
use super::message::LaunchMessage;
use super::output_messages::OutputCommandSender;
use super::plan::LaunchPlan;
use crate::rendezvous::{NoticeReceiver, Server, ServerOptions};
use crate::wire::Secret;

/// The place at which the ranks find each other.
pub(super) struct JobRendezvous {
    pub(super) address: SocketAddr,
    /// The server, unless the ringrun of another node serves it.
    pub(super) server: Option<Server>,
    /// The secret of the job.
    pub(super) secret: String,
}

/// Starts the rendezvous server of the job. While ranks are missing, the server prints their numbers.
pub(super) fn start_rendezvous_server(
    plan: &LaunchPlan,
    (host, secret, job_id): (IpAddr, &str, &str),
    output: OutputCommandSender,
) -> Result<Server, LaunchError> {
    let secret = Secret::new(secret.as_bytes()).map_err(|error| LaunchError::Rendezvous(error.into()))?;
    let job_id =
        u128::from_str_radix(job_id, 16).expect("an id that this program has just made").to_be_bytes();
    Server::start(ServerOptions {
        host,
        ports: plan.ports,
        world: plan.world,
        secret,
        job_id,
        start_timeout: plan.limits.start_timeout,
        notices: NoticeReceiver::Report(Box::new(move |notice| {
            output.print_message(LaunchMessage::warning(notice));
        })),
    })
    .map_err(LaunchError::Rendezvous)
}
