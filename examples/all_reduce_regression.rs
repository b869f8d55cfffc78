//! Linear regression with data parallelism: every rank computes the gradient of its rows, and every step sums the gradients of
//! all ranks. So all ranks always hold the same model.
//!
//! ```sh
//! ringrun -n 4 target/release/examples/all_reduce_regression
//! ```

use ringtrain::{Group, Rank, ReduceOp};

const ROWS: usize = 4000;
const TRUTH: [f64; 4] = [1.5, -2.0, 0.25, 3.0];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut group = Group::from_environment()?;
    let mine = group.chunk(ROWS, group.rank());
    let mut weights = [0.0; TRUTH.len()];
    let mut loss = 0.0;
    for _ in 0..300 {
        // The gradient, followed by the sum of the squared errors.
        let mut sums = [0.0; TRUTH.len() + 1];
        for index in mine.clone() {
            let (features, target) = row(index);
            let miss: f64 = features.iter().zip(&weights).map(|(x, w)| x * w).sum::<f64>() - target;
            for (slope, x) in sums.iter_mut().zip(&features) {
                *slope += 2.0 * miss * x;
            }
            sums[TRUTH.len()] += miss * miss;
        }
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        for (weight, slope) in weights.iter_mut().zip(&sums) {
            *weight -= slope / ROWS as f64;
        }
        loss = sums[TRUTH.len()] / ROWS as f64;
    }
    // Sums are the same on all ranks to the last bit, so the models are too.
    let all = group.gather(&weights, Rank::ZERO)?;
    if group.rank() == Rank::ZERO {
        assert!(all.chunks(weights.len()).all(|other| other == weights), "all ranks hold the same model");
        println!(
            "{} ranks, the same model on all: {weights:.3?}, mean squared error {loss:.2e}",
            group.size()
        );
        assert!(weights.iter().zip(&TRUTH).all(|(w, t)| (w - t).abs() < 1e-3), "it is the right one");
    }
    Ok(())
}

/// A row of features from -1 to 1, and its target.
fn row(index: usize) -> ([f64; TRUTH.len()], f64) {
    let features = std::array::from_fn(|feature| ((index * (7 + 3 * feature)) % 101) as f64 / 50.0 - 1.0);
    let target = features.iter().zip(&TRUTH).map(|(x, w)| x * w).sum();
    (features, target)
}
