//! How the ranks of a job exchange their addresses: at the rendezvous of `ringrun`, or at that of rank 0.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use super::{
    JoinMethod, Member, PeersFile, PortRange, Registration, RendezvousHost, Roster, SharedSettings,
    StartError, host_name, is_loopback, machine_id, register, resolve_host, serve, user_secret,
};
use crate::transport::handshake::Identity;
use crate::transport::listener::Listener;
use crate::transport::tcp::SocketOptions;
use crate::types::{Rank, WorldSize};
use crate::wire::{Secret, handshake};

/// What a rank needs to exchange addresses with the other ranks of its job. Most fields are those of `JoinOptions`.
pub(crate) struct ExchangeOptions<'a> {
    pub(crate) method: &'a JoinMethod,
    pub(crate) secret: &'a Secret,
    pub(crate) ports: Option<PortRange>,
    pub(crate) start_timeout: Duration,
    pub(crate) host_id: Option<&'a str>,
    pub(crate) shared: SharedSettings,
    pub(crate) sockets: &'a SocketOptions,
}

/// Returns the listener of this rank and the roster of the job; `None` in a world of one rank.
pub(crate) fn exchange(options: &ExchangeOptions<'_>) -> Result<Option<(Listener, Roster)>, StartError> {
    let new = |id, peers_digest| Exchange::new(options, (id, peers_digest));
    match options.method {
        JoinMethod::Peers { file, bind, .. } if file.world() != WorldSize::ONE => {
            new([0; 16], file.digest()).with_peers_file(file, *bind).map(Some)
        }
        JoinMethod::Launched(launched) if launched.world != WorldSize::ONE => {
            new(launched.job_id, [0; 32]).at_launcher(launched.rendezvous, launched.listen).map(Some)
        }
        JoinMethod::Discovered(discovered) => {
            new(discovered.job_id, [0; 32]).at_rank_0(&discovered.host, discovered.port).map(Some)
        }
        _ => Ok(None),
    }
}

/// Returns the user's secret if a launcher other than `ringrun` has started the job, and the job has no other secret.
pub(crate) fn user_secret_if_needed(
    method: &JoinMethod,
    secret: &Secret,
) -> Result<Option<Secret>, StartError> {
    match method {
        JoinMethod::Discovered(discovered) if secret.is_none() && discovered.launcher.may_share_home() => {
            user_secret().map(Some)
        }
        _ => Ok(None),
    }
}

struct Exchange<'a> {
    options: &'a ExchangeOptions<'a>,
    rank: Rank,
    world: WorldSize,
    identity: Identity,
}

impl<'a> Exchange<'a> {
    fn new(options: &'a ExchangeOptions<'a>, (id, peers_digest): ([u8; 16], [u8; 32])) -> Self {
        let (rank, world) = options.method.rank_and_world();
        let job = handshake::Job { id, world: world.get(), peers_digest };
        let identity = Identity { secret: options.secret.clone(), job, rank: Some(rank) };
        Self { options, rank, world, identity }
    }

    fn with_peers_file(
        &self,
        file: &PeersFile,
        bind: Option<IpAddr>,
    ) -> Result<(Listener, Roster), StartError> {
        let Self { rank, world, .. } = *self;
        if !world.contains(rank) {
            return Err(StartError::RankOutOfRange { rank, world });
        }
        let addresses = file.resolve_all()?;
        if let Some(&address) = addresses.iter().find(|address| !is_loopback(address.ip())) {
            self.check_secret(address)?;
        }
        let own_address = addresses[rank.index()];
        let mut listener =
            self.listen(SocketAddr::new(bind.unwrap_or(own_address.ip()), own_address.port()))?;
        let member = Member { host: file.host(rank).to_owned(), ..self.own_member(own_address) };
        let name = |rank| file.name(rank);
        let roster = if rank == Rank::ZERO {
            serve(&mut listener, world, (rank, member), self.options.start_timeout, name)?
        } else {
            register(&self.registration(addresses[0], "rank 0"), |_| Ok(member), name)?
        };
        Ok((listener, roster))
    }

    fn at_launcher(
        &self,
        rendezvous: SocketAddr,
        listen: Option<IpAddr>,
    ) -> Result<(Listener, Roster), StartError> {
        if !is_loopback(rendezvous.ip()) {
            self.check_secret(rendezvous)?;
        }
        let registration = self.registration(rendezvous, "the launcher's rendezvous");
        // Without another choice, listen on the network interface that leads to the rendezvous, because the peers can reach it.
        self.register_and_listen(&registration, |local| listen.unwrap_or(local))
    }

    /// Rank 0 serves the rendezvous. A launcher other than `ringrun` has started the ranks.
    fn at_rank_0(&self, host: &RendezvousHost, port: u16) -> Result<(Listener, Roster), StartError> {
        let Self { options, rank, world, .. } = *self;
        let (ip, has_several_hosts): (IpAddr, bool) = match host {
            RendezvousHost::ThisHost => (Ipv4Addr::LOCALHOST.into(), false),
            RendezvousHost::Named(name) => (resolve_host(name, options.start_timeout)?, true),
        };
        let address = SocketAddr::new(ip, port);
        if has_several_hosts {
            self.check_secret(address)?;
        }
        if rank == Rank::ZERO {
            // On this host, its name may be a loopback address. So rank 0 listens on all addresses.
            let listen_at = if has_several_hosts { unspecified(ip) } else { ip };
            let address = SocketAddr::new(listen_at, port);
            let mut listener = self.listen(address).map_err(|error| match error {
                StartError::PortInUse { address, .. } => StartError::RendezvousPortInUse { address },
                error => error,
            })?;
            let own = (rank, self.own_member(address));
            let name = |rank| format!("rank {rank}");
            let mut roster = serve(&mut listener, world, own, options.start_timeout, name)?;
            let loopback = if ip.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            roster.replace_unspecified_hosts(loopback);
            return Ok((listener, roster));
        }
        // A rank that reaches rank 0 at a loopback address is on its host. The ranks of other hosts reach both in the same way.
        let listen_at =
            |local: IpAddr| if has_several_hosts && is_loopback(local) { unspecified(local) } else { local };
        let (listener, mut roster) =
            self.register_and_listen(&self.registration(address, "rank 0"), listen_at)?;
        roster.replace_unspecified_hosts(ip);
        Ok((listener, roster))
    }

    fn check_secret(&self, address: SocketAddr) -> Result<(), StartError> {
        if self.options.secret.is_none() { Err(StartError::NeedsSecret { address }) } else { Ok(()) }
    }

    fn registration(&self, address: SocketAddr, server: &str) -> Registration<'_> {
        let Self { options, rank, world, ref identity, .. } = *self;
        let (server_name, start_timeout) = (server.into(), options.start_timeout);
        Registration { identity, rank, world, address, server_name, start_timeout }
    }

    /// Registers a rank that listens on a free port. `listen_at` receives the address with which this rank reaches the
    /// rendezvous, and returns the address on which this rank listens.
    fn register_and_listen(
        &self,
        registration: &Registration<'_>,
        listen_at: impl FnOnce(IpAddr) -> IpAddr,
    ) -> Result<(Listener, Roster), StartError> {
        let mut listener = None;
        let start_listening = |local: IpAddr| {
            let listening = self.listen_on_free_port(listen_at(local))?;
            let address = listening
                .local_address()
                .map_err(|source| StartError::System { what: "this rank's own address", source })?;
            listener = Some(listening);
            Ok(self.own_member(address))
        };
        let roster = register(registration, start_listening, |rank| format!("rank {rank}"))?;
        let listener = listener.ok_or_else(|| {
            StartError::Refused("the rendezvous did not ask for the address of this rank".into())
        })?;
        Ok((listener, roster))
    }

    fn own_member(&self, address: SocketAddr) -> Member {
        let machine = machine_id(self.options.host_id);
        Member { host: host_name(), machine, address, shared: self.options.shared }
    }

    /// Opens a free port on which this rank accepts connections: a permitted one, or one that the operating system chooses.
    fn listen_on_free_port(&self, ip: IpAddr) -> Result<Listener, StartError> {
        let (rank, any_port) = (self.rank, SocketAddr::new(ip, 0));
        let Some(ports) = self.options.ports else { return self.listen(any_port) };
        // The ranks of a host begin with different ports, so that they seldom try the same port.
        let socket = ports.listen(rank.get(), |port| self.options.sockets.listen(SocketAddr::new(ip, port)));
        let in_use = StartError::PortsInUse { process: format!("rank {rank}"), host: host_name(), ports, ip };
        self.new_listener(socket, any_port, in_use)
    }

    fn listen(&self, address: SocketAddr) -> Result<Listener, StartError> {
        let in_use = StartError::PortInUse { address, rank: self.rank };
        self.new_listener(self.options.sockets.listen(address), address, in_use)
    }

    /// Returns the listener on a socket, or the error why there is none.
    fn new_listener(
        &self,
        socket: io::Result<TcpListener>,
        address: SocketAddr,
        in_use: StartError,
    ) -> Result<Listener, StartError> {
        let socket = socket.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => in_use,
            _ => StartError::CannotListen { address, rank: self.rank, source },
        })?;
        let listener = Listener::new(socket, self.identity.clone());
        listener.map_err(|source| StartError::System { what: "an event queue", source })
    }
}

/// Returns the address that stands for all addresses of a host, of the same version as `ip`.
fn unspecified(ip: IpAddr) -> IpAddr {
    if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}
