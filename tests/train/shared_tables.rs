//! Tests of tables whose rows are divided over ranks. The ranks are threads of the test.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use ringtrain::train::data::{DataSource, MissingPolicy, TableOptions};
use ringtrain::train::optimizer::Rule;
use ringtrain::train::{
    CompletedStep, Config, EpochRecord, ExistingCheckpoint, Observer, Recipe, Summary, TrainError,
    Validation, run,
};
use ringtrain::{Group, Rank};

use super::library::{PrintedLines, config, train};
use super::strategies::{
    NONE, PlannedInterventions, assert_close, checkpoint_in, parse_strategy, train_and_compare, train_on,
};
use super::util::{if_long_tests_else, ranks};

/// The number of rows of a table. A row has about 370 bytes, so the rows fill four blocks of 64 KiB.
const ROWS: usize = 700;
/// The number of columns of small numbers. These columns make the table larger than 65,536 cells, so that the ranks
/// divide its rows and exchange the rows of an epoch in several windows.
const SMALL_COLUMNS: usize = 110;

/// Writes a table with numbers, large numbers that differ little, texts, missing values and line breaks in cells. The
/// row `special_row` has the text `special_x` in the column `x`.
pub(crate) fn write_table(path: &Path, (special_row, special_x): (usize, &str)) {
    let names = join_columns(|column| format!("small{column},"));
    let mut text = format!("x,time,kind,comment,{names}y\n");
    for row in 0..ROWS {
        let x = match row {
            _ if row == special_row => special_x.to_owned(),
            _ if row % 9 == 4 => String::new(),
            _ => format!("{}", (row * 131 % 997) as f64 / 7.0),
        };
        let kind = ["a", "b", "", "c"][row * 7 % 4];
        let time = 1_700_000_000 + row * 37 % 101;
        let y = if row % 50 == 3 { String::new() } else { format!("{}", (row * 57 % 503) as f64 / 3.0) };
        let comment = "comment ".repeat(5 + row % 5);
        let small = join_columns(|column| format!("{},", row * column % 23));
        writeln!(text, "{x},{time},{kind},\"{comment}\n\",{small}{y}").unwrap();
    }
    std::fs::write(path, text).unwrap();
}

/// Joins the texts of all columns of small numbers.
fn join_columns(text_of_column: impl Fn(usize) -> String) -> String {
    (0..SMALL_COLUMNS).map(text_of_column).collect()
}

pub(crate) fn table_config(path: PathBuf) -> Config {
    let table = TableOptions {
        missing: MissingPolicy::Indicator,
        drop: vec!["comment".into()],
        ..TableOptions::default()
    };
    Config { source: DataSource::Csv(path), target: Some("y".into()), table, ..config() }
}

/// Runs on `n` ranks. `path_of` returns the path of a rank's table. Returns the result and the messages of each rank.
fn run_on_ranks(
    n: u32,
    config: &Config,
    path_of: impl Fn(usize) -> PathBuf + Send + Sync + 'static,
) -> Vec<(Result<Summary, TrainError>, Vec<String>)> {
    let config = config.clone();
    ranks::run(n, move |mut group: Group| {
        let source = DataSource::Csv(path_of(group.rank().index()));
        let mut lines = PrintedLines(Vec::new());
        let summary =
            run(&mut group, &Config { source, ..config.clone() }, &AtomicBool::new(false), &mut lines);
        (summary, lines.0)
    })
}

/// With one sample in each batch, all ranks except one have a gradient of 0, so the sum of the gradients is exact. If
/// the order of the samples and the statistics of the table are the same, each number of ranks gives the same bits.
#[test]
fn each_number_of_ranks_computes_the_same_parameters_from_a_table() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    write_table(&path, (0, "1"));
    let recipe =
        Recipe { validation: Some(Validation { fraction: 0.1, patience: Some(5) }), ..Recipe::default() };
    let config = Config { batch_size: Some(1), epochs: Some(1), recipe, ..table_config(path.clone()) };
    let mut lines = PrintedLines(Vec::new());
    let alone = run(&mut Group::solo(), &config, &AtomicBool::new(false), &mut lines).unwrap();
    let is_about_data = |line: &&String| line.contains("rows") || line.contains("column");
    let notes: Vec<&String> = lines.0.iter().filter(is_about_data).collect();
    assert!(notes.len() >= 3 && notes[0].starts_with("dropped 14 of 700 rows"), "{notes:?}");
    for &n in if_long_tests_else(&[2, 3, 4, 7][..], &[3]) {
        let path = path.clone();
        for (summary, lines) in run_on_ranks(n, &config, move |_| path.clone()) {
            let summary = summary.unwrap();
            assert_eq!(summary.parameters, alone.parameters, "{n} ranks");
            assert_eq!(summary.report.train_samples, alone.report.train_samples);
            assert_eq!(lines.iter().filter(is_about_data).collect::<Vec<_>>(), notes, "{n} ranks");
            let [loss, expected] = [&summary, &alone].map(|summary| summary.report.test_loss.unwrap());
            assert!((loss - expected).abs() < 1e-9 * expected, "{n} ranks: {loss} {expected}");
        }
    }
}

/// Returns a configuration with SGD, with which each strategy computes the parameters of a single process.
fn synchronous_config(path: PathBuf) -> Config {
    Config {
        model: Some("mlp:8".parse().unwrap()),
        rule: Some(Rule::Sgd),
        learning_rate: Some(0.02),
        batch_size: Some(50),
        epochs: Some(2),
        ..table_config(path)
    }
}

/// With `tensor`, `pipeline` and `ps-sync`, each rank holds all rows. With the other strategies, the ranks exchange
/// rows.
#[test]
#[ignore = "runs with tools/test --full"]
fn each_strategy_computes_the_same_from_a_table_as_a_single_process() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    write_table(&path, (0, "1"));
    let config = synchronous_config(path);
    let alone = train(&config).unwrap();
    let all: &[(u32, &str)] = &[
        (3, "local-sgd:1"),
        (2, "tensor"),
        (3, "ps-sync"),
        (3, "allreduce"),
        (2, "pipeline:2"),
        (4, "hybrid:2x2"),
    ];
    for &(n, text) in if_long_tests_else(all, &all[..3]) {
        let found = train_and_compare(n, &Config { strategy: parse_strategy(text), ..config.clone() });
        assert_close(&found.parameters, &alone.parameters, text);
        assert_eq!(found.report.train_samples, alone.report.train_samples, "{text}");
    }
}

/// With `replicate_data`, each rank reads all rows, so the ranks send each other no rows.
#[test]
#[ignore = "runs with tools/test --full"]
fn ranks_with_all_rows_take_the_same_steps_and_send_fewer_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    write_table(&path, (0, "1"));
    let divided = synchronous_config(path);
    let replicated = Config { replicate_data: true, ..divided.clone() };
    let [divided, replicated] = [divided, replicated].map(|config| train_and_compare(3, &config));
    assert_eq!(replicated.parameters, divided.parameters);
    let saved = divided.report.bytes_sent.checked_sub(replicated.report.bytes_sent).unwrap();
    // In each of the 2 epochs, a rank sends 2/3 of its third of the training rows, whose values have 4 bytes.
    let rows_bytes = 2 * 4 * (divided.report.train_samples * SMALL_COLUMNS) as u64 * 2 / 9;
    assert!(saved > rows_bytes, "{saved} bytes saved, {rows_bytes} bytes of rows");
}

/// Records the rows of the first batch on this rank.
pub(crate) struct FirstBatchRows(pub(crate) Vec<u32>);

impl Observer for FirstBatchRows {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn batch_started(&mut self, epoch: u64, batch: u64, rows: &[u32]) {
        if (epoch, batch) == (0, 0) {
            rows.clone_into(&mut self.0);
        }
    }
    fn step_taken(&mut self, _: &CompletedStep) {}
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// If a batch has all rows, each rank processes the rows that it holds: every second block. A rank that held all
/// rows would process a contiguous part of them.
#[test]
fn each_of_two_ranks_holds_every_second_block_of_rows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    write_table(&path, (0, "1"));
    let config = Config { batch_size: Some(ROWS), ..synchronous_config(path) };
    let alone = train(&config).unwrap();
    let results = ranks::run(2, move |mut group: Group| {
        let mut recorder = FirstBatchRows(Vec::new());
        let summary = run(&mut group, &config, &AtomicBool::new(false), &mut recorder).unwrap();
        (summary, recorder.0)
    });
    let mut rows = Vec::new();
    for (summary, held) in results {
        assert_close(&summary.parameters, &alone.parameters, "a batch of all rows");
        let gaps = held.windows(2).filter(|pair| pair[1] > pair[0] + 1).count();
        assert!(gaps > 0, "the rows of a rank are one contiguous part: {held:?}");
        rows.extend(held);
    }
    rows.sort_unstable();
    assert!(rows.into_iter().eq(0..alone.report.train_samples as u32));
}

/// The second run begins its first window in the middle of the epoch. With one sample in each batch, each number of
/// ranks gives the same bits.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_run_on_a_table_resumes_within_an_epoch_on_another_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    write_table(&path, (0, "1"));
    let config = Config { batch_size: Some(1), epochs: Some(1), ..synchronous_config(path) };
    let expected = train(&config).unwrap();
    let first = Config {
        checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Refuse)),
        ..config.clone()
    };
    for stopped in train_on(3, &first, PlannedInterventions { stop: Some((Rank::new(1), 201)), ..NONE }) {
        let report = stopped.unwrap().report;
        assert!(report.stopped && report.steps < expected.report.steps, "{report:?}");
    }
    let resume =
        Config { checkpoint: Some(checkpoint_in(directory.path(), ExistingCheckpoint::Resume)), ..config };
    let found = train_and_compare(2, &resume);
    assert_eq!(found.report.steps, expected.report.steps);
    assert_eq!(found.parameters, expected.parameters);
}

/// Only the rank that parses the damaged cell finds the damage.
#[test]
fn all_ranks_name_a_damaged_cell() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    // This row is in the third block, which the third rank parses. Each row has two lines.
    let row = (5 << 16) / 2 / 370;
    write_table(&path, (row, "bad"));
    let expected = format!("line {}, column `x`: `bad` is not a number", 2 * row + 2);
    let results = run_on_ranks(3, &table_config(path.clone()), move |_| path.clone());
    for (index, (result, _)) in results.iter().enumerate() {
        let error = result.as_ref().unwrap_err().to_string();
        assert!(error.contains(&expected), "{error} / {expected}");
        assert_eq!(error.starts_with("rank "), index != 2, "{error}");
    }
}

/// The first 1,000 rows decide that the column `x` holds numbers. From row 300,000 on, the column holds texts. Each rank names
/// the first text among the rows that it parses, and one rank parses row 300,000.
#[test]
#[ignore = "runs with tools/test --full"]
fn all_ranks_name_the_row_at_which_a_column_changes_its_type() {
    const CHANGE_ROW: usize = 300_000;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    let mut text = "kind,x,y\n".to_owned();
    for row in 1..=CHANGE_ROW + 20_000 {
        let x = if row < CHANGE_ROW { format!("{}", row % 997) } else { format!("text {row}") };
        writeln!(text, "{},{x},{}", ["a", "b", "c"][row % 3], row % 101).unwrap();
    }
    std::fs::write(&path, text).unwrap();
    let start = format!("{}: line ", path.display());
    let config = Config { source: DataSource::Csv(path.clone()), target: Some("y".into()), ..config() };
    let mut lines = Vec::new();
    for (result, _) in run_on_ranks(3, &config, move |_| path.clone()) {
        let error = result.unwrap_err().to_string();
        let (line, rest) = error.strip_prefix(&start).unwrap().split_once(", column `x`: ").unwrap();
        lines.push(line.parse::<usize>().unwrap());
        let row = lines[lines.len() - 1] - 1;
        assert!(rest.starts_with(&format!("`text {row}` is not a number")), "{error}");
        assert!(row >= CHANGE_ROW && rest.contains("pass --categorical x"), "{error}");
    }
    assert!(lines.contains(&(CHANGE_ROW + 1)), "{lines:?}");
}

/// The difference is in a row that only one rank parses.
#[test]
fn ranks_with_different_files_end_with_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let paths = ["one.csv", "other.csv"].map(|name| directory.path().join(name));
    write_table(&paths[0], (0, "1"));
    write_table(&paths[1], (0, "2"));
    let config = table_config(paths[0].clone());
    for (result, _) in run_on_ranks(3, &config, move |rank| paths[rank / 2].clone()) {
        let error = result.unwrap_err();
        assert!(matches!(&error, TrainError::DataDiffer { rank, .. } if rank.get() == 2), "{error}");
    }
}
