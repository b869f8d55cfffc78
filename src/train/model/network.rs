//! A chain of layers, and the loss that training minimizes.

use std::ops::Range;

use ndarray::{ArrayView2, s};

use super::architecture::{self, InputShape};
use super::batch_norm::RUNNING_VARIANCE;
use super::layer::{ForwardMode, GradientUpdate, LayerError, StepSeed, SumOrder, SumOverRanks, TrainingPass};
use super::loss::LossSums;
use super::stage::{BatchPart, PlacedLayer, Stage};
use super::{Loss, ModelSpec, Workspace};
use crate::train::data::Targets;
use crate::train::random;

/// The maximum number of parameters of a model.
pub(crate) const PARAMETERS_MAX: usize = 1 << 30;
/// The maximum number of values that an evaluation computes at once. An evaluation of a single sample may exceed this
/// maximum.
const EVALUATION_VALUES_MAX: usize = 1 << 26;
/// The maximum number of samples that an evaluation processes at once.
const EVALUATION_ROWS_MAX: usize = 256;

/// The layers and the loss of a model. A `Network` does not contain the parameters: the caller passes the parameters to
/// each call, as one flat vector.
#[derive(Clone, Debug)]
pub struct Network {
    /// All layers of the model.
    stage: Stage,
    loss: Loss,
}

/// A tensor of parameters, such as the weights of a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParameterTensor {
    /// The name, such as `layers.I.weight` or `layers.I.bias`. I is the index of the layer among the layers with
    /// parameters.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// The range of the elements in the flat vector of parameters.
    pub range: Range<usize>,
    /// Whether the elements are running statistics of batch normalization. In place of their gradient, the backward pass
    /// writes the numbers that the optimizer subtracts from them: see
    /// [`Optimizer::statistics`](crate::train::optimizer::Optimizer::statistics).
    pub is_statistic: bool,
}

/// One rank's samples in a training step.
#[derive(Clone, Copy, Debug)]
pub struct TrainingBatch<'a> {
    /// The targets of all samples of the training set.
    pub targets: &'a Targets,
    /// The samples, as indices into `targets`. The features of these samples are in the first rows of [`Workspace::input`].
    pub indices: &'a [u32],
    /// The sum of the losses is multiplied by this factor.
    pub weight: f32,
    /// The seed of the run and the number of the step.
    pub step: StepSeed,
    /// Whether the gradient replaces the earlier gradients or is added to them.
    pub update: GradientUpdate,
    /// The ranks that compute the batch together.
    pub ranks: &'a dyn SumOverRanks,
}

impl Network {
    /// Creates the network that `spec` describes, with inputs of the given shape and with `outputs` outputs.
    ///
    /// # Errors
    ///
    /// A text that says why the model does not fit: the inputs are not images, the images are too small, or the model
    /// has more than 2^30 parameters.
    pub fn new(
        spec: &ModelSpec,
        input: impl Into<InputShape>,
        outputs: usize,
        loss: Loss,
    ) -> Result<Self, String> {
        let stage = Stage::new(architecture::build_layers(spec, input.into(), outputs)?);
        if stage.parameter_count() > PARAMETERS_MAX {
            return Err(format!("has too many parameters; the maximum is {PARAMETERS_MAX}"));
        }
        Ok(Self { stage, loss })
    }

    /// Returns the number of parameters.
    pub fn parameter_count(&self) -> usize {
        self.stage.parameter_count()
    }

    /// Returns all layers as one stage.
    pub(crate) fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Returns whether a layer adds numbers over ranks, as batch normalization does.
    pub(crate) fn uses_sums_over_ranks(&self) -> bool {
        self.stage.layers().iter().any(|placed| placed.layer.uses_sums_over_ranks())
    }

    /// Returns whether all layers are [reproducible](super::Layer::is_reproducible).
    pub(crate) fn is_reproducible(&self) -> bool {
        self.stage.layers().iter().all(|placed| placed.layer.is_reproducible())
    }

    /// Returns the loss that training minimizes.
    pub fn loss(&self) -> &Loss {
        &self.loss
    }

    /// Returns the number of samples that an evaluation should process at once.
    pub(crate) fn evaluation_rows(&self) -> usize {
        let values = self.stage.layers().iter().map(|PlacedLayer { layer, .. }| layer.values_per_sample());
        (EVALUATION_VALUES_MAX / values.sum::<usize>().max(1)).clamp(1, EVALUATION_ROWS_MAX)
    }

    /// Returns all tensors of parameters, in the order of the parameters.
    pub fn parameter_tensors(&self) -> Vec<ParameterTensor> {
        let mut tensors = Vec::new();
        for (index, PlacedLayer { layer, range }) in self.layers_with_parameters().enumerate() {
            let mut start = range.start;
            for (name, shape) in layer.tensor_names_and_shapes() {
                let end = start + shape.iter().product::<usize>();
                tensors.push(ParameterTensor {
                    name: format!("layers.{index}.{name}"),
                    shape,
                    range: start..end,
                    is_statistic: start >= range.end - layer.statistic_count(),
                });
                start = end;
            }
        }
        tensors
    }

    /// Returns the tensors of running variances. The elements of these tensors must not be negative.
    pub(crate) fn running_variances(&self) -> impl Iterator<Item = ParameterTensor> {
        self.parameter_tensors().into_iter().filter(|tensor| tensor.name.ends_with(RUNNING_VARIANCE))
    }

    /// Returns the initial parameters of all layers: see [`Layer::initialize`](super::Layer::initialize). The parameters
    /// depend on `seed`, but not on the world size.
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        let layers = 0..self.stage.layers().len();
        layers.flat_map(|index| self.initialize_layer(index, seed)).collect()
    }

    /// Returns the initial parameters of one layer: see [`initialize`](Self::initialize).
    pub(crate) fn initialize_layer(&self, index: usize, seed: u64) -> Vec<f32> {
        let PlacedLayer { layer, range } = &self.stage.layers()[index];
        let number = self.stage.layers()[..index].iter().filter(|layer| !layer.range.is_empty()).count();
        let mut parameters = vec![0.0; range.len()];
        let mut stream = random::random_stream("initialize", seed, number as u64);
        layer.initialize(&mut parameters, &mut || random::symmetric_uniform(&mut stream, 1.0));
        parameters
    }

    /// Returns the layers that have parameters.
    fn layers_with_parameters(&self) -> impl Iterator<Item = &PlacedLayer> {
        self.stage.layers().iter().filter(|layer| !layer.range.is_empty())
    }

    /// Allocates the memory for batches of up to `rows` samples.
    pub fn allocate_workspace(&self, rows: usize) -> Workspace {
        self.stage.allocate_workspace(rows)
    }

    /// Computes the outputs for the first `rows` rows of [`Workspace::input`] in an evaluation: without dropout, and with
    /// the running statistics of batch normalization.
    ///
    /// # Panics
    ///
    /// If the workspace has fewer than `rows` rows.
    pub(crate) fn compute_outputs<'a>(
        &self,
        parameters: &[f32],
        workspace: &'a mut Workspace,
        rows: usize,
    ) -> Result<ArrayView2<'a, f32>, LayerError> {
        self.stage.forward(parameters, workspace, rows, ForwardMode::Evaluation)?;
        Ok(workspace.output(rows))
    }

    /// Computes the losses of the samples of a training step, and returns their sum and the number of correct
    /// predictions. Computes the gradient of the sum of the losses times [`TrainingBatch::weight`].
    /// [`TrainingBatch::update`] says whether this gradient replaces the content of `gradients` or is added to it.
    /// For regression, the gradient is divided by the square of [`TargetScale::deviation`](super::TargetScale).
    /// Without samples, the gradient is 0.
    ///
    /// The backward pass goes from the last parameter to the first. As soon as a range of `gradients` is final, the
    /// pass calls `on_gradient_ready` with this range and with `gradients`, so that the caller can sum the range over ranks
    /// while the pass continues. A fully connected layer has ranges of about `elements_per_report` elements. Every other
    /// layer has one range. Without samples, every layer has one range.
    ///
    /// # Errors
    ///
    /// If a layer fails. The content of `gradients` is then unspecified.
    ///
    /// # Panics
    ///
    /// If there are more samples than the workspace has rows.
    pub fn differentiate(
        &self,
        parameters: &[f32],
        gradients: &mut [f32],
        workspace: &mut Workspace,
        TrainingBatch { targets, indices, weight, step, update, ranks }: TrainingBatch<'_>,
        (elements_per_report, on_gradient_ready): (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> Result<LossSums, LayerError> {
        let count = indices.len();
        let mut sums = LossSums::default();
        let pass = TrainingPass { step, indices, weight, ranks };
        self.stage.forward(parameters, workspace, count, ForwardMode::Training(pass))?;
        if count > 0 {
            let rows = indices.iter().map(|&index| index as usize);
            sums = self.loss.evaluate(&workspace.output(count), targets, rows.clone());
            workspace.copy_output_to_delta(count);
            self.loss.differentiate(workspace.output_delta_mut(count), targets, rows, weight);
        }
        let part = BatchPart { rows: count, order: SumOrder::Any, ranks };
        let reports = (elements_per_report, on_gradient_ready);
        self.stage.backward_part(parameters, (gradients, update), workspace, part, reports)?;
        Ok(sums)
    }

    /// Does what [`differentiate`](Self::differentiate) does, but only `row_groups` decides the order of additions. The
    /// row groups are consecutive and contain the rows of all samples. The gradient replaces the content of `gradients`.
    /// Writes the sums of the losses of each row group to `sums`.
    ///
    /// # Panics
    ///
    /// If there are more samples than the workspace has rows, or if there is no row group.
    pub(crate) fn differentiate_row_groups(
        &self,
        parameters: &[f32],
        gradients: &mut [f32],
        workspace: &mut Workspace,
        TrainingBatch { targets, indices, weight, step, ranks, .. }: TrainingBatch<'_>,
        (row_groups, sums): (&[Range<usize>], &mut [LossSums]),
    ) -> Result<(), LayerError> {
        let count = indices.len();
        if count > 0 {
            let pass = TrainingPass { step, indices, weight, ranks };
            self.stage.forward(parameters, workspace, count, ForwardMode::Training(pass))?;
            let rows = indices.iter().map(|&index| index as usize);
            for (group, sums) in row_groups.iter().zip(sums) {
                let outputs = workspace.output(count);
                let outputs = outputs.slice(s![group.clone(), ..]);
                *sums =
                    self.loss.evaluate(&outputs, targets, rows.clone().skip(group.start).take(group.len()));
            }
            workspace.copy_output_to_delta(count);
            self.loss.differentiate(workspace.output_delta_mut(count), targets, rows, weight);
        } else {
            sums.fill(LossSums::default());
        }
        let part = BatchPart { rows: count, order: SumOrder::RowGroups(row_groups), ranks };
        let gradients = (gradients, GradientUpdate::Replace);
        let ignore_ranges = (usize::MAX, |_, _: &mut [f32]| {});
        self.stage.backward_part(parameters, gradients, workspace, part, ignore_ranges)
    }
}

#[cfg(test)]
mod tests;
