//! Converts failures of the crate `parquet` to errors that name the file.

use std::any::Any;
use std::cell::Cell;
use std::error::Error;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Once;

use ::parquet::errors::ParquetError;

use crate::train::data::DataError;

thread_local! {
    /// Whether this thread runs code whose panics become errors.
    static CATCHES_PANICS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `read`, which reads a part of the file `path`. A damaged file can make the crate `parquet` panic, so a panic
/// becomes an error too. `part` says what is read, for example "column `x`".
pub(super) fn read_part<T>(
    path: &Path,
    part: &str,
    read: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    silence_caught_panics();
    let caught_before = CATCHES_PANICS.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(read));
    CATCHES_PANICS.set(caught_before);
    let problem = match result {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => match into_read_error(error) {
            Ok(error) => return Err(DataError::unreadable(path, error)),
            Err(error) => error.to_string(),
        },
        Err(panic) => describe_panic(&*panic),
    };
    Err(DataError::malformed(
        path,
        format!("{part} is truncated or corrupt ({problem}); download or write the file again"),
    ))
}

/// Returns the error of the operating system that `error` contains. If `error` is about the content of the file, returns
/// `Err(error)`.
fn into_read_error(error: ParquetError) -> Result<io::Error, ParquetError> {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    match error {
        ParquetError::External(source) => match source.downcast::<io::Error>() {
            Ok(error) if !matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof) => Ok(*error),
            Ok(error) => Err(ParquetError::External(error)),
            Err(source) => Err(ParquetError::External(source as Box<dyn Error + Send + Sync>)),
        },
        other => Err(other),
    }
}

/// Returns the message of a panic.
fn describe_panic(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown problem".into())
}

/// Installs a panic hook that does not print the panics that [`read_part`] catches.
fn silence_caught_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !CATCHES_PANICS.get() {
                previous(panic);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_panics_name_the_file_and_the_part() {
        let path = Path::new("a.parquet");
        let read = |result: fn() -> Result<(), ParquetError>| {
            read_part(path, "column `x`", result).unwrap_err().to_string()
        };
        let expected = |problem: &str| {
            format!(
                "a.parquet: column `x` is truncated or corrupt ({problem}); download or write the file again"
            )
        };
        assert_eq!(read(|| panic!("bad {}", 5)), expected("bad 5"));
        assert_eq!(read(|| panic!("bad")), expected("bad"));
        assert_eq!(read(|| Err(ParquetError::EOF("short".into()))), expected("EOF: short"));
        let eof = || Err(ParquetError::from(io::Error::from(io::ErrorKind::UnexpectedEof)));
        assert!(read(eof).contains("truncated or corrupt"));
        let denied = || Err(ParquetError::from(io::Error::from(io::ErrorKind::PermissionDenied)));
        assert_eq!(read(denied), "cannot read a.parquet: permission denied");
    }
}
