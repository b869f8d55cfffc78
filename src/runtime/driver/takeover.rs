//! Taking asynchronous operations over from the progress thread. While a thread waits for asynchronous operations, this thread
//! drives the operations, and polls before it sleeps. When the thread stops waiting, the progress thread drives the operations
//! again. The progress thread never polls, to leave the processor to the program's computation.

use super::shared::DriverShared;
use crate::engine::OpId;

/// Operations that a waiting thread drives until this guard is dropped.
pub(super) struct TakeoverGuard<'a> {
    shared: &'a DriverShared,
    /// The operations that the progress thread drove before.
    ids: Vec<OpId>,
}

impl DriverShared {
    /// Takes operations over from the progress thread until the returned guard is dropped.
    pub(super) fn take_over_driving(&self, ids: impl Iterator<Item = OpId>) -> TakeoverGuard<'_> {
        let mut core = self.lock();
        let ids: Vec<OpId> = ids.filter(|id| core.background.remove(id)).collect();
        // The progress thread may wait for the sockets. Wake it, so that this thread can wait for the sockets.
        let must_wake = !ids.is_empty() && core.background.is_empty() && core.has_socket_waiter;
        drop(core);
        if must_wake {
            let _ = self.waker.wake();
        }
        TakeoverGuard { shared: self, ids }
    }
}

impl Drop for TakeoverGuard<'_> {
    fn drop(&mut self) {
        if self.ids.is_empty() {
            return;
        }
        let mut core = self.shared.lock();
        for &id in &self.ids {
            if core.active_ids.contains(&id) {
                core.background.insert(id);
            }
        }
        if !core.has_socket_waiter && !core.background.is_empty() {
            self.shared.progress_work.notify_one();
        }
    }
}
