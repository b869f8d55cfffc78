//! The number of each group's next operation, and the contracts of its last operations.

use std::collections::{BTreeMap, VecDeque};

use crate::types::{Contract, Site};

/// For each group, the contracts of this many last operations are stored, for error messages about late ranks.
const HISTORY_MAX: usize = 64;
/// The contracts of this many dropped groups stay stored, because a late rank may still call an operation of such a group.
const RETIRED_MAX: usize = 64;

/// The contract of a call, and the line of the caller's program that made the call.
pub(super) type ContractAndSite = (Contract, Site);

#[derive(Default)]
pub(super) struct OperationHistory {
    next_sequences: BTreeMap<u32, u64>,
    /// The numbers and the contracts of each group's last operations, oldest first.
    histories: BTreeMap<u32, VecDeque<(u64, ContractAndSite)>>,
    /// Dropped groups that still have a history, oldest first.
    retired: VecDeque<u32>,
}

impl OperationHistory {
    /// Records the next operation of a group, and returns its number.
    pub(super) fn record_next(&mut self, group: u32, contract_and_site: ContractAndSite) -> u64 {
        let next = self.next_sequences.entry(group).or_default();
        let sequence = *next;
        *next += 1;
        self.push(group, sequence, contract_and_site);
        sequence
    }

    /// Records that an operation has begun. A number that is not above the last one was recorded before.
    pub(super) fn record_begun(&mut self, group: u32, sequence: u64) {
        let next = self.next_sequences.entry(group).or_default();
        *next = (*next).max(sequence + 1);
    }

    pub(super) fn push(&mut self, group: u32, sequence: u64, contract_and_site: ContractAndSite) {
        let history = self.histories.entry(group).or_default();
        if history.len() == HISTORY_MAX {
            history.pop_front();
        }
        history.push_back((sequence, contract_and_site));
    }

    pub(super) fn next_sequence(&self, group: u32) -> u64 {
        self.next_sequences.get(&group).copied().unwrap_or_default()
    }

    pub(super) fn find(&self, group: u32, sequence: u64) -> Option<ContractAndSite> {
        let history = self.histories.get(&group)?;
        history.iter().find(|entry| entry.0 == sequence).map(|entry| entry.1)
    }

    /// Records that a group was dropped. The group's contracts are removed after [`RETIRED_MAX`] more groups have been dropped.
    /// The number of the group's next operation stays.
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

    /// The memory of a program that splits a group in every training step must not grow with each step.
    #[test]
    fn contracts_of_earlier_calls_and_of_dropped_groups_are_removed_but_next_numbers_stay() {
        const CALLS: u64 = HISTORY_MAX as u64 + 5;
        let mut history = OperationHistory::default();
        let contract_and_site = (Contract::NONE, Site::new("a.rs", 1));
        for group in 0..200 {
            for sequence in 0..CALLS {
                assert_eq!(history.record_next(group, contract_and_site), sequence);
            }
            history.retire_group(group);
        }
        assert_eq!(history.histories.len(), RETIRED_MAX);
        assert_eq!((history.next_sequence(5), history.find(5, CALLS - 1)), (CALLS, None));
        assert_eq!((history.find(199, 4), history.find(199, 5)), (None, Some(contract_and_site)));
        history.retire_group(200);
        assert_eq!(history.next_sequence(200), 0);
    }
}
