//! When to stop a job, and how hard: a state machine without IO, whose time is an argument (the time since the job's start).
//!
//! Feed it what happened (`ended`, `signalled`, `output_closed`, `tick`), then do what `poll_action` says until it says nothing,
//! and wait no longer than `deadline`.
//!
//! ```text
//!            a rank fails          grace over           kill-after over
//!  Running ---------------> Leaving ---------> Stopping --------------> Killing ---> over
//!     |      (the others notice         SIGTERM      ^         SIGKILL
//!     |       and exit)                              |
//!     +--- SIGINT, SIGTERM, job timeout, no reader --+       (a second Ctrl-C: straight to Killing)
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};

use super::LaunchLimits;
use super::outcome::{JobOutcome, RankEnd, RankStatus, seconds, signal_name};
use crate::types::Rank;

/// How long a process may take to vanish after SIGKILL before ringrun gives it up: one in uninterruptible sleep (a dead network
/// file system, a driver) may never do so.
const KILL_WAIT: Duration = Duration::from_secs(10);

/// What the job does next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum SupervisorAction {
    /// Send this signal to the process group of every rank that still runs.
    Signal(i32),
    /// Tell the person.
    Note(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StopPhase {
    Running,
    /// A rank failed; the others have time to notice and exit.
    Leaving {
        until: Duration,
    },
    /// All have been told to end.
    Stopping {
        until: Duration,
    },
    /// All have been killed; the kernel has yet to say so.
    Killing {
        until: Duration,
    },
    /// Some could not be killed.
    GivenUp,
}

pub(super) struct Supervisor {
    limits: LaunchLimits,
    members: Vec<RankStatus>,
    stage: StopPhase,
    outcome: JobOutcome,
    actions: VecDeque<SupervisorAction>,
}

impl Supervisor {
    /// A job whose ranks run as these processes.
    pub(super) fn new(limits: LaunchLimits, pids: &[i32]) -> Self {
        let members = (0..)
            .zip(pids)
            .map(|(number, &pid)| RankStatus { rank: Rank::new(number), pid, ended: None })
            .collect();
        Self {
            limits,
            members,
            stage: StopPhase::Running,
            outcome: JobOutcome::Success,
            actions: VecDeque::new(),
        }
    }

    /// These ranks were found to have ended, in an unknown order.
    pub(super) fn ended(&mut self, batch: &[(Rank, RankEnd)], now: Duration) {
        for &(rank, ended) in batch {
            self.members[rank.index()].ended.get_or_insert((ended, now));
        }
        let Some(&(rank, ended)) =
            batch.iter().max_by_key(|(rank, ended)| (ended.blame(), u32::MAX - rank.get()))
        else {
            return;
        };
        if ended.is_success() {
            return;
        }
        match (self.stage, self.outcome) {
            (StopPhase::Running, _) => self.fail(rank, now),
            // A rank that only reports what another did may be seen before that one: the kernel closes the sockets of a dying
            // process before it tells its parent.
            (StopPhase::Leaving { .. }, JobOutcome::Failed(first)) if ended.blame() > self.blame(first) => {
                self.outcome = JobOutcome::Failed(rank);
                self.note(self.members[rank.index()].sentence());
            }
            _ => {}
        }
    }

    /// ringrun itself received this signal.
    pub(super) fn signalled(&mut self, signal: i32, now: Duration) {
        match signal {
            SIGINT | SIGHUP | SIGQUIT => match self.stage {
                StopPhase::Running => {
                    self.outcome = JobOutcome::Interrupted(signal);
                    self.note(format!(
                        "{}: the ranks have {} to end{}",
                        signal_name(signal),
                        seconds(self.limits.kill_after),
                        if signal == SIGINT { "; press Ctrl-C again to kill them at once" } else { "" }
                    ));
                    self.stop(signal, self.limits.kill_after, now);
                }
                // The person insists. A terminal that hangs up after Ctrl-C does not.
                _ if signal == SIGINT => self.kill(now),
                _ => {}
            },
            SIGTERM => {
                if self.stage == StopPhase::Running {
                    self.outcome = JobOutcome::Terminated;
                    self.note(format!(
                        "SIGTERM: the ranks have {} to end",
                        seconds(self.limits.term_timeout)
                    ));
                    self.stop(signal, self.limits.term_timeout, now);
                }
            }
            other => self.actions.push_back(SupervisorAction::Signal(other)),
        }
    }

    /// Our standard output cannot be written any more, for this `errno`; `EPIPE` if its reader has gone.
    pub(super) fn output_closed(&mut self, errno: i32, now: Duration) {
        if self.stage == StopPhase::Running {
            self.outcome = JobOutcome::OutputClosed { errno };
            self.stop(SIGTERM, self.limits.kill_after, now);
        }
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Duration) {
        match self.stage {
            StopPhase::Running if self.limits.job_timeout.is_some_and(|timeout| now >= timeout) => {
                self.outcome = JobOutcome::TimedOut;
                self.note("the job passed its --job-timeout; stopping it".to_owned());
                self.stop(SIGTERM, self.limits.kill_after, now);
            }
            StopPhase::Leaving { until } if now >= until => self.stop(SIGTERM, self.limits.kill_after, now),
            StopPhase::Stopping { until } if now >= until => self.kill(now),
            StopPhase::Killing { until } if now >= until => self.stage = StopPhase::GivenUp,
            _ => {}
        }
    }

    /// When `tick` must be called at the latest.
    pub(super) fn deadline(&self) -> Option<Duration> {
        match self.stage {
            StopPhase::Running => self.limits.job_timeout,
            StopPhase::Leaving { until } | StopPhase::Stopping { until } | StopPhase::Killing { until } => {
                Some(until)
            }
            StopPhase::GivenUp => None,
        }
    }

    /// The next thing to do, first things first.
    pub(super) fn poll_action(&mut self) -> Option<SupervisorAction> {
        self.actions.pop_front()
    }

    /// Whether there is nothing left to wait for.
    pub(super) fn is_over(&self) -> bool {
        self.stage == StopPhase::GivenUp || self.members.iter().all(|member| member.ended.is_some())
    }

    /// What became of the job and of each rank.
    pub(super) fn into_result(self) -> (JobOutcome, Vec<RankStatus>) {
        (self.outcome, self.members)
    }

    fn blame(&self, rank: Rank) -> u8 {
        self.members[rank.index()].ended.map_or(0, |(ended, _)| ended.blame())
    }

    fn fail(&mut self, rank: Rank, now: Duration) {
        self.outcome = JobOutcome::Failed(rank);
        if self.members.iter().any(|member| member.ended.is_none()) {
            let grace = seconds(self.limits.grace);
            let sentence = self.members[rank.index()].sentence();
            self.note(format!("{sentence}; the others have {grace} to end"));
        }
        self.stage = StopPhase::Leaving { until: now + self.limits.grace };
        self.tick(now);
    }

    fn stop(&mut self, signal: i32, patience: Duration, now: Duration) {
        self.actions.push_back(SupervisorAction::Signal(signal));
        // A stopped process handles no signal but SIGKILL until it is continued.
        self.actions.push_back(SupervisorAction::Signal(SIGCONT));
        self.stage = StopPhase::Stopping { until: now + patience };
    }

    fn kill(&mut self, now: Duration) {
        if !matches!(self.stage, StopPhase::Killing { .. } | StopPhase::GivenUp) {
            self.actions.push_back(SupervisorAction::Signal(SIGKILL));
            self.stage = StopPhase::Killing { until: now + KILL_WAIT };
        }
    }

    fn note(&mut self, text: String) {
        self.actions.push_back(SupervisorAction::Note(text));
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

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn of_three() -> Supervisor {
        Supervisor::new(LIMITS, &[10, 11, 12])
    }

    /// The signals that it now wants sent.
    fn signals(supervisor: &mut Supervisor) -> Vec<i32> {
        std::iter::from_fn(|| supervisor.poll_action())
            .filter_map(
                |action| if let SupervisorAction::Signal(signal) = action { Some(signal) } else { None },
            )
            .collect()
    }

    fn end(supervisor: &mut Supervisor, rank: u32, ended: RankEnd, now: Duration) {
        supervisor.ended(&[(Rank::new(rank), ended)], now);
    }

    #[test]
    fn ranks_that_succeed_one_after_another() {
        let mut job = of_three();
        for rank in 0..3 {
            assert!(!job.is_over());
            end(&mut job, rank, RankEnd::Exited(0), s(u64::from(rank)));
        }
        assert!(job.is_over());
        assert!(signals(&mut job).is_empty());
        assert_eq!(job.into_result().0, JobOutcome::Success);
    }

    #[test]
    fn a_failure_leaves_time_then_asks_then_kills() {
        let mut job = of_three();
        end(&mut job, 1, RankEnd::Exited(3), s(10));
        assert_eq!((signals(&mut job), job.deadline()), (vec![], Some(s(12))));
        job.tick(s(12));
        assert_eq!((signals(&mut job), job.deadline()), (vec![SIGTERM, SIGCONT], Some(s(17))));
        end(&mut job, 0, RankEnd::Killed(SIGTERM), s(13));
        job.tick(s(17));
        assert_eq!((signals(&mut job), job.deadline()), (vec![SIGKILL], Some(s(27))));
        assert!(!job.is_over());
        end(&mut job, 2, RankEnd::Killed(SIGKILL), s(17));
        assert!(job.is_over());
        assert_eq!(job.into_result().0, JobOutcome::Failed(Rank::new(1)));
    }

    #[test]
    fn a_process_that_cannot_be_killed_is_given_up() {
        let mut job = of_three();
        job.signalled(SIGINT, s(1));
        job.tick(s(6));
        job.tick(s(16));
        assert!(job.is_over());
        assert!(job.into_result().1.iter().all(|member| member.ended.is_none()));
    }

    /// Which rank a job is blamed on, for ends that arrive together or one after the other.
    #[test]
    fn the_rank_that_began_it_is_blamed() {
        let lost = RankEnd::Exited(6);
        for (name, batches, expected) in [
            ("first by time", vec![vec![(2, RankEnd::Exited(4))], vec![(0, RankEnd::Exited(3))]], 2),
            ("killed before lost", vec![vec![(0, lost), (2, RankEnd::Killed(9))]], 2),
            ("code before lost", vec![vec![(0, lost), (1, RankEnd::Exited(4)), (2, lost)]], 1),
            ("lost seen first", vec![vec![(0, lost)], vec![(2, RankEnd::Killed(9))]], 2),
            (
                "code after a deadline",
                vec![vec![(0, RankEnd::Exited(8))], vec![(1, RankEnd::Exited(101))]],
                1,
            ),
            ("killed seen late", vec![vec![(0, RankEnd::Exited(1))], vec![(1, RankEnd::Killed(11))]], 1),
            (
                "a closed pipe is no fault",
                vec![vec![(0, RankEnd::Exited(1))], vec![(1, RankEnd::Killed(13))]],
                0,
            ),
            ("lost alone", vec![vec![(1, lost)], vec![(0, lost)]], 1),
            ("lowest of equals", vec![vec![(1, RankEnd::Exited(4)), (2, RankEnd::Exited(5))]], 1),
            ("success does not matter", vec![vec![(0, RankEnd::Exited(0)), (2, RankEnd::Exited(4))]], 2),
        ] {
            let mut job = of_three();
            for batch in batches {
                let batch: Vec<_> = batch.into_iter().map(|(rank, ended)| (Rank::new(rank), ended)).collect();
                job.ended(&batch, s(1));
            }
            assert_eq!(job.into_result().0, JobOutcome::Failed(Rank::new(expected)), "{name}");
        }
    }

    #[test]
    fn what_follows_our_own_signals_is_not_the_cause() {
        let mut job = of_three();
        end(&mut job, 0, RankEnd::Exited(6), s(1));
        job.tick(s(3));
        end(&mut job, 1, RankEnd::Killed(SIGTERM), s(3));
        assert_eq!(job.into_result().0, JobOutcome::Failed(Rank::ZERO));
    }

    #[test]
    fn ctrl_c_asks_and_a_second_one_kills() {
        let mut job = of_three();
        job.signalled(SIGINT, s(1));
        assert_eq!((signals(&mut job), job.deadline()), (vec![SIGINT, SIGCONT], Some(s(6))));
        end(&mut job, 0, RankEnd::Exited(1), s(2));
        job.signalled(SIGINT, s(2));
        assert_eq!(signals(&mut job), [SIGKILL]);
        assert_eq!(job.into_result().0, JobOutcome::Interrupted(SIGINT));
    }

    #[test]
    fn sigterm_leaves_time_to_save_however_often_it_comes() {
        let mut job = of_three();
        job.signalled(SIGTERM, s(1));
        job.signalled(SIGTERM, s(2));
        assert_eq!((signals(&mut job), job.deadline()), (vec![SIGTERM, SIGCONT], Some(s(26))));
        job.tick(s(26));
        assert_eq!(signals(&mut job), [SIGKILL]);
    }

    #[test]
    fn other_signals_pass_through() {
        let mut job = of_three();
        job.signalled(signal_hook::consts::SIGUSR1, s(1));
        assert_eq!(signals(&mut job), [signal_hook::consts::SIGUSR1]);
        assert_eq!(job.into_result().0, JobOutcome::Success);
    }

    #[test]
    fn the_job_has_a_deadline() {
        let mut job = of_three();
        assert_eq!(job.deadline(), Some(s(100)));
        job.tick(s(99));
        assert!(signals(&mut job).is_empty());
        job.tick(s(100));
        assert_eq!(signals(&mut job), [SIGTERM, SIGCONT]);
        assert_eq!(job.into_result().0, JobOutcome::TimedOut);
    }

    #[test]
    fn no_grace_asks_at_once() {
        let mut job = Supervisor::new(LaunchLimits { grace: Duration::ZERO, ..LIMITS }, &[10, 11]);
        end(&mut job, 0, RankEnd::Exited(1), s(1));
        assert_eq!(signals(&mut job), [SIGTERM, SIGCONT]);
    }
}
