//! A group that one thread at a time works with, and others wait for.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use ringtrain::{Group, Messenger};

use crate::{fork, interrupt};

/// How often a thread that waits for its turn looks whether a signal's handler raised.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Why a thread does not get the group.
pub(crate) enum Denied {
    /// It has been closed.
    Closed,
    /// A signal's handler raised.
    Interrupted,
    /// This thread is in an operation of it, and calls from a signal's handler.
    Nested,
}

enum State {
    Here(Box<Group>),
    /// A thread is in a collective of it; whether it is to be closed then.
    Away(ThreadId, bool),
    Closed,
}

/// A group and its messages.
pub(crate) struct Slot {
    state: Mutex<State>,
    returned: Condvar,
    messenger: Mutex<Option<Arc<Messenger>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slot {
    pub(crate) fn new(group: Group) -> Self {
        let messenger = Arc::new(group.messenger());
        fork::remember(&messenger);
        Self {
            messenger: Mutex::new(Some(messenger)),
            state: Mutex::new(State::Here(Box::new(group))),
            returned: Condvar::new(),
        }
    }

    /// Has a turn with the group. The caller does not hold the interpreter's lock.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut Group) -> R) -> Result<R, Denied> {
        let own = thread::current().id();
        let mut state = lock(&self.state);
        let group = loop {
            match std::mem::replace(&mut *state, State::Away(own, false)) {
                State::Here(group) => break group,
                State::Closed => {
                    *state = State::Closed;
                    return Err(Denied::Closed);
                }
                State::Away(other, is_closing) => {
                    *state = State::Away(other, is_closing);
                    if is_closing {
                        return Err(Denied::Closed);
                    }
                    if other == own {
                        return Err(Denied::Nested);
                    }
                }
            }
            let (guard, waited) =
                self.returned.wait_timeout(state, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if waited.timed_out() {
                drop(state);
                if interrupt::is_interrupted() {
                    return Err(Denied::Interrupted);
                }
                state = lock(&self.state);
            }
        };
        drop(state);
        let mut turn = Turn { slot: self, group: Some(group) };
        Ok(turn.group.as_mut().map(|group| work(group)).expect("the turn has just begun"))
    }

    /// The group's messages; `None` once it is closed.
    pub(crate) fn messenger(&self) -> Option<Arc<Messenger>> {
        lock(&self.messenger).clone()
    }

    /// Has messages take what has been changed in the group.
    pub(crate) fn renew_messenger(&self, group: &Group) {
        let mut messenger = lock(&self.messenger);
        if messenger.is_some() {
            let renewed = Arc::new(group.messenger());
            fork::remember(&renewed);
            *messenger = Some(renewed);
        }
    }

    /// Lets go of the group, at once or when the thread that works with it is done.
    pub(crate) fn close(&self) {
        let messenger = lock(&self.messenger).take();
        let mut state = lock(&self.state);
        let group = match std::mem::replace(&mut *state, State::Closed) {
            State::Here(group) => Some(group),
            State::Away(thread, _) => {
                *state = State::Away(thread, true);
                None
            }
            State::Closed => None,
        };
        drop(state);
        self.returned.notify_all();
        drop((messenger, group));
    }

    /// Whether it has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(*lock(&self.state), State::Closed | State::Away(_, true))
    }

    /// Forgets the group without a word to anybody: in a forked process its connections are the parent's.
    pub(crate) fn leak(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::replace(state, State::Closed));
        std::mem::forget(self.messenger.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A thread's turn with the group.
struct Turn<'a> {
    slot: &'a Slot,
    group: Option<Box<Group>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        let mut state = lock(&self.slot.state);
        let (next, closed) = match *state {
            State::Away(_, true) => (State::Closed, Some(group)),
            _ => (State::Here(group), None),
        };
        *state = next;
        drop(state);
        self.slot.returned.notify_one();
        drop(closed);
    }
}
