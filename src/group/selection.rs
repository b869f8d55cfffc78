//! The selection of the algorithm for an operation and the size of its buffer.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::schedule::cost::{self, LinkCost};
use crate::schedule::topology::Medium;
use crate::types::{Algorithm, Operation, WorldSize};

const RANGES_MAX: usize = 16;

/// The largest buffer, in bytes, for which every rank reduces all elements in shared memory. If each rank reduced only
/// a part of the elements, the operation would need a second round to exchange the reduced parts.
const ONE_SHOT_BYTES_MAX: u64 = 16 << 10;
/// The largest size in bytes of the buffers of all ranks together for which every rank reduces all elements of buffers of more
/// than [`ALWAYS_ONE_SHOT_BYTES_MAX`] bytes. Each of n ranks reduces n buffers, so the work grows with the square of n.
const ONE_SHOT_TOTAL_BYTES_MAX: u64 = 64 << 10;
/// The largest such buffer for any number of ranks. A second round takes longer than the additional work.
const ALWAYS_ONE_SHOT_BYTES_MAX: u64 = 4 << 10;

/// The transport between ranks of one host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LocalTransport {
    /// Shared memory if possible, TCP otherwise.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// Shared memory. Joining fails if shared memory is not possible.
    Shm,
}

/// The requested algorithms, by the number of bytes of the buffer. Default: the algorithm with the lowest cost.
///
/// As text, `ring` means the ring for every size, and `direct:0-65536;ring:65537-max` names an algorithm for each range of
/// sizes. If an operation does not have the requested algorithm, it uses its algorithm with the lowest cost.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Algorithms(Vec<(Algorithm, RangeInclusive<u64>)>);

impl Algorithms {
    /// Returns fixed ranges. With them, all runs on the same hosts give the same bits. Measured costs may differ from run to run.
    pub fn reproducible() -> Self {
        Self(vec![
            // For groups with several hosts and several ranks on a host.
            (Algorithm::Hierarchy, 0..=u64::MAX),
            (Algorithm::OneShot, 0..=8 << 10),
            (Algorithm::Direct, (8 << 10) + 1..=256 << 10),
            (Algorithm::Ring, (256 << 10) + 1..=u64::MAX),
        ])
    }

    /// Returns whether no algorithm was requested.
    pub fn is_automatic(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Algorithms {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::default());
        }
        let ranges: Vec<_> = text.split(';').map(parse_range).collect::<Result<_, _>>()?;
        if ranges.len() > RANGES_MAX {
            return Err(format!("more than {RANGES_MAX} ranges"));
        }
        Ok(Self(ranges))
    }
}

/// Parses an algorithm with its range of sizes, for example `ring:65537-max`. Without a range, the range is all sizes.
fn parse_range(text: &str) -> Result<(Algorithm, RangeInclusive<u64>), String> {
    let (name, bytes) = text.split_once(':').unwrap_or((text, "0-max"));
    let algorithm = cost::requestable_algorithms().find(|algorithm| algorithm.name() == name);
    let algorithm = algorithm.ok_or_else(|| {
        let names: Vec<&str> = cost::requestable_algorithms().map(Algorithm::name).collect();
        format!("`{name}` is not one of {}, auto", names.join(", "))
    })?;
    let invalid_range = || format!("`{bytes}` is not a range of bytes like 0-65536 or 65537-max");
    let (min_text, max_text) = bytes.split_once('-').ok_or_else(invalid_range)?;
    let bytes_min = min_text.parse().map_err(|_| invalid_range())?;
    let bytes_max =
        if max_text == "max" { u64::MAX } else { max_text.parse().map_err(|_| invalid_range())? };
    if bytes_min > bytes_max {
        return Err(invalid_range());
    }
    Ok((algorithm, bytes_min..=bytes_max))
}

impl fmt::Display for Algorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("auto");
        }
        for (index, (algorithm, bytes)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ";" };
            write!(f, "{separator}{}:{}-", algorithm.name(), bytes.start())?;
            match *bytes.end() {
                u64::MAX => f.write_str("max")?,
                bytes_max => write!(f, "{bytes_max}")?,
            }
        }
        Ok(())
    }
}

/// The data that decide which algorithm an operation uses. All ranks of a job have the same data.
#[derive(Clone, Debug, Default)]
pub(super) struct AlgorithmSelection {
    pub(super) algorithms: Algorithms,
    pub(super) link_cost: LinkCost,
    /// The transport between ranks of one host.
    pub(super) local_transport: LocalTransport,
}

impl AlgorithmSelection {
    /// Returns the algorithm of `operation` on a buffer of `bytes` bytes among `world` ranks.
    pub(super) fn choose(
        &self,
        operation: Operation,
        world: WorldSize,
        bytes: u64,
        medium: Medium<'_>,
    ) -> Algorithm {
        let possible: &[Algorithm] = match medium {
            Medium::SharedMemory if operation == Operation::AllReduce => {
                &[Algorithm::OneShot, Algorithm::Direct]
            }
            Medium::SharedMemory => &[Algorithm::Direct],
            Medium::Links | Medium::Hosts(_) => cost::possible_algorithms(operation),
        };
        let is_hierarchical =
            matches!(medium, Medium::Hosts(_)) && cost::has_hierarchical_algorithm(operation);
        let is_possible = |algorithm: &Algorithm| match algorithm {
            Algorithm::Hierarchy => is_hierarchical,
            other => possible.contains(other) && cost::can_run(*other, world, bytes),
        };
        let of_size = self.algorithms.0.iter().filter(|(_, range)| range.contains(&bytes));
        let requested = of_size.map(|(algorithm, _)| *algorithm).find(is_possible);
        requested.unwrap_or_else(|| match possible {
            // With shared memory on each host, the operation always costs less than over links alone.
            _ if is_hierarchical => Algorithm::Hierarchy,
            [only] => *only,
            _ if matches!(medium, Medium::SharedMemory) => cheapest_in_shared_memory(world, bytes),
            _ => self.link_cost.cheapest(operation, world, bytes),
        })
    }
}

fn cheapest_in_shared_memory(world: WorldSize, bytes: u64) -> Algorithm {
    let total = bytes.saturating_mul(world.get().into());
    let is_short = bytes <= ONE_SHOT_BYTES_MAX && total <= ONE_SHOT_TOTAL_BYTES_MAX;
    if is_short || bytes <= ALWAYS_ONE_SHOT_BYTES_MAX { Algorithm::OneShot } else { Algorithm::Direct }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::hierarchy::HostLayout;
    use crate::types::Rank;

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
        let choose = |operation, bytes| selection.choose(operation, world, bytes, Medium::Links);
        assert_eq!(choose(Operation::AllReduce, 100), Algorithm::Direct);
        assert_eq!(choose(Operation::AllReduce, 101), Algorithm::OneShot);
        assert_eq!(choose(Operation::AllReduce, 1 << 30), Algorithm::Ring);
        assert_eq!(choose(Operation::Broadcast, 100), Algorithm::Tree);
        assert_eq!(choose(Operation::AllGather, 100), Algorithm::Direct);
        let layout = HostLayout::new(&[0, 0, 1, 1], Rank::ZERO).unwrap();
        let choose_with_hosts =
            |operation, bytes| selection.choose(operation, world, bytes, Medium::Hosts(&layout));
        assert_eq!(choose_with_hosts(Operation::AllReduce, 100), Algorithm::Direct);
        assert_eq!(choose_with_hosts(Operation::AllReduce, 201), Algorithm::Hierarchy);
        assert_eq!(choose_with_hosts(Operation::Barrier, 0), Algorithm::Hierarchy);
        assert_eq!(choose_with_hosts(Operation::AllGather, 1 << 30), Algorithm::Ring);
    }

    #[test]
    fn in_shared_memory_all_ranks_reduce_all_elements_only_if_they_are_few() {
        let cases = [
            (2, 16 << 10, true),
            (2, (16 << 10) + 1, false),
            (4, 16 << 10, true),
            (5, 16 << 10, false),
            (8, 8 << 10, true),
            (64, 4 << 10, true),
            (64, (4 << 10) + 1, false),
        ];
        for (ranks, bytes, is_one_shot) in cases {
            let chosen = cheapest_in_shared_memory(WorldSize::new(ranks).unwrap(), bytes);
            assert_eq!(chosen == Algorithm::OneShot, is_one_shot, "{ranks} ranks, {bytes} bytes");
        }
    }
}
