//! The number of connections of each link: a requested number, or the one that a measurement at the start finds faster.

use std::fmt;
use std::str::FromStr;

use crate::wire::handshake::STREAMS_MAX;

/// A measurement compares this number of connections with one connection.
pub(super) const MEASURED_STREAMS: u8 = 4;

/// The number of connections of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Streams {
    /// The number; 0 if a measurement at the start of the job chooses the number.
    count: u8,
}

impl Streams {
    /// One connection, the default.
    pub const ONE: Self = Self { count: 1 };
    /// One or four connections. The ranks measure at the start of the job which number is faster.
    pub const AUTO: Self = Self { count: 0 };

    /// Returns `count` connections; `None` if `count` is not from 1 to 8.
    pub fn new(count: u8) -> Option<Self> {
        (1..=STREAMS_MAX).contains(&count).then_some(Self { count })
    }

    pub(super) fn to_byte(self) -> u8 {
        self.count
    }

    /// Decodes the byte of [`Streams::to_byte`]; `None` if the byte is larger than 8.
    pub(super) fn from_byte(count: u8) -> Option<Self> {
        (count <= STREAMS_MAX).then_some(Self { count })
    }

    /// Returns the number of connections that each link opens at the start of the job.
    pub(super) fn initial_count(self) -> u8 {
        if self.is_measured() { MEASURED_STREAMS } else { self.count }
    }

    pub(super) fn is_measured(self) -> bool {
        self == Self::AUTO
    }
}

impl Default for Streams {
    fn default() -> Self {
        Self::ONE
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::AUTO);
        }
        let count = text.parse().ok().and_then(Self::new);
        count.ok_or_else(|| format!("`{text}` is neither auto nor a number from 1 to {STREAMS_MAX}"))
    }
}

impl fmt::Display for Streams {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_measured() { out.write_str("auto") } else { write!(out, "{}", self.count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_auto_or_a_number_from_1_to_8() {
        assert_eq!("auto".parse(), Ok(Streams::AUTO));
        assert_eq!("1".parse(), Ok(Streams::default()));
        for text in ["0", "9", "-1", "", "four"] {
            assert!(text.parse::<Streams>().unwrap_err().contains("neither auto nor a number"), "{text}");
        }
        for byte in 0..=u8::MAX {
            let streams = Streams::from_byte(byte);
            assert_eq!(streams.is_some(), byte <= STREAMS_MAX);
            assert!(streams.is_none_or(|streams| streams.to_byte() == byte));
        }
    }
}
