//! The layers of a GPT: the embedding of the tokens, the transformer blocks, and the output layer.
//!
//! Sources: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2). The order of the
//! operations and the initial parameters are the same as in <https://github.com/karpathy/nanoGPT>. There are two
//! differences: there is no dropout, and the embedding and the output layer have separate weights.

use std::sync::Arc;

use candle_core::{D, DType, Device, Module, ModuleT, Result as CandleResult, Tensor};
use candle_nn::ops::layer_norm_slow;
use candle_nn::{Init, Linear, VarBuilder};

use super::GptSpec;
use super::candle_layer::{CandleLayer, CandleModule};
use super::layer::Layer;

/// The maximum number of values that a layer computes for a window of tokens.
const LAYER_VALUES_MAX: usize = 1 << 26;
/// The standard deviation of the initial weights.
const WEIGHT_DEVIATION: f64 = 0.02;
/// The hidden layer of a block has `width` times this number of units.
const HIDDEN_UNITS_PER_VALUE: usize = 4;
/// The number that a layer norm adds to the variance.
const NORM_EPSILON: f32 = 1e-5;

/// Returns the layers of a GPT that reads windows of `context` tokens and returns `vocabulary` outputs for each token of a
/// window.
///
/// # Errors
///
/// A text that says why the model is too large.
pub(super) fn build_gpt_layers(
    spec: GptSpec,
    context: usize,
    vocabulary: usize,
) -> Result<Vec<Arc<dyn Layer>>, String> {
    let GptSpec { layers, heads, width } = spec;
    let (input, inner, output) = (context, context * width, context * vocabulary);
    let embedding = TokenEmbedding { context, vocabulary, width };
    let block = TransformerBlock { context, heads, width, layers };
    let last = TokenOutput { context, vocabulary, width };
    let values = [embedding.value_count(), block.value_count(), last.value_count()];
    let largest = values.iter().copied().fold(0, usize::max);
    if largest > LAYER_VALUES_MAX {
        return Err(format!(
            "computes {largest} values in a layer for each window of {context} tokens; the maximum is {LAYER_VALUES_MAX}; lower \
             --context"
        ));
    }
    let embedding = CandleLayer::new_unchecked("token embedding", (input, inner), embedding, values[0])?;
    let block: Arc<dyn Layer> =
        Arc::new(CandleLayer::new_unchecked("transformer block", (inner, inner), block, values[1])?);
    let last = CandleLayer::new_unchecked("token output", (inner, output), last, values[2])?;
    let mut built: Vec<Arc<dyn Layer>> = vec![Arc::new(embedding)];
    built.extend(std::iter::repeat_n(block, layers));
    built.push(Arc::new(last));
    Ok(built)
}

/// The distribution of initial weights with this standard deviation.
fn normal(deviation: f64) -> Init {
    Init::Randn { mean: 0.0, stdev: deviation }
}

/// Returns a fully connected layer.
fn build_linear(
    parameters: &VarBuilder<'_>,
    (inputs, outputs): (usize, usize),
    deviation: f64,
) -> CandleResult<Linear> {
    let weight = parameters.get_with_hints((outputs, inputs), "weight", normal(deviation))?;
    let bias = parameters.get_with_hints(outputs, "bias", Init::Const(0.0))?;
    Ok(Linear::new(weight, Some(bias)))
}

/// Returns a layer norm: scales each row of the last dimension to mean 0 and variance 1, multiplies the row by weights, and adds
/// biases. The layer norm of `candle_nn` has no backward pass.
fn build_norm(parameters: &VarBuilder<'_>, width: usize) -> CandleResult<impl Module + use<>> {
    let weight = parameters.get_with_hints(width, "weight", Init::Const(1.0))?;
    let bias = parameters.get_with_hints(width, "bias", Init::Const(0.0))?;
    Ok(move |input: &Tensor| layer_norm_slow(input, &weight, &bias, NORM_EPSILON))
}

/// Converts each token to `width` values: a vector for the token plus a vector for its position.
struct TokenEmbedding {
    /// The number of tokens in a window.
    context: usize,
    /// The number of tokens in the vocabulary.
    vocabulary: usize,
    /// The number of values that represent a token.
    width: usize,
}

impl TokenEmbedding {
    /// Returns the approximate number of values that a forward pass computes for each window.
    fn value_count(&self) -> usize {
        2 * self.context * self.width
    }
}

impl CandleModule for TokenEmbedding {
    fn build(&self, parameters: VarBuilder<'_>) -> CandleResult<impl ModuleT> {
        let &Self { context, vocabulary, width } = self;
        let weights = normal(WEIGHT_DEVIATION);
        let tokens = parameters.get_with_hints((vocabulary, width), "token_embedding", weights)?;
        let positions = parameters.get_with_hints((context, width), "position_embedding", weights)?;
        Ok(move |input: &Tensor| {
            // An f32 holds each token exactly, because a vocabulary has at most 2^16 tokens.
            let indices = input.to_dtype(DType::U32)?.flatten_all()?;
            let embedded = tokens.index_select(&indices, 0)?;
            embedded.reshape((input.dim(0)?, context, width))?.broadcast_add(&positions)
        })
    }

    fn multiplications(&self) -> Option<u64> {
        Some((self.context * self.width) as u64)
    }
}

/// A transformer block. It has two parts: causal self-attention, and a network with one hidden layer. Each part reads
/// a layer norm of the tokens' values. The result of the part is added to these values.
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

    /// Returns the approximate number of values that a forward pass computes for each window.
    fn value_count(&self) -> usize {
        self.context * (10 * self.width + 2 * self.hidden_units() + 3 * self.heads * self.context)
    }

    /// Computes the self-attention from the queries, keys and values of all tokens, whose shape is (windows, context, 3 width).
    /// The result for a token depends only on this token and the tokens before it.
    fn attend(&self, projected: &Tensor) -> CandleResult<Tensor> {
        let (context, heads, head_width) = (self.context, self.heads, self.width / self.heads);
        let rows = projected.dim(0)?;
        let all = projected.reshape((rows, context, 3, heads, head_width))?;
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
    fn build(&self, parameters: VarBuilder<'_>) -> CandleResult<impl ModuleT> {
        let (width, hidden) = (self.width, self.hidden_units());
        // Each block adds two results to the tokens' values. The smaller deviation keeps the variance of the sum of
        // all 2 * `layers` results independent of `layers`.
        let output_deviation = WEIGHT_DEVIATION / ((2 * self.layers) as f64).sqrt();
        let part = |name: &str| parameters.pp(name);
        let attention_norm = build_norm(&part("attention_norm"), width)?;
        let attention = build_linear(&part("attention"), (width, 3 * width), WEIGHT_DEVIATION)?;
        let attention_output = build_linear(&part("attention_output"), (width, width), output_deviation)?;
        let hidden_norm = build_norm(&part("hidden_norm"), width)?;
        let hidden_layer = build_linear(&part("hidden"), (width, hidden), WEIGHT_DEVIATION)?;
        let hidden_output = build_linear(&part("hidden_output"), (hidden, width), output_deviation)?;
        Ok(move |input: &Tensor| {
            let input = input.reshape((input.dim(0)?, self.context, width))?;
            let attended = self.attend(&attention.forward(&attention_norm.forward(&input)?)?)?;
            let input = (input + attention_output.forward(&attended)?)?;
            let hidden = hidden_layer.forward(&hidden_norm.forward(&input)?)?.gelu_erf()?;
            input + hidden_output.forward(&hidden)?
        })
    }

    fn multiplications(&self) -> Option<u64> {
        let (context, width) = (self.context as u64, self.width as u64);
        Some(context * width * (12 * width + 2 * context))
    }
}

/// A layer norm, and a fully connected layer without bias that returns an output for each token of the vocabulary.
struct TokenOutput {
    /// The number of tokens in a window.
    context: usize,
    /// The number of tokens in the vocabulary.
    vocabulary: usize,
    /// The number of values that represent a token.
    width: usize,
}

impl TokenOutput {
    /// Returns the approximate number of values that a forward pass computes for each window.
    fn value_count(&self) -> usize {
        self.context * (5 * self.width + 2 * self.vocabulary)
    }
}

impl CandleModule for TokenOutput {
    fn build(&self, parameters: VarBuilder<'_>) -> CandleResult<impl ModuleT> {
        let &Self { context, vocabulary, width } = self;
        let norm = build_norm(&parameters.pp("norm"), width)?;
        let weights = normal(WEIGHT_DEVIATION);
        let output = Linear::new(parameters.get_with_hints((vocabulary, width), "weight", weights)?, None);
        Ok(move |input: &Tensor| {
            let input = input.reshape((input.dim(0)?, context, width))?;
            output.forward(&norm.forward(&input)?)
        })
    }

    fn multiplications(&self) -> Option<u64> {
        Some(((self.context * self.vocabulary) as u64).saturating_mul(self.width as u64))
    }
}

/// Returns the softmax of the last dimension.
fn softmax(scores: &Tensor) -> CandleResult<Tensor> {
    // The softmax does not depend on the number that is subtracted, so the backward pass need not differentiate `max`.
    let max = scores.max_keepdim(D::Minus1)?.detach();
    let powers = scores.broadcast_sub(&max)?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)
}

/// Returns a matrix of the shape (context, context). Element (i, j) is 0 if token i may read token j, and minus infinity
/// if token j comes after token i.
fn causal_mask(context: usize) -> CandleResult<Tensor> {
    let value = |index: usize| if index % context > index / context { f32::NEG_INFINITY } else { 0.0 };
    Tensor::from_iter((0..context * context).map(value), &Device::Cpu)?.reshape((context, context))
}
