//! How the ranks of a job exchange their addresses: at the rendezvous of `ringrun`, or at that of rank 0, if the ranks have a
//! peers file or another launcher.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::num::NonZero;
use std::thread::available_parallelism;

use super::options::{JoinMethod, JoinOptions};
use crate::rendezvous::{
    DiscoveredRank, LaunchedRank, Member, PeersFile, PortRange, Registration, RendezvousHost, Roster,
    SharedSettings, StartError, host_name, is_loopback, machine_id, register, resolve_host, serve,
    user_secret,
};
use crate::transport::handshake::Identity;
use crate::transport::listener::Listener;
use crate::transport::tcp::SocketOptions;
use crate::types::{Rank, WorldSize};
use crate::wire::{Secret, handshake};

/// What a rank has after the exchange.
pub(super) struct Exchanged {
    pub(super) rank: Rank,
    pub(super) listener: Listener,
    /// The addresses and settings of all ranks.
    pub(super) roster: Roster,
    /// The address of rank 0's host, which applies to all ranks in the roster whose address has no IP address.
    pub(super) host_of_rank_0: Option<IpAddr>,
}

/// Exchanges addresses and settings with the other ranks. Returns `None` for a job of one rank.
pub(super) fn exchange(
    options: &JoinOptions,
    sockets: &SocketOptions,
) -> Result<Option<Exchanged>, StartError> {
    match &options.method {
        JoinMethod::Peers { file, rank, bind } if file.world() != WorldSize::ONE => {
            exchange_by_peers_file(options, sockets, file, *rank, *bind).map(Some)
        }
        JoinMethod::Launched(launched) if launched.world != WorldSize::ONE => {
            exchange_at_launcher(options, sockets, launched).map(Some)
        }
        JoinMethod::Discovered(discovered) => exchange_at_rank_0(options, sockets, discovered).map(Some),
        _ => Ok(None),
    }
}

/// Returns the user's secret if a launcher other than `ringrun` has started the job, and the job has no other secret.
pub(super) fn user_secret_if_needed(options: &JoinOptions) -> Result<Option<Secret>, StartError> {
    match &options.method {
        JoinMethod::Discovered(discovered)
            if options.secret.is_none() && discovered.launcher.may_share_home() =>
        {
            user_secret().map(Some)
        }
        _ => Ok(None),
    }
}

/// Exchanges settings with the other ranks, whose addresses are in a peers file. Rank 0 serves the rendezvous.
fn exchange_by_peers_file(
    options: &JoinOptions,
    sockets: &SocketOptions,
    file: &PeersFile,
    rank: Rank,
    bind: Option<IpAddr>,
) -> Result<Exchanged, StartError> {
    let world = file.world();
    if !world.contains(rank) {
        return Err(StartError::RankOutOfRange { rank, world });
    }
    let addresses = file.resolve_all()?;
    if options.secret.is_none()
        && let Some(&address) = addresses.iter().find(|address| !is_loopback(address.ip()))
    {
        return Err(StartError::NeedsSecret { address });
    }
    let own_address = addresses[rank.index()];
    let job = handshake::Job { id: [0; 16], world: world.get(), peers_digest: file.digest() };
    let identity = Identity { secret: options.secret.clone(), job, rank: Some(rank) };
    let listen_at = SocketAddr::new(bind.unwrap_or(own_address.ip()), own_address.port());
    let mut listener = listen(sockets, listen_at, rank, identity.clone())?;
    let member = Member {
        host: file.host(rank).to_owned(),
        machine: machine_id(options.host_id.as_deref()),
        address: own_address,
        shared: shared_settings(options),
    };
    let name = |rank| file.name(rank);
    let roster = if rank == Rank::ZERO {
        serve(&mut listener, world, (rank, member), options.start_timeout, name)?
    } else {
        register(
            &registration(options, &identity, (rank, world), (addresses[0], "rank 0")),
            |_| Ok(member),
            name,
        )?
    };
    Ok(Exchanged { rank, listener, roster, host_of_rank_0: None })
}

/// Exchanges addresses and settings with the other ranks at the rendezvous of the launcher.
fn exchange_at_launcher(
    options: &JoinOptions,
    sockets: &SocketOptions,
    launched: &LaunchedRank,
) -> Result<Exchanged, StartError> {
    let LaunchedRank { rank, world, rendezvous, listen: own_address, job_id, .. } = *launched;
    if options.secret.is_none() && !is_loopback(rendezvous.ip()) {
        return Err(StartError::NeedsSecret { address: rendezvous });
    }
    let job = handshake::Job { id: job_id, world: world.get(), peers_digest: [0; 32] };
    let identity = Identity { secret: options.secret.clone(), job, rank: Some(rank) };
    let server = (rendezvous, "the launcher's rendezvous");
    let registration = registration(options, &identity, (rank, world), server);
    // Without another choice, listen on the network interface that leads to the rendezvous, because the peers can reach it.
    let listen_at = |local| own_address.unwrap_or(local);
    let (listener, roster) = register_and_listen(options, sockets, &registration, listen_at)?;
    Ok(Exchanged { rank, listener, roster, host_of_rank_0: None })
}

/// Returns what a rank needs to register. `server` is the address of the rendezvous and the name of its process.
fn registration<'a>(
    options: &JoinOptions,
    identity: &'a Identity,
    (rank, world): (Rank, WorldSize),
    (address, server_name): (SocketAddr, &str),
) -> Registration<'a> {
    let (server_name, start_timeout) = (server_name.into(), options.start_timeout);
    Registration { identity, rank, world, address, server_name, start_timeout }
}

/// Registers a rank that listens on a free port. `listen_at` receives the address with which this rank reaches the rendezvous,
/// and returns the address on which this rank listens.
fn register_and_listen(
    options: &JoinOptions,
    sockets: &SocketOptions,
    registration: &Registration<'_>,
    listen_at: impl FnOnce(IpAddr) -> IpAddr,
) -> Result<(Listener, Roster), StartError> {
    let mut listener = None;
    let start_listening = |local: IpAddr| {
        let ip = listen_at(local);
        let listening = listen_on_free_port(options.ports, (sockets, ip), registration.identity.clone())?;
        let address = listening
            .local_address()
            .map_err(|source| StartError::System { what: "this rank's own address", source })?;
        listener = Some(listening);
        Ok(own_member(options, address))
    };
    let roster = register(registration, start_listening, |rank| format!("rank {rank}"))?;
    let listener = listener.ok_or_else(|| {
        StartError::Refused("the rendezvous did not ask for the address of this rank".into())
    })?;
    Ok((listener, roster))
}

/// Exchanges addresses and settings with the other ranks at a rendezvous that rank 0 serves. A launcher other than `ringrun` has
/// started the ranks.
fn exchange_at_rank_0(
    options: &JoinOptions,
    sockets: &SocketOptions,
    discovered: &DiscoveredRank,
) -> Result<Exchanged, StartError> {
    let DiscoveredRank { rank, world, ref host, port, job_id, .. } = *discovered;
    let (ip, has_several_hosts): (IpAddr, bool) = match host {
        RendezvousHost::ThisHost => (Ipv4Addr::LOCALHOST.into(), false),
        RendezvousHost::Named(name) => (resolve_host(name, options.start_timeout)?, true),
    };
    let address = SocketAddr::new(ip, port);
    if has_several_hosts && options.secret.is_none() {
        return Err(StartError::NeedsSecret { address });
    }
    let job = handshake::Job { id: job_id, world: world.get(), peers_digest: [0; 32] };
    let identity = Identity { secret: options.secret.clone(), job, rank: Some(rank) };
    if rank == Rank::ZERO {
        // The name of this host may have a loopback address on this host. So rank 0 listens on all addresses, and the other
        // ranks use the address at which they have reached it.
        let listen_at = if has_several_hosts { unspecified(ip) } else { ip };
        let address = SocketAddr::new(listen_at, port);
        let mut listener = listen(sockets, address, rank, identity).map_err(|error| match error {
            StartError::PortInUse { address, .. } => StartError::RendezvousPortInUse { address },
            error => error,
        })?;
        let own = (rank, own_member(options, address));
        let roster = serve(&mut listener, world, own, options.start_timeout, |rank| format!("rank {rank}"))?;
        let loopback = if ip.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        return Ok(Exchanged { rank, listener, roster, host_of_rank_0: Some(loopback) });
    }
    let registration = registration(options, &identity, (rank, world), (address, "rank 0"));
    // A rank that reaches rank 0 at a loopback address is on the host of rank 0. The ranks of other hosts reach both in the
    // same way.
    let listen_at =
        |local: IpAddr| if has_several_hosts && is_loopback(local) { unspecified(local) } else { local };
    let (listener, roster) = register_and_listen(options, sockets, &registration, listen_at)?;
    Ok(Exchanged { rank, listener, roster, host_of_rank_0: Some(ip) })
}

/// Returns the address that stands for all addresses of a host, of the same version as `ip`.
fn unspecified(ip: IpAddr) -> IpAddr {
    if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Returns what this rank registers about itself. `address` is the address on which it listens.
fn own_member(options: &JoinOptions, address: SocketAddr) -> Member {
    let machine = machine_id(options.host_id.as_deref());
    Member { host: host_name(), machine, address, shared: shared_settings(options) }
}

/// Opens a free port on which this rank accepts connections: one of `ports`, or one that the operating system chooses.
fn listen_on_free_port(
    ports: Option<PortRange>,
    (sockets, ip): (&SocketOptions, IpAddr),
    identity: Identity,
) -> Result<Listener, StartError> {
    let rank = identity.rank.unwrap_or(Rank::ZERO);
    let Some(ports) = ports else { return listen(sockets, SocketAddr::new(ip, 0), rank, identity) };
    // The ranks of a host begin with different ports, so that they seldom try the same port.
    let socket = ports.listen(rank.get(), |port| sockets.listen(SocketAddr::new(ip, port)));
    let socket = socket.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => {
            StartError::PortsInUse { process: format!("rank {rank}"), host: host_name(), ports, ip }
        }
        _ => StartError::CannotListen { address: SocketAddr::new(ip, 0), rank, source },
    })?;
    new_listener(socket, identity)
}

/// Opens the port on which this rank accepts connections.
fn listen(
    sockets: &SocketOptions,
    address: SocketAddr,
    rank: Rank,
    identity: Identity,
) -> Result<Listener, StartError> {
    let listener = sockets.listen(address).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => StartError::PortInUse { address, rank },
        _ => StartError::CannotListen { address, rank, source },
    })?;
    new_listener(listener, identity)
}

fn new_listener(socket: TcpListener, identity: Identity) -> Result<Listener, StartError> {
    Listener::new(socket, identity).map_err(|source| StartError::System { what: "an event queue", source })
}

/// Returns the number of processors that the ranks of this host have. A launcher that binds ranks to processors sets the
/// number.
pub(super) fn local_processors(options: &JoinOptions) -> u32 {
    let from_launcher = match &options.method {
        JoinMethod::Launched(launched) => launched.local_processors,
        _ => None,
    };
    from_launcher.unwrap_or_else(|| available_parallelism().map_or(1, NonZero::get) as u32)
}

/// Returns the settings that this rank sends to the other ranks.
fn shared_settings(options: &JoinOptions) -> SharedSettings {
    SharedSettings {
        segment_bytes: options.segment_bytes,
        checksums: options.checksums,
        processors: local_processors(options),
        streams: options.streams.to_byte(),
        timeline: options.recording.timeline.is_some(),
    }
}
