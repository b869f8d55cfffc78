//! Opens the links of an isolated group. They arrive on the port of the job, which passes the accepted connections to the
//! transport of the group. Of two ranks, the lower rank of the group dials. All ranks must have called
//! [`TcpTransport::create_isolated`] before one of them dials, because the transport of the job refuses unexpected connections.

use std::io;
use std::time::Duration;

use mio::Interest;

use super::{IsolatedGroup, SocketOptions, TcpLink, TcpTransport};
use crate::transport::SocketTransport as _;
use crate::transport::listener::Listener;
use crate::types::Rank;

impl TcpTransport {
    /// Creates the transport of rank `rank` of an isolated group, which is this rank of this job. From now on, this job's port
    /// accepts the connections of the group's lower ranks. Returns an error if the operating system refuses an event queue.
    pub fn create_isolated(
        &mut self,
        group: IsolatedGroup,
        rank: Rank,
        options: SocketOptions,
        streams: u8,
    ) -> io::Result<Self> {
        let listener = Listener::without_port(self.listener.incoming.identity.clone())?;
        let lower = group.members[..rank.index()].iter().copied();
        self.listener.incoming.expect_isolated_links(group.id, lower, streams);
        let addresses = group.members.iter().map(|member| self.addresses[member.index()]).collect();
        let transport = Self::new(listener, rank, addresses, options, streams);
        Ok(Self { isolated: Some(group), ..transport })
    }

    /// Begins to open the links to all higher ranks of an isolated group.
    pub fn dial_higher_ranks(&mut self, now: Duration) {
        for peer in (self.rank.get() + 1..self.addresses.len() as u32).map(Rank::new) {
            self.connect(now, peer);
        }
    }

    pub fn has_dialed(&self) -> bool {
        self.dials.is_empty()
    }

    /// Returns a peer whose link is lost or still being opened, and why.
    pub fn missing_link(&self) -> Option<(Rank, &str)> {
        self.links.iter().find_map(|(&peer, link)| match link {
            TcpLink::Open(_) => None,
            TcpLink::Lost(why) => Some((peer, why.as_str())),
            TcpLink::Opening(_) => Some((peer, "it did not complete the handshake in time")),
        })
    }

    /// Adds the connections that the lower ranks of this isolated group have opened to the port of `job`, which from now on
    /// refuses such connections. Returns an error if a connection cannot move to the event queue of this transport.
    pub fn take_accepted_from(&mut self, job: &mut Self) -> io::Result<()> {
        let Some(group) = self.isolated.clone() else { return Ok(()) };
        for mut accepted in job.listener.incoming.take_isolated_links(group.id) {
            job.listener.registry.deregister(&mut accepted.stream)?;
            accepted.token = self.listener.new_token();
            let interest = Interest::READABLE | Interest::WRITABLE;
            self.listener.registry.register(&mut accepted.stream, accepted.token, interest)?;
            let from = group.members.iter().position(|&member| member == accepted.introduction.from);
            let Some(from) = from else { continue };
            accepted.introduction.from = Rank::new(from as u32);
            self.add_peer_connection(accepted);
        }
        // The other ranks may send before this rank needs its links.
        self.incoming_links = self.links.keys().copied().collect();
        Ok(())
    }
}
