//! A small HTTP server with one thread, for a few short documents. It limits the number of connections, and the time and the
//! length of each request, so that no client can keep it busy for long or make it use much memory.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::setpriority_process;

use super::http_request::{HEAD_BYTES_MAX, ParsedHead, parse_head};

/// The maximum number of open connections. If another client connects, the server closes the oldest connection.
const CONNECTIONS_MAX: usize = 16;
/// The time from the start of a connection until the server closes it.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the server accepts no connections after the system has refused one, for example because of too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The thread of the server gets less processor time than the threads that train.
const NICENESS: i32 = 10;

/// An HTTP server. Dropping it closes all connections and ends its thread.
pub(crate) struct HttpServer {
    address: SocketAddr,
    /// Closing this socket ends the thread.
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// A document that the server sends.
pub(crate) struct HttpResponse {
    pub(crate) content_type: &'static str,
    pub(crate) body: String,
}

/// Returns the document for a path, or `None` if there is none.
type Handler = Box<dyn Fn(&str) -> Option<HttpResponse> + Send>;

impl HttpServer {
    /// Starts a server that listens at `address`. If the port is 0, the kernel chooses one.
    pub(crate) fn start(
        address: SocketAddr,
        handler: impl Fn(&str) -> Option<HttpResponse> + Send + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (wake, woken) = UnixStream::pair()?;
        let mut service = Service {
            listener,
            woken,
            handler: Box::new(handler),
            connections: VecDeque::new(),
            paused_until: None,
        };
        let thread = thread::Builder::new().name("metrics".into()).spawn(move || {
            // Without the permission, the thread has the usual priority.
            let _ = setpriority_process(Some(rustix::thread::gettid()), NICENESS);
            service.serve_until_woken();
        })?;
        Ok(Self { address, wake: Some(wake), thread: Some(thread) })
    }

    /// Returns the address at which the server listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already been printed, and the caller goes on without the server.
            let _ = thread.join();
        }
    }
}

/// The state of the server's thread.
struct Service {
    listener: TcpListener,
    /// Becomes readable when the server must end.
    woken: UnixStream,
    handler: Handler,
    /// The open connections, from the oldest to the newest.
    connections: VecDeque<HttpConnection>,
    /// The server accepts no connections before this time.
    paused_until: Option<Instant>,
}

impl Service {
    fn serve_until_woken(&mut self) {
        loop {
            let now = Instant::now();
            self.paused_until = self.paused_until.filter(|&until| until > now);
            self.connections.retain(|connection| connection.deadline > now);
            match self.wait(now) {
                Ok(Readiness { is_woken: false, accepts, ready }) => {
                    let mut ready = ready.into_iter();
                    let handler = &self.handler;
                    self.connections.retain_mut(|connection| {
                        !ready.next().unwrap_or(false) || connection.advance(handler)
                    });
                    if accepts {
                        self.accept();
                    }
                }
                // Without the ability to wait, the server cannot go on.
                Ok(_) | Err(_) => return,
            }
        }
    }

    /// Waits for a client, for a deadline or for the end.
    fn wait(&self, now: Instant) -> io::Result<Readiness> {
        let listens = self.paused_until.is_none();
        let mut descriptors = vec![
            PollFd::new(&self.woken, PollFlags::IN),
            PollFd::new(&self.listener, if listens { PollFlags::IN } else { PollFlags::empty() }),
        ];
        descriptors.extend(self.connections.iter().map(|connection| {
            let is_writing = matches!(connection.state, ConnectionState::Writing { .. });
            PollFd::new(&connection.stream, if is_writing { PollFlags::OUT } else { PollFlags::IN })
        }));
        let deadlines = self.connections.iter().map(|connection| connection.deadline);
        let next = deadlines.chain(self.paused_until).min();
        let timeout = next.and_then(|next| {
            // The kernel may end a wait a little early, so wait a little longer.
            Timespec::try_from(next.saturating_duration_since(now) + Duration::from_millis(1)).ok()
        });
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |descriptor: &PollFd<'_>| !descriptor.revents().is_empty();
        Ok(Readiness {
            is_woken: is_ready(&descriptors[0]),
            accepts: listens && is_ready(&descriptors[1]),
            ready: descriptors[2..].iter().map(is_ready).collect(),
        })
    }

    /// Accepts a connection. If there are too many, closes the oldest.
    fn accept(&mut self) {
        let accepted = self.listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        match accepted {
            Ok(stream) => {
                if self.connections.len() >= CONNECTIONS_MAX {
                    self.connections.pop_front();
                }
                let deadline = Instant::now() + CONNECTION_TIMEOUT;
                let state = ConnectionState::Reading(Vec::new());
                self.connections.push_back(HttpConnection { stream, deadline, state });
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.paused_until = Some(Instant::now() + ACCEPT_PAUSE),
        }
    }
}

/// What has become ready.
struct Readiness {
    is_woken: bool,
    accepts: bool,
    /// For each connection, whether it can be read or written.
    ready: Vec<bool>,
}

/// A connection with a client, which carries one request and one response.
struct HttpConnection {
    stream: TcpStream,
    deadline: Instant,
    state: ConnectionState,
}

enum ConnectionState {
    /// The server has received these bytes of the head of the request.
    Reading(Vec<u8>),
    /// The server has sent the first bytes of the response.
    Writing { response: Vec<u8>, sent: usize },
    /// The server discards what the client still sends. If it closed the connection before it had read everything, the client
    /// might lose the response.
    Draining,
}

impl HttpConnection {
    /// Continues after the socket has become ready. Returns false if the connection is to be closed.
    fn advance(&mut self, handler: &Handler) -> bool {
        match self.try_advance(handler) {
            Ok(is_open) => is_open,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    fn try_advance(&mut self, handler: &Handler) -> io::Result<bool> {
        let mut buffer = [0; HEAD_BYTES_MAX];
        match &mut self.state {
            ConnectionState::Reading(head) => {
                let count = self.stream.read(&mut buffer)?;
                if count == 0 {
                    return Ok(false);
                }
                head.extend_from_slice(&buffer[..count]);
                if let Some(response) = respond(head, handler) {
                    self.state = ConnectionState::Writing { response, sent: 0 };
                }
            }
            ConnectionState::Writing { response, sent } => {
                *sent += self.stream.write(&response[*sent..])?;
                if *sent == response.len() {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.state = ConnectionState::Draining;
                }
            }
            ConnectionState::Draining => return Ok(self.stream.read(&mut buffer)? > 0),
        }
        Ok(true)
    }
}

/// Returns the response to the bytes of a request, or `None` if the request is not complete.
fn respond(head: &[u8], handler: &Handler) -> Option<Vec<u8>> {
    let (status, document, wants_body) = match parse_head(head) {
        ParsedHead::Incomplete => return None,
        ParsedHead::Complete(request) => match handler(&request.path) {
            Some(document) => ("200 OK", document, request.wants_body),
            None => ("404 Not Found", plain_text("there is no such page"), request.wants_body),
        },
        ParsedHead::Refused(status, why) => (status, plain_text(why), true),
    };
    let HttpResponse { content_type, body } = document;
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let mut response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n{allow}Cache-Control: no-store\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    if wants_body {
        response += &body;
    }
    Some(response.into_bytes())
}

fn plain_text(text: &str) -> HttpResponse {
    HttpResponse { content_type: "text/plain; charset=utf-8", body: format!("{text}\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start_server() -> HttpServer {
        let handler = |path: &str| {
            (path == "/a").then(|| HttpResponse { content_type: "text/plain", body: "x".repeat(1 << 20) })
        };
        HttpServer::start(SocketAddr::from(([127, 0, 0, 1], 0)), handler).unwrap()
    }

    /// Sends `request` and returns the response.
    fn exchange(server: &HttpServer, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // The server may have answered and closed its side before it got the whole request.
        let _ = stream.write_all(request);
        let mut text = Vec::new();
        stream.read_to_end(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn each_request_gets_one_response() {
        let server = start_server();
        let long_line = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20));
        let body = format!("POST / HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n{}", "b".repeat(1 << 20));
        let get_body = format!("GET / HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n{}", "b".repeat(1 << 20));
        for (request, status, length) in [
            ("GET /a HTTP/1.1\r\n\r\n", "200", 1 << 20),
            ("HEAD /a HTTP/1.1\r\n\r\n", "200", 0),
            ("GET /b HTTP/1.1\r\n\r\n", "404", 22),
            (&long_line, "431", 61),
            (&body, "405", 16),
            (&get_body, "413", 28),
        ] {
            let response = exchange(&server, request.as_bytes());
            let (head, body) = response.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
            assert_eq!(body.len(), length, "{head}\n{}", &request[..30.min(request.len())]);
        }
    }

    #[test]
    fn idle_clients_do_not_keep_others_waiting() {
        let server = start_server();
        let connect = |_| TcpStream::connect(server.address()).unwrap();
        let mut idle: Vec<TcpStream> = (0..3 * CONNECTIONS_MAX).map(connect).collect();
        let started = Instant::now();
        assert!(exchange(&server, b"GET /b HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(started.elapsed() < CONNECTION_TIMEOUT, "{:?}", started.elapsed());
        // The server has closed the oldest connection.
        idle[0].set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let closed = idle[0].read(&mut [0; 1]).map_err(|error| error.kind());
        assert!(matches!(closed, Ok(0) | Err(ErrorKind::ConnectionReset)), "{closed:?}");
    }

    #[test]
    fn a_slow_client_is_disconnected_at_its_deadline() {
        let server = start_server();
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(b"GET /a HT").unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let started = Instant::now();
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0)));
        assert!(started.elapsed() < 5 * CONNECTION_TIMEOUT);
    }

    #[test]
    fn dropping_the_server_frees_its_port() {
        let server = start_server();
        let address = server.address();
        let client = TcpStream::connect(address).unwrap();
        drop(server);
        drop(client);
        assert!(TcpStream::connect(address).is_err());
    }
}
