//! Sources of data, as `--data` names them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::file::extension;
use super::synthetic::SyntheticTarget;
use super::{
    DataError, Dataset, ELEMENTS_MAX, Header, Samples, Table, Task, csv, digits, idx, npy, split, synthetic,
    target,
};

/// A source of data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DataSource {
    /// The handwritten digits that the program contains.
    Digits,
    /// A directory of IDX files.
    Idx(PathBuf),
    /// A table: `.csv` or, separated by tabs, `.tsv`; plain or `.gz`.
    Csv(PathBuf),
    /// Features and targets as numpy saves them.
    Npy(PathBuf, PathBuf),
    /// Random numbers.
    Synthetic {
        /// Samples.
        rows: usize,
        /// Features of each.
        columns: usize,
    },
}

impl FromStr for DataSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "digits" {
            return Ok(Self::Digits);
        }
        if let Some(shape) = text.strip_prefix("synthetic:") {
            return parse_synthetic(shape);
        }
        if let Some((features, targets)) = text.split_once(".npy,") {
            if targets.is_empty() {
                return Err("lacks the second name: it needs a pair, FEATURES.npy,TARGETS.npy".into());
            }
            return Ok(Self::Npy(format!("{features}.npy").into(), targets.into()));
        }
        if text.is_empty() {
            return Err("is empty".into());
        }
        match extension(Path::new(text)).as_deref() {
            Some("npy") => Err("needs a pair: FEATURES.npy,TARGETS.npy".into()),
            Some("csv" | "tsv") => Ok(Self::Csv(text.into())),
            _ => Ok(Self::Idx(text.into())),
        }
    }
}

fn parse_synthetic(shape: &str) -> Result<DataSource, String> {
    let (rows, columns) = shape
        .split_once('x')
        .and_then(|(rows, columns)| Some((rows.parse().ok()?, columns.parse().ok()?)))
        .ok_or("needs a shape, such as synthetic:10000x64")?;
    let elements = (rows as u64).checked_mul(columns as u64);
    if rows < 2 || columns == 0 || elements.is_none_or(|elements| elements > ELEMENTS_MAX) {
        return Err(format!("needs at least 2 rows, 1 feature, and at most {ELEMENTS_MAX} values"));
    }
    Ok(DataSource::Synthetic { rows, columns })
}

impl fmt::Display for DataSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Digits => f.write_str("digits"),
            Self::Idx(path) | Self::Csv(path) => write!(f, "{}", path.display()),
            Self::Npy(features, targets) => write!(f, "{},{}", features.display(), targets.display()),
            Self::Synthetic { rows, columns } => write!(f, "synthetic:{rows}x{columns}"),
        }
    }
}

/// How a source is read.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LoadOptions {
    /// The target's column in a table: its name or number.
    pub target: Option<String>,
    /// Whether a table has a header.
    pub header: Header,
    /// The part of the rows that is kept for testing, if the source has no test set.
    pub test_fraction: f64,
    /// What is learned; `None` if the target decides, see [`Targets`](super::Targets).
    pub task: Option<Task>,
}

impl DataSource {
    /// Reads the data, splits off a test set if it has none, and interprets its target.
    ///
    /// # Errors
    ///
    /// Anything wrong with the files ([`DataError`] names file and line), or a target that does not fit the task.
    pub fn load(&self, options: &LoadOptions) -> Result<Dataset, DataError> {
        let one = |table: Table| split::split(&table, options.test_fraction);
        let (train, test) = match self {
            Self::Digits => one(digits::load())?,
            Self::Idx(directory) => idx::load(directory)?,
            Self::Csv(path) => {
                let target = options.target.as_deref().ok_or_else(|| {
                    DataError::malformed(path, "is a table: name the column to predict with --target")
                })?;
                one(csv::load(path, target, options.header)?)?
            }
            Self::Npy(features, targets) => one(npy::load(features, targets)?)?,
            &Self::Synthetic { rows, columns } => {
                let kind = if options.task == Some(Task::Regression) {
                    SyntheticTarget::Numbers
                } else {
                    SyntheticTarget::Classes
                };
                one(synthetic::load(rows, columns, kind))?
            }
        };
        if train.features.rows() == 0 || train.features.columns() == 0 {
            return Err(DataError::Unsuitable(format!("{self} holds no samples")));
        }
        let mut notes = Vec::new();
        let task = match (self, options.task) {
            (_, Some(task)) => task,
            // Their targets are classes.
            (Self::Digits | Self::Idx(_) | Self::Synthetic { .. }, None) => Task::Classification,
            (Self::Csv(_) | Self::Npy(..), None) => {
                let (task, note) = target::guess([&train.target, &test.target]);
                notes.extend(note);
                task
            }
        };
        let ([train_targets, test_targets], classes) = target::interpret(train.target, test.target, task)?;
        Ok(Dataset {
            name: self.to_string(),
            train: Samples { features: train.features, targets: train_targets },
            test: Samples { features: test.features, targets: test_targets },
            classes,
            tabular: !matches!(self, Self::Digits | Self::Idx(_)),
            notes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sources() {
        let cases = [
            ("digits", Ok(DataSource::Digits)),
            ("/data/mnist", Ok(DataSource::Idx("/data/mnist".into()))),
            ("a.csv", Ok(DataSource::Csv("a.csv".into()))),
            ("a.csv.gz", Ok(DataSource::Csv("a.csv.gz".into()))),
            ("x.npy,y.npy", Ok(DataSource::Npy("x.npy".into(), "y.npy".into()))),
            ("synthetic:10x3", Ok(DataSource::Synthetic { rows: 10, columns: 3 })),
            ("x.npy", Err("pair")),
            ("x.npy,", Err("second name")),
            ("synthetic:10", Err("shape")),
            ("synthetic:0x3", Err("at least")),
            ("synthetic:99999999x99999999", Err("at most")),
            ("synthetic:18446744073709551615x18446744073709551615", Err("at most")),
            ("", Err("empty")),
        ];
        for (text, expected) in cases {
            match (text.parse::<DataSource>(), expected) {
                (Ok(source), Ok(expected)) => assert_eq!(source, expected),
                (Err(error), Err(expected)) => assert!(error.contains(expected), "{error}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }

    #[test]
    fn synthetic_data_suits_the_task() {
        let source = DataSource::Synthetic { rows: 100, columns: 4 };
        let load = |task, test_fraction| {
            source.load(&LoadOptions { test_fraction, task, ..LoadOptions::default() }).unwrap()
        };
        assert_eq!(load(None, 0.2).task(), Task::Classification);
        let dataset = load(Some(Task::Regression), 0.2);
        assert_eq!((dataset.task(), dataset.train.len(), dataset.test.len()), (Task::Regression, 80, 20));
        assert_ne!(dataset.digest(), load(Some(Task::Regression), 0.3).digest());
    }
}
