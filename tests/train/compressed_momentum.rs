//! Tests of `--compression-momentum` and `--compression-warmup`. Each rank is on a host of its own.

use std::num::NonZeroU64;

use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    BucketBytes, CheckpointSettings, CompressionRules, Config, ExistingCheckpoint, Summary, Warmup,
};

use super::compression::{memory_tensors, run_on_hosts, small_config, train_on_hosts, with_strategy};
use super::library::train;
use super::strategies::checkpoint_in;
use super::util::{if_long_tests_else, runs_long_tests};

const ADAM: Rule = Rule::Adam(AdamOptions::DEFAULT);

/// Returns a run whose ranks apply the momentum before compression. All of its 30 steps are after the warm-up, except for the
/// first `warmup`.
fn momentum_config(rule: Rule, codec: &str, warmup: u64) -> Config {
    Config {
        rule: Some(rule),
        learning_rate: Some(if rule.momentum().is_some() { 0.1 } else { 0.003 }),
        compression_momentum: true,
        compression_warmup: Warmup::Steps(warmup),
        ..small_config(codec)
    }
}

/// Returns the same run, but each tensor travels exactly.
fn with_exact_tensors(config: Config) -> Config {
    let compression_rules = CompressionRules { elements_min: usize::MAX, ..CompressionRules::default() };
    Config { compression_rules, ..config }
}

/// Checks that each parameter of the runs differs by at most `fraction` of the largest parameter.
fn assert_near(found: &Summary, expected: &Summary, fraction: f32, name: &str) {
    let largest = expected.parameters.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    for (found, expected) in found.parameters.iter().zip(&expected.parameters) {
        assert!((found - expected).abs() <= fraction * largest, "{name}: {found} {expected}");
    }
}

/// If each element travels, the sum of the velocities of the ranks is the velocity of the sum.
#[test]
fn momentum_on_each_rank_is_the_momentum_of_the_optimizer_if_the_sums_are_exact() {
    let all = [
        (Rule::Nesterov { momentum: 0.8 }, "allreduce"),
        (Rule::Momentum { momentum: 0.9 }, "hybrid:3x1"),
        (Rule::Momentum { momentum: 0.9 }, "allreduce"),
    ];
    for &(rule, strategy) in if runs_long_tests() { &all[..] } else { &all[..2] } {
        let mut config = with_exact_tensors(momentum_config(rule, "topk:0.1", 0));
        (config.weight_decay, config.overlap) = (0.01, false);
        let config = with_strategy(strategy, &config);
        let by_optimizer = Config { compression_momentum: false, ..config.clone() };
        let expected = train_on_hosts(3, &by_optimizer);
        assert_near(&train_on_hosts(3, &config), &expected, 1e-4, strategy);
        if strategy == "allreduce" {
            let in_buckets =
                Config { overlap: true, bucket_bytes: Some(BucketBytes::Fixed(2000)), ..config.clone() };
            assert_near(&train_on_hosts(3, &in_buckets), &expected, 1e-4, "buckets");
            let mut clipped = config;
            clipped.recipe.clip_norm = Some(0.5);
            let by_optimizer = Config { compression_momentum: false, ..clipped.clone() };
            assert_near(&train(&clipped).unwrap(), &train(&by_optimizer).unwrap(), 1e-4, "clipped");
        }
    }
}

/// In the warm-up, 1-bit Adam is Adam. After it, the first moments of the ranks add up to the first moment of all samples.
#[test]
#[ignore = "runs with tools/test --full"]
fn adam_with_a_frozen_variance_takes_the_same_steps_on_each_number_of_ranks() {
    let all = [Rule::AdamW(AdamOptions { beta_1: 0.8, ..AdamOptions::DEFAULT }), ADAM];
    for &rule in if runs_long_tests() { &all[..] } else { &all[..1] } {
        let by_optimizer = |compression: &str| Config {
            compression_momentum: false,
            compression_warmup: Warmup::default(),
            weight_decay: 0.01,
            ..momentum_config(rule, compression, 0)
        };
        let exact = train_on_hosts(3, &by_optimizer("none"));
        let warmup = Config { weight_decay: 0.01, ..momentum_config(rule, "onebit", 30) };
        assert!(
            train_on_hosts(3, &warmup).parameters == exact.parameters,
            "{rule:?}: the warm-up differs from Adam"
        );
        let frozen = Config { weight_decay: 0.01, ..momentum_config(rule, "onebit", 10) };
        let alone = train(&frozen).unwrap();
        assert_near(&train_on_hosts(3, &with_exact_tensors(frozen)), &alone, 1e-3, "exact");
        assert!(alone.parameters != exact.parameters, "{rule:?}: the variance is not frozen");
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn each_codec_trains_with_momentum_before_compression() {
    let momentum = Rule::Momentum { momentum: 0.9 };
    let all = [
        (momentum, "topk:0.02", 16, Some(1.0)),
        (ADAM, "onebit", 10, None),
        (momentum, "topk:0.02", 16, None),
        (Rule::Nesterov { momentum: 0.9 }, "randomk:0.05", 0, None),
        (ADAM, "int4-stochastic", 10, Some(1.0)),
    ];
    let cases = if runs_long_tests() { &all[..] } else { &all[..2] };
    for &(rule, codec, warmup, clip_norm) in cases {
        let mut config = Config { epochs: Some(5), ..momentum_config(rule, codec, warmup) };
        config.recipe.clip_norm = clip_norm;
        let n = if runs_long_tests() { 3 } else { 2 };
        let found = train_on_hosts(n, &config).report;
        config.compression = "none".parse().unwrap();
        (config.compression_momentum, config.compression_warmup) = (false, Warmup::default());
        let exact = train_on_hosts(n, &config).report;
        println!("{rule:?} {codec}: loss {} and {}", found.train_loss, exact.train_loss);
        assert!(found.train_loss < exact.train_loss + 0.4, "{rule:?} {codec}");
        assert!(found.bytes_sent < exact.bytes_sent, "{rule:?} {codec}");
    }
}

#[test]
fn the_warm_up_sends_more_elements_without_momentum_too() {
    for strategy in if_long_tests_else(&["allreduce", "local-sgd:3"][..], &["local-sgd:3"]) {
        let bytes = |steps| {
            let config = Config { compression_warmup: Warmup::Steps(steps), ..small_config("topk:0.01") };
            train_on_hosts(2, &with_strategy(strategy, &config)).report.bytes_sent
        };
        let (without, short, long) = (bytes(0), bytes(4), bytes(30));
        assert!(without < short && short < long, "{strategy}: {without} {short} {long}");
    }
}

/// A stop signal ends the first part of the run after 20 of 30 steps.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_resumed_run_has_the_bits_of_a_run_without_interruption() {
    let momentum = Rule::Momentum { momentum: 0.9 };
    let all = [
        (momentum, "allreduce", "topk:0.1", 24),
        (ADAM, "allreduce", "onebit", 10),
        (momentum, "hybrid:2x1", "randomk:0.1", 0),
        (ADAM, "allreduce", "int8-stochastic", 24),
        (ADAM, "hybrid:2x1", "int4-stochastic", 10),
    ];
    let cases = if runs_long_tests() { &all[..] } else { &all[..2] };
    for &(rule, strategy, codec, warmup) in cases {
        let config = with_strategy(strategy, &momentum_config(rule, codec, warmup));
        let expected = train_on_hosts(2, &config);
        let directory = tempfile::tempdir().unwrap();
        let part = |existing| Config {
            checkpoint: Some(checkpoint_in(directory.path(), existing)),
            ..config.clone()
        };
        for summary in run_on_hosts(2, &part(ExistingCheckpoint::Refuse), Some(20)) {
            assert!(summary.unwrap().report.stopped, "{strategy} {codec}");
        }
        let found = train_on_hosts(2, &part(ExistingCheckpoint::Resume));
        assert_eq!(found.report.steps, expected.report.steps);
        assert!(found.parameters == expected.parameters, "{rule:?} {strategy} {codec}");
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn velocities_are_regrouped_for_another_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let config = |epochs, existing| Config {
        checkpoint: Some(CheckpointSettings {
            steps: NonZeroU64::new(7),
            ..checkpoint_in(directory.path(), existing)
        }),
        epochs: Some(epochs),
        ..momentum_config(Rule::Momentum { momentum: 0.9 }, "topk:0.1", 0)
    };
    for (n, epochs, existing) in [
        (3, 1, ExistingCheckpoint::Refuse),
        (2, 2, ExistingCheckpoint::Resume),
        (4, 3, ExistingCheckpoint::Resume),
    ] {
        let found = train_on_hosts(n, &config(epochs, existing));
        let names =
            ["residual", "velocity"].map(|kind| (0..n).map(move |rank| format!("compression.{kind}.{rank}")));
        let expected: Vec<String> = names.into_iter().flatten().collect();
        assert_eq!(memory_tensors(directory.path()), expected);
        assert!(epochs < 3 || found.report.train_loss < 0.5, "{}", found.report.train_loss);
    }
    let other = Config { compression_momentum: false, ..config(4, ExistingCheckpoint::Resume) };
    let error = run_on_hosts(1, &other, None).remove(0).unwrap_err().to_string();
    assert!(error.contains("--compression-momentum"), "{error}");
}
