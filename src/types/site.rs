//! The place in the user's program, a file and a line, at which an operation is called.

use std::fmt;
use std::panic::Location;

/// If the path of a file is longer than this number of bytes, messages show only the end of the path.
const SHOWN_PATH_BYTES_MAX: usize = 60;

/// A line of the user's program that calls the library. Error messages show this line, for example as `train.py:12`.
///
/// For a program in Rust, the site is the line of the call. A binding to another language sets the line with
/// [`group::at`](crate::group::at).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    file: &'static str,
    line: u32,
}

impl Site {
    /// Returns the site of a line of a file. Lines are counted from 1.
    pub const fn new(file: &'static str, line: u32) -> Self {
        Self { file, line }
    }

    /// Returns the number of the line.
    pub const fn line(self) -> u32 {
        self.line
    }

    /// Returns whether both sites are the same line of the same string in memory. Much faster than `==`.
    pub(crate) fn is_same_place(self, other: Self) -> bool {
        std::ptr::eq(self.file, other.file) && self.line == other.line
    }

    /// Returns a hash for [`is_same_place`](Self::is_same_place).
    pub(crate) fn place_hash(self) -> usize {
        (self.file.as_ptr().addr() / 8).wrapping_add(self.line as usize).wrapping_mul(0x9e37_79b1) >> 7
    }
}

impl From<&'static Location<'static>> for Site {
    fn from(location: &'static Location<'static>) -> Self {
        Self { file: location.file(), line: location.line() }
    }
}

/// Prints the end of the path and the number of the line.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.file.ceil_char_boundary(self.file.len().saturating_sub(SHOWN_PATH_BYTES_MAX));
        write!(f, "{}:{}", &self.file[start..], self.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_printed_as_the_end_of_its_path_and_its_line() {
        assert_eq!(Site::new("train.py", 12).to_string(), "train.py:12");
        assert_eq!(Site::new("", 0).to_string(), ":0");
        let here = Location::caller();
        assert_eq!(Site::from(here).to_string(), format!("src/types/site.rs:{}", here.line()));
        // The path has 61 bytes, one more than the limit. A cut at 60 bytes would split the two-byte character `ä`,
        // so the whole character is removed.
        let long = format!("ä{}", "x".repeat(59)).leak();
        assert_eq!(Site::new(long, 7).to_string(), format!("{}:7", "x".repeat(59)));
    }
}
