//! Tests of checkpoints within epochs, for strategies whose ranks do not have the same parameters after each step.

use std::fs;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use ringtrain::train::data::DataSource;
use ringtrain::train::{CHECKPOINT_FILE_NAME, CheckpointSettings, Config, StrategySpec, Summary};

use super::checkpoints::{
    STEP_COUNT, assert_each_sample_is_used_once, checkpoint_every, resumed_steps, run_on_ranks, small_config,
    sorted_file_names, with_checkpoint,
};
use super::library::train;
use super::strategies::{parse_strategy, train_and_compare};
use super::util::if_long_tests_else;

/// Returns a run that saves a checkpoint every `steps` steps, and keeps all checkpoints.
fn config_with_checkpoints(text: &str, steps: u64, directory: &Path) -> Config {
    let checkpoint = CheckpointSettings {
        checkpoints_kept: NonZeroU32::new(99).unwrap(),
        ..checkpoint_every(steps, directory)
    };
    Config { strategy: parse_strategy(text), ..with_checkpoint(checkpoint, small_config()) }
}

/// Returns the steps of the kept checkpoints that were saved within an epoch, in increasing order.
fn steps_within_epochs(directory: &Path) -> Vec<u64> {
    let names = sorted_file_names(directory);
    let steps = names.iter().filter_map(|name| {
        name.strip_prefix("checkpoint-")?.strip_suffix(".safetensors")?.parse::<u64>().ok()
    });
    let mut within: Vec<u64> = steps.filter(|steps| !steps.is_multiple_of(STEP_COUNT)).collect();
    within.sort_unstable();
    within
}

/// Makes the checkpoint of step `steps` in `from` the latest checkpoint in `to`.
fn copy_checkpoint(from: &Path, steps: u64, to: &Path) {
    fs::copy(from.join(format!("checkpoint-{steps}.safetensors")), to.join(CHECKPOINT_FILE_NAME)).unwrap();
}

/// At the first average after every 4 steps, the ranks agree on their whole state and save it. A job that dies and resumes
/// must give the same bits as an uninterrupted job, although it has lost the state that was not saved.
#[test]
#[ignore = "runs with tools/test --full"]
fn ranks_that_train_alone_save_when_they_average() {
    let all: &[(&str, u64)] = &[("local-sgd:3", 6), ("diloco:2,2", 4), ("diloco:3", 6)];
    for &(text, first) in if_long_tests_else(all, &all[..2]) {
        let directories = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let [whole, killed, other] = directories.each_ref().map(tempfile::TempDir::path);
        let config = |directory| config_with_checkpoints(text, 4, directory);
        let (expected, before, _) = run_on_ranks(2, &config(whole), None);
        let expected = expected.unwrap();
        // Later checkpoints may be missing, if the write before them took too long.
        let within = steps_within_epochs(whole);
        assert_eq!(within[0], first, "{text}: {within:?}");
        assert_ne!(train_without_checkpoints(text).parameters, expected.parameters, "{text}: no save");

        let (summary, _, _) = run_on_ranks(2, &config(killed), Some((1, 17)));
        assert!(summary.is_none(), "{text}: the job should have died");
        let (summary, _, lines) = run_on_ranks(2, &config(killed), None);
        assert!((first..=17).contains(&resumed_steps(&lines)), "{text}: {lines:?}");
        let found = summary.unwrap();
        assert_eq!(found.parameters, expected.parameters, "{text}");
        for (found, expected) in found.report.history.iter().zip(&expected.report.history) {
            let (found, expected) = (found.train_loss, expected.train_loss);
            assert!((found - expected).abs() <= 1e-9 * expected, "{text}: {found}, expected {expected}");
        }

        copy_checkpoint(whole, first, other);
        let (summary, after, lines) = run_on_ranks(3, &config(other), None);
        assert!(summary.is_some() && resumed_steps(&lines) == first, "{text}: {lines:?}");
        assert_each_sample_is_used_once((&before, &after), first, text);
    }
}

/// Returns the summary of rank 0 of two ranks.
fn train_without_checkpoints(text: &str) -> Summary {
    let config = Config { strategy: parse_strategy(text), ..small_config() };
    run_on_ranks(2, &config, None).0.unwrap()
}

/// Only rank 0 looks at the clock, so the other ranks must learn of a save from rank 0.
#[test]
fn ranks_that_train_alone_save_after_some_time() {
    let directory = tempfile::tempdir().unwrap();
    let config = config_with_checkpoints("local-sgd:3", 1, directory.path());
    let checkpoint = config.checkpoint.clone().map(|checkpoint| CheckpointSettings {
        steps: None,
        interval: Some(Duration::from_nanos(1)),
        ..checkpoint
    });
    train_and_compare(2, &Config { checkpoint, ..config });
    let within = steps_within_epochs(directory.path());
    assert!(within.first() == Some(&3), "{within:?}");
    assert!(within.iter().all(|steps| (steps % STEP_COUNT).is_multiple_of(3)), "{within:?}");
}

/// The run has 240 epochs of 2 steps, and a record after every 8 epochs. The average after epoch 4 is the first average
/// after 3 steps.
#[test]
#[ignore = "runs with tools/test --full"]
fn model_average_saves_at_averages_between_two_records() {
    let directories = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [whole, resumed, other] = directories.each_ref().map(tempfile::TempDir::path);
    let config = |directory| Config {
        source: DataSource::Synthetic { rows: 200, columns: 5 },
        batch_size: None,
        epochs: None,
        ..config_with_checkpoints("model-average:4", 3, directory)
    };
    let expected = run_on_ranks(2, &Config { checkpoint: None, ..config(whole) }, None).0.unwrap();
    assert_eq!((expected.report.steps, expected.report.history[0].epoch), (480, 8));
    let found = run_on_ranks(2, &config(whole), None).0.unwrap();
    assert_eq!(found.parameters, expected.parameters, "a save changed the parameters");
    for (ranks, directory) in [(2, resumed), (3, other)] {
        copy_checkpoint(whole, 8, directory);
        let (summary, _, lines) = run_on_ranks(ranks, &config(directory), None);
        let summary = summary.unwrap();
        assert_eq!((resumed_steps(&lines), summary.report.steps), (8, 480), "{ranks} ranks");
        assert_eq!(summary.parameters == expected.parameters, ranks == 2, "{ranks} ranks");
    }
}

/// With gossip, a checkpoint has the replica of the coordinator.
#[test]
fn the_coordinator_of_gossip_saves_within_epochs() {
    let directories = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [whole, resumed, other] = directories.each_ref().map(tempfile::TempDir::path);
    let config = |directory| config_with_checkpoints("gossip", 4, directory);
    let expected = train(&config(whole)).unwrap();
    assert_eq!(expected.parameters, train(&small_config()).unwrap().parameters);
    assert_eq!(steps_within_epochs(whole).first(), Some(&4));
    copy_checkpoint(whole, 4, resumed);
    let found = train(&config(resumed)).unwrap();
    assert_eq!(found.parameters, expected.parameters);
    copy_checkpoint(whole, 4, other);
    let found = train_and_compare(3, &config(other)).report;
    let parts: u64 = found.gossip.as_ref().unwrap().steps.iter().map(|(_, steps)| steps).sum();
    assert_eq!((found.steps, parts), (3 * STEP_COUNT, 3 * (3 * STEP_COUNT - 4)), "{found:?}");
}

/// A parameter server saves within epochs while its workers continue, and each of these checkpoints can be resumed.
#[test]
fn a_parameter_server_saves_within_epochs() {
    let expected = train(&small_config()).unwrap();
    for text in ["ps-sync", "ps-async"] {
        let directory = tempfile::tempdir().unwrap();
        let config = config_with_checkpoints(text, 3, directory.path());
        let (summary, _, _) = run_on_ranks(3, &config, None);
        assert_eq!(summary.unwrap().report.steps, 3 * STEP_COUNT, "{text}");
        let within = steps_within_epochs(directory.path());
        let last = *within.last().unwrap_or_else(|| panic!("{text}: no checkpoint within an epoch"));
        copy_checkpoint(directory.path(), last, directory.path());
        let (summary, _, lines) = run_on_ranks(2, &config, None);
        let summary = summary.unwrap();
        assert_eq!((resumed_steps(&lines), summary.report.steps), (last, 3 * STEP_COUNT), "{text}");
        if config.strategy == StrategySpec::PsSync {
            for (found, expected) in summary.parameters.iter().zip(&expected.parameters) {
                assert!((found - expected).abs() <= 1e-5, "{found} {expected}");
            }
        }
    }
}
