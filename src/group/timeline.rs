//! Gathers the timelines of all ranks.

use std::fmt;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::clock::CLOCK_TAG;
use super::{Error, Group};
use crate::observe::clock_offset::ClockMap;
use crate::observe::perfetto;
use crate::observe::recorder::Recorder;
use crate::observe::timeline::TimelineContent;
use crate::types::{Rank, SETUP_GROUP, counted};

/// The longest timeline of a rank that rank 0 accepts, in bytes. With the limits of operations and spans, it has some 100 MB.
const TIMELINE_BYTES_MAX: usize = 256 << 20;

/// A timeline that rank 0 has written.
#[derive(Clone, PartialEq, Debug)]
pub struct TimelineReport {
    /// The file.
    pub path: PathBuf,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of operations of all ranks in the timeline.
    pub operations: u64,
    /// The number of operations, steps of operations and parts of training that the ranks left out, because there were too many.
    pub left_out: u64,
    /// The largest possible error of the times of a rank relative to rank 0, in microseconds.
    pub clock_error_us: f64,
    /// Why the file is not complete; `None` if it is.
    pub problem: Option<String>,
}

impl fmt::Display for TimelineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, ranks, operations, left_out, clock_error_us, problem } = self;
        if let Some(problem) = problem {
            return write!(f, "warning: the timeline {} could not be written: {problem}", path.display());
        }
        write!(
            f,
            "timeline {}: {} of {}, clocks within {clock_error_us:.1} us",
            path.display(),
            counted(operations, "operation"),
            counted(ranks, "rank")
        )?;
        if *left_out > 0 {
            write!(
                f,
                "; the last {left_out} operations, steps and parts of training did not fit and are left out"
            )?;
        }
        Ok(())
    }
}

/// What rank 0 needs to know of a rank's timeline, as numbers of a message: the number of operations, the number of events that
/// were left out, and the error of the clock in nanoseconds.
type TimelineSummary = [u64; 3];

impl Group {
    /// Ends the timeline, and writes it to the file of [`JoinOptions::recording`](super::JoinOptions::recording) on rank 0,
    /// with the operations of all ranks on the clock of rank 0. All ranks of the job must call this function on the group of
    /// all ranks. Returns a report on rank 0, and `None` on other ranks and without a timeline.
    ///
    /// If this function is not called, or if the job fails, each rank writes its part to `FILE.rank.N` when its last group is
    /// dropped. Parts can be concatenated to one file.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::all_reduce`].
    pub fn write_timeline(&mut self) -> Result<Option<TimelineReport>, Error> {
        let Some(recorder) = self.recorder.clone() else { return Ok(None) };
        let Some(content) = recorder.take_timeline() else { return Ok(None) };
        // With a separate group number, these messages cannot be confused with those of the program.
        let id = std::mem::replace(&mut self.id, SETUP_GROUP);
        let written = self.gather_timelines(&recorder, &content);
        self.id = id;
        if written.is_err() {
            recorder.write_part_of_timeline(&content);
        }
        written
    }

    fn gather_timelines(
        &self,
        recorder: &Recorder,
        content: &TimelineContent,
    ) -> Result<Option<TimelineReport>, Error> {
        let end = if self.job.is_some() { Some(self.measure_clock(recorder)?) } else { None };
        let clock = ClockMap::new(recorder.start_offset(), end);
        let bytes = perfetto::encode(content, clock);
        let operations = content.operations.len() as u64;
        let left_out = content.left_out.operations + content.left_out.spans + content.left_out.parts;
        let summary: TimelineSummary = [operations, left_out, clock.error_ns() as u64];
        if self.rank != Rank::ZERO {
            self.send(&summary, Rank::ZERO, CLOCK_TAG)?;
            self.send(&bytes, Rank::ZERO, CLOCK_TAG)?;
            return Ok(None);
        }
        let path = recorder.timeline_path().unwrap_or(Path::new("")).to_owned();
        let mut file = File::create(&path).and_then(|mut file| file.write_all(&bytes).map(|()| file));
        let mut all = vec![summary];
        for peer in self.world.ranks().skip(1) {
            let mut summary: TimelineSummary = [0; 3];
            self.receive(&mut summary, peer, CLOCK_TAG)?;
            let bytes = self.receive_async::<u8>(TIMELINE_BYTES_MAX, peer, CLOCK_TAG)?.wait()?.elements;
            file = file.and_then(|mut file| file.write_all(&bytes).map(|()| file));
            all.push(summary);
        }
        Ok(Some(make_report(path, &all, file.err())))
    }
}

fn make_report(path: PathBuf, all: &[TimelineSummary], error: Option<io::Error>) -> TimelineReport {
    let sum = |index: usize| all.iter().map(|summary| summary[index]).fold(0, u64::saturating_add);
    let error_ns = all.iter().map(|summary| summary[2]).max().unwrap_or_default();
    TimelineReport {
        path,
        ranks: all.len() as u32,
        operations: sum(0),
        left_out: sum(1),
        clock_error_us: error_ns as f64 / 1e3,
        problem: error.map(|error| error.to_string()),
    }
}
