//! Metrics of predicted classes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ClassReport, Evaluation, TopK};

/// With more classes than this number, [`Evaluation`] has no confusion matrix.
const CONFUSION_MATRIX_CLASSES_MAX: usize = 100;

/// Sums over rows, from which the metrics of predicted classes are computed.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ClassificationSums {
    /// The number of rows.
    rows: u64,
    /// The sum of the cross-entropies of the rows, in nats.
    log_loss_sum: f64,
    /// The number of rows of each pair (class, prediction) that occurs.
    pair_counts: BTreeMap<(usize, usize), u64>,
    /// The k of the top-k accuracy. `None` if the model has k classes or fewer.
    k: Option<usize>,
    /// The number of rows whose class is among the k most probable classes.
    among_top_k: u64,
    /// For models of two classes, two values for each row: the probability of the second class, and whether the row
    /// belongs to the second class.
    scores: Option<Vec<(f64, bool)>>,
}

impl ClassificationSums {
    /// Creates sums over no rows. `k` is the k of the top-k accuracy.
    pub(super) fn new(classes: usize, k: usize) -> Self {
        Self { k: (k < classes).then_some(k), scores: (classes == 2).then(Vec::new), ..Self::default() }
    }

    /// Adds a row. `prediction` and `target` are indices of classes.
    pub(super) fn add(&mut self, prediction: usize, probabilities: &[f64], target: usize) {
        self.rows += 1;
        let probability = probabilities[target];
        self.log_loss_sum -= probability.max(f64::MIN_POSITIVE).ln();
        *self.pair_counts.entry((target, prediction)).or_default() += 1;
        // If two classes have the same probability, the class with the lower index counts as more probable.
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

    /// Returns the same sums without `scores`. Later rows add no scores.
    pub(super) fn without_scores(self) -> Self {
        Self { scores: None, ..self }
    }

    /// Adds the sums of another rank. Returns `false` if `other` cannot be the sums of a model with this number of
    /// classes.
    pub(super) fn merge(&mut self, other: Self, classes: usize) -> bool {
        let has_known_classes =
            other.pair_counts.keys().all(|&(class, prediction)| class < classes && prediction < classes);
        if !has_known_classes || other.k != self.k || other.scores.is_some() != self.scores.is_some() {
            return false;
        }
        self.rows = self.rows.saturating_add(other.rows);
        self.log_loss_sum += other.log_loss_sum;
        for (pair, count) in other.pair_counts {
            let total = self.pair_counts.entry(pair).or_default();
            *total = total.saturating_add(count);
        }
        self.among_top_k = self.among_top_k.saturating_add(other.among_top_k);
        if let (Some(scores), Some(others)) = (&mut self.scores, other.scores) {
            scores.extend(others);
        }
        true
    }

    /// Computes the metrics. `names` holds the names of the classes.
    pub(super) fn into_evaluation(self, rows_without_target: u64, names: &[String]) -> Evaluation {
        let rows = self.rows;
        let count = |matches: &dyn Fn(usize, usize) -> bool| -> u64 {
            self.pair_counts
                .iter()
                .filter(|((class, prediction), _)| matches(*class, *prediction))
                .map(|(_, n)| n)
                .sum()
        };
        let right = count(&|class, prediction| class == prediction);
        let classes = class_reports(&self.pair_counts, names);
        let f1: Vec<f64> = classes.iter().filter_map(|class| class.f1).collect();
        let mut wrong: Vec<_> =
            self.pair_counts.iter().filter(|((class, prediction), _)| class != prediction).collect();
        wrong.sort_by_key(|&(pair, &count)| (std::cmp::Reverse(count), *pair));
        let confusions = wrong
            .into_iter()
            .take(10)
            .map(|(&(class, prediction), &count)| (names[class].clone(), names[prediction].clone(), count))
            .collect();
        let cell =
            |class, prediction| self.pair_counts.get(&(class, prediction)).copied().unwrap_or_default();
        let confusion_matrix = (names.len() <= CONFUSION_MATRIX_CLASSES_MAX).then(|| {
            (0..names.len()).map(|class| (0..names.len()).map(|guess| cell(class, guess)).collect()).collect()
        });
        Evaluation::Classification {
            rows,
            rows_without_target,
            accuracy: right as f64 / rows as f64,
            log_loss: self.log_loss_sum / rows as f64,
            macro_f1: f1.iter().sum::<f64>() / f1.len() as f64,
            top_k: self.k.map(|k| TopK { k, accuracy: self.among_top_k as f64 / rows as f64 }),
            auc: self.scores.and_then(area_under_curve),
            classes,
            confusion_matrix,
            confusions,
        }
    }
}

/// Returns the results of each class. `pair_counts` is the number of rows of each pair (class, prediction).
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
/// higher score than a random row of the negative class (Mann-Whitney statistic). Equal scores count as one half. Each
/// entry of `scores` is the score of a row, and whether the row belongs to the positive class. Returns `None` if all rows
/// belong to the same class.
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
        let mut sums = ClassificationSums::new(3, 2);
        for (target, probabilities) in
            [(0, [0.7, 0.2, 0.1]), (0, [0.4, 0.5, 0.1]), (1, [0.1, 0.8, 0.1]), (1, [0.2, 0.2, 0.6])]
        {
            let best = probabilities.iter().copied().fold(0.0, f64::max);
            let class = probabilities.iter().position(|&p| p == best).unwrap();
            sums.add(class, &probabilities, target);
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
        } = sums.into_evaluation(0, &names)
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
}
