//! The hosts of a simulated job: the memory that the ranks of a host share, and what connects the ranks of a group.

use std::sync::Arc;

use crate::Rank;
use crate::runtime::driver::RoundsKey;
use crate::runtime::host_rounds::HostRounds;
use crate::runtime::measurements::Meter;
use crate::schedule::cost::has_hierarchical_algorithm;
use crate::schedule::hierarchy::HostLayout;
use crate::schedule::topology::Medium;
use crate::shm::{HostMemoryLayout, RoundsSize, ShmRounds};
use crate::simulation::memory::SimMemory;
use crate::simulation::program::{Members, SimCall};
use crate::types::{Algorithm, HOSTS_GROUP_BIT, Operation, ReduceOp};

/// Each part of the memory begins at a multiple of this number of bytes.
const PART_ALIGNMENT: usize = 128;

/// What the ranks of a host use their memory for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryUse {
    /// Whether the ranks have queues.
    pub(crate) has_queues: bool,
    /// The numbers of cells and of bytes of a queue.
    pub(crate) queue_size: (usize, usize),
    /// The length of a slot in bytes; `None` if all collectives go over links.
    pub(crate) slot_bytes: Option<usize>,
    /// The bytes of a slice of a block in a hierarchical collective.
    pub(crate) chunk_bytes: usize,
}

/// A group, as one of its ranks sees it.
#[derive(Clone)]
pub(crate) struct SimGroup {
    pub(crate) members: Members,
    pub(crate) medium: SimMedium,
}

/// What connects the ranks of a group.
#[derive(Clone)]
pub(crate) enum SimMedium {
    Links,
    SharedMemory,
    Hosts(HostLayout),
}

impl SimGroup {
    /// Returns a group as `rank` sees it. Ranks r and s share memory if `host_ids[r] == host_ids[s]`.
    pub(crate) fn new(members: &[Rank], host_ids: &[u32], rank: Rank, memory_use: MemoryUse) -> Self {
        let own = members.iter().position(|&member| member == rank);
        let member_hosts: Vec<u32> = members.iter().map(|member| host_ids[member.index()]).collect();
        let medium = match own {
            Some(own) if memory_use.slot_bytes.is_some() && members.len() > 1 => {
                if member_hosts.iter().all(|host| *host == member_hosts[0]) {
                    SimMedium::SharedMemory
                } else {
                    let layout = HostLayout::new(&member_hosts, Rank::new(own as u32));
                    layout.map_or(SimMedium::Links, |mut layout| {
                        layout.chunk_bytes = memory_use.chunk_bytes;
                        SimMedium::Hosts(layout)
                    })
                }
            }
            _ => SimMedium::Links,
        };
        Self { members: members.to_vec(), medium }
    }

    /// Returns a call with the algorithm that it has in this group. The medium of a group is the same on all its ranks.
    pub(crate) fn with_algorithm(&self, call: SimCall) -> SimCall {
        let algorithm = match &self.medium {
            _ if call.operation == Operation::Message => call.algorithm,
            SimMedium::SharedMemory
                if call.operation == Operation::AllReduce && call.count.is_multiple_of(3) =>
            {
                Algorithm::OneShot
            }
            SimMedium::SharedMemory => Algorithm::Direct,
            SimMedium::Hosts(_) if has_hierarchical_algorithm(call.operation) && call.count % 5 != 1 => {
                Algorithm::Hierarchy
            }
            SimMedium::Hosts(_) | SimMedium::Links => call.algorithm,
        };
        let can_be_compressed = call.operation == Operation::AllReduce
            && call.op != ReduceOp::Average
            && self.members.len() > 1
            && !matches!(self.medium, SimMedium::SharedMemory);
        if can_be_compressed && call.count % 4 == 2 {
            let is_hierarchical = algorithm == Algorithm::Hierarchy;
            let algorithm = if is_hierarchical { algorithm } else { Algorithm::Direct };
            return SimCall { algorithm, is_compressed: true, ..call };
        }
        SimCall { algorithm, ..call }
    }

    /// Returns the medium of a call; `None` if its schedule over links is not planned as in a job.
    pub(crate) fn medium_of(&self, call: SimCall) -> Option<Medium<'_>> {
        match &self.medium {
            _ if call.operation == Operation::Message => None,
            SimMedium::SharedMemory => Some(Medium::SharedMemory),
            SimMedium::Hosts(layout) if call.algorithm == Algorithm::Hierarchy => Some(Medium::Hosts(layout)),
            SimMedium::Hosts(_) | SimMedium::Links => call.is_compressed.then_some(Medium::Links),
        }
    }
}

/// A host with several ranks, which share memory.
pub(crate) struct SimulatedHost {
    pub(crate) ranks: Members,
    /// The whole memory.
    pub(crate) memory: Arc<SimMemory>,
    /// The memory of the queues, and its layout.
    pub(crate) queues: Option<(Arc<SimMemory>, HostMemoryLayout)>,
    rounds: Vec<SharedRounds>,
}

/// The memory of rounds.
struct SharedRounds {
    key: RoundsKey,
    /// The ranks that share the memory.
    members: Members,
    size: RoundsSize,
    memory: Arc<SimMemory>,
}

impl SimulatedHost {
    /// Creates the memory of the host on which the ranks `ranks` are.
    #[expect(clippy::arc_with_non_send_sync, reason = "all ranks are simulated in one thread")]
    pub(crate) fn new(ranks: &[Rank], groups: &[Members], memory_use: MemoryUse, seed: u64) -> Self {
        let (cell_count, arena_bytes) = memory_use.queue_size;
        let layout = HostMemoryLayout::with_short_queues(ranks.len(), cell_count, arena_bytes);
        let mut end = if memory_use.has_queues { layout.bytes() } else { 0 };
        let mut place = |bytes: usize| {
            let start = end.next_multiple_of(PART_ALIGNMENT);
            end = start + bytes;
            start
        };
        let mut places = Vec::new();
        for (group, members) in (0..).zip(groups) {
            let local: Members = members.iter().copied().filter(|member| ranks.contains(member)).collect();
            let Some(slot_bytes) = memory_use.slot_bytes.filter(|_| local.len() > 1) else { continue };
            let size = RoundsSize { ranks: local.len(), slot_bytes };
            let keys = if local.len() == members.len() {
                vec![(group, 0)]
            } else {
                vec![(group | HOSTS_GROUP_BIT, 0), (group | HOSTS_GROUP_BIT, 1)]
            };
            places.extend(keys.into_iter().map(|key| (key, local.clone(), size, place(size.bytes()))));
        }
        let memory = Arc::new(SimMemory::new(end, seed));
        let part = |start, bytes| Arc::new(memory.part(start, bytes));
        let rounds = places.into_iter().map(|(key, members, size, start)| {
            let memory = part(start, size.bytes());
            SharedRounds { key, members, size, memory }
        });
        let rounds = rounds.collect();
        let queues = memory_use.has_queues.then(|| (part(0, layout.bytes()), layout));
        Self { ranks: ranks.to_vec(), queues, rounds, memory }
    }

    /// Returns the rounds of all groups in which `rank` shares memory.
    pub(crate) fn rounds_of(
        &self,
        rank: Rank,
    ) -> impl Iterator<Item = (RoundsKey, Box<HostRounds<SimMemory>>)> + '_ {
        self.rounds.iter().filter_map(move |SharedRounds { key, members, size, memory }| {
            let own = members.iter().position(|&member| member == rank)?;
            let rounds = ShmRounds::new(Arc::clone(memory), *size, own);
            let members = members.iter().copied().collect();
            Some((*key, Box::new(HostRounds::new(rounds, members, Meter::default()))))
        })
    }
}
