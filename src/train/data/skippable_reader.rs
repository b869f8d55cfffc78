//! Reads parts of a file. Bytes between the parts are skipped: in a plain file without reading them, and in a
//! compressed file by decompressing them.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use super::DataError;
use super::compression::{FileCompression, READ_BUFFER_BYTES, decompress};
use super::file::{open_file, read_part, stream_error};

/// A stream of bytes that can skip bytes.
pub(crate) enum SkippableReader {
    /// A plain file.
    File(BufReader<File>),
    /// A stream that must be read from its beginning to its end.
    Stream(Box<dyn Read>),
}

impl SkippableReader {
    /// Opens a file. Decompresses it if the name of the file ends in `.gz`, `.zip` or `.zst`.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = open_file(path)?;
        let compression = FileCompression::from_file_name(path);
        // A pipe cannot skip bytes.
        let is_plain = compression.is_none() && file.metadata().is_ok_and(|metadata| metadata.is_file());
        Ok(if is_plain {
            Self::File(BufReader::with_capacity(READ_BUFFER_BYTES, file))
        } else {
            Self::Stream(decompress(path, file, compression)?)
        })
    }

    /// Skips `count` bytes. If the file is shorter, this call or the next read finds its end.
    pub(crate) fn skip(&mut self, count: u64) -> io::Result<()> {
        match self {
            Self::File(file) => file.seek_relative(i64::try_from(count).unwrap_or(i64::MAX)),
            Self::Stream(stream) => io::copy(&mut stream.take(count), &mut io::sink()).map(|_| ()),
        }
    }

    /// Returns the number of bytes of the file, which must not have been read yet. Reads a stream to its end.
    pub(crate) fn into_len(self) -> io::Result<u64> {
        match self {
            Self::File(file) => Ok(file.get_ref().metadata()?.len()),
            Self::Stream(mut stream) => io::copy(&mut stream, &mut io::sink()),
        }
    }
}

impl Read for SkippableReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(buffer),
            Self::Stream(stream) => stream.read(buffer),
        }
    }
}

/// The bytes of data after the header of a file. The header announces the number of bytes.
pub(crate) struct DataBytes {
    reader: SkippableReader,
    /// The path of the file.
    pub(crate) path: PathBuf,
    /// The number of bytes that the header announces.
    len: u64,
    /// The number of bytes that were read or skipped.
    position: u64,
}

impl DataBytes {
    /// `reader` is at the end of the header of the file at `path`.
    pub(crate) fn new(reader: SkippableReader, path: &Path, len: u64) -> Self {
        Self { reader, path: path.to_owned(), len, position: 0 }
    }

    /// Returns the position in the data of the next byte to read.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Skips bytes, so that the next byte to read is the byte `position` of the data.
    pub(crate) fn skip_to(&mut self, position: u64) -> Result<(), DataError> {
        let skipped = self.reader.skip(position - self.position);
        self.position = position;
        skipped.map_err(|error| stream_error(&self.path, error))
    }

    /// Reads the next `count` bytes. If they are the last bytes that the header announces, checks that the file ends there.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is too short, or is too long.
    pub(crate) fn read(&mut self, count: u64) -> Result<Vec<u8>, DataError> {
        let range = self.position..self.position + count;
        self.position = range.end;
        read_part(&mut self.reader, range, self.len, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    #[test]
    fn parts_of_plain_and_compressed_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        // The file is longer than the buffer.
        let content: Vec<u8> = (0..3 * READ_BUFFER_BYTES).map(|index| (index % 251) as u8).collect();
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&content).unwrap();
        let len = content.len() as u64 - 7;
        for (name, bytes) in [("a", content.clone()), ("a.gz", encoder.finish().unwrap())] {
            let path = directory.path().join(name);
            fs::write(&path, bytes).unwrap();
            let open = |announced: u64| {
                let mut reader = SkippableReader::open(&path).unwrap();
                reader.read_exact(&mut [0; 7]).unwrap();
                DataBytes::new(reader, &path, announced)
            };
            let (mut data, mut found) = (open(len), Vec::new());
            let middle = 2 * READ_BUFFER_BYTES as u64 + 5;
            for range in [1..4, 4..6, middle..middle + 3, len - 2..len] {
                data.skip_to(range.start).unwrap();
                found.extend(data.read(range.end - range.start).unwrap());
            }
            let at = |start: usize, count: usize| content[7 + start..7 + start + count].to_vec();
            let expected = [at(1, 5), at(middle as usize, 3), at(len as usize - 2, 2)].concat();
            assert_eq!(found, expected, "{name}");
            // A rank that does not read the last bytes does not notice that the length is wrong.
            open(len + 1).read(3).unwrap();
            for (announced, expected) in [(len + 1, "is truncated"), (len - 1, "holds more than")] {
                let mut data = open(announced);
                data.skip_to(announced - 1).unwrap();
                let error = data.read(1).unwrap_err().to_string();
                assert!(error.contains(expected) && error.contains(name), "{error}");
            }
        }
    }
}
