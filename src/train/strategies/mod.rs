//! Strategies. A strategy says how the ranks divide the work of a step, and when they exchange gradients or parameters.
//!
//! `docs/strategies.md` describes each strategy for users. Each strategy has a separate file in this module. A
//! strategy communicates with other ranks only through the trait [`Runtime`].

mod allreduce;
mod diloco;
mod divided_step;
mod local_sgd;
mod local_training;
mod model_average;
mod pipeline;
mod pipeline_schedule;
mod reproducible;
mod request_exchange;
mod shard_step;
mod sharded_optimizer;
mod spec;
mod stage_messages;
mod tensor_parallel;

use self::allreduce::SynchronousStrategy;
use self::diloco::DiLoCo;
use self::local_sgd::LocalSgd;
use self::local_training::LocalTraining;
use self::model_average::ModelAverage;
use self::pipeline::Pipeline;
pub(crate) use self::pipeline::pipeline_stages;
use self::reproducible::Reproducible;
pub(crate) use self::request_exchange::RankRequests;
use self::shard_step::ShardStep;
use self::sharded_optimizer::ShardedOptimizer;
pub use self::spec::StrategySpec;
use self::tensor_parallel::TensorParallel;
use super::TrainError;
use super::bucket_options::BucketBytes;
use super::bucket_ranges::BucketSizes;
use super::buckets::Buckets;
use super::compression_plan::{CompressionPlan, ModelTensor};
use super::compression_reach::CompressionReach;
use super::config::Config;
use super::evaluation_work::EvaluationWork;
use super::gradient_work::GradientWork;
use super::local_momentum::LocalMomentum;
use super::model::LossSums;
use super::optimizer::Optimizer;
use super::partition::ModelPartition;
use super::runtime::{self, Runtime};
use super::setup::Setup;
use crate::group::{Error, Group};
use crate::types::WorldSize;

/// How ranks divide the work of training. All ranks call the functions of this trait in the same order.
pub(crate) trait Strategy {
    /// Returns after which event the parameters are the same on all ranks.
    fn parameter_agreement(&self) -> ParameterAgreement;

    /// Computes the gradient of this rank's samples. May start to exchange finished parts of the gradient before the
    /// whole gradient is computed.
    fn compute_local_gradient(
        &mut self,
        runtime: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError>;

    /// Takes a step of the optimizer with the gradient of [`compute_local_gradient`](Self::compute_local_gradient).
    /// `own_totals` holds this rank's totals. Returns the sum of the totals over all ranks, or `None` if the ranks do not
    /// exchange totals in every step.
    fn take_step(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        own_totals: StepTotals,
    ) -> Result<Option<StepTotals>, Error>;

    /// Called after each step if [`take_step`](Self::take_step) returns `None`. `steps` is the number of steps that the run
    /// has taken in this epoch, and `own` has the requests of this rank. Returns the requests of all ranks that this rank
    /// knows by now: the same on all ranks.
    fn after_step(
        &mut self,
        _runtime: &mut dyn Runtime,
        _replica: &mut Replica<'_>,
        (_steps, own): (u64, RankRequests),
    ) -> Result<RankRequests, Error> {
        Ok(own)
    }

    /// Returns whether the ranks average their parameters when they have taken `steps` steps of an epoch. The trainer may
    /// then call [`agree_on_parameters`](Self::agree_on_parameters) instead of [`after_step`](Self::after_step).
    fn averages_after_step(&self, _steps: u64) -> bool {
        false
    }

    /// Returns whether all ranks have the same parameters and the same state of the optimizer now.
    fn has_equal_parameters(&self) -> bool {
        true
    }

    /// Called at the end of each epoch. `epochs` is the number of epochs that the run has completed.
    fn after_epoch(
        &mut self,
        _runtime: &mut dyn Runtime,
        _replica: &mut Replica<'_>,
        _epochs: u64,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Makes the parameters and the state of the optimizer the same on all ranks. The trainer calls this function
    /// before it tests or saves the model.
    fn agree_on_parameters(
        &mut self,
        _runtime: &mut dyn Runtime,
        _replica: &mut Replica<'_>,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Evaluates samples. If several ranks evaluate the same samples together, one rank returns the results, and the
    /// other ranks return 0.
    fn evaluate(
        &mut self,
        _runtime: &mut dyn Runtime,
        work: EvaluationWork<'_>,
    ) -> Result<LossSums, TrainError> {
        Ok(work.evaluate()?)
    }

    /// Returns the state vectors with the names of [`StrategySpec::state_names`]. Each vector is as long as the
    /// parameters. Checkpoints contain these vectors. Whenever the parameters are the same on all ranks, these vectors are
    /// also the same.
    fn state(&mut self) -> Vec<&mut Vec<f32>> {
        Vec::new()
    }

    /// Returns the size in bytes of a bucket of gradients. Returns `None` if gradients are not reduced in buckets.
    fn bucket_bytes(&self) -> Option<usize> {
        None
    }

    /// Returns the sums whose values may be compressed. Checkpoints contain what each rank remembers of these sums.
    fn compressed_sums(&mut self) -> Option<&mut Buckets> {
        None
    }
}

/// Creates the strategy of a run. `partition` says which parameters of the model this rank holds. All ranks must call
/// this function.
pub(crate) fn create(
    config: &Config,
    setup: &Setup,
    partition: &ModelPartition,
    group: &mut Group,
) -> Result<Box<dyn Strategy>, TrainError> {
    let network = &setup.network;
    let count = network.parameter_count();
    let size = group.size();
    let tensors = network.parameter_tensors().into_iter().map(|tensor| ModelTensor {
        own_range: partition.own_range_of_tensor(&tensor.range),
        name: tensor.name,
        shape: tensor.shape,
        is_statistic: tensor.is_statistic,
    });
    let compression = (config.compression, &config.compression_rules);
    let codecs = config.compression_rules.codecs(config.compression);
    let is_encoded = CompressionReach::new(group, codecs) == CompressionReach::Full;
    let plan = CompressionPlan::new(compression, tensors.collect(), (is_encoded, config.seed));
    let plan = plan.map_err(TrainError::Options)?.with_schedule(setup.compression_schedule);
    let momentum = LocalMomentum::new(&plan, (partition.place().replicas, config.recipe.clip_norm));
    let sizes = bucket_sizes(config, count, size);
    let shard_step =
        partition.has_optimizer_shards().then(|| ShardStep::new(partition.optimizer_partition().clone()));
    if let Some(shards) = config.recipe.logical_shards() {
        return Ok(Box::new(Reproducible::new(shards, config.micro_batches, shard_step)));
    }
    if let Some(shard_step) = shard_step {
        return Ok(Box::new(ShardedOptimizer::new(shard_step, &plan, sizes)));
    }
    Ok(match config.strategy {
        // With a parameter server and with gossip, rank 0 uses `SynchronousStrategy` alone, to test and save the model.
        StrategySpec::AllReduce
        | StrategySpec::PsSync
        | StrategySpec::PsAsync { .. }
        | StrategySpec::Gossip { .. } => Box::new(SynchronousStrategy::new(size, (&plan, momentum), sizes)),
        StrategySpec::ModelAverage { epochs } => Box::new(LocalTraining::new(ModelAverage { epochs }, &plan)),
        StrategySpec::DiLoCo { steps, delay } => {
            let statistics = network.parameter_tensors().into_iter().filter(|tensor| tensor.is_statistic);
            let statistics = statistics.map(|tensor| tensor.range).collect();
            Box::new(LocalTraining::new(DiLoCo::new((steps, delay), count, statistics), &plan))
        }
        StrategySpec::LocalSgd { steps } => Box::new(LocalTraining::new(LocalSgd { steps }, &plan)),
        StrategySpec::Tensor => {
            Box::new(TensorParallel::new(network, partition.place(), (group.rank(), group.size())))
        }
        StrategySpec::Pipeline { .. } | StrategySpec::Hybrid { .. } => {
            let stages = pipeline_stages(config.strategy, network.stage(), group.size());
            let (stages, replicas) = stages.map_err(TrainError::Options)?;
            let place = partition.place();
            let replicas = match replicas {
                WorldSize::ONE => None,
                _ => Some(runtime::split_by_part(group, place.part as u32)?),
            };
            let sums = Buckets::single(&plan).with_momentum(momentum);
            let micro_batches = config.micro_batches_per_step();
            Box::new(Pipeline::new((network, &stages), place, micro_batches, (replicas, sums)))
        }
    })
}

/// Returns the sizes of the buckets of a model. If the ranks divide the state of the optimizer, the sizes are multiples of the
/// number of ranks, so that the ranks have equal chunks and hold state of equal size.
pub(crate) fn bucket_sizes(config: &Config, parameter_count: usize, size: WorldSize) -> BucketSizes {
    // A reproducible run exchanges all gradients at once.
    if !config.overlap || config.recipe.reproducible_shards.is_some() {
        return BucketSizes::whole(parameter_count);
    }
    let bytes = match config.bucket_bytes {
        Some(BucketBytes::Fixed(bytes)) => Some(bytes),
        // `BucketTrial` changes the sizes later.
        Some(BucketBytes::Auto) | None => None,
    };
    let sizes = BucketSizes::new(bytes, parameter_count);
    if config.shard_optimizer { sizes.round_up_to_multiples(size.as_usize()) } else { sizes }
}

/// Converts the indices of samples to `usize`.
fn to_row_indices(samples: &[u32]) -> impl ExactSizeIterator<Item = usize> + Clone {
    samples.iter().map(|&sample| sample as usize)
}

/// The event after which the parameters and the state of the optimizer are the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ParameterAgreement {
    /// After each step. The ranks compare hashes of their parameters after each epoch.
    EveryStep,
    /// After [`Strategy::agree_on_parameters`]. The ranks compare hashes of their parameters before each test.
    OnRequest,
}

/// The numbers that the ranks sum in each step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct StepTotals {
    /// The sum of the losses of the samples of the step.
    pub(crate) loss: f64,
    /// The number of ranks that have received a stop signal.
    pub(crate) stop_flags: f64,
    /// The number of ranks that ask for a checkpoint after this step. Ranks ask only if all ranks take part in a save.
    pub(crate) save_flags: f64,
    /// Two numbers whose sums over all ranks are 0 if all ranks hold the same parameters. See
    /// [`ReplicaHash`](super::rank_checks::ReplicaHash).
    pub(crate) differences: [f64; 2],
}

impl StepTotals {
    /// Returns the numbers in the order in which ranks sum them.
    fn to_array(self) -> [f64; 5] {
        let [high, low] = self.differences;
        [self.loss, self.stop_flags, high, low, self.save_flags]
    }

    /// Creates the totals from the sums over all ranks of [`to_array`](Self::to_array).
    fn from_totals(totals: &[f64]) -> Self {
        let [loss, stop_flags, high, low, save_flags] =
            *totals.first_chunk().expect("a sum has as many numbers as its terms");
        Self { loss, stop_flags, save_flags, differences: [high, low] }
    }
}

/// The model and the optimizer of this rank, which a strategy updates.
pub(crate) struct Replica<'a> {
    pub(crate) parameters: &'a mut [f32],
    /// The gradient that [`Strategy::compute_local_gradient`] computed.
    pub(crate) gradients: &'a mut [f32],
    pub(crate) optimizer: &'a mut Optimizer,
}
