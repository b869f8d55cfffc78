//! The options of strategies with a parameter server.

use std::num::NonZeroU32;

use clap::Args;

use crate::train::ServerSettings;

#[derive(Args, Clone, Debug)]
pub(super) struct ServerArgs {
    /// The number of parameter servers with ps-sync and ps-async. Ranks 0 to N - 1 are servers, the other ranks are
    /// workers [default: 1]
    #[arg(long, value_name = "N", help_heading = "Training")]
    servers: Option<NonZeroU32>,

    /// With ps-async, divide the learning rate of an update by the staleness of its gradient. Gradients with a
    /// staleness of 0 or 1 keep the full learning rate
    #[arg(long, help_heading = "Training")]
    staleness_aware: bool,
}

impl ServerArgs {
    pub(super) fn to_server_settings(&self) -> ServerSettings {
        ServerSettings { servers: self.servers, staleness_aware: self.staleness_aware }
    }
}
