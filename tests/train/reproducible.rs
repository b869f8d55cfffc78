//! Tests of `--reproducible`: the parameters have the same bits for every number of ranks.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ringtrain::Compression;
use ringtrain::train::data::DataSource;
use ringtrain::train::model::ModelSpec;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    ClassWeights, Config, ExistingCheckpoint, Recipe, SHARDS_DEFAULT, SilentObserver, Summary, Validation,
    run,
};

use super::cnn::write_array;
use super::library::{StopAfter, config, train};
use super::shared_tables::{table_config, write_table};
use super::strategies::{assert_close, checkpoint_in, parse_strategy};
use super::util::ranks::TestTransport;
use super::util::{if_long_tests_else, ringrun, run as run_program, runs_long_tests};

fn reproducible_recipe() -> Recipe {
    Recipe { reproducible_shards: Some(SHARDS_DEFAULT), ..Recipe::default() }
}

/// Returns a reproducible configuration for 120 training samples. The batches have 35, 35, 35 and 15 samples, so their
/// shards differ in length.
fn reproducible_config(model: &str) -> Config {
    Config {
        model: Some(model.parse::<ModelSpec>().unwrap()),
        rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
        batch_size: Some(35),
        epochs: Some(1),
        recipe: reproducible_recipe(),
        source: table(150),
        ..config()
    }
}

/// Writes 150 images of three classes.
pub(crate) fn write_images(directory: &Path) -> DataSource {
    let [images, classes] = ["images.npy", "classes.npy"].map(|name| directory.join(name));
    let pixels: Vec<u8> = (0..150 * 64_u32).map(|pixel| (pixel * pixel % 251) as u8).collect();
    write_array(&images, &[150, 8, 8], &pixels);
    write_array(&classes, &[150], &[0, 1, 2].repeat(50));
    DataSource::Npy(images, classes)
}

fn table(rows: usize) -> DataSource {
    DataSource::Synthetic { rows, columns: 3 }
}

/// Trains on `n` ranks and returns the summary of rank 0. Stops the run after `stop` steps.
fn train_over(transport: TestTransport, n: u32, config: &Config, stop: Option<usize>) -> Summary {
    let config = config.clone();
    let mut summaries = transport.run(n, move |mut group| {
        let flag = Arc::new(AtomicBool::new(false));
        match stop {
            Some(steps) => run(&mut group, &config, &flag, &mut StopAfter { steps, stop: &flag }),
            None => run(&mut group, &config, &flag, &mut SilentObserver),
        }
        .unwrap()
    });
    summaries.swap_remove(0)
}

/// Returns everything in a summary that must not depend on the number of ranks.
fn comparable(summary: &Summary) -> (String, Vec<u64>) {
    let report = &summary.report;
    let mut numbers = vec![report.train_loss, report.test_loss.unwrap(), report.lr];
    numbers.extend(report.validation_loss);
    numbers.extend(report.test_r2);
    for record in &report.history {
        numbers.extend([record.train_loss, record.test_loss.unwrap()]);
        numbers.extend(record.validation_loss);
    }
    (report.parameters_hash.clone(), numbers.into_iter().map(f64::to_bits).collect())
}

#[test]
fn every_number_of_ranks_and_transport_gives_the_same_bits() {
    let (tcp, shm, hosts) = (TestTransport::Tcp, TestTransport::Shm, TestTransport::Hosts);
    let clipped = Recipe {
        clip_norm: Some(0.01),
        label_smoothing: 0.1,
        class_weights: ClassWeights::Balanced,
        ..reproducible_recipe()
    };
    let directory = tempfile::tempdir().unwrap();
    let images = write_images(directory.path());
    let table = reproducible_config("mlp:12,5");
    let momentum = Some(Rule::Momentum { momentum: 0.9 });
    let cnn = reproducible_config("cnn:conv2x3,pool2,dropout0.5,dense8");
    let cnn = Config { source: images.clone(), rule: momentum, ..cnn };
    let softmax = Config { source: images, recipe: clipped, ..reproducible_config("softmax") };
    let all = &[(2, tcp), (3, shm), (4, hosts), (8, shm)];
    let cases = [
        (table, if runs_long_tests() { &all[..] } else { &[(3, tcp)] }),
        (cnn, if runs_long_tests() { all } else { &[(3, shm)] }),
        (softmax, if runs_long_tests() { all } else { &[(3, hosts)] }),
    ];
    for (config, runs) in cases {
        let alone = train(&config).unwrap();
        for &(n, transport) in runs {
            let found = train_over(transport, n, &config, None);
            assert_eq!(comparable(&found), comparable(&alone), "{:?} on {n} ranks", config.model);
            assert!(found.parameters.iter().zip(&alone.parameters).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
}

/// On several ranks, each rank holds only a part of the rows of this table. By default, a linear model trains with batches
/// of all rows.
#[test]
fn tables_that_are_divided_among_ranks_give_the_same_bits() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    write_table(&path, (0, "1"));
    let table = Config { recipe: reproducible_recipe(), ..table_config(path) };
    // It takes long to compute the learning rate of a linear model.
    let learning_rate = if runs_long_tests() { None } else { Some(0.05) };
    let whole_batches = Config { learning_rate, epochs: Some(2), ..table.clone() };
    let mlp = reproducible_config("mlp:4");
    let several_windows =
        Config { model: mlp.model, rule: mlp.rule, batch_size: Some(100), epochs: Some(1), ..table };
    for config in [whole_batches, several_windows] {
        let alone = train(&config).unwrap();
        for n in if_long_tests_else(&[2, 3, 4, 8][..], &[3]) {
            let found = train_over(TestTransport::Shm, *n, &config, None);
            assert_eq!(comparable(&found), comparable(&alone), "{:?} on {n} ranks", config.model);
        }
    }
}

/// A run of 3 ranks without the option gives other bits, so the comparisons of these tests can fail.
#[test]
fn a_reproducible_run_equals_an_ordinary_run_except_for_rounding() {
    let config = Config { rule: Some(Rule::Sgd), ..reproducible_config("mlp:8") };
    let reproducible = train(&config).unwrap();
    let ordinary = Config { recipe: Recipe::default(), ..config };
    let alone = train(&ordinary).unwrap();
    assert_close(&reproducible.parameters, &alone.parameters, "mlp:8");
    let found = train_over(TestTransport::Tcp, 3, &ordinary, None);
    assert_ne!(found.report.parameters_hash, alone.report.parameters_hash);
}

/// `accelerated` computes its learning rate from the data. Without `epochs`, it also ends the run by the loss. With 3 shards
/// of a batch of 2 samples, a shard is empty.
#[test]
fn decisions_of_a_run_do_not_depend_on_the_number_of_ranks() {
    let source = table(30);
    let accelerated = Config {
        source: source.clone(),
        model: Some("linear".parse().unwrap()),
        epochs: if runs_long_tests() { None } else { Some(10) },
        recipe: reproducible_recipe(),
        ..config()
    };
    let validation = Validation { fraction: 0.2, patience: Some(2) };
    let small_shards =
        Recipe { validation: Some(validation), reproducible_shards: NonZeroU32::new(3), ..Recipe::default() };
    let stopped_early = Config {
        source,
        batch_size: Some(2),
        epochs: Some(2),
        recipe: small_shards,
        ..reproducible_config("mlp:4")
    };
    for config in [accelerated, stopped_early] {
        let alone = train(&config).unwrap();
        let found = train_over(TestTransport::Shm, 3, &config, None);
        assert_eq!(comparable(&found), comparable(&alone));
        assert_eq!(
            (found.report.steps, found.report.best_epoch),
            (alone.report.steps, alone.report.best_epoch)
        );
    }
}

#[test]
fn micro_batches_do_not_change_the_bits() {
    let config = reproducible_config("mlp:8");
    let expected = comparable(&train(&config).unwrap());
    for &count in if_long_tests_else(&[2, 3, 100][..], &[3, 100]) {
        let config = Config { micro_batches: NonZeroU32::new(count).unwrap(), ..config.clone() };
        assert_eq!(comparable(&train(&config).unwrap()), expected, "{count} micro-batches");
    }
}

#[test]
fn a_run_that_resumes_on_another_number_of_ranks_keeps_the_bits() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = |existing| Some(checkpoint_in(directory.path(), existing));
    let config = Config { epochs: Some(3), ..reproducible_config("mlp:8") };
    let expected = train(&config).unwrap();
    for (n, stop, existing) in [
        (3, Some(1), ExistingCheckpoint::Refuse),
        (1, Some(3), ExistingCheckpoint::Resume),
        (2, None, ExistingCheckpoint::Resume),
    ] {
        let part = Config { checkpoint: checkpoint(existing), ..config.clone() };
        let found = train_over(TestTransport::Shm, n, &part, stop);
        assert_eq!(found.report.stopped, stop.is_some());
        if stop.is_none() {
            assert_eq!(comparable(&found), comparable(&expected));
        }
    }
    for recipe in
        [Recipe::default(), Recipe { reproducible_shards: NonZeroU32::new(4), ..reproducible_recipe() }]
    {
        let changed = Config { recipe, checkpoint: checkpoint(ExistingCheckpoint::Resume), ..config.clone() };
        let error = train(&changed).unwrap_err().to_string();
        assert!(error.contains("--reproducible and --shards"), "{error}");
    }
}

#[test]
fn options_that_prevent_reproducible_bits_are_refused() {
    let config = reproducible_config("mlp:16");
    let recipe = |scale_learning_rate, shards| Recipe {
        scale_learning_rate,
        reproducible_shards: NonZeroU32::new(shards),
        ..Recipe::default()
    };
    let all_strategies = [
        "model-average",
        "local-sgd:2",
        "diloco:2",
        "ps-sync",
        "ps-async",
        "gossip",
        "tensor",
        "pipeline:1",
        "hybrid:1x1",
    ];
    for text in all_strategies {
        let error =
            train(&Config { strategy: parse_strategy(text), ..config.clone() }).unwrap_err().to_string();
        assert!(error.contains("--reproducible is for --strategy allreduce"), "{text}: {error}");
    }
    for (config, expected) in [
        (Config { compression: Compression::Bf16, ..config.clone() }, "leave out --compression"),
        (Config { recipe: recipe(true, 8), ..config.clone() }, "leave out --scale-lr"),
        (
            Config { recipe: recipe(false, 1025), ..config.clone() },
            "--shards 1025: it must be from 1 to 1024",
        ),
    ] {
        let error = train(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let few = Config { recipe: recipe(false, 2), ..config };
    for result in TestTransport::Tcp.run(3, move |mut group| {
        run(&mut group, &few, &AtomicBool::new(false), &mut SilentObserver).unwrap_err().to_string()
    }) {
        assert!(result.contains("start at most 2 ranks, or start a new run with --shards 3"), "{result}");
    }
}

/// The options also work on the command line, in a file of options, and in a resumed run.
#[test]
fn ringtrain_prints_the_same_hash_on_every_number_of_ranks() {
    const OPTIONS: &str = "
        reproducible = true
        shards = 5
        data = \"synthetic:150x3\"
        model = \"mlp:8\"
        batch-size = 35
        epochs = 1
    ";
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("run.toml");
    std::fs::write(&file, OPTIONS).unwrap();
    let hash = |n: &str, arguments: &[&str]| {
        let done = run_program(&mut ringrun(&[&["-n", n, "ringtrain"], arguments].concat()));
        let stdout = done.stdout();
        assert_eq!(done.code(), Some(0), "{done:?}");
        stdout.split("parameters_hash ").nth(1).map(|rest| rest[..32].to_owned()).unwrap()
    };
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let counts = if runs_long_tests() { &["1", "2", "3", "4", "5"][..] } else { &["1", "3"] };
    let config_file = path(&file);
    let hashes: Vec<String> = counts.iter().map(|n| hash(n, &["--config", &config_file])).collect();
    assert!(hashes.iter().all(|found| *found == hashes[0]), "{hashes:?}");
    let done = run_program(&mut ringrun(&["-n", "1", "ringtrain", "--shards", "4"]));
    assert!(done.stderr().contains("--shards needs --reproducible"), "{done:?}");
}
