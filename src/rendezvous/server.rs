//! The serving side of the rendezvous: the sockets and the clock of a [`RankRegistry`].

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::Waker;

use super::registry::{NoticeAudience, NoticeReceiver, RankRegistry};
use super::{Member, PortRange, Roster, StartError, host_name, is_loopback};
use crate::transport::handshake::Identity;
use crate::transport::listener::{Listener, listen};
use crate::transport::poller::Event;
use crate::types::{Rank, WorldSize};
use crate::wire::Secret;
use crate::wire::handshake::Job;

/// How long the server tries to send its last message to all ranks.
const LAST_SEND_TIMEOUT: Duration = Duration::from_secs(5);

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
    let started = Instant::now();
    let mut registry = RankRegistry::new(world, start_timeout, NoticeAudience::AllRanks);
    registry.register_rank(started.elapsed(), own.0, own.1);
    let result = serve_until_complete(listener, &mut registry, started, &commands, &name);
    if let Ok(Some(roster)) = &result {
        let late_reply = registry.start_job(roster.clone());
        listener.incoming.reply_to_late_ranks(started.elapsed(), late_reply);
    }
    send_last_messages(listener, &mut registry, started);
    Ok(result?.unwrap_or(Roster { members: Vec::new() }))
}

/// A command from a launcher to the thread that serves its rendezvous: to stop, or that a rank's process has ended.
enum ServerCommand {
    Stop,
    RankEnded { rank: Rank, how: String },
}

/// The options of a launcher's rendezvous.
pub struct ServerOptions {
    /// The address of this machine on which the rendezvous listens.
    pub host: IpAddr,
    /// The ports on which the rendezvous may listen; `None` if the operating system chooses the port.
    pub ports: Option<PortRange>,
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

/// The rendezvous of a launcher. A thread serves the ranks until all have registered.
pub struct Server {
    address: SocketAddr,
    commands: Sender<ServerCommand>,
    waker: Option<Arc<Waker>>,
    has_job_started: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on a free port of `ports`, and serves the ranks of a job.
    ///
    /// # Errors
    ///
    /// If all ports are in use, if the operating system refuses a socket or a thread, or if there is no secret and other hosts
    /// can reach the address.
    pub fn start(options: ServerOptions) -> Result<Self, StartError> {
        let ServerOptions { host, ports, world, secret, job_id, start_timeout, notices } = options;
        let system = |what| move |source| StartError::System { what, source };
        let listener = listen_for_ranks(host, ports)?;
        let address = listener.local_addr().map_err(system("the rendezvous's address"))?;
        if secret.is_none() && !is_loopback(host) {
            return Err(StartError::NeedsSecret { address });
        }
        let job = Job { id: job_id, world: world.get(), peers_digest: [0; 32] };
        let mut listener = Listener::new(listener, Identity { secret, job, rank: None })
            .map_err(system("an event queue for the rendezvous"))?;
        let waker = listener.poller.as_ref().map(|poller| Arc::clone(&poller.waker));
        let (commands, receiver) = channel();
        let has_job_started = Arc::new(AtomicBool::new(false));
        let started_flag = Arc::clone(&has_job_started);
        let serve = move || {
            let started = Instant::now();
            let mut registry = RankRegistry::new(world, start_timeout, NoticeAudience::Launcher(notices));
            let name = |rank| format!("rank {rank}");
            match serve_until_complete(&mut listener, &mut registry, started, &receiver, &name) {
                Ok(None) => {}
                Ok(Some(roster)) => {
                    log::debug!("all {world} ranks have registered");
                    // Set the flag before the roster is sent. A rank that has received the roster may fail at once, and this
                    // failure must not count as a failed start.
                    started_flag.store(true, Ordering::Release);
                    drop(registry.start_job(roster));
                    send_last_messages(&mut listener, &mut registry, started);
                }
                Err(error) => {
                    log::info!("rendezvous: {error}");
                    send_last_messages(&mut listener, &mut registry, started);
                    // The registered ranks have received this error and report it. A rank that registers later receives
                    // the same error.
                    if let Some(reply) = registry.failure_reply() {
                        listener.incoming.reply_to_late_ranks(started.elapsed(), reply);
                        reply_until_stopped(&mut listener, &receiver, started);
                    }
                }
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

/// Listens on one of `ports`, or on a port that the operating system chooses.
fn listen_for_ranks(host: IpAddr, ports: Option<PortRange>) -> Result<TcpListener, StartError> {
    let listen_on = |port| listen(SocketAddr::new(host, port), |_| Ok(()));
    // The ranks begin with the first port, and the rendezvous with the last port.
    let listener = match ports {
        Some(ports) => ports.listen(ports.count() - 1, listen_on),
        None => listen_on(0),
    };
    listener.map_err(|source| match ports {
        Some(ports) if source.kind() == io::ErrorKind::AddrInUse => {
            StartError::PortsInUse { process: "the rendezvous".into(), host: host_name(), ports, ip: host }
        }
        _ => StartError::System { what: "a socket for the rendezvous", source },
    })
}

/// Replies to late ranks until the launcher stops the server.
fn reply_until_stopped(listener: &mut Listener, commands: &Receiver<ServerCommand>, started: Instant) {
    // One wake-up may announce several commands, so look at all commands.
    while !commands.try_iter().any(|command| matches!(command, ServerCommand::Stop)) {
        if listener.wait(started.elapsed(), None).is_err() {
            return;
        }
    }
}

/// Serves until all ranks have registered. Returns the roster, or `None` if the launcher has stopped the server. After
/// that, and after an error, the caller sends the last messages to all ranks.
fn serve_until_complete(
    listener: &mut Listener,
    registry: &mut RankRegistry,
    started: Instant,
    commands: &Receiver<ServerCommand>,
    name: &dyn Fn(Rank) -> String,
) -> Result<Option<Roster>, StartError> {
    let mut events = Vec::new();
    loop {
        match commands.try_recv() {
            Ok(ServerCommand::Stop) => return Ok(None),
            Ok(ServerCommand::RankEnded { rank, how }) => {
                return Err(registry.fail_for_lost_rank(rank, how));
            }
            Err(_) => {}
        }
        let now = started.elapsed();
        let tokens = events.drain(..).map(|event: Event| event.token);
        registry.serve(now, &mut listener.incoming, tokens, name)?;
        if let Some(roster) = registry.roster() {
            return Ok(Some(roster));
        }
        events = listener
            .wait(now, registry.next_deadline())
            .map_err(|source| StartError::System { what: "waiting at the rendezvous", source })?;
    }
}

/// Waits until the sockets have accepted the last messages of the rendezvous, at most [`LAST_SEND_TIMEOUT`].
fn send_last_messages(listener: &mut Listener, registry: &mut RankRegistry, started: Instant) {
    let deadline = started.elapsed() + LAST_SEND_TIMEOUT;
    while !registry.send_last_messages(&mut listener.incoming) {
        let now = started.elapsed();
        if now >= deadline {
            return;
        }
        if let Err(error) = listener.wait(now, Some(deadline)) {
            log::warn!("the rendezvous could not send its last messages to all ranks: {error}");
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::{Checksums, Registration, SharedSettings, machine_id, register};

    /// Regression test: before the fix, a rank whose connection the rendezvous had just accepted when the start failed got no
    /// answer. Its error came after its start timeout, and did not name the rank that had died.
    #[test]
    fn a_rank_that_has_just_connected_learns_which_rank_has_died() {
        let (world, start_timeout) = (WorldSize::new(2).unwrap(), Duration::from_secs(5));
        let job = Job { id: [7; 16], world: world.get(), peers_digest: [0; 32] };
        let identity = Identity { secret: Secret::none(), job, rank: Some(Rank::ZERO) };
        for _ in 0..100 {
            let server = Server::start(ServerOptions {
                host: "127.0.0.1".parse().unwrap(),
                ports: None,
                world,
                secret: Secret::none(),
                job_id: [7; 16],
                start_timeout,
                notices: NoticeReceiver::LowestRank,
            })
            .unwrap();
            // The rank calls this function when the rendezvous has accepted its connection.
            let listen = |ip| {
                server.rank_ended(Rank::new(1), "it exited with code 1".into());
                let shared = SharedSettings {
                    segment_bytes: 1,
                    checksums: Checksums::Auto,
                    processors: 1,
                    streams: 1,
                    timeline: false,
                };
                Ok(Member {
                    host: "a".into(),
                    machine: machine_id(None),
                    address: SocketAddr::new(ip, 1),
                    shared,
                })
            };
            let registration = Registration {
                identity: &identity,
                rank: Rank::ZERO,
                world,
                address: server.address(),
                server_name: "the rendezvous".into(),
                start_timeout,
            };
            let error = register(&registration, listen, |rank| format!("rank {rank}")).unwrap_err();
            assert!(matches!(error, StartError::PeerLost { rank, .. } if rank == Rank::new(1)), "{error}");
        }
    }
}
