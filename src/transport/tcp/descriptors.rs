//! What a process that is forked from this one has copies of.

use std::os::fd::{AsRawFd, RawFd};

use super::{State, TcpTransport};

impl TcpTransport {
    /// The sockets that are open now, by their numbers. For as long as a forked process has copies of them, peers do not hear of
    /// this one's end.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let mut all = self.lobby.descriptors();
        for link in self.links.values() {
            match &link.state {
                State::Open(stream) => all.push(stream.as_raw_fd()),
                State::Bundled(bundle) => all.extend(bundle.pipes().map(AsRawFd::as_raw_fd)),
                // Both are closed or opened again by whoever has them next; the peer has not been let in yet.
                State::Meeting(_) | State::Lost(_) => {}
            }
        }
        all
    }
}
