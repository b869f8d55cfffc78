//! Tests of models whose layers candle computes.

use std::num::NonZeroU32;
use std::sync::Arc;

use ringtrain::candle_core::{D, DType, Device, ModuleT, Result, Tensor, bail, safetensors};
use ringtrain::candle_nn::{
    Conv2dConfig, Init, LayerNormConfig, Module, VarBuilder, conv2d, func_t, layer_norm, linear,
    linear_no_bias, seq,
};
use ringtrain::train::data::{
    DataSource, Features, ImageShape, LoadOptions, Targets, TextOptions, TokenKind,
};
use ringtrain::train::model::{CandleLayer, CandleModule, InputShape, Layer, ModelSpec, OwnModel};
use ringtrain::train::{
    BucketBytes, CHECKPOINT_FILE_NAME, Config, ExistingCheckpoint, Recipe, SHARDS_DEFAULT, TrainError,
};

use super::library::{checkpoint_in, config, train};
use super::strategies::{NONE, assert_close, parse_strategy, sgd_config, train_and_compare, train_on};

/// A convolution of digits and a rectifier.
struct Convolution {
    image: ImageShape,
}

impl CandleModule for Convolution {
    fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
        let ImageShape { channels, height, width } = self.image;
        Ok(seq()
            .add_fn(move |input| input.reshape(((), channels, height, width)))
            .add(conv2d(channels, 3, 3, Conv2dConfig::default(), parameters.pp("conv"))?)
            .add_fn(Tensor::relu))
    }
}

/// A fully connected layer that calls `check` in each pass, with the inputs and with `train`.
struct Checked<F> {
    inputs: usize,
    outputs: usize,
    check: F,
}

impl<F: Fn(&Tensor, bool) -> Result<()> + Send + Sync + 'static> CandleModule for Checked<F> {
    fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
        let linear = linear(self.inputs, self.outputs, parameters.pp("linear"))?;
        Ok(func_t(move |input, train| {
            (self.check)(input, train)?;
            linear.forward(input)
        }))
    }
}

type Layers = std::result::Result<Vec<Arc<dyn Layer>>, String>;

fn with_model(config: Config, build: impl Fn(InputShape, usize) -> Layers + Send + Sync + 'static) -> Config {
    Config { model: Some(ModelSpec::Own(OwnModel::new("test", build))), ..config }
}

/// Returns a configuration with a convolution and a second layer that calls `check`.
fn checked_config(check: impl Fn(&Tensor, bool) -> Result<()> + Copy + Send + Sync + 'static) -> Config {
    let config = Config { epochs: Some(2), batch_size: Some(90), ..sgd_config() };
    with_model(config, move |input, outputs| {
        let module = Convolution { image: input.image.ok_or("needs images")? };
        let convolution = CandleLayer::new("convolution", input.features, module)?;
        let module = Checked { inputs: convolution.outputs(), outputs, check };
        let last = CandleLayer::new("last", convolution.outputs(), module)?;
        Ok(vec![Arc::new(convolution), Arc::new(last)])
    })
}

#[test]
fn the_parameters_do_not_depend_on_the_number_of_ranks() {
    let config = checked_config(|_, _| Ok(()));
    let expected = train(&config).unwrap();
    assert!(expected.report.test_accuracy.unwrap() > 0.7, "{:?}", expected.report);
    for (strategy, bucket_bytes) in [("allreduce", Some(500)), ("pipeline:2", None)] {
        let config = Config {
            strategy: parse_strategy(strategy),
            bucket_bytes: bucket_bytes.map(BucketBytes::Fixed),
            ..config.clone()
        };
        let found = train_and_compare(2, &config);
        assert_close(&found.parameters, &expected.parameters, strategy);
    }
}

/// The last batch has 43 samples, of which rank 1 gets 21. With `pipeline`, the layer is on rank 1, and the last micro-batch of a
/// batch has 9 samples.
#[test]
fn a_layer_that_fails_on_one_rank_ends_the_run_on_all_ranks_with_its_error() {
    let config = checked_config(|input, train| match input.dim(0)? {
        0..30 if train && input.dim(0)? % 2 == 1 => bail!("an odd number of samples"),
        _ => Ok(()),
    });
    let problem = "the layer `last` failed: an odd number of samples";
    for (strategy, ranks) in
        [("allreduce", 2), ("local-sgd:2", 2), ("pipeline:2", 2), ("gossip", 2), ("ps-sync", 3)]
    {
        let config = Config { strategy: parse_strategy(strategy), batch_size: Some(93), ..config.clone() };
        let results = train_on(ranks, &config, NONE).into_iter();
        let errors: Vec<TrainError> =
            results.map(|result| result.map(|_| ()).expect_err("each rank fails")).collect();
        let texts: Vec<String> = errors.iter().map(TrainError::to_string).collect();
        assert!(texts.iter().all(|text| text.contains(problem)), "{strategy}: {texts:?}");
        // With gossip, the coordinator sends the text of the error to all ranks, and any rank may compute a part of a batch.
        let is_layer_error = strategy == "gossip" || matches!(errors.last(), Some(TrainError::Layer(_)));
        assert!(is_layer_error && texts[0].contains("rank"), "{strategy}: {texts:?}");
    }
}

/// Each of these errors comes before the first step, except for the errors of evaluations.
#[test]
fn modules_that_do_not_work_are_refused_with_the_name_of_their_layer() {
    /// A module without hidden layers.
    struct Broken<F>(F);
    impl<F, M> CandleModule for Broken<F>
    where
        F: Fn(VarBuilder<'_>) -> Result<M> + Send + Sync + 'static,
        M: ModuleT,
    {
        fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
            (self.0)(parameters)
        }
    }
    fn broken<M: ModuleT>(
        build: impl Fn(VarBuilder<'_>) -> Result<M> + Copy + Send + Sync + 'static,
    ) -> Config {
        with_model(sgd_config(), move |input, _| {
            Ok(vec![Arc::new(CandleLayer::new("broken", input.features, Broken(build))?)])
        })
    }
    let train_only = checked_config(|_, train| if train { Ok(()) } else { bail!("no evaluation") });
    let recipe = Recipe { reproducible_shards: Some(SHARDS_DEFAULT), ..Recipe::default() };
    for (config, expected) in [
        (
            broken(|parameters| linear(63, 10, parameters)),
            "the model has a layer `broken` that fails: shape mismatch in matmul, lhs: [2, 64], rhs: [63, 10]",
        ),
        (
            broken(|parameters| {
                let norm = layer_norm(64, LayerNormConfig::default(), parameters.pp("norm"))?;
                Ok(seq().add(norm).add(linear(64, 10, parameters)?))
            }),
            "`broken` that fails: candle computes no gradient of its parameter `norm.weight`",
        ),
        (
            broken(|parameters| {
                parameters.get(3, "a")?;
                parameters.get(4, "a")?;
                linear(64, 10, parameters)
            }),
            "it gets the parameter `a` with two shapes",
        ),
        (
            broken(|parameters| linear(usize::MAX, 10, parameters)),
            "it has too many parameters; the maximum is 1073741824",
        ),
        (
            broken(|parameters| {
                let linear = linear_no_bias(64, 10, parameters)?;
                Ok(move |input: &Tensor| linear.forward(input)?.t())
            }),
            "its output for 2 samples has the shape [10, 2]",
        ),
        (broken(|parameters| linear(64, 9, parameters)), "has 1 layer and 9 outputs, but needs 10 outputs"),
        (train_only, "the layer `last` failed: no evaluation"),
        (Config { recipe, ..checked_config(|_, _| Ok(())) }, "--reproducible does not apply to this model"),
    ] {
        let error = train(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// A layer that rounds its inputs has no derivative with respect to them.
#[test]
fn only_the_first_layer_may_have_no_derivative_with_respect_to_its_inputs() {
    /// Rounds its inputs.
    struct Rounding {
        inputs: usize,
        outputs: usize,
    }
    impl CandleModule for Rounding {
        fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
            let linear = linear(self.inputs, self.outputs, parameters)?;
            Ok(move |input: &Tensor| linear.forward(&(input * 4.0)?.round()?))
        }
    }
    let config = |widths: &'static [usize]| {
        with_model(Config { epochs: Some(1), ..config() }, move |_, _| {
            let layer = |pair: &[usize]| {
                let module = Rounding { inputs: pair[0], outputs: pair[1] };
                Ok(Arc::new(CandleLayer::new(format!("rounding to {}", pair[1]), pair[0], module)?) as _)
            };
            widths.windows(2).map(layer).collect()
        })
    };
    train(&config(&[64, 10])).unwrap();
    let error = train(&config(&[64, 8, 10])).unwrap_err().to_string();
    assert!(error.starts_with("the layer `rounding to 10` failed: candle computes no derivative"), "{error}");
}

/// The vocabulary is the number of outputs divided by the number of inputs.
#[test]
fn an_own_model_learns_plain_text() {
    /// Predicts each token from the token before it.
    struct Bigram {
        vocabulary: usize,
    }
    impl CandleModule for Bigram {
        fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
            let shape = (self.vocabulary, self.vocabulary);
            let distribution = Init::Uniform { lo: -0.1, up: 0.1 };
            let table = parameters.get_with_hints(shape, "table", distribution)?;
            Ok(move |tokens: &Tensor| {
                let indices = tokens.to_dtype(DType::U32)?;
                table.index_select(&indices.flatten_all()?, 0)?.reshape((tokens.dim(0)?, ()))
            })
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.txt");
    std::fs::write(&path, "the sea - the whale - the ship.\n".repeat(40)).unwrap();
    let text = Config {
        source: DataSource::Text(vec![path]),
        text: TextOptions { tokens: TokenKind::Characters, context: 16 },
        epochs: Some(10),
        learning_rate: Some(0.1),
        micro_batches: NonZeroU32::new(2).unwrap(),
        ..config()
    };
    let build = |input: InputShape, outputs: usize| -> Layers {
        let module = Bigram { vocabulary: outputs / input.features };
        Ok(vec![Arc::new(CandleLayer::new("bigram", input.features, module)?)])
    };
    let config = with_model(text, build);
    let expected = train(&config).unwrap();
    // A model that always predicts the frequencies of the characters has a perplexity of more than 10.
    assert!(expected.report.test_perplexity.unwrap() < 3.0, "{:?}", expected.report);
    let found = train_and_compare(2, &config);
    assert_close(&found.parameters, &expected.parameters, "2 ranks");
    let text = TextOptions { context: 0, ..config.text };
    let error = train(&Config { text, ..config }).unwrap_err().to_string();
    assert!(error.contains("--context 0: it must be from 1"), "{error}");
}

/// `own-models.md` shows this code.
#[test]
fn a_module_predicts_with_the_tensors_of_a_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse));
    let module =
        |inputs, outputs| Checked { inputs, outputs, check: |_: &Tensor, _: bool| -> Result<()> { Ok(()) } };
    let config = with_model(Config { epochs: Some(2), checkpoint, ..sgd_config() }, move |input, outputs| {
        Ok(vec![Arc::new(CandleLayer::new("linear", input.features, module(input.features, outputs))?)])
    });
    let expected = train(&config).unwrap().report.test_accuracy.unwrap();
    let options = LoadOptions { test_fraction: config.test_fraction, ..LoadOptions::default() };
    let test = config.source.load(&options).unwrap().test;
    let (Features::Pixels { values, divisor }, Targets::Classes(classes)) = (test.features, test.targets)
    else {
        panic!("the digits are images with classes")
    };
    let predict = || -> Result<Vec<u32>> {
        let pixels: Vec<f32> = values.iter().map(|&pixel| f32::from(pixel) / divisor).collect();
        let inputs = Tensor::from_vec(pixels, values.dim(), &Device::Cpu)?;
        let tensors = safetensors::load(directory.path().join(CHECKPOINT_FILE_NAME), &Device::Cpu)?;
        let parameters = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let outputs = module(64, 10).build(parameters.pp("layers.0"))?.forward_t(&inputs, false)?;
        outputs.argmax(D::Minus1)?.to_vec1()
    };
    let correct = predict().unwrap().iter().zip(&classes).filter(|(found, class)| found == class).count();
    assert!(expected > 0.6 && (correct as f64 / classes.len() as f64 - expected).abs() < 1e-9, "{correct}");
}
