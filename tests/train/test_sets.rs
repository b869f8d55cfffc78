//! Tests of `--test-data`: a test set from a source of its own.

use std::path::{Path, PathBuf};

use ringtrain::train::Config;
use ringtrain::train::data::{DataSource, Dataset, LoadOptions, MissingPolicy, TableOptions};
use serde_json::Value;

use super::cnn::write_array;
use super::library::{config, train};
use super::program::{assert_fails, ringtrain_stdout};
use super::strategies::train_and_compare;

fn write(directory: &Path, name: &str, content: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

fn load(train: &DataSource, test: DataSource, options: LoadOptions) -> Result<Dataset, String> {
    train.load(&LoadOptions { test_source: Some(test), ..options }).map_err(|error| error.to_string())
}

#[test]
fn a_table_is_tested_on_the_rows_of_its_test_files() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name, content| write(directory.path(), name, content);
    let (a, b) = (file("a.csv", "x,name,y\n1,p,1\nNA,q,2\n"), file("b.csv", "x,name,y\n3,p,3\n"));
    let (c, d) = (file("c.csv", "x,name,y\n100,new,4\n,q,5\n9,p,\n"), file("d.csv", "x,name,y\n7,p,6\n"));
    let options = LoadOptions {
        target: Some("y".into()),
        table: TableOptions { missing: MissingPolicy::Mean, ..TableOptions::default() },
        ..LoadOptions::default()
    };
    let found =
        load(&DataSource::CsvFiles(vec![a.clone(), b]), DataSource::CsvFiles(vec![c, d]), options.clone())
            .unwrap();
    assert_eq!((found.train.len(), found.test.len()), (3, 3));
    let inputs = |rows: usize, features: &ringtrain::train::data::Features| {
        let mut inputs = ndarray::Array2::zeros((rows, features.columns()));
        features.write_rows(0..rows, None, inputs.view_mut());
        inputs
    };
    // The columns are `x`, `name=p` and `name=q`. The mean of `x` is that of the training rows.
    assert_eq!(
        inputs(3, &found.train.features),
        ndarray::array![[1.0, 1.0, 0.0], [2.0, 0.0, 1.0], [3.0, 1.0, 0.0]]
    );
    assert_eq!(
        inputs(3, &found.test.features),
        ndarray::array![[100.0, 0.0, 0.0], [2.0, 0.0, 1.0], [7.0, 1.0, 0.0]]
    );
    let notes = found.notes.join("\n");
    for expected in ["dropped 1 of 7 rows", "1 test row has a value of `name` that no training row has"] {
        assert!(notes.contains(expected), "{notes}");
    }
    let empty = file("empty.csv", "x,name,y\n1,p,NA\n");
    let other = file("other.csv", "x,z,y\n1,p,1\n");
    for (train, test, expected) in [
        (&a, &empty, "--test-data"),
        (&empty, &a, "--data holds no row with a target"),
        (&a, &other, "column"),
    ] {
        let sources = [train, test].map(|path| DataSource::Csv(path.clone()));
        let [train, test] = sources;
        let error = load(&train, test, options.clone()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn sparse_rows_and_arrays_are_tested_on_their_test_source() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name, content| DataSource::Libsvm(write(directory.path(), name, content));
    let narrow = file("narrow.libsvm", "1 1:1 2:2\n0 1:3\n1 2:1\n");
    let wide = file("wide.libsvm", "1 5:1\n0 1:2\n");
    for (train, test, rows) in [(&narrow, &wide, (3, 2)), (&wide, &narrow, (2, 3))] {
        let found = load(train, test.clone(), LoadOptions::default()).unwrap();
        assert_eq!((found.train.len(), found.test.len()), rows);
        assert_eq!((found.train.features.columns(), found.test.features.columns()), (5, 5));
    }
    let table = DataSource::Csv(write(directory.path(), "t.csv", "x,y\n1,2\n"));
    let error = load(&narrow, table, LoadOptions::default()).unwrap_err();
    assert!(error.contains("another format"), "{error}");
    let error = load(&DataSource::Digits, DataSource::Digits, LoadOptions::default()).unwrap_err();
    assert!(error.contains("built in"), "{error}");
    let arrays = |name: &str, columns: usize| {
        let path = |part: &str| directory.path().join(format!("{name}-{part}.npy"));
        write_array(&path("x"), &[4, columns], &vec![7; 4 * columns]);
        write_array(&path("y"), &[4], &[0, 1, 0, 1]);
        DataSource::Npy(path("x"), path("y"))
    };
    let (three, four) = (arrays("three", 3), arrays("four", 4));
    assert_eq!(load(&three, three.clone(), LoadOptions::default()).unwrap().test.len(), 4);
    let error = load(&three, four.clone(), LoadOptions::default()).unwrap_err();
    assert!(error.contains("has 4 features, but --data") && error.contains("has 3 features"), "{error}");
    let images = arrays("images", 4);
    write_array(&directory.path().join("images-x.npy"), &[4, 2, 2], &[7; 16]);
    let error = load(&images, four, LoadOptions::default()).unwrap_err();
    assert!(error.contains("has no images, but --data") && error.contains("shape 1x2x2"), "{error}");
}

/// Regression test: before the fix, `ringtrain` trained a model with an output for a class that only the test set has,
/// and the user got no message.
#[test]
fn a_class_that_only_the_test_set_has_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let row = |(x, class): (usize, &&str)| format!("{x},{class}\n");
    let table = |rows: &[&str]| "x,y\n".to_owned() + &rows.iter().enumerate().map(row).collect::<String>();
    write(place, "train.csv", &table(&["a", "b", "a", "b"]));
    write(place, "same.csv", &table(&["b", "b"]));
    write(place, "other.csv", &table(&["a", "c", "d", "c"]));
    write(place, "distinct.csv", &table(&["k", "l", "m", "n", "o", "p", "q", "r", "s", "t"]));
    let unknown = "the class `c` did not occur in training; the classes of the model are a, b";
    let options = "--target y --epochs 1 --save-model m";
    let printed = ringtrain_stdout(place, &format!("--data train.csv --test-data same.csv {options}"));
    assert!(!printed.contains("no training row has"), "{printed}");
    assert_fails(place, "eval --model m --data other.csv", 4, unknown);
    let expected = format!("--test-data other.csv: {unknown}; remove the 3 test rows");
    assert_fails(place, &format!("--data train.csv --test-data other.csv {options}"), 4, &expected);
    let printed = ringtrain_stdout(place, &format!("--data distinct.csv --test-fraction 0.3 {options}"));
    assert!(printed.contains("3 test rows have a class that no training row has ("), "{printed}");
}

/// The ranks hold different rows, and the boundary between the sets lies within the rows of a rank.
#[test]
fn several_ranks_test_on_the_same_rows_as_one_rank() {
    let directory = tempfile::tempdir().unwrap();
    let rows = |count: u32, offset: u32| {
        let row = |i| format!("{},{},{}\n", i % 7, i % 5, 2 * (i % 7) + 3 * (i % 5) + offset);
        "a,b,y\n".to_owned() + &(0..count).map(row).collect::<String>()
    };
    let source = |name, content: String| DataSource::Csv(write(directory.path(), name, &content));
    let config = Config {
        source: source("train.csv", rows(210, 0)),
        test_source: Some(source("test.csv", rows(35, 1))),
        target: Some("y".into()),
        model: Some("linear".parse().unwrap()),
        epochs: Some(50),
        ..config()
    };
    let expected = train(&config).unwrap().report;
    // All targets of the test set are larger by 1, so the mean squared error is 1.
    let test_loss = expected.test_loss.unwrap();
    assert!((test_loss - 1.0).abs() < 0.01, "{test_loss}");
    let found = train_and_compare(3, &config).report.test_loss.unwrap();
    assert!((found - test_loss).abs() < 1e-4, "{found} {test_loss}");
}

/// The report of a run has the metrics that `ringtrain eval` computes, on any number of ranks. With strategies that divide the
/// model, only some ranks have the outputs of the model.
#[test]
#[ignore = "runs with tools/test --full"]
fn the_report_has_the_metrics_of_ringtrain_eval() {
    let directory = tempfile::tempdir().unwrap();
    let table = |seed: u32, target: &dyn Fn(u32) -> String| {
        let row = |i: u32| {
            let x = (i * 7919 + seed) % 101;
            format!("{x},{}\n", target(x + i % 40))
        };
        "x,y\n".to_owned() + &(0..150).map(row).collect::<String>()
    };
    let two: &dyn Fn(u32) -> String = &|x| if x > 70 { "yes".into() } else { "no".into() };
    let seven: &dyn Fn(u32) -> String = &|x| format!("c{}", x / 20);
    let numbers: &dyn Fn(u32) -> String = &|x| format!("{x}.5");
    // With `tensor`, the ranks add the inputs of a layer in another order.
    for (name, target, strategy, ranks, tolerance) in [
        ("two", two, "allreduce", 3, 1e-9),
        ("seven", seven, "allreduce", 3, 1e-9),
        ("numbers", numbers, "allreduce", 3, 1e-9),
        ("two", two, "hybrid:2x2", 4, 1e-9),
        ("numbers", numbers, "pipeline:2", 2, 1e-9),
        ("seven", seven, "tensor", 2, 1e-5),
    ] {
        let (train, test) = (format!("{name}.csv"), format!("{name}-test.csv"));
        write(directory.path(), &train, &table(0, target));
        write(directory.path(), &test, &table(1, target));
        let run = Config {
            source: DataSource::Csv(directory.path().join(&train)),
            test_source: Some(DataSource::Csv(directory.path().join(&test))),
            target: Some("y".into()),
            epochs: Some(20),
            strategy: strategy.parse().unwrap(),
            model: (strategy != "allreduce").then(|| "mlp:8".parse().unwrap()),
            model_file: Some(directory.path().join(name)),
            ..config()
        };
        let found = train_and_compare(ranks, &run).report.test_metrics.unwrap();
        let line = format!("eval --model {name} --data {test} --json");
        let expected = serde_json::from_str(&ringtrain_stdout(directory.path(), &line)).unwrap();
        assert_near(&serde_json::to_value(found).unwrap(), &expected, tolerance);
    }
}

/// Asserts that two values are equal, except that the relative difference of two numbers may be `tolerance`.
fn assert_near(found: &Value, expected: &Value, tolerance: f64) {
    match (found, expected) {
        (Value::Number(found), Value::Number(expected)) => {
            let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((found - expected).abs() <= tolerance * expected.abs(), "{found} {expected}");
        }
        (Value::Array(found), Value::Array(expected)) => {
            assert_eq!(found.len(), expected.len());
            found.iter().zip(expected).for_each(|(found, expected)| assert_near(found, expected, tolerance));
        }
        (Value::Object(found), Value::Object(expected)) => {
            assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
            found.iter().for_each(|(key, value)| assert_near(value, &expected[key], tolerance));
        }
        _ => assert_eq!(found, expected),
    }
}
