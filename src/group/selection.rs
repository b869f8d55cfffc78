//! The selection of the algorithm for an operation and the size of its buffer.

use std::fmt;
use std::str::FromStr;

use super::share::LocalTransport;
use crate::schedule::cost::{self, LinkCost};
use crate::types::{Algorithm, Operation, WorldSize};

/// The most ranges of sizes that can be requested.
pub(super) const RANGES_MAX: usize = 16;

/// The requested algorithms, by the number of bytes of the buffer. Without a request, an operation uses the algorithm with
/// the lowest cost.
///
/// As text, `ring` means the ring for every size, and `direct:0-65536;ring:65537-max` names an algorithm for each range of
/// sizes. If an operation does not have the requested algorithm, it uses the one of its algorithms with the lowest cost.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Algorithms(Vec<AlgorithmRange>);

/// One algorithm for a range of buffer sizes in bytes, with both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AlgorithmRange {
    pub(super) algorithm: Algorithm,
    pub(super) from: u64,
    pub(super) to: u64,
}

impl Algorithms {
    pub(super) fn new(ranges: Vec<AlgorithmRange>) -> Self {
        Self(ranges)
    }

    pub(super) fn ranges(&self) -> &[AlgorithmRange] {
        &self.0
    }

    /// Returns fixed ranges, with which all runs on the same hosts give the same bits. A choice by measurement may differ
    /// between runs.
    pub fn reproducible() -> Self {
        let range = |algorithm, from, to| AlgorithmRange { algorithm, from, to };
        Self(vec![
            // For groups with several hosts and several ranks on a host.
            range(Algorithm::Hierarchy, 0, u64::MAX),
            range(Algorithm::OneShot, 0, 8 << 10),
            range(Algorithm::Direct, (8 << 10) + 1, 256 << 10),
            range(Algorithm::Ring, (256 << 10) + 1, u64::MAX),
        ])
    }

    /// Returns whether no algorithm was requested.
    pub fn is_automatic(&self) -> bool {
        self.0.is_empty()
    }

    fn for_bytes(&self, bytes: u64) -> impl Iterator<Item = Algorithm> {
        let fits = move |range: &&AlgorithmRange| (range.from..=range.to).contains(&bytes);
        self.0.iter().filter(fits).map(|range| range.algorithm)
    }
}

impl FromStr for Algorithms {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::default());
        }
        let ranges: Vec<AlgorithmRange> = text.split(';').map(parse_range).collect::<Result<_, _>>()?;
        if ranges.len() > RANGES_MAX {
            return Err(format!("more than {RANGES_MAX} ranges"));
        }
        Ok(Self(ranges))
    }
}

fn parse_range(text: &str) -> Result<AlgorithmRange, String> {
    let (name, bytes) = text.split_once(':').unwrap_or((text, "0-max"));
    let algorithm = cost::REQUESTABLE_ALGORITHMS.iter().copied().find(|algorithm| algorithm.name() == name);
    let algorithm = algorithm.ok_or_else(|| {
        let names: Vec<&str> =
            cost::REQUESTABLE_ALGORITHMS.iter().map(|algorithm| algorithm.name()).collect();
        format!("`{name}` is not one of {}, auto", names.join(", "))
    })?;
    let wrong = || format!("`{bytes}` is not a range of bytes like 0-65536 or 65537-max");
    let (from, to) = bytes.split_once('-').ok_or_else(wrong)?;
    let from = from.parse().map_err(|_| wrong())?;
    let to = if to == "max" { u64::MAX } else { to.parse().map_err(|_| wrong())? };
    if from > to {
        return Err(wrong());
    }
    Ok(AlgorithmRange { algorithm, from, to })
}

impl fmt::Display for Algorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("auto");
        }
        for (index, AlgorithmRange { algorithm, from, to }) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ";" };
            let name = algorithm.name();
            match *to {
                u64::MAX => write!(f, "{separator}{name}:{from}-max")?,
                to => write!(f, "{separator}{name}:{from}-{to}")?,
            }
        }
        Ok(())
    }
}

/// The connection between the ranks of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GroupMedium {
    /// Only links.
    Links,
    /// Memory that all ranks share.
    SharedMemory,
    /// Memory that the ranks of each host share, and links between hosts.
    Hosts,
}

/// The data that decide which algorithm an operation uses. All ranks of a job have the same data.
#[derive(Clone, Debug, Default)]
pub(super) struct AlgorithmSelection {
    pub(super) algorithms: Algorithms,
    pub(super) link: LinkCost,
    /// The transport between ranks of one host.
    pub(super) local: LocalTransport,
}

impl AlgorithmSelection {
    /// Returns the algorithm of `operation` on a buffer of `bytes` bytes among `world` ranks.
    pub(super) fn choose(
        &self,
        operation: Operation,
        world: WorldSize,
        bytes: u64,
        medium: GroupMedium,
    ) -> Algorithm {
        let possible = match medium {
            GroupMedium::SharedMemory => cost::possible_algorithms_in_shared_memory(operation),
            GroupMedium::Links | GroupMedium::Hosts => cost::possible_algorithms(operation),
        };
        let is_hierarchical = medium == GroupMedium::Hosts && cost::has_hierarchical_algorithm(operation);
        let is_possible = |algorithm: &Algorithm| match algorithm {
            Algorithm::Hierarchy => is_hierarchical,
            other => possible.contains(other) && cost::can_run(*other, world, bytes),
        };
        let requested = self.algorithms.for_bytes(bytes).find(is_possible);
        requested.unwrap_or_else(|| match possible {
            // Shared memory on each host always costs less than links.
            _ if is_hierarchical => Algorithm::Hierarchy,
            [only] => *only,
            _ if medium == GroupMedium::SharedMemory => cost::cheapest_in_shared_memory(bytes),
            _ => self.link.cheapest(operation, world, bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requested_algorithms_are_parsed_and_printed() {
        for text in ["auto", "ring:0-max", "direct:0-65536;ring:65537-max", "one-shot:0-64;doubling:65-128"] {
            assert_eq!(text.parse::<Algorithms>().unwrap().to_string(), text);
        }
        assert_eq!("ring".parse::<Algorithms>().unwrap().to_string(), "ring:0-max");
        let fixed = "hierarchy:0-max;one-shot:0-8192;direct:8193-262144;ring:262145-max";
        assert_eq!(Algorithms::reproducible().to_string(), fixed);
        for wrong in
            ["", "rings", "ring:", "ring:5", "ring:9-3", "ring:-1-4", "ring:0-max;", "chain", "ring:0-1;;"]
        {
            assert!(wrong.parse::<Algorithms>().is_err(), "{wrong}");
        }
        let many = vec!["ring:0-1"; RANGES_MAX + 1].join(";");
        assert!(many.parse::<Algorithms>().unwrap_err().contains("more than 16"));
    }

    #[test]
    fn a_requested_algorithm_is_used_if_the_operation_has_it() {
        let algorithms = "direct:0-100;one-shot:101-200".parse().unwrap();
        let selection = AlgorithmSelection { algorithms, ..AlgorithmSelection::default() };
        let world = WorldSize::new(4).unwrap();
        let choose = |operation, bytes| selection.choose(operation, world, bytes, GroupMedium::Links);
        assert_eq!(choose(Operation::AllReduce, 100), Algorithm::Direct);
        assert_eq!(choose(Operation::AllReduce, 101), Algorithm::OneShot);
        assert_eq!(choose(Operation::AllReduce, 1 << 30), Algorithm::Ring);
        assert_eq!(choose(Operation::Broadcast, 100), Algorithm::Tree);
        assert_eq!(choose(Operation::AllGather, 100), Algorithm::Direct);
        let choose_with_hosts =
            |operation, bytes| selection.choose(operation, world, bytes, GroupMedium::Hosts);
        assert_eq!(choose_with_hosts(Operation::AllReduce, 100), Algorithm::Direct);
        assert_eq!(choose_with_hosts(Operation::AllReduce, 201), Algorithm::Hierarchy);
        assert_eq!(choose_with_hosts(Operation::Barrier, 0), Algorithm::Hierarchy);
        assert_eq!(choose_with_hosts(Operation::AllGather, 1 << 30), Algorithm::Ring);
    }
}
