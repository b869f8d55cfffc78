//! Divides the parameters of a model over the ranks of a job.
//!
//! A part is a set of parameters that one rank holds. Each parameter belongs to exactly one part. Several ranks may
//! hold the same part. These ranks are the replicas of the part. If the strategy does not divide the model, there is
//! one part, and all ranks are replicas.

use std::ops::Range;

use super::model::{Network, check_tensor_split, tensor_ranges};
use super::runtime::Runtime;
use super::strategies::{StrategySpec, pipeline_stages};
use crate::group::Error;
use crate::types::{Rank, WorldSize};

/// The tag of the messages that carry parts.
const MODEL_PART_TAG: u32 = 3;

/// The parts of a model, and the part that this rank holds.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ModelPartition {
    /// The ranges of the parameters of each part, in increasing order. A rank keeps the parameters of its part in one
    /// vector, in the order of the ranges.
    parts: Vec<Vec<Range<usize>>>,
    parameter_count: usize,
    place: PartPlace,
}

/// The part that a rank holds, and the index of the rank among the replicas of this part. Replicas of a part have
/// adjacent ranks, so that mostly ranks of the same host sum the gradients of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PartPlace {
    pub(crate) part: usize,
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
                let ranges = |rank| tensor_ranges(network.stage(), (rank, size));
                (size.ranks().map(ranges).collect(), WorldSize::ONE)
            }
            _ => (vec![whole], size),
        };
        Ok(Self { parts, parameter_count, place: PartPlace::new(rank, replicas) })
    }

    /// Returns which part this rank holds, and which replica of the part it is.
    pub(crate) fn place(&self) -> PartPlace {
        self.place
    }

    /// Returns whether each rank holds the whole model.
    pub(crate) fn is_undivided(&self) -> bool {
        self.parts.len() == 1
    }

    /// Returns the number of parameters that this rank holds.
    pub(crate) fn own_parameter_count(&self) -> usize {
        self.part_parameter_count(self.place.part)
    }

    fn part_parameter_count(&self, part: usize) -> usize {
        self.parts[part].iter().map(Range::len).sum()
    }

    /// Returns the range of a tensor in this rank's vector of parameters. `tensor` is its range in the vector of the whole
    /// model. Returns `None` if this rank holds no part of the tensor.
    pub(crate) fn own_tensor(&self, tensor: &Range<usize>) -> Option<Range<usize>> {
        let held = |range: &Range<usize>| -> usize {
            self.parts[self.place.part].iter().map(|own| overlap(own, range).len()).sum()
        };
        let (start, count) = (held(&(0..tensor.start)), held(tensor));
        (count > 0).then_some(start..start + count)
    }

    /// Returns the initial parameters of this rank. If the model is divided, allocates temporary memory for only one
    /// layer at a time.
    pub(crate) fn initialize(&self, network: &Network, seed: u64) -> Vec<f32> {
        if self.is_undivided() {
            return network.initialize(seed);
        }
        let mut own = Vec::with_capacity(self.own_parameter_count());
        let mut start = 0;
        for index in 0..network.stage().layers().len() {
            let values = network.initialize_layer(index, seed);
            let layer = start..start + values.len();
            for range in &self.parts[self.place.part] {
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
        let PartPlace { part, replica, .. } = self.place;
        if replica != Rank::ZERO {
            return Ok(None);
        }
        if part > 0 {
            runtime.start_send(own.to_vec(), Rank::ZERO, MODEL_PART_TAG)?.wait()?;
            return Ok(None);
        }
        let mut whole = vec![0.0; self.parameter_count];
        self.copy_part_into_whole(0, own, &mut whole);
        for part in 1..self.parts.len() {
            let sender = self.place.rank_with_part(part);
            let values = runtime
                .start_receive(vec![0.0; self.part_parameter_count(part)], sender, MODEL_PART_TAG)?
                .wait()?;
            self.copy_part_into_whole(part, &values, &mut whole);
        }
        Ok(Some(whole))
    }

    /// Copies the values of part `part` to their positions in the vector of the whole model.
    fn copy_part_into_whole(&self, part: usize, values: &[f32], whole: &mut [f32]) {
        let mut rest = values;
        for range in &self.parts[part] {
            let (first, others) = rest.split_at(range.len());
            whole[range.clone()].copy_from_slice(first);
            rest = others;
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
        let (rank, size) = runtime.rank_and_size();
        if rank != Rank::ZERO {
            *vector = runtime.start_receive(std::mem::take(vector), Rank::ZERO, MODEL_PART_TAG)?.wait()?;
            return Ok(());
        }
        for other in size.ranks().skip(1) {
            let part = PartPlace::new(other, self.place.replicas).part;
            runtime.start_send(self.select_part(part, vector), other, MODEL_PART_TAG)?.wait()?;
        }
        *vector = self.select_part(0, vector);
        Ok(())
    }

    /// Returns the values of part `part` from the vector of the whole model.
    fn select_part(&self, part: usize, whole: &[f32]) -> Vec<f32> {
        self.parts[part].iter().flat_map(|range| &whole[range.clone()]).copied().collect()
    }

    /// Returns a sentence for the user that says how many parameters each rank holds.
    pub(crate) fn describe_part_sizes(&self) -> String {
        let counts = || (0..self.parts.len()).map(|part| self.part_parameter_count(part));
        let (least, most) = (counts().min().unwrap_or_default(), counts().max().unwrap_or_default());
        let total = self.parameter_count;
        format!("each rank holds a part of the model: from {least} to {most} of the {total} parameters")
    }
}

/// Returns the intersection of two ranges. If the intersection is empty, returns an empty range within `second`.
pub(crate) fn overlap(first: &Range<usize>, second: &Range<usize>) -> Range<usize> {
    let start = first.start.clamp(second.start, second.end);
    start..first.end.clamp(start, second.end)
}
