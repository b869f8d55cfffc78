//! The threads of named tensors. These threads send and receive the messages of the client and the coordinator, and
//! pass the current time to the coordinator. The client and the coordinator perform no IO and read no clock.
//!
//! Every rank has three threads. The reporter sends the reports of the client, the reader executes the instructions
//! of the coordinator, and the finisher waits for operations and delivers their results. On rank 0 a fourth thread,
//! the collector, receives the reports of the other ranks. All threads end when all ranks have closed or the job
//! fails.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::client::{Client, ClientAction};
use super::coordinator::Coordinator;
use super::error::{NamedError, Violation};
use super::execute::{self, BegunOperation, Promise, TensorPayload, lock};
use super::message::{CoordinatorMessage, MESSAGE_BYTES_MAX, RankReport};
use crate::group::{Error, Group, Source};
use crate::types::Rank;

/// The tag of a rank's report to the coordinator.
const REPORT_TAG: u32 = 0;
/// The tag of a message from the coordinator to a rank.
const MESSAGE_TAG: u32 = 1;
/// The largest number of operations in the queue of the finisher. While the queue is full, the reader waits before it
/// adds another operation.
const FINISHER_QUEUE_LEN_MAX: usize = 4;

/// The state that a rank's threads share.
pub(super) struct NamedTensorsState {
    /// The state of this rank. Rank 0 has additional state in `rank_0`.
    pub(super) local: Mutex<ThisRankState>,
    /// Wakes the reporter when there is something to report, or when the named tensors have ended.
    pub(super) changed: Condvar,
    /// The group for the messages of the negotiation.
    control: Mutex<Group>,
    /// The additional state on rank 0; `None` on other ranks.
    pub(super) rank_0: Option<Rank0State>,
    /// The coordinator's timestamps are durations since this instant.
    start_time: Instant,
}

/// This rank's own state.
pub(super) struct ThisRankState {
    pub(super) client: Client<Box<dyn TensorPayload>>,
    /// The promise for a thread of the program that waits in `join`; `None` if no thread waits.
    pub(super) join_promise: Option<Promise<Rank>>,
    /// The reason why the named tensors have ended: a failure, or `Closed` if all ranks have closed.
    pub(super) end_reason: Option<NamedError>,
}

/// The additional state of rank 0.
pub(super) struct Rank0State {
    pub(super) coordinator: Mutex<Coordinator>,
    /// Sends the messages of the coordinator to the reader of rank 0. An error tells the reader that the job has
    /// failed.
    message_sender: Sender<Result<CoordinatorMessage, Error>>,
    /// The interval between checks for stalls.
    stall_check_interval: Duration,
}

/// Starts the threads. The group `control` carries the messages of the negotiation, and the group `data` carries the
/// tensors. `coordinator` is `Some` on rank 0 and `None` on other ranks.
pub(super) fn start_threads(
    control: Group,
    data: Group,
    coordinator: Option<Coordinator>,
) -> Result<(Arc<NamedTensorsState>, Vec<JoinHandle<()>>), Error> {
    let (message_sender, message_receiver) = mpsc::channel();
    let stall_check_interval =
        coordinator.as_ref().map(|coordinator| coordinator.stall_watch.check_interval());
    let rank_0 = coordinator.zip(stall_check_interval).map(|(coordinator, stall_check_interval)| {
        Rank0State { coordinator: Mutex::new(coordinator), message_sender, stall_check_interval }
    });
    let needs_collector = rank_0.is_some() && control.size().get() > 1;
    let client = Client::new(control.size());
    let shared = Arc::new(NamedTensorsState {
        local: Mutex::new(ThisRankState { client, join_promise: None, end_reason: None }),
        changed: Condvar::new(),
        control: Mutex::new(control),
        rank_0,
        start_time: Instant::now(),
    });
    let (operation_sender, operation_receiver) = mpsc::sync_channel(FINISHER_QUEUE_LEN_MAX);
    let mut threads = Vec::new();
    let mut spawn = |name: &str, work: Box<dyn FnOnce(&NamedTensorsState) + Send>| {
        let state = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name.into()).spawn(move || work(&state));
        // If a thread cannot be started, the job ends. The end of the job also ends the threads that already run.
        thread.map(|thread| threads.push(thread)).map_err(|error| {
            let error = Error::System { what: "a thread", detail: error.to_string() };
            shared.abort(&error.to_string());
            shared.end_named_tensors(&error.clone().into());
            error
        })
    };
    spawn("named-finish", Box::new(move |shared| shared.run_finisher(&operation_receiver)))?;
    spawn(
        "named-read",
        Box::new(move |shared| shared.run_reader(data, &operation_sender, &message_receiver)),
    )?;
    spawn("named-report", Box::new(NamedTensorsState::run_reporter))?;
    if needs_collector {
        spawn("named-collect", Box::new(NamedTensorsState::run_collector))?;
    }
    Ok((shared, threads))
}

impl NamedTensorsState {
    /// Runs the reporter: sends reports until this rank closes.
    fn run_reporter(&self) {
        loop {
            let mut local = lock(&self.local);
            let report = loop {
                if local.end_reason.is_some() {
                    return;
                }
                match local.client.take_report() {
                    Some(report) => break report,
                    None => local = self.changed.wait(local).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(local);
            let is_last = report.closes;
            if let Err(error) = self.send_report(report) {
                return self.end_named_tensors(&error.into());
            }
            if is_last {
                return;
            }
        }
    }

    /// Sends one report, and waits for the end of the send. If the program submits tensors during this wait, they are
    /// in the next report.
    fn send_report(&self, report: RankReport) -> Result<(), Error> {
        if let Some(rank_0) = &self.rank_0 {
            return self.process_report(rank_0, Rank::ZERO, Ok(report));
        }
        let sent = lock(&self.control).send_async(report.encode(), Rank::ZERO, REPORT_TAG)?;
        sent.wait().map(|_| ())
    }

    /// Runs the collector: receives reports until all other ranks have closed.
    fn run_collector(&self) {
        let Some(rank_0) = &self.rank_0 else { return };
        while lock(&rank_0.coordinator).expects_reports() {
            if let Err(error) = self.collect_report(rank_0) {
                return self.end_named_tensors(&error.into());
            }
        }
    }

    /// Receives and processes one report of another rank.
    fn collect_report(&self, rank_0: &Rank0State) -> Result<(), Error> {
        let (receive, world) = {
            let control = lock(&self.control);
            (control.receive_async::<u8>(MESSAGE_BYTES_MAX, Source::Any, REPORT_TAG)?, control.size())
        };
        let received = receive.wait()?;
        self.process_report(rank_0, received.status.source, RankReport::decode(&received.elements, world))
    }

    /// Passes a report to the coordinator, and sends the messages that follow. Ends the job if the report is invalid.
    fn process_report(
        &self,
        rank_0: &Rank0State,
        from: Rank,
        report: Result<RankReport, Violation>,
    ) -> Result<(), Error> {
        let mut coordinator = lock(&rank_0.coordinator);
        let result =
            report.and_then(|report| coordinator.handle_report(self.start_time.elapsed(), from, report));
        match result {
            Ok(()) => self.send_messages(rank_0, &mut coordinator),
            Err(violation) => {
                let who = coordinator.describe_ranks(&[from]);
                drop(coordinator);
                Err(self.abort(&format!("{who} broke the protocol of named tensors: {violation}")))
            }
        }
    }

    /// Sends the messages of the coordinator to all ranks. The caller keeps the coordinator locked, so that all ranks
    /// receive the messages in the same order.
    fn send_messages(&self, rank_0: &Rank0State, coordinator: &mut Coordinator) -> Result<(), Error> {
        while let Some(message) = coordinator.next_message() {
            let bytes = message.encode();
            let control = lock(&self.control);
            for peer in control.size().ranks().skip(1) {
                // The send continues after its handle is dropped. No thread waits for the send: if the send fails,
                // the job fails, and the other threads end with this failure.
                drop(control.send_async(bytes.clone(), peer, MESSAGE_TAG)?);
            }
            drop(control);
            // If the reader has ended, the job has failed, and another thread reports the failure.
            let _ = rank_0.message_sender.send(Ok(message));
        }
        Ok(())
    }

    /// Runs the reader: executes the coordinator's messages until the named tensors end.
    fn run_reader(
        &self,
        mut data: Group,
        operation_sender: &SyncSender<Box<dyn BegunOperation>>,
        message_receiver: &Receiver<Result<CoordinatorMessage, Error>>,
    ) {
        let mut last_check = Instant::now();
        loop {
            let message = match &self.rank_0 {
                Some(rank_0) => self.wait_for_local_message(rank_0, message_receiver, &mut last_check),
                None => self.receive_message(),
            };
            match message.and_then(|message| self.execute_message(message, &mut data, operation_sender)) {
                Ok(false) => {}
                Ok(true) => return self.end_named_tensors(&NamedError::Closed),
                Err(error) => return self.end_named_tensors(&error.into()),
            }
        }
    }

    /// Receives the next message of the coordinator on a rank other than rank 0.
    fn receive_message(&self) -> Result<CoordinatorMessage, Error> {
        let (receive, world) = {
            let control = lock(&self.control);
            (control.receive_async::<u8>(MESSAGE_BYTES_MAX, Rank::ZERO, MESSAGE_TAG)?, control.size())
        };
        let received = receive.wait()?;
        CoordinatorMessage::decode(&received.elements, world)
            .map_err(|violation| self.abort_for_violation(&violation))
    }

    /// Waits on rank 0 for the next message of the coordinator. Checks for stalls while waiting.
    fn wait_for_local_message(
        &self,
        rank_0: &Rank0State,
        message_receiver: &Receiver<Result<CoordinatorMessage, Error>>,
        last_check: &mut Instant,
    ) -> Result<CoordinatorMessage, Error> {
        loop {
            if last_check.elapsed() >= rank_0.stall_check_interval {
                *last_check = Instant::now();
                let report = lock(&rank_0.coordinator).check_for_stalls(self.start_time.elapsed());
                for stall in &report.stalls {
                    log::warn!("{stall}");
                }
                if let Some(message) = report.abort_reason {
                    return Err(self.abort(&message));
                }
            }
            match message_receiver
                .recv_timeout(rank_0.stall_check_interval.saturating_sub(last_check.elapsed()))
            {
                Ok(received) => return received,
                Err(RecvTimeoutError::Timeout) => {}
                // The channel cannot be disconnected, because `rank_0` owns a sender.
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Taken),
            }
        }
    }

    /// Executes the instructions of a message. Returns whether this message was the last message.
    fn execute_message(
        &self,
        message: CoordinatorMessage,
        data: &mut Group,
        operation_sender: &SyncSender<Box<dyn BegunOperation>>,
    ) -> Result<bool, Error> {
        let actions = lock(&self.local).client.handle_message(message);
        for action in actions.map_err(|violation| self.abort_for_violation(&violation))? {
            match action {
                ClientAction::Run(items) => {
                    if let Some(operation) = execute::begin_operation(data, items) {
                        // The send cannot fail, because the finisher runs until this sender is dropped.
                        let _ = operation_sender.send(operation);
                    }
                }
                ClientAction::Fail(payload, error) => payload.fail(error),
                ClientAction::Joined(last) => {
                    let join = lock(&self.local).join_promise.take();
                    if let Some(promise) = join {
                        promise.fulfil(Ok(last));
                    }
                }
                ClientAction::End => return Ok(true),
            }
        }
        Ok(false)
    }

    /// Runs the finisher: finishes operations in the order in which they began, until the reader ends.
    fn run_finisher(&self, operation_receiver: &Receiver<Box<dyn BegunOperation>>) {
        while let Ok(operation) = operation_receiver.recv() {
            let mut release_names = |names: &[String]| {
                let mut local = lock(&self.local);
                for name in names {
                    local.client.release_name(name);
                }
            };
            let mut result = operation.wait_and_deliver(&mut release_names);
            if let (Ok(()), Some(rank_0)) = (&result, &self.rank_0) {
                let mut coordinator = lock(&rank_0.coordinator);
                coordinator.record_completion(self.start_time.elapsed());
                result = self.send_messages(rank_0, &mut coordinator);
            }
            if let Err(error) = result {
                self.end_named_tensors(&error.into());
            }
        }
    }

    /// Ends the job, because the coordinator has sent an invalid message. Returns the error of this rank.
    fn abort_for_violation(&self, violation: &Violation) -> Error {
        self.abort(&format!("rank 0 of the group broke the protocol of named tensors: {violation}"))
    }

    /// Ends the job on every rank. Returns the error of this rank.
    fn abort(&self, message: &str) -> Error {
        lock(&self.control).abort(message)
    }

    /// Ends the named tensors. The handles of tensors that have no result yet get the error. A thread that waits in
    /// `join` gets the error too. If several threads call this function, all handles get the error of the first call.
    fn end_named_tensors(&self, error: &NamedError) {
        let mut local = lock(&self.local);
        local.end_reason.get_or_insert_with(|| error.clone());
        let error = local.end_reason.clone().unwrap_or(NamedError::Closed);
        let payloads = local.client.end_and_take_payloads();
        let join = local.join_promise.take();
        drop(local);
        self.changed.notify_all();
        for payload in payloads {
            payload.fail(error.clone());
        }
        if let Some(promise) = join {
            promise.fulfil(Err(error.clone()));
        }
        if let (Some(rank_0), NamedError::Job(error)) = (&self.rank_0, error) {
            // Wakes the reader if it waits for a message of the coordinator. If the reader waits for anything else,
            // the failure of the job ends that wait.
            let _ = rank_0.message_sender.send(Err(error));
        }
    }
}
