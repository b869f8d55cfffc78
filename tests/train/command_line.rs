//! Tests of the program `ringtrain`: exit codes, output and report.

use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;

use ringtrain::Group;
use ringtrain::train::{Config, run};

use super::library::{PrintedLines, config};

fn ringtrain(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringtrain")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_training_run_writes_a_report_and_prints_the_hash_of_its_parameters() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("report.json");
    let output = ringtrain(&["--epochs", "2", "--report", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let keys = "world_size model dataset epochs train_loss test_loss test_accuracy test_r2 train_r2 \
                samples_per_second seconds communication_seconds exposed_communication_seconds \
                bucket_bytes bytes_sent parameters_hash history step_times";
    for key in keys.split_whitespace() {
        assert!(report.get(key).is_some(), "{key}");
    }
    let times = &report["step_times"];
    assert_eq!(times["steps"], report["steps"]);
    for part in ["compute_seconds", "data_seconds"] {
        assert!(times[part].as_f64().unwrap() > 0.0, "{times}");
        let of_epochs: f64 =
            (0..2).map(|epoch| report["history"][epoch]["step_times"][part].as_f64().unwrap()).sum();
        assert!((times[part].as_f64().unwrap() - of_epochs).abs() < 1e-9, "{report}");
    }
    assert_eq!(report["history"].as_array().unwrap().len(), 2);
    assert!(report["test_r2"].is_null());
    assert_eq!(report["lr"], 0.001);
    let hash = report["parameters_hash"].as_str().unwrap();
    let stdout = text(&output.stdout);
    assert!(stdout.ends_with(&format!("rank 0: parameters_hash {hash}\n")), "{stdout}");
    assert!(stdout.contains("epoch 2/2: train loss"), "{stdout}");
}

#[test]
fn failures_are_reported_with_the_right_exit_codes() {
    let directory = tempfile::tempdir().unwrap();
    let csv = directory.path().join("bad.csv");
    std::fs::write(&csv, "a,y\n1,2\n2,2\nabc,3\n").unwrap();
    let csv = csv.to_str().unwrap();
    let in_missing_directory = directory.path().join("absent/report.json");
    let under_file = format!("{csv}/checkpoints");
    let cases: [(&[&str], i32, &str); 9] = [
        (&["--no-such-flag"], 2, "--no-such-flag"),
        (&["--resume"], 2, "--checkpoint"),
        (&["--batch-size", "x"], 2, "--batch-size"),
        (&["--data", "/no/such/place"], 4, "/no/such/place"),
        (&["--data", csv, "--target", "y"], 4, "line 4, column `a`: `abc` is not a number"),
        (&["--data", csv, "--target", "z"], 4, "no column `z`"),
        (&["--model", "linear", "--optimizer", "sgd", "--lr", "1e9"], 9, "on rank 0; lower --lr"),
        (&["--report", in_missing_directory.to_str().unwrap()], 10, "report.json"),
        (&["--checkpoint", &under_file], 10, "checkpoints"),
    ];
    for (arguments, code, expected) in cases {
        let output = ringtrain(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected) && !stderr.contains("panicked"), "{arguments:?}: {stderr}");
    }
}

/// Regression test: before the fix, the model or the report could be written over a checkpoint, a report or a table.
#[test]
fn a_run_does_not_write_a_file_over_another_file_of_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(path("c")).unwrap();
    std::fs::write(path("a.csv"), "a,y\n1,2\n").unwrap();
    std::fs::write(path("t.toml"), "epochs = 1\n").unwrap();
    std::os::unix::fs::symlink(path("a.csv"), path("link")).unwrap();
    for (line, expected) in [
        ("--report r --save-model r", "--save-model would replace"),
        ("--checkpoint c --save-model c/checkpoint.safetensors", "which --checkpoint of this run uses"),
        ("--checkpoint new --report new/checkpoint.safetensors", "--report would replace"),
        ("--checkpoint new --report new", "pass another path to --report"),
        ("--data a.csv --target y --report link", "which --data of this run uses"),
        ("--data x.npy,a.csv --report a.csv", "which --data of this run uses"),
        ("--class-weights a.csv --save-model a.csv", "which --class-weights of this run uses"),
        ("--plot p.svg --report p.svg", "--plot would replace p.svg, which --report"),
        ("--tensorboard r --report r", "--tensorboard would replace r, which --report"),
        ("--plot curves.png", "pass a name that ends in .svg"),
        ("--config t.toml --report t.toml", "--report would replace t.toml, the file of --config"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_ringtrain"))
            .args(line.split(' '))
            .current_dir(&directory)
            .output()
            .unwrap();
        let stderr = text(&output.stderr);
        assert!(output.status.code() == Some(2) && stderr.contains(expected), "{line}: {stderr}");
    }
    assert_eq!(std::fs::read_to_string(path("a.csv")).unwrap(), "a,y\n1,2\n");
    let output = ringtrain(&["--epochs", "1", "--report", "/dev/null", "--save-model", "/dev/null"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn help_lists_defaults_and_exit_codes() {
    let output = ringtrain(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let help = text(&output.stdout);
    for expected in ["Exit codes", "Examples", "--compression", "mlp:128", "SIGTERM"] {
        assert!(help.contains(expected), "{expected}");
    }
}

#[test]
fn quiet_and_log_interval_change_the_printed_lines() {
    let output = ringtrain(&["--epochs", "1", "--quiet"]);
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
    let output = ringtrain(&["--epochs", "1", "--batch-size", "300", "--log-interval", "2"]);
    let lines: Vec<&str> = text(&output.stdout).lines().filter(|line| line.contains(", step ")).collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(
        lines[0].starts_with("epoch 1/1, step 2/5: loss 2.") && lines[0].contains(", lr 0.001, "),
        "{lines:?}"
    );
    assert!(lines[2].starts_with("epoch 1/1: train loss") && lines[2].contains(", step "), "{lines:?}");
    for (arguments, expected) in [
        (&["--quiet", "--log-interval", "2"][..], "--log-interval has no effect"),
        (&["--log-interval", "0"], "'--log-interval <STEPS>'"),
    ] {
        let output = ringtrain(arguments);
        assert!(output.status.code() == Some(2) && text(&output.stderr).contains(expected), "{output:?}");
    }
}

#[test]
fn a_resumed_run_draws_and_records_curves_too() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let plot = format!("{place}/curves.svg");
    for (epochs, points) in [("2", 2), ("3", 3)] {
        let output = ringtrain(
            &[
                &["--model", "softmax", "--epochs", epochs, "--checkpoint", place, "--resume"][..],
                // The directory of the checkpoint may be the directory for TensorBoard.
                &["--plot", &plot, "--tensorboard", place],
            ]
            .concat(),
        );
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        // A curve of the training loss, one of the test loss, and one of the accuracy, with a dot for each epoch.
        let svg = std::fs::read_to_string(&plot).unwrap();
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<circle").count()), (3, 3 * points));
    }
    let names =
        std::fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.starts_with("events.out.tfevents.")).count(), 2);
    for (option, path) in [("--plot", "/proc/curves.svg"), ("--tensorboard", "/proc/events")] {
        let output = ringtrain(&["--epochs", "1", option, path]);
        let stderr = text(&output.stderr);
        assert!(output.status.code() == Some(10) && stderr.contains(path), "{stderr}");
    }
}

/// A reader that closes the pipe (`ringtrain | head -1`) must not cause a panic.
#[test]
fn a_closed_pipe_causes_no_panic() {
    let script = format!("({} --epochs 2; echo code $? >&2) | true", env!("CARGO_BIN_EXE_ringtrain"));
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(text(&output.stderr), "code 0\n");
}

#[test]
fn an_unwritable_standard_output_is_reported_at_the_end() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_ringtrain")).args(["--epochs", "1"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stderr).contains("could not be written: No space left"), "{output:?}");
}

/// After SIGTERM the program finishes the step, saves a checkpoint and exits with 0. `--resume` continues from the
/// checkpoint.
#[test]
fn a_stop_signal_saves_a_checkpoint_from_which_resume_continues() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ringtrain"))
        .args(["--epochs", "100000", "--checkpoint", place])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("epoch 1/")), "training has not begun");
    let pid = child.id().to_string();
    assert!(Command::new("sh").args(["-c", &format!("kill -TERM {pid}")]).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(rest.iter().any(|line| line.contains("stopped by a signal")), "{rest:?}");
    let again = ringtrain(&["--epochs", "1", "--checkpoint", place]);
    assert_eq!(again.status.code(), Some(10), "ringtrain should refuse to overwrite a checkpoint");
    let again = ringtrain(&["--epochs", "1", "--checkpoint", place, "--resume"]);
    assert_eq!(again.status.code(), Some(0));
    assert!(text(&again.stdout).contains("resuming from the checkpoint"), "{again:?}");
}

/// Regression test: ringtrain said that nothing was saved, and then that the model was saved.
#[test]
fn a_stopped_run_without_checkpoints_says_what_it_saved() {
    let directory = tempfile::tempdir().unwrap();
    let mut lines = PrintedLines(Vec::new());
    let config = Config { model_file: Some(directory.path().join("m")), ..config() };
    run(&mut Group::solo(), &config, &AtomicBool::new(true), &mut lines).unwrap();
    let [.., stopped, saved] = &lines.0[..] else { panic!("{lines:?}", lines = lines.0) };
    assert_eq!(
        stopped,
        "stopped by a signal after step 1: no checkpoint was saved, because --checkpoint was not given"
    );
    assert!(saved.starts_with("saved the model to "), "{saved}");
}
