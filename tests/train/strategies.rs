//! Tests of the strategies: runs whose ranks are threads of the test, and `ringtrain --strategy` under `ringrun`.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringtrain::Rank;
use ringtrain::train::data::DataSource;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    BucketBytes, CheckpointSettings, CompletedStep, Config, EpochRecord, ExistingCheckpoint, Observer,
    Recipe, SilentObserver, StepTimes, StrategySpec, Summary, TrainError, Validation, run,
};

use super::library::{config, train};
use super::util::{if_long_tests_else, ranks, ringrun, run as run_program, runs_long_tests};

/// What a test does to a rank at certain moments of a run.
#[derive(Clone, Copy)]
pub(crate) struct PlannedInterventions {
    /// Sets the stop flag of this rank after this number of steps.
    pub(crate) stop: Option<(Rank, usize)>,
    /// Sets a parameter of this rank to this value at the end of each epoch.
    pub(crate) parameter: Option<(Rank, f32)>,
}

pub(crate) const NONE: PlannedInterventions = PlannedInterventions { stop: None, parameter: None };

/// Performs the [`PlannedInterventions`] of one rank.
struct InterveningObserver {
    rank: Rank,
    actions: PlannedInterventions,
    steps: usize,
    stop: Arc<AtomicBool>,
}

impl Observer for InterveningObserver {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {
        self.steps += 1;
        if self.actions.stop == Some((self.rank, self.steps)) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
    fn adjust_parameters(&mut self, parameters: &mut [f32]) {
        if let Some((_, value)) = self.actions.parameter.filter(|(rank, _)| *rank == self.rank) {
            parameters[0] = value;
        }
    }
}

/// Runs the configuration on `n` ranks.
pub(crate) fn train_on(
    n: u32,
    config: &Config,
    actions: PlannedInterventions,
) -> Vec<Result<Summary, TrainError>> {
    let config = config.clone();
    ranks::run(n, move |mut group| {
        let stop = Arc::new(AtomicBool::new(false));
        let mut actor =
            InterveningObserver { rank: group.rank(), actions, steps: 0, stop: Arc::clone(&stop) };
        run(&mut group, &config, &stop, &mut actor)
    })
}

/// Runs the configuration on `n` ranks. Checks that the final parameters agree on all ranks, and returns the summary
/// of rank 0.
pub(crate) fn train_and_compare(n: u32, config: &Config) -> Summary {
    let mut summaries: Vec<Summary> =
        train_on(n, config, NONE).into_iter().map(|result| result.unwrap()).collect();
    for summary in &summaries {
        assert_eq!(summary.report.parameters_hash, summaries[0].report.parameters_hash);
    }
    summaries.swap_remove(0)
}

pub(crate) fn parse_strategy(text: &str) -> StrategySpec {
    text.parse().unwrap()
}

pub(crate) fn checkpoint_in(directory: &Path, existing: ExistingCheckpoint) -> CheckpointSettings {
    CheckpointSettings::new(directory, existing)
}

/// A parameter near 0 is a sum of larger numbers, and its error is the rounding error of these numbers. So [`assert_close`]
/// divides the difference of a parameter at least by this fraction of the largest parameter.
const SMALLEST_FRACTION: f32 = 0.05;

/// Asserts that no parameter of two runs differs by more than 1e-5, relative to the parameter itself or, if the parameter is
/// small, relative to [`SMALLEST_FRACTION`] of the largest parameter.
pub(crate) fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let difference = largest_relative_difference(found, expected);
    println!("{what}: the largest relative difference of a parameter is {difference:.1e}");
    assert!(difference <= 1e-5, "{what}: the relative difference of a parameter is {difference:e}");
}

fn largest_relative_difference(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0.0, |max: f32, value| max.max(value.abs()));
    let differences =
        found.iter().zip(expected).map(|(f, e)| (f - e).abs() / e.abs().max(SMALLEST_FRACTION * largest));
    // In this order, NaN is larger than all numbers.
    differences.max_by(f32::total_cmp).unwrap_or(0.0)
}

#[test]
fn assert_close_finds_differences_of_large_and_of_small_parameters() {
    for (found, is_close) in [
        ([2.0, -0.001], true),
        ([2.000_01, -0.001], true),
        ([2.000_03, -0.001], false),
        ([2.0, -0.001_000_5], true),
        ([2.0, -0.001_002], false),
        ([f32::NAN, -0.001], false),
        ([2.0, f32::NAN], false),
    ] {
        assert_eq!(largest_relative_difference(&found, &[2.0, -0.001]) <= 1e-5, is_close, "{found:?}");
    }
}

/// Returns a configuration with SGD and a small model, so that the tests are fast.
pub(crate) fn sgd_config() -> Config {
    let model = Some("mlp:16".parse().unwrap());
    Config { model, rule: Some(Rule::Sgd), learning_rate: Some(0.3), epochs: Some(8), ..config() }
}

/// Returns the configuration of the convergence test. The long tests use the configuration of the results in
/// `docs/strategies.md`.
pub(crate) fn convergence_config() -> Config {
    if runs_long_tests() {
        Config { rule: Some(Rule::Sgd), learning_rate: Some(0.1), epochs: Some(40), ..config() }
    } else {
        sgd_config()
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn each_strategy_learns_digits_as_well_as_a_single_process() {
    let config = convergence_config();
    let alone = train(&config).unwrap().report;
    let mut bytes_sent = Vec::new();
    let all: &[&str] =
        &["allreduce", "local-sgd:4", "diloco:4", "model-average", "model-average:1", "diloco:4,0"];
    for text in if_long_tests_else(all, &all[..4]) {
        let report =
            train_and_compare(4, &Config { strategy: parse_strategy(text), ..config.clone() }).report;
        let (found, expected) = (report.test_accuracy.unwrap(), alone.test_accuracy.unwrap());
        println!("{text}: accuracy {found}, alone {expected}; {} bytes", report.bytes_sent);
        assert!(found >= expected - 0.01, "{text}: {found}, alone {expected}");
        assert_eq!(
            (report.epochs, report.steps, report.strategy.as_str()),
            (alone.epochs, alone.steps, *text)
        );
        bytes_sent.push(report.bytes_sent);
    }
    // A job chooses its algorithms by measured cost, and some algorithms send twice as many bytes as others.
    assert!(bytes_sent[1..].iter().all(|&bytes| bytes < bytes_sent[0]), "{bytes_sent:?}");
}

/// With SGD, an average of the parameters after each step equals a step with the average gradient. A wrong weight in
/// the average would give other parameters. The test also covers ranks whose parts have different lengths, and
/// micro-batches whose gradients are added and then reduced in buckets.
#[test]
fn synchronous_runs_equal_a_single_process_after_100_steps() {
    // An epoch has 15 steps. Batches of 100 samples give 3 ranks parts of 34, 33 and 33 samples.
    let config = Config { batch_size: Some(100), epochs: Some(7), ..sgd_config() };
    let alone = train(&config).unwrap();
    assert_eq!(alone.report.steps, 105);
    let all: &[(u32, &str, u32)] = &[
        (2, "allreduce", 3),
        (3, "local-sgd:1", 1),
        (3, "allreduce", 1),
        (4, "allreduce", 1),
        (3, "local-sgd:1", 40),
    ];
    for (n, text, micro_batches) in if_long_tests_else(all, &all[..2]) {
        let config = Config {
            strategy: parse_strategy(text),
            micro_batches: NonZeroU32::new(*micro_batches).unwrap(),
            bucket_bytes: (*micro_batches > 1).then_some(BucketBytes::Fixed(1000)),
            ..config.clone()
        };
        let found = train_and_compare(*n, &config);
        let what = format!("{text} on {n} ranks, {micro_batches} micro-batches");
        assert_close(&found.parameters, &alone.parameters, &what);
        assert_eq!(found.report.micro_batches, *micro_batches);
    }
}

/// With a parameter server, rank 0 takes no steps, so it must learn the times from the workers.
#[test]
#[ignore = "runs with tools/test --full"]
fn each_strategy_reports_the_parts_of_its_steps() {
    for (text, ranks) in
        [("tensor", 2), ("pipeline:2", 2), ("ps-sync", 3), ("ps-async", 3), ("gossip", 2), ("local-sgd:3", 2)]
    {
        let config = Config { strategy: parse_strategy(text), epochs: Some(2), ..sgd_config() };
        let report = train_and_compare(ranks, &config).report;
        let times = report.step_times.unwrap();
        let StepTimes { steps, compute_seconds, exposed_communication_seconds, data_seconds } = times;
        assert!(
            compute_seconds > 0.0 && exposed_communication_seconds > 0.0 && data_seconds > 0.0,
            "{text}: {times:?}"
        );
        let workers = if text.starts_with("ps") { 2 } else { 1 };
        match text {
            "ps-sync" => assert_eq!(steps, 2 * report.steps),
            "ps-async" => assert!(steps >= report.steps, "{times:?}"),
            "gossip" => assert_eq!(steps, report.gossip.as_ref().unwrap().steps[0].1),
            _ => assert_eq!(steps, report.steps, "{text}"),
        }
        assert!(
            times.seconds() <= f64::from(workers) * report.seconds,
            "{text}: {times:?}, {}",
            report.seconds
        );
        let recorded: u64 = report.history.iter().map(|record| record.step_times.unwrap().steps).sum();
        assert_eq!(recorded, steps, "{text}");
    }
}

#[test]
fn a_single_rank_computes_the_same_bits_with_every_averaging_strategy() {
    let config = Config { epochs: Some(2), rule: Some(Rule::Adam(AdamOptions::DEFAULT)), ..sgd_config() };
    let expected = train(&config).unwrap().parameters;
    for text in ["local-sgd:3", "model-average:1", "model-average"] {
        let found = train(&Config { strategy: parse_strategy(text), ..config.clone() }).unwrap().parameters;
        assert_eq!(found, expected, "{text}");
    }
    // The estimate of a single rank has no error, so the parameters do not depend on the delay.
    let [waiting, delayed] = ["diloco:5,0", "diloco:5,3"]
        .map(|text| train(&Config { strategy: parse_strategy(text), ..config.clone() }).unwrap().parameters);
    assert!(waiting == delayed && waiting != expected);
}

/// Lets rank 1 begin a step only when rank 0 has completed a later step.
struct DelayingObserver {
    rank: Rank,
    /// Rank 1 waits before this step until rank 0 has completed the next step number, both counted from 1.
    steps: (u64, u64),
    signal: Arc<(Sender<()>, Mutex<Receiver<()>>)>,
}

impl Observer for DelayingObserver {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn batch_started(&mut self, _: u64, batch: u64, _: &[u32]) {
        if self.rank == Rank::new(1) && batch + 1 == self.steps.0 {
            let signal = self.signal.1.lock().unwrap().recv_timeout(Duration::from_secs(20));
            signal.expect("rank 0 takes steps during an average, which cannot end without rank 1");
        }
    }
    fn step_taken(&mut self, step: &CompletedStep) {
        if self.rank == Rank::ZERO && step.steps_total == self.steps.1 {
            self.signal.0.send(()).unwrap();
        }
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// With `diloco:8,3`, the ranks average after step 8, and the average changes the parameters after step 11. So rank 0
/// can complete step 10 before rank 1 begins step 8. The parameters do not depend on how fast the ranks are.
#[test]
fn ranks_take_steps_while_they_average() {
    let config = Config { strategy: parse_strategy("diloco:8,3"), epochs: Some(1), ..sgd_config() };
    let expected = train_and_compare(2, &config);
    let (sender, receiver) = channel();
    let signal = Arc::new((sender, Mutex::new(receiver)));
    let found = ranks::run(2, move |mut group| {
        let mut observer =
            DelayingObserver { rank: group.rank(), steps: (8, 10), signal: Arc::clone(&signal) };
        run(&mut group, &config, &AtomicBool::new(false), &mut observer).unwrap()
    });
    assert!(found.iter().all(|summary| summary.parameters == expected.parameters));
}

/// Ranks without a sample take no step. If ranks without samples had the same weight as the other ranks, their old
/// parameters would distort the average.
#[test]
fn ranks_without_samples_do_not_change_the_average() {
    let source = DataSource::Synthetic { rows: 200, columns: 4 };
    let config = Config { source, batch_size: Some(2), epochs: Some(1), ..sgd_config() };
    let two = train_and_compare(2, &Config { strategy: parse_strategy("local-sgd:7"), ..config.clone() });
    let four = train_and_compare(4, &Config { strategy: parse_strategy("local-sgd:7"), ..config });
    assert_close(&four.parameters, &two.parameters, "4 ranks share batches of 2 samples");
}

/// A stop signal on one rank stops all ranks after the same step. Before the ranks stop, they average their
/// parameters, so the run can continue on another number of ranks.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_stopped_run_resumes_on_another_number_of_ranks() {
    for text in ["local-sgd:4", "diloco:4", "model-average:2", "model-average"] {
        let directory = tempfile::tempdir().unwrap();
        let first = Config {
            strategy: parse_strategy(text),
            epochs: Some(4),
            rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
            learning_rate: Some(0.01),
            checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
            ..sgd_config()
        };
        let stopped = train_on(3, &first, PlannedInterventions { stop: Some((Rank::new(1), 5)), ..NONE });
        let reports: Vec<_> = stopped.into_iter().map(|result| result.unwrap().report).collect();
        for report in &reports {
            assert!(report.stopped && (5..48).contains(&report.steps), "{text}: {report:?}");
            assert_eq!(report.parameters_hash, reports[0].parameters_hash);
            assert!((0.1..3.0).contains(&report.train_loss), "{text}: {}", report.train_loss);
        }
        let resume = Config {
            checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
            ..first.clone()
        };
        let report = train_and_compare(2, &resume).report;
        assert_eq!((report.steps, report.epochs), (48, 4), "{text}");
        assert!(report.test_accuracy.unwrap() > 0.8, "{text}: {:?}", report.test_accuracy);
        let other = Config { strategy: parse_strategy("allreduce"), ..resume };
        let error = train(&other).unwrap_err().to_string();
        assert!(error.contains(&format!("saved with --strategy {text}, but this run has")), "{error}");
    }
}

/// Checkpoints must contain the outer velocity of `diloco`, and the averaged state of the ranks' optimizers.
#[test]
fn a_run_that_is_resumed_between_epochs_gives_the_same_bits() {
    for text in ["local-sgd:5", "diloco:5"] {
        let directory = tempfile::tempdir().unwrap();
        // Two ranks give the same bits with every algorithm, because a sum of two numbers does not depend on their
        // order.
        let whole = Config {
            strategy: parse_strategy(text),
            rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
            epochs: Some(2),
            ..sgd_config()
        };
        let expected = train_and_compare(2, &whole);
        for (epochs, existing) in [(1, ExistingCheckpoint::Refuse), (2, ExistingCheckpoint::Resume)] {
            let checkpoint = Some(checkpoint_in(directory.path(), existing));
            let found = train_and_compare(2, &Config { epochs: Some(epochs), checkpoint, ..whole.clone() });
            assert_eq!(found.report.epochs, epochs);
            assert_eq!(found.parameters == expected.parameters, epochs == 2, "{text}, {epochs} epochs");
        }
    }
}

#[test]
fn divergence_on_one_rank_ends_all_ranks() {
    for text in ["local-sgd:4", "model-average"] {
        // The parameter becomes NaN at the end of the first epoch on rank 1 only.
        let config = Config { strategy: parse_strategy(text), ..sgd_config() };
        let results =
            train_on(3, &config, PlannedInterventions { parameter: Some((Rank::new(1), f32::NAN)), ..NONE });
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err().to_string();
            let expected = if text == "model-average" { "the loss is NaN" } else { "different parameters" };
            assert!(error.contains(expected), "{text}, rank {rank}: {error}");
        }
    }
}

#[test]
fn options_that_do_not_fit_a_strategy_are_refused() {
    let accelerated =
        Config { rule: Some(Rule::Accelerated), strategy: parse_strategy("local-sgd:2"), ..config() };
    let recipe =
        Recipe { validation: Some(Validation { fraction: 0.1, patience: Some(1) }), ..Recipe::default() };
    let early_stopping = Config { recipe, epochs: Some(8), ..config() };
    for (config, expected) in [
        (accelerated, Some("pass --optimizer adam")),
        (
            Config { strategy: parse_strategy("model-average"), ..early_stopping.clone() },
            Some("model-average:EPOCHS"),
        ),
        (
            Config { strategy: parse_strategy("model-average:8"), ..early_stopping.clone() },
            Some("only at its end"),
        ),
        (Config { strategy: parse_strategy("model-average:4"), ..early_stopping }, None),
    ] {
        let found = run(&mut ringtrain::Group::solo(), &config, &AtomicBool::new(false), &mut SilentObserver);
        match (found, expected) {
            (Err(error), Some(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            (Ok(summary), None) => assert_eq!(summary.report.history.len(), 2),
            (found, _) => panic!("{found:?}"),
        }
    }
}

#[test]
fn ringtrain_trains_with_the_option_strategy() {
    let arguments = "-n 2 ringtrain --strategy local-sgd:3 --epochs 2 --compression bf16";
    let done = run_program(&mut ringrun(&arguments.split(' ').collect::<Vec<_>>()));
    assert_eq!(done.code(), Some(0), "{done:?}");
    let stdout = done.stdout();
    assert!(stdout.contains("2 ranks, strategy local-sgd:3"), "{stdout}");
    let hashes: Vec<_> = stdout.lines().filter_map(|line| line.split("parameters_hash ").nth(1)).collect();
    assert!(hashes.len() == 2 && hashes[0] == hashes[1], "{stdout}");
    let done = run_program(&mut ringrun(&["-n", "2", "ringtrain", "--strategy", "local-sgd:0"]));
    assert_eq!(done.code(), Some(2), "{done:?}");
    assert!(done.stderr().contains("`0` is not a number from 1"), "{done:?}");
}
