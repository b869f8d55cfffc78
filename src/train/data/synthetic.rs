//! Synthetic data of any size, for speed measurements and experiments.

use ndarray::Array2;

use super::sample_blocks::{BlockReader, RowOrigins, SampleBlock};
use super::{Column, DataError, Features, Task, UninterpretedSamples};
use crate::train::random::{self, RandomStream};

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

impl SyntheticTarget {
    /// Returns the target for a task.
    pub(crate) fn of_task(task: Option<Task>) -> Self {
        if task == Some(Task::Regression) { Self::Numbers } else { Self::Classes }
    }
}

/// Returns `rows` samples with `columns` independent, uniformly distributed features of variance 1. The data does not depend on
/// `--seed`.
pub(crate) fn generate_samples(rows: usize, columns: usize, target: SyntheticTarget) -> UninterpretedSamples {
    SyntheticReader::new(rows, columns, target).generate(rows)
}

/// Generates the samples of [`generate_samples`] block by block.
pub(crate) struct SyntheticReader {
    /// The number of all samples.
    rows: usize,
    /// The number of samples that have been generated.
    rows_read: usize,
    target: SyntheticTarget,
    /// The random numbers of the features.
    features: RandomStream,
    /// The weights of the linear functions: a column for each output.
    weights: Array2<f32>,
    /// The random numbers of the noise.
    noise: RandomStream,
}

impl SyntheticReader {
    pub(crate) fn new(rows: usize, columns: usize, target: SyntheticTarget) -> Self {
        let features = random::random_stream("synthetic", 0, (rows as u64) << 32 | columns as u64);
        // The random numbers of the weights come after those of all features.
        let mut later = features.clone();
        for _ in 0..rows * columns {
            random::symmetric_uniform(&mut later, 1.0);
        }
        let outputs = if target == SyntheticTarget::Classes { CLASS_COUNT } else { 1 };
        // With weights of variance 1 / columns, the outputs have variance 1 for every number of columns.
        let bound = feature_bound() / (columns as f32).sqrt();
        let weights =
            Array2::from_shape_simple_fn((columns, outputs), || random::symmetric_uniform(&mut later, bound));
        Self { rows, rows_read: 0, target, features, weights, noise: later }
    }

    /// Generates the next samples, at most `rows_max`.
    fn generate(&mut self, rows_max: usize) -> UninterpretedSamples {
        let Self { target, features, weights, noise, .. } = self;
        let rows = rows_max.min(self.rows - self.rows_read);
        self.rows_read += rows;
        let features = Array2::from_shape_simple_fn((rows, weights.nrows()), || {
            random::symmetric_uniform(features, feature_bound())
        });
        let scores = features.dot(weights);
        let target = scores.rows().into_iter().map(|row| match target {
            SyntheticTarget::Numbers => {
                f64::from(row[0] + random::symmetric_uniform(noise, 0.1 * feature_bound()))
            }
            SyntheticTarget::Classes => {
                let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
                best.map_or(0.0, |(class, _)| class as f64)
            }
        });
        let target = Column::Numbers(target.collect());
        UninterpretedSamples { features: Features::Numbers(features), target }
    }
}

/// Returns the largest absolute value of a feature. Numbers with a uniform distribution have variance 1 with this bound.
fn feature_bound() -> f32 {
    3.0_f32.sqrt()
}

impl BlockReader for SyntheticReader {
    fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError> {
        let name = format!("synthetic:{}x{}", self.rows, self.weights.nrows());
        let origins = RowOrigins::Numbers(name, self.rows_read);
        Ok(SampleBlock { samples: self.generate(rows_max), origins })
    }
}
