//! Pipeline parallelism: each rank holds a stage, a range of consecutive layers of the model. With `hybrid`,
//! several pipelines work side by side on different parts of each batch.
//!
//! A batch is divided into micro-batches. A stage receives the activations of a micro-batch from the previous stage,
//! computes its layers, and sends its own activations to the next stage. In the backward pass, each stage sends
//! derivatives to the previous stage. The stages compute different micro-batches at the same time, in the order of
//! [`order_of_passes`]. Each stage adds the gradients of its micro-batches. With `hybrid`, the replicas of a stage
//! sum their gradients. So a step is the same as in a single process, except for rounding:
//!
//! `p -= update(1/B * (g_1 + ... + g_m))`
//!
//! Here B is the number of samples of the batch, and `g_i` is the sum of the gradients of the samples of micro-batch
//! i. Batch normalization uses the statistics of a micro-batch.
//!
//! Sources: Narayanan et al., "`PipeDream`: generalized pipeline parallelism for DNN training", SOSP 2019 (the
//! schedule 1F1B); Huang et al., "`GPipe`", `NeurIPS` 2019 (synchronous steps); Narayanan et al., "Efficient
//! large-scale language model training on GPU clusters using Megatron-LM", SC 2021 (the combination of the two).

use std::num::NonZeroU32;
use std::ops::Range;
use std::time::{Duration, Instant};

use ndarray::s;

use super::divided_step::{self, PassInputs};
use super::pipeline_schedule::{StagePass, divide_layers, order_of_passes};
use super::stage_messages::{FreeStageBuffers, StageInbox, StageOutbox};
use super::{ParameterAgreement, Replica, StepTotals, Strategy, StrategySpec, to_row_indices};
use crate::group::Error;
use crate::train::TrainError;
use crate::train::buckets::Buckets;
use crate::train::evaluation_work::EvaluationWork;
use crate::train::gradient_work::{GradientWork, divide_into_micro_batches};
use crate::train::model::{
    ForwardMode, GradientUpdate, LossSums, Network, OneRank, Stage, TrainingPass, Workspace,
};
use crate::train::partition::PartPlace;
use crate::train::runtime::Runtime;
use crate::types::{Rank, WorldSize};

/// The tag of the messages that carry activations.
const ACTIVATIONS_TAG: u32 = 1;
/// The tag of the messages that carry derivatives.
const DERIVATIVES_TAG: u32 = 2;

/// Returns the layers of each stage, and how many ranks hold a replica of each stage.
///
/// # Errors
///
/// The number of ranks or of layers does not suit the strategy. The error tells the user what to change.
pub(crate) fn pipeline_stages(
    strategy: StrategySpec,
    model: &Stage,
    size: WorldSize,
) -> Result<(Vec<Range<usize>>, WorldSize), String> {
    let (replicas, stages) = strategy.pipeline_shape().unwrap_or((size.get(), 1));
    let blocks = model.blocks_with_parameters();
    let layers = blocks.len();
    if stages as usize > layers {
        return Err(format!(
            "--strategy {strategy} has {stages} stages, but the model has only {layers} layers with parameters, and each stage \
             needs at least one; use fewer stages or a model with more layers"
        ));
    }
    let needed = u64::from(replicas) * u64::from(stages);
    let replicas = WorldSize::new(replicas).filter(|_| needed == u64::from(size.get())).ok_or_else(|| {
        format!("--strategy {strategy} needs {needed} ranks, but this job has {size}; start the job with ringrun -n {needed}")
    })?;
    let costs: Vec<u64> = blocks.iter().map(|layers| model.multiplications(layers.clone())).collect();
    let layers = |range: Range<usize>| blocks[range.start].start..blocks[range.end - 1].end;
    Ok((divide_layers(&costs, stages as usize).into_iter().map(layers).collect(), replicas))
}

/// The strategies `pipeline` and `hybrid`, on one rank.
pub(crate) struct Pipeline {
    stage: Stage,
    /// The stage that this rank holds, and the index of this rank among the replicas of the stage.
    place: PartPlace,
    /// The number of stages.
    stages: usize,
    /// The number of micro-batches into which the pipeline divides its part of a batch.
    micro_batches: NonZeroU32,
    /// A workspace for each micro-batch that can be in progress on this stage. `None` before its first use.
    workspaces: Vec<Option<Workspace>>,
    buffers: FreeStageBuffers,
    /// The group of the ranks that hold the same stage. `None` if only this rank holds the stage.
    replicas: Option<Box<dyn Runtime>>,
    /// The sums of the gradients of the replicas.
    sums: Buckets,
    /// The time for reading features since the start of the current step.
    data_time: Duration,
}

/// The messages of a stage in one step.
struct StageExchange {
    /// The activations of the previous stage. `None` on the first stage, which reads the features of the samples.
    activations: Option<StageInbox>,
    /// The derivatives that the next stage computes. `None` on the last stage, which computes the loss.
    derivatives: Option<StageInbox>,
    /// The messages to both neighbours.
    sent: StageOutbox,
}

impl Pipeline {
    /// Creates the strategy of a rank that holds the part `place` of the model. `replicas` is the group of the ranks
    /// with the same part, and `sums` are the sums of its gradients.
    pub(crate) fn new(
        (network, stages): (&Network, &[Range<usize>]),
        place: PartPlace,
        micro_batches: NonZeroU32,
        (replicas, sums): (Option<Box<dyn Runtime>>, Buckets),
    ) -> Self {
        Self {
            stage: network.stage().select(stages[place.part].clone()),
            place,
            stages: stages.len(),
            micro_batches,
            workspaces: (place.part..stages.len()).map(|_| None).collect(),
            buffers: FreeStageBuffers::default(),
            replicas,
            sums,
            data_time: Duration::ZERO,
        }
    }

    /// Returns the rank with the previous stage. Returns `None` on the first stage.
    fn previous_rank(&self) -> Option<Rank> {
        self.place.part.checked_sub(1).map(|part| self.place.rank_with_part(part))
    }

    /// Returns the rank with the next stage. Returns `None` on the last stage.
    fn next_rank(&self) -> Option<Rank> {
        let part = self.place.part + 1;
        (part < self.stages).then(|| self.place.rank_with_part(part))
    }

    /// Prepares the messages of a step over these micro-batches.
    fn new_exchange(&self, micro_batches: &[&[u32]]) -> StageExchange {
        let (inputs, outputs) = self.stage.input_and_output_widths();
        let inbox = |from: Option<Rank>, tag, width: usize| {
            from.map(|from| StageInbox::new(from, tag, micro_batches.iter().map(|rows| rows.len() * width)))
        };
        StageExchange {
            activations: inbox(self.previous_rank(), ACTIVATIONS_TAG, inputs),
            derivatives: inbox(self.next_rank(), DERIVATIVES_TAG, outputs),
            sent: StageOutbox::default(),
        }
    }

    /// Computes the activations of the micro-batch with the samples `indices` in the workspace `slot`. Sends these
    /// activations to the next stage.
    fn forward(
        &mut self,
        runtime: &mut dyn Runtime,
        exchange: &mut StageExchange,
        (inputs, mode): (PassInputs<'_>, ForwardMode<'_>),
        (slot, indices): (usize, &[u32]),
    ) -> Result<(), TrainError> {
        let (rows, next) = (indices.len(), self.next_rank());
        let workspace = workspace_for_rows(&self.stage, &mut self.workspaces[slot], rows);
        let input = workspace.input.slice_mut(s![..rows, ..]);
        if let Some(inbox) = &mut exchange.activations {
            inbox.receive(runtime, &mut self.buffers, input)?;
        } else {
            let start = Instant::now();
            inputs.samples.features.write_rows(to_row_indices(indices), inputs.standardizer, input);
            self.data_time += start.elapsed();
        }
        self.stage.forward(inputs.parameters, workspace, rows, mode)?;
        if let Some(next) = next {
            let to = (next, ACTIVATIONS_TAG);
            exchange.sent.send(runtime, &mut self.buffers, &workspace.output(rows), to)?;
        }
        Ok(())
    }

    /// Computes the gradient of a micro-batch from the activations in the workspace `slot`. Sends the derivative of
    /// the loss with respect to the stage's input to the previous stage. `weight` is the weight of each sample.
    /// Returns the loss on the last stage, and 0 on the other stages.
    fn backward(
        &mut self,
        runtime: &mut dyn Runtime,
        exchange: &mut StageExchange,
        (inputs, weight): (PassInputs<'_>, f32),
        gradients: (&mut [f32], GradientUpdate),
        (slot, indices): (usize, &[u32]),
    ) -> Result<LossSums, TrainError> {
        let (rows, previous) = (indices.len(), self.previous_rank());
        let workspace = workspace_for_rows(&self.stage, &mut self.workspaces[slot], rows);
        let mut sums = LossSums::default();
        if let Some(inbox) = &mut exchange.derivatives {
            inbox.receive(runtime, &mut self.buffers, workspace.output_delta_mut(rows))?;
        } else {
            let targets = &inputs.samples.targets;
            sums = inputs.loss.evaluate(&workspace.output(rows), targets, to_row_indices(indices));
            workspace.copy_output_to_delta(rows);
            let output = workspace.output_delta_mut(rows);
            inputs.loss.differentiate(output, targets, to_row_indices(indices), weight);
        }
        let ignore_ranges = (usize::MAX, |_, _: &mut [f32]| {});
        self.stage.backward(inputs.parameters, gradients, workspace, rows, ignore_ranges)?;
        if let Some(previous) = previous {
            let to = (previous, DERIVATIVES_TAG);
            exchange.sent.send(runtime, &mut self.buffers, &workspace.input_delta_mut(rows).view(), to)?;
        }
        Ok(sums)
    }
}

/// Returns the workspace in `slot`, with memory for at least `rows` samples.
fn workspace_for_rows<'a>(stage: &Stage, slot: &'a mut Option<Workspace>, rows: usize) -> &'a mut Workspace {
    let workspace = slot.take().filter(|workspace| workspace.input.nrows() >= rows);
    slot.insert(workspace.unwrap_or_else(|| stage.allocate_workspace(rows)))
}

impl Strategy for Pipeline {
    fn parameter_agreement(&self) -> ParameterAgreement {
        ParameterAgreement::EveryStep
    }

    fn compute_local_gradient(
        &mut self,
        runtime: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError> {
        let GradientWork { network, parameters, gradients, samples, standardizer, indices, .. } = work;
        let micro_batches: Vec<&[u32]> = divide_into_micro_batches(indices, self.micro_batches).collect();
        if micro_batches.is_empty() {
            gradients.fill(0.0);
        }
        let inputs = PassInputs { loss: network.loss(), parameters, samples, standardizer };
        let weight = 1.0 / work.batch_len as f32;
        let mut exchange = self.new_exchange(&micro_batches);
        let mut total = LossSums::default();
        self.data_time = Duration::ZERO;
        let slots = self.workspaces.len();
        for pass in order_of_passes(self.place.part, self.stages, micro_batches.len()) {
            match pass {
                StagePass::Forward(number) => {
                    let micro_batch = (number % slots, micro_batches[number]);
                    let mode = ForwardMode::Training(TrainingPass {
                        step: work.step,
                        indices: micro_batches[number],
                        weight,
                        ranks: &OneRank,
                    });
                    self.forward(runtime, &mut exchange, (inputs, mode), micro_batch)?;
                }
                StagePass::Backward(number) => {
                    let micro_batch = (number % slots, micro_batches[number]);
                    let update = if number == 0 { GradientUpdate::Replace } else { GradientUpdate::Add };
                    let gradients = (&mut *gradients, update);
                    total.add(self.backward(
                        runtime,
                        &mut exchange,
                        (inputs, weight),
                        gradients,
                        micro_batch,
                    )?);
                }
            }
        }
        exchange.sent.wait_until_sent(&mut self.buffers)?;
        *work.data_time += self.data_time;
        Ok(total)
    }

    fn take_step(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        own_totals: StepTotals,
    ) -> Result<Option<StepTotals>, Error> {
        self.sums.apply_momentum(replica);
        if let Some(replicas) = &mut self.replicas {
            self.sums.sum(replicas.as_mut(), replica.gradients)?;
        }
        divided_step::clip_and_take_step(runtime, replica, self.place, own_totals).map(Some)
    }

    fn compressed_sums(&mut self) -> Option<&mut Buckets> {
        Some(&mut self.sums)
    }

    fn evaluate(
        &mut self,
        runtime: &mut dyn Runtime,
        work: EvaluationWork<'_>,
    ) -> Result<LossSums, TrainError> {
        let EvaluationWork { network, parameters, samples, standardizer, rows, mut metrics, .. } = work;
        let indices: Vec<u32> = rows.clone().map(|row| row as u32).collect();
        let micro_batches: Vec<&[u32]> = divide_into_micro_batches(&indices, self.micro_batches).collect();
        let inputs = PassInputs { loss: network.loss(), parameters, samples, standardizer };
        let mut exchange = self.new_exchange(&micro_batches);
        exchange.derivatives = None;
        let mut total = LossSums::default();
        let mut start = rows.start;
        for indices in micro_batches {
            self.forward(runtime, &mut exchange, (inputs, ForwardMode::Evaluation), (0, indices))?;
            let rows = start..start + indices.len();
            start = rows.end;
            if let (None, Some(workspace)) = (self.next_rank(), &self.workspaces[0]) {
                let output = workspace.output(indices.len());
                if let Some(metrics) = &mut metrics {
                    metrics.add_outputs(&output, (inputs.loss, &samples.targets), rows.clone());
                }
                total.add(inputs.loss.evaluate(&output, &samples.targets, rows));
            }
        }
        exchange.sent.wait_until_sent(&mut self.buffers)?;
        Ok(total)
    }
}
