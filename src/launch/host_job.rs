//! What ringrun and its agents share: the processes of one host, and the wait for all events in a single poll.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token, Waker};

use super::environment::host_job_id;
use super::error::LaunchError;
use super::input_feed::InputFeed;
use super::message::LaunchMessage;
use super::output::Output;
use super::output_messages::OutputTarget;
use super::plan::{LaunchPlan, StdinReader};
use super::rank_processes::RankProcesses;
use super::signals::Signals;
use super::watchdog::Watchdog;

const WAKE_TOKEN: Token = Token(0);
const FIRST_SIGNAL_TOKEN: usize = 1;

/// How long ringrun tries to kill processes that the ranks have left behind.
const LEFTOVER_PROCESSES_TIMEOUT: Duration = Duration::from_secs(2);

/// The ranks of one host, and the events that concern them.
pub(super) struct HostJob {
    pub(super) start_time: Instant,
    pub(super) poll: Poll,
    pub(super) output: Output,
    pub(super) rank_processes: RankProcesses,
    /// Copies the standard input of ringrun to the ranks; `None` if rank 0 inherits it.
    pub(super) input_feed: Option<InputFeed>,
    signals: Signals,
    /// The waker with which the output thread wakes the poll. The job also owns the waker: a wake-up would be lost if
    /// the output thread were the only owner, and dropped the waker before the poll returns.
    pub(super) waker: Arc<Waker>,
    has_warned_of_lost_watchdog: bool,
}

/// The events that have ended a wait.
pub(super) struct WaitResult {
    /// The signals that have arrived.
    pub(super) signals: Vec<i32>,
    /// The tokens of other events.
    pub(super) tokens: Vec<Token>,
}

impl HostJob {
    /// Prepares the job without starting ranks. Installs the signal handlers first, so that no signal ends ringrun
    /// without stopping the job.
    pub(super) fn prepare(
        plan: &LaunchPlan,
        job_id: &str,
        target: OutputTarget,
    ) -> Result<Self, LaunchError> {
        let system_error = |resource| move |source| LaunchError::System { resource, source };
        let poll = Poll::new().map_err(system_error("an event queue"))?;
        let signals = Signals::register(poll.registry(), FIRST_SIGNAL_TOKEN)
            .map_err(system_error("the signal handlers"))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE_TOKEN).map_err(system_error("an eventfd"))?);
        let watchdog = Watchdog::start(&host_job_id(job_id, &plan.share))
            .map_err(system_error("the watchdog process"))?;
        let rank_processes = RankProcesses::new(watchdog, plan.share.ranks().collect());
        // The agents of other hosts have no standard input that ranks could inherit.
        let copies_input =
            matches!(target, OutputTarget::Launcher(_)) || plan.stdin_reader == StdinReader::AllRanks;
        let input_feed = copies_input.then(InputFeed::default);
        let output = Output::start(plan.world, target, Arc::clone(&waker))
            .map_err(system_error("the output thread"))?;
        Ok(Self {
            start_time: Instant::now(),
            poll,
            output,
            rank_processes,
            input_feed,
            signals,
            waker,
            has_warned_of_lost_watchdog: false,
        })
    }

    /// Waits for events.
    pub(super) fn wait_for_events(&mut self, timeout: Option<Duration>) -> Result<WaitResult, LaunchError> {
        let mut events = Events::with_capacity(64);
        let mut found = WaitResult { signals: Vec::new(), tokens: Vec::new() };
        match self.poll.poll(&mut events, timeout) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(LaunchError::System { resource: "a wait for events", source: error })
            }
            _ => {
                for token in events.iter().map(mio::event::Event::token) {
                    match self.signals.take_signal(token) {
                        Some(signal) => found.signals.push(signal),
                        None => found.tokens.push(token),
                    }
                }
                Ok(found)
            }
        }
    }

    /// Kills processes that the ranks have left behind, until none is left or [`LEFTOVER_PROCESSES_TIMEOUT`] is over.
    pub(super) fn kill_leftover_processes(&mut self) -> Result<(), LaunchError> {
        let deadline = Instant::now() + LEFTOVER_PROCESSES_TIMEOUT;
        loop {
            // A process that ends after this call of `reap_ended_ranks` causes another SIGCHLD, which ends the wait
            // below.
            self.rank_processes.reap_ended_ranks();
            if self.rank_processes.kill_leftover_processes() == 0 {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = "some processes that the ranks left behind cannot be killed";
                self.output.print_message(LaunchMessage::warning(text));
                break;
            }
            self.wait_for_events(Some(left))?;
        }
        Ok(())
    }

    /// After the watchdog was killed, prints a warning once.
    pub(super) fn warn_of_lost_watchdog(&mut self) {
        if self.rank_processes.watchdog_ended() && !self.has_warned_of_lost_watchdog {
            self.has_warned_of_lost_watchdog = true;
            let text = "the watchdog process was killed; if ringrun is killed too, processes of its ranks may survive";
            self.output.print_message(LaunchMessage::warning(text));
        }
    }
}
