//! Interprets single cells of a table.

use csv::ByteRecord;

/// What a column holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ColumnKind {
    /// Finite numbers.
    Numbers,
    /// Text, such as names of categories.
    Text,
}

/// Returns whether a cell stands for a missing value: it is empty, `?`, `NA`, `N/A`, `NaN` or `null` in upper or lower case,
/// `<NA>` or `#N/A`.
pub(crate) fn is_missing(cell: &[u8]) -> bool {
    match cell {
        b"" | b"?" | b"<NA>" | b"#N/A" => true,
        [_, _] => cell.eq_ignore_ascii_case(b"na"),
        [_, _, _] => cell.eq_ignore_ascii_case(b"nan") || cell.eq_ignore_ascii_case(b"n/a"),
        [_, _, _, _] => cell.eq_ignore_ascii_case(b"null"),
        _ => false,
    }
}

/// Returns the cell as a number. Returns `None` if the cell is not a number.
fn number(cell: &[u8]) -> Option<f64> {
    std::str::from_utf8(cell).ok()?.parse().ok()
}

/// Parses a cell as a number that is finite as an f32.
pub(crate) fn parse_number(cell: &[u8]) -> Result<f64, String> {
    match number(cell) {
        Some(value) if (value as f32).is_finite() => Ok(value),
        Some(_) => Err(format!("`{}` is not a finite number", show(cell))),
        None => Err(format!("`{}` is not a number", show(cell))),
    }
}

/// Returns the beginning of a cell for a message.
fn show(cell: &[u8]) -> String {
    const SHOWN_MAX: usize = 40;
    let text = String::from_utf8_lossy(&cell[..cell.len().min(4 * SHOWN_MAX)]);
    let short: String = text.chars().take(SHOWN_MAX).collect();
    if short.len() < cell.len() { format!("{short}...") } else { short }
}

/// Returns the kind of column `index` in these rows: numbers, if more than half of the values are numbers, or if there is no
/// value.
pub(crate) fn column_kind(rows: &[ByteRecord], index: usize) -> ColumnKind {
    let (mut numbers, mut texts) = (0, 0);
    for cell in rows.iter().filter_map(|row| row.get(index)).map(<[u8]>::trim_ascii) {
        match number(cell) {
            _ if is_missing(cell) => {}
            Some(_) => numbers += 1,
            None => texts += 1,
        }
    }
    if texts > 0 && numbers <= texts { ColumnKind::Text } else { ColumnKind::Numbers }
}

/// Returns whether the `first` row of a table is probably a sample and not a header. `rows` are the next rows.
///
/// The first row is a sample if all cells but at most one (the target) are numbers, or if the row has a number in
/// every column that holds numbers in the next rows. A first row with the numbers 0, 1, 2, ... is a header, because
/// pandas writes these numbers above columns without names.
pub(crate) fn looks_like_data(first: &ByteRecord, rows: &[ByteRecord]) -> bool {
    let numbers: Vec<&[u8]> =
        first.iter().map(<[u8]>::trim_ascii).filter(|cell| number(cell).is_some()).collect();
    if numbers.iter().enumerate().all(|(index, cell)| number(cell) == Some(index as f64)) {
        return false;
    }
    let is_number_or_missing = |index: usize| {
        let cell = first.get(index).unwrap_or_default().trim_ascii();
        is_missing(cell) || number(cell).is_some()
    };
    let mut numeric = (0..first.len())
        .filter(|&index| !rows.is_empty() && column_kind(rows, index) == ColumnKind::Numbers)
        .peekable();
    numbers.len() + 1 >= first.len() || numeric.peek().is_some() && numeric.all(is_number_or_missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_values_are_recognised() {
        for cell in ["", "?", "NA", "na", "N/A", "n/a", "NaN", "nan", "NAN", "NULL", "null", "<NA>", "#N/A"] {
            assert!(is_missing(cell.as_bytes()), "{cell}");
        }
        for cell in ["0", "-", "??", "None", "Nan Madol", "NAs", "nul", "n.a."] {
            assert!(!is_missing(cell.as_bytes()), "{cell}");
        }
    }

    #[test]
    fn the_kind_of_a_column_is_that_of_most_values() {
        for (cells, expected) in [
            (&["1", "2.5", "-1e3"][..], ColumnKind::Numbers),
            (&["1", "2", "x"], ColumnKind::Numbers),
            (&["1", "NA", "x"], ColumnKind::Text),
            (&["NA", "", "?"], ColumnKind::Numbers),
            (&["UA", "NA", ""], ColumnKind::Text),
            (&[], ColumnKind::Numbers),
        ] {
            let rows: Vec<ByteRecord> = cells.iter().map(|cell| ByteRecord::from(vec!["0", cell])).collect();
            assert_eq!(column_kind(&rows, 1), expected, "{cells:?}");
        }
    }

    #[test]
    fn long_cells_are_shortened_in_messages() {
        let error = parse_number("ä".repeat(100).as_bytes()).unwrap_err();
        assert_eq!(error, format!("`{}...` is not a number", "ä".repeat(40)));
        assert_eq!(parse_number(b"1e300").unwrap_err(), "`1e300` is not a finite number");
        assert_eq!(parse_number(b"12,5").unwrap_err(), "`12,5` is not a number");
    }
}
