//! What a process that is forked from this one has copies of.

use std::os::fd::{AsRawFd, RawFd};

use super::{LinkState, TcpTransport};

impl TcpTransport {
    /// The sockets that are open now, by their numbers. For as long as a forked process has copies of them, peers do not hear of
    /// this one's end.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.listener.descriptors();
        for link in self.links.values() {
            match &link.state {
                LinkState::Open(stream) => all.push(stream.as_raw_fd()),
                LinkState::Bundled(bundle) => all.extend(bundle.connections().map(AsRawFd::as_raw_fd)),
                // Both are closed or opened again by whoever has them next; the peer has not been let in yet.
                LinkState::Opening(_) | LinkState::Lost(_) => {}
            }
        }
        all
    }
}
