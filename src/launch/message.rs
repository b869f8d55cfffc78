//! The messages of ringrun itself. This module performs no IO.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::types::Rank;

/// How important a message of ringrun is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MessageLevel {
    /// The job fails, or a rank has failed.
    Error,
    /// Something that the user should know.
    Warning,
    /// What the user has asked for, for example with `--verbose`.
    Info,
}

/// A message of ringrun itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchMessage {
    /// How important the message is.
    pub level: MessageLevel,
    /// One sentence, or one sentence and lines of a rank.
    pub text: String,
    /// The rank that the message is about, if it is about one rank.
    pub rank: Option<Rank>,
    /// The name of the host that the message is about; `None` for the host of ringrun.
    pub host: Option<Arc<str>>,
}

/// Returns a message as ringrun writes it to standard error, with a newline at the end.
pub type MessageFormat = fn(&LaunchMessage) -> String;

impl LaunchMessage {
    /// Makes a message that is not about a rank, or another host.
    pub(super) fn new(level: MessageLevel, text: impl Into<String>) -> Self {
        Self { level, text: text.into(), rank: None, host: None }
    }

    pub(super) fn error(text: impl Into<String>) -> Self {
        Self::new(MessageLevel::Error, text)
    }

    pub(super) fn warning(text: impl Into<String>) -> Self {
        Self::new(MessageLevel::Warning, text)
    }

    pub(super) fn info(text: impl Into<String>) -> Self {
        Self::new(MessageLevel::Info, text)
    }

    /// Says that the message is about this rank.
    pub(super) fn about(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Says that the message is about this host.
    pub(super) fn on_host(mut self, host: Option<&Arc<str>>) -> Self {
        self.host = host.cloned();
        self
    }

    /// Returns the message as text: `ringrun: TEXT`.
    pub fn to_text(&self) -> String {
        format!("ringrun: {}\n", self.text)
    }
}
