//! Where in a program something is asked for.

use std::fmt;
use std::panic::Location;

/// How much of a file's name is shown: its end.
const FILE_BYTES_MAX: usize = 60;

/// A place in the caller's program, which errors name: `train.py:12`.
///
/// Calls from Rust find out by themselves where they are made. A binding to another language says it with
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

/// As people name it: the end of its path, and the line.
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
        // 61 bytes, the first two of which are one letter.
        let long = format!("ä{}", "x".repeat(59)).leak();
        assert_eq!(Site::new(long, 7).to_string(), format!("{}:7", "x".repeat(59)));
    }
}
