//! What a rank records, as the user asks for it.

use std::path::PathBuf;

/// What a rank records. By default it records nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RecordingOptions {
    /// If the job fails, the rank writes its last 1,000 operations to a file in this directory.
    pub flight_recorder: Option<PathBuf>,
    /// The ranks keep a timeline in memory, and rank 0 writes it to this file in
    /// [`Group::write_timeline`](crate::Group::write_timeline). Rank 0's setting applies to all ranks.
    pub timeline: Option<PathBuf>,
}

impl RecordingOptions {
    /// Returns these options; where they say nothing, those of `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            flight_recorder: self.flight_recorder.or(other.flight_recorder),
            timeline: self.timeline.or(other.timeline),
        }
    }
}
