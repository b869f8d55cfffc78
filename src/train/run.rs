//! A run from its configuration to its report.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::agree::{all_succeeded, first_difference, short_digest};
use super::checkpoint::{self, CheckpointError, Position, State};
use super::config::{Config, Existing};
use super::plan::Plan;
use super::progress::Observer;
use super::report::{Report, parameters_hash};
use super::trainer::{Metrics, Trainer};
use super::{Phase, TrainError, atomic_file};
use crate::group::Group;
use crate::types::Rank;

/// How a run ended well.
#[derive(Clone, PartialEq, Debug)]
pub struct Summary {
    /// All figures; the timings and bytes are this rank's own.
    pub report: Report,
    /// The final parameters, the same on all ranks.
    pub parameters: Vec<f32>,
}

/// Trains as `config` says, with all ranks of `group`. `observer` is told of what happens (pass
/// [`Silent`](super::Silent) on all ranks but 0). Once `stop` is true on any rank, all ranks finish the step, save, write the
/// report and return, without another evaluation.
///
/// # Errors
///
/// See [`TrainError`]. Where one rank fails, all return an error.
pub fn run(
    group: &mut Group,
    config: &Config,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    agree_on_arguments(group, config)?;
    let plan = Plan::new(config).map_err(TrainError::from);
    let plan = all_succeeded(group, Phase::Data, plan)?;
    agree_on_data(group, &plan)?;
    observer.notice(&introduction(group, config, &plan));
    let state = starting_state(group, config, &plan, observer)?;
    let clock = Instant::now();
    let before = group.statistics();
    let mut trainer = Trainer::new(config, &plan, state, group, stop);
    trainer.train(group, observer)?;
    let train = trainer.evaluate(group, &plan.dataset.train)?;
    let test = trainer.evaluate(group, &plan.dataset.test)?;
    if trainer.stopped {
        let steps = trainer.state.position.steps_total;
        let saved = if config.checkpoint.is_some() { "saved; go on with --resume" } else { "nothing saved" };
        observer.notice(&format!("stopped by a signal after step {steps}, {saved}"));
    }
    let after = group.statistics();
    let communication = after.communication.saturating_sub(before.communication);
    let figure = |metrics: Option<Metrics>, get: fn(Metrics) -> Option<f64>| metrics.and_then(get);
    let report = Report {
        world_size: group.size().get(),
        model: plan.model.to_string(),
        dataset: plan.dataset.name.clone(),
        train_samples: plan.dataset.train.len(),
        test_samples: plan.dataset.test.len(),
        parameters: plan.network.parameter_count(),
        optimizer: config.rule.name().into(),
        lr: shortest(config.learning_rate(&plan.model)),
        weight_decay: shortest(config.weight_decay),
        batch_size: config.batch_size,
        seed: config.seed,
        compression: config.compression.to_string(),
        bucket_bytes: trainer.bucket_bytes(),
        epochs: trainer.state.position.epoch,
        steps: trainer.state.position.steps_total,
        stopped: trainer.stopped,
        train_loss: train.map_or_else(|| trainer.running_loss(), |metrics| metrics.loss),
        test_loss: test.map(|metrics| metrics.loss),
        test_accuracy: figure(test, |metrics| metrics.accuracy),
        train_accuracy: figure(train, |metrics| metrics.accuracy),
        test_r2: figure(test, |metrics| metrics.r2),
        train_r2: figure(train, |metrics| metrics.r2),
        samples_per_second: trainer.step_samples as f64 / trainer.step_seconds.max(1e-9),
        seconds: clock.elapsed().as_secs_f64(),
        communication_seconds: communication.as_secs_f64(),
        // Callers' waits are measured around the operations, with what it takes to begin and to leave them.
        exposed_communication_seconds: after
            .exposed
            .saturating_sub(before.exposed)
            .min(communication)
            .as_secs_f64(),
        bytes_sent: after.bytes_sent - before.bytes_sent,
        parameters_hash: parameters_hash(&trainer.state.parameters),
        history: trainer.state.history.clone(),
    };
    let written = match &config.report {
        Some(path) if group.rank() == Rank::ZERO => write_report(path, &report),
        _ => Ok(()),
    };
    all_succeeded(group, Phase::Storage, written.map_err(TrainError::from))?;
    Ok(Summary { report, parameters: trainer.state.parameters })
}

/// An f32 as the f64 that prints the same: 0.001 and not 0.0010000000474974513.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

fn introduction(group: &Group, config: &Config, plan: &Plan) -> String {
    let target = match plan.dataset.classes.len() {
        0 => "regression".to_owned(),
        count => format!("{count} classes"),
    };
    format!(
        "{} on {} ({target}): {} training and {} test samples of {} features, {} parameters; {} lr {}, batch {}, {} epochs, \
         seed {}, {} ranks",
        plan.model,
        plan.dataset.name,
        plan.dataset.train.len(),
        plan.dataset.test.len(),
        plan.dataset.train.features.columns(),
        plan.network.parameter_count(),
        config.rule.name(),
        config.learning_rate(&plan.model),
        config.batch_size,
        config.epochs,
        config.seed,
        group.size(),
    )
}

fn agree_on_arguments(group: &mut Group, config: &Config) -> Result<(), TrainError> {
    let shared = config.shared();
    let digests: Vec<u64> = shared.iter().map(|(_, value)| short_digest(value.as_bytes())).collect();
    let Some((rank, different)) = first_difference(group, &digests)? else { return Ok(()) };
    let names: Vec<&str> = different.iter().map(|&index| shared[index].0).collect();
    Err(TrainError::ArgumentsDiffer { rank, what: names.join(", ") })
}

fn agree_on_data(group: &mut Group, plan: &Plan) -> Result<(), TrainError> {
    match first_difference(group, &[short_digest(&plan.digest)])? {
        None => Ok(()),
        Some((rank, _)) => Err(TrainError::DataDiffer { rank, name: plan.dataset.name.clone() }),
    }
}

/// Rank 0's fresh parameters or checkpoint, on all ranks.
fn starting_state(
    group: &mut Group,
    config: &Config,
    plan: &Plan,
    observer: &mut dyn Observer,
) -> Result<State, TrainError> {
    let found = if group.rank() == Rank::ZERO { look_for_checkpoint(config, plan) } else { Ok(None) };
    let found = all_succeeded(group, Phase::Storage, found.map_err(TrainError::from))?;
    let resuming = config.checkpoint.as_ref().is_some_and(|place| place.existing == Existing::Resume);
    match &found {
        Some(State { position, .. }) => observer.notice(&format!(
            "going on from the checkpoint at step {} (epoch {}, step {} of it)",
            position.steps_total,
            position.epoch + 1,
            position.step,
        )),
        None if resuming => observer.notice("no checkpoint to go on from yet: starting from the beginning"),
        None => {}
    }
    let count = plan.network.parameter_count();
    let mut state = found.unwrap_or_else(|| State {
        position: Position::default(),
        parameters: plan.network.initialize(config.seed),
        optimizer: vec![vec![0.0; count]; config.rule.state_names().len()],
        history: Vec::new(),
    });
    let mut words = state.position.to_words();
    group.broadcast(&mut words, Rank::ZERO)?;
    state.position = Position::from_words(words);
    group.broadcast(&mut state.parameters, Rank::ZERO)?;
    for vector in &mut state.optimizer {
        group.broadcast(vector, Rank::ZERO)?;
    }
    Ok(state)
}

fn look_for_checkpoint(config: &Config, plan: &Plan) -> Result<Option<State>, CheckpointError> {
    if let Some(path) = &config.report {
        check_report_place(path)?;
    }
    let Some(place) = &config.checkpoint else { return Ok(None) };
    match place.existing {
        Existing::Resume => checkpoint::load(&place.directory, &plan.network, &plan.identity(config)),
        Existing::Refuse if checkpoint::exists(&place.directory)? => {
            Err(CheckpointError::Exists { path: place.directory.join(checkpoint::FILE_NAME) })
        }
        Existing::Refuse => {
            // Better to learn now than at the end of the first epoch that this is no place to save.
            std::fs::create_dir_all(&place.directory)
                .map_err(|error| CheckpointError::io("make the directory", &place.directory, error))?;
            Ok(None)
        }
    }
}

fn check_report_place(path: &Path) -> Result<(), CheckpointError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let fail = |kind: std::io::ErrorKind| Err(CheckpointError::io("write the report", path, kind.into()));
    match std::fs::metadata(parent) {
        Err(error) => Err(CheckpointError::io("write the report", path, error)),
        Ok(metadata) if !metadata.is_dir() => fail(std::io::ErrorKind::NotADirectory),
        Ok(_) if path.is_dir() => fail(std::io::ErrorKind::IsADirectory),
        Ok(_) => Ok(()),
    }
}

fn write_report(path: &Path, report: &Report) -> Result<(), CheckpointError> {
    let mut text = serde_json::to_string_pretty(report).expect("strings and numbers are valid JSON");
    text.push('\n');
    atomic_file::write(path, text.as_bytes())
        .map_err(|error| CheckpointError::io("write the report", path, error))
}
