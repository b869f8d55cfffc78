//! Tests of checkpoints: when a run saves them, which ones it keeps, and runs that cannot save or are killed.

use std::collections::BTreeMap;
use std::fs;
use std::num::{NonZeroU32, NonZeroU64};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::Group;
use ringtrain::train::data::{DataSource, Task};
use ringtrain::train::optimizer::{AdamOptions, Rule};
use ringtrain::train::{
    CheckpointSettings, CompletedStep, Config, CurveFiles, EpochRecord, ExistingCheckpoint, Observer,
    Summary, TrainError, run,
};

use super::library::{config, train};
use super::program::assert_fails;
use super::util::{FinishedProgram, ranks, ringrun, run as finish, runs_long_tests, wait_until};

/// The number of training samples of [`small_config`].
pub(crate) const SAMPLE_COUNT: u32 = 96;
/// The number of steps in an epoch of [`small_config`].
pub(crate) const STEP_COUNT: u64 = 10;

/// Returns a run of 3 epochs with [`STEP_COUNT`] steps each. The last batch of an epoch has fewer samples than the others.
pub(crate) fn small_config() -> Config {
    Config {
        source: DataSource::Synthetic { rows: SAMPLE_COUNT as usize, columns: 5 },
        task: Some(Task::Regression),
        model: Some("mlp:7".parse().unwrap()),
        rule: Some(Rule::Adam(AdamOptions::DEFAULT)),
        test_fraction: 0.0,
        batch_size: Some(10),
        epochs: Some(3),
        ..config()
    }
}

/// Returns settings that save a checkpoint every `steps` steps.
pub(crate) fn checkpoint_every(steps: u64, directory: &Path) -> CheckpointSettings {
    CheckpointSettings {
        steps: NonZeroU64::new(steps),
        ..CheckpointSettings::new(directory, ExistingCheckpoint::Resume)
    }
}

pub(crate) fn with_checkpoint(checkpoint: CheckpointSettings, config: Config) -> Config {
    Config { checkpoint: Some(checkpoint), ..config }
}

/// Returns the sorted names of the files in a directory.
pub(crate) fn sorted_file_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The samples that all ranks used in each batch, by epoch and batch.
pub(crate) type SamplesOfSteps = BTreeMap<(u64, u64), Vec<u32>>;

/// Records the lines and the samples of a run, and calls `after_step` after each step.
struct BatchRecorder<'a> {
    lines: Vec<String>,
    samples: SamplesOfSteps,
    steps: u64,
    after_step: Box<dyn FnMut(u64) + 'a>,
}

impl<'a> BatchRecorder<'a> {
    fn new(after_step: impl FnMut(u64) + 'a) -> Self {
        Self { lines: Vec::new(), samples: BTreeMap::new(), steps: 0, after_step: Box::new(after_step) }
    }
}

impl Observer for BatchRecorder<'_> {
    fn notice(&mut self, line: &str) {
        self.lines.push(line.to_owned());
    }
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn batch_started(&mut self, epoch: u64, batch: u64, samples: &[u32]) {
        let known = self.samples.insert((epoch, batch), samples.to_owned());
        assert_eq!(known, None, "batch {batch} of epoch {epoch} was started twice");
    }
    fn step_taken(&mut self, _: &CompletedStep) {
        self.steps += 1;
        (self.after_step)(self.steps);
    }
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

fn run_solo(config: &Config, observer: &mut BatchRecorder<'_>) -> Result<Summary, TrainError> {
    run(&mut Group::solo(), config, &AtomicBool::new(false), observer)
}

#[test]
fn a_run_saves_within_epochs_and_keeps_the_last_checkpoints_and_the_best() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = CheckpointSettings {
        checkpoints_kept: NonZeroU32::new(3).unwrap(),
        keeps_best: true,
        ..checkpoint_every(4, directory.path())
    };
    let expected = train(&small_config()).unwrap();
    let mut observer = BatchRecorder::new(|_| {});
    let found = run_solo(&with_checkpoint(checkpoint.clone(), small_config()), &mut observer).unwrap();
    assert_eq!(found.parameters, expected.parameters);
    let names = sorted_file_names(directory.path());
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(names.contains(&"checkpoint-best.safetensors".into()), "{names:?}");
    assert!(names.contains(&"checkpoint.safetensors".into()), "{names:?}");
    // Each kept checkpoint can be resumed. The losses fall, so the best checkpoint is that of the last epoch.
    for name in names {
        let copy = tempfile::tempdir().unwrap();
        fs::copy(directory.path().join(&name), copy.path().join("checkpoint.safetensors")).unwrap();
        let mut observer = BatchRecorder::new(|_| {});
        let config =
            with_checkpoint(CheckpointSettings::new(copy.path(), ExistingCheckpoint::Resume), small_config());
        let found = run_solo(&config, &mut observer).unwrap();
        assert_eq!(found.parameters, expected.parameters, "{name}");
        let resumed = resumed_steps(&observer.lines);
        match name.as_str() {
            "checkpoint.safetensors" | "checkpoint-best.safetensors" => assert_eq!(resumed, 3 * STEP_COUNT),
            name => assert_eq!(name, format!("checkpoint-{resumed}.safetensors")),
        }
    }
    fs::remove_file(directory.path().join("checkpoint.safetensors")).unwrap();
    for (existing, expected) in [
        (ExistingCheckpoint::Refuse, "already exists"),
        (ExistingCheckpoint::Resume, "checkpoint.safetensors, is missing"),
    ] {
        let error =
            train(&with_checkpoint(CheckpointSettings { existing, ..checkpoint.clone() }, small_config()))
                .unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Returns the number of steps of the checkpoint from which a run resumed. `lines` are the lines that the run
/// printed.
pub(crate) fn resumed_steps(lines: &[String]) -> u64 {
    let steps = lines.iter().find_map(|line| {
        line.strip_prefix("resuming from the checkpoint at step ")?.split(' ').next()?.parse().ok()
    });
    steps.unwrap_or(0)
}

/// Makes the next writes of a checkpoint fail, as on a full disk, until the test removes the returned path.
fn block_writes(directory: &Path) -> PathBuf {
    let blocked = directory.join(".checkpoint.safetensors.ringtrain-tmp");
    fs::create_dir(&blocked).unwrap();
    blocked
}

#[test]
fn a_failed_save_keeps_the_previous_checkpoint_and_training_continues() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoint.safetensors");
    let config = with_checkpoint(checkpoint_every(4, directory.path()), small_config());
    train(&Config { epochs: Some(1), ..config.clone() }).unwrap();
    let first = fs::read(&path).unwrap();
    let mut observer = BatchRecorder::new(|steps| match steps {
        1 => drop(block_writes(directory.path())),
        15 => {
            assert!(fs::read(&path).unwrap() == first, "the previous checkpoint changed");
            fs::remove_dir(directory.path().join(".checkpoint.safetensors.ringtrain-tmp")).unwrap();
        }
        _ => {}
    });
    let found = run_solo(&config, &mut observer).unwrap();
    assert_eq!(found.parameters, train(&small_config()).unwrap().parameters);
    let count = |text: &str| observer.lines.iter().filter(|line| line.contains(text)).count();
    let lines = &observer.lines;
    assert_eq!(count("was not saved: cannot write"), 1, "one message in a minute: {lines:?}");
    assert_eq!(count("the latest checkpoint is from step 10; training continues"), 1, "{lines:?}");
    assert_eq!(count("was saved, after"), 1, "{lines:?}");
}

#[test]
fn a_run_fails_last_if_its_final_checkpoint_cannot_be_saved() {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report.json");
    let model_file = directory.path().join("model");
    let config = with_checkpoint(
        CheckpointSettings::new(directory.path(), ExistingCheckpoint::Resume),
        small_config(),
    );
    train(&Config { epochs: Some(1), ..config.clone() }).unwrap();
    let mut observer = BatchRecorder::new(|steps| {
        if steps == 1 {
            block_writes(directory.path());
        }
    });
    let all_files = Config { report: Some(report.clone()), model_file: Some(model_file.clone()), ..config };
    let error = run_solo(&all_files, &mut observer).unwrap_err().to_string();
    let expected = "the checkpoint of step 30, the last of the run, was not saved: cannot write";
    assert!(error.starts_with(expected), "{error}");
    assert!(error.contains("the latest checkpoint is from step 10;"), "{error}");
    assert!(report.exists() && model_file.exists());
    fs::remove_dir(directory.path().join(".checkpoint.safetensors.ringtrain-tmp")).unwrap();
    let mut observer = BatchRecorder::new(|_| {});
    run_solo(&all_files, &mut observer).unwrap();
    assert_eq!(resumed_steps(&observer.lines), 10);
}

/// Regression test: before the fix, a run that could not write the report did not save the model.
#[test]
fn a_run_whose_report_cannot_be_written_saves_the_model_and_the_picture() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (report, plot, model_file) = (path("report.json"), path("curves.svg"), path("model"));
    let curves = CurveFiles { plot: Some(plot.clone()), ..CurveFiles::default() };
    let config = Config {
        report: Some(report),
        curves,
        model_file: Some(model_file.clone()),
        ..with_checkpoint(
            CheckpointSettings::new(directory.path(), ExistingCheckpoint::Resume),
            small_config(),
        )
    };
    let mut observer = BatchRecorder::new(|steps| {
        if steps == 1 {
            fs::create_dir(path(".report.json.ringtrain-tmp")).unwrap();
            block_writes(directory.path());
        }
    });
    let error = run_solo(&config, &mut observer).unwrap_err().to_string();
    assert!(error.starts_with("the checkpoint of step 30, the last of the run, was not saved"), "{error}");
    let warns = |line: &String| line.starts_with("warning: cannot write the report");
    assert!(observer.lines.iter().any(warns), "{:?}", observer.lines);
    assert!(plot.exists() && model_file.exists());
}

/// Runs `config` on `n` ranks. With `death` = `(rank, steps)`, this rank ends after this number of steps without a
/// message, as if it had been killed. Returns the result of rank 0, the samples that all ranks used, and the lines of
/// rank 0.
pub(crate) fn run_on_ranks(
    n: u32,
    config: &Config,
    death: Option<(u32, u64)>,
) -> (Option<Summary>, SamplesOfSteps, Vec<String>) {
    let used = Arc::new(Mutex::new(SamplesOfSteps::new()));
    let (config, shared) = (config.clone(), Arc::clone(&used));
    let mut results = ranks::run(n, move |mut group| {
        let rank = group.rank().get();
        let mut observer = BatchRecorder::new(move |steps| {
            if death == Some((rank, steps)) {
                // Unlike `panic!`, this prints nothing.
                resume_unwind(Box::new(()));
            }
        });
        let result = catch_unwind(AssertUnwindSafe(|| {
            run(&mut group, &config, &AtomicBool::new(false), &mut observer)
        }));
        let mut used = shared.lock().unwrap();
        for (batch, samples) in observer.samples {
            used.entry(batch).or_default().extend(samples);
        }
        (result.ok().and_then(Result::ok), observer.lines)
    });
    let (summary, lines) = results.remove(0);
    let samples = std::mem::take(&mut *used.lock().unwrap());
    (summary, samples, lines)
}

/// Asserts that the batches before step `start` of the first job, and all batches of the second job, together have each
/// sample of each epoch exactly once.
pub(crate) fn assert_each_sample_is_used_once(
    (before, after): (&SamplesOfSteps, &SamplesOfSteps),
    start: u64,
    what: &str,
) {
    for epoch in 0..3 {
        let batches = (0..STEP_COUNT).map(|batch| (epoch, batch));
        let job = |&(epoch, batch): &(u64, u64)| {
            if epoch * STEP_COUNT + batch < start { before } else { after }
        };
        let mut used: Vec<u32> = batches.flat_map(|batch| job(&batch)[&batch].clone()).collect();
        used.sort_unstable();
        assert!(used.into_iter().eq(0..SAMPLE_COUNT), "{what}, epoch {epoch}");
    }
    assert_eq!(after.len() as u64, 3 * STEP_COUNT - start, "{what}: a batch was repeated");
}

/// A job of four ranks dies at a random step, and a job of two ranks resumes the run. Together, both jobs use each
/// sample of each epoch exactly once. The final model is that of an uninterrupted run.
#[test]
fn a_killed_job_resumes_on_fewer_ranks_with_the_same_result() {
    let (expected, samples, _) = run_on_ranks(4, &small_config(), None);
    let expected = expected.unwrap();
    assert_eq!(samples.len() as u64, 3 * STEP_COUNT);
    for seed in 0..if runs_long_tests() { 50 } else { 3 } {
        let mut random = StdRng::seed_from_u64(seed);
        let directory = tempfile::tempdir().unwrap();
        let death = (random.random_range(0..4), random.random_range(1..3 * STEP_COUNT));
        let config =
            with_checkpoint(checkpoint_every(random.random_range(1..=6), directory.path()), small_config());
        let (summary, before, _) = run_on_ranks(4, &config, Some(death));
        assert!(summary.is_none(), "seed {seed}: the job should have died");
        let (summary, after, lines) = run_on_ranks(2, &config, None);
        let start = resumed_steps(&lines);
        assert!(start <= death.1 + 1, "seed {seed}: resumed at step {start}, died after {}", death.1);
        assert_each_sample_is_used_once((&before, &after), start, &format!("seed {seed}"));
        let summary = summary.unwrap();
        let scale = expected.parameters.iter().fold(0.0, |scale: f32, value| scale.max(value.abs()));
        for (found, expected) in summary.parameters.iter().zip(&expected.parameters) {
            assert!((found - expected).abs() <= 1e-5 * scale, "seed {seed}: {found} {expected}");
        }
        let losses = |summary: &Summary| {
            summary.report.history.iter().map(|record| record.train_loss).collect::<Vec<_>>()
        };
        for (found, expected) in losses(&summary).iter().zip(losses(&expected)) {
            assert!((found - expected).abs() <= 1e-5 * expected, "seed {seed}: {found} {expected}");
        }
    }
}

const RINGTRAIN: &str = env!("CARGO_BIN_EXE_ringtrain");

/// A process that is killed while it writes a checkpoint leaves a complete checkpoint, from which a run continues to
/// the same result.
#[test]
fn a_process_that_is_killed_while_it_writes_leaves_a_complete_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("saved");
    let options = "--data synthetic:500x20 --task regression --model mlp:256 --batch-size 50 --epochs 6";
    let command = |checkpoints: bool| {
        let mut command = Command::new(RINGTRAIN);
        command.args(options.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
        if checkpoints {
            command.args(["--checkpoint-steps", "1", "--resume", "--checkpoint"]).arg(&place);
        }
        command
    };
    for _ in 0..if runs_long_tests() { 30 } else { 3 } {
        let mut child = command(true).spawn().unwrap();
        wait_until("a checkpoint and a write in progress, or the end of the run", || {
            place.join("checkpoint.safetensors").exists()
                && place.join(".checkpoint.safetensors.ringtrain-tmp").exists()
                || child.try_wait().unwrap().is_some()
        });
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        // The process may end before the signal arrives.
        assert!(output.status.code().is_none_or(|code| code == 0), "{output:?}");
    }
    let resumed = finish(&mut command(true));
    let uninterrupted = finish(&mut command(false));
    let hash = |text: String| text.lines().last().map(str::to_owned);
    assert_eq!((resumed.code(), uninterrupted.code()), (Some(0), Some(0)), "{resumed:?}");
    assert!(resumed.stdout().contains("resuming from the checkpoint"), "{resumed:?}");
    assert_eq!(hash(resumed.stdout()), hash(uninterrupted.stdout()));
    assert_eq!(sorted_file_names(&place), ["checkpoint.safetensors", "config.toml"]);
}

/// A run resumes without further options, even on another number of ranks. Options on the command line override those
/// of the checkpoint.
#[test]
fn resume_takes_the_options_of_the_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("t.toml"), "model = \"mlp:7\"\nseed = 3 # A comment.\n").unwrap();
    let ringtrain = |ranks: u32, line: &str| {
        let mut command = ringrun(&["-n", &ranks.to_string(), RINGTRAIN]);
        finish(command.args(line.split(' ')).current_dir(&directory))
    };
    let options =
        "--data synthetic:96x5 --batch-size 10 --lr 0.02 --scale-lr --optimizer momentum --momentum 0.5";
    let whole = ringtrain(2, &format!("--config t.toml {options} --epochs 3"));
    let first = ringtrain(2, &format!("--config t.toml {options} --epochs 2 --checkpoint c"));
    assert_eq!((whole.code(), first.code()), (Some(0), Some(0)), "{first:?}");
    let config = fs::read_to_string(directory.path().join("c/config.toml")).unwrap();
    for line in ["model = \"mlp:7\"", "seed = 3", "data = [\"synthetic:96x5\"]", "# strategy = \"allreduce\""]
    {
        assert!(config.lines().any(|found| found == line), "{line}: {config}");
    }
    // The rate of the first run applies, although --scale-lr would now multiply it by 3.
    let resumed = ringtrain(3, "--resume c --epochs 3");
    let loss = |program: &FinishedProgram| {
        let text = program.stdout();
        let line = text.lines().find(|line| line.contains("epoch 3/3: train loss")).unwrap_or_default();
        line.split(", ").take(2).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(resumed.code() == Some(0) && !loss(&whole).is_empty(), "{resumed:?}");
    assert_eq!(loss(&resumed), loss(&whole));
    let again = ringtrain(1, "--resume c");
    assert!(again.stdout().contains("batch 10, 3 epochs"), "the options of the last run apply: {again:?}");
    for (line, code, expected) in [
        ("--resume c --seed 4", 10, "it was saved with --seed 3, but this run has --seed 4"),
        ("--resume c --optimizer adam", 2, "(--momentum is given in the checkpoint in c)"),
        ("--resume absent", 10, "there is no checkpoint.safetensors in absent"),
        ("--config c/config.toml --epochs x", 2, "invalid value 'x'"),
        ("--config t.toml --resume", 2, "--resume needs the directory"),
    ] {
        let output = ringtrain(2, line);
        assert_eq!(output.code(), Some(code), "{line}: {output:?}");
        assert!(output.stderr().contains(expected), "{line}: {output:?}");
    }
    // Regression test: a run that trained nothing said so nowhere, and replaced the options of the run before it.
    let config = || fs::read_to_string(directory.path().join("c/config.toml")).unwrap();
    let before = config();
    let nothing = ringtrain(2, "--resume c --epochs 1");
    let line = "the checkpoint in c is at epoch 3, and --epochs is 1, so there is nothing to train; pass a larger --epochs";
    assert_eq!((nothing.code(), nothing.stdout().matches(line).count()), (Some(0), 1), "{nothing:?}");
    assert_eq!(config(), before);
    assert!(!resumed.stdout().contains("nothing to train"), "{resumed:?}");
    let repeated = ringtrain(2, "--config c/config.toml --lr 0.02");
    assert_eq!(loss(&repeated), loss(&whole), "{repeated:?}");
}

/// Regression test: before the fix, a run replaced a user's file with the name of the file for its options.
#[test]
fn a_config_file_of_the_user_in_the_checkpoint_directory_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let own = "# My options.\nepochs = 1\n";
    fs::write(directory.path().join("config.toml"), own).unwrap();
    assert_fails(
        directory.path(),
        "--config config.toml --checkpoint .",
        10,
        "config.toml by a file with its options, but ringtrain did not write",
    );
    assert_eq!(fs::read_to_string(directory.path().join("config.toml")).unwrap(), own);
    assert_eq!(sorted_file_names(directory.path()), ["config.toml"]);
}

/// Fills a small disk during a run. The run trains to its end, and then fails with exit code 10. The last complete
/// checkpoint remains, and a second run resumes from it.
#[test]
fn a_full_disk_leaves_the_checkpoint_and_training_continues() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can mount a small disk");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = r#"
        mkdir disk && mount -t tmpfs -o size=1m none disk || exit 70
        set -- "$0" --data synthetic:500x20 --task regression --model mlp:256 --batch-size 50 --checkpoint disk --resume
        ("$@" --epochs 12 --checkpoint-steps 7; echo "code $?"; : > ended) &
        until [ -e disk/checkpoint.safetensors ]; do :; done
        until [ -e ended ]; do cat /dev/zero >> disk/full; done 2> /dev/null
        cp disk/checkpoint.safetensors copy
        "$@" --epochs 12 && exit 71
        rm disk/full
        cmp copy disk/checkpoint.safetensors && "$@" --epochs 12; echo "code $?""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, RINGTRAIN]).current_dir(&directory);
    let done = finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let (stdout, stderr) = (done.stdout(), done.stderr());
    if done.code() == Some(70) || stderr.contains("unshare failed") {
        println!("SKIPPED: this user may not mount a disk: {stderr}");
        return;
    }
    for expected in ["was not saved: cannot write", "No space left on device", "epoch 12/12", "code 10\n"] {
        assert!(stdout.contains(expected) || stderr.contains(expected), "{expected}: {stdout}{stderr}");
    }
    assert!(stdout.ends_with("code 0\n"), "{stdout}{stderr}");
}
