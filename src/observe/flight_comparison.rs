//! Compares the flight records of the ranks of a job: for each group, which rank is behind and which rank called something else.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt::{self, Write as _};
use std::path::Path;
use std::{fs, io};

use super::flight_record::{FlightRecord, OperationRecord};
use crate::types::counted;

/// The most messages in progress that are shown for each rank.
const MESSAGES_SHOWN_MAX: usize = 5;

/// For each call, as text: the ranks that made the call, and their records of it.
type CallersByCall<'a> = BTreeMap<&'a str, Vec<(u32, &'a OperationRecord)>>;

/// The records of a job, by rank.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct FlightComparison {
    records: BTreeMap<u32, FlightRecord>,
    /// Files that cannot be read or do not fit to the others, with the reason.
    rejected: Vec<(String, String)>,
}

impl FlightComparison {
    /// Reads the files `rank.N.json` in a directory.
    ///
    /// # Errors
    ///
    /// The error of the file system if the directory cannot be read. [`FlightComparison::is_empty`] says whether there were any
    /// records.
    pub fn read(directory: &Path) -> io::Result<Self> {
        let mut comparison = Self::default();
        let mut names = Vec::new();
        for entry in fs::read_dir(directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.starts_with("rank.") && Path::new(&name).extension() == Some(OsStr::new("json")) {
                names.push(name);
            }
        }
        names.sort();
        for name in names {
            match FlightRecord::read(&directory.join(&name)) {
                Ok(record) => comparison.add(name, record),
                Err(reason) => comparison.rejected.push((name, reason)),
            }
        }
        Ok(comparison)
    }

    /// Adds the record of a rank, which comes from the file `name`.
    fn add(&mut self, name: String, record: FlightRecord) {
        let (rank, ranks) = (record.identity.rank, record.identity.ranks);
        let first = self.records.values().next().map(|first| first.identity.ranks);
        let reason = match first {
            Some(first) if first != ranks => {
                format!(
                    "it is of a job of {}, and other records are of a job of {first}",
                    counted(ranks, "rank")
                )
            }
            _ if self.records.contains_key(&rank) => format!("another file has the record of rank {rank}"),
            _ => {
                self.records.insert(rank, record);
                return;
            }
        };
        self.rejected.push((name, reason));
    }

    /// Returns whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the files that cannot be used, each with the reason.
    pub fn rejected(&self) -> &[(String, String)] {
        &self.rejected
    }

    /// Writes the ranks without a record, and why the other ranks wrote theirs.
    fn write_ranks(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        let ranks = self.records.values().next().map_or(0, |record| record.identity.ranks);
        writeln!(out, "records of {} of {}", self.records.len(), counted(ranks, "rank"))?;
        let missing = (0..ranks).filter(|rank| !self.records.contains_key(rank));
        let missing: Vec<String> = missing.map(|rank| rank.to_string()).collect();
        if !missing.is_empty() {
            writeln!(
                out,
                "no record of rank {} (killed, still running, or on another host)",
                missing.join(", ")
            )?;
        }
        for (name, reason) in &self.rejected {
            writeln!(out, "{name} was ignored: {reason}")?;
        }
        for (rank, record) in &self.records {
            writeln!(out, "rank {rank} ({}): {}", record.identity.host, record.reason)?;
        }
        Ok(())
    }

    /// Writes the last collective of each rank in a group, and which ranks are behind or differ.
    fn write_group(&self, out: &mut dyn fmt::Write, group: u32) -> fmt::Result {
        let last: Vec<(u32, &OperationRecord, &FlightRecord)> = self
            .records
            .iter()
            .filter_map(|(&rank, record)| Some((rank, collectives(record, group).next_back()?, record)))
            .collect();
        writeln!(out, "group {group}: the last collective of each rank")?;
        for (rank, operation, record) in &last {
            writeln!(out, "  rank {rank}: {}", describe(operation, record.written))?;
        }
        let newest = last.iter().filter_map(|(_, operation, _)| operation.sequence).max().unwrap_or_default();
        for (rank, operation, _) in &last {
            if let Some(behind) =
                operation.sequence.map(|sequence| newest - sequence).filter(|&count| count > 0)
            {
                writeln!(out, "  -> rank {rank} is {behind} behind: it has not called {newest}")?;
            }
        }
        self.write_difference(out, group)
    }

    /// Writes the first number under which the ranks called different collectives.
    fn write_difference(&self, out: &mut dyn fmt::Write, group: u32) -> fmt::Result {
        let mut calls: BTreeMap<u64, CallersByCall<'_>> = BTreeMap::new();
        for (&rank, record) in &self.records {
            for operation in collectives(record, group) {
                let same_number = calls.entry(operation.sequence.unwrap_or_default()).or_default();
                same_number.entry(operation.call.as_str()).or_default().push((rank, operation));
            }
        }
        let Some((sequence, different)) = calls.into_iter().find(|(_, different)| different.len() > 1) else {
            return Ok(());
        };
        writeln!(out, "  -> the ranks called different collectives as {sequence}:")?;
        for (call, callers) in different {
            let ranks: Vec<String> = callers.iter().map(|(rank, _)| rank.to_string()).collect();
            let line = callers.iter().find_map(|(_, operation)| operation.line.as_deref());
            writeln!(out, "     rank {}: {call} at {}", ranks.join(", "), line.unwrap_or("an unknown line"))?;
        }
        Ok(())
    }

    /// Writes the messages that were in progress.
    fn write_messages(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        for (rank, record) in &self.records {
            let is_active = |operation: &&OperationRecord| {
                operation.result == "active" && ["send", "receive"].contains(&operation.kind.as_str())
            };
            let active: Vec<_> = record.operations.iter().filter(is_active).collect();
            for operation in active.iter().take(MESSAGES_SHOWN_MAX) {
                let group = operation.group;
                writeln!(out, "rank {rank}, group {group}: {}", describe(operation, record.written))?;
            }
            if active.len() > MESSAGES_SHOWN_MAX {
                writeln!(
                    out,
                    "rank {rank}: {} in progress",
                    counted(active.len() - MESSAGES_SHOWN_MAX, "more message")
                )?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for FlightComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_ranks(f)?;
        let groups: BTreeSet<u32> = self
            .records
            .values()
            .flat_map(|record| &record.operations)
            .filter(|operation| operation.sequence.is_some())
            .map(|operation| operation.group)
            .collect();
        for group in groups {
            self.write_group(f, group)?;
        }
        self.write_messages(f)
    }
}

/// Returns the numbered collectives of a group, in the order of their numbers.
fn collectives(record: &FlightRecord, group: u32) -> impl DoubleEndedIterator<Item = &OperationRecord> {
    record.operations.iter().filter(move |operation| operation.group == group && operation.sequence.is_some())
}

/// Describes an operation of a record that was written at the time `written`.
fn describe(operation: &OperationRecord, written: f64) -> String {
    let mut text = String::new();
    if let Some(sequence) = operation.sequence {
        let _ = write!(text, "{sequence}, ");
    }
    let _ = match (operation.kind.as_str(), operation.peer) {
        ("send", Some(peer)) => write!(text, "send to rank {peer}, "),
        ("receive", Some(peer)) => write!(text, "receive from rank {peer}, "),
        ("receive", None) => write!(text, "receive from any rank, "),
        _ => Ok(()),
    };
    text += &operation.call;
    if let Some(line) = &operation.line {
        let _ = write!(text, " at {line}");
    }
    let _ = match operation.finished {
        None => write!(text, ", in progress for {:.3} s", (written - operation.submitted).max(0.0)),
        Some(finished) => {
            write!(text, ", {} {:.3} s before", operation.result, (written - finished).max(0.0))
        }
    };
    if !operation.waits_for.is_empty() {
        let ranks: Vec<String> = operation.waits_for.iter().map(u32::to_string).collect();
        let _ = write!(text, ", waits for rank {}", ranks.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::flight_record::RankIdentity;
    use super::*;

    fn record(rank: u32, ranks: u32, operations: Vec<OperationRecord>) -> FlightRecord {
        FlightRecord {
            format: 1,
            version: "1".into(),
            identity: RankIdentity { rank, ranks, host: format!("node{rank}") },
            process: 1,
            reason: "rank 2 was lost".into(),
            written: 2.5,
            operations_total: 9,
            operations,
        }
    }

    fn operation(sequence: u64, call: &str, finished: Option<f64>, waits_for: &[u32]) -> OperationRecord {
        OperationRecord {
            number: sequence,
            group: 0,
            sequence: Some(sequence),
            call: call.into(),
            kind: "all_reduce".into(),
            dtype: "f32".into(),
            count: 8,
            algorithm: None,
            codec: None,
            peer: None,
            line: Some("train.py:30".into()),
            submitted: 1.0,
            begun: None,
            finished,
            result: if finished.is_some() { "completed" } else { "active" }.into(),
            waits_for: waits_for.to_vec(),
        }
    }

    #[test]
    fn the_comparison_names_the_rank_that_is_behind_and_the_rank_that_differs() {
        let mut comparison = FlightComparison::default();
        let (sum, max) = ("all_reduce(sum, 8 x f32, ring)", "all_reduce(max, 8 x f32, ring)");
        let records = [
            record(0, 4, vec![operation(6, sum, Some(1.5), &[]), operation(7, sum, None, &[1, 3])]),
            record(1, 4, vec![operation(6, sum, Some(1.5), &[])]),
            record(3, 4, vec![operation(6, sum, Some(1.5), &[]), operation(7, max, None, &[])]),
            record(3, 4, vec![]),
            record(2, 5, vec![]),
        ];
        for (index, record) in records.into_iter().enumerate() {
            comparison.add(format!("file {index}"), record);
        }
        assert_eq!(
            comparison.to_string(),
            "records of 3 of 4 ranks
no record of rank 2 (killed, still running, or on another host)
file 3 was ignored: another file has the record of rank 3
file 4 was ignored: it is of a job of 5 ranks, and other records are of a job of 4
rank 0 (node0): rank 2 was lost
rank 1 (node1): rank 2 was lost
rank 3 (node3): rank 2 was lost
group 0: the last collective of each rank
  rank 0: 7, all_reduce(sum, 8 x f32, ring) at train.py:30, in progress for 1.500 s, waits for rank 1, 3
  rank 1: 6, all_reduce(sum, 8 x f32, ring) at train.py:30, completed 1.000 s before
  rank 3: 7, all_reduce(max, 8 x f32, ring) at train.py:30, in progress for 1.500 s
  -> rank 1 is 1 behind: it has not called 7
  -> the ranks called different collectives as 7:
     rank 3: all_reduce(max, 8 x f32, ring) at train.py:30
     rank 0: all_reduce(sum, 8 x f32, ring) at train.py:30
"
        );
    }
}
