//! The state machine that decides when to send which signal to the ranks. The state machine does no IO, and reads no
//! clock: the caller passes the time since the job started.
//!
//! The caller reports events with `handle_job_start`, `handle_rank_ends`, `handle_signal`, `handle_stdout_failure` and
//! `tick`. The caller then performs the actions that `poll_action` returns, until `poll_action` returns `None`. The
//! caller waits for the next event, but at most until `deadline`.
//!
//! ```text
//!            a rank fails          --grace passed            --kill-after passed
//!  Running -----------------> Leaving ------------> Stopping -------------------> Killing ---> over
//!     |    (other ranks exit)            SIGTERM       ^             SIGKILL
//!     |                                                |
//!     +- SIGINT, SIGTERM, job timeout, failed stdout --+      (Ctrl-C again: Killing at once)
//! ```
//!
//! With `FailurePolicy::Tolerate`, the phase remains `Running` when a rank fails after the start of the job.

use std::collections::VecDeque;
use std::time::Duration;

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};

use super::message::LaunchMessage;
use super::outcome::{JobOutcome, RankEnd, RankPlace, RankStatus, format_seconds, signal_name};
use super::plan::{FailurePolicy, LaunchLimits};
use crate::types::Rank;

/// How long ringrun waits for a process to end after SIGKILL. A process in uninterruptible sleep may never end.
const WAIT_AFTER_KILL: Duration = Duration::from_secs(10);

/// An action that the caller must perform.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum SupervisorAction {
    /// Send this signal to the process group of every rank that still runs.
    Signal(i32),
    /// Print this message.
    Print(LaunchMessage),
}

/// How far ringrun has come in stopping the job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StopPhase {
    Running,
    /// A rank failed. The other ranks have time to notice the failure and exit.
    Leaving {
        until: Duration,
    },
    /// All ranks got a signal that tells them to exit.
    Stopping {
        until: Duration,
    },
    /// All ranks got SIGKILL, and some of their processes have not ended yet.
    Killing {
        until: Duration,
    },
    /// Some ranks did not end within [`WAIT_AFTER_KILL`] after SIGKILL.
    KillFailed,
}

/// The state of the job, from which the supervisor decides which signals to send.
pub(super) struct Supervisor {
    limits: LaunchLimits,
    failure_policy: FailurePolicy,
    /// Whether all ranks have joined the job.
    has_started: bool,
    rank_statuses: Vec<RankStatus>,
    phase: StopPhase,
    outcome: JobOutcome,
    /// Until this time (`--grace` after the first tolerated failure), a later failure may still get the blame.
    blame_until: Option<Duration>,
    actions: VecDeque<SupervisorAction>,
}

impl Supervisor {
    /// Creates the supervisor of a job. `places` has the process of each rank, in rank order.
    pub(super) fn new(limits: LaunchLimits, failure_policy: FailurePolicy, places: Vec<RankPlace>) -> Self {
        let status = |(number, place)| RankStatus { rank: Rank::new(number), place, ended: None };
        let rank_statuses = (0..).zip(places).map(status).collect();
        Self {
            limits,
            failure_policy,
            has_started: false,
            rank_statuses,
            phase: StopPhase::Running,
            outcome: JobOutcome::Success,
            blame_until: None,
            actions: VecDeque::new(),
        }
    }

    /// Records that all ranks have joined the job.
    pub(super) fn handle_job_start(&mut self) {
        self.has_started = true;
    }

    /// Records how these ranks ended, and reacts to failures. The ranks are not sorted by the time when they ended.
    pub(super) fn handle_rank_ends(&mut self, ended_ranks: &[(Rank, RankEnd)], now: Duration) {
        for &(rank, ended) in ended_ranks {
            self.rank_statuses[rank.index()].ended.get_or_insert((ended, now));
        }
        let Some(&(rank, ended)) =
            ended_ranks.iter().max_by_key(|(rank, ended)| (ended.blame_score(), u32::MAX - rank.get()))
        else {
            return;
        };
        if ended.is_success() {
            return;
        }
        match (self.phase, self.outcome) {
            (StopPhase::Running, _) if self.has_started && self.failure_policy == FailurePolicy::Tolerate => {
                self.tolerate_failures(ended_ranks, rank, now);
            }
            (StopPhase::Running, _) => self.fail_job(rank, now),
            // Rank `first` may have failed only because `rank` failed: when a process dies, the kernel closes its
            // sockets before it notifies ringrun. Therefore blame `rank` instead of `first`.
            (StopPhase::Leaving { .. }, JobOutcome::Failed(first))
                if ended.blame_score() > self.blame_score(first) =>
            {
                self.outcome = JobOutcome::Failed(rank);
                self.queue_failure(rank, "");
            }
            _ => {}
        }
    }

    /// Handles a signal that ringrun itself received.
    pub(super) fn handle_signal(&mut self, signal: i32, now: Duration) {
        match signal {
            SIGINT | SIGHUP | SIGQUIT => match self.phase {
                StopPhase::Running => {
                    self.outcome = JobOutcome::Interrupted(signal);
                    let (name, limit) = (signal_name(signal), format_seconds(self.limits.kill_after));
                    let how = if signal == SIGINT { "; press Ctrl-C again to kill them at once" } else { "" };
                    self.queue_warning(format!("{name}: the ranks have {limit} to exit{how}"));
                    self.stop_ranks(signal, self.limits.kill_after, now);
                }
                // While ringrun stops the job, Ctrl-C kills the ranks at once. Other signals change nothing.
                _ if signal == SIGINT => self.kill_ranks(now),
                _ => {}
            },
            SIGTERM if self.phase == StopPhase::Running => {
                self.outcome = JobOutcome::Terminated;
                let limit = format_seconds(self.limits.term_timeout);
                self.queue_warning(format!("SIGTERM: the ranks have {limit} to exit"));
                self.stop_ranks(signal, self.limits.term_timeout, now);
            }
            SIGTERM => {}
            other => self.actions.push_back(SupervisorAction::Signal(other)),
        }
    }

    /// Stops the job, because a write to ringrun's standard output failed with this `errno`. `EPIPE` means that the
    /// reader closed the pipe.
    pub(super) fn handle_stdout_failure(&mut self, errno: i32, now: Duration) {
        if self.phase == StopPhase::Running {
            self.outcome = JobOutcome::StdoutFailed { errno };
            self.stop_ranks(SIGTERM, self.limits.kill_after, now);
        }
    }

    /// Acts on the time limits that have passed at the time `now`.
    pub(super) fn tick(&mut self, now: Duration) {
        match self.phase {
            StopPhase::Running if self.limits.job_timeout.is_some_and(|timeout| now >= timeout) => {
                self.outcome = JobOutcome::TimedOut;
                self.queue_warning("the job passed its --job-timeout; ringrun stops the job".to_owned());
                self.stop_ranks(SIGTERM, self.limits.kill_after, now);
            }
            StopPhase::Leaving { until } if now >= until => {
                self.stop_ranks(SIGTERM, self.limits.kill_after, now);
            }
            StopPhase::Stopping { until } if now >= until => self.kill_ranks(now),
            StopPhase::Killing { until } if now >= until => self.phase = StopPhase::KillFailed,
            _ => {}
        }
    }

    /// Returns the latest time at which `tick` must be called, if any.
    pub(super) fn deadline(&self) -> Option<Duration> {
        match self.phase {
            StopPhase::Running => self.limits.job_timeout,
            StopPhase::Leaving { until } | StopPhase::Stopping { until } | StopPhase::Killing { until } => {
                Some(until)
            }
            StopPhase::KillFailed => None,
        }
    }

    /// Returns the next action. The caller must perform the actions in this order.
    pub(super) fn poll_action(&mut self) -> Option<SupervisorAction> {
        self.actions.pop_front()
    }

    /// Returns whether the job is over: every rank has ended, or some ranks did not end after SIGKILL.
    pub(super) fn is_over(&self) -> bool {
        self.phase == StopPhase::KillFailed || self.rank_statuses.iter().all(|status| status.ended.is_some())
    }

    /// Returns the outcome of the job and the status of each rank.
    pub(super) fn into_result(self) -> (JobOutcome, Vec<RankStatus>) {
        (self.outcome, self.rank_statuses)
    }

    /// Returns the blame score of how a rank ended, or 0 while the rank runs.
    fn blame_score(&self, rank: Rank) -> u8 {
        self.rank_statuses[rank.index()].ended.map_or(0, |(ended, _)| ended.blame_score())
    }

    /// Lets the other ranks continue after the failures in `ended_ranks`. `blamed` is the rank of `ended_ranks` that
    /// probably failed first.
    fn tolerate_failures(&mut self, ended_ranks: &[(Rank, RankEnd)], blamed: Rank, now: Duration) {
        let until = *self.blame_until.get_or_insert(now + self.limits.grace);
        let keeps_blame = |first| now > until || self.blame_score(blamed) <= self.blame_score(first);
        if !matches!(self.outcome, JobOutcome::Tolerated(first) if keeps_blame(first)) {
            self.outcome = JobOutcome::Tolerated(blamed);
        }
        // If all ranks have ended, print no messages, because the report at the end of the job lists the failures.
        for &(rank, ended) in ended_ranks {
            if !ended.is_success() && !self.is_over() {
                self.queue_failure(rank, "; --tolerate-failures: the other ranks continue");
            }
        }
    }

    /// Blames `rank` for the failure of the job, and gives the other ranks time to exit.
    fn fail_job(&mut self, rank: Rank, now: Duration) {
        self.outcome = JobOutcome::Failed(rank);
        if self.rank_statuses.iter().any(|status| status.ended.is_none()) {
            let grace = format_seconds(self.limits.grace);
            let before_start = match self.failure_policy {
                FailurePolicy::EndJob => "",
                FailurePolicy::Tolerate => " and before all ranks had joined the job",
            };
            self.queue_failure(rank, &format!("{before_start}; the other ranks have {grace} to exit"));
        }
        self.phase = StopPhase::Leaving { until: now + self.limits.grace };
        self.tick(now);
    }

    /// Sends `signal` to all ranks. The ranks have the time `kill_after` to exit before ringrun kills them.
    fn stop_ranks(&mut self, signal: i32, kill_after: Duration, now: Duration) {
        self.actions.push_back(SupervisorAction::Signal(signal));
        // Continue stopped processes, because a stopped process handles no signal but SIGKILL.
        self.actions.push_back(SupervisorAction::Signal(SIGCONT));
        self.phase = StopPhase::Stopping { until: now + kill_after };
    }

    fn kill_ranks(&mut self, now: Duration) {
        if !matches!(self.phase, StopPhase::Killing { .. } | StopPhase::KillFailed) {
            self.actions.push_back(SupervisorAction::Signal(SIGKILL));
            self.phase = StopPhase::Killing { until: now + WAIT_AFTER_KILL };
        }
    }

    fn queue_warning(&mut self, text: String) {
        self.actions.push_back(SupervisorAction::Print(LaunchMessage::warning(text)));
    }

    /// Makes ringrun print how a rank has failed, and `rest`.
    fn queue_failure(&mut self, rank: Rank, rest: &str) {
        self.actions
            .push_back(SupervisorAction::Print(self.rank_statuses[rank.index()].failure_message(rest)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: LaunchLimits = LaunchLimits {
        start_timeout: Duration::from_secs(30),
        grace: Duration::from_secs(2),
        kill_after: Duration::from_secs(5),
        term_timeout: Duration::from_secs(25),
        job_timeout: Some(Duration::from_secs(100)),
    };

    fn print_failure_of_rank_1(sentence: &str) -> SupervisorAction {
        SupervisorAction::Print(LaunchMessage::error(sentence).about(Rank::new(1)))
    }

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn make_places(count: i32) -> Vec<RankPlace> {
        (10..10 + count).map(|pid| RankPlace { pid, host: None }).collect()
    }

    fn supervise_three_ranks() -> Supervisor {
        Supervisor::new(LIMITS, FailurePolicy::EndJob, make_places(3))
    }

    /// Supervises three ranks with `--tolerate-failures`, after the start of the job.
    fn supervise_with_tolerated_failures() -> Supervisor {
        let mut job = Supervisor::new(LIMITS, FailurePolicy::Tolerate, make_places(3));
        job.handle_job_start();
        job
    }

    /// Takes all pending actions and returns the signals among them.
    fn take_signals(supervisor: &mut Supervisor) -> Vec<i32> {
        std::iter::from_fn(|| supervisor.poll_action())
            .filter_map(
                |action| if let SupervisorAction::Signal(signal) = action { Some(signal) } else { None },
            )
            .collect()
    }

    fn end_rank(supervisor: &mut Supervisor, rank: u32, ended: RankEnd, now: Duration) {
        supervisor.handle_rank_ends(&[(Rank::new(rank), ended)], now);
    }

    #[test]
    fn the_job_succeeds_when_every_rank_has_exited_with_0() {
        let mut job = supervise_three_ranks();
        for rank in 0..3 {
            assert!(!job.is_over());
            end_rank(&mut job, rank, RankEnd::Exited(0), secs(u64::from(rank)));
        }
        assert!(job.is_over());
        assert!(take_signals(&mut job).is_empty());
        assert_eq!(job.into_result().0, JobOutcome::Success);
    }

    #[test]
    fn after_a_failure_ranks_get_time_then_sigterm_then_sigkill() {
        let mut job = supervise_three_ranks();
        end_rank(&mut job, 1, RankEnd::Exited(3), secs(10));
        assert_eq!((take_signals(&mut job), job.deadline()), (vec![], Some(secs(12))));
        job.tick(secs(12));
        assert_eq!((take_signals(&mut job), job.deadline()), (vec![SIGTERM, SIGCONT], Some(secs(17))));
        end_rank(&mut job, 0, RankEnd::Killed(SIGTERM), secs(13));
        job.tick(secs(17));
        assert_eq!((take_signals(&mut job), job.deadline()), (vec![SIGKILL], Some(secs(27))));
        assert!(!job.is_over());
        end_rank(&mut job, 2, RankEnd::Killed(SIGKILL), secs(17));
        assert!(job.is_over());
        assert_eq!(job.into_result().0, JobOutcome::Failed(Rank::new(1)));
    }

    #[test]
    fn the_job_ends_although_a_process_cannot_be_killed() {
        let mut job = supervise_three_ranks();
        job.handle_signal(SIGINT, secs(1));
        job.tick(secs(6));
        job.tick(secs(16));
        assert!(job.is_over());
        assert!(job.into_result().1.iter().all(|status| status.ended.is_none()));
    }

    /// Each case lists how ranks ended, in order of time. ringrun detects all ends of an inner list at the same time.
    #[test]
    fn the_rank_that_probably_failed_first_is_blamed() {
        let lost = RankEnd::Exited(6);
        for (name, ends, expected) in [
            ("first in time", vec![vec![(2, RankEnd::Exited(4))], vec![(0, RankEnd::Exited(3))]], 2),
            ("killed and lost", vec![vec![(0, lost), (2, RankEnd::Killed(9))]], 2),
            ("code 4 and lost", vec![vec![(0, lost), (1, RankEnd::Exited(4)), (2, lost)]], 1),
            ("killed after lost", vec![vec![(0, lost)], vec![(2, RankEnd::Killed(9))]], 2),
            (
                "code 101 after code 8",
                vec![vec![(0, RankEnd::Exited(8))], vec![(1, RankEnd::Exited(101))]],
                1,
            ),
            ("killed after code 1", vec![vec![(0, RankEnd::Exited(1))], vec![(1, RankEnd::Killed(11))]], 1),
            ("SIGPIPE after code 1", vec![vec![(0, RankEnd::Exited(1))], vec![(1, RankEnd::Killed(13))]], 0),
            ("only lost", vec![vec![(1, lost)], vec![(0, lost)]], 1),
            ("equal: lowest rank", vec![vec![(1, RankEnd::Exited(4)), (2, RankEnd::Exited(5))]], 1),
            ("success is not blamed", vec![vec![(0, RankEnd::Exited(0)), (2, RankEnd::Exited(4))]], 2),
        ] {
            let mut job = supervise_three_ranks();
            for ended_ranks in ends {
                let ended_ranks: Vec<_> =
                    ended_ranks.into_iter().map(|(rank, ended)| (Rank::new(rank), ended)).collect();
                job.handle_rank_ends(&ended_ranks, secs(1));
            }
            assert_eq!(job.into_result().0, JobOutcome::Failed(Rank::new(expected)), "{name}");
        }
    }

    #[test]
    fn ranks_that_ringrun_stopped_are_not_blamed() {
        let mut job = supervise_three_ranks();
        end_rank(&mut job, 0, RankEnd::Exited(6), secs(1));
        job.tick(secs(3));
        end_rank(&mut job, 1, RankEnd::Killed(SIGTERM), secs(3));
        assert_eq!(job.into_result().0, JobOutcome::Failed(Rank::ZERO));
    }

    #[test]
    fn ctrl_c_sends_sigint_and_a_second_ctrl_c_sends_sigkill() {
        let mut job = supervise_three_ranks();
        job.handle_signal(SIGINT, secs(1));
        assert_eq!((take_signals(&mut job), job.deadline()), (vec![SIGINT, SIGCONT], Some(secs(6))));
        end_rank(&mut job, 0, RankEnd::Exited(1), secs(2));
        job.handle_signal(SIGINT, secs(2));
        assert_eq!(take_signals(&mut job), [SIGKILL]);
        assert_eq!(job.into_result().0, JobOutcome::Interrupted(SIGINT));
    }

    #[test]
    fn a_second_sigterm_does_not_delay_sigkill() {
        let mut job = supervise_three_ranks();
        job.handle_signal(SIGTERM, secs(1));
        job.handle_signal(SIGTERM, secs(2));
        assert_eq!((take_signals(&mut job), job.deadline()), (vec![SIGTERM, SIGCONT], Some(secs(26))));
        job.tick(secs(26));
        assert_eq!(take_signals(&mut job), [SIGKILL]);
    }

    #[test]
    fn signals_that_do_not_end_the_job_are_passed_on() {
        let mut job = supervise_three_ranks();
        job.handle_signal(signal_hook::consts::SIGUSR1, secs(1));
        assert_eq!(take_signals(&mut job), [signal_hook::consts::SIGUSR1]);
        assert_eq!(job.into_result().0, JobOutcome::Success);
    }

    #[test]
    fn a_job_timeout_stops_the_job() {
        let mut job = supervise_three_ranks();
        assert_eq!(job.deadline(), Some(secs(100)));
        job.tick(secs(99));
        assert!(take_signals(&mut job).is_empty());
        job.tick(secs(100));
        assert_eq!(take_signals(&mut job), [SIGTERM, SIGCONT]);
        assert_eq!(job.into_result().0, JobOutcome::TimedOut);
    }

    #[test]
    fn without_grace_sigterm_is_sent_at_once() {
        let limits = LaunchLimits { grace: Duration::ZERO, ..LIMITS };
        let mut job = Supervisor::new(limits, FailurePolicy::EndJob, make_places(2));
        end_rank(&mut job, 0, RankEnd::Exited(1), secs(1));
        assert_eq!(take_signals(&mut job), [SIGTERM, SIGCONT]);
    }

    #[test]
    fn a_tolerated_failure_is_printed_once_and_sends_no_signal() {
        let mut job = supervise_with_tolerated_failures();
        end_rank(&mut job, 1, RankEnd::Killed(SIGKILL), secs(1));
        let sentence = "rank 1 (pid 11) was killed by signal 9 (SIGKILL) after 1.0 s; --tolerate-failures: the other ranks \
                        continue";
        assert_eq!(job.poll_action(), Some(print_failure_of_rank_1(sentence)));
        end_rank(&mut job, 0, RankEnd::Exited(0), secs(50));
        job.tick(secs(50));
        assert_eq!((job.poll_action(), job.deadline(), job.is_over()), (None, Some(secs(100)), false));
        end_rank(&mut job, 2, RankEnd::Exited(3), secs(60));
        assert!(job.is_over() && job.poll_action().is_none());
        assert_eq!(job.into_result().0, JobOutcome::Tolerated(Rank::new(1)));
    }

    #[test]
    fn the_tolerated_failure_that_probably_came_first_is_blamed() {
        let (lost, killed) = (RankEnd::Exited(6), RankEnd::Killed(SIGKILL));
        for (name, ends, expected) in [
            ("first in time", [(2, 1, RankEnd::Exited(4)), (0, 2, RankEnd::Exited(3)), (1, 9, lost)], 2),
            ("killed within --grace", [(0, 1, lost), (2, 3, killed), (1, 9, lost)], 2),
            ("killed after --grace", [(0, 1, lost), (2, 4, killed), (1, 9, lost)], 0),
            ("success is not blamed", [(0, 1, RankEnd::Exited(0)), (1, 9, lost), (2, 9, lost)], 1),
        ] {
            let mut job = supervise_with_tolerated_failures();
            for (rank, second, ended) in ends {
                end_rank(&mut job, rank, ended, secs(second));
            }
            assert_eq!(job.into_result().0, JobOutcome::Tolerated(Rank::new(expected)), "{name}");
        }
    }

    #[test]
    fn signals_and_the_job_timeout_stop_a_job_after_a_tolerated_failure() {
        let pass_job_timeout: fn(&mut Supervisor) = |job| job.tick(secs(100));
        for (stop, signal, outcome) in [
            (pass_job_timeout, SIGTERM, JobOutcome::TimedOut),
            (|job| job.handle_signal(SIGTERM, secs(2)), SIGTERM, JobOutcome::Terminated),
            (|job| job.handle_signal(SIGINT, secs(2)), SIGINT, JobOutcome::Interrupted(SIGINT)),
        ] {
            let mut job = supervise_with_tolerated_failures();
            end_rank(&mut job, 0, RankEnd::Exited(1), secs(1));
            stop(&mut job);
            assert_eq!(take_signals(&mut job), [signal, SIGCONT]);
            end_rank(&mut job, 1, RankEnd::Exited(1), secs(100));
            assert!(take_signals(&mut job).is_empty());
            assert_eq!(job.into_result().0, outcome);
        }
    }

    #[test]
    fn a_failure_before_the_start_is_not_tolerated() {
        let mut job = Supervisor::new(LIMITS, FailurePolicy::Tolerate, make_places(2));
        end_rank(&mut job, 1, RankEnd::Exited(3), secs(1));
        let sentence = "rank 1 (pid 11) exited with code 3 after 1.0 s and before all ranks had joined the job; the other \
                        ranks have 2.0 s to exit";
        assert_eq!(job.poll_action(), Some(print_failure_of_rank_1(sentence)));
        assert_eq!(job.deadline(), Some(secs(3)));
        assert_eq!(job.into_result().0, JobOutcome::Failed(Rank::new(1)));
    }
}
