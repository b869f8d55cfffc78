//! Tests of samples in temporary files.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use ringtrain::Group;
use ringtrain::train::data::DataSource;
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{Config, ExistingCheckpoint, Recipe, Validation, run};

use super::library::{PrintedLines, StopAfter, config, train};
use super::shared_formats::{Content, FORMATS, GOOD, SAMPLES, config_of};
use super::shared_tables::{table_config, write_table};
use super::strategies::{NONE, assert_close, checkpoint_in, parse_strategy, train_and_compare, train_on};
use super::util::{if_long_tests_else, run as finish, runs_long_tests};

const RINGRUN: &str = env!("CARGO_BIN_EXE_ringrun");
const RINGTRAIN: &str = env!("CARGO_BIN_EXE_ringtrain");

/// Returns the configuration of a run that holds the rows of `directory/table.csv` in temporary files. With one sample in
/// each batch, each number of ranks computes the same bits.
fn stream_config(directory: &Path) -> Config {
    let path = directory.join("table.csv");
    if !path.exists() {
        write_table(&path, (0, "1"));
    }
    Config {
        batch_size: Some(1),
        epochs: Some(1),
        stream_directory: Some(directory.to_owned()),
        ..table_config(path)
    }
}

/// The table is smaller than a window of the shuffle, so the order of the samples is the same as without `--stream`.
#[test]
fn streamed_rows_give_the_same_parameters_as_rows_in_memory() {
    let directory = tempfile::tempdir().unwrap();
    let recipe =
        Recipe { validation: Some(Validation { fraction: 0.1, patience: Some(5) }), ..Recipe::default() };
    let streamed = Config { recipe, ..stream_config(directory.path()) };
    let mut lines = [const { Vec::new() }; 2].map(PrintedLines);
    let in_memory = Config { stream_directory: None, ..streamed.clone() };
    let [memory_lines, streamed_lines] = &mut lines;
    let expected = run(&mut Group::solo(), &in_memory, &AtomicBool::new(false), memory_lines).unwrap();
    let found = run(&mut Group::solo(), &streamed, &AtomicBool::new(false), streamed_lines).unwrap();
    assert_eq!(found.parameters, expected.parameters);
    assert_eq!(found.report.test_loss, expected.report.test_loss);
    assert_eq!(found.report.train_loss, expected.report.train_loss);
    let [memory_notes, streamed_notes] = lines.map(|lines| {
        let is_about_data = |line: &String| line.contains("rows") || line.contains("column");
        lines.0.into_iter().filter(is_about_data).collect::<Vec<_>>()
    });
    assert!(memory_notes.len() >= 3);
    assert_eq!(streamed_notes, memory_notes);
    for &n in if_long_tests_else(&[2, 3, 4, 7][..], &[3]) {
        assert_eq!(train_and_compare(n, &streamed).parameters, expected.parameters, "{n} ranks");
    }
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["table.csv"], "the temporary files have no names");
}

/// A run with a batch of all samples is refused only if the training set is not in memory.
#[test]
#[ignore = "runs with tools/test --full"]
fn samples_of_each_format_are_not_in_memory() {
    for format in &FORMATS {
        let (directory, stream_directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let streamed = Config {
            rule: Some(Rule::Sgd),
            batch_size: Some(SAMPLES),
            stream_directory: Some(stream_directory.path().to_owned()),
            ..config_of(format, (format.write)(directory.path(), GOOD))
        };
        let error = train(&streamed).unwrap_err().to_string();
        assert!(error.contains("so --stream would hold all samples in memory"), "{}: {error}", format.name);
        let gossip = Config { strategy: parse_strategy("gossip"), ..streamed };
        for result in train_on(2, &gossip, NONE) {
            let error = result.unwrap_err().to_string();
            assert!(
                error.contains("so --stream would hold all samples in memory"),
                "{}: {error}",
                format.name
            );
        }
    }
}

/// The training set has 1.3 MB of pixels: two blocks of the shuffle in blocks. The second run begins within an epoch.
#[test]
#[ignore = "runs with tools/test --full"]
fn samples_of_several_blocks_have_the_same_order_on_each_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let images = FORMATS.iter().find(|format| format.name == "images in .npy files").unwrap();
    let in_memory = Config {
        rule: Some(Rule::Sgd),
        learning_rate: Some(1e-5),
        batch_size: Some(1),
        ..config_of(images, (images.write)(directory.path(), Content { samples: 400, ..GOOD }))
    };
    let streamed = Config { stream_directory: Some(directory.path().to_owned()), ..in_memory.clone() };
    let expected = train(&streamed).unwrap().parameters;
    assert_ne!(train(&in_memory).unwrap().parameters, expected, "the order differs from the order in memory");
    for &n in if_long_tests_else(&[2, 3, 5][..], &[3]) {
        assert_eq!(train_and_compare(n, &streamed).parameters, expected, "{n} ranks");
    }
    let checkpoint = |existing| Some(checkpoint_in(&directory.path().join("c"), existing));
    let first = Config { checkpoint: checkpoint(ExistingCheckpoint::Refuse), ..streamed.clone() };
    let stop = AtomicBool::new(false);
    let mut observer = StopAfter { steps: 200, stop: &stop };
    assert!(run(&mut Group::solo(), &first, &stop, &mut observer).unwrap().report.stopped);
    let resumed = Config { checkpoint: checkpoint(ExistingCheckpoint::Resume), ..streamed.clone() };
    assert_eq!(train_and_compare(2, &resumed).parameters, expected);
    if !runs_long_tests() {
        return;
    }
    let servers = Config { strategy: parse_strategy("ps-sync"), ..streamed };
    assert_close(&train_and_compare(2, &servers).parameters, &expected, "ps-sync");
}

/// With `tensor`, `ps-sync`, `pipeline` and `hybrid`, each rank writes all rows to its file.
#[test]
#[ignore = "runs with tools/test --full"]
fn each_synchronous_strategy_computes_the_same_from_streamed_rows() {
    let directory = tempfile::tempdir().unwrap();
    let streamed = Config {
        model: Some("mlp:8".parse().unwrap()),
        rule: Some(Rule::Sgd),
        learning_rate: Some(0.02),
        batch_size: Some(50),
        ..stream_config(directory.path())
    };
    let expected = train(&Config { stream_directory: None, ..streamed.clone() }).unwrap();
    let all: &[(u32, &str)] = &[
        (2, "local-sgd:1"),
        (2, "tensor"),
        (3, "ps-sync"),
        (3, "allreduce"),
        (2, "pipeline:2"),
        (4, "hybrid:2x2"),
    ];
    for &(n, text) in if_long_tests_else(all, &all[..3]) {
        let found = train_and_compare(n, &Config { strategy: parse_strategy(text), ..streamed.clone() });
        assert_close(&found.parameters, &expected.parameters, text);
    }
}

/// The table has 72,000 cells, so it is in temporary files. The order of the updates depends on the time.
#[test]
#[ignore = "runs with tools/test --full"]
fn asynchronous_strategies_learn_from_streamed_rows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    let x = |row: usize, column: usize| (row * (31 + 7 * column) % 101) as f64 / 50.0;
    let mut text = String::new();
    for row in 0..1200 {
        (0..60).for_each(|column| write!(text, "{},", x(row, column)).unwrap());
        let y: f64 = (0..60).map(|column| (column % 3) as f64 * x(row, column)).sum();
        writeln!(text, "{y}").unwrap();
    }
    std::fs::write(&path, text).unwrap();
    for (n, strategy) in [(3, "ps-async"), (2, "gossip")] {
        let config = Config {
            source: DataSource::Csv(path.clone()),
            target: Some("60".into()),
            rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
            learning_rate: Some(0.02),
            batch_size: Some(20),
            epochs: Some(4),
            strategy: parse_strategy(strategy),
            stream_directory: Some(directory.path().to_owned()),
            ..config()
        };
        let r2 = train_on(n, &config, NONE).remove(0).unwrap().report.test_r2.unwrap();
        println!("{strategy}: R² {r2}");
        assert!(r2 > 0.8, "{strategy}: {r2}");
    }
}

#[test]
fn options_that_do_not_suit_streamed_rows_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let streamed = stream_config(directory.path());
    let absent = directory.path().join("absent");
    let checkpoint = |existing| Some(checkpoint_in(directory.path(), existing));
    let saved = Config {
        stream_directory: None,
        checkpoint: checkpoint(ExistingCheckpoint::Refuse),
        ..streamed.clone()
    };
    train(&saved).unwrap();
    let digits = Config { source: DataSource::Digits, target: None, ..streamed.clone() };
    for (config, expected) in [
        (Config { stream_directory: Some(absent), ..streamed.clone() }, "absent: No such file or directory"),
        (
            Config { rule: Some(Rule::Accelerated), ..streamed.clone() },
            "--optimizer accelerated uses all samples",
        ),
        (
            Config { batch_size: Some(1000), ..streamed.clone() },
            "--batch-size 1000 is not smaller than the training set",
        ),
        (
            Config { table: config().table, ..digits },
            "--stream is for data in files; leave it out with --data digits",
        ),
        (
            Config { checkpoint: checkpoint(ExistingCheckpoint::Resume), epochs: Some(2), ..streamed },
            "shuffled as a whole, but this run has samples (--stream) shuffled in blocks",
        ),
    ] {
        let error = match config.check() {
            Ok(()) => train(&config).unwrap_err().to_string(),
            Err(problem) => problem,
        };
        assert!(error.contains(expected), "{error} / {expected}");
    }
}

/// Streams a table and sparse rows to a disk of 200 KiB. The encoded rows of the table need 320 KB, and the sparse rows 280 KB.
#[test]
fn a_full_disk_ends_the_run_on_all_ranks_with_an_error() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can mount a small disk");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    write_table(&directory.path().join("table.csv"), (0, "1"));
    let sparse = FORMATS.iter().find(|format| format.name == "sparse rows").unwrap();
    (sparse.write)(directory.path(), GOOD);
    for data in ["table.csv --target y --missing mean --drop comment", "rows.libsvm"] {
        let script = format!(
            "mkdir -p disk && mount -t tmpfs -o size=200k none disk || exit 70
            exec \"$0\" -n 2 \"$1\" --data {data} --stream disk"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, RINGRUN, RINGTRAIN]).current_dir(&directory);
        let done = finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        let stderr = done.stderr();
        if done.code() == Some(70) || stderr.contains("unshare failed") {
            println!("SKIPPED: this user may not mount a disk: {stderr}");
            return;
        }
        assert_eq!(done.code(), Some(4), "{data}: {stderr}");
        let expected = "cannot write a temporary file in disk: No space left on device";
        assert!(
            stderr.contains(expected) && stderr.contains("another directory to --stream"),
            "{data}: {stderr}"
        );
    }
}
