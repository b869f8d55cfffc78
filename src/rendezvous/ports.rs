//! The ports on which the processes of a job listen, if the user has chosen them.

use std::env;
use std::fmt;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::environment_error::EnvironmentError;

/// The environment variable with the ports on which the ranks listen.
pub const LISTEN_PORTS_VARIABLE: &str = "RING_LISTEN_PORTS";

/// A port, or a range of ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// Returns the number of ports.
    pub fn count(self) -> u32 {
        u32::from(self.last.saturating_sub(self.first)) + 1
    }

    /// Returns a range of `count` ports that begins, if possible, with the first port of this range.
    pub(crate) fn suggest(self, count: u32) -> Self {
        let count = count.clamp(1, u16::MAX.into()) as u16;
        let first = self.first.min(u16::MAX - count + 1);
        Self { first, last: first + (count - 1) }
    }

    /// Returns all ports in order, beginning with the port number `start` of the range and continuing at its beginning.
    pub fn ports_from(self, start: u32) -> impl Iterator<Item = u16> {
        let count = self.count();
        // The sum is at most `last`, so it fits.
        (0..count).map(move |index| self.first + ((start % count + index) % count) as u16)
    }

    /// Returns `port 7000 is` or `all of the ports 7000-7010 are`, for errors.
    pub(super) fn describe_all(self) -> String {
        if self.count() == 1 { format!("port {self} is") } else { format!("all of the ports {self} are") }
    }

    /// Calls `listen` with the ports of the range until a port is not in use. Begins with the port number `start` of the range.
    ///
    /// # Errors
    ///
    /// The last error of `listen`: `AddrInUse` if all ports are in use.
    pub fn listen<T>(self, start: u32, mut listen: impl FnMut(u16) -> io::Result<T>) -> io::Result<T> {
        let mut error = io::Error::from(io::ErrorKind::AddrInUse);
        // If two processes listen on a free port at the same time, the kernel may refuse both, so each port is tried twice.
        for port in self.ports_from(start).chain(self.ports_from(start)) {
            match listen(port) {
                Err(refused) if refused.kind() == io::ErrorKind::AddrInUse => error = refused,
                result => return result,
            }
        }
        Err(error)
    }
}

impl From<u16> for PortRange {
    fn from(port: u16) -> Self {
        Self { first: port, last: port }
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |port: &str| {
            let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
            let number = port.parse().ok().filter(|&number: &u16| is_number && number > 0);
            number.ok_or_else(|| format!("`{port}` is not a port, 1 to 65535"))
        };
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let range = Self { first: parse(first)?, last: parse(last)? };
        if range.last < range.first {
            return Err(format!("the range `{text}` ends before it begins"));
        }
        Ok(range)
    }
}

/// Writes `7000` or `7000-7010`.
impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = self;
        if first == last { write!(f, "{first}") } else { write!(f, "{first}-{last}") }
    }
}

/// Returns the ports on which this rank may listen; `None` if the operating system chooses the port.
///
/// # Errors
///
/// [`EnvironmentError`] if the variable has a wrong value.
pub fn ports_from_environment() -> Result<Option<PortRange>, EnvironmentError> {
    let Some(value) = env::var_os(LISTEN_PORTS_VARIABLE) else { return Ok(None) };
    let value = value.to_string_lossy().into_owned();
    value.parse().map(Some).map_err(|_| EnvironmentError::Invalid {
        name: LISTEN_PORTS_VARIABLE,
        value,
        expected: "a port or a range of ports, such as 7000-7010",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_ranges_are_parsed() {
        for (text, expected, count) in [
            ("7000", "7000", 1),
            ("7000-7010", "7000-7010", 11),
            ("1-65535", "1-65535", 65_535),
            ("8-8", "8", 1),
        ] {
            let range: PortRange = text.parse().unwrap();
            assert_eq!((range.to_string().as_str(), range.count()), (expected, count), "{text}");
        }
        for (text, part) in [
            ("", "`` is not a port"),
            ("0", "`0` is not a port, 1 to 65535"),
            ("65536", "`65536` is not a port"),
            ("7000-", "`` is not a port"),
            ("+7000", "`+7000` is not a port"),
            ("7000-7001-7002", "`7001-7002` is not a port"),
            ("7001-7000", "ends before it begins"),
        ] {
            let error = text.parse::<PortRange>().expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn ports_in_use_are_skipped_and_other_errors_are_returned() {
        let range: PortRange = "65533-65535".parse().unwrap();
        assert_eq!(range.ports_from(4).collect::<Vec<_>>(), [65_534, 65_535, 65_533]);
        let listen = |free: u16| {
            range.listen(1, |port| if port == free { Ok(port) } else { Err(io::ErrorKind::AddrInUse.into()) })
        };
        assert_eq!(listen(65_533).unwrap(), 65_533);
        assert_eq!(listen(1).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let refused = range.listen(0, |_| Err::<(), _>(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
