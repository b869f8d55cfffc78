//! Runs a training job. If the run fails, tells `ringrun` which rank failed first.

use std::sync::atomic::AtomicBool;

use super::gossip::GossipError;
use super::parameter_server::ParameterServerError;
use super::progress::Observer;
use super::run::run_on_this_rank;
use super::{Config, Summary, TrainError};
use crate::group::Group;
use crate::types::Rank;

/// Trains the model that `config` describes. All ranks of `group` must call this function. The function reports
/// progress to `observer`. Pass [`SilentObserver`](super::SilentObserver) on all ranks except rank 0.
///
/// If `stop` becomes true on any rank, all ranks end after the current step. If the strategy does not exchange gradients
/// in each step, the ranks end a little later (`docs/stop-signals.md`). The run saves a checkpoint and writes the
/// report, but does not evaluate the model.
///
/// # Errors
///
/// See [`TrainError`]. If one rank fails, all ranks return an error.
pub fn run(
    group: &mut Group,
    config: &Config,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let result = run_on_this_rank(group, config, stop, observer);
    if let Err(error) = &result
        && let Some(rank) = find_failed_rank(error, group.rank())
    {
        group.report_failed_rank(rank);
    }
    result
}

/// Returns the rank at fault for an error of the rank `own`. Returns `None` if no single rank is at fault, and for a failure
/// of the group, because the group itself tells `ringrun` its cause.
fn find_failed_rank(error: &TrainError, own: Rank) -> Option<Rank> {
    match error {
        TrainError::Group(_)
        | TrainError::ParameterServer(ParameterServerError::Group(_))
        | TrainError::Gossip(GossipError::Group(_))
        | TrainError::Options(_)
        | TrainError::ArgumentsDiffer { .. }
        | TrainError::DataDiffer { .. }
        | TrainError::ParametersDiffer { .. } => None,
        TrainError::OtherRankFailed { rank, .. } => Some(*rank),
        TrainError::ParameterServer(error) => match error {
            ParameterServerError::ServerLost { server, .. }
            | ParameterServerError::Refused { server, .. } => Some(*server),
            ParameterServerError::WorkerLost { worker, .. }
            | ParameterServerError::AllWorkersLost { worker, .. } => Some(*worker),
            _ => Some(own),
        },
        TrainError::Gossip(
            GossipError::CoordinatorFailed { coordinator, .. }
            | GossipError::CoordinatorLostAtEnd { coordinator, .. },
        ) => Some(*coordinator),
        TrainError::Gossip(_)
        | TrainError::Data(_)
        | TrainError::Checkpoint(_)
        | TrainError::ModelFile(_)
        | TrainError::Diverged(_)
        | TrainError::Layer(_) => Some(own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Cause, Error};
    use crate::train::{RefusalReason, RunPhase};

    #[test]
    fn the_rank_that_an_error_names_is_at_fault() {
        let (own, other, message) = (Rank::new(1), Rank::new(4), || "it failed".to_owned());
        let cause = Cause::PeerLeft { rank: other, host: "h".into() };
        let group_error = || Error::Failed { cause: cause.clone(), reported_by: None };
        let phase = RunPhase::Data;
        let refused = ParameterServerError::Refused {
            server: other,
            reason: RefusalReason::Storage,
            problem: message(),
        };
        let coordinator_failed = GossipError::CoordinatorFailed { coordinator: other, problem: message() };
        for (error, expected) in [
            (TrainError::OtherRankFailed { rank: other, phase, message: message() }, Some(other)),
            (TrainError::ParameterServer(refused), Some(other)),
            (TrainError::Gossip(coordinator_failed), Some(other)),
            (TrainError::Gossip(GossipError::Interrupted), Some(own)),
            (TrainError::Diverged(message()), Some(own)),
            (TrainError::Options(message()), None),
            (TrainError::Group(group_error()), None),
            (TrainError::Gossip(GossipError::Group(group_error())), None),
        ] {
            assert_eq!(find_failed_rank(&error, own), expected, "{error}");
        }
    }
}
