//! Tensor parallelism: each rank holds a part of each layer, and all ranks compute each batch together.
//!
//! The layers are divided in pairs. The first layer of a pair is divided by its outputs: rank i computes `y_i = f(x
//! W_i' + b_i)`, where `W_i'` is the transposed matrix of the weights. The second layer is divided by its inputs: rank
//! i computes `z_i = y_i V_i'`. The ranks sum these results: `z = z_1 + ... + z_n + c`. The first rank adds the biases
//! c. In the backward pass, the ranks sum the derivatives with respect to x. So a step is the same as in a single
//! process, except for rounding. Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models
//! using model parallelism", 2019.

use std::time::{Duration, Instant};

use ndarray::{Array2, s};

use super::divided_step::{self, PassInputs};
use super::{ParameterAgreement, Replica, StepTotals, Strategy, to_row_indices};
use crate::group::Error;
use crate::train::TrainError;
use crate::train::evaluation_work::EvaluationWork;
use crate::train::gradient_work::{GradientWork, divide_into_micro_batches};
use crate::train::model::{
    ForwardMode, GradientUpdate, LossSums, Network, OneRank, TensorSegment, TrainingPass, Workspace,
    tensor_segments,
};
use crate::train::partition::PartPlace;
use crate::train::runtime::{Runtime, Values};
use crate::types::{Rank, WorldSize};

/// The number of samples whose features are read at once.
const ROWS_PER_READ: usize = 64;

/// The strategy `tensor`, on one rank.
pub(crate) struct TensorParallel {
    segments: Vec<TensorSegment>,
    /// A workspace for each segment. Empty before the first batch.
    workspaces: Vec<Workspace>,
    /// Memory for the features of [`ROWS_PER_READ`] samples.
    features: Array2<f32>,
    place: PartPlace,
    /// The time for reading features since the start of the current step.
    data_time: Duration,
}

impl TensorParallel {
    /// Creates the strategy of a rank that holds the part `place` of the model.
    pub(crate) fn new(network: &Network, place: PartPlace, (rank, size): (Rank, WorldSize)) -> Self {
        let segments = tensor_segments(network.stage(), (rank, size));
        let features = Array2::zeros((ROWS_PER_READ, network.stage().input_and_output_widths().0));
        Self { segments, workspaces: Vec::new(), features, place, data_time: Duration::ZERO }
    }

    /// Computes the outputs of the model for the samples `indices`. All ranks get the same bits.
    fn forward(
        &mut self,
        runtime: &mut dyn Runtime,
        (inputs, mode): (PassInputs<'_>, ForwardMode<'_>),
        indices: &[u32],
    ) -> Result<(), TrainError> {
        let rows = indices.len();
        if self.workspaces.first().is_none_or(|workspace| workspace.input.nrows() < rows) {
            self.workspaces =
                self.segments.iter().map(|segment| segment.stage.allocate_workspace(rows)).collect();
        }
        self.read_features(inputs, indices);
        for (number, segment) in self.segments.iter().enumerate() {
            let (earlier_workspaces, later_workspaces) = self.workspaces.split_at_mut(number);
            let workspace = &mut later_workspaces[0];
            if let (Some(previous), Some(last)) = (number.checked_sub(1), earlier_workspaces.last()) {
                let mut input = workspace.input.slice_mut(s![..rows, ..]);
                input.assign(&last.output(rows));
                let values = input.as_slice_mut().expect("the first rows of an array are contiguous");
                self.segments[previous].activation.apply(values);
            }
            segment.stage.forward(&inputs.parameters[segment.parameters.clone()], workspace, rows, mode)?;
            let mut output = workspace.output_mut(rows);
            let output = output.as_slice_mut().expect("the first rows of an array are contiguous");
            runtime.combine(Values::Vector(output))?;
        }
        Ok(())
    }

    /// Writes the features that this rank needs to the input of the first segment.
    fn read_features(&mut self, inputs: PassInputs<'_>, indices: &[u32]) {
        let start_time = Instant::now();
        let columns = self.segments[0].inputs.clone();
        for (number, indices) in indices.chunks(ROWS_PER_READ).enumerate() {
            let start = number * ROWS_PER_READ;
            let mut features = self.features.slice_mut(s![..indices.len(), ..]);
            inputs.samples.features.write_rows(
                to_row_indices(indices),
                inputs.standardizer,
                features.view_mut(),
            );
            let mut input = self.workspaces[0].input.slice_mut(s![start..start + indices.len(), ..]);
            input.assign(&features.slice(s![.., columns.clone()]));
        }
        self.data_time += start_time.elapsed();
    }

    /// Returns the sum of the losses and the number of correct predictions of the last forward pass. All ranks except
    /// for the first rank return 0.
    fn evaluate_outputs(&self, inputs: PassInputs<'_>, indices: &[u32]) -> LossSums {
        match self.workspaces.last() {
            Some(workspace) if self.place.part == 0 => {
                let output = workspace.output(indices.len());
                inputs.loss.evaluate(&output, &inputs.samples.targets, to_row_indices(indices))
            }
            _ => LossSums::default(),
        }
    }

    /// Computes the gradient of this rank's parameters for the samples of the last forward pass. `weight` is the
    /// weight of each sample.
    fn backward(
        &mut self,
        runtime: &mut dyn Runtime,
        (inputs, weight): (PassInputs<'_>, f32),
        (gradients, update): (&mut [f32], GradientUpdate),
        indices: &[u32],
    ) -> Result<(), TrainError> {
        let rows = indices.len();
        for (number, segment) in self.segments.iter().enumerate().rev() {
            let (earlier_workspaces, later_workspaces) = self.workspaces.split_at_mut(number + 1);
            let workspace = &mut earlier_workspaces[number];
            if let Some(next) = later_workspaces.first_mut() {
                let mut delta = next.input_delta_mut(rows);
                let values = delta.as_slice_mut().expect("the first rows of an array are contiguous");
                runtime.combine(Values::Vector(values))?;
                let mut output_delta = workspace.output_delta_mut(rows);
                output_delta.assign(&delta);
                let values = output_delta.as_slice_mut().expect("the first rows of an array are contiguous");
                let output = next.input.slice(s![..rows, ..]);
                let output = output.as_slice().expect("the first rows of an array are contiguous");
                segment.activation.differentiate(values, output);
            } else {
                workspace.copy_output_to_delta(rows);
                let output = workspace.output_delta_mut(rows);
                inputs.loss.differentiate(output, &inputs.samples.targets, to_row_indices(indices), weight);
            }
            let own = segment.parameters.clone();
            let gradients = (&mut gradients[own.clone()], update);
            let ignore_ranges = (usize::MAX, |_, _: &mut [f32]| {});
            segment.stage.backward(&inputs.parameters[own], gradients, workspace, rows, ignore_ranges)?;
        }
        Ok(())
    }
}

impl Strategy for TensorParallel {
    fn parameter_agreement(&self) -> ParameterAgreement {
        ParameterAgreement::EveryStep
    }

    fn compute_local_gradient(
        &mut self,
        runtime: &mut dyn Runtime,
        work: GradientWork<'_>,
    ) -> Result<LossSums, TrainError> {
        let inputs = PassInputs {
            loss: work.network.loss(),
            parameters: work.parameters,
            samples: work.samples,
            standardizer: work.standardizer,
        };
        let weight = 1.0 / work.batch_len as f32;
        let mut total = LossSums::default();
        let mut update = GradientUpdate::Replace;
        self.data_time = Duration::ZERO;
        for indices in divide_into_micro_batches(work.indices, work.micro_batches) {
            let pass = TrainingPass { step: work.step, indices, weight, ranks: &OneRank };
            self.forward(runtime, (inputs, ForwardMode::Training(pass)), indices)?;
            total.add(self.evaluate_outputs(inputs, indices));
            self.backward(runtime, (inputs, weight), (work.gradients, update), indices)?;
            update = GradientUpdate::Add;
        }
        *work.data_time += self.data_time;
        Ok(total)
    }

    fn take_step(
        &mut self,
        runtime: &mut dyn Runtime,
        replica: &mut Replica<'_>,
        own_totals: StepTotals,
    ) -> Result<Option<StepTotals>, Error> {
        divided_step::clip_and_take_step(runtime, replica, self.place, own_totals).map(Some)
    }

    fn evaluate(
        &mut self,
        runtime: &mut dyn Runtime,
        work: EvaluationWork<'_>,
    ) -> Result<LossSums, TrainError> {
        let EvaluationWork { network, parameters, samples, standardizer, rows, metrics, .. } = work;
        let inputs = PassInputs { loss: network.loss(), parameters, samples, standardizer };
        let indices: Vec<u32> = rows.clone().map(|row| row as u32).collect();
        self.forward(runtime, (inputs, ForwardMode::Evaluation), &indices)?;
        // All ranks have the same outputs, so only the first rank adds the results.
        if let (Some(metrics), Some(workspace), 0) = (metrics, self.workspaces.last(), self.place.part) {
            metrics.add_outputs(&workspace.output(rows.len()), (inputs.loss, &samples.targets), rows);
        }
        Ok(self.evaluate_outputs(inputs, &indices))
    }
}
