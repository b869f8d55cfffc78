//! Made-up data of any size, for measuring speed and for trying things out.

use ndarray::Array2;

use super::{Column, Features, Table};
use crate::train::random;

/// Classes of a made-up classification problem.
const CLASSES: usize = 10;

/// What is made up as the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Made {
    /// A linear function of the features plus noise.
    Numbers,
    /// Which of ten random linear functions of the features is largest.
    Classes,
}

/// `rows` samples of `columns` independent uniform features of variance 1; the same numbers for every `--seed`.
pub(crate) fn load(rows: usize, columns: usize, made: Made) -> Table {
    let mut stream = random::stream("synthetic", 0, (rows as u64) << 32 | columns as u64);
    let unit = 3.0_f32.sqrt();
    let values: Vec<f32> = (0..rows * columns).map(|_| random::symmetric(&mut stream, unit)).collect();
    let features =
        Array2::from_shape_vec((rows, columns), values).expect("as many values as the shape holds");
    let outputs = if made == Made::Classes { CLASSES } else { 1 };
    // Weights of variance 1 / columns give outputs of variance 1 whatever the width.
    let bound = unit / (columns as f32).sqrt();
    let weights = Array2::from_shape_simple_fn((columns, outputs), || random::symmetric(&mut stream, bound));
    let scores = features.dot(&weights);
    let target = scores.rows().into_iter().map(|row| match made {
        Made::Numbers => f64::from(row[0] + random::symmetric(&mut stream, 0.1 * unit)),
        Made::Classes => {
            let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            best.map_or(0.0, |(class, _)| class as f64)
        }
    });
    let target = Column::Numbers(target.collect());
    Table { features: Features::Numbers(features), target }
}
