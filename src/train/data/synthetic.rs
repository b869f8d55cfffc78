//! Synthetic data of any size, for speed measurements and experiments.

use ndarray::Array2;

use super::{Column, Features, UninterpretedSamples};
use crate::train::random;

/// The number of classes in a synthetic classification problem.
const CLASS_COUNT: usize = 10;

/// The target of a synthetic problem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SyntheticTarget {
    /// A linear function of the features, with noise.
    Numbers,
    /// A class from 0 to 9. Each class has a random linear function of the features. The target of a sample is the
    /// class whose function has the largest value.
    Classes,
}

/// Returns `rows` samples with `columns` independent, uniformly distributed features of variance 1. The data does not depend on
/// `--seed`.
pub(crate) fn generate_samples(rows: usize, columns: usize, target: SyntheticTarget) -> UninterpretedSamples {
    let mut stream = random::random_stream("synthetic", 0, (rows as u64) << 32 | columns as u64);
    let unit = 3.0_f32.sqrt();
    let values: Vec<f32> =
        (0..rows * columns).map(|_| random::symmetric_uniform(&mut stream, unit)).collect();
    let features =
        Array2::from_shape_vec((rows, columns), values).expect("the number of values matches the shape");
    let outputs = if target == SyntheticTarget::Classes { CLASS_COUNT } else { 1 };
    // With weights of variance 1 / columns, the outputs have variance 1 for every number of columns.
    let bound = unit / (columns as f32).sqrt();
    let weights =
        Array2::from_shape_simple_fn((columns, outputs), || random::symmetric_uniform(&mut stream, bound));
    let scores = features.dot(&weights);
    let target = scores.rows().into_iter().map(|row| match target {
        SyntheticTarget::Numbers => f64::from(row[0] + random::symmetric_uniform(&mut stream, 0.1 * unit)),
        SyntheticTarget::Classes => {
            let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            best.map_or(0.0, |(class, _)| class as f64)
        }
    });
    let target = Column::Numbers(target.collect());
    UninterpretedSamples { features: Features::Numbers(features), target }
}
