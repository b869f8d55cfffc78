//! Decides whether a target holds numbers or classes, and converts the target to numbers or to indices of classes.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::text::{TokenWindows, digest_tokens};
use super::texts::advise_about_commas;
use super::{Column, DataError, Texts};
use crate::group::Group;
use crate::train::TrainError;
use crate::types::{ReduceOp, counted};

/// The maximum number of classes in a target.
pub(crate) const CLASSES_MAX: usize = 10_000;
/// If a target holds more distinct integers than this, [`guess_task`] chooses regression.
const CLASSES_GUESSED_MAX: usize = 100;
/// If a distinct integer has, on average, fewer samples than this, [`guess_task`] chooses regression. A target with
/// one or two distinct integers always holds classes.
const SAMPLES_PER_CLASS_MIN: usize = 10;

/// The smallest integer n for which n and n + 1 are the same f64. A class number must be below n and above -n.
pub(crate) const CLASS_NUMBER_LIMIT: f64 = (1_u64 << 53) as f64;

/// The kind of value that a model predicts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// The class of a sample.
    Classification,
    /// A number.
    Regression,
    /// The next token of a text.
    Text,
}

impl Task {
    /// Returns the name of the task in `--task` and in checkpoints.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Classification => "classification",
            Self::Regression => "regression",
            Self::Text => "text",
        }
    }

    /// Describes the prediction of a model that ignores its inputs.
    pub(crate) fn describe_constant_prediction(self) -> &'static str {
        match self {
            Self::Classification => "the same class probabilities",
            Self::Regression => "the mean",
            Self::Text => "each token with its frequency",
        }
    }
}

/// The targets of samples. If neither the model nor `--task` decides, a target holds classes in these cases:
///
/// - It contains text.
/// - It contains integers with at most two distinct values.
/// - It contains integers with at most 100 distinct values and, on average, at least 10 samples of each value.
///
/// All other targets hold numbers.
#[derive(Clone, PartialEq, Debug)]
pub enum Targets {
    /// Numbers in the unit of the data, not scaled.
    Numbers(Vec<f64>),
    /// Indices into [`Dataset::classes`](super::Dataset::classes).
    Classes(Vec<u32>),
    /// Windows of a text. For each token of a window, the target is the token that follows it.
    NextTokens(TokenWindows),
}

impl Targets {
    /// Adds the target of a sample to a digest.
    pub(crate) fn digest_row(&self, row: usize, hasher: &mut Sha256) {
        match self {
            Self::Numbers(values) => hasher.update(values[row].to_le_bytes()),
            Self::Classes(values) => hasher.update(values[row].to_le_bytes()),
            Self::NextTokens(windows) => digest_tokens(windows.next_tokens(row), hasher),
        }
    }
}

/// The properties of a target that decide the task.
#[derive(Default, Serialize, Deserialize)]
struct TargetSummary {
    holds_text: bool,
    /// The number of values.
    value_count: u64,
    /// The smallest value that is not an integer. `None` if all values are integers.
    smallest_fraction: Option<f64>,
    /// The bits of the distinct values. If there are more than [`CLASSES_GUESSED_MAX`], some of them may be missing.
    distinct: BTreeSet<u64>,
}

impl TargetSummary {
    /// Summarizes the target of the training set and the target of the test set.
    fn new(columns: [&Column; 2]) -> Self {
        let mut summary = Self::default();
        for column in columns {
            let Column::Numbers(values) = column else {
                return Self { holds_text: true, ..summary };
            };
            summary.value_count += values.len() as u64;
            for &value in values {
                if value.fract() != 0.0 {
                    summary.smallest_fraction =
                        Some(summary.smallest_fraction.map_or(value, |smallest| smallest.min(value)));
                }
                if summary.distinct.len() <= CLASSES_GUESSED_MAX {
                    // Adding 0.0 converts -0 to 0.
                    summary.distinct.insert((value + 0.0).to_bits());
                }
            }
        }
        summary
    }

    /// Returns a summary of the values of `self` and `other` together.
    fn merge(mut self, other: Self) -> Self {
        let fractions = [self.smallest_fraction, other.smallest_fraction].into_iter().flatten();
        self.distinct.extend(other.distinct);
        Self {
            holds_text: self.holds_text || other.holds_text,
            value_count: self.value_count + other.value_count,
            smallest_fraction: fractions.reduce(f64::min),
            distinct: self.distinct,
        }
    }
}

/// Guesses the task by the rule that [`Targets`] documents. Also returns a message for the user that gives the
/// reason. If both tasks are possible, the message names the option that chooses between them. Each rank of `group`
/// passes its part of the target.
pub(crate) fn guess_task(
    train_target: &Column,
    test_target: &Column,
    group: &mut Group,
) -> Result<(Task, String), TrainError> {
    let own = TargetSummary::new([train_target, test_target]);
    let ranks = group.all_gather_object(&own)?.into_iter();
    let TargetSummary { holds_text, value_count, smallest_fraction, distinct } =
        ranks.fold(TargetSummary::default(), TargetSummary::merge);
    if holds_text {
        let advice = advise_about_target(train_target);
        return Ok((Task::Classification, format!("the target holds text: treated as classes{advice}")));
    }
    if let Some(value) = smallest_fraction {
        let note = format!("the target holds {value}, which is not an integer: treated as numbers");
        return Ok((Task::Regression, note));
    }
    let count = distinct.len();
    let as_classes = "treated as classes; to predict numbers, pass --task regression";
    let as_numbers = "treated as numbers; to predict classes, pass --task classification";
    let found =
        format!("the target holds {} in {}", counted(count, "distinct integer"), counted(value_count, "row"));
    Ok(if count > CLASSES_GUESSED_MAX {
        let found = format!("the target holds more than {CLASSES_GUESSED_MAX} distinct integers");
        (Task::Regression, format!("{found}: {as_numbers}"))
    } else if count <= 2 || value_count >= (SAMPLES_PER_CLASS_MIN * count) as u64 {
        (Task::Classification, format!("{found}: {as_classes}"))
    } else {
        (Task::Regression, format!("{found}: {as_numbers}"))
    })
}

/// Returns the targets of the training and the test set, and the names of the classes (none for regression). Each
/// rank of `group` passes its part of the targets, and gets the targets of this part.
pub(crate) fn interpret_targets(
    train: Column,
    test: Column,
    task: Task,
    group: &mut Group,
) -> Result<([Targets; 2], Vec<String>), TrainError> {
    match (task, train, test) {
        (Task::Regression, Column::Numbers(train), Column::Numbers(test)) => {
            Ok(([Targets::Numbers(train), Targets::Numbers(test)], Vec::new()))
        }
        (Task::Regression, train, _) => Err(DataError::Unsuitable(format!(
            "the target holds text, so regression (--model linear, --task regression) cannot predict it; \
             try --model softmax, or another --target{}",
            advise_about_target(&train)
        ))
        .into()),
        (Task::Text, ..) => {
            Err(DataError::Unsuitable("only --model gpt:... predicts the next token of a text".into()).into())
        }
        (Task::Classification, Column::Numbers(train), Column::Numbers(test)) => {
            check_class_numbers([&train, &test], group)?;
            // Sort the classes as integers and not as text, so that 2 comes before 10.
            let key = |value: &f64| (value + 0.0) as i64;
            let sets = [train, test].map(|values| values.iter().map(key).collect::<Vec<i64>>());
            let classes = merge_classes(sets.iter().flatten().copied(), group)?;
            let targets = sets.map(|values| {
                let class = |value| {
                    classes.binary_search(value).expect("the classes were collected from these values")
                };
                Targets::Classes(values.iter().map(|value| class(value) as u32).collect())
            });
            Ok((targets, classes.iter().map(i64::to_string).collect()))
        }
        (Task::Classification, train, test) => {
            let sets = [train, test].map(to_texts);
            let distinct = sets.iter().flat_map(|set| set.distinct_in(0..set.indices.len()));
            let classes = merge_classes(distinct.map(str::to_owned), group)?;
            let targets = sets.each_ref().map(|texts| {
                // A distinct text that occurs in no row has no class. `unwrap_or_default` gives 0, which is never
                // used.
                let class = |text: &Arc<str>| {
                    classes.binary_search_by(|class| class.as_str().cmp(text)).unwrap_or_default() as u32
                };
                let class_of: Vec<u32> = texts.distinct.iter().map(class).collect();
                Targets::Classes(texts.indices.iter().map(|&index| class_of[index as usize]).collect())
            });
            Ok((targets, classes))
        }
    }
}

/// Returns what the user can do if a target holds numbers with a decimal comma. Looks only at the rows of this rank.
fn advise_about_target(target: &Column) -> String {
    match target {
        Column::Text(texts) => advise_about_commas(&texts.distinct),
        Column::Numbers(_) => String::new(),
    }
}

/// Returns an error on all ranks if a rank has a number that is not an integer or is too large for a class.
fn check_class_numbers(sets: [&Vec<f64>; 2], group: &mut Group) -> Result<(), TrainError> {
    let smallest = |is_bad: fn(f64) -> bool| {
        sets.into_iter().flatten().copied().filter(|&value| is_bad(value)).fold(f64::INFINITY, f64::min)
    };
    let mut bad =
        [smallest(|value| value.fract() != 0.0), smallest(|value| value.abs() >= CLASS_NUMBER_LIMIT)];
    group.all_reduce(&mut bad, ReduceOp::Min)?;
    let [fraction, large] = bad;
    if fraction.is_finite() {
        return Err(DataError::Unsuitable(format!(
            "the target holds {fraction}, which is not a class; to predict numbers, pass --model linear, \
             or --model mlp:... with --task regression"
        ))
        .into());
    }
    if large.is_finite() {
        return Err(DataError::Unsuitable(format!(
            "the target holds {large:.0}, but the magnitude of a class number must be below 2^53 = {CLASS_NUMBER_LIMIT:.0}, \
             because larger integers may be rounded; to predict the classes of a table, pass --categorical with the name of \
             the target, so that the classes are read as texts, or give the classes smaller numbers"
        ))
        .into());
    }
    Ok(())
}

/// Converts a column to texts. This conversion is needed if the target of one set holds texts and the target of the
/// other set holds only numbers.
fn to_texts(column: Column) -> Texts {
    match column {
        Column::Text(texts) => texts,
        Column::Numbers(values) => {
            let names: Vec<String> = values.iter().map(f64::to_string).collect();
            names.iter().map(String::as_str).collect()
        }
    }
}

/// Returns the distinct values of all ranks in sorted order: the classes. Returns an error if there are fewer than 2 or
/// more than [`CLASSES_MAX`] classes.
fn merge_classes<T: Ord + Serialize + DeserializeOwned>(
    values: impl Iterator<Item = T>,
    group: &mut Group,
) -> Result<Vec<T>, TrainError> {
    let own: BTreeSet<T> = values.collect();
    // One class above the maximum is enough for the error.
    let own: Vec<T> = own.into_iter().take(CLASSES_MAX + 1).collect();
    let classes: BTreeSet<T> = group.all_gather_object(&own)?.into_iter().flatten().collect();
    if classes.len() > CLASSES_MAX {
        return Err(DataError::Unsuitable(format!(
            "the target holds more than {CLASSES_MAX} distinct values, which is the maximum number of classes; to predict a \
             number, pass --model linear or --task regression"
        ))
        .into());
    }
    if classes.len() < 2 {
        let problem = "the target holds only one class; there is nothing to learn";
        return Err(DataError::Unsuitable(problem.into()).into());
    }
    Ok(classes.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(values: &[f64]) -> Column {
        Column::Numbers(values.to_vec())
    }

    /// Regression test: before the fix, a target with 43 distinct integers in 60 rows was treated as classes, and the
    /// user got no message.
    #[test]
    fn text_and_integers_with_many_samples_of_each_value_are_classes() {
        let text = Column::Text(["a"].into_iter().collect());
        let cycle = |distinct: u32, rows: u32| {
            numbers(&(0..rows).map(|i| f64::from(i % distinct)).collect::<Vec<_>>())
        };
        for (column, expected, note) in [
            (text, Task::Classification, "holds text: treated as classes"),
            (cycle(2, 5), Task::Classification, "--task regression"),
            (cycle(3, 150), Task::Classification, "3 distinct integers in 150 rows: treated as classes"),
            (cycle(43, 60), Task::Regression, "43 distinct integers in 60 rows: treated as numbers"),
            (cycle(43, 60), Task::Regression, "--task classification"),
            (cycle(100, 1000), Task::Classification, "--task regression"),
            (cycle(101, 100_000), Task::Regression, "more than 100 distinct integers: treated as numbers"),
            (numbers(&[1.0, 0.5]), Task::Regression, "holds 0.5, which is not an integer"),
        ] {
            let (task, found) = guess_task(&column, &numbers(&[]), &mut Group::solo()).unwrap();
            assert_eq!(task, expected, "{found}");
            assert!(found.contains(note), "{found}");
        }
    }

    #[test]
    fn training_and_test_set_use_the_same_sorted_classes() {
        let (targets, names) = interpret_targets(
            numbers(&[10.0, 9.0]),
            numbers(&[-1.0]),
            Task::Classification,
            &mut Group::solo(),
        )
        .unwrap();
        assert_eq!(names, ["-1", "9", "10"]);
        assert_eq!(targets, [Targets::Classes(vec![2, 1]), Targets::Classes(vec![0])]);
        let column: Texts = ["b", "unused", "c", "b", "a"].into_iter().collect();
        let column = |rows: &[usize]| Column::Text(column.select(rows));
        let (targets, names) =
            interpret_targets(column(&[0, 2]), column(&[4, 3]), Task::Classification, &mut Group::solo())
                .unwrap();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(targets, [Targets::Classes(vec![1, 2]), Targets::Classes(vec![0, 1])]);
    }

    #[test]
    fn a_target_that_does_not_fit_the_task_is_refused() {
        let text = || Column::Text(["a", "b"].into_iter().collect());
        for (train, task, expected) in [
            (text(), Task::Regression, "holds text"),
            (numbers(&[1.5]), Task::Classification, "holds 1.5"),
            (numbers(&[1.0, 1.0]), Task::Classification, "only one class"),
            // Regression test: before the fix, 2^53 and 2^53 + 1 became one class.
            (
                numbers(&[5.0, 9_007_199_254_740_992.0]),
                Task::Classification,
                "holds 9007199254740992, but the magnitude of a class number must be below 2^53",
            ),
            (numbers(&[5.0, -1e20]), Task::Classification, "pass --categorical with the name of the target"),
        ] {
            let error =
                interpret_targets(train, numbers(&[]), task, &mut Group::solo()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
