//! Serving the rendezvous: registers ranks, and sends all of them the roster when the last has registered.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Token, Waker};

use super::message::{self, Absent, FROM_RANK_BYTES_MAX, FromRank, ToRank};
use super::{Member, Roster, StartError, is_loopback, list};
use crate::transport::handshake::Identity;
use crate::transport::listener::{Event, Listener};
use crate::types::{Rank, WorldSize};
use crate::wire::Secret;
use crate::wire::handshake::{Job, Purpose};

/// How long sending the last messages may take.
const FINAL_SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// When a job that waits for ranks says so for the first time.
pub(super) const NOTICE_AFTER: Duration = Duration::from_secs(2);
/// By how much the time until the next notice grows.
const NOTICE_GROWTH: u32 = 5;

/// Serves the rendezvous on `listener` until all ranks of `world` have registered; `own` is the serving rank's own registration.
/// Ranks that want to register later are told that the job runs.
///
/// # Errors
///
/// [`StartError::Missing`] at the deadline, and [`StartError::PeerLost`] if a rank goes away before that. All ranks that
/// have registered are told the same.
pub fn serve(
    listener: &mut Listener,
    world: WorldSize,
    own: (Rank, Member),
    start_timeout: Duration,
    name: impl Fn(Rank) -> String,
) -> Result<Roster, StartError> {
    let (_sender, commands) = channel();
    let mut registry = Registry::new(listener, world, start_timeout, Audience::AllRanks);
    registry.add(own.0, own.1);
    let roster = registry.run(&commands, &name)?.unwrap_or(Roster { members: Vec::new() });
    let members = roster.members.clone();
    listener.reply_to_late_ranks(move |rank| {
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

/// What a launcher tells its rendezvous.
enum Command {
    Stop,
    RankEnded { rank: Rank, how: String },
}

/// A launcher's rendezvous. A thread serves it until all ranks have registered.
pub struct Server {
    address: SocketAddr,
    commands: Sender<Command>,
    waker: Option<Arc<Waker>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on a free port of `host`, an address of this machine, and serves `world` ranks of the job `job_id`.
    ///
    /// # Errors
    ///
    /// When the operating system refuses a socket or a thread, and without a secret where others can reach it.
    pub fn start(
        host: IpAddr,
        world: WorldSize,
        secret: Secret,
        job_id: [u8; 16],
        start_timeout: Duration,
    ) -> Result<Self, StartError> {
        let system = |what| move |source| StartError::System { what, source };
        let listener = TcpListener::bind((host, 0)).map_err(system("a socket for the rendezvous"))?;
        let address = listener.local_addr().map_err(system("the rendezvous's address"))?;
        if secret.is_none() && !is_loopback(host) {
            return Err(StartError::NeedsSecret { address });
        }
        let job = Job { id: job_id, world: world.get(), peers_digest: [0; 32] };
        let mut listener = Listener::new(listener, Identity { secret, job, rank: None })
            .map_err(system("an event queue for the rendezvous"))?;
        let waker = listener.waker();
        let (commands, receiver) = channel();
        let serve = move || {
            let mut registry = Registry::new(&mut listener, world, start_timeout, Audience::LowestRank);
            match registry.run(&receiver, &|rank| format!("rank {rank}")) {
                Ok(_) => log::debug!("all {world} ranks have registered"),
                // The ranks that wait have been told, and report it. Others may still come.
                Err(StartError::PeerLost { rank, host, detail }) => {
                    let started = registry.started;
                    let lost = message::encode(&ToRank::Lost { rank, host, detail });
                    listener.reply_to_late_ranks(move |_| lost.clone());
                    reply_until_stopped(&mut listener, &receiver, started, start_timeout);
                }
                Err(error) => log::info!("rendezvous: {error}"),
            }
        };
        let thread = std::thread::Builder::new()
            .name("rendezvous".into())
            .spawn(serve)
            .map_err(system("a thread for the rendezvous"))?;
        Ok(Self { address, commands, waker, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The process of a rank has ended badly, such as "was killed by signal 9 (SIGKILL)". If the job has not started yet, it
    /// cannot start any more, and the ranks that wait are told so.
    pub fn rank_ended(&self, rank: Rank, how: String) {
        self.send(Command::RankEnded { rank, how });
    }

    fn send(&self, command: Command) {
        // Either fails when all ranks have registered and the thread is over.
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
        self.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the rendezvous's thread panicked, which is a bug");
        }
    }
}

/// Replies to late ranks until the launcher stops the server, or no rank waits any more.
fn reply_until_stopped(
    listener: &mut Listener,
    commands: &Receiver<Command>,
    started: Instant,
    start_timeout: Duration,
) {
    let mut events = Vec::new();
    // One wake-up may stand for several commands.
    while !commands.try_iter().any(|command| matches!(command, Command::Stop)) {
        events.clear();
        let now = started.elapsed();
        if now >= start_timeout || listener.wait(now, Some(start_timeout), &mut events).is_err() {
            return;
        }
    }
}

/// Which ranks are told that the job waits for others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Audience {
    /// All, and the serving rank: each of them may have been started in another terminal.
    AllRanks,
    /// The lowest one that waits: the launcher shows the output of all ranks.
    LowestRank,
}

/// The ranks that have registered so far.
struct Registry<'a> {
    listener: &'a mut Listener,
    world: WorldSize,
    start_timeout: Duration,
    audience: Audience,
    started: Instant,
    /// When the next notice about missing ranks is due, counted from the first registration.
    notice: Option<(Duration, Duration)>,
    members: BTreeMap<Rank, Member>,
    clients: BTreeMap<Token, Client>,
}

/// A rank's connection to the rendezvous.
struct Client {
    stream: TcpStream,
    rank: Rank,
    state: ClientState,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// How far a client has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ClientState {
    /// It has proved who it is.
    Known,
    /// It has said where it listens.
    Registered,
    /// Its registration has been refused.
    Refused,
}

/// Why serving ends before all ranks have registered.
enum ServeError {
    /// A rank went away.
    Gone { rank: Rank, detail: String },
    /// The operating system refused to wait.
    System(io::Error),
}

impl<'a> Registry<'a> {
    fn new(
        listener: &'a mut Listener,
        world: WorldSize,
        start_timeout: Duration,
        audience: Audience,
    ) -> Self {
        Self {
            listener,
            world,
            start_timeout,
            audience,
            started: Instant::now(),
            notice: None,
            members: BTreeMap::new(),
            clients: BTreeMap::new(),
        }
    }

    fn add(&mut self, rank: Rank, member: Member) {
        self.members.insert(rank, member);
        let now = self.started.elapsed();
        self.notice.get_or_insert((now, now + NOTICE_AFTER));
    }

    /// Serves until all ranks have registered; `None` if stopped before.
    fn run(
        &mut self,
        commands: &Receiver<Command>,
        name: &dyn Fn(Rank) -> String,
    ) -> Result<Option<Roster>, StartError> {
        let mut events = Vec::new();
        while self.members.len() < self.world.as_usize() {
            let now = self.started.elapsed();
            match commands.try_recv() {
                Ok(Command::Stop) => return Ok(None),
                Ok(Command::RankEnded { rank, how }) => return Err(self.lose(rank, how)),
                Err(_) => {}
            }
            if now >= self.start_timeout {
                return Err(self.time_out(name));
            }
            if let Some((since, at)) = self.notice.filter(|&(_, at)| now >= at) {
                self.notify(now.saturating_sub(since), name);
                self.notice = Some((since, since + at.saturating_sub(since) * NOTICE_GROWTH));
            }
            let until = self.notice.map_or(self.start_timeout, |(_, at)| at.min(self.start_timeout));
            self.poll(now, until, &mut events).map_err(|error| match error {
                ServeError::Gone { rank, detail } => self.lose(rank, detail),
                ServeError::System(source) => {
                    StartError::System { what: "waiting at the rendezvous", source }
                }
            })?;
        }
        let roster = Roster { members: self.members.values().cloned().collect() };
        self.tell_all(&ToRank::Ready(roster.clone()));
        Ok(Some(roster))
    }

    /// Says which ranks the job waits for.
    fn notify(&mut self, waited: Duration, name: &dyn Fn(Rank) -> String) {
        let absent = self.absent();
        if self.audience == Audience::AllRanks {
            log::warn!("waiting for {} since {} s", describe_absent(&absent, name), waited.as_secs());
        }
        let words = message::encode(&ToRank::Waiting(absent));
        let registered = self.clients.values_mut().filter(|client| client.state == ClientState::Registered);
        let mut registered: Vec<&mut Client> = registered.collect();
        registered.sort_by_key(|client| client.rank);
        let count = if self.audience == Audience::AllRanks { registered.len() } else { 1 };
        for client in registered.into_iter().take(count) {
            client.output.extend_from_slice(&words);
            if let Err(error) = client.write() {
                // The next event on this connection says so again.
                log::debug!("rank {} could not be told who is missing: {error}", client.rank);
            }
        }
    }

    fn poll(&mut self, now: Duration, until: Duration, events: &mut Vec<Event>) -> Result<(), ServeError> {
        events.clear();
        self.listener.wait(now, Some(until), events).map_err(ServeError::System)?;
        let mut tokens: Vec<Token> = events.iter().map(|event| event.token).collect();
        while let Some(accepted) = self.listener.take_accepted(Purpose::Rendezvous) {
            let client = Client {
                stream: accepted.stream,
                rank: accepted.introduction.from,
                state: ClientState::Known,
                input: Vec::new(),
                output: Vec::new(),
            };
            self.clients.insert(accepted.token, client);
            tokens.push(accepted.token);
        }
        for token in tokens {
            self.serve_client(token)?;
        }
        Ok(())
    }

    /// Reads what a client has sent, and answers it.
    fn serve_client(&mut self, token: Token) -> Result<(), ServeError> {
        let Some(mut client) = self.clients.remove(&token) else { return Ok(()) };
        // What it sent before it ended counts: a rank that registered and died at once must not count as missing.
        let ending = client.read();
        let result = self.answer_all(&mut client).and(ending).and_then(|()| client.write());
        match result {
            Ok(()) => {
                self.clients.insert(token, client);
                Ok(())
            }
            Err(detail) if client.state == ClientState::Refused => {
                log::info!("the second rank {} closed its connection: {detail}", client.rank);
                Ok(())
            }
            Err(detail) => Err(ServeError::Gone { rank: client.rank, detail }),
        }
    }

    fn answer_all(&mut self, client: &mut Client) -> Result<(), String> {
        while let Some(said) = message::decode(&mut client.input, FROM_RANK_BYTES_MAX)? {
            self.answer(client, said);
        }
        Ok(())
    }

    fn answer(&mut self, client: &mut Client, said: FromRank) {
        let reply = match said {
            FromRank::Ask => ToRank::Missing(self.absent()),
            FromRank::Register(_) if client.state == ClientState::Registered => return,
            FromRank::Register(member) => {
                let Some(first) = self.members.get(&client.rank) else {
                    client.state = ClientState::Registered;
                    self.add(client.rank, member);
                    return;
                };
                client.state = ClientState::Refused;
                ToRank::Refused {
                    reason: format!(
                        "rank {} is already taken by a process on {} that listens on {}; was it started twice?",
                        client.rank, first.host, first.address
                    ),
                }
            }
        };
        client.output.extend_from_slice(&message::encode(&reply));
    }

    fn absent(&self) -> Absent {
        let ranks = self.world.ranks().filter(|rank| !self.members.contains_key(rank)).collect();
        Absent { ranks, refused: self.listener.refused().map(ToString::to_string).collect() }
    }

    fn time_out(&mut self, name: &dyn Fn(Rank) -> String) -> StartError {
        let absent = self.absent();
        let timeout = self.start_timeout;
        let missing = describe_absent(&absent, name);
        self.tell_all(&ToRank::TimedOut { absent, timeout_ms: timeout.as_millis() as u64 });
        StartError::Missing { missing, timeout }
    }

    fn lose(&mut self, rank: Rank, detail: String) -> StartError {
        let host =
            self.members.get(&rank).map_or_else(|| "an unknown host".into(), |member| member.host.clone());
        self.tell_all(&ToRank::Lost { rank, host: host.clone(), detail: detail.clone() });
        StartError::PeerLost { rank, host, detail }
    }

    /// Sends all clients the same message, and waits until it has left.
    fn tell_all(&mut self, words: &ToRank) {
        let words = message::encode(words);
        for client in self.clients.values_mut() {
            client.output.extend_from_slice(&words);
        }
        let deadline = self.started.elapsed() + FINAL_SEND_TIMEOUT;
        let mut events = Vec::new();
        loop {
            self.clients.retain(|_, client| client.write().is_ok() && !client.output.is_empty());
            let now = self.started.elapsed();
            if self.clients.is_empty() || now >= deadline {
                return;
            }
            events.clear();
            if let Err(error) = self.listener.wait(now, Some(deadline), &mut events) {
                log::warn!("the rendezvous ended early: {error}");
                return;
            }
        }
    }
}

impl Client {
    fn read(&mut self) -> Result<(), String> {
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err("it closed its connection".into()),
                Ok(count) => self.input.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
            // A limit, so that a long message cannot fill the memory.
            if self.input.len() > 2 * FROM_RANK_BYTES_MAX {
                return Err("it sent a longer message than any rank does".into());
            }
        }
    }

    fn write(&mut self) -> Result<(), String> {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(count) => {
                    self.output.drain(..count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }
}

/// Names the missing ranks, with their addresses if these are known and few, and the processes that were refused.
pub(super) fn describe_absent(absent: &Absent, name: &dyn Fn(Rank) -> String) -> String {
    let Absent { ranks, refused } = absent;
    let mut text = if ranks.len() <= 8 {
        ranks.iter().map(|&rank| name(rank)).collect::<Vec<_>>().join(", ")
    } else {
        format!("ranks {}", list(ranks))
    };
    for refused in refused {
        text.push_str(" (");
        text.push_str(refused);
        text.push(')');
    }
    text
}
