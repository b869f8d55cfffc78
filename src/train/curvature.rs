//! The learning rate of [`Rule::Accelerated`](super::optimizer::Rule): 1 / (the largest curvature of the loss). All
//! ranks must call `safe_learning_rate`, because each rank processes a part of the samples.

use ndarray::{Array2, s};

use super::TrainError;
use super::config::Config;
use super::data::{ExactSum, add_sums_of_ranks};
use super::model::Loss;
use super::portable_math::round_down_to_three_digits;
use super::random;
use super::rank_checks::abort_if_failed;
use super::setup::Setup;
use crate::group::Group;
use crate::types::ReduceOp;

/// The maximum number of iterations of the power method. Each iteration is a pass over the training set.
const ITERATIONS_MAX: usize = 50;
/// The number of samples that are read at once.
const BLOCK_ROWS: usize = 256;
/// The computed eigenvalue is multiplied by this factor, because the power method approaches the true eigenvalue from
/// below.
const EIGENVALUE_MARGIN_FACTOR: f64 = 1.05;

/// Returns the largest learning rate that is safe for a model without hidden layers, rounded down to three
/// significant digits. The rounding makes the rate the same for every number of ranks, although this number changes
/// the order of the additions.
///
/// The curvature of the squared error is twice the covariance of the features. The curvature of the cross-entropy is
/// at most half of the covariance (Böhning 1992). For models with hidden layers, the covariance gives no bound.
pub(crate) fn safe_learning_rate(
    group: &mut Group,
    setup: &Setup,
    config: &Config,
) -> Result<f32, TrainError> {
    let factor = match setup.network.loss() {
        Loss::SquaredError(_) => 2.0,
        // This function is called only for `linear` and `softmax`, so the loss is never `NextToken` or `Own`.
        Loss::CrossEntropy | Loss::NextToken | Loss::Own(_) => 0.5,
        Loss::WeightedCrossEntropy(targets) => 0.5 * f64::from(targets.weight_max()),
    };
    let curvature = factor * EIGENVALUE_MARGIN_FACTOR * largest_eigenvalue(group, setup, config)?
        + f64::from(config.weight_decay);
    Ok(round_down(1.0 / curvature))
}

/// Returns the largest eigenvalue of the mean of the outer products x xᵀ, where x holds the features of a training
/// sample, followed by a 1 for the bias. Uses the power method. With `--reproducible`, the sums over samples are exact,
/// because their order depends on which rank holds which rows.
fn largest_eigenvalue(group: &mut Group, setup: &Setup, config: &Config) -> Result<f64, TrainError> {
    let samples = &setup.dataset.train;
    let columns = samples.columns();
    let local_rows = samples.own_part(group.rank(), group.size());
    let is_reproducible = config.recipe.logical_shards().is_some();
    let mut rows = Array2::<f32>::zeros((BLOCK_ROWS, columns));
    let mut stream = random::random_stream("power method", 0, 0);
    let mut vector: Vec<f64> =
        (0..=columns).map(|_| f64::from(random::symmetric_uniform(&mut stream, 1.0))).collect();
    normalize(&mut vector);
    let mut eigenvalue = 0.0;
    for _ in 0..ITERATIONS_MAX {
        let mut product = vec![0.0; columns + 1];
        let mut exact_product = vec![ExactSum::ZERO; if is_reproducible { columns + 1 } else { 0 }];
        for start in local_rows.clone().step_by(BLOCK_ROWS) {
            let block = start..local_rows.end.min(start + BLOCK_ROWS);
            let mut block_rows = rows.slice_mut(s![..block.len(), ..]);
            let (block_samples, block) = abort_if_failed(group, samples.held.load_range(block))?;
            block_samples.features.write_rows(block, setup.standardizer.as_ref(), block_rows.view_mut());
            for row in block_rows.rows() {
                let dot: f64 =
                    row.iter().zip(&vector).map(|(&x, v)| f64::from(x) * v).sum::<f64>() + vector[columns];
                let terms = row.iter().map(|&x| dot * f64::from(x)).chain([dot]);
                if is_reproducible {
                    exact_product.iter_mut().zip(terms).for_each(|(sum, term)| sum.add(term));
                } else {
                    product.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
                }
            }
        }
        if is_reproducible {
            add_sums_of_ranks(group, &mut exact_product)?;
            product = exact_product.iter().map(ExactSum::value).collect();
        } else {
            group.all_reduce(&mut product, ReduceOp::Sum)?;
        }
        for value in &mut product {
            *value /= samples.len() as f64;
        }
        let previous = eigenvalue;
        eigenvalue = normalize(&mut product);
        vector = product;
        // All ranks hold the same sums, so all ranks leave the loop in the same iteration.
        if (eigenvalue - previous).abs() < 1e-3 * eigenvalue {
            break;
        }
    }
    Ok(eigenvalue)
}

/// Divides a vector by its Euclidean length and returns the length.
fn normalize(vector: &mut [f64]) -> f64 {
    let length = vector.iter().map(|value| value * value).sum::<f64>().sqrt();
    if length > 0.0 {
        for value in vector {
            *value /= length;
        }
    }
    length
}

/// Rounds `value` down to three significant digits. Returns the smallest normal f32 if `value` is NaN or too small.
fn round_down(value: f64) -> f32 {
    if value.is_nan() || value <= f64::from(f32::MIN_POSITIVE) {
        return f32::MIN_POSITIVE;
    }
    round_down_to_three_digits(value) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_down_keeps_three_digits() {
        assert_eq!([0.123_99, 4.567, 1e-5].map(round_down), [0.123, 4.56, 1e-5]);
        assert_eq!([0.0, f64::NAN].map(round_down), [f32::MIN_POSITIVE; 2]);
    }
}
