//! Tests of `ringtrain` on several ranks of this machine, launched by `ringrun`.

use std::process::{Command, Output};

use super::util::if_long_tests_else;

fn ringtrain(ranks: u32, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringrun"))
        .args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_ringtrain")])
        .args(arguments)
        .output()
        .unwrap()
}

/// Each rank processes a part of each batch. If a part were weighted wrongly, used twice or skipped, the losses would
/// differ. With 1,438 samples in batches of 100, the parts have different lengths, and the last batch has 38 samples.
#[test]
fn every_world_size_gives_the_same_loss() {
    let directory = tempfile::tempdir().unwrap();
    let mut losses = Vec::new();
    for &ranks in if_long_tests_else(&[1, 2, 3, 4, 7][..], &[1, 3]) {
        let path = directory.path().join("report.json");
        let output =
            ringtrain(ranks, &["--epochs", "3", "--batch-size", "100", "--report", path.to_str().unwrap()]);
        assert!(output.status.success(), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(report["world_size"], ranks);
        let hash = format!("parameters_hash {}", report["parameters_hash"].as_str().unwrap());
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!(stdout.lines().filter(|line| line.ends_with(&hash)).count(), ranks as usize, "{stdout}");
        losses.push(report["train_loss"].as_f64().unwrap());
        let times = &report["history"][2]["step_times"];
        let part = |name: &str| times[name].as_f64().unwrap();
        let (exposed, data) = (part("exposed_communication_seconds"), part("data_seconds"));
        let sum = part("compute_seconds") + exposed + data;
        assert_eq!(
            (times["steps"].as_u64(), exposed > 0.0, data > 0.0),
            (Some(15), ranks > 1, true),
            "{times}"
        );
        assert!((sum - report["history"][2]["seconds"].as_f64().unwrap()).abs() < 1e-9, "{times}");
    }
    for loss in &losses {
        assert!((loss - losses[0]).abs() < 1e-5 * losses[0], "{losses:?}");
    }
}

/// Ranks without a sample contribute zeros. Regression test: before the fix, if there were several buckets, ranks
/// without samples and ranks with samples started all-reduces of different lengths, and the job ended with exit code
/// 7.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_batch_may_have_fewer_samples_than_ranks() {
    let cases: [&[&str]; 2] = [
        &["--batch-size", "3", "--data", "synthetic:50x4"],
        &["--batch-size", "1000", "--data", "synthetic:1251x600", "--model", "mlp:600"],
    ];
    for arguments in cases {
        let output = ringtrain(4, &[&["--epochs", "1"], arguments].concat());
        assert!(output.status.success(), "{output:?}");
    }
}

/// If a rank fails, all ranks end with the same exit code and print an error.
#[test]
fn a_failure_on_one_rank_ends_all_ranks_with_the_same_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("checkpoint.safetensors"), "not one").unwrap();
    let checkpoints = directory.path().to_str().unwrap();
    let cases: [(&[&str], i32, &str); 2] = [
        (&["--model", "linear", "--optimizer", "sgd", "--lr", "1e9"], 9, "the loss is"),
        (&["--checkpoint", checkpoints, "--resume"], 10, "rank 0 failed"),
    ];
    for (arguments, code, expected) in cases {
        let output = ringtrain(3, arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
        for rank in 0..3 {
            assert!(stderr.contains(&format!("[{rank}]<stderr>:ringtrain: error: ")), "{stderr}");
        }
    }
}
