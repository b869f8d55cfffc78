//! The serving side of the rendezvous. The server registers ranks. When the last rank has registered, the server
//! sends all ranks the roster, which is the list of all ranks and their addresses.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Token, Waker};

use super::message::{self, AbsentRanks, FROM_RANK_BYTES_MAX, FromRank, ToRank};
use super::{Member, Roster, StartError, is_loopback};
use crate::transport::handshake::Identity;
use crate::transport::listener::{Listener, listen};
use crate::types::{Rank, WorldSize};
use crate::wire::Secret;
use crate::wire::handshake::{ConnectionPurpose, Job};

/// How long the server tries to send its last message to all ranks.
const FINAL_SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// The time after which a rank or a launcher that waits for missing ranks or for the rendezvous logs its first notice.
pub(super) const FIRST_NOTICE_DELAY: Duration = Duration::from_secs(2);
/// The time of each notice is the time of the previous notice multiplied by this number: 2 s, 10 s, 50 s, ...
const NOTICE_TIME_FACTOR: u32 = 5;

/// Serves the rendezvous on `listener` until all ranks of `world` have registered. `own` is the registration of the
/// serving rank. `name(rank)` returns a rank's name for messages. A process that connects after the last registration
/// receives the reply that the job already runs.
///
/// # Errors
///
/// [`StartError::Missing`] if a rank does not register within `start_timeout`, and [`StartError::PeerLost`] if a
/// registered rank ends or disconnects. All ranks that have registered receive the same error.
pub fn serve(
    listener: &mut Listener,
    world: WorldSize,
    own: (Rank, Member),
    start_timeout: Duration,
    name: impl Fn(Rank) -> String,
) -> Result<Roster, StartError> {
    let (_sender, commands) = channel();
    let mut registry = RankRegistry::new(listener, world, start_timeout, NoticeAudience::AllRanks);
    registry.register_rank(own.0, own.1);
    let roster = registry.serve_until_complete(&commands, &name)?.unwrap_or(Roster { members: Vec::new() });
    registry.send_to_all(&ToRank::Ready(roster.clone()));
    let members = roster.members.clone();
    listener.incoming.reply_to_late_ranks(move |rank| {
        let reason = match members.get(rank.index()) {
            Some(Member { host, address, .. }) => format!(
                "the job already runs, and its rank {rank} is another process, on {host} at {address}; start each rank once"
            ),
            None => "the job already runs".to_owned(),
        };
        message::encode(&ToRank::Refused { reason })
    });
    Ok(roster)
}

/// A command from a launcher to the thread that serves its rendezvous: to stop, or that a rank's process has ended.
enum ServerCommand {
    Stop,
    RankEnded { rank: Rank, how: String },
}

/// The options of a launcher's rendezvous.
pub struct ServerOptions {
    /// The address of this machine on which the rendezvous listens. The operating system chooses the port.
    pub host: IpAddr,
    /// The number of ranks of the job.
    pub world: WorldSize,
    /// The secret of the job.
    pub secret: Secret,
    /// The id of the job.
    pub job_id: [u8; 16],
    /// The time within which all ranks must register after the first rank has registered. Until the first rank has
    /// registered, the rendezvous waits without a limit.
    pub start_timeout: Duration,
    /// The receiver of notices about missing ranks.
    pub notices: NoticeReceiver,
}

/// The receiver of the notices about missing ranks. The server sends notices 2 s, 10 s, 50 s, ... after the first
/// registration.
pub enum NoticeReceiver {
    /// The registered rank with the lowest number logs the notices.
    LowestRank,
    /// The server's thread calls this function with the text of each notice.
    Report(Box<dyn Fn(&str) + Send>),
}

/// The rendezvous of a launcher. A thread serves the ranks until all have registered.
pub struct Server {
    address: SocketAddr,
    commands: Sender<ServerCommand>,
    waker: Option<Arc<Waker>>,
    has_job_started: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on a free port, and serves the ranks of a job.
    ///
    /// # Errors
    ///
    /// If the operating system refuses a socket or a thread, or if there is no secret and other hosts can reach the
    /// address.
    pub fn start(options: ServerOptions) -> Result<Self, StartError> {
        let ServerOptions { host, world, secret, job_id, start_timeout, notices } = options;
        let system = |what| move |source| StartError::System { what, source };
        let listener =
            listen(SocketAddr::new(host, 0), |_| Ok(())).map_err(system("a socket for the rendezvous"))?;
        let address = listener.local_addr().map_err(system("the rendezvous's address"))?;
        if secret.is_none() && !is_loopback(host) {
            return Err(StartError::NeedsSecret { address });
        }
        let job = Job { id: job_id, world: world.get(), peers_digest: [0; 32] };
        let mut listener = Listener::new(listener, Identity { secret, job, rank: None })
            .map_err(system("an event queue for the rendezvous"))?;
        let waker = listener.waker();
        let (commands, receiver) = channel();
        let has_job_started = Arc::new(AtomicBool::new(false));
        let started_flag = Arc::clone(&has_job_started);
        let serve = move || {
            let mut registry =
                RankRegistry::new(&mut listener, world, start_timeout, NoticeAudience::Launcher(notices));
            match registry.serve_until_complete(&receiver, &|rank| format!("rank {rank}")) {
                Ok(None) => {}
                Ok(Some(roster)) => {
                    log::debug!("all {world} ranks have registered");
                    // Set the flag before the roster is sent. A rank that has received the roster may fail at once, and this
                    // failure must not count as a failed start.
                    started_flag.store(true, Ordering::Release);
                    registry.send_to_all(&ToRank::Ready(roster));
                }
                // The registered ranks have received this error and report it. A rank that registers later receives
                // the same error.
                Err(StartError::PeerLost { rank, host, detail }) => {
                    let started = registry.started;
                    let lost = message::encode(&ToRank::Lost { rank, host, detail });
                    listener.incoming.reply_to_late_ranks(move |_| lost.clone());
                    reply_until_stopped(&mut listener, &receiver, started);
                }
                Err(error) => log::info!("rendezvous: {error}"),
            }
        };
        let thread = std::thread::Builder::new()
            .name("rendezvous".into())
            .spawn(serve)
            .map_err(system("a thread for the rendezvous"))?;
        Ok(Self { address, commands, waker, has_job_started, thread: Some(thread) })
    }

    /// Returns the address on which the rendezvous listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns whether the job has started: whether all ranks have registered.
    pub fn has_job_started(&self) -> bool {
        self.has_job_started.load(Ordering::Acquire)
    }

    /// Reports that the process of a rank has ended; `how` is, for example, "was killed by signal 9 (SIGKILL)". If
    /// the job has not started, its start fails, and the waiting ranks receive an error that contains `how`.
    pub fn rank_ended(&self, rank: Rank, how: String) {
        self.send_command(ServerCommand::RankEnded { rank, how });
    }

    fn send_command(&self, command: ServerCommand) {
        // If all ranks have registered, the server's thread may have ended: the send or the wake-up then fails.
        if self.commands.send(command).is_ok()
            && let Some(waker) = &self.waker
            && let Err(error) = waker.wake()
        {
            log::debug!("the rendezvous could not be woken: {error}");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.send_command(ServerCommand::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the rendezvous's thread panicked, which is a bug");
        }
    }
}

/// Replies to late ranks until the launcher stops the server.
fn reply_until_stopped(listener: &mut Listener, commands: &Receiver<ServerCommand>, started: Instant) {
    let mut events = Vec::new();
    // One wake-up may announce several commands, so look at all commands.
    while !commands.try_iter().any(|command| matches!(command, ServerCommand::Stop)) {
        events.clear();
        if listener.wait(started.elapsed(), None, &mut events).is_err() {
            return;
        }
    }
}

/// Who receives the notices about missing ranks.
enum NoticeAudience {
    /// All registered ranks, including the serving rank. The user may have started each rank in a separate terminal.
    AllRanks,
    /// Only the launcher's receiver. The launcher shows the output of all ranks.
    Launcher(NoticeReceiver),
}

/// The ranks that have registered, and the connections of the ranks to the rendezvous.
struct RankRegistry<'a> {
    listener: &'a mut Listener,
    world: WorldSize,
    start_timeout: Duration,
    audience: NoticeAudience,
    started: Instant,
    /// The times of the first registration and of the next notice about missing ranks; `None` before that registration.
    first_registration_and_next_notice: Option<(Duration, Duration)>,
    members: BTreeMap<Rank, Member>,
    clients: BTreeMap<Token, ClientConnection>,
}

/// A rank's connection to the rendezvous.
struct ClientConnection {
    stream: TcpStream,
    rank: Rank,
    state: ClientState,
    received: Vec<u8>,
    unsent: Vec<u8>,
}

/// The progress of a client.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ClientState {
    /// The handshake is complete, but the client has not registered.
    Unregistered,
    Registered,
    /// The client's registration has been refused.
    Refused,
}

/// Why the rendezvous ends before all ranks have registered.
enum ServeError {
    /// A rank has disconnected or sent an invalid message.
    RankLost { rank: Rank, detail: String },
    /// The system call that waits for events failed.
    System(io::Error),
}

impl<'a> RankRegistry<'a> {
    fn new(
        listener: &'a mut Listener,
        world: WorldSize,
        start_timeout: Duration,
        audience: NoticeAudience,
    ) -> Self {
        Self {
            listener,
            world,
            start_timeout,
            audience,
            started: Instant::now(),
            first_registration_and_next_notice: None,
            members: BTreeMap::new(),
            clients: BTreeMap::new(),
        }
    }

    /// Adds a rank to the registered ranks.
    fn register_rank(&mut self, rank: Rank, member: Member) {
        self.members.insert(rank, member);
        let now = self.started.elapsed();
        self.first_registration_and_next_notice.get_or_insert((now, now + FIRST_NOTICE_DELAY));
    }

    /// Serves until all ranks have registered. Returns the roster, or `None` if the launcher has stopped the server.
    /// The caller must send the roster to all ranks.
    fn serve_until_complete(
        &mut self,
        commands: &Receiver<ServerCommand>,
        name: &dyn Fn(Rank) -> String,
    ) -> Result<Option<Roster>, StartError> {
        while self.members.len() < self.world.as_usize() {
            let now = self.started.elapsed();
            match commands.try_recv() {
                Ok(ServerCommand::Stop) => return Ok(None),
                Ok(ServerCommand::RankEnded { rank, how }) => return Err(self.fail_for_lost_rank(rank, how)),
                Err(_) => {}
            }
            // Before the first registration, there is no deadline: a program may load data for minutes before it joins.
            let times = self.first_registration_and_next_notice;
            let deadline = times.map(|(first_registration, _)| first_registration + self.start_timeout);
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(self.fail_for_timeout(name));
            }
            if let Some((first, due)) = times.filter(|&(_, next_notice)| now >= next_notice) {
                self.report_absent_ranks(now.saturating_sub(first), name);
                let next_notice = first + due.saturating_sub(first) * NOTICE_TIME_FACTOR;
                self.first_registration_and_next_notice = Some((first, next_notice));
            }
            let next_notice = self.first_registration_and_next_notice.map(|(_, next_notice)| next_notice);
            let until = next_notice.into_iter().chain(deadline).min();
            self.wait_and_serve(now, until).map_err(|error| match error {
                ServeError::RankLost { rank, detail } => self.fail_for_lost_rank(rank, detail),
                ServeError::System(source) => {
                    StartError::System { what: "waiting at the rendezvous", source }
                }
            })?;
        }
        Ok(Some(Roster { members: self.members.values().cloned().collect() }))
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
        let mut registered: Vec<&mut ClientConnection> = registered.collect();
        registered.sort_by_key(|client| client.rank);
        for client in registered.into_iter().take(receiver_count) {
            client.unsent.extend_from_slice(&bytes);
            if let Err(error) = client.send_unsent() {
                // Only log this error: the next event on this connection reports the same error again.
                log::debug!("the list of missing ranks could not be sent to rank {}: {error}", client.rank);
            }
        }
    }

    fn wait_and_serve(&mut self, now: Duration, until: Option<Duration>) -> Result<(), ServeError> {
        let mut events = Vec::new();
        self.listener.wait(now, until, &mut events).map_err(ServeError::System)?;
        let mut tokens: Vec<Token> = events.iter().map(|event| event.token).collect();
        while let Some(accepted) = self.listener.incoming.take(ConnectionPurpose::Rendezvous) {
            let client = ClientConnection {
                stream: accepted.stream,
                rank: accepted.introduction.from,
                state: ClientState::Unregistered,
                received: Vec::new(),
                unsent: Vec::new(),
            };
            self.clients.insert(accepted.token, client);
            tokens.push(accepted.token);
        }
        for token in tokens {
            self.serve_client(token)?;
        }
        Ok(())
    }

    /// Reads a client's messages, and answers them.
    fn serve_client(&mut self, token: Token) -> Result<(), ServeError> {
        let Some(mut client) = self.clients.remove(&token) else { return Ok(()) };
        // Handle received messages before connection errors: a rank that registered and ended at once is lost, not missing.
        let read_result = client.receive_bytes();
        let result =
            self.answer_received_messages(&mut client).and(read_result).and_then(|()| client.send_unsent());
        match result {
            Ok(()) => {
                self.clients.insert(token, client);
                Ok(())
            }
            Err(detail) if client.state == ClientState::Refused => {
                log::info!("a refused process with rank {} disconnected: {detail}", client.rank);
                Ok(())
            }
            Err(detail) => Err(ServeError::RankLost { rank: client.rank, detail }),
        }
    }

    fn answer_received_messages(&mut self, client: &mut ClientConnection) -> Result<(), String> {
        while let Some(message) = message::decode(&mut client.received, FROM_RANK_BYTES_MAX)? {
            self.answer_message(client, message);
        }
        Ok(())
    }

    fn answer_message(&mut self, client: &mut ClientConnection, message: FromRank) {
        let reply = match message {
            FromRank::Ask => ToRank::Missing(self.absent_ranks()),
            FromRank::Register(_) if client.state == ClientState::Registered => return,
            FromRank::Register(member) => {
                let Some(registered) = self.members.get(&client.rank) else {
                    client.state = ClientState::Registered;
                    self.register_rank(client.rank, member);
                    return;
                };
                client.state = ClientState::Refused;
                ToRank::Refused {
                    reason: format!(
                        "rank {} is already taken by a process on {} that listens on {}; was this rank started twice?",
                        client.rank, registered.host, registered.address
                    ),
                }
            }
        };
        client.unsent.extend_from_slice(&message::encode(&reply));
    }

    /// Returns the ranks that have not registered, and the processes that were refused.
    fn absent_ranks(&self) -> AbsentRanks {
        let ranks = self.world.ranks().filter(|rank| !self.members.contains_key(rank)).collect();
        let refused = self.listener.incoming.refused_ranks().map(ToString::to_string).collect();
        AbsentRanks { ranks, refused }
    }

    /// Sends all clients the error that the start timeout is over, and returns the error.
    fn fail_for_timeout(&mut self, name: &dyn Fn(Rank) -> String) -> StartError {
        let absent = self.absent_ranks();
        let timeout = self.start_timeout;
        let missing = absent.describe(name);
        self.send_to_all(&ToRank::TimedOut { absent, timeout_ms: timeout.as_millis() as u64 });
        StartError::Missing { missing, timeout }
    }

    /// Sends all clients the error that `rank` is lost, and returns the error.
    fn fail_for_lost_rank(&mut self, rank: Rank, detail: String) -> StartError {
        let host =
            self.members.get(&rank).map_or_else(|| "an unknown host".into(), |member| member.host.clone());
        self.send_to_all(&ToRank::Lost { rank, host: host.clone(), detail: detail.clone() });
        StartError::PeerLost { rank, host, detail }
    }

    /// Sends the same message to all clients, and waits until the sockets have accepted the whole message.
    fn send_to_all(&mut self, message: &ToRank) {
        let bytes = message::encode(message);
        for client in self.clients.values_mut() {
            client.unsent.extend_from_slice(&bytes);
        }
        let deadline = self.started.elapsed() + FINAL_SEND_TIMEOUT;
        let mut events = Vec::new();
        loop {
            self.clients.retain(|_, client| client.send_unsent().is_ok() && !client.unsent.is_empty());
            let now = self.started.elapsed();
            if self.clients.is_empty() || now >= deadline {
                return;
            }
            events.clear();
            if let Err(error) = self.listener.wait(now, Some(deadline), &mut events) {
                log::warn!("the rendezvous could not send its last messages to all ranks: {error}");
                return;
            }
        }
    }
}

impl ClientConnection {
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
