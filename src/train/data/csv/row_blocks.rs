//! Divides the rows of a file into blocks, so that each rank parses only the rows of its own blocks.
//!
//! A line break in a quoted cell does not end a row, and a rank that starts in the middle of a file does not know
//! which line breaks are in quoted cells. Therefore each rank reads the whole file and finds the ends of all rows,
//! which takes much less time than parsing the cells. The blocks depend only on the content of the file, and not on
//! the number of ranks.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::ops::Range;

use crc_fast::{CrcAlgorithm, Digest};
use memchr::{memchr, memchr_iter, memchr2};

use crate::train::data::BlocksOfRank;

/// The minimum size in bytes of each block except the last. A block ends at the first end of a row at or after this size.
pub(crate) const BLOCK_BYTES: u64 = 1 << 16;
/// The maximum size in bytes of a row. A quotation mark that is never closed makes the rest of the file one row.
pub(super) const ROW_BYTES_MAX: u64 = 1 << 26;
/// The size in bytes of the buffer in which row ends are found.
const BUFFER_BYTES: usize = 1 << 18;

/// The length and the checksum of a file, which ranks compare to find out whether they read the same file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct FileFingerprint {
    /// The number of bytes, with LF at the end of each line.
    pub(crate) bytes: u64,
    /// The CRC-32C of the file, with LF at the end of each line.
    pub(crate) checksum: u64,
}

/// The place of the next byte of a file in its row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PlaceInCell {
    /// The beginning of a cell: a quotation mark begins a quoted cell.
    CellStart,
    /// A cell that does not begin with a quotation mark: a quotation mark is text.
    Unquoted,
    /// A quoted cell: a line break is text.
    Quoted,
    /// After a quotation mark in a quoted cell: a second quotation mark is text, and any other byte ends the quoted
    /// text.
    AfterQuote,
}

/// Finds the ends of rows by the rules of the crate `csv`, which parses the rows.
#[derive(Debug)]
struct RowScanner {
    /// The character between the cells of a row.
    separator: u8,
    /// The place of the next byte.
    place: PlaceInCell,
}

impl RowScanner {
    /// Returns the number of bytes up to the end of the current row, including the line break. Returns `None` if the
    /// row does not end in `bytes`. The next call must pass the bytes that follow.
    fn find_row_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while let Some(&next) = bytes.get(at) {
            match self.place {
                PlaceInCell::Quoted => {
                    at += memchr(b'"', &bytes[at..])? + 1;
                    self.place = PlaceInCell::AfterQuote;
                }
                PlaceInCell::AfterQuote | PlaceInCell::CellStart if next == b'"' => {
                    at += 1;
                    self.place = PlaceInCell::Quoted;
                }
                PlaceInCell::CellStart | PlaceInCell::Unquoted | PlaceInCell::AfterQuote => {
                    // A quotation mark in the place `Unquoted` is text, so the search starts after the mark.
                    let skipped = usize::from(next == b'"');
                    let found =
                        memchr2(b'\n', b'"', &bytes[at + skipped..]).map(|found| at + skipped + found);
                    let end = found.unwrap_or(bytes.len());
                    let after_separator = end > at && bytes[end - 1] == self.separator;
                    self.place = if after_separator { PlaceInCell::CellStart } else { PlaceInCell::Unquoted };
                    if found.is_some_and(|end| bytes[end] == b'\n') {
                        self.place = PlaceInCell::CellStart;
                        return Some(end + 1);
                    }
                    at = end;
                }
            }
        }
        None
    }
}

/// A segment: consecutive lines of one block that [`RowFilter`] passes on. "Before this segment" means: earlier in the
/// file.
#[derive(Clone, Copy, Debug)]
struct BlockSegment {
    /// The number of the block.
    block: usize,
    /// The number of lines that [`RowFilter`] has passed on before this segment.
    lines_passed_before: u64,
    /// The number of lines that [`RowFilter`] has skipped before this segment.
    lines_skipped_before: u64,
}

/// A reader that passes on only the first row of a file and the rows of this rank's blocks, and skips all other rows. In
/// `input`, each line must end with LF.
pub(super) struct RowFilter<R> {
    input: R,
    scanner: RowScanner,
    /// The blocks of this rank.
    share: BlocksOfRank,
    /// The bytes that the last read of `input` returned.
    buffer: Vec<u8>,
    /// The parts of `buffer` that are to be passed on.
    ready: VecDeque<Range<usize>>,
    /// The number of the current block.
    block: usize,
    /// The number of bytes of the current block that have been read.
    block_bytes: u64,
    /// The number of bytes of the current row that have been read.
    row_bytes: u64,
    /// Whether the first row of the file is complete.
    is_first_row_complete: bool,
    /// The line, counted from 1, in which the current row begins.
    row_line: u64,
    /// The segments. The first segment contains the row of the last call of `line_and_block_of_row`.
    segments: VecDeque<BlockSegment>,
    /// The number of lines that have been passed on.
    lines_passed: u64,
    /// The number of lines that have been skipped.
    lines_skipped: u64,
    /// The checksum of the bytes that have been read.
    digest: Digest,
    /// The number of bytes that have been read.
    bytes: u64,
    /// Whether `read` has reached the end of the file since the caller last set this field to `false`.
    pub(super) has_ended: bool,
}

impl<R: Read> RowFilter<R> {
    /// Creates a filter for the file `input`. `first_block` is the number of the first block of this file.
    pub(super) fn new(input: R, separator: u8, share: BlocksOfRank, first_block: usize) -> Self {
        Self {
            input,
            scanner: RowScanner { separator, place: PlaceInCell::CellStart },
            share,
            buffer: vec![0; BUFFER_BYTES],
            ready: VecDeque::new(),
            block: first_block,
            block_bytes: 0,
            row_bytes: 0,
            is_first_row_complete: false,
            row_line: 1,
            segments: VecDeque::from([BlockSegment {
                block: first_block,
                lines_passed_before: 0,
                lines_skipped_before: 0,
            }]),
            lines_passed: 0,
            lines_skipped: 0,
            digest: Digest::new(CrcAlgorithm::Crc32Iscsi),
            bytes: 0,
            has_ended: false,
        }
    }

    /// Returns the line of the file in which a row begins, and the number of the row's block. `line` is the line in the
    /// output of `RowFilter` in which the row begins. Lines are counted from 1. The caller must ask for the rows in
    /// ascending order.
    pub(super) fn line_and_block_of_row(&mut self, line: u64) -> (u64, usize) {
        while self.segments.get(1).is_some_and(|next| next.lines_passed_before < line) {
            self.segments.pop_front();
        }
        self.segments
            .front()
            .map_or((line, 0), |segment| (line + segment.lines_skipped_before, segment.block))
    }

    /// After the error `FileTooLarge`: returns the line, counted from 1, in which the overlong row begins.
    pub(super) fn long_row_line(&self) -> u64 {
        self.row_line
    }

    /// Returns the number of the first block of the next file. The caller must have read this file to its end.
    pub(super) fn first_block_of_next_file(&self) -> usize {
        self.block + usize::from(self.block_bytes > 0)
    }

    /// Returns the length and the checksum of the file. The caller must have read the file to its end.
    pub(super) fn fingerprint(&self) -> FileFingerprint {
        FileFingerprint { bytes: self.bytes, checksum: self.digest.finalize() }
    }

    /// Reads the next part of the file. Returns `false` at the end of the file.
    fn fill_buffer(&mut self) -> io::Result<bool> {
        let count = self.input.read(&mut self.buffer)?;
        let buffer = std::mem::take(&mut self.buffer);
        self.digest.update(&buffer[..count]);
        self.bytes += count as u64;
        let scanned = self.find_bytes_to_pass_on(&buffer[..count]);
        self.buffer = buffer;
        scanned.map(|()| count > 0)
    }

    /// Finds the ends of the rows in `bytes`, and divides `bytes` into parts to pass on and parts to skip.
    fn find_bytes_to_pass_on(&mut self, bytes: &[u8]) -> io::Result<()> {
        let lines_before = self.lines_passed + self.lines_skipped;
        let (mut start, mut at, mut row_start) = (0, 0, 0);
        while at < bytes.len() {
            let end = self.scanner.find_row_end(&bytes[at..]);
            let len = end.unwrap_or(bytes.len() - at);
            at += len;
            self.row_bytes += len as u64;
            self.block_bytes += len as u64;
            if self.row_bytes > ROW_BYTES_MAX {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            if end.is_none() {
                break;
            }
            row_start = at;
            // An empty line is not the first row, because the crate `csv` skips empty lines.
            let is_first_row = !self.is_first_row_complete && self.row_bytes > 1;
            self.row_bytes = 0;
            if is_first_row || self.block_bytes >= BLOCK_BYTES {
                self.pass_on_or_skip(bytes, start..at);
                start = at;
                self.is_first_row_complete |= is_first_row;
                if self.block_bytes >= BLOCK_BYTES {
                    self.block += 1;
                    self.block_bytes = 0;
                }
                self.begin_segment();
            }
        }
        self.pass_on_or_skip(bytes, start..at);
        if row_start > 0 {
            self.row_line = lines_before + count_lines(&bytes[..row_start]) + 1;
        }
        Ok(())
    }

    /// Begins a segment with the next row. If the last segment has no lines, the new segment replaces it.
    fn begin_segment(&mut self) {
        self.segments.pop_back_if(|last| last.lines_passed_before == self.lines_passed);
        self.segments.push_back(BlockSegment {
            block: self.block,
            lines_passed_before: self.lines_passed,
            lines_skipped_before: self.lines_skipped,
        });
    }

    /// Passes on or skips `part`, a range of `bytes` that belongs to the current block.
    fn pass_on_or_skip(&mut self, bytes: &[u8], part: Range<usize>) {
        let lines = count_lines(&bytes[part.clone()]);
        if !self.is_first_row_complete || self.share.contains(self.block) {
            self.lines_passed += lines;
            if part.start < part.end {
                self.ready.push_back(part);
            }
        } else {
            self.lines_skipped += lines;
        }
        // If the last segment has no lines yet, all lines that were skipped are before its first line.
        if let Some(last) =
            self.segments.back_mut().filter(|last| last.lines_passed_before == self.lines_passed)
        {
            last.lines_skipped_before = self.lines_skipped;
        }
    }
}

/// Returns the number of line ends.
fn count_lines(bytes: &[u8]) -> u64 {
    memchr_iter(b'\n', bytes).count() as u64
}

impl<R: Read> Read for RowFilter<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                let count = part.len().min(out.len());
                let end = part.start + count;
                out[..count].copy_from_slice(&self.buffer[part.start..end]);
                if end < part.end {
                    self.ready.push_front(end..part.end);
                }
                return Ok(count);
            }
            if !self.fill_buffer()? {
                self.has_ended = true;
                return Ok(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use proptest::prelude::*;

    use super::*;

    /// Returns the line, the block and the cells of each row that `RowFilter` passes on.
    fn rows_of_share(text: &[u8], share: BlocksOfRank) -> Vec<(u64, usize, Vec<String>)> {
        let input = RowFilter::new(text, b',', share, 5 * share.ranks);
        let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(input);
        let mut row = csv::ByteRecord::new();
        let mut rows = Vec::new();
        loop {
            let line = reader.position().line();
            if !reader.read_byte_record(&mut row).unwrap() {
                return rows;
            }
            let (line, block) = reader.get_mut().line_and_block_of_row(line);
            rows.push((
                line,
                block,
                row.iter().map(|cell| String::from_utf8_lossy(cell).into_owned()).collect(),
            ));
        }
    }

    proptest! {
        /// If the scanner and the crate `csv` found different ends of a row, a rank would read a part of the row.
        #[test]
        fn the_scanner_and_the_crate_csv_find_the_same_rows(text in "[a,\"\n]{0,60}", part in 1_usize..9) {
            let text = text.as_bytes();
            let mut scanner = RowScanner { separator: b',', place: PlaceInCell::CellStart };
            let mut ends = Vec::new();
            for (index, bytes) in text.chunks(part).enumerate() {
                let mut at = 0;
                while let Some(len) = scanner.find_row_end(&bytes[at..]) {
                    at += len;
                    ends.push(index * part + at);
                }
            }
            let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text);
            let rows: Vec<_> = reader.byte_records().collect::<Result<_, _>>().unwrap();
            let mut found = Vec::new();
            let mut start = 0;
            for end in ends.into_iter().chain([text.len()]) {
                let mut reader =
                    csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(&text[start..end]);
                found.extend(reader.byte_records().map(Result::unwrap));
                start = end;
            }
            prop_assert_eq!(found, rows);
        }
    }

    #[test]
    fn exactly_one_rank_reads_each_row_after_the_first() {
        let mut text = String::from("\nname,\"text\nof a cell\"\n");
        for row in 0..6000 {
            writeln!(text, "{row},\"{}\n\"", "x".repeat(row % 97)).unwrap();
            if row % 5 == 0 {
                text += "\n";
            }
        }
        let all = rows_of_share(text.as_bytes(), BlocksOfRank::ALL);
        assert_eq!(all.len(), 6001);
        assert!(all.last().unwrap().1 > 5 + 4, "the text has several blocks");
        for ranks in [2, 3, 7] {
            let mut found = Vec::new();
            for rank in 0..ranks {
                let rows = rows_of_share(text.as_bytes(), BlocksOfRank { rank, ranks });
                assert_eq!(rows[0].2, all[0].2);
                assert!(rows[1..].iter().all(|row| row.1 % ranks == rank));
                found.extend_from_slice(&rows[1..]);
            }
            found.sort();
            let expected = all[1..].iter().map(|row| (row.0, row.1 - 5 + 5 * ranks, row.2.clone()));
            assert_eq!(found, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_error_about_a_long_row_names_its_first_line() {
        let start = &b"a,b\n1,2\n\"3\n"[..];
        let mut input = RowFilter::new(start.chain(io::repeat(b'\n')), b',', BlocksOfRank::ALL, 0);
        let error = io::copy(&mut input, &mut io::sink()).unwrap_err();
        assert_eq!((error.kind(), input.long_row_line()), (io::ErrorKind::FileTooLarge, 3));
    }
}
