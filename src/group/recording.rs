//! How a rank records its operations.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::Group;
use super::options::JoinOptions;
use crate::observe::flight_record::{FlightDirectory, RankIdentity};
use crate::observe::recorder::Recorder;
use crate::rendezvous::{StartError, host_name};
use crate::types::Rank;

impl Group {
    /// Writes the last operations of this rank to the directory of the flight recorder, and `reason`. Does nothing if the flight
    /// recorder is off, or if it has already written because the job has failed. If the file cannot be written, logs a warning.
    ///
    /// The library calls this function itself when an operation fails. Call it if the program fails for another reason.
    pub fn write_flight_record(&self, reason: &str) {
        if let Some(recorder) = &self.recorder {
            recorder.write_because(reason);
        }
    }

    pub(crate) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    pub(super) fn start_recording(&mut self, recorder: Option<Arc<Recorder>>) {
        self.recorder = recorder;
        if let (Some(job), Some(recorder)) = (&self.job, &self.recorder) {
            job.driver.meter().start_recording(recorder);
        }
    }
}

/// The files to which a rank records, which it has checked before it joins.
pub(super) struct RecordingFiles {
    identity: RankIdentity,
    flight: Option<FlightDirectory>,
    timeline_path: Option<PathBuf>,
}

impl RecordingFiles {
    pub(super) fn open(options: &JoinOptions) -> Result<Self, StartError> {
        let (rank, world) = options.method.rank_and_world();
        let failed =
            |what, path: &Path, source| StartError::Recording { what, path: path.to_owned(), source };
        let identity = RankIdentity { rank: rank.get(), ranks: world.get(), host: host_name() };
        let open = |path: &Path| {
            FlightDirectory::open(path, identity.clone())
                .map_err(|source| failed("flight recorder", path, source))
        };
        if let (false, Some(path)) = (cfg!(feature = "train"), &options.recording.timeline) {
            let source = io::Error::other("timelines need a build with the feature `train`");
            return Err(failed("timeline", path, source));
        }
        let flight = options.recording.flight_recorder.as_deref().map(open).transpose()?;
        if let Some(path) = options.recording.timeline.as_deref().filter(|_| rank == Rank::ZERO) {
            check_writable(path).map_err(|source| failed("timeline", path, source))?;
        }
        Ok(Self { identity, flight, timeline_path: options.recording.timeline.clone() })
    }

    /// Returns the recorder, if anything is recorded. `has_timeline` says whether the ranks record a timeline from `epoch` on.
    pub(super) fn into_recorder(self, epoch: Instant, has_timeline: bool) -> Option<Arc<Recorder>> {
        let timeline = has_timeline.then_some((self.identity, self.timeline_path));
        Recorder::new(epoch, self.flight, timeline).map(Arc::new)
    }
}

/// Checks that a file can be written. Does not change an existing file.
fn check_writable(path: &Path) -> io::Result<()> {
    let exists = path.exists();
    OpenOptions::new().create(true).append(true).open(path)?;
    if exists { Ok(()) } else { fs::remove_file(path) }
}
