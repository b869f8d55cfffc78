//! The line of a program that requests an operation.

use std::fmt;
use std::panic::Location;

/// The number of bytes of a file's path that are shown, from its end.
const FILE_BYTES_MAX: usize = 60;

/// A line of the caller's program, which errors name: `train.py:12`.
///
/// Calls from Rust determine their own line. A binding to another language sets it with
/// [`group::at`](crate::group::at).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    file: &'static str,
    line: u32,
}

impl Site {
    /// A line of a file, counted from 1.
    pub const fn new(file: &'static str, line: u32) -> Self {
        Self { file, line }
    }

    /// The line.
    pub const fn line(self) -> u32 {
        self.line
    }
}

impl From<&'static Location<'static>> for Site {
    fn from(location: &'static Location<'static>) -> Self {
        Self { file: location.file(), line: location.line() }
    }
}

/// The end of the path, and the line.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.file.ceil_char_boundary(self.file.len().saturating_sub(FILE_BYTES_MAX));
        write!(f, "{}:{}", &self.file[start..], self.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_path_and_the_line() {
        assert_eq!(Site::new("train.py", 12).to_string(), "train.py:12");
        assert_eq!(Site::new("", 0).to_string(), ":0");
        let here = Location::caller();
        assert_eq!(Site::from(here).to_string(), format!("src/types/site.rs:{}", here.line()));
        // 61 bytes, the first two of which are one character.
        let long = format!("ä{}", "x".repeat(59)).leak();
        assert_eq!(Site::new(long, 7).to_string(), format!("{}:7", "x".repeat(59)));
    }
}
