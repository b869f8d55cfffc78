//! The sockets of which a forked process gets copies.

use std::os::fd::{AsRawFd, RawFd};

use super::{LinkState, TcpTransport};

impl TcpTransport {
    /// Returns the file descriptors of the open sockets. As long as a child that this process has forked holds copies
    /// of these file descriptors, peers do not notice that this process has ended.
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
