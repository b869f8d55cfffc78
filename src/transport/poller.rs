//! The queue of socket events. One thread waits for events, while other threads may register sockets.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Events, Poll, Registry, Token, Waker};

const EVENTS_MAX: usize = 256;
/// The longest wait, because the kernel counts the milliseconds of a timeout in 31 bits.
const TIMEOUT_MAX: Duration = Duration::from_hours(24);
/// The token of [`Poller::waker`]. [`Poller::wait`] does not return events with this token.
const WAKER: Token = Token(1);
/// The lowest token that the owner of a poller may give to a socket.
pub(crate) const FIRST_TOKEN: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    pub token: Token,
    /// The socket may be readable, or has been closed.
    pub is_readable: bool,
    pub is_writable: bool,
    /// The peer has closed its sending direction: no data follow the data that have arrived.
    pub is_ended: bool,
}

pub struct Poller {
    poll: Poll,
    events: Events,
    /// Ends a wait of another thread.
    pub waker: Arc<Waker>,
}

impl Poller {
    /// Returns an error if the operating system cannot create an event queue.
    pub fn new() -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        Ok(Self { poll, events: Events::with_capacity(EVENTS_MAX), waker })
    }

    /// Returns the registry for sockets, which can be used while another thread waits for events. Returns an error if the
    /// operating system cannot duplicate the file descriptor of the queue.
    pub fn registry(&self) -> io::Result<Registry> {
        self.poll.registry().try_clone()
    }

    /// Waits for events, but not longer than `timeout`, and appends the events to `events`. A signal ends the wait
    /// early. Returns whether another thread ended the wait ([`Poller::waker`]). A caller that ignores this result
    /// and waits again misses the wake-up. Returns an error if the system call that waits for events fails.
    pub fn wait(&mut self, timeout: Option<Duration>, events: &mut Vec<Event>) -> io::Result<bool> {
        // The kernel counts whole milliseconds. Rounded down, the wait could end up to 1 ms before the caller's deadline.
        let timeout = timeout.map(|timeout| {
            Duration::from_millis(timeout.min(TIMEOUT_MAX).as_nanos().div_ceil(1_000_000) as u64)
        });
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
