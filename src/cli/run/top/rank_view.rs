//! What `ringrun top` knows about a rank.

use std::net::SocketAddr;

use serde::Serialize;

use crate::monitor::LiveRankStatus;

/// What is known about a rank.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RankView {
    pub(super) address: SocketAddr,
    /// `None` if the rank did not answer.
    pub(super) status: Option<LiveRankStatus>,
    /// Why there is no status.
    pub(super) error: Option<String>,
    /// The job and the rank from the run directory, for a rank that does not answer.
    #[serde(skip)]
    pub(super) known: Option<(String, u32)>,
}
