//! Tests of the library's training function on one rank.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ringtrain::Group;
use ringtrain::train::data::{DataSource, Task};
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    CHECKPOINT_FILE_NAME, CheckpointError, CheckpointSettings, CompletedStep, Config, EPOCHS_DEFAULT,
    EpochRecord, ExistingCheckpoint, Observer, SilentObserver, Summary, TrainError, run,
};

use super::util::runs_long_tests;

/// Returns the default configuration, but without buckets.
pub(crate) fn config() -> Config {
    Config { bucket_bytes: None, ..Config::new(DataSource::Digits) }
}

/// Trains on one rank without output.
pub(crate) fn train(config: &Config) -> Result<Summary, TrainError> {
    run(&mut Group::solo(), config, &AtomicBool::new(false), &mut SilentObserver)
}

#[test]
#[ignore = "runs with tools/test --full"]
fn the_default_settings_learn_digits_with_every_seed() {
    for seed in 0..if runs_long_tests() { 5 } else { 1 } {
        let report = train(&Config { seed, ..config() }).unwrap().report;
        assert!(report.test_accuracy.unwrap() >= 0.96, "seed {seed}: {:?}", report.test_accuracy);
        assert_eq!((report.test_samples, report.history.len() as u64), (359, EPOCHS_DEFAULT));
        assert_eq!((report.test_r2, report.train_r2), (None, None));
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn other_models_and_optimizers_learn_digits() {
    let all = [
        ("mlp:64,32", Rule::Sgd),
        ("softmax", Rule::Adam(AdamOptions::DEFAULT)),
        ("mlp:64", Rule::Momentum { momentum: 0.9 }),
        ("mlp:64", Rule::Nesterov { momentum: 0.9 }),
        ("mlp:64", Rule::AdamW(AdamOptions::DEFAULT)),
        ("mlp:64", Rule::Lamb(AdamOptions::DEFAULT)),
    ];
    for &(model, rule) in if runs_long_tests() { &all[..] } else { &all[..2] } {
        let model = Some(model.parse().unwrap());
        let epochs = if runs_long_tests() { None } else { Some(20) };
        let report = train(&Config { model, rule: Some(rule), epochs, ..config() }).unwrap().report;
        assert!(report.test_accuracy.unwrap() > 0.9, "{} {:?}", report.model, report.test_accuracy);
    }
}

/// With SGD and the whole training set as one batch, regression must reach the least-squares solution. The loss must
/// be in the squared unit of the target.
#[test]
fn linear_regression_finds_the_least_squares_solution() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("line.csv");
    // y = 1000 + 3 x - 20 z, plus 1 in rows with an even number and minus 1 in the other rows. The feature `same` is
    // constant.
    let row = |i: u32| {
        let (x, z) = (f64::from(i * 7 % 50), f64::from(i * i % 11));
        let noise = if i.is_multiple_of(2) { 1.0 } else { -1.0 };
        format!("{x},{},{z},5\n", 1000.0 + 3.0 * x - 20.0 * z + noise)
    };
    let rows: String = (0..50).map(row).collect();
    std::fs::write(&path, format!("x,y,z,same\n{rows}")).unwrap();
    let config = Config {
        source: DataSource::Csv(path),
        model: Some("linear".parse().unwrap()),
        target: Some("y".into()),
        rule: Some(Rule::Sgd),
        learning_rate: Some(0.3),
        batch_size: Some(1000),
        epochs: Some(300),
        test_fraction: 0.0,
        ..config()
    };
    let report = train(&config).unwrap().report;
    // The variance of the noise is 1. The loss is slightly lower than 1, because the model also fits a little of the
    // noise.
    assert!((0.9..1.0).contains(&report.train_loss), "{}", report.train_loss);
    assert!(report.train_r2.unwrap() > 0.999);
    assert_eq!((report.test_loss, report.test_accuracy, report.test_r2), (None, None, None));
}

#[test]
#[ignore = "runs with tools/test --full"]
fn an_mlp_learns_regression() {
    let config = Config {
        source: DataSource::Synthetic { rows: 2000, columns: 8 },
        task: Some(Task::Regression),
        model: Some("mlp:32".parse().unwrap()),
        ..config()
    };
    let report = train(&config).unwrap().report;
    assert!(report.test_r2.unwrap() > 0.9, "{:?}", report.test_r2);
}

/// An observer that sets the stop flag after `steps` steps, as a signal handler does.
pub(crate) struct StopAfter<'a> {
    pub(crate) steps: usize,
    pub(crate) stop: &'a AtomicBool,
}

impl Observer for StopAfter<'_> {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {
        self.steps = self.steps.saturating_sub(1);
        self.stop.store(self.steps == 0, Ordering::Relaxed);
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// Collects the lines that a run prints.
pub(crate) struct PrintedLines(pub(crate) Vec<String>);

impl Observer for PrintedLines {
    fn notice(&mut self, line: &str) {
        self.0.push(line.to_owned());
    }
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {}
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// Returns the settings that save checkpoints to `directory`.
pub(crate) fn checkpoint_in(directory: &Path, existing: ExistingCheckpoint) -> CheckpointSettings {
    CheckpointSettings::new(directory, existing)
}

/// A run that is stopped within an epoch and resumed must give the same bits as an uninterrupted run.
#[test]
fn a_resumed_run_gives_the_same_bits_as_an_uninterrupted_run() {
    // In the short tests, one rule for each kind of state.
    let all = [
        Rule::Momentum { momentum: 0.9 },
        Rule::Lamb(AdamOptions::DEFAULT),
        Rule::Sgd,
        Rule::Nesterov { momentum: 0.9 },
        Rule::Adam(AdamOptions::DEFAULT),
        Rule::AdamW(AdamOptions::DEFAULT),
    ];
    for &rule in if runs_long_tests() { &all[..] } else { &all[..2] } {
        let directory = tempfile::tempdir().unwrap();
        // An epoch has 15 steps. The run stops after step 8, after step 15 (the last step of an epoch), and after
        // step 28.
        let model = Some("mlp:16".parse().unwrap());
        let uninterrupted =
            Config { epochs: Some(3), batch_size: Some(100), rule: Some(rule), model, ..config() };
        let expected = train(&uninterrupted).unwrap();
        for (steps, existing) in [
            (7, ExistingCheckpoint::Refuse),
            (7, ExistingCheckpoint::Resume),
            (12, ExistingCheckpoint::Resume),
        ] {
            let stop = AtomicBool::new(false);
            let config = Config {
                checkpoint: Some(checkpoint_in(directory.path(), existing)),
                ..uninterrupted.clone()
            };
            let mut observer = StopAfter { steps, stop: &stop };
            let summary = run(&mut Group::solo(), &config, &stop, &mut observer).unwrap();
            assert!(summary.report.stopped);
        }
        let config = Config {
            checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
            ..uninterrupted.clone()
        };
        let found = train(&config).unwrap();
        assert_eq!(found.parameters, expected.parameters);
        assert_eq!(found.report.parameters_hash, expected.report.parameters_hash);
        let losses =
            |summary: &Summary| summary.report.history.iter().map(|e| e.train_loss).collect::<Vec<_>>();
        assert_eq!(losses(&found), losses(&expected));
        // Resuming a completed run takes no more steps and reports the same results.
        assert_eq!(train(&config).unwrap().report.train_loss, expected.report.train_loss);
        // A run with more epochs continues from the checkpoint.
        assert_eq!(train(&Config { epochs: Some(4), ..config }).unwrap().report.epochs, 4);
    }
}

/// Evaluating a large table can take longer than the launcher waits after SIGTERM. If a stopped run evaluated the
/// table, the launcher would kill the rank, and the report would be lost.
#[test]
fn a_stopped_run_saves_and_reports_without_another_evaluation() {
    // An epoch of the digits, in batches of 100, has 15 steps. In the third case, the stop flag is set after the last
    // step of the epoch and before the evaluation.
    for steps in [1, 7, 15] {
        let directory = tempfile::tempdir().unwrap();
        let stop = AtomicBool::new(false);
        let config = Config {
            batch_size: Some(100),
            checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
            report: Some(directory.path().join("report.json")),
            ..config()
        };
        let report =
            run(&mut Group::solo(), &config, &stop, &mut StopAfter { steps, stop: &stop }).unwrap().report;
        assert!(report.stopped);
        assert_eq!((report.test_loss, report.train_accuracy), (None, None));
        assert!((0.1..3.0).contains(&report.train_loss), "{}", report.train_loss);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "wrong number of files");
    }
}

#[test]
fn a_checkpoint_is_not_overwritten_or_resumed_with_other_options() {
    let directory = tempfile::tempdir().unwrap();
    let first = Config {
        epochs: Some(1),
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..config()
    };
    train(&first).unwrap();
    let file = directory.path().join(CHECKPOINT_FILE_NAME);
    let bytes = std::fs::read(&file).unwrap();
    let other_betas = AdamOptions { beta_1: 0.5, ..AdamOptions::DEFAULT };
    let resume = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
        ..first.clone()
    };
    for (config, expected) in [
        (first.clone(), "--resume"),
        (Config { seed: 5, ..resume.clone() }, "saved with --seed 0, but this run has --seed 5"),
        (Config { batch_size: Some(5), ..resume.clone() }, "--batch-size 128"),
        (Config { model: Some("mlp:5".parse().unwrap()), ..resume.clone() }, "--model mlp:128"),
        (
            Config { test_fraction: 0.3, ..resume.clone() },
            "saved with --test-fraction 0.2, but this run has --test-fraction 0.3",
        ),
        (Config { rule: Some(Rule::Sgd), ..resume.clone() }, "--optimizer adam"),
        (
            Config { rule: Some(Rule::Adam(other_betas)), ..resume.clone() },
            "--betas and --epsilon default, but this run has --betas and --epsilon 0.5,0.999 and 0.00000001",
        ),
        (
            Config { weight_decay: 0.5, ..resume.clone() },
            "saved with --weight-decay 0, but this run has --weight-decay 0.5",
        ),
    ] {
        match train(&config) {
            Err(TrainError::Checkpoint(
                error @ (CheckpointError::Mismatch { .. } | CheckpointError::Exists { .. }),
            )) => {
                assert!(error.to_string().contains(expected), "{error}");
            }
            other => panic!("{expected}: {other:?}"),
        }
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
    }
}

/// Regression test: before the fix, `--resume` accepted a different learning rate, momentum or weight decay without a
/// message.
#[test]
fn a_resumed_run_keeps_the_learning_rate_or_reports_that_it_changes() {
    let directory = tempfile::tempdir().unwrap();
    let momentum = |momentum| Some(Rule::Momentum { momentum });
    let first = Config {
        rule: momentum(0.5),
        learning_rate: Some(0.05),
        epochs: Some(1),
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..config()
    };
    train(&first).unwrap();
    let resume = Config {
        epochs: Some(2),
        learning_rate: None,
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
        ..first
    };
    assert_eq!(train(&resume).unwrap().report.lr, 0.05);
    let mut lines = PrintedLines(Vec::new());
    let lower = Config { learning_rate: Some(0.01), ..resume.clone() };
    let report = run(&mut Group::solo(), &lower, &AtomicBool::new(false), &mut lines).unwrap().report;
    assert_eq!(report.lr, 0.01);
    assert!(lines.0.iter().any(|line| line == "--lr changes from 0.05 to 0.01"), "{:?}", lines.0);
    let error = train(&Config { rule: momentum(0.9), ..resume }).unwrap_err().to_string();
    assert!(error.contains("saved with --momentum 0.5, but this run has --momentum 0.9"), "{error}");
}

/// Regression test: before the fix, the loss of a softmax model could grow to thousands, and the run ended with exit
/// code 0.
#[test]
fn a_loss_far_above_that_of_a_constant_prediction_is_an_error() {
    let config = Config {
        model: Some("softmax".parse().unwrap()),
        rule: Some(Rule::Sgd),
        learning_rate: Some(1e5),
        epochs: Some(2),
        ..config()
    };
    match train(&config) {
        Err(TrainError::Diverged(message)) => {
            assert!(message.contains("always predicts") && message.contains("lower --lr"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

/// Regression test: before the fix, if the checkpoint directory had no free space, the error came only after the
/// first epoch.
#[test]
fn a_checkpoint_that_cannot_be_saved_is_an_error_before_training() {
    /// An observer that panics if training begins.
    struct PanicIfTrainingBegins;
    impl Observer for PanicIfTrainingBegins {
        fn notice(&mut self, _: &str) {}
        fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {
            panic!("training has begun");
        }
        fn step_taken(&mut self, _: &CompletedStep) {}
        fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
    }
    // Not even root can create a file in /proc/self/task.
    let config = Config {
        checkpoint: Some(checkpoint_in(Path::new("/proc/self/task"), ExistingCheckpoint::Refuse)),
        ..config()
    };
    let error =
        run(&mut Group::solo(), &config, &AtomicBool::new(false), &mut PanicIfTrainingBegins).unwrap_err();
    assert!(error.to_string().contains("cannot save checkpoints to"), "{error}");
}

#[test]
fn the_error_of_a_diverged_run_names_the_step_and_no_checkpoint_is_saved() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        model: Some("linear".parse().unwrap()),
        rule: Some(Rule::Sgd),
        learning_rate: Some(1e9),
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..config()
    };
    match train(&config) {
        Err(TrainError::Diverged(message)) => {
            assert!(message.contains("step") && message.contains("--lr"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
