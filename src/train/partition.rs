//! Divides the parameters of a model over the ranks of a job.
//!
//! A part is the set of parameters that a rank holds. Each parameter belongs to exactly one part. Several ranks may
//! hold the same part. These ranks are the replicas of the part. If the strategy does not divide the model, there is
//! one part, and all ranks are its replicas.
//!
//! With `--shard-optimizer`, each rank holds all parameters, but the optimizer's state for only some of them. A
//! second partition says which rank holds which state.

use std::ops::Range;

use super::bucket_ranges::{BucketSizes, chunk_of_bucket, overlap};
use super::config::Config;
use super::model::{Network, check_tensor_split, parameter_ranges_of_rank};
use super::runtime::Runtime;
use super::strategies::{StrategySpec, bucket_sizes, pipeline_stages};
use crate::group::{Error, Group};
use crate::types::{Rank, WorldSize};

/// The tag of the messages that carry parts.
const MODEL_PART_TAG: u32 = 3;

/// The parts of a model, and the part that this rank holds.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ModelPartition {
    /// The ranges of the parameters of each part, in increasing order. A rank keeps the parameters of its part in one
    /// vector, in the order of the ranges.
    parts: Vec<Vec<Range<usize>>>,
    /// The number of parameters of the whole model.
    parameter_count: usize,
    /// The part that this rank holds.
    place: PartPlace,
    /// How the ranks divide the state of the optimizer. `None` if the state is divided like the parameters.
    optimizer_shards: Option<Box<Self>>,
}

/// The part that a rank holds, and the index of the rank among the replicas of this part. The replicas of a part sum its
/// gradients. The replicas are adjacent ranks, because adjacent ranks are often on the same host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PartPlace {
    /// The index of the part.
    pub(crate) part: usize,
    /// The index of the rank among the replicas of the part.
    pub(crate) replica: Rank,
    /// The number of replicas of each part.
    pub(crate) replicas: WorldSize,
}

impl PartPlace {
    /// Returns the place of `rank` if each part has `replicas` replicas.
    fn new(rank: Rank, replicas: WorldSize) -> Self {
        let replica = Rank::new(rank.get() % replicas.get());
        Self { part: rank.index() / replicas.as_usize(), replica, replicas }
    }

    /// Returns the rank that holds part `part` and processes the same samples as this rank.
    pub(crate) fn rank_with_part(self, part: usize) -> Rank {
        Rank::new(part as u32 * self.replicas.get() + self.replica.get())
    }
}

impl ModelPartition {
    /// Divides the model and the state of the optimizer as `config` says.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub(crate) fn of_run(config: &Config, network: &Network, group: &Group) -> Result<Self, String> {
        let (rank, size) = (group.rank(), group.size());
        let mut partition = Self::new(config.strategy, network, (rank, size))?;
        if config.shard_optimizer && size != WorldSize::ONE {
            partition.shard_optimizer(bucket_sizes(config, network.parameter_count(), size), (rank, size));
        }
        Ok(partition)
    }

    /// Divides the model as `strategy` says.
    ///
    /// # Errors
    ///
    /// If the strategy cannot use this number of ranks or this model. The sentence says what to do.
    pub(crate) fn new(
        strategy: StrategySpec,
        network: &Network,
        (rank, size): (Rank, WorldSize),
    ) -> Result<Self, String> {
        let parameter_count = network.parameter_count();
        let whole = std::iter::once(0..parameter_count).collect();
        let (parts, replicas) = match strategy {
            StrategySpec::Pipeline { .. } | StrategySpec::Hybrid { .. } => {
                let (layers, replicas) = pipeline_stages(strategy, network.stage(), size)?;
                let range = |layers| std::iter::once(network.stage().parameter_range(layers)).collect();
                (layers.into_iter().map(range).collect(), replicas)
            }
            StrategySpec::Tensor => {
                check_tensor_split(network.stage(), size)?;
                let ranges = |rank| parameter_ranges_of_rank(network.stage(), (rank, size));
                (size.ranks().map(ranges).collect(), WorldSize::ONE)
            }
            _ => (vec![whole], size),
        };
        let place = PartPlace::new(rank, replicas);
        Ok(Self { parts, parameter_count, place, optimizer_shards: None })
    }

    /// Divides the state of the optimizer over all ranks. `sizes` are the sizes of the buckets. A reduce-scatter
    /// gives each rank one chunk of the bucket's gradients. The rank holds the state for this chunk.
    ///
    /// If there are several buckets, `sizes` must be multiples of the number of ranks, so that a rank's part
    /// is as long as its chunk of the vector of all parameters.
    fn shard_optimizer(&mut self, sizes: BucketSizes, (rank, size): (Rank, WorldSize)) {
        let chunks = |rank| {
            let mut chunks: Vec<_> = sizes
                .ranges(self.parameter_count)
                .map(|bucket| chunk_of_bucket(&bucket, (rank, size)))
                .collect();
            chunks.reverse();
            chunks
        };
        self.optimizer_shards = Some(Box::new(Self {
            parts: size.ranks().map(chunks).collect(),
            parameter_count: self.parameter_count,
            place: PartPlace::new(rank, WorldSize::ONE),
            optimizer_shards: None,
        }));
    }

    /// Returns whether the ranks divide the state of the optimizer, but not the parameters.
    pub(crate) fn has_optimizer_shards(&self) -> bool {
        self.optimizer_shards.is_some()
    }

    /// Returns the partition of the optimizer's state. This is the partition of the parameters if the state is divided like
    /// the parameters.
    pub(crate) fn optimizer_partition(&self) -> &Self {
        self.optimizer_shards.as_deref().unwrap_or(self)
    }

    /// Returns the ranges of the parameters of this rank's part, in increasing order.
    pub(crate) fn own_ranges(&self) -> &[Range<usize>] {
        &self.parts[self.place.part]
    }

    /// Returns which part this rank holds, and which replica of the part it is.
    pub(crate) fn place(&self) -> PartPlace {
        self.place
    }

    /// Returns whether each rank holds all parameters.
    pub(crate) fn is_undivided(&self) -> bool {
        self.parts.len() == 1
    }

    /// Returns whether each rank holds all parameters and the whole state of the optimizer.
    pub(crate) fn has_whole_state(&self) -> bool {
        self.optimizer_partition().is_undivided()
    }

    /// Returns the number of parameters that this rank holds.
    pub(crate) fn own_parameter_count(&self) -> usize {
        self.part_parameter_count(self.place.part)
    }

    fn part_parameter_count(&self, part: usize) -> usize {
        self.parts[part].iter().map(Range::len).sum()
    }

    /// Returns the range of a tensor in this rank's vector of parameters. `tensor` is its range in the vector of the whole
    /// model. If this rank has no value of the tensor, the range is empty.
    pub(crate) fn own_range_of_tensor(&self, tensor: &Range<usize>) -> Range<usize> {
        let held = |range: &Range<usize>| -> usize {
            self.own_ranges().iter().map(|own| overlap(own, range).len()).sum()
        };
        let start = held(&(0..tensor.start));
        start..start + held(tensor)
    }

    /// Returns the initial parameters of this rank. If the model is divided, allocates temporary memory for only one
    /// layer at a time.
    pub(crate) fn initial_parameters(&self, network: &Network, seed: u64) -> Vec<f32> {
        if self.is_undivided() {
            return network.initialize(seed);
        }
        let mut own = Vec::with_capacity(self.own_parameter_count());
        let mut start = 0;
        for index in 0..network.stage().layers().len() {
            let values = network.initialize_layer(index, seed);
            let layer = start..start + values.len();
            for range in self.own_ranges() {
                let common = overlap(range, &layer);
                own.extend_from_slice(&values[common.start - start..common.end - start]);
            }
            start = layer.end;
        }
        own
    }

    /// Collects a vector with one value for each parameter of the model on rank 0. `own` holds the values of this
    /// rank's part. Rank 0 returns the vector, and all other ranks return `None`. All ranks must call this function.
    pub(crate) fn gather_on_rank_0(
        &self,
        runtime: &mut dyn Runtime,
        own: &[f32],
    ) -> Result<Option<Vec<f32>>, Error> {
        self.gather_replica_on_rank_0(runtime, own, Rank::ZERO)
    }

    /// Does the same with the values of the ranks that have the index `replica` among the replicas of their parts.
    pub(crate) fn gather_replica_on_rank_0(
        &self,
        runtime: &mut dyn Runtime,
        own: &[f32],
        replica: Rank,
    ) -> Result<Option<Vec<f32>>, Error> {
        let (rank, _) = runtime.rank_and_size();
        let is_sender = self.place.replica == replica;
        if rank != Rank::ZERO {
            if is_sender {
                runtime.start_send(own.to_vec(), Rank::ZERO, MODEL_PART_TAG)?.wait()?;
            }
            return Ok(None);
        }
        let mut whole = vec![0.0; self.parameter_count];
        for part in 0..self.parts.len() {
            if part == 0 && is_sender {
                self.copy_part_into_whole(0, own, &mut whole);
                continue;
            }
            let sender = PartPlace { replica, ..self.place }.rank_with_part(part);
            let values = runtime
                .start_receive(vec![0.0; self.part_parameter_count(part)], sender, MODEL_PART_TAG)?
                .wait()?;
            self.copy_part_into_whole(part, &values, &mut whole);
        }
        Ok(Some(whole))
    }

    /// Copies each value to its position in the vector of the whole model. `parts` holds the values of all parts, one
    /// part after the other.
    pub(crate) fn copy_parts_into_whole(&self, parts: &[f32], whole: &mut [f32]) {
        let mut rest = parts;
        for part in 0..self.parts.len() {
            let (values, later_values) = rest.split_at(self.part_parameter_count(part));
            self.copy_part_into_whole(part, values, whole);
            rest = later_values;
        }
    }

    /// Copies the values of part `part` to their positions in the vector of the whole model.
    fn copy_part_into_whole(&self, part: usize, values: &[f32], whole: &mut [f32]) {
        let mut rest = values;
        for range in &self.parts[part] {
            let (range_values, later_values) = rest.split_at(range.len());
            whole[range.clone()].copy_from_slice(range_values);
            rest = later_values;
        }
    }

    /// Replaces `vector` by this rank's part of the vector of rank 0. On rank 0, `vector` has one value for each
    /// parameter of the model. All other ranks pass a vector of the length of their part. All ranks must call this
    /// function.
    pub(crate) fn distribute_from_rank_0(
        &self,
        runtime: &mut dyn Runtime,
        vector: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let vectors = [std::mem::take(vector)];
        *vector = self.distribute_replicas_from_rank_0(runtime, &vectors)?;
        Ok(())
    }

    /// Returns this rank's part of one of the vectors of rank 0, which have one value for each parameter of the model. The
    /// ranks with index i among the replicas of their parts get the vector i, or the last vector if there are fewer. All ranks
    /// must call this function.
    pub(crate) fn distribute_replicas_from_rank_0(
        &self,
        runtime: &mut dyn Runtime,
        vectors: &[Vec<f32>],
    ) -> Result<Vec<f32>, Error> {
        let (rank, size) = runtime.rank_and_size();
        if rank != Rank::ZERO {
            let own = vec![0.0; self.own_parameter_count()];
            return runtime.start_receive(own, Rank::ZERO, MODEL_PART_TAG)?.wait();
        }
        for other in size.ranks().skip(1) {
            let PartPlace { part, replica, .. } = PartPlace::new(other, self.place.replicas);
            let vector = &vectors[replica.index().min(vectors.len() - 1)];
            runtime.start_send(self.select_part(part, vector), other, MODEL_PART_TAG)?.wait()?;
        }
        Ok(self.select_part(0, &vectors[0]))
    }

    /// Returns the values of part `part` from the vector of the whole model.
    fn select_part(&self, part: usize, whole: &[f32]) -> Vec<f32> {
        self.parts[part].iter().flat_map(|range| &whole[range.clone()]).copied().collect()
    }

    /// Returns a sentence for the user that says what each rank holds. Returns `None` if each rank holds everything.
    pub(crate) fn describe_part_sizes(&self) -> Option<String> {
        let what = match &self.optimizer_shards {
            Some(_) => "the state of the optimizer for a part of the model",
            _ if self.is_undivided() => return None,
            _ => "a part of the model",
        };
        let held = self.optimizer_partition();
        let counts = || (0..held.parts.len()).map(|part| held.part_parameter_count(part));
        let (least, most) = (counts().min().unwrap_or_default(), counts().max().unwrap_or_default());
        let total = self.parameter_count;
        Some(format!("each rank holds {what}: from {least} to {most} of the {total} parameters"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::model::Loss;
    use crate::train::range_of_rank;

    /// The parts must be disjoint, cover all parameters, and be as long as the chunks of an all-gather of all parameters.
    #[test]
    fn shards_of_the_optimizer_are_as_long_as_chunks_of_all_parameters() {
        let network = Network::new(&"mlp:9".parse().unwrap(), 8, 1, Loss::CrossEntropy).unwrap();
        let count = network.parameter_count();
        for (ranks, first, others) in [
            (1, 3, 3),
            (2, 10, 10),
            (3, 9, 9),
            (3, 3, 12),
            (4, 88, 88),
            (5, usize::MAX, usize::MAX),
            (200, 200, 200),
            (100, 91, 91),
        ] {
            let sizes = BucketSizes { first, others };
            let size = WorldSize::new(ranks).unwrap();
            let place = (Rank::new(ranks - 1), size);
            let mut whole = ModelPartition::new(StrategySpec::AllReduce, &network, place).unwrap();
            whole.shard_optimizer(sizes, place);
            let shards = whole.optimizer_partition();
            for (part, rank) in size.ranks().enumerate() {
                let expected = range_of_rank(count, rank, size).len();
                assert_eq!(shards.part_parameter_count(part), expected, "{ranks} ranks, {sizes:?}");
            }
            let numbers: Vec<f32> = (0..count).map(|number| number as f32).collect();
            let parts: Vec<f32> =
                (0..ranks as usize).flat_map(|part| shards.select_part(part, &numbers)).collect();
            let mut found = vec![-1.0; count];
            shards.copy_parts_into_whole(&parts, &mut found);
            assert_eq!(found, numbers, "{ranks} ranks, {sizes:?}");
        }
    }
}
