//! The plan of a collective among the ranks of a group, which depends on what connects them.

use super::hierarchy::{BLOCKS_MAX, Block, CollectiveStage, HostLayout};
use super::partition::{Partition, blocks};
use super::two_step::TwoStepExchange;
use super::{CollectiveSpec, Schedule, double_tree};
use crate::types::{Algorithm, Rank, WorldSize};

/// The most blocks of an all-reduce on the ring. The limit keeps the schedule of a long buffer small.
const RING_BLOCKS_MAX: usize = 512;
/// The most bytes, before encoding, of each rank's chunk of a block in an exchange of encoded elements.
const ENCODED_CHUNK_BYTES_MAX: usize = 512 << 10;

/// What connects the ranks of a group.
#[derive(Clone, Copy, Debug)]
pub enum Medium<'a> {
    Links,
    /// Memory that all ranks share.
    SharedMemory,
    /// Memory that the ranks of each host share, and links between hosts.
    Hosts(&'a HostLayout),
}

/// A group, as one of its ranks sees it.
#[derive(Clone, Copy, Debug)]
pub struct Topology<'a> {
    pub world: WorldSize,
    pub rank: Rank,
    /// The ranks of the job that are the ranks of the group.
    pub members: &'a [Rank],
    pub medium: Medium<'a>,
    /// The bytes of each rank's chunk of a block in a ring all-reduce; for encoded elements, the most bytes before encoding.
    pub chunk_bytes: usize,
}

impl Topology<'_> {
    /// Returns the plan of this rank for a collective with elements of `element_bytes` bytes. `in_rank_order` must be true if
    /// the reduction does not commute. A partition must have one part for each rank.
    pub fn plan(
        &self,
        spec: &CollectiveSpec,
        algorithm: Algorithm,
        in_rank_order: bool,
        element_bytes: usize,
    ) -> Vec<Block> {
        let whole = |stage| vec![Block { elements: 0..spec.count(), stages: vec![stage] }];
        let mut planned = match self.medium {
            Medium::SharedMemory => whole(CollectiveStage::OnHost(0, spec.clone())),
            Medium::Hosts(layout) => layout.blocks(spec, element_bytes),
            Medium::Links => {
                let block = self.block_elements(spec.count(), algorithm, element_bytes);
                let schedule = spec.schedule(algorithm, (self.world, self.rank), block, in_rank_order);
                whole(CollectiveStage::OverLinks(schedule))
            }
        };
        self.rename_peers(&mut planned);
        planned
    }

    /// Returns the plan of this rank for an all-reduce or a reduce-scatter in which the ranks encode what they send over links.
    /// `encoded_words` returns the number of words of an encoded chunk. The ranks must not all share memory.
    pub fn plan_encoded(&self, spec: &CollectiveSpec, encoded_words: &dyn Fn(usize) -> usize) -> Vec<Block> {
        let participants: Vec<Rank> = self.world.ranks().collect();
        let own = (&participants[..], self.rank.index());
        let block = |elements, partition: &Partition, second| {
            let mut exchange = TwoStepExchange { second, ..TwoStepExchange::default() };
            exchange.add_slice(partition, own, 0, encoded_words);
            Block { elements, stages: vec![CollectiveStage::Encoded(Box::new(exchange))] }
        };
        let mut planned = match (spec, self.medium) {
            (CollectiveSpec::ReduceScatter(partition), _) => vec![block(0..spec.count(), partition, None)],
            (_, Medium::Hosts(layout)) => layout.encoded_blocks(spec, encoded_words),
            _ => {
                // While a block is sent, the next one is encoded.
                let chunk_elements = self.chunk_bytes.min(ENCODED_CHUNK_BYTES_MAX) / size_of::<f32>();
                let elements_max = self.world.as_usize() * chunk_elements;
                let elements_max = elements_max.max(spec.count().div_ceil(BLOCKS_MAX));
                let partition = |count| Partition::even(count, self.world);
                blocks(0..spec.count(), elements_max)
                    .map(|range| block(range.clone(), &partition(range.len()), Some(Schedule::default())))
                    .collect()
            }
        };
        self.rename_peers(&mut planned);
        planned
    }

    /// Replaces the ranks of the group by the ranks of the job.
    fn rename_peers(&self, blocks: &mut [Block]) {
        let name = |peer: Rank| self.members[peer.index()];
        for stage in blocks.iter_mut().flat_map(|block| &mut block.stages) {
            match stage {
                CollectiveStage::OnHost(..) => {}
                CollectiveStage::OverLinks(schedule) => schedule.rename_peers(name),
                CollectiveStage::Encoded(exchange) => exchange.rename_peers(name),
            }
        }
    }

    /// Returns the number of elements of a message in a double tree, or of a block of the ring, in a buffer of `count` elements.
    fn block_elements(&self, count: usize, algorithm: Algorithm, element_bytes: usize) -> usize {
        if algorithm == Algorithm::DoubleTree {
            let bytes = double_tree::block_bytes(count.saturating_mul(element_bytes) as u64);
            return (bytes as usize / element_bytes).max(1);
        }
        let block_elements = self.world.as_usize() * (self.chunk_bytes / element_bytes);
        block_elements.max(count.div_ceil(RING_BLOCKS_MAX))
    }
}
