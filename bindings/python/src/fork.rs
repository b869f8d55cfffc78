//! Processes that are forked from a rank. They are not ranks themselves: they must not use its connections, and must not keep
//! them open either, because then the peers would not see the rank end while a child of it lives.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use ringtrain::Messenger;
use rustix::fs::FileType;

use crate::errors;

/// This process was forked from a rank.
static IS_FORKED: AtomicBool = AtomicBool::new(false);
/// This process has had a group. A process that has only loaded the module may fork processes that become ranks.
static HAS_HAD_GROUPS: AtomicBool = AtomicBool::new(false);
/// The groups that this process has.
static GROUPS: Mutex<Vec<Weak<Messenger>>> = Mutex::new(Vec::new());
/// The sockets of the groups at the time of the last fork.
static SOCKETS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// Registers a group.
pub(crate) fn remember(messenger: &Arc<Messenger>) {
    HAS_HAD_GROUPS.store(true, Ordering::Release);
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(messenger));
}

/// Tells the module that this process is about to fork.
#[pyfunction]
pub(crate) fn before_fork(py: Python<'_>) {
    if is_forked() {
        return;
    }
    py.detach(|| {
        let groups: Vec<Arc<Messenger>> = {
            let groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
            groups.iter().filter_map(Weak::upgrade).collect()
        };
        let mut sockets: Vec<RawFd> = groups.iter().flat_map(|group| group.descriptors()).collect();
        sockets.sort_unstable();
        sockets.dedup();
        *SOCKETS.lock().unwrap_or_else(PoisonError::into_inner) = sockets;
    });
}

/// Tells the module that this process is a forked child.
#[pyfunction]
pub(crate) fn after_fork() {
    if !HAS_HAD_GROUPS.load(Ordering::Acquire) || IS_FORKED.swap(true, Ordering::AcqRel) {
        return;
    }
    // Only the thread that forked can have held it, and that thread is this one.
    let Ok(sockets) = SOCKETS.try_lock() else { return };
    // Replaces the sockets and keeps their numbers in use: the child has copies of the objects that own them.
    let Ok(nothing) = rustix::fs::open("/dev/null", rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())
    else {
        return;
    };
    for &socket in &*sockets {
        // SAFETY: `fstat` only reads; the descriptor may have been closed since its number was noted.
        let looked = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(socket) });
        let is_socket = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        if !looked.is_ok_and(is_socket) {
            continue;
        }
        // SAFETY: it was open when the process forked and is a copy of the parent's; the child does not use it.
        let mut socket = std::mem::ManuallyDrop::new(unsafe { std::os::fd::FromRawFd::from_raw_fd(socket) });
        let _ = rustix::io::dup3(&nothing, &mut socket, rustix::io::DupFlags::CLOEXEC);
    }
}

pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Acquire)
}

/// Fails in a process that was forked from a rank.
pub(crate) fn check(py: Python<'_>) -> PyResult<()> {
    if is_forked() { Err(errors::forked(py)) } else { Ok(()) }
}
