//! Builds the layers of the models that `--model` can name.

use std::sync::Arc;

use super::batch_norm::BatchNorm;
use super::convolution::Convolution;
use super::dense::Dense;
use super::dropout::Dropout;
use super::hidden_layer::HiddenLayer;
use super::layer::{Activation, Layer};
use super::pooling::MaxPooling;
use super::{GptSpec, ModelSpec};
use crate::train::data::ImageShape;
use crate::types::counted;

/// The maximum number of values that all layers of a convolutional network together compute for a sample.
const LAYER_VALUES_MAX: usize = 1 << 24;

/// The number of inputs of a model, and the shape of the images if the samples are images.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InputShape {
    /// The number of features of a sample.
    pub features: usize,
    /// The shape of the images. `None` if the samples are not images.
    pub image: Option<ImageShape>,
}

/// Converts a number of features to the input shape of samples that are not images.
impl From<usize> for InputShape {
    fn from(features: usize) -> Self {
        Self { features, image: None }
    }
}

/// Returns the layers of a model, from the first to the last.
///
/// # Errors
///
/// A text that says why the model does not fit the inputs.
pub(super) fn build_layers(
    spec: &ModelSpec,
    input: InputShape,
    outputs: usize,
) -> Result<Vec<Arc<dyn Layer>>, String> {
    if let ModelSpec::Own(own) = spec {
        return own.build_layers(input, outputs);
    }
    if let ModelSpec::Gpt(gpt) = spec {
        return build_gpt(*gpt, input.features, outputs);
    }
    if let (ModelSpec::Cnn(_), None) = (spec, input.image) {
        return Err(format!(
            "needs images, but a sample has {} without height and width; pass digits, a directory of \
             images or of IDX files, or an array of the shape (samples, height, width) or (samples, channels, height, width) \
             as .npy",
            counted(input.features, "feature")
        ));
    }
    let mut builder =
        LayerStackBuilder { layers: Vec::new(), output_count: input.features, output_image: input.image };
    builder.add_hidden_layers(spec.hidden_layers())?;
    builder.add_output(outputs);
    let values: usize =
        builder.layers.iter().fold(input.features, |sum, layer| sum.saturating_add(layer.outputs()));
    // Other models need no check, because the number and the widths of their layers are limited.
    if matches!(spec, ModelSpec::Cnn(_)) && values > LAYER_VALUES_MAX {
        return Err(format!("computes {values} values for each sample; the maximum is {LAYER_VALUES_MAX}"));
    }
    Ok(builder.layers)
}

/// Returns the layers of a GPT. The inputs are `context` tokens. For each of these input tokens, there is one output for
/// each token of the vocabulary.
#[cfg(feature = "candle")]
fn build_gpt(spec: GptSpec, context: usize, outputs: usize) -> Result<Vec<Arc<dyn Layer>>, String> {
    super::gpt::build_gpt_layers(spec, context, outputs / context.max(1))
}

#[cfg(not(feature = "candle"))]
fn build_gpt(_: GptSpec, _: usize, _: usize) -> Result<Vec<Arc<dyn Layer>>, String> {
    Err(super::CANDLE_NEEDED.into())
}

/// The layers of a model that is being built.
struct LayerStackBuilder {
    layers: Vec<Arc<dyn Layer>>,
    /// The number of outputs of the last layer. Before the first layer is added, the number of inputs of the model.
    output_count: usize,
    /// The shape of these outputs. `None` if the outputs are not an image.
    output_image: Option<ImageShape>,
}

impl LayerStackBuilder {
    /// Adds a layer. `image` is the shape of the layer's outputs.
    fn add_layer(&mut self, layer: impl Layer + 'static, image: Option<ImageShape>) {
        self.output_count = layer.outputs();
        self.output_image = image;
        self.layers.push(Arc::new(layer));
    }

    /// Adds the last layer. Without hidden layers, the initial weights are 0: the loss is convex, so random weights would
    /// only raise the initial loss. With hidden layers, the variance of the initial weights is 2 / (inputs + outputs) (Glorot
    /// and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010).
    fn add_output(&mut self, outputs: usize) {
        let inputs = self.output_count;
        let weight_bound =
            if self.layers.is_empty() { 0.0 } else { (6.0 / (inputs as f32 + outputs as f32)).sqrt() };
        self.add_layer(
            Dense { inputs, outputs, activation: Activation::Identity, weight_bound, has_biases: true },
            None,
        );
    }

    /// Adds the hidden layers. A layer before a batch normalization has neither a rectifier nor biases: the rectifier
    /// follows the normalization, which adds its own biases. The variance of the initial weights is 2 / inputs (He et
    /// al., "Delving deep into rectifiers", 2015).
    fn add_hidden_layers(&mut self, layers: &[HiddenLayer]) -> Result<(), String> {
        let mut dropout_number = 0;
        for (index, layer) in layers.iter().enumerate() {
            let is_normalized = layers.get(index + 1) == Some(&HiddenLayer::BatchNorm);
            let activation = if is_normalized { Activation::Identity } else { Activation::Rectifier };
            match (*layer, self.output_image) {
                (HiddenLayer::Convolution { channels, kernel }, Some(input)) => {
                    let fan_in = input.channels.saturating_mul(kernel * kernel);
                    let weight_bound = (6.0 / fan_in as f32).sqrt();
                    let has_biases = !is_normalized;
                    let layer = Convolution { input, channels, kernel, activation, weight_bound, has_biases };
                    self.add_layer(layer, Some(ImageShape { channels, ..input }));
                }
                (HiddenLayer::Pooling(window), Some(input)) => {
                    if window > input.height.min(input.width) {
                        return Err(format!(
                            "has `{layer}` where the image has only {} x {} pixels; leave out a pooling layer, or pass larger \
                             images",
                            input.height, input.width
                        ));
                    }
                    let layer = MaxPooling { input, window };
                    let shape = layer.output_shape();
                    self.add_layer(layer, Some(shape));
                }
                (HiddenLayer::Convolution { .. } | HiddenLayer::Pooling(_), None) => {
                    return Err(format!("has `{layer}` after a dense layer, whose output is not an image"));
                }
                (HiddenLayer::Dense(outputs), _) => {
                    let inputs = self.output_count;
                    let weight_bound = (6.0 / inputs as f32).sqrt();
                    let has_biases = !is_normalized;
                    self.add_layer(Dense { inputs, outputs, activation, weight_bound, has_biases }, None);
                }
                (HiddenLayer::BatchNorm, image) => {
                    let (channels, pixels) = match image {
                        Some(image) => (image.channels, image.height * image.width),
                        None => (self.output_count, 1),
                    };
                    self.add_layer(BatchNorm { channels, pixels, activation: Activation::Rectifier }, image);
                }
                (HiddenLayer::Dropout(probability), image) => {
                    let (width, number) = (self.output_count, dropout_number);
                    self.add_layer(Dropout { width, probability, number }, image);
                    dropout_number += 1;
                }
            }
        }
        Ok(())
    }
}
