//! A chain of fully connected layers with rectifiers (`ReLU`) between them.

use std::ops::Range;

use ndarray::{Array2, ArrayView2, Zip, s};

use super::dense::{Dense, EarlierGradients};
use super::loss::LossSums;
use super::{Loss, ModelSpec};
use crate::train::data::Targets;
use crate::train::random;

/// The maximum number of parameters of a model.
pub(crate) const PARAMETERS_MAX: usize = 1 << 30;

/// The shape of a model. A `Network` does not contain the parameters: the caller passes the parameters to each call,
/// as one flat vector.
#[derive(Clone, PartialEq, Debug)]
pub struct Network {
    layers: Vec<Dense>,
    loss: Loss,
}

/// The memory for the forward and the backward pass. This memory is allocated once, for the largest batch.
#[derive(Debug)]
pub struct Workspace {
    /// The input of the model. The caller writes the features of the samples into the first rows.
    pub input: Array2<f32>,
    /// The output of each layer.
    outputs: Vec<Array2<f32>>,
    /// The derivative of the loss with respect to the output of each layer except the last.
    deltas: Vec<Array2<f32>>,
}

impl Network {
    /// Creates the network that `spec` describes, with `inputs` features and `outputs` outputs. Returns `None` if the network
    /// would have more than 2^30 parameters.
    pub fn new(spec: &ModelSpec, inputs: usize, outputs: usize, loss: Loss) -> Option<Self> {
        let mut layers = Vec::new();
        let mut start = 0_usize;
        let mut inputs = inputs;
        for &width in spec.hidden().iter().chain([&outputs]) {
            let count = inputs.checked_add(1)?.checked_mul(width)?;
            if start.checked_add(count)? > PARAMETERS_MAX {
                return None;
            }
            layers.push(Dense::new(inputs, width, start));
            start += count;
            inputs = width;
        }
        Some(Self { layers, loss })
    }

    /// Returns the number of parameters.
    pub fn parameter_count(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.range().end)
    }

    /// Returns the loss that training minimizes.
    pub fn loss(&self) -> &Loss {
        &self.loss
    }

    /// Returns the name and the shape of each tensor, and the range of its elements in the flat vector of parameters. The names
    /// are the same as in `PyTorch`'s `Sequential`.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Range<usize>)> {
        let weight_and_bias = |(index, layer): (usize, &Dense)| {
            [
                (format!("layers.{index}.weight"), vec![layer.outputs, layer.inputs], layer.weight_range()),
                (format!("layers.{index}.bias"), vec![layer.outputs], layer.bias_range()),
            ]
        };
        self.layers.iter().enumerate().flat_map(weight_and_bias).collect()
    }

    /// Returns initial parameters, which do not depend on the world size. Biases are 0.
    ///
    /// - Without hidden layers, weights are 0 too: the loss is convex, so random weights would only raise the loss.
    /// - With hidden layers, weights are uniform random numbers. The variance is 2 / inputs before a rectifier (He et al. 2015),
    ///   and 2 / (inputs + outputs) in the last layer (Glorot and Bengio 2010).
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        let mut parameters = vec![0.0; self.parameter_count()];
        if self.layers.len() == 1 {
            return parameters;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let last = index + 1 == self.layers.len();
            let fan = if last { layer.inputs + layer.outputs } else { layer.inputs };
            let mut stream = random::stream("initialize", seed, index as u64);
            layer.initialize(&mut parameters, &mut stream, (6.0 / fan as f32).sqrt());
        }
        parameters
    }

    /// Allocates the memory for batches of up to `rows` samples.
    pub fn workspace(&self, rows: usize) -> Workspace {
        let shape = |layer: &Dense| Array2::zeros((rows, layer.outputs));
        Workspace {
            input: Array2::zeros((rows, self.layers[0].inputs)),
            outputs: self.layers.iter().map(shape).collect(),
            deltas: self.layers[..self.layers.len() - 1].iter().map(shape).collect(),
        }
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
        self.forward(parameters, workspace, rows);
        last_output(workspace, rows)
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
        self.forward(parameters, workspace, count);
        self.loss.evaluate(&last_output(workspace, count), targets, rows)
    }

    /// Does the same as [`evaluate`](Self::evaluate), and writes `weight` times the gradient of the sum of the losses to
    /// `gradients`. For regression, the gradient is divided by the square of [`Scale::deviation`](super::Scale). Without
    /// samples, the gradient is 0.
    ///
    /// The backward pass goes from the last parameter to the first. As soon as a range of `gradients` is final, the
    /// pass calls `on_gradient_ready` for this range. So the caller can reduce the range while the pass computes the
    /// next ranges. A range has about `slice` elements. Without samples, the gradients of each layer are one range.
    ///
    /// # Panics
    ///
    /// If there are more samples than the workspace has rows.
    pub fn differentiate(
        &self,
        parameters: &[f32],
        gradients: &mut [f32],
        workspace: &mut Workspace,
        (targets, rows): (&Targets, impl ExactSizeIterator<Item = usize> + Clone),
        weight: f32,
        ranges: (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> LossSums {
        let gradients = (gradients, EarlierGradients::Replace);
        self.accumulate(parameters, gradients, workspace, (targets, rows), weight, ranges)
    }

    /// Does the same as [`differentiate`](Self::differentiate). If `earlier` says so, adds the gradient to those in `gradients`.
    pub(crate) fn accumulate(
        &self,
        parameters: &[f32],
        (gradients, earlier): (&mut [f32], EarlierGradients),
        workspace: &mut Workspace,
        (targets, rows): (&Targets, impl ExactSizeIterator<Item = usize> + Clone),
        weight: f32,
        (slice, mut on_gradient_ready): (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> LossSums {
        let count = rows.len();
        let sums = self.evaluate(parameters, workspace, targets, rows.clone());
        let Workspace { input, outputs, deltas } = workspace;
        for (index, layer) in self.layers.iter().enumerate().rev() {
            if count == 0 {
                if earlier == EarlierGradients::Replace {
                    gradients[layer.range()].fill(0.0);
                }
                on_gradient_ready(layer.range(), gradients);
                continue;
            }
            let (before, from) = outputs.split_at_mut(index);
            let mut output = from[0].slice_mut(s![..count, ..]);
            if index + 1 == self.layers.len() {
                self.loss.differentiate(output.view_mut(), targets, rows.clone(), weight);
            } else {
                // Overwrite the rectifier's output, which is no longer needed, with the derivative of the loss with
                // respect to the rectifier's input.
                let delta = deltas[index].slice(s![..count, ..]);
                Zip::from(&mut output).and(&delta).for_each(|y, &d| *y = if *y > 0.0 { d } else { 0.0 });
            }
            let layer_input = before.last().unwrap_or(input);
            let layer_input = layer_input.slice(s![..count, ..]);
            let gradients = (&mut *gradients, earlier);
            layer.backward_parameters(gradients, &layer_input, &output.view(), slice, &mut on_gradient_ready);
            if index > 0 {
                layer.backward_input(
                    parameters,
                    &output.view(),
                    deltas[index - 1].slice_mut(s![..count, ..]),
                );
            }
        }
        sums
    }

    fn forward(&self, parameters: &[f32], workspace: &mut Workspace, count: usize) {
        let Workspace { input, outputs, .. } = workspace;
        for (index, layer) in self.layers.iter().enumerate() {
            let (before, from) = outputs.split_at_mut(index);
            let layer_input = before.last().unwrap_or(input);
            let mut output = from[0].slice_mut(s![..count, ..]);
            layer.forward(parameters, &layer_input.slice(s![..count, ..]), output.view_mut());
            if index + 1 < self.layers.len() {
                // `max` would turn NaN into 0 and hide that a layer has diverged.
                output.mapv_inplace(|value| if value < 0.0 { 0.0 } else { value });
            }
        }
    }
}

fn last_output(workspace: &Workspace, count: usize) -> ArrayView2<'_, f32> {
    workspace.outputs.last().expect("a network has at least one layer").slice(s![..count, ..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::model::{ClassTargets, Scale};

    /// Checks that the gradient is the slope of the loss divided by `divisor`. Finite differences give the slope.
    fn check_gradient(spec: &str, outputs: usize, loss: Loss, targets: &Targets, divisor: f64) {
        let network = Network::new(&spec.parse().unwrap(), 5, outputs, loss).unwrap();
        let mut stream = random::stream("test", 1, 2);
        let mut parameters = vec![0.0; network.parameter_count()];
        parameters.fill_with(|| random::symmetric_uniform(&mut stream, 0.7));
        let mut workspace = network.workspace(4);
        workspace.input.mapv_inplace(|_| random::symmetric_uniform(&mut stream, 1.0));
        let mut gradients = vec![f32::NAN; parameters.len()];
        let mut ready = Vec::new();
        network.differentiate(
            &parameters,
            &mut gradients,
            &mut workspace,
            (targets, 0..4),
            0.5,
            (11, |range, _: &mut [f32]| ready.push(range)),
        );
        let mut end = parameters.len();
        for range in ready {
            assert_eq!(range.end, end, "ranges have a gap, an overlap or a wrong order");
            end = range.start;
        }
        assert_eq!(end, 0);
        for index in 0..parameters.len() {
            let step = 1e-3_f32;
            let centre = parameters[index];
            let mut loss_at = |value| {
                parameters[index] = value;
                network.evaluate(&parameters, &mut workspace, targets, 0..4).loss
            };
            let slope = (loss_at(centre + step) - loss_at(centre - step)) / f64::from(2.0 * step);
            parameters[index] = centre;
            let expected = 0.5 * slope / divisor;
            let found = f64::from(gradients[index]);
            assert!(
                (found - expected).abs() < 2e-3 * expected.abs().max(1.0),
                "{spec} {index}: {found} {expected}"
            );
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        let classes = Targets::Classes(vec![0, 2, 1, 2]);
        let numbers = Targets::Numbers(vec![1.0, -2.0, 0.5, 3.0]);
        let scale = Scale { mean: 0.5, deviation: 2.0 };
        check_gradient("softmax", 3, Loss::CrossEntropy, &classes, 1.0);
        check_gradient("mlp:7", 3, Loss::CrossEntropy, &classes, 1.0);
        check_gradient("mlp:6,4", 3, Loss::CrossEntropy, &classes, 1.0);
        let weighted =
            |smoothing| Loss::WeightedCrossEntropy(ClassTargets::new(smoothing, vec![0.5, 0.0, 2.0]));
        check_gradient("softmax", 3, weighted(0.0), &classes, 1.0);
        check_gradient("mlp:7", 3, weighted(0.2), &classes, 1.0);
        check_gradient("linear", 1, Loss::SquaredError(Scale::IDENTITY), &numbers, 1.0);
        check_gradient("mlp:8", 1, Loss::SquaredError(scale), &numbers, 4.0);
    }

    #[test]
    fn the_gradients_of_parts_of_a_batch_add_up_and_that_of_an_empty_part_is_zero() {
        let network = Network::new(&"mlp:6".parse().unwrap(), 5, 3, Loss::CrossEntropy).unwrap();
        let parameters = network.initialize(1);
        let targets = Targets::Classes(vec![0, 2, 1, 2]);
        let mut workspace = network.workspace(4);
        let mut stream = random::stream("test", 1, 2);
        let samples = Array2::from_shape_simple_fn((4, 5), || random::symmetric_uniform(&mut stream, 1.0));
        let mut gradient = |rows: Range<usize>| {
            let mut gradients = vec![f32::NAN; parameters.len()];
            workspace.input.slice_mut(s![..rows.len(), ..]).assign(&samples.slice(s![rows.clone(), ..]));
            let batch = (&targets, rows);
            network.differentiate(
                &parameters,
                &mut gradients,
                &mut workspace,
                batch,
                0.25,
                (usize::MAX, |_, _: &mut [f32]| {}),
            );
            gradients
        };
        let complete = gradient(0..4);
        let shards = [gradient(0..3), gradient(3..4), gradient(4..4)];
        for (index, expected) in complete.iter().enumerate() {
            assert!((expected - shards.iter().map(|shard| shard[index]).sum::<f32>()).abs() < 1e-6);
        }
        assert!(shards[2].iter().all(|&value| value == 0.0));
    }

    #[test]
    fn a_model_with_too_many_parameters_is_refused() {
        let spec = "mlp:65536,65536".parse().unwrap();
        assert!(Network::new(&spec, 10, 10, Loss::CrossEntropy).is_none());
        assert!(Network::new(&ModelSpec::Softmax, usize::MAX, 2, Loss::CrossEntropy).is_none());
    }
}
