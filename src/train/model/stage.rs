//! A stage: consecutive layers of a model. The forward pass computes the output of the last layer from the input of the first
//! layer. The backward pass computes the gradient of the parameters.

use std::ops::Range;

use ndarray::{Array2, ArrayView2, ArrayViewMut2, Zip, s};

use super::dense::{Dense, EarlierGradients};

/// Consecutive layers of a model, with rectifiers (`ReLU`) between them. A `Stage` does not contain the parameters: the caller
/// passes the parameters of the stage to each call, as one flat vector.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Stage {
    layers: Vec<Dense>,
}

/// The memory for the forward and the backward pass of a stage. This memory is allocated once, for the largest batch.
#[derive(Debug)]
pub struct Workspace {
    /// The input of the first layer. The caller writes a row for each sample into the first rows.
    pub input: Array2<f32>,
    /// The output of each layer.
    outputs: Vec<Array2<f32>>,
    /// The derivative of the loss with respect to the output of each layer that a rectifier follows.
    deltas: Vec<Array2<f32>>,
}

impl Workspace {
    /// Returns the output of the last layer for the first `rows` samples. After a backward pass, the content is unspecified.
    pub(crate) fn output(&self, rows: usize) -> ArrayView2<'_, f32> {
        self.outputs.last().expect("a stage has at least one layer").slice(s![..rows, ..])
    }

    /// Returns where the caller writes the derivative of the loss with respect to the output, before the backward pass. This
    /// is the memory of the output.
    pub(crate) fn output_delta_mut(&mut self, rows: usize) -> ArrayViewMut2<'_, f32> {
        self.outputs.last_mut().expect("a stage has at least one layer").slice_mut(s![..rows, ..])
    }
}

impl Stage {
    /// Creates the stage with all layers of a model. No rectifier follows the last layer. The parameters of the layers follow
    /// each other, from index 0.
    pub(crate) fn new(layers: Vec<Dense>) -> Self {
        Self { layers }
    }

    /// Returns the layers.
    pub(crate) fn layers(&self) -> &[Dense] {
        &self.layers
    }

    /// Returns the number of parameters.
    pub(crate) fn parameter_count(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.range().end)
    }

    /// Allocates the memory for batches of up to `rows` samples.
    pub(crate) fn workspace(&self, rows: usize) -> Workspace {
        let shape = |layer: &Dense| Array2::zeros((rows, layer.outputs));
        let inputs = self.layers[0].inputs;
        let rectified = self.layers.iter().enumerate().filter(|&(index, _)| self.has_rectifier(index));
        Workspace {
            input: Array2::zeros((rows, inputs)),
            outputs: self.layers.iter().map(shape).collect(),
            deltas: rectified.map(|(_, layer)| shape(layer)).collect(),
        }
    }

    /// Returns whether a rectifier follows the layer.
    fn has_rectifier(&self, layer: usize) -> bool {
        layer + 1 < self.layers.len()
    }

    /// Computes the outputs for the first `rows` rows of [`Workspace::input`].
    ///
    /// # Panics
    ///
    /// If the workspace has fewer rows.
    pub(crate) fn forward(&self, parameters: &[f32], workspace: &mut Workspace, rows: usize) {
        let Workspace { input, outputs, .. } = workspace;
        for (index, layer) in self.layers.iter().enumerate() {
            let (before, from) = outputs.split_at_mut(index);
            let layer_input = before.last().unwrap_or(input);
            let mut output = from[0].slice_mut(s![..rows, ..]);
            layer.forward(parameters, &layer_input.slice(s![..rows, ..]), output.view_mut());
            if self.has_rectifier(index) {
                // `max` would turn NaN into 0 and hide that a layer has diverged.
                output.mapv_inplace(|value| if value < 0.0 { 0.0 } else { value });
            }
        }
    }

    /// Computes the gradient of the parameters from [`Workspace::output_delta_mut`]. The forward pass for the same `rows` samples
    /// must be the last pass that used this workspace. Without samples, the gradient is 0.
    ///
    /// The backward pass goes from the last parameter to the first. As soon as a range of `gradients` is final, the
    /// pass calls `on_gradient_ready` for this range. A range has about `slice` elements. Without samples, the gradients of each
    /// layer are one range.
    pub(crate) fn backward(
        &self,
        parameters: &[f32],
        (gradients, earlier): (&mut [f32], EarlierGradients),
        workspace: &mut Workspace,
        rows: usize,
        (slice, mut on_gradient_ready): (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) {
        let Workspace { input, outputs, deltas } = workspace;
        for (index, layer) in self.layers.iter().enumerate().rev() {
            if rows == 0 {
                if earlier == EarlierGradients::Replace {
                    gradients[layer.range()].fill(0.0);
                }
                on_gradient_ready(layer.range(), gradients);
                continue;
            }
            let (before, from) = outputs.split_at_mut(index);
            let mut output = from[0].slice_mut(s![..rows, ..]);
            if self.has_rectifier(index) {
                // Overwrite the rectifier's output, which is no longer needed, with the derivative of the loss with
                // respect to the rectifier's input.
                let delta = deltas[index].slice(s![..rows, ..]);
                Zip::from(&mut output).and(&delta).for_each(|y, &d| *y = if *y > 0.0 { d } else { 0.0 });
            }
            let layer_input = before.last().unwrap_or(input).slice(s![..rows, ..]);
            let gradients = (&mut *gradients, earlier);
            layer.backward_parameters(gradients, &layer_input, &output.view(), slice, &mut on_gradient_ready);
            if index > 0 {
                let input_delta = deltas[index - 1].slice_mut(s![..rows, ..]);
                layer.backward_input(parameters, &output.view(), input_delta);
            }
        }
    }
}
