//! Tells the service manager, for example systemd, the state of this process, as `sd_notify`(3) describes.

use std::cell::Cell;
use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The variable with the address of the service manager's socket.
const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";
/// The variable with the time in microseconds within which the service manager expects the next sign of life.
const WATCHDOG_VARIABLE: &str = "WATCHDOG_USEC";
/// The variable with the id of the process that must give signs of life.
const WATCHDOG_PID_VARIABLE: &str = "WATCHDOG_PID";
/// The longest time that sending a message may take. If the service manager does not read its messages, training continues
/// without them.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// The most bytes of a status line.
const STATUS_BYTES_MAX: usize = 500;

/// The connection to the service manager.
#[derive(Debug)]
pub(super) struct ServiceManager {
    socket: UnixDatagram,
    address: SocketAddr,
    /// Within this time, the service manager expects the next sign of life. `None` if it expects none.
    pub(super) watchdog_timeout: Option<Duration>,
    has_failed: Cell<bool>,
}

impl ServiceManager {
    /// Connects to the service manager that the environment names. Returns `None` if there is none.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which variable is wrong.
    pub(super) fn from_environment() -> Result<Option<Self>, String> {
        let Some(name) = env::var_os(SOCKET_VARIABLE).filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let problem = |error: io::Error| format!("{SOCKET_VARIABLE}={}: {error}", name.display());
        let address = parse_address(&name).map_err(problem)?;
        let socket = UnixDatagram::unbound().map_err(problem)?;
        socket.set_write_timeout(Some(SEND_TIMEOUT)).map_err(problem)?;
        let watchdog_timeout = watchdog_timeout()?;
        Ok(Some(Self { socket, address, watchdog_timeout, has_failed: Cell::new(false) }))
    }

    /// Sends a message of lines such as `READY=1`. If this fails, logs a warning the first time.
    pub(super) fn notify(&self, message: &str) {
        match self.socket.send_to_addr(message.as_bytes(), &self.address) {
            Err(error) if !self.has_failed.replace(true) => {
                log::warn!("the service manager does not receive messages: {error}");
            }
            _ => {}
        }
    }

    /// Sends the line that the service manager shows as the status of the service.
    pub(super) fn set_status(&self, status: &str) {
        self.notify(&format_status(status));
    }

    /// Says that this process reads its configuration again. `READY=1` ends this state.
    pub(super) fn begin_reload(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        self.notify(&format!("RELOADING=1\nMONOTONIC_USEC={}", now.tv_sec * 1_000_000 + now.tv_nsec / 1000));
    }
}

/// Parses the address of a socket: a path, or `@` and the name of an abstract socket.
fn parse_address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        [b'/', ..] => SocketAddr::from_pathname(name),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "neither a path nor the name of an abstract socket",
        )),
    }
}

/// Returns the time within which the service manager expects the next sign of life of this process.
fn watchdog_timeout() -> Result<Option<Duration>, String> {
    let Some(text) = env::var_os(WATCHDOG_VARIABLE) else { return Ok(None) };
    // The variables may be inherited from a parent that the service manager watches.
    let is_own = env::var(WATCHDOG_PID_VARIABLE).map_or(true, |pid| pid == std::process::id().to_string());
    match text.to_str().and_then(|text| text.parse::<u64>().ok()).filter(|&microseconds| microseconds > 0) {
        Some(microseconds) => Ok(Some(Duration::from_micros(microseconds)).filter(|_| is_own)),
        None => Err(format!("{WATCHDOG_VARIABLE}={} is not a number of microseconds", text.display())),
    }
}

/// Returns the message with a status: a single line, which is shortened if necessary.
fn format_status(status: &str) -> String {
    let line = status.lines().next().unwrap_or_default();
    format!("STATUS={}", &line[..line.floor_char_boundary(STATUS_BYTES_MAX)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_one_short_line() {
        assert_eq!(format_status("epoch 1\nREADY=1"), "STATUS=epoch 1");
        assert_eq!(format_status(&"é".repeat(400)).len(), "STATUS=".len() + STATUS_BYTES_MAX);
    }

    #[test]
    fn addresses_are_paths_or_abstract_names() {
        assert!(parse_address(OsStr::new("/run/x")).unwrap().as_pathname().is_some());
        assert_eq!(parse_address(OsStr::new("@x")).unwrap().as_abstract_name(), Some(&b"x"[..]));
        assert!(parse_address(OsStr::new("x")).is_err());
    }
}
