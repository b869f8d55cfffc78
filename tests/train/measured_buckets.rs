//! Tests of `--bucket-bytes auto`, with which the ranks divide the gradients into other buckets during a run.

use ringtrain::train::optimizer::Rule;
use ringtrain::train::{BucketBytes, Config, ExistingCheckpoint, Summary};

use super::compression::{residuals, small_config, train_on_hosts};
use super::strategies::{checkpoint_in, train_and_compare};
use super::util::if_long_tests_else;

/// Returns a run of 45 steps of a model of 307 kB, for which a trial of 33 steps compares three sizes. The rate is so small that
/// the gradients of runs with other codecs are nearly the same.
fn slow_config(compression: &str) -> Config {
    Config {
        model: Some("mlp:1024".parse().unwrap()),
        rule: Some(Rule::Sgd),
        learning_rate: Some(LEARNING_RATE),
        batch_size: Some(32),
        epochs: Some(1),
        bucket_bytes: Some(BucketBytes::Auto),
        ..small_config(compression)
    }
}

const LEARNING_RATE: f32 = 1e-4;

/// Checks that the report names a size from the candidates.
fn check_report(Summary { report, .. }: &Summary, codec: &str) {
    println!("{codec}: {}", report.bucket_trial.as_ref().unwrap());
    let trial = report.bucket_trial.as_ref().unwrap();
    let buckets: Vec<usize> = trial.candidates.iter().map(|time| time.buckets).collect();
    assert_eq!((report.steps, buckets), (45, vec![5, 1, 3]), "{codec}");
    let chosen = trial.candidates.iter().find(|time| Some(time.bytes) == trial.chosen_bytes).unwrap();
    assert_eq!(report.bucket_bytes, (chosen.buckets > 1).then_some(chosen.bytes), "{codec}");
    assert!(trial.candidates.iter().all(|time| time.seconds.unwrap() > 0.0), "{codec}: {trial}");
}

/// Returns the Euclidean norm of the difference of two vectors.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

/// A trial divides the gradients four times. The parameters of a run with error feedback lack only the residuals at its end: with
/// these, they are the parameters of an exact run. If a division lost the residuals, this part of the gradients would be missing.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_trial_chooses_a_size_and_loses_no_residuals() {
    let exact = train_on_hosts(2, &Config { bucket_bytes: None, ..slow_config("none") });
    assert_eq!(exact.report.bucket_trial, None);
    let measured = train_on_hosts(2, &slow_config("none"));
    check_report(&measured, "none");
    assert!(distance(&measured.parameters, &exact.parameters) < 1e-5);
    // On one host, the ranks free the buffers in shared memory of earlier buckets.
    let on_one_host = train_and_compare(2, &slow_config("none"));
    check_report(&on_one_host, "on one host");
    assert!(distance(&on_one_host.parameters, &exact.parameters) < 1e-5);
    for codec in if_long_tests_else(&["powersgd:2", "topk:0.01", "onebit"][..], &["powersgd:2"][..]) {
        let directory = tempfile::tempdir().unwrap();
        let checkpoint = Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse));
        let found = train_on_hosts(2, &Config { checkpoint, ..slow_config(codec) });
        check_report(&found, codec);
        let mut completed = found.parameters.clone();
        for residual in residuals(directory.path()) {
            for (parameter, residual) in completed.iter_mut().zip(&residual) {
                *parameter -= LEARNING_RATE * residual;
            }
        }
        let before = distance(&found.parameters, &exact.parameters);
        let after = distance(&completed, &exact.parameters);
        println!("{codec}: {before} without the residuals, {after} with them");
        assert!(after < 0.1 * before, "{codec}: {after} {before}");
    }
}
