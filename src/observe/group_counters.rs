//! Counts the collectives of each group.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of groups that can be counted. A job usually has fewer than ten groups.
const GROUPS_MAX: usize = 256;

/// The number of collectives of each group. Threads use the counters without locks.
pub(super) struct GroupCounters(Box<[GroupCounter]>);

/// The counter of one group.
#[derive(Default)]
struct GroupCounter {
    /// The number of the group plus 1; 0 if the counter is free.
    key: AtomicU64,
    count: AtomicU64,
}

impl GroupCounters {
    pub(super) fn new() -> Self {
        Self((0..GROUPS_MAX).map(|_| GroupCounter::default()).collect())
    }

    /// Counts a collective, and returns how many collectives of the group were counted before. Returns `None` if there are too
    /// many groups.
    pub(super) fn count(&self, group: u32) -> Option<u64> {
        let key = u64::from(group) + 1;
        let start = group as usize % GROUPS_MAX;
        for counter in self.0[start..].iter().chain(&self.0[..start]) {
            let mut found = counter.key.load(Ordering::Relaxed);
            if found == 0 {
                let exchanged = counter.key.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed);
                found = exchanged.map_or_else(|other| other, |_| key);
            }
            if found == key {
                return Some(counter.count.fetch_add(1, Ordering::Relaxed));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_is_counted_separately_until_there_are_too_many() {
        let counters = GroupCounters::new();
        let groups = || (0..GROUPS_MAX as u32).map(|group| group * 3);
        for count in 0..3 {
            assert!(groups().all(|group| counters.count(group) == Some(count)));
        }
        assert_eq!(counters.count(u32::MAX), None);
    }
}
