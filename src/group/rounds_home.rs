//! Who has the state of a group's rounds in shared memory: the group, or the core. A blocking collective runs in the thread that
//! calls it, and uses the rounds of the group without a lock. Asynchronous collectives run in the core.

use std::mem;
use std::sync::Arc;

use crate::runtime::driver::{CoreRounds, Driver, RoundsKey};
use crate::runtime::host_rounds::HostRounds;
use crate::types::Rank;

/// Where the state of a group's rounds is.
pub(super) enum RoundsHome {
    /// The group owns the rounds.
    Owned(Box<HostRounds>),
    /// The group has handed the rounds over to the core, because of an asynchronous operation.
    InCore,
}

impl RoundsHome {
    /// Returns the rounds. Takes them back from the core, if no operation of `group` uses them. Otherwise returns `None`.
    pub(super) fn take_back(&mut self, driver: &Driver, group: u32) -> Option<&mut HostRounds> {
        if let Self::InCore = self
            && let Some(host_rounds) = driver.take_rounds(group)
        {
            *self = Self::Owned(host_rounds);
        }
        match self {
            Self::Owned(host_rounds) => Some(host_rounds),
            Self::InCore => None,
        }
    }

    /// Hands the rounds over to the core, unless the core already has them. `members` are the world ranks that share the memory.
    pub(super) fn hand_over(&mut self, driver: &Driver, key: RoundsKey, members: &Arc<[Rank]>) {
        if let Self::Owned(host_rounds) = mem::replace(self, Self::InCore) {
            driver.add_rounds(key, CoreRounds::new(host_rounds, Arc::clone(members)));
        }
    }
}
