//! What a training strategy does with the requests to a server.

use super::message::StrategyNote;
use super::shard::PushOutcome;

/// The parts of a server that depend on the training strategy. The argument `client` is the index of a client in the
/// list of the server's clients, which is in rank order.
pub(crate) trait RequestHandler: Send + Sync {
    /// Returns whether the server should apply a gradient that a client has pushed with the note `note`. The shard is
    /// locked during the call.
    fn wants_gradient(&self, _client: usize, _note: &StrategyNote) -> bool {
        true
    }

    /// Called after the server has applied or dropped the gradient of a client. The shard is locked during the call.
    fn record_push_outcome(&self, _client: usize, _note: &StrategyNote, _outcome: PushOutcome) {}

    /// Returns the note of the reply to a request. May block for at most 500 ms.
    fn reply_note(&self, _client: usize, _kind: PushOrNote, _note: &StrategyNote) -> StrategyNote {
        StrategyNote::default()
    }

    /// Returns the words that clients can fetch at the end of the run.
    fn published_results(&self) -> Option<Vec<u32>> {
        None
    }

    /// Called after a client has closed its link or is lost.
    fn record_link_end(&self, _client: usize, _outcome: &LinkOutcome) {}
}

/// The kind of request that [`RequestHandler::reply_note`] answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PushOrNote {
    /// A push. The server has already called [`RequestHandler::record_push_outcome`] for this push.
    Push,
    /// A request that has only a note.
    Note,
}

/// How the link with a client ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LinkOutcome {
    /// The client has closed its link.
    Closed,
    /// The client is lost or sent an invalid request. The text names the cause.
    Lost(String),
}
