//! Interprets single cells of a table.

use std::collections::BTreeSet;

use csv::ByteRecord;

use crate::train::data::column_values::ColumnKind;

/// Returns whether a cell stands for a missing value. A missing value is an empty cell, `?`, `<NA>` or `#N/A`, or, in
/// upper or lower case, `NA`, `N/A`, `NaN` or `null`.
pub(crate) fn is_missing(cell: &[u8]) -> bool {
    match cell {
        b"" | b"?" | b"<NA>" | b"#N/A" => true,
        [_, _] => cell.eq_ignore_ascii_case(b"na"),
        [_, _, _] => cell.eq_ignore_ascii_case(b"nan") || cell.eq_ignore_ascii_case(b"n/a"),
        [_, _, _, _] => cell.eq_ignore_ascii_case(b"null"),
        _ => false,
    }
}

/// Returns all texts for which [`is_missing`] returns `true`, except for the empty text.
pub(crate) fn spellings_of_missing_values() -> impl Iterator<Item = String> {
    let in_any_case = ["na", "nan", "n/a", "null"].into_iter().flat_map(|word| {
        let with_case = move |upper: u32| {
            let letter = |(index, letter): (usize, char)| {
                if upper >> index & 1 == 1 { letter.to_ascii_uppercase() } else { letter }
            };
            word.chars().enumerate().map(letter).collect::<String>()
        };
        (0..1_u32 << word.len()).map(with_case)
    });
    let spellings: BTreeSet<String> = in_any_case.chain(["?", "<NA>", "#N/A"].map(String::from)).collect();
    spellings.into_iter()
}

/// Returns the cell as a number, which may be infinite or NaN. Returns `None` if the cell is not a number.
fn parse_f64(cell: &[u8]) -> Option<f64> {
    std::str::from_utf8(cell).ok()?.parse().ok()
}

/// Parses a cell as a number that is finite as an f32.
pub(crate) fn parse_number(cell: &[u8]) -> Result<f64, String> {
    match parse_f64(cell) {
        Some(value) if (value as f32).is_finite() => Ok(value),
        Some(_) => Err(format!("`{}` is not a finite number", shorten_cell(cell))),
        None => Err(format!("`{}` is not a number", shorten_cell(cell))),
    }
}

/// Shortens a cell for a message.
fn shorten_cell(cell: &[u8]) -> String {
    const CELL_CHARACTERS_SHOWN_MAX: usize = 40;
    let text = String::from_utf8_lossy(&cell[..cell.len().min(4 * CELL_CHARACTERS_SHOWN_MAX)]);
    let short: String = text.chars().take(CELL_CHARACTERS_SHOWN_MAX).collect();
    if short.len() < cell.len() { format!("{short}...") } else { short }
}

/// Returns the kind of column `index` in `rows`. Missing values do not count. If more than half of the values are
/// numbers, or if there is no value, the kind is [`ColumnKind::Numbers`]. Otherwise the kind is [`ColumnKind::Text`].
pub(crate) fn column_kind(rows: &[ByteRecord], index: usize) -> ColumnKind {
    let (mut numbers, mut texts) = (0, 0);
    for cell in rows.iter().filter_map(|row| row.get(index)).map(<[u8]>::trim_ascii) {
        match parse_f64(cell) {
            _ if is_missing(cell) => {}
            Some(_) => numbers += 1,
            None => texts += 1,
        }
    }
    if texts > 0 && numbers <= texts { ColumnKind::Text } else { ColumnKind::Numbers }
}

/// Returns whether the `first` row of a table is probably a sample and not a header. `rows` holds the next rows. The first
/// of these rules that applies to the `first` row decides:
///
/// 1. The row has two or more numbers, which are 0, 1, 2 and so on. The row is a header, because pandas writes these
///    numbers above columns without names. But if a text of the row occurs again in its column, the row is a sample.
/// 2. The row has no number. The row is a sample if more than half of its texts occur again in their columns, and if no
///    column has a text in this row and numbers in the next rows.
/// 3. The row has a number. The row is a sample if at most one cell (the target) is not a number. The row is also a
///    sample if a column has numbers in the next rows, and if no such column has a text in this row.
pub(crate) fn looks_like_data(first: &ByteRecord, rows: &[ByteRecord]) -> bool {
    let numbers: Vec<f64> = first.iter().filter_map(|cell| parse_f64(cell.trim_ascii())).collect();
    let is_text = |index: usize| {
        let cell = first.get(index).unwrap_or_default().trim_ascii();
        parse_f64(cell).is_none() && !is_missing(cell)
    };
    let occurs_again = |index: usize| {
        let text = first.get(index).map(<[u8]>::trim_ascii);
        rows.iter().any(|row| row.get(index).map(<[u8]>::trim_ascii) == text)
    };
    let texts: Vec<usize> = (0..first.len()).filter(|&index| is_text(index)).collect();
    let repeated = texts.iter().filter(|&&index| occurs_again(index)).count();
    let is_numbering = numbers.iter().enumerate().all(|(index, &value)| value == index as f64);
    if numbers.len() > 1 && is_numbering {
        return repeated > 0;
    }
    let mut numeric = (0..first.len()).filter(|&index| column_kind(rows, index) == ColumnKind::Numbers);
    if numbers.is_empty() {
        return 2 * repeated > texts.len() && !numeric.any(is_text);
    }
    let mut numeric = numeric.filter(|_| !rows.is_empty()).peekable();
    numbers.len() + 1 >= first.len() || numeric.peek().is_some() && !numeric.any(is_text)
}

/// Returns whether the `first` row of a table that [`looks_like_data`] is certainly a sample: the row has a number, and each
/// cell is a number above a column of numbers, or a text above a column of texts in which it occurs again.
pub(crate) fn is_certainly_data(first: &ByteRecord, rows: &[ByteRecord]) -> bool {
    let fits_column = |(index, cell): (usize, &[u8])| {
        let cell = cell.trim_ascii();
        let is_number = parse_f64(cell).is_some();
        let kind = if is_number { ColumnKind::Numbers } else { ColumnKind::Text };
        let occurs_again = || rows.iter().any(|row| row.get(index).map(<[u8]>::trim_ascii) == Some(cell));
        !is_missing(cell) && column_kind(rows, index) == kind && (is_number || occurs_again())
    };
    let has_number = first.iter().any(|cell| parse_f64(cell.trim_ascii()).is_some());
    !rows.is_empty() && has_number && first.iter().enumerate().all(fits_column)
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
        let spellings: Vec<String> = spellings_of_missing_values().collect();
        assert!(spellings.iter().all(|text| is_missing(text.as_bytes())), "{spellings:?}");
        assert_eq!(spellings.len(), 4 + 8 + 4 + 16 + 3);
    }

    #[test]
    fn the_kind_of_a_column_is_the_kind_of_most_values() {
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

    /// Regression test: before the fix, a first row without numbers was always taken for a header, and its values
    /// were lost. A first row whose only numbers were 0, 1, 2, ... in this order was also taken for a header.
    #[test]
    fn a_first_row_that_looks_like_data_is_recognised() {
        for (text, expected) in [
            ("0,red,yes\n1,blue,no\n2,red,yes", true),
            ("7,red,yes\n1,blue,no", true),
            ("0,1,red\n5,2,blue\n3,4,red", true),
            ("0,1,red\n5,2,blue\n3,4,green", false),
            ("red,yes\nblue,no\nred,no\nblue,yes", true),
            ("id7,red,yes\nid8,blue,no\nid9,red,yes", true),
            ("?,red,yes\n5,blue,no\n7,red,yes", true),
            // The name of a column may be one of its values.
            ("colour,yes\nblue,no\nred,yes", false),
            ("size,yes\n1,no\n2,yes", false),
            (",colour,kind\n0,blue,no\n1,red,yes", false),
            (",0,1\n0,5,6\n1,7,8", false),
            ("0,1,2\n4,5,6", false),
            ("0,size\n4,5", true),
            ("2019,rooms,price\n1,2,3", false),
            ("a,b", false),
            ("1,b,c", false),
            ("1,b", true),
        ] {
            let mut rows = text.lines().map(|line| ByteRecord::from(line.split(',').collect::<Vec<_>>()));
            let first = rows.next().unwrap();
            assert_eq!(looks_like_data(&first, &rows.collect::<Vec<_>>()), expected, "{text}");
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
