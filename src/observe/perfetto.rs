//! Writes timelines in the format of Perfetto: a sequence of protobuf messages, of which this file has the few that a timeline
//! needs. The format is documented in `protos/perfetto/trace/` of <https://github.com/google/perfetto>. Traces can be
//! concatenated.

use std::cmp::Reverse;

use prost::Message;

use super::clock_offset::ClockMap;
use super::event::{Direction, RecordedEvent};
use super::operation_part::OperationPart;
use super::span::Span;
use super::timeline::TimelineContent;
use crate::types::INTERNAL_GROUP_BITS;

/// The number of a rank's first track for operations. The numbers below belong to the tracks of training.
const FIRST_LANE: u64 = 16;
/// The number of a rank's first track for the parts of operations.
const FIRST_PART_LANE: u64 = 1 << 31;

/// A file: a sequence of packets.
#[derive(Clone, PartialEq, Message)]
struct Trace {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<TracePacket>,
}

/// A description of a track, or an event.
#[derive(Clone, PartialEq, Message)]
struct TracePacket {
    /// In nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    trusted_packet_sequence_id: Option<u32>,
    #[prost(message, optional, tag = "11")]
    track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "60")]
    track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackDescriptor {
    #[prost(uint64, optional, tag = "1")]
    uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(message, optional, tag = "3")]
    process: Option<ProcessDescriptor>,
    #[prost(uint64, optional, tag = "5")]
    parent_uuid: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct ProcessDescriptor {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(string, optional, tag = "6")]
    process_name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    debug_annotations: Vec<DebugAnnotation>,
    #[prost(enumeration = "TrackEventType", optional, tag = "9")]
    r#type: Option<i32>,
    #[prost(uint64, optional, tag = "11")]
    track_uuid: Option<u64>,
    #[prost(string, repeated, tag = "22")]
    categories: Vec<String>,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
enum TrackEventType {
    Unspecified = 0,
    SliceBegin = 1,
    SliceEnd = 2,
    Instant = 3,
}

/// A named value of an event.
#[derive(Clone, PartialEq, Message)]
struct DebugAnnotation {
    #[prost(uint64, optional, tag = "3")]
    uint_value: Option<u64>,
    #[prost(double, optional, tag = "5")]
    double_value: Option<f64>,
    #[prost(string, optional, tag = "6")]
    string_value: Option<String>,
    #[prost(string, optional, tag = "10")]
    name: Option<String>,
}

impl DebugAnnotation {
    fn number(name: &str, value: u64) -> Self {
        Self { uint_value: Some(value), name: Some(name.into()), ..Self::default() }
    }

    fn float(name: &str, value: f64) -> Self {
        Self { double_value: Some(value), name: Some(name.into()), ..Self::default() }
    }

    fn text(name: &str, value: &(impl ToString + ?Sized)) -> Self {
        Self { string_value: Some(value.to_string()), name: Some(name.into()), ..Self::default() }
    }
}

/// An interval on a track, on the clock of rank 0.
struct Slice {
    begin: u64,
    end: u64,
    name: &'static str,
    category: &'static str,
    annotations: Vec<DebugAnnotation>,
}

/// The packets of one rank.
struct RankTrace {
    rank: u32,
    packets: Vec<TracePacket>,
}

/// Returns the timeline of a rank as a part of a trace. `clock` converts its times to the clock of rank 0.
pub(crate) fn encode(content: &TimelineContent, clock: ClockMap) -> Vec<u8> {
    let mut trace = RankTrace { rank: content.identity.rank, packets: Vec::new() };
    trace.describe_rank(content, clock);
    let spans = content.spans.iter().map(|span| slice_of_span(span, clock)).collect();
    trace.add_track(1, "training", spans);
    let ended_ns = content.ended_ns;
    let operations = content.operations.iter().map(|event| slice_of_operation(event, clock, ended_ns));
    for (lane, slices) in divide_into_lanes(operations.collect()).into_iter().enumerate() {
        trace.add_track(FIRST_LANE + lane as u64, "communication", slices);
    }
    // Threads of the program and the thread that drives asynchronous operations may work at the same time.
    let parts = content.parts.iter().map(|part| slice_of_part(part, clock));
    for (lane, slices) in divide_into_lanes(parts.collect()).into_iter().enumerate() {
        trace.add_track(FIRST_PART_LANE + lane as u64, "steps", slices);
    }
    Trace { packet: trace.packets }.encode_to_vec()
}

impl RankTrace {
    fn uuid(&self, track: u64) -> u64 {
        u64::from(self.rank + 1) << 32 | track
    }

    fn add_packet(&mut self, packet: TracePacket) {
        let trusted_packet_sequence_id = Some(self.rank + 1);
        self.packets.push(TracePacket { trusted_packet_sequence_id, ..packet });
    }

    fn add_descriptor(&mut self, descriptor: TrackDescriptor) {
        self.add_packet(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() });
    }

    fn add_event(&mut self, timestamp: u64, event: TrackEvent) {
        let (timestamp, track_event) = (Some(timestamp), Some(event));
        self.add_packet(TracePacket { timestamp, track_event, ..TracePacket::default() });
    }

    /// Adds the rank as a process, with an event that says how exact its times are and what is left out.
    fn describe_rank(&mut self, content: &TimelineContent, clock: ClockMap) {
        let identity = &content.identity;
        let name = format!("rank {} ({})", identity.rank, identity.host);
        let process = ProcessDescriptor { pid: Some(identity.rank as i32 + 1), process_name: Some(name) };
        let uuid = Some(self.uuid(0));
        self.add_descriptor(TrackDescriptor { uuid, process: Some(process), ..TrackDescriptor::default() });
        let debug_annotations = vec![
            DebugAnnotation::number("rank", identity.rank.into()),
            DebugAnnotation::number("ranks", identity.ranks.into()),
            DebugAnnotation::text("host", &identity.host),
            DebugAnnotation::text("version", env!("CARGO_PKG_VERSION")),
            DebugAnnotation::float("clock_error_us", clock.error_ns() as f64 / 1e3),
            DebugAnnotation::float("clock_drift_ppm", clock.drift_ppm()),
            DebugAnnotation::number("operations_left_out", content.left_out.operations),
            DebugAnnotation::number("training_parts_left_out", content.left_out.spans),
            DebugAnnotation::number("steps_left_out", content.left_out.parts),
        ];
        let first = content.operations.iter().map(|event| event.submitted);
        let first = first.chain(content.spans.iter().map(|span| span.begun)).min().unwrap_or_default();
        let event = TrackEvent {
            debug_annotations,
            r#type: Some(TrackEventType::Instant.into()),
            track_uuid: uuid,
            categories: vec!["rank".into()],
            name: Some("timeline of a rank".into()),
        };
        self.add_event(clock.to_rank_0(first.as_nanos() as u64), event);
    }

    /// Adds a track of the rank. Slices that overlap must be nested.
    fn add_track(&mut self, track: u64, name: &str, mut slices: Vec<Slice>) {
        if slices.is_empty() {
            return;
        }
        let (uuid, parent_uuid) = (Some(self.uuid(track)), Some(self.uuid(0)));
        self.add_descriptor(TrackDescriptor { uuid, parent_uuid, name: Some(name.into()), process: None });
        slices.sort_by_key(|slice| (slice.begin, Reverse(slice.end)));
        let mut open_ends: Vec<u64> = Vec::new();
        let end_event = || TrackEvent {
            r#type: Some(TrackEventType::SliceEnd.into()),
            track_uuid: uuid,
            ..TrackEvent::default()
        };
        for slice in slices {
            while let Some(end) = open_ends.pop_if(|end| *end <= slice.begin) {
                self.add_event(end, end_event());
            }
            // Rounding may let a slice end a nanosecond after the slice that contains it.
            open_ends.push(open_ends.last().map_or(slice.end, |&end| end.min(slice.end)));
            let event = TrackEvent {
                debug_annotations: slice.annotations,
                r#type: Some(TrackEventType::SliceBegin.into()),
                track_uuid: uuid,
                categories: vec![slice.category.into()],
                name: Some(slice.name.into()),
            };
            self.add_event(slice.begin, event);
        }
        while let Some(end) = open_ends.pop() {
            self.add_event(end, end_event());
        }
    }
}

fn slice_of_span(span: &Span, clock: ClockMap) -> Slice {
    let time = |time: std::time::Duration| clock.to_rank_0(time.as_nanos() as u64);
    let annotations = span.step.map(|step| DebugAnnotation::number("step", step)).into_iter().collect();
    let (name, category) = (span.kind.name(), "training");
    Slice { begin: time(span.begun), end: time(span.ended), name, category, annotations }
}

fn slice_of_part(part: &OperationPart, clock: ClockMap) -> Slice {
    let time = |time: std::time::Duration| clock.to_rank_0(time.as_nanos() as u64);
    let annotations = part.transfer.map_or_else(Vec::new, |(peer, bytes)| {
        vec![DebugAnnotation::number("peer", peer.get().into()), DebugAnnotation::number("bytes", bytes)]
    });
    Slice { begin: time(part.begun), end: time(part.ended), name: part.name, category: "step", annotations }
}

/// Returns an operation from its call to its end. `ended_ns` is the end of the timeline.
fn slice_of_operation(event: &RecordedEvent, clock: ClockMap, ended_ns: u64) -> Slice {
    let contract = &event.contract;
    let begin = event.submitted.as_nanos() as u64;
    let end = event.finished.map_or(ended_ns, |time| time.as_nanos() as u64).max(begin);
    let bytes = contract.count.saturating_mul(contract.dtype.size_bytes() as u64);
    let mut annotations = vec![
        DebugAnnotation::number("group", (event.group & !INTERNAL_GROUP_BITS).into()),
        DebugAnnotation::number("bytes", bytes),
        DebugAnnotation::text("call", contract),
        DebugAnnotation::text("result", event.status.name()),
    ];
    let name = match event.direction {
        Direction::Collective => {
            annotations.push(DebugAnnotation::text("algorithm", &contract.algorithm));
            contract.operation.name()
        }
        Direction::To(rank) => {
            annotations.push(DebugAnnotation::number("peer", rank.get().into()));
            "send"
        }
        Direction::From(rank) => {
            annotations.extend(rank.map(|rank| DebugAnnotation::number("peer", rank.get().into())));
            "receive"
        }
    };
    annotations.extend(event.sequence.map(|sequence| DebugAnnotation::number("sequence", sequence)));
    annotations.extend(contract.compression().map(|codec| DebugAnnotation::text("codec", &codec)));
    annotations.extend(event.site.map(|site| DebugAnnotation::text("line", &site)));
    annotations.extend(event.begun.map(|begun| {
        let delay_ns = (begun.as_nanos() as u64).saturating_sub(begin);
        DebugAnnotation::float("begun_after_us", delay_ns as f64 / 1e3)
    }));
    let (begin, end) = (clock.to_rank_0(begin), clock.to_rank_0(end));
    Slice { begin, end, name, category: "communication", annotations }
}

/// Divides slices into as few lanes as possible, so that the slices of a lane do not overlap.
fn divide_into_lanes(mut slices: Vec<Slice>) -> Vec<Vec<Slice>> {
    slices.sort_by_key(|slice| slice.begin);
    let mut lanes: Vec<Vec<Slice>> = Vec::new();
    for slice in slices {
        let is_free = |lane: &Vec<Slice>| lane.last().is_none_or(|last| last.end <= slice.begin);
        match lanes.iter().position(is_free) {
            Some(lane) => lanes[lane].push(slice),
            None => lanes.push(vec![slice]),
        }
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(begin: u64, end: u64) -> Slice {
        Slice { begin, end, name: "a", category: "b", annotations: Vec::new() }
    }

    #[test]
    fn nested_slices_begin_and_end_in_the_order_of_time() {
        let mut trace = RankTrace { rank: 0, packets: Vec::new() };
        trace.add_track(1, "t", vec![slice(4, 6), slice(1, 3), slice(0, 10), slice(4, 4), slice(10, 12)]);
        let events: Vec<(u64, i32)> = trace
            .packets
            .iter()
            .filter_map(|packet| Some((packet.timestamp?, packet.track_event.as_ref()?.r#type?)))
            .collect();
        let (begin, end) = (1, 2);
        let expected = [
            (0, begin),
            (1, begin),
            (3, end),
            (4, begin),
            (4, begin),
            (4, end),
            (6, end),
            (10, end),
            (10, begin),
            (12, end),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn slices_that_overlap_are_in_different_lanes() {
        let lanes = divide_into_lanes(vec![slice(0, 5), slice(2, 3), slice(3, 9), slice(5, 6), slice(6, 7)]);
        let lanes: Vec<Vec<u64>> =
            lanes.iter().map(|lane| lane.iter().map(|slice| slice.begin).collect()).collect();
        assert_eq!(lanes, [vec![0, 5, 6], vec![2, 3]]);
    }
}
