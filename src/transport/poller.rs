//! The event queue. One thread waits for its events, while other threads may register sockets.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Events, Poll, Registry, Token, Waker};

const EVENTS_MAX: usize = 256;
/// The kernel counts milliseconds in 31 bits, so a longer wait is divided into days.
const TIMEOUT_MAX: Duration = Duration::from_hours(24);
/// The token of [`Poller::waker`]; its events are not returned.
const WAKER: Token = Token(1);
/// The first token that is free for sockets.
pub(super) const FIRST_TOKEN: usize = 2;

/// An event on a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The socket.
    pub token: Token,
    /// It may be readable, or has been closed.
    pub is_readable: bool,
    /// It may be writable.
    pub is_writable: bool,
    /// The peer has ended its side; no data follow those that have arrived.
    pub is_ended: bool,
}

/// The event queue.
pub struct Poller {
    poll: Poll,
    events: Events,
    waker: Arc<Waker>,
}

impl Poller {
    /// A queue without sockets.
    ///
    /// # Errors
    ///
    /// When the operating system has no event queue left.
    pub fn new() -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        Ok(Self { poll, events: Events::with_capacity(EVENTS_MAX), waker })
    }

    /// The registry for sockets; it can be used while another thread waits.
    ///
    /// # Errors
    ///
    /// When the operating system refuses.
    pub fn registry(&self) -> io::Result<Registry> {
        self.poll.registry().try_clone()
    }

    /// Ends a wait from another thread.
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// Waits for events and appends them to `events`; with a timeout, at most that long. A signal ends the wait early. Returns
    /// whether another thread ended it ([`Poller::waker`]): a caller that ignores this and waits again misses the wake-up.
    ///
    /// # Errors
    ///
    /// When the operating system refuses to wait.
    pub fn wait(&mut self, timeout: Option<Duration>, events: &mut Vec<Event>) -> io::Result<bool> {
        // The kernel counts whole milliseconds. Rounded up, so that a deadline has passed after the wait.
        let timeout = timeout.map(|timeout| round_up_to_ms(timeout.min(TIMEOUT_MAX)));
        match self.poll.poll(&mut self.events, timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(false),
            result => result?,
        }
        let sockets = self.events.iter().filter(|event| event.token() != WAKER);
        events.extend(sockets.map(|event| Event {
            token: event.token(),
            is_readable: event.is_readable() || event.is_read_closed() || event.is_error(),
            is_writable: event.is_writable() || event.is_write_closed() || event.is_error(),
            is_ended: event.is_read_closed() || event.is_error(),
        }));
        Ok(self.events.iter().any(|event| event.token() == WAKER))
    }
}

fn round_up_to_ms(duration: Duration) -> Duration {
    Duration::from_millis(duration.as_nanos().div_ceil(1_000_000) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_reports_the_waker_once() {
        let mut poller = Poller::new().unwrap();
        let mut events = Vec::new();
        assert!(!poller.wait(Some(Duration::ZERO), &mut events).unwrap());
        poller.waker().wake().unwrap();
        assert!(poller.wait(None, &mut events).unwrap());
        assert!(!poller.wait(Some(Duration::ZERO), &mut events).unwrap());
        assert!(events.is_empty(), "no socket has an event");
    }
}
