//! Metrics that compare predictions with targets, for `ringtrain eval` and for the evaluation at the end of training.
//!
//! The sums of several ranks can be merged. Metrics of the merged sums that are computed from counts, and the area under
//! the ROC curve, are the same as on a single rank that has all rows. All other metrics differ only by the rounding of
//! sums.

mod classification;
mod display;
mod regression;

use std::ops::Range;

use ndarray::ArrayView2;
use serde::{Deserialize, Serialize};

use self::classification::ClassificationSums;
use self::regression::RegressionSums;
use super::TrainError;
use super::data::{DataError, Targets};
use super::model::{Loss, Prediction};
use crate::group::Group;

/// The default of `k` in the top-k accuracy.
pub(crate) const TOP_K_DEFAULT: usize = 5;

/// Metrics that compare predictions with targets.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "task", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Evaluation {
    /// The model predicts classes.
    Classification {
        /// The number of rows.
        rows: u64,
        /// The number of rows that were left out because their target is missing.
        rows_without_target: u64,
        /// The fraction of rows with the right prediction.
        accuracy: f64,
        /// The mean cross-entropy in nats. Probabilities of 0 count as 2.2e-308.
        log_loss: f64,
        /// The mean F1 score of all classes that occur in the targets or in the predictions.
        macro_f1: f64,
        /// The fraction of rows whose class is among the k most probable classes. `None` if the model has at most k classes.
        top_k: Option<TopK>,
        /// The area under the ROC curve. The second class is the positive class. `None` if the model has more than
        /// two classes, or if only one class occurs in the targets.
        auc: Option<f64>,
        /// The results of each class, in the order of the model.
        classes: Vec<ClassReport>,
        /// Element (i, j) is the number of samples of class i that are predicted as class j. `None` if there are more
        /// than 100 classes.
        confusion_matrix: Option<Vec<Vec<u64>>>,
        /// At most 10 kinds of wrong predictions as (class, predicted class, number of rows), the most frequent first.
        confusions: Vec<(String, String, u64)>,
    },
    /// The model predicts the next token of a text.
    Text {
        /// The number of tokens that were predicted.
        tokens: u64,
        /// The mean cross-entropy in nats for each token.
        loss: f64,
        /// e to the power of the loss.
        perplexity: f64,
    },
    /// The model predicts numbers.
    Regression {
        /// The number of rows.
        rows: u64,
        /// The number of rows that were left out because their target is missing.
        rows_without_target: u64,
        /// The mean absolute error.
        mae: f64,
        /// The square root of the mean squared error.
        rmse: f64,
        /// The coefficient of determination (R²). `None` if all targets are the same.
        r2: Option<f64>,
    },
}

/// A top-k accuracy.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct TopK {
    /// A prediction counts as right if the class of the row is among the `k` most probable classes.
    pub k: usize,
    /// The fraction of rows whose class is among the k most probable classes.
    pub accuracy: f64,
}

/// The results of a class.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ClassReport {
    /// The name of the class.
    pub name: String,
    /// The number of rows of this class.
    pub support: u64,
    /// The fraction of right predictions among the predictions of this class. `None` if the class was never predicted.
    pub precision: Option<f64>,
    /// The fraction of right predictions among the rows of this class. `None` if the class does not occur in the
    /// targets.
    pub recall: Option<f64>,
    /// The harmonic mean of precision and recall. `None` if the class occurs neither in the targets nor in the
    /// predictions.
    pub f1: Option<f64>,
}

/// The target of a row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Truth {
    /// The number from the data, not scaled.
    Number(f64),
    /// The index of a class of the model.
    Class(usize),
}

/// Sums over rows. The metrics are computed from these sums.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum MetricSums {
    Classification(ClassificationSums),
    Regression(RegressionSums),
}

impl MetricSums {
    /// Creates the sums for a model with this number of classes, before any row is added. A model without classes
    /// predicts numbers. `top_k` is the k of the top-k accuracy (default: [`TOP_K_DEFAULT`]).
    pub(crate) fn new(classes: usize, top_k: Option<usize>) -> Self {
        if classes == 0 {
            return Self::Regression(RegressionSums::default());
        }
        Self::Classification(ClassificationSums::new(classes, top_k.unwrap_or(TOP_K_DEFAULT)))
    }

    /// Returns the same sums without the scores from which the area under the ROC curve is computed. Rows that are
    /// added later add no scores. The scores would take 16 bytes for each row.
    pub(crate) fn without_scores(self) -> Self {
        match self {
            Self::Classification(sums) => Self::Classification(sums.without_scores()),
            sums @ Self::Regression(_) => sums,
        }
    }

    /// Adds a row.
    ///
    /// # Panics
    ///
    /// If the prediction and the target are not both numbers or both classes.
    pub(crate) fn add(&mut self, prediction: &Prediction, truth: Truth) {
        match (self, prediction, truth) {
            (Self::Regression(sums), Prediction::Number(value), Truth::Number(target)) => {
                sums.add(*value, target);
            }
            (
                Self::Classification(sums),
                Prediction::Class { class, probabilities },
                Truth::Class(target),
            ) => {
                sums.add(*class, probabilities, target);
            }
            _ => unreachable!("the targets were converted for the task of the model"),
        }
    }

    /// Adds the samples with the indices `rows`. Row i of `outputs` is the output of the network for the i-th index.
    pub(crate) fn add_outputs(
        &mut self,
        outputs: &ArrayView2<'_, f32>,
        (loss, targets): (&Loss, &Targets),
        rows: Range<usize>,
    ) {
        for (output, row) in outputs.rows().into_iter().zip(rows) {
            let truth = match targets {
                Targets::Numbers(values) => Truth::Number(values[row]),
                Targets::Classes(classes) => Truth::Class(classes[row] as usize),
                Targets::NextTokens(_) => unreachable!("a model for texts has no metric sums"),
            };
            self.add(&Prediction::from_outputs(&output, loss.target_scale()), truth);
        }
    }

    /// Adds the rows of another rank. `classes` is the number of classes of the model. Returns `false` if `other`
    /// cannot be the sums of this model.
    #[must_use]
    fn merge(&mut self, other: Self, classes: usize) -> bool {
        match (self, other) {
            (Self::Regression(sums), Self::Regression(other)) => {
                sums.merge(&other);
                true
            }
            (Self::Classification(sums), Self::Classification(other)) => sums.merge(other, classes),
            _ => false,
        }
    }

    /// Adds the rows of all other ranks. `classes` is the number of classes of the model. All ranks must call this
    /// function, and all ranks get the same sums.
    ///
    /// # Errors
    ///
    /// If the group fails, or if a rank sent sums that cannot be correct.
    pub(crate) fn merge_over_ranks(&mut self, classes: usize, group: &mut Group) -> Result<(), TrainError> {
        let mut all = group.all_gather_object(self)?.into_iter().enumerate();
        let Some((_, mut total)) = all.next() else { return Ok(()) };
        for (rank, sums) in all {
            if !total.merge(sums, classes) {
                let message = format!(
                    "rank {rank} sent the metrics of another model: the memory of a host or the network corrupted a value; start \
                     the job again without --no-checksum"
                );
                // `abort` fails if another rank has already aborted the job. Even then, this rank returns its own message.
                let _ = group.abort(&message);
                return Err(DataError::Unsuitable(message).into());
            }
        }
        *self = total;
        Ok(())
    }

    /// Computes the metrics. `classes` holds the names of the classes.
    pub(crate) fn into_evaluation(self, rows_without_target: u64, classes: &[String]) -> Evaluation {
        match self {
            Self::Regression(sums) => sums.into_evaluation(rows_without_target),
            Self::Classification(sums) => sums.into_evaluation(rows_without_target, classes),
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::RngExt as _;

    use super::*;
    use crate::train::random;

    /// Returns random rows. Many of the probabilities are equal.
    fn random_rows(classes: usize, count: usize) -> Vec<(Prediction, Truth)> {
        let mut stream = random::random_stream("metrics", 1, classes as u64);
        let mut row = || {
            if classes == 0 {
                let target: f64 = stream.random_range(1e6..1e6 + 10.0);
                return (Prediction::Number(target + stream.random_range(-1.0..1.0)), Truth::Number(target));
            }
            let weights: Vec<u32> = (0..classes).map(|_| stream.random_range(1..5)).collect();
            let sum: u32 = weights.iter().sum();
            let best = weights.iter().max().expect("there are classes");
            let class = weights.iter().position(|weight| weight == best).expect("there is a largest weight");
            let probabilities = weights.iter().map(|&weight| f64::from(weight) / f64::from(sum)).collect();
            (Prediction::Class { class, probabilities }, Truth::Class(stream.random_range(0..classes)))
        };
        (0..count).map(|_| row()).collect()
    }

    fn evaluate_in_parts(rows: &[(Prediction, Truth)], classes: usize, parts: usize) -> Evaluation {
        let names: Vec<String> = (0..classes).map(|class| class.to_string()).collect();
        let mut total = MetricSums::new(classes, Some(3));
        // With more parts than rows, some parts are empty.
        for part in 0..parts {
            let mut sums = MetricSums::new(classes, Some(3));
            for (prediction, truth) in &rows[rows.len() * part / parts..rows.len() * (part + 1) / parts] {
                sums.add(prediction, *truth);
            }
            assert!(total.merge(sums, classes));
        }
        total.into_evaluation(0, &names)
    }

    #[test]
    fn sums_of_another_model_are_refused() {
        let sums = |classes: usize, rows| {
            let mut sums = MetricSums::new(classes, Some(3));
            for (prediction, truth) in &random_rows(classes, rows) {
                sums.add(prediction, *truth);
            }
            sums
        };
        for (classes, other) in [(0, 2), (2, 0), (2, 7), (7, 2), (4, 7)] {
            assert!(!sums(classes, 50).merge(sums(other, 50), classes), "{classes} {other}");
        }
        assert!(!sums(2, 50).merge(sums(2, 50).without_scores(), 2));
    }

    #[test]
    fn metrics_do_not_depend_on_the_number_of_ranks() {
        for (classes, count) in [(0, 100), (2, 100), (7, 100), (2, 3), (0, 1)] {
            let rows = random_rows(classes, count);
            let expected = evaluate_in_parts(&rows, classes, 1);
            for parts in [2, 3, 8, 150] {
                match (evaluate_in_parts(&rows, classes, parts), expected.clone()) {
                    (
                        Evaluation::Regression { rows, mae, rmse, r2, .. },
                        Evaluation::Regression { rows: count, mae: mae1, rmse: rmse1, r2: first, .. },
                    ) => {
                        assert_eq!((rows, r2.is_some()), (count, first.is_some()));
                        for (found, expected) in
                            [(mae, mae1), (rmse, rmse1), (r2.unwrap_or(0.0), first.unwrap_or(0.0))]
                        {
                            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
                        }
                    }
                    (
                        Evaluation::Classification { log_loss: loss, .. },
                        Evaluation::Classification { log_loss, .. },
                    ) => {
                        assert!((loss - log_loss).abs() < 1e-12, "{loss} {log_loss}");
                        let mut found = evaluate_in_parts(&rows, classes, parts);
                        if let Evaluation::Classification { log_loss: rounded, .. } = &mut found {
                            *rounded = log_loss;
                        }
                        assert_eq!(found, expected, "{parts} parts");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}
