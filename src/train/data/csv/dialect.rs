//! Recognises how a text file stores a table: the byte-order mark and the separator of the cells.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::train::data::DataError;
use crate::train::data::compression::FileCompression;
use crate::train::data::file::extension;
use crate::train::data::standard_input::is_standard_input;

/// The byte-order mark of UTF-8.
const UTF8_BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// The maximum number of rows from which the separator is chosen.
const SEPARATOR_ROWS_COMPARED_MAX: usize = 50;

/// The character between the cells of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Separator(u8);

impl Separator {
    /// A comma.
    pub const COMMA: Self = Self(b',');
    /// A tab.
    pub const TAB: Self = Self(b'\t');
    /// A space.
    const SPACE: Self = Self(b' ');
    /// The separators that are recognised, with their names on the command line.
    const NAMES: [(Self, &'static str); 5] = [
        (Self::COMMA, "comma"),
        (Self::TAB, "tab"),
        (Self(b';'), "semicolon"),
        (Self(b'|'), "pipe"),
        (Self::SPACE, "space"),
    ];

    /// Returns the character as a byte.
    pub(crate) fn byte(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Separator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(separator, _)| separator == self) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "`{}`", self.0.escape_ascii()),
        }
    }
}

impl FromStr for Separator {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((separator, _)) = Self::NAMES.iter().find(|(_, name)| *name == text) {
            return Ok(*separator);
        }
        match text.as_bytes() {
            b"\\t" => Ok(Self::TAB),
            [b'"' | b'\n' | b'\r'] => Err("must not be a quotation mark or a line break".into()),
            [byte] if byte.is_ascii() && !byte.is_ascii_alphanumeric() => Ok(Self(*byte)),
            _ => {
                Err("is not one of comma, tab, semicolon, pipe, space, or a single character such as `:`"
                    .into())
            }
        }
    }
}

/// Returns the length in bytes of the byte-order mark of a file: 0 or 3. `start` is the beginning of the file.
///
/// # Errors
///
/// If the file is UTF-16 text or compressed.
pub(crate) fn byte_order_mark_length(path: &Path, start: &[u8]) -> Result<usize, DataError> {
    if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
        return Err(DataError::malformed(
            path,
            "is UTF-16 text; save the table as UTF-8 (in Excel: CSV UTF-8)",
        ));
    }
    if let Some(compression) = FileCompression::from_file_content(start) {
        let extension = compression.extension();
        let problem = if is_standard_input(path) {
            "is compressed; decompress the table first, as in `zcat a.csv.gz | ringtrain --data - --target y`"
                .into()
        } else {
            format!("is a compressed file; give the file a name that ends in {extension}")
        };
        return Err(DataError::malformed(path, problem));
    }
    Ok(if start.starts_with(UTF8_BYTE_ORDER_MARK) { UTF8_BYTE_ORDER_MARK.len() } else { 0 })
}

/// Chooses the separator of a table from its first rows. `start` is the beginning of the file, without a byte-order
/// mark. `is_whole_file` says whether `start` is the whole file.
///
/// For a `.tsv` or `.tab` file with a tab in its first row, chooses the tab. For other files, chooses a separator that occurs
/// equally often in every row: a space only if no other separator does so, and the most frequent one of several others.
/// If no separator occurs equally often in every row, chooses the separator other than a space that is the most frequent
/// one in the first row. If the first row has only spaces as separators, or none, chooses a comma.
pub(crate) fn detect_separator(path: &Path, start: &[u8], is_whole_file: bool) -> Separator {
    let rows = count_separators(start, is_whole_file);
    let Some(first) = rows.first() else { return Separator::COMMA };
    let tab = Separator::NAMES.iter().position(|(separator, _)| *separator == Separator::TAB);
    if let Some(tab) = tab
        && first[tab] > 0
        && matches!(extension(path).as_deref(), Some("tsv" | "tab"))
    {
        return Separator::TAB;
    }
    let is_regular = |index: usize| rows.iter().all(|row| row[index] == first[index]);
    // `max_by_key` returns the last of several equal values, so the order is reversed: a comma is preferred to a tab.
    let best = (0..first.len()).rev().max_by_key(|&index| {
        let is_space = Separator::NAMES[index].0 == Separator::SPACE;
        (first[index] > 0 && is_regular(index), !is_space, first[index])
    });
    best.filter(|&index| first[index] > 0).map_or(Separator::COMMA, |index| Separator::NAMES[index].0)
}

/// Returns how often each separator in [`Separator::NAMES`] occurs in each of the first rows, outside of quotation
/// marks. Does not count spaces at the beginning and the end of a row, and counts several adjacent spaces as one.
fn count_separators(start: &[u8], is_whole_file: bool) -> Vec<[u32; Separator::NAMES.len()]> {
    let mut rows = Vec::new();
    let mut quoted = false;
    let mut row_start = 0;
    for (index, &byte) in start.iter().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            b'\n' | b'\r' if !quoted => {
                rows.extend(count_separators_in_row(&start[row_start..index]));
                row_start = index + 1;
                if rows.len() == SEPARATOR_ROWS_COMPARED_MAX {
                    return rows;
                }
            }
            _ => {}
        }
    }
    // If `start` is not the whole file, its last row may be incomplete. That row is used only if there is no other row.
    if is_whole_file || rows.is_empty() {
        rows.extend(count_separators_in_row(&start[row_start..]));
    }
    rows
}

/// Counts the separators in a row. Returns `None` for an empty row.
fn count_separators_in_row(row: &[u8]) -> Option<[u32; Separator::NAMES.len()]> {
    let row = row.trim_ascii_end();
    if row.is_empty() {
        return None;
    }
    let mut counts = [0; Separator::NAMES.len()];
    let (mut quoted, mut last) = (false, b' ');
    for &byte in row {
        quoted ^= byte == b'"';
        let index = Separator::NAMES.iter().position(|(separator, _)| separator.byte() == byte);
        if let Some(index) = index.filter(|_| !(quoted || byte == b' ' && last == b' ')) {
            counts[index] += 1;
        }
        last = byte;
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_separator_is_the_one_that_occurs_equally_often_in_every_row() {
        for (name, text, expected) in [
            ("a.csv", "a,b,c\n1,2,3\n", Separator(b',')),
            ("a.csv", "a;b;c\n1,5;2,5;3,5\n", Separator(b';')),
            ("a.csv", "a;b;c\r\n1,5;2,5;3,5\r\n\r\n", Separator(b';')),
            ("a.csv", "a\tb\r1\t2\r", Separator(b'\t')),
            ("a.csv", "first name|last name\nx y z|b\n", Separator(b'|')),
            ("a.csv", "a b\n1 2\n3 4", Separator(b' ')),
            ("a.csv", "\"a;b;c\",d\n\"1;;\",2\n", Separator(b',')),
            ("a.csv", "\"x\ny;z\";b\n1;2\n", Separator(b';')),
            ("a.csv", "a,b\n1,\"long text, with commas, and a\n", Separator(b',')),
            ("a.csv", "a;b;c\n1;2\n", Separator(b';')),
            ("a.tsv", "a,b,c\td\n1,2,3\t4\n", Separator(b'\t')),
            ("a.tsv", "a,b,c\n1,2,3\n", Separator(b',')),
            ("a.csv", "y\n1\n", Separator(b',')),
            ("a.csv", "", Separator(b',')),
        ] {
            assert_eq!(detect_separator(Path::new(name), text.as_bytes(), true), expected, "{text:?}");
        }
        // The last row may be cut, so it does not count.
        assert_eq!(detect_separator(Path::new("a.csv"), b"a;b;c\n1;2,0", false), Separator(b';'));
    }

    #[test]
    fn separators_are_given_by_name_or_character() {
        for (text, byte) in
            [("tab", b'\t'), ("\\t", b'\t'), ("\t", b'\t'), (":", b':'), ("space", b' '), (" ", b' ')]
        {
            assert_eq!(text.parse(), Ok(Separator(byte)));
        }
        for text in ["", "ab", "x", "1", "\"", "\n", "ä", "commas"] {
            assert!(text.parse::<Separator>().is_err(), "{text}");
        }
        assert_eq!((Separator::TAB.to_string(), Separator(b':').to_string()), ("tab".into(), "`:`".into()));
    }

    #[test]
    fn files_that_are_not_utf8_text_are_refused() {
        let path = Path::new("a.csv");
        assert_eq!(byte_order_mark_length(path, b"\xef\xbb\xbfa,b").unwrap(), 3);
        assert_eq!(byte_order_mark_length(path, b"a,b").unwrap(), 0);
        for (start, expected) in [
            (&b"\xff\xfea\0"[..], "UTF-16"),
            (b"\xfe\xff\0a", "UTF-16"),
            (b"\x1f\x8b\x08\0", "ends in .gz"),
            (b"PK\x03\x04", "ends in .zip"),
            (b"\x28\xb5\x2f\xfd", "ends in .zst"),
        ] {
            let error = byte_order_mark_length(path, start).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("a.csv"), "{error}");
        }
    }
}
