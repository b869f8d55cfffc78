//! Reads numpy's `.npz` files. A `.npz` file is a zip archive with a `.npy` file for each array.
//!
//! In this crate, the path of an array is the path of the archive and the name of the array: `d.npz/x.npy`.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use crate::train::data::DataError;
use crate::train::data::archive::Archive;
use crate::train::data::compression::READ_BUFFER_BYTES;
use crate::train::data::file::open_file;
use crate::train::data::skippable_reader::SkippableReader;

/// The names of an array of features and of its array of targets. Upper and lower case do not matter. `train_` before or
/// `_train` after both names marks the training set, and `test` marks the test set in the same way.
const PAIR_NAMES: [(&str, &str); 3] = [("x", "y"), ("features", "targets"), ("images", "labels")];
/// A message names at most this many arrays.
const ARRAYS_SHOWN_MAX: usize = 20;

/// A `.npz` file whose list of arrays has been read.
#[derive(Debug)]
pub(crate) struct NpzFile {
    path: PathBuf,
    /// The names of all arrays.
    names: Vec<String>,
    /// The training set, or all samples.
    training: ArrayPair,
    test: Option<ArrayPair>,
}

/// The names of an array of features and of its array of targets.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ArrayPair {
    features: String,
    targets: Option<String>,
}

impl NpzFile {
    /// Reads the list of arrays, and finds the features and the targets by their names.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or if it does not have one pair of arrays for each set.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        Self::new(path, array_names(&open_archive(path)?))
    }

    /// Finds the features and the targets among the arrays `names` of the file at `path`.
    fn new(path: &Path, names: Vec<String>) -> Result<Self, DataError> {
        let [all, training, test] = ["", "train", "test"].map(|set| find_pairs(&names, set));
        match (&all[..], &training[..], &test[..]) {
            ([pair], [], [] | [_]) | ([], [pair], [] | [_]) => {
                let (training, test) = (pair.clone(), test.first().cloned());
                Ok(Self { path: path.to_owned(), names, training, test })
            }
            _ => Err(unsuitable_arrays_error(path, &names)),
        }
    }

    /// Returns the paths of the features and the targets of the training set. If the file has no test set, these arrays hold
    /// all samples.
    pub(crate) fn training_arrays(&self) -> Result<(PathBuf, PathBuf), DataError> {
        self.paths_with_targets(&self.training)
    }

    /// Returns the paths of the features and the targets of the test set.
    pub(crate) fn test_arrays(&self) -> Result<Option<(PathBuf, PathBuf)>, DataError> {
        self.test.as_ref().map(|pair| self.paths_with_targets(pair)).transpose()
    }

    /// Returns the paths of the features and the targets to which a model is applied: the test set if the file has one.
    pub(crate) fn arrays_to_predict(&self) -> (PathBuf, Option<PathBuf>) {
        let ArrayPair { features, targets } = self.test.as_ref().unwrap_or(&self.training);
        (self.path_of(features), targets.as_ref().map(|name| self.path_of(name)))
    }

    /// Returns a message for the user that names the arrays that are not used.
    pub(crate) fn describe_ignored_arrays(&self) -> Option<String> {
        let pairs = [Some(&self.training), self.test.as_ref()];
        let used: Vec<&String> = pairs
            .into_iter()
            .flatten()
            .flat_map(|pair| [Some(&pair.features), pair.targets.as_ref()])
            .flatten()
            .collect();
        let ignored: Vec<String> = self.names.iter().filter(|name| !used.contains(name)).cloned().collect();
        (!ignored.is_empty())
            .then(|| format!("{}: ignored the arrays {}", self.path.display(), join_first_names(&ignored)))
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.npy"))
    }

    fn paths_with_targets(&self, pair: &ArrayPair) -> Result<(PathBuf, PathBuf), DataError> {
        match &pair.targets {
            Some(targets) => Ok((self.path_of(&pair.features), self.path_of(targets))),
            None => Err(unsuitable_arrays_error(&self.path, &self.names)),
        }
    }
}

/// Returns all pairs of features and targets of a set. `set` is `train`, `test`, or empty for arrays that hold all samples.
fn find_pairs(names: &[String], set: &str) -> Vec<ArrayPair> {
    let find = |wanted: &'static str| {
        let spellings = match set {
            "" => vec![wanted.to_owned()],
            _ => vec![format!("{wanted}_{set}"), format!("{set}_{wanted}")],
        };
        names.iter().filter(move |name| spellings.contains(&name.to_ascii_lowercase())).cloned()
    };
    let mut pairs = Vec::new();
    for (features, targets) in PAIR_NAMES {
        for features in find(features) {
            let pair = |targets| ArrayPair { features: features.clone(), targets };
            let with_targets: Vec<ArrayPair> = find(targets).map(|name| pair(Some(name))).collect();
            pairs.extend(if with_targets.is_empty() { vec![pair(None)] } else { with_targets });
        }
    }
    pairs
}

fn unsuitable_arrays_error(path: &Path, names: &[String]) -> DataError {
    let file = path.display();
    let found =
        if names.is_empty() { "no arrays".into() } else { format!("the arrays {}", join_first_names(names)) };
    let problem = format!(
        "holds {found}; ringtrain needs two arrays with the names x and y, features and targets, or images and labels, or \
         two such pairs, one with _train and one with _test after the names; to use other arrays, pass the names of two: --data \
         {file}/FEATURES.npy,{file}/TARGETS.npy"
    );
    DataError::malformed(path, problem)
}

fn join_first_names(names: &[String]) -> String {
    let shown: Vec<&str> = names.iter().take(ARRAYS_SHOWN_MAX).map(String::as_str).collect();
    let more = if names.len() > shown.len() { ", ..." } else { "" };
    shown.join(", ") + more
}

fn open_archive(path: &Path) -> Result<Archive, DataError> {
    Archive::new(path, BufReader::with_capacity(READ_BUFFER_BYTES, open_file(path)?))
}

/// Returns the names of the arrays in an archive.
fn array_names(archive: &Archive) -> Vec<String> {
    let files = archive.files().into_iter();
    files.filter_map(|(_, file)| file.strip_suffix(".npy").map(str::to_owned)).collect()
}

/// Returns the path of the `.npz` file in which the array at `path` is. Returns `None` if `path` is not the path of an array
/// in a `.npz` file.
fn find_archive(path: &Path) -> Option<&Path> {
    let is_archive = |path: &&Path| {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npz")) && path.is_file()
    };
    path.ancestors().skip(1).find(is_archive)
}

/// Returns the path of the file in which the array at `path` is: a `.npy` file or a `.npz` file.
pub(crate) fn file_of_array(path: &Path) -> &Path {
    find_archive(path).unwrap_or(path)
}

/// Opens the array at `path`, in a `.npy` file or in a `.npz` file.
pub(super) fn open_array(path: &Path) -> Result<SkippableReader, DataError> {
    let Some(archive_path) = find_archive(path) else { return SkippableReader::open(path) };
    let archive = open_archive(archive_path)?;
    let files = archive.files();
    let wanted = path.strip_prefix(archive_path).ok();
    let Some((index, _)) = files.iter().find(|(_, name)| wanted == Some(Path::new(name))) else {
        let names = join_first_names(&array_names(&archive));
        let problem = format!("there is no such array in the file; it holds the arrays {names}");
        return Err(DataError::malformed(path, problem));
    };
    Ok(SkippableReader::Stream(archive.into_file(*index)?))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::read_npy_file;
    use super::super::tests::{StorageOrder, load_array_pair, npy_bytes};
    use super::*;
    use crate::train::data::archive::test_archives::{make_deflated_zip, make_stored_zip};

    #[test]
    fn arrays_are_found_by_their_names() {
        let path = Path::new("d.npz");
        for (names, training, test, ignored) in [
            ("x y", "x y", "", ""),
            ("y X z", "X y", "", "z"),
            ("features targets", "features targets", "", ""),
            ("Images LABELS", "Images LABELS", "", ""),
            ("x_train y_train x_test y_test", "x_train y_train", "x_test y_test", ""),
            (
                "train_images train_labels val_images test_images test_labels",
                "train_images train_labels",
                "test_images test_labels",
                "val_images",
            ),
            ("x_train y_train", "x_train y_train", "", ""),
            ("x y x_test y_test", "x y", "x_test y_test", ""),
        ] {
            let file = NpzFile::new(path, names.split(' ').map(str::to_owned).collect()).unwrap();
            let paths = |names: &str| -> Option<(PathBuf, PathBuf)> {
                let (features, targets) = names.split_once(' ')?;
                Some((format!("d.npz/{features}.npy").into(), format!("d.npz/{targets}.npy").into()))
            };
            assert_eq!(file.training_arrays().ok(), paths(training), "{names}");
            assert_eq!(file.test_arrays().unwrap(), paths(test), "{names}");
            let found = file.describe_ignored_arrays().unwrap_or_default();
            assert_eq!(
                found.split_once("ignored the arrays ").map_or("", |(_, found)| found),
                ignored,
                "{names}"
            );
        }
        let only_features = NpzFile::new(path, vec!["x".into()]).unwrap();
        assert_eq!(only_features.arrays_to_predict(), ("d.npz/x.npy".into(), None));
        let error = NpzFile::new(path, Vec::new()).unwrap_err().to_string();
        assert!(error.starts_with("d.npz: holds no arrays; ringtrain needs"), "{error}");
        let mut errors = vec![("x".to_owned(), only_features.training_arrays().unwrap_err())];
        for names in ["a b", "y", "x X y", "x y Y", "x images y", "x y x_train y_train", "x_test y_test"] {
            let found = NpzFile::new(path, names.split(' ').map(str::to_owned).collect());
            errors.push((names.replace(' ', ", "), found.expect_err(names)));
        }
        for (names, error) in errors {
            let error = error.to_string();
            let expected = format!("d.npz: holds the arrays {names}; ringtrain needs two arrays");
            assert!(
                error.starts_with(&expected) && error.contains("--data d.npz/FEATURES.npy,d.npz"),
                "{error}"
            );
        }
    }

    #[test]
    fn stored_and_compressed_arrays_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("d.npz");
        let x = npy_bytes("<f4", StorageOrder::RowMajor, "(3, 2)", &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let y = npy_bytes("|b1", StorageOrder::RowMajor, "(3,)", &[1_u8, 0, 1]);
        let files: [(&str, &[u8]); 2] = [("x.npy", &x), ("group/y.npy", &y)];
        let archives = [make_stored_zip(&files), make_deflated_zip(&files)];
        for archive in &archives {
            fs::write(&path, archive).unwrap();
            assert_eq!(read_npy_file(&path.join("x.npy")).unwrap().values, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
            assert!(load_array_pair(&path.join("x.npy"), &path.join("group/y.npy")).is_ok());
            assert_eq!(file_of_array(&path.join("group/y.npy")), path);
            let error = read_npy_file(&path.join("z.npy")).err().unwrap().to_string();
            assert!(
                error.contains(
                    "d.npz/z.npy: there is no such array in the file; it holds the arrays x, group/y"
                ),
                "{error}"
            );
        }
        let [stored, deflated] = archives;
        let mut flipped = stored;
        let start = flipped.windows(x.len()).position(|bytes| bytes == x).unwrap();
        flipped[start + x.len() - 1] ^= 1;
        let wrong_type = make_deflated_zip(&[("x.npy", b"no array")]);
        for (bytes, expected) in [
            (&flipped, "d.npz/x.npy: is truncated or corrupt (the checksum in the zip archive"),
            (&deflated[..deflated.len() / 2].to_vec(), "d.npz: is not a valid zip archive"),
            (&wrong_type, "d.npz/x.npy: is not a .npy file"),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = read_npy_file(&path.join("x.npy")).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(
            NpzFile::open(&directory.path().join("absent.npz"))
                .unwrap_err()
                .to_string()
                .contains("cannot read")
        );
    }
}
