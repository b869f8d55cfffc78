//! Reads tables of cells that are separated by a character, with or without a header.

mod dialect;
mod records;

use std::path::Path;

use csv::ByteRecord;
use ndarray::Array2;

pub use self::dialect::Separator;
use self::records::Records;
use super::{Column, DataError, ELEMENTS_MAX, Features, Table};

/// Whether the first row of a table holds the names of the columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HeaderRow {
    /// The first row should hold names. If the first row looks like data, reading the table fails, because the values of
    /// this row would be lost.
    #[default]
    Expected,
    /// The first row holds names, even if it looks like data.
    Present,
    /// The first row holds data. The name of a column is its number, counted from 0.
    Absent,
}

/// How to read a table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TableOptions {
    /// Whether the first row holds the names of the columns.
    pub header: HeaderRow,
    /// The character between the cells of a row. If `None`, the first rows decide.
    pub separator: Option<Separator>,
}

impl TableOptions {
    /// Returns the command-line name of the first option that differs from its default. Returns `None` if there is none.
    pub(crate) fn first_given(&self) -> Option<&'static str> {
        let default = Self::default().shared_options();
        let differing =
            self.shared_options().into_iter().zip(default).find(|(given, default)| given != default);
        differing.map(|((name, _), _)| name)
    }

    /// Returns the names and values of the options that must be the same on all ranks.
    pub(crate) fn shared_options(&self) -> Vec<(&'static str, String)> {
        let Self { header, separator } = self;
        vec![("--header or --no-header", format!("{header:?}")), ("--separator", format!("{separator:?}"))]
    }
}

/// Reads a table and separates the target column from the features. `target` is the name of this column or, if no column has
/// this name, its number, counted from 0. The target may hold text (class names). All other cells must be finite numbers.
///
/// # Errors
///
/// Returns an error in each of these cases. If the fault is in a line or a column, the message names it.
///
/// - The file cannot be read, is empty, or is not UTF-8 text.
/// - The file has no column `target`.
/// - Rows have different lengths, or a cell is not a finite number.
/// - The first row should be a header, but looks like data.
pub(crate) fn load(path: &Path, target: &str, options: &TableOptions) -> Result<Table, DataError> {
    let mut records = Records::open(path, options.separator)?;
    if !records.advance()? {
        return Err(records.error("is empty"));
    }
    let names = read_header(&records, options.header)?;
    let target_index = find_target(&names, target).map_err(|problem| records.error(problem))?;
    if names.len() < 2 {
        return Err(records.error(format!(
            "has no column besides the target; the separator is {} (to choose another one, pass --separator)",
            records.separator()
        )));
    }
    let mut values = Vec::new();
    let mut cells = Vec::new();
    let mut in_row = options.header == HeaderRow::Absent || records.advance()?;
    while in_row {
        records.check_length(names.len())?;
        for (index, (cell, name)) in records.row().iter().zip(&names).enumerate() {
            let fail =
                |why: String| records.error(format!("line {}, column `{name}`: {why}", records.line()));
            let cell =
                std::str::from_utf8(cell.trim_ascii()).map_err(|_| fail("the text is not UTF-8".into()))?;
            if cell.is_empty() {
                return Err(fail("the value is missing; fill it in or drop the row".into()));
            }
            if index == target_index {
                cells.push((cell.to_owned(), records.line()));
            } else {
                values.push(parse_number(cell).map_err(fail)? as f32);
            }
        }
        if values.len() as u64 > ELEMENTS_MAX {
            return Err(records.error(format!("holds more than {ELEMENTS_MAX} values")));
        }
        in_row = records.advance()?;
    }
    let rows = cells.len();
    let target = parse_target(cells)
        .map_err(|problem| records.error(format!("column `{}`: {problem}", &names[target_index])))?;
    let values =
        Array2::from_shape_vec((rows, names.len() - 1), values).expect("all rows have the same length");
    Ok(Table { features: Features::Numbers(values), target })
}

/// Returns the names of the columns. The current row of `records` is the first row.
fn read_header(records: &Records, header: HeaderRow) -> Result<Vec<String>, DataError> {
    let first = records.row();
    if header == HeaderRow::Absent {
        return Ok((0..first.len()).map(|index| index.to_string()).collect());
    }
    if header == HeaderRow::Expected && looks_like_data(first) {
        return Err(records.error(
            "the first row holds numbers, so it looks like data and not like a header; pass --no-header if the file has no \
             header, or --header if these are the columns' names",
        ));
    }
    let name = |(index, cell): (usize, &[u8])| {
        let text = std::str::from_utf8(cell.trim_ascii()).map(str::to_owned);
        text.map_err(|_| {
            records.error(format!(
                "line {}, column number {}: the text is not UTF-8",
                records.line(),
                index + 1
            ))
        })
    };
    first.iter().enumerate().map(name).collect()
}

/// Returns whether a first row is probably a sample: at most one of its cells (the target) is not a number. A row with the
/// numbers 0, 1, 2, ... is a header, because pandas writes these numbers above columns without names.
fn looks_like_data(first: &ByteRecord) -> bool {
    let cells = first.iter().filter_map(|cell| std::str::from_utf8(cell.trim_ascii()).ok());
    let numbers: Vec<&str> = cells.filter(|cell| cell.parse::<f64>().is_ok()).collect();
    let counted = numbers.iter().enumerate().all(|(index, cell)| cell.parse() == Ok(index));
    numbers.len() + 1 >= first.len() && !counted
}

/// Parses a cell as a number that is finite as an f32.
fn parse_number(cell: &str) -> Result<f64, String> {
    match cell.parse::<f64>() {
        Ok(value) if (value as f32).is_finite() => Ok(value),
        Ok(_) => Err(format!("`{cell}` is not a finite number")),
        Err(_) => Err(format!("`{cell}` is not a number")),
    }
}

/// Returns numbers if every cell of the target is a number, and class names otherwise. If all cells are numbers, `nan` and
/// `inf` are errors. `cells` holds each cell with its line number.
fn parse_target(cells: Vec<(String, u64)>) -> Result<Column, String> {
    if cells.iter().any(|(cell, _)| cell.parse::<f64>().is_err()) {
        return Ok(Column::Text(cells.into_iter().map(|(cell, _)| cell).collect()));
    }
    let values =
        cells.iter().map(|(cell, line)| parse_number(cell).map_err(|why| format!("line {line}: {why}")));
    Ok(Column::Numbers(values.collect::<Result<_, _>>()?))
}

/// Returns the index of the column with the name or number `target`.
fn find_target(header: &[String], target: &str) -> Result<usize, String> {
    let mut named = header.iter().enumerate().filter(|(_, name)| *name == target).map(|(index, _)| index);
    match (named.next(), named.next()) {
        (Some(index), None) => return Ok(index),
        (Some(_), Some(_)) => {
            return Err(format!(
                "has more than one column `{target}`; pass the number of the column instead"
            ));
        }
        (None, _) => {}
    }
    target.parse().ok().filter(|&index| index < header.len()).ok_or_else(|| {
        let names: Vec<&str> = header.iter().take(20).map(String::as_str).collect();
        let more = if header.len() > names.len() { ", ..." } else { "" };
        format!("has no column `{target}`; its columns are {}{more}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8], target: &str) -> Result<Table, DataError> {
        parse_as(bytes, target, HeaderRow::Expected)
    }

    fn parse_as(bytes: &[u8], target: &str, header: HeaderRow) -> Result<Table, DataError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("table.csv");
        std::fs::write(&path, bytes).unwrap();
        load(&path, target, &TableOptions { header, ..TableOptions::default() })
    }

    /// Regression test: a table without a header lost its first row.
    #[test]
    fn a_first_row_of_numbers_is_refused_without_a_header_option() {
        for (bytes, target) in [(&b"1,2,3\n4,5,6\n"[..], "2"), (b"5.1,3.5,setosa\n6,2,virginica\n", "2")] {
            let error = parse_as(bytes, target, HeaderRow::Expected).unwrap_err().to_string();
            assert!(error.contains("--no-header") && error.contains("--header if"), "{error}");
            assert_eq!(parse_as(bytes, target, HeaderRow::Absent).unwrap().features.rows(), 2);
            assert_eq!(parse_as(bytes, target, HeaderRow::Present).unwrap().features.rows(), 1);
        }
        for header in
            [&b"0,1,2\n4,5,6\n"[..], b"0,1,target\n4,5,6\n", b"2019,rooms,price\n1,2,3\n", b",0,1\n0,7,8\n"]
        {
            assert_eq!(parse_as(header, "2", HeaderRow::Expected).unwrap().features.rows(), 1);
        }
    }

    #[test]
    fn the_target_is_found_by_name_or_number() {
        for target in ["y", "1"] {
            let table = parse(b"a,y,b\n1, 5 ,2\n3,6,4\n", target).unwrap();
            assert_eq!(table.features, Features::Numbers(ndarray::array![[1.0, 2.0], [3.0, 4.0]]));
            assert_eq!(table.target, Column::Numbers(vec![5.0, 6.0]));
        }
        let table = parse(b"a,kind\n1,cat\n2,7\n", "kind").unwrap();
        assert_eq!(table.target, Column::Text(vec!["cat".into(), "7".into()]));
    }

    #[test]
    fn separators_marks_and_line_ends_of_every_kind_are_read() {
        let expected = parse(b"a,y\n1,2\n3,4\n", "y").unwrap();
        for bytes in [
            &b"\xef\xbb\xbfa,y\n1,2\n3,4\n"[..],
            b"\xef\xbb\xbf\"a\";y\n1;2\n3;4\n",
            b"a\ty\r\n1\t2\n\r\n3\t4",
            b"a|y\r1|2\n3|4\r\n",
            b"a y\n1 2\n3 4\n",
            b"\"a\", \"y\"\n\"1\", 2 \n 3,\"4\"\n",
        ] {
            assert_eq!(parse(bytes, "y").unwrap(), expected, "{}", bytes.escape_ascii());
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("table.csv");
        std::fs::write(&path, b"a:y\n1:2\n3:4\n").unwrap();
        let options = TableOptions { separator: Some(":".parse().unwrap()), ..TableOptions::default() };
        assert_eq!(load(&path, "y", &options).unwrap(), expected);
        let error = load(&path, "0", &TableOptions::default()).unwrap_err().to_string();
        assert!(error.contains("no column besides the target") && error.contains("--separator"), "{error}");
    }

    #[test]
    fn errors_name_the_line_and_the_column_of_bad_cells() {
        let cases: [(&[u8], &str); 15] = [
            (b"a,y\n1,2\nabc,3\n", "line 3, column `a`: `abc` is not a number"),
            (b"a,y\n1,2\n\"x\ny\",3\n4,z\n", "line 3, column `a`"),
            (b"a,y\nNaN,3\n", "line 2, column `a`: `NaN` is not a finite number"),
            (b"a,y\n1e300,3\n", "line 2, column `a`: `1e300` is not a finite number"),
            (b"a,y\n1,inf\n", "column `y`: line 2: `inf` is not a finite number"),
            (b"a,y\n,3\n", "line 2, column `a`: the value is missing"),
            (b"a,y\n3,\n", "line 2, column `y`: the value is missing"),
            (b"a,y\n1,2,3\n", "line 2 has 3 cells, but the first row has 2"),
            (b"a,y\n1\n", "line 2 has 1 cells, but the first row has 2"),
            (b"a,b\n1,2\n", "has no column `y`; its columns are a, b"),
            (b"y,y\n1,2\n", "more than one column `y`"),
            (b"y\n1\n", "no column besides"),
            (b"a,y\n\xff,2\n", "line 2, column `a`: the text is not UTF-8"),
            (b"y,\xff\n1,2\n", "line 1, column number 2: the text is not UTF-8"),
            (
                b"a,y\n\"1\n2,3\n4,5\n",
                "line 2 has 1 cells, but the first row has 2; a cell of this row contains a line break",
            ),
        ];
        for (bytes, expected) in cases {
            let error = parse(bytes, "y").unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("table.csv"), "{error} / {expected}");
        }
        assert!(parse(b"", "y").unwrap_err().to_string().contains("is empty"));
        let error = load(Path::new("/nonexistent/x.csv"), "y", &TableOptions::default()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/x.csv"), "{error}");
    }
}
