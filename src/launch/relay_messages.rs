//! The messages between ringrun and its relays. A relay is a ringrun that ssh has started on a host from which ringrun reaches
//! further hosts.
//!
//! ```text
//!    ringrun                      relay on host a                        agent of host a, agents and relays of further hosts
//!       | <------ Hello ------------ |
//!       | ------- Open(0) ---------> | starts the agent of its own host
//!       | ------- Open(1, ssh) ----> | starts ssh
//!       | <====== bytes of channel 0, 1, ... ===============================> |
//!       | <------ Ended(1) --------- |                                        | has ended
//! ```
//!
//! A channel carries the bytes that ringrun and the program at its end would exchange through an ssh of ringrun, so all
//! messages of [agents](super::agent_messages) are the same behind any number of relays. The end of the relay's standard input
//! ends all its channels.

use std::ffi::OsString;

use serde::{Deserialize, Serialize};

/// The channel of the agent on the host of the relay. The channels from 1 belong to further hosts.
pub(super) const OWN_AGENT_CHANNEL: u16 = 0;

/// A message from ringrun to a relay.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum ToRelay {
    /// Start a program, and connect it to the channel: ssh with these arguments, or the agent of the host of the relay.
    Open { channel: u16, ssh: Option<Vec<OsString>> },
}

/// A message from a relay to ringrun.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum FromRelay {
    /// The version of the relay.
    Hello { version: String },
    /// The program of the channel has ended, and all its bytes have been passed on. The code is `None` if a signal killed it.
    Ended { channel: u16, code: Option<i32> },
}
