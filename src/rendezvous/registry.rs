//! The registrations of ranks at the rendezvous. When the last rank has registered, the registry sends all ranks the roster,
//! which is the list of all ranks and their addresses.
//!
//! This module opens no sockets and reads no clock, so the simulation runs it with simulated connections. `server.rs` adds
//! the sockets and the clock.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::time::Duration;

use mio::Token;
use mio::net::TcpStream;

use super::message::{self, AbsentRanks, FROM_RANK_BYTES_MAX, FromRank, MEMBER_BYTES_MAX, ToRank};
use super::{Member, Roster, StartError};
use crate::transport::incoming::{AcceptedConnection, IncomingConnections};
use crate::types::{Rank, WorldSize};
use crate::wire::handshake::ConnectionPurpose;

/// The time after which a rank or a launcher that waits for missing ranks or for the rendezvous logs its first notice.
pub(super) const FIRST_NOTICE_DELAY: Duration = Duration::from_secs(2);
/// The time of each notice is the time of the previous notice multiplied by this number: 2 s, 10 s, 50 s, ...
const NOTICE_TIME_FACTOR: u32 = 5;
/// The maximum number of connections of one rank that are not registered. A rank that is started several times has several
/// connections, and so has a rank whose first connection failed without a notice.
const UNREGISTERED_CLIENTS_PER_RANK_MAX: usize = 2;
/// The maximum number of failed connections of missing ranks that an error lists.
const FAILED_CLIENTS_LISTED_MAX: usize = 8;

/// The receiver of the notices about missing ranks. The server sends notices 2 s, 10 s, 50 s, ... after the first
/// registration.
pub enum NoticeReceiver {
    /// The registered rank with the lowest number logs the notices.
    LowestRank,
    /// The server's thread calls this function with the text of each notice.
    Report(Box<dyn Fn(&str) + Send>),
}

/// Who receives the notices about missing ranks.
pub(crate) enum NoticeAudience {
    /// All registered ranks, including the serving rank. The user may have started each rank in a separate terminal.
    AllRanks,
    /// Only the launcher's receiver. The launcher shows the output of all ranks.
    Launcher(NoticeReceiver),
}

/// The ranks that have registered, and the connections of the ranks to the rendezvous. For each rank, the registry has at
/// most one registered connection and [`UNREGISTERED_CLIENTS_PER_RANK_MAX`] others.
pub(crate) struct RankRegistry<S = TcpStream> {
    world: WorldSize,
    start_timeout: Duration,
    audience: NoticeAudience,
    /// The times of the first registration and of the next notice about missing ranks; `None` before that registration.
    first_registration_and_next_notice: Option<(Duration, Duration)>,
    members: BTreeMap<Rank, Member>,
    clients: BTreeMap<Token, ClientConnection<S>>,
    /// A sentence for each process that was refused in its handshake.
    refused: Vec<String>,
    /// For each rank, how its last connection failed before it had registered.
    failed_clients: BTreeMap<Rank, String>,
    /// The message with the error that has ended the start of the job.
    failure_message: Option<Vec<u8>>,
}

/// A rank's connection to the rendezvous.
struct ClientConnection<S> {
    stream: S,
    rank: Rank,
    state: ClientState,
    /// Whether the rank has asked for the list of missing ranks, because its start timeout is over.
    has_asked: bool,
    received: Vec<u8>,
    unsent: Vec<u8>,
}

/// The progress of a client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum ClientState {
    /// The client's registration has been refused.
    Refused,
    /// The handshake is complete, but the client has not registered.
    Unregistered,
    Registered,
}

impl<S: Read + Write> RankRegistry<S> {
    /// Creates a registry without ranks. All ranks must register within `start_timeout` after the first registration.
    pub(crate) fn new(world: WorldSize, start_timeout: Duration, audience: NoticeAudience) -> Self {
        Self {
            world,
            start_timeout,
            audience,
            first_registration_and_next_notice: None,
            members: BTreeMap::new(),
            clients: BTreeMap::new(),
            refused: Vec::new(),
            failed_clients: BTreeMap::new(),
            failure_message: None,
        }
    }

    /// Adds a rank to the registered ranks.
    pub(crate) fn register_rank(&mut self, now: Duration, rank: Rank, member: Member) {
        self.members.insert(rank, member);
        self.failed_clients.remove(&rank);
        self.first_registration_and_next_notice.get_or_insert((now, now + FIRST_NOTICE_DELAY));
    }

    /// Returns the roster if all ranks have registered.
    pub(crate) fn roster(&self) -> Option<Roster> {
        let is_complete = self.members.len() == self.world.as_usize();
        is_complete.then(|| Roster { members: self.members.values().cloned().collect() })
    }

    /// Returns the ranks that have registered.
    #[cfg(test)]
    pub(crate) fn registered_ranks(&self) -> impl Iterator<Item = Rank> {
        self.members.keys().copied()
    }

    /// Returns the number of connections, and the number of bytes in their buffers.
    #[cfg(test)]
    pub(crate) fn state_size(&self) -> (usize, usize) {
        let bytes = self.clients.values().map(|client| client.received.len() + client.unsent.len()).sum();
        (self.clients.len(), bytes)
    }

    /// Returns the time at which [`RankRegistry::serve`] must be called again, even if there is no event.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        // Before the first registration, there is no deadline: a program may load data for minutes before it joins.
        let (first_registration, next_notice) = self.first_registration_and_next_notice?;
        Some(next_notice.min(first_registration + self.start_timeout))
    }

    /// Serves the connections in `events` and the new connections in `incoming`, and sends notices about missing ranks.
    /// `name(rank)` returns a rank's name for messages. After an error, or if all ranks have registered
    /// ([`RankRegistry::roster`]), call [`RankRegistry::send_last_messages`] and not this method.
    ///
    /// # Errors
    ///
    /// [`StartError::Missing`] or [`StartError::PeerLost`]. All clients will receive the same error.
    pub(crate) fn serve(
        &mut self,
        now: Duration,
        incoming: &mut IncomingConnections<S>,
        events: impl IntoIterator<Item = Token>,
        name: &dyn Fn(Rank) -> String,
    ) -> Result<(), StartError> {
        // A rank opens links only after it has received the roster.
        while incoming.take(ConnectionPurpose::Link).is_some() {}
        self.refused.clone_from(&incoming.refused);
        for token in events {
            self.serve_client(now, token)?;
        }
        while let Some(accepted) = incoming.take(ConnectionPurpose::Rendezvous) {
            let token = accepted.token;
            self.add_client(accepted);
            self.serve_client(now, token)?;
        }
        if self.roster().is_some() {
            return Ok(());
        }
        let Some((first, due)) = self.first_registration_and_next_notice else { return Ok(()) };
        if now >= first + self.start_timeout {
            return Err(self.fail_for_timeout(name));
        }
        if now >= due {
            self.report_absent_ranks(now.saturating_sub(first), name);
            let next_notice = first + due.saturating_sub(first) * NOTICE_TIME_FACTOR;
            self.first_registration_and_next_notice = Some((first, next_notice));
        }
        Ok(())
    }

    /// Sends a notice about the missing ranks to all receivers of notices.
    fn report_absent_ranks(&mut self, waited: Duration, name: &dyn Fn(Rank) -> String) {
        let absent = self.absent_ranks();
        let notice = absent.describe_wait(name, waited);
        let receiver_count = match &self.audience {
            NoticeAudience::AllRanks => {
                log::warn!("{notice}");
                usize::MAX
            }
            NoticeAudience::Launcher(NoticeReceiver::LowestRank) => 1,
            NoticeAudience::Launcher(NoticeReceiver::Report(report)) => return report(&notice),
        };
        let bytes = message::encode(&ToRank::Waiting(absent));
        let registered = self.clients.values_mut().filter(|client| client.state == ClientState::Registered);
        let mut registered: Vec<&mut ClientConnection<S>> = registered.collect();
        registered.sort_by_key(|client| client.rank);
        for client in registered.into_iter().take(receiver_count) {
            client.unsent.extend_from_slice(&bytes);
            if let Err(error) = client.send_unsent() {
                // Only log this error: the next event on this connection reports the same error again.
                log::debug!("the list of missing ranks could not be sent to rank {}: {error}", client.rank);
            }
        }
    }

    /// Adds a connection whose handshake is complete. If its rank has too many connections that are not registered, closes
    /// one of them.
    fn add_client(&mut self, accepted: AcceptedConnection<S>) {
        let rank = accepted.introduction.from;
        let is_unregistered =
            |client: &ClientConnection<S>| client.rank == rank && client.state != ClientState::Registered;
        let of_rank = self.clients.iter().filter(|(_, client)| is_unregistered(client));
        let mut of_rank: Vec<_> = of_rank.map(|(token, client)| (client.state, *token)).collect();
        of_rank.sort_unstable();
        if of_rank.len() >= UNREGISTERED_CLIENTS_PER_RANK_MAX {
            self.clients.remove(&of_rank[0].1);
        }
        let client = ClientConnection {
            stream: accepted.stream,
            rank,
            state: ClientState::Unregistered,
            has_asked: false,
            received: Vec::new(),
            unsent: Vec::new(),
        };
        self.clients.insert(accepted.token, client);
    }

    /// Reads a client's messages, and answers them.
    fn serve_client(&mut self, now: Duration, token: Token) -> Result<(), StartError> {
        let Some(mut client) = self.clients.remove(&token) else { return Ok(()) };
        // Handle received messages before connection errors: a rank that registered and ended at once is lost, not missing.
        let read_result = client.receive_bytes();
        let result = self
            .answer_received_messages(now, &mut client)
            .and(read_result)
            .and_then(|()| client.send_unsent());
        let Err(detail) = result else {
            self.clients.insert(token, client);
            return Ok(());
        };
        let rank = client.rank;
        match client.state {
            ClientState::Registered if client.has_asked => {
                let detail = format!("its start timeout was over before all ranks had registered: {detail}");
                Err(self.fail_for_lost_rank(rank, detail))
            }
            ClientState::Registered => Err(self.fail_for_lost_rank(rank, detail)),
            // The rank may connect again, and another process may have registered this rank.
            ClientState::Unregistered => {
                log::info!("rank {rank} was lost before it registered: {detail}");
                if !self.members.contains_key(&rank) {
                    let text = format!("rank {rank} connected, but was lost before it registered: {detail}");
                    self.failed_clients.insert(rank, text);
                }
                Ok(())
            }
            ClientState::Refused => {
                log::info!("a refused process with rank {rank} disconnected: {detail}");
                Ok(())
            }
        }
    }

    fn answer_received_messages(
        &mut self,
        now: Duration,
        client: &mut ClientConnection<S>,
    ) -> Result<(), String> {
        while let Some(message) = message::decode(&mut client.received, FROM_RANK_BYTES_MAX)? {
            self.answer_message(now, client, message);
        }
        Ok(())
    }

    fn answer_message(&mut self, now: Duration, client: &mut ClientConnection<S>, message: FromRank) {
        let reply = match message {
            // Answers that the rank does not read could fill the memory.
            FromRank::Ask if !client.unsent.is_empty() => return,
            FromRank::Ask => {
                client.has_asked = true;
                ToRank::Missing(self.absent_ranks())
            }
            FromRank::Register(_) if client.state != ClientState::Unregistered => return,
            FromRank::Register(member) => {
                let Some(reason) = self.reason_to_refuse(client.rank, &member) else {
                    client.state = ClientState::Registered;
                    return self.register_rank(now, client.rank, member);
                };
                client.state = ClientState::Refused;
                ToRank::Refused { reason }
            }
        };
        client.unsent.extend_from_slice(&message::encode(&reply));
    }

    /// Returns why `rank` may not register, or `None` if it may.
    fn reason_to_refuse(&self, rank: Rank, member: &Member) -> Option<String> {
        if let Some(Member { host, address, .. }) = self.members.get(&rank) {
            return Some(format!(
                "rank {rank} is already taken by a process on {host} that listens on {address}; was this rank started twice?"
            ));
        }
        let length = message::encode(member).len();
        (length > MEMBER_BYTES_MAX).then(|| {
            format!("its registration has {length} bytes, more than {MEMBER_BYTES_MAX}; use shorter names of hosts")
        })
    }

    /// Returns the ranks that have not registered, and the processes that failed to register.
    fn absent_ranks(&self) -> AbsentRanks {
        let ranks = self.world.ranks().filter(|rank| !self.members.contains_key(rank)).collect();
        let failed = self.failed_clients.values().take(FAILED_CLIENTS_LISTED_MAX);
        AbsentRanks { ranks, refused: self.refused.iter().chain(failed).cloned().collect() }
    }

    /// Sends all clients the error that the start timeout is over, and returns the error.
    fn fail_for_timeout(&mut self, name: &dyn Fn(Rank) -> String) -> StartError {
        let absent = self.absent_ranks();
        let timeout = self.start_timeout;
        let missing = absent.describe(name);
        self.queue_failure(&ToRank::TimedOut { absent, timeout_ms: timeout.as_millis() as u64 });
        StartError::Missing { missing, timeout }
    }

    /// Sends all clients the error that `rank` is lost, and returns the error.
    pub(crate) fn fail_for_lost_rank(&mut self, rank: Rank, detail: String) -> StartError {
        let host =
            self.members.get(&rank).map_or_else(|| "an unknown host".into(), |member| member.host.clone());
        self.queue_failure(&ToRank::Lost { rank, host: host.clone(), detail: detail.clone() });
        StartError::PeerLost { rank, host, detail }
    }

    /// Sends the roster to all ranks. Other processes with their ranks receive the reply that the job already runs. Returns
    /// a function that creates this reply for the processes that connect later.
    pub(crate) fn start_job(&mut self, roster: Roster) -> impl Fn(Rank) -> Vec<u8> + Send + 'static {
        let ready = message::encode(&ToRank::Ready(roster.clone()));
        let late_reply = move |rank: Rank| {
            let reason = match roster.members.get(rank.index()) {
                Some(Member { host, address, .. }) => format!(
                    "the job already runs, and its rank {rank} is another process, on {host} at {address}; start each rank once"
                ),
                None => "the job already runs".to_owned(),
            };
            message::encode(&ToRank::Refused { reason })
        };
        for client in self.clients.values_mut() {
            match client.state {
                ClientState::Registered => client.unsent.extend_from_slice(&ready),
                ClientState::Unregistered => client.unsent.extend_from_slice(&late_reply(client.rank)),
                ClientState::Refused => {}
            }
        }
        late_reply
    }

    /// Adds the error that ends the start of the job to the unsent bytes of all clients that have not been refused.
    fn queue_failure(&mut self, message: &ToRank) {
        let bytes = message::encode(message);
        for client in self.clients.values_mut().filter(|client| client.state != ClientState::Refused) {
            client.unsent.extend_from_slice(&bytes);
        }
        self.failure_message = Some(bytes);
    }

    /// Returns a function that creates the reply for the processes that connect after the start of the job has failed.
    pub(crate) fn failure_reply(&self) -> Option<impl Fn(Rank) -> Vec<u8> + Send + 'static> {
        let bytes = self.failure_message.clone()?;
        Some(move |_| bytes.clone())
    }

    /// Sends as many of the unsent bytes as possible without blocking, and closes each connection on which nothing is left
    /// to send. Connections whose registration may still arrive stay open in `incoming`. Returns whether everything is sent.
    pub(crate) fn send_last_messages(&mut self, incoming: &mut IncomingConnections<S>) -> bool {
        for (token, mut client) in std::mem::take(&mut self.clients) {
            match client.send_unsent() {
                Ok(()) if !client.unsent.is_empty() => drop(self.clients.insert(token, client)),
                Ok(()) if client.state == ClientState::Unregistered => incoming.keep_open(client.stream),
                _ => {}
            }
        }
        self.clients.is_empty()
    }
}

impl<S: Read + Write> ClientConnection<S> {
    /// Reads all bytes that have arrived.
    fn receive_bytes(&mut self) -> Result<(), String> {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err("it closed its connection".into()),
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
            // Without this limit, a client that sends without end could fill the memory.
            if self.received.len() > 2 * FROM_RANK_BYTES_MAX {
                return Err("it sent a message that is longer than the limit".into());
            }
        }
    }

    /// Sends as many of the unsent bytes as possible without blocking.
    fn send_unsent(&mut self) -> Result<(), String> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(count) => {
                    self.unsent.drain(..count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }
}
