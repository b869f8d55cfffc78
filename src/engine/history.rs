//! What groups have done: the numbers of their next operations, and what was asked for in the last ones.

use std::collections::{BTreeMap, VecDeque};

use crate::types::{Contract, Site};

/// How many past operations of a group are remembered, to tell a rank that it asked for something else.
const HISTORY_MAX: usize = 64;
/// How many groups that are not used any more keep that memory: their last operation may still be disputed.
const RETIRED_MAX: usize = 64;

/// What was asked for, and where in the caller's program.
pub(super) type CallerContract = (Contract, Site);

/// All groups that there have been.
#[derive(Default)]
pub(super) struct OperationHistory {
    /// The number of each group's next operation.
    next: BTreeMap<u32, u64>,
    /// The last operations, oldest first.
    histories: BTreeMap<u32, VecDeque<(u64, CallerContract)>>,
    /// Groups that are not used any more and still have a history, oldest first.
    retired: VecDeque<u32>,
}

impl OperationHistory {
    /// Notes the next operation of a group, and returns its number.
    pub(super) fn begin(&mut self, group: u32, asked: CallerContract) -> u64 {
        let next = self.next.entry(group).or_default();
        let sequence = *next;
        *next += 1;
        let history = self.histories.entry(group).or_default();
        if history.len() == HISTORY_MAX {
            history.pop_front();
        }
        history.push_back((sequence, asked));
        sequence
    }

    /// Notes an operation that was numbered elsewhere.
    pub(super) fn note(&mut self, group: u32, sequence: u64, asked: CallerContract) {
        let history = self.histories.entry(group).or_default();
        if history.iter().all(|history| history.0 != sequence) {
            if history.len() == HISTORY_MAX {
                history.pop_front();
            }
            history.push_back((sequence, asked));
        }
    }

    /// The number of a group's next operation.
    pub(super) fn next(&self, group: u32) -> u64 {
        self.next.get(&group).copied().unwrap_or_default()
    }

    /// What was asked for in an operation, if that is remembered.
    pub(super) fn find(&self, group: u32, sequence: u64) -> Option<CallerContract> {
        let history = self.histories.get(&group)?;
        history.iter().find(|history| history.0 == sequence).map(|history| history.1)
    }

    /// The group begins nothing more. In the end a number is all that is left of it.
    pub(super) fn retire(&mut self, group: u32) {
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

    /// Miri takes a thousand times as long for each.
    const GROUPS: u32 = if cfg!(miri) { 300 } else { 100_000 };

    /// A program that splits in every step does not grow with its steps.
    #[test]
    fn a_hundred_thousand_groups_leave_their_numbers_behind() {
        let mut history = OperationHistory::default();
        let asked = (Contract::NONE, Site::new("a.rs", 1));
        for group in 0..GROUPS {
            for sequence in 0..3 {
                assert_eq!(history.begin(group, asked), sequence);
            }
            history.retire(group);
        }
        assert_eq!(history.histories.len(), RETIRED_MAX);
        assert_eq!((history.next(5), history.find(5, 2)), (3, None));
        assert_eq!((history.next(GROUPS - 1), history.find(GROUPS - 1, 2)), (3, Some(asked)));
        history.retire(GROUPS);
        assert_eq!(history.next(GROUPS), 0);
    }

    #[test]
    fn a_group_remembers_its_last_operations() {
        let mut history = OperationHistory::default();
        let asked = (Contract::NONE, Site::new("a.rs", 1));
        for _ in 0..HISTORY_MAX + 5 {
            history.begin(7, asked);
        }
        assert_eq!((history.find(7, 4), history.find(7, 5)), (None, Some(asked)));
    }
}
