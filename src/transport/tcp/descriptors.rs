//! The sockets that a forked process has copies of.

use std::os::fd::{AsRawFd, RawFd};

use super::{LinkState, TcpTransport};

impl TcpTransport {
    /// The descriptors of the sockets that are open now. While a forked process has copies of them, peers do not notice that this
    /// process has ended.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.listener.descriptors();
        for link in self.links.values() {
            match &link.state {
                LinkState::Open(stream) => all.push(stream.as_raw_fd()),
                LinkState::Bundled(bundle) => all.extend(bundle.connections().map(AsRawFd::as_raw_fd)),
                // A connection that is being opened is not a link yet, and a lost one is closed.
                LinkState::Opening(_) | LinkState::Lost(_) => {}
            }
        }
        all
    }
}
