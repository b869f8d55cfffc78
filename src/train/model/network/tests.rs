//! Compares gradients with finite differences, and tests that results do not depend on the division of a batch.

use std::sync::{Barrier, Mutex};

use ndarray::Array2;

use super::*;
use crate::train::data::ImageShape;
use crate::train::model::layer::{BackwardPass, GradientSink, Layer as _, OneRank, SumOrder};
use crate::train::model::pooling::MaxPooling;
use crate::train::model::{CrossEntropyOptions, TargetScale};

/// The shape of the images of the tests. Pooling with windows of 2 x 2 pixels ignores the last of the 5 rows.
const IMAGE: ImageShape = ImageShape { channels: 2, height: 5, width: 4 };
const IMAGE_INPUT: InputShape = InputShape { features: 40, image: Some(IMAGE) };

fn network(spec: &str, input: impl Into<InputShape>, outputs: usize, loss: Loss) -> Network {
    Network::new(&spec.parse().unwrap(), input, outputs, loss).unwrap()
}

/// Returns a workspace with random inputs.
fn filled_workspace(network: &Network, rows: usize) -> Workspace {
    let mut workspace = network.allocate_workspace(rows);
    let mut stream = random::random_stream("inputs", 1, 2);
    workspace.input.mapv_inplace(|_| random::symmetric_uniform(&mut stream, 1.0));
    workspace
}

fn batch<'a>(targets: &'a Targets, indices: &'a [u32], weight: f32) -> TrainingBatch<'a> {
    let step = StepSeed { seed: 3, step: 17 };
    TrainingBatch { targets, indices, weight, step, update: GradientUpdate::Replace, ranks: &OneRank }
}

/// Checks that the gradient is the slope of the loss, times the weight 0.5 of the batch, divided by `divisor`. Computes
/// the slope by finite differences.
fn check_gradient(network: &Network, targets: &Targets, divisor: f64) {
    let mut stream = random::random_stream("test", 1, 2);
    let mut parameters = vec![0.0; network.parameter_count()];
    parameters.fill_with(|| random::symmetric_uniform(&mut stream, 0.7));
    let mut workspace = filled_workspace(network, 4);
    let mut gradients = vec![f32::NAN; parameters.len()];
    let mut ready = Vec::new();
    let indices = [0, 1, 2, 3];
    let ranges = (11, |range, _: &mut [f32]| ready.push(range));
    let samples = batch(targets, &indices, 0.5);
    network.differentiate(&parameters, &mut gradients, &mut workspace, samples, ranges).unwrap();
    let mut end = parameters.len();
    for range in ready {
        assert_eq!(range.end, end, "ranges have a gap, an overlap or a wrong order");
        end = range.start;
    }
    assert_eq!(end, 0);
    let mut unused = gradients.clone();
    let tensors = network.parameter_tensors();
    let trained = tensors.iter().filter(|tensor| !tensor.is_statistic);
    for index in trained.flat_map(|tensor| tensor.range.clone()) {
        let step = 1e-3_f32;
        let centre = parameters[index];
        let mut loss_at = |value| {
            parameters[index] = value;
            let batch = batch(targets, &indices, 0.5);
            let ranges = (usize::MAX, |_, _: &mut [f32]| {});
            network.differentiate(&parameters, &mut unused, &mut workspace, batch, ranges).unwrap().loss
        };
        let slope = (loss_at(centre + step) - loss_at(centre - step)) / f64::from(2.0 * step);
        parameters[index] = centre;
        let expected = 0.5 * slope / divisor;
        let found = f64::from(gradients[index]);
        assert!(
            (found - expected).abs() < 2e-3 * expected.abs().max(1.0),
            "{network:?} {index}: {found} {expected}"
        );
    }
}

#[test]
fn gradients_match_finite_differences() {
    let classes = Targets::Classes(vec![0, 2, 1, 2]);
    let numbers = Targets::Numbers(vec![1.0, -2.0, 0.5, 3.0]);
    let scale = TargetScale { mean: 0.5, deviation: 2.0 };
    for spec in ["softmax", "mlp:7", "mlp:6,4", "mlp:6,batchnorm,4", "mlp:dropout0.2,6,4,batchnorm"] {
        check_gradient(&network(spec, 5, 3, Loss::CrossEntropy), &classes, 1.0);
    }
    let weighted =
        |smoothing| Loss::WeightedCrossEntropy(CrossEntropyOptions::new(smoothing, vec![0.5, 0.0, 2.0]));
    check_gradient(&network("softmax", 5, 3, weighted(0.0)), &classes, 1.0);
    check_gradient(&network("mlp:7", 5, 3, weighted(0.2)), &classes, 1.0);
    check_gradient(&network("linear", 5, 1, Loss::SquaredError(TargetScale::IDENTITY)), &numbers, 1.0);
    check_gradient(&network("mlp:8", 5, 1, Loss::SquaredError(scale)), &numbers, 4.0);
    for spec in [
        "cnn:conv3x3",
        "cnn:conv2x1,pool2,conv3x5,dense4",
        "cnn:dropout0.2,conv2x3,dropout0.5,pool3,dense3",
        "cnn:conv2x3,batchnorm,pool2,conv3x1,batchnorm,dense4,batchnorm",
    ] {
        check_gradient(&network(spec, IMAGE_INPUT, 3, Loss::CrossEntropy), &classes, 1.0);
    }
    check_gradient(&network("cnn:conv2x3,pool2", IMAGE_INPUT, 1, Loss::SquaredError(scale)), &numbers, 4.0);
}

#[cfg(feature = "candle")]
#[test]
fn gradients_of_candle_match_finite_differences() {
    use std::sync::Arc;

    use candle_core::{ModuleT, Result, Tensor};
    use candle_nn::ops::{layer_norm_slow, softmax};
    use candle_nn::{Conv2dConfig, Module, VarBuilder, conv2d, linear, linear_no_bias, seq};

    use crate::train::model::{CandleLayer, CandleModule, Layer, ModelSpec, OwnModel};

    /// A convolution, a rectifier and max pooling.
    struct PooledConvolution;
    impl CandleModule for PooledConvolution {
        fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
            let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
            Ok(seq()
                .add_fn(|input| input.reshape(((), 2, 5, 4)))
                .add(conv2d(2, 3, 3, config, parameters)?)
                .add_fn(|output| {
                    let images = output.dim(0)?;
                    output.relu()?.narrow(2, 0, 4)?.reshape(&[images, 3, 2, 2, 2, 2])?.max(5)?.max(3)
                }))
        }
    }
    /// A layer norm of four vectors, and attention.
    struct Attention;
    impl CandleModule for Attention {
        fn build(&self, parameters: VarBuilder<'_>) -> Result<impl ModuleT> {
            let (weight, bias) = (parameters.get(3, "weight")?, parameters.get(3, "bias")?);
            let query = linear_no_bias(3, 3, parameters.pp("query"))?;
            let output = linear(12, 3, parameters.pp("output"))?;
            Ok(move |input: &Tensor| {
                let vectors = layer_norm_slow(&input.reshape(((), 4, 3))?, &weight, &bias, 1e-3)?;
                let scores = query.forward(&vectors)?.matmul(&vectors.t()?.contiguous()?)?;
                output.forward(&softmax(&scores, 2)?.matmul(&vectors)?.flatten_from(1)?)
            })
        }
    }
    let model = OwnModel::new("test", |input, _| {
        let convolution = CandleLayer::new("convolution", input.features, PooledConvolution)?;
        let attention = CandleLayer::new("attention", convolution.outputs(), Attention)?;
        Ok(vec![Arc::new(convolution) as Arc<dyn Layer>, Arc::new(attention)])
    });
    let network = Network::new(&ModelSpec::Own(model), IMAGE_INPUT, 3, Loss::CrossEntropy).unwrap();
    let names: Vec<String> = network.parameter_tensors().into_iter().map(|tensor| tensor.name).collect();
    let expected =
        ["0.weight", "0.bias", "1.weight", "1.bias", "1.query.weight", "1.output.weight", "1.output.bias"];
    assert_eq!(names, expected.map(|name| format!("layers.{name}")));
    check_gradient(&network, &Targets::Classes(vec![0, 2, 1, 2]), 1.0);
}

/// Tests negative values, equal values, infinity, NaN, and rows and columns that do not fill a window. If a window
/// has several equal maxima, the derivative goes to the first maximum.
#[test]
fn pooling_finds_the_first_largest_value_of_each_window_and_keeps_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let image = ImageShape { channels: 1, height: 3, width: 5 };
    let layer = MaxPooling { input: image, window: 2 };
    for (window, largest, expected_index) in [
        ([-1.0, -3.0, -0.5, -2.0], -0.5, 2),
        ([1.0, 4.0, 4.0, 2.0], 4.0, 1),
        ([-inf, -inf, -inf, -inf], -inf, 0),
        ([1.0, -inf, inf, 0.0], inf, 2),
        ([1.0, nan, inf, 0.0], nan, 1),
        ([-nan, 2.0, 3.0, -4.0], nan, 0),
        ([-0.0, -1e-40, 1e-40, -1.0], 1e-40, 2),
    ] {
        let mut input = Array2::from_elem((1, 15), 9.0);
        for (place, value) in [2, 3, 7, 8].into_iter().zip(window) {
            input[(0, place)] = value;
        }
        let (mut output, mut input_delta) = (Array2::zeros((1, 2)), Array2::from_elem((1, 15), nan));
        let mut saved = layer.allocate_saved(1);
        let mode = ForwardMode::Evaluation;
        layer.forward(&[], input.view(), output.view_mut(), &mut saved, mode).unwrap();
        assert_eq!(output[(0, 0)], 9.0);
        assert!(output[(0, 1)] == largest || output[(0, 1)].is_nan() && largest.is_nan(), "{output}");
        let mut delta = Array2::from_shape_vec((1, 2), vec![5.0, 7.0]).unwrap();
        let pass = BackwardPass {
            input: input.view(),
            output: output.view(),
            delta: delta.view_mut(),
            input_delta: Some(input_delta.view_mut()),
            saved: &mut saved,
            ranks: &OneRank,
        };
        let mut ignore = |_: Range<usize>, _: &mut [f32]| {};
        let mut scratch = Vec::new();
        let mut sink = GradientSink::new(
            (&mut [], GradientUpdate::Replace),
            0..0,
            1,
            &mut ignore,
            (SumOrder::Any, &mut scratch),
        );
        layer.backward(&[], pass, &mut sink).unwrap();
        let mut expected = Array2::zeros((1, 15));
        expected[(0, 0)] = 5.0;
        expected[(0, [2, 3, 7, 8][expected_index])] = 7.0;
        assert_eq!(input_delta, expected, "{window:?}");
    }
}

/// The random numbers of dropout must depend on a sample's index, not on its position in the batch. Otherwise the
/// result would depend on the number of ranks. The test therefore reorders the samples.
#[test]
fn the_gradients_of_parts_of_a_batch_add_up_to_the_gradient_of_the_batch() {
    let targets = Targets::Classes(vec![0, 2, 1, 2]);
    for network in [
        network("mlp:6", 40, 3, Loss::CrossEntropy),
        network(
            "cnn:dropout0.3,conv3x3,pool2,dropout0.5,dense6,dropout0.5",
            IMAGE_INPUT,
            3,
            Loss::CrossEntropy,
        ),
    ] {
        let parameters = network.initialize(1);
        let inputs = filled_workspace(&network, 4).input;
        let mut workspace = network.allocate_workspace(4);
        let mut gradient = |indices: &[u32]| {
            let mut gradients = vec![f32::NAN; parameters.len()];
            for (row, &sample) in indices.iter().enumerate() {
                workspace.input.row_mut(row).assign(&inputs.row(sample as usize));
            }
            let ranges = (usize::MAX, |_, _: &mut [f32]| {});
            let batch = batch(&targets, indices, 0.25);
            network.differentiate(&parameters, &mut gradients, &mut workspace, batch, ranges).unwrap();
            gradients
        };
        let complete = gradient(&[0, 1, 2, 3]);
        let shards = [gradient(&[2, 0, 1]), gradient(&[3]), gradient(&[])];
        for (index, expected) in complete.iter().enumerate() {
            assert!((expected - shards.iter().map(|shard| shard[index]).sum::<f32>()).abs() < 1e-6);
        }
        assert!(shards[2].iter().all(|&value| value == 0.0));
    }
}

/// Adds numbers over the threads of a test. Each thread stands for a rank.
#[derive(Debug)]
struct SumOverThreads {
    total: Mutex<Vec<f64>>,
    barrier: Barrier,
}

impl SumOverRanks for SumOverThreads {
    fn sum_over_ranks(&self, values: &mut [f64]) {
        let mut total = self.total.lock().unwrap();
        total.resize(values.len(), 0.0);
        total.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += value);
        drop(total);
        self.barrier.wait();
        values.copy_from_slice(&self.total.lock().unwrap());
        if self.barrier.wait().is_leader() {
            self.total.lock().unwrap().clear();
        }
        self.barrier.wait();
    }
}

/// Each rank has a part of the batch, and the second rank has no sample. The statistics must be the statistics of
/// the whole batch.
#[test]
fn batch_normalization_over_ranks_equals_batch_normalization_on_one_rank() {
    let targets = Targets::Classes(vec![0, 2, 1, 2, 0]);
    for network in [
        network("mlp:6,batchnorm,5,batchnorm", 40, 3, Loss::CrossEntropy),
        network(
            "cnn:conv3x3,batchnorm,pool2,dropout0.5,dense6,batchnorm",
            IMAGE_INPUT,
            3,
            Loss::CrossEntropy,
        ),
    ] {
        let parameters = network.initialize(1);
        let inputs = filled_workspace(&network, 5).input;
        let gradient = |indices: &[u32], ranks: &dyn SumOverRanks| {
            let mut gradients = vec![f32::NAN; parameters.len()];
            let mut workspace = network.allocate_workspace(indices.len());
            for (row, &sample) in indices.iter().enumerate() {
                workspace.input.row_mut(row).assign(&inputs.row(sample as usize));
            }
            let batch = TrainingBatch { ranks, ..batch(&targets, indices, 0.2) };
            let ranges = (usize::MAX, |_, _: &mut [f32]| {});
            network.differentiate(&parameters, &mut gradients, &mut workspace, batch, ranges).unwrap();
            gradients
        };
        let expected = gradient(&[0, 1, 2, 3, 4], &OneRank);
        let sum = SumOverThreads { total: Mutex::default(), barrier: Barrier::new(3) };
        let found = std::thread::scope(|scope| {
            let parts = [&[2, 0][..], &[], &[4, 1, 3]];
            let (gradient, sum) = (&gradient, &sum);
            let threads = parts.map(|indices| scope.spawn(move || gradient(indices, sum)));
            threads.map(|thread| thread.join().unwrap())
        });
        let largest = expected.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
        for (index, expected) in expected.iter().enumerate() {
            let found: f32 = found.iter().map(|part| part[index]).sum();
            assert!((found - expected).abs() < 1e-6 * largest, "{index}: {found} {expected}");
        }
    }
}

/// The expected values were computed with `PyTorch`: `conv2d` with padding 1, `relu`, `max_pool2d` and `linear`.
#[test]
fn a_convolution_with_known_weights_gives_the_outputs_of_pytorch() {
    let image = ImageShape { channels: 1, height: 4, width: 4 };
    let input = InputShape { features: 16, image: Some(image) };
    let network =
        network("cnn:conv2x3,pool2", input, 1, Loss::SquaredError(TargetScale { mean: 0.0, deviation: 1.0 }));
    let parameters: Vec<f32> =
        (0..network.parameter_count()).map(|index| ((index * 7 % 11) as f32 - 5.0) / 10.0).collect();
    let mut workspace = network.allocate_workspace(1);
    workspace.input.indexed_iter_mut().for_each(|((_, x), value)| *value = (x * 5 % 7) as f32 / 7.0);
    let shapes: Vec<_> =
        network.parameter_tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
    let expected = [
        ("layers.0.weight", vec![2, 1, 3, 3]),
        ("layers.0.bias", vec![2]),
        ("layers.1.weight", vec![1, 8]),
        ("layers.1.bias", vec![1]),
    ];
    assert_eq!(shapes, expected.map(|(name, shape)| (name.to_owned(), shape)));
    let output = network.compute_outputs(&parameters, &mut workspace, 1).unwrap()[(0, 0)];
    assert!((output - 0.361_428_56).abs() < 1e-6, "{output}");
}

/// Dropout must keep the expected value of each input, and must use different random numbers in each step.
#[test]
fn dropout_keeps_the_mean_and_differs_between_steps_layers_and_samples() {
    use crate::train::model::dropout::Dropout;
    let layer = Dropout { width: 4001, probability: 0.3, number: 0 };
    let input = Array2::ones((2, 4001));
    let output = |layer: &Dropout, step: StepSeed, indices: &[u32]| {
        let mut output = Array2::zeros((2, 4001));
        let mut saved = layer.allocate_saved(2);
        let pass = TrainingPass { step, indices, weight: 1.0, ranks: &OneRank };
        let mode = ForwardMode::Training(pass);
        layer.forward(&[], input.view(), output.view_mut(), &mut saved, mode).unwrap();
        output
    };
    let step = StepSeed { seed: 1, step: 2 };
    let first = output(&layer, step, &[5, 6]);
    assert!((first.mean().unwrap() - 1.0).abs() < 0.03, "{:?}", first.mean());
    assert!(first.iter().all(|&value| value == 0.0 || (value - 1.0 / 0.7).abs() < 1e-6));
    assert_eq!(first, output(&layer, step, &[5, 6]));
    assert_eq!(first.row(1), output(&layer, step, &[6, 5]).row(0));
    let others = [
        output(&layer, StepSeed { seed: 2, step: 2 }, &[5, 6]),
        output(&layer, StepSeed { seed: 1, step: 3 }, &[5, 6]),
        output(&Dropout { number: 1, ..layer.clone() }, step, &[5, 6]),
        output(&layer, step, &[7, 8]),
    ];
    for other in others {
        let different = first.iter().zip(&other).filter(|(a, b)| a != b).count();
        // Two independent dropout masks differ in 2 x 0.3 x 0.7 = 42% of their elements on average.
        assert!((0.38..0.46).contains(&(different as f64 / 8002.0)), "{different}");
    }
    let mut evaluated = Array2::zeros((2, 4001));
    let (mut saved, mode) = (layer.allocate_saved(2), ForwardMode::Evaluation);
    layer.forward(&[], input.view(), evaluated.view_mut(), &mut saved, mode).unwrap();
    assert_eq!(evaluated, input);
}

#[test]
fn a_model_that_does_not_fit_its_inputs_is_refused() {
    let small = InputShape { features: 6, image: Some(ImageShape { channels: 1, height: 2, width: 3 }) };
    for (spec, input, expected) in [
        ("mlp:65536,65536", 10.into(), "too many parameters"),
        ("softmax", usize::MAX.into(), "too many parameters"),
        ("cnn", 64.into(), "needs images, but a sample has 64 features"),
        ("cnn", small, "has `pool2` where the image has only 1 x 1 pixels"),
        ("cnn:conv65536x1,conv65536x1,pool2", IMAGE_INPUT, "too many parameters"),
        (
            &["cnn:conv65536x1", &["pool1"; 13].join(",")].join(","),
            IMAGE_INPUT,
            "values for each sample; the maximum",
        ),
    ] {
        let error = Network::new(&spec.parse().unwrap(), input, 3, Loss::CrossEntropy).unwrap_err();
        assert!(error.contains(expected), "{spec}: {error}");
    }
}
