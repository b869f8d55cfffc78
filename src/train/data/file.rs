//! Opens and reads data files, plain or compressed.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use super::compression::{FileCompression, decompress};
use super::{DataError, ELEMENTS_MAX};

/// Opens a file as a stream. Decompresses the stream if the name of the file ends in `.gz`, `.zip` or `.zst`.
///
/// # Errors
///
/// [`DataError::Unreadable`] if the file is missing or cannot be opened. [`DataError::Malformed`] if the path is a directory or
/// an archive that cannot be used.
pub(crate) fn open_data_file(path: &Path) -> Result<Box<dyn Read>, DataError> {
    decompress(path, open_file(path)?, FileCompression::from_file_name(path))
}

/// Opens a file. Returns an error if the path is a directory.
pub(super) fn open_file(path: &Path) -> Result<File, DataError> {
    let file = File::open(path).map_err(|error| DataError::unreadable(path, error))?;
    let metadata = file.metadata().map_err(|error| DataError::unreadable(path, error))?;
    if metadata.is_dir() {
        return Err(DataError::malformed(path, "is a directory, but a file is needed"));
    }
    Ok(file)
}

/// Returns the extension of a file's name in lower case, without the extension of its compression: `csv` for `a.CSV.gz`.
pub(crate) fn extension(path: &Path) -> Option<String> {
    let name = match FileCompression::from_file_name(path) {
        Some(_) => Path::new(path.file_stem()?),
        None => path,
    };
    Some(name.extension()?.to_str()?.to_ascii_lowercase())
}

/// Reads the rest of a stream. Returns an error if the rest does not have exactly `len` bytes.
pub(crate) fn read_exactly(reader: &mut dyn Read, len: u64, path: &Path) -> Result<Vec<u8>, DataError> {
    read_part(reader, 0..len, len, path)
}

/// Reads the bytes `range` of the data that follow a header. `total` is the number of bytes that the header announces.
/// If `range` ends at `total`, returns an error if the stream has more bytes. `reader` must be at the start of `range`.
///
/// This function allocates memory only for bytes that it has read, because the header of a malformed file may announce any
/// length.
pub(crate) fn read_part(
    reader: &mut dyn Read,
    range: Range<u64>,
    total: u64,
    path: &Path,
) -> Result<Vec<u8>, DataError> {
    let len = range.end - range.start;
    let limit = if range.end == total { len + 1 } else { len };
    let mut bytes = Vec::new();
    reader.take(limit).read_to_end(&mut bytes).map_err(|error| stream_error(path, error))?;
    let found = bytes.len() as u64;
    if found < len {
        let problem =
            format!("is truncated: it has fewer than the {total} bytes of data that its header announces");
        return Err(DataError::malformed(path, problem));
    }
    if found > len {
        let problem = format!("holds more than the {total} bytes of data that its header announces");
        return Err(DataError::malformed(path, problem));
    }
    Ok(bytes)
}

/// Returns the number of values in an array with the dimensions that a header announces. Returns an error if there
/// are more than [`ELEMENTS_MAX`] values.
pub(crate) fn checked_element_count(dimensions: &[u64], path: &Path) -> Result<u64, DataError> {
    let product = dimensions.iter().try_fold(1_u64, |product, &length| product.checked_mul(length));
    product.filter(|&count| count <= ELEMENTS_MAX).ok_or_else(|| {
        let problem = format!(
            "its header announces an array of the shape {dimensions:?}; the limit is {ELEMENTS_MAX} values"
        );
        DataError::malformed(path, problem)
    })
}

/// Converts an error of a read: damaged compressed data to [`DataError::Malformed`], other errors to
/// [`DataError::Unreadable`].
pub(crate) fn stream_error(path: &Path, error: std::io::Error) -> DataError {
    use std::io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    if matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof) {
        DataError::malformed(path, format!("is truncated or corrupt ({error}); download it again"))
    } else {
        DataError::unreadable(path, error)
    }
}
