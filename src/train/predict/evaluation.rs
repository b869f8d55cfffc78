//! Compares predictions with targets.

use std::collections::BTreeMap;

use serde::Serialize;

use super::input::{InputOptions, TargetColumn, open_prediction_input};
use super::{PredictError, Truth, for_each_row};
use crate::train::data::DataError;
use crate::train::model_file::{Prediction, SavedModel};

/// With more classes than this, [`Evaluation`] has no confusion matrix.
const CONFUSION_MATRIX_CLASSES_MAX: usize = 100;
/// The default of `k` in the top-k accuracy.
const TOP_K_DEFAULT: usize = 5;

/// Metrics that compare predictions with targets.
#[derive(Clone, PartialEq, Debug, Serialize)]
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
        /// The most frequent wrong predictions as (class, predicted class, number of rows), the most frequent first.
        confusions: Vec<(String, String, u64)>,
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
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct TopK {
    /// A prediction counts as right if the class is among this many most probable classes.
    pub k: usize,
    /// The fraction of rows whose class is among the k most probable classes.
    pub accuracy: f64,
}

/// The results of a class.
#[derive(Clone, PartialEq, Debug, Serialize)]
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

/// Computes a prediction for each row of data and compares it with the target. `top_k` is the k of the top-k accuracy
/// (default: 5). A model with two classes needs 16 bytes of memory for each row. For other models, memory does not
/// grow with the number of rows.
///
/// # Errors
///
/// See [`PredictError`]. If a target is a class that did not occur in training.
pub fn evaluate(
    model: &mut SavedModel,
    input: &InputOptions,
    top_k: Option<usize>,
) -> Result<Evaluation, PredictError> {
    let target = match &input.target {
        TargetColumn::Unread => TargetColumn::SameName,
        given => given.clone(),
    };
    let mut reader = open_prediction_input(&InputOptions { target, ..input.clone() }, model.description())?;
    let classes = model.description().classes.clone();
    let mut sums = EvaluationSums::new(&classes, top_k);
    let rows = for_each_row(model, &mut *reader, |prediction, truth| {
        if let Some(truth) = truth {
            sums.add(prediction, truth);
        }
        Ok::<_, PredictError>(())
    })?;
    if rows == 0 {
        return Err(
            DataError::Unsuitable("the data has no rows, so there is nothing to compare".into()).into()
        );
    }
    Ok(sums.finish((rows, reader.rows_without_target()), &classes))
}

/// The sums over all rows.
enum EvaluationSums {
    Classification(ClassificationSums),
    Regression(RegressionSums),
}

impl EvaluationSums {
    fn new(classes: &[String], top_k: Option<usize>) -> Self {
        if classes.is_empty() {
            return Self::Regression(RegressionSums::default());
        }
        let k = top_k.unwrap_or(TOP_K_DEFAULT);
        Self::Classification(ClassificationSums {
            k: (k < classes.len()).then_some(k),
            scores: (classes.len() == 2).then(Vec::new),
            ..ClassificationSums::default()
        })
    }

    fn add(&mut self, prediction: &Prediction, truth: Truth) {
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

    /// `row_counts` holds the number of rows with a target and the number of rows without a target.
    fn finish(self, row_counts: (u64, u64), classes: &[String]) -> Evaluation {
        match self {
            Self::Regression(sums) => sums.finish(row_counts),
            Self::Classification(sums) => sums.finish(row_counts, classes),
        }
    }
}

#[derive(Default)]
struct RegressionSums {
    count: f64,
    absolute: f64,
    squared: f64,
    /// The mean of the targets, by Welford's method.
    mean: f64,
    /// The sum of the squared differences between the targets and their mean, by Welford's method.
    differences: f64,
}

impl RegressionSums {
    fn add(&mut self, prediction: f64, target: f64) {
        let error = prediction - target;
        self.absolute += error.abs();
        self.squared += error * error;
        self.count += 1.0;
        let difference = target - self.mean;
        self.mean += difference / self.count;
        self.differences += difference * (target - self.mean);
    }

    fn finish(self, (rows, rows_without_target): (u64, u64)) -> Evaluation {
        Evaluation::Regression {
            rows,
            rows_without_target,
            mae: self.absolute / self.count,
            rmse: (self.squared / self.count).sqrt(),
            r2: (self.differences > 0.0).then(|| 1.0 - self.squared / self.differences),
        }
    }
}

#[derive(Default)]
struct ClassificationSums {
    log_loss: f64,
    /// The number of rows of each pair (class, prediction) that occurs.
    pairs: BTreeMap<(usize, usize), u64>,
    /// The k of the top-k accuracy. `None` if the model has at most k classes.
    k: Option<usize>,
    among_top_k: u64,
    /// For models of two classes, two values for each row: the probability of the second class, and whether the row
    /// belongs to the second class.
    scores: Option<Vec<(f64, bool)>>,
}

impl ClassificationSums {
    fn add(&mut self, prediction: usize, probabilities: &[f64], target: usize) {
        let probability = probabilities[target];
        self.log_loss -= probability.max(f64::MIN_POSITIVE).ln();
        *self.pairs.entry((target, prediction)).or_default() += 1;
        // If two classes have the same probability, the first counts as more probable.
        let rank = probabilities
            .iter()
            .enumerate()
            .filter(|&(class, &other)| other > probability || (other == probability && class < target))
            .count();
        self.among_top_k += u64::from(self.k.is_some_and(|k| rank < k));
        if let Some(scores) = &mut self.scores {
            scores.push((probabilities[1], target == 1));
        }
    }

    fn finish(self, (rows, rows_without_target): (u64, u64), names: &[String]) -> Evaluation {
        let count = |matches: &dyn Fn(usize, usize) -> bool| -> u64 {
            self.pairs
                .iter()
                .filter(|((class, prediction), _)| matches(*class, *prediction))
                .map(|(_, n)| n)
                .sum()
        };
        let right = count(&|class, prediction| class == prediction);
        let classes = class_reports(&self.pairs, names);
        let f1: Vec<f64> = classes.iter().filter_map(|class| class.f1).collect();
        let mut wrong: Vec<_> =
            self.pairs.iter().filter(|((class, prediction), _)| class != prediction).collect();
        wrong.sort_by_key(|&(pair, &count)| (std::cmp::Reverse(count), *pair));
        let confusions = wrong
            .into_iter()
            .take(10)
            .map(|(&(class, prediction), &count)| (names[class].clone(), names[prediction].clone(), count))
            .collect();
        let cell = |class, prediction| self.pairs.get(&(class, prediction)).copied().unwrap_or_default();
        let confusion_matrix = (names.len() <= CONFUSION_MATRIX_CLASSES_MAX).then(|| {
            (0..names.len()).map(|class| (0..names.len()).map(|guess| cell(class, guess)).collect()).collect()
        });
        Evaluation::Classification {
            rows,
            rows_without_target,
            accuracy: right as f64 / rows as f64,
            log_loss: self.log_loss / rows as f64,
            macro_f1: f1.iter().sum::<f64>() / f1.len() as f64,
            top_k: self.k.map(|k| TopK { k, accuracy: self.among_top_k as f64 / rows as f64 }),
            auc: self.scores.and_then(area_under_curve),
            classes,
            confusion_matrix,
            confusions,
        }
    }
}

fn class_reports(pair_counts: &BTreeMap<(usize, usize), u64>, names: &[String]) -> Vec<ClassReport> {
    let mut right = vec![0_u64; names.len()];
    let mut support = vec![0_u64; names.len()];
    let mut predicted = vec![0_u64; names.len()];
    for (&(class, prediction), &count) in pair_counts {
        support[class] += count;
        predicted[prediction] += count;
        if class == prediction {
            right[class] += count;
        }
    }
    let fraction = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    let report = |(class, name): (usize, &String)| ClassReport {
        name: name.clone(),
        support: support[class],
        precision: fraction(right[class], predicted[class]),
        recall: fraction(right[class], support[class]),
        f1: fraction(2 * right[class], support[class] + predicted[class]),
    };
    names.iter().enumerate().map(report).collect()
}

/// Returns the area under the ROC curve, which is the probability that a random row of the positive class has a
/// higher score than a random row of the other class (Mann-Whitney statistic). Equal scores count as one half.
fn area_under_curve(mut scores: Vec<(f64, bool)>) -> Option<f64> {
    scores.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut below, mut wins) = (0.0, 0.0);
    for ties in scores.chunk_by(|a, b| a.0 == b.0) {
        let positive = ties.iter().filter(|(_, is_positive)| *is_positive).count() as f64;
        let negative = ties.len() as f64 - positive;
        wins += positive * (below + 0.5 * negative);
        below += negative;
    }
    let positive = scores.len() as f64 - below;
    (positive > 0.0 && below > 0.0).then(|| wins / (positive * below))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected F1 score is the result of scikit-learn's `f1_score(average="macro")`, where a class that occurs
    /// only in predictions has the score 0.
    #[test]
    fn classification_metrics_are_computed_from_their_definitions() {
        let names = ["a".to_owned(), "b".to_owned(), "c".to_owned()];
        let mut sums = EvaluationSums::new(&names, Some(2));
        for (target, probabilities) in
            [(0, [0.7, 0.2, 0.1]), (0, [0.4, 0.5, 0.1]), (1, [0.1, 0.8, 0.1]), (1, [0.2, 0.2, 0.6])]
        {
            let best = probabilities.iter().copied().fold(0.0, f64::max);
            let class = probabilities.iter().position(|&p| p == best).unwrap();
            sums.add(
                &Prediction::Class { class, probabilities: probabilities.to_vec() },
                Truth::Class(target),
            );
        }
        let Evaluation::Classification {
            accuracy,
            log_loss,
            macro_f1,
            top_k,
            auc,
            confusion_matrix,
            confusions,
            ..
        } = sums.finish((4, 0), &names)
        else {
            panic!("the evaluation is not of classes")
        };
        assert_eq!((accuracy, auc), (0.5, None));
        assert!((log_loss + (0.7_f64.ln() + 0.4_f64.ln() + 0.8_f64.ln() + 0.2_f64.ln()) / 4.0).abs() < 1e-12);
        assert!((macro_f1 - (2.0 / 3.0 + 0.5 + 0.0) / 3.0).abs() < 1e-12, "{macro_f1}");
        // In the last row, `a` and `b` have the same probability, and `a` counts as more probable.
        assert_eq!(top_k, Some(TopK { k: 2, accuracy: 0.75 }));
        assert_eq!(confusion_matrix.unwrap(), [[1, 1, 0], [0, 1, 1], [0, 0, 0]]);
        assert_eq!(confusions, [("a".into(), "b".into(), 1), ("b".into(), "c".into(), 1)]);
    }

    #[test]
    fn the_area_under_the_curve_counts_ties_as_one_half() {
        let cases = [
            (vec![(0.1, false), (0.4, false), (0.35, true), (0.8, true)], Some(0.75)),
            (vec![(0.5, false), (0.5, true)], Some(0.5)),
            (vec![(0.1, true), (0.9, false)], Some(0.0)),
            (vec![(0.2, false), (0.2, true), (0.2, true), (0.9, true)], Some(2.0 / 3.0)),
            (vec![(0.1, true)], None),
        ];
        for (scores, expected) in cases {
            assert_eq!(area_under_curve(scores.clone()), expected, "{scores:?}");
        }
    }

    #[test]
    fn regression_metrics_are_computed_from_their_definitions() {
        let mut sums = EvaluationSums::new(&[], None);
        for (prediction, target) in [(2.5, 3.0), (0.0, -0.5), (2.0, 2.0), (8.0, 7.0)] {
            sums.add(&Prediction::Number(prediction), Truth::Number(target));
        }
        let Evaluation::Regression { mae, rmse, r2, .. } = sums.finish((4, 0), &[]) else {
            panic!("the evaluation is not of numbers")
        };
        // The documentation of scikit-learn's `r2_score` gives this result.
        assert!((r2.unwrap() - 0.948_608_137_044_967_9).abs() < 1e-12);
        assert_eq!((mae, rmse), (0.5, 0.375_f64.sqrt()));
        let mut constant = EvaluationSums::new(&[], None);
        constant.add(&Prediction::Number(1.0), Truth::Number(2.0));
        assert!(matches!(constant.finish((1, 0), &[]), Evaluation::Regression { r2: None, .. }));
    }
}
