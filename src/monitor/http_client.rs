//! Reads a document from the HTTP server of a rank.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The maximum length of a response in bytes. The status of a rank with 1,024 links has about 150 KiB.
const RESPONSE_BYTES_MAX: usize = 4 << 20;

/// Returns the body of the document with this path.
///
/// # Errors
///
/// If the server does not answer within `timeout`, or if its answer is not a document. The error says why.
pub(crate) fn get(address: SocketAddr, path: &str, timeout: Duration) -> Result<String, String> {
    let deadline = Instant::now() + timeout;
    let response = exchange(address, path, deadline).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("no answer within {} ms", timeout.as_millis())
        }
        io::ErrorKind::ConnectionRefused => "nothing listens there".to_owned(),
        _ => error.to_string(),
    })?;
    let text = String::from_utf8(response).map_err(|_| "the answer is not text".to_owned())?;
    match text.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 200 ") => Ok(body.to_owned()),
        _ => Err("the answer is not that of a rank of ringtrain".to_owned()),
    }
}

fn exchange(address: SocketAddr, path: &str, deadline: Instant) -> io::Result<Vec<u8>> {
    let time_left = || {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut) } else { Ok(left) }
    };
    let mut stream = TcpStream::connect_timeout(&address, time_left()?)?;
    stream.set_write_timeout(Some(time_left()?))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut response = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        stream.set_read_timeout(Some(time_left()?))?;
        match stream.read(&mut buffer)? {
            0 => return Ok(response),
            count => response.extend_from_slice(&buffer[..count]),
        }
        if response.len() > RESPONSE_BYTES_MAX {
            return Err(io::Error::other("the answer is too long"));
        }
    }
}
