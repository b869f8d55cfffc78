//! Tests of batch normalization: statistics over ranks, running statistics in checkpoints and model files, and options that
//! do not fit.

use std::fs;
use std::num::NonZeroU32;
use std::sync::atomic::AtomicBool;

use ringtrain::Group;
use ringtrain::train::data::{DataSource, Task};
use ringtrain::train::optimizer::Rule;
use ringtrain::train::{BucketBytes, Config, ExistingCheckpoint, Recipe, run};
use serde_json::Value;

use super::library::{StopAfter, checkpoint_in, config, train};
use super::program::{assert_fails, ringtrain_stdout};
use super::strategies::{assert_close, parse_strategy, train_and_compare};
use super::util::if_long_tests_else;

const MLP: &str = "mlp:8,batchnorm,6,batchnorm";
const CNN: &str = "cnn:conv3x3,batchnorm,pool2,dropout0.1,dense6,batchnorm";

/// Returns a configuration with little data. An epoch has 20 steps.
fn small_config(model: &str) -> Config {
    Config {
        source: if model.starts_with("mlp") {
            DataSource::Synthetic { rows: 300, columns: 5 }
        } else {
            DataSource::Digits
        },
        model: Some(model.parse().unwrap()),
        test_fraction: if model.starts_with("mlp") { 0.2 } else { 0.8 },
        batch_size: Some(if model.starts_with("mlp") { 12 } else { 18 }),
        epochs: Some(5),
        rule: Some(Rule::Momentum { momentum: 0.5 }),
        learning_rate: Some(0.01),
        ..config()
    }
}

/// The ranks must use the statistics of the whole batch, and the buckets of gradients must not change their order.
#[test]
fn the_parameters_do_not_depend_on_the_number_of_ranks() {
    let all: &[(&str, u32)] = &[
        (CNN, 3),
        (MLP, 4),
        (MLP, 2),
        (MLP, 3),
        (CNN, 2),
        (CNN, 4),
        ("cnn:conv3x3,pool2,dense6", 2),
        ("cnn:conv3x3,pool2,dense6", 3),
        ("cnn:conv3x3,pool2,dense6", 4),
    ];
    for &(model, ranks) in if_long_tests_else(all, &all[..1]) {
        let config = small_config(model);
        let expected = train(&config).unwrap();
        assert!(expected.report.steps >= 100, "{:?}", expected.report);
        let buckets = Config { bucket_bytes: Some(BucketBytes::Fixed(400)), ..config };
        let found = train_and_compare(ranks, &buckets);
        assert_close(&found.parameters, &expected.parameters, &format!("{model} on {ranks} ranks"));
    }
}

/// Returns a configuration with 10 epochs of 10 steps and clipped gradients.
fn clipped_config() -> Config {
    let recipe = Recipe { clip_norm: Some(0.5), ..Recipe::default() };
    Config { recipe, batch_size: Some(24), epochs: Some(10), ..small_config(MLP) }
}

/// Clipping must not change the running statistics, and a bucket may end within them.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_sharded_optimizer_takes_the_same_steps() {
    let config = clipped_config();
    let expected = train(&config).unwrap();
    assert!(expected.report.steps >= 100, "{:?}", expected.report);
    let sharded = Config { shard_optimizer: true, bucket_bytes: Some(BucketBytes::Fixed(76)), ..config };
    assert_close(&train_and_compare(3, &sharded).parameters, &expected.parameters, "3 ranks");
}

/// The stages of a pipeline normalize each micro-batch. A single process with `--accumulate` has the same micro-batches. Two
/// pipelines divide the batch between them, so each has half of the micro-batches.
#[test]
#[ignore = "runs with tools/test --full"]
fn pipelines_and_a_single_process_with_the_same_micro_batches_take_the_same_steps() {
    let all: &[(&str, u32, u32, u32)] =
        &[("hybrid:2x2", 4, 2, 4), ("pipeline:3", 3, 3, 3), ("pipeline:2", 2, 1, 1)];
    for &(text, ranks, own_count, count) in if_long_tests_else(all, &all[..2]) {
        let config = Config { micro_batches: NonZeroU32::new(count).unwrap(), ..clipped_config() };
        let expected = train(&config).unwrap();
        let divided = Config {
            strategy: parse_strategy(text),
            micro_batches: NonZeroU32::MIN,
            pipeline_micro_batches: NonZeroU32::new(own_count),
            ..config
        };
        assert_close(&train_and_compare(ranks, &divided).parameters, &expected.parameters, text);
    }
}

/// Micro-batch k consists of the k-th micro-batch of each rank. So a single process has the same micro-batches if its rows
/// have another order: an epoch is a single batch, whose rows are not shuffled.
#[test]
#[ignore = "runs with tools/test --full"]
fn the_micro_batches_of_all_ranks_are_normalized_together() {
    const ROWS: usize = 24;
    let directory = tempfile::tempdir().unwrap();
    let run = |name: &str, order: &[usize]| {
        let cell = |row: usize, column: usize| (row * 7919 + column * 104_729) % 101;
        let line = |&row: &usize| {
            format!(
                "{},{},{}
",
                cell(row, 0),
                cell(row, 1),
                cell(row, 2)
            )
        };
        let path = directory.path().join(name);
        fs::write(
            &path,
            "a,b,y
"
            .to_owned()
                + &order.iter().map(line).collect::<String>(),
        )
        .unwrap();
        Config {
            source: DataSource::Csv(path),
            target: Some("y".into()),
            task: Some(Task::Regression),
            test_fraction: 0.0,
            batch_size: Some(ROWS),
            micro_batches: NonZeroU32::new(3).unwrap(),
            epochs: Some(100),
            ..small_config(MLP)
        }
    };
    let on_two_ranks = run("ranks.csv", &(0..ROWS).collect::<Vec<_>>());
    // Each of the two ranks has 12 rows, and each of its 3 micro-batches has 4 rows.
    let order: Vec<usize> = (0..3).flat_map(|k| (4 * k..4 * k + 4).chain(12 + 4 * k..16 + 4 * k)).collect();
    let expected = train(&run("alone.csv", &order)).unwrap();
    assert_close(&train_and_compare(2, &on_two_ranks).parameters, &expected.parameters, "2 ranks");
    let unordered = train(&on_two_ranks).unwrap();
    assert_ne!(unordered.parameters, expected.parameters, "the order of the rows matters");
}

/// If ranks without samples did not take part in the sums, the other ranks would wait for them.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_batch_may_have_fewer_samples_than_ranks() {
    let config = Config { batch_size: Some(3), epochs: Some(1), ..small_config(MLP) };
    let expected = train(&config).unwrap();
    assert_close(&train_and_compare(4, &config).parameters, &expected.parameters, "4 ranks");
    // The last batch has 6 samples, so some ranks have empty micro-batches.
    let short = Config { batch_size: Some(13), micro_batches: NonZeroU32::new(3).unwrap(), ..config };
    assert!(train_and_compare(4, &short).report.train_loss.is_finite());
}

#[test]
fn a_resumed_run_gives_the_same_bits_as_an_uninterrupted_run() {
    let directory = tempfile::tempdir().unwrap();
    let uninterrupted = Config { epochs: Some(2), ..small_config(MLP) };
    let expected = train(&uninterrupted).unwrap();
    let stop = AtomicBool::new(false);
    let first = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..uninterrupted.clone()
    };
    let mut observer = StopAfter { steps: 7, stop: &stop };
    assert!(run(&mut Group::solo(), &first, &stop, &mut observer).unwrap().report.stopped);
    let second = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
        ..uninterrupted
    };
    assert_eq!(train(&second).unwrap().parameters, expected.parameters);
}

/// Tests use the running statistics. If a strategy did not carry them, the tested model would be useless.
#[test]
#[ignore = "runs with tools/test --full"]
fn strategies_whose_ranks_train_alone_average_the_running_statistics() {
    let all: &[&str] = &["diloco:4", "ps-sync", "local-sgd:4", "model-average:1", "gossip"];
    for text in if_long_tests_else(all, &all[..2]) {
        let config = Config {
            strategy: parse_strategy(text),
            test_fraction: 0.2,
            batch_size: Some(60),
            epochs: Some(4),
            learning_rate: Some(0.1),
            ..small_config("mlp:16,batchnorm")
        };
        let digits = Config { source: DataSource::Digits, ..config };
        let accuracy = train_and_compare(3, &digits).report.test_accuracy.unwrap();
        assert!(accuracy > 0.85, "{text}: {accuracy}");
    }
}

#[test]
fn a_saved_model_predicts_with_its_running_statistics() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    ringtrain_stdout(
        place,
        "--model mlp:16,batchnorm --lr 0.01 --epochs 2 --batch-size 64 --test-fraction 0 --save-model m --report r",
    );
    let report: Value = serde_json::from_str(&fs::read_to_string(place.join("r")).unwrap()).unwrap();
    let evaluation: Value =
        serde_json::from_str(&ringtrain_stdout(place, "eval --model m --data digits --json")).unwrap();
    assert_eq!(evaluation["accuracy"], report["train_accuracy"]);
    assert!(evaluation["accuracy"].as_f64().unwrap() > 0.85, "{evaluation}");
    let text = ringtrain_stdout(place, "inspect m");
    assert!(text.contains("layers.1.running_var"), "{text}");
    assert!(!text.contains("layers.0.bias"), "the normalized layer has no biases: {text}");
}

#[test]
fn options_that_do_not_fit_batch_normalization_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    for (line, code, expected) in [
        ("--model mlp:8,batchnorm --strategy tensor", 2, "pass --strategy allreduce or pipeline"),
        ("--model mlp:8,batchnorm --strategy pipeline:1 --batch-size 7", 2, "or a smaller --micro-batches"),
        ("--model mlp:8,batchnorm --strategy ps-async", 2, "pass --strategy ps-sync or allreduce"),
        ("--model mlp:8,batchnorm --reproducible", 2, "leave out --reproducible"),
        ("--model mlp:8,batchnorm --accumulate 2 --batch-size 3", 2, "in a micro-batch (--accumulate 2)"),
        ("--model mlp:8,batchnorm --batch-size 1", 2, "pass --batch-size 2 or more"),
        ("--model mlp:batchnorm,8", 2, "has `batchnorm` as its first layer"),
    ] {
        assert_fails(directory.path(), line, code, expected);
    }
}
