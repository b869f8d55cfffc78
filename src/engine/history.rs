//! The number of each group's next operation, and the contracts of its last operations.

use std::collections::{BTreeMap, VecDeque};

use crate::types::{Contract, Site};

/// The number of past operations of a group whose contracts are stored. If a late rank calls another operation, the error
/// message shows the stored contract.
const HISTORY_MAX: usize = 64;
/// The number of dropped groups whose contracts stay stored. A late rank may still call another operation in such a group.
const RETIRED_MAX: usize = 64;

/// The contract of a call, and the line of the caller's program that made the call.
pub(super) type CallerContract = (Contract, Site);

/// The operations of all groups that have ever existed.
#[derive(Default)]
pub(super) struct OperationHistory {
    /// The number of each group's next operation.
    next_sequences: BTreeMap<u32, u64>,
    /// The number and the contract of the last operations of each group, oldest first.
    histories: BTreeMap<u32, VecDeque<(u64, CallerContract)>>,
    /// Dropped groups that still have a history, oldest first.
    retired: VecDeque<u32>,
}

impl OperationHistory {
    /// Records the next operation of a group, and returns the operation's number.
    pub(super) fn record_next(&mut self, group: u32, caller_contract: CallerContract) -> u64 {
        let next = self.next_sequences.entry(group).or_default();
        let sequence = *next;
        *next += 1;
        let history = self.histories.entry(group).or_default();
        if history.len() == HISTORY_MAX {
            history.pop_front();
        }
        history.push_back((sequence, caller_contract));
        sequence
    }

    /// Records an operation whose number was not assigned here: an operation in shared memory.
    pub(super) fn record_numbered(&mut self, group: u32, sequence: u64, caller_contract: CallerContract) {
        let history = self.histories.entry(group).or_default();
        if history.iter().all(|history| history.0 != sequence) {
            if history.len() == HISTORY_MAX {
                history.pop_front();
            }
            history.push_back((sequence, caller_contract));
        }
    }

    /// Returns the number of a group's next operation.
    pub(super) fn next_sequence(&self, group: u32) -> u64 {
        self.next_sequences.get(&group).copied().unwrap_or_default()
    }

    /// Returns the contract of an operation, if it is still stored.
    pub(super) fn find(&self, group: u32, sequence: u64) -> Option<CallerContract> {
        let history = self.histories.get(&group)?;
        history.iter().find(|history| history.0 == sequence).map(|history| history.1)
    }

    /// Records that a group was dropped. Later, the history of the group is removed, but the number of its next operation
    /// stays.
    pub(super) fn retire_group(&mut self, group: u32) {
        if !self.histories.contains_key(&group) {
            return;
        }
        self.retired.push_back(group);
        if self.retired.len() > RETIRED_MAX
            && let Some(oldest) = self.retired.pop_front()
        {
            self.histories.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of groups in the test. Miri is a thousand times slower, so under Miri the test has fewer groups.
    const GROUPS: u32 = if cfg!(miri) { 300 } else { 100_000 };

    /// A program that splits a group in every step must not use more memory with each step.
    #[test]
    fn histories_of_old_groups_are_removed_but_their_next_numbers_stay() {
        let mut history = OperationHistory::default();
        let caller_contract = (Contract::NONE, Site::new("a.rs", 1));
        for group in 0..GROUPS {
            for sequence in 0..3 {
                assert_eq!(history.record_next(group, caller_contract), sequence);
            }
            history.retire_group(group);
        }
        assert_eq!(history.histories.len(), RETIRED_MAX);
        assert_eq!((history.next_sequence(5), history.find(5, 2)), (3, None));
        assert_eq!(
            (history.next_sequence(GROUPS - 1), history.find(GROUPS - 1, 2)),
            (3, Some(caller_contract))
        );
        history.retire_group(GROUPS);
        assert_eq!(history.next_sequence(GROUPS), 0);
    }

    #[test]
    fn only_the_last_operations_of_a_group_are_stored() {
        let mut history = OperationHistory::default();
        let caller_contract = (Contract::NONE, Site::new("a.rs", 1));
        for _ in 0..HISTORY_MAX + 5 {
            history.record_next(7, caller_contract);
        }
        assert_eq!((history.find(7, 4), history.find(7, 5)), (None, Some(caller_contract)));
    }
}
