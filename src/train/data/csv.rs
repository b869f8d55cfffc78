//! Comma-separated values with a header row.

use std::path::Path;

use ndarray::Array2;

use super::file::{extension, open, stream_error};
use super::{Column, DataError, ELEMENTS_MAX, Features, Table};

/// Reads a table of numbers and takes the column `target` out of it: a column of that name or, where there is none, of
/// that number, counted from 0. The target may hold text (class names); everything else must be finite numbers.
///
/// # Errors
///
/// A file that cannot be read, is empty, has no such column, has rows of different lengths, or cells that are no numbers;
/// line and column are named.
pub(crate) fn load(path: &Path, target: &str) -> Result<Table, DataError> {
    let tabs = extension(path).as_deref() == Some("tsv");
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(if tabs { b'\t' } else { b',' })
        .trim(csv::Trim::All)
        .flexible(true)
        .from_reader(open(path)?);
    let header = reader.headers().map_err(|error| csv_error(path, error))?.clone();
    let target_index =
        target_column(&header, target).map_err(|problem| DataError::malformed(path, problem))?;
    if header.len() < 2 {
        return Err(DataError::malformed(path, "has no column besides the target"));
    }
    let mut values = Vec::new();
    let mut cells = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| csv_error(path, error))?;
        let line = record.position().map_or(0, csv::Position::line);
        if record.len() != header.len() {
            let (found, wanted) = (record.len(), header.len());
            return Err(DataError::malformed(
                path,
                format!("line {line} has {found} cells, the header {wanted}"),
            ));
        }
        for (index, (cell, name)) in record.iter().zip(&header).enumerate() {
            let place = || format!("line {line}, column `{name}`");
            if cell.is_empty() {
                let problem = format!("{}: the value is missing; fill it in or drop the row", place());
                return Err(DataError::malformed(path, problem));
            }
            if index == target_index {
                cells.push((cell.to_owned(), line));
            } else {
                let value =
                    number(cell).map_err(|why| DataError::malformed(path, format!("{}: {why}", place())))?;
                values.push(value as f32);
            }
        }
        if values.len() as u64 > ELEMENTS_MAX {
            return Err(DataError::malformed(path, format!("holds more than {ELEMENTS_MAX} values")));
        }
    }
    let rows = cells.len();
    let target = target_values(cells).map_err(|problem| {
        DataError::malformed(path, format!("column `{}`: {problem}", &header[target_index]))
    })?;
    let values =
        Array2::from_shape_vec((rows, header.len() - 1), values).expect("each row has the header's length");
    Ok(Table { features: Features::Numbers(values), target })
}

/// A cell as a number that an f32 can hold.
fn number(cell: &str) -> Result<f64, String> {
    match cell.parse::<f64>() {
        Ok(value) if (value as f32).is_finite() => Ok(value),
        Ok(_) => Err(format!("`{cell}` is not a finite number")),
        Err(_) => Err(format!("`{cell}` is not a number")),
    }
}

/// Numbers if every cell is one, class names otherwise. `nan` and `inf` among numbers are mistakes, not class names.
fn target_values(cells: Vec<(String, u64)>) -> Result<Column, String> {
    if cells.iter().any(|(cell, _)| cell.parse::<f64>().is_err()) {
        return Ok(Column::Text(cells.into_iter().map(|(cell, _)| cell).collect()));
    }
    let values = cells.iter().map(|(cell, line)| number(cell).map_err(|why| format!("line {line}: {why}")));
    Ok(Column::Numbers(values.collect::<Result<_, _>>()?))
}

fn target_column(header: &csv::StringRecord, target: &str) -> Result<usize, String> {
    let mut named = header.iter().enumerate().filter(|(_, name)| *name == target).map(|(index, _)| index);
    match (named.next(), named.next()) {
        (Some(index), None) => return Ok(index),
        (Some(_), Some(_)) => {
            return Err(format!("has more than one column `{target}`; give its number instead"));
        }
        (None, _) => {}
    }
    target.parse().ok().filter(|&index| index < header.len()).ok_or_else(|| {
        let names: Vec<&str> = header.iter().take(20).collect();
        let more = if header.len() > names.len() { ", ..." } else { "" };
        format!("has no column `{target}`; its columns are {}{more}", names.join(", "))
    })
}

fn csv_error(path: &Path, error: csv::Error) -> DataError {
    let text = error.to_string();
    match error.into_kind() {
        csv::ErrorKind::Io(error) => stream_error(path, error),
        csv::ErrorKind::Utf8 { pos, err } => {
            let line = pos.map_or(0, |pos| pos.line());
            let column = err.field() + 1;
            DataError::malformed(path, format!("line {line}, column number {column}: the text is not UTF-8"))
        }
        _ => DataError::malformed(path, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8], target: &str) -> Result<Table, DataError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("table.csv");
        std::fs::write(&path, bytes).unwrap();
        load(&path, target)
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
    fn bad_cells_are_named_by_line_and_column() {
        let cases: [(&[u8], &str); 13] = [
            (b"a,y\n1,2\nabc,3\n", "line 3, column `a`: `abc` is not a number"),
            (b"a,y\n1,2\n\"x\ny\",3\n4,z\n", "line 3, column `a`"),
            (b"a,y\nNaN,3\n", "line 2, column `a`: `NaN` is not a finite number"),
            (b"a,y\n1e300,3\n", "line 2, column `a`: `1e300` is not a finite number"),
            (b"a,y\n1,inf\n", "column `y`: line 2: `inf` is not a finite number"),
            (b"a,y\n,3\n", "line 2, column `a`: the value is missing"),
            (b"a,y\n3,\n", "line 2, column `y`: the value is missing"),
            (b"a,y\n1,2,3\n", "line 2 has 3 cells, the header 2"),
            (b"a,y\n1\n", "line 2 has 1 cells, the header 2"),
            (b"a,b\n1,2\n", "has no column `y`; its columns are a, b"),
            (b"y,y\n1,2\n", "more than one column `y`"),
            (b"y\n1\n", "no column besides"),
            (b"a,y\n\xff,2\n", "line 2, column number 1: the text is not UTF-8"),
        ];
        for (bytes, expected) in cases {
            let error = parse(bytes, "y").unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("table.csv"), "{error} / {expected}");
        }
        assert!(parse(b"", "y").unwrap_err().to_string().contains("no column `y`"));
        assert!(
            load(Path::new("/nonexistent/x.csv"), "y")
                .unwrap_err()
                .to_string()
                .contains("/nonexistent/x.csv")
        );
    }
}
