//! Tests of the strategies that divide the model over ranks: `tensor`, `pipeline` and `hybrid`.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::Path;

use ringtrain::train::data::DataSource;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    CHECKPOINT_FILE_NAME, CheckpointSettings, Config, ExistingCheckpoint, Recipe, Summary, Validation,
};
use ringtrain::{Compression, Rank};

use super::library::train;
use super::strategies::{
    NONE, PlannedInterventions, assert_close, checkpoint_in, parse_strategy, sgd_config, train_and_compare,
    train_on,
};
use super::util::{ringrun, run as run_program, runs_long_tests};

/// Returns a configuration with four layers. An epoch has 15 steps.
fn deep_config() -> Config {
    let model = Some("mlp:16,12,8".parse().unwrap());
    Config { model, batch_size: Some(100), epochs: Some(7), learning_rate: Some(0.1), ..sgd_config() }
}

/// Returns a configuration with four layers and little data. An epoch has 12 steps.
fn small_config() -> Config {
    let source = DataSource::Synthetic { rows: 600, columns: 8 };
    Config { source, batch_size: Some(40), learning_rate: Some(0.05), ..deep_config() }
}

fn micro_batch_count(count: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(count)
}

/// An epoch has 111 steps of 13 samples, so the parts of 3 pipelines and the micro-batches have different lengths.
/// With 1000 micro-batches, each sample is a micro-batch.
#[test]
fn runs_equal_a_single_process_after_100_steps() {
    let plain = Config { batch_size: Some(13), epochs: Some(1), ..deep_config() };
    let recipe = Recipe { clip_norm: Some(0.5), ..Recipe::default() };
    let clipped = Config { recipe, rule: Some(Rule::Momentum { momentum: 0.5 }), ..plain.clone() };
    // With three layers, `tensor` divides the first layer by its inputs.
    let odd = Config {
        model: Some("mlp:16,12".parse().unwrap()),
        micro_batches: NonZeroU32::new(2).unwrap(),
        epochs: Some(9),
        recipe: clipped.recipe.clone(),
        ..small_config()
    };
    let all: &[(u32, &str, u32, &Config)] = &[
        (4, "hybrid:2x2", 2, &clipped),
        (3, "tensor", 0, &odd),
        (4, "pipeline:4", 3, &plain),
        (3, "hybrid:3x1", 0, &plain),
        (3, "pipeline:3", 1, &plain),
        (2, "pipeline:2", 1000, &clipped),
        (2, "hybrid:1x2", 7, &plain),
        (1, "pipeline:1", 2, &plain),
        (1, "tensor", 0, &plain),
        (2, "tensor", 0, &clipped),
        (3, "tensor", 0, &plain),
        (4, "tensor", 0, &clipped),
    ];
    for &(n, text, count, config) in if runs_long_tests() { all } else { &all[..2] } {
        let alone = train(config).unwrap();
        let divided = Config {
            strategy: parse_strategy(text),
            pipeline_micro_batches: micro_batch_count(count),
            ..config.clone()
        };
        let found = train_and_compare(n, &divided);
        assert_close(&found.parameters, &alone.parameters, text);
        assert!(found.report.steps == alone.report.steps && alone.report.steps > 100, "{text}");
        assert_eq!(found.report.test_accuracy, alone.report.test_accuracy, "{text}");
        assert!(count == 0 || found.report.micro_batches == count, "{text}: {:?}", found.report);
    }
}

/// The random numbers of dropout depend on the sample and not on the rank. A pooling layer has no parameters, so it
/// stays on the rank of the convolution before it.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_pipeline_takes_the_same_steps_with_convolution_and_dropout() {
    let model = Some("cnn:conv2x3,pool2,dropout0.5,dense8".parse().unwrap());
    let config = Config { model, batch_size: Some(100), epochs: Some(1), ..deep_config() };
    let alone = train(&config).unwrap();
    for text in
        if runs_long_tests() { &["pipeline:3", "hybrid:3x1", "pipeline:2"][..] } else { &["pipeline:3"] }
    {
        let n = if *text == "pipeline:2" { 2 } else { 3 };
        let found = train_and_compare(n, &Config { strategy: parse_strategy(text), ..config.clone() });
        assert_close(&found.parameters, &alone.parameters, text);
    }
    let error = train(&Config { strategy: parse_strategy("tensor"), ..config }).unwrap_err().to_string();
    assert!(error.contains("divides fully connected layers only"), "{error}");
}

/// LAMB needs the norms of whole tensors, and a rank must not mix up the tensors of its stage with those of other
/// stages.
#[test]
fn optimizers_with_a_state_take_the_same_steps() {
    let all = &[Rule::Lamb(AdamOptions::DEFAULT), Rule::AdamW(AdamOptions::DEFAULT)][..];
    for &rule in if runs_long_tests() { all } else { &all[..1] } {
        let config = Config {
            rule: Some(rule),
            learning_rate: Some(0.003),
            weight_decay: 0.01,
            epochs: Some(2),
            ..small_config()
        };
        let alone = train(&config).unwrap();
        let found = train_and_compare(2, &Config { strategy: parse_strategy("pipeline:2"), ..config });
        // Adam divides by the square root of small numbers, so it magnifies the differences of rounding.
        let largest = alone.parameters.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
        for (f, e) in found.parameters.iter().zip(&alone.parameters) {
            assert!((f - e).abs() <= 1e-3 * largest, "{rule:?}: {f}, expected {e}");
        }
    }
}

/// A rank holds the parameters of its stage only, and rank 0 has the whole model at the end.
#[test]
fn each_rank_of_a_divided_model_holds_only_its_part() {
    let config = Config { strategy: parse_strategy("hybrid:2x2"), epochs: Some(1), ..deep_config() };
    let summaries: Vec<Summary> =
        train_on(4, &config, NONE).into_iter().map(|result| result.unwrap()).collect();
    // The first stage has the first layer (64 inputs and 16 outputs), and the second stage has the other layers.
    let (first, second) = (64 * 16 + 16, 16 * 12 + 12 + 12 * 8 + 8 + 8 * 10 + 10);
    let counts: Vec<usize> = summaries.iter().map(|summary| summary.parameters.len()).collect();
    assert_eq!(counts, [first + second, first, second, second]);
    assert_eq!(summaries[0].report.parameters, first + second);
    assert_eq!(summaries[0].parameters[..first], summaries[1].parameters);
    assert_eq!(summaries[0].parameters[first..], summaries[3].parameters);
}

/// A checkpoint holds the whole model, so a run can resume on another number of ranks, and with `allreduce`,
/// `tensor`, `pipeline` or `hybrid`.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_run_continues_with_other_stages_and_without_stages() {
    let validation = Validation { fraction: 0.1, patience: Some(9) };
    let recipe = Recipe { validation: Some(validation), ..Recipe::default() };
    let whole =
        Config { rule: Some(Rule::Momentum { momentum: 0.9 }), recipe, epochs: Some(5), ..small_config() };
    let expected = train(&whole).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let part = |epochs, text: &str, existing| Config {
        epochs: Some(epochs),
        strategy: parse_strategy(text),
        checkpoint: Some(checkpoint_in(directory.path(), existing)),
        ..whole.clone()
    };
    train_and_compare(2, &part(1, "pipeline:2", ExistingCheckpoint::Refuse));
    train_and_compare(4, &part(2, "hybrid:2x2", ExistingCheckpoint::Resume));
    train_and_compare(2, &part(3, "allreduce", ExistingCheckpoint::Resume));
    train_and_compare(3, &part(4, "tensor", ExistingCheckpoint::Resume));
    let found = train_and_compare(3, &part(5, "pipeline:3", ExistingCheckpoint::Resume));
    assert_close(&found.parameters, &expected.parameters, "resumed four times");
    assert_eq!(found.report.best_epoch, expected.report.best_epoch);
    assert_eq!(found.report.epochs, 5);
}

/// A stop signal on one rank stops all ranks after the same step, and the checkpoint has the parts of all ranks.
#[test]
fn a_stopped_divided_run_is_saved_and_continues() {
    let directory = tempfile::tempdir().unwrap();
    let config = |existing| Config {
        epochs: Some(2),
        strategy: parse_strategy("pipeline:3"),
        checkpoint: Some(checkpoint_in(directory.path(), existing)),
        ..small_config()
    };
    let stop = PlannedInterventions { stop: Some((Rank::new(2), 5)), ..NONE };
    for result in train_on(3, &config(ExistingCheckpoint::Refuse), stop) {
        let report = result.unwrap().report;
        assert!(report.stopped && report.steps == 6, "{report:?}");
    }
    let found = train_and_compare(3, &config(ExistingCheckpoint::Resume));
    let expected = train(&Config { epochs: Some(2), ..small_config() }).unwrap();
    assert_close(&found.parameters, &expected.parameters, "stopped after step 6");
}

/// Rank 0 decides when a checkpoint within an epoch is due, and all ranks have to send their parts.
#[test]
fn a_checkpoint_within_an_epoch_has_the_whole_model() {
    let directory = tempfile::tempdir().unwrap();
    let settings = CheckpointSettings {
        steps: NonZeroU64::new(5),
        checkpoints_kept: NonZeroU32::new(9).unwrap(),
        ..checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)
    };
    let config = |text: &str, checkpoint| Config {
        epochs: Some(1),
        strategy: parse_strategy(text),
        checkpoint: Some(checkpoint),
        ..small_config()
    };
    let expected = train_and_compare(4, &config("hybrid:2x2", settings)).parameters;
    let latest = directory.path().join(CHECKPOINT_FILE_NAME);
    let earlier = |entry: std::io::Result<std::fs::DirEntry>| entry.map(|entry| entry.path()).unwrap();
    let mut files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(earlier).collect();
    files.retain(|path| *path != latest);
    assert!((1..=2).contains(&files.len()), "{files:?}");
    std::fs::copy(&files[0], &latest).unwrap();
    let found =
        train_and_compare(3, &config("tensor", checkpoint_in(directory.path(), ExistingCheckpoint::Resume)));
    assert_close(&found.parameters, &expected, "resumed within the epoch");
    assert_eq!(found.report.steps, 12);
}

/// The replicas of a stage compare hashes with each other, and not with ranks that hold another stage.
#[test]
fn an_error_names_the_rank_with_corrupted_parameters() {
    let config = Config { strategy: parse_strategy("hybrid:2x2"), epochs: Some(2), ..small_config() };
    let corrupt = PlannedInterventions { parameter: Some((Rank::new(3), 0.5)), ..NONE };
    for result in train_on(4, &config, corrupt) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("ranks 2, 3 hold different parameters"), "{error}");
    }
}

#[test]
fn divergence_of_a_divided_model_ends_all_ranks() {
    let config =
        Config { learning_rate: Some(1e30), strategy: parse_strategy("pipeline:2"), ..deep_config() };
    for result in train_on(2, &config, NONE) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("lower --lr"), "{error}");
    }
}

#[test]
fn wrong_numbers_of_ranks_and_stages_are_refused_before_training() {
    for (n, text, expected) in [
        (2, "pipeline:3", "needs 3 ranks, but this job has 2; start the job with ringrun -n 3"),
        (2, "hybrid:2x2", "needs 4 ranks, but this job has 2"),
        (
            3,
            "tensor",
            "divides the outputs of layer 1 over the 3 ranks of this job, but this layer has only 2",
        ),
        (1, "pipeline:5", "has 5 stages, but the model has only 4 layers"),
        (2, "hybrid:4294967295x4", "needs 17179869180 ranks"),
    ] {
        let model = if text == "tensor" { "mlp:2" } else { "mlp:16,12,8" };
        let model = Some(model.parse().unwrap());
        for result in train_on(n, &Config { strategy: parse_strategy(text), model, ..deep_config() }, NONE) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}

#[test]
fn options_that_do_not_fit_are_refused() {
    let pipeline = Config { strategy: parse_strategy("pipeline:1"), ..small_config() };
    let scaled = Recipe { scale_learning_rate: true, ..Recipe::default() };
    for (config, expected) in [
        (Config { micro_batches: NonZeroU32::new(4).unwrap(), ..pipeline.clone() }, "pass --micro-batches 4"),
        (Config { compression: Compression::Bf16, ..pipeline.clone() }, "leave out --compression"),
        (Config { recipe: scaled, ..pipeline.clone() }, "leave out --scale-lr"),
        (Config { rule: Some(Rule::Accelerated), ..pipeline.clone() }, "pass --optimizer adam"),
        (
            Config {
                rule: Some(Rule::Lamb(AdamOptions::DEFAULT)),
                strategy: parse_strategy("tensor"),
                ..pipeline
            },
            "or --strategy pipeline",
        ),
    ] {
        let error = train(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // The pipelines of `hybrid` sum their gradients.
    let compression = Compression::Bf16;
    let hybrid =
        Config { strategy: parse_strategy("hybrid:2x1"), compression, epochs: Some(1), ..small_config() };
    assert_eq!(train_and_compare(2, &hybrid).report.steps, 12);
}

/// The model file and the report of a run under `ringrun` have the whole model.
#[test]
fn ringtrain_saves_the_whole_model_of_a_divided_run() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let options = "--model mlp:16 --epochs 2 --strategy pipeline:2 --micro-batches 3";
    let (model, report) = (path("model.safetensors"), path("report.json"));
    let mut arguments = vec!["-n", "2", "ringtrain", "--save-model", &model, "--report", &report];
    arguments.extend(options.split(' '));
    let done = run_program(&mut ringrun(&arguments));
    assert_eq!(done.code(), Some(0), "{done:?}");
    assert!(done.stdout().contains("each rank holds a part of the model: from 170 to 1040"), "{done:?}");
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    assert_eq!((&report["parameters"], &report["micro_batches"]), (&1210.into(), &3.into()));
    assert!(Path::new(&model).metadata().unwrap().len() > 4 * 1210);
}
