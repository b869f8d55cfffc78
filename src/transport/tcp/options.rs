//! The options of every socket, and the reasons for them.

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
use super::pacing::PacingRate;

/// The file in which Linux lists the congestion controls that any process may choose.
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";
/// The error of a connection that continues in the background.
const IN_PROGRESS: i32 = Errno::INPROGRESS.raw_os_error();
/// The time without data after which the kernel checks that the peer's machine still answers.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
/// The number of connections that the kernel keeps for a rank that is not inside a call (`somaxconn` may lower it). The kernel
/// does not answer further ones, and their dialers give up.
const BACKLOG: i32 = 4096;
/// The time beyond an operation's timeout for which sent data may stay unread before the kernel ends the connection. The kernel
/// also counts the time in which the receive buffer is full, so this must exceed the time that a peer may compute.
const USER_TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// Which congestion control links use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum CongestionControl {
    /// Cubic if the kernel has it: over loopback and inside a rack it is more than twice as fast as BBR, the default of some
    /// hosts. Otherwise the host's default, which is logged.
    #[default]
    Auto,
    /// The host's default.
    Host,
    /// The named one; an error if it is not available.
    Named(String),
}

impl FromStr for CongestionControl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("a congestion control has a name, such as cubic".into()),
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            name if name.len() < 16 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => {
                Ok(Self::Named(name.to_owned()))
            }
            other => Err(format!("`{other}` cannot be the name of a congestion control")),
        }
    }
}

/// The congestion controls that this kernel offers to all processes; empty if it has no list.
pub fn available_congestion_controls() -> Vec<String> {
    let text = fs::read_to_string(AVAILABLE).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// The kernel takes milliseconds as 32 bits.
const USER_TIMEOUT_MAX: Duration = Duration::from_secs(1_000_000);

/// The options of every link's socket.
#[derive(Clone, Debug)]
pub struct SocketOptions {
    congestion: Option<String>,
    user_timeout: Duration,
    pacing: Option<PacingRate>,
}

impl SocketOptions {
    /// Creates options; `congestion` must be available on this host, and `operation_timeout` is the time that a peer may take to
    /// read.
    ///
    /// # Errors
    ///
    /// A message if the named congestion control is not available.
    pub fn new(congestion: &CongestionControl, operation_timeout: Duration) -> Result<Self, String> {
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
                    "congestion control `{name}` is not available on this host, which offers {} (see {AVAILABLE})",
                    available.join(", ")
                ));
            }
        };
        let user_timeout = operation_timeout.saturating_add(USER_TIMEOUT_MARGIN);
        Ok(Self { congestion, user_timeout, pacing: None })
    }

    /// Limits the rate at which links send.
    ///
    /// # Errors
    ///
    /// A message if this kernel cannot limit the rate.
    pub fn paced(self, pacing: Option<PacingRate>) -> Result<Self, String> {
        let options = Self { pacing, ..self };
        let Some(rate) = pacing else { return Ok(options) };
        let tried = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))
            .and_then(|socket| options.pace(&socket, 1));
        tried.map_err(|error| format!("this kernel does not pace connections (at {rate}): {error}"))?;
        Ok(options)
    }

    /// The congestion control that will be set; `None` leaves the host's default.
    pub fn congestion(&self) -> Option<&str> {
        self.congestion.as_deref()
    }

    /// Begins to connect to `address`. All options are set before the first packet: if a congestion control that paces, for
    /// example BBR, has begun, Linux goes on pacing after it is replaced. `sharers` as in `apply`.
    pub(super) fn connect(&self, address: SocketAddr, sharers: u8) -> io::Result<TcpStream> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        self.apply(&socket, sharers)?;
        match socket.connect(&address.into()) {
            Err(error) if error.raw_os_error() != Some(IN_PROGRESS) => Err(error),
            _ => Ok(TcpStream::from_std(socket.into())),
        }
    }

    /// Listens on `address`. All options are set before the first connection: accepted sockets inherit the congestion control.
    ///
    /// # Errors
    ///
    /// When the operating system refuses the address or an option.
    pub fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        // So that closed connections of an earlier job do not block the port.
        socket.set_reuse_address(true)?;
        self.apply_to_all(&socket)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    }

    /// Sets all options on a link's socket. `sharers` sockets share the link's rate.
    pub(super) fn apply<S: AsFd>(&self, socket: &S, sharers: u8) -> io::Result<()> {
        self.apply_to_all(socket)?;
        self.pace(socket, sharers)
    }

    /// Sets the rate at which the kernel paces a socket. No queueing discipline is needed.
    pub(super) fn pace<S: AsFd>(&self, socket: &S, sharers: u8) -> io::Result<()> {
        let Some(rate) = self.pacing else { return Ok(()) };
        set_pacing(socket, rate.bytes_per_second() / u64::from(sharers.max(1)))
    }

    /// Sets all options except the rate. Buffer sizes are not set, because that would switch off the kernel's autotuning.
    fn apply_to_all<S: AsFd>(&self, socket: &S) -> io::Result<()> {
        let socket = SockRef::from(socket);
        socket.set_tcp_nodelay(true)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_PROBES);
        socket.set_tcp_keepalive(&keepalive)?;
        socket.set_tcp_user_timeout(Some(self.user_timeout.min(USER_TIMEOUT_MAX)))?;
        if let Some(name) = &self.congestion {
            socket.set_tcp_congestion(name.as_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel::pacing;
    use super::*;

    #[test]
    fn a_rate_is_set_and_may_be_changed() {
        let rate = "80mbit".parse().unwrap();
        let options = SocketOptions::new(&CongestionControl::Host, Duration::ZERO).unwrap();
        let options = options.paced(Some(rate)).unwrap();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
        for sharers in [1, 4] {
            options.apply(&socket, sharers).unwrap();
            assert_eq!(pacing(&socket).unwrap(), 10_000_000 / u64::from(sharers));
        }
    }

    #[test]
    fn a_congestion_control_that_is_not_there_is_an_error() {
        let error =
            SocketOptions::new(&CongestionControl::Named("nosuch".into()), Duration::ZERO).unwrap_err();
        assert!(error.contains("`nosuch` is not available"), "{error}");
        assert!(SocketOptions::new(&CongestionControl::Host, Duration::ZERO).unwrap().congestion().is_none());
        assert!("../../etc".parse::<CongestionControl>().is_err());
    }
}
