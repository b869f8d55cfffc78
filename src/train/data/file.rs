//! Opening data files, plain or compressed.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::{DataError, ELEMENTS_MAX};

/// A file's content as a stream, decompressed if its name ends in `.gz`.
///
/// # Errors
///
/// [`DataError::Unreadable`] if the file is missing, not a file, or may not be read.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Read>, DataError> {
    let file = File::open(path).map_err(|error| DataError::unreadable(path, error))?;
    let metadata = file.metadata().map_err(|error| DataError::unreadable(path, error))?;
    if metadata.is_dir() {
        return Err(DataError::malformed(path, "is a directory where a file is needed"));
    }
    let reader = BufReader::with_capacity(1 << 18, file);
    let compressed = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gz"));
    Ok(if compressed { Box::new(MultiGzDecoder::new(reader)) } else { Box::new(reader) })
}

/// The extension of a file's name in lower case, without `.gz`: `csv` for `a.CSV.gz`.
pub(crate) fn extension(path: &Path) -> Option<String> {
    let outer = path.extension()?.to_str()?.to_ascii_lowercase();
    if outer != "gz" {
        return Some(outer);
    }
    Some(Path::new(path.file_stem()?).extension()?.to_str()?.to_ascii_lowercase())
}

/// The rest of a stream, which must be exactly `len` bytes.
///
/// Memory grows with the bytes that are read. It does not depend on `len`, which a wrong file may claim to be anything.
pub(crate) fn read_exactly(reader: &mut dyn Read, len: u64, path: &Path) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    reader.take(len + 1).read_to_end(&mut bytes).map_err(|error| stream_error(path, error))?;
    let found = bytes.len() as u64;
    if found < len {
        let problem = format!("is truncated: its header says {len} bytes of data, but it holds {found}");
        return Err(DataError::malformed(path, problem));
    }
    if found > len {
        let problem = format!("holds more than the {len} bytes of data that its header says");
        return Err(DataError::malformed(path, problem));
    }
    Ok(bytes)
}

/// Checks a claimed number of values against [`ELEMENTS_MAX`].
pub(crate) fn bounded(dimensions: &[u64], path: &Path) -> Result<u64, DataError> {
    let product = dimensions.iter().try_fold(1_u64, |product, &length| product.checked_mul(length));
    product.filter(|&count| count <= ELEMENTS_MAX).ok_or_else(|| {
        let problem = format!("its header says {dimensions:?} values; the limit is {ELEMENTS_MAX} in all");
        DataError::malformed(path, problem)
    })
}

/// An error while reading: a broken gzip stream is the fault of the file, other errors are those of the machine.
pub(crate) fn stream_error(path: &Path, error: std::io::Error) -> DataError {
    use std::io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    if matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof) {
        DataError::malformed(path, format!("is truncated or not valid gzip ({error}); fetch it again"))
    } else {
        DataError::unreadable(path, error)
    }
}
