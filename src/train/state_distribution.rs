//! Gives each rank its part of the state from which a run starts.

use super::TrainError;
use super::checkpoint::{Position, TrainingState};
use super::compression_memory::CompressionMemory;
use super::early_stopping::BestParameters;
use super::partition::ModelPartition;
use crate::group::Group;
use crate::types::Rank;

/// Broadcasts the state of rank 0 to all ranks. If ranks hold parts of the model, each rank gets its part of the
/// vectors. If rank 0 does not resume from a checkpoint, each rank has already computed its part of the initial
/// vectors.
pub(super) fn broadcast_state(
    group: &mut Group,
    (partition, resumes): (&ModelPartition, bool),
    state: &mut TrainingState,
) -> Result<(), TrainError> {
    let [resumes] = {
        let mut flag = [u8::from(resumes)];
        group.broadcast(&mut flag, Rank::ZERO)?;
        flag
    };
    let share = |group: &mut Group, partition: &ModelPartition, vector: &mut Vec<f32>| match resumes {
        _ if partition.is_undivided() => group.broadcast(vector, Rank::ZERO),
        0 => Ok(()),
        _ => partition.distribute_from_rank_0(group, vector),
    };
    let mut position = state.position.to_words();
    group.broadcast(&mut position, Rank::ZERO)?;
    state.position = Position::from_words(position);
    // 0 represents `None`, because a learning rate is above 0.
    let mut rate = [state.learning_rate.unwrap_or_default()];
    group.broadcast(&mut rate, Rank::ZERO)?;
    state.learning_rate = Some(rate[0]).filter(|&rate| rate > 0.0);
    share(group, partition, &mut state.parameters)?;
    for vector in &mut state.optimizer {
        share(group, partition.optimizer_partition(), vector)?;
    }
    for vector in &mut state.strategy {
        share(group, partition, vector)?;
    }
    distribute_compression_memory(group, (partition, resumes), &mut state.compression)?;
    let record = group.broadcast_object(&state.best.as_ref().map(|best| best.record), Rank::ZERO)?;
    if let Some(record) = record {
        let mut parameters =
            state.best.take().map_or_else(|| state.parameters.clone(), |best| best.parameters);
        share(group, partition, &mut parameters)?;
        state.best = Some(BestParameters { record, parameters });
    }
    state.history = group.broadcast_object(&state.history, Rank::ZERO)?;
    Ok(())
}

/// Gives each rank its part of the memory of compressed sums, which rank 0 has read from a checkpoint. If the number of ranks has
/// changed, rank r gets the sum of the residuals and of the velocities of the ranks r, r + n, r + 2n, ..., where n is the new
/// number of ranks. So the sum over all ranks stays the same.
fn distribute_compression_memory(
    group: &mut Group,
    (partition, resumes): (&ModelPartition, u8),
    memory: &mut CompressionMemory,
) -> Result<(), TrainError> {
    if resumes == 0 {
        return Ok(());
    }
    let CompressionMemory { residuals, velocities, results, factors, calls } = memory;
    let lengths = [residuals.len(), velocities.len(), results.len(), factors.len()];
    let [residual_count, velocity_count, result_len, factor_len] = lengths.map(|length| length as u64);
    let mut numbers = [*calls, residual_count, velocity_count, result_len, factor_len];
    group.broadcast(&mut numbers, Rank::ZERO)?;
    let [saved_calls, residual_count, velocity_count, result_len, factor_len] = numbers;
    *calls = saved_calls;
    for (count, vectors) in [(residual_count, residuals), (velocity_count, velocities)] {
        if count > 0 {
            fold_vectors(vectors, partition.place().replicas.as_usize());
            *vectors = vec![partition.distribute_replicas_from_rank_0(group, vectors)?];
        }
    }
    for (length, vector) in [(result_len, results), (factor_len, factors)] {
        if length > 0 {
            partition.distribute_from_rank_0(group, vector)?;
        }
    }
    Ok(())
}

/// Changes the number of vectors to `count`. Adds the vector of rank r to that of rank r modulo `count`. New vectors are 0.
fn fold_vectors(vectors: &mut Vec<Vec<f32>>, count: usize) {
    let len = vectors.first().map_or(0, Vec::len);
    let removed = vectors.split_off(count.min(vectors.len()));
    for (removed, rank) in removed.iter().zip(count..) {
        vectors[rank % count].iter_mut().zip(removed).for_each(|(sum, value)| *sum += value);
    }
    vectors.resize(count, vec![0.0; len]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_all_vectors_stays_the_same_for_another_number_of_ranks() {
        let saved = vec![vec![1.0, 10.0], vec![2.0, 20.0], vec![4.0, 40.0]];
        for (count, expected) in [
            (1, vec![vec![7.0, 70.0]]),
            (2, vec![vec![5.0, 50.0], vec![2.0, 20.0]]),
            (3, saved.clone()),
            (4, [&saved[..], &[vec![0.0, 0.0]]].concat()),
        ] {
            let mut vectors = saved.clone();
            fold_vectors(&mut vectors, count);
            assert_eq!(vectors, expected);
        }
    }
}
