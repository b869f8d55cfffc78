//! Layers that the crate `candle` computes and differentiates.

use std::fmt::Debug;

use candle_core::{Device, Result, Tensor, Var};
use ndarray::{ArrayView2, ArrayViewMut2};

use super::layer::{BackwardPass, CONTIGUITY_MESSAGE, ForwardMode, GradientSink, Layer, SavedForBackward};

/// A function with parameters that the crate `candle` computes. [`CandleLayer`] implements [`Layer`] with this function.
pub(crate) trait CandleModule: Debug + Send + Sync + 'static {
    /// Returns the number of inputs for each sample.
    fn input_count(&self) -> usize;

    /// Returns the number of outputs for each sample.
    fn output_count(&self) -> usize;

    /// Returns the name and the shape of each tensor of parameters.
    fn tensor_names_and_shapes(&self) -> Vec<(&'static str, Vec<usize>)>;

    /// Returns the approximate number of multiplications of a forward pass, for each sample.
    fn multiplication_count(&self) -> u64;

    /// Returns the approximate number of values that a forward pass computes for each sample.
    fn value_count(&self) -> usize;

    /// Sets the initial parameters. `uniform` returns random numbers from -1 up to, but not including, 1.
    fn set_initial_parameters(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32);

    /// Returns the outputs, in any shape whose first dimension is the sample. `parameters` holds the tensors in the
    /// order of [`tensor_names_and_shapes`](Self::tensor_names_and_shapes). `input` has the shape (samples, inputs).
    /// The function must not fail for any values of the parameters and the inputs.
    fn forward(&self, parameters: &[Tensor], input: &Tensor) -> Result<Tensor>;
}

/// A layer that candle computes. The forward pass of a training step records the operations, and the backward pass
/// differentiates them.
#[derive(Debug)]
pub(crate) struct CandleLayer<M>(pub(crate) M);

/// The data that the layer stores between a forward and a backward pass.
#[derive(Debug)]
struct RecordedPass {
    parameters: Vec<Var>,
    input: Var,
    output: Tensor,
}

/// The message of `expect` for operations of candle, which fail only for shapes that do not fit.
const SHAPES_MESSAGE: &str = "the shapes of a module's tensors fit each other";

impl<M: CandleModule> CandleLayer<M> {
    /// Computes the outputs as a tensor of the shape (samples, outputs).
    fn compute_outputs(&self, parameters: &[Tensor], input: &Tensor) -> Result<Tensor> {
        let rows = input.dim(0)?;
        self.0.forward(parameters, input)?.reshape((rows, self.0.output_count()))
    }

    /// Copies the parameters to tensors.
    fn parameter_tensors(&self, parameters: &[f32]) -> Result<Vec<Tensor>> {
        let mut rest = parameters;
        let tensors = self.0.tensor_names_and_shapes().into_iter().map(|(_, shape)| {
            let (values, others) = rest.split_at(shape.iter().product());
            rest = others;
            Tensor::from_slice(values, shape, &Device::Cpu)
        });
        tensors.collect()
    }

    /// Computes the outputs. Records the operations if `records_operations` is true.
    fn run_forward(
        &self,
        parameters: &[f32],
        input: &ArrayView2<'_, f32>,
        records_operations: bool,
    ) -> Result<(Tensor, Option<RecordedPass>)> {
        let parameters = self.parameter_tensors(parameters)?;
        let input = to_tensor(input)?;
        if !records_operations {
            return Ok((self.compute_outputs(&parameters, &input)?, None));
        }
        let variables: Vec<Var> = parameters.iter().map(Var::from_tensor).collect::<Result<_>>()?;
        let tracked: Vec<Tensor> = variables.iter().map(|variable| variable.as_tensor().clone()).collect();
        let input = Var::from_tensor(&input)?;
        let output = self.compute_outputs(&tracked, &input)?;
        Ok((output.clone(), Some(RecordedPass { parameters: variables, input, output })))
    }
}

impl RecordedPass {
    /// Returns the gradient of each tensor of parameters, or `None` for a tensor on which the outputs do not depend. Also
    /// returns the gradient of the inputs, or `None` if the outputs do not depend on the inputs.
    fn differentiate(self, delta: &ArrayView2<'_, f32>) -> Result<(Vec<Option<Tensor>>, Option<Tensor>)> {
        let mut gradients = (self.output * to_tensor(delta)?)?.sum_all()?.backward()?;
        let parameters = self.parameters.iter().map(|variable| gradients.remove(variable)).collect();
        Ok((parameters, gradients.remove(&self.input)))
    }
}

/// Copies an array of samples to a tensor.
fn to_tensor(array: &ArrayView2<'_, f32>) -> Result<Tensor> {
    Tensor::from_slice(array.as_slice().expect(CONTIGUITY_MESSAGE), array.dim(), &Device::Cpu)
}

/// Returns the values of a tensor in row-major order.
fn to_values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|flat| flat.to_vec1()).expect("the tensor holds f32")
}

impl<M: CandleModule> Layer for CandleLayer<M> {
    fn inputs(&self) -> usize {
        self.0.input_count()
    }

    fn outputs(&self) -> usize {
        self.0.output_count()
    }

    fn tensor_names_and_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        self.0.tensor_names_and_shapes()
    }

    fn multiplications(&self) -> u64 {
        self.0.multiplication_count()
    }

    fn values_per_sample(&self) -> usize {
        self.0.value_count()
    }

    fn initialize(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        self.0.set_initial_parameters(parameters, uniform);
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        saved: &mut SavedForBackward,
        mode: ForwardMode<'_>,
    ) {
        let records_operations = matches!(mode, ForwardMode::Training(..));
        let (computed, recorded) =
            self.run_forward(parameters, &input, records_operations).expect(SHAPES_MESSAGE);
        output.as_slice_mut().expect(CONTIGUITY_MESSAGE).copy_from_slice(&to_values(&computed));
        if let Some(recorded) = recorded {
            saved.other = Some(Box::new(recorded));
        }
    }

    fn backward(&self, _: &[f32], pass: BackwardPass<'_>, gradients: &mut GradientSink<'_>) {
        let BackwardPass { delta, input_delta, saved, .. } = pass;
        let recorded = saved.other.take().and_then(|recorded| recorded.downcast::<RecordedPass>().ok());
        let recorded = recorded.expect("the forward pass of the batch recorded its operations");
        let (tensors, input_gradient) = recorded.differentiate(&delta.view()).expect(SHAPES_MESSAGE);
        let rows = delta.nrows();
        gradients.add_gradients(rows, |group, target| {
            assert_eq!(group, 0..rows, "reproducible runs refuse models of candle");
            let mut rest = target;
            for ((_, shape), tensor) in self.0.tensor_names_and_shapes().iter().zip(&tensors) {
                let (values, others) = rest.split_at_mut(shape.iter().product());
                rest = others;
                if let Some(tensor) = tensor {
                    values.iter_mut().zip(to_values(tensor)).for_each(|(value, new)| *value += new);
                }
            }
        });
        if let Some(mut input_delta) = input_delta {
            let values = input_gradient.expect("each module that is not the first differentiates its input");
            let target = input_delta.as_slice_mut().expect(CONTIGUITY_MESSAGE);
            target.copy_from_slice(&to_values(&values));
        }
    }
}
