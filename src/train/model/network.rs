//! A chain of fully connected layers with rectifiers (`ReLU`) between them.

use std::ops::Range;

use ndarray::ArrayView2;

use super::dense::{Dense, EarlierGradients};
use super::loss::LossSums;
use super::{Loss, ModelSpec, Stage, Workspace};
use crate::train::data::Targets;
use crate::train::random;

/// The maximum number of parameters of a model.
pub(crate) const PARAMETERS_MAX: usize = 1 << 30;

/// The shape of a model. A `Network` does not contain the parameters: the caller passes the parameters to each call,
/// as one flat vector.
#[derive(Clone, PartialEq, Debug)]
pub struct Network {
    /// All layers.
    stage: Stage,
    loss: Loss,
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
        Some(Self { stage: Stage::new(layers), loss })
    }

    /// Returns the number of parameters.
    pub fn parameter_count(&self) -> usize {
        self.stage.parameter_count()
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
        self.stage.layers().iter().enumerate().flat_map(weight_and_bias).collect()
    }

    /// Returns initial parameters, which do not depend on the world size. Biases are 0.
    ///
    /// - Without hidden layers, weights are 0 too: the loss is convex, so random weights would only raise the loss.
    /// - With hidden layers, weights are uniform random numbers. The variance is 2 / inputs before a rectifier (He et al. 2015),
    ///   and 2 / (inputs + outputs) in the last layer (Glorot and Bengio 2010).
    pub fn initialize(&self, seed: u64) -> Vec<f32> {
        let mut parameters = Vec::with_capacity(self.parameter_count());
        for index in 0..self.stage.layers().len() {
            parameters.extend(self.initialize_layer(index, seed));
        }
        parameters
    }

    /// Returns the initial parameters of one layer: see [`initialize`](Self::initialize).
    pub(crate) fn initialize_layer(&self, index: usize, seed: u64) -> Vec<f32> {
        let layer = self.stage.layers()[index].moved_to(0);
        let mut parameters = vec![0.0; layer.range().len()];
        let layers = self.stage.layers().len();
        if layers > 1 {
            let fan = if index + 1 == layers { layer.inputs + layer.outputs } else { layer.inputs };
            let mut stream = random::stream("initialize", seed, index as u64);
            layer.initialize(&mut parameters, &mut stream, (6.0 / fan as f32).sqrt());
        }
        parameters
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
        self.stage.forward(parameters, workspace, rows);
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
        self.stage.forward(parameters, workspace, count);
        self.loss.evaluate(&workspace.output(count), targets, rows)
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

    /// Does the same as [`differentiate`](Self::differentiate). With [`EarlierGradients::Keep`], adds
    /// the gradient to the gradients that are already in `gradients`.
    pub(crate) fn accumulate(
        &self,
        parameters: &[f32],
        (gradients, earlier): (&mut [f32], EarlierGradients),
        workspace: &mut Workspace,
        (targets, rows): (&Targets, impl ExactSizeIterator<Item = usize> + Clone),
        weight: f32,
        ranges: (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> LossSums {
        let count = rows.len();
        let sums = self.evaluate(parameters, workspace, targets, rows.clone());
        if count > 0 {
            self.loss.differentiate(workspace.output_delta_mut(count), targets, rows, weight);
        }
        self.stage.backward(parameters, (gradients, earlier), workspace, count, ranges);
        sums
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, s};

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
