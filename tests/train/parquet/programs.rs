//! Tests of the program `ringtrain` with Parquet files.

use std::fs;

use super::super::program::{assert_fails, ringtrain_stdout};
use super::columns::{columns_for_training, columns_of_all_types, properties};
use super::written_file::{Stored, TestColumn, write_csv, write_parquet};

#[test]
fn a_model_predicts_the_same_for_each_format() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let columns = columns_of_all_types();
    for (name, rows) in [("a", 0..300), ("b", 300..360), ("c", 360..450)] {
        write_csv(&place.join(format!("{name}.csv")), &columns, rows.clone());
        let middle = 320.clamp(rows.start, rows.end);
        let bounds = [rows.start, middle, rows.end];
        write_parquet(&place.join(format!("{name}.parquet")), &columns, &bounds, properties());
    }
    let options = "--target y --missing mean --categorical code --epochs 1 --batch-size 64 --drop half";
    ringtrain_stdout(
        place,
        &format!("--data a.parquet --test-data *.parquet {options} --save-model p.model"),
    );
    ringtrain_stdout(
        place,
        &format!("--data a.csv --test-data *.csv {options} --dates day,ms,us,ns,i96 --save-model c.model"),
    );
    let expected = ringtrain_stdout(place, "predict --model c.model --data b.csv c.csv");
    assert_eq!(expected.lines().count(), 151);
    let expected_metrics = ringtrain_stdout(place, "eval --model c.model --data b.csv c.csv --target d32");
    assert!(expected_metrics.contains("R2") || expected_metrics.contains("R²"), "{expected_metrics}");
    for (model, data) in [("p", "b.csv c.csv"), ("c", "b.parquet c.parquet"), ("p", "[bc].parquet")] {
        let arguments = format!("--model {model}.model --data {data}");
        assert_eq!(ringtrain_stdout(place, &format!("predict {arguments}")), expected, "{arguments}");
        let metrics = ringtrain_stdout(place, &format!("eval {arguments} --target d32"));
        assert_eq!(metrics, expected_metrics, "{arguments}");
    }
    let other = [TestColumn::new("x", "int32 #", |_| Some((Stored::I32(1), String::new())))];
    write_parquet(&place.join("other.parquet"), &other, &[0, 1], properties());
    for (line, code, expected) in [
        ("predict --model p.model --data other.parquet", 4, "other.parquet: has no columns flag, i8,"),
        (
            "predict --model p.model --data b.parquet other.parquet",
            4,
            "other.parquet: has 1 column, but b.parquet has 25",
        ),
        (
            "predict --model p.model --data b.parquet --separator ;",
            2,
            "are for tables of text; --data b.parquet is a Parquet file",
        ),
        ("eval --model p.model --data b.parquet --target name", 4, "column `name`: `a` is not a number"),
    ] {
        assert_fails(place, line, code, expected);
    }
}

#[test]
fn the_program_refuses_unsuitable_files_and_options() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let columns = columns_for_training();
    write_parquet(&place.join("a.parquet"), &columns, &[0, 60], properties());
    write_parquet(&place.join("data"), &columns, &[0, 60], properties());
    write_parquet(&place.join("fewer.parquet"), &columns[1..], &[0, 60], properties());
    let mut renamed = columns_for_training();
    renamed[0].name = "other".into();
    write_parquet(&place.join("renamed.parquet"), &renamed, &[0, 60], properties());
    let mut retyped = columns_for_training();
    retyped[1] =
        TestColumn::new("i8", "byte_array # (STRING)", |_| Some((Stored::Bytes(b"x".into()), String::new())));
    write_parquet(&place.join("retyped.parquet"), &retyped, &[0, 60], properties());
    write_csv(&place.join("a.csv"), &columns, 0..60);
    fs::create_dir(place.join("folder.parquet")).unwrap();
    fs::write(place.join("text.parquet"), "a,y\n1,2\n3,4\n").unwrap();
    let bytes = fs::read(place.join("a.parquet")).unwrap();
    fs::write(place.join("short.parquet"), &bytes[..bytes.len() / 2]).unwrap();
    fs::write(place.join("encrypted.parquet"), [&bytes[..bytes.len() - 1], b"E"].concat()).unwrap();
    for (arguments, code, expected) in [
        ("--data a.parquet", 2, "name the column to predict with --target"),
        (
            "--data a.parquet --target y --no-header",
            2,
            "--no-header is for tables of text; --data a.parquet is a Parquet file",
        ),
        (
            "--data a.parquet a.csv --target y",
            2,
            "--data a.parquet: this is a Parquet file, but a.csv is a table of text",
        ),
        (
            "--data a.parquet --test-data a.csv --target y",
            2,
            "--test-data a.csv has another format than --data a.parquet",
        ),
        ("--data a.parquet digits --target y", 2, "--data digits: only tables"),
        (
            "--data folder.parquet --target y",
            2,
            "is a directory; pass the Parquet files in it, for example as 'folder.parquet/*.parquet'",
        ),
        (
            "--data a.parquet.gz --target y",
            2,
            "is a Parquet file with the ending .gz of compressed files; decompress the file",
        ),
        ("--data absent.parquet --target y", 4, "cannot read absent.parquet"),
        (
            "--data a.parquet fewer.parquet --target y",
            4,
            "fewer.parquet: has 115 columns, but a.parquet has 116; the files of a table",
        ),
        (
            "--data a.parquet renamed.parquet --target y",
            4,
            "column number 1 is `other`, but in a.parquet it is `flag`",
        ),
        (
            "--data a.parquet retyped.parquet --target y",
            4,
            "retyped.parquet: column `i8` holds texts or truth values, but in a.parquet it holds numbers",
        ),
        (
            "--data text.parquet --target y",
            4,
            "text.parquet: is truncated or is not a Parquet file: it does not end with `PAR1`",
        ),
        ("--data short.parquet --target y", 4, "short.parquet: is truncated or is not a Parquet file"),
        ("--data encrypted.parquet --target y", 4, "encrypted.parquet: is encrypted"),
        ("--data a.csv --format parquet --target y", 4, "a.csv: is truncated or is not a Parquet file"),
    ] {
        assert_fails(place, arguments, code, expected);
    }
    for data in ["data", "a.parquet retyped.parquet --drop i8", "data --format parquet"] {
        let output = ringtrain_stdout(
            place,
            &format!("--data {data} --target y --missing mean --epochs 1 --batch-size 64"),
        );
        assert!(output.contains("column `us` holds dates: each date becomes"), "{output}");
    }
}
