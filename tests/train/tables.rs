//! Tests of training on tables with text columns and missing values.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use ringtrain::Group;
use ringtrain::train::data::{ColumnInputs, DataSource, LoadOptions, MissingPolicy, TableOptions};
use ringtrain::train::{CheckpointSettings, Config, ExistingCheckpoint, run};

use super::library::{PrintedLines, config, train};
use super::program::{ringtrain_stdout, run_ringtrain_in};

/// Writes a table whose target y is 2 x + (the effect of `carrier`). In rows without x, y is 2 * 5 - 5 + (the effect
/// of `carrier`). Every tenth y is missing.
fn write_table(directory: &Path) -> PathBuf {
    let mut text = String::from("\u{feff}id;x;carrier;y\r\n");
    for row in 0..500_u32 {
        let (carrier, effect) = [("UA", 10.0), ("AA", -7.0), ("B6", 0.5)][row as usize * 7 % 3];
        let x = f64::from(row * 13 % 101) / 10.0;
        let is_missing = row % 9 == 4;
        let y = if is_missing { 2.0 * 5.0 - 5.0 } else { 2.0 * x } + effect;
        let x = if is_missing { "NA".into() } else { x.to_string() };
        let y = if row % 10 == 0 { String::new() } else { y.to_string() };
        writeln!(text, "N{row};{x};{carrier};{y}").unwrap();
    }
    let path = directory.join("table.csv");
    std::fs::write(&path, text).unwrap();
    path
}

fn table_config(path: PathBuf, missing: MissingPolicy) -> Config {
    let table = TableOptions { missing, drop: vec!["id".into()], ..TableOptions::default() };
    Config { source: DataSource::Csv(path), target: Some("y".into()), table, ..config() }
}

#[test]
fn text_columns_and_missing_values_are_used_as_features() {
    let directory = tempfile::tempdir().unwrap();
    let path = write_table(directory.path());
    let mut scores = Vec::new();
    for missing in [MissingPolicy::Drop, MissingPolicy::Mean, MissingPolicy::Indicator] {
        let mut lines = PrintedLines(Vec::new());
        let config = table_config(path.clone(), missing);
        let summary = run(&mut Group::solo(), &config, &AtomicBool::new(false), &mut lines).unwrap();
        let lines = lines.0.join("\n");
        for expected in [
            "dropped 50 of 500 rows, because their target `y` is missing",
            "column `carrier` holds text with 3 distinct values: one input for each value",
            "which is not an integer: treated as numbers",
        ] {
            assert!(lines.contains(expected), "{expected}: {lines}");
        }
        scores.push((
            summary.report.test_r2.unwrap(),
            summary.report.train_samples + summary.report.test_samples,
        ));
    }
    let [(drop, drop_rows), (mean, mean_rows), (indicator, indicator_rows)] = scores[..] else {
        panic!("{scores:?}")
    };
    assert!(drop > 0.9999 && indicator > 0.9999 && mean < 0.999, "{scores:?}");
    assert_eq!((drop_rows, mean_rows, indicator_rows), (400, 450, 450));
    let error = train(&table_config(path, MissingPolicy::Error)).unwrap_err().to_string();
    assert!(error.contains("table.csv: line 6, column `x`: the value is missing"), "{error}");
}

#[test]
fn a_run_on_a_table_resumes_only_with_the_same_columns() {
    let directory = tempfile::tempdir().unwrap();
    let path = write_table(directory.path());
    let with = |existing| Config {
        epochs: Some(2),
        checkpoint: Some(CheckpointSettings::new(directory.path().join("saved"), existing)),
        ..table_config(path.clone(), MissingPolicy::Mean)
    };
    train(&with(ExistingCheckpoint::Refuse)).unwrap();
    train(&Config { epochs: Some(3), ..with(ExistingCheckpoint::Resume) }).unwrap();
    let change = |change: fn(&mut TableOptions)| {
        let mut config = with(ExistingCheckpoint::Resume);
        change(&mut config.table);
        train(&config).unwrap_err().to_string()
    };
    for (error, expected) in [
        (
            change(|table| table.missing = MissingPolicy::Indicator),
            "--missing mean, but this run has --missing indicator",
        ),
        (change(|table| table.drop.push("carrier".into())), "(--features, --drop) x,carrier, but this run"),
        (
            change(|table| table.categorical = vec!["x".into()]),
            "--categorical , but this run has --categorical x",
        ),
        (
            change(|table| table.categories_max = 2),
            "--max-categories 256, but this run has --max-categories 2",
        ),
    ] {
        assert!(error.contains(expected), "{error}");
    }
}

/// Regression test: before the fix, means and categories were fitted also on the rows that are held out for
/// validation.
#[test]
fn columns_are_encoded_without_the_validation_rows() {
    let directory = tempfile::tempdir().unwrap();
    let text = |fill: &dyn Fn(u32) -> String| {
        let rows = (0..40).map(|row| format!("{},c{row},{}\n", fill(row), f64::from(row) / 3.0));
        "x,name,y\n".to_owned() + &rows.collect::<String>()
    };
    let load = |name: &str, text: String, validation_fraction: Option<f64>| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        let table = TableOptions { missing: MissingPolicy::Mean, ..TableOptions::default() };
        let target = Some("y".into());
        let options =
            LoadOptions { target, table, test_fraction: 0.2, validation_fraction, ..LoadOptions::default() };
        DataSource::Csv(path).load(&options).unwrap()
    };
    let plain = load("a.csv", text(&|row| if row == 0 { String::new() } else { row.to_string() }), Some(0.5));
    let encoding = plain.encoding.unwrap();
    let ColumnInputs::OneHot { categories } = &encoding.columns[1].inputs else { panic!("text is expected") };
    let fitted: Vec<u32> = categories.iter().map(|name| name[1..].parse().unwrap()).collect();
    assert_eq!((plain.train.len(), fitted.len()), (32, 16));
    assert!(
        plain.notes.iter().any(|note| note.starts_with("16 validation rows have a value of `name`")),
        "{:?}",
        plain.notes
    );
    let present = fitted.iter().filter(|&&row| row > 0);
    let mean = f64::from(present.clone().sum::<u32>()) / present.count() as f64;
    assert_eq!(
        encoding.columns[0].inputs,
        ColumnInputs::Number { fill: Some(mean as f32), indicator: false }
    );
    // The rows that are held out for validation do not change the encoding.
    let other = |row: u32| match row {
        0 => String::new(),
        row if fitted.contains(&row) => row.to_string(),
        row => (1000 * row).to_string(),
    };
    assert_eq!(load("b.csv", text(&other), Some(0.5)).encoding.unwrap(), encoding);
    assert_ne!(load("c.csv", text(&other), None).encoding.unwrap(), encoding);
}

/// Regression test: before the fix, the loss was NaN at step 1, and the error said to lower the learning rate.
#[test]
fn a_column_of_tiny_numbers_counts_as_constant() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    let rows = (0..60).map(|row| format!("{row}e-40,{row},{}\n", 2 * row));
    std::fs::write(&path, "tiny,x,y\n".to_owned() + &rows.collect::<String>()).unwrap();
    let config = Config { table: TableOptions::default(), ..table_config(path, MissingPolicy::Error) };
    let mut lines = PrintedLines(Vec::new());
    let summary = run(&mut Group::solo(), &config, &AtomicBool::new(false), &mut lines).unwrap();
    let lines = lines.0.join("\n");
    assert!(summary.report.train_r2.unwrap() > 0.99, "{lines}");
    assert!(
        lines.contains("too little for 32-bit floating-point numbers: `tiny`. They count as constant"),
        "{lines}"
    );
}

/// Regression test: predict and eval used a text that no training row has, and said nothing.
#[test]
fn predict_and_eval_warn_about_texts_that_no_training_row_has() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let write = |name: &str, text: &str| std::fs::write(place.join(name), text).unwrap();
    write("t.csv", "city,x,y\nOslo,1,1.5\nParis,2,2.5\nRome,3,0.5\nOslo,4,4.5\n");
    write("new.csv", "city,x,y\nRome,1,1.5\nBerlin,2,2.5\nOslo,3,1.5\nMadrid,4,5.5\n");
    ringtrain_stdout(place, "--data t.csv --target y --test-fraction 0 --epochs 2 --save-model m");
    for command in ["predict", "eval"] {
        let run = |data: &str| run_ringtrain_in(place, &format!("{command} --model m --data {data}"));
        let (known, new) = (run("t.csv"), run("new.csv"));
        assert!(known.status.success() && known.stderr.is_empty(), "{known:?}");
        let text = String::from_utf8_lossy(&new.stderr);
        let expected = "2 rows have a value of `city` that no training row has (the first is `Berlin` in new.csv, line 3); all \
                        inputs of this column are 0 there\n";
        assert!(new.status.success() && text.ends_with(expected) && text.lines().count() == 1, "{new:?}");
    }
}

/// Regression test: a run without test rows said nothing about the missing test set.
#[test]
fn a_table_that_is_too_small_for_a_test_set_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("t.csv"), "x,y\n1,1.5\n2,2.5\n").unwrap();
    for (fraction, has_note) in [("0.2", true), ("0.5", false), ("0", false)] {
        let line = format!("--data t.csv --target y --epochs 2 --test-fraction {fraction}");
        let printed = ringtrain_stdout(directory.path(), &line);
        let expected = "there is no test set, because --test-fraction 0.2 selects none of the 2 samples";
        assert_eq!(printed.contains(expected), has_note, "{printed}");
        assert_eq!(printed.contains("there is no test set"), has_note, "{printed}");
    }
}

/// Regression test: columns of numbers with decimal commas became categories, and no message named the commas.
#[test]
fn decimal_commas_are_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    std::fs::write(place.join("t.csv"), "a;b;y\n1,5;2;0,5\n2,5;3;1,5\n3;4;0,5\n4,5;5;1,5\n").unwrap();
    let printed = ringtrain_stdout(place, "--data t.csv --target y --epochs 2");
    for expected in [
        "column `a` holds text with 3 distinct values: one input for each value; if these are numbers with a decimal comma, such as \
         `1,5`, replace the commas by decimal points",
        "the target holds text: treated as classes; if these are numbers with a decimal comma, such as `0,5`, ",
    ] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    assert!(!printed.contains("column `b`"), "{printed}");
    let failure = run_ringtrain_in(place, "--data t.csv --target y --model linear");
    assert_eq!(failure.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&failure.stderr).contains("decimal comma, such as `0,5`"), "{failure:?}");
}
