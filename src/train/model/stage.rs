//! A stage: consecutive layers of a model. The forward pass computes the output of the last layer from the input of the first
//! layer. The backward pass computes the gradient of the parameters.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array2, ArrayView2, ArrayViewMut2, s};

use super::layer::{BackwardPass, EarlierGradients, GradientSink, Layer, LayerMemory, Mode};

/// Consecutive layers of a model. A `Stage` does not contain the parameters: the caller passes the parameters of the stage to
/// each call, as one flat vector.
#[derive(Clone, Debug)]
pub(crate) struct Stage {
    layers: Vec<PlacedLayer>,
}

/// A layer, and the range of its parameters in the flat vector of the stage.
#[derive(Clone, Debug)]
pub(crate) struct PlacedLayer {
    pub(crate) layer: Arc<dyn Layer>,
    pub(crate) range: Range<usize>,
}

/// The memory for the forward and the backward pass of a stage. This memory is allocated once, for the largest batch.
#[derive(Debug)]
pub struct Workspace {
    /// The input of the first layer. The caller writes a row for each sample into the first rows.
    pub input: Array2<f32>,
    /// The output of each layer.
    outputs: Vec<Array2<f32>>,
    /// What each layer stores between its forward and its backward pass.
    memories: Vec<LayerMemory>,
    /// The derivatives of the loss with respect to the outputs of two successive layers. Before a backward pass, the first
    /// vector has the derivative with respect to the output of the last layer.
    deltas: [Vec<f32>; 2],
}

impl Workspace {
    /// Returns the output of the last layer for the first `rows` samples.
    pub(crate) fn output(&self, rows: usize) -> ArrayView2<'_, f32> {
        self.outputs.last().expect("a stage has at least one layer").slice(s![..rows, ..])
    }

    /// Returns where the caller writes the derivative of the loss with respect to the output, before the backward pass.
    pub(crate) fn output_delta_mut(&mut self, rows: usize) -> ArrayViewMut2<'_, f32> {
        let columns = self.output(rows).ncols();
        rows_mut(&mut self.deltas[0], (rows, columns))
    }

    /// Copies the output to [`output_delta_mut`](Self::output_delta_mut).
    pub(crate) fn copy_output_to_delta(&mut self, rows: usize) {
        let output = self.outputs.last().expect("a stage has at least one layer").slice(s![..rows, ..]);
        rows_mut(&mut self.deltas[0], output.dim()).assign(&output);
    }
}

impl Stage {
    /// Creates a stage. The parameters of the layers follow each other, from index 0.
    pub(crate) fn new(layers: Vec<Arc<dyn Layer>>) -> Self {
        let mut start = 0_usize;
        let place = |layer: Arc<dyn Layer>| {
            let range = start..start.saturating_add(layer.parameter_count());
            start = range.end;
            PlacedLayer { layer, range }
        };
        Self { layers: layers.into_iter().map(place).collect() }
    }

    /// Returns the layers.
    pub(crate) fn layers(&self) -> &[PlacedLayer] {
        &self.layers
    }

    /// Returns the number of parameters.
    pub(crate) fn parameter_count(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.range.end)
    }

    /// Allocates the memory for batches of up to `rows` samples.
    pub(crate) fn workspace(&self, rows: usize) -> Workspace {
        let layers = || self.layers.iter().map(|PlacedLayer { layer, .. }| layer);
        let widest = layers().map(|layer| layer.outputs()).max().unwrap_or_default();
        Workspace {
            input: Array2::zeros((rows, self.layers.first().map_or(0, |first| first.layer.inputs()))),
            outputs: layers().map(|layer| Array2::zeros((rows, layer.outputs()))).collect(),
            memories: layers().map(|layer| layer.memory(rows)).collect(),
            deltas: [vec![0.0; rows * widest], vec![0.0; rows * widest]],
        }
    }

    /// Computes the outputs for the first `rows` rows of [`Workspace::input`].
    ///
    /// # Panics
    ///
    /// If the workspace has fewer rows.
    pub(crate) fn forward(&self, parameters: &[f32], workspace: &mut Workspace, rows: usize, mode: Mode<'_>) {
        let Workspace { input, outputs, memories, .. } = workspace;
        for (index, PlacedLayer { layer, range }) in self.layers.iter().enumerate() {
            let (before, from) = outputs.split_at_mut(index);
            let layer_input = before.last().unwrap_or(input).slice(s![..rows, ..]);
            let output = from[0].slice_mut(s![..rows, ..]);
            layer.forward(&parameters[range.clone()], layer_input, output, &mut memories[index], mode);
        }
    }

    /// Computes the gradient of the parameters from [`Workspace::output_delta_mut`]. The forward pass for the same `rows` samples
    /// must be the last pass that used this workspace. Without samples, the gradient is 0.
    ///
    /// The backward pass goes from the last parameter to the first. As soon as a range of `gradients` is final, the
    /// pass calls `on_gradient_ready` for this range. A range of a fully connected layer has about `slice` elements. The
    /// gradients of any other layer are one range, and those of each layer if there are no samples.
    pub(crate) fn backward(
        &self,
        parameters: &[f32],
        (gradients, earlier): (&mut [f32], EarlierGradients),
        workspace: &mut Workspace,
        rows: usize,
        (slice, mut on_gradient_ready): (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) {
        let Workspace { input, outputs, memories, deltas: [delta, input_delta] } = workspace;
        let (mut delta, mut input_delta) = (delta, input_delta);
        for (index, PlacedLayer { layer, range }) in self.layers.iter().enumerate().rev() {
            let gradients = (&mut *gradients, earlier);
            let mut sink = GradientSink::new(gradients, range.clone(), slice, &mut on_gradient_ready);
            if rows == 0 {
                sink.report_no_samples();
                continue;
            }
            let layer_input = if index > 0 { &outputs[index - 1] } else { &*input };
            let pass = BackwardPass {
                input: layer_input.slice(s![..rows, ..]),
                output: outputs[index].slice(s![..rows, ..]),
                delta: rows_mut(delta, (rows, layer.outputs())),
                input_delta: (index > 0).then(|| rows_mut(input_delta, (rows, layer.inputs()))),
                memory: &mut memories[index],
            };
            layer.backward(&parameters[range.clone()], pass, &mut sink);
            std::mem::swap(&mut delta, &mut input_delta);
        }
    }
}

/// Returns the first rows of an array of samples.
fn rows_mut(values: &mut [f32], (rows, columns): (usize, usize)) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((rows, columns), &mut values[..rows * columns])
        .expect("the workspace has memory for the widest layer")
}
