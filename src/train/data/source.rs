//! The sources of data that `--data` can name.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::compression::FileCompression;
use super::file::extension;
use super::npy::{NpzFile, file_of_array};
use super::standard_input::STANDARD_INPUT_NAME;
use super::text::name_of_files;
use super::{DataError, ELEMENTS_MAX, image_folder};

/// The maximum number of files of a table.
const FILES_MAX: usize = 100_000;

/// The error for a Parquet file in a program that was built without the feature `parquet`.
#[cfg(not(feature = "parquet"))]
pub(crate) const NO_PARQUET_MESSAGE: &str = "is a Parquet file and needs the feature `parquet`, but this program was built without \
                                         this feature; build the program with `cargo build --release --features parquet`, or \
                                         save the table as .csv";

/// A source of data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DataSource {
    /// The handwritten digits that are compiled into the program.
    Digits,
    /// A directory with IDX files, such as MNIST.
    Idx(PathBuf),
    /// A directory with a folder of PNG or JPEG images for each class.
    Images(PathBuf),
    /// A table whose cells are separated by commas, tabs or another character, plain or compressed (`.gz`, `.zip`, `.zst`).
    Csv(PathBuf),
    /// Several files with the rows of one table. All files have the same columns in the same order. The list of files
    /// is never empty.
    CsvFiles(Vec<PathBuf>),
    /// A table of text, without compression, that rank 0 reads from its standard input and sends to the other ranks.
    StandardInput,
    /// Parquet files with the rows of one table. All files have the same columns in the same order. The list of files
    /// is never empty. Only programs with the cargo feature `parquet` can read Parquet files.
    Parquet(Vec<PathBuf>),
    /// An array of features and an array of targets, each in a `.npy` file or in a `.npz` file (`d.npz/x.npy`).
    Npy(PathBuf, PathBuf),
    /// A `.npz` file with an array of features and an array of targets, or with two such pairs: the training set and the
    /// test set.
    Npz(PathBuf),
    /// A file with sparse rows in the format of LIBSVM, plain or compressed.
    Libsvm(PathBuf),
    /// The files of a text, in this order. The files may be compressed. The list is never empty.
    Text(Vec<PathBuf>),
    /// Random numbers.
    Synthetic {
        /// The number of samples.
        rows: usize,
        /// The number of features of each sample.
        columns: usize,
    },
}

impl FromStr for DataSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "digits" => return Ok(Self::Digits),
            "-" => return Ok(Self::StandardInput),
            _ => {}
        }
        if let Some(shape) = text.strip_prefix("synthetic:") {
            return parse_synthetic_shape(shape);
        }
        if let Some((features, targets)) = text.split_once(".npy,") {
            if targets.is_empty() {
                return Err("has no second file name; it needs a pair: FEATURES.npy,TARGETS.npy".into());
            }
            return Ok(Self::Npy(format!("{features}.npy").into(), targets.into()));
        }
        if text.is_empty() {
            return Err("is empty".into());
        }
        let path = Path::new(text);
        match extension(path).as_deref() {
            Some("npy") => Err("needs a pair: FEATURES.npy,TARGETS.npy".into()),
            Some("npz") if FileCompression::from_file_name(path).is_none() => Ok(Self::Npz(text.into())),
            Some("npz") => {
                Err("is a compressed .npz file; decompress it to a file whose name ends in .npz".into())
            }
            Some("csv" | "tsv" | "tab") => Ok(Self::Csv(text.into())),
            Some("libsvm" | "svmlight" | "svm") => Ok(Self::Libsvm(text.into())),
            Some("parquet" | "pq") => check_parquet_path(path).map(|()| Self::Parquet(vec![text.into()])),
            _ if image_folder::is_image_folder(path) => Ok(Self::Images(text.into())),
            _ if path.is_dir() => Ok(Self::Idx(text.into())),
            Some("txt" | "data" | "dat") => Ok(Self::Csv(text.into())),
            // A file such as `a.gz`, whose name does not say the format, is read as a table.
            None if FileCompression::from_file_name(path).is_some() => Ok(Self::Csv(text.into())),
            Some(extension) if UNSUPPORTED_COMPRESSIONS.contains(&extension) => Err(format!(
                "has the compression .{extension}, which ringtrain cannot read; decompress it, or compress the table as .gz, .zst \
                 or .zip"
            )),
            Some(extension) if UNSUPPORTED_FORMATS.contains(&extension) => Err(format!(
                "has the format .{extension}, which ringtrain cannot read; save the table as .csv"
            )),
            // IDX data is always a directory, so a file with an unknown extension is a table.
            _ if is_parquet_file(path) => check_parquet_path(path).map(|()| Self::Parquet(vec![text.into()])),
            _ if path.exists() => check_file_holds_text(path).map(|()| Self::Csv(text.into())),
            _ => Ok(Self::Idx(text.into())),
        }
    }
}

/// The extensions of files with a compression that ringtrain cannot read.
const UNSUPPORTED_COMPRESSIONS: [&str; 10] =
    ["bz2", "xz", "lzma", "lz4", "br", "z", "7z", "rar", "tar", "tgz"];
/// The extensions of tables in a format that ringtrain cannot read.
const UNSUPPORTED_FORMATS: [&str; 8] = ["xlsx", "xls", "ods", "feather", "arrow", "json", "jsonl", "pkl"];
/// The check whether a file holds text reads at most this number of bytes at the beginning of the file.
const TEXT_CHECK_BYTES: u64 = 1 << 16;

/// Returns the error for an option whose values are `-` and names of files.
pub(super) fn standard_input_among_files_error(option: &str) -> String {
    format!("{option} -: standard input cannot be one of several files; pipe the rows of all files into it")
}

/// Returns an error, because this program cannot read Parquet files.
#[cfg(not(feature = "parquet"))]
pub(super) fn check_parquet_path(_: &Path) -> Result<(), String> {
    Err(NO_PARQUET_MESSAGE.into())
}

/// Returns an error if `path` is a directory, or if it has the ending of compressed files.
#[cfg(feature = "parquet")]
pub(super) fn check_parquet_path(path: &Path) -> Result<(), String> {
    if let Some(compression) = FileCompression::from_file_name(path) {
        let ending = compression.extension();
        Err(format!(
            "is a Parquet file with the ending {ending} of compressed files; decompress the file, or remove the ending if the \
             file is not compressed"
        ))
    } else if path.is_dir() {
        let directory = path.display();
        Err(format!("is a directory; pass the Parquet files in it, for example as '{directory}/*.parquet'"))
    } else {
        Ok(())
    }
}

/// Returns whether `path` is a regular file that begins with `PAR1`, as Parquet files do. Pipes are not checked, because
/// they cannot be read twice.
fn is_parquet_file(path: &Path) -> bool {
    let mut first_bytes = [0; 4];
    path.is_file()
        && File::open(path).and_then(|mut file| file.read_exact(&mut first_bytes)).is_ok()
        && first_bytes == *b"PAR1"
}

/// Returns an error if a regular file does not hold text. Pipes are not checked, because they cannot be read twice.
fn check_file_holds_text(path: &Path) -> Result<(), String> {
    if !path.is_file() || FileCompression::from_file_name(path).is_some() {
        return Ok(());
    }
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(TEXT_CHECK_BYTES).read_to_end(&mut start));
    read.map_err(|error| format!("cannot be read ({error})"))?;
    // UTF-16 text and compressed content are refused later, with more specific errors.
    let is_refused_later = start.starts_with(b"\xff\xfe")
        || start.starts_with(b"\xfe\xff")
        || FileCompression::from_file_content(&start).is_some();
    if start.contains(&0) && !is_refused_later {
        return Err("is a file that does not hold text; ringtrain reads tables of text (.csv, .tsv), arrays (.npy, .npz) and \
                    directories of IDX files"
            .into());
    }
    Ok(())
}

/// If `value` is a pattern, returns the names of the matching files. If `value` is not a pattern, returns `value`. The
/// name of an existing file is not a pattern. A value with `.npy,` names two files and is not a pattern either.
pub(super) fn expand_file_pattern(value: &str) -> Result<Vec<String>, String> {
    let is_pattern = value.contains(['*', '?', '[']) && !value.contains(".npy,");
    if !is_pattern || Path::new(value).exists() {
        return Ok(vec![value.to_owned()]);
    }
    let mut names = Vec::new();
    for path in glob::glob(value).map_err(|error| format!("the pattern is not valid ({error})"))? {
        let path = path.map_err(|error| error.to_string())?;
        names.push(
            path.into_os_string()
                .into_string()
                .map_err(|name| format!("the name {} is not UTF-8", name.display()))?,
        );
        if names.len() > FILES_MAX {
            return Err(format!("more than {FILES_MAX} files match; pass a pattern that matches fewer"));
        }
    }
    if names.is_empty() { Err("no file matches this pattern".into()) } else { Ok(names) }
}

/// Parses the shape `ROWSxFEATURES` of random data.
fn parse_synthetic_shape(shape: &str) -> Result<DataSource, String> {
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
            Self::StandardInput => f.write_str(STANDARD_INPUT_NAME),
            Self::Idx(path) | Self::Images(path) | Self::Csv(path) | Self::Libsvm(path) | Self::Npz(path) => {
                write!(f, "{}", path.display())
            }
            Self::CsvFiles(paths) | Self::Parquet(paths) | Self::Text(paths) => {
                f.write_str(&name_of_files(paths))
            }
            Self::Npy(features, targets) => write!(f, "{},{}", features.display(), targets.display()),
            Self::Synthetic { rows, columns } => write!(f, "synthetic:{rows}x{columns}"),
        }
    }
}

impl DataSource {
    /// Returns whether the source is a table of text or a Parquet table.
    pub(crate) fn is_table(&self) -> bool {
        matches!(self, Self::StandardInput) || self.table_files().is_some()
    }

    /// Returns the files of a table of text or of a Parquet table. Returns `None` for all other sources.
    pub fn table_files(&self) -> Option<&[PathBuf]> {
        match self {
            Self::Csv(path) => Some(std::slice::from_ref(path)),
            Self::CsvFiles(paths) | Self::Parquet(paths) => Some(paths),
            _ => None,
        }
    }

    /// Returns the files that the source names. Returns no files if the source is a directory or built-in data.
    pub(crate) fn files(&self) -> Vec<&Path> {
        match self {
            Self::Csv(path) | Self::Libsvm(path) | Self::Npz(path) => vec![path],
            Self::CsvFiles(paths) | Self::Parquet(paths) | Self::Text(paths) => {
                paths.iter().map(PathBuf::as_path).collect()
            }
            Self::Npy(features, targets) => vec![file_of_array(features), file_of_array(targets)],
            Self::Digits | Self::Idx(_) | Self::Images(_) | Self::StandardInput | Self::Synthetic { .. } => {
                Vec::new()
            }
        }
    }

    /// Returns the files and the directories that the source names.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        match self {
            Self::Idx(directory) | Self::Images(directory) => vec![directory],
            _ => self.files(),
        }
    }

    /// Returns a text that names the source if the source has a test set of its own. Returns `None` for all other sources.
    pub(crate) fn name_of_own_test_set(&self) -> Option<String> {
        match self {
            Self::Idx(_) => Some("IDX data has its own test set (t10k-*)".into()),
            // If the file cannot be read, reading the data returns an error.
            Self::Npz(path) if path.is_file() => {
                NpzFile::open(path).ok()?.test_arrays().ok()??;
                Some(format!("{self} has its own test set, an array of features and an array of targets"))
            }
            _ => None,
        }
    }

    /// Returns the arrays of the test set of a `.npz` file. Returns `None` if the file has no test set, and for all other
    /// sources.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or does not have the needed arrays.
    pub(crate) fn own_test_arrays(&self) -> Result<Option<Self>, DataError> {
        let Self::Npz(path) = self else { return Ok(None) };
        Ok(NpzFile::open(path)?.test_arrays()?.map(|(features, targets)| Self::Npy(features, targets)))
    }

    /// Parses the values of the option `option`, for example `--data`. A value with the characters `*`, `?` or `[...]`
    /// is a pattern if no file has this name. A pattern is replaced by the names of the matching files, in sorted
    /// order.
    ///
    /// # Errors
    ///
    /// If a value is not a source, if no file matches a pattern, or if several files are given that
    /// are not all tables of text or all Parquet files.
    pub fn from_values(option: &str, values: &[String]) -> Result<Self, String> {
        let mut names = Vec::new();
        for value in values {
            names.extend(expand_file_pattern(value).map_err(|why| format!("{option} {value}: {why}"))?);
        }
        let mut sources = Vec::new();
        for name in &names {
            sources.push(name.parse::<Self>().map_err(|why| format!("{option} {name} {why}"))?);
        }
        if sources.len() == 1 {
            return Ok(sources.remove(0));
        }
        let mut parquet_files = Vec::new();
        let mut text_files = Vec::new();
        for source in sources {
            match source {
                Self::Csv(path) => text_files.push(path),
                Self::Parquet(paths) => parquet_files.extend(paths),
                Self::StandardInput => return Err(standard_input_among_files_error(option)),
                other => {
                    return Err(format!(
                        "{option} {other}: only tables (.csv, .tsv, .parquet) can consist of several files"
                    ));
                }
            }
        }
        match (text_files.first(), parquet_files.first()) {
            (_, None) => Ok(Self::CsvFiles(text_files)),
            (None, _) => Ok(Self::Parquet(parquet_files)),
            (Some(text), Some(parquet)) => Err(format!(
                "{option} {}: this is a Parquet file, but {} is a table of text; all files of a table must have the same format",
                parquet.display(),
                text.display()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_source_names_are_parsed() {
        let cases = [
            ("digits", Ok(DataSource::Digits)),
            ("-", Ok(DataSource::StandardInput)),
            ("./-", Ok(DataSource::Idx("./-".into()))),
            ("/data/mnist", Ok(DataSource::Idx("/data/mnist".into()))),
            ("a.csv", Ok(DataSource::Csv("a.csv".into()))),
            ("a.csv.gz", Ok(DataSource::Csv("a.csv.gz".into()))),
            ("a.csv.zip", Ok(DataSource::Csv("a.csv.zip".into()))),
            ("archive.zip", Ok(DataSource::Csv("archive.zip".into()))),
            ("a.TSV.zst", Ok(DataSource::Csv("a.TSV.zst".into()))),
            ("a9a.libsvm", Ok(DataSource::Libsvm("a9a.libsvm".into()))),
            ("a.svm.gz", Ok(DataSource::Libsvm("a.svm.gz".into()))),
            ("x.npy,y.npy", Ok(DataSource::Npy("x.npy".into(), "y.npy".into()))),
            ("d.NPZ", Ok(DataSource::Npz("d.NPZ".into()))),
            ("d.npz/a.npy,y.npy", Ok(DataSource::Npy("d.npz/a.npy".into(), "y.npy".into()))),
            ("d.npz.gz", Err("is a compressed .npz file")),
            ("synthetic:10x3", Ok(DataSource::Synthetic { rows: 10, columns: 3 })),
            ("x.npy", Err("pair")),
            ("x.npy,", Err("second file name")),
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
    fn a_pattern_is_replaced_by_the_matching_files_in_sorted_order() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["b.csv", "a.csv", "c.tsv", "d[1].csv"] {
            std::fs::write(path(name), "a,y\n1,2\n").unwrap();
        }
        let parse = |names: &[&str]| {
            let values: Vec<String> =
                names.iter().map(|name| path(name).to_str().unwrap().to_owned()).collect();
            DataSource::from_values("--data", &values)
        };
        for (names, expected) in [
            (&["[ab].csv"][..], &["a.csv", "b.csv"][..]),
            (&["c.tsv", "?.csv"], &["c.tsv", "a.csv", "b.csv"]),
            (&["*.csv"], &["a.csv", "b.csv", "d[1].csv"]),
        ] {
            let paths = expected.iter().map(|name| path(name)).collect();
            assert_eq!(parse(names).unwrap(), DataSource::CsvFiles(paths));
        }
        for names in [&["d[1].csv"][..], &["a*.csv"]] {
            assert!(matches!(parse(names), Ok(DataSource::Csv(_))));
        }
        assert_eq!(
            parse(&["a.csv", "b.csv"]).unwrap().to_string(),
            format!("{} and 1 more file", path("a.csv").display())
        );
        for (names, expected) in [
            (&["x*.csv"][..], "no file matches this pattern"),
            (&["a.csv", "folder"], "only tables"),
            (&["a***.csv"], "the pattern is not valid"),
        ] {
            let error = parse(names).unwrap_err();
            assert!(error.contains(expected) && error.starts_with("--data "), "{error}");
        }
    }

    /// Regression test: before the fix, a text file with an unknown extension was taken for IDX data, and a pair of
    /// `.npy` files was taken for a pattern.
    #[test]
    fn files_with_unknown_extensions_are_tables_if_they_hold_text() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        std::fs::create_dir(path("run[1]")).unwrap();
        std::fs::create_dir(path("folder.data")).unwrap();
        for name in ["t.psv", "noending", "t.csv.bz2", "t.xz", "t.feather", "t.foo.gz"] {
            std::fs::write(path(name), "a,y\n1,2\n").unwrap();
        }
        std::fs::write(path("t.bin"), [1, 0, 2]).unwrap();
        std::fs::write(path("utf16"), b"\xff\xfea\0").unwrap();
        for name in ["t.psv", "noending", "t.foo.gz", "utf16", "absent.txt", "absent.data", "absent.dat.gz"] {
            let name = path(name);
            assert_eq!(
                DataSource::from_values("--data", std::slice::from_ref(&name)),
                Ok(DataSource::Csv(name.into()))
            );
        }
        std::fs::create_dir_all(path("pictures/cat")).unwrap();
        std::fs::create_dir(path("flat")).unwrap();
        std::fs::write(path("flat/a.PNG"), "").unwrap();
        for name in ["pictures", "flat"] {
            let name = path(name);
            let found = DataSource::from_values("--data", std::slice::from_ref(&name));
            assert_eq!(found, Ok(DataSource::Images(name.into())));
        }
        for name in ["folder.data", "run[1]", "absent"] {
            let name = path(name);
            assert_eq!(
                DataSource::from_values("--data", std::slice::from_ref(&name)),
                Ok(DataSource::Idx(name.into()))
            );
        }
        for (name, expected) in [
            ("t.csv.bz2", "has the compression .bz2, which ringtrain cannot read; decompress it"),
            ("t.xz", "has the compression .xz"),
            ("absent.tar.gz", "has the compression .tar"),
            ("t.feather", "has the format .feather, which ringtrain cannot read; save the table as .csv"),
            ("t.bin", "is a file that does not hold text"),
        ] {
            let error = DataSource::from_values("--data", &[path(name)]).unwrap_err();
            assert!(error.contains(expected) && error.contains(name), "{error}");
        }
        let (features, targets) = (path("run[1]/X.npy"), path("run[1]/y*.npy"));
        assert_eq!(
            DataSource::from_values("--data", &[format!("{features},{targets}")]),
            Ok(DataSource::Npy(features.into(), targets.into()))
        );
    }
}
