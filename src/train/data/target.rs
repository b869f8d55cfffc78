//! The meaning of the target: numbers or classes.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::{Column, DataError};

/// The most classes that a target may hold.
const CLASSES_MAX: usize = 10_000;
/// An integer target is guessed to hold classes if it has at most this many distinct values and as many samples of each, on
/// average, as the next constant says. Two distinct values are always classes.
const CLASSES_GUESSED_MAX: usize = 100;
const SAMPLES_PER_CLASS_MIN: usize = 10;

/// The kind of value that a model predicts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// The class of a sample.
    Classification,
    /// A number.
    Regression,
}

/// The targets of samples. If neither the model nor `--task` says which they are, text is classes, and so are integers of at
/// most 100 distinct values, with at least 10 samples of each on average or with only two values.
#[derive(Clone, PartialEq, Debug)]
pub enum Targets {
    /// Numbers, in their original unit.
    Numbers(Vec<f64>),
    /// Indices into [`Dataset::classes`](super::Dataset::classes).
    Classes(Vec<u32>),
}

impl Targets {
    /// Feeds the content into a digest.
    pub(crate) fn digest(&self, hasher: &mut Sha256) {
        match self {
            Self::Numbers(values) => values.iter().for_each(|value| hasher.update(value.to_le_bytes())),
            Self::Classes(values) => values.iter().for_each(|value| hasher.update(value.to_le_bytes())),
        }
    }
}

/// The task for a target, by the rule at [`Targets`], and a sentence for the user if another choice was possible.
pub(crate) fn guess(columns: [&Column; 2]) -> (Task, Option<String>) {
    let (mut distinct, mut samples) = (BTreeSet::new(), 0);
    for column in columns {
        let Column::Numbers(values) = column else { return (Task::Classification, None) };
        samples += values.len();
        for value in values {
            // Adding 0.0 makes -0 and 0 the same value.
            distinct.insert((value + 0.0).to_bits());
            if value.fract() != 0.0 || distinct.len() > CLASSES_GUESSED_MAX {
                return (Task::Regression, None);
            }
        }
    }
    let count = distinct.len();
    let found = format!("the target holds {count} distinct integers in {samples} rows");
    if count <= 2 || samples >= SAMPLES_PER_CLASS_MIN * count {
        let note = format!("{found}: taken as classes; for numbers pass --task regression");
        (Task::Classification, Some(note))
    } else {
        let note = format!("{found}: taken as numbers; for classes pass --task classification");
        (Task::Regression, Some(note))
    }
}

/// The targets of the training and the test set, and the names of the classes (none for regression).
pub(crate) fn interpret(
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
                    "the target holds {value}, which is not a class; for numbers pass --model linear, \
                     or --model mlp:... with --task regression"
                )));
            }
            // Integers in numeric order: adding 0.0 makes -0 and 0 the same class.
            let key = |value: &f64| (value + 0.0) as i64;
            let [train, test] = [train, test].map(|values| values.iter().map(key).collect::<Vec<i64>>());
            index(&train, &test)
        }
        (Task::Classification, train, test) => index(&texts(train), &texts(test)),
    }
}

/// A column as text. One part of a split table may hold only numbers, but its classes are names too.
fn texts(column: Column) -> Vec<String> {
    match column {
        Column::Text(names) => names,
        Column::Numbers(values) => values.iter().map(f64::to_string).collect(),
    }
}

fn index<T: Ord + ToString>(train: &[T], test: &[T]) -> Result<([Targets; 2], Vec<String>), DataError> {
    let classes: Vec<&T> = train.iter().chain(test).collect::<BTreeSet<_>>().into_iter().collect();
    if classes.len() > CLASSES_MAX {
        return Err(DataError::Unsuitable(format!(
            "the target holds {} distinct values; at most {CLASSES_MAX} can be classes; to predict a number \
             pass --model linear or --task regression",
            classes.len()
        )));
    }
    if classes.len() < 2 {
        return Err(DataError::Unsuitable(
            "the target holds only one class; there is nothing to learn".into(),
        ));
    }
    let targets = [train, test].map(|values| {
        let position =
            |value| classes.binary_search(&value).expect("the classes were collected from these values");
        Targets::Classes(values.iter().map(|value| position(value) as u32).collect())
    });
    Ok((targets, classes.iter().map(|class| class.to_string()).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(values: &[f64]) -> Column {
        Column::Numbers(values.to_vec())
    }

    /// 43 distinct integers in 60 rows used to become classes without a word.
    #[test]
    fn text_and_integers_with_many_samples_each_are_classes() {
        let text = Column::Text(vec!["a".into()]);
        let cycle = |distinct: u32, rows: u32| {
            numbers(&(0..rows).map(|i| f64::from(i % distinct)).collect::<Vec<_>>())
        };
        for (column, expected, note) in [
            (text, Task::Classification, None),
            (cycle(2, 5), Task::Classification, Some("--task regression")),
            (cycle(3, 150), Task::Classification, Some("3 distinct integers in 150 rows: taken as classes")),
            (cycle(43, 60), Task::Regression, Some("43 distinct integers in 60 rows: taken as numbers")),
            (cycle(43, 60), Task::Regression, Some("--task classification")),
            (cycle(100, 1000), Task::Classification, Some("--task regression")),
            (cycle(101, 100_000), Task::Regression, None),
            (numbers(&[1.0, 0.5]), Task::Regression, None),
        ] {
            let (task, found) = guess([&column, &numbers(&[])]);
            assert_eq!(task, expected, "{found:?}");
            match (note, found) {
                (None, None) => {}
                (Some(note), Some(found)) => assert!(found.contains(note), "{found}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn classes_are_sorted_and_shared_by_both_sets() {
        let (targets, names) =
            interpret(numbers(&[10.0, 9.0]), numbers(&[-1.0]), Task::Classification).unwrap();
        assert_eq!(names, ["-1", "9", "10"]);
        assert_eq!(targets, [Targets::Classes(vec![2, 1]), Targets::Classes(vec![0])]);
    }

    #[test]
    fn a_target_that_does_not_fit_the_task_is_refused() {
        let text = || Column::Text(vec!["a".into(), "b".into()]);
        for (train, task, expected) in [
            (text(), Task::Regression, "holds text"),
            (numbers(&[1.5]), Task::Classification, "holds 1.5"),
            (numbers(&[1.0, 1.0]), Task::Classification, "only one class"),
        ] {
            let error = interpret(train, numbers(&[]), task).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
