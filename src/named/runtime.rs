//! The threads and the messages of named tensors: they connect the client and, on rank 0, the coordinator to a group
//! and the clock.
//!
//! Every rank has three threads. The reporter sends submitted tensors, the reader carries out the coordinator's
//! instructions, and the finisher waits for operations and delivers results. On rank 0 the collector receives the
//! other ranks' reports. All of them end when all ranks have closed, or when the job fails.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::client::{Client, ClientAction};
use super::coordinator::Coordinator;
use super::error::{NamedError, Violation};
use super::execute::{self, BegunOperation, Promise, TensorPayload, lock};
use super::message::{CoordinatorMessage, MESSAGE_BYTES_MAX, Report};
use crate::group::{Error, Group, Source};
use crate::types::Rank;

/// The tags of the two kinds of messages.
const REPORT: u32 = 0;
const MESSAGE: u32 = 1;
/// The largest number of unfinished operations of a rank. At this number it reads no messages until one has finished.
const RUNNING_MAX: usize = 4;

/// The state that a rank's threads share.
pub(super) struct NamedShared {
    pub(super) local: Mutex<LocalState>,
    /// Notified when there is something to report, or at the end.
    pub(super) changed: Condvar,
    control: Mutex<Group>,
    pub(super) leader: Option<LeaderState>,
    epoch: Instant,
}

/// This rank's own state.
pub(super) struct LocalState {
    pub(super) client: Client<Box<dyn TensorPayload>>,
    pub(super) join: Option<Promise<Rank>>,
    /// The reason for the end, including that all ranks have closed.
    pub(super) ended: Option<NamedError>,
}

/// The additional state of rank 0.
pub(super) struct LeaderState {
    pub(super) coordinator: Mutex<Coordinator>,
    inbox: Sender<ReaderInput>,
    interval: Duration,
}

/// The inputs of rank 0's reader.
enum ReaderInput {
    Message(CoordinatorMessage),
    Failed(Error),
}

/// Starts the threads; `coordinator` is `Some` on rank 0.
pub(super) fn start(
    control: Group,
    data: Group,
    coordinator: Option<Coordinator>,
) -> Result<(Arc<NamedShared>, Vec<JoinHandle<()>>), Error> {
    let (inbox, arrivals) = mpsc::channel();
    let interval = coordinator.as_ref().map(|coordinator| coordinator.watch.interval());
    let leader = coordinator.zip(interval).map(|(coordinator, interval)| LeaderState {
        coordinator: Mutex::new(coordinator),
        inbox,
        interval,
    });
    let is_collecting = leader.is_some() && control.size().get() > 1;
    let client = Client::new(control.size());
    let shared = Arc::new(NamedShared {
        local: Mutex::new(LocalState { client, join: None, ended: None }),
        changed: Condvar::new(),
        control: Mutex::new(control),
        leader,
        epoch: Instant::now(),
    });
    let (running, begun) = mpsc::sync_channel(RUNNING_MAX);
    let mut threads = Vec::new();
    let mut spawn = |name: &str, work: Box<dyn FnOnce(&NamedShared) + Send>| {
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name.into()).spawn(move || work(&own));
        let refused = |error: std::io::Error| Error::System { what: "a thread", detail: error.to_string() };
        // The threads that already run end with the job.
        thread.map(|thread| threads.push(thread)).map_err(|error| {
            let error = refused(error);
            shared.abort(&error.to_string());
            shared.end(&error.clone().into());
            error
        })
    };
    spawn("named-finish", Box::new(move |shared| shared.finish_all(&begun)))?;
    spawn("named-read", Box::new(move |shared| shared.read_all(data, &running, &arrivals)))?;
    spawn("named-report", Box::new(NamedShared::report_all))?;
    if is_collecting {
        spawn("named-collect", Box::new(NamedShared::collect_all))?;
    }
    Ok((shared, threads))
}

impl NamedShared {
    /// The reporter's loop.
    fn report_all(&self) {
        loop {
            let mut local = lock(&self.local);
            let report = loop {
                if local.ended.is_some() {
                    return;
                }
                match local.client.take_report() {
                    Some(report) => break report,
                    None => local = self.changed.wait(local).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(local);
            let is_last = report.closes;
            if let Err(error) = self.report(report) {
                return self.end(&error.into());
            }
            if is_last {
                return;
            }
        }
    }

    /// Sends one report. Tensors submitted before it has been sent are in the next one.
    fn report(&self, report: Report) -> Result<(), Error> {
        if let Some(leader) = &self.leader {
            return self.take_report(leader, Rank::ZERO, Ok(report));
        }
        let sent = lock(&self.control).send_async(report.encode(), Rank::ZERO, REPORT)?;
        sent.wait().map(|_| ())
    }

    /// The collector's loop.
    fn collect_all(&self) {
        let Some(leader) = &self.leader else { return };
        while lock(&leader.coordinator).is_expecting_others() {
            if let Err(error) = self.collect(leader) {
                return self.end(&error.into());
            }
        }
    }

    fn collect(&self, leader: &LeaderState) -> Result<(), Error> {
        let (receive, world) = {
            let control = lock(&self.control);
            (control.receive_async::<u8>(MESSAGE_BYTES_MAX, Source::Any, REPORT)?, control.size())
        };
        let received = receive.wait()?;
        self.take_report(leader, received.status.source, Report::decode(&received.elements, world))
    }

    fn take_report(
        &self,
        leader: &LeaderState,
        from: Rank,
        report: Result<Report, Violation>,
    ) -> Result<(), Error> {
        let mut coordinator = lock(&leader.coordinator);
        let taken = report.and_then(|report| coordinator.report(self.epoch.elapsed(), from, report));
        match taken {
            Ok(()) => self.send_messages(leader, &mut coordinator),
            Err(violation) => {
                let who = coordinator.text_of(&[from]);
                drop(coordinator);
                Err(self.abort(&format!("{who} broke the protocol of named tensors: {violation}")))
            }
        }
    }

    /// Sends the coordinator's messages to all ranks. The coordinator stays locked, so that all ranks receive them in
    /// the same order.
    fn send_messages(&self, leader: &LeaderState, coordinator: &mut Coordinator) -> Result<(), Error> {
        while let Some(message) = coordinator.next_message() {
            let bytes = message.encode();
            let control = lock(&self.control);
            for peer in control.size().ranks().skip(1) {
                // The send is asynchronous; if it fails, the job has failed.
                drop(control.send_async(bytes.clone(), peer, MESSAGE)?);
            }
            drop(control);
            // If there is no reader the job has failed, and another thread reports that.
            let _ = leader.inbox.send(ReaderInput::Message(message));
        }
        Ok(())
    }

    /// The reader's loop.
    fn read_all(
        &self,
        mut data: Group,
        running: &SyncSender<Box<dyn BegunOperation>>,
        arrivals: &Receiver<ReaderInput>,
    ) {
        let mut checked_at = Instant::now();
        loop {
            let read = match &self.leader {
                Some(leader) => self.next_local_message(leader, arrivals, &mut checked_at),
                None => self.receive_message(),
            };
            match read.and_then(|message| self.execute_message(message, &mut data, running)) {
                Ok(false) => {}
                Ok(true) => return self.end(&NamedError::Closed),
                Err(error) => return self.end(&error.into()),
            }
        }
    }

    fn receive_message(&self) -> Result<CoordinatorMessage, Error> {
        let (receive, world) = {
            let control = lock(&self.control);
            (control.receive_async::<u8>(MESSAGE_BYTES_MAX, Rank::ZERO, MESSAGE)?, control.size())
        };
        let received = receive.wait()?;
        CoordinatorMessage::decode(&received.elements, world).map_err(|violation| self.violated(&violation))
    }

    /// The next message for rank 0; also checks for stalls from time to time.
    fn next_local_message(
        &self,
        leader: &LeaderState,
        arrivals: &Receiver<ReaderInput>,
        checked_at: &mut Instant,
    ) -> Result<CoordinatorMessage, Error> {
        loop {
            if checked_at.elapsed() >= leader.interval {
                *checked_at = Instant::now();
                let report = lock(&leader.coordinator).check(self.epoch.elapsed());
                for stall in &report.stalls {
                    log::warn!("{stall}");
                }
                if let Some(message) = report.abort {
                    return Err(self.abort(&message));
                }
            }
            match arrivals.recv_timeout(leader.interval.saturating_sub(checked_at.elapsed())) {
                Ok(ReaderInput::Message(message)) => return Ok(message),
                Ok(ReaderInput::Failed(error)) => return Err(error),
                Err(RecvTimeoutError::Timeout) => {}
                // This state holds a sender, so this cannot happen; treat it as the end.
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Taken),
            }
        }
    }

    /// Carries out a message; returns whether it was the last one.
    fn execute_message(
        &self,
        message: CoordinatorMessage,
        data: &mut Group,
        running: &SyncSender<Box<dyn BegunOperation>>,
    ) -> Result<bool, Error> {
        let steps = lock(&self.local).client.read(message).map_err(|violation| self.violated(&violation))?;
        for step in steps {
            match step {
                ClientAction::Run(items) => {
                    if let Some(operation) = execute::begin(data, items) {
                        // The finisher lives as long as this sender.
                        let _ = running.send(operation);
                    }
                }
                ClientAction::Fail(payload, error) => payload.fail(error),
                ClientAction::Joined(last) => {
                    let join = lock(&self.local).join.take();
                    if let Some(promise) = join {
                        promise.fulfil(Ok(last));
                    }
                }
                ClientAction::End => return Ok(true),
            }
        }
        Ok(false)
    }

    /// The finisher's loop.
    fn finish_all(&self, begun: &Receiver<Box<dyn BegunOperation>>) {
        while let Ok(operation) = begun.recv() {
            let mut ended = |names: &[String]| {
                let mut local = lock(&self.local);
                for name in names {
                    local.client.finish(name);
                }
            };
            let mut result = operation.finish(&mut ended);
            if let (Ok(()), Some(leader)) = (&result, &self.leader) {
                let mut coordinator = lock(&leader.coordinator);
                coordinator.complete(self.epoch.elapsed());
                result = self.send_messages(leader, &mut coordinator);
            }
            if let Err(error) = result {
                self.end(&error.into());
            }
        }
    }

    fn violated(&self, violation: &Violation) -> Error {
        self.abort(&format!("rank 0 of the group broke the protocol of named tensors: {violation}"))
    }

    /// Ends the job on every rank.
    fn abort(&self, message: &str) -> Error {
        lock(&self.control).abort(message)
    }

    /// Ends all named tensors: those that wait get this error, unless there is an earlier one.
    fn end(&self, error: &NamedError) {
        let mut local = lock(&self.local);
        local.ended.get_or_insert_with(|| error.clone());
        let error = local.ended.clone().unwrap_or(NamedError::Closed);
        let payloads = local.client.end();
        let join = local.join.take();
        drop(local);
        self.changed.notify_all();
        for payload in payloads {
            payload.fail(error.clone());
        }
        if let Some(promise) = join {
            promise.fulfil(Err(error.clone()));
        }
        if let (Some(leader), NamedError::Job(error)) = (&self.leader, error) {
            // The reader waits only for operations that a failed job ends.
            let _ = leader.inbox.send(ReaderInput::Failed(error));
        }
    }
}
