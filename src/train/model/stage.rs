//! A stage: consecutive layers of a model. The forward pass computes the output of the last layer from the input of
//! the first layer. The backward pass computes the gradient of the stage's parameters, and the derivative of the loss
//! with respect to the stage's input.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array2, ArrayView2, ArrayViewMut2, s};

use super::layer::{
    BackwardPass, ForwardMode, GradientSink, GradientUpdate, Layer, LayerError, OneRank, SavedForBackward,
    SumOrder, SumOverRanks,
};

/// Consecutive layers of a model. A `Stage` does not contain the parameters: the caller passes the parameters of the stage to
/// each call, as one flat vector.
#[derive(Clone, Debug)]
pub(crate) struct Stage {
    layers: Vec<PlacedLayer>,
    /// Whether the backward pass computes the derivative of the loss with respect to the input. The first stage of a
    /// model does not compute this derivative.
    differentiates_input: bool,
}

/// One rank's part of a batch, in a backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchPart<'a> {
    /// The number of samples.
    pub(crate) rows: usize,
    /// How the gradients of the samples are added.
    pub(crate) order: SumOrder<'a>,
    /// The ranks that compute the batch together.
    pub(crate) ranks: &'a dyn SumOverRanks,
}

/// A layer of a stage, and the range of the layer's parameters in the stage's flat vector of parameters.
#[derive(Clone, Debug)]
pub(crate) struct PlacedLayer {
    pub(crate) layer: Arc<dyn Layer>,
    /// The range of the layer's parameters.
    pub(crate) range: Range<usize>,
}

/// The memory for the forward and the backward pass of a stage. Allocate a workspace once, for the largest batch.
#[derive(Debug)]
pub struct Workspace {
    /// The input of the first layer. The caller writes the features of n samples to the first n rows.
    pub input: Array2<f32>,
    /// The output of each layer.
    outputs: Vec<Array2<f32>>,
    /// The data that each layer stores between its forward and its backward pass.
    saved: Vec<SavedForBackward>,
    /// The derivatives of the loss with respect to the output and to the input of the current layer of the backward
    /// pass. Before the pass, `deltas[0]` holds the derivative with respect to the output of the last layer.
    deltas: [Vec<f32>; 2],
    /// Memory for the gradients of row groups: see [`SumOrder::RowGroups`].
    scratch: Vec<f32>,
}

impl Workspace {
    /// Returns the output of the last layer for the first `rows` samples.
    pub(crate) fn output(&self, rows: usize) -> ArrayView2<'_, f32> {
        self.outputs.last().expect("a stage has at least one layer").slice(s![..rows, ..])
    }

    /// Returns the memory to which the caller writes the derivative of the loss with respect to the output before the
    /// backward pass.
    pub(crate) fn output_delta_mut(&mut self, rows: usize) -> ArrayViewMut2<'_, f32> {
        let columns = self.output(rows).ncols();
        rows_mut(&mut self.deltas[0], (rows, columns))
    }

    /// Copies the output to [`output_delta_mut`](Self::output_delta_mut).
    pub(crate) fn copy_output_to_delta(&mut self, rows: usize) {
        let output = self.outputs.last().expect("a stage has at least one layer").slice(s![..rows, ..]);
        rows_mut(&mut self.deltas[0], output.dim()).assign(&output);
    }

    /// Returns the output of the last layer for the first `rows` samples as a mutable array.
    pub(crate) fn output_mut(&mut self, rows: usize) -> ArrayViewMut2<'_, f32> {
        self.outputs.last_mut().expect("a stage has at least one layer").slice_mut(s![..rows, ..])
    }

    /// Returns the derivative of the loss with respect to the input. Valid after a backward pass of a stage that computes
    /// this derivative: see [`Stage::with_input_derivative`].
    pub(crate) fn input_delta_mut(&mut self, rows: usize) -> ArrayViewMut2<'_, f32> {
        // After each layer, the backward pass swaps the two vectors.
        let last = self.outputs.len() % self.deltas.len();
        rows_mut(&mut self.deltas[last], (rows, self.input.ncols()))
    }
}

impl Stage {
    /// Creates a stage. The parameters of the layers are stored one after the other, from index 0.
    pub(crate) fn new(layers: Vec<Arc<dyn Layer>>) -> Self {
        let mut start = 0_usize;
        let place = |layer: Arc<dyn Layer>| {
            let range = start..start.saturating_add(layer.parameter_count());
            start = range.end;
            PlacedLayer { layer, range }
        };
        Self { layers: layers.into_iter().map(place).collect(), differentiates_input: false }
    }

    /// Makes the backward pass also compute the derivative of the loss with respect to the stage's input.
    pub(crate) fn with_input_derivative(self) -> Self {
        Self { differentiates_input: true, ..self }
    }

    /// Returns a new stage with the layers `layers` of this stage. The parameters of the new stage begin at index 0.
    pub(crate) fn select(&self, layers: Range<usize>) -> Self {
        let differentiates_input = self.differentiates_input || layers.start > 0;
        let layers = self.layers[layers].iter().map(|layer| Arc::clone(&layer.layer)).collect();
        Self { differentiates_input, ..Self::new(layers) }
    }

    /// Returns the range of the parameters of the layers `layers`.
    pub(crate) fn parameter_range(&self, layers: Range<usize>) -> Range<usize> {
        match &self.layers[layers] {
            [] => 0..0,
            [first, .., last] => first.range.start..last.range.end,
            [layer] => layer.range.clone(),
        }
    }

    /// Divides the layers into blocks. Each block starts with a layer with parameters, and also holds the layers
    /// without parameters that follow. Layers without parameters at the start of the stage belong to the first block.
    pub(crate) fn blocks_with_parameters(&self) -> Vec<Range<usize>> {
        let with_parameters = self.layers.iter().enumerate().filter(|(_, layer)| !layer.range.is_empty());
        let mut starts: Vec<usize> = with_parameters.map(|(index, _)| index).skip(1).collect();
        starts.insert(0, 0);
        starts.push(self.layers.len());
        starts.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }

    /// Returns the approximate number of multiplications for each sample in a forward pass of the layers `layers`.
    pub(crate) fn multiplications(&self, layers: Range<usize>) -> u64 {
        self.layers[layers].iter().fold(0, |sum, layer| sum.saturating_add(layer.layer.multiplications()))
    }

    /// Returns the number of inputs and the number of outputs.
    pub(crate) fn input_and_output_widths(&self) -> (usize, usize) {
        let outputs = self.layers.last().map_or(0, |last| last.layer.outputs());
        (self.layers.first().map_or(0, |first| first.layer.inputs()), outputs)
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
    pub(crate) fn allocate_workspace(&self, rows: usize) -> Workspace {
        let layers = || self.layers.iter().map(|PlacedLayer { layer, .. }| layer);
        let (inputs, _) = self.input_and_output_widths();
        let widest = layers().map(|layer| layer.outputs()).max().unwrap_or_default();
        let widest = if self.differentiates_input { widest.max(inputs) } else { widest };
        Workspace {
            input: Array2::zeros((rows, inputs)),
            outputs: layers().map(|layer| Array2::zeros((rows, layer.outputs()))).collect(),
            saved: layers().map(|layer| layer.allocate_saved(rows)).collect(),
            deltas: [vec![0.0; rows * widest], vec![0.0; rows * widest]],
            scratch: Vec::new(),
        }
    }

    /// Computes the outputs for the first `rows` rows of [`Workspace::input`]. If `rows` is 0, only the layers
    /// that add numbers over ranks run.
    ///
    /// # Panics
    ///
    /// If the workspace has fewer than `rows` rows.
    pub(crate) fn forward(
        &self,
        parameters: &[f32],
        workspace: &mut Workspace,
        rows: usize,
        mode: ForwardMode<'_>,
    ) -> Result<(), LayerError> {
        let Workspace { input, outputs, saved, .. } = workspace;
        for (index, PlacedLayer { layer, range }) in self.layers.iter().enumerate() {
            if rows == 0 && !layer.uses_sums_over_ranks() {
                continue;
            }
            let (earlier, from) = outputs.split_at_mut(index);
            let layer_input = earlier.last().unwrap_or(input).slice(s![..rows, ..]);
            let output = from[0].slice_mut(s![..rows, ..]);
            layer
                .forward(&parameters[range.clone()], layer_input, output, &mut saved[index], mode)
                .map_err(|problem| LayerError::new(layer.as_ref(), problem))?;
        }
        Ok(())
    }

    /// Reads [`Workspace::output_delta_mut`], and computes `gradients` and [`Workspace::input_delta_mut`]. The last
    /// pass with this workspace must have been the forward pass for the same `rows` samples. Without samples, the
    /// gradient is 0.
    ///
    /// The backward pass goes from the last parameter to the first. As soon as a range of `gradients` is final, the
    /// pass calls `on_gradient_ready` with this range and with `gradients`. A fully connected layer has ranges of about
    /// `elements_per_report` elements. Every other layer has one range. Without samples, every layer has one range.
    pub(crate) fn backward(
        &self,
        parameters: &[f32],
        (gradients, update): (&mut [f32], GradientUpdate),
        workspace: &mut Workspace,
        rows: usize,
        (elements_per_report, on_gradient_ready): (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> Result<(), LayerError> {
        let part = BatchPart { rows, order: SumOrder::Any, ranks: &OneRank };
        let reports = (elements_per_report, on_gradient_ready);
        self.backward_part(parameters, (gradients, update), workspace, part, reports)
    }

    /// Does the same as [`backward`](Self::backward), for this rank's part of a batch that several ranks compute.
    pub(crate) fn backward_part(
        &self,
        parameters: &[f32],
        (gradients, update): (&mut [f32], GradientUpdate),
        workspace: &mut Workspace,
        BatchPart { rows, order, ranks }: BatchPart<'_>,
        (elements_per_report, mut on_gradient_ready): (usize, impl FnMut(Range<usize>, &mut [f32])),
    ) -> Result<(), LayerError> {
        let Workspace { input, outputs, saved, deltas: [delta, input_delta], scratch } = workspace;
        let (mut delta, mut input_delta) = (delta, input_delta);
        for (index, PlacedLayer { layer, range }) in self.layers.iter().enumerate().rev() {
            let gradients = (&mut *gradients, update);
            let order = (order, &mut *scratch);
            let mut sink = GradientSink::new(
                gradients,
                range.clone(),
                elements_per_report,
                &mut on_gradient_ready,
                order,
            );
            if rows == 0 && !layer.uses_sums_over_ranks() {
                sink.report_without_samples();
                continue;
            }
            let layer_input = if index > 0 { &outputs[index - 1] } else { &*input };
            let pass = BackwardPass {
                input: layer_input.slice(s![..rows, ..]),
                output: outputs[index].slice(s![..rows, ..]),
                delta: rows_mut(delta, (rows, layer.outputs())),
                input_delta: (index > 0 || self.differentiates_input)
                    .then(|| rows_mut(input_delta, (rows, layer.inputs()))),
                saved: &mut saved[index],
                ranks,
            };
            layer
                .backward(&parameters[range.clone()], pass, &mut sink)
                .map_err(|problem| LayerError::new(layer.as_ref(), problem))?;
            sink.finish();
            std::mem::swap(&mut delta, &mut input_delta);
        }
        Ok(())
    }
}

/// Returns the first `rows` rows of an array with `columns` columns.
fn rows_mut(values: &mut [f32], (rows, columns): (usize, usize)) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((rows, columns), &mut values[..rows * columns])
        .expect("the workspace has memory for the widest layer")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::data::Targets;
    use crate::train::model::layer::StepSeed;
    use crate::train::model::{Loss, Network, TrainingBatch};
    use crate::train::random;

    /// However the network is divided into stages, the gradient has the same bits as the gradient of the whole network.
    #[test]
    fn the_stages_of_a_network_compute_the_gradient_of_the_network() {
        let network = Network::new(&"mlp:6,5,4".parse().unwrap(), 7, 3, Loss::CrossEntropy).unwrap();
        let (whole, targets) = (network.stage(), Targets::Classes(vec![0, 2, 1]));
        let parameters = network.initialize(1);
        let mut stream = random::random_stream("test", 1, 2);
        let samples = Array2::from_shape_simple_fn((3, 7), || random::symmetric_uniform(&mut stream, 1.0));
        let mut expected = vec![f32::NAN; parameters.len()];
        let mut workspace = network.allocate_workspace(3);
        workspace.input.assign(&samples);
        let no_ranges = || (usize::MAX, |_, _: &mut [f32]| {});
        let (step, update) = (StepSeed::default(), GradientUpdate::Replace);
        let batch = TrainingBatch {
            targets: &targets,
            indices: &[0, 1, 2],
            weight: 1.0,
            step,
            update,
            ranks: &OneRank,
        };
        network.differentiate(&parameters, &mut expected, &mut workspace, batch, no_ranges()).unwrap();
        for cuts in [vec![0, 4], vec![0, 1, 4], vec![0, 2, 3, 4], vec![0, 1, 2, 3, 4]] {
            let ranges: Vec<Range<usize>> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
            let stages: Vec<Stage> = ranges.iter().map(|layers| whole.select(layers.clone())).collect();
            let mut workspaces: Vec<Workspace> =
                stages.iter().map(|stage| stage.allocate_workspace(3)).collect();
            let mut values = samples.clone();
            for (index, stage) in stages.iter().enumerate() {
                workspaces[index].input.assign(&values);
                let range = whole.parameter_range(ranges[index].clone());
                stage
                    .forward(&parameters[range], &mut workspaces[index], 3, ForwardMode::Evaluation)
                    .unwrap();
                values = workspaces[index].output(3).to_owned();
            }
            let mut found = vec![f32::NAN; parameters.len()];
            network.loss().differentiate(values.view_mut(), &targets, 0..3, 1.0);
            for (index, stage) in stages.iter().enumerate().rev() {
                let range = whole.parameter_range(ranges[index].clone());
                let gradients = (&mut found[range.clone()], GradientUpdate::Replace);
                workspaces[index].output_delta_mut(3).assign(&values);
                stage
                    .backward(&parameters[range], gradients, &mut workspaces[index], 3, no_ranges())
                    .unwrap();
                if index > 0 {
                    values = workspaces[index].input_delta_mut(3).to_owned();
                }
            }
            assert_eq!(found, expected, "{cuts:?}");
        }
    }
}
