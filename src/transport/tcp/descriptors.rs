//! Lists the sockets of the transport. A forked child inherits these sockets and must close them.

use std::os::fd::{AsRawFd, RawFd};

use super::{TcpLink, TcpTransport};

impl TcpTransport {
    /// Returns the file descriptors of the listener, of all links and of all connections that are being opened. If a forked
    /// child keeps copies of these file descriptors open, peers do not notice the end of this process.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.listener.descriptors();
        all.extend(self.extras.values().map(|dial| dial.stream.as_raw_fd()));
        for link in self.links.values() {
            match link {
                TcpLink::Open(bundle) => all.extend(bundle.connections().map(AsRawFd::as_raw_fd)),
                TcpLink::Opening(opening) => {
                    all.push(opening.ours.stream.as_raw_fd());
                    all.extend(opening.peer_connection().map(|accepted| accepted.stream.as_raw_fd()));
                }
                // The connections of a lost link are closed.
                TcpLink::Lost(_) => {}
            }
        }
        all
    }
}
