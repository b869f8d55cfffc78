//! Messages between ranks of a host without operations. A thread that sends or receives such a message does not enter the tables
//! of the engine, and a thread that waits for one polls only the queue of its sender, for a short time.

use super::core::Core;
use super::tasks::operation_start;
use super::threads::ThreadedDriver as _;
use super::{Driver, Submission};
use crate::engine::{Envelope, OperationRequest, Pattern, Timestamp};
use crate::observe::event::{Direction, EventStatus};
use crate::runtime::error::Error;
use crate::runtime::link_driver::direct::{DirectReceive, LOOKS};
use crate::runtime::measurements::{OperationTimer, ProfilePart, SHORT_MESSAGE_BYTES};
use crate::runtime::memory::Memory;
use crate::shm::RoundsMemory;
use crate::transport::SocketTransport;
use crate::types::Rank;

/// One of so many messages becomes an operation, so that a rank which only exchanges messages also learns of other events.
const MESSAGES_PER_OPERATION: u32 = 1024;

impl<S: SocketTransport, M: RoundsMemory> Core<S, M> {
    /// Returns whether the next message may go without an operation.
    pub(crate) fn may_be_direct(&mut self) -> bool {
        self.direct_messages = (self.direct_messages + 1) % MESSAGES_PER_OPERATION;
        self.direct_messages != 0 && self.is_running()
    }
}

impl Driver {
    /// Sends a message, and returns when its bytes have left this rank.
    #[inline]
    pub(crate) fn send(&self, request: OperationRequest, to: Rank, bytes: &[u8]) -> Result<(), Error> {
        if self.try_send_directly(&request, to, bytes) {
            return Ok(());
        }
        self.run(request, bytes, |memory| Submission::Send(to, memory)).map(|_| ())
    }

    /// Receives a message into the start of `bytes`. If only an operation can receive it, `convert` makes the memory.
    pub(crate) fn receive(
        &self,
        mut request: OperationRequest,
        pattern: Pattern,
        bytes: &mut [u8],
        convert: impl FnOnce(Memory) -> Memory,
    ) -> Result<Option<Envelope>, Error> {
        if let Some(envelope) = self.try_receive_directly(&mut request, pattern, bytes) {
            return Ok(Some(envelope));
        }
        self.run(request, bytes, |memory| Submission::Receive(pattern, convert(memory)))
    }

    /// Sends a message without an operation. Returns false if it was not sent, and needs an operation.
    pub(crate) fn try_send_directly(&self, request: &OperationRequest, to: Rank, bytes: &[u8]) -> bool {
        if !self.shared.local_peers.get().is_some_and(|local| local.numbers.contains(to)) {
            return false;
        }
        let submitted = self.shared.meter.recorder().map(|recorder| recorder.now());
        let mut core = self.shared.lock();
        let timer = OperationTimer::new(core.direct_messages.into(), bytes.len(), SHORT_MESSAGE_BYTES);
        let is_sent = core.may_be_direct() && core.link_driver.try_send_directly(request, to, bytes);
        if is_sent {
            core.statistics.operations += 1;
        }
        drop(core);
        if is_sent {
            self.shared.shm_counters.count_time(&timer);
            self.record_message(request, Direction::To(to), submitted);
        }
        is_sent
    }

    /// Records a message that went without an operation. The caller called the library at the time `submitted`.
    #[inline]
    fn record_message(&self, request: &OperationRequest, direction: Direction, submitted: Option<Timestamp>) {
        if let (Some(recorder), Some(submitted)) = (self.shared.meter.recorder(), submitted) {
            let event = recorder.submit(&operation_start(request, direction, submitted));
            recorder.begin(event, submitted);
            recorder.finish(event, EventStatus::Completed);
        }
    }

    /// Receives a message without an operation, or returns `None`. If it has waited, the request says since when.
    fn try_receive_directly(
        &self,
        request: &mut OperationRequest,
        pattern: Pattern,
        bytes: &mut [u8],
    ) -> Option<Envelope> {
        let source = pattern.source?;
        let local = self.shared.local_peers.get()?;
        let number = *local.numbers.get(source)?;
        let submitted = self.shared.meter.recorder().map(|recorder| recorder.now());
        let mut core = self.shared.lock();
        let mut timer = OperationTimer::new(core.direct_messages.into(), bytes.len(), SHORT_MESSAGE_BYTES);
        // A profile counts what a thread waits for apart from what it copies.
        let may_look = self.shared.has_own_processor && !self.shared.meter.is_on();
        let looks = if may_look && !self.shared.core.is_contended() { LOOKS } else { 1 };
        let mut has_begun = false;
        loop {
            let now = timer.is_timed().then(|| self.shared.now());
            let received = if has_begun || core.may_be_direct() {
                core.link_driver.receive_directly(
                    request,
                    (pattern, source),
                    (&mut *bytes, looks, has_begun),
                    now,
                )
            } else {
                DirectReceive::NeedsOperation
            };
            match received {
                DirectReceive::Received(envelope) => {
                    core.poll_time.record_received_message();
                    core.statistics.operations += 1;
                    // The thread that waits for the sockets did not read this link meanwhile.
                    if has_begun {
                        self.shared.wake_socket_waiter(&core);
                    }
                    drop(core);
                    self.shared.shm_counters.count_time(&timer);
                    self.record_message(request, Direction::From(Some(source)), submitted);
                    return Some(envelope);
                }
                DirectReceive::NeedsOperation => return None,
                DirectReceive::NotYet => {}
                DirectReceive::Begun => has_begun = true,
            }
            drop(core);
            let has_arrived = self.shared.meter.time(ProfilePart::Wait, || {
                self.shared.spin_until(&mut timer, local.signals.next_entry_watch(number))
            });
            core = self.shared.lock();
            if !has_arrived {
                request.began = Some(self.shared.now().saturating_sub(self.shared.shm_spin_time));
                if has_begun {
                    core.link_driver.interrupt_receive(source, bytes);
                }
                core.poll_time.record_wait(self.shared.shm_spin_time);
                return None;
            }
        }
    }
}
