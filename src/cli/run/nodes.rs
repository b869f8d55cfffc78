//! The options of torchrun for jobs in which each node runs the same command.

use clap::Args;

use super::hosts::{JobHosts, count_ranks};
use super::rank_count::RankCount;
use crate::launch::{HOSTS_MAX, RankShare};
use crate::rendezvous::NodeOptions;
use crate::types::{Rank, WorldSize};

/// The port of an endpoint without a port, as for torchrun.
const ENDPOINT_PORT: u16 = 29400;

/// The options of the nodes of a job.
#[derive(Args, Debug)]
pub(super) struct NodeArgs {
    /// Run the job on N nodes. You call the same command on each node, and each starts --nproc-per-node ranks. The ringruns
    /// of the nodes meet at --rdzv-endpoint.
    #[arg(long, value_name = "N")]
    nnodes: Option<String>,

    /// The number of this node, from 0. Without this option, the node on the host of --rdzv-endpoint is node 0, and the
    /// others are numbered in the order in which they come.
    #[arg(long, value_name = "R")]
    node_rank: Option<u32>,

    /// The place at which the nodes meet: a name or address of node 0 that all nodes can reach, and a free port (29400 if
    /// you give none).
    #[arg(long, value_name = "HOST[:PORT]")]
    rdzv_endpoint: Option<String>,

    /// A name of the job. Jobs with the same endpoint need different names.
    #[arg(long, value_name = "ID", default_value = "none", hide_default_value = true)]
    rdzv_id: String,
}

impl NodeArgs {
    /// Returns the options of a job on several nodes, or `None` if the job has one node or its hosts are listed.
    pub(super) fn check(&self) -> Result<Option<NodeOptions>, String> {
        let text = self.nnodes.as_deref().unwrap_or("1");
        let number = text.split_once(':').map_or(text, |(low, high)| if low == high { low } else { text });
        let nodes: u32 =
            number.parse().ok().filter(|nodes| (1..=HOSTS_MAX as u32).contains(nodes)).ok_or_else(|| {
                format!("--nnodes {text}: give a fixed number of nodes from 1 to {HOSTS_MAX}")
            })?;
        if let Some(node) = self.node_rank.filter(|&node| node >= nodes) {
            return Err(format!(
                "--node-rank {node}: the nodes are numbered 0 to {} (--nnodes {nodes})",
                nodes - 1
            ));
        }
        let Some(nodes) = WorldSize::new(nodes).filter(|&nodes| nodes != WorldSize::ONE) else {
            return Ok(None);
        };
        let endpoint = self.rdzv_endpoint.as_deref().ok_or_else(|| {
            format!(
                "--nnodes {nodes}: give --rdzv-endpoint HOST:PORT, at which the nodes meet; or leave --nnodes out, and name the \
                 hosts: ringrun -H HOST:N,HOST:N"
            )
        })?;
        let (host, port) = parse_endpoint(endpoint).ok_or_else(|| {
            format!("--rdzv-endpoint {endpoint}: write HOST:PORT, such as node0:{ENDPOINT_PORT}")
        })?;
        let node = self.node_rank.map(Rank::new);
        Ok(Some(NodeOptions { nodes, node, host, port, id: self.rdzv_id.clone() }))
    }
}

/// Places the ranks of a job on several nodes. The number of this node is not known yet, so its share has the ranks of node 0.
pub(super) fn place_on_nodes(options: &NodeOptions, per_node: Option<RankCount>) -> Result<JobHosts, String> {
    let hosts = options.nodes.get();
    let count = per_node.ok_or_else(|| format!("--nnodes {hosts}: give --nproc-per-node M"))?;
    let count = count_ranks(count)?;
    let world = count.get().checked_mul(hosts).and_then(WorldSize::new);
    let world =
        world.ok_or_else(|| format!("--nnodes {hosts} with {count} ranks per node: too many ranks"))?;
    let share = RankShare { ranks: (0..count.get()).collect(), host: 0, hosts };
    Ok(JobHosts { world, share, remote_hosts: Vec::new() })
}

/// Parses `HOST`, `HOST:PORT`, `[ADDRESS]:PORT`.
fn parse_endpoint(text: &str) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) }),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(ENDPOINT_PORT), |port| port.parse().ok().filter(|&port| port != 0))?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_parsed() {
        for (text, expected) in [
            ("a", Some(("a", 29400))),
            ("a:7000", Some(("a", 7000))),
            ("[fe80::1]:7000", Some(("fe80::1", 7000))),
            ("[::1]", Some(("::1", 29400))),
            ("a:0", None),
            ("a:x", None),
            (":7000", None),
            ("[::1]7", None),
        ] {
            let found = parse_endpoint(text);
            assert_eq!(found.as_ref().map(|(host, port)| (host.as_str(), *port)), expected, "{text}");
        }
    }
}
