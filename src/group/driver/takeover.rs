//! Operations that go on by themselves, while somebody waits for them: that thread drives them then, and may stay awake for
//! them as it does for those that it calls; the progress thread, which takes no processor from who computes, has them back
//! afterwards.

use super::shared::DriverShared;
use crate::engine::OpId;

/// That a thread waits for operations.
pub(super) struct TakeoverGuard<'a> {
    shared: &'a DriverShared,
    /// Those that the progress thread had.
    ids: Vec<OpId>,
}

impl DriverShared {
    /// Takes operations over from the progress thread until what it gives is dropped.
    pub(super) fn take_over_driving(&self, ids: impl Iterator<Item = OpId>) -> TakeoverGuard<'_> {
        let mut core = self.lock();
        let ids: Vec<OpId> = ids.filter(|id| core.unattended.remove(id)).collect();
        // The progress thread may be asleep at the sockets, where this one has to be.
        let is_handed_over = !ids.is_empty() && core.unattended.is_empty() && core.is_polled;
        drop(core);
        if is_handed_over {
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
            if core.pending.contains(&id) {
                core.unattended.insert(id);
            }
        }
        if !core.is_polled && !core.unattended.is_empty() {
            self.shared.work.notify_one();
        }
    }
}
