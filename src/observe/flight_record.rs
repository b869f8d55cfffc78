//! The file that a rank writes when its job fails: the last operations of the rank.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::event::{Direction, EventNumber, RecordedEvent};
use crate::types::{INTERNAL_GROUP_BITS, Operation, Rank, WORLD_SIZE_MAX};

/// The version of the format of records.
const FORMAT: u32 = 1;
/// The largest file that [`FlightRecord::read`] accepts, in bytes. A record of 1,000 operations has some 400 KB.
const RECORD_BYTES_MAX: u64 = 16 << 20;

/// The last operations of a rank.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The version of this format.
    pub format: u32,
    /// The version of ringtrain.
    pub version: String,
    /// The rank that wrote the record.
    #[serde(flatten)]
    pub identity: RankIdentity,
    /// The process id of the rank.
    pub process: u32,
    /// Why the record was written: the error of the job, or the signal.
    pub reason: String,
    /// The time at which the record was written, in seconds since the rank began to join the job.
    pub written: f64,
    /// The number of operations since the job has started. The record contains only the last ones.
    pub operations_total: u64,
    /// The last operations, in the order in which they were submitted.
    pub operations: Vec<OperationRecord>,
}

/// A rank of a job.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RankIdentity {
    /// The rank.
    pub rank: u32,
    /// The number of ranks of the job.
    pub ranks: u32,
    /// The name of the rank's host.
    pub host: String,
}

/// An operation in a [`FlightRecord`]. Times are in seconds since the rank began to join the job.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct OperationRecord {
    /// The number of the operation on its rank.
    pub number: u64,
    /// The number of its group in the job. Group 0 has all ranks.
    pub group: u32,
    /// The number of the collective in its group, counted from 0. Ranks that call the same collectives have the same numbers.
    /// `None` for messages and internal operations.
    pub sequence: Option<u64>,
    /// The arguments on which all ranks must agree, as text.
    pub call: String,
    /// The kind of operation: the name of a collective, `send` or `receive`.
    pub kind: String,
    /// The element type.
    pub dtype: String,
    /// The number of elements.
    pub count: u64,
    /// The algorithm of a collective.
    pub algorithm: Option<String>,
    /// The compression of a collective.
    pub codec: Option<String>,
    /// The other rank of a message; `None` if any rank may send it.
    pub peer: Option<u32>,
    /// The line of the program that called the operation.
    pub line: Option<String>,
    /// When the program called the operation.
    pub submitted: f64,
    /// When the rank began to execute the operation.
    pub begun: Option<f64>,
    /// When the operation ended.
    pub finished: Option<f64>,
    /// `active`, `completed`, `failed` or `cancelled`.
    pub result: String,
    /// For an active operation: ranks for which it waits, if they are known.
    pub waits_for: Vec<u32>,
}

impl FlightRecord {
    /// Returns the record of these events, of which there were `total` since the start of the job.
    pub(super) fn new(
        identity: &RankIdentity,
        (reason, written): (&str, Duration),
        (events, total): (&[RecordedEvent], u64),
        awaited: &[(EventNumber, Vec<Rank>)],
    ) -> Self {
        let operation = |event: &RecordedEvent| {
            let waits_for = awaited.iter().find(|(number, _)| *number == event.number);
            let ranks = waits_for.map_or(&[][..], |(_, ranks)| ranks);
            OperationRecord::new(event, ranks.iter().map(|rank| rank.get()).collect())
        };
        Self {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            identity: identity.clone(),
            process: std::process::id(),
            reason: reason.to_owned(),
            written: written.as_secs_f64(),
            operations_total: total,
            operations: events.iter().map(operation).collect(),
        }
    }

    /// Reads a record.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong with the file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let mut text = String::new();
        let file = File::open(path).map_err(|error| error.to_string())?;
        file.take(RECORD_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
        if text.len() as u64 > RECORD_BYTES_MAX {
            return Err(format!("it has more than {RECORD_BYTES_MAX} bytes, too many for a flight record"));
        }
        let record: Self = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let RankIdentity { rank, ranks, .. } = record.identity;
        match record {
            Self { format, .. } if format != FORMAT => {
                Err(format!("it has format {format}, and this version reads format {FORMAT}"))
            }
            _ if ranks > WORLD_SIZE_MAX || rank >= ranks => Err(format!("it is of rank {rank} of {ranks}")),
            record => Ok(record),
        }
    }

    /// Returns the record as JSON, with one line for each operation.
    fn to_json(&self) -> serde_json::Result<String> {
        let header = serde_json::to_string_pretty(&Self { operations: Vec::new(), ..self.clone() })?;
        let operations: Vec<String> =
            self.operations.iter().map(serde_json::to_string).collect::<serde_json::Result<_>>()?;
        let header = header.strip_suffix("[]\n}").unwrap_or(&header);
        Ok(format!("{header}[\n    {}\n  ]\n}}\n", operations.join(",\n    ")))
    }
}

impl OperationRecord {
    fn new(event: &RecordedEvent, waits_for: Vec<u32>) -> Self {
        let contract = &event.contract;
        let is_message = contract.operation == Operation::Message;
        let (kind, peer) = match event.direction {
            Direction::Collective => (contract.operation.name(), None),
            Direction::To(rank) => ("send", Some(rank.get())),
            Direction::From(rank) => ("receive", rank.map(Rank::get)),
        };
        Self {
            number: event.number.0,
            group: event.group & !INTERNAL_GROUP_BITS,
            sequence: event.sequence,
            call: contract.to_string(),
            kind: kind.into(),
            dtype: contract.dtype.name().into(),
            count: contract.count,
            algorithm: (!is_message).then(|| contract.algorithm.name().into()),
            codec: contract.compression().map(|compression| compression.to_string()),
            peer,
            line: event.site.map(|site| site.to_string()),
            submitted: event.submitted.as_secs_f64(),
            begun: event.begun.map(|time| time.as_secs_f64()),
            finished: event.finished.map(|time| time.as_secs_f64()),
            result: event.status.name().into(),
            waits_for,
        }
    }
}

/// The directory in which the ranks of a job write their records, and this rank.
pub(crate) struct FlightDirectory {
    path: PathBuf,
    identity: RankIdentity,
}

impl FlightDirectory {
    /// Creates the directory if it does not exist, removes this rank's record of an earlier job, and checks that a file can be
    /// written.
    ///
    /// # Errors
    ///
    /// The error of the file system.
    pub(crate) fn open(path: &Path, identity: RankIdentity) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        let directory = Self { path: path.to_owned(), identity };
        match fs::remove_file(directory.record_path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let probe = directory.unfinished_path();
        let written = fs::write(&probe, b"a rank checks that it can write its record\n");
        // A full disk may have created an empty file.
        let removed = fs::remove_file(&probe);
        written.and(removed)?;
        Ok(directory)
    }

    pub(super) fn identity(&self) -> &RankIdentity {
        &self.identity
    }

    fn record_path(&self) -> PathBuf {
        self.path.join(format!("rank.{}.json", self.identity.rank))
    }

    fn unfinished_path(&self) -> PathBuf {
        self.path.join(format!("rank.{}.json.part", self.identity.rank))
    }

    /// Writes a record. Replaces an earlier record only when the new one is complete. Returns the path.
    pub(super) fn write(&self, record: &FlightRecord) -> Result<PathBuf, (PathBuf, io::Error)> {
        let (path, unfinished) = (self.record_path(), self.unfinished_path());
        let written = record.to_json().map_err(io::Error::from).and_then(|json| {
            let mut file = File::create(&unfinished)?;
            file.write_all(json.as_bytes())?;
            fs::rename(&unfinished, &path)
        });
        match written {
            Ok(()) => Ok(path),
            Err(error) => {
                let _ = fs::remove_file(&unfinished);
                Err((path, error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::EventStatus;
    use super::*;
    use crate::types::{Algorithm, Contract, DType, ReduceOp, Site};

    fn event(direction: Direction, finished: Option<Duration>) -> RecordedEvent {
        let is_collective = direction == Direction::Collective;
        let contract = Contract {
            operation: if is_collective { Operation::AllReduce } else { Operation::Message },
            dtype: DType::F32,
            reduction: is_collective.then_some(ReduceOp::Sum),
            algorithm: Algorithm::Ring,
            root: Rank::ZERO,
            count: 10,
            layout: 0,
        };
        RecordedEvent {
            number: EventNumber(7),
            group: 0,
            sequence: is_collective.then_some(4),
            contract,
            direction,
            site: Some(Site::new("train.py", 3)),
            submitted: Duration::from_micros(1500),
            begun: None,
            finished,
            status: if finished.is_some() { EventStatus::Completed } else { EventStatus::Active },
        }
    }

    #[test]
    fn a_record_is_written_with_one_line_for_each_operation_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let identity = RankIdentity { rank: 1, ranks: 2, host: "node \"1\"".into() };
        let directory = FlightDirectory::open(&folder.path().join("a/b"), identity.clone()).unwrap();
        let events = [
            event(Direction::Collective, None),
            event(Direction::From(None), Some(Duration::from_secs(2))),
            event(Direction::To(Rank::new(1)), None),
        ];
        let awaited = [(EventNumber(7), vec![Rank::new(1)])];
        for events in [&events[..], &[]] {
            let times = ("rank 1 was lost\n", Duration::from_secs(3));
            let record = FlightRecord::new(&identity, times, (events, 9), &awaited);
            let path = directory.write(&record).unwrap();
            assert_eq!(FlightRecord::read(&path).unwrap(), record);
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(text.lines().filter(|line| line.contains("\"number\"")).count(), events.len());
        }
        // The next job removes the record, and a directory that is a file is refused.
        FlightDirectory::open(&folder.path().join("a/b"), identity.clone()).unwrap();
        assert_eq!(fs::read_dir(folder.path().join("a/b")).unwrap().count(), 0);
        fs::write(folder.path().join("file"), "").unwrap();
        assert!(FlightDirectory::open(&folder.path().join("file"), identity).is_err());
    }

    #[test]
    fn files_that_are_no_records_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank.0.json");
        let text = |format: u32, rank: u32, ranks: u32| {
            let rest =
                r#""host":"a","process":1,"reason":"","written":1.0,"operations_total":0,"operations":[]}"#;
            format!(r#"{{"format":{format},"version":"1","rank":{rank},"ranks":{ranks},{rest}"#)
        };
        for (text, expected) in [
            (text(1, 0, 1), None),
            (text(2, 0, 1), Some("it has format 2")),
            (text(1, 3, 3), Some("it is of rank 3 of 3")),
            (text(1, 0, u32::MAX), Some("it is of rank 0 of 4294967295")),
            ("[]".into(), Some("invalid")),
            (" ".repeat(RECORD_BYTES_MAX as usize + 1), Some("too many for a flight record")),
        ] {
            fs::write(&path, text).unwrap();
            match (FlightRecord::read(&path), expected) {
                (Ok(_), None) => {}
                (Err(error), Some(expected)) if error.contains(expected) => {}
                (found, expected) => panic!("{found:?} instead of {expected:?}"),
            }
        }
    }
}
