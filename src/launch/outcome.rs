//! Describes how each rank and the job ended, and writes the text of the final report. This module performs no IO and
//! reads no clock.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGPIPE, SIGTERM};

use super::message::LaunchMessage;
use crate::exit::Exit;
use crate::types::Rank;
use crate::wire::ExitRecord;

/// The error of a write to a pipe that has no reader.
pub(super) const EPIPE: i32 = rustix::io::Errno::PIPE.raw_os_error();

/// The exit codes with which a rank reports that another rank may have caused its failure.
const VICTIM_EXIT_CODES: [Exit; 4] = [Exit::PeerLost, Exit::Mismatch, Exit::Timeout, Exit::Protocol];

/// How one rank's process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RankEnd {
    /// The process exited with this code.
    Exited(u8),
    /// This signal killed the process.
    Killed(i32),
    /// The process of the rank could not execute the command: `exec` failed with this `errno`.
    NotRun(i32),
    /// ringrun lost its connection to the host of the rank, so it does not know how the process ended.
    HostLost,
    /// The ringrun of another node runs the rank.
    OtherNode,
}

impl RankEnd {
    /// Returns whether the rank exited with 0, or this ringrun does not run it.
    pub fn is_success(self) -> bool {
        matches!(self, Self::Exited(0) | Self::OtherNode)
    }

    /// Returns the exit code that a shell would report for this process.
    pub fn shell_exit_code(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Killed(signal) => exit_code_of_signal(signal),
            Self::NotRun(errno) if errno == rustix::io::Errno::NOENT.raw_os_error() => {
                Exit::CommandNotFound as u8
            }
            Self::NotRun(_) => Exit::CommandNotExecutable as u8,
            Self::HostLost => Exit::PeerLost as u8,
            Self::OtherNode => Exit::Success as u8,
        }
    }

    /// Returns a score. The rank with the highest score probably failed first. A rank that exited with one of
    /// [`VICTIM_EXIT_CODES`], or was killed by SIGPIPE, probably failed because of another rank. A rank that was killed
    /// by any other signal probably failed first.
    pub(super) fn blame_score(self) -> u8 {
        match self {
            Self::Exited(0) | Self::OtherNode => 0,
            Self::Exited(code) if VICTIM_EXIT_CODES.iter().any(|&exit| code == exit as u8) => 1,
            Self::Killed(SIGPIPE) => 1,
            Self::Exited(_) => 2,
            Self::Killed(_) | Self::NotRun(_) | Self::HostLost => 3,
        }
    }
}

impl fmt::Display for RankEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exited(code) => write!(f, "exited with code {code}"),
            Self::Killed(signal) => write!(f, "was killed by signal {signal} ({})", signal_name(signal)),
            Self::NotRun(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                write!(f, "could not execute its command: {error}")
            }
            Self::HostLost => f.write_str("was lost with its host"),
            Self::OtherNode => f.write_str("belongs to another node"),
        }
    }
}

/// Returns the exit code that a shell would report for a program killed by `signal`.
pub(super) fn exit_code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Returns the signal's name, such as `SIGKILL`.
pub(super) fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("a real-time signal")
}

/// Why the job ended or is being stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JobOutcome {
    /// While the job runs: no rank has failed. After the end of the job: every rank exited with 0.
    Success,
    /// This rank failed first.
    Failed(Rank),
    /// This rank failed first, and `--tolerate-failures` let the other ranks continue.
    Tolerated(Rank),
    /// ringrun got this signal: SIGINT, SIGHUP or SIGQUIT.
    Interrupted(i32),
    /// ringrun got SIGTERM. The ranks may still save and exit with 0.
    Terminated,
    /// The job passed `--job-timeout`.
    TimedOut,
    /// ringrun can no longer write to its standard output.
    StdoutFailed {
        /// The `errno` of the failed write: `EPIPE` if the reader closed the pipe.
        errno: i32,
    },
}

/// The process of a rank.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct RankPlace {
    /// The process id of the rank.
    pub(super) pid: i32,
    /// The host of the rank; `None` if the rank runs on the host of ringrun.
    pub(super) host: Option<Arc<str>>,
}

impl fmt::Display for RankPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(host) => write!(f, "pid {} on {host}", self.pid),
            None => write!(f, "pid {}", self.pid),
        }
    }
}

/// The status of one rank.
#[derive(Clone, Debug)]
pub(super) struct RankStatus {
    /// The rank.
    pub(super) rank: Rank,
    /// The process of the rank.
    pub(super) place: RankPlace,
    /// How the rank ended, and the time from the start of the job to the rank's end. `None` while the rank runs, and
    /// also if the rank cannot be killed.
    pub(super) ended: Option<(RankEnd, Duration)>,
}

impl RankStatus {
    /// Returns whether the ringrun of another node runs the rank.
    fn is_elsewhere(&self) -> bool {
        matches!(self.ended, Some((RankEnd::OtherNode, _)))
    }

    /// Returns whether the rank exited with 0.
    fn is_success(&self) -> bool {
        self.ended.is_some_and(|(ended, _)| ended.is_success())
    }

    /// Describes the end of the rank: `rank 2 (pid 1234) was killed by signal 9 (SIGKILL) after 12.3 s`.
    pub(super) fn describe(&self) -> String {
        let Self { rank, place, ended } = self;
        match ended {
            Some((ended, at)) => format!("rank {rank} ({place}) {ended} after {}", format_seconds(*at)),
            None => format!("rank {rank} ({place}) did not end, even after SIGKILL"),
        }
    }

    /// Returns the message that describes the end of the rank, and continues with `rest`.
    pub(super) fn failure_message(&self, rest: &str) -> LaunchMessage {
        LaunchMessage::error(self.describe() + rest).about(self.rank).on_host(self.place.host.as_ref())
    }
}

/// Returns the exit code of ringrun.
pub(super) fn exit_code(outcome: JobOutcome, rank_statuses: &[RankStatus]) -> u8 {
    let all_succeeded = rank_statuses.iter().all(RankStatus::is_success);
    match outcome {
        JobOutcome::Success => 0,
        JobOutcome::Tolerated(_) if rank_statuses.iter().any(RankStatus::is_success) => 0,
        JobOutcome::Failed(rank) | JobOutcome::Tolerated(rank) => rank_statuses[rank.index()]
            .ended
            .map_or(Exit::Failure as u8, |(ended, _)| ended.shell_exit_code()),
        JobOutcome::Interrupted(signal) => exit_code_of_signal(signal),
        JobOutcome::TimedOut => Exit::JobTimeout as u8,
        // After SIGTERM, the job is a success if all ranks saved and exited with 0.
        JobOutcome::Terminated if all_succeeded => 0,
        JobOutcome::Terminated => exit_code_of_signal(SIGTERM),
        // The job was stopped early, so the exit code is not 0 even if all ranks exited with 0.
        JobOutcome::StdoutFailed { errno: EPIPE } => exit_code_of_signal(SIGPIPE),
        JobOutcome::StdoutFailed { .. } => Exit::Failure as u8,
    }
}

/// Returns the report for standard error at the end of the job. The report is empty if the job succeeded. `last_lines`
/// holds the last output lines of each rank. `report` is a rank's exit record about the failure, and this rank.
pub(super) fn failure_report(
    outcome: JobOutcome,
    rank_statuses: &[RankStatus],
    (last_lines, report): (&[Vec<String>], Option<(Rank, &ExitRecord)>),
) -> Vec<LaunchMessage> {
    let all_succeeded = rank_statuses.iter().all(RankStatus::is_success);
    let headline = match outcome {
        JobOutcome::Success => return Vec::new(),
        JobOutcome::Terminated if all_succeeded => return Vec::new(),
        JobOutcome::Tolerated(_) if rank_statuses.iter().any(RankStatus::is_success) => {
            return vec![summarize_tolerated_failures(rank_statuses)];
        }
        JobOutcome::Tolerated(rank) => {
            rank_statuses[rank.index()].failure_message("; all other ranks failed too")
        }
        JobOutcome::Failed(rank) => {
            let others = if rank_statuses.len() > 1 { "; the job has ended" } else { "" };
            let alone = rank_statuses.iter().all(|status| status.rank == rank || status.is_success());
            rank_statuses[rank.index()].failure_message(if alone { "" } else { others })
        }
        JobOutcome::Interrupted(signal) => {
            LaunchMessage::error(format!("stopped by signal {signal} ({})", signal_name(signal)))
        }
        JobOutcome::Terminated => LaunchMessage::error("stopped by signal 15 (SIGTERM)"),
        JobOutcome::TimedOut => LaunchMessage::error("the job passed its --job-timeout and was stopped"),
        JobOutcome::StdoutFailed { errno: EPIPE } => {
            LaunchMessage::error("standard output was closed by its reader; the job was stopped")
        }
        JobOutcome::StdoutFailed { errno } => {
            let error = std::io::Error::from_raw_os_error(errno);
            LaunchMessage::error(format!("standard output cannot be written: {error}; the job was stopped"))
        }
    };
    let mut messages = vec![headline];
    let blamed = match outcome {
        JobOutcome::Failed(rank) | JobOutcome::Tolerated(rank) => Some(rank),
        _ => None,
    };
    if let Some(rank) = blamed {
        if let Some((reporter, record)) = report.filter(|(_, record)| !record.only_says_that_failed(rank)) {
            let text = format!("rank {reporter} reported: {record}");
            messages.push(LaunchMessage::error(text).about(reporter));
        }
        let lines = last_lines.get(rank.index()).map_or(&[][..], Vec::as_slice);
        messages.push(LaunchMessage::error(describe_last_lines(rank, lines)).about(rank));
    }
    for (ranks, description) in group_by_end(
        rank_statuses.iter().filter(|status| Some(status.rank) != blamed && !status.is_elsewhere()),
    ) {
        let message = LaunchMessage::error(format!("{} {description}", format_ranks(&ranks)));
        messages.push(if let [rank] = ranks[..] { message.about(rank) } else { message });
    }
    messages
}

/// Returns the report of a job in which some ranks failed and others exited with 0.
fn summarize_tolerated_failures(rank_statuses: &[RankStatus]) -> LaunchMessage {
    let failed = rank_statuses.iter().filter(|status| !status.is_success());
    let (world, success_count) = (rank_statuses.len(), rank_statuses.len() - failed.clone().count());
    let mut text = format!("--tolerate-failures: {success_count} of {world} ranks exited with 0");
    for (ranks, description) in group_by_end(failed) {
        let _ = write!(text, ", {} {description}", format_ranks(&ranks));
    }
    LaunchMessage::warning(text)
}

/// Returns the last lines of a rank for the report.
fn describe_last_lines(rank: Rank, lines: &[String]) -> String {
    if lines.is_empty() {
        return format!("rank {rank} printed nothing");
    }
    format!("last lines of rank {rank}:\n  | {}", lines.join("\n  | "))
}

/// Groups ranks by how they ended, so that a report about a thousand ranks has only a few lines. Returns the ranks of
/// each group, and how they ended.
fn group_by_end<'a>(rank_statuses: impl Iterator<Item = &'a RankStatus>) -> Vec<(Vec<Rank>, String)> {
    let mut groups: Vec<(Option<RankEnd>, Vec<Rank>)> = Vec::new();
    for status in rank_statuses {
        let ended = status.ended.map(|(ended, _)| ended);
        match groups.iter_mut().find(|(group_end, _)| *group_end == ended) {
            Some((_, ranks)) => ranks.push(status.rank),
            None => groups.push((ended, vec![status.rank])),
        }
    }
    groups
        .into_iter()
        .map(|(group_end, ranks)| {
            let description = group_end
                .map_or_else(|| "did not end, even after SIGKILL".to_owned(), |ended| ended.to_string());
            let is_plural = ranks.len() > 1;
            (ranks, if is_plural { description.replacen("was ", "were ", 1) } else { description })
        })
        .collect()
}

/// Formats ranks in ascending order as `rank 3` or `ranks 0-1,3-63`.
fn format_ranks(ranks: &[Rank]) -> String {
    let mut text = String::from(if ranks.len() == 1 { "rank " } else { "ranks " });
    let mut rest = ranks;
    while let Some(first) = rest.first() {
        let length =
            rest.iter().zip(first.get()..).take_while(|(rank, number)| rank.get() == *number).count();
        let (consecutive, remaining) = rest.split_at(length);
        let last = consecutive.last().unwrap_or(first);
        let _ = if consecutive.len() == 1 { write!(text, "{first}") } else { write!(text, "{first}-{last}") };
        if !remaining.is_empty() {
            text.push(',');
        }
        rest = remaining;
    }
    text
}

/// Formats a duration as `0.3 s`, `12.3 s` or `75 s`.
pub(super) fn format_seconds(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds < 60.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::CauseKind;

    fn make_rank_statuses(ends: &[Option<RankEnd>]) -> Vec<RankStatus> {
        (0..)
            .zip(ends)
            .map(|(number, ended)| RankStatus {
                rank: Rank::new(number),
                place: RankPlace { pid: 100 + number as i32, host: None },
                ended: ended.map(|ended| (ended, Duration::from_millis(12_340))),
            })
            .collect()
    }

    /// Returns the report as text.
    fn report_text(
        outcome: JobOutcome,
        ends: &[Option<RankEnd>],
        reported: (&[Vec<String>], Option<(Rank, &ExitRecord)>),
    ) -> String {
        let messages = failure_report(outcome, &make_rank_statuses(ends), reported);
        messages.iter().map(LaunchMessage::to_text).collect()
    }

    #[test]
    fn each_job_outcome_has_its_exit_code() {
        let ok = Some(RankEnd::Exited(0));
        let one = Rank::new(1);
        for (outcome, ends, expected) in [
            (JobOutcome::Success, [ok, ok], 0),
            (JobOutcome::Failed(one), [ok, Some(RankEnd::Exited(3))], 3),
            (JobOutcome::Failed(one), [Some(RankEnd::Exited(6)), Some(RankEnd::Killed(9))], 137),
            (JobOutcome::Failed(one), [ok, Some(RankEnd::NotRun(2))], 127),
            (JobOutcome::Failed(one), [ok, Some(RankEnd::NotRun(8))], 126),
            (JobOutcome::Failed(one), [ok, None], 1),
            (JobOutcome::Tolerated(one), [ok, Some(RankEnd::Killed(9))], 0),
            (JobOutcome::Tolerated(one), [Some(RankEnd::Exited(3)), Some(RankEnd::Killed(9))], 137),
            (JobOutcome::Interrupted(2), [ok, ok], 130),
            (JobOutcome::Terminated, [ok, ok], 0),
            (JobOutcome::Terminated, [ok, Some(RankEnd::Killed(15))], 143),
            (JobOutcome::TimedOut, [ok, ok], 124),
            (JobOutcome::StdoutFailed { errno: EPIPE }, [ok, ok], 141),
            (JobOutcome::StdoutFailed { errno: EPIPE }, [ok, Some(RankEnd::Killed(15))], 141),
            (JobOutcome::StdoutFailed { errno: 28 }, [ok, ok], 1),
        ] {
            assert_eq!(exit_code(outcome, &make_rank_statuses(&ends)), expected, "{outcome:?} {ends:?}");
        }
    }

    #[test]
    fn the_report_describes_the_failed_rank_and_groups_the_other_ranks() {
        let mut ends = vec![Some(RankEnd::Exited(6)); 6];
        ends[2] = Some(RankEnd::Killed(9));
        ends[4] = Some(RankEnd::Killed(15));
        let mut last_lines = vec![Vec::new(); 6];
        last_lines[2] = vec!["step 7".to_owned(), "step 8".to_owned()];
        let (host, operation) = ("h".to_owned(), "barrier() at a.py:3".to_owned());
        let record = ExitRecord { kind: CauseKind::PeerLost, ranks: vec![Rank::new(2)], host, operation };
        assert_eq!(
            report_text(
                JobOutcome::Failed(Rank::new(2)),
                &ends,
                (&last_lines, Some((Rank::new(1), &record)))
            ),
            "ringrun: rank 2 (pid 102) was killed by signal 9 (SIGKILL) after 12.3 s; the job has ended\n\
             ringrun: rank 1 reported: a rank was lost: rank 2 on h; in barrier() at a.py:3\n\
             ringrun: last lines of rank 2:\n  | step 7\n  | step 8\n\
             ringrun: ranks 0-1,3,5 exited with code 6\n\
             ringrun: rank 4 was killed by signal 15 (SIGTERM)\n"
        );
    }

    #[test]
    fn the_report_of_tolerated_failures_is_one_sentence_if_a_rank_succeeded() {
        let (lost, killed) = (Some(RankEnd::Exited(6)), Some(RankEnd::Killed(9)));
        for (ends, expected) in [
            (
                vec![lost, Some(RankEnd::Exited(0)), killed, lost],
                "ringrun: --tolerate-failures: 1 of 4 ranks exited with 0, ranks 0,3 exited with code 6, rank 2 was killed by \
                 signal 9 (SIGKILL)\n",
            ),
            (
                vec![lost, lost, killed],
                "ringrun: rank 2 (pid 102) was killed by signal 9 (SIGKILL) after 12.3 s; all other ranks failed too\n\
                 ringrun: rank 2 printed nothing\n\
                 ringrun: ranks 0-1 exited with code 6\n",
            ),
        ] {
            assert_eq!(report_text(JobOutcome::Tolerated(Rank::new(2)), &ends, (&[], None)), expected);
        }
    }

    #[test]
    fn the_report_of_a_success_is_empty() {
        for outcome in [JobOutcome::Success, JobOutcome::Terminated] {
            assert_eq!(report_text(outcome, &[Some(RankEnd::Exited(0))], (&[], None)), "");
        }
    }
}
