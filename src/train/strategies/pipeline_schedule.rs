//! Divides the layers of a model into the stages of a pipeline, and orders the passes of a stage over its
//! micro-batches.

use std::collections::VecDeque;
use std::ops::Range;

/// A pass of a stage over a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StagePass {
    /// The forward pass of the micro-batch with this number.
    Forward(usize),
    /// The backward pass of the micro-batch with this number.
    Backward(usize),
}

/// Returns the passes of a stage over a batch, in their order: the schedule 1F1B of Narayanan et al. 2019. Stage s
/// (counted from 0) of S stages first takes S - s - 1 forward passes. Then forward passes alternate with backward
/// passes, the oldest micro-batch first. So at most S - s micro-batches are in progress on this stage at any time.
pub(super) fn order_of_passes(stage: usize, stages: usize, micro_batches: usize) -> Vec<StagePass> {
    let mut result = Vec::with_capacity(2 * micro_batches);
    let mut in_progress = VecDeque::new();
    for number in 0..micro_batches {
        result.push(StagePass::Forward(number));
        in_progress.push_back(number);
        if in_progress.len() == stages - stage {
            result.extend(in_progress.pop_front().map(StagePass::Backward));
        }
    }
    result.extend(in_progress.into_iter().map(StagePass::Backward));
    result
}

/// Divides the layers into stages of at least one layer each, so that the most expensive stage costs as little as
/// possible. `costs[i]` is the cost of layer i. `stages` must be from 1 to the number of layers.
pub(super) fn divide_layers(costs: &[u64], stages: usize) -> Vec<Range<usize>> {
    let layers = costs.len();
    let cost = |range: Range<usize>| costs[range].iter().fold(0, |sum: u64, &cost| sum.saturating_add(cost));
    // `best[end]` describes the best division of the layers before `end`: the cost of its most expensive stage, and
    // the first layer of its last stage.
    let mut best: Vec<(u64, usize)> = (0..=layers).map(|end| (cost(0..end), 0)).collect();
    // `best_by_stage_count[i]` is `best` for divisions into i + 1 stages.
    let mut best_by_stage_count = vec![best.clone()];
    for stage in 1..stages {
        let choose = |end: usize| {
            let options = (stage..end).map(|start| (best[start].0.max(cost(start..end)), start));
            options.min().unwrap_or((u64::MAX, stage))
        };
        best = (0..=layers).map(choose).collect();
        best_by_stage_count.push(best.clone());
    }
    let mut end = layers;
    let mut result: Vec<Range<usize>> = best_by_stage_count
        .iter()
        .rev()
        .map(|best| {
            let range = best[end].1..end;
            end = range.start;
            range
        })
        .collect();
    result.reverse();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forward_and_backward_passes_alternate_after_the_first_forward_passes() {
        use StagePass::{Backward as B, Forward as F};
        assert_eq!(order_of_passes(1, 2, 3), [F(0), B(0), F(1), B(1), F(2), B(2)]);
        assert_eq!(order_of_passes(0, 2, 3), [F(0), F(1), B(0), F(2), B(1), B(2)]);
        assert_eq!(order_of_passes(0, 4, 2), [F(0), F(1), B(0), B(1)]);
        assert_eq!(order_of_passes(0, 1, 2), [F(0), B(0), F(1), B(1)]);
        assert_eq!(order_of_passes(2, 3, 0), []);
    }

    /// Simulates the passes of all stages. A forward pass waits for the previous stage, a backward pass for the next
    /// stage.
    #[test]
    fn no_stage_waits_forever_and_stage_s_has_at_most_stages_minus_s_micro_batches_in_progress() {
        for stages in 1..=6 {
            for micro_batches in 0..=9 {
                let mut queues: Vec<VecDeque<StagePass>> =
                    (0..stages).map(|stage| order_of_passes(stage, stages, micro_batches).into()).collect();
                let mut done: Vec<Vec<StagePass>> = vec![Vec::new(); stages];
                while queues.iter().any(|queue| !queue.is_empty()) {
                    let before: usize = done.iter().map(Vec::len).sum();
                    for stage in 0..stages {
                        let Some(&pass) = queues[stage].front() else { continue };
                        let is_ready = match pass {
                            StagePass::Forward(_) => stage == 0 || done[stage - 1].contains(&pass),
                            StagePass::Backward(number) if stage + 1 == stages => {
                                done[stage].contains(&StagePass::Forward(number))
                            }
                            StagePass::Backward(_) => done[stage + 1].contains(&pass),
                        };
                        if is_ready {
                            done[stage].extend(queues[stage].pop_front());
                        }
                    }
                    let after: usize = done.iter().map(Vec::len).sum();
                    assert!(after > before, "{stages} stages wait with {micro_batches} micro-batches");
                }
                for (stage, done) in done.iter().enumerate() {
                    assert_eq!(done.len(), 2 * micro_batches);
                    let mut in_progress = 0;
                    for pass in done {
                        in_progress += if matches!(pass, StagePass::Forward(_)) { 1 } else { -1 };
                        assert!((0..=(stages - stage) as i32).contains(&in_progress));
                    }
                }
            }
        }
    }

    #[test]
    fn the_most_expensive_stage_costs_as_little_as_possible() {
        for (costs, expected) in [
            (&[5, 1, 1, 1][..], &[1, 4][..]),
            (&[1, 1, 1, 5], &[3, 4]),
            (&[2, 2, 2, 2], &[2, 4]),
            (&[9, 0, 0], &[1, 2, 3]),
            (&[1, 2, 3, 4, 5], &[3, 4, 5]),
            (&[7], &[1]),
            (&[u64::MAX, u64::MAX], &[2]),
        ] {
            let stages = divide_layers(costs, expected.len());
            assert!(
                stages.iter().map(|stage| stage.end).eq(expected.iter().copied()),
                "{costs:?}: {stages:?}"
            );
            assert!(stages.windows(2).all(|pair| pair[0].end == pair[1].start) && stages[0].start == 0);
        }
    }
}
