//! Tests of `--strategy gossip`.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ringtrain::Rank;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    CompletedStep, Config, EpochRecord, ExistingCheckpoint, GossipReport, Observer, Summary, run,
};

use super::library::train;
use super::strategies::{
    NONE, PlannedInterventions, checkpoint_in, convergence_config, parse_strategy, sgd_config,
    train_and_compare, train_on,
};
use super::util::{if_long_tests_else, ranks, retry_on_busy_machine, runs_long_tests};

fn gossip_report(summary: &Summary) -> &GossipReport {
    summary.report.gossip.as_ref().unwrap()
}

/// Returns the number of steps of all ranks together.
fn total_steps(report: &GossipReport) -> u64 {
    report.steps.iter().map(|(_, count)| count).sum()
}

/// Returns the configuration of a run of 10 epochs of 12 steps, at whose end the model is accurate.
pub(crate) fn short_config() -> Config {
    Config {
        rule: Some(Rule::Momentum { momentum: 0.9 }),
        learning_rate: Some(0.05),
        epochs: Some(10),
        ..sgd_config()
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn gossip_learns_digits_as_well_as_a_single_process() {
    let short = Config { learning_rate: Some(0.1), epochs: Some(24), ..sgd_config() };
    // Two runs with the same options differ. The short run ends while the accuracy still rises.
    let (config, tolerance) = if runs_long_tests() { (convergence_config(), 0.01) } else { (short, 0.02) };
    let alone = train(&config).unwrap().report;
    for text in if_long_tests_else(&["gossip", "gossip:3"][..], &["gossip"]) {
        let found = train_and_compare(4, &Config { strategy: parse_strategy(text), ..config.clone() });
        let (accuracy, expected) = (found.report.test_accuracy.unwrap(), alone.test_accuracy.unwrap());
        println!("{text}: accuracy {accuracy}, alone {expected}; {:?}", gossip_report(&found));
        assert!(accuracy >= expected - tolerance, "{text}: {accuracy}, alone {expected}");
        assert_eq!((found.report.epochs, found.report.steps), (alone.epochs, alone.steps));
        assert_eq!(found.report.history.last().map(|record| record.epoch), Some(alone.epochs));
        // Each part of a batch is used exactly once.
        assert_eq!(total_steps(gossip_report(&found)), 4 * alone.steps);
        assert!(gossip_report(&found).averages > 0);
    }
}

#[test]
fn a_single_rank_computes_the_same_bits_as_without_gossip() {
    let config = Config { epochs: Some(2), rule: Some(Rule::Adam(AdamOptions::DEFAULT)), ..sgd_config() };
    let expected = train(&config).unwrap();
    let found = train(&Config { strategy: parse_strategy("gossip"), ..config }).unwrap();
    assert_eq!(found.parameters, expected.parameters);
    assert_eq!(found.report.train_loss.to_bits(), expected.report.train_loss.to_bits());
}

/// A stopped run completes the batches that it has begun. So the resumed run uses each batch of the epoch exactly once,
/// on another number of ranks.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_stopped_run_resumes_on_another_number_of_ranks() {
    for &victim in if_long_tests_else(&[0, 1][..], &[1]) {
        // On a busy machine, the other ranks may complete the run before this rank has taken three steps.
        retry_on_busy_machine(|_| stop_and_resume(Rank::new(victim)));
    }
}

/// Stops a run of 3 ranks after 3 steps of one rank, and resumes the run on 2 ranks. The run has 24 epochs of 12 steps.
fn stop_and_resume(stopping_rank: Rank) {
    const STEPS: u64 = 288;
    let directory = tempfile::tempdir().unwrap();
    let first = Config {
        strategy: parse_strategy("gossip:2"),
        rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
        learning_rate: Some(0.01),
        epochs: Some(24),
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..sgd_config()
    };
    let stopped = train_on(3, &first, PlannedInterventions { stop: Some((stopping_rank, 3)), ..NONE });
    let reports: Vec<_> = stopped.into_iter().map(|result| result.unwrap().report).collect();
    for report in &reports {
        assert!(report.stopped && (3..STEPS).contains(&report.steps), "{report:?}");
        assert_eq!(report.parameters_hash, reports[0].parameters_hash);
        assert!(report.train_loss > 0.0, "{report:?}");
    }
    let resume =
        Config { checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)), ..first };
    let resumed = train_and_compare(2, &resume);
    assert_eq!((resumed.report.steps, resumed.report.epochs), (STEPS, 24));
    assert_eq!(total_steps(gossip_report(&resumed)), 2 * (STEPS - reports[0].steps));
    assert!(resumed.report.test_accuracy.unwrap() > 0.8, "{:?}", resumed.report);
}

#[test]
fn divergence_on_one_rank_ends_all_ranks() {
    let config = Config { strategy: parse_strategy("gossip"), learning_rate: Some(1e30), ..sgd_config() };
    for (rank, result) in train_on(3, &config, NONE).into_iter().enumerate() {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("lower --lr"), "rank {rank}: {error}");
    }
}

/// The slow rank.
const SLOW_RANK: Rank = Rank::new(3);

/// Makes the slow rank ten times slower: after each step, this rank waits until ranks 1 and 2 have taken 20 steps together.
struct SlowRank {
    rank: Rank,
    fast_steps: Arc<(Mutex<u64>, Condvar)>,
}

impl Observer for SlowRank {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {
        let (steps, changed) = &*self.fast_steps;
        let mut steps = steps.lock().unwrap();
        if self.rank == SLOW_RANK {
            let end = *steps + 20;
            // At the end of the run, the other ranks take no steps any more.
            let timeout = Duration::from_millis(500);
            drop(changed.wait_timeout_while(steps, timeout, |steps| *steps < end).unwrap());
        } else if self.rank != Rank::ZERO {
            *steps += 1;
            changed.notify_all();
        }
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// If ranks waited for each other, all ranks would take the same number of steps.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_slow_rank_does_not_delay_the_others() {
    let config = Config { strategy: parse_strategy("gossip"), ..short_config() };
    let fast_steps = Arc::new((Mutex::new(0), Condvar::new()));
    let mut summaries = ranks::run(4, move |mut group| {
        let mut observer = SlowRank { rank: group.rank(), fast_steps: Arc::clone(&fast_steps) };
        run(&mut group, &config, &AtomicBool::new(false), &mut observer).unwrap()
    });
    let report = summaries.swap_remove(0).report;
    let gossip = report.gossip.unwrap();
    let counts: Vec<u64> = gossip.steps.iter().map(|(_, count)| *count).collect();
    assert_eq!(counts.iter().sum::<u64>(), 4 * report.steps);
    assert!(8 * counts[3] < counts[1] + counts[2], "{counts:?}");
    assert!(report.test_accuracy.unwrap() > 0.85, "{:?}", report.test_accuracy);
}

/// Pauses after each step.
struct PausingObserver {
    pause: Duration,
    /// The number of steps, and the times of the first and of the last step.
    steps: (u32, Option<(Instant, Instant)>),
}

impl Observer for PausingObserver {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {
        let now = Instant::now();
        let (count, times) = self.steps;
        self.steps = (count + 1, Some((times.map_or(now, |(first, _)| first), now)));
        let (lock, condition) = (Mutex::new(()), Condvar::new());
        // The condition is never notified.
        drop(condition.wait_timeout_while(lock.lock().unwrap(), self.pause, |()| true).unwrap());
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// Returns the steps per second of ranks 1 and 2 together, which pause 5 ms after each step, if rank 3 pauses for `pause`.
fn measure_fast_ranks(text: &str, pause: Duration) -> f64 {
    let config =
        Config { strategy: parse_strategy(text), epochs: Some(30), learning_rate: Some(0.1), ..sgd_config() };
    let rates = ranks::run(4, move |mut group| {
        let pause = if group.rank() == SLOW_RANK { pause } else { Duration::from_millis(5) };
        let mut observer = PausingObserver { pause, steps: (0, None) };
        run(&mut group, &config, &AtomicBool::new(false), &mut observer).unwrap();
        let (count, Some((first, last))) = observer.steps else { return 0.0 };
        f64::from(count - 1) / last.duration_since(first).as_secs_f64()
    });
    rates[1] + rates[2]
}

#[test]
#[ignore = "runs with tools/test --full"]
fn fast_ranks_beside_a_slow_rank_keep_more_speed_with_gossip_than_with_allreduce() {
    let [gossip, allreduce] = ["gossip", "allreduce"].map(|text| {
        let mut ratios = [0, 1, 2].map(|round| {
            let [even, slow] = [5, 50].map(|pause| measure_fast_ranks(text, Duration::from_millis(pause)));
            println!(
                "{text}, round {round}: {even:.0} steps/s, beside a slow rank {slow:.0}: {:.2}",
                slow / even
            );
            slow / even
        });
        ratios.sort_by(f64::total_cmp);
        ratios[1]
    });
    assert!(gossip > allreduce, "medians: gossip {gossip:.2}, allreduce {allreduce:.2}");
}
