//! The weights of classes: balanced, from a list, or from a file.

use std::convert::Infallible;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::data::{DataError, join_first_classes};
use crate::types::{counted, plural};

/// The maximum size in bytes of a file with class weights.
const CLASS_WEIGHTS_FILE_BYTES_MAX: u64 = 1 << 24;

/// How much the samples of each class count.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum ClassWeights {
    /// All classes have the weight 1.
    #[default]
    Equal,
    /// The weight of a class is samples / (classes * samples of the class), so that all classes have the same total
    /// weight. Classes without training samples do not count. scikit-learn uses the same formula for
    /// `class_weight="balanced"`.
    Balanced,
    /// A weight for each class, in the order of the classes.
    List(Vec<f32>),
    /// A CSV file with two columns: the name of a class and its weight. The first row may be the header
    /// `class,weight`.
    File(PathBuf),
}

/// Parses `balanced`, a list of numbers or the path of a file.
impl FromStr for ClassWeights {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        if text == "balanced" {
            return Ok(Self::Balanced);
        }
        let numbers: Result<Vec<f32>, _> = text.split(',').map(|word| word.trim().parse()).collect();
        Ok(numbers.map_or_else(|_| Self::File(text.into()), Self::List))
    }
}

/// Returns `weight`, or an error if `weight` is negative or not finite.
fn check_weight(weight: f32) -> Result<f32, String> {
    if weight.is_finite() && weight >= 0.0 {
        Ok(weight)
    } else {
        Err(format!("`{weight}` is not a weight; a weight is a finite number of at least 0"))
    }
}

/// Returns an error if a weight is negative or not finite, or if all weights are 0.
pub(crate) fn check_class_weights(weights: &[f32]) -> Result<(), String> {
    weights.iter().try_for_each(|&weight| check_weight(weight).map(drop))?;
    if weights.iter().all(|&weight| weight == 0.0) {
        return Err("all weights are 0; at least one must be above 0".into());
    }
    Ok(())
}

impl ClassWeights {
    /// Returns the weight of each class. `counts` holds the number of training samples of each class.
    pub(crate) fn weight_of_each_class(
        &self,
        classes: &[String],
        counts: &[u64],
    ) -> Result<Vec<f32>, DataError> {
        match self {
            Self::Equal => Ok(vec![1.0; classes.len()]),
            Self::Balanced => {
                let present = counts.iter().filter(|&&count| count > 0).count().max(1);
                let each = counts.iter().sum::<u64>() as f64 / present as f64;
                // The weight of a class without training samples is never used.
                Ok(counts.iter().map(|&count| (each / count.max(1) as f64) as f32).collect())
            }
            Self::List(weights) => {
                let fail = |why: String| DataError::Unsuitable(format!("--class-weights: {why}"));
                check_class_weights(weights).map_err(fail)?;
                if weights.len() != classes.len() {
                    return Err(fail(format!(
                        "{} {} given, but the target has {} classes, in this order: {}",
                        counted(weights.len(), "weight"),
                        plural(weights.len(), "is", "are"),
                        classes.len(),
                        join_first_classes(classes),
                    )));
                }
                Ok(weights.clone())
            }
            Self::File(path) => read_weights_file(path, classes),
        }
    }
}

fn read_weights_file(path: &Path, classes: &[String]) -> Result<Vec<f32>, DataError> {
    let unreadable = |error| DataError::unreadable(path, error);
    let mut text = Vec::new();
    // Limit the read itself, because a device or a pipe has no length that could be checked.
    let file = File::open(path).map_err(unreadable)?;
    file.take(CLASS_WEIGHTS_FILE_BYTES_MAX + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > CLASS_WEIGHTS_FILE_BYTES_MAX {
        let problem = format!(
            "has more than {CLASS_WEIGHTS_FILE_BYTES_MAX} bytes, which is the limit for class weights"
        );
        return Err(DataError::malformed(path, problem));
    }
    parse_weights_file(&text, classes).map_err(|problem| DataError::malformed(path, problem))
}

/// Parses the content of a file of weights. An error names the line and the column.
fn parse_weights_file(text: &[u8], classes: &[String]) -> Result<Vec<f32>, String> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let mut weights: Vec<Option<f32>> = vec![None; classes.len()];
    let mut reader =
        csv::ReaderBuilder::new().has_headers(false).flexible(true).trim(csv::Trim::All).from_reader(text);
    for (index, record) in reader.records().enumerate() {
        let record = record.map_err(|error| error.to_string())?;
        let line = record.position().map_or(0, |start| line_of_record(text, start));
        let [name, weight] = record.iter().collect::<Vec<_>>()[..] else {
            return Err(format!(
                "line {line} has {} cells, but needs 2: a class and its weight",
                record.len()
            ));
        };
        if index == 0 && (name, weight) == ("class", "weight") {
            continue;
        }
        let Some(class) = classes.iter().position(|class| class == name) else {
            return Err(format!(
                "line {line}, column 1: the target has no class `{name}`; its classes are {}",
                join_first_classes(classes)
            ));
        };
        let number = weight.parse().map_err(|_| format!("`{weight}` is not a number")).and_then(check_weight);
        let number = number.map_err(|why| format!("line {line}, column 2: {why}"))?;
        if weights[class].replace(number).is_some() {
            return Err(format!("line {line}, column 1: the class `{name}` has a weight in an earlier line"));
        }
    }
    let complete: Option<Vec<f32>> = weights.iter().copied().collect();
    let Some(complete) = complete else {
        let missing = classes.iter().zip(&weights).filter(|(_, weight)| weight.is_none());
        let missing: Vec<String> = missing.map(|(class, _)| class.clone()).collect();
        return Err(format!("has no weight for {}; add a line for each class", join_first_classes(&missing)));
    };
    check_class_weights(&complete)?;
    Ok(complete)
}

/// Returns the number of the line in which a record begins. `start` is the position of the record according to the crate
/// `csv`. If there are empty lines before the record, `start` is the position of the first empty line.
fn line_of_record(text: &[u8], start: &csv::Position) -> u64 {
    let rest = text.get(start.byte() as usize..).unwrap_or_default();
    let skipped = rest.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
    start.line() + skipped.filter(|&&byte| byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes() -> Vec<String> {
        ["cat", "dog", "newt, red"].map(str::to_owned).to_vec()
    }

    /// scikit-learn's `compute_class_weight("balanced", ...)` gives these weights.
    #[test]
    fn balanced_weights_are_those_of_scikit_learn() {
        let weights = ClassWeights::Balanced.weight_of_each_class(&classes(), &[6, 2, 4]).unwrap();
        assert_eq!(weights, [12.0 / 18.0, 2.0, 1.0]);
        assert_eq!(ClassWeights::Equal.weight_of_each_class(&classes(), &[6, 2, 4]).unwrap(), [1.0; 3]);
        assert_eq!(
            ClassWeights::Balanced.weight_of_each_class(&classes(), &[3, 0, 1]).unwrap()[..1],
            [2.0 / 3.0]
        );
    }

    #[test]
    fn class_weights_are_parsed_from_a_word_a_list_or_a_path() {
        for (text, expected) in [
            ("balanced", ClassWeights::Balanced),
            ("1,2.5", ClassWeights::List(vec![1.0, 2.5])),
            ("weights.csv", ClassWeights::File("weights.csv".into())),
            ("1,x", ClassWeights::File("1,x".into())),
        ] {
            assert_eq!(text.parse::<ClassWeights>(), Ok(expected));
        }
    }

    #[test]
    fn a_file_must_name_each_class_once() {
        let text = "\u{feff}class,weight\r\ndog, 2\r\n\"newt, red\",0\r\ncat,1e-3\r\n";
        assert_eq!(parse_weights_file(text.as_bytes(), &classes()).unwrap(), [1e-3, 2.0, 0.0]);
        for (text, expected) in [
            ("cat,1\ndog\n", "line 2 has 1 cells"),
            ("cat,1\n\ncow,2\n", "line 3, column 1: the target has no class `cow`; its classes are cat, dog"),
            ("cat,1\ncat,1\n", "line 2, column 1: the class `cat` has a weight in an earlier line"),
            ("cat,heavy\n", "line 1, column 2: `heavy` is not a number"),
            ("cat,-1\n", "line 1, column 2: `-1` is not a weight"),
            ("cat,nan\n", "line 1, column 2: `NaN` is not a weight"),
            ("cat,1\n", "has no weight for dog, newt, red; add a line for each class"),
            ("cat,0\ndog,0\n\"newt, red\",0\n", "all weights are 0"),
            ("", "has no weight for cat, dog"),
            ("cat,\u{0}\n", "not a number"),
        ] {
            let error = parse_weights_file(text.as_bytes(), &classes()).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        assert!(parse_weights_file(b"cat,\xff\n", &classes()).is_err());
    }

    /// Regression test: before the fix, a device was read without a limit.
    #[test]
    fn endless_files_are_refused() {
        let weights = ClassWeights::File("/dev/zero".into());
        let error = weights.weight_of_each_class(&classes(), &[1; 3]).unwrap_err().to_string();
        assert_eq!(error, "/dev/zero: has more than 16777216 bytes, which is the limit for class weights");
    }

    #[test]
    fn a_list_must_have_a_weight_for_each_class() {
        for (list, expected) in [
            (vec![1.0, 2.0], "2 weights are given, but the target has 3 classes, in this order: cat, dog"),
            (vec![0.0; 3], "all weights are 0"),
            (vec![1.0, f32::INFINITY, 1.0], "`inf` is not a weight"),
        ] {
            let error =
                ClassWeights::List(list).weight_of_each_class(&classes(), &[1; 3]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
