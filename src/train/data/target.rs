//! Decides whether a target holds numbers or classes, and converts the target to numbers or to indices of classes.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Column, DataError, Texts};

/// The maximum number of classes in a target.
pub(crate) const CLASSES_MAX: usize = 10_000;
/// If a target holds more distinct integers than this, [`guess_task`] chooses regression.
const CLASSES_GUESSED_MAX: usize = 100;
/// If a distinct integer has, on average, fewer samples than this, [`guess_task`] chooses regression. A target with
/// one or two distinct integers always holds classes.
const SAMPLES_PER_CLASS_MIN: usize = 10;

/// The smallest integer n for which n and n + 1 are the same f64. Class numbers must be smaller.
pub(crate) const CLASS_END: f64 = (1_u64 << 53) as f64;

/// The kind of value that a model predicts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// The class of a sample.
    Classification,
    /// A number.
    Regression,
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
}

impl Targets {
    /// Adds the targets to a digest.
    pub(crate) fn digest(&self, hasher: &mut Sha256) {
        match self {
            Self::Numbers(values) => values.iter().for_each(|value| hasher.update(value.to_le_bytes())),
            Self::Classes(values) => values.iter().for_each(|value| hasher.update(value.to_le_bytes())),
        }
    }
}

/// Guesses the task by the rule that [`Targets`] documents. Also returns a message for the user that gives the
/// reason. If the other task is possible too, the message names the option that chooses it.
pub(crate) fn guess_task(train_target: &Column, test_target: &Column) -> (Task, String) {
    let (mut distinct, mut samples) = (BTreeSet::new(), 0);
    for column in [train_target, test_target] {
        let Column::Numbers(values) = column else {
            return (Task::Classification, "the target holds text: treated as classes".into());
        };
        samples += values.len();
        for value in values {
            // Adding 0.0 converts -0 to 0.
            distinct.insert((value + 0.0).to_bits());
            if value.fract() != 0.0 {
                return (
                    Task::Regression,
                    format!("the target holds {value}, which is not an integer: treated as numbers"),
                );
            }
            if distinct.len() > CLASSES_GUESSED_MAX {
                let found = format!("the target holds more than {CLASSES_GUESSED_MAX} distinct integers");
                return (
                    Task::Regression,
                    format!("{found}: treated as numbers; to predict classes, pass --task classification"),
                );
            }
        }
    }
    let count = distinct.len();
    let found = format!("the target holds {count} distinct integers in {samples} rows");
    if count <= 2 || samples >= SAMPLES_PER_CLASS_MIN * count {
        let note = format!("{found}: treated as classes; to predict numbers, pass --task regression");
        (Task::Classification, note)
    } else {
        let note = format!("{found}: treated as numbers; to predict classes, pass --task classification");
        (Task::Regression, note)
    }
}

/// Returns the targets of the training and the test set, and the names of the classes (none for regression).
pub(crate) fn interpret_targets(
    train: Column,
    test: Column,
    task: Task,
) -> Result<([Targets; 2], Vec<String>), DataError> {
    match (task, train, test) {
        (Task::Regression, Column::Numbers(train), Column::Numbers(test)) => {
            Ok(([Targets::Numbers(train), Targets::Numbers(test)], Vec::new()))
        }
        (Task::Regression, ..) => Err(DataError::Unsuitable(
            "the target holds text, so regression (--model linear, --task regression) cannot predict it; \
             try --model softmax, or another --target"
                .into(),
        )),
        (Task::Classification, Column::Numbers(train), Column::Numbers(test)) => {
            if let Some(value) = train.iter().chain(&test).find(|value| value.fract() != 0.0) {
                return Err(DataError::Unsuitable(format!(
                    "the target holds {value}, which is not a class; to predict numbers, pass --model linear, \
                     or --model mlp:... with --task regression"
                )));
            }
            if let Some(value) = train.iter().chain(&test).find(|value| value.abs() >= CLASS_END) {
                return Err(DataError::Unsuitable(format!(
                    "the target holds {value:.0}; as numbers, integers of 2^53 = {CLASS_END:.0} or more cannot be told apart; to \
                     predict classes, pass --categorical with the name of the target, which reads the classes of a table as \
                     texts, or give the classes smaller numbers"
                )));
            }
            // Sort the classes as integers and not as text, so that 2 comes before 10.
            let key = |value: &f64| (value + 0.0) as i64;
            let sets = [train, test].map(|values| values.iter().map(key).collect::<Vec<i64>>());
            let classes = sort_classes(sets.iter().flatten().copied())?;
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
            let classes = sort_classes(sets.iter().flat_map(|set| set.distinct_in(0..set.indices.len())))?;
            let targets = sets.each_ref().map(|texts| {
                // A distinct text that occurs in no row has no class. `unwrap_or_default` gives 0, which is never
                // used.
                let class = |text: &Arc<str>| classes.binary_search(&&**text).unwrap_or_default() as u32;
                let class_of: Vec<u32> = texts.distinct.iter().map(class).collect();
                Targets::Classes(texts.indices.iter().map(|&index| class_of[index as usize]).collect())
            });
            Ok((targets, classes.iter().map(|&class| class.to_owned()).collect()))
        }
    }
}

/// Converts a column to text. The target of one set may hold only numbers while the target of the other set holds
/// text.
fn to_texts(column: Column) -> Texts {
    match column {
        Column::Text(texts) => texts,
        Column::Numbers(values) => {
            let names: Vec<String> = values.iter().map(f64::to_string).collect();
            names.iter().map(String::as_str).collect()
        }
    }
}

/// Returns the distinct values in sorted order.
fn sort_classes<T: Ord>(values: impl Iterator<Item = T>) -> Result<Vec<T>, DataError> {
    let classes: BTreeSet<T> = values.collect();
    if classes.len() > CLASSES_MAX {
        return Err(DataError::Unsuitable(format!(
            "the target holds {} distinct values, but at most {CLASSES_MAX} classes are possible; to predict a \
             number, pass --model linear or --task regression",
            classes.len()
        )));
    }
    if classes.len() < 2 {
        return Err(DataError::Unsuitable(
            "the target holds only one class; there is nothing to learn".into(),
        ));
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
            let (task, found) = guess_task(&column, &numbers(&[]));
            assert_eq!(task, expected, "{found}");
            assert!(found.contains(note), "{found}");
        }
    }

    #[test]
    fn training_and_test_set_use_the_same_sorted_classes() {
        let (targets, names) =
            interpret_targets(numbers(&[10.0, 9.0]), numbers(&[-1.0]), Task::Classification).unwrap();
        assert_eq!(names, ["-1", "9", "10"]);
        assert_eq!(targets, [Targets::Classes(vec![2, 1]), Targets::Classes(vec![0])]);
        let column: Texts = ["b", "unused", "c", "b", "a"].into_iter().collect();
        let column = |rows: &[usize]| Column::Text(column.select(rows));
        let (targets, names) =
            interpret_targets(column(&[0, 2]), column(&[4, 3]), Task::Classification).unwrap();
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
                "holds 9007199254740992; as numbers",
            ),
            (numbers(&[5.0, -1e20]), Task::Classification, "pass --categorical with the name of the target"),
        ] {
            let error = interpret_targets(train, numbers(&[]), task).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
