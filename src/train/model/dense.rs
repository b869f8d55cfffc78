//! A fully connected layer: y = f(x W' + b), where W' is the transpose of W, and f is the activation. W has the shape (outputs,
//! inputs), as in `PyTorch`.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, s};

use super::layer::{
    Activation, BackwardPass, CONTIGUITY_MESSAGE, ForwardMode, GradientSink, Layer, SavedForBackward,
};
use crate::train::arithmetic_check::CHAIN_LENGTH;

/// A fully connected layer. The biases follow the weights in the parameters.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Dense {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) activation: Activation,
    /// The initial weights are uniform random numbers from `-weight_bound` to `weight_bound`.
    pub(crate) weight_bound: f32,
    /// Whether the layer adds biases. If a layer is divided over ranks by its inputs, only rank 0 adds the biases.
    pub(crate) has_biases: bool,
}

impl Dense {
    /// Returns the number of weights.
    pub(crate) fn weight_count(&self) -> usize {
        self.inputs * self.outputs
    }

    /// Returns the number of biases.
    fn bias_count(&self) -> usize {
        if self.has_biases { self.outputs } else { 0 }
    }

    /// Returns the weights as a matrix (outputs x inputs).
    fn weight_matrix<'a>(&self, parameters: &'a [f32]) -> ArrayView2<'a, f32> {
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
        if self.has_biases {
            gradients.compute_gradients(
                start..end,
                (delta.nrows(), usize::MAX),
                |rows, biases, earlier_factor| {
                    let mut biases = ArrayViewMut1::from(biases);
                    if earlier_factor == 0.0 {
                        biases.fill(0.0);
                    }
                    biases += &delta.slice(s![rows, ..]).sum_axis(Axis(0));
                },
            );
        }
        let rows_at_once = gradients.rows_per_report(self.inputs, self.outputs);
        let mut row_end = self.outputs;
        // The first range that is reported contains the biases and the last rows of the weights.
        let mut ready_end = end;
        while row_end > 0 {
            let outputs = row_end.saturating_sub(rows_at_once)..row_end;
            let range = outputs.start * self.inputs..outputs.end * self.inputs;
            gradients.compute_gradients(
                range.clone(),
                (delta.nrows(), CHAIN_LENGTH),
                |rows, weights, earlier_factor| {
                    let mut weights = ArrayViewMut2::from_shape((outputs.len(), self.inputs), weights)
                        .expect("the range has outputs x inputs elements");
                    let delta = delta.slice(s![rows.clone(), outputs.clone()]);
                    general_mat_mul(
                        1.0,
                        &delta.t(),
                        &input.slice(s![rows, ..]),
                        earlier_factor,
                        &mut weights,
                    );
                },
            );
            gradients.report_final_range(range.start..ready_end);
            (row_end, ready_end) = (outputs.start, range.start);
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

    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let mut tensors = vec![("weight".into(), vec![self.outputs, self.inputs])];
        if self.has_biases {
            tensors.push(("bias".into(), vec![self.outputs]));
        }
        tensors
    }

    fn multiplications(&self) -> u64 {
        self.weight_count() as u64
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
    ) -> Result<(), String> {
        if self.has_biases {
            output.assign(&ArrayView1::from(&parameters[self.weight_count()..]));
        } else {
            output.fill(0.0);
        }
        general_mat_mul(1.0, &input, &self.weight_matrix(parameters).t(), 1.0, &mut output);
        self.activation.apply(output.as_slice_mut().expect(CONTIGUITY_MESSAGE));
        Ok(())
    }

    fn backward(
        &self,
        parameters: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String> {
        let BackwardPass { input, output, mut delta, input_delta, .. } = pass;
        self.activation.differentiate(
            delta.as_slice_mut().expect(CONTIGUITY_MESSAGE),
            output.as_slice().expect(CONTIGUITY_MESSAGE),
        );
        self.backward_parameters(&input, &delta.view(), gradients);
        if let Some(mut input_delta) = input_delta {
            general_mat_mul(1.0, &delta, &self.weight_matrix(parameters), 0.0, &mut input_delta);
        }
        Ok(())
    }
}
