//! The parameters of one rank. The training loop and the threads of the connections change them.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The parameters of this rank, shared by the threads of this process.
pub(super) struct SharedReplica(Mutex<ReplicaState>);

struct ReplicaState {
    parameters: Vec<f32>,
    /// The ranges of parameters that are variances of batch normalization.
    variances: Vec<Range<usize>>,
    /// Whether this rank refuses to average its parameters with the parameters of other ranks.
    refuses_averages: bool,
}

impl SharedReplica {
    /// Creates a replica. `variances` are ranges of indices of `parameters`. If [`subtract`](Self::subtract) would
    /// make a parameter in these ranges negative, it sets the parameter to 0.
    pub(super) fn new(parameters: Vec<f32>, variances: Vec<Range<usize>>) -> Self {
        Self(Mutex::new(ReplicaState { parameters, variances, refuses_averages: false }))
    }

    fn lock(&self) -> MutexGuard<'_, ReplicaState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the parameters to `target`, which must have the same length.
    pub(super) fn copy_to(&self, target: &mut [f32]) {
        target.copy_from_slice(&self.lock().parameters);
    }

    /// Returns the parameters as words, for a message.
    pub(super) fn parameter_words(&self) -> Vec<u32> {
        bytemuck::cast_slice(&self.lock().parameters).to_vec()
    }

    /// Calls `use_parameters` with the parameters locked.
    pub(super) fn with_parameters<R>(&self, use_parameters: impl FnOnce(&mut [f32]) -> R) -> R {
        use_parameters(&mut self.lock().parameters)
    }

    /// Adds `parameters - previous` to the replica. `previous` is the replica as this rank read it last. If no other
    /// thread has changed the replica since then, the new replica is equal to `parameters`, bit for bit. `previous` and
    /// `parameters` must have the length of the replica.
    pub(super) fn add_change(&self, previous: &[f32], parameters: &[f32]) {
        let mut state = self.lock();
        for ((own, &before), &after) in state.parameters.iter_mut().zip(previous).zip(parameters) {
            *own = if own.to_bits() == before.to_bits() { after } else { *own + (after - before) };
        }
    }

    /// Moves the parameters halfway to `theirs`, the parameters of another rank. Returns the differences that the other
    /// rank has to subtract from its own parameters. The average does not change the sum of the parameters of both
    /// ranks, even if the other rank takes steps before it subtracts. Returns `None` if this rank refuses averages, or
    /// if `theirs` has another length.
    pub(super) fn average_with(&self, theirs: &[f32]) -> Option<Vec<f32>> {
        let mut state = self.lock();
        if state.refuses_averages || theirs.len() != state.parameters.len() {
            return None;
        }
        let halve = |(own, theirs): (&mut f32, &f32)| {
            let difference = (theirs - *own) / 2.0;
            *own += difference;
            difference
        };
        Some(state.parameters.iter_mut().zip(theirs).map(halve).collect())
    }

    /// Subtracts the differences that [`average_with`](Self::average_with) returned on another rank. If the lengths
    /// differ, changes nothing and returns `false`.
    pub(super) fn subtract(&self, differences: &[f32]) -> bool {
        let mut state = self.lock();
        let fits = differences.len() == state.parameters.len();
        if fits {
            let ReplicaState { parameters, variances, .. } = &mut *state;
            parameters.iter_mut().zip(differences).for_each(|(own, difference)| *own -= difference);
            // A step of this rank may have reduced a variance after the other rank had computed the difference.
            for range in variances {
                for variance in &mut parameters[range.clone()] {
                    *variance = if *variance < 0.0 { 0.0 } else { *variance };
                }
            }
        }
        fits
    }

    /// Sets whether this rank refuses to average its parameters with the parameters of other ranks.
    pub(super) fn set_refuses_averages(&self, refuses_averages: bool) {
        self.lock().refuses_averages = refuses_averages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_parameters(replica: &SharedReplica) -> Vec<f32> {
        replica.with_parameters(|parameters| parameters.to_vec())
    }

    /// If a rank replaced its parameters by the average, it would lose the steps that it takes before the reply
    /// arrives.
    #[test]
    fn an_average_keeps_the_sum_of_two_replicas_and_the_steps_taken_before_the_reply() {
        let (first, second) =
            (SharedReplica::new(vec![4.0, -1.0], Vec::new()), SharedReplica::new(vec![2.0, 5.0], Vec::new()));
        let words = first.parameter_words();
        let differences = second.average_with(bytemuck::cast_slice(&words)).unwrap();
        assert_eq!(read_parameters(&second), [3.0, 2.0]);
        first.with_parameters(|parameters| parameters[0] += 10.0);
        assert!(first.subtract(&differences));
        assert_eq!(read_parameters(&first), [13.0, 2.0]);
    }

    /// If the program's parameters replaced the replica, the average with another rank would be lost.
    #[test]
    fn a_change_is_added_to_the_changes_of_other_threads() {
        let replica = SharedReplica::new(vec![1.0, 2.0, 0.1], Vec::new());
        assert_eq!(replica.average_with(&[3.0, 2.0, 0.1]), Some(vec![1.0, 0.0, 0.0]));
        replica.add_change(&[1.0, 2.0, 0.1], &[1.5, 1.0, 0.3]);
        assert_eq!(read_parameters(&replica), [2.5, 1.0, 0.3]);
    }

    #[test]
    fn variances_that_would_become_negative_become_zero() {
        let replica = SharedReplica::new(vec![1.0, 2.0, f32::NAN, 3.0], std::iter::once(1..4).collect());
        assert!(replica.subtract(&[5.0, 5.0, 5.0, 1.0]));
        let found = read_parameters(&replica);
        assert_eq!((&found[..2], found[3]), (&[-4.0, 0.0][..], 2.0));
        assert!(found[2].is_nan());
    }

    #[test]
    fn a_refused_average_or_a_vector_of_another_length_changes_nothing() {
        let replica = SharedReplica::new(vec![1.0, 2.0], Vec::new());
        assert_eq!(replica.average_with(&[1.0]), None);
        assert!(!replica.subtract(&[1.0, 2.0, 3.0]));
        replica.set_refuses_averages(true);
        assert_eq!(replica.average_with(&[5.0, 5.0]), None);
        assert_eq!(read_parameters(&replica), [1.0, 2.0]);
        replica.set_refuses_averages(false);
        assert_eq!(replica.average_with(&[5.0, 6.0]), Some(vec![2.0, 2.0]));
    }
}
