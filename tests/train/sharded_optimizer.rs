//! Tests of `--shard-optimizer`: each rank holds the state of the optimizer for only a part of the parameters.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::Path;

use ringtrain::train::data::{DataSource, Task};
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    BucketBytes, CHECKPOINT_FILE_NAME, CheckpointSettings, Config, ExistingCheckpoint, Recipe,
    SHARDS_DEFAULT, Validation,
};
use ringtrain::{Compression, Rank};

use super::library::train;
use super::strategies::{
    NONE, PlannedInterventions, assert_close, checkpoint_in, parse_strategy, sgd_config, train_and_compare,
    train_on,
};
use super::util::{ringrun, run as run_program, runs_long_tests};

/// Returns a run of two epochs with 12 steps each, of a model with 170 parameters.
fn small_config() -> Config {
    Config {
        source: DataSource::Synthetic { rows: 600, columns: 8 },
        task: Some(Task::Regression),
        model: Some("mlp:9,8".parse().unwrap()),
        rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
        learning_rate: Some(0.01),
        batch_size: Some(40),
        epochs: Some(2),
        ..sgd_config()
    }
}

/// Returns the same run with the state divided, and with buckets of 60 parameters on 2, 3 or 4 ranks.
fn sharded(config: &Config) -> Config {
    Config { shard_optimizer: true, bucket_bytes: Some(BucketBytes::Fixed(240)), ..config.clone() }
}

/// The sum of two gradients has the same bits in both orders. So two ranks take exactly the steps of `allreduce` if the
/// step of a parameter does not depend on other parameters.
#[test]
fn two_ranks_take_the_same_steps_as_with_whole_states() {
    let plain = Config { weight_decay: 0.01, ..small_config() };
    let accumulated = Config {
        micro_batches: NonZeroU32::new(3).unwrap(),
        compression: Compression::Bf16,
        ..plain.clone()
    };
    let clipped = Recipe { clip_norm: Some(0.05), ..Recipe::default() };
    let clipped = Config { recipe: clipped, ..plain.clone() };
    let with_rule = |rule| Config { rule: Some(rule), ..plain.clone() };
    let options = AdamOptions::DEFAULT;
    let all = [
        (accumulated, true),
        (clipped, false),
        (with_rule(Rule::Lamb(options)), false),
        (Config { learning_rate: Some(5.0), ..with_rule(Rule::Lars { momentum: 0.9 }) }, false),
        (with_rule(Rule::AdamW(options)), true),
        (with_rule(Rule::Sgd), true),
        (with_rule(Rule::Momentum { momentum: 0.9 }), true),
        (with_rule(Rule::Nesterov { momentum: 0.9 }), true),
    ];
    for (config, same_bits) in if runs_long_tests() { &all[..] } else { &all[..4] } {
        let expected = train_and_compare(2, config);
        let found = train_and_compare(2, &sharded(config));
        let what = format!("{:?}", config.rule);
        if *same_bits {
            assert!(found.parameters == expected.parameters, "{what}");
        }
        assert_close(&found.parameters, &expected.parameters, &what);
        assert_eq!((found.report.bucket_bytes, expected.report.bucket_bytes), (Some(240), None));
        assert_ne!(found.report.history[0].train_loss, found.report.history[1].train_loss, "{what}");
    }
}

/// The default of a linear model is `accelerated`, which needs a sum over all parameters. Some ranks have no sample of a
/// batch. Ranks without parameters and without samples must take part in all operations.
#[test]
fn more_ranks_than_parameters_or_samples_give_the_same_result() {
    let source = DataSource::Synthetic { rows: 30, columns: 2 };
    let linear = Config { source, model: None, rule: None, learning_rate: None, ..small_config() };
    let accelerated = Config { batch_size: None, epochs: Some(20), ..linear.clone() };
    let few_samples = Config { batch_size: Some(2), ..linear };
    for config in [accelerated, few_samples] {
        let expected = train(&config).unwrap();
        let found = train_and_compare(5, &sharded(&config));
        assert_eq!(found.report.parameters, 3);
        assert_close(&found.parameters, &expected.parameters, &found.report.optimizer);
    }
}

/// Each rank holds 1/n of the state, also with buckets that n does not divide.
#[test]
fn the_state_of_each_rank_becomes_smaller_with_the_number_of_ranks() {
    for (n, bucket_bytes) in [(2, None), (3, Some(4)), (4, Some(100))] {
        let bucket_bytes = bucket_bytes.map(BucketBytes::Fixed);
        let config = Config { bucket_bytes, epochs: Some(1), ..sharded(&small_config()) };
        let summaries = train_on(n, &config, NONE);
        let sizes: Vec<usize> =
            summaries.into_iter().map(|summary| summary.unwrap().report.optimizer_state_bytes).collect();
        // Adam has two numbers of 4 bytes for each parameter.
        let total = 2 * 4 * (8 * 9 + 9 + 9 * 8 + 8 + 8 + 1);
        assert_eq!(sizes.iter().sum::<usize>(), total, "{sizes:?}");
        let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
        assert!(most - least <= 16 && most * n as usize >= total, "{sizes:?}");
    }
}

/// A checkpoint holds the whole state, so a run can resume on another number of ranks, with and without the option.
#[test]
fn a_run_continues_on_other_ranks_and_without_the_option() {
    let validation = Validation { fraction: 0.1, patience: Some(9) };
    let recipe = Recipe { validation: Some(validation), ..Recipe::default() };
    let whole =
        Config { rule: Some(Rule::Momentum { momentum: 0.9 }), recipe, epochs: Some(5), ..small_config() };
    let expected = train(&whole).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let part = |epochs, existing| Config {
        epochs: Some(epochs),
        checkpoint: Some(checkpoint_in(directory.path(), existing)),
        ..whole.clone()
    };
    train_and_compare(3, &sharded(&part(1, ExistingCheckpoint::Refuse)));
    train_and_compare(2, &sharded(&part(2, ExistingCheckpoint::Resume)));
    train_and_compare(1, &sharded(&part(3, ExistingCheckpoint::Resume)));
    train_and_compare(2, &part(4, ExistingCheckpoint::Resume));
    let found = train_and_compare(4, &sharded(&part(5, ExistingCheckpoint::Resume)));
    assert_close(&found.parameters, &expected.parameters, "resumed four times");
    assert_eq!((found.report.epochs, found.report.best_epoch), (5, expected.report.best_epoch));
}

/// Rank 0 decides when a checkpoint is due, and all ranks have to send their parts. A stop signal on one rank stops all
/// ranks after the same step.
#[test]
fn checkpoints_within_an_epoch_have_the_whole_state() {
    let directory = tempfile::tempdir().unwrap();
    let latest = directory.path().join(CHECKPOINT_FILE_NAME);
    let config = |existing| {
        let settings = CheckpointSettings {
            steps: NonZeroU64::new(5),
            checkpoints_kept: NonZeroU32::new(9).unwrap(),
            ..checkpoint_in(directory.path(), existing)
        };
        Config { checkpoint: Some(settings), ..sharded(&small_config()) }
    };
    let stop = PlannedInterventions { stop: Some((Rank::new(2), 7)), ..NONE };
    for result in train_on(3, &config(ExistingCheckpoint::Refuse), stop) {
        let report = result.unwrap().report;
        assert!(report.stopped && report.steps == 8, "{report:?}");
    }
    let expected = train(&small_config()).unwrap();
    let periodic = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| *path != latest)
        .expect("a checkpoint within the epoch");
    let stopped = std::fs::read(&latest).unwrap();
    let found = train_and_compare(2, &config(ExistingCheckpoint::Resume));
    assert_close(&found.parameters, &expected.parameters, "stopped after step 8");
    assert!(std::fs::read(&periodic).unwrap() != stopped);
    std::fs::copy(&periodic, &latest).unwrap();
    let found = train_and_compare(2, &config(ExistingCheckpoint::Resume));
    assert_close(&found.parameters, &expected.parameters, "saved within the epoch");
}

#[test]
fn reproducible_runs_keep_their_bits() {
    let recipe =
        |clip_norm| Recipe { reproducible_shards: Some(SHARDS_DEFAULT), clip_norm, ..Recipe::default() };
    for clip_norm in [None, Some(0.05)] {
        let config = Config { recipe: recipe(clip_norm), ..small_config() };
        let expected = train(&config).unwrap();
        let found = train_and_compare(3, &sharded(&config));
        assert_eq!(found.report.parameters_hash, expected.report.parameters_hash, "{clip_norm:?}");
        assert_eq!(found.report.optimizer_state_bytes, 57 * 8);
    }
    let lamb = Config {
        rule: Some(Rule::Lamb(AdamOptions::DEFAULT)),
        recipe: recipe(None),
        ..sharded(&small_config())
    };
    let error = train(&lamb).unwrap_err().to_string();
    assert!(
        error.contains("--reproducible does not apply to --shard-optimizer with --optimizer lamb"),
        "{error}"
    );
}

#[test]
fn an_error_names_the_rank_with_corrupted_parameters() {
    let corrupt = PlannedInterventions { parameter: Some((Rank::new(1), 0.5)), ..NONE };
    for result in train_on(3, &Config { epochs: Some(1), ..sharded(&small_config()) }, corrupt) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank 1 holds different parameters"), "{error}");
    }
}

#[test]
fn other_strategies_refuse_the_option() {
    for text in [
        "model-average",
        "local-sgd:2",
        "diloco:2",
        "ps-sync",
        "ps-async",
        "gossip",
        "tensor",
        "pipeline:1",
        "hybrid:1x1",
    ] {
        let config = Config { strategy: parse_strategy(text), ..sharded(&small_config()) };
        let error = train(&config).unwrap_err().to_string();
        assert!(error.contains("--shard-optimizer is for --strategy allreduce"), "{text}: {error}");
        assert!(error.contains(&format!("leave it out with --strategy {text}")), "{error}");
    }
}

/// A resumed run takes the option from the checkpoint, unless another option excludes it.
#[test]
#[ignore = "runs with tools/test --full"]
fn ringtrain_resumes_with_and_without_the_option() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let state_bytes = |n: &str, line: &str| {
        let report = path("report.json");
        let mut arguments = vec!["-n", n, "ringtrain", "--report", &report];
        arguments.extend(line.split(' '));
        let done = run_program(&mut ringrun(&arguments));
        assert_eq!(done.code(), Some(0), "{done:?}");
        let text = std::fs::read_to_string(Path::new(&report)).unwrap();
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        (report["optimizer_state_bytes"].as_u64().unwrap(), done.stdout())
    };
    let (saved, options) =
        (path("saved"), "--data synthetic:100x4 --task regression --model mlp:5,5 --epochs");
    let resume = |rest: &str| format!("--resume {saved} --epochs {rest}");
    // The model has 61 parameters.
    let (bytes, stdout) = state_bytes("2", &format!("{options} 1 --shard-optimizer --checkpoint {saved}"));
    assert_eq!(bytes, 31 * 8);
    let expected = "each rank holds the state of the optimizer for a part of the model: from 30 to 31 of the 61 parameters";
    assert!(stdout.contains(expected), "{stdout}");
    assert_eq!(state_bytes("2", &resume("2")).0, 31 * 8);
    assert_eq!(state_bytes("2", &resume("3 --no-shard-optimizer")).0, 61 * 8);
    assert_eq!(state_bytes("3", &resume("4 --shard-optimizer")).0, 21 * 8);
    assert!(state_bytes("3", &resume("5 --strategy pipeline:3")).0 < 61 * 8);
}
