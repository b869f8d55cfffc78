//! The recorder of a rank.

#[cfg(feature = "train")]
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::call_sites::CallSites;
#[cfg(feature = "train")]
use super::clock_offset::ClockMap;
use super::clock_offset::ClockOffset;
use super::event::{Direction, EventNumber, EventStatus, OperationStart, RecordedEvent};
use super::event_log::{EventLog, EventWords, Keep};
use super::flight_record::{FlightDirectory, FlightRecord, RankIdentity};
use super::group_counters::GroupCounters;
use super::operation_part::OperationPart;
#[cfg(feature = "train")]
use super::perfetto;
use super::span::{Span, SpanKind};
use super::step::current_step;
use super::timeline::{LeftOut, TIMELINE_OPERATIONS_MAX, TimelineContent, TimelineLog};
use crate::types::{LOCAL_GROUP_BIT, Rank};

/// The number of operations that the flight recorder keeps.
pub(crate) const LAST_OPERATIONS: usize = 1000;

/// Records the operations of a rank. Threads record without locks.
pub(crate) struct Recorder {
    /// All times are measured from this time.
    epoch: Instant,
    next_number: AtomicU64,
    sites: CallSites,
    groups: GroupCounters,
    /// The last operations, for the flight recorder.
    last: Option<EventLog>,
    flight: Option<FlightDirectory>,
    /// Whether the record of a failure has been written.
    has_failure_record: AtomicBool,
    timeline: Option<TimelineLog>,
}

impl Recorder {
    /// Returns a recorder whose times are measured from `epoch`; `None` if there is nothing to record.
    pub(crate) fn new(
        epoch: Instant,
        flight: Option<FlightDirectory>,
        timeline: Option<(RankIdentity, Option<PathBuf>)>,
    ) -> Option<Self> {
        (flight.is_some() || timeline.is_some()).then(|| Self {
            epoch,
            next_number: AtomicU64::new(0),
            sites: CallSites::new(),
            groups: GroupCounters::new(),
            last: flight.is_some().then(|| EventLog::new(LAST_OPERATIONS, Keep::Last)),
            flight,
            has_failure_record: AtomicBool::new(false),
            timeline: timeline.map(|(identity, path)| TimelineLog::new(identity, path)),
        })
    }

    /// Returns the time since the start of the recorder.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Records an operation that the program has submitted.
    pub(crate) fn submit(&self, start: &OperationStart) -> EventNumber {
        let number = EventNumber(self.next_number.fetch_add(1, Ordering::Relaxed));
        let is_counted = start.direction == Direction::Collective && start.group & LOCAL_GROUP_BIT == 0;
        let sequence = if is_counted { self.groups.count(start.group) } else { None };
        let words = EventWords::encode(start, sequence, self.sites.index_of(start.site));
        self.for_each_log(|log| log.submit(number, &words));
        number
    }

    /// Records that the rank has begun to execute an operation.
    pub(crate) fn begin(&self, number: EventNumber, time: Duration) {
        self.for_each_log(|log| log.set_begun(number, time));
    }

    /// Records that an operation has ended now.
    pub(crate) fn finish(&self, number: EventNumber, status: EventStatus) {
        let now = self.now();
        self.for_each_log(|log| log.set_finished(number, now, status));
    }

    fn for_each_log(&self, write: impl Fn(&EventLog)) {
        self.last.iter().for_each(&write);
        if let Some(timeline) = self.timeline.as_ref().filter(|timeline| timeline.is_on()) {
            write(&timeline.operations);
        }
    }

    /// Returns whether this rank keeps a timeline.
    pub(crate) fn has_timeline(&self) -> bool {
        self.timeline.is_some()
    }

    /// Returns where rank 0 writes the timeline; `None` if this rank does not know it.
    pub(crate) fn timeline_path(&self) -> Option<&Path> {
        self.timeline.as_ref()?.path.as_deref()
    }

    /// Adds a part of training that ends now to the timeline.
    pub(super) fn add_span(&self, kind: SpanKind, begun: Duration) {
        if let Some(timeline) = self.timeline.as_ref().filter(|timeline| timeline.is_on()) {
            timeline.add_span(Span { kind, step: current_step(), begun, ended: self.now() });
        }
    }

    /// Adds a part of an operation, from `begun` to `ended`, to the timeline. `transfer` has the peer and the bytes.
    pub(crate) fn add_part(
        &self,
        name: &'static str,
        transfer: Option<(Rank, u64)>,
        (begun, ended): (Instant, Instant),
    ) {
        if let Some(timeline) = self.timeline.as_ref().filter(|timeline| timeline.is_on()) {
            let since_epoch = |time: Instant| time.saturating_duration_since(self.epoch);
            timeline.add_part(OperationPart {
                name,
                transfer,
                begun: since_epoch(begun),
                ended: since_epoch(ended),
            });
        }
    }

    /// Stores the difference between the clocks of this rank and of rank 0 at the start of the job.
    pub(crate) fn set_start_offset(&self, offset: ClockOffset) {
        if let Some(timeline) = &self.timeline {
            timeline.start.get_or_init(|| offset);
        }
    }

    /// Returns the difference between the clocks of this rank and of rank 0 at the start of the job.
    pub(crate) fn start_offset(&self) -> ClockOffset {
        self.timeline.as_ref().and_then(|timeline| timeline.start.get().copied()).unwrap_or_default()
    }

    /// Ends the timeline and returns its content. Returns `None` if there is no timeline, or if it has already ended.
    pub(crate) fn take_timeline(&self) -> Option<TimelineContent> {
        let timeline = self.timeline.as_ref().filter(|timeline| timeline.stop())?;
        let (spans, spans_left_out) = timeline.take_spans();
        let (parts, parts_left_out) = timeline.take_parts();
        let submitted = self.next_number.load(Ordering::Relaxed);
        let operations_left_out = submitted.saturating_sub(TIMELINE_OPERATIONS_MAX as u64);
        Some(TimelineContent {
            identity: timeline.identity.clone(),
            operations: timeline.operations.read(&self.sites),
            spans,
            parts,
            left_out: LeftOut {
                operations: operations_left_out,
                spans: spans_left_out,
                parts: parts_left_out,
            },
            ended_ns: self.now().as_nanos() as u64,
        })
    }

    /// Writes the record of the failure of the job. `awaited` has the ranks for which active operations wait. Only the first
    /// failure is written.
    pub(crate) fn write_failure(&self, error: &str, awaited: &[(EventNumber, Vec<Rank>)]) {
        if !self.has_failure_record.swap(true, Ordering::Relaxed) {
            self.write_record(error, awaited);
        }
    }

    /// Writes a record because of `reason`, unless the record of a failure has been written.
    pub(crate) fn write_because(&self, reason: &str) {
        if !self.has_failure_record.load(Ordering::Relaxed) {
            self.write_record(reason, &[]);
        }
    }

    fn write_record(&self, reason: &str, awaited: &[(EventNumber, Vec<Rank>)]) {
        let (Some(flight), Some(last)) = (&self.flight, &self.last) else { return };
        let events: Vec<RecordedEvent> = last.read(&self.sites);
        let total = self.next_number.load(Ordering::Relaxed);
        let record = FlightRecord::new(flight.identity(), (reason, self.now()), (&events, total), awaited);
        match flight.write(&record) {
            Ok(path) => log::info!("wrote the last operations of this rank to {}", path.display()),
            // The error for which the record was written is more important.
            Err((path, error)) => {
                log::warn!("the flight recorder could not write {}: {error}", path.display());
            }
        }
    }
}

#[cfg(feature = "train")]
impl Drop for Recorder {
    /// If the ranks did not gather the timeline, because the job failed or the program did not ask for it, writes this rank's
    /// part to a file of its own. The clocks are then known only from the start of the job.
    fn drop(&mut self) {
        if let Some(content) = self.take_timeline() {
            self.write_part_of_timeline(&content);
        }
    }
}

#[cfg(feature = "train")]
impl Recorder {
    /// Writes the timeline of this rank to a file of its own.
    pub(crate) fn write_part_of_timeline(&self, content: &TimelineContent) {
        let Some(path) = self.timeline_path() else { return };
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".rank.{}", content.identity.rank));
        let path = PathBuf::from(name);
        match fs::write(&path, perfetto::encode(content, ClockMap::new(self.start_offset(), None))) {
            Ok(()) => log::warn!("wrote only this rank's part of the timeline, to {}", path.display()),
            Err(error) => log::warn!("the timeline could not be written to {}: {error}", path.display()),
        }
    }
}
