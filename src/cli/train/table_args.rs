//! The arguments of `ringtrain` that say how to read a table.

use clap::Args;

use crate::train::data::{DataSource, HeaderRow, TableOptions};

/// How to read a table.
#[derive(Args, Debug)]
#[command(next_help_heading = "Tables")]
pub(super) struct TableArgs {
    /// Read the first row of the table as data. --target is then the number of a column
    #[arg(long, conflicts_with = "header")]
    no_header: bool,

    /// Read the first row of the table as a header, even if it holds numbers
    #[arg(long)]
    header: bool,

    /// The character between the cells of a row: comma, tab, semicolon, pipe, space, or any other character
    /// [default: the one that occurs equally often in the first rows]
    #[arg(long, value_name = "CHARACTER")]
    separator: Option<String>,
}

impl TableArgs {
    /// Checks the arguments.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which argument is wrong and what to do.
    pub(super) fn into_options(self, source: &DataSource) -> Result<TableOptions, String> {
        let separator = self
            .separator
            .map(|text| text.parse().map_err(|why| format!("--separator {text}: it {why}")))
            .transpose()?;
        let header = match (self.header, self.no_header) {
            (true, _) => HeaderRow::Present,
            (_, true) => HeaderRow::Absent,
            _ => HeaderRow::Expected,
        };
        let options = TableOptions { header, separator };
        match options.first_given() {
            Some(name) if !matches!(source, DataSource::Csv(_)) => {
                Err(format!("{name} is for tables; --data {source} is not a table"))
            }
            _ => Ok(options),
        }
    }
}
