//! Handles processes that are forked from a rank. A forked process is not a rank itself, and must not use the rank's
//! connections. A forked process must also not keep the rank's connections open: otherwise the peers could not see
//! that the rank has ended.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use ringtrain::Messenger;
use rustix::fs::FileType;

use crate::calls::{is_forked, set_forked};

/// Whether this process has ever had a group. If a process forks before it has a group, the child can still become a
/// rank: calls do not fail in this child.
static HAS_HAD_GROUPS: AtomicBool = AtomicBool::new(false);
/// The groups that this process has.
static GROUPS: Mutex<Vec<Weak<Messenger>>> = Mutex::new(Vec::new());
/// The sockets that the groups had when this process last forked. A forked child inherits this list.
static SOCKETS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// Registers the messenger of a group. A forked child must close the sockets of all registered messengers.
pub(crate) fn register_messenger(messenger: Messenger) -> Arc<Messenger> {
    let messenger = Arc::new(messenger);
    HAS_HAD_GROUPS.store(true, Ordering::Release);
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(&messenger));
    messenger
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
    if !HAS_HAD_GROUPS.load(Ordering::Acquire) || set_forked() {
        return;
    }
    // Only `before_fork` takes this lock, and it releases the lock before the fork.
    let Ok(sockets) = SOCKETS.try_lock() else { return };
    // Replace each socket by `/dev/null` instead of closing it. If the descriptor were closed, another file could get
    // its number, and the child's copy of the Rust owner could later close that file.
    let Ok(dev_null) = rustix::fs::open("/dev/null", rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())
    else {
        return;
    };
    for &socket in &*sockets {
        // SAFETY: `fstat` changes nothing. If the descriptor has been closed in the meantime, `fstat` returns an
        // error, or the status of another file that now has this number.
        let status = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(socket) });
        let is_socket = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        if !status.is_ok_and(is_socket) {
            continue;
        }
        // SAFETY: `fstat` has just shown that the descriptor is an open socket, which the child inherited from its
        // parent. Nothing else in the child uses the socket, and `ManuallyDrop` does not close it.
        let mut socket = std::mem::ManuallyDrop::new(unsafe { std::os::fd::FromRawFd::from_raw_fd(socket) });
        let _ = rustix::io::dup3(&dev_null, &mut socket, rustix::io::DupFlags::CLOEXEC);
    }
}
