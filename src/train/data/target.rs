//! What the target means: numbers to come close to, or classes to choose from.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::{Column, DataError};

/// The most classes that a target may hold.
const CLASSES_MAX: usize = 10_000;
/// A numeric target with at most this many distinct values, all integers, is taken to hold classes.
const CLASSES_GUESSED_MAX: usize = 100;

/// What is learned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Which class a sample belongs to.
    Classification,
    /// A number for each sample.
    Regression,
}

/// The targets of samples.
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

/// What a target is if nobody says: text, and at most 100 distinct integers, are classes.
pub(crate) fn guess(columns: [&Column; 2]) -> Task {
    let mut distinct = BTreeSet::new();
    for column in columns {
        let Column::Numbers(values) = column else { return Task::Classification };
        for value in values {
            distinct.insert(value.to_bits());
            if value.fract() != 0.0 || distinct.len() > CLASSES_GUESSED_MAX {
                return Task::Regression;
            }
        }
    }
    Task::Classification
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
                    "the target holds {value}, which is not a class; for numbers take --model linear, \
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

/// A column as text. One part of a split table may happen to hold only numbers; its classes are names all the same.
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
            "the target holds {} distinct values; at most {CLASSES_MAX} can be classes (is it a number to predict? \
             then take --model linear or --task regression)",
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

    #[test]
    fn few_integers_and_text_are_classes() {
        let text = Column::Text(vec!["a".into()]);
        let many: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(guess([&numbers(&[1.0, 2.0]), &numbers(&[])]), Task::Classification);
        assert_eq!(guess([&text, &text]), Task::Classification);
        assert_eq!(guess([&numbers(&many[1..]), &numbers(&[])]), Task::Classification);
        assert_eq!(guess([&numbers(&many), &numbers(&[])]), Task::Regression);
        assert_eq!(guess([&numbers(&[1.0]), &numbers(&[0.5])]), Task::Regression);
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
