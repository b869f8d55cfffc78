//! Records the operations of the core for the flight recorder and the timeline.

use super::core::Core;
use super::tasks::Submission;
use crate::engine::{Failure, OpId, OperationRequest, Timestamp};
use crate::observe::event::{Direction, EventNumber, EventStatus, OperationStart};
use crate::runtime::error::Error;
use crate::shm::RoundsMemory;
use crate::transport::SocketTransport;
use crate::types::Rank;

impl Submission {
    pub(super) fn direction(&self) -> Direction {
        match self {
            Self::Collective(..) => Direction::Collective,
            Self::Send(to, _) => Direction::To(*to),
            Self::Receive(pattern, _) => Direction::From(pattern.source),
        }
    }
}

/// Returns what is known of an operation when it is submitted.
pub(super) fn operation_start(
    request: &OperationRequest,
    direction: Direction,
    submitted: Timestamp,
) -> OperationStart {
    let OperationRequest { group, contract, site, .. } = *request;
    OperationStart { group, contract, direction, site, submitted }
}

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    pub(super) fn record_end(&mut self, id: OpId, status: EventStatus) {
        if let (Some(recorder), Some(event)) = (&self.recorder, self.recorded.remove(&id)) {
            recorder.finish(event, status);
        }
    }

    /// Writes the last operations of this rank after a failure of the job, if the flight recorder is on.
    pub(super) fn write_flight_record(&self) {
        let (Some(recorder), Some(Failure { cause, reported_by })) =
            (&self.recorder, self.link_driver.failure())
        else {
            return;
        };
        let error = Error::Failed { cause: cause.clone(), reported_by: *reported_by };
        let mut awaited: Vec<(EventNumber, Vec<Rank>)> = Vec::new();
        for (id, ranks) in self.link_driver.engine().awaited_ranks() {
            let whole = self.stage_of.get(&id).map_or(id, |&(whole, _)| whole);
            let Some(&event) = self.recorded.get(&whole) else { continue };
            match awaited.iter_mut().find(|(known, _)| *known == event) {
                Some((_, known)) => known.extend(ranks),
                None => awaited.push((event, ranks)),
            }
        }
        for (_, ranks) in &mut awaited {
            ranks.sort_unstable();
            ranks.dedup();
        }
        recorder.write_failure(&error.to_string(), &awaited);
    }
}
