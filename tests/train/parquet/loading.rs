//! Tests of loading Parquet files, and of training on them.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use ::parquet::basic::{Compression, GzipLevel, ZstdLevel};
use ::parquet::file::properties::WriterVersion;
use ndarray::Array2;
use ringtrain::Group;
use ringtrain::train::data::{DataSource, Dataset, MissingPolicy, TableOptions};
use ringtrain::train::{Config, SilentObserver, run};

use super::super::library::{config, train};
use super::super::strategies::{NONE, train_on};
use super::super::util::{if_long_tests_else, ranks};
use super::columns::{
    columns_for_training, columns_of_all_types, load, options_for_all_types, parquet_source, properties,
    target_column,
};
use super::written_file::{Stored, TestColumn, write_csv, write_parquet};

/// Returns the inputs of the model for the training set.
fn inputs(dataset: &Dataset) -> Array2<f32> {
    let features = &dataset.train.features;
    let mut inputs = Array2::zeros((dataset.train.len(), features.columns()));
    features.write_rows(0..dataset.train.len(), None, inputs.view_mut());
    inputs
}

/// A Parquet file has the same features, targets and encoding as a table of text, with each compression and version of
/// Parquet.
#[test]
fn a_parquet_file_gives_the_same_data_as_a_table_of_text() {
    let directory = tempfile::tempdir().unwrap();
    let columns = columns_of_all_types();
    let csv = directory.path().join("a.csv");
    write_csv(&csv, &columns, 0..600);
    let all_dates = ["day", "ms", "us", "ns", "i96", "written_day"];
    let expected = load(&DataSource::Csv(csv), "y", &options_for_all_types(&all_dates)).unwrap();
    assert_eq!((expected.train.len(), expected.notes.len()), (588, 7));
    let path = directory.path().join("a.parquet");
    for (case, properties) in [
        properties(),
        properties()
            .set_compression(Compression::SNAPPY)
            .set_data_page_row_count_limit(100)
            .set_write_batch_size(50),
        properties()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_writer_version(WriterVersion::PARQUET_2_0),
        properties().set_compression(Compression::GZIP(GzipLevel::default())).set_dictionary_enabled(false),
    ]
    .into_iter()
    .enumerate()
    {
        write_parquet(&path, &columns, &[0, 1, 500, 500, 600], properties);
        let found = load(&parquet_source(&path), "y", &options_for_all_types(&["written_day"])).unwrap();
        assert_eq!((&found.encoding, &found.layout), (&expected.encoding, &expected.layout), "case {case}");
        assert_eq!(found.train.targets, expected.train.targets);
        assert_eq!(inputs(&found), inputs(&expected), "case {case}");
        let notes: Vec<&String> =
            found.notes.iter().filter(|note| !note.contains("holds dates: each date")).collect();
        assert_eq!(notes, expected.notes.iter().collect::<Vec<_>>());
        assert_eq!(found.notes.len() - notes.len(), 5);
    }
}

#[test]
fn booleans_and_small_integers_as_targets_become_classes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.parquet");
    write_parquet(&path, &columns_of_all_types(), &[0, 400], properties());
    let table = TableOptions {
        features: vec!["i32".into()],
        missing: MissingPolicy::Mean,
        ..TableOptions::default()
    };
    assert_eq!(load(&parquet_source(&path), "flag", &table).unwrap().classes, ["False", "True"]);
    let codes = load(&parquet_source(&path), "code", &table).unwrap();
    assert_eq!(codes.classes, ["7", "8", "10"]);
}

#[test]
fn errors_name_the_columns_that_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.parquet");
    let bytes = |size| move |_: usize| Some((Stored::Fixed(vec![1; size]), String::new()));
    let number = |_: usize| Some((Stored::I32(5), String::new()));
    let columns = [
        TestColumn::new("id", "fixed_len_byte_array(16) # (UUID)", bytes(16)),
        TestColumn::new("blob", "fixed_len_byte_array(3) #", bytes(3)),
        TestColumn::new("span", "fixed_len_byte_array(12) # (INTERVAL)", bytes(12)),
        TestColumn::new("clock", "int32 # (TIME_MILLIS)", number),
        TestColumn::new("wide", "fixed_len_byte_array(30) # (DECIMAL(60,2))", bytes(30)),
        TestColumn::nested(
            "list",
            "optional group list (LIST) { repeated group list { required int32 element; } }",
        ),
        TestColumn::nested(
            "map",
            "optional group map (MAP) { repeated group key_value { required int32 key; } }",
        ),
        TestColumn::nested("pair", "optional group pair { required int32 first; }"),
        TestColumn::new("day", "int32 # (DATE)", number),
        TestColumn::new("x", "int32 #", number),
        target_column(),
    ];
    write_parquet(&path, &columns, &[0, 40], properties());
    let refused = ["id", "blob", "span", "clock", "wide", "list", "map", "pair"];
    for (index, (name, expected)) in refused
        .iter()
        .zip([
            "type Uuid",
            "bytes",
            "type INTERVAL",
            "times without a date",
            "decimals with 60 digits",
            "lists",
            "maps",
            "structs",
        ])
        .enumerate()
    {
        let table = TableOptions {
            drop: refused[..index].iter().map(|&name| name.into()).collect(),
            ..TableOptions::default()
        };
        let error = load(&parquet_source(&path), "y", &table).unwrap_err();
        let expected_start = format!("{}: column `{name}` holds ", path.display());
        let expected_end =
            format!(", which ringtrain cannot read; pass --drop {name} to leave out the column");
        assert!(
            error.starts_with(&expected_start) && error.contains(expected) && error.ends_with(&expected_end),
            "{error}"
        );
    }
    let drop = TableOptions { drop: refused.map(String::from).to_vec(), ..TableOptions::default() };
    assert_eq!(load(&parquet_source(&path), "y", &drop).unwrap().train.len(), 39);
    let only_list = TableOptions {
        drop: drop.drop.iter().filter(|name| *name != "list").cloned().collect(),
        ..drop.clone()
    };
    let categorical = TableOptions { categorical: vec!["day".into()], ..drop.clone() };
    for (target, table, expected) in [
        ("list", &only_list, "column `list` holds lists, which ringtrain cannot read; pass another --target"),
        ("day", &drop, "column `day` holds dates, and the target cannot be a date; pass another --target"),
        ("y", &categorical, "leave it out of --categorical, or pass --drop day"),
        ("z", &drop, "has no column `z`; its columns are id, blob,"),
    ] {
        let error = load(&parquet_source(&path), target, table).unwrap_err();
        assert!(error.contains(expected) && error.contains("a.parquet: "), "{error}");
    }
}

#[test]
fn errors_name_the_row_and_the_column() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.parquet");
    let column = |name, value: fn(usize) -> f64| {
        TestColumn::new(name, "double #", move |row| {
            (row != 30 || name != "x").then(|| (Stored::F64(value(row)), String::new()))
        })
    };
    let text = |bytes: &'static [u8]| {
        TestColumn::new("text", "byte_array #", move |row| {
            Some((Stored::Bytes(if row == 33 { bytes.to_vec() } else { b"a".to_vec() }), String::new()))
        })
    };
    let infinite = |row| if row == 37 { f64::INFINITY } else { row as f64 };
    for (columns, expected) in [
        (
            vec![column("x", |row| row as f64), target_column()],
            "row 31, column `x`: the value is missing; pass --missing drop",
        ),
        (
            vec![column("z", infinite), target_column()],
            "row 38, column `z`: `inf` is not a finite number; leave the cell without a value",
        ),
        (vec![text(b"\xff"), target_column()], "row 34, column `text`: the text is not UTF-8"),
        (
            vec![column("z", |row| row as f64), column("y", infinite)],
            "row 38, column `y`: `inf` is not a finite number",
        ),
    ] {
        write_parquet(&path, &columns, &[0, 20, 40], properties());
        let error = load(&parquet_source(&path), "y", &TableOptions::default()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    write_parquet(&path, &[target_column(), column("z", infinite)], &[0], properties());
    let error = load(&parquet_source(&path), "y", &TableOptions::default()).unwrap_err();
    assert!(error.ends_with("a.parquet: has no rows or no columns"), "{error}");
}

/// With one sample in each batch, the sum of the gradients is exact. So each number of ranks, and each format, must give
/// the same bits.
#[test]
fn each_number_of_ranks_computes_the_same_parameters_as_a_table_of_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let columns = columns_for_training();
    write_csv(&path("a.csv"), &columns, 0..650);
    write_csv(&path("test.csv"), &columns, 650..700);
    write_parquet(&path("1.parquet"), &columns, &[0, 3, 200], properties().set_data_page_row_count_limit(64));
    write_parquet(&path("2.parquet"), &columns, &[200, 500, 501, 650], properties());
    write_parquet(&path("test.parquet"), &columns, &[650, 651, 700], properties());
    let table = TableOptions { missing: MissingPolicy::Indicator, ..TableOptions::default() };
    let csv = Config {
        source: DataSource::Csv(path("a.csv")),
        test_source: Some(DataSource::Csv(path("test.csv"))),
        target: Some("y".into()),
        table: TableOptions { dates: vec!["us".into()], ..table.clone() },
        batch_size: Some(1),
        epochs: Some(1),
        ..config()
    };
    let parquet = Config {
        source: DataSource::Parquet(vec![path("1.parquet"), path("2.parquet")]),
        test_source: Some(parquet_source(&path("test.parquet"))),
        table,
        ..csv.clone()
    };
    let expected = train(&csv).unwrap();
    assert_eq!((expected.report.train_samples, expected.report.test_samples), (637, 49));
    for &n in if_long_tests_else(&[1, 2, 3, 4, 7][..], &[1, 3]) {
        for summary in train_on(n, &parquet, NONE) {
            let summary = summary.unwrap();
            assert_eq!(summary.parameters, expected.parameters, "{n} ranks");
            assert_eq!(summary.report.train_samples, expected.report.train_samples);
            let [loss, expected] = [&summary, &expected].map(|summary| summary.report.test_loss.unwrap());
            assert!((loss - expected).abs() < 1e-9 * expected, "{n} ranks: {loss} {expected}");
        }
    }
}

/// If two ranks read different files, all ranks return an error.
#[test]
fn all_ranks_fail_if_their_files_differ() {
    let directory = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> =
        ["0.parquet", "1.parquet"].iter().map(|name| directory.path().join(name)).collect();
    write_parquet(&paths[0], &columns_for_training(), &[0, 60], properties());
    write_parquet(&paths[1], &columns_for_training(), &[0, 30, 60], properties());
    let config = Config {
        target: Some("y".into()),
        table: TableOptions { missing: MissingPolicy::Mean, ..TableOptions::default() },
        ..config()
    };
    let results = ranks::run(2, move |mut group: Group| {
        let source = parquet_source(&paths[group.rank().index()]);
        let stop = AtomicBool::new(false);
        let config = Config { source, ..config.clone() };
        run(&mut group, &config, &stop, &mut SilentObserver).map(|_| ())
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("differ"), "{error}");
    }
}
