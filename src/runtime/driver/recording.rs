//! Records the ends of operations and the failure of the job, for the flight recorder and the timeline.

use super::core::Core;
use crate::engine::{Failure, OpId};
use crate::observe::event::{EventNumber, EventStatus};
use crate::runtime::error::Error;
use crate::shm::RoundsMemory;
use crate::transport::SocketTransport;
use crate::types::Rank;

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
