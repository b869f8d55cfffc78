//! Chooses the servers, divides the parameters among them, and connects clients to servers.

use std::num::NonZeroU32;
use std::ops::Range;

use super::ParameterServerError;
use super::message::JOINED_PAYLOAD_WORDS_MAX;
use crate::group::Group;
use crate::train::batches::range_of_rank;
use crate::train::peer_link::{ConnectError, PeerLink, connect_pair};
use crate::types::{Rank, WorldSize};

/// The range of parameters that each server holds. With n servers, ranks 0 to n - 1 are the servers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ShardLayout {
    world: WorldSize,
    ranges: Vec<Range<usize>>,
}

impl ShardLayout {
    /// Divides `count` parameters evenly among the first `servers` ranks. If `tensors` is `Some`, each of these ranges
    /// of parameters stays on one server, because the optimizer needs the norm of each tensor.
    pub(crate) fn new(
        world: WorldSize,
        servers: NonZeroU32,
        count: usize,
        tensors: Option<&[Range<usize>]>,
    ) -> Result<Self, ParameterServerError> {
        let servers = servers.get();
        let Some(size) = WorldSize::new(servers).filter(|_| servers < world.get()) else {
            return Err(ParameterServerError::TooFewRanks { ranks: world.get(), servers });
        };
        if servers as usize > tensors.map_or(count, <[_]>::len) {
            let unit = if tensors.is_some() {
                "tensors, and this optimizer cannot divide a tensor"
            } else {
                "parameters"
            };
            return Err(ParameterServerError::Unsupported(format!(
                "{servers} servers are too many for this model: it has only {} {unit}; lower the number of servers",
                tensors.map_or(count, <[_]>::len),
            )));
        }
        let even: Vec<_> = size.ranks().map(|rank| range_of_rank(count, rank, size)).collect();
        let ranges = match tensors {
            None => even,
            Some(tensors) => assign_whole_tensors(tensors, &even),
        };
        Ok(Self { world, ranges })
    }

    /// Returns whether `rank` is a server.
    pub(crate) fn is_server(&self, rank: Rank) -> bool {
        rank.index() < self.ranges.len()
    }

    /// Returns the range of the parameters that the server `rank` holds.
    pub(crate) fn range(&self, rank: Rank) -> Range<usize> {
        self.ranges[rank.index()].clone()
    }

    /// Returns the ranks that are servers.
    pub(crate) fn servers(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.ranges.len() as u32).map(Rank::new)
    }

    /// Returns the ranks that are workers.
    pub(crate) fn workers(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.ranges.len() as u32..self.world.get()).map(Rank::new)
    }

    /// Returns the ranks that send requests to `server`. The clients of rank 0 are all other ranks. The clients of
    /// every other server are rank 0, which saves and tests the whole model, and the workers.
    fn clients(&self, server: Rank) -> impl Iterator<Item = Rank> + use<> {
        let other_servers = if server == Rank::ZERO { 1..self.ranges.len() as u32 } else { 0..1 };
        other_servers.map(Rank::new).chain(self.workers())
    }
}

/// Divides whole tensors among the servers, and returns the range of parameters of each server. Each server gets at
/// least one tensor. `even_ranges` divides the parameters without regard to tensors. Each returned range ends near the
/// end of the server's range in `even_ranges`.
fn assign_whole_tensors(tensors: &[Range<usize>], even_ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut next, servers) = (0, even_ranges.len());
    let assign_to_server = |(server, even): (usize, &Range<usize>)| {
        let (first, servers_left) = (next, servers - server - 1);
        let is_wanted = |index: usize| {
            let middle = tensors[index].start.midpoint(tensors[index].end);
            index == first || middle <= even.end || servers_left == 0
        };
        while next < tensors.len() - servers_left && is_wanted(next) {
            next += 1;
        }
        tensors[first].start..tensors[next - 1].end
    };
    even_ranges.iter().enumerate().map(assign_to_server).collect()
}

/// The connections of this rank.
pub(crate) struct Links {
    /// The connections with this rank's clients. Empty on a worker.
    pub(crate) clients: Vec<PeerLink>,
    /// The connections with the servers to which this rank sends requests, in rank order.
    pub(crate) servers: Vec<PeerLink>,
}

/// Connects servers and clients. All ranks of `group` must call this function with the same arguments. `are_encoded` says
/// whether the workers send encoded gradients.
pub(crate) fn connect_clients_to_servers(
    group: &mut Group,
    layout: &ShardLayout,
    are_encoded: bool,
) -> Result<Links, ParameterServerError> {
    let own = group.rank();
    let mut links = Links { clients: Vec::new(), servers: Vec::new() };
    for server in layout.servers() {
        for client in layout.clients(server) {
            let pair = [server, client];
            let Some(mut link) = connect_pair(group, pair)? else { continue };
            let parameter_count = layout.range(server).len();
            // Rank 0 gets all parameters of the other servers, but the other servers get none of rank 0.
            let exchanges_parameters =
                if layout.is_server(client) { server != Rank::ZERO } else { !are_encoded };
            if exchanges_parameters && parameter_count > JOINED_PAYLOAD_WORDS_MAX {
                link.share_memory(parameter_count)
                    .map_err(|failure| ConnectError::Pair { pair, problem: failure.problem().to_owned() })?;
            }
            link.adapt_polling();
            if own == server {
                link.wait_for_requests();
                links.clients.push(link);
            } else {
                links.servers.push(link);
            }
        }
    }
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_layout(
        world: u32,
        servers: u32,
        count: usize,
        tensors: Option<&[Range<usize>]>,
    ) -> Result<ShardLayout, String> {
        ShardLayout::new(WorldSize::new(world).unwrap(), NonZeroU32::new(servers).unwrap(), count, tensors)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn servers_hold_all_parameters_and_workers_are_the_other_ranks() {
        let layout = make_layout(5, 2, 7, None).unwrap();
        assert_eq!(layout.ranges, [0..4, 4..7]);
        assert!(layout.is_server(Rank::new(1)) && !layout.is_server(Rank::new(2)));
        let numbers = |ranks: &mut dyn Iterator<Item = Rank>| ranks.map(Rank::get).collect::<Vec<_>>();
        assert_eq!(numbers(&mut layout.workers()), [2, 3, 4]);
        assert_eq!(numbers(&mut layout.clients(Rank::ZERO)), [1, 2, 3, 4]);
        assert_eq!(numbers(&mut layout.clients(Rank::new(1))), [0, 2, 3, 4]);
    }

    #[test]
    fn each_server_holds_whole_tensors_if_the_optimizer_needs_them() {
        let tensors = [0..10, 10..12, 12..90, 90..100];
        for (servers, expected) in
            [(2, vec![0..12, 12..100]), (3, vec![0..12, 12..90, 90..100]), (4, tensors.to_vec())]
        {
            assert_eq!(
                make_layout(9, servers, 100, Some(&tensors)).unwrap().ranges,
                expected,
                "{servers} servers"
            );
        }
    }

    #[test]
    fn too_many_servers_are_refused() {
        for (world, servers, count, tensors, expected) in [
            (2, 2, 9, None, "the number of ranks is 2 and the number of servers is 2"),
            (1, 1, 9, None, "the number of ranks is 1"),
            (9, 4, 3, None, "it has only 3 parameters"),
            (9, 3, 9, Some(&[0..5, 5..9][..]), "it has only 2 tensors"),
        ] {
            let error = make_layout(world, servers, count, tensors).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
