//! The formats of data that `--format` can name.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::DataSource;
use super::source::{check_parquet_path, expand_file_pattern, standard_input_among_files_error};

/// A format of the files or the directory that `--data` names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataFormat {
    /// A table of text, such as CSV.
    Table,
    /// A table in Parquet files.
    Parquet,
    /// Sparse rows as text, in the format of LIBSVM and `SVMlight`.
    Libsvm,
    /// A directory of IDX files.
    Idx,
    /// A directory with a folder of images for each class.
    Images,
    /// Plain text.
    Text,
}

impl DataFormat {
    const NAMES: [(Self, &'static str); 6] = [
        (Self::Table, "table"),
        (Self::Parquet, "parquet"),
        (Self::Libsvm, "libsvm"),
        (Self::Idx, "idx"),
        (Self::Images, "images"),
        (Self::Text, "text"),
    ];
}

impl DataSource {
    /// Creates a data source from `values`, the values of the option `option`, in the format `format`. Replaces
    /// patterns by the names of files, as [`from_values`](Self::from_values) does.
    ///
    /// # Errors
    ///
    /// If no file matches a pattern, or if there are several values and the format takes only one.
    pub fn from_values_with_format(
        option: &str,
        values: &[String],
        format: DataFormat,
    ) -> Result<Self, String> {
        if values.iter().any(|value| value == "-") {
            return match format {
                DataFormat::Table if values.len() == 1 => Ok(Self::StandardInput),
                DataFormat::Table => Err(standard_input_among_files_error(option)),
                _ => Err(format!(
                    "{option} -: standard input must hold a table of text, and not the format {format}; pass the name of a file"
                )),
            };
        }
        let mut paths: Vec<PathBuf> = Vec::new();
        for value in values {
            let names = expand_file_pattern(value).map_err(|why| format!("{option} {value}: {why}"))?;
            paths.extend(names.into_iter().map(PathBuf::from));
        }
        match (format, paths.len()) {
            (DataFormat::Table, 1) => Ok(Self::Csv(paths.remove(0))),
            (DataFormat::Table, _) => Ok(Self::CsvFiles(paths)),
            (DataFormat::Parquet, _) => {
                for path in &paths {
                    check_parquet_path(path).map_err(|why| format!("{option} {} {why}", path.display()))?;
                }
                Ok(Self::Parquet(paths))
            }
            (DataFormat::Text, _) => Ok(Self::Text(paths)),
            (DataFormat::Libsvm, 1) => Ok(Self::Libsvm(paths.remove(0))),
            (DataFormat::Idx, 1) => Ok(Self::Idx(paths.remove(0))),
            (DataFormat::Images, 1) => Ok(Self::Images(paths.remove(0))),
            (DataFormat::Libsvm | DataFormat::Idx | DataFormat::Images, count) => {
                Err(format!("{option} has {count} values, but --format {format} takes one"))
            }
        }
    }
}

impl fmt::Display for DataFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMES.iter().find(|(format, _)| format == self);
        f.write_str(named.map_or("", |(_, name)| name))
    }
}

impl FromStr for DataFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::NAMES.iter().find(|(_, name)| *name == text);
        named.map(|(format, _)| *format).ok_or_else(|| {
            let names: Vec<&str> = Self::NAMES.iter().map(|(_, name)| *name).collect();
            format!("is not one of {}", names.join(", "))
        })
    }
}
