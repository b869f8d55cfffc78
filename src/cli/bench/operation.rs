//! The operations that `ringbench` measures, and the properties of these operations, for example whether an operation
//! works in place.

use crate::types::{Operation, Rank, WorldSize};

/// A measured operation: a collective, or messages between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BenchOperation {
    /// [`Group::all_reduce`](crate::Group::all_reduce).
    AllReduce,
    /// [`Group::reduce`](crate::Group::reduce).
    Reduce,
    /// [`Group::reduce_scatter`](crate::Group::reduce_scatter).
    ReduceScatter,
    /// [`Group::all_gather`](crate::Group::all_gather).
    AllGather,
    /// [`Group::broadcast`](crate::Group::broadcast).
    Broadcast,
    /// [`verbs::Gather`](crate::verbs::Gather).
    Gather,
    /// [`verbs::Scatter`](crate::verbs::Scatter).
    Scatter,
    /// [`verbs::AllToAll`](crate::verbs::AllToAll).
    AllToAll,
    /// [`Group::scan`](crate::Group::scan).
    Scan,
    /// [`verbs::Exscan`](crate::verbs::Exscan).
    Exscan,
    /// [`Group::barrier`](crate::Group::barrier).
    Barrier,
    /// A message from rank 0 to rank 1, and a message back. The reported time is half of the round trip.
    PingPong,
    /// [`Group::send_receive`](crate::Group::send_receive): every rank R sends to rank R + 1 and receives from
    /// rank R - 1. The last rank sends to rank 0.
    SendReceive,
}

impl BenchOperation {
    /// All operations, in the order in which an error message lists them.
    pub const ALL: &'static [Self] = &[
        Self::AllReduce,
        Self::Reduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Scan,
        Self::Exscan,
        Self::Barrier,
        Self::PingPong,
        Self::SendReceive,
    ];

    /// Returns the name that the command line and the table use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PingPong => "ping_pong",
            Self::SendReceive => "send_receive",
            collective => collective.group_operation().name(),
        }
    }

    /// Returns the operation of [`Group`](crate::Group) whose time is measured.
    pub const fn group_operation(self) -> Operation {
        match self {
            Self::AllReduce => Operation::AllReduce,
            Self::Reduce => Operation::Reduce,
            Self::ReduceScatter => Operation::ReduceScatter,
            Self::AllGather => Operation::AllGather,
            Self::Broadcast => Operation::Broadcast,
            Self::Gather => Operation::Gather,
            Self::Scatter => Operation::Scatter,
            Self::AllToAll => Operation::AllToAll,
            Self::Scan => Operation::Scan,
            Self::Exscan => Operation::Exscan,
            Self::Barrier => Operation::Barrier,
            Self::PingPong | Self::SendReceive => Operation::Message,
        }
    }

    /// Returns whether the operation reduces elements of different ranks.
    pub const fn reduces(self) -> bool {
        match self {
            Self::AllReduce | Self::Reduce | Self::ReduceScatter | Self::Scan | Self::Exscan => true,
            Self::AllGather
            | Self::Broadcast
            | Self::Gather
            | Self::Scatter
            | Self::AllToAll
            | Self::Barrier
            | Self::PingPong
            | Self::SendReceive => false,
        }
    }

    /// Returns whether the operation reduces prefixes: a scan gives each rank the reduction over the lower ranks and
    /// itself, and an exscan the reduction over the lower ranks.
    pub const fn reduces_prefixes(self) -> bool {
        matches!(self, Self::Scan | Self::Exscan)
    }

    /// Returns whether the operation writes its result over its input, in the same buffer.
    pub const fn is_in_place(self) -> bool {
        match self {
            Self::AllReduce
            | Self::Reduce
            | Self::ReduceScatter
            | Self::AllGather
            | Self::Broadcast
            | Self::Scan
            | Self::Barrier => true,
            Self::Gather
            | Self::Scatter
            | Self::AllToAll
            | Self::Exscan
            | Self::PingPong
            | Self::SendReceive => false,
        }
    }

    /// Returns whether the whole buffer must consist of equal parts, one for each rank.
    pub const fn has_equal_parts(self) -> bool {
        matches!(self, Self::Gather | Self::Scatter | Self::AllToAll)
    }

    /// Returns the least number of ranks with which the operation can be measured.
    pub const fn ranks_min(self) -> u32 {
        if self.is_point_to_point() { 2 } else { 1 }
    }

    /// Returns whether the operation is point-to-point, that is, sends messages between pairs of ranks.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, Self::PingPong | Self::SendReceive)
    }

    /// Returns whether `rank` performs the operation. In a ping-pong, only ranks 0 and 1 send messages, and the other
    /// ranks wait.
    pub fn involves(self, rank: Rank) -> bool {
        self != Self::PingPong || rank.get() < 2
    }

    /// Returns the memory in bytes that `ranks` ranks on one host need if the whole buffer has `buffer_bytes` bytes.
    /// The memory holds the inputs and the results of all ranks, the library's copies, and the results of the
    /// previous iteration.
    pub fn memory_bytes(self, buffer_bytes: u64, ranks: u32) -> u64 {
        let buffer_count = match self {
            Self::AllReduce
            | Self::Reduce
            | Self::ReduceScatter
            | Self::AllGather
            | Self::Broadcast
            | Self::Scan
            | Self::Barrier => ranks.into(),
            // Only the root has the whole buffer, and each other rank has one part of it. All parts together are as
            // large as the whole buffer, so the memory does not depend on the number of ranks.
            Self::Gather | Self::Scatter => 4,
            Self::Exscan => 5 * u64::from(ranks),
            Self::AllToAll => 2 * u64::from(ranks),
            Self::PingPong => 2 * u64::from(ranks.min(2)),
            Self::SendReceive => 3 * u64::from(ranks),
        };
        buffer_bytes.saturating_mul(buffer_count)
    }

    /// Returns the ratio of bus bandwidth to algorithm bandwidth. With any algorithm, the busiest rank must send or
    /// receive at least this number of bytes for each byte of the buffer (nccl-tests, `doc/PERFORMANCE.md`).
    ///
    /// nccl-tests has no scan and no ping-pong. In a scan along a chain of ranks, each rank sends each byte once, as
    /// in a reduce.
    pub fn bus_factor(self, world: WorldSize) -> f64 {
        let n = f64::from(world.get());
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::ReduceScatter | Self::AllGather | Self::Gather | Self::Scatter | Self::AllToAll => {
                (n - 1.0) / n
            }
            Self::Reduce
            | Self::Broadcast
            | Self::Scan
            | Self::Exscan
            | Self::Barrier
            | Self::PingPong
            | Self::SendReceive => 1.0,
        }
    }
}

/// What nccl-tests, OSU's benchmarks and MPI call operations, without the prefix `osu_`, the suffix `_perf`, `_` and `-`.
/// `latency` and `bw` measure messages between two ranks.
const NAMES_ELSEWHERE: &[(&str, BenchOperation)] = &[
    ("bcast", BenchOperation::Broadcast),
    ("sendrecv", BenchOperation::SendReceive),
    ("reducescatterblock", BenchOperation::ReduceScatter),
    ("latency", BenchOperation::PingPong),
    ("bw", BenchOperation::PingPong),
];

impl std::fmt::Display for BenchOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for BenchOperation {
    type Err = String;

    /// Parses a name. Ignores case, `_` and `-`. Also accepts `sendrecv`, the name of `send_receive` in nccl-tests.
    fn from_str(text: &str) -> Result<Self, String> {
        let normalize = |name: &str| name.to_ascii_lowercase().replace(['_', '-'], "");
        let typed = normalize(text);
        let typed = if typed == "sendrecv" { "sendreceive".to_owned() } else { typed };
        let find =
            |name: &str| Self::ALL.iter().copied().find(|operation| normalize(operation.name()) == name);
        find(&typed).ok_or_else(|| {
            let stem = typed.trim_start_matches("osu").trim_end_matches("perf");
            let meant =
                NAMES_ELSEWHERE.iter().find(|(name, _)| *name == stem).map(|(_, operation)| *operation);
            if let Some(meant) = meant.or_else(|| find(stem)) {
                return format!("`{text}` is the name of another benchmark; did you mean `{meant}`?");
            }
            let names: Vec<&str> = Self::ALL.iter().map(|operation| operation.name()).collect();
            format!("`{text}` is not one of {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_match_nccl_tests() {
        let factor = |operation: BenchOperation, n| operation.bus_factor(WorldSize::new(n).unwrap());
        assert_eq!(factor(BenchOperation::AllReduce, 4), 1.5);
        for operation in [
            BenchOperation::ReduceScatter,
            BenchOperation::AllGather,
            BenchOperation::Gather,
            BenchOperation::Scatter,
            BenchOperation::AllToAll,
        ] {
            assert_eq!((factor(operation, 4), factor(operation, 2)), (0.75, 0.5), "{operation}");
        }
        for operation in [BenchOperation::Broadcast, BenchOperation::Reduce, BenchOperation::SendReceive] {
            assert_eq!(factor(operation, 8), 1.0, "{operation}");
        }
        assert_eq!(factor(BenchOperation::AllReduce, 1), 0.0);
    }

    #[test]
    fn names_and_other_spellings_are_parsed() {
        for &operation in BenchOperation::ALL {
            assert_eq!(operation.name().parse(), Ok(operation));
        }
        let cases = [
            ("allreduce", BenchOperation::AllReduce),
            ("reduce-scatter", BenchOperation::ReduceScatter),
            ("alltoall", BenchOperation::AllToAll),
            ("All-To-All", BenchOperation::AllToAll),
            ("sendrecv", BenchOperation::SendReceive),
            ("pingpong", BenchOperation::PingPong),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse(), Ok(expected));
        }
        assert!("message".parse::<BenchOperation>().is_err() && "".parse::<BenchOperation>().is_err());
        for (text, expected) in [
            ("all_reduce_perf", "all_reduce"),
            ("alltoall_perf", "all_to_all"),
            ("sendrecv_perf", "send_receive"),
            ("bcast", "broadcast"),
            ("osu_bcast", "broadcast"),
            ("osu_latency", "ping_pong"),
        ] {
            let error = text.parse::<BenchOperation>().unwrap_err();
            assert!(error.ends_with(&format!("did you mean `{expected}`?")), "{error}");
        }
    }
}
