//! Reads the files in zip archives.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use flate2::CrcReader;
use flate2::bufread::DeflateDecoder;
use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

use super::DataError;
use super::compression::invalid_data_error;
use super::file::stream_error;

/// If an archive has several files, the error message shows at most this number of names.
const ARCHIVED_NAMES_SHOWN_MAX: usize = 5;

/// A zip archive whose list of files has been read.
pub(crate) struct Archive {
    path: PathBuf,
    zip: ZipArchive<BufReader<File>>,
}

impl Archive {
    /// Reads the list of files of the archive in `reader`. `path` is the name of the archive in errors.
    ///
    /// # Errors
    ///
    /// If `reader` does not hold a zip archive, or if the archive is damaged.
    pub(crate) fn new(path: &Path, reader: BufReader<File>) -> Result<Self, DataError> {
        let zip = ZipArchive::new(reader).map_err(|error| archive_error(path, error))?;
        Ok(Self { path: path.to_owned(), zip })
    }

    /// Returns the index and the name of each file. Leaves out directories, hidden files and the metadata that macOS
    /// adds.
    pub(crate) fn files(&self) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for index in 0..self.zip.len() {
            let Some(Ok(name)) = self.zip.name_for_index(index) else { continue };
            let is_hidden_part =
                |part: &str| part.starts_with('.') && !matches!(part, "." | "..") || part == "__MACOSX";
            let is_hidden = name.split('/').any(is_hidden_part);
            if !name.ends_with('/') && !is_hidden {
                found.push((index, name.into_owned()));
            }
        }
        found
    }

    /// Returns the content of the only file.
    ///
    /// # Errors
    ///
    /// If the archive does not hold exactly one file, and the errors of [`into_file`](Self::into_file).
    pub(crate) fn into_only_file(self) -> Result<Box<dyn Read>, DataError> {
        let files = self.files();
        if let [(index, _)] = files.as_slice() {
            return self.into_file(*index);
        }
        let names: Vec<&str> =
            files.iter().take(ARCHIVED_NAMES_SHOWN_MAX).map(|(_, name)| name.as_str()).collect();
        let problem = match files.len() {
            0 => "is a zip archive without a file".to_owned(),
            count => {
                let more = if count > names.len() { ", ..." } else { "" };
                format!(
                    "holds {count} files ({}{more}), but must hold one; extract the files and pass the file that you want to use",
                    names.join(", ")
                )
            }
        };
        Err(DataError::malformed(&self.path, problem))
    }

    /// Returns the content of the file with the index `index`.
    ///
    /// The crate `zip` finds the position of the content. The readers of the crate `zip` borrow the archive, but the
    /// caller of this function needs a reader that owns the file. Therefore this function decompresses the content
    /// itself.
    ///
    /// # Errors
    ///
    /// If the file is damaged or encrypted, or has a compression other than Deflate.
    pub(crate) fn into_file(mut self, index: usize) -> Result<Box<dyn Read>, DataError> {
        let path = &self.path;
        let entry = self.zip.by_index_raw(index).map_err(|error| archive_error(path, error))?;
        if entry.encrypted() {
            return Err(DataError::malformed(
                path,
                "is encrypted; extract the file and pass the extracted file",
            ));
        }
        let (method, bytes, expected_checksum) =
            (entry.compression(), entry.compressed_size(), entry.crc32());
        let start = entry.data_start().ok_or_else(|| DataError::malformed(path, "has no content"))?;
        drop(entry);
        let mut reader = self.zip.into_inner();
        reader.seek(SeekFrom::Start(start)).map_err(|error| stream_error(path, error))?;
        let content = reader.take(bytes);
        let content: Box<dyn Read> = match method {
            CompressionMethod::Stored => Box::new(content),
            CompressionMethod::DEFLATE => Box::new(DeflateDecoder::new(content)),
            other => {
                let problem =
                    format!("uses the compression {other:?}; extract the file and pass the extracted file");
                return Err(DataError::malformed(path, problem));
            }
        };
        Ok(Box::new(ArchivedFile { content: CrcReader::new(content), expected_checksum }))
    }
}

/// Converts an error of the crate `zip`.
fn archive_error(path: &Path, error: ZipError) -> DataError {
    match error {
        ZipError::Io(error) => stream_error(path, error),
        error => {
            DataError::malformed(path, format!("is not a valid zip archive ({error}); download it again"))
        }
    }
}

/// The content of a file in a zip archive. The read that reaches the end of the content checks the checksum.
struct ArchivedFile {
    /// The decompressed content.
    content: CrcReader<Box<dyn Read>>,
    /// The checksum that the archive holds for the content.
    expected_checksum: u32,
}

impl Read for ArchivedFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.content.read(buffer)?;
        if count == 0 && !buffer.is_empty() && self.content.crc().sum() != self.expected_checksum {
            return Err(invalid_data_error(
                "the checksum in the zip archive differs from the checksum of the content",
            ));
        }
        Ok(count)
    }
}

/// Archives for tests.
#[cfg(test)]
pub(crate) mod test_archives {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::DeflateEncoder;
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    /// Returns an archive with the given names and contents, which are not compressed.
    pub(crate) fn make_stored_zip(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut writer = ZipWriter::new(io::Cursor::new(Vec::new()));
        for (name, bytes) in files {
            let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
            writer.start_file(*name, options).unwrap();
            writer.write_all(bytes).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    /// Returns an archive with the given names and contents, which are compressed. Python's `zipfile` writes the same
    /// fields. This function does not use the crate `zip`, because this package builds that crate without compression.
    pub(crate) fn make_deflated_zip(files: &[(&str, &[u8])]) -> Vec<u8> {
        let (mut contents, mut directory) = (Vec::new(), Vec::new());
        for (name, bytes) in files {
            let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(bytes).unwrap();
            let packed = encoder.finish().unwrap();
            let mut crc = CrcReader::new(*bytes);
            io::copy(&mut crc, &mut io::sink()).unwrap();
            let common = [
                &[20, 0, 0, 0, 8, 0, 0, 0, 0, 0][..],
                &crc.crc().sum().to_le_bytes(),
                &(packed.len() as u32).to_le_bytes(),
                &(bytes.len() as u32).to_le_bytes(),
                &(name.len() as u16).to_le_bytes(),
                &[0, 0],
            ]
            .concat();
            let start = (contents.len() as u32).to_le_bytes();
            let entry = [b"PK\x01\x02\x14\x00", &common[..], &[0; 10], &start, name.as_bytes()].concat();
            directory.extend(entry);
            contents.extend([b"PK\x03\x04", &common[..], name.as_bytes(), &packed].concat());
        }
        let count = (files.len() as u16).to_le_bytes();
        let (size, start) = ((directory.len() as u32).to_le_bytes(), (contents.len() as u32).to_le_bytes());
        let end = [b"PK\x05\x06", &[0; 4][..], &count, &count, &size, &start, &[0, 0]].concat();
        [contents, directory, end].concat()
    }
}
