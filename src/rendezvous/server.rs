//! Serving the rendezvous: admits ranks, keeps the registry, and sends the roster when the last has come.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::Token;
use mio::net::TcpStream;

use super::message::{self, FROM_RANK_BYTES_MAX, FromRank, ToRank};
use super::{Member, Roster, StartError, is_loopback, list};
use crate::transport::listener::{Event, Identity, Listener};
use crate::types::{Rank, WorldSize};
use crate::wire::Secret;
use crate::wire::handshake::{Job, Purpose};

/// How long the last messages may take to leave.
const FINAL_SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a server that may be stopped looks whether it has been.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// Serves the rendezvous on `listener` until all of `world` have come; `own` is the serving rank's own registration.
///
/// # Errors
///
/// [`StartError::Missing`] at the deadline, and [`StartError::PeerLost`] if a rank goes away before that. All ranks that
/// have come are told the same.
pub fn serve(
    listener: &mut Listener,
    world: WorldSize,
    own: Option<(Rank, Member)>,
    start_timeout: Duration,
    name: impl Fn(Rank) -> String,
) -> Result<Roster, StartError> {
    let mut registry = Registry::new(listener, world, start_timeout);
    if let Some((rank, member)) = own {
        registry.members.insert(rank, member);
    }
    registry
        .run(&AtomicBool::new(false), &name)
        .map(|roster| roster.unwrap_or(Roster { members: Vec::new() }))
}

/// A launcher's rendezvous, served by a thread of its own until all ranks have come.
pub struct Server {
    address: SocketAddr,
    is_stopped: Arc<AtomicBool>,
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
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_stopped);
        let serve = move || {
            let result =
                Registry::new(&mut listener, world, start_timeout).run(&stop, &|rank| format!("rank {rank}"));
            match result {
                Ok(_) => log::debug!("all {world} ranks have met"),
                // The ranks have been told and report it themselves.
                Err(error) => log::info!("rendezvous: {error}"),
            }
        };
        let thread = std::thread::Builder::new()
            .name("rendezvous".into())
            .spawn(serve)
            .map_err(system("a thread for the rendezvous"))?;
        Ok(Self { address, is_stopped, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the rendezvous's thread panicked, which is a bug");
        }
    }
}

/// The ranks that have registered so far.
struct Registry<'a> {
    listener: &'a mut Listener,
    world: WorldSize,
    start_timeout: Duration,
    started: Instant,
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
    /// It has been sent away.
    Refused,
}

/// Why serving ends before all have come.
enum ServeError {
    /// A rank went away.
    Gone { rank: Rank, detail: String },
    /// This machine refused to wait.
    System(io::Error),
}

impl<'a> Registry<'a> {
    fn new(listener: &'a mut Listener, world: WorldSize, start_timeout: Duration) -> Self {
        Self {
            listener,
            world,
            start_timeout,
            started: Instant::now(),
            members: BTreeMap::new(),
            clients: BTreeMap::new(),
        }
    }

    /// Serves until all have come; `None` if stopped before.
    fn run(
        &mut self,
        is_stopped: &AtomicBool,
        name: &dyn Fn(Rank) -> String,
    ) -> Result<Option<Roster>, StartError> {
        let mut events = Vec::new();
        while self.members.len() < self.world.as_usize() {
            let now = self.started.elapsed();
            if is_stopped.load(Ordering::Acquire) {
                return Ok(None);
            }
            if now >= self.start_timeout {
                return Err(self.time_out(name));
            }
            let until = self.start_timeout.min(now + STOP_CHECK);
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

    /// Reads what a client says, answers, and lets go of those who are done.
    fn serve_client(&mut self, token: Token) -> Result<(), ServeError> {
        let Some(mut client) = self.clients.remove(&token) else { return Ok(()) };
        // What it said before it went counts, or a rank that registered and died at once would seem never to have come.
        let ending = client.read();
        let result = self.answer_all(&mut client).and(ending).and_then(|()| client.write());
        match result {
            Ok(()) => {
                self.clients.insert(token, client);
                Ok(())
            }
            Err(detail) if client.state == ClientState::Refused => {
                log::info!("the second rank {} is gone: {detail}", client.rank);
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
            FromRank::Ask => ToRank::Missing { ranks: self.missing() },
            FromRank::Register(_) if client.state == ClientState::Registered => return,
            FromRank::Register(member) => {
                let Some(first) = self.members.get(&client.rank) else {
                    client.state = ClientState::Registered;
                    self.members.insert(client.rank, member);
                    return;
                };
                client.state = ClientState::Refused;
                ToRank::Refused {
                    reason: format!(
                        "rank {} is taken by a process on {} that listens on {}; was it started twice?",
                        client.rank, first.host, first.address
                    ),
                }
            }
        };
        client.output.extend_from_slice(&message::encode(&reply));
    }

    fn missing(&self) -> Vec<Rank> {
        self.world.ranks().filter(|rank| !self.members.contains_key(rank)).collect()
    }

    fn time_out(&mut self, name: &dyn Fn(Rank) -> String) -> StartError {
        let ranks = self.missing();
        let timeout = self.start_timeout;
        let missing = name_missing(&ranks, name);
        self.tell_all(&ToRank::TimedOut { ranks, timeout_ms: timeout.as_millis() as u64 });
        StartError::Missing { missing, timeout }
    }

    fn lose(&mut self, rank: Rank, detail: String) -> StartError {
        let host =
            self.members.get(&rank).map_or_else(|| "an unknown host".into(), |member| member.host.clone());
        self.tell_all(&ToRank::Lost { rank, host: host.clone(), detail: detail.clone() });
        StartError::PeerLost { rank, host, detail }
    }

    /// Tells every client the same and gives the words time to leave.
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
            // Served piece by piece, so that nobody fills our memory with one long message.
            if self.input.len() > 2 * FROM_RANK_BYTES_MAX {
                return Err("it sends more than a rank has to say".into());
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

/// Who is missing, in words, with addresses where they are known and not too many.
pub(super) fn name_missing(ranks: &[Rank], name: &dyn Fn(Rank) -> String) -> String {
    if ranks.len() <= 8 {
        return ranks.iter().map(|&rank| name(rank)).collect::<Vec<_>>().join(", ");
    }
    format!("ranks {}", list(ranks))
}
