//! Trains a model that the crate candle computes: a small vision transformer (Dosovitskiy et al. 2021) for handwritten digits.
//! This file has only forward passes. candle differentiates them, and the trainer does everything else, as in `own_model.rs`.
//!
//! ```sh
//! cargo build --release --features candle --example candle_model
//! ringrun -n 2 target/release/examples/candle_model
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ringtrain::candle_core::{D, Module, ModuleT, Result, Tensor};
use ringtrain::candle_nn::ops::{layer_norm_slow, softmax};
use ringtrain::candle_nn::{Init, VarBuilder, linear};
use ringtrain::train::data::{DataSource, ImageShape};
use ringtrain::train::model::{CandleLayer, CandleModule, Layer, ModelSpec, OwnModel};
use ringtrain::train::{Config, SilentObserver, run};
use ringtrain::{Group, Rank};

/// The height and the width of a patch.
const PATCH: usize = 2;
/// The number of values that represent a patch.
const WIDTH: usize = 32;
/// The number of attention heads.
const HEADS: usize = 4;

/// Divides an image into patches, and converts each patch to [`WIDTH`] values.
struct PatchEmbedding {
    image: ImageShape,
}

impl PatchEmbedding {
    fn patch_count(&self) -> usize {
        (self.image.height / PATCH) * (self.image.width / PATCH)
    }
}

impl CandleModule for PatchEmbedding {
    fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
        let ImageShape { channels, height, width } = self.image;
        let (rows, columns, values) = (height / PATCH, width / PATCH, channels * PATCH * PATCH);
        let embedding = linear(values, WIDTH, parameters.pp("embedding"))?;
        let distribution = Init::Randn { mean: 0.0, stdev: 0.1 };
        let positions = parameters.get_with_hints((rows * columns, WIDTH), "positions", distribution)?;
        Ok(move |images: &Tensor| {
            let squares = images.reshape(&[images.dim(0)?, channels, rows, PATCH, columns, PATCH])?;
            let patches = squares.permute([0, 2, 4, 1, 3, 5])?.reshape(((), rows * columns, values))?;
            embedding.forward(&patches)?.broadcast_add(&positions)
        })
    }
}

/// A transformer block: self-attention, and a network with one hidden layer.
struct Block {
    patches: usize,
}

impl CandleModule for Block {
    fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
        let attention_norm = norm(&parameters.pp("attention_norm"))?;
        let attention = linear(WIDTH, 3 * WIDTH, parameters.pp("attention"))?;
        let attention_output = linear(WIDTH, WIDTH, parameters.pp("attention_output"))?;
        let hidden_norm = norm(&parameters.pp("hidden_norm"))?;
        let hidden = linear(WIDTH, 2 * WIDTH, parameters.pp("hidden"))?;
        let hidden_output = linear(2 * WIDTH, WIDTH, parameters.pp("hidden_output"))?;
        Ok(move |input: &Tensor| {
            let input = input.reshape(((), self.patches, WIDTH))?;
            let attended = attend(&attention.forward(&attention_norm(&input)?)?)?;
            let input = (input + attention_output.forward(&attended)?)?;
            let units = hidden.forward(&hidden_norm(&input)?)?.gelu()?;
            input + hidden_output.forward(&units)?
        })
    }
}

/// The mean of all patches, and a fully connected layer with an output for each class.
struct Classifier {
    patches: usize,
    classes: usize,
}

impl CandleModule for Classifier {
    fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
        let norm = norm(&parameters.pp("norm"))?;
        let output = linear(WIDTH, self.classes, parameters.pp("output"))?;
        Ok(move |input: &Tensor| output.forward(&norm(&input.reshape(((), self.patches, WIDTH))?)?.mean(1)?))
    }
}

/// Returns a layer norm. `candle_nn::LayerNorm` has no backward pass.
fn norm(parameters: &VarBuilder<'_>) -> Result<impl Fn(&Tensor) -> Result<Tensor> + use<>> {
    let weight = parameters.get_with_hints(WIDTH, "weight", Init::Const(1.0))?;
    let bias = parameters.get_with_hints(WIDTH, "bias", Init::Const(0.0))?;
    Ok(move |input: &Tensor| layer_norm_slow(input, &weight, &bias, 1e-5))
}

/// Computes self-attention from the queries, keys and values of all patches, whose shape is (images, patches, 3 WIDTH).
fn attend(projected: &Tensor) -> Result<Tensor> {
    let (images, patches, _) = projected.dims3()?;
    let all = projected.reshape((images, patches, 3, HEADS, WIDTH / HEADS))?;
    let part = |index: usize| all.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
    let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
    let scale = 1.0 / ((WIDTH / HEADS) as f64).sqrt();
    let scores = (queries.matmul(&keys.t()?.contiguous()?)? * scale)?;
    let attended = softmax(&scores, D::Minus1)?.matmul(&values)?;
    attended.transpose(1, 2)?.reshape((images, patches, WIDTH))
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut group = Group::from_environment()?;
    let model = OwnModel::new("vision transformer", |input, classes| {
        let embedding = PatchEmbedding { image: input.image.ok_or("needs images")? };
        let (patches, inputs) = (embedding.patch_count(), input.features);
        let values = patches * WIDTH;
        Ok(vec![
            Arc::new(CandleLayer::new("patch embedding", inputs, embedding)?) as Arc<dyn Layer>,
            Arc::new(CandleLayer::new("block", values, Block { patches })?),
            Arc::new(CandleLayer::new("classifier", values, Classifier { patches, classes })?),
        ])
    });
    let config = Config {
        model: Some(ModelSpec::Own(model)),
        epochs: Some(10),
        learning_rate: Some(0.005),
        ..Config::new(DataSource::Digits)
    };
    let summary = run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver)?;
    let accuracy = summary.report.test_accuracy.ok_or("the digits have a test set")?;
    if group.rank() == Rank::ZERO {
        println!("{} ranks, test accuracy {accuracy:.3}", group.size());
    }
    assert!(accuracy > 0.85, "the model learns the digits");
    Ok(())
}
