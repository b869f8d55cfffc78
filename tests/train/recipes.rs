//! Tests of the options that change how a model is trained: learning-rate schedules, clipping and others.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use ringtrain::train::data::DataSource;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    BucketBytes, ClassWeights, Config, EpochRecord, ExistingCheckpoint, RateSchedule, Recipe, SilentObserver,
    Summary, Validation, Warmup, run,
};
use ringtrain::{Group, Rank};

use super::library::{StopAfter, checkpoint_in, config, train};
use super::strategies::{NONE, PlannedInterventions, parse_strategy, train_and_compare, train_on};
use super::util::ranks;

/// Returns the configuration of a run of 3 epochs with 15 steps each.
fn three_epoch_config(recipe: Recipe) -> Config {
    Config {
        epochs: Some(3),
        batch_size: Some(100),
        model: Some("mlp:16".parse().unwrap()),
        rule: Some(Rule::AdamW(AdamOptions::DEFAULT)),
        weight_decay: 0.01,
        recipe,
        ..config()
    }
}

/// Runs `config` with checkpoints in `directory`. For each number in `parts`, sets the stop flag after this many
/// steps, and then resumes the run. Returns the result of the last part, which runs to the end.
fn train_in_parts(config: &Config, directory: &Path, parts: &[usize]) -> Summary {
    let mut existing = ExistingCheckpoint::Refuse;
    for &steps in parts {
        let checkpoint = Some(checkpoint_in(directory, existing));
        let part = Config { checkpoint, ..config.clone() };
        let stop = AtomicBool::new(false);
        let mut observer = StopAfter { steps, stop: &stop };
        assert!(run(&mut Group::solo(), &part, &stop, &mut observer).unwrap().report.stopped);
        existing = ExistingCheckpoint::Resume;
    }
    train(&Config { checkpoint: Some(checkpoint_in(directory, existing)), ..config.clone() }).unwrap()
}

/// The effect of each option must depend on the number of the step alone, and not on where the run was interrupted.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_run_resumed_with_any_recipe_gives_the_same_bits() {
    let step = RateSchedule::Step { epochs: 1, factor: 0.5 };
    let plain = train(&three_epoch_config(Recipe::default())).unwrap();
    for recipe in [
        Recipe { schedule: step, warmup: Warmup::Steps(9), ..Recipe::default() },
        Recipe { schedule: RateSchedule::Cosine, warmup: Warmup::Epochs(1), ..Recipe::default() },
        Recipe { clip_norm: Some(0.5), ..Recipe::default() },
        Recipe { label_smoothing: 0.1, class_weights: ClassWeights::Balanced, ..Recipe::default() },
    ] {
        let config = three_epoch_config(recipe);
        let expected = train(&config).unwrap();
        assert_ne!(expected.parameters, plain.parameters, "{:?} has no effect", config.recipe);
        let directory = tempfile::tempdir().unwrap();
        let found = train_in_parts(&config, directory.path(), &[7, 5, 4, 20]);
        assert_eq!(found.parameters, expected.parameters, "{:?}", config.recipe);
        assert_eq!(found.report.train_loss, expected.report.train_loss);
    }
}

#[test]
fn a_run_is_not_resumed_with_another_recipe() {
    let directory = tempfile::tempdir().unwrap();
    let recipe = Recipe { schedule: RateSchedule::Cosine, ..Recipe::default() };
    let config = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..three_epoch_config(recipe.clone())
    };
    train(&config).unwrap();
    let resume = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
        ..config.clone()
    };
    let with = |recipe: Recipe| Config { recipe, ..resume.clone() };
    for (config, expected) in [
        (Config { epochs: Some(4), ..resume.clone() }, "--schedule cosine over 3 epochs, but this run"),
        (with(Recipe::default()), "--schedule cosine over 3 epochs, but this run has --schedule constant"),
        (
            with(Recipe { warmup: Warmup::Epochs(1), ..recipe.clone() }),
            "--warmup 0, but this run has --warmup 1e",
        ),
        (
            with(Recipe { clip_norm: Some(1.5), ..recipe.clone() }),
            "--clip-norm none, but this run has --clip-norm 1.5",
        ),
    ] {
        let error = train(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// The weights of rare classes can make the loss of a good model larger than the loss of a model that always predicts
/// the same probabilities. The run must not end with the error that it diverged.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_rare_class_with_balanced_weights_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rare.csv");
    // One row in 50 is of the rare class. The feature of these rows is only slightly larger than that of the other
    // rows.
    let row = |i: u32| {
        format!(
            "{},{}\n",
            f64::from(i * 37 % 101) / 50.0 + 0.3 * f64::from(u32::from(i.is_multiple_of(50))),
            u32::from(i.is_multiple_of(50))
        )
    };
    let rows: String = (0..400).map(row).collect();
    std::fs::write(&path, format!("x,y\n{rows}")).unwrap();
    let weights = directory.path().join("weights.csv");
    std::fs::write(&weights, "class,weight\n0,0.5102041\n1,25\n").unwrap();
    let recall = |class_weights| {
        let config = Config {
            source: DataSource::Csv(path.clone()),
            target: Some("y".into()),
            model: Some("softmax".parse().unwrap()),
            test_fraction: 0.0,
            epochs: Some(100),
            recipe: Recipe { class_weights, ..Recipe::default() },
            ..config()
        };
        let summary = train(&config).unwrap();
        (summary.report.train_accuracy.unwrap(), summary.report.train_loss)
    };
    let (plain, plain_loss) = recall(ClassWeights::Equal);
    let (balanced, balanced_loss) = recall(ClassWeights::Balanced);
    let (listed, listed_loss) = recall(ClassWeights::List(vec![0.510_204_1, 25.0]));
    assert_eq!((listed, listed_loss), recall(ClassWeights::File(weights)));
    // Without weights, the model never predicts the rare class.
    assert_eq!(plain, 0.98);
    assert!(balanced < 0.9 && balanced_loss < 2.0_f64.ln() && plain_loss < 0.1, "{balanced} {balanced_loss}");
    assert!((listed - balanced).abs() < 0.01 && (listed_loss - balanced_loss).abs() < 1e-4);
}

#[test]
fn options_for_classes_are_refused_for_numbers() {
    for recipe in [
        Recipe { label_smoothing: 0.1, ..Recipe::default() },
        Recipe { class_weights: ClassWeights::Balanced, ..Recipe::default() },
    ] {
        let model = Some("linear".parse().unwrap());
        let error = train(&Config { model, recipe, ..config() }).unwrap_err().to_string();
        assert!(error.contains("is for classes, but the target holds numbers"), "{error}");
    }
}

/// Trains on `count` ranks and returns the results of all ranks.
fn train_on_ranks(count: u32, config: &Config) -> Vec<Summary> {
    let config = config.clone();
    ranks::run(count, move |mut group| {
        run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver).unwrap()
    })
}

/// The norm of the reduced gradients must not depend on the number of ranks or on the buckets.
#[test]
fn clipped_gradients_are_the_same_on_all_ranks_and_for_all_buckets() {
    let recipe = Recipe { clip_norm: Some(0.1), ..Recipe::default() };
    let whole = Config { rule: Some(Rule::Sgd), weight_decay: 0.0, ..three_epoch_config(recipe) };
    let expected = train(&whole).unwrap();
    for bucket_bytes in [None, Some(4000)] {
        let summaries = train_on_ranks(
            3,
            &Config { bucket_bytes: bucket_bytes.map(BucketBytes::Fixed), ..whole.clone() },
        );
        for summary in &summaries {
            assert_eq!(summary.parameters, summaries[0].parameters, "{bucket_bytes:?}");
        }
        for (found, expected) in summaries[0].parameters.iter().zip(&expected.parameters) {
            assert!((found - expected).abs() < 1e-5, "{bucket_bytes:?}: {found} {expected}");
        }
    }
}

/// A resumed run uses the learning rate in the checkpoint, even with another number of ranks.
#[test]
fn the_learning_rate_is_scaled_once_with_the_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let recipe = Recipe { scale_learning_rate: true, ..Recipe::default() };
    let checkpoint = |existing| Some(checkpoint_in(directory.path(), existing));
    let first = Config {
        epochs: Some(1),
        checkpoint: checkpoint(ExistingCheckpoint::Refuse),
        ..three_epoch_config(recipe)
    };
    assert_eq!(train_on_ranks(2, &first)[0].report.lr, 0.002);
    let second = Config { epochs: Some(2), checkpoint: checkpoint(ExistingCheckpoint::Resume), ..first };
    assert_eq!(train_on_ranks(1, &second)[0].report.lr, 0.002);
}

/// Returns the configuration of a run that overfits, because it trains a large model on few samples. The run holds
/// out samples for validation.
fn config_that_overfits(patience: Option<u64>) -> Config {
    Config {
        epochs: Some(30),
        batch_size: Some(50),
        test_fraction: 0.85,
        model: Some("mlp:32".parse().unwrap()),
        rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
        learning_rate: Some(0.02),
        recipe: Recipe { validation: Some(Validation { fraction: 0.25, patience }), ..Recipe::default() },
        ..config()
    }
}

/// Returns the epoch with the lowest validation loss in the history.
fn epoch_with_lowest_loss(summary: &Summary) -> u64 {
    let loss = |record: &&EpochRecord| record.validation_loss.unwrap();
    summary.report.history.iter().min_by(|a, b| loss(a).total_cmp(&loss(b))).unwrap().epoch
}

#[test]
#[ignore = "runs with tools/test --full"]
fn the_best_parameters_are_the_result_also_after_a_resumption() {
    let config = config_that_overfits(Some(3));
    let expected = train(&config).unwrap();
    let report = &expected.report;
    let best = report.best_epoch.unwrap();
    assert_eq!((best, best + 3), (epoch_with_lowest_loss(&expected), report.epochs), "{:?}", report.history);
    assert!(report.epochs < 30);
    assert_eq!((report.train_samples, report.validation_samples), (202, 68));
    // A run whose last epoch is the best epoch gives the same parameters.
    let short = train(&Config { epochs: Some(best), ..config.clone() }).unwrap();
    assert_eq!(short.parameters, expected.parameters);
    let directory = tempfile::tempdir().unwrap();
    // An epoch has 5 steps. The third part ends with the last step of an epoch, before the validation.
    let found = train_in_parts(&config, directory.path(), &[3, 6, 6]);
    assert_eq!(found.parameters, expected.parameters);
    // A completed run continues from the parameters of its last step if the patience is raised.
    let uninterrupted = train(&config_that_overfits(Some(100))).unwrap();
    let checkpoint = Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume));
    let continued = train(&Config { checkpoint, ..config_that_overfits(Some(100)) }).unwrap();
    let losses = |summary: &Summary| -> Vec<f64> {
        summary.report.history.iter().map(|record| record.train_loss).collect()
    };
    assert_eq!(losses(&continued), losses(&uninterrupted));
    assert_eq!(continued.parameters, uninterrupted.parameters);
}

/// Returns the validation losses of all records.
fn validation_losses(summary: &Summary) -> Vec<Option<f64>> {
    summary.report.history.iter().map(|record| record.validation_loss).collect()
}

/// Without a patience, the validation losses change neither the end of the run nor its result. Then a run without a patience
/// ends after the best epoch, a run with a patience continues, and a third run drops the patience again.
#[test]
#[ignore = "runs with tools/test --full"]
fn without_patience_the_validation_loss_is_only_reported() {
    let config = |patience| Config { epochs: Some(20), ..config_that_overfits(patience) };
    let [expected, patient] = [None, Some(100)].map(|patience| train(&config(patience)).unwrap());
    let report = &expected.report;
    let losses = validation_losses(&expected);
    assert_eq!((report.epochs, report.best_epoch, report.validation_samples), (20, None, 68));
    assert_eq!((losses.len(), report.validation_loss), (20, losses[19]));
    assert_eq!(losses, validation_losses(&patient));
    let best = epoch_with_lowest_loss(&expected);
    assert!(best < 20 && expected.parameters != patient.parameters, "the run does not overfit: {losses:?}");
    let directory = tempfile::tempdir().unwrap();
    for (epochs, patience, parameters) in [
        (best, None, None),
        (20, Some(100), Some(&patient.parameters)),
        (20, None, Some(&expected.parameters)),
    ] {
        let checkpoint = Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume));
        let found = train(&Config { epochs: Some(epochs), checkpoint, ..config(patience) }).unwrap();
        assert_eq!(found.report.best_epoch, patience.map(|_| best), "{epochs} epochs, patience {patience:?}");
        assert!(parameters.is_none_or(|expected| *expected == found.parameters), "patience {patience:?}");
    }
}

#[test]
fn each_strategy_reports_the_validation_loss_of_the_final_parameters() {
    for strategy in ["allreduce", "model-average", "ps-async", "gossip"] {
        let config =
            Config { strategy: parse_strategy(strategy), epochs: Some(2), ..config_that_overfits(None) };
        let report = train_and_compare(3, &config).report;
        let last = report.history.last().unwrap();
        assert_eq!((last.epoch, report.best_epoch), (2, None), "{strategy}");
        assert!(last.validation_loss.is_some(), "{strategy}: {last:?}");
        assert_eq!(report.validation_loss, last.validation_loss, "{strategy}");
    }
}

/// The first part ends after the last step of an epoch, before the validation. The second part ends early, and saves
/// the best parameters. Each next part continues from the parameters of the last step.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_run_with_a_parameter_server_resumes_with_the_same_bits() {
    let config = |records| Config {
        strategy: parse_strategy("ps-sync"),
        epochs: Some(16),
        ..config_that_overfits(Some(records))
    };
    let uninterrupted = train_and_compare(2, &config(100));
    let directory = tempfile::tempdir().unwrap();
    let saved = |records| Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
        ..config(records)
    };
    let stop = PlannedInterventions { stop: Some((Rank::ZERO, 5)), ..NONE };
    for result in train_on(2, &saved(3), stop) {
        assert_eq!(result.unwrap().report.history[0].validation_loss, None);
    }
    assert!(train_and_compare(2, &saved(3)).report.epochs < 16);
    let continued = train_and_compare(2, &saved(100));
    assert_eq!(validation_losses(&continued), validation_losses(&uninterrupted));
    assert_eq!(continued.parameters, uninterrupted.parameters);
}

#[test]
fn all_ranks_stop_early_after_the_same_epoch() {
    let config = config_that_overfits(Some(2));
    let expected = train(&config).unwrap().report;
    for summary in train_on_ranks(3, &config) {
        assert_eq!(
            (summary.report.epochs, summary.report.best_epoch),
            (expected.epochs, expected.best_epoch)
        );
        assert!((summary.report.validation_loss.unwrap() - expected.validation_loss.unwrap()).abs() < 1e-4);
    }
}
