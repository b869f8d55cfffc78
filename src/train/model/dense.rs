//! A fully connected layer: y = f(x W' + b), where W' is the transpose of W, and f is the activation. W has the shape (outputs,
//! inputs), as in `PyTorch`.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};

use super::layer::{
    Activation, BackwardPass, CONTIGUITY_MESSAGE, ForwardMode, GradientSink, Layer, SavedForBackward,
};

/// A fully connected layer. The biases follow the weights in the parameters.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Dense {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) activation: Activation,
    /// The initial weights are uniform random numbers from `-weight_bound` to `weight_bound`.
    pub(crate) weight_bound: f32,
    /// Whether the layer adds biases. If a layer is divided over ranks, only one rank adds the biases.
    pub(crate) has_biases: bool,
}

impl Dense {
    pub(crate) fn weight_count(&self) -> usize {
        self.inputs * self.outputs
    }

    /// Returns the number of biases.
    fn bias_count(&self) -> usize {
        if self.has_biases { self.outputs } else { 0 }
    }

    fn weight<'a>(&self, parameters: &'a [f32]) -> ArrayView2<'a, f32> {
        ArrayView2::from_shape((self.outputs, self.inputs), &parameters[..self.weight_count()])
            .expect("the range has outputs x inputs elements")
    }

    /// Computes the gradient of the parameters. Reports ranges of final gradients from the last parameter to the
    /// first.
    fn backward_parameters(
        &self,
        input: &ArrayView2<'_, f32>,
        delta: &ArrayView2<'_, f32>,
        gradients: &mut GradientSink<'_>,
    ) {
        let (start, end) = (self.weight_count(), self.weight_count() + self.bias_count());
        let factor_of_earlier_gradients = gradients.factor_of_earlier_gradients();
        if self.has_biases {
            let mut biases = ArrayViewMut1::from(gradients.slice_mut(start..end));
            if factor_of_earlier_gradients == 0.0 {
                biases.fill(0.0);
            }
            biases += &delta.sum_axis(Axis(0));
        }
        let rows_at_once =
            (gradients.elements_per_report() / self.inputs.max(1)).clamp(1, self.outputs.max(1));
        let mut row_end = self.outputs;
        // The first range that is reported contains the biases and the last rows of the weights.
        let mut ready_end = end;
        while row_end > 0 {
            let rows = row_end.saturating_sub(rows_at_once)..row_end;
            let range = rows.start * self.inputs..rows.end * self.inputs;
            let mut weights =
                ArrayViewMut2::from_shape((rows.len(), self.inputs), gradients.slice_mut(range.clone()))
                    .expect("the range has rows x inputs elements");
            let delta = delta.slice(s![.., rows.clone()]);
            general_mat_mul(1.0, &delta.t(), input, factor_of_earlier_gradients, &mut weights);
            gradients.report_final_range(range.start..ready_end);
            (row_end, ready_end) = (rows.start, range.start);
        }
    }
}

impl Layer for Dense {
    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn tensor_names_and_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let mut tensors = vec![("weight", vec![self.outputs, self.inputs])];
        if self.has_biases {
            tensors.push(("bias", vec![self.outputs]));
        }
        tensors
    }

    fn multiplications(&self) -> u64 {
        self.weight_count() as u64
    }

    fn as_dense(&self) -> Option<&Dense> {
        Some(self)
    }

    fn initialize(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        let (weights, biases) = parameters.split_at_mut(self.weight_count());
        weights.fill_with(|| uniform() * self.weight_bound);
        biases.fill(0.0);
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        _: &mut SavedForBackward,
        _: ForwardMode<'_>,
    ) {
        if self.has_biases {
            output.assign(&ArrayView1::from(&parameters[self.weight_count()..]));
        } else {
            output.fill(0.0);
        }
        general_mat_mul(1.0, &input, &self.weight(parameters).t(), 1.0, &mut output);
        self.activation.apply(output.as_slice_mut().expect(CONTIGUITY_MESSAGE));
    }

    fn backward(&self, parameters: &[f32], pass: BackwardPass<'_>, gradients: &mut GradientSink<'_>) {
        let BackwardPass { input, output, mut delta, input_delta, .. } = pass;
        self.activation.differentiate(
            delta.as_slice_mut().expect(CONTIGUITY_MESSAGE),
            output.as_slice().expect(CONTIGUITY_MESSAGE),
        );
        self.backward_parameters(&input, &delta.view(), gradients);
        if let Some(mut input_delta) = input_delta {
            general_mat_mul(1.0, &delta, &self.weight(parameters), 0.0, &mut input_delta);
        }
    }
}
