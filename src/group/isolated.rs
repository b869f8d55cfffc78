//! A separate job of the ranks of a group, with connections of its own.

use std::time::Instant;

use super::Group;
use super::exchange::{Exchanged, listen_on_free_port};
use super::join::{StartInputs, start_error, start_group};
use super::options::{JoinOptions, OPERATION_TIMEOUT};
use super::state::Origin;
use super::streams::Streams;
use crate::rendezvous::{Member, Roster, StartError};
use crate::transport::handshake::Identity;
use crate::transport::tcp::SocketOptions;
use crate::types::Rank;
use crate::wire::handshake::Job;

impl Group {
    /// Starts a separate job of the ranks of this group, with connections of its own. All ranks of this group must call
    /// this function. A failure in one of the two jobs, such as the loss of a rank, does not affect the other job. For
    /// example, a process can have an isolated group of two ranks with each peer. If the process loses one peer, its
    /// groups with the other peers still work. Errors of the new job show the ranks of this group.
    ///
    /// # Errors
    ///
    /// [`StartError`] if this group has failed, if a rank cannot open a port, or if the ranks cannot connect.
    pub fn isolated(&mut self) -> Result<Self, StartError> {
        let Some(job) = self.job.clone() else {
            return Ok(Self { timeout: self.timeout, ..Self::solo() });
        };
        let Some(Origin { options, member, host_of_rank_0, ranks_per_processor, failure_reporter }) =
            &job.origin
        else {
            return Err(StartError::Refused("the group of one rank has no connections".into()));
        };
        let epoch = Instant::now();
        let options = JoinOptions {
            streams: Streams::new(self.streams()).unwrap_or_default(),
            transport: job.selection.local_transport,
            operation_timeout: self.timeout,
            ..options.clone()
        };
        let sockets =
            SocketOptions::new(&options.congestion, options.operation_timeout.max(OPERATION_TIMEOUT))
                .and_then(|sockets| sockets.with_pacing(options.pacing))
                .map_err(StartError::SocketOptions)?;
        let id = self
            .broadcast_object(&rand::random::<[u8; 16]>(), Rank::ZERO)
            .map_err(|error| start_error(&error))?;
        let job = Job { id, world: self.size().get(), peers_digest: [0; 32] };
        let identity = Identity { secret: options.secret.clone(), job, rank: Some(self.rank()) };
        let listener = listen_on_free_port(options.ports, (&sockets, member.address.ip()), identity);
        let own_member = listener.as_ref().map_err(ToString::to_string).and_then(|listener| {
            let address = listener.local_address().map_err(|error| error.to_string())?;
            let mut member = Member { address, ..member.clone() };
            member.shared.streams = options.streams.to_byte();
            Ok(member)
        });
        // A rank that cannot listen must inform the other ranks, because they would wait for its connection.
        let members = self.all_gather_object(&own_member).map_err(|error| start_error(&error))?;
        let members: Result<Vec<Member>, String> = members.into_iter().collect();
        let roster = Roster { members: members.map_err(StartError::Refused)? };
        let rank = self.rank();
        let failure_reporter =
            failure_reporter.as_ref().map(|reporter| reporter.for_isolated_group(self.members()));
        let exchanged = Exchanged { rank, listener: listener?, roster, host_of_rank_0: *host_of_rank_0 };
        let ranks_per_processor = Some(*ranks_per_processor);
        start_group(
            StartInputs { exchanged, sockets, epoch, ranks_per_processor, failure_reporter },
            &options,
        )
    }

    /// From now on, a thread that waits for a message of this job polls up to 200 us before it sleeps, while its waits are
    /// short. Use this for connections on which ranks exchange short requests and replies.
    pub(crate) fn adapt_polling(&self) {
        if let Some(job) = &self.job {
            job.driver.core().adapt_polling();
        }
    }
}
