//! Whole training runs on one rank, through the library.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ringtrain::train::data::{Source, Task};
use ringtrain::train::optimizer::Rule;
use ringtrain::train::{
    BATCH_SIZE_DEFAULT, CHECKPOINT_FILE_NAME, Checkpoint, CheckpointError, Config, EPOCHS_DEFAULT,
    EpochRecord, Existing, Observer, Silent, Summary, TrainError, run,
};
use ringtrain::{Compression, Group};

fn config() -> Config {
    Config {
        source: Source::Digits,
        target: None,
        test_fraction: 0.2,
        model: None,
        task: None,
        standardize: true,
        rule: Rule::Adam,
        learning_rate: None,
        weight_decay: 0.0,
        batch_size: BATCH_SIZE_DEFAULT,
        epochs: EPOCHS_DEFAULT,
        seed: 0,
        compression: Compression::None,
        bucket_bytes: None,
        checkpoint: None,
        report: None,
    }
}

fn train(config: &Config) -> Result<Summary, TrainError> {
    run(&mut Group::solo(), config, &AtomicBool::new(false), &mut Silent)
}

#[test]
fn the_defaults_learn_digits_with_every_seed() {
    for seed in 0..5 {
        let report = train(&Config { seed, ..config() }).unwrap().report;
        assert!(report.test_accuracy.unwrap() >= 0.96, "seed {seed}: {:?}", report.test_accuracy);
        assert_eq!((report.test_samples, report.history.len() as u64), (359, EPOCHS_DEFAULT));
        assert_eq!((report.test_r2, report.train_r2), (None, None));
    }
}

#[test]
fn other_models_and_optimisers_learn_too() {
    for (model, rule) in
        [("softmax", Rule::Adam), ("mlp:64,32", Rule::Sgd), ("mlp:64", Rule::Momentum { momentum: 0.9 })]
    {
        let model = Some(model.parse().unwrap());
        let report = train(&Config { model, rule, ..config() }).unwrap().report;
        assert!(report.test_accuracy.unwrap() > 0.9, "{} {:?}", report.model, report.test_accuracy);
    }
}

/// With full batches and plain steps, regression must arrive at the least-squares solution, and the loss that it reports
/// must be the one in the target's own unit.
#[test]
fn linear_regression_finds_the_least_squares() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("line.csv");
    // y = 1000 + 3 x - 20 z, plus or minus 1 on each second row; `same` is constant.
    let row = |i: u32| {
        let (x, z) = (f64::from(i * 7 % 50), f64::from(i * i % 11));
        let noise = if i.is_multiple_of(2) { 1.0 } else { -1.0 };
        format!("{x},{},{z},5\n", 1000.0 + 3.0 * x - 20.0 * z + noise)
    };
    let rows: String = (0..50).map(row).collect();
    std::fs::write(&path, format!("x,y,z,same\n{rows}")).unwrap();
    let config = Config {
        source: Source::Csv(path),
        model: Some("linear".parse().unwrap()),
        target: Some("y".into()),
        rule: Rule::Sgd,
        learning_rate: Some(0.3),
        batch_size: 1000,
        epochs: 300,
        test_fraction: 0.0,
        ..config()
    };
    let report = train(&config).unwrap().report;
    // The noise's variance is 1; a fit of three coefficients explains a little of it.
    assert!((0.9..1.0).contains(&report.train_loss), "{}", report.train_loss);
    assert!(report.train_r2.unwrap() > 0.999);
    assert_eq!((report.test_loss, report.test_accuracy, report.test_r2), (None, None, None));
}

#[test]
fn an_mlp_learns_a_regression() {
    let config = Config {
        source: Source::Synthetic { rows: 2000, columns: 8 },
        task: Some(Task::Regression),
        model: Some("mlp:32".parse().unwrap()),
        ..config()
    };
    let report = train(&config).unwrap().report;
    assert!(report.test_r2.unwrap() > 0.9, "{:?}", report.test_r2);
}

/// Sets the stop flag after a number of steps, as a signal would.
struct StopAfter<'a> {
    steps: usize,
    stop: &'a AtomicBool,
}

impl Observer for StopAfter<'_> {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: f64, _: f64) {
        self.steps = self.steps.saturating_sub(1);
        self.stop.store(self.steps == 0, Ordering::Relaxed);
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

fn saving(directory: &Path, existing: Existing) -> Checkpoint {
    Checkpoint { directory: directory.to_owned(), existing }
}

/// A run that is stopped in mid-epoch and resumed must not differ in one bit from one that never stopped.
#[test]
fn a_resumed_run_is_the_uninterrupted_one() {
    for rule in [Rule::Sgd, Rule::Momentum { momentum: 0.9 }, Rule::Adam] {
        let directory = tempfile::tempdir().unwrap();
        // 15 steps an epoch: the stops fall into the middle of an epoch, and on its last step.
        let whole = Config { epochs: 3, batch_size: 100, rule, ..config() };
        let expected = train(&whole).unwrap();
        for (pause, existing) in [(7, Existing::Refuse), (7, Existing::Resume), (12, Existing::Resume)] {
            let stop = AtomicBool::new(false);
            let config = Config { checkpoint: Some(saving(directory.path(), existing)), ..whole.clone() };
            let mut observer = StopAfter { steps: pause, stop: &stop };
            let summary = run(&mut Group::solo(), &config, &stop, &mut observer).unwrap();
            assert!(summary.report.stopped);
        }
        let config = Config { checkpoint: Some(saving(directory.path(), Existing::Resume)), ..whole.clone() };
        let found = train(&config).unwrap();
        assert_eq!(found.parameters, expected.parameters);
        assert_eq!(found.report.parameters_hash, expected.report.parameters_hash);
        let losses =
            |summary: &Summary| summary.report.history.iter().map(|e| e.train_loss).collect::<Vec<_>>();
        assert_eq!(losses(&found), losses(&expected));
        // Nothing is left to do, and the figures are still there.
        assert_eq!(train(&config).unwrap().report.train_loss, expected.report.train_loss);
        // A longer run goes on from there.
        assert_eq!(train(&Config { epochs: 4, ..config }).unwrap().report.epochs, 4);
    }
}

/// Evaluating a large table takes longer than a launcher waits after SIGTERM; it then kills the rank and the report is lost.
#[test]
fn a_stopped_run_saves_and_reports_without_another_evaluation() {
    // Digits in batches of 100 are 15 steps: the third case asks to stop after the epoch's last step, before the test.
    for steps in [1, 7, 15] {
        let directory = tempfile::tempdir().unwrap();
        let stop = AtomicBool::new(false);
        let config = Config {
            batch_size: 100,
            checkpoint: Some(saving(directory.path(), Existing::Refuse)),
            report: Some(directory.path().join("report.json")),
            ..config()
        };
        let report =
            run(&mut Group::solo(), &config, &stop, &mut StopAfter { steps, stop: &stop }).unwrap().report;
        assert!(report.stopped);
        assert_eq!((report.test_loss, report.train_accuracy), (None, None));
        assert!((0.1..3.0).contains(&report.train_loss), "{}", report.train_loss);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "a checkpoint and a report");
    }
}

#[test]
fn a_checkpoint_is_neither_overwritten_nor_misused() {
    let directory = tempfile::tempdir().unwrap();
    let first =
        Config { epochs: 1, checkpoint: Some(saving(directory.path(), Existing::Refuse)), ..config() };
    train(&first).unwrap();
    let file = directory.path().join(CHECKPOINT_FILE_NAME);
    let bytes = std::fs::read(&file).unwrap();
    let resume = Config { checkpoint: Some(saving(directory.path(), Existing::Resume)), ..first.clone() };
    for (config, expected) in [
        (first.clone(), "--resume"),
        (Config { seed: 5, ..resume.clone() }, "its seed is 0"),
        (Config { batch_size: 5, ..resume.clone() }, "its batch_size is 128"),
        (Config { model: Some("mlp:5".parse().unwrap()), ..resume.clone() }, "its model is mlp:128"),
        (Config { test_fraction: 0.3, ..resume.clone() }, "its data is"),
        (Config { rule: Rule::Sgd, ..resume.clone() }, "its optimizer is adam"),
    ] {
        match train(&config) {
            Err(TrainError::Checkpoint(
                error @ (CheckpointError::Unfit { .. } | CheckpointError::Exists { .. }),
            )) => {
                assert!(error.to_string().contains(expected), "{error}");
            }
            other => panic!("{expected}: {other:?}"),
        }
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
    }
}

#[test]
fn divergence_ends_the_run_with_the_step_and_saves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        model: Some("linear".parse().unwrap()),
        rule: Rule::Sgd,
        learning_rate: Some(1e9),
        checkpoint: Some(saving(directory.path(), Existing::Refuse)),
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
