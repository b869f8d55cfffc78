//! Reads files in the format of LIBSVM and `SVMlight`: sparse rows as text.
//!
//! A line is `TARGET INDEX:VALUE INDEX:VALUE ... # COMMENT`. Indices start at 1 and increase within a line. Features that
//! a line does not name are 0. `qid:NUMBER`, which `SVMlight` uses for rankings, is ignored.

use std::io::{BufRead as _, BufReader, Read as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memchr::memchr_iter;

use super::csv::parse_number;
use super::file::stream_error;
use super::file_digest::FileDigest;
use super::part_of_source::{PartOfSource, read_samples};
use super::sample_blocks::{BlockReader, RowOrigins, SampleBlock};
use super::skippable_reader::SkippableReader;
use super::sparse::SparseRowsBuilder;
use super::{BlocksOfRank, Column, DataError, ELEMENTS_MAX, Features, UninterpretedSamples};

/// The maximum length of a line in bytes.
const LINE_BYTES_MAX: usize = 1 << 26;
/// The maximum index of a feature. Without a limit, one large index could make the model too large: a model has
/// parameters for every index up to the largest index.
const FEATURE_INDEX_MAX: u32 = 1 << 22;
/// The maximum number of characters of a token that an error message shows.
const TOKEN_CHARACTERS_SHOWN_MAX: usize = 40;

/// Reads this rank's part of the rows of a file: the lines that begin in this rank's part of the bytes. The number of features is
/// the largest index in these lines. The part may have no rows. If there are several ranks, a compressed file is read twice: the
/// ranks first need the number of its bytes.
///
/// # Errors
///
/// If the file cannot be read, or if a line of this rank is malformed. An error names the line and the character, both counted
/// from 1.
pub(crate) fn read_part_of_file(
    path: &Path,
    (share, stream_directory): (BlocksOfRank, Option<&Path>),
) -> Result<PartOfSource, DataError> {
    // A single rank reads the file only once, so the file may be a pipe.
    let (len, own_bytes) = if share == BlocksOfRank::ALL {
        (0, 0..u64::MAX)
    } else {
        let len = SkippableReader::open(path)?.into_len().map_err(|error| stream_error(path, error))?;
        (len, share.range_of(len))
    };
    let digests = vec![FileDigest::of_file(path, &len.to_string(), share)?];
    let samples = read_samples(&mut LibsvmReader::open_part(path, own_bytes)?, stream_directory)?;
    Ok(PartOfSource { samples, image: None, digests, notes: Vec::new(), rounding: None })
}

/// Returns an error if a file has no rows or no features.
pub(crate) fn check_rows(path: &Path, rows: usize, columns: usize) -> Result<(), DataError> {
    match (rows, columns) {
        (0, _) => Err(DataError::malformed(path, "holds no rows")),
        (_, 0) => Err(DataError::malformed(path, "no row has a feature INDEX:VALUE")),
        _ => Ok(()),
    }
}

/// Reads the rows of a file, or of a part of a file, block by block.
pub(crate) struct LibsvmReader {
    path: PathBuf,
    reader: BufReader<SkippableReader>,
    /// The position in the file of the first line of the part.
    start: u64,
    /// The position of the next line.
    position: u64,
    /// Lines that begin at this position or later do not belong to the part.
    end: u64,
    /// The number of lines that have been read.
    lines_read: u64,
    /// The number of rows that have been read.
    rows_read: usize,
    /// The largest index of a feature in the lines that have been read.
    largest_index: u32,
}

impl LibsvmReader {
    /// Opens a file.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        Self::open_part(path, 0..u64::MAX)
    }

    /// Opens a file to read the lines that begin in the part `bytes`.
    fn open_part(path: &Path, bytes: Range<u64>) -> Result<Self, DataError> {
        let unreadable = |error| stream_error(path, error);
        let mut content = SkippableReader::open(path)?;
        let mut start = bytes.start.saturating_sub(1);
        content.skip(start).map_err(unreadable)?;
        let mut reader = BufReader::new(content);
        if bytes.start > 0 {
            // The line of the byte before this part belongs to an earlier part. This byte may be its line break.
            start += reader.skip_until(b'\n').map_err(unreadable)? as u64;
        }
        Ok(Self {
            path: path.to_owned(),
            reader,
            start,
            position: start,
            end: bytes.end,
            lines_read: 0,
            rows_read: 0,
            largest_index: 0,
        })
    }

    /// Reads the next line into `line`. At the end of the part, `line` becomes empty, and the function returns `false`.
    fn read_line(&mut self, line: &mut Vec<u8>) -> Result<bool, DataError> {
        line.clear();
        if self.position >= self.end {
            return Ok(false);
        }
        let limit = LINE_BYTES_MAX as u64 + 1;
        let read = self.reader.by_ref().take(limit).read_until(b'\n', line);
        let count = read.map_err(|error| stream_error(&self.path, error))?;
        if count == 0 {
            return Ok(false);
        }
        self.position += count as u64;
        self.lines_read += 1;
        if line.len() > LINE_BYTES_MAX {
            return Err(self.error_in_line(&format!(": the line has more than {LINE_BYTES_MAX} bytes")));
        }
        Ok(true)
    }

    /// Returns an error that names the line that was read last.
    fn error_in_line(&self, problem: &str) -> DataError {
        match count_line_breaks(&self.path, self.start) {
            Ok(earlier) => {
                DataError::malformed(&self.path, format!("line {}{problem}", earlier + self.lines_read))
            }
            Err(error) => error,
        }
    }

    /// Reads the next rows, at most `rows_max`. Also returns whether there are no more rows. The number of features of the block
    /// is the largest index in the lines that have been read.
    fn read_rows(&mut self, rows_max: usize) -> Result<(SampleBlock, bool), DataError> {
        let mut parsed = ParsedLines { largest_index: self.largest_index, ..ParsedLines::default() };
        let mut line = Vec::new();
        let mut is_at_end = false;
        while parsed.targets.len() < rows_max && !is_at_end {
            is_at_end = !self.read_line(&mut line)?;
            let is_first = (self.start, self.lines_read) == (0, 1);
            let text = if is_first { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line) } else { &line };
            parsed
                .add_line(self.lines_read, text)
                .map_err(|(at, problem)| self.error_in_line(&format!(", character {at}: {problem}")))?;
        }
        self.largest_index = parsed.largest_index;
        self.rows_read += parsed.targets.len();
        let features = Features::Sparse(parsed.rows.build(parsed.largest_index as usize));
        let samples = UninterpretedSamples { features, target: Column::Numbers(parsed.targets) };
        let origins = RowOrigins::Lines(self.path.clone(), parsed.line_numbers);
        Ok((SampleBlock { samples, origins }, is_at_end))
    }
}

impl BlockReader for LibsvmReader {
    fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError> {
        let (block, is_at_end) = self.read_rows(rows_max)?;
        // A part may have no rows.
        if is_at_end && self.end == u64::MAX {
            check_rows(&self.path, self.rows_read, self.largest_index as usize)?;
        }
        Ok(block)
    }
}

/// Returns the number of line breaks in the first `len` bytes of a file.
fn count_line_breaks(path: &Path, len: u64) -> Result<u64, DataError> {
    if len == 0 {
        return Ok(0);
    }
    let unreadable = |error| stream_error(path, error);
    let mut reader = BufReader::new(SkippableReader::open(path)?.take(len));
    let mut count = 0;
    loop {
        let bytes = reader.fill_buf().map_err(unreadable)?;
        if bytes.is_empty() {
            return Ok(count);
        }
        count += memchr_iter(b'\n', bytes).count() as u64;
        let len = bytes.len();
        reader.consume(len);
    }
}

/// The rows of the lines that were parsed.
#[derive(Default)]
struct ParsedLines {
    /// The features of each row.
    rows: SparseRowsBuilder,
    /// The target of each row.
    targets: Vec<f64>,
    /// The line number of each row. The first line of the part has the number 1.
    line_numbers: Vec<u64>,
    /// The largest index of a feature in these lines and in all earlier lines.
    largest_index: u32,
}

impl ParsedLines {
    /// Adds the row of a line. Ignores an empty line and a line that holds only a comment. An error consists of the
    /// position of a character and a sentence that says what is wrong with the token at this position.
    fn add_line(&mut self, number: u64, line: &[u8]) -> Result<(), (usize, String)> {
        let end = line.iter().position(|&byte| byte == b'#').unwrap_or(line.len());
        let mut tokens = Tokens { line: &line[..end], position: 0 };
        let Some((at, target)) = tokens.next() else { return Ok(()) };
        let target = parse_target(target).map_err(|problem| (at, problem))?;
        let mut previous = 0;
        for (at, token) in tokens {
            if token.starts_with(b"qid:") && previous == 0 {
                continue;
            }
            let (index, value) = parse_feature(token).map_err(|problem| (at, problem))?;
            if index <= previous {
                let problem = format!(
                    "the index {index} follows the index {previous}, but indices must increase within a line"
                );
                return Err((at, problem));
            }
            previous = index;
            self.rows.push(index - 1, value);
        }
        if self.rows.stored_value_count() as u64 > ELEMENTS_MAX {
            return Err((1, format!("the file holds more than {ELEMENTS_MAX} values")));
        }
        self.largest_index = self.largest_index.max(previous);
        self.rows.end_row();
        self.targets.push(target);
        self.line_numbers.push(number);
        Ok(())
    }
}

/// The tokens of a line, each with the position of its first character, counted from 1.
struct Tokens<'a> {
    line: &'a [u8],
    /// The index in `line` of the first byte after the last token.
    position: usize,
}

impl<'a> Iterator for Tokens<'a> {
    type Item = (usize, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let rest = &self.line[self.position..];
        let start = self.position + rest.iter().position(|byte| !byte.is_ascii_whitespace())?;
        let rest = &self.line[start..];
        let length = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len());
        self.position = start + length;
        Some((start + 1, &rest[..length]))
    }
}

/// Parses the first token of a line. The error is a sentence for the user.
fn parse_target(token: &[u8]) -> Result<f64, String> {
    if token.contains(&b':') {
        return Err(format!(
            "the line starts with `{}`, but it must start with the target",
            shorten_token(token)
        ));
    }
    let mut parts = token.split(|&byte| byte == b',');
    if token.contains(&b',') && parts.all(|part| parse_number(part).is_ok()) {
        return Err(format!(
            "`{}` is a list of targets; ringtrain reads one target for each row",
            shorten_token(token)
        ));
    }
    parse_number(token).map_err(|problem| format!("the target {problem}"))
}

/// Parses a token `INDEX:VALUE`. The error is a sentence for the user.
fn parse_feature(token: &[u8]) -> Result<(u32, f32), String> {
    let colon = token.iter().position(|&byte| byte == b':');
    let Some((index, value)) = colon.map(|colon| (&token[..colon], &token[colon + 1..])) else {
        return Err(format!("`{}` is not a feature; a feature is written INDEX:VALUE", shorten_token(token)));
    };
    let number = std::str::from_utf8(index).ok().and_then(|text| text.parse::<u64>().ok());
    let index = match number {
        None => {
            return Err(format!(
                "`{}` is not an index; an index is an integer of at least 1",
                shorten_token(index)
            ));
        }
        Some(0) => {
            return Err("the index is 0, but indices start at 1; write the file with indices from 1 (in scikit-learn, \
                        pass zero_based=False to dump_svmlight_file)"
                .into());
        }
        Some(index) if index > u64::from(FEATURE_INDEX_MAX) => {
            return Err(format!("the index {index} is too large; the maximum is {FEATURE_INDEX_MAX}"));
        }
        Some(index) => index as u32,
    };
    Ok((index, parse_number(value)? as f32))
}

/// Shortens a token for a message.
fn shorten_token(token: &[u8]) -> String {
    let text = String::from_utf8_lossy(token);
    if text.chars().count() <= TOKEN_CHARACTERS_SHOWN_MAX {
        return text.into_owned();
    }
    text.chars().take(TOKEN_CHARACTERS_SHOWN_MAX).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ndarray::{Array2, array};

    use super::*;

    fn load_libsvm_text(text: &[u8]) -> Result<SampleBlock, DataError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.libsvm");
        fs::write(&path, text).unwrap();
        LibsvmReader::open(&path)?.read_block(usize::MAX)
    }

    #[test]
    fn features_that_a_line_does_not_name_are_0() {
        let text = b"\xef\xbb\xbf+1 1:0.5 3:-2 # first\r\n\n# only a comment\n-1\t2:1e2\n2 qid:7 4:0\n0.5";
        let loaded = load_libsvm_text(text).unwrap();
        let Features::Sparse(rows) = &loaded.samples.features else { panic!("the features are sparse") };
        assert_eq!((rows.rows(), rows.columns(), rows.stored_value_count()), (4, 4, 3));
        let mut gathered = Array2::from_elem((4, 4), 9.0);
        loaded.samples.features.write_rows(0..4, None, gathered.view_mut());
        let expected =
            array![[0.5, 0.0, -2.0, 0.0], [0.0, 100.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]];
        assert_eq!(gathered, expected);
        assert_eq!(loaded.samples.target, Column::Numbers(vec![1.0, -1.0, 2.0, 0.5]));
        let error = loaded.origins.error(1, "problem").to_string();
        assert!(error.ends_with("a.libsvm: line 4: problem"), "{error}");
    }

    /// Parts may begin and end within a line, and may hold no line.
    #[test]
    fn the_parts_of_all_ranks_hold_each_row_once_and_errors_name_the_line_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.libsvm");
        let text = "\u{feff}1 1:1\n2 4:2\n\n3 2:3 # comment\r\n4 1:4 5:1\n5";
        fs::write(&path, text).unwrap();
        let all = LibsvmReader::open(&path).unwrap().read_block(99).unwrap().samples;
        for ranks in [2, 3, 7, 60] {
            let (mut targets, mut largest, mut digests) = (Vec::new(), 0, Vec::new());
            for rank in 0..ranks {
                let part = read_part_of_file(&path, (BlocksOfRank { rank, ranks }, None)).unwrap();
                let Column::Numbers(own) = part.samples.target else { panic!("targets are numbers") };
                let features = part.samples.features.format();
                assert_eq!(own.len(), features.rows());
                targets.extend(own);
                largest = largest.max(features.columns());
                digests.push(part.digests[0].value);
            }
            assert!(digests.iter().all(|digest| *digest == digests[0]), "{ranks}: {digests:?}");
            assert_eq!((Column::Numbers(targets), largest), (all.target.clone(), 5), "{ranks}");
        }
        fs::write(&path, text.replace("5:1", "5:x")).unwrap();
        let failures = (0..7).filter_map(|rank| {
            let share = BlocksOfRank { rank, ranks: 7 };
            read_part_of_file(&path, (share, None)).err().map(|error| error.to_string())
        });
        let failures: Vec<String> = failures.collect();
        assert!(failures.len() == 1 && failures[0].contains("line 5, character 7: `x`"), "{failures:?}");
    }

    #[test]
    fn errors_name_the_line_and_the_character() {
        for (text, expected) in [
            ("", "a.libsvm: holds no rows"),
            ("# x\n\n", "holds no rows"),
            ("1 \n2\n", "no row has a feature INDEX:VALUE"),
            ("1 1:2\n1 1:2  2:x", "line 2, character 8: `x` is not a number"),
            ("1 1:inf", "line 1, character 3: `inf` is not a finite number"),
            ("1 1:2 3", "line 1, character 7: `3` is not a feature; a feature is written INDEX:VALUE"),
            ("1 0:2", "line 1, character 3: the index is 0, but indices start at 1"),
            ("1 -4:2", "character 3: `-4` is not an index"),
            ("1 5000000:2", "the index 5000000 is too large; the maximum is 4194304"),
            ("1 99999999999999999999:2", "is not an index"),
            ("1 2:3 2:4", "character 7: the index 2 follows the index 2, but indices must increase"),
            ("\n 1:2", "line 2, character 2: the line starts with `1:2`, but it must start with the target"),
            ("spam 1:2", "line 1, character 1: the target `spam` is not a number"),
            ("1,3 1:2", "`1,3` is a list of targets"),
            ("1 1:2 qid:3", "`qid` is not an index"),
        ] {
            let error = load_libsvm_text(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
