//! Metrics of predicted numbers.

use serde::{Deserialize, Serialize};

use super::Evaluation;

/// Sums over rows, from which the metrics of predicted numbers are computed.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RegressionSums {
    /// The number of rows.
    rows: u64,
    /// The sum of the absolute errors.
    absolute_errors: f64,
    /// The sum of the squared errors.
    squared_errors: f64,
    /// The mean of the targets, by Welford's method.
    target_mean: f64,
    /// The sum of the squared differences between the targets and their mean, by Welford's method.
    squared_differences: f64,
}

impl RegressionSums {
    /// Adds a row.
    pub(super) fn add(&mut self, prediction: f64, target: f64) {
        let error = prediction - target;
        self.absolute_errors += error.abs();
        self.squared_errors += error * error;
        self.rows += 1;
        let difference = target - self.target_mean;
        self.target_mean += difference / self.rows as f64;
        self.squared_differences += difference * (target - self.target_mean);
    }

    /// Adds the rows of another rank. Source: Chan, Golub and `LeVeque`, "Updating formulae and a pairwise algorithm
    /// for computing sample variances", 1979.
    pub(super) fn merge(&mut self, other: &Self) {
        let rows = self.rows.saturating_add(other.rows);
        if rows == 0 {
            return;
        }
        let difference = other.target_mean - self.target_mean;
        let share = other.rows as f64 / rows as f64;
        self.squared_differences +=
            other.squared_differences + difference * difference * self.rows as f64 * share;
        self.target_mean += difference * share;
        self.absolute_errors += other.absolute_errors;
        self.squared_errors += other.squared_errors;
        self.rows = rows;
    }

    /// Computes the metrics.
    pub(super) fn into_evaluation(self, rows_without_target: u64) -> Evaluation {
        let rows = self.rows as f64;
        Evaluation::Regression {
            rows: self.rows,
            rows_without_target,
            mae: self.absolute_errors / rows,
            rmse: (self.squared_errors / rows).sqrt(),
            r2: (self.squared_differences > 0.0)
                .then(|| 1.0 - self.squared_errors / self.squared_differences),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_metrics_are_computed_from_their_definitions() {
        let mut sums = RegressionSums::default();
        for (prediction, target) in [(2.5, 3.0), (0.0, -0.5), (2.0, 2.0), (8.0, 7.0)] {
            sums.add(prediction, target);
        }
        let Evaluation::Regression { mae, rmse, r2, .. } = sums.into_evaluation(0) else {
            panic!("the evaluation is not of numbers")
        };
        // The documentation of scikit-learn's `r2_score` gives this result.
        assert!((r2.unwrap() - 0.948_608_137_044_967_9).abs() < 1e-12);
        assert_eq!((mae, rmse), (0.5, 0.375_f64.sqrt()));
        let mut constant = RegressionSums::default();
        constant.add(1.0, 2.0);
        assert!(matches!(constant.into_evaluation(0), Evaluation::Regression { r2: None, .. }));
    }
}
