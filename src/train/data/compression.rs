//! Decompresses data files: gzip, Zstandard, and zip archives that hold one file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::GzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::DataError;
use super::archive::Archive;

/// The size in bytes of the buffer through which a file is read.
pub(super) const READ_BUFFER_BYTES: usize = 1 << 18;

/// The compression of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FileCompression {
    /// One or more gzip streams. Each stream may be padded with zeros.
    Gzip,
    /// A zip archive that holds one file.
    Zip,
    /// One or more Zstandard frames.
    Zstandard,
}

impl FileCompression {
    /// Returns the compression that the extension of a file's name stands for. Returns `None` if the extension stands
    /// for no compression.
    pub(crate) fn from_file_name(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "gz" => Some(Self::Gzip),
            "zip" => Some(Self::Zip),
            "zst" => Some(Self::Zstandard),
            _ => None,
        }
    }

    /// Returns the compression of a file that starts with `bytes`. Returns `None` if the file is not compressed.
    pub(crate) fn from_file_content(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0x1f, 0x8b, 8, ..] => Some(Self::Gzip),
            [b'P', b'K', 3, 4, ..] => Some(Self::Zip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Self::Zstandard),
            _ => None,
        }
    }

    /// Returns the extension of files with this compression.
    pub(crate) fn extension(self) -> &'static str {
        match self {
            Self::Gzip => ".gz",
            Self::Zip => ".zip",
            Self::Zstandard => ".zst",
        }
    }
}

/// Returns a stream of the decompressed content of `file`. `path` is the name of the file in errors.
///
/// # Errors
///
/// If a zip archive is damaged, is encrypted, or does not hold exactly one file. If a gzip or Zstandard file is
/// damaged, reading the stream returns an error.
pub(crate) fn decompress(
    path: &Path,
    file: File,
    compression: Option<FileCompression>,
) -> Result<Box<dyn Read>, DataError> {
    let reader = BufReader::with_capacity(READ_BUFFER_BYTES, file);
    match compression {
        None => Ok(Box::new(reader)),
        Some(FileCompression::Gzip) => Ok(Box::new(GzipReader { stream: Some(GzDecoder::new(reader)) })),
        Some(FileCompression::Zstandard) => Ok(Box::new(ZstandardReader::new(reader))),
        Some(FileCompression::Zip) => Archive::new(path, reader)?.into_only_file(),
    }
}

/// The decompressed content of one or more gzip streams. Like `gzip`, this reader skips zeros after a stream.
struct GzipReader<R> {
    /// The current stream. `None` at the end of the file.
    stream: Option<GzDecoder<R>>,
}

impl<R: BufRead> Read for GzipReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        while let Some(stream) = &mut self.stream {
            let count = stream.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            let mut source = self.stream.take().expect("there is a current stream").into_inner();
            if skip_zeros(&mut source)? {
                self.stream = Some(GzDecoder::new(source));
            }
        }
        Ok(0)
    }
}

/// Skips bytes that are 0. Returns `false` at the end of the source.
fn skip_zeros(source: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let bytes = source.fill_buf()?;
        let (zeros, len) = (bytes.iter().take_while(|&&byte| byte == 0).count(), bytes.len());
        source.consume(zeros);
        if len == 0 || zeros < len {
            return Ok(len > 0);
        }
    }
}

/// The decompressed content of a Zstandard stream, which may have several frames.
struct ZstandardReader<R> {
    /// The compressed stream.
    source: R,
    decoder: FrameDecoder,
    /// Whether `decoder` has begun a frame and has not returned all of its content.
    in_frame: bool,
    /// How often [`begin_frame`](Self::begin_frame) has tried to begin a frame.
    frame_attempts: u64,
}

impl<R: BufRead> ZstandardReader<R> {
    fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), in_frame: false, frame_attempts: 0 }
    }

    /// Begins the next frame. Returns `false` at the end of the stream. An empty stream is an error.
    fn begin_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() && self.frame_attempts > 0 {
                return Ok(false);
            }
            self.frame_attempts += 1;
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                }
                Err(error) => return Err(invalid_data_error(&error.to_string())),
            }
        }
    }

    /// Ends a frame. If the frame has a checksum, compares it with the checksum of the content.
    fn end_frame(&mut self) -> io::Result<()> {
        self.in_frame = false;
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(expected), Some(found)) if expected != found => Err(invalid_data_error(
                "the checksum of a Zstandard frame differs from the checksum of its content",
            )),
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for ZstandardReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame {
                if !self.begin_frame()? {
                    return Ok(0);
                }
                self.in_frame = true;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 {
                return Ok(count);
            }
            if self.decoder.is_finished() {
                self.end_frame()?;
            } else {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| invalid_data_error(&error.to_string()))?;
            }
        }
    }
}

/// Returns an error that reports damage in a file.
pub(super) fn invalid_data_error(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::super::archive::test_archives::{make_deflated_zip, make_stored_zip};
    use super::super::file::{open_data_file, stream_error};
    use super::*;

    fn make_csv_content() -> Vec<u8> {
        (0..50_000_u32).flat_map(|index| format!("{},{}\n", index % 97, index).into_bytes()).collect()
    }

    fn compress_with_gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn write_and_read(directory: &Path, name: &str, bytes: &[u8]) -> Result<Vec<u8>, String> {
        let path = directory.join(name);
        std::fs::write(&path, bytes).unwrap();
        let mut reader = open_data_file(&path).map_err(|error| error.to_string())?;
        let mut content = Vec::new();
        match reader.read_to_end(&mut content) {
            Ok(_) => Ok(content),
            Err(error) => Err(stream_error(&path, error).to_string()),
        }
    }

    #[test]
    fn every_compression_gives_the_same_content() {
        let directory = tempfile::tempdir().unwrap();
        let content = make_csv_content();
        let (first, second) = content.split_at(1000);
        let zst = |bytes: &[u8]| compress_to_vec(bytes, CompressionLevel::Fastest);
        // The magic number, the length and the content of a frame that decoders skip.
        let skipped = [0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 7, 7];
        let archive = [("__MACOSX/._a.csv", &b"x"[..]), ("folder/a.csv", &content), (".DS_Store", b"y")];
        for (name, bytes) in [
            ("a.csv", content.clone()),
            ("a.csv.gz", compress_with_gzip(&content)),
            ("b.csv.GZ", [compress_with_gzip(first), compress_with_gzip(second)].concat()),
            // Regression test: before the fix, zeros at the end caused an error.
            (
                "c.csv.gz",
                [compress_with_gzip(first), vec![0; 700], compress_with_gzip(second), vec![0; 1 << 19]]
                    .concat(),
            ),
            ("a.csv.zst", zst(&content)),
            ("b.csv.zst", [&zst(first)[..], &skipped, &zst(second)].concat()),
            ("a.csv.zip", make_stored_zip(&archive)),
            ("b.csv.zip", make_deflated_zip(&[("a.csv", &content)])),
            // Regression test: before the fix, `./a.csv` was taken for a hidden file.
            ("c.csv.zip", make_stored_zip(&[("./a.csv", &content), ("./.hidden", b"x")])),
            ("d.csv.zip", make_stored_zip(&[("../folder/a.csv", &content)])),
        ] {
            assert!(write_and_read(directory.path(), name, &bytes).as_ref() == Ok(&content), "{name}");
        }
    }

    #[test]
    fn damaged_files_and_unsuitable_archives_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let content = make_csv_content();
        let (zst, deflated) = (
            compress_to_vec(&content[..], CompressionLevel::Fastest),
            make_deflated_zip(&[("a.csv", &content)]),
        );
        let mut flipped = make_stored_zip(&[("a.csv", &content)]);
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        for (name, bytes, expected) in [
            ("a.gz", &compress_with_gzip(&content)[..999], "truncated"),
            ("b.gz", b"", "truncated"),
            ("c.gz", &[compress_with_gzip(&content), vec![0, 0, 1]].concat(), "truncated or corrupt"),
            ("a.zst", &zst[..zst.len() / 2], "truncated"),
            ("b.zst", b"", "truncated"),
            ("c.zst", b"plain text", "truncated or corrupt"),
            ("a.zip", &deflated[..999], "not a valid zip"),
            ("b.zip", b"", "not a valid zip"),
            ("c.zip", &flipped, "checksum"),
            ("d.zip", &make_stored_zip(&[("a.csv", b"1"), ("b.csv", b"2")]), "holds 2 files (a.csv, b.csv)"),
            ("e.zip", &make_stored_zip(&[]), "without a file"),
        ] {
            let error = write_and_read(directory.path(), name, bytes).unwrap_err();
            assert!(error.contains(expected) && error.contains(name), "{name}: {error}");
        }
    }

    #[test]
    fn the_compression_is_recognised_by_name_and_by_content() {
        for (compression, bytes) in [
            (FileCompression::Gzip, compress_with_gzip(b"a")),
            (FileCompression::Zip, make_stored_zip(&[("a", b"a")])),
            (FileCompression::Zstandard, compress_to_vec(&b"a"[..], CompressionLevel::Fastest)),
        ] {
            assert_eq!(FileCompression::from_file_content(&bytes), Some(compression));
            let name = format!("a.csv{}", compression.extension());
            assert_eq!(FileCompression::from_file_name(Path::new(&name)), Some(compression));
        }
        assert_eq!(FileCompression::from_file_content(b"a,b"), None);
    }
}
