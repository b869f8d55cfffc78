//! Classes that occur in the rows of a test, but not in training.

use super::{DataError, DataSource, Dataset, SharedSamples};
use crate::types::{counted, plural};

/// The maximum number of classes that a message names.
const CLASSES_SHOWN_MAX: usize = 20;

/// Returns the names of the classes, or only the first names if there are many.
pub(crate) fn join_first_classes(classes: &[String]) -> String {
    let names = classes.iter().take(CLASSES_SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    if classes.len() > CLASSES_SHOWN_MAX { names + ", ..." } else { names }
}

/// Returns the message for a class that did not occur in training. `known` lists the classes of the model.
pub(crate) fn describe_unknown_class(class: &str, known: &str) -> String {
    format!("the class `{class}` did not occur in training; the classes of the model are {known}")
}

/// Looks for test rows whose class no training row and no validation row has. Returns a message for the user if there are
/// such rows. `test_source` is the value of `--test-data`. The targets of all sets must have been measured.
///
/// # Errors
///
/// If there are such rows in `test_source`, because the user may have named the wrong file.
pub(crate) fn check_test_classes(
    dataset: &Dataset<SharedSamples>,
    validation: Option<&SharedSamples>,
    test_source: Option<&DataSource>,
) -> Result<Option<String>, DataError> {
    let row_count = |samples: &SharedSamples, class: usize| samples.statistics.class_counts[class];
    let is_known = |class: usize| {
        row_count(&dataset.train, class) > 0 || validation.is_some_and(|held| row_count(held, class) > 0)
    };
    let (known, others): (Vec<usize>, Vec<usize>) =
        (0..dataset.classes.len()).partition(|&class| is_known(class));
    let count: u64 = others.iter().map(|&class| row_count(&dataset.test, class)).sum();
    let names =
        |classes: &[usize]| classes.iter().map(|&class| dataset.classes[class].clone()).collect::<Vec<_>>();
    match (names(&others).first(), test_source) {
        (None, _) => Ok(None),
        (Some(class), Some(source)) => Err(DataError::Unsuitable(format!(
            "--test-data {source}: {}; remove the {} whose classes --data does not have, or add rows with these \
             classes to --data",
            describe_unknown_class(class, &join_first_classes(&names(&known))),
            counted(count, "test row")
        ))),
        (Some(_), None) => Ok(Some(format!(
            "{count} {} a class that no training row has ({}); the model cannot learn such a class",
            plural(count, "test row has", "test rows have"),
            join_first_classes(&names(&others))
        ))),
    }
}
