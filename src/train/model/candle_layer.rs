//! Layers that the crate `candle` computes and differentiates.

use std::fmt;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Error, ModuleT, Result as CandleResult, Tensor, Var, bail};
use candle_nn::VarBuilder;
use ndarray::{ArrayView2, ArrayViewMut2};

use super::candle_parameters::{
    ModuleTensor, PassTensors, RecorderMemory, TensorRecorder, write_initial_values,
};
use super::layer::{BackwardPass, CONTIGUITY_MESSAGE, ForwardMode, GradientSink, Layer, SavedForBackward};

/// The number of samples of the pass that checks a new module. With a single sample, a module that swaps dimensions could pass
/// the check.
const CHECKED_SAMPLES: usize = 2;

/// A model, or a part of a model, that the crate [`candle`](candle_core) computes. Implement this trait for a model of your own.
/// [`CandleLayer`] makes a [`Layer`] of it, which the trainer trains like every other layer.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::AtomicBool;
///
/// use ringtrain::Group;
/// use ringtrain::candle_core::{ModuleT, Result};
/// use ringtrain::candle_nn::{VarBuilder, linear, seq};
/// use ringtrain::train::data::DataSource;
/// use ringtrain::train::model::{CandleLayer, CandleModule, Layer, ModelSpec, OwnModel};
/// use ringtrain::train::{Config, SilentObserver, run};
///
/// /// A network with one hidden layer.
/// struct Perceptron {
///     inputs: usize,
///     outputs: usize,
/// }
///
/// impl CandleModule for Perceptron {
///     fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
///         Ok(seq()
///             .add(linear(self.inputs, 16, parameters.pp("hidden"))?)
///             .add_fn(|hidden| hidden.relu())
///             .add(linear(16, self.outputs, parameters.pp("output"))?))
///     }
/// }
///
/// let model = OwnModel::new("perceptron", |input, outputs| {
///     let module = Perceptron { inputs: input.features, outputs };
///     Ok(vec![Arc::new(CandleLayer::new("perceptron", input.features, module)?) as Arc<dyn Layer>])
/// });
/// let model = Some(ModelSpec::Own(model));
/// let (epochs, learning_rate) = (Some(5), Some(0.01));
/// let config = Config { model, epochs, learning_rate, ..Config::new(DataSource::Digits) };
/// let mut group = Group::from_environment()?;
/// let summary = run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver)?;
/// assert!(summary.report.test_accuracy > Some(0.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The program must use the same version of candle as this crate, for example through `ringtrain::candle_core` and
/// `ringtrain::candle_nn`.
///
/// # Limits
///
/// - The output for a sample must not depend on the other samples of the batch, because they may be on other ranks. So the
///   batch normalization of `candle_nn` does not work.
/// - All operations between the parameters and the outputs need a backward pass. Some functions of `candle_nn` have none:
///   `LayerNorm` and `RmsNorm` of contiguous tensors, and `ops::softmax_last_dim`. Use `ops::layer_norm_slow`,
///   `ops::rms_norm_slow` and `ops::softmax` instead. [`CandleLayer::new`] returns an error if a parameter gets no gradient.
/// - The derivative of `max_pool2d` is too small in candle 0.11: it is divided by the number of pixels of a window. Take the
///   maximum with `reshape` and `max` instead.
/// - The random numbers of candle, such as those of `candle_nn::Dropout`, do not depend on the seed of the run. With them,
///   the result of a run differs each time.
pub trait CandleModule: Send + Sync + 'static {
    /// Gets the parameters, and returns the function that computes the outputs, for example a
    /// [`Sequential`](candle_nn::Sequential) or a closure.
    ///
    /// The module gets each tensor of parameters by its name, for example with [`candle_nn::linear()`] or
    /// [`VarBuilder::get_with_hints`](candle_nn::VarBuilder), which also say how the initial values are distributed. The trainer
    /// draws the initial values from the seed of the run. All tensors hold `f32` and are on the processor.
    ///
    /// The input of the returned function has the shape (samples, inputs). The first dimension of the output must be the sample.
    /// The other dimensions are flattened. The argument `train` of [`ModuleT::forward_t`] is true in training steps.
    ///
    /// The layer calls this function in each pass, because the parameters change in each step. In each pass, the module must get
    /// tensors with the same names and shapes.
    ///
    /// # Errors
    ///
    /// An error ends the run on all ranks. The message names the layer.
    fn build(&self, parameters: VarBuilder<'_>) -> CandleResult<impl ModuleT>;

    /// Returns the approximate number of multiplications of a forward pass, for each sample. The strategies `pipeline` and
    /// `hybrid` divide the layers by this number. By default, it is the number of parameters.
    fn multiplications(&self) -> Option<u64> {
        None
    }
}

/// A layer that candle computes. The forward pass of a training step records the operations, and the backward pass
/// differentiates them.
pub struct CandleLayer<M> {
    name: String,
    module: M,
    inputs: usize,
    outputs: usize,
    /// The approximate number of values that a forward pass computes for each sample.
    values_per_sample: usize,
    tensors: Vec<ModuleTensor>,
}

/// The data that the layer stores between a forward and a backward pass.
#[derive(Debug)]
struct RecordedPass {
    parameters: Vec<Tensor>,
    input: Tensor,
    /// The outputs, with the shape (samples, outputs).
    output: Tensor,
}

impl<M: CandleModule> CandleLayer<M> {
    /// Creates a layer with `inputs` inputs for each sample. `name` is for error messages. Runs a forward and a backward pass
    /// to find the parameters and the number of outputs. In this pass, all inputs and parameters are 0.
    ///
    /// # Errors
    ///
    /// A text that names the layer and says why the pass failed, or which parameter gets no gradient.
    pub fn new(name: impl Into<String>, inputs: usize, module: M) -> Result<Self, String> {
        let name = name.into();
        match check_module(&module, inputs) {
            Ok(CheckedModule { outputs, values_per_sample, tensors }) => {
                Ok(Self { name, module, inputs, outputs, values_per_sample, tensors })
            }
            Err(error) => Err(format!("has a layer `{name}` that fails: {}", describe(error))),
        }
    }

    /// Does the same as [`new`](Self::new) without a pass, and without memory for the parameters. The caller knows the numbers of
    /// inputs and outputs, and the approximate number of values that a forward pass computes for each sample.
    pub(super) fn new_unchecked(
        name: &str,
        (inputs, outputs): (usize, usize),
        module: M,
        values_per_sample: usize,
    ) -> Result<Self, String> {
        let recorder = TensorRecorder::new(RecorderMemory::Shared);
        if let Err(error) = module.build(recorder.builder()) {
            return Err(format!("has a layer `{name}` that fails: {}", describe(error)));
        }
        let tensors = recorder.into_tensors().into_iter().map(|(tensor, _)| tensor).collect();
        Ok(Self { name: name.to_owned(), module, inputs, outputs, values_per_sample, tensors })
    }

    /// Computes the outputs. In a training step, records the operations.
    fn compute_outputs(
        &self,
        parameters: &[f32],
        input: &ArrayView2<'_, f32>,
        train: bool,
    ) -> CandleResult<RecordedPass> {
        let new_tensor = |values: &[f32], shape: &[usize]| {
            if train {
                Var::from_slice(values, shape, &Device::Cpu).map(Var::into_inner)
            } else {
                Tensor::from_slice(values, shape, &Device::Cpu)
            }
        };
        let parameters: Vec<Tensor> = self
            .tensors
            .iter()
            .map(|tensor| new_tensor(&parameters[tensor.range.clone()], &tensor.shape))
            .collect::<CandleResult<_>>()?;
        let rows = input.nrows();
        let input = new_tensor(input.as_slice().expect(CONTIGUITY_MESSAGE), input.shape())?;
        let builder = PassTensors { known: &self.tensors, values: &parameters }.into_builder();
        let output = self.module.build(builder)?.forward_t(&input, train)?;
        let output = output.to_dtype(DType::F32)?.reshape((rows, self.outputs))?;
        Ok(RecordedPass { parameters, input, output })
    }
}

/// What the check of a module found out.
struct CheckedModule {
    outputs: usize,
    values_per_sample: usize,
    tensors: Vec<ModuleTensor>,
}

/// Runs a forward and a backward pass with [`CHECKED_SAMPLES`] samples. Checks that all parameters get a gradient.
fn check_module(module: &impl CandleModule, inputs: usize) -> CandleResult<CheckedModule> {
    let recorder = TensorRecorder::new(RecorderMemory::Variables);
    let input = Var::zeros((CHECKED_SAMPLES, inputs), DType::F32, &Device::Cpu)?;
    let output = module.build(recorder.builder())?.forward_t(&input, true)?.to_dtype(DType::F32)?;
    if output.dims().first() != Some(&CHECKED_SAMPLES) {
        bail!(
            "its output for {CHECKED_SAMPLES} samples has the shape {:?}, but the first dimension must be {CHECKED_SAMPLES}",
            output.dims()
        );
    }
    let nodes = output.sorted_nodes();
    let computed = nodes.iter().filter(|node| !node.is_variable()).map(|node| node.elem_count());
    let values_per_sample = inputs + computed.sum::<usize>() / CHECKED_SAMPLES;
    let gradients = output.sum_all()?.backward()?;
    let tensors = recorder.into_tensors();
    if let Some((tensor, _)) = tensors.iter().find(|(_, variable)| gradients.get(variable).is_none()) {
        bail!(
            "candle computes no gradient of its parameter `{}`: either the outputs do not depend on this parameter, or an \
             operation between them has no backward pass. LayerNorm, RmsNorm and softmax_last_dim of candle_nn have none; \
             use layer_norm_slow, rms_norm_slow and softmax of candle_nn::ops instead",
            tensor.name
        );
    }
    let outputs = output.elem_count() / CHECKED_SAMPLES;
    Ok(CheckedModule {
        outputs,
        values_per_sample,
        tensors: tensors.into_iter().map(|(tensor, _)| tensor).collect(),
    })
}

impl RecordedPass {
    /// Returns the gradients of the parameters and of the inputs. `delta` is the derivative of the loss with respect to the
    /// outputs.
    fn differentiate(&self, delta: &ArrayView2<'_, f32>) -> CandleResult<GradStore> {
        let values = delta.as_slice().expect(CONTIGUITY_MESSAGE);
        let delta = Tensor::from_slice(values, delta.dim(), &Device::Cpu)?;
        (&self.output * delta)?.sum_all()?.backward()
    }
}

/// Returns the values of a tensor in row-major order.
fn to_values(tensor: &Tensor) -> CandleResult<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// Describes an error of candle without the backtrace that the error may contain.
fn describe(error: Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => describe(*inner),
        other => other.to_string(),
    }
}

impl<M> fmt::Debug for CandleLayer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.name)
    }
}

impl<M: CandleModule> Layer for CandleLayer<M> {
    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect()
    }

    /// Candle adds numbers in an order that depends on the number of samples.
    fn is_reproducible(&self) -> bool {
        false
    }

    fn multiplications(&self) -> u64 {
        self.module.multiplications().unwrap_or_else(|| self.parameter_count().max(self.outputs) as u64)
    }

    fn values_per_sample(&self) -> usize {
        self.values_per_sample
    }

    fn initialize(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        write_initial_values(&self.tensors, parameters, uniform);
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        saved: &mut SavedForBackward,
        mode: ForwardMode<'_>,
    ) -> Result<(), String> {
        let train = matches!(mode, ForwardMode::Training(..));
        let pass = self.compute_outputs(parameters, &input, train).map_err(describe)?;
        let values = to_values(&pass.output).map_err(describe)?;
        output.as_slice_mut().expect(CONTIGUITY_MESSAGE).copy_from_slice(&values);
        if train {
            saved.other = Some(Box::new(pass));
        }
        Ok(())
    }

    fn backward(
        &self,
        _: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String> {
        let BackwardPass { delta, input_delta, saved, .. } = pass;
        let recorded = saved.other.take().and_then(|recorded| recorded.downcast::<RecordedPass>().ok());
        let recorded = recorded.expect("the forward pass of the batch recorded its operations");
        let found = recorded.differentiate(&delta.view()).map_err(describe)?;
        let gradient_of =
            |variable: &Tensor| found.get(variable).map(to_values).transpose().map_err(describe);
        // A module may use a parameter only for some inputs.
        let of_parameters: Vec<Vec<f32>> = recorded
            .parameters
            .iter()
            .map(|variable| Ok(gradient_of(variable)?.unwrap_or_default()))
            .collect::<Result<_, String>>()?;
        if let Some(mut input_delta) = input_delta {
            let values = gradient_of(&recorded.input)?.ok_or(
                "candle computes no derivative with respect to the inputs of this layer, but a layer before it needs this \
                 derivative; put this layer first, or replace an operation that has no backward pass",
            )?;
            input_delta.as_slice_mut().expect(CONTIGUITY_MESSAGE).copy_from_slice(&values);
        }
        gradients.add_gradients(delta.nrows(), |rows, target| {
            assert_eq!(rows, 0..delta.nrows(), "reproducible runs refuse layers of candle");
            for (tensor, new) in self.tensors.iter().zip(&of_parameters) {
                let sums = &mut target[tensor.range.clone()];
                sums.iter_mut().zip(new).for_each(|(sum, new)| *sum += new);
            }
        });
        Ok(())
    }
}
