//! Linear regression by averaging models, as MPI programs do it: rank 0 scatters the data, every rank fits a model to its shard,
//! and rank 0 gathers the models and averages them.
//!
//! ```sh
//! ringrun -n 4 target/release/examples/model_averaging
//! ```

use ringtrain::verbs::{Gather, Scatter};
use ringtrain::{Group, Rank};

const ROWS: usize = 4000;
const FEATURES: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut group = Group::from_environment()?;
    let true_weights: Vec<f64> = (0..FEATURES).map(|feature| feature as f64 - 3.5).collect();

    // Rank 0 holds the data. Each row consists of the features and the target. The shards have about the same number of rows.
    let row_len = FEATURES + 1;
    let data = if group.rank() == Rank::ZERO { make_data(&true_weights) } else { Vec::new() };
    let counts: Vec<usize> =
        group.size().ranks().map(|rank| group.chunk(ROWS, rank).len() * row_len).collect();
    let shard = group.call(Scatter::from(Rank::ZERO).counts(&counts)).run_from(&data)?;

    let model = fit(&shard);
    let models = group.call(Gather::to(Rank::ZERO)).run_from(&model)?;
    if group.rank() == Rank::ZERO {
        let ranks = f64::from(group.size().get());
        let average: Vec<f64> = (0..FEATURES)
            .map(|feature| models.iter().skip(feature).step_by(FEATURES).sum::<f64>() / ranks)
            .collect();
        let error = average.iter().zip(&true_weights).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("averaged {} models: largest error of a weight {error:.4}", group.size());
        assert!(error < 0.05, "the average is close to the true weights");
    }
    Ok(())
}

/// Returns rows whose targets follow the true weights, with a little noise. The rows are the same in every run.
fn make_data(true_weights: &[f64]) -> Vec<f64> {
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    let mut data = Vec::with_capacity(ROWS * (FEATURES + 1));
    for _ in 0..ROWS {
        let features: Vec<f64> = (0..FEATURES).map(|_| draw()).collect();
        let target: f64 = features.iter().zip(true_weights).map(|(x, w)| x * w).sum();
        data.extend(features);
        data.push(target + 0.1 * draw());
    }
    data
}

/// Fits weights to these rows by gradient descent on the mean squared error.
fn fit(rows: &[f64]) -> Vec<f64> {
    let count = rows.len() / (FEATURES + 1);
    let mut weights = vec![0.0; FEATURES];
    for _ in 0..400 {
        let mut gradient = vec![0.0; FEATURES];
        for row in rows.chunks_exact(FEATURES + 1) {
            let (features, target) = row.split_at(FEATURES);
            let error: f64 = features.iter().zip(&weights).map(|(x, w)| x * w).sum::<f64>() - target[0];
            for (slope, x) in gradient.iter_mut().zip(features) {
                *slope += 2.0 * error * x / count as f64;
            }
        }
        for (weight, slope) in weights.iter_mut().zip(gradient) {
            *weight -= 2.0 * slope;
        }
    }
    weights
}
