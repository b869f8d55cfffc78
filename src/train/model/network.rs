//! A chain of layers, and the loss that training minimizes.

use std::ops::Range;

use ndarray::ArrayView2;

use super::architecture::{self, InputShape};
use super::layer::{EarlierGradients, Mode, StepSeed};
use super::loss::LossSums;
use super::stage::{PlacedLayer, Stage};
use super::{Loss, ModelSpec, Workspace};
use crate::train::data::Targets;
use crate::train::random;

/// The maximum number of parameters of a model.
pub(crate) const PARAMETERS_MAX: usize = 1 << 30;
/// The maximum number of values that an evaluation computes at once. A single sample may need more values.
const EVALUATION_VALUES_MAX: usize = 1 << 26;
/// The maximum number of samples that an evaluation processes at once.
const EVALUATION_ROWS_MAX: usize = 256;

/// The shape of a model. A `Network` does not contain the parameters: the caller passes the parameters to each call,
/// as one flat vector.
#[derive(Clone, Debug)]
pub struct Network {
    /// All layers.
    stage: Stage,
    loss: Loss,
}

/// The samples of a training step whose gradient a rank computes.
#[derive(Clone, Copy, Debug)]
pub struct TrainingBatch<'a> {
    /// The targets of all samples of the training set.
    pub targets: &'a Targets,
    /// The samples, as indices of `targets`. The features of these samples are in the first rows of [`Workspace::input`].
    pub samples: &'a [u32],
    /// The factor of the sum of the losses.
    pub weight: f32,
    /// The seed and the number of the step.
    pub step: StepSeed,
    /// Whether the gradient replaces the earlier gradients or is added to them.
    pub earlier: EarlierGradients,
}

impl Network {
    /// Creates the network that `spec` describes, for inputs of this shape, with `outputs` outputs.
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
        let stage = Stage::new(architecture::build(spec, input.into(), outputs)?);
        if stage.parameter_count() > PARAMETERS_MAX {
            return Err(format!("has too many parameters; the maximum is {PARAMETERS_MAX}"));
        }
        Ok(Self { stage, loss })
    }

    /// Returns the number of parameters.
    pub fn parameter_count(&self) -> usize {
        self.stage.parameter_count()
    }

    /// Returns the stage with all layers.
    pub(crate) fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Returns the loss that training minimizes.
    pub fn loss(&self) -> &Loss {
        &self.loss
    }

    /// Returns the number of samples that an evaluation should process at once.
    pub(crate) fn evaluation_rows(&self) -> usize {
        let values =
            self.stage.layers().iter().map(|PlacedLayer { layer, .. }| layer.inputs() + layer.outputs());
        (EVALUATION_VALUES_MAX / values.sum::<usize>().max(1)).clamp(1, EVALUATION_ROWS_MAX)
    }

    /// Returns the name and the shape of each tensor, and the range of its elements in the flat vector of parameters. The
    /// names are `layers.I.weight` and `layers.I.bias`, where I counts the layers with parameters.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Range<usize>)> {
        let mut tensors = Vec::new();
        for (index, PlacedLayer { layer, range }) in self.layers_with_parameters().enumerate() {
            let mut start = range.start;
            for (name, shape) in layer.tensors() {
                let end = start + shape.iter().product::<usize>();
                tensors.push((format!("layers.{index}.{name}"), shape, start..end));
                start = end;
            }
        }
        tensors
    }

    /// Returns initial parameters, which do not depend on the world size. Biases are 0. Without hidden layers, weights are 0
    /// too. With hidden layers, weights are uniform random numbers.
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        let layers = 0..self.stage.layers().len();
        layers.flat_map(|index| self.initialize_layer(index, seed)).collect()
    }

    /// Returns the initial parameters of one layer: see [`initialize`](Self::initialize).
    pub(crate) fn initialize_layer(&self, index: usize, seed: u64) -> Vec<f32> {
        let PlacedLayer { layer, range } = &self.stage.layers()[index];
        let number = self.stage.layers()[..index].iter().filter(|layer| !layer.range.is_empty()).count();
        let mut parameters = vec![0.0; range.len()];
        let mut stream = random::stream("initialize", seed, number as u64);
        layer.initialize(&mut parameters, &mut || random::symmetric_uniform(&mut stream, 1.0));
        parameters
    }

    fn layers_with_parameters(&self) -> impl Iterator<Item = &PlacedLayer> {
        self.stage.layers().iter().filter(|layer| !layer.range.is_empty())
    }

    /// Allocates the memory for batches of up to `rows` samples.
    pub fn workspace(&self, rows: usize) -> Workspace {
        self.stage.workspace(rows)
    }

    /// Returns the outputs for the first `rows` rows of [`Workspace::input`].
    ///
    /// # Panics
    ///
    /// If the workspace has fewer rows.
    pub(crate) fn outputs<'a>(
        &self,
        parameters: &[f32],
        workspace: &'a mut Workspace,
        rows: usize,
    ) -> ArrayView2<'a, f32> {
        self.stage.forward(parameters, workspace, rows, Mode::Evaluation);
        workspace.output(rows)
    }

    /// Evaluates the samples that have the indices `rows` in `targets`, and returns the sum of their losses and the
    /// number of correct predictions. The features of these samples must be in the first rows of
    /// [`Workspace::input`].
    ///
    /// # Panics
    ///
    /// If there are more samples than the workspace has rows.
    pub fn evaluate(
        &self,
        parameters: &[f32],
        workspace: &mut Workspace,
        targets: &Targets,
        rows: impl ExactSizeIterator<Item = usize>,
    ) -> LossSums {
        let count = rows.len();
        if count == 0 {
            return LossSums::default();
        }
        self.stage.forward(parameters, workspace, count, Mode::Evaluation);
        self.loss.evaluate(&workspace.output(count), targets, rows)
    }

    /// Computes the losses of the samples of a training step, and returns their sum and the number of correct predictions.
    /// Writes the gradient of the sum of the losses times [`TrainingBatch::weight`] to `gradients`, or adds it to the
    /// gradient in `gradients` (see [`TrainingBatch::earlier`]). For regression, the gradient is divided by the square of
    /// [`Scale::deviation`](super::Scale). Without samples, the gradient is 0.
    ///
    /// The backward pass goes from the last parameter to the first. As soon as a range of `gradients` is final, the
    /// pass calls the function of `ranges` for this range. So the caller can reduce the range while the pass computes the
    /// next ranges. A range of a fully connected layer has about `slice` elements. The gradients of any other layer are
    /// one range, and those of each layer if there are no samples.
    ///
    /// # Panics
    ///
    /// If there are more samples than the workspace has rows.
    pub fn differentiate(
        &self,
        parameters: &[f32],
        gradients: &mut [f32],
        workspace: &mut Workspace,
        TrainingBatch { targets, samples, weight, step, earlier }: TrainingBatch<'_>,
        ranges: (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> LossSums {
        let count = samples.len();
        let mut sums = LossSums::default();
        if count > 0 {
            self.stage.forward(parameters, workspace, count, Mode::Training(step, samples));
            let rows = samples.iter().map(|&sample| sample as usize);
            sums = self.loss.evaluate(&workspace.output(count), targets, rows.clone());
            workspace.copy_output_to_delta(count);
            self.loss.differentiate(workspace.output_delta_mut(count), targets, rows, weight);
        }
        self.stage.backward(parameters, (gradients, earlier), workspace, count, ranges);
        sums
    }
}

#[cfg(test)]
mod tests;
