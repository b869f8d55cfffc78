//! Hierarchical collectives, for groups on several hosts, if at least one host has several ranks (`docs/hierarchy.md`).
//!
//! The buffer is divided into slices, as many as the largest host has ranks. On each host, each slice has one *carrier*: the
//! rank that exchanges the slice with other hosts. Between hosts, each slice is a separate instance of an ordinary algorithm in
//! which each host has the role of a rank.

use std::ops::Range;

use super::partition::{Partition, blocks};
use super::two_step::TwoStepExchange;
use super::{CollectiveSpec, Schedule, cost, double_tree};
use crate::types::{Algorithm, Rank, WorldSize};

/// The bytes of each slice of a block that a host sends to another host in one step of the ring, if the buffer is long enough.
/// Meanwhile, the ranks of the host work on the next block in shared memory.
const CHUNK_BYTES: usize = 512 << 10;
/// The most blocks of a collective of several stages.
pub const BLOCKS_MAX: usize = 64;

/// A range of the elements of a buffer, and the stages that it passes one after another. Blocks may be in different stages at the
/// same time, but all ranks begin the stages of the blocks in the same order. A collective that is not hierarchical has one block
/// with one stage.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    pub elements: Range<usize>,
    pub stages: Vec<CollectiveStage>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CollectiveStage {
    /// A collective of the ranks of this host, in the shared memory with this number. Its ranks are numbered within the host.
    OnHost(usize, CollectiveSpec),
    /// Messages over links. The peers are ranks of the job.
    OverLinks(Schedule),
    /// An exchange of encoded elements over links. The peers are ranks of the job.
    Encoded(Box<TwoStepExchange>),
}

/// The placement of a group's ranks on hosts, as one of the ranks sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostLayout {
    /// The ranks of each host, in ascending order. The hosts are sorted by their lowest rank.
    hosts: Vec<Vec<Rank>>,
    /// The index of this rank's host.
    host: usize,
    /// The local rank: the index of this rank among the ranks of its host.
    local: usize,
    /// The bytes of each slice of a block that a host sends in one step of the ring. Tests use few, to have several blocks.
    pub chunk_bytes: usize,
}

impl HostLayout {
    /// Returns the layout for `rank`. Ranks r and s are on the same host if `host_ids[r] == host_ids[s]`. Returns `None` if there
    /// is only one host, or if each rank has a host to itself. Panics if `host_ids` has no entry for `rank`.
    pub fn new(host_ids: &[u32], rank: Rank) -> Option<Self> {
        let mut hosts: Vec<Vec<Rank>> = Vec::new();
        for (member, id) in (0..).map(Rank::new).zip(host_ids) {
            match hosts.iter_mut().find(|ranks| host_ids[ranks[0].index()] == *id) {
                Some(ranks) => ranks.push(member),
                None => hosts.push(vec![member]),
            }
        }
        let local_rank = |ranks: &Vec<Rank>| ranks.iter().position(|&member| member == rank);
        let place = hosts.iter().enumerate().find_map(|(host, ranks)| Some((host, local_rank(ranks)?)));
        let (host, local) = place.expect("`host_ids` has an entry for the rank");
        let is_useful = hosts.len() > 1 && hosts.len() < host_ids.len();
        is_useful.then_some(Self { hosts, host, local, chunk_bytes: CHUNK_BYTES })
    }

    pub fn local_ranks(&self) -> &[Rank] {
        &self.hosts[self.host]
    }

    pub fn host_count(&self) -> WorldSize {
        world_size(self.hosts.len())
    }

    pub fn slice_count(&self) -> WorldSize {
        world_size(self.hosts.iter().map(Vec::len).max().unwrap_or(1))
    }

    /// Returns the blocks of this rank for the operation `spec` on elements of `element_bytes` bytes. The peers are ranks of the
    /// group. Panics if the operation has no [hierarchical algorithm](super::cost::has_hierarchical_algorithm).
    pub fn blocks(&self, spec: &CollectiveSpec, element_bytes: usize) -> Vec<Block> {
        self.in_blocks(spec, element_bytes, |spec| {
            let slice_elements = spec.count().div_ceil(self.slice_count().as_usize());
            let slice_bytes = slice_elements.saturating_mul(element_bytes) as u64;
            let algorithm = cost::cheapest_between_hosts(spec.operation(), self.host_count(), slice_bytes);
            let message_elements = match algorithm {
                Algorithm::DoubleTree => double_tree::block_bytes(slice_bytes) as usize / element_bytes,
                _ => slice_elements,
            };
            self.stages(spec, algorithm, message_elements.max(1))
        })
    }

    /// Divides the operation `spec` into blocks. `stages` returns the stages of the operation on one block.
    fn in_blocks(
        &self,
        spec: &CollectiveSpec,
        element_bytes: usize,
        stages: impl Fn(&CollectiveSpec) -> Vec<CollectiveStage>,
    ) -> Vec<Block> {
        let hosts_and_slices = self.host_count().as_usize() * self.slice_count().as_usize();
        let elements_max = hosts_and_slices * (self.chunk_bytes / element_bytes);
        let block = |elements: Range<usize>| {
            let stages = stages(&spec.of_block(elements.len(), spec.root()));
            Block { elements, stages }
        };
        blocks(0..spec.count(), elements_max.max(spec.count().div_ceil(BLOCKS_MAX))).map(block).collect()
    }

    /// Returns the stages of this rank for the operation `spec`. `algorithm` is the algorithm between hosts. If it divides a
    /// slice into blocks, each block has `block` elements.
    pub fn stages(&self, spec: &CollectiveSpec, algorithm: Algorithm, block: usize) -> Vec<CollectiveStage> {
        let between_hosts = self.schedule_between_hosts(spec, algorithm, block);
        self.with_stages_on_host(spec, CollectiveStage::OverLinks(between_hosts))
    }

    /// Returns the stages of this rank. A rank that is alone on its host has only the stage between hosts.
    fn with_stages_on_host(
        &self,
        spec: &CollectiveSpec,
        between_hosts: CollectiveStage,
    ) -> Vec<CollectiveStage> {
        if self.local_ranks().len() == 1 {
            return vec![between_hosts];
        }
        let count = spec.count();
        let local_root = self.local_ranks().iter().position(|&rank| rank == spec.root());
        let parts = self.carried_parts(count);
        let (gather, barrier) = (CollectiveSpec::AllGather(parts.clone()), CollectiveSpec::Barrier);
        let (first, last) = match spec {
            CollectiveSpec::Barrier => (barrier.clone(), barrier),
            CollectiveSpec::AllReduce { .. } => (CollectiveSpec::ReduceScatter(parts), gather),
            // In the third stage, all ranks of the root's host get the result, although only the root needs it.
            CollectiveSpec::Reduce { .. } => {
                (CollectiveSpec::ReduceScatter(parts), if local_root.is_some() { gather } else { barrier })
            }
            CollectiveSpec::Broadcast { .. } => match local_root {
                Some(local) => (CollectiveSpec::Broadcast { count, root: Rank::new(local as u32) }, barrier),
                None => (barrier, gather),
            },
            _ => unreachable!("no hierarchy for {spec:?}"),
        };
        vec![CollectiveStage::OnHost(0, first), between_hosts, CollectiveStage::OnHost(1, last)]
    }

    /// Returns the blocks of this rank for an all-reduce in which the carriers encode what they send to other hosts. The peers
    /// are ranks of the group. `encoded_words` returns the number of words of an encoded chunk.
    pub fn encoded_blocks(
        &self,
        spec: &CollectiveSpec,
        encoded_words: &dyn Fn(usize) -> usize,
    ) -> Vec<Block> {
        self.in_blocks(spec, size_of::<f32>(), |spec| {
            let mut exchange = TwoStepExchange { second: Some(Schedule::default()), ..Default::default() };
            let slices = Partition::even(spec.count(), self.slice_count());
            for slice in self.carried_slices(self.local) {
                let carriers: Vec<Rank> =
                    (0..self.hosts.len()).map(|host| self.carrier_of_slice(host, slice)).collect();
                let range = slices.range(Rank::new(slice as u32));
                let partition = Partition::even(range.len(), self.host_count());
                exchange.add_slice(&partition, (&carriers, self.host), range.start, encoded_words);
            }
            self.with_stages_on_host(spec, CollectiveStage::Encoded(Box::new(exchange)))
        })
    }

    /// Returns the schedule that reduces or copies each slice of this rank among the carriers of the slice on all hosts.
    fn schedule_between_hosts(&self, spec: &CollectiveSpec, algorithm: Algorithm, block: usize) -> Schedule {
        let root_host = self.hosts.iter().position(|ranks| ranks.contains(&spec.root()));
        let root = Rank::new(root_host.unwrap_or_default() as u32);
        let slices = Partition::even(spec.count(), self.slice_count());
        let host_as_rank = (self.host_count(), Rank::new(self.host as u32));
        let mut all = Schedule::default();
        // In a barrier, only one rank of each host exchanges messages.
        let is_barrier = *spec == CollectiveSpec::Barrier;
        let carried = self.carried_slices(self.local);
        for slice in carried.filter(|&slice| slice == 0 || !is_barrier) {
            let range = slices.range(Rank::new(slice as u32));
            let mut schedule =
                spec.of_block(range.len(), root).schedule(algorithm, host_as_rank, block, false);
            schedule.rename_peers(|host| self.carrier_of_slice(host.index(), slice));
            all.append(schedule, range.start);
        }
        all
    }

    /// Returns the indices of the slices whose carrier is the rank with index `local` on this host.
    fn carried_slices(&self, local: usize) -> Range<usize> {
        let (slices, ranks) = (self.slice_count().as_usize(), self.local_ranks().len());
        (local * slices).div_ceil(ranks)..((local + 1) * slices).div_ceil(ranks)
    }

    fn carrier_of_slice(&self, host: usize, slice: usize) -> Rank {
        self.hosts[host][slice * self.hosts[host].len() / self.slice_count().as_usize()]
    }

    /// Divides the buffer into one part for each rank of this host: the elements that the rank carries.
    fn carried_parts(&self, count: usize) -> Partition {
        let slices = Partition::even(count, self.slice_count());
        let elements = |slice: usize| slices.range(Rank::new(slice as u32)).len();
        let carried = |local| self.carried_slices(local).map(elements).sum();
        let counts: Vec<usize> = (0..self.local_ranks().len()).map(carried).collect();
        Partition::from_counts(&counts).expect("the sum of the counts is the length of the buffer")
    }
}

fn world_size(ranks: usize) -> WorldSize {
    WorldSize::new(ranks as u32).expect("every host has a rank")
}
