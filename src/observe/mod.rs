//! Records what a rank does: its last operations for the [flight recorder](flight_record), and its operations and the parts of
//! its steps for the timeline. A rank records nothing unless the user asks for one of the two.

mod call_sites;
pub(crate) mod clock_offset;
pub(crate) mod event;
mod event_log;
pub mod flight_comparison;
pub mod flight_record;
mod group_counters;
pub mod log_line;
pub(crate) mod operation_part;
#[cfg(feature = "train")]
pub(crate) mod perfetto;
pub(crate) mod recorder;
pub mod recording_options;
mod span;
pub(crate) mod step;
pub(crate) mod timeline;
#[cfg(feature = "train")]
pub(crate) mod timeline_report;
pub(crate) mod training_thread;
