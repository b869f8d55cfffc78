//! Measures the connection between two hosts: the round-trip time, the difference of the clocks, and the rate in both directions.
//!
//! The host that dials sends requests, and the other host answers them. A request is 9 bytes: its kind and a little-endian
//! number.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

/// How long a host waits for a connection. The kernel sends its first packet again after a second.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1300);
/// How long a host waits for a part of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a host that answers waits for the next request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// The number of round trips, unless they take longer than [`ROUND_TRIPS_TIME`].
const ROUND_TRIPS: usize = 100;
const ROUND_TRIPS_TIME: Duration = Duration::from_millis(200);
/// A transfer is repeated with more bytes until it takes at least this time.
const TRANSFER_TIME: Duration = Duration::from_millis(100);
const TRANSFER_BYTES_MIN: u64 = 64 << 10;
const TRANSFER_BYTES_MAX: u64 = 1 << 30;
const BLOCK_BYTES: usize = 64 << 10;
/// The greatest number of connections that a host answers at a time.
const CONNECTIONS_MAX: usize = 256;

/// The first bytes of a connection, which only processes of the same job know.
pub(super) type Token = [u8; 32];

/// The measurements of a connection to another host.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct LinkMeasurement {
    /// The median round-trip time of a short message, in seconds.
    pub(super) round_trip_s: f64,
    /// The clock of the other host minus the clock of this host, in seconds.
    pub(super) clock_offset_s: f64,
    /// The bound of the error of `clock_offset_s`: half of the shortest round-trip time.
    pub(super) clock_error_s: f64,
    /// The rate of a transfer to the other host in bytes per second, without the headers of packets.
    pub(super) send_rate: Option<f64>,
    /// The rate of a transfer from the other host.
    pub(super) receive_rate: Option<f64>,
    /// Why a long transfer failed, although short messages arrived.
    pub(super) transfer_error: Option<String>,
}

/// What a host requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinkRequest {
    /// The other host answers with the nanoseconds of its clock since 1970.
    Time,
    /// This number of bytes follow. The other host answers with a zero after the last byte.
    Send(u64),
    /// The other host sends this number of bytes.
    Receive(u64),
}

impl LinkRequest {
    fn to_bytes(self) -> [u8; 9] {
        let (kind, number) = match self {
            Self::Time => (0, 0),
            Self::Send(bytes) => (1, bytes),
            Self::Receive(bytes) => (2, bytes),
        };
        let mut bytes = [kind; 9];
        bytes[1..].copy_from_slice(&u64::to_le_bytes(number));
        bytes
    }

    /// Returns `None` for bytes that are no request.
    fn from_bytes(bytes: [u8; 9]) -> Option<Self> {
        let [kind, number @ ..] = bytes;
        match (kind, u64::from_le_bytes(number)) {
            (0, 0) => Some(Self::Time),
            (1, bytes) if bytes <= TRANSFER_BYTES_MAX => Some(Self::Send(bytes)),
            (2, bytes) if bytes <= TRANSFER_BYTES_MAX => Some(Self::Receive(bytes)),
            _ => None,
        }
    }
}

/// Answers the connections of other hosts in other threads, until this process ends.
pub(super) fn answer_connections(listener: TcpListener, token: Token) {
    let open = Arc::new(AtomicUsize::new(0));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                open.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let open = Arc::clone(&open);
            thread::spawn(move || {
                // The host that has dialled reports an error.
                let _ = answer_requests(stream, &token);
                open.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
}

fn answer_requests(mut stream: TcpStream, token: &Token) -> io::Result<()> {
    prepare(&stream, REQUEST_TIMEOUT)?;
    let mut claimed = Token::default();
    stream.read_exact(&mut claimed)?;
    if !bool::from(claimed.ct_eq(token)) {
        return Ok(());
    }
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        let mut bytes = [0; 9];
        stream.read_exact(&mut bytes)?;
        match LinkRequest::from_bytes(bytes) {
            None => return Ok(()),
            Some(LinkRequest::Time) => stream.write_all(&clock_ns().to_le_bytes())?,
            Some(LinkRequest::Send(bytes)) => {
                receive_bytes(&mut stream, bytes, &mut block)?;
                stream.write_all(&0u64.to_le_bytes())?;
            }
            Some(LinkRequest::Receive(bytes)) => send_bytes(&mut stream, bytes, &block)?,
        }
    }
}

/// Dials another host, and measures the connection. `with_rate` says whether to measure the rate too.
///
/// # Errors
///
/// If no connection was possible, or the other host did not answer.
pub(super) fn measure_link(
    address: SocketAddr,
    token: &Token,
    with_rate: bool,
) -> io::Result<LinkMeasurement> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
    prepare(&stream, ANSWER_TIMEOUT)?;
    stream.write_all(token)?;
    let mut measurement = measure_round_trips(&mut stream)?;
    if with_rate {
        let mut block = vec![0; BLOCK_BYTES];
        let sent = measure_rate(|bytes| {
            stream.write_all(&LinkRequest::Send(bytes).to_bytes())?;
            send_bytes(&mut stream, bytes, &block)?;
            stream.read_exact(&mut [0; 8])
        });
        let received = measure_rate(|bytes| {
            stream.write_all(&LinkRequest::Receive(bytes).to_bytes())?;
            receive_bytes(&mut stream, bytes, &mut block)
        });
        measurement.transfer_error =
            [&sent, &received].into_iter().find_map(|rate| Some(rate.as_ref().err()?.to_string()));
        (measurement.send_rate, measurement.receive_rate) = (sent.ok(), received.ok());
    }
    Ok(measurement)
}

fn prepare(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))
}

/// Measures round trips of short messages. The clocks are compared at the fastest one (Cristian, "Probabilistic clock
/// synchronization", 1989).
fn measure_round_trips(stream: &mut TcpStream) -> io::Result<LinkMeasurement> {
    let started = Instant::now();
    let mut times: Vec<f64> = Vec::new();
    let (mut clock_offset_s, mut fastest) = (0.0, f64::INFINITY);
    while times.len() < ROUND_TRIPS && (times.is_empty() || started.elapsed() < ROUND_TRIPS_TIME) {
        let (sent, sent_ns) = (Instant::now(), clock_ns());
        stream.write_all(&LinkRequest::Time.to_bytes())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        let time = sent.elapsed().as_secs_f64();
        if time < fastest {
            fastest = time;
            let difference_ns = i128::from(u64::from_le_bytes(answer)) - i128::from(sent_ns);
            clock_offset_s = difference_ns as f64 * 1e-9 - time / 2.0;
        }
        times.push(time);
    }
    times.sort_by(f64::total_cmp);
    Ok(LinkMeasurement {
        round_trip_s: times[times.len() / 2],
        clock_offset_s,
        clock_error_s: fastest / 2.0,
        send_rate: None,
        receive_rate: None,
        transfer_error: None,
    })
}

/// Calls `transfer` with more and more bytes until a call takes [`TRANSFER_TIME`]. Returns the rate of the last call in bytes per
/// second.
fn measure_rate(mut transfer: impl FnMut(u64) -> io::Result<()>) -> io::Result<f64> {
    let mut bytes = TRANSFER_BYTES_MIN;
    loop {
        let started = Instant::now();
        transfer(bytes)?;
        let elapsed = started.elapsed().as_secs_f64().max(1e-9);
        if elapsed >= TRANSFER_TIME.as_secs_f64() || bytes == TRANSFER_BYTES_MAX {
            return Ok(bytes as f64 / elapsed);
        }
        let factor = (2.0 * TRANSFER_TIME.as_secs_f64() / elapsed).clamp(2.0, 8.0);
        bytes = ((bytes as f64 * factor) as u64).min(TRANSFER_BYTES_MAX);
    }
}

fn send_bytes(stream: &mut TcpStream, bytes: u64, block: &[u8]) -> io::Result<()> {
    let mut left = bytes;
    while left > 0 {
        let part = left.min(block.len() as u64);
        stream.write_all(&block[..part as usize])?;
        left -= part;
    }
    Ok(())
}

fn receive_bytes(stream: &mut TcpStream, bytes: u64, block: &mut [u8]) -> io::Result<()> {
    let mut left = bytes;
    while left > 0 {
        let part = left.min(block.len() as u64);
        stream.read_exact(&mut block[..part as usize])?;
        left -= part;
    }
    Ok(())
}

/// Returns the nanoseconds since 1970.
fn clock_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_on_this_host_is_fast_and_its_clocks_are_equal() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        answer_connections(listener, [7; 32]);
        let link = measure_link(address, &[7; 32], true).unwrap();
        assert!(link.clock_offset_s.abs() <= link.clock_error_s + 1e-3, "{link:?}");
        assert!(link.send_rate.unwrap() > 1e6 && link.receive_rate.unwrap() > 1e6, "{link:?}");
        assert_eq!(measure_link(address, &[7; 32], false).unwrap().send_rate, None);
    }

    #[test]
    fn strangers_and_wrong_requests_get_no_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        answer_connections(listener, [7; 32]);
        assert!(measure_link(address, &[8; 32], false).is_err());
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&[7; 32]).unwrap();
        stream.write_all(&LinkRequest::Send(TRANSFER_BYTES_MAX + 1).to_bytes()).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn requests_survive_their_encoding() {
        for request in [LinkRequest::Time, LinkRequest::Send(1), LinkRequest::Receive(TRANSFER_BYTES_MAX)] {
            assert_eq!(LinkRequest::from_bytes(request.to_bytes()), Some(request));
        }
        for bytes in [[3; 9], [0, 1, 0, 0, 0, 0, 0, 0, 0], [1, 255, 255, 255, 255, 255, 0, 0, 0]] {
            assert_eq!(LinkRequest::from_bytes(bytes), None);
        }
    }
}
