//! Tests of `--compression`: each rank is on a host of its own, because the ranks of a host exchange exact values.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringtrain::train::data::DataSource;
use ringtrain::train::optimizer::Rule;
use ringtrain::train::{
    BucketBytes, CHECKPOINT_FILE_NAME, CheckpointSettings, CompletedStep, CompressionRules, Config,
    EpochRecord, ExistingCheckpoint, Observer, SilentObserver, Summary, TrainError, run,
};
use ringtrain::{Compression, Rank};

use super::library::config;
use super::strategies::{checkpoint_in, parse_strategy};
use super::util::ranks::{self, TestTransport};
use super::util::{if_long_tests_else, ringrun, run as run_program, runs_long_tests};

/// Sets the stop flag of rank 1 after a number of steps.
struct StoppingObserver {
    steps_left: Option<u64>,
    stop: Arc<AtomicBool>,
}

impl Observer for StoppingObserver {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {
        if let Some(left) = &mut self.steps_left {
            *left = left.saturating_sub(1);
            self.stop.fetch_or(*left == 0, Ordering::Relaxed);
        }
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// Runs the configuration on `n` ranks, each on a host of its own. If `stop_after` is not `None`, rank 1 gets a stop signal after
/// this number of steps.
pub(crate) fn run_on_hosts(
    n: u32,
    config: &Config,
    stop_after: Option<u64>,
) -> Vec<Result<Summary, TrainError>> {
    let config = config.clone();
    // The options of each rank are adjusted once.
    let hosts = std::cell::Cell::new(0);
    let own_host = move |options: &mut ringtrain::JoinOptions| {
        options.host_id = Some(format!("host {}", hosts.replace(hosts.get() + 1)));
    };
    ranks::run_with(n, own_host, move |mut group| {
        let stop = Arc::new(AtomicBool::new(false));
        let steps_left = stop_after.filter(|_| group.rank() == Rank::new(1));
        let mut observer = StoppingObserver { steps_left, stop: Arc::clone(&stop) };
        run(&mut group, &config, &stop, &mut observer)
    })
}

/// Runs the configuration as [`run_on_hosts`], checks that all ranks have the same parameters, and returns the summary of rank 0.
pub(crate) fn train_on_hosts(n: u32, config: &Config) -> Summary {
    let mut summaries: Vec<Summary> =
        run_on_hosts(n, config, None).into_iter().map(|result| result.unwrap()).collect();
    for summary in &summaries {
        assert_eq!(summary.report.parameters_hash, summaries[0].report.parameters_hash);
    }
    summaries.swap_remove(0)
}

/// Returns a run of two epochs of a model whose tensors have 2048, 32, 320 and 10 elements. Only the first is compressed.
/// The buckets have 500 parameters, so most buckets have one compression, and one bucket has two.
pub(crate) fn small_config(compression: &str) -> Config {
    Config {
        model: Some("mlp:32".parse().unwrap()),
        rule: Some(Rule::Momentum { momentum: 0.9 }),
        learning_rate: Some(0.1),
        batch_size: Some(96),
        epochs: Some(2),
        compression: compression.parse().unwrap(),
        bucket_bytes: Some(BucketBytes::Fixed(2000)),
        ..config()
    }
}

/// The codecs, and the largest fraction of the bytes of an exact run that a run of [`small_config`] with them sends.
const CODECS: &[(&str, f64)] = &[
    ("bf16", 0.8),
    ("powersgd:2", 0.6),
    ("int8", 0.5),
    ("topk:0.1", 0.5),
    ("int4-stochastic", 0.4),
    ("fp8-e4m3", 0.5),
    ("onebit", 0.4),
];

/// The strategies that send gradients or changes of parameters. `sharded` is `allreduce` with `--shard-optimizer`.
const STRATEGIES: &[&str] =
    &["allreduce", "sharded", "local-sgd:3", "diloco:4", "hybrid:3x1", "model-average:1", "diloco:4,0"];

pub(crate) fn with_strategy(name: &str, config: &Config) -> Config {
    match name {
        "sharded" => Config { shard_optimizer: true, ..config.clone() },
        "allreduce" | "hybrid:3x1" | "hybrid:2x1" => {
            Config { strategy: parse_strategy(name), ..config.clone() }
        }
        // Changes of several steps are larger than gradients, and `diloco` adds momentum.
        name => Config { strategy: parse_strategy(name), learning_rate: Some(0.02), ..config.clone() },
    }
}

/// The report counts the encoded bytes, and names the codec that `auto` has chosen for each bucket.
#[test]
#[ignore = "runs with tools/test --full"]
fn the_report_says_what_compression_saved_and_what_auto_chose() {
    let exact = train_on_hosts(2, &small_config("none")).report;
    assert_eq!(exact.compressed, None);
    let int8 = train_on_hosts(2, &small_config("int8")).report.compressed.unwrap();
    let fraction = int8.encoded_bytes as f64 / int8.unencoded_bytes as f64;
    assert!((0.25..0.27).contains(&fraction) && int8.choices.is_empty(), "{int8:?}");
    let config = Config { epochs: Some(3), ..small_config("auto") };
    let found = train_on_hosts(2, &config).report;
    assert!(found.train_loss < exact.train_loss * 1.6, "{} {}", found.train_loss, exact.train_loss);
    let auto = found.compressed.unwrap();
    assert!(auto.encoded_bytes > 0 && auto.choices.len() >= 4, "{auto:?}");
    assert!(auto.choices.iter().all(|choice| choice.seconds.is_some()), "a trial has not ended: {auto:?}");
}

/// All ranks must have the same parameters, with fewer bytes than without compression, and a loss that is nearly the same.
#[test]
#[ignore = "runs with tools/test --full"]
fn each_strategy_trains_with_each_codec() {
    let strategies = if_long_tests_else(STRATEGIES, &STRATEGIES[..6]);
    for (index, strategy) in strategies.iter().enumerate() {
        let exact = train_on_hosts(3, &with_strategy(strategy, &small_config("none"))).report;
        for (number, (codec, fraction)) in CODECS.iter().enumerate() {
            // The short tests combine each strategy except the last one with one codec.
            if !runs_long_tests() && number != index {
                continue;
            }
            let found = train_on_hosts(3, &with_strategy(strategy, &small_config(codec))).report;
            let bytes = found.bytes_sent as f64 / exact.bytes_sent as f64;
            println!("{strategy} {codec}: loss {} and {}, bytes {bytes}", found.train_loss, exact.train_loss);
            assert_ne!(
                found.parameters_hash, exact.parameters_hash,
                "{strategy} {codec}: nothing was encoded"
            );
            assert!(found.train_loss < exact.train_loss * 1.6, "{strategy} {codec}");
            let fraction = match *strategy {
                // After each step, `--shard-optimizer` sends parameters, which are exact.
                "sharded" => 1.0,
                "allreduce" | "hybrid:3x1" => *fraction,
                // Each average of parameters is followed by one of the exact state, which is as long. With bf16, that makes
                // 0.75 of the bytes if both runs use the same algorithm.
                "model-average:1" => 0.76,
                // At the end of each epoch, the ranks average the exact state of the optimizer.
                _ => 0.6,
            };
            assert!(bytes < fraction, "{strategy} {codec}: {bytes}");
        }
    }
}

/// Ranks of one host send nothing to other hosts, and excluded tensors and small ones stay exact.
#[test]
#[ignore = "runs with tools/test --full"]
fn what_is_not_compressed_has_the_bits_of_an_exact_run() {
    let exact = train_on_hosts(2, &small_config("none")).parameters;
    let rules = |pattern: &str, elements_min| CompressionRules {
        tensors: vec![(pattern.into(), Compression::None)],
        elements_min,
    };
    for (rules, is_exact) in [
        (rules("layers.0.weight", 1024), true),
        (rules("layers.*.weight", 1), true),
        (CompressionRules { elements_min: 2049, ..CompressionRules::default() }, true),
        (rules("bias", 0), false),
    ] {
        let config = Config { compression_rules: rules.clone(), ..small_config("powersgd:1") };
        assert_eq!(train_on_hosts(2, &config).parameters == exact, is_exact, "{rules:?}");
    }
    let config = small_config("powersgd:1");
    let on_one_host = TestTransport::Shm.run(2, move |mut group| {
        run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver).unwrap()
    });
    assert!(on_one_host[0].parameters == exact, "the ranks of one host encoded something");
}

/// Checkpoints contain what each rank has not sent. A stop signal ends the first part of the run within an epoch.
#[test]
fn a_resumed_run_has_the_bits_of_a_run_without_interruption() {
    let all: &[(&str, &str)] = &[
        ("allreduce", "powersgd:2"),
        ("sharded", "int4"),
        ("hybrid:2x1", "topk:0.1"),
        ("allreduce", "int8-stochastic"),
        ("allreduce", "randomk:0.1"),
        ("allreduce", "onebit"),
        ("sharded", "powersgd:1"),
        ("allreduce", "ef21:topk:0.1"),
        ("hybrid:2x1", "ef21:int4"),
        ("sharded", "randomk:0.1"),
        ("hybrid:2x1", "powersgd:2"),
    ];
    for (strategy, codec) in if_long_tests_else(all, &all[..3]) {
        let config = with_strategy(strategy, &small_config(codec));
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
        assert!(found.parameters == expected.parameters, "{strategy} {codec}");
    }
}

/// With strategies that average parameters, a save within an epoch happens when an average is due.
#[test]
#[ignore = "runs with tools/test --full"]
fn local_training_resumes_from_checkpoints_with_residuals() {
    for (strategy, codec) in
        [("local-sgd:3", "topk:0.1"), ("diloco:4,0", "powersgd:2"), ("local-sgd:3", "ef21:int8")]
    {
        let directory = tempfile::tempdir().unwrap();
        let config = |existing, epochs| Config {
            checkpoint: Some(CheckpointSettings {
                steps: NonZeroU64::new(6),
                ..checkpoint_in(directory.path(), existing)
            }),
            epochs: Some(epochs),
            ..with_strategy(strategy, &small_config(codec))
        };
        let expected = train_on_hosts(2, &config(ExistingCheckpoint::Refuse, 2));
        std::fs::remove_dir_all(directory.path()).unwrap();
        train_on_hosts(2, &config(ExistingCheckpoint::Refuse, 1));
        let found = train_on_hosts(2, &config(ExistingCheckpoint::Resume, 2));
        assert!(found.parameters == expected.parameters, "{strategy} {codec}");
    }
}

/// Workers push encoded gradients, and servers keep exact parameters.
#[test]
#[ignore = "runs with tools/test --full"]
fn parameter_servers_decode_what_workers_push() {
    let all: &[(&str, u32)] = &[("ps-sync", 1), ("ps-async", 2), ("ps-sync", 2)];
    for &(strategy, servers) in if_long_tests_else(all, &all[..2]) {
        let config = |compression| {
            let mut config = Config {
                strategy: parse_strategy(strategy),
                learning_rate: Some(0.02),
                ..small_config(compression)
            };
            config.parameter_server.servers = NonZeroU32::new(servers);
            config
        };
        let exact = train_on_hosts(4, &config("none")).report;
        let codecs = if_long_tests_else(&["bf16", "int8", "int8-stochastic"][..], &["int8"]);
        for codec in codecs {
            let found = train_on_hosts(4, &config(codec)).report;
            println!("{strategy} {codec}: loss {} and {}", found.train_loss, exact.train_loss);
            // Rank 0 sends its shard in each reply to a push, with 2 bytes for each parameter instead of 4.
            let replies = found.steps * if strategy == "ps-sync" { 4 - u64::from(servers) } else { 1 };
            let expected = 2 * replies * (found.parameters as u64 / u64::from(servers));
            let saved = exact.bytes_sent - found.bytes_sent;
            assert!(saved * 10 > expected * 9, "{strategy} {codec}: {saved} of {expected} bytes");
            assert!(found.train_loss < exact.train_loss * 1.3, "{strategy} {codec}");
        }
    }
}

/// Returns the names of the tensors of the memory of compression in the checkpoint.
pub(crate) fn memory_tensors(directory: &Path) -> Vec<String> {
    let bytes = std::fs::read(directory.join(CHECKPOINT_FILE_NAME)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<String> =
        tensors.names().into_iter().filter(|name| name.starts_with("compression")).map(Into::into).collect();
    names.sort();
    names
}

/// Returns what each rank has not sent, from the checkpoint.
pub(crate) fn residuals(directory: &Path) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(directory.join(CHECKPOINT_FILE_NAME)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &String| {
        let data = tensors.tensor(name).unwrap().data();
        data.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let names = memory_tensors(directory);
    names.iter().filter(|name| name.starts_with("compression.residual")).map(read).collect()
}

/// After many steps that send few elements, the residuals are much larger than the gradients of the two steps of the resumed run.
/// If the residual of a rank were lost, the sum would change by minus this residual.
#[test]
#[ignore = "runs with tools/test --full"]
fn the_sum_of_residuals_is_kept_on_another_number_of_ranks() {
    let sum = |residuals: &[Vec<f32>], element: usize| -> f32 {
        residuals.iter().map(|residual| residual[element]).sum()
    };
    for n in [2, 4] {
        let directory = tempfile::tempdir().unwrap();
        let config = |epochs, existing| Config {
            checkpoint: Some(checkpoint_in(directory.path(), existing)),
            learning_rate: Some(1e-6),
            epochs: Some(epochs),
            ..small_config("topk:0.0001")
        };
        train_on_hosts(3, &config(4, ExistingCheckpoint::Refuse));
        let before = residuals(directory.path());
        for summary in run_on_hosts(n, &config(5, ExistingCheckpoint::Resume), Some(1)) {
            assert!(summary.unwrap().report.stopped);
        }
        let after = residuals(directory.path());
        assert_eq!((before.len(), after.len()), (3, n as usize));
        for (rank, residual) in before.iter().enumerate() {
            let change = |element| -> f32 { sum(&after, element) - sum(&before, element) };
            let along: f32 =
                residual.iter().enumerate().map(|(element, value)| value * change(element)).sum();
            // -1 if the residual of this rank were lost.
            let part = along / residual.iter().map(|value| value * value).sum::<f32>();
            println!("{n} ranks: the sum has changed by {part} of the residual of rank {rank}");
            assert!(part.abs() < 0.4, "{n} ranks, rank {rank}: {part}");
        }
    }
}

#[test]
fn a_run_resumes_on_another_number_of_ranks_and_with_another_codec() {
    let directory = tempfile::tempdir().unwrap();
    let config = |codec, epochs, existing| Config {
        checkpoint: Some(checkpoint_in(directory.path(), existing)),
        epochs: Some(epochs),
        ..small_config(codec)
    };
    train_on_hosts(3, &config("powersgd:2", 1, ExistingCheckpoint::Refuse));
    let [factors, residual] = ["compression.factors", "compression.residual"];
    let residuals = |n: usize| (0..n).map(|rank| format!("{residual}.{rank}")).collect::<Vec<_>>();
    assert_eq!(memory_tensors(directory.path()), [&[factors.into()][..], &residuals(3)].concat());
    train_on_hosts(2, &config("powersgd:2", 2, ExistingCheckpoint::Resume));
    assert_eq!(memory_tensors(directory.path()), [&[factors.into()][..], &residuals(2)].concat());
    train_on_hosts(4, &config("powersgd:2", 3, ExistingCheckpoint::Resume));
    assert_eq!(memory_tensors(directory.path()), [&[factors.into()][..], &residuals(4)].concat());
    let found = train_on_hosts(2, &config("none", 4, ExistingCheckpoint::Resume));
    assert_eq!(memory_tensors(directory.path()), Vec::<String>::new());
    assert!(found.report.train_loss < 0.3, "{}", found.report.train_loss);
}

#[test]
fn options_that_do_not_fit_are_refused_with_a_reason() {
    let source = DataSource::Digits;
    for (options, expected) in [
        ("--compression int9", "--compression `int9` is not one of none, fp16"),
        ("--compression topk:2", "`2` is not a fraction"),
        ("--compression-tensor layers.0", "it must be PATTERN=CODEC"),
        ("--compression-tensor layers.0=zip", "--compression-tensor layers.0=zip: `zip` is not one of"),
        ("--compression int8 --compression-exclude a[", "the pattern `a[`"),
        ("--compression-exclude bias", "needs --compression"),
        (
            "--compression bf16 --compression-exclude conv",
            "matches no tensor of the model; its tensors are layers.0",
        ),
        ("--compression int8 --reproducible", "leave out --compression"),
        ("--compression auto:7", "`7` is not a fraction"),
        ("--compression auto --strategy ps-sync", "ps-sync; pass bf16, fp16"),
        ("--compression ef21:bf16", "ef21 applies to fp8-e4m3"),
        ("--compression ef21 --shard-optimizer", "ef21:int4 does not apply to --shard-optimizer"),
        ("--compression signsgd --strategy local-sgd:2", "pass --compression onebit"),
        ("--compression int8 --strategy gossip", "gossip, which sends f32"),
        ("--compression topk --strategy ps-sync", "ps-sync; pass bf16, fp16"),
        ("--compression int8 --compression-exclude bias --strategy ps-async", "leave them out"),
    ] {
        let mut arguments = vec!["-n", "2", "ringtrain", "--epochs", "1"];
        arguments.extend(options.split(' '));
        let done = run_program(&mut ringrun(&arguments));
        assert_eq!(done.code(), Some(2), "{options} with {source}: {done:?}");
        assert!(done.stderr().contains(expected), "{options}: {done:?}");
    }
}

/// Within a host, `auto` sends nothing encoded. Regression test: it divided the gradients into more sums than a run without
/// compression, so steps took longer.
#[test]
fn auto_on_one_host_does_the_same_operations_as_no_compression() {
    let [exact, auto] = ["none", "auto"].map(|compression| {
        let config = small_config(compression);
        let results = TestTransport::Tcp.run(2, move |mut group| {
            // How many messages a rank sends to measure its links when it joins depends on the load.
            let before = group.statistics().operations;
            let report =
                run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver).unwrap().report;
            (report.parameters_hash, group.statistics().operations - before, report.compressed)
        });
        results.into_iter().next().unwrap()
    });
    assert_eq!((&auto.0, auto.1), (&exact.0, exact.1));
    let report = auto.2.unwrap();
    assert!(report.choices.is_empty() && report.encoded_bytes == 0, "{report:?}");
}

/// Regression test: a run that could not compress anything printed that 0.0 MB became 0.0 MB.
#[test]
fn a_run_on_one_host_says_why_it_compressed_nothing() {
    for (options, expected) in [
        ("--compression int8", "; compression had no effect, because all ranks share memory\n"),
        (
            "--compression int8 --strategy ps-sync",
            "; compression had no effect, because all ranks share memory\n",
        ),
        (
            "--compression auto --transport tcp",
            "; auto sent exact elements, because all ranks are on one host\n",
        ),
    ] {
        let mut arguments = vec!["-n", "2", "ringtrain", "--data", "synthetic:64x64", "--epochs", "1"];
        arguments.extend(["--model", "mlp:32"].into_iter().chain(options.split(' ')));
        let done = run_program(&mut ringrun(&arguments));
        assert!(done.code() == Some(0) && done.stdout().contains(expected), "{options}: {done:?}");
    }
}
