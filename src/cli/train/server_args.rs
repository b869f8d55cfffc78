//! The options of strategies with a parameter server.

use std::num::NonZeroU32;

use clap::Args;

use crate::train::ServerSettings;

#[derive(Args, Clone, Debug)]
pub(super) struct ServerArgs {
    /// The number of ranks that are parameter servers, with ps-sync and ps-async. These are the first ranks. The other ranks are
    /// workers. The default is 1
    #[arg(long, value_name = "N", help_heading = "Training")]
    servers: Option<NonZeroU32>,

    /// With ps-async, divide the learning rate of an update by the staleness of its gradient
    #[arg(long, help_heading = "Training")]
    staleness_aware: bool,
}

impl ServerArgs {
    pub(super) fn to_options(&self) -> ServerSettings {
        ServerSettings { servers: self.servers, staleness_aware: self.staleness_aware }
    }
}
