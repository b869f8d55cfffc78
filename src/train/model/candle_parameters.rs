//! The parameters of a module that the crate `candle` computes. A module gets its parameters by name while it is built. The
//! first time, [`TensorRecorder`] records their names and shapes. In each pass, [`PassTensors`] holds their values.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var, bail};
use candle_nn::init::NormalOrUniform;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::PARAMETERS_MAX;
use crate::train::portable_math::ln;

/// A tensor of parameters of a module.
#[derive(Clone, Debug)]
pub(super) struct ModuleTensor {
    /// The name.
    pub(super) name: String,
    /// The shape.
    pub(super) shape: Vec<usize>,
    /// The range of the elements in the flat vector of the layer's parameters.
    pub(super) range: Range<usize>,
    /// The distribution of the initial values.
    initial: Init,
}

/// Records the tensors that a module gets, in the order in which the module first gets them. The elements of all tensors are 0.
pub(super) struct TensorRecorder {
    memory: RecorderMemory,
    found: Mutex<Vec<(ModuleTensor, Tensor)>>,
}

/// The memory of the tensors of a [`TensorRecorder`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RecorderMemory {
    /// Each tensor is a variable with memory for all of its elements.
    Variables,
    /// All elements of a tensor share one number. Such tensors need no memory, but some operations refuse them.
    Shared,
}

impl TensorRecorder {
    pub(super) fn new(memory: RecorderMemory) -> Self {
        Self { memory, found: Mutex::default() }
    }

    /// Returns the builder that a module gets its parameters from.
    pub(super) fn builder(&self) -> VarBuilder<'_> {
        VarBuilder::from_backend(Box::new(self), DType::F32, Device::Cpu)
    }

    /// Returns the recorded tensors.
    pub(super) fn into_tensors(self) -> Vec<(ModuleTensor, Tensor)> {
        self.found.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a tensor that the module gets for the first time. `earlier` is the number of parameters of the earlier tensors.
    fn create(
        &self,
        earlier: usize,
        shape: &Shape,
        name: &str,
        initial: Init,
    ) -> Result<(ModuleTensor, Tensor)> {
        let count = shape.dims().iter().copied().fold(1, usize::saturating_mul);
        let end = earlier.saturating_add(count);
        if end > PARAMETERS_MAX {
            bail!("it has too many parameters; the maximum is {PARAMETERS_MAX}");
        }
        let tensor = match self.memory {
            RecorderMemory::Variables => Var::zeros(shape, DType::F32, &Device::Cpu)?.into_inner(),
            RecorderMemory::Shared => Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)?,
        };
        let (name, shape) = (name.to_owned(), shape.dims().to_vec());
        Ok((ModuleTensor { name, shape, range: earlier..end, initial }, tensor))
    }
}

impl SimpleBackend for &TensorRecorder {
    fn get(&self, shape: Shape, name: &str, initial: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tensor)) = found.iter().find(|(known, _)| known.name == name) {
            return convert(tensor, name, Some(shape), (dtype, device));
        }
        let earlier = found.last().map_or(0, |(last, _)| last.range.end);
        let (recorded, tensor) = self.create(earlier, &shape, name, initial)?;
        found.push((recorded, tensor.clone()));
        convert(&tensor, name, None, (dtype, device))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        match found.iter().find(|(known, _)| known.name == name) {
            Some((_, tensor)) => convert(tensor, name, None, (dtype, device)),
            None => {
                bail!("it gets the parameter `{name}` without a shape; pass the shape with `get_with_hints`")
            }
        }
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// The tensors of a pass.
pub(super) struct PassTensors<'a> {
    /// The tensors that the module got when its layer was created.
    pub(super) known: &'a [ModuleTensor],
    /// The values, one tensor for each element of `known`.
    pub(super) values: &'a [Tensor],
}

impl<'a> PassTensors<'a> {
    /// Returns the builder that a module gets its parameters from.
    pub(super) fn into_builder(self) -> VarBuilder<'a> {
        VarBuilder::from_backend(Box::new(self), DType::F32, Device::Cpu)
    }

    fn find(&self, name: &str) -> Result<&Tensor> {
        match self.known.iter().position(|known| known.name == name) {
            Some(index) => Ok(&self.values[index]),
            None => bail!("it gets the parameter `{name}`, which it did not get when its layer was created"),
        }
    }
}

impl SimpleBackend for PassTensors<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        convert(self.find(name)?, name, Some(shape), (dtype, device))
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        convert(self.find(name)?, name, None, (dtype, device))
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// Converts a tensor to the type and the device that the module wants. Returns an error if the shape is not `wanted_shape`.
fn convert(
    tensor: &Tensor,
    name: &str,
    wanted_shape: Option<Shape>,
    (dtype, device): (DType, &Device),
) -> Result<Tensor> {
    match wanted_shape {
        Some(expected) if tensor.shape() != &expected => Err(Error::UnexpectedShape {
            msg: format!("it gets the parameter `{name}` with two shapes"),
            expected,
            got: tensor.shape().clone(),
        }),
        _ => tensor.to_device(device)?.to_dtype(dtype),
    }
}

/// Writes the initial values of all tensors. `uniform` returns random numbers from -1 up to, but not including, 1.
pub(super) fn write_initial_values(
    tensors: &[ModuleTensor],
    parameters: &mut [f32],
    uniform: &mut dyn FnMut() -> f32,
) {
    let mut normal = NormalNumbers::default();
    for ModuleTensor { shape, range, initial, .. } in tensors {
        let values = &mut parameters[range.clone()];
        let distribution = match *initial {
            Init::Kaiming { dist, fan, non_linearity } => {
                let fan = fan.for_shape(&shape.as_slice().into()) as f64;
                let deviation = non_linearity.gain() / fan.sqrt();
                match dist {
                    NormalOrUniform::Normal => Init::Randn { mean: 0.0, stdev: deviation },
                    NormalOrUniform::Uniform => {
                        let bound = 3_f64.sqrt() * deviation;
                        Init::Uniform { lo: -bound, up: bound }
                    }
                }
            }
            other => other,
        };
        match distribution {
            Init::Const(value) => values.fill(value as f32),
            Init::Uniform { lo, up } => {
                values.fill_with(|| (lo + (up - lo) * (f64::from(uniform()) + 1.0) / 2.0) as f32);
            }
            Init::Randn { mean, stdev } => values.fill_with(|| (mean + stdev * normal.draw(uniform)) as f32),
            Init::Kaiming { .. } => unreachable!("it was replaced by a normal or uniform distribution"),
        }
    }
}

/// Draws normal random numbers with mean 0 and standard deviation 1, by Marsaglia's polar method. The numbers have the same bits
/// on every host.
#[derive(Default)]
struct NormalNumbers {
    /// The second number of a pair.
    second: Option<f64>,
}

impl NormalNumbers {
    fn draw(&mut self, uniform: &mut dyn FnMut() -> f32) -> f64 {
        if let Some(number) = self.second.take() {
            return number;
        }
        loop {
            let (x, y) = (f64::from(uniform()), f64::from(uniform()));
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                let factor = (-2.0 * ln(square) / square).sqrt();
                self.second = Some(y * factor);
                return x * factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_nn::init::{FanInOut, NonLinearity};

    use super::*;
    use crate::train::random;

    #[test]
    fn initial_values_have_the_distributions_that_the_module_asks_for() {
        let kaiming = |dist, fan| Init::Kaiming { dist, fan, non_linearity: NonLinearity::ReLU };
        let cases = [
            // The mean and the standard deviation of tensors of the shape (200, 50).
            (Init::Const(0.5), 0.5, 0.0),
            (Init::Uniform { lo: -1.0, up: 3.0 }, 1.0, 4.0 / 12.0_f64.sqrt()),
            (Init::Randn { mean: 2.0, stdev: 0.5 }, 2.0, 0.5),
            (kaiming(NormalOrUniform::Uniform, FanInOut::FanIn), 0.0, 0.2),
            (kaiming(NormalOrUniform::Normal, FanInOut::FanOut), 0.0, 0.1),
        ];
        let recorder = TensorRecorder::new(RecorderMemory::Shared);
        let builder = recorder.builder();
        for (index, (initial, ..)) in cases.into_iter().enumerate() {
            builder.get_with_hints((200, 50), &index.to_string(), initial).unwrap();
        }
        drop(builder);
        let tensors: Vec<ModuleTensor> =
            recorder.into_tensors().into_iter().map(|(tensor, _)| tensor).collect();
        let mut stream = random::random_stream("test", 1, 2);
        let mut parameters = vec![f32::NAN; 10_000 * cases.len()];
        write_initial_values(&tensors, &mut parameters, &mut || random::symmetric_uniform(&mut stream, 1.0));
        for (values, (initial, mean, deviation)) in parameters.chunks(10_000).zip(cases) {
            let average = |term: &dyn Fn(f64) -> f64| {
                values.iter().map(|&value| term(f64::from(value))).sum::<f64>() / 10_000.0
            };
            let found_mean = average(&|value| value);
            let found_deviation = average(&|value| (value - mean).powi(2)).sqrt();
            assert!((found_mean - mean).abs() <= 0.04 * deviation, "{initial:?}: {found_mean}");
            assert!(
                (found_deviation - deviation).abs() <= 0.03 * deviation,
                "{initial:?}: {found_deviation}"
            );
        }
    }
}
