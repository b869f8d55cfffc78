//! Writes the files that `TensorBoard` reads.
//!
//! A file is a sequence of records of the format `TFRecord`: the length of the data (u64), the masked checksum of the
//! length (u32), the data, and the masked checksum of the data (u32), all little-endian. The data of a record is an
//! `Event`, encoded as a protocol buffer. Sources: `tensorflow/core/lib/io/record_writer.h`,
//! `tensorflow/core/util/event.proto` and `tensorflow/core/framework/summary.proto`.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crc_fast::crc32_iscsi;

/// The version of the format, in the first record of each file.
const EVENT_FILE_VERSION: &str = "brain.Event:2";
/// The start of the name of each file.
const NAME_PREFIX: &str = "events.out.tfevents.";
/// The number of digits of the time in a file name. The time in seconds follows the prefix.
const SECONDS_DIGITS: usize = 10;
/// The value `START` of `SessionLog.SessionStatus`, with which `TensorBoard` discards earlier values of repeated steps.
const SESSION_STATUS_START: u64 = 1;

/// The wire types of protocol buffers.
const WIRE_TYPE_VARINT: u64 = 0;
const WIRE_TYPE_FIXED_64: u64 = 1;
const WIRE_TYPE_BYTES: u64 = 2;
const WIRE_TYPE_FIXED_32: u64 = 5;

/// An open file of events.
#[derive(Debug)]
pub(super) struct EventFile {
    file: File,
}

impl EventFile {
    /// Creates a new file in `directory`. Never replaces a file. In the order of names, the file comes after all
    /// earlier files, even if the clock was set back.
    pub(super) fn create(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let now = time_since_1970();
        let uname = rustix::system::uname();
        let latest = latest_seconds_in_names(directory)?;
        // TensorBoard recognizes a file by `tfevents` in its name, and reads the files of a directory in the order of
        // their names.
        let name = format!(
            "{NAME_PREFIX}{:010}.{}.{}.{}",
            latest.map_or(now.as_secs(), |latest| now.as_secs().max(latest + 1)),
            uname.nodename().to_string_lossy().replace('/', "-"),
            std::process::id(),
            now.subsec_nanos()
        );
        let file = File::options().append(true).create_new(true).open(directory.join(name))?;
        let mut events = Self { file };
        events.write(&encode_event(now.as_secs_f64(), &EventContent::FileVersion(EVENT_FILE_VERSION)))?;
        Ok(events)
    }

    /// Writes the values of a step. Each value has a tag, which names its curve.
    pub(super) fn add_scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> io::Result<()> {
        self.write(&encode_event(time_since_1970().as_secs_f64(), &EventContent::Scalars { step, scalars }))
    }

    /// Tells `TensorBoard` to discard the values in earlier files for `step` and all later steps.
    pub(super) fn discard_from_step(&mut self, step: u64) -> io::Result<()> {
        self.write(&encode_event(time_since_1970().as_secs_f64(), &EventContent::SessionStart { step }))
    }

    /// Writes a record with one call to the operating system, so that a reader seldom sees a part of a record.
    fn write(&mut self, event: &[u8]) -> io::Result<()> {
        self.file.write_all(&encode_record(event))
    }
}

/// Returns the largest time in the names of the event files in `directory`.
fn latest_seconds_in_names(directory: &Path) -> io::Result<Option<u64>> {
    let mut latest = None;
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(NAME_PREFIX)?.get(..SECONDS_DIGITS));
        latest = latest.max(digits.and_then(|digits| digits.parse::<u64>().ok()));
    }
    Ok(latest)
}

fn time_since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The content of an event.
enum EventContent<'a> {
    FileVersion(&'a str),
    Scalars { step: u64, scalars: &'a [(&'a str, f64)] },
    SessionStart { step: u64 },
}

/// Returns a record of the format `TFRecord` that contains `data`.
fn encode_record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_checksum(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked_checksum(data).to_le_bytes());
    record
}

/// Returns the masked checksum of the format `TFRecord`: the CRC-32C of `bytes`, rotated by 15 bits, plus a constant.
fn masked_checksum(bytes: &[u8]) -> u32 {
    let crc = crc32_iscsi(bytes);
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Encodes an `Event`: `wall_time` is field 1 (double), `step` field 2 (int64), `file_version` field 3 (string),
/// `summary` field 5 (Summary), and `session_log` field 7 (`SessionLog`, in which `status` is field 1).
fn encode_event(wall_time: f64, content: &EventContent<'_>) -> Vec<u8> {
    let mut event = Vec::new();
    push_varint(&mut event, 1 << 3 | WIRE_TYPE_FIXED_64);
    event.extend_from_slice(&wall_time.to_le_bytes());
    match content {
        EventContent::FileVersion(version) => push_bytes(&mut event, 3, version.as_bytes()),
        EventContent::Scalars { step, scalars } => {
            push_varint(&mut event, 2 << 3 | WIRE_TYPE_VARINT);
            push_varint(&mut event, *step);
            let mut summary = Vec::new();
            for (tag, value) in *scalars {
                push_bytes(&mut summary, 1, &encode_scalar(tag, *value));
            }
            push_bytes(&mut event, 5, &summary);
        }
        EventContent::SessionStart { step } => {
            push_varint(&mut event, 2 << 3 | WIRE_TYPE_VARINT);
            push_varint(&mut event, *step);
            let mut session_log = Vec::new();
            push_varint(&mut session_log, 1 << 3 | WIRE_TYPE_VARINT);
            push_varint(&mut session_log, SESSION_STATUS_START);
            push_bytes(&mut event, 7, &session_log);
        }
    }
    event
}

/// Encodes a `Summary.Value`: `tag` is field 1 (string), and `simple_value` field 2 (float).
fn encode_scalar(tag: &str, value: f64) -> Vec<u8> {
    let mut scalar = Vec::new();
    push_bytes(&mut scalar, 1, tag.as_bytes());
    push_varint(&mut scalar, 2 << 3 | WIRE_TYPE_FIXED_32);
    scalar.extend_from_slice(&(value as f32).to_le_bytes());
    scalar
}

/// Appends a field that holds a text, bytes or another message to a protocol buffer.
fn push_bytes(message: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    push_varint(message, field << 3 | WIRE_TYPE_BYTES);
    push_varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

/// Appends a number in groups of 7 bits, the lowest first. All bytes except the last have their highest bit set.
fn push_varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected bytes were written by `tensorboard.summary.writer.record_writer.RecordWriter` of `TensorBoard`
    /// 2.21, with the message `Event(wall_time=1.5, step=300, summary=Summary(value=[Summary.Value(tag="a",
    /// simple_value=0.5)]))`.
    #[test]
    fn a_record_has_the_bytes_that_tensorboard_writes() {
        let event = encode_event(1.5, &EventContent::Scalars { step: 300, scalars: &[("a", 0.5)] });
        assert_eq!(encode_record(&event), EXPECTED_RECORD);
    }

    const EXPECTED_RECORD: &[u8] =
        b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7f\x4b\x22\x09\x00\x00\x00\x00\x00\x00\xf8\
        \x3f\x10\xac\x02\x2a\x0a\x0a\x08\x0a\x01\x61\x15\x00\x00\x00\x3f\x64\x07\x6a\x3f";

    /// The expected bytes were also written by `RecordWriter`, with the message `Event(wall_time=1.5, step=300,
    /// session_log=SessionLog(status=SessionLog.START))`.
    #[test]
    fn a_session_start_has_the_bytes_that_tensorboard_writes() {
        let event = encode_event(1.5, &EventContent::SessionStart { step: 300 });
        assert_eq!(event, b"\x09\x00\x00\x00\x00\x00\x00\xf8\x3f\x10\xac\x02\x3a\x02\x08\x01");
    }

    /// `TensorBoard` reads files in the order of their names. A resumed run discards values of earlier files only.
    #[test]
    fn the_names_of_files_are_in_the_order_of_their_creation() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("events.out.tfevents.8000000000.host.1.2"), "").unwrap();
        fs::write(directory.path().join("events.out.tfevents.x"), "").unwrap();
        for expected in ["events.out.tfevents.8000000001.", "events.out.tfevents.8000000002."] {
            EventFile::create(directory.path()).unwrap();
            let names = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name());
            let found = names.filter(|name| name.to_string_lossy().starts_with(expected)).count();
            assert_eq!(found, 1, "{expected}");
        }
    }

    #[test]
    fn a_new_file_never_replaces_another() {
        let directory = tempfile::tempdir().unwrap();
        for _ in 0..3 {
            EventFile::create(&directory.path().join("runs/one")).unwrap();
        }
        let files: Vec<_> =
            fs::read_dir(directory.path().join("runs/one")).unwrap().map(Result::unwrap).collect();
        assert_eq!(files.len(), 3);
        for file in files {
            let bytes = fs::read(file.path()).unwrap();
            // The length, its checksum, the time, the version, and the checksum of the event.
            assert_eq!(bytes.len(), 8 + 4 + 9 + 2 + EVENT_FILE_VERSION.len() + 4);
            assert!(file.file_name().to_string_lossy().starts_with("events.out.tfevents."));
        }
    }
}
