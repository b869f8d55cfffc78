//! Tests of model files with the programs: `ringtrain --save-model`, `predict`, `eval`, `inspect` and `export`.

use std::fmt::Write as _;
use std::fs;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::program::{assert_fails, ringtrain_stdout, run_ringtrain_in};

/// Returns a directory with three tables of two features. The target of `flowers.csv` is `kind`, which has three
/// classes. The target of `numbers.csv` is the number `size`. `plain.csv` is `numbers.csv` without the header.
fn directory_with_table() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let (mut kinds, mut sizes) = ("width,length,kind\n".to_owned(), String::new());
    for row in 0..90_u32 {
        let kind = row % 3;
        let width = f64::from(row * 7 % 10) / 10.0 + 3.0 * f64::from(kind);
        let length = f64::from(row * 3 % 11) / 11.0 - 2.0 * f64::from(kind % 2);
        let name = ["rose", "lily", "iris, blue"][kind as usize];
        writeln!(kinds, "{width},{length},\"{name}\"").unwrap();
        writeln!(sizes, "{width},{length},{}", 5.0 + 2.0 * width - 3.0 * length).unwrap();
    }
    let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
    write("flowers.csv", &kinds);
    write("numbers.csv", &format!("width,length,size\n{sizes}"));
    write("plain.csv", &sizes);
    directory
}

fn read_json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn predictions_do_not_depend_on_the_column_order_or_the_input() {
    let directory = directory_with_table();
    let place = directory.path();
    ringtrain_stdout(
        place,
        "--data flowers.csv --target kind --model softmax --test-fraction 0 --save-model m --report r.json",
    );
    let report = read_json(&fs::read_to_string(place.join("r.json")).unwrap());
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data flowers.csv --json"));
    assert_eq!(evaluation["rows"], 90);
    assert_eq!(evaluation["accuracy"], report["train_accuracy"]);
    let difference = evaluation["log_loss"].as_f64().unwrap() - report["train_loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-9, "{evaluation} {report}");
    let total: u64 = evaluation["confusion_matrix"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .map(|count| count.as_u64().unwrap())
        .sum();
    assert_eq!(total, 90);

    let text = ringtrain_stdout(place, "predict --model m --data flowers.csv");
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("prediction,\"probability_iris, blue\",probability_lily,probability_rose"));
    let first: Vec<&str> = lines.next().unwrap().split(',').collect();
    assert_eq!(first[0], "rose");
    assert!((first[1..].iter().map(|cell| cell.parse::<f64>().unwrap()).sum::<f64>() - 1.0).abs() < 1e-6);
    assert_eq!(text.lines().count(), 91);

    // The same rows without the target, with the columns in another order and an unknown column.
    let table = fs::read_to_string(place.join("flowers.csv")).unwrap();
    let rows = table.lines().skip(1).map(|line| {
        let cells: Vec<&str> = line.splitn(3, ',').collect();
        format!("{},note,{}\n", cells[1], cells[0])
    });
    let reordered: String = std::iter::once("length,extra,width\n".to_owned()).chain(rows).collect();
    fs::write(place.join("new.csv"), &reordered).unwrap();
    ringtrain_stdout(place, "predict --model m --data new.csv --output out.csv");
    assert_eq!(fs::read_to_string(place.join("out.csv")).unwrap(), text);
    let mut child = Command::new(env!("CARGO_BIN_EXE_ringtrain"))
        .args(["predict", "--model", "m", "--data", "-"])
        .current_dir(place)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(reordered.as_bytes()).unwrap();
    assert_eq!(String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap(), text);

    ringtrain_stdout(place, "predict --model m --data new.csv --output out.npy");
    let bytes = fs::read(place.join("out.npy")).unwrap();
    assert_eq!(bytes.len(), 128 + 90 * 3 * 4);
    assert!(String::from_utf8_lossy(&bytes[..128]).contains("'shape': (90, 3), }"));
    let probability = f32::from_le_bytes(*bytes[128..].first_chunk().unwrap());
    assert_eq!(Ok(probability), first[1].parse());
}

#[test]
fn a_regression_model_predicts_in_the_unit_of_the_target() {
    let directory = directory_with_table();
    let place = directory.path();
    let numbers = fs::read_to_string(place.join("plain.csv")).unwrap();
    ringtrain_stdout(place, "--data numbers.csv --target size --save-model m");
    assert_eq!(
        ringtrain_stdout(place, "export --model m --output m.onnx"),
        "input   width: float (rows, 1)\ninput   length: float (rows, 1)\noutput  prediction: double (rows)\n"
    );
    let onnx = fs::read(place.join("m.onnx")).unwrap();
    let mean = b"ringtrain/target.mean";
    assert!(onnx.windows(mean.len()).any(|window| window == mean));
    let printed = ringtrain_stdout(place, "export --model m --output m.onnx --inputs matrix");
    assert_eq!(printed, "input   x: float (rows, 2)\noutput  prediction: double (rows)\n");
    assert_fails(place, "export --model m --output absent/m.onnx", 1, "cannot write the ONNX file absent");
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data numbers.csv --json"));
    assert!(evaluation["r2"].as_f64().unwrap() > 0.9999, "{evaluation}");
    let text = ringtrain_stdout(place, "predict --model m --data numbers.csv");
    for (line, row) in text.lines().skip(1).zip(numbers.lines()) {
        let wanted: f64 = row.rsplit(',').next().unwrap().parse().unwrap();
        assert!((line.parse::<f64>().unwrap() - wanted).abs() < 0.05, "{line} {row}");
    }
    let output = ringtrain_stdout(place, "eval --model m --data numbers.csv");
    assert!(output.contains("MAE") && output.contains("RMSE") && output.contains("R²"), "{output}");
    // Without a header, columns are found by position.
    assert_eq!(
        ringtrain_stdout(place, "eval --model m --data plain.csv --no-header --target 2 --json"),
        ringtrain_stdout(place, "eval --model m --data numbers.csv --json")
    );
    ringtrain_stdout(place, "--data plain.csv --no-header --target 2 --save-model plain");
    let detected = ringtrain_stdout(place, "--data plain.csv --target 2 --save-model detected");
    assert!(detected.contains("the first row holds data, so the table has no header"), "{detected}");
    for (model, data) in [
        ("plain", "plain.csv --no-header"),
        ("plain", "numbers.csv"),
        ("detected", "plain.csv"),
        ("detected", "numbers.csv"),
    ] {
        assert_eq!(
            ringtrain_stdout(place, &format!("predict --model {model} --data {data}")),
            text,
            "{model} {data}"
        );
    }
}

/// Regression test: before the fix, predictions for a table without a header used the column numbers of the training
/// table, even if the new table lacked the target. Without the target, all later columns have other numbers.
#[test]
fn a_table_without_header_may_lack_the_target_and_dropped_columns() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let write = |name: &str, order: &[usize]| {
        let rows = (0..60_u32).map(|row| {
            let (a, b, noise) = (row * 7 % 10, row * 3 % 11, row * 5 % 13);
            let cells = [3 * a + 5 * b, a, noise, b].map(|cell| cell.to_string());
            order.iter().map(|&column| cells[column].as_str()).collect::<Vec<_>>().join(",") + "\n"
        });
        fs::write(place.join(name), rows.collect::<String>()).unwrap();
    };
    for (name, order) in [
        ("all.csv", &[0, 1, 2, 3][..]),
        ("no_target.csv", &[1, 2, 3]),
        ("features.csv", &[1, 3]),
        ("moved.csv", &[1, 3, 0]),
        ("one.csv", &[1]),
    ] {
        write(name, order);
    }
    let all = fs::read_to_string(place.join("all.csv")).unwrap();
    fs::write(place.join("named.csv"), format!("y,a,n,b\n{all}")).unwrap();
    fs::write(place.join("twice.csv"), format!("y,x,n,x\n{all}")).unwrap();
    for (train, drop) in [("all.csv --no-header", "2"), ("named.csv", "n"), ("twice.csv", "n")] {
        ringtrain_stdout(
            place,
            &format!("--data {train} --target 0 --drop {drop} --test-fraction 0 --save-model m"),
        );
        for data in ["all.csv", "no_target.csv", "features.csv"] {
            let text = ringtrain_stdout(place, &format!("predict --model m --no-header --data {data}"));
            for (line, row) in text.lines().skip(1).zip(all.lines()) {
                let wanted: f64 = row.split(',').next().unwrap().parse().unwrap();
                assert!((line.parse::<f64>().unwrap() - wanted).abs() < 0.05, "{train} {data}: {line} {row}");
            }
        }
        for (data, target) in [("all.csv", 0), ("moved.csv", 2)] {
            let line = format!("eval --model m --no-header --data {data} --target {target} --json");
            assert!(
                read_json(&ringtrain_stdout(place, &line))["r2"].as_f64().unwrap() > 0.999,
                "{train} {line}"
            );
        }
        assert_fails(
            place,
            "predict --model m --no-header --data one.csv",
            4,
            "has 1 column, but the model finds its columns by position",
        );
        // Column 1, the given target, is a feature of the model.
        assert_fails(place, "eval --model m --no-header --data all.csv --target 1", 4, "has 4 columns");
    }
}

/// Regression test: before the fix, `predict` and `eval` refused several files and patterns, which training accepts.
/// From standard input, both also read bytes again that another program had already read.
#[test]
fn several_files_and_the_rest_of_standard_input_are_read() {
    let directory = directory_with_table();
    let place = directory.path();
    ringtrain_stdout(place, "--data numbers.csv --target size --save-model m");
    let (predict, eval) = ("predict --model m --data", "eval --model m --json --data");
    let whole = fs::read_to_string(place.join("numbers.csv")).unwrap();
    let (header, rows) = whole.split_once('\n').unwrap();
    let middle = rows.len() / 2 + rows[rows.len() / 2..].find('\n').unwrap() + 1;
    for (name, rows) in [("part-1", &rows[..middle]), ("part-2", &rows[middle..])] {
        fs::write(place.join(name).with_extension("csv"), format!("{header}\n{rows}")).unwrap();
        fs::write(place.join(name).with_extension("tsv"), rows).unwrap();
    }
    let (predictions, evaluation) = (
        ringtrain_stdout(place, &format!("{predict} numbers.csv")),
        ringtrain_stdout(place, &format!("{eval} numbers.csv")),
    );
    for data in ["part-1.csv part-2.csv", "part-*.csv", "part-?.tsv --no-header"] {
        assert_eq!(ringtrain_stdout(place, &format!("{predict} {data}")), predictions, "{data}");
        let data = data.replace("--no-header", "--no-header --target 2");
        assert_eq!(ringtrain_stdout(place, &format!("{eval} {data}")), evaluation, "{data}");
    }
    fs::write(place.join("skipped"), format!("other program{whole}")).unwrap();
    let mut input = fs::File::open(place.join("skipped")).unwrap();
    input.seek(SeekFrom::Start("other program".len() as u64)).unwrap();
    fs::write(place.join("nothing.csv"), "").unwrap();
    for (second, expected) in [
        ("flowers.csv", "is `kind`, but in numbers.csv it is `size`"),
        ("nothing.csv", "nothing.csv: is empty"),
    ] {
        assert_fails(place, &format!("{predict} numbers.csv {second}"), 4, expected);
    }
    let output = Command::new(env!("CARGO_BIN_EXE_ringtrain"))
        .args(["predict", "--model", "m", "--data", "-"])
        .current_dir(place)
        .stdin(input)
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), predictions);
}

/// Regression test: before the fix, the header was printed before the first row was read.
#[test]
fn the_header_of_predictions_is_printed_with_the_first_of_them() {
    let directory = directory_with_table();
    let place = directory.path();
    ringtrain_stdout(place, "--data numbers.csv --target size --epochs 3 --save-model m");
    for (data, rows, lines) in [("text.csv", "1,2\n3,long\n", 0), ("none.csv", "", 1)] {
        fs::write(place.join(data), format!("width,length\n{rows}")).unwrap();
        let output = run_ringtrain_in(place, &format!("predict --model m --data {data}"));
        assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), lines, "{data}");
    }
}

#[test]
fn predict_refuses_data_that_does_not_fit_the_model() {
    let directory = directory_with_table();
    let place = directory.path();
    ringtrain_stdout(place, "--data flowers.csv --target kind --model softmax --epochs 3 --save-model m");
    let files = [
        ("missing.csv", "width,height\n1,2\n"),
        ("twice.csv", "width,length,length\n1,2,3\n"),
        ("text.csv", "width,length\n1,2\n3,long\n"),
        ("empty_cell.csv", "width,length\n1,2\n3,\n"),
        ("short.csv", "width,length\n1,2\n3\n"),
        ("no_target.csv", "width,length,kind\n1,2,rose\n3,4,NA\n"),
        ("unknown.csv", "width,length,kind\n1,2,rose\n1,2,tulip\n"),
        ("headless.csv", "1,2\n3,4\n"),
        ("four.csv", "1,2,3,4\n"),
        ("none.csv", "width,length,kind\n"),
        ("huge.csv", "width,length\n1,2\n3e38,-3e38\n"),
        ("sized.csv", "width,length,kind\n1,2,rose\n"),
        ("huge_sized.csv", "width,length,kind\n1,2,\n\"1\",2,\n3e38,-3e38,rose\n"),
        ("nothing.csv", ""),
    ];
    for (name, content) in files {
        fs::write(place.join(name), content).unwrap();
    }
    for (line, expected) in [
        (
            "predict --data missing.csv",
            "has no column length, which the model needs; its columns are width, height",
        ),
        ("predict --data twice.csv", "more than one column `length`"),
        ("predict --data text.csv", "line 3, column `length`: `long` is not a number"),
        ("predict --data empty_cell.csv", "line 3, column `length`: the value is missing"),
        ("predict --data short.csv", "line 3 has 1 cells, but the first row has 2"),
        ("predict --data headless.csv", "pass --no-header"),
        (
            "predict --data four.csv --no-header",
            "has 4 columns, but the model finds its columns by position and needs the 3 columns",
        ),
        ("predict --data nothing.csv", "is empty"),
        ("predict --data digits", "digits has 64 features, but the model was trained on 2"),
        ("predict --data absent.csv", "cannot read absent.csv"),
        (
            "predict --data huge.csv",
            "huge.csv: line 3: the prediction is not finite; a value in this row is far outside",
        ),
        // Regression test: before the fix, the line number did not count rows without a target, and the error did not
        // name the file.
        ("eval --data sized.csv huge_sized.csv", "huge_sized.csv: line 4: the prediction is not finite"),
        ("eval --data unknown.csv", "line 3, column `kind`: the class `tulip` did not occur in training"),
        ("predict --data no_target.csv --separator ;", "has no columns width, length, which the model needs"),
        ("eval --data missing.csv", "has no column `kind`"),
        ("eval --data none.csv", "the data has no rows"),
    ] {
        assert_fails(place, &format!("{line} --model m"), 4, expected);
    }
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data no_target.csv --json"));
    assert_eq!((&evaluation["rows"], &evaluation["rows_without_target"]), (&1.into(), &1.into()));
    assert_fails(place, "predict --model flowers.csv --data flowers.csv", 10, "is not a model file");
    // A failed command leaves the old output unchanged.
    fs::write(place.join("out.csv"), "old").unwrap();
    assert_fails(place, "predict --model m --data text.csv --output out.csv", 4, "long");
    assert_eq!(fs::read_to_string(place.join("out.csv")).unwrap(), "old");
    assert_fails(
        place,
        "predict --model m --data none.csv --output absent/out.csv",
        1,
        "cannot write the predictions",
    );
    assert_fails(
        place,
        "--data flowers.csv --target kind --save-model numbers.csv",
        10,
        "would overwrite a file that is not a model",
    );
}

#[test]
fn models_of_pixels_are_inspected_and_checkpoints_become_models() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    ringtrain_stdout(place, "--epochs 2 --test-fraction 0 --model softmax --checkpoint c --report r.json");
    let text = ringtrain_stdout(place, "inspect c/checkpoint.safetensors");
    assert!(text.contains("checkpoint") && text.contains("layers.0.weight"), "{text}");
    assert_fails(
        place,
        "eval --model c/checkpoint.safetensors --data digits",
        10,
        "--resume --save-model FILE",
    );
    ringtrain_stdout(
        place,
        "--epochs 2 --test-fraction 0 --model softmax --checkpoint c --resume --save-model m",
    );
    let report = read_json(&fs::read_to_string(place.join("r.json")).unwrap());
    let inspection = read_json(&ringtrain_stdout(place, "inspect m --json"));
    assert_eq!(inspection["description"]["training"]["parameters_hash"], report["parameters_hash"]);
    assert_eq!((&inspection["kind"], &inspection["inputs"]), (&"model".into(), &64.into()));
    assert_eq!(inspection["description"]["pixel_divisor"], 16.0);
    let text = ringtrain_stdout(place, "inspect m");
    for expected in [
        "model file, format version 1",
        "10 classes: 0, 1, 2",
        "pixels         divided by 16",
        "... and 44 more",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data digits --json"));
    assert_eq!(evaluation["accuracy"], report["train_accuracy"]);
    assert_eq!(evaluation["top_k"]["k"], 5);
    let text = ringtrain_stdout(place, "eval --model m --data digits --top-k 3");
    assert!(text.contains("top-3 accuracy") && text.contains("confusion matrix"), "{text}");
}

/// Two ranks under `ringrun` write one model file. If the model file cannot be written, the job ends with exit code
/// 10.
#[test]
fn rank_0_saves_the_model_under_ringrun() {
    let directory = directory_with_table();
    let place = directory.path();
    let ringrun = |line: &str| {
        Command::new(env!("CARGO_BIN_EXE_ringrun"))
            .args(["-n", "2", env!("CARGO_BIN_EXE_ringtrain")])
            .args(line.split_whitespace())
            .current_dir(place)
            .output()
            .unwrap()
    };
    let output = ringrun("--data flowers.csv --target kind --model softmax --epochs 3 --save-model m");
    assert!(output.status.success(), "{output:?}");
    ringtrain_stdout(place, "eval --model m --data flowers.csv");
    let output = ringrun("--data flowers.csv --target kind --epochs 1 --save-model absent/m");
    assert_eq!(output.status.code(), Some(10), "{output:?}");
}

/// A reader that closes the pipe (`ringtrain predict | head -1`) must cause neither a panic nor an error.
#[test]
fn a_closed_pipe_ends_predictions_without_an_error() {
    let directory = directory_with_table();
    let place = directory.path();
    ringtrain_stdout(place, "--data flowers.csv --target kind --model softmax --epochs 1 --save-model m");
    let program = env!("CARGO_BIN_EXE_ringtrain");
    for command in ["predict", "eval"] {
        let script = format!("({program} {command} --model m --data flowers.csv; echo code $? >&2) | true");
        let output = Command::new("sh").args(["-c", &script]).current_dir(place).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "code 0\n");
    }
}

/// Texts become the same inputs as in training, and missing values are replaced as in training.
#[test]
fn text_columns_and_missing_values_are_encoded_as_in_training() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let mut table = "size;colour;place;price\n".to_owned();
    for row in 0..120_u32 {
        let (colour, bonus) = [("red", 10), ("green", 0), ("NA", -5)][(row % 3) as usize];
        let size = if row % 10 == 0 { "NA".to_owned() } else { (row * 7 % 20).to_string() };
        writeln!(table, "{size};{colour};street {};{}", row % 8, 3 * i64::from(row * 7 % 20) + bonus)
            .unwrap();
    }
    fs::write(place.join("t.csv"), &table).unwrap();
    let train = "--data t.csv --target price --model linear --test-fraction 0 --missing indicator --max-categories 5 --report r.json";
    ringtrain_stdout(place, &format!("{train} --save-model m"));
    let report = read_json(&fs::read_to_string(place.join("r.json")).unwrap());
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data t.csv --json"));
    let difference = evaluation["r2"].as_f64().unwrap() - report["train_r2"].as_f64().unwrap();
    assert!(difference.abs() < 1e-9, "{evaluation} {report}");
    let text = ringtrain_stdout(place, "inspect m");
    for expected in ["3 categories: , green, red", "text, hashed to 5 inputs", "and set a second input"] {
        assert!(text.contains(expected), "{text}");
    }
    // `predict` accepts a text that did not occur in training.
    fs::write(place.join("new.csv"), "colour,place,size\nblue,elsewhere,?\n").unwrap();
    assert_eq!(ringtrain_stdout(place, "predict --model m --data new.csv").lines().count(), 2);
    let rows: Vec<&str> = table.lines().filter(|line| !line.contains("NA")).collect();
    fs::write(place.join("complete.csv"), rows.join("\n")).unwrap();
    ringtrain_stdout(
        place,
        "--data complete.csv --target price --model linear --epochs 2 --save-model strict",
    );
    assert_fails(place, "eval --model strict --data t.csv", 4, "column `size`: the value is missing");
    assert_fails(
        place,
        "predict --model m --data synthetic:9x3",
        4,
        "column `colour` of the model holds categories",
    );
}

/// Regression test: before the fix, a model could not learn from times in seconds, because the differences between
/// the times were lost.
#[test]
fn small_differences_between_large_times_are_learned() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let rows = (0..120).map(|row| format!("{},{}\n", 1_700_000_000 + row, f64::from(row) / 2.0 + 0.1));
    fs::write(place.join("t.csv"), "t,y\n".to_owned() + &rows.collect::<String>()).unwrap();
    let text = ringtrain_stdout(place, "--data t.csv --target y --save-model m --report r.json");
    assert!(text.contains("column `t` holds large numbers that differ little: 17000000"), "{text}");
    let report = read_json(&fs::read_to_string(place.join("r.json")).unwrap());
    assert!(report["test_r2"].as_f64().unwrap() > 0.999_999, "{report}");
    let evaluation = read_json(&ringtrain_stdout(place, "eval --model m --data t.csv --json"));
    assert!(evaluation["r2"].as_f64().unwrap() > 0.999_999, "{evaluation}");
    let text = ringtrain_stdout(place, "inspect m");
    assert!(text.contains("number - 17000000"), "{text}");
    fs::write(place.join("new.csv"), "t\n1700000200\n1700000201.5\n").unwrap();
    let times = [1_700_000_200.0_f64, 1_700_000_201.5];
    let header = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 1), }";
    let mut npy = b"\x93NUMPY\x01\x00v\x00".to_vec();
    npy.extend(format!("{header:<117}\n").bytes());
    npy.extend(times.iter().flat_map(|time| time.to_le_bytes()));
    fs::write(place.join("new.npy"), npy).unwrap();
    for data in ["new.csv", "new.npy"] {
        let text = ringtrain_stdout(place, &format!("predict --model m --data {data}"));
        let found: Vec<f64> = text.lines().skip(1).map(|line| line.parse().unwrap()).collect();
        assert!((found[0] - 100.1).abs() < 0.01 && (found[1] - 100.85).abs() < 0.01, "{data}: {found:?}");
    }
    assert_fails(place, "predict --model m --data synthetic:9x1", 4, "converts column `t` of a table");
}

#[test]
fn a_model_of_dates_predicts_from_dates_in_another_format() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let row = |day| format!("2024-{:02}-{:02},{day}", 1 + day / 20, 1 + day % 20);
    let rows = (0..60).map(row).collect::<Vec<_>>().join("\n");
    fs::write(place.join("t.csv"), format!("when,y\n{rows}\n")).unwrap();
    fs::write(place.join("new.csv"), "when\n2024-01-11T00:00:00Z\n20240111\n2024-01-10 18:00-06:00\n")
        .unwrap();
    ringtrain_stdout(place, "--data t.csv --target y --model linear --dates when --save-model m");
    let text = ringtrain_stdout(place, "predict --model m --data new.csv");
    let values: Vec<f64> = text.lines().skip(1).map(|line| line.parse().unwrap()).collect();
    assert!(values.len() == 3 && values.iter().all(|value| value == &values[0]), "{text}");
    assert!((5.0..15.0).contains(&values[0]), "{text}");
    fs::write(place.join("bad.csv"), "when\n11.01.2024\n").unwrap();
    assert_fails(
        place,
        "predict --model m --data bad.csv",
        4,
        "line 2, column `when`: `11.01.2024` is not a date",
    );
}
