//! A fully connected layer: y = x W' + b, where W' is the transpose of W. W has the shape (outputs, inputs), as in `PyTorch`.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};

use crate::train::random::{RandomStream, symmetric_uniform};

/// The shape of a layer, and the range of its parameters in the flat vector of all parameters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Dense {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// The index of the first weight in the flat vector. The biases follow the weights.
    start: usize,
}

/// What a backward pass does with the gradients that are already in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EarlierGradients {
    /// The new gradients replace the earlier gradients.
    Replace,
    /// The new gradients are added to the earlier gradients.
    Keep,
}

impl Dense {
    pub(crate) fn new(inputs: usize, outputs: usize, start: usize) -> Self {
        Self { inputs, outputs, start }
    }

    /// Returns the same layer with the first weight at the index `start`.
    pub(crate) fn moved_to(&self, start: usize) -> Self {
        Self { start, ..self.clone() }
    }

    pub(crate) fn weight_range(&self) -> Range<usize> {
        self.start..self.start + self.inputs * self.outputs
    }

    pub(crate) fn bias_range(&self) -> Range<usize> {
        let start = self.weight_range().end;
        start..start + self.outputs
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.bias_range().end
    }

    fn weight<'a>(&self, parameters: &'a [f32]) -> ArrayView2<'a, f32> {
        ArrayView2::from_shape((self.outputs, self.inputs), &parameters[self.weight_range()])
            .expect("the range has outputs x inputs elements")
    }

    /// Sets the weights to uniform random numbers from -`bound` to `bound`, and the biases to 0.
    pub(crate) fn initialize(&self, parameters: &mut [f32], stream: &mut RandomStream, bound: f32) {
        parameters[self.weight_range()]
            .iter_mut()
            .for_each(|weight| *weight = symmetric_uniform(stream, bound));
        parameters[self.bias_range()].fill(0.0);
    }

    /// Writes the layer's outputs for each row of `input` to the rows of `output`.
    pub(crate) fn forward(
        &self,
        parameters: &[f32],
        input: &ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
    ) {
        output.assign(&ArrayView1::from(&parameters[self.bias_range()]));
        general_mat_mul(1.0, input, &self.weight(parameters).t(), 1.0, &mut output);
    }

    /// Computes the gradient of the layer's parameters from `delta`, the derivative with respect to the layer's
    /// outputs. Computes slices of about `slice` elements, from the last parameter to the first, and calls `on_ready`
    /// after each slice.
    pub(crate) fn backward_parameters(
        &self,
        (gradients, earlier): (&mut [f32], EarlierGradients),
        input: &ArrayView2<'_, f32>,
        delta: &ArrayView2<'_, f32>,
        slice: usize,
        mut on_ready: impl FnMut(Range<usize>, &mut [f32]),
    ) {
        let mut biases = ArrayViewMut1::from(&mut gradients[self.bias_range()]);
        let earlier_factor = match earlier {
            EarlierGradients::Replace => {
                biases.assign(&delta.sum_axis(Axis(0)));
                0.0
            }
            EarlierGradients::Keep => {
                biases += &delta.sum_axis(Axis(0));
                1.0
            }
        };
        let rows_at_once = (slice / self.inputs.max(1)).clamp(1, self.outputs.max(1));
        let mut end = self.outputs;
        // The first slice contains the biases and the last rows of the weights.
        let mut ready_end = self.range().end;
        while end > 0 {
            let rows = end.saturating_sub(rows_at_once)..end;
            let range = self.start + rows.start * self.inputs..self.start + rows.end * self.inputs;
            let mut weights =
                ArrayViewMut2::from_shape((rows.len(), self.inputs), &mut gradients[range.clone()])
                    .expect("the range has rows x inputs elements");
            let delta = delta.slice(s![.., rows.clone()]);
            general_mat_mul(1.0, &delta.t(), input, earlier_factor, &mut weights);
            on_ready(range.start..ready_end, gradients);
            (end, ready_end) = (rows.start, range.start);
        }
    }

    /// `delta` is the derivative of the loss with respect to the layer's outputs. Computes the derivative with
    /// respect to the layer's inputs.
    pub(crate) fn backward_input(
        &self,
        parameters: &[f32],
        delta: &ArrayView2<'_, f32>,
        mut input_delta: ArrayViewMut2<'_, f32>,
    ) {
        general_mat_mul(1.0, delta, &self.weight(parameters), 0.0, &mut input_delta);
    }
}
