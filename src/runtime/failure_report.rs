//! Reports failures to `ringrun`, which then knows which rank failed first.

use std::sync::Arc;

use crate::rendezvous::{ReportImportance, report_to_launcher};
use crate::types::{Contract, Rank, Site, WorldSize};
use crate::wire::{Cause, CauseKind, ExitRecord};

#[derive(Clone)]
pub(crate) struct FailureReporter {
    importance: ReportImportance,
    /// For each rank of this job: its rank in the job that `ringrun` has started. The two differ in isolated groups.
    launched_ranks: Arc<[Rank]>,
}

impl FailureReporter {
    pub(crate) fn of_launched_job(world: WorldSize) -> Self {
        Self { importance: ReportImportance::Job, launched_ranks: world.ranks().collect() }
    }

    pub(crate) fn for_isolated_group(&self, members: &[Rank]) -> Self {
        let launched_ranks = members.iter().map(|&rank| self.launched_rank(rank).unwrap_or(rank)).collect();
        Self { importance: ReportImportance::IsolatedGroup, launched_ranks }
    }

    pub(crate) fn report_cause(&self, cause: &Cause, operation: Option<(Contract, Site)>) {
        let operation = operation.map(|(contract, site)| format!("{contract} at {site}"));
        let mut record = ExitRecord::new(cause, operation.unwrap_or_default());
        record.ranks = record.ranks.into_iter().filter_map(|rank| self.launched_rank(rank)).collect();
        report_to_launcher(self.importance, &record);
    }

    pub(crate) fn report_lost_at_start(&self, rank: Rank, host: &str) {
        let operation = "the start of the job".into();
        let record =
            ExitRecord { kind: CauseKind::PeerLost, ranks: vec![rank], host: host.to_owned(), operation };
        report_to_launcher(self.importance, &record);
    }

    /// Reports that the program of this rank ends because a rank of the job failed for a reason of its own.
    pub(crate) fn report_failed_rank(&self, rank: Rank) {
        let ranks = self.launched_rank(rank).into_iter().collect();
        let (host, operation) = (String::new(), String::new());
        let record = ExitRecord { kind: CauseKind::RankFailed, ranks, host, operation };
        report_to_launcher(ReportImportance::Program, &record);
    }

    fn launched_rank(&self, rank: Rank) -> Option<Rank> {
        self.launched_ranks.get(rank.index()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::WorldSize;

    #[test]
    fn ranks_of_isolated_groups_are_translated() {
        let job = FailureReporter::of_launched_job(WorldSize::new(6).unwrap());
        let outer = job.for_isolated_group(&[5, 3, 1].map(Rank::new));
        let inner = outer.for_isolated_group(&[2, 0].map(Rank::new));
        let ranks = |reporter: &FailureReporter| -> Vec<u32> {
            reporter.launched_ranks.iter().map(|rank| rank.get()).collect()
        };
        assert_eq!(
            (ranks(&job), ranks(&outer), ranks(&inner)),
            (vec![0, 1, 2, 3, 4, 5], vec![5, 3, 1], vec![1, 5])
        );
        assert_eq!(inner.launched_rank(Rank::new(2)), None);
    }
}
