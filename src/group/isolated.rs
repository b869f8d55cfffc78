//! A separate job of the ranks of a group, with connections of its own.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::Group;
use super::join::{start_error, start_group};
use super::options::{JoinOptions, OPERATION_TIMEOUT};
use super::state::{Origin, SharedJob};
use super::streams::Streams;
use crate::rendezvous::{Member, Roster, SharedSettings, StartError};
use crate::transport::SocketTransport as _;
use crate::transport::tcp::{CONNECT_TIMEOUT, IsolatedGroup, SocketOptions, TcpTransport};
use crate::types::Rank;

impl Group {
    /// Starts a separate job of the ranks of this group, with connections of its own, which arrive on the ports of the ranks. All
    /// ranks of this group must call this function. A failure in one of the two jobs, such as the loss of a rank, does not affect
    /// the other job. For example, a process can have an isolated group of two ranks with each peer. If the process loses one
    /// peer, its groups with the other peers still work. Errors of the new job show the ranks of this group.
    ///
    /// # Errors
    ///
    /// [`StartError`] if this group has failed or is itself isolated, or if the ranks cannot connect.
    pub fn isolated(&mut self) -> Result<Self, StartError> {
        let Some(job) = self.job.clone() else {
            return Ok(Self { timeout: self.timeout, ..Self::solo() });
        };
        let has_port = job.driver.core().link_driver.transport.sockets.listener.has_port();
        let Some(origin) = job.origin.as_ref().filter(|_| has_port) else {
            return Err(StartError::Isolated(
                "an isolated group has no ports on which another one could connect; use a group of the whole job"
                    .into(),
            ));
        };
        let epoch = Instant::now();
        let options = JoinOptions {
            streams: Streams::new(self.streams()).unwrap_or_default(),
            transport: job.selection.local_transport,
            operation_timeout: self.timeout,
            ..origin.options.clone()
        };
        let timeout = options.operation_timeout.max(OPERATION_TIMEOUT);
        let sockets = SocketOptions::new(&options.congestion, timeout, options.pacing)
            .map_err(StartError::SocketOptions)?;
        let transport = self.connect_isolated(&job, sockets, options.streams.initial_count(), epoch)?;
        let member = |rank: &Rank| {
            let member = &origin.roster.members[rank.index()];
            let shared = SharedSettings { streams: options.streams.to_byte(), ..member.shared };
            Member { shared, ..member.clone() }
        };
        let reporter = origin.failure_reporter.as_ref();
        let origin = Origin {
            roster: Roster { members: self.members.iter().map(member).collect() },
            options,
            ranks_per_processor: origin.ranks_per_processor,
            failure_reporter: reporter.map(|reporter| reporter.for_isolated_group(self.members())),
        };
        start_group(origin, self.rank, epoch, |_, _| transport)
    }

    fn connect_isolated(
        &mut self,
        job: &SharedJob,
        sockets: SocketOptions,
        streams: u8,
        epoch: Instant,
    ) -> Result<TcpTransport, StartError> {
        let refused_queue = |source| StartError::System { what: "an event queue", source };
        let id =
            self.broadcast_object(&rand::random::<u64>(), Rank::ZERO).map_err(|error| start_error(&error))?;
        let group = IsolatedGroup { id, members: Arc::clone(&self.members) };
        let core = || job.driver.core();
        let created =
            core().link_driver.transport.sockets.create_isolated(group, self.rank, sockets, streams);
        // A rank that cannot take part must inform the other ranks, because they would wait for its connection. No rank dials
        // before the ports of all ranks accept connections of the isolated group.
        let ready = self.check_all(&created.as_ref().map(|_| ()).map_err(ToString::to_string));
        let mut transport = created.map_err(refused_queue)?;
        let connected = ready.and_then(|()| self.open_isolated_links(&mut transport, epoch));
        // Even after a failure, the port must not accept connections of the isolated group any more.
        let taken = transport.take_accepted_from(&mut core().link_driver.transport.sockets);
        connected?;
        taken.map_err(refused_queue)?;
        Ok(transport)
    }

    /// Dials the higher ranks of an isolated group, and accepts the connections of the lower ranks, until all ranks have dialed.
    fn open_isolated_links(
        &mut self,
        transport: &mut TcpTransport,
        epoch: Instant,
    ) -> Result<(), StartError> {
        let dialed = dial_higher_ranks(transport, epoch).map_err(|error| error.to_string());
        let dialed = dialed.and_then(|()| match transport.missing_link() {
            None => Ok(()),
            Some((peer, why)) => {
                let (from, to) = (self.members[self.rank.index()], self.members[peer.index()]);
                let host = self.host(peer);
                Err(format!("the connection from rank {from} to rank {to} on {host} failed: {why}"))
            }
        });
        self.check_all(&dialed)
    }

    /// Returns an error if any rank has one.
    fn check_all(&mut self, own: &Result<(), String>) -> Result<(), StartError> {
        let results = self.all_gather_object(own).map_err(|error| start_error(&error))?;
        results.into_iter().collect::<Result<(), String>>().map_err(StartError::Isolated)
    }

    /// From now on, a thread that waits for a message of this job polls up to 200 us before it sleeps, while its waits are
    /// short. Use this for connections on which ranks exchange short requests and replies.
    pub(crate) fn adapt_polling(&self) {
        if let Some(job) = &self.job {
            job.driver.core().adapt_polling();
        }
    }
}

/// Opens the links to the higher ranks of an isolated group, as far as this is possible before the deadline. All ranks already
/// accept connections, so the time is short, but longer than the timeout for connecting a link.
fn dial_higher_ranks(transport: &mut TcpTransport, epoch: Instant) -> io::Result<()> {
    let deadline = epoch.elapsed() + 2 * CONNECT_TIMEOUT;
    transport.dial_higher_ranks(epoch.elapsed());
    loop {
        let now = epoch.elapsed();
        if transport.has_dialed() || now >= deadline {
            return Ok(());
        }
        let until = transport.next_deadline().map_or(deadline, |next| next.min(deadline));
        let events = transport.listener.wait(now, Some(until))?;
        transport.serve(epoch.elapsed(), events);
    }
}
