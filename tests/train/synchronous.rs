//! Synchronous strategies take the steps of a single process, for an MLP and for a CNN: after 100 steps, no parameter has a
//! relative difference above 1e-5, as `assert_close` defines it.

use ringtrain::train::{BucketBytes, Config};

use super::library::train;
use super::reproducible::write_images;
use super::strategies::{assert_close, parse_strategy, sgd_config, train_and_compare};
use super::util::{if_long_tests_else, runs_long_tests};

/// Models with four layers that have parameters. Without `tools/test --full`, the test trains only the first model.
const MODELS: &[&str] = &["cnn:conv2x3,pool2,dense8,dense6", "mlp:12,8,6"];

/// A strategy, the number of ranks and whether the ranks divide the state of the optimizer.
type RunShape = (&'static str, u32, bool);

/// The shapes of a test run without `--full`: one for each kind of exchange that other tests of 100 steps do not cover.
const SHORT_RUN_SHAPES: &[RunShape] = &[("allreduce", 3, true)];

/// All strategies that take the steps of a single process, on 1 to 4 ranks. `tensor` divides fully connected layers only.
const ALL_SHAPES: &[RunShape] = &[
    ("allreduce", 1, false),
    ("allreduce", 2, false),
    ("allreduce", 3, false),
    ("allreduce", 4, false),
    ("allreduce", 1, true),
    ("allreduce", 2, true),
    ("allreduce", 3, true),
    ("allreduce", 4, true),
    ("local-sgd:1", 2, false),
    ("local-sgd:1", 3, false),
    ("local-sgd:1", 4, false),
    ("ps-sync", 2, false),
    ("ps-sync", 3, false),
    ("ps-sync", 4, false),
    ("pipeline:1", 1, false),
    ("pipeline:2", 2, false),
    ("pipeline:3", 3, false),
    ("pipeline:4", 4, false),
    ("hybrid:1x1", 1, false),
    ("hybrid:2x1", 2, false),
    ("hybrid:1x3", 3, false),
    ("hybrid:2x2", 4, false),
    ("tensor", 1, false),
    ("tensor", 2, false),
    ("tensor", 3, false),
    ("tensor", 4, false),
];

/// The last batch of an epoch is shorter than the others, and the parts of the ranks differ in length.
#[test]
fn runs_equal_sgd_in_a_single_process_after_100_steps() {
    let directory = tempfile::tempdir().unwrap();
    let images = Config {
        source: write_images(directory.path()),
        batch_size: Some(14),
        epochs: Some(12),
        learning_rate: Some(0.1),
        ..sgd_config()
    };
    for model in if_long_tests_else(MODELS, &MODELS[..1]) {
        let config = Config { model: Some(model.parse().unwrap()), ..images.clone() };
        let alone = train(&config).unwrap();
        assert_eq!(alone.report.steps, 108);
        for &(text, n, shard_optimizer) in if runs_long_tests() { ALL_SHAPES } else { SHORT_RUN_SHAPES } {
            if text == "tensor" && model.starts_with("cnn") {
                continue;
            }
            let config = Config {
                strategy: parse_strategy(text),
                shard_optimizer,
                bucket_bytes: Some(BucketBytes::Fixed(500)),
                ..config.clone()
            };
            let what = format!("{model}, {text} on {n} ranks, {shard_optimizer}");
            assert_close(&train_and_compare(n, &config).parameters, &alone.parameters, &what);
        }
    }
}
