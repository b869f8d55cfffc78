//! What a rank keeps in memory for the timeline.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::clock_offset::ClockOffset;
use super::event::RecordedEvent;
use super::event_log::{EventLog, Keep};
use super::flight_record::RankIdentity;
use super::operation_part::OperationPart;
use super::span::Span;

/// The most operations of a rank in a timeline. The first ones are kept. They take 8 MiB.
pub(crate) const TIMELINE_OPERATIONS_MAX: usize = 1 << 17;
/// The most parts of training of a rank in a timeline. The first ones are kept. They take some 12 MiB.
const SPANS_MAX: usize = 1 << 18;
/// The most parts of operations of a rank in a timeline. The first ones are kept. They take 16 MiB.
const OPERATION_PARTS_MAX: usize = 1 << 18;

/// The timeline of a rank.
pub(crate) struct TimelineLog {
    pub(super) identity: RankIdentity,
    /// Where rank 0 writes the timeline. If the job fails, each rank writes its part next to this file. `None` on a rank that has
    /// not been given the option.
    pub(super) path: Option<PathBuf>,
    pub(super) operations: EventLog,
    spans: FirstOf<Span>,
    parts: FirstOf<OperationPart>,
    /// False after the timeline has been written.
    is_on: AtomicBool,
    /// The difference between this rank's clock and that of rank 0 at the start of the job.
    pub(super) start: OnceLock<ClockOffset>,
}

/// The content of a rank's timeline.
#[derive(Debug)]
pub(crate) struct TimelineContent {
    pub(crate) identity: RankIdentity,
    pub(crate) operations: Vec<RecordedEvent>,
    pub(crate) spans: Vec<Span>,
    pub(crate) parts: Vec<OperationPart>,
    /// What did not fit.
    pub(crate) left_out: LeftOut,
    /// When the timeline ended, in nanoseconds on the clock of the rank.
    pub(crate) ended_ns: u64,
}

/// How many entries did not fit into a timeline.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LeftOut {
    pub(crate) operations: u64,
    pub(crate) spans: u64,
    pub(crate) parts: u64,
}

/// The first entries of a list, and the number of the others. Any thread may add an entry.
struct FirstOf<T> {
    entries: Mutex<Vec<T>>,
    max: usize,
    left_out: AtomicU64,
}

impl<T> FirstOf<T> {
    const fn new(max: usize) -> Self {
        Self { entries: Mutex::new(Vec::new()), max, left_out: AtomicU64::new(0) }
    }

    fn add(&self, entry: T) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() < self.max {
            entries.push(entry);
        } else {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes the entries, and returns how many were left out.
    fn take(&self) -> (Vec<T>, u64) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut *entries), self.left_out.load(Ordering::Relaxed))
    }
}

impl TimelineLog {
    pub(super) fn new(identity: RankIdentity, path: Option<PathBuf>) -> Self {
        Self {
            identity,
            path,
            operations: EventLog::new(TIMELINE_OPERATIONS_MAX, Keep::First),
            spans: FirstOf::new(SPANS_MAX),
            parts: FirstOf::new(OPERATION_PARTS_MAX),
            is_on: AtomicBool::new(true),
            start: OnceLock::new(),
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Ends the recording. Returns false if it has already ended.
    pub(super) fn stop(&self) -> bool {
        self.is_on.swap(false, Ordering::Relaxed)
    }

    pub(super) fn add_span(&self, span: Span) {
        self.spans.add(span);
    }

    pub(super) fn add_part(&self, part: OperationPart) {
        self.parts.add(part);
    }

    /// Takes the spans, and returns how many were left out.
    pub(super) fn take_spans(&self) -> (Vec<Span>, u64) {
        self.spans.take()
    }

    /// Takes the parts of operations, and returns how many were left out.
    pub(super) fn take_parts(&self) -> (Vec<OperationPart>, u64) {
        self.parts.take()
    }
}
