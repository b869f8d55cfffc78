//! Sets the options of the sockets of links: the congestion control, the maximum rate, and how soon a lost peer is noticed.

use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::str::FromStr;
use std::time::Duration;

use mio::net::TcpStream;
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::kernel::set_pacing;
use crate::transport::listener;

const AVAILABLE_CONTROLS_FILE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";
const CONNECT_IN_PROGRESS: i32 = Errno::INPROGRESS.raw_os_error();
/// The time without data after which the kernel checks whether the peer's machine still answers.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// The time between two checks whether the peer's machine still answers.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// The number of unanswered checks after which the kernel ends the connection.
const KEEPALIVE_PROBES: u32 = 3;
/// The option `TCP_USER_TIMEOUT` is the time-out of operations plus this margin. The kernel ends a connection if sent data stay
/// unacknowledged, or the peer's receive buffer stays full, for longer.
const USER_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);
/// The maximum of `TCP_USER_TIMEOUT`, which the kernel stores as milliseconds in 32 bits.
const USER_TIMEOUT_MAX: Duration = Duration::from_secs(1_000_000);

/// The lowest and the highest accepted rate, in bits per second.
const BITS_PER_SECOND_MIN: f64 = 1e5;
const BITS_PER_SECOND_MAX: f64 = 1e13;
/// The units of tc(8), in bits per second. `mbps` is not accepted, because it means megabytes only in tc(8).
const UNITS: [(&str, f64); 4] = [("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9), ("bit", 1.0)];

/// The choice of a congestion control for links.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum CongestionControl {
    /// Cubic, because the default of some hosts is BBR: over loopback and inside a rack, cubic is more than twice as fast
    /// as BBR. If the kernel does not offer cubic, links use the host's default, and a log message says so.
    #[default]
    Auto,
    /// The host's default congestion control.
    Host,
    /// The congestion control with this name. The host must offer it.
    Named(String),
}

impl FromStr for CongestionControl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("the name of the congestion control is empty; give a name, for example cubic".into()),
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            name if name.len() < 16 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => {
                Ok(Self::Named(name.to_owned()))
            }
            other => Err(format!("`{other}` is not a possible name of a congestion control")),
        }
    }
}

/// The maximum rate at which a link sends. A link without one sends in bursts, and a switch may drop packets of a burst.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PacingRate {
    bytes_per_second: u64,
}

impl PacingRate {
    pub fn bytes_per_second(self) -> u64 {
        self.bytes_per_second
    }
}

impl FromStr for PacingRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate = || {
            let split = |&(unit, factor): &(&str, f64)| Some((text.strip_suffix(unit)?, factor));
            let (number, factor) = UNITS.iter().find_map(split)?;
            let is_plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
            Some(number.parse::<f64>().ok().filter(|_| is_plain)? * factor)
        };
        match rate() {
            Some(bits) if (BITS_PER_SECOND_MIN..=BITS_PER_SECOND_MAX).contains(&bits) => {
                Ok(Self { bytes_per_second: (bits / 8.0) as u64 })
            }
            Some(_) => Err(format!("`{text}` is not between 100kbit and 10000gbit")),
            None => Err(format!(
                "`{text}` is not a rate; give a number and kbit, mbit or gbit, for example 940mbit or 1.2gbit"
            )),
        }
    }
}

impl fmt::Display for PacingRate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}mbit", self.bytes_per_second as f64 * 8.0 / 1e6)
    }
}

/// Returns the congestion controls that this kernel offers. The result is empty if the kernel's list cannot be read.
pub fn available_congestion_controls() -> Vec<String> {
    let text = fs::read_to_string(AVAILABLE_CONTROLS_FILE).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

#[derive(Clone, Debug)]
pub struct SocketOptions {
    /// The name of the congestion control; `None` for the host's default.
    pub congestion: Option<String>,
    user_timeout: Duration,
    pacing: Option<PacingRate>,
}

impl SocketOptions {
    /// Creates options. `operation_timeout` is the time within which a peer must read sent data. Returns a message if this host
    /// does not offer the congestion control, or if this kernel cannot limit the rate.
    pub fn new(
        congestion: &CongestionControl,
        operation_timeout: Duration,
        pacing: Option<PacingRate>,
    ) -> Result<Self, String> {
        let available = available_congestion_controls();
        let congestion = match congestion {
            CongestionControl::Host => None,
            CongestionControl::Auto if available.iter().any(|name| name == "cubic") => Some("cubic".into()),
            CongestionControl::Auto => {
                log::info!(
                    "this kernel does not offer cubic; links use the host's default congestion control"
                );
                None
            }
            CongestionControl::Named(name) if available.contains(name) => Some(name.clone()),
            CongestionControl::Named(name) => {
                return Err(format!(
                    "congestion control `{name}` is not available on this host, which offers {} (see {AVAILABLE_CONTROLS_FILE})",
                    available.join(", ")
                ));
            }
        };
        let user_timeout = operation_timeout.saturating_add(USER_TIMEOUT_MARGIN).min(USER_TIMEOUT_MAX);
        let options = Self { congestion, user_timeout, pacing };
        if let Some(rate) = pacing {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP));
            socket.and_then(|socket| options.apply_pacing(&socket, 1)).map_err(|error| {
                format!("this kernel cannot limit the rate of a connection to {rate}: {error}")
            })?;
        }
        Ok(options)
    }

    /// Begins to connect to `address`. Sets all options before the first packet, because Linux continues to pace a connection
    /// that began with BBR, even under another congestion control.
    pub(super) fn connect(&self, address: SocketAddr, rate_divisor: u8) -> io::Result<TcpStream> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        self.apply(&socket, rate_divisor)?;
        match socket.connect(&address.into()) {
            Err(error) if error.raw_os_error() != Some(CONNECT_IN_PROGRESS) => Err(error),
            _ => Ok(TcpStream::from_std(socket.into())),
        }
    }

    /// Listens on `address`. The options are set before the first connection, because accepted sockets inherit the
    /// congestion control. Returns an error if the operating system refuses the address or an option.
    pub fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        listener::listen(address, |socket| self.apply_except_pacing(socket))
    }

    /// Sets all options of a link's socket, which gets the link's pacing rate divided by `rate_divisor`.
    pub(super) fn apply<S: AsFd>(&self, socket: &S, rate_divisor: u8) -> io::Result<()> {
        self.apply_except_pacing(socket)?;
        self.apply_pacing(socket, rate_divisor)
    }

    /// Sets the socket's share of the link's pacing rate. Without the queueing discipline `fq`, the kernel's TCP paces the data.
    pub(super) fn apply_pacing<S: AsFd>(&self, socket: &S, rate_divisor: u8) -> io::Result<()> {
        let Some(rate) = self.pacing else { return Ok(()) };
        set_pacing(socket, rate.bytes_per_second() / u64::from(rate_divisor.max(1)))
    }

    /// Sets all options except the pacing rate. Fixed buffer sizes would switch off the kernel's autotuning.
    fn apply_except_pacing<S: AsFd>(&self, socket: &S) -> io::Result<()> {
        let socket = SockRef::from(socket);
        socket.set_tcp_nodelay(true)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
        socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_PROBES))?;
        socket.set_tcp_user_timeout(Some(self.user_timeout))?;
        if let Some(name) = &self.congestion {
            socket.set_tcp_congestion(name.as_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel::read_pacing;
    use super::*;

    #[test]
    fn the_pacing_rate_is_set_and_can_be_changed() {
        let rate = "80mbit".parse().unwrap();
        let options = SocketOptions::new(&CongestionControl::Host, Duration::ZERO, Some(rate)).unwrap();
        assert!(options.congestion.is_none());
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
        for rate_divisor in [1, 4] {
            options.apply(&socket, rate_divisor).unwrap();
            assert_eq!(read_pacing(&socket).unwrap(), 10_000_000 / u64::from(rate_divisor));
        }
    }

    #[test]
    fn an_unavailable_congestion_control_is_an_error() {
        let named = CongestionControl::Named("nosuch".into());
        let error = SocketOptions::new(&named, Duration::ZERO, None).unwrap_err();
        assert!(error.contains("`nosuch` is not available"), "{error}");
        assert!("../../etc".parse::<CongestionControl>().is_err());
    }

    #[test]
    fn rates_are_read_in_bits_per_second() {
        for (text, bytes) in [
            ("940mbit", 117_500_000),
            ("1.2gbit", 150_000_000),
            ("100gbit", 12_500_000_000),
            ("800kbit", 100_000),
            ("8000000bit", 1_000_000),
        ] {
            assert_eq!(text.parse::<PacingRate>().unwrap().bytes_per_second(), bytes, "{text}");
        }
        for text in
            ["", "940", "mbit", "940MB", "117mbps", "1e3mbit", "-1gbit", "infgbit", "nangbit", "1.2.3gbit"]
        {
            assert!(text.parse::<PacingRate>().unwrap_err().contains("is not a rate"), "{text}");
        }
        for text in ["0gbit", "1kbit", "10001gbit"] {
            assert!(text.parse::<PacingRate>().unwrap_err().contains("is not between"), "{text}");
        }
        assert_eq!("1.2gbit".parse::<PacingRate>().unwrap().to_string(), "1200mbit");
    }
}
