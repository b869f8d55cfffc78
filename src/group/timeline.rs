//! Gathers the timelines of all ranks.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use super::clock::CLOCK_TAG;
use super::{Error, Group};
use crate::observe::clock_offset::ClockMap;
use crate::observe::perfetto;
use crate::observe::recorder::Recorder;
use crate::observe::timeline::TimelineContent;
use crate::observe::timeline_report::TimelineReport;
use crate::types::{Rank, SETUP_GROUP};

/// The longest timeline of a rank that rank 0 accepts, in bytes. With the limits of operations and spans, it has some 100 MB.
const TIMELINE_BYTES_MAX: usize = 256 << 20;

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
        let left_out = content.left_out.operations + content.left_out.spans + content.left_out.parts;
        let mut report = TimelineReport {
            path: recorder.timeline_path().unwrap_or(Path::new("")).to_owned(),
            ranks: self.world.get(),
            operations: content.operations.len() as u64,
            left_out,
            clock_error_us: clock.error_ns() as f64 / 1e3,
            problem: None,
        };
        if self.rank != Rank::ZERO {
            let summary = [report.operations, report.left_out, clock.error_ns() as u64];
            self.send(&summary, Rank::ZERO, CLOCK_TAG)?;
            self.send(&bytes, Rank::ZERO, CLOCK_TAG)?;
            return Ok(None);
        }
        let mut file = File::create(&report.path).and_then(|mut file| file.write_all(&bytes).map(|()| file));
        for peer in self.world.ranks().skip(1) {
            let mut summary = [0u64; 3];
            self.receive(&mut summary, peer, CLOCK_TAG)?;
            let bytes = self.receive_async::<u8>(TIMELINE_BYTES_MAX, peer, CLOCK_TAG)?.wait()?.elements;
            file = file.and_then(|mut file| file.write_all(&bytes).map(|()| file));
            let [operations, left_out, error_ns] = summary;
            report.operations = report.operations.saturating_add(operations);
            report.left_out = report.left_out.saturating_add(left_out);
            report.clock_error_us = report.clock_error_us.max(error_ns as f64 / 1e3);
        }
        report.problem = file.err().map(|error| error.to_string());
        Ok(Some(report))
    }
}
