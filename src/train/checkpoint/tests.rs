use std::time::{Duration, Instant};

use super::*;
use crate::train::compression_memory::CompressionMemory;
use crate::train::model::{Loss, TargetScale};

/// Writes a checkpoint into `directory`. Creates the directory if it does not exist.
fn save_checkpoint(
    directory: &Path,
    network: &Network,
    identity: &RunIdentity,
    state: &TrainingState,
) -> Result<(), CheckpointError> {
    let settings = CheckpointSettings::new(directory, ExistingCheckpoint::Resume);
    create_directory(directory)?;
    let start = Instant::now();
    let mut writer = CheckpointWriter::new(&settings, (network.clone(), identity.clone()), 0, start);
    assert_eq!(writer.begin_save(state, false, start), None);
    writer.wait(Duration::from_mins(1));
    assert!(!writer.is_writing());
    writer.take_error()
}

/// Returns the network, the identity and the state of a run.
pub(super) fn example_run() -> (Network, RunIdentity, TrainingState) {
    let network = Network::new(&"mlp:3".parse().unwrap(), 2, 2, Loss::CrossEntropy).unwrap();
    let identity = RunIdentity {
        entries: vec![
            IdentityEntry { key: "weight_decay", option: "--weight-decay", value: "0.5".into() },
            IdentityEntry { key: "seed", option: "--seed", value: "7".into() },
        ],
        data_name: "a.csv".into(),
        data_hash: "123".into(),
        steps_per_epoch: 3,
        keeps_best: true,
        optimizer_names: &["optimizer.velocity"],
        strategy_names: &["strategy.outer_velocity"],
        compression_vectors: 5,
        standardizer: None,
        scale: TargetScale::IDENTITY,
        classes: vec!["a".into(), "b".into()],
        encoding: None,
        options: Some("epochs = 5\n".into()),
    };
    let parameters = network.initialize(1);
    let optimizer = vec![parameters.iter().map(|value| value * 0.5).collect()];
    let strategy = vec![parameters.iter().map(|value| value * 0.25).collect()];
    let position =
        Position { epoch: 3, step: 2, steps_total: 13, momentum_start: 5, loss_sum: 0.1, samples: 64 };
    let learning_rate = Some(0.05);
    let history = Vec::new();
    let quarter: Vec<f32> = parameters.iter().map(|value| value * 0.25).collect();
    let compression = CompressionMemory {
        residuals: vec![quarter.clone(), quarter.clone()],
        velocities: vec![quarter.clone()],
        results: quarter.clone(),
        factors: quarter,
        calls: 13,
    };
    let mut best = BestParameters::new(&parameters, None);
    best.keep_if_lowest_loss(0.1, 2, &vec![0.25; parameters.len()]);
    let best = Some(best);
    (
        network,
        identity,
        TrainingState {
            position,
            learning_rate,
            parameters,
            optimizer,
            best,
            strategy,
            compression,
            done_ahead: vec![12, 14],
            history,
        },
    )
}

#[test]
fn a_loaded_checkpoint_equals_the_saved_checkpoint_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let (network, identity, state) = example_run();
    let nested = directory.path().join("a/b");
    assert_eq!(load_checkpoint(&nested, &network, &identity).unwrap(), None);
    save_checkpoint(&nested, &network, &identity, &state).unwrap();
    assert_eq!(load_checkpoint(&nested, &network, &identity).unwrap(), Some(state));
    assert_eq!(fs::read_dir(&nested).unwrap().count(), 1);
}

#[test]
fn damaged_checkpoints_and_checkpoints_of_other_runs_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (network, identity, state) = example_run();
    save_checkpoint(directory.path(), &network, &identity, &state).unwrap();
    let path = directory.path().join(LATEST_FILE_NAME);
    let complete = fs::read(&path).unwrap();
    for len in 0..complete.len() {
        fs::write(&path, &complete[..len]).unwrap();
        let error = load_checkpoint(directory.path(), &network, &identity).unwrap_err();
        assert!(matches!(error, CheckpointError::Corrupt { .. }), "{len}: {error}");
    }
    for index in (0..complete.len()).step_by(7) {
        let mut flipped = complete.clone();
        flipped[index] ^= 1 << (index % 8);
        fs::write(&path, &flipped).unwrap();
        let error =
            load_checkpoint(directory.path(), &network, &identity).expect_err(&format!("byte {index}"));
        let is_expected = matches!(
            error,
            CheckpointError::Corrupt { .. }
                | CheckpointError::Mismatch { .. }
                | CheckpointError::NewerVersion { .. }
        );
        assert!(is_expected, "{index}: {error}");
    }
    fs::write(&path, &complete).unwrap();
    let mut other = identity.clone();
    other.entries[1].value = "8".into();
    let error = load_checkpoint(directory.path(), &network, &other).unwrap_err().to_string();
    assert!(error.contains("it was saved with --seed 7, but this run has --seed 8"), "{error}");
    let mut newer = identity.clone();
    newer.entries.push(IdentityEntry { key: "missing", option: "--missing", value: "error".into() });
    let error = load_checkpoint(directory.path(), &network, &newer).unwrap_err().to_string();
    assert!(
        error.contains("an earlier version of ringtrain saved it, and did not record --missing"),
        "{error}"
    );
    let other = RunIdentity { data_name: "b.csv".into(), data_hash: "456".into(), ..identity.clone() };
    let error = load_checkpoint(directory.path(), &network, &other).unwrap_err().to_string();
    assert!(
        error.contains("saved with --data a.csv, but --data b.csv of this run contains different"),
        "{error}"
    );
    let wider = Network::new(&"mlp:4".parse().unwrap(), 2, 2, Loss::CrossEntropy).unwrap();
    assert!(matches!(
        load_checkpoint(directory.path(), &wider, &identity),
        Err(CheckpointError::Mismatch { .. })
    ));
}

/// Regression test: before the fix, the check before training did not count the encoding of a table. So the first
/// checkpoint could fail after a whole epoch.
#[test]
fn an_encoding_that_is_too_long_is_refused_before_training() {
    let directory = tempfile::tempdir().unwrap();
    let (network, mut identity, state) = example_run();
    for encoding in ["", "{\"a\":\"\\\"\"}"] {
        identity.encoding = Some(encoding.repeat(1000));
        save_checkpoint(directory.path(), &network, &identity, &state).unwrap();
        let file = fs::read(directory.path().join(LATEST_FILE_NAME)).unwrap();
        let header = u64::from_le_bytes(*file.first_chunk().unwrap());
        let bytes = estimate_header_bytes(Path::new("c"), &identity, HEADER_BYTES_MAX).unwrap();
        assert!((header..header + VARIABLE_HEADER_BYTES_ASSUMED).contains(&bytes), "{bytes} {header}");
        let error = estimate_header_bytes(Path::new("c"), &identity, bytes - 1).unwrap_err().to_string();
        assert!(error.contains(&format!("but a checkpoint holds at most {}", bytes - 1)), "{error}");
    }
}

/// In checkpoints of earlier versions, the accelerated rule has the name `nesterov`.
#[test]
fn the_earlier_name_of_the_accelerated_rule_is_understood() {
    let directory = tempfile::tempdir().unwrap();
    let (network, mut identity, state) = example_run();
    let mut entries = |optimizer: &str, momentum: &str| {
        let entry = |key, option, value: &str| IdentityEntry { key, option, value: value.into() };
        identity.entries =
            vec![entry("optimizer", "--optimizer", optimizer), entry("momentum", "--momentum", momentum)];
        identity.clone()
    };
    for (saved, resumed, expected) in [
        (("nesterov", "none"), ("accelerated", "none"), None),
        (
            ("nesterov", "none"),
            ("nesterov", "0.9"),
            Some("--optimizer accelerated, but this run has --optimizer nesterov"),
        ),
        (("nesterov", "0.9"), ("nesterov", "0.9"), None),
        (("nesterov", "0.9"), ("accelerated", "none"), Some("--optimizer nesterov, but")),
        (("accelerated", "none"), ("accelerated", "none"), None),
    ] {
        save_checkpoint(directory.path(), &network, &entries(saved.0, saved.1), &state).unwrap();
        let found = load_checkpoint(directory.path(), &network, &entries(resumed.0, resumed.1));
        match expected {
            None => assert_eq!(found.unwrap(), Some(state.clone())),
            Some(expected) => assert!(found.unwrap_err().to_string().contains(expected)),
        }
    }
}

/// Replaces texts in the metadata of a checkpoint by texts of the same length.
fn replace_texts(bytes: &mut [u8], edits: &[(&str, &str)]) {
    for (from, to) in edits {
        assert_eq!(from.len(), to.len());
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    }
}

/// Regression test: before the fix, the error for a checkpoint of a newer version said to resume with the original
/// options, which cannot help.
#[test]
fn a_checkpoint_of_a_newer_version_or_of_an_unknown_format_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (network, identity, state) = example_run();
    save_checkpoint(directory.path(), &network, &identity, &state).unwrap();
    let path = directory.path().join(LATEST_FILE_NAME);
    let complete = fs::read(&path).unwrap();
    for (format, expected) in [
        (
            "ringtrain-4",
            "has version 4 of the format of checkpoints, but this ringtrain only reads versions up to 3",
        ),
        ("ringtrain-9", "install a newer ringtrain"),
        ("ringtrain-0", "its format is `ringtrain-0`, which is not a format of checkpoints"),
        ("ringtrain-m", "its format is `ringtrain-m`"),
    ] {
        let mut bytes = complete.clone();
        replace_texts(&mut bytes, &[(FORMAT_3, format)]);
        fs::write(&path, bytes).unwrap();
        for error in [
            load_checkpoint(directory.path(), &network, &identity).unwrap_err(),
            read_options(directory.path()).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(error.contains(expected) && !error.contains("original options"), "{error}");
        }
    }
}

/// A checkpoint of format 2 has no hash of its position. If a wrong position were accepted, the run could loop without
/// end or skip epochs.
#[test]
fn an_impossible_position_in_a_checkpoint_of_format_2_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (network, identity, state) = example_run();
    save_checkpoint(directory.path(), &network, &identity, &state).unwrap();
    let path = directory.path().join(LATEST_FILE_NAME);
    let complete = fs::read(&path).unwrap();
    let format_2 = [(FORMAT_3, FORMAT_2), (METADATA_HASH_KEY, "metadata_none")];
    for (from, to, expected) in [
        ("\"step\":\"2\"", "\"step\":\"9\"", Some("its step is 9, but an epoch has 3 steps")),
        ("[12,14]", "[12,10]", Some("its done_ahead is [12, 10]")),
        ("\"epoch\":\"3\"", "\"epoch\":\"7\"", Some("its steps_total is 13")),
        ("\"momentum_start\":\"5\"", "\"momentum_start\":\"9\"", None),
        ("\"learning_rate\":\"0.05\"", "\"learning_rate\":\"-0.5\"", Some("its learning_rate is -0.5")),
        ("\"learning_rate\":\"0.05\"", "\"learning_rate\":\"1e99\"", Some("its learning_rate is inf")),
    ] {
        let mut bytes = complete.clone();
        replace_texts(&mut bytes, &[&format_2[..], &[(from, to)]].concat());
        fs::write(&path, bytes).unwrap();
        match (load_checkpoint(directory.path(), &network, &identity), expected) {
            (Ok(Some(found)), None) => assert_eq!(found.parameters, state.parameters),
            (Err(error), Some(expected)) => assert!(error.to_string().contains(expected), "{error}"),
            (found, _) => panic!("{to}: {found:?}"),
        }
    }
    let mut bytes = complete;
    replace_texts(&mut bytes, &format_2[1..]);
    fs::write(&path, bytes).unwrap();
    let error = load_checkpoint(directory.path(), &network, &identity).unwrap_err().to_string();
    assert!(error.contains("its metadata_hash is missing"), "{error}");
}

/// Format 1 contains neither the learning rate nor some options that format 2 compares.
#[test]
fn a_run_can_resume_from_a_checkpoint_of_format_1() {
    let directory = tempfile::tempdir().unwrap();
    let (network, mut identity, mut state) = example_run();
    identity.keeps_best = false;
    state.best = None;
    save_checkpoint(directory.path(), &network, &identity, &state).unwrap();
    let path = directory.path().join(LATEST_FILE_NAME);
    let mut bytes = fs::read(&path).unwrap();
    // The new keys have the same lengths as the old keys, so the offsets in the file stay valid.
    replace_texts(
        &mut bytes,
        &[
            (FORMAT_3, FORMAT_1),
            (METADATA_HASH_KEY, "metadata_none"),
            ("weight_decay", "weight_other"),
            ("momentum_start", "momentum_other"),
            ("learning_rate", "learning_none"),
        ],
    );
    fs::write(&path, bytes).unwrap();
    let found = load_checkpoint(directory.path(), &network, &identity).unwrap().unwrap();
    assert_eq!((found.learning_rate, found.position.momentum_start), (None, 0));
    assert_eq!(found.parameters, state.parameters);
}
