//! Compares batch normalization with `PyTorch`, and tests unusual batches.

use ndarray::Array2;

use super::*;
use crate::train::model::layer::{GradientUpdate, OneRank, StepSeed, SumOrder};

/// The results of a training step of a layer.
struct LayerStep {
    output: Array2<f32>,
    input_delta: Array2<f32>,
    gradients: Vec<f32>,
}

fn training_pass(weight: f32) -> ForwardMode<'static> {
    ForwardMode::Training(TrainingPass { step: StepSeed::default(), indices: &[], weight, ranks: &OneRank })
}

fn take_step(layer: &BatchNorm, parameters: &[f32], input: &Array2<f32>, delta: &Array2<f32>) -> LayerStep {
    let mut saved = layer.allocate_saved(input.nrows());
    let (mut output, mut input_delta) = (input.clone(), input.clone());
    let mode = training_pass(1.0 / input.nrows() as f32);
    layer.forward(parameters, input.view(), output.view_mut(), &mut saved, mode).unwrap();
    let mut gradients = vec![f32::NAN; parameters.len()];
    let (mut ignore, mut scratch) = (|_: std::ops::Range<usize>, _: &mut [f32]| {}, Vec::new());
    let mut sink = GradientSink::new(
        (&mut gradients, GradientUpdate::Replace),
        0..parameters.len(),
        usize::MAX,
        &mut ignore,
        (SumOrder::Any, &mut scratch),
    );
    let mut delta = delta.clone();
    let pass = BackwardPass {
        input: input.view(),
        output: output.view(),
        delta: delta.view_mut(),
        input_delta: Some(input_delta.view_mut()),
        saved: &mut saved,
        ranks: &OneRank,
    };
    layer.backward(parameters, pass, &mut sink).unwrap();
    LayerStep { output, input_delta, gradients }
}

fn assert_close<'a>(found: impl IntoIterator<Item = &'a f32>, expected: &[f32], what: &str) {
    let found: Vec<f32> = found.into_iter().copied().collect();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 2e-6 * expected.abs().max(1.0), "{what}: {found} {expected}");
    }
}

/// Returns an array of values from `-shift` to `1 - shift`. `factor` and `modulus` choose the values.
fn make_values(shape: (usize, usize), factor: usize, modulus: usize, shift: f32) -> Array2<f32> {
    let value = |index: usize| (index * factor % modulus) as f32 / modulus as f32 - shift;
    Array2::from_shape_fn(shape, |(row, column)| value(row * shape.1 + column))
}

/// Checks a training step, and then an evaluation. `expected` has four arrays:
///
/// 1. the outputs of the step
/// 2. the derivatives with respect to the inputs
/// 3. the gradients of the weights and biases, followed by the new running statistics
/// 4. the outputs of the evaluation
fn check_against_pytorch(layer: &BatchNorm, rows: usize, expected: [&[f32]; 4]) {
    let channels = layer.channels;
    let mut parameters: Vec<f32> = (0..channels).map(|index| 0.5 + 0.25 * index as f32).collect();
    parameters.extend((0..channels).map(|index| 0.1 * index as f32 - 0.1));
    parameters.extend((0..channels).map(|index| 0.3 - 0.2 * index as f32));
    parameters.extend((0..channels).map(|index| 0.5 + 0.5 * index as f32));
    let shape = (rows, channels * layer.pixels);
    let (input, delta) = (make_values(shape, 7, 11, 0.25), make_values(shape, 5, 13, 0.5));
    let LayerStep { output, input_delta, gradients } = take_step(layer, &parameters, &input, &delta);
    assert_close(&output, expected[0], "output");
    assert_close(&input_delta, expected[1], "derivative of the input");
    let statistics = 2 * channels..;
    parameters[statistics.clone()].iter_mut().zip(&gradients[statistics.clone()]).for_each(|(p, g)| *p -= g);
    let gradients_and_statistics = gradients[..2 * channels].iter().chain(&parameters[statistics]);
    assert_close(gradients_and_statistics, expected[2], "gradients and running statistics");
    let (mut output, mut saved) = (input.clone(), layer.allocate_saved(rows));
    let mode = ForwardMode::Evaluation;
    layer.forward(&parameters, input.view(), output.view_mut(), &mut saved, mode).unwrap();
    assert_close(&output, expected[3], "evaluation");
}

/// The values of `PyTorch` for [`a_layer_of_units_equals_batch_norm_1d_of_pytorch`].
const UNITS_EXPECTED: [&[f32]; 4] = [
    &[
        -0.952_079_6,
        1.005_744,
        1.440_992,
        0.310_260_6,
        0.335_248,
        0.546_997_2,
        0.184_026_5,
        -0.335_247_9,
        -0.346_997_3,
        0.057_792_48,
        -1.005_744,
        -1.240_992,
    ],
    &[
        -0.056_193_12,
        -0.001_645_685,
        -0.979_882_1,
        -0.234_043_4,
        -0.000_548_635_1,
        2.951_353,
        0.018_731_07,
        0.000_548_69,
        -2.951_353,
        0.271_505_6,
        0.001_645_795,
        0.979_882_4,
    ],
    &[
        0.446_674_2,
        -0.687_688_2,
        1.100_301,
        -1.076_923,
        0.461_538_5,
        0.0,
        0.306_363_6,
        0.115,
        -0.101_363_6,
        0.467_286_5,
        0.901_377_4,
        1.351_377,
    ],
    &[
        -0.506_941_9,
        0.214_366_6,
        0.206_745_6,
        0.157_995_9,
        0.142_552,
        0.128_543_7,
        0.091_502_09,
        0.070_737_4,
        0.050_341_78,
        0.025_008_31,
        -0.001_077_212,
        -0.027_860_13,
    ],
];

/// The expected values were computed with `BatchNorm1d` of `PyTorch` 2.
#[test]
fn a_layer_of_units_equals_batch_norm_1d_of_pytorch() {
    let layer = BatchNorm { channels: 3, pixels: 1, activation: Activation::Identity };
    check_against_pytorch(&layer, 4, UNITS_EXPECTED);
}

/// The values of `PyTorch` for [`a_layer_of_images_equals_batch_norm_2d_of_pytorch`].
const IMAGES_EXPECTED: [&[f32]; 4] = [
    &[
        -0.706_308,
        0.312_289_4,
        -0.269_766_2,
        0.748_831_2,
        0.111_105_7,
        -0.955_508_6,
        0.911_066_4,
        -0.155_547_9,
        -0.560_794_1,
        0.457_803_3,
        -0.124_252_3,
        -0.706_308,
        0.377_759_2,
        -0.688_855_1,
        1.177_72,
        0.111_105_7,
        -0.415_280_2,
        0.603_317_3,
        0.021_261_59,
        -0.560_794_1,
        0.644_412_8,
        -0.422_201_5,
        -1.488_816,
        0.377_759_2,
    ],
    &[
        -0.478_040_3,
        -0.145_278_3,
        0.631_999_7,
        -0.635_891_4,
        0.029_517_36,
        1.235_308,
        -0.705_603_5,
        0.500_187_6,
        -0.395_323_7,
        -0.062_561_69,
        0.714_716_3,
        -0.108_658_9,
        0.235_737,
        -1.491_661,
        -0.499_383_8,
        0.706_407_2,
        -0.312_607_1,
        0.020_154_94,
        0.797_432_9,
        -0.025_942_25,
        0.441_956_7,
        -1.285_442,
        -0.079_650_77,
        0.912_626_9,
    ],
    &[1.040_984, 0.223_350_7, -1.153_846, 0.307_692_3, 0.282_878_8, 0.115_757_6, 0.460_643_6, 0.907_131_2],
    &[
        -0.492_564_6,
        -0.023_764_1,
        -0.291_650_1,
        0.177_150_5,
        0.141_502_6,
        -0.144_843_4,
        0.356_262_1,
        0.069_916_15,
        -0.425_593_1,
        0.043_207_41,
        -0.224_678_6,
        -0.492_564_6,
        0.213_089_2,
        -0.073_256_85,
        0.427_848_7,
        0.141_502_6,
        -0.358_621_6,
        0.110_178_9,
        -0.157_707_1,
        -0.425_593_1,
        0.284_675_7,
        -0.001_670_344,
        -0.288_016_3,
        0.213_089_2,
    ],
];

/// The expected values were computed with `BatchNorm2d` of `PyTorch` 2.
#[test]
fn a_layer_of_images_equals_batch_norm_2d_of_pytorch() {
    let layer = BatchNorm { channels: 2, pixels: 4, activation: Activation::Identity };
    check_against_pytorch(&layer, 3, IMAGES_EXPECTED);
}

/// A sum of squares in f32 would lose the variance of numbers far from 0.
#[test]
fn values_far_from_the_running_mean_keep_their_variance() {
    let layer = BatchNorm { channels: 1, pixels: 4, activation: Activation::Identity };
    let input = Array2::from_shape_vec(
        (2, 4),
        vec![1e6, 1e6 + 1.0, 1e6 + 2.0, 1e6 + 3.0, 1e6, 1e6 + 1.0, 1e6 + 2.0, 1e6 + 3.0],
    );
    let input = input.unwrap();
    let step = take_step(&layer, &[1.0, 0.0, 0.0, 1.0], &input, &Array2::zeros((2, 4)));
    // The mean is 1e6 + 1.5, and the variance 1.25. f32 rounds the mean to a multiple of 1/16.
    let expected = [-1.5, -0.5, 0.5, 1.5].map(|value| value / (1.25_f32 + 1e-5).sqrt());
    assert_close(&step.output, &[expected, expected].concat(), "output");
    assert!((1.0 - step.gradients[3] - 1.042_857).abs() < 1e-4, "{:?}", step.gradients);
}

/// A batch with a single value says nothing about the variance, so the running variance must not change.
#[test]
fn a_single_value_becomes_the_bias_and_keeps_the_running_variance() {
    let layer = BatchNorm { channels: 1, pixels: 1, activation: Activation::Identity };
    let (input, delta) = (Array2::from_elem((1, 1), 7.0), Array2::ones((1, 1)));
    let step = take_step(&layer, &[2.0, 0.5, 5.0, 3.0], &input, &delta);
    assert_eq!((step.output[(0, 0)], step.input_delta[(0, 0)]), (0.5, 0.0));
    assert_close(&step.gradients, &[0.0, 1.0, -0.2, 0.0], "gradients");
}

/// If NaN became a number, the run would not notice that it has diverged.
#[test]
fn nan_reaches_the_output() {
    let layer = BatchNorm { channels: 1, pixels: 2, activation: Activation::Rectifier };
    let input = Array2::from_shape_vec((1, 2), vec![1.0, f32::NAN]).unwrap();
    let step = take_step(&layer, &[1.0, 0.0, 0.0, 1.0], &input, &Array2::ones((1, 2)));
    assert!(step.output.iter().all(|value| value.is_nan()), "{}", step.output);
}
