//! The bytes of a text, in memory or in a temporary file. They are read in blocks of complete lines.

use std::borrow::Cow;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::name_of_files;
use crate::train::data::file::{open_data_file, stream_error};
use crate::train::data::stream_file::StreamFile;
use crate::train::data::{DataError, ELEMENTS_MAX};
use crate::train::rank_checks::short_digest;

/// The byte-order mark, with which some UTF-8 files begin.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// A block ends after the first complete line that follows this number of bytes. The blocks are small because the crate
/// `tokenizers` needs much memory for each byte of a call.
const BLOCK_BYTES: usize = 1 << 16;
/// The number of bytes that are read at once to find the end of a block.
const READ_BYTES: usize = BLOCK_BYTES + (1 << 12);
/// The maximum number of bytes of a block. A block with a longer line ends after a complete character.
const BLOCK_BYTES_MAX: usize = 1 << 20;

/// The content of one or more text files, without byte-order marks.
pub(crate) struct StoredText {
    content: TextContent,
    /// A name for the text, for messages.
    name: String,
    hasher: Sha256,
}

enum TextContent {
    InMemory(Vec<u8>),
    OnDisk(StreamFile),
}

/// Some complete lines of a text.
pub(crate) struct TextBlock<'a> {
    pub(super) bytes: Cow<'a, [u8]>,
    /// The number of lines before this block.
    lines_before: usize,
}

impl StoredText {
    /// Reads `files`, in this order. The text is in memory, or in a temporary file in `stream_directory` if there is one.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, if the text is too long, or if the temporary file cannot be written.
    pub(super) fn read(files: &[PathBuf], stream_directory: Option<&Path>) -> Result<Self, DataError> {
        let content = match stream_directory {
            None => TextContent::InMemory(Vec::new()),
            Some(directory) => TextContent::OnDisk(StreamFile::create(directory)?),
        };
        let mut text = Self { content, name: name_of_files(files), hasher: Sha256::new() };
        text.append_files(files)?;
        Ok(text)
    }

    /// Adds the content of more files. The limit of the length applies to these files alone.
    pub(super) fn append_files(&mut self, files: &[PathBuf]) -> Result<(), DataError> {
        let (mut block, len_before) = (Vec::new(), self.len());
        if len_before > 0 {
            self.name = format!("{} and then {}", self.name, name_of_files(files));
        }
        for path in files {
            let mut reader = open_data_file(path)?;
            let mut is_first = true;
            loop {
                block.clear();
                let read = reader.by_ref().take(BLOCK_BYTES_MAX as u64).read_to_end(&mut block);
                if read.map_err(|error| stream_error(path, error))? == 0 {
                    break;
                }
                let start =
                    if is_first && block.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
                is_first = false;
                if (self.len() - len_before + block.len() - start) as u64 > ELEMENTS_MAX {
                    let problem = format!("the text has more than {ELEMENTS_MAX} bytes; pass a shorter text");
                    return Err(DataError::malformed(path, problem));
                }
                self.append(&block[start..])?;
            }
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.hasher.update(bytes);
        match &mut self.content {
            TextContent::InMemory(text) => text.extend_from_slice(bytes),
            TextContent::OnDisk(file) => {
                file.append(bytes)?;
            }
        }
        Ok(())
    }

    /// Returns a text in memory.
    #[cfg(test)]
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let content = TextContent::InMemory(bytes.to_owned());
        Self { content, name: "text".into(), hasher: Sha256::new() }
    }

    /// Returns the number of bytes.
    pub(super) fn len(&self) -> usize {
        match &self.content {
            TextContent::InMemory(text) => text.len(),
            TextContent::OnDisk(file) => file.len() as usize,
        }
    }

    /// Returns a hash of the text.
    pub(super) fn digest(&self) -> u64 {
        short_digest(&self.hasher.clone().finalize())
    }

    /// Returns an error about this text.
    pub(super) fn refuse(&self, problem: impl Into<String>) -> DataError {
        DataError::Unsuitable(format!("{}: {}", self.name, problem.into()))
    }

    /// Returns the first position at or after `position` where a UTF-8 character starts. Returns the length of the text if
    /// there is no such position.
    pub(super) fn start_of_character(&self, position: usize) -> Result<usize, DataError> {
        for start in (position..self.len()).step_by(READ_BYTES) {
            let bytes = self.bytes(start..self.len().min(start + READ_BYTES))?;
            if let Some(index) = bytes.iter().position(|&byte| starts_character(byte)) {
                return Ok(start + index);
            }
        }
        Ok(self.len())
    }

    /// Returns the blocks of the bytes in `range`, in this order. `range` must begin and end with a complete character. After
    /// an error, there are no more blocks.
    pub(super) fn blocks(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = Result<TextBlock<'_>, DataError>> + Send {
        divide_into_blocks(range, |range| self.bytes(range))
    }

    fn bytes(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>, DataError> {
        match &self.content {
            TextContent::InMemory(text) => Ok(Cow::Borrowed(&text[range])),
            TextContent::OnDisk(file) => {
                let mut bytes = vec![0; range.len()];
                file.read_at(&mut bytes, range.start as u64)?;
                Ok(Cow::Owned(bytes))
            }
        }
    }
}

impl TextBlock<'_> {
    /// Returns the block as a string. If the block is not UTF-8, the error is a sentence that names the line.
    pub(super) fn to_str(&self) -> Result<&str, String> {
        std::str::from_utf8(&self.bytes).map_err(|error| {
            let line = self.line_number(error.valid_up_to());
            format!("line {line}: the text is not UTF-8; convert it to UTF-8, or pass --tokens bytes")
        })
    }

    /// Returns the number of the line with the byte `index` of this block. The first line of the first block has the number 1.
    pub(super) fn line_number(&self, index: usize) -> usize {
        self.lines_before + count_line_ends(&self.bytes[..index]) + 1
    }
}

/// Returns the blocks of a text in memory.
pub(super) fn blocks_in_memory(text: &[u8]) -> impl Iterator<Item = TextBlock<'_>> {
    divide_into_blocks(0..text.len(), |range| Ok(Cow::Borrowed(&text[range]))).flatten()
}

/// Divides a text into blocks. `read` returns a range of its bytes.
fn divide_into_blocks<'a>(
    range: Range<usize>,
    read: impl Fn(Range<usize>) -> Result<Cow<'a, [u8]>, DataError>,
) -> impl Iterator<Item = Result<TextBlock<'a>, DataError>> {
    let (mut rest, mut lines_before) = (range, 0);
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let block = read_block(rest.clone(), &read).map(|bytes| TextBlock { bytes, lines_before });
        match &block {
            Ok(TextBlock { bytes, .. }) => {
                rest.start += bytes.len();
                lines_before += count_line_ends(bytes);
            }
            Err(_) => rest.start = rest.end,
        }
        Some(block)
    })
}

/// Reads the first block of the bytes in `rest`.
fn read_block<'a>(
    rest: Range<usize>,
    read: impl Fn(Range<usize>) -> Result<Cow<'a, [u8]>, DataError>,
) -> Result<Cow<'a, [u8]>, DataError> {
    let first_bytes = |len: usize| rest.start..rest.end.min(rest.start + len);
    let end_of_line = |bytes: &[u8]| {
        let position = memchr::memchr(b'\n', bytes.get(BLOCK_BYTES..)?)?;
        Some(BLOCK_BYTES + position + 1)
    };
    let mut bytes = read(first_bytes(READ_BYTES))?;
    let mut end = end_of_line(&bytes);
    if end.is_none() && bytes.len() < rest.len() {
        bytes = read(first_bytes(BLOCK_BYTES_MAX))?;
        end = end_of_line(&bytes);
        if end.is_none() && bytes.len() < rest.len() {
            // The last character may be incomplete. A character has at most 4 bytes.
            let last = bytes.len() - 4..bytes.len();
            end = last.rev().find(|&index| starts_character(bytes[index]));
        }
    }
    let len = end.unwrap_or(bytes.len());
    Ok(match bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[..len]),
        Cow::Owned(mut bytes) => {
            bytes.truncate(len);
            Cow::Owned(bytes)
        }
    })
}

/// Returns whether `byte` is the first byte of a UTF-8 character.
fn starts_character(byte: u8) -> bool {
    byte & 0b1100_0000 != 0b1000_0000
}

fn count_line_ends(bytes: &[u8]) -> usize {
    memchr::memchr_iter(b'\n', bytes).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines are shorter than a block, as long as several blocks, or longer than the longest block.
    #[test]
    fn blocks_in_memory_and_on_disk_are_the_same_complete_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.txt");
        for line in [80, 3 * BLOCK_BYTES, 2 * BLOCK_BYTES_MAX] {
            let lines = ["€".repeat(line / 3), "\n".into()].concat().repeat(3 * BLOCK_BYTES_MAX / line);
            std::fs::write(&path, ["\u{feff}", &lines].concat()).unwrap();
            let read = |stream_directory| {
                let text = StoredText::read(std::slice::from_ref(&path), stream_directory).unwrap();
                assert_eq!(text.len(), lines.len());
                let blocks: Vec<(String, usize)> = text
                    .blocks(0..text.len())
                    .map(|block| {
                        let block = block.unwrap();
                        (block.to_str().unwrap().to_owned(), block.line_number(0))
                    })
                    .collect();
                let starts: Vec<usize> = (1..4).map(|at| text.start_of_character(at).unwrap()).collect();
                assert_eq!(starts, [3, 3, 3]);
                (blocks, text.digest())
            };
            let (blocks, digest) = read(None);
            assert!((blocks.clone(), digest) == read(Some(directory.path())), "{line}");
            assert_eq!(blocks.iter().map(|(block, _)| block.as_str()).collect::<String>(), lines);
            assert!(blocks.len() > 1 && blocks.iter().all(|(block, _)| block.len() <= BLOCK_BYTES_MAX));
            let mut line_number = 1;
            for (block, first_line) in &blocks {
                assert_eq!(*first_line, line_number, "{line}");
                assert!(block.ends_with('\n') || line > BLOCK_BYTES_MAX, "{line}");
                line_number += count_line_ends(block.as_bytes());
            }
        }
    }
}
