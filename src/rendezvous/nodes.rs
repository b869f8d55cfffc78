//! How several ringruns, one on each node, find each other at an endpoint, as the processes of torchrun do.
//!
//! The ringrun of node 0 serves two rendezvous. At the endpoint, the ringruns of all nodes register, and so learn their
//! numbers and the port of the second rendezvous. There, the ranks register, as those of any job of ringrun.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::client::register;
use super::environment::secret_from_environment;
use super::error::StartError;
use super::ports::PortRange;
use super::registration::Registration;
use super::registry::NoticeReceiver;
use super::resolve::{resolve_host, source_address};
use super::roster::{Checksums, Member, Roster, SharedSettings, host_name, is_loopback, machine_id};
use super::server::{Server, ServerOptions};
use super::user_secret::user_secret;
use crate::transport::handshake::Identity;
use crate::types::{Rank, WorldSize};
use crate::wire::Secret;
use crate::wire::handshake::Job;

/// The part of a job that the ringruns of all nodes must agree on, and this node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The number of nodes, at least 2.
    pub nodes: WorldSize,
    /// The number of this node; `None` if the nodes are numbered in the order in which they come. Node 0 is then on the
    /// host of the endpoint.
    pub node: Option<Rank>,
    /// The host of the endpoint: the host of node 0.
    pub host: String,
    /// The port of the endpoint.
    pub port: u16,
    /// A name that distinguishes jobs with the same endpoint.
    pub id: String,
}

/// What a ringrun knows after all nodes have met.
pub struct MetNodes {
    /// The number of this node.
    pub node: Rank,
    /// The rendezvous of the ranks.
    pub rendezvous: SocketAddr,
    /// The rendezvous of the ranks, on node 0.
    pub server: Option<Server>,
    /// The id of the job.
    pub job_id: [u8; 16],
    /// The secret of the job as text, derived from the secret of the user or from `RING_SECRET`.
    pub secret: String,
}

/// Meets the ringruns of the other nodes. `ranks` is the number of ranks of the job, `ports` are the ports for the
/// rendezvous of the ranks, and `print` receives notices about missing nodes and ranks.
///
/// # Errors
///
/// [`StartError`] if the secret cannot be used, the endpoint cannot be reached, or not all nodes come within `timeout`.
pub fn meet_nodes(
    options: &NodeOptions,
    ranks: WorldSize,
    ports: Option<PortRange>,
    timeout: Duration,
    print: impl Fn(&str) + Clone + Send + 'static,
) -> Result<MetNodes, StartError> {
    let NodeOptions { nodes, node, host, port, id } = options;
    let user_secret = secret_from_environment()?.map_or_else(user_secret, Ok)?;
    // Nodes with other numbers of ranks do not belong to this job.
    let name = format!("ringrun nodes {host}:{port} {id} {nodes} {ranks}");
    let [job_id, nodes_id] = ["ranks", "nodes"].map(|part| digest(&format!("{part} {name}")));
    let secret_text = user_secret.derive(name.as_bytes());
    let secret = Secret::new(secret_text.as_bytes())?;
    let ip = resolve_host(host, timeout)?;
    let server = |ports, world, job_id, notices: Box<dyn Fn(&str) + Send>| {
        let (host, secret) = (listening_address(host, ip), secret.clone());
        let notices = NoticeReceiver::Report(notices);
        Server::start(ServerOptions { host, ports, world, secret, job_id, start_timeout: timeout, notices })
    };
    let may_serve = node.map_or_else(|| is_own_address(ip), |node| node == Rank::ZERO);
    let print_nodes = print.clone();
    let endpoint_server = may_serve.then(|| {
        let notice = move |notice: &str| print_nodes(&notice.replace("rank", "node"));
        server(Some(PortRange::from(*port)), *nodes, nodes_id, Box::new(notice))
    });
    let endpoint_server = match endpoint_server.transpose() {
        // Another ringrun on this host is node 0.
        Err(StartError::PortsInUse { .. }) if node.is_none() => None,
        result => result?,
    };
    let rank_server =
        endpoint_server.is_some().then(|| server(ports, ranks, job_id, Box::new(print))).transpose()?;
    let rank_port = rank_server.as_ref().map_or(0, |server| server.address().port());
    let serves = endpoint_server.is_some();
    let address = SocketAddr::new(if serves { loopback(ip) } else { ip }, *port);
    let job = Job { id: nodes_id, world: nodes.get(), peers_digest: [0; 32] };
    let candidates = match node {
        Some(node) => node.get()..node.get() + 1,
        None if serves => 0..1,
        None => 1..nodes.get(),
    };
    let meeting = Meeting { secret, job, nodes: *nodes, address, timeout, rank_port };
    let (node, roster) = meeting.register_first_free(candidates.map(Rank::new))?;
    // All nodes have met, so the endpoint is free for other programs: PyTorch uses it as MASTER_PORT.
    drop(endpoint_server);
    let of_node_0 = roster.members.first().map_or(address, |member| member.address);
    let rendezvous = if serves {
        // The address of this host that the other nodes can reach.
        let other = roster.members.last().map_or(ip, |member| member.address.ip());
        let own = source_address(other).map_err(|source| StartError::System { what: "a route", source })?;
        SocketAddr::new(own, rank_port)
    } else {
        SocketAddr::new(ip, of_node_0.port())
    };
    Ok(MetNodes { node, rendezvous, server: rank_server, job_id, secret: secret_text })
}

/// What a node needs to register at the endpoint.
struct Meeting {
    secret: Secret,
    job: Job,
    nodes: WorldSize,
    address: SocketAddr,
    timeout: Duration,
    /// The port of the rendezvous of the ranks, on node 0.
    rank_port: u16,
}

impl Meeting {
    /// Registers as the first of these nodes that is free. Returns the node when all nodes have registered.
    fn register_first_free(&self, nodes: impl Iterator<Item = Rank>) -> Result<(Rank, Roster), StartError> {
        let mut refused = StartError::Refused("the job has no node for this ringrun".to_owned());
        for node in nodes {
            let identity = Identity { secret: self.secret.clone(), job: self.job.clone(), rank: Some(node) };
            let registration = Registration {
                identity: &identity,
                rank: node,
                world: self.nodes,
                address: self.address,
                server_name: "the ringrun of node 0".to_owned(),
                start_timeout: self.timeout,
            };
            let member = |local: IpAddr| {
                Ok(Member {
                    host: host_name(),
                    machine: machine_id(None),
                    address: SocketAddr::new(local, self.rank_port),
                    // The ringruns open no links, so these settings have no effect.
                    shared: SharedSettings {
                        segment_bytes: 64,
                        checksums: Checksums::Auto,
                        processors: 1,
                        streams: 1,
                        timeline: false,
                    },
                })
            };
            match register(&registration, member, |node| format!("node {node}")) {
                // Usually, another ringrun has registered as this node.
                Err(error @ StartError::Refused(_)) => refused = error,
                result => return result.map(|roster| (node, roster)),
            }
        }
        Err(refused)
    }
}

/// Returns the first bytes of the digest of a text.
fn digest(text: &str) -> [u8; 16] {
    let digest: [u8; 32] = Sha256::digest(text).into();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    id
}

/// Returns the address on which node 0 listens. The name of its host may have a loopback address there, so only an endpoint
/// that is itself a loopback address for all nodes restricts it.
fn listening_address(host: &str, ip: IpAddr) -> IpAddr {
    if host == "localhost" || host.parse().is_ok_and(is_loopback) {
        ip
    } else if ip.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    }
}

fn loopback(ip: IpAddr) -> IpAddr {
    if ip.is_loopback() {
        ip
    } else if ip.is_ipv4() {
        Ipv4Addr::LOCALHOST.into()
    } else {
        Ipv6Addr::LOCALHOST.into()
    }
}

/// Returns whether the kernel knows `ip` as an address of this host.
fn is_own_address(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).map(drop).map_err(|error: io::Error| error.kind()).is_ok()
}
