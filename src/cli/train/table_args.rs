//! The arguments of `ringtrain` that say how to read a table.

use clap::Args;

use crate::train::data::{DataSource, HeaderRow, Separator, TableOptions};

/// How rows and cells are separated, and whether the table has a header.
#[derive(Args, Debug)]
pub(super) struct TableFormatArgs {
    /// Read the first row of the table as data, not as column names. In training, give --target as a column number.
    /// In predict and eval, the columns must have the same order as in training. The table may have all columns of the
    /// training table, all columns except the target, or only the features
    #[arg(long, conflicts_with = "header")]
    no_header: bool,

    /// Read the first row of the table as column names, even if the row holds numbers
    #[arg(long)]
    header: bool,

    /// The character between two cells of a row: comma, tab, semicolon, pipe, space, or any other character [default:
    /// the first rows decide between comma, tab, semicolon, pipe and space]
    #[arg(long, value_name = "CHARACTER")]
    separator: Option<String>,
}

impl TableFormatArgs {
    /// Returns whether the table has a header row, and the separator of its cells. The separator is `None` without
    /// `--separator`.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says what is wrong with `--separator`.
    pub(super) fn parse_header_and_separator(&self) -> Result<(HeaderRow, Option<Separator>), String> {
        let parse_separator =
            |text: &String| text.parse().map_err(|why| format!("--separator {text}: it {why}"));
        let header = match (self.header, self.no_header) {
            (true, _) => HeaderRow::Present,
            (_, true) => HeaderRow::Absent,
            _ => HeaderRow::Expected,
        };
        Ok((header, self.separator.as_ref().map(parse_separator).transpose()?))
    }
}

/// How to read a table.
#[derive(Args, Debug)]
#[command(next_help_heading = "Tables")]
pub(super) struct TableArgs {
    #[command(flatten)]
    format: TableFormatArgs,

    /// What to do with missing values in features: empty cells, ?, NA, N/A, NaN and null. error: stop. drop: leave
    /// out the row. mean: replace a missing number by the mean of its column in the training rows. indicator: as
    /// mean, and add an input that is 1 if the number is missing, otherwise 0. With mean and indicator, a missing
    /// text is a category of its own. Rows without a target are always left out
    #[arg(long, value_name = "error|drop|mean|indicator", default_value = "error")]
    missing: String,

    /// Use only these columns as features: their names, or their numbers counted from 0
    #[arg(long, value_name = "COLUMN,COLUMN,...", value_delimiter = ',')]
    features: Vec<String>,

    /// Do not use these columns as features: their names, or their numbers counted from 0
    #[arg(long, value_name = "COLUMN,COLUMN,...", value_delimiter = ',')]
    drop: Vec<String>,

    /// Read these columns as text, even if they hold numbers. By default, a column is text if at least half of its
    /// first values are not numbers. In a Parquet file, the type of the column decides
    #[arg(long, value_name = "COLUMN,COLUMN,...", value_delimiter = ',')]
    categorical: Vec<String>,

    /// These columns hold dates such as 2024-03-01 or 2024-03-01 17:30:05. Each date becomes the number of days
    /// since 1970-01-01. In a Parquet file, columns of dates and timestamps need no option
    #[arg(long, value_name = "COLUMN,COLUMN,...", value_delimiter = ',')]
    dates: Vec<String>,

    /// The maximal number of inputs for one text column. Each distinct value of the column has an input, which is 1
    /// in the rows with this value and 0 in all other rows. If a column has more than COUNT distinct values,
    /// ringtrain hashes them to COUNT inputs
    #[arg(long, value_name = "COUNT", default_value_t = 256)]
    max_categories: u32,
}

/// The maximum of `--max-categories`. The index of a category is stored as an f32, which can represent all indices up
/// to this maximum.
const CATEGORIES_MAX: u32 = 1 << 16;

impl TableArgs {
    /// Checks the arguments.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which argument is wrong and what to do.
    pub(super) fn into_table_options(self, source: &DataSource) -> Result<TableOptions, String> {
        let (header, separator) = self.format.parse_header_and_separator()?;
        let missing = self.missing.parse().map_err(|why| format!("--missing {}: it {why}", self.missing))?;
        if !(2..=CATEGORIES_MAX).contains(&self.max_categories) {
            return Err(format!(
                "--max-categories {}: it must be from 2 to {CATEGORIES_MAX}",
                self.max_categories
            ));
        }
        let options = TableOptions {
            header,
            separator,
            missing,
            features: self.features,
            drop: self.drop,
            categorical: self.categorical,
            dates: self.dates,
            categories_max: self.max_categories as usize,
        };
        match options.name_of_first_given_option() {
            Some(name) if !source.is_table() => {
                Err(format!("{name} is for tables; --data {source} is not a table"))
            }
            Some(name)
                if matches!(source, DataSource::Parquet(_)) && options.has_options_of_text_tables() =>
            {
                Err(format!("{name} is for tables of text; --data {source} is a Parquet file"))
            }
            _ => Ok(options),
        }
    }
}
