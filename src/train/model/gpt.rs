//! The layers of a GPT: the embedding of the tokens, the transformer blocks, and the output layer.
//!
//! Sources: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2). The order of the
//! operations and the initial parameters are the same as in <https://github.com/karpathy/nanoGPT>. There are two
//! differences: there is no dropout, and the embedding and the output layer have separate weights.

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};

use super::GptSpec;
use super::candle_layer::{CandleLayer, CandleModule};
use super::layer::Layer;
use crate::train::portable_math::ln;

/// The standard deviation of the initial weights.
const WEIGHT_DEVIATION: f64 = 0.02;
/// The hidden layer of a block has `width` times this number of units.
const HIDDEN_UNITS_PER_VALUE: usize = 4;
/// The number that a layer norm adds to the variance.
const NORM_EPSILON: f64 = 1e-5;

/// Returns the layers of a GPT that reads windows of `context` tokens and returns `vocabulary` outputs for each token of a
/// window.
pub(super) fn build_gpt_layers(spec: GptSpec, context: usize, vocabulary: usize) -> Vec<Arc<dyn Layer>> {
    let GptSpec { layers, heads, width } = spec;
    let mut built: Vec<Arc<dyn Layer>> =
        vec![Arc::new(CandleLayer(TokenEmbedding { context, vocabulary, width }))];
    for _ in 0..layers {
        built.push(Arc::new(CandleLayer(TransformerBlock { context, heads, width, layers })));
    }
    built.push(Arc::new(CandleLayer(TokenOutput { context, vocabulary, width })));
    built
}

/// Returns a function that draws normal random numbers with mean 0 and standard deviation 1, by Marsaglia's
/// polar method. The numbers have the same bits on every host.
fn normal_numbers(uniform: &mut dyn FnMut() -> f32) -> impl FnMut() -> f64 {
    let mut second = None;
    move || {
        if let Some(number) = second.take() {
            return number;
        }
        loop {
            let (x, y) = (f64::from(uniform()), f64::from(uniform()));
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                let factor = (-2.0 * ln(square) / square).sqrt();
                second = Some(y * factor);
                return x * factor;
            }
        }
    }
}

/// Sets the initial values of each tensor: random weights, 1 for the weights of layer norms, and 0 for biases.
/// `deviation` returns the standard deviation of the weights of the tensor with this name.
fn initialize_tensors(
    tensors: &[(&'static str, Vec<usize>)],
    parameters: &mut [f32],
    uniform: &mut dyn FnMut() -> f32,
    deviation: impl Fn(&str) -> f64,
) {
    let mut normal = normal_numbers(uniform);
    let mut rest = parameters;
    for (name, shape) in tensors {
        let (values, others) = rest.split_at_mut(shape.iter().product());
        rest = others;
        match shape.len() {
            1 => values.fill(if name.ends_with("norm.weight") { 1.0 } else { 0.0 }),
            _ => values.fill_with(|| (normal() * deviation(name)) as f32),
        }
    }
}

/// Converts each token to `width` values: a vector for the token plus a vector for its position.
#[derive(Debug)]
struct TokenEmbedding {
    /// The number of tokens in a window.
    context: usize,
    /// The number of tokens in the vocabulary.
    vocabulary: usize,
    /// The number of values that represent a token.
    width: usize,
}

impl CandleModule for TokenEmbedding {
    fn input_count(&self) -> usize {
        self.context
    }

    fn output_count(&self) -> usize {
        self.context * self.width
    }

    fn tensor_names_and_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        vec![
            ("token_embedding", vec![self.vocabulary, self.width]),
            ("position_embedding", vec![self.context, self.width]),
        ]
    }

    fn multiplication_count(&self) -> u64 {
        self.output_count() as u64
    }

    fn value_count(&self) -> usize {
        2 * self.output_count()
    }

    fn set_initial_parameters(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        initialize_tensors(&self.tensor_names_and_shapes(), parameters, uniform, |_| WEIGHT_DEVIATION);
    }

    fn forward(&self, parameters: &[Tensor], input: &Tensor) -> Result<Tensor> {
        let [tokens, positions] = parameters else { unreachable!("there are two tensors") };
        // An f32 holds each token exactly, because a vocabulary has at most 2^16 tokens.
        let indices = input.to_dtype(DType::U32)?.flatten_all()?;
        let embedded = tokens.index_select(&indices, 0)?;
        embedded.reshape((input.dim(0)?, self.context, self.width))?.broadcast_add(positions)
    }
}

/// A transformer block. It has two parts: causal self-attention, and a network with one hidden layer. Each part reads
/// a layer norm of the tokens' values. The result of the part is added to these values.
#[derive(Debug)]
struct TransformerBlock {
    /// The number of tokens in a window.
    context: usize,
    /// The number of attention heads.
    heads: usize,
    /// The number of values that represent a token.
    width: usize,
    /// The number of blocks of the model.
    layers: usize,
}

impl TransformerBlock {
    /// Returns the number of units of the hidden layer.
    fn hidden_units(&self) -> usize {
        HIDDEN_UNITS_PER_VALUE * self.width
    }

    /// Computes the self-attention. The result for a token depends only on this token and the tokens before it.
    fn attend(&self, input: &Tensor, [weight, bias]: [&Tensor; 2]) -> Result<Tensor> {
        let (context, heads, head_width) = (self.context, self.heads, self.width / self.heads);
        let rows = input.dim(0)?;
        let all = linear(input, weight, Some(bias))?.reshape((rows, context, 3, heads, head_width))?;
        let part = |index: usize| all.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
        let scale = 1.0 / (head_width as f64).sqrt();
        let scores = (queries.matmul(&keys.transpose(2, 3)?.contiguous()?)? * scale)?;
        let scores = scores.broadcast_add(&causal_mask(context)?)?;
        let attended = softmax(&scores)?.matmul(&values)?;
        attended.transpose(1, 2)?.contiguous()?.reshape((rows, context, self.width))
    }
}

impl CandleModule for TransformerBlock {
    fn input_count(&self) -> usize {
        self.context * self.width
    }

    fn output_count(&self) -> usize {
        self.context * self.width
    }

    fn tensor_names_and_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let (width, hidden) = (self.width, self.hidden_units());
        vec![
            ("attention_norm.weight", vec![width]),
            ("attention_norm.bias", vec![width]),
            ("attention.weight", vec![3 * width, width]),
            ("attention.bias", vec![3 * width]),
            ("attention_output.weight", vec![width, width]),
            ("attention_output.bias", vec![width]),
            ("hidden_norm.weight", vec![width]),
            ("hidden_norm.bias", vec![width]),
            ("hidden.weight", vec![hidden, width]),
            ("hidden.bias", vec![hidden]),
            ("hidden_output.weight", vec![width, hidden]),
            ("hidden_output.bias", vec![width]),
        ]
    }

    fn multiplication_count(&self) -> u64 {
        let (context, width) = (self.context as u64, self.width as u64);
        context * width * (12 * width + 2 * context)
    }

    fn value_count(&self) -> usize {
        self.context * (10 * self.width + 2 * self.hidden_units() + 3 * self.heads * self.context)
    }

    fn set_initial_parameters(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        // Each block adds two results to the tokens' values. The smaller deviation keeps the variance of the sum of
        // all 2 * `layers` results independent of `layers`.
        let output_deviation = WEIGHT_DEVIATION / ((2 * self.layers) as f64).sqrt();
        initialize_tensors(&self.tensor_names_and_shapes(), parameters, uniform, |name| {
            if name.ends_with("output.weight") { output_deviation } else { WEIGHT_DEVIATION }
        });
    }

    fn forward(&self, parameters: &[Tensor], input: &Tensor) -> Result<Tensor> {
        let [
            norm_1,
            norm_1_bias,
            qkv,
            qkv_bias,
            joined,
            joined_bias,
            norm_2,
            norm_2_bias,
            up,
            up_bias,
            down,
            down_bias,
        ] = parameters
        else {
            unreachable!("there are twelve tensors")
        };
        let input = input.reshape((input.dim(0)?, self.context, self.width))?;
        let attended = self.attend(&layer_norm(&input, norm_1, norm_1_bias)?, [qkv, qkv_bias])?;
        let input = (input + linear(&attended, joined, Some(joined_bias))?)?;
        let hidden = linear(&layer_norm(&input, norm_2, norm_2_bias)?, up, Some(up_bias))?.gelu_erf()?;
        input + linear(&hidden, down, Some(down_bias))?
    }
}

/// A layer norm, and a fully connected layer without bias that returns an output for each token of the vocabulary.
#[derive(Debug)]
struct TokenOutput {
    /// The number of tokens in a window.
    context: usize,
    /// The number of tokens in the vocabulary.
    vocabulary: usize,
    /// The number of values that represent a token.
    width: usize,
}

impl CandleModule for TokenOutput {
    fn input_count(&self) -> usize {
        self.context * self.width
    }

    fn output_count(&self) -> usize {
        self.context * self.vocabulary
    }

    fn tensor_names_and_shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        vec![
            ("norm.weight", vec![self.width]),
            ("norm.bias", vec![self.width]),
            ("weight", vec![self.vocabulary, self.width]),
        ]
    }

    fn multiplication_count(&self) -> u64 {
        (self.output_count() as u64).saturating_mul(self.width as u64)
    }

    fn value_count(&self) -> usize {
        self.context * (5 * self.width + 2 * self.vocabulary)
    }

    fn set_initial_parameters(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        initialize_tensors(&self.tensor_names_and_shapes(), parameters, uniform, |_| WEIGHT_DEVIATION);
    }

    fn forward(&self, parameters: &[Tensor], input: &Tensor) -> Result<Tensor> {
        let [norm, norm_bias, weight] = parameters else { unreachable!("there are three tensors") };
        let input = input.reshape((input.dim(0)?, self.context, self.width))?;
        linear(&layer_norm(&input, norm, norm_bias)?, weight, None)
    }
}

/// Returns x W' + b for each row x of the last dimension. W' is the transpose of `weight`, and b is `bias`.
fn linear(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut shape = input.dims().to_vec();
    let width = shape.pop().unwrap_or_default();
    let rows = shape.iter().product::<usize>();
    let output = input.reshape((rows, width))?.matmul(&weight.t()?)?;
    shape.push(weight.dim(0)?);
    let output = output.reshape(shape)?;
    bias.map_or(Ok(output.clone()), |bias| output.broadcast_add(bias))
}

/// Scales each row of the last dimension to mean 0 and variance 1. Then multiplies the row by `weight` and adds `bias`.
fn layer_norm(input: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let centered = input.broadcast_sub(&input.mean_keepdim(D::Minus1)?)?;
    let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = centered.broadcast_div(&(variance + NORM_EPSILON)?.sqrt()?)?;
    normal.broadcast_mul(weight)?.broadcast_add(bias)
}

/// Returns the softmax of the last dimension.
fn softmax(scores: &Tensor) -> Result<Tensor> {
    // The softmax does not depend on the number that is subtracted, so the backward pass need not differentiate `max`.
    let max = scores.max_keepdim(D::Minus1)?.detach();
    let powers = scores.broadcast_sub(&max)?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)
}

/// Returns a matrix of the shape (context, context). Element (i, j) is 0 if token i may read token j, and minus infinity
/// if token j comes after token i.
fn causal_mask(context: usize) -> Result<Tensor> {
    let value = |index: usize| if index % context > index / context { f32::NEG_INFINITY } else { 0.0 };
    Tensor::from_iter((0..context * context).map(value), &Device::Cpu)?.reshape((context, context))
}
