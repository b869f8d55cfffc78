//! Linear regression with data parallelism. In every step, each rank computes the gradient of its rows, and an all-reduce sums
//! the gradients of all ranks. So all ranks always hold the same model.
//!
//! ```sh
//! ringrun -n 4 target/release/examples/all_reduce_regression
//! ```

use ringtrain::verbs::Gather;
use ringtrain::{Group, Rank, ReduceOp};

const ROWS: usize = 4000;
/// The weights from which the data is made.
const TRUE_WEIGHTS: [f64; 4] = [1.5, -2.0, 0.25, 3.0];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut group = Group::from_environment()?;
    let local_rows = group.chunk(ROWS, group.rank());
    let mut weights = [0.0; TRUE_WEIGHTS.len()];
    let mut loss = 0.0;
    for _ in 0..300 {
        // The gradient, followed by the sum of the squared errors.
        let mut sums = [0.0; TRUE_WEIGHTS.len() + 1];
        for index in local_rows.clone() {
            let (features, target) = row(index);
            let error: f64 = features.iter().zip(&weights).map(|(x, w)| x * w).sum::<f64>() - target;
            for (slope, x) in sums.iter_mut().zip(&features) {
                *slope += 2.0 * error * x;
            }
            sums[TRUE_WEIGHTS.len()] += error * error;
        }
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        for (weight, slope) in weights.iter_mut().zip(&sums) {
            *weight -= slope / ROWS as f64;
        }
        loss = sums[TRUE_WEIGHTS.len()] / ROWS as f64;
    }
    // The sums are the same on all ranks to the last bit, so the models are the same too.
    let all = group.call(Gather::to(Rank::ZERO)).run_from(&weights)?;
    if group.rank() == Rank::ZERO {
        assert!(all.chunks(weights.len()).all(|other| other == weights), "all ranks hold the same model");
        println!(
            "{} ranks, the same model on all: {weights:.3?}, mean squared error {loss:.2e}",
            group.size()
        );
        let is_close = weights.iter().zip(&TRUE_WEIGHTS).all(|(w, t)| (w - t).abs() < 1e-3);
        assert!(is_close, "the model has the weights from which the data was made");
    }
    Ok(())
}

/// Returns a row of features from -1 to 1, and its target.
fn row(index: usize) -> ([f64; TRUE_WEIGHTS.len()], f64) {
    let features = std::array::from_fn(|feature| ((index * (7 + 3 * feature)) % 101) as f64 / 50.0 - 1.0);
    let target = features.iter().zip(&TRUE_WEIGHTS).map(|(x, w)| x * w).sum();
    (features, target)
}
