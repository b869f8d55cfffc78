//! The parameters of one rank, which its training loop and its connections change.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The parameters of this rank.
pub(super) struct SharedReplica(Mutex<ReplicaState>);

struct ReplicaState {
    parameters: Vec<f32>,
    /// Whether other ranks may no longer average their parameters with these.
    is_closed: bool,
}

impl SharedReplica {
    pub(super) fn new(parameters: Vec<f32>) -> Self {
        Self(Mutex::new(ReplicaState { parameters, is_closed: false }))
    }

    fn lock(&self) -> MutexGuard<'_, ReplicaState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the parameters to `target`, which must be as long as they are.
    pub(super) fn copy_to(&self, target: &mut [f32]) {
        target.copy_from_slice(&self.lock().parameters);
    }

    /// Returns the parameters as words, for a message.
    pub(super) fn words(&self) -> Vec<u32> {
        bytemuck::cast_slice(&self.lock().parameters).to_vec()
    }

    /// Calls `update` with the parameters, while no other thread uses them.
    pub(super) fn update<R>(&self, update: impl FnOnce(&mut [f32]) -> R) -> R {
        update(&mut self.lock().parameters)
    }

    /// Moves the parameters half the way to `theirs`. Returns the differences that the other rank has to subtract from its own
    /// parameters. So the sum of the parameters of both ranks stays the same, even if the other rank takes steps before it
    /// subtracts. Returns `None` if these parameters are closed, or if `theirs` has another length.
    pub(super) fn average_with(&self, theirs: &[f32]) -> Option<Vec<f32>> {
        let mut state = self.lock();
        if state.is_closed || theirs.len() != state.parameters.len() {
            return None;
        }
        let halve = |(own, theirs): (&mut f32, &f32)| {
            let difference = (theirs - *own) / 2.0;
            *own += difference;
            difference
        };
        Some(state.parameters.iter_mut().zip(theirs).map(halve).collect())
    }

    /// Subtracts the differences that [`average_with`](Self::average_with) returned on another rank. Ignores a reply of another
    /// length.
    pub(super) fn subtract(&self, differences: &[f32]) -> bool {
        let mut state = self.lock();
        let fits = differences.len() == state.parameters.len();
        if fits {
            state.parameters.iter_mut().zip(differences).for_each(|(own, difference)| *own -= difference);
        }
        fits
    }

    /// Sets whether other ranks may no longer average their parameters with these.
    pub(super) fn set_closed(&self, is_closed: bool) {
        self.lock().is_closed = is_closed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(replica: &SharedReplica) -> Vec<f32> {
        replica.update(|parameters| parameters.to_vec())
    }

    /// If a rank replaced its parameters by the average, it would lose the steps that it takes while the reply is on its way.
    #[test]
    fn an_average_keeps_the_sum_of_two_replicas_and_the_steps_during_the_exchange() {
        let (first, second) = (SharedReplica::new(vec![4.0, -1.0]), SharedReplica::new(vec![2.0, 5.0]));
        let words = first.words();
        let differences = second.average_with(bytemuck::cast_slice(&words)).unwrap();
        assert_eq!(values(&second), [3.0, 2.0]);
        first.update(|parameters| parameters[0] += 10.0);
        assert!(first.subtract(&differences));
        assert_eq!(values(&first), [13.0, 2.0]);
    }

    #[test]
    fn closed_replicas_and_vectors_of_another_length_are_left_unchanged() {
        let replica = SharedReplica::new(vec![1.0, 2.0]);
        assert_eq!(replica.average_with(&[1.0]), None);
        assert!(!replica.subtract(&[1.0, 2.0, 3.0]));
        replica.set_closed(true);
        assert_eq!(replica.average_with(&[5.0, 5.0]), None);
        assert_eq!(values(&replica), [1.0, 2.0]);
        replica.set_closed(false);
        assert_eq!(replica.average_with(&[5.0, 6.0]), Some(vec![2.0, 2.0]));
    }
}
