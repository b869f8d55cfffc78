//! Tests of `--strategy ps-sync` and `--strategy ps-async`.

use std::fs;
use std::num::NonZeroU32;
use std::time::Instant;

use ringtrain::Rank;
use ringtrain::group::OPERATION_TIMEOUT;
use ringtrain::train::data::DataSource;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    Config, ExistingCheckpoint, Recipe, ServerReport, ServerSettings, Summary, Validation,
};

use super::library::train;
use super::strategies::{
    NONE, PlannedInterventions, assert_close, checkpoint_in, convergence_config, parse_strategy, sgd_config,
    train_and_compare, train_on,
};
use super::util::{
    finish, read_pid, retry_on_busy_machine, ringrun_script, run as run_program, runs_long_tests,
    send_signal, wait_until,
};

fn server_settings(count: u32) -> ServerSettings {
    ServerSettings { servers: NonZeroU32::new(count), staleness_aware: false }
}

fn server_report(summary: &Summary) -> &ServerReport {
    summary.report.parameter_server.as_ref().unwrap()
}

/// Returns the number of gradients that the servers have applied.
fn update_count(report: &ServerReport) -> u64 {
    report.updates.iter().map(|(_, count)| count).sum()
}

#[test]
fn synchronous_runs_equal_a_single_process_after_100_steps() {
    // An epoch has 15 steps. Batches of 100 samples give 3 workers parts of 34, 33 and 33 samples.
    let plain = Config { batch_size: Some(100), epochs: Some(7), ..sgd_config() };
    let clipped = Config { recipe: Recipe { clip_norm: Some(0.1), ..Recipe::default() }, ..plain.clone() };
    let all = &[(4, 1, &clipped), (4, 2, &plain), (2, 1, &plain), (3, 1, &plain), (5, 2, &plain)][..];
    for &(n, count, config) in if runs_long_tests() { all } else { &all[..2] } {
        let alone = train(config).unwrap();
        let config = Config {
            strategy: parse_strategy("ps-sync"),
            parameter_server: server_settings(count),
            ..config.clone()
        };
        let found = train_and_compare(n, &config);
        assert_close(&found.parameters, &alone.parameters, &format!("{n} ranks, {count} servers"));
        assert_eq!((found.report.steps, found.report.world_size), (105, n));
        let report = server_report(&found);
        assert_eq!(
            (update_count(report), report.servers.len()),
            (105 * u64::from(n - count), count as usize)
        );
    }
}

/// LAMB needs the norms of whole tensors, so servers hold whole tensors. The sum of two gradients has the same bits
/// in both orders, so two workers compute the same bits as two ranks with `allreduce`.
#[test]
#[ignore = "runs with tools/test --full"]
fn two_synchronous_workers_give_the_same_bits_as_two_allreduce_ranks() {
    let all = &[Rule::Lamb(AdamOptions::DEFAULT), Rule::Adam(AdamOptions::DEFAULT)][..];
    for &rule in if runs_long_tests() { all } else { &all[..1] } {
        let config = Config { rule: Some(rule), learning_rate: Some(0.01), epochs: Some(2), ..sgd_config() };
        let expected = train_and_compare(2, &config).parameters;
        let config =
            Config { strategy: parse_strategy("ps-sync"), parameter_server: server_settings(2), ..config };
        assert_eq!(train_and_compare(4, &config).parameters, expected, "{rule:?}");
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn an_asynchronous_run_learns_digits_as_well_as_a_single_process() {
    let short = Config { learning_rate: Some(0.1), epochs: Some(30), ..sgd_config() };
    let config = if runs_long_tests() { convergence_config() } else { short };
    let alone = train(&config).unwrap().report;
    let all = &[("ps-async", 4, 2), ("ps-async:4", 4, 1)][..];
    for &(text, n, count) in if runs_long_tests() { all } else { &all[..1] } {
        for &staleness_aware in if runs_long_tests() { &[false, true][..] } else { &[false] } {
            let parameter_server = ServerSettings { staleness_aware, ..server_settings(count) };
            let summary = train_and_compare(
                n,
                &Config { strategy: parse_strategy(text), parameter_server, ..config.clone() },
            );
            let (found, expected) = (summary.report.test_accuracy.unwrap(), alone.test_accuracy.unwrap());
            let report = server_report(&summary);
            println!(
                "{text}: accuracy {found}, alone {expected}; {}",
                serde_json::to_string(report).unwrap()
            );
            // With `staleness_aware`, the steps are shorter, so the same number of steps gives a lower accuracy.
            let margin = if staleness_aware { 0.03 } else { 0.01 };
            assert!(found >= expected - margin, "{text}: {found}, alone {expected}");
            // Each batch is applied exactly once.
            assert_eq!((summary.report.steps, update_count(report)), (alone.steps, alone.steps));
            assert_eq!(report.staleness.iter().sum::<u64>(), alone.steps);
            assert!(report.lost_workers.is_empty());
        }
    }
}

/// A bound of 0 accepts only gradients that were computed with the current parameters. The server drops the other
/// gradients, and workers compute the batches of these gradients again.
#[test]
fn every_applied_gradient_is_within_the_bound_of_the_staleness() {
    let config = Config { strategy: parse_strategy("ps-async:0"), epochs: Some(3), ..sgd_config() };
    let summary = train_and_compare(4, &config);
    let report = server_report(&summary);
    assert_eq!((report.staleness_max, report.staleness.as_slice()), (0, &[36][..]));
    assert_eq!((update_count(report), summary.report.steps), (36, 36));
}

/// A stopped run saves which batches are done. So the resumed run uses each batch exactly once, also with another
/// number of ranks.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_stopped_run_resumes_with_other_servers_and_workers() {
    for text in ["ps-async", "ps-sync"] {
        // If the system suspends a rank, the workers may take all steps before the run stops.
        retry_on_busy_machine(|_| {
            let directory = tempfile::tempdir().unwrap();
            let first = Config {
                strategy: parse_strategy(text),
                rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
                learning_rate: Some(0.01),
                epochs: Some(6),
                checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
                ..sgd_config()
            };
            let stopped = train_on(4, &first, PlannedInterventions { stop: Some((Rank::ZERO, 17)), ..NONE });
            let mut stopped: Vec<_> = stopped.into_iter().map(|result| result.unwrap()).collect();
            let stopped = stopped.swap_remove(0).report;
            assert!(stopped.stopped && (17..72).contains(&stopped.steps), "{text}: {stopped:?}");
            let resume = Config {
                checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)),
                parameter_server: server_settings(2),
                ..first
            };
            let report = train_and_compare(3, &resume).report;
            assert_eq!((report.steps, report.epochs), (72, 6), "{text}");
            assert!(report.test_accuracy.unwrap() > 0.8, "{text}: {:?}", report.test_accuracy);
        });
    }
}

#[test]
fn wrong_numbers_of_ranks_and_diverged_runs_are_errors_on_all_ranks() {
    let base = Config { strategy: parse_strategy("ps-async"), epochs: Some(2), ..sgd_config() };
    let diverging = Config { learning_rate: Some(1e30), ..base.clone() };
    let crowded = Config { parameter_server: server_settings(3), ..base.clone() };
    for (n, config, expected) in [
        (1, &base, "at least one server and one worker, but the number of ranks is 1"),
        (3, &crowded, "the number of ranks is 3 and the number of servers is 3"),
        (3, &diverging, "lower --lr"),
    ] {
        for (rank, result) in train_on(n, config, NONE).into_iter().enumerate() {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(expected), "rank {rank}: {error}");
        }
    }
}

/// Starts a run of 4 ranks, waits until rank 0 has saved a checkpoint, and kills the rank `victim`. Returns the exit
/// code, the output and the report.
fn kill_one_rank(
    victim: u32,
    strategy: &str,
    model: &str,
) -> (Option<i32>, String, Option<serde_json::Value>) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let script = format!(
        "echo $$ >{0}/part.$RING_RANK && mv {0}/part.$RING_RANK {0}/pid.$RING_RANK && exec {1} --strategy {strategy} --epochs 80 \
         --optimizer sgd --lr 0.1 --model {model} --checkpoint {0} --report {0}/report.json",
        folder.path().display(),
        env!("CARGO_BIN_EXE_ringtrain"),
    );
    let child = ringrun_script(&["-n", "4", "--tolerate-failures"], &script).spawn().unwrap();
    wait_until("a checkpoint", || path("checkpoint.safetensors").exists());
    send_signal("KILL", read_pid(&path(&format!("pid.{victim}"))));
    let done = finish(child);
    let report = fs::read_to_string(path("report.json")).ok();
    let report = report.map(|text| serde_json::from_str(&text).unwrap());
    (done.code(), done.stdout() + &done.stderr(), report)
}

#[test]
fn the_other_workers_finish_an_asynchronous_run_after_a_worker_was_killed() {
    // The gradients of this model are in memory that the worker shares with the server.
    let (code, output, report) = kill_one_rank(2, "ps-async", "mlp:160");
    assert_eq!(code, Some(0), "{output}");
    assert_eq!(output.matches("rank 2, a worker, is lost: the connection failed").count(), 1, "{output}");
    let report = report.unwrap();
    assert_eq!(report["parameter_server"]["lost_workers"], serde_json::json!([2]));
    // Each batch is applied exactly once, although a worker was lost.
    let updates = report["parameter_server"]["updates"].as_array().unwrap();
    let total: u64 = updates.iter().map(|entry| entry[1].as_u64().unwrap()).sum();
    assert_eq!((total, report["steps"].as_u64()), (960, Some(960)));
    assert!(report["test_accuracy"].as_f64().unwrap() > 0.93, "{output}");
}

#[test]
fn a_lost_server_or_synchronous_worker_ends_the_run_with_an_error() {
    for (victim, strategy, expected) in [
        (0, "ps-async", "rank 0, a parameter server, is lost"),
        (1, "ps-async --servers 2", "rank 1, a parameter server, is lost"),
        (3, "ps-sync", "rank 3, a worker, is lost"),
    ] {
        let (code, output, _) = kill_one_rank(victim, strategy, "mlp:16");
        assert!(strategy != "ps-sync" || !output.contains("the other workers continue"), "{output}");
        assert!(code != Some(0) && output.contains(expected), "exit code {code:?}: {output}");
    }
}

/// All ranks end as soon as the run stops early. The report counts only the updates that the final model includes.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_run_that_stops_early_ends_without_waiting_for_a_deadline() {
    for text in ["ps-sync", "ps-async"] {
        let validation = Validation { fraction: 0.3, patience: Some(1) };
        let config = Config {
            strategy: parse_strategy(text),
            recipe: Recipe { validation: Some(validation), ..Recipe::default() },
            learning_rate: Some(1.0),
            epochs: Some(200),
            ..sgd_config()
        };
        let started = Instant::now();
        let summary = train_and_compare(3, &config);
        assert!(summary.report.epochs < 200 && !summary.report.stopped, "{text}: {:?}", summary.report);
        assert!(started.elapsed() < OPERATION_TIMEOUT, "{text}: {:?}", started.elapsed());
        let workers = if text == "ps-sync" { 2 } else { 1 };
        assert_eq!(update_count(server_report(&summary)), workers * summary.report.steps, "{text}");
    }
}

/// If no other batches are left, idle workers compute the batches in progress again. Only the first result of a batch
/// may change the parameters of each server.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_batch_that_several_workers_compute_is_applied_once_on_every_server() {
    let source = DataSource::Synthetic { rows: 2000, columns: 20 };
    let config =
        Config { source, batch_size: Some(2000), epochs: Some(3), learning_rate: Some(0.1), ..sgd_config() };
    let alone = train(&config).unwrap();
    let config =
        Config { strategy: parse_strategy("ps-async"), parameter_server: server_settings(2), ..config };
    let found = train_and_compare(6, &config);
    assert_eq!(found.report.steps, 3);
    if server_report(&found).staleness_max == 0 {
        assert_close(&found.parameters, &alone.parameters, "one batch for each epoch");
    }
}

/// A stop signal on rank 1, a server, or on rank 3, a worker, stops the run. The report has the loss of the last
/// epoch.
#[test]
fn a_stop_signal_on_any_rank_stops_the_run() {
    for signalled in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let script = format!(
            "echo $$ >{0}/part.$RING_RANK && mv {0}/part.$RING_RANK {0}/pid.$RING_RANK && exec {1} --strategy ps-async --servers 2 \
             --epochs 1000000 --model mlp:16 --checkpoint {0} --report {0}/report.json",
            folder.path().display(),
            env!("CARGO_BIN_EXE_ringtrain"),
        );
        let child = ringrun_script(&["-n", "4"], &script).spawn().unwrap();
        wait_until("a checkpoint", || path("checkpoint.safetensors").exists());
        send_signal("TERM", read_pid(&path(&format!("pid.{signalled}"))));
        let done = finish(child);
        assert_eq!(done.code(), Some(0), "{done:?}");
        let report: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(path("report.json")).unwrap()).unwrap();
        assert!(
            report["stopped"].as_bool().unwrap() && report["train_loss"].as_f64().unwrap() > 0.0,
            "{report}"
        );
    }
}

#[test]
fn ringtrain_prints_the_staleness_of_gradients() {
    let script =
        format!("exec {} --strategy ps-async --servers 2 --epochs 2", env!("CARGO_BIN_EXE_ringtrain"));
    let done = run_program(&mut ringrun_script(&["-n", "4"], &script));
    assert_eq!(done.code(), Some(0), "{done:?}");
    let stdout = done.stdout();
    assert!(stdout.contains("staleness of 24 updates: mean "), "{stdout}");
    let hashes: Vec<_> = stdout.lines().filter_map(|line| line.split("parameters_hash ").nth(1)).collect();
    assert!(hashes.len() == 4 && hashes.iter().all(|hash| *hash == hashes[0]), "{stdout}");
}
