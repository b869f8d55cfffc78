//! Lists the sockets of the listener and of the open links. A forked child inherits these sockets and must close them.

use std::os::fd::{AsRawFd, RawFd};

use super::{LinkState, TcpTransport};

impl TcpTransport {
    /// Returns the file descriptors of the listener and of the open links. If a forked child keeps copies of these file
    /// descriptors open, peers do not notice the end of this process.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.listener.descriptors();
        for link in self.links.values() {
            match &link.state {
                LinkState::Open(stream) => all.push(stream.as_raw_fd()),
                LinkState::Bundled(bundle) => all.extend(bundle.connections().map(AsRawFd::as_raw_fd)),
                // A connection that is being opened is not a link yet, and the connections of a lost link are closed.
                LinkState::Opening(_) | LinkState::Lost(_) => {}
            }
        }
        all
    }
}
