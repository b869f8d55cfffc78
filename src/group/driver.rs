//! The one loop that joins engine, transport and clock.

use std::time::{Duration, Instant};

use super::pump::{Pump, Turn};
use super::{Error, Statistics};
use crate::engine::{Failure, Timestamp};
use crate::schedule::Schedule;
use crate::transport::Transport as _;
use crate::transport::tcp::TcpTransport;
use crate::types::{Contract, Rank};

/// How long a failed operation may take to tell the peers why.
const NOTIFY_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a closing group waits for its peers' last words.
const PART_TIMEOUT: Duration = Duration::from_secs(1);

/// A pump over TCP and the clock that drives it.
pub(super) struct Driver {
    pump: Pump<TcpTransport>,
    congestion: Option<String>,
    epoch: Instant,
    operation_timeout: Duration,
    communication: Duration,
}

impl Driver {
    pub(super) fn new(
        pump: Pump<TcpTransport>,
        congestion: Option<String>,
        epoch: Instant,
        operation_timeout: Duration,
    ) -> Self {
        Self { pump, congestion, epoch, operation_timeout, communication: Duration::ZERO }
    }

    /// The time since the epoch: the engine's and the transport's clock.
    fn now(&self) -> Timestamp {
        self.epoch.elapsed()
    }

    pub(super) fn congestion_control(&self) -> Option<&str> {
        self.congestion.as_deref()
    }

    pub(super) fn transport(&self) -> &'static str {
        self.pump.transport().name()
    }

    pub(super) fn statistics(&self) -> Statistics {
        let counters = self.pump.counters();
        Statistics {
            operations: 0,
            bytes_sent: counters.bytes_sent,
            bytes_received: counters.bytes_received,
            communication: self.communication,
        }
    }

    /// Opens a link before the first operation needs it.
    pub(super) fn connect(&mut self, peer: Rank) {
        self.pump.connect(self.now(), peer);
    }

    /// Runs one operation to its end.
    pub(super) fn run(
        &mut self,
        contract: Contract,
        schedule: Schedule,
        memory: &mut [u8],
    ) -> Result<(), Error> {
        self.run_within(self.operation_timeout, contract, schedule, memory)
    }

    /// Runs one operation to its end or to its deadline.
    pub(super) fn run_within(
        &mut self,
        timeout: Duration,
        contract: Contract,
        schedule: Schedule,
        memory: &mut [u8],
    ) -> Result<(), Error> {
        let started = self.now();
        let result = match self.pump.begin(started, contract, schedule, timeout) {
            Ok(()) => self.turn_until_done(memory),
            Err(failure) => Err(self.fail(failure, memory)),
        };
        self.communication += self.now().saturating_sub(started);
        result
    }

    fn turn_until_done(&mut self, memory: &mut [u8]) -> Result<(), Error> {
        loop {
            match self.pump.turn(self.now(), memory) {
                Turn::Complete => return Ok(()),
                Turn::Failed(failure) => return Err(self.fail(failure, memory)),
                Turn::Blocked => self.wait(None)?,
            }
        }
    }

    fn wait(&mut self, until: Option<Timestamp>) -> Result<(), Error> {
        self.pump
            .wait(self.now(), until)
            .map_err(|error| Error::System { what: "waiting for its sockets", detail: error.to_string() })
    }

    /// Tells the peers before the caller learns it: the caller may exit at once.
    fn fail(&mut self, failure: Failure, memory: &mut [u8]) -> Error {
        let deadline = self.now() + NOTIFY_TIMEOUT;
        while !self.pump.notify(memory) && self.now() < deadline && self.wait(Some(deadline)).is_ok() {}
        Error::Failed { cause: failure.cause, reported_by: failure.reported_by }
    }

    pub(super) fn abort(&mut self, message: &str) -> Error {
        let failure = self.pump.abort(message);
        self.fail(failure, &mut [])
    }
}

impl Drop for Driver {
    /// Says goodbye, or why the job failed, and reads what the peers still say, so that no last word is lost to a reset.
    fn drop(&mut self) {
        let deadline = self.now() + PART_TIMEOUT;
        while !self.pump.part(&mut []) && self.now() < deadline && self.wait(Some(deadline)).is_ok() {}
    }
}
